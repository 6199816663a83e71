/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests and their blocks.
 *
 *   flow_start      WANT ----> fetcher: has some blocks, gives others slots
 *   take_need       <---- NEED: blocks that have to come; they are divided
 *                   among the holders, a group for one holder is a part
 *                   PREPARE -> holder: makes the blocks in slots of its own
 *   take_prepared   <- PREPARED
 *                   MOVE ----> holder (or fetcher, with --pull): transfers
 *   take_done       <---- DONE: how it went
 *                   LANDED --> fetcher, with the blocks' keys, known to it
 *                   only now; UNPIN -> holder
 *   take_checked    <- CHECKED: the part is over
 *   take_settled    <- SETTLED: all blocks of the request are, it is over
 *
 * A part that fails is divided again among the other holders. Its slots at the
 * fetcher are used again only if it is certain that nothing writes there any
 * more; else they are given up (AGAIN) and the fetcher asks with other slots.
 */
#include <stdlib.h>
#include <string.h>

#include "replay.h"

enum part_state {
    PART_PREPARING, /* the holder makes the blocks: nothing was posted */
    PART_MOVING,
    PART_CHECKING /* the fetcher compares what has landed */
};

struct block {
    uint64_t id;
    uint64_t fetcher_slot;
    uint64_t holder_slot;
    uint64_t attempts;
};

struct part {
    struct request *request;
    uint64_t handle;
    uint64_t holder;
    enum part_state state;
    size_t count;
    uint64_t spent_ns; /* in transfers, those that failed as well */
    struct block blocks[];
};

struct request {
    bool active;
    uint64_t fetcher;
    uint64_t count;      /* blocks */
    uint64_t parts;      /* not over */
    uint64_t wave_ns;    /* the slowest part of those that go together */
    uint64_t latency_ns; /* waves follow one another */
    bool moved;
};

void flow_open(struct replay *replay)
{
    replay->requests = cli_alloc(replay->options.inflight,
                                 sizeof(*replay->requests));
}

void flow_close(struct replay *replay)
{
    for (size_t i = 0; i < replay->part_count; i++) {
        free(replay->parts[i]);
    }
    free(replay->parts);
    free(replay->requests);
}

static uint64_t handle_of(const struct replay *replay,
                          const struct request *request)
{
    return (uint64_t)(request - replay->requests);
}

static struct replay_node *fetcher_of(struct replay *replay,
                                      const struct request *request)
{
    return nodes_fetcher(replay, request->fetcher);
}

/* -------------------------------------------------------------------- parts */

static struct part *new_part(struct replay *replay, struct request *request,
                             uint64_t holder, size_t count)
{
    struct part *part = cli_alloc(1, sizeof(*part) +
                                         count * sizeof(part->blocks[0]));
    size_t handle = replay->part_hint;

    while (handle < replay->part_count && replay->parts[handle] != NULL) {
        handle++;
    }
    replay->parts = cli_grow((void *)replay->parts, &replay->part_capacity,
                             handle + 1, sizeof(struct part *));
    if (handle == replay->part_count) {
        replay->part_count++;
    }
    replay->parts[handle] = part;
    replay->part_hint = handle + 1;
    part->handle = handle;
    part->request = request;
    part->holder = holder;
    request->parts++;
    return part;
}

static void end_part(struct replay *replay, struct part *part)
{
    struct request *request = part->request;

    if (part->spent_ns > request->wave_ns) {
        request->wave_ns = part->spent_ns;
    }
    request->parts--;
    if (request->parts == 0) {
        request->latency_ns += request->wave_ns;
        request->wave_ns = 0;
    }
    replay->parts[part->handle] = NULL;
    if (part->handle < replay->part_hint) {
        replay->part_hint = part->handle;
    }
    free(part);
}

/* The part that a message is about; NULL: it lies. */
static struct part *find_part(struct replay *replay, uint64_t handle,
                              enum part_state state)
{
    struct part *part = handle < replay->part_count ? replay->parts[handle]
                                                    : NULL;

    return part != NULL && part->state == state ? part : NULL;
}

/*
 * The holder of a block: the one with the highest score among those that live,
 * so that the death of one moves only its own blocks. `except` is passed over if
 * there is another one; a transfer from it has just failed.
 */
