/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts transfers and reports how they ended: everything that a caller of kvt
 * has to do once the layouts are prepared.
 *
 * A move lives from the coordinator's message until its report. Its address is
 * the transfer's user_data, so the result leads back to it. When kvt takes no
 * more (KVT_EAGAIN) moves wait in `backlog` until a result has been drained.
 */
#include "node.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* Results taken at a time. */
#define DRAIN_MAX 64

struct mover_peer {
    kvt_peer id;
    kvt_layout layout; /* of the peer's pool */
    bool dead;
};

struct move {
    struct move *next; /* in the backlog */
    uint64_t part;
    uint64_t peer;
    uint64_t start_ns;
    uint64_t submit_ns;
    uint64_t preempted;
    uint64_t pages;
    uint64_t *own; /* indices of kvt blocks, and the peer's, pair by pair */
    uint64_t *peers;
};

struct node_mover {
    kvt_layout layout; /* of our pool */
    struct mover_peer *peers;
    uint64_t inflight;
    struct move *head;
    struct move **tail;
};

void mover_open(struct node *node)
{
    struct node_mover *mover = cli_alloc(1, sizeof(*mover));
    struct kvt_error err = {0};
    struct kvt_run *runs = kvpool_runs(&node->config.geometry,
                                       node->config.slots,
                                       (uint64_t)(uintptr_t)node->pool.base);

    mover->tail = &mover->head;
    mover->peers = cli_alloc(node->config.peers, sizeof(*mover->peers));
    if (kvt_prepare(node->transport, KVT_SELF, "pool", runs,
                    node->config.geometry.regions, &mover->layout,
                    &err) != KVT_OK) {
        node_fail(node, "the pool has no layout: %s", err.text);
    }
    free(runs);
    node->mover = mover;
}

static void free_move(struct move *move)
{
    free(move->own);
    free(move->peers);
    free(move);
}

void mover_close(struct node *node)
{
    struct move *move;

    if (node->mover == NULL) {
        return;
    }
    while ((move = node->mover->head) != NULL) {
        node->mover->head = move->next;
        free_move(move);
    }
    free(node->mover->peers);
    free(node->mover);
    node->mover = NULL;
}

static void report_added(struct node *node, uint64_t index)
{
    struct kvt_peer_info info;

    if (kvt_peer_info(node->transport, node->mover->peers[index].id, &info) !=
        KVT_OK) {
        node_fail(node, "peer %llu is gone", (unsigned long long)index);
    }
    proto_begin(&node->control, PROTO_ADDED);
    proto_put(&node->control, index);
    proto_put_bytes(&node->control, info.path, strlen(info.path));
    proto_end(&node->control);
}

void mover_add_peer(struct node *node, struct proto_message *message)
{
    uint64_t index = proto_take(message);
    uint64_t base = proto_take(message);
    struct kvt_peer_params params = {.size = sizeof(params)};
    struct kvt_error err = {0};
    struct mover_peer *peer;
    struct kvt_run *runs;
    kvt_xfer xfer;
    char name[32];

    params.metadata = proto_take_bytes(message, &params.metadata_length);
    if (message->damaged || index >= node->config.peers) {
        message->damaged = true;
        return;
    }
    peer = &node->mover->peers[index];
    (void)snprintf(name, sizeof(name), "peer-%llu", (unsigned long long)index);
    params.name = name;
    if (kvt_peer_add(node->transport, &params, &peer->id, &err) != KVT_OK) {
        node_fail(node, "peer %llu cannot be added: %s",
                  (unsigned long long)index, err.text);
    }
    runs = kvpool_runs(&node->config.geometry, node->config.slots, base);
    if (kvt_prepare(node->transport, peer->id, "pool", runs,
                    node->config.geometry.regions, &peer->layout,
                    &err) != KVT_OK) {
        node_fail(node, "the pool of peer %llu has no layout: %s",
                  (unsigned long long)index, err.text);
    }
    free(runs);
    /* Its result reports the peer as added: see drain_warm_up(). */
    if (kvt_warm_up(node->transport, peer->id, NULL, &xfer, &err) != KVT_OK) {
        node_fail(node, "peer %llu cannot be connected: %s",
                  (unsigned long long)index, err.text);
    }
}