static uint64_t choose_holder(struct replay *replay, uint64_t id,
                              uint64_t except)
{
    bool others = nodes_holders_alive(replay) > 1;
    uint64_t best = UINT64_MAX;
    uint64_t best_score = 0;

    for (uint64_t i = 0; i < replay->options.holders; i++) {
        const struct replay_node *holder = nodes_holder(replay, i);
        uint64_t score = cli_mix(cli_mix(replay->options.seed, i), id);

        if (!holder->alive || (i == except && others)) {
            continue;
        }
        if (best == UINT64_MAX || score > best_score) {
            best = i;
            best_score = score;
        }
    }
    return best;
}

static void send_prepare(struct replay *replay, const struct part *part)
{
    struct proto *control = &nodes_holder(replay, part->holder)->control;

    proto_begin(control, PROTO_PREPARE);
    proto_put(control, part->handle);
    proto_put(control, part->count);
    for (size_t i = 0; i < part->count; i++) {
        proto_put(control, part->blocks[i].id);
    }
    proto_end(control);
}

static void send_drop(struct replay *replay, const struct request *request,
                      bool final, const struct block *blocks, size_t count)
{
    struct proto *control = &fetcher_of(replay, request)->control;

    proto_begin(control, PROTO_DROP);
    proto_put(control, final);
    proto_put(control, count);
    for (size_t i = 0; i < count; i++) {
        proto_put(control, blocks[i].fetcher_slot);
    }
    proto_end(control);
}

/* Starts the parts of the blocks that this holder gets. */
static void ask_holder(struct replay *replay, struct request *request,
                       uint64_t holder, uint64_t spent_ns,
                       const struct block *blocks, const uint64_t *chosen,
                       size_t count)
{
    /* Several parts at a time must fit the holder's pool, so that it can make
     * one while it moves another. */
    size_t limit = replay->slots > 4 ? (size_t)(replay->slots / 4) : 1;
    size_t mine = 0;
    size_t at = 0;

    for (size_t i = 0; i < count; i++) {
        mine += chosen[i] == holder;
    }
    while (mine > 0) {
        size_t size = mine < limit ? mine : limit;
        struct part *part = new_part(replay, request, holder, size);

        part->spent_ns = spent_ns;
        while (part->count < size) {
            if (chosen[at] == holder) {
                part->blocks[part->count++] = blocks[at];
            }
            at++;
        }
        nodes_holder(replay, holder)->fates.asked += size;
        send_prepare(replay, part);
        mine -= size;
    }
}

/* Divides blocks among the holders; `except` has just failed, or is none. */
static void divide(struct replay *replay, struct request *request,
                   uint64_t except, uint64_t spent_ns,
                   const struct block *blocks, size_t count)
{
    uint64_t *chosen = cli_alloc(count, sizeof(*chosen));

    for (size_t i = 0; i < count; i++) {
        chosen[i] = choose_holder(replay, blocks[i].id, except);
    }
    for (uint64_t i = 0; i < replay->options.holders; i++) {
        ask_holder(replay, request, i, spent_ns, blocks, chosen, count);
    }
    free(chosen);
}

static void send_unpin(struct replay *replay, const struct part *part)
{
    struct replay_node *holder = nodes_holder(replay, part->holder);

    if (!holder->alive) {
        return;
    }
    proto_begin(&holder->control, PROTO_UNPIN);
    proto_put(&holder->control, part->count);
    for (size_t i = 0; i < part->count; i++) {
        proto_put(&holder->control, part->blocks[i].holder_slot);
    }
    proto_end(&holder->control);
}

static void send_again(struct replay *replay, const struct part *part)
{
    struct proto *control = &fetcher_of(replay, part->request)->control;

    proto_begin(control, PROTO_AGAIN);
    proto_put(control, part->count);
    for (size_t i = 0; i < part->count; i++) {
        proto_put(control, part->blocks[i].fetcher_slot);
    }
    proto_end(control);
}

/*
 * The blocks of a part have not come. `final`: nothing writes to their slots
 * at the fetcher any more.
 */
static void fail_part(struct replay *replay, struct part *part, bool final)
{
    struct replay_node *holder = nodes_holder(replay, part->holder);
    bool hopeless = nodes_holders_alive(replay) == 0;

    for (size_t i = 0; i < part->count; i++) {
        part->blocks[i].attempts++;
        hopeless = hopeless || part->blocks[i].attempts >= REPLAY_ATTEMPTS_MAX;
    }
    if (hopeless) {
        holder->fates.failed += part->count;
        send_drop(replay, part->request, final, part->blocks, part->count);
    } else {
        holder->fates.refetched += part->count;
        replay->totals.refetched += part->count;
        if (final) {
            divide(replay, part->request, part->holder, part->spent_ns,
                   part->blocks, part->count);
        } else {
            send_again(replay, part);
        }
    }
    end_part(replay, part);
}