void mover_peer_dead(struct node *node, struct proto_message *message)
{
    uint64_t index = proto_take(message);
    bool proven = proto_take(message) != 0;

    if (message->damaged || index >= node->config.peers) {
        message->damaged = true;
        return;
    }
    node->mover->peers[index].dead = true;
    if (proven) {
        /* Its process has been reaped: what waits for a proof completes. */
        (void)kvt_peer_confirm_dead(node->transport,
                                    node->mover->peers[index].id);
    } else {
        /* Nobody will ever prove it: what is not final is lost by and by. */
        (void)kvt_peer_remove(node->transport, node->mover->peers[index].id);
    }
}

static void report_move(struct node *node, struct move *move,
                        struct move_report *report)
{
    struct kvt_stats stats = {0};

    (void)kvt_stats(node->transport, &stats, sizeof(stats));
    report->bytes_local = stats.bytes_local;
    report->bytes_nixl = stats.bytes_nixl;
    report->start_ns = move->start_ns;
    report->submit_ns = move->submit_ns;
    report->preempted = move->preempted;
    report->pages = move->pages;
    proto_begin(&node->control, PROTO_DONE);
    proto_put(&node->control, move->part);
    move_report_put(&node->control, report);
    proto_end(&node->control);
    free_move(move);
}

/* kvt took nothing, so nothing of it touches any memory. */
static void report_refused(struct node *node, struct move *move,
                           const char *text)
{
    struct move_report report = {
        .state = KVT_REJECTED,
        .own_final = 1,
        .peer_final = 1,
    };

    (void)snprintf(report.text, sizeof(report.text), "%s", text);
    report_move(node, move, &report);
}

/* A link can break although both processes are well: then load it again. */
static int load_peer(struct node *node, const struct mover_peer *peer,
                     struct kvt_error *err)
{
    if (peer->dead || kvt_peer_loaded(node->transport, peer->id) == 1) {
        return KVT_OK; /* a dead peer is refused by the transfer's own call */
    }
    return kvt_peer_reload(node->transport, peer->id, NULL, 0, 0, err);
}

/* False when kvt takes nothing now but will later. */
static bool submit(struct node *node, struct move *move)
{
    struct node_mover *mover = node->mover;
    const struct mover_peer *peer = &mover->peers[move->peer];
    struct kvt_indices own = {move->own, move->pages, KVT_INDEX_U64, 0};
    struct kvt_indices peers = {move->peers, move->pages, KVT_INDEX_U64, 0};
    struct kvt_xfer_options options = {
        .size = sizeof(options),
        .timeout_ns = node->config.timeout_ns,
        .user_data = (uint64_t)(uintptr_t)move,
    };
    struct kvt_error err = {0};
    uint64_t before;
    kvt_xfer xfer;
    int rc = load_peer(node, peer, &err);

    if (rc == KVT_OK) {
        before = cli_preemptions();
        move->start_ns = cli_now_ns();
        rc = node->config.pull != 0
                 ? kvt_read_blocks(node->transport, peer->id, mover->layout,
                                   &own, peer->layout, &peers, &options, &xfer,
                                   &err)
                 : kvt_write_blocks(node->transport, peer->id, mover->layout,
                                    &own, peer->layout, &peers, &options, &xfer,
                                    &err);
        move->submit_ns = cli_now_ns() - move->start_ns;
        move->preempted = cli_preemptions() != before;
    }
    if (rc == KVT_OK) {
        mover->inflight++;
        return true;
    }
    if (rc == KVT_EAGAIN && mover->inflight > 0) {
        return false;
    }
    report_refused(node, move, err.text);
    return true;
}

static void submit_backlog(struct node *node)
{
    struct node_mover *mover = node->mover;

    while (mover->head != NULL) {
        struct move *move = mover->head;
        struct move *next = move->next;

        if (!submit(node, move)) {
            return;
        }
        mover->head = next;
        if (next == NULL) {
            mover->tail = &mover->head;
        }
    }
}