void flow_holder_dead(struct replay *replay, struct replay_node *holder,
                      bool proven)
{
    /* Parts that come while this goes through them belong to others. */
    for (size_t i = 0; i < replay->part_count; i++) {
        struct part *part = replay->parts[i];

        if (part == NULL || part->holder != holder->index) {
            continue;
        }
        if (part->state == PART_PREPARING) {
            fail_part(replay, part, true);
        } else if (part->state == PART_MOVING && !replay->options.pull) {
            /* A dead process copies nothing; what it gave to a network may
             * still arrive. Where the kernel stopped letting it in, even a
             * peer of its own host got its bytes through NIXL. */
            fail_part(replay, part,
                      proven && holder->bytes_nixl == 0 &&
                          holder->local[part->request->fetcher]);
        }
        /* A fetcher's own transfer ends with a report of the fetcher. */
    }
}

/* ----------------------------------------------------------------- messages */

void flow_start(struct replay *replay, const struct trace_request *from)
{
    struct request *request = replay->requests;
    struct replay_node *fetcher = nodes_fetcher(replay, 0);

    while (request->active) {
        request++;
    }
    for (uint64_t i = 1; i < replay->options.fetchers; i++) {
        struct replay_node *other = nodes_fetcher(replay, i);

        if (other->active < fetcher->active) {
            fetcher = other;
        }
    }
    *request = (struct request){
        .active = true,
        .fetcher = fetcher->index,
        .count = from->id_count,
    };
    fetcher->active++;
    replay->active++;
    replay->totals.started++;
    proto_begin(&fetcher->control, PROTO_WANT);
    proto_put(&fetcher->control, handle_of(replay, request));
    proto_put(&fetcher->control, from->id_count);
    for (size_t i = 0; i < from->id_count; i++) {
        proto_put(&fetcher->control, from->ids[i]);
    }
    proto_end(&fetcher->control);
}

static struct request *take_request(struct replay *replay,
                                    const struct replay_node *node,
                                    struct proto_message *message)
{
    uint64_t handle = proto_take(message);
    struct request *request;

    if (handle >= replay->options.inflight) {
        message->damaged = true;
        return NULL;
    }
    request = &replay->requests[handle];
    if (!request->active || node->role != NODE_FETCHER ||
        request->fetcher != node->index) {
        message->damaged = true;
        return NULL;
    }
    return request;
}

static void take_need(struct replay *replay, const struct replay_node *node,
                      struct proto_message *message)
{
    struct request *request = take_request(replay, node, message);
    size_t count = proto_take_count(message, 3);
    struct block *blocks;
    size_t kept = 0;

    if (request == NULL || message->damaged) {
        return;
    }
    blocks = cli_alloc(count, sizeof(*blocks));
    for (size_t i = 0; i < count; i++) {
        struct block block = {
            .id = proto_take(message),
        };

        block.fetcher_slot = proto_take(message);
        block.attempts = proto_take(message);
        if (block.attempts >= REPLAY_ATTEMPTS_MAX ||
            nodes_holders_alive(replay) == 0) {
            send_drop(replay, request, true, &block, 1);
        } else {
            blocks[kept++] = block;
        }
    }
    divide(replay, request, UINT64_MAX, 0, blocks, kept);
    free(blocks);
}

static void take_prepared(struct replay *replay, const struct replay_node *node,
                          struct proto_message *message)
{
    struct part *part = find_part(replay, proto_take(message), PART_PREPARING);
    size_t count = proto_take_count(message, 1);
    bool pull = replay->options.pull;
    struct proto *control;

    if (part == NULL || part->count != count || node->role != NODE_HOLDER ||
        part->holder != node->index) {
        message->damaged = true;
        return;
    }
    for (size_t i = 0; i < count; i++) {
        part->blocks[i].holder_slot = proto_take(message);
    }
    part->state = PART_MOVING;
    control = pull ? &fetcher_of(replay, part->request)->control
                   : &nodes_holder(replay, part->holder)->control;
    proto_begin(control, PROTO_MOVE);
    proto_put(control, part->handle);
    proto_put(control, pull ? part->holder : part->request->fetcher);
    proto_put(control, count);
    for (size_t i = 0; i < count; i++) {
        const struct block *block = &part->blocks[i];

        proto_put(control, pull ? block->fetcher_slot : block->holder_slot);
        proto_put(control, pull ? block->holder_slot : block->fetcher_slot);
    }
    proto_end(control);
}