/*
 * Turns slots into indices of pages. All pages of one region come together,
 * so that neighbours in memory are neighbours in the list and kvt can merge
 * them.
 */
static void spread(const struct node *node, struct move *move,
                   const uint64_t *slots, size_t count)
{
    const struct geometry *geometry = &node->config.geometry;
    size_t at = 0;

    move->pages = count * geometry_slot_pages(geometry);
    move->own = cli_alloc(move->pages, sizeof(*move->own));
    move->peers = cli_alloc(move->pages, sizeof(*move->peers));
    for (uint64_t r = 0; r < geometry->regions; r++) {
        for (size_t i = 0; i < count; i++) {
            for (uint64_t page = 0; page < geometry->pages; page++) {
                move->own[at] = kvpool_index(geometry, node->config.slots, r,
                                             slots[2 * i], page);
                move->peers[at] = kvpool_index(geometry, node->config.slots, r,
                                               slots[2 * i + 1], page);
                at++;
            }
        }
    }
}

/* Whether these pairs can be of one transfer: no slot is in it twice, and the
 * peer's pool has as many slots as ours. Keeps spread() within the pool. */
static bool are_slots(const struct node *node, const uint64_t *slots,
                      size_t count)
{
    if (count > node->slots.count) {
        return false;
    }
    for (size_t i = 0; i < 2 * count; i++) {
        if (slots[i] >= node->slots.count) {
            return false;
        }
    }
    return true;
}

void mover_move(struct node *node, struct proto_message *message)
{
    struct move *move = cli_alloc(1, sizeof(*move));
    size_t count;
    uint64_t *slots; /* own, peer's, own, peer's, … */

    move->part = proto_take(message);
    move->peer = proto_take(message);
    count = proto_take_count(message, 2);
    slots = cli_alloc(count, 2 * sizeof(*slots));
    for (size_t i = 0; i < 2 * count; i++) {
        slots[i] = proto_take(message);
    }
    if (message->damaged || move->peer >= node->config.peers ||
        !are_slots(node, slots, count)) {
        message->damaged = true;
        free(slots);
        free_move(move);
        return;
    }
    spread(node, move, slots, count);
    free(slots);
    *node->mover->tail = move;
    node->mover->tail = &move->next;
    submit_backlog(node);
}

static void drain_warm_up(struct node *node, const struct kvt_result *result)
{
    if (result->state != KVT_DONE) {
        node_fail(node, "a peer cannot be connected: %s", result->text);
    }
    for (uint64_t i = 0; i < node->config.peers; i++) {
        if (node->mover->peers[i].id == result->peer) {
            report_added(node, i);
        }
    }
}

static void drain_move(struct node *node, const struct kvt_result *result)
{
    struct move *move = (struct move *)(uintptr_t)result->user_data;
    struct move_report report = {
        .state = result->state,
        .own_final = (result->flags & KVT_LOCAL_FINAL) != 0,
        .peer_final = (result->flags & KVT_PEER_FINAL) != 0,
        .bytes = result->bytes,
        .copies = result->copies,
        .latency_ns = result->latency_ns,
    };

    (void)snprintf(report.text, sizeof(report.text), "%s",
                   result->text[0] != '\0' ? result->text
                                           : kvt_strerror(result->code));
    node->mover->inflight--;
    report_move(node, move, &report);
}

void mover_drain(struct node *node)
{
    struct kvt_result results[DRAIN_MAX];
    int count;

    if (node->transport == NULL) {
        return;
    }
    while ((count = kvt_poll(node->transport, KVT_ANY, results, DRAIN_MAX)) >
           0) {
        for (int i = 0; i < count; i++) {
            if (results[i].op == KVT_OP_WARM_UP) {
                drain_warm_up(node, &results[i]);
            } else {
                drain_move(node, &results[i]);
            }
        }
        submit_backlog(node);
    }
}