/* Hands over the keys: the fetcher can now say what should have landed. */
static void send_landed(struct replay *replay, const struct part *part)
{
    struct proto *control = &fetcher_of(replay, part->request)->control;
    uint64_t secret = nodes_holder(replay, part->holder)->secret;

    proto_begin(control, PROTO_LANDED);
    proto_put(control, part->handle);
    proto_put(control, part->count);
    for (size_t i = 0; i < part->count; i++) {
        proto_put(control, part->blocks[i].fetcher_slot);
        proto_put(control, node_block_key(secret, part->blocks[i].id));
    }
    proto_end(control);
}

static void count_transfer(struct replay *replay, const struct part *part,
                           const struct move_report *report)
{
    struct replay_totals *totals = &replay->totals;
    struct replay_node *holder = nodes_holder(replay, part->holder);

    holder->fates.bytes += report->bytes;
    totals->bytes += report->bytes;
    totals->pages += report->pages;
    totals->merged += report->pages > report->copies
                          ? report->pages - report->copies
                          : 0;
    totals->transfers++;
    histogram_add(&totals->submit, report->submit_ns);
    if (report->preempted == 0) {
        /* A full host may take the caller's CPU in the middle of the call,
         * which says nothing about the call. */
        histogram_add(&totals->submit_quiet, report->submit_ns);
        totals->quiet_ns += report->submit_ns;
        totals->quiet_indices += report->pages;
    }
    spans_add(&totals->active, report->start_ns,
              report->start_ns + report->latency_ns);
}

static void take_done(struct replay *replay, struct replay_node *node,
                      struct proto_message *message)
{
    struct part *part = find_part(replay, proto_take(message), PART_MOVING);
    struct move_report report;
    bool pull = replay->options.pull;

    move_report_take(message, &report);
    if (part == NULL || message->damaged) {
        message->damaged = true;
        return;
    }
    part->spent_ns += report.latency_ns;
    node->bytes_local = report.bytes_local;
    node->bytes_nixl = report.bytes_nixl;
    /* The holder's slots may hold another block once nobody reads them. */
    if (pull ? report.peer_final : report.own_final) {
        send_unpin(replay, part);
    }
    if (report.state == KVT_DONE) {
        count_transfer(replay, part, &report);
        part->request->moved = true;
        part->state = PART_CHECKING;
        send_landed(replay, part);
        return;
    }
    if (!replay->failure_told) {
        replay->failure_told = true;
        cli_error("%s %llu: a transfer failed; if another holder lives its "
                  "blocks come from there; further ones are only counted: %s",
                  node->role == NODE_HOLDER ? "holder" : "fetcher",
                  (unsigned long long)node->index, report.text);
    }
    fail_part(replay, part, (pull ? report.own_final : report.peer_final) != 0);
}

static void take_checked(struct replay *replay, struct proto_message *message)
{
    struct part *part = find_part(replay, proto_take(message), PART_CHECKING);
    uint64_t wrong = proto_take(message);
    uint64_t around = proto_take(message);
    struct holder_fates *fates;

    if (part == NULL || wrong > part->count) {
        message->damaged = true;
        return;
    }
    fates = &nodes_holder(replay, part->holder)->fates;
    fates->landed += part->count - wrong;
    fates->wrong += wrong;
    replay->totals.wrong_blocks += wrong;
    replay->totals.wrong_around += around;
    end_part(replay, part);
}

static void take_settled(struct replay *replay, struct replay_node *node,
                         struct proto_message *message)
{
    struct request *request = take_request(replay, node, message);
    struct replay_totals *totals = &replay->totals;

    if (request == NULL) {
        return;
    }
    totals->counts.hits += proto_take(message);
    totals->counts.shared += proto_take(message);
    totals->counts.landed += proto_take(message);
    totals->counts.failed += proto_take(message);
    totals->blocks += request->count;
    totals->settled++;
    if (request->moved) {
        histogram_add(&totals->latency, request->latency_ns);
    }
    request->active = false;
    replay->active--;
    node->active--;
}

bool flow_message(struct replay *replay, struct replay_node *node,
                  struct proto_message *message)
{
    switch (message->type) {
    case PROTO_NEED:
        take_need(replay, node, message);
        break;
    case PROTO_PREPARED:
        take_prepared(replay, node, message);
        break;
    case PROTO_DONE:
        take_done(replay, node, message);
        break;
    case PROTO_CHECKED:
        take_checked(replay, message);
        break;
    case PROTO_SETTLED:
        take_settled(replay, node, message);
        break;
    default:
        return false;
    }
    return !message->damaged;
}
