/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fetcher wants the blocks of its requests. It has some; for the others it
 * takes slots, poisons them, and asks the coordinator to have them filled.
 *
 * A pool may be smaller than a request. So a request goes in waves: as many of
 * its blocks as there are slots for now, until all of them have landed; then
 * their slots may be taken for others, and the next wave comes. A request
 * keeps no slot while it waits in the queue, so none waits for ever.
 *
 * A block that is on its way for one request is not fetched again for
 * another: both wait for the same slot.
 *
 * The checks. Every slot at rest has a known checksum, of its poison or its
 * block. What lands is compared with what its key says, which nobody here knew
 * before; then the slots on either side and the guards must be as they were,
 * unless a transfer of their own is on its way, whose landing is checked in
 * its turn.
 */
#include "node.h"

#include <stdlib.h>

#include "cli.h"

enum want_state {
    WANT_ASK,  /* not dealt with yet */
    WANT_WAIT, /* on its way, in the list of its slot */
    WANT_HAVE, /* in its slot, pinned until the wave ends */
    WANT_OVER
};

struct fetch;

struct want {
    struct fetch *fetch;
    struct want *next; /* of those that wait for the same slot */
    uint64_t id;
    uint64_t attempts; /* times that a slot of this block was lost */
    uint32_t slot;
    enum want_state state;
    bool shared; /* another want asked for the block */
};

/* A request. Requests have the coordinator's handles, below config.requests. */
struct fetch {
    struct fetch *next; /* in the queue */
    struct want *wants;
    size_t count;
    size_t ask;     /* no want before this one is WANT_ASK */
    size_t begin;   /* of the wave; no want before it is pinned */
    size_t end;     /* of the wave */
    size_t waiting; /* wants in WANT_WAIT */
    struct fetch_counts counts;
};

/* Those who wait for the block of one slot. */
struct waiters {
    struct want *first;
};

struct node_fetcher {
    struct fetch *fetches; /* by handle; no wants: unused */
    struct fetch *head;    /* requests that want slots */
    struct fetch **tail;
    struct waiters *waiters; /* by slot */
    uint64_t *poison_sums;   /* by slot */
    uint64_t *rounds;        /* by slot: the last check that read it */
    uint64_t round;
    uint64_t *asks; /* want and slot of what this wave needs */
    size_t ask_capacity;
    uint64_t corrupt; /* enum node_corrupt: still to be done */
};

static uint64_t poison_key(const struct node *node, uint32_t slot)
{
    return cli_mix(node->config.secret, UINT64_MAX - slot);
}

static void poison(struct node *node, uint32_t slot)
{
    kvpool_fill(&node->pool, slot, poison_key(node, slot));
}

void fetcher_open(struct node *node)
{
    struct node_fetcher *fetcher = cli_alloc(1, sizeof(*fetcher));
    uint32_t count = node->slots.count;

    fetcher->tail = &fetcher->head;
    fetcher->fetches = cli_alloc(node->config.requests,
                                 sizeof(*fetcher->fetches));
    fetcher->waiters = cli_alloc(count, sizeof(*fetcher->waiters));
    fetcher->poison_sums = cli_alloc(count, sizeof(*fetcher->poison_sums));
    fetcher->rounds = cli_alloc(count, sizeof(*fetcher->rounds));
    fetcher->corrupt = node->config.corrupt;
    for (uint32_t i = 0; i < count; i++) {
        poison(node, i);
        fetcher->poison_sums[i] = kvpool_expected(&node->pool.geometry,
                                                  poison_key(node, i));
        node->slots.at[i].checksum = fetcher->poison_sums[i];
    }
    node->fetcher = fetcher;
}

void fetcher_close(struct node *node)
{
    struct node_fetcher *fetcher = node->fetcher;

    if (fetcher == NULL) {
        return;
    }
    for (uint64_t i = 0; i < node->config.requests; i++) {
        free(fetcher->fetches[i].wants);
    }
    free(fetcher->fetches);
    free(fetcher->waiters);
    free(fetcher->poison_sums);
    free(fetcher->rounds);
    free(fetcher->asks);
    free(fetcher);
    node->fetcher = NULL;
}

/* -------------------------------------------------------------------- waves */

static void enqueue(struct node_fetcher *fetcher, struct fetch *fetch)
{
    fetch->next = NULL;
    *fetcher->tail = fetch;
    fetcher->tail = &fetch->next;
}

static void settle(struct node *node, struct fetch *fetch)
{
    proto_begin(&node->control, PROTO_SETTLED);
    proto_put(&node->control, (uint64_t)(fetch - node->fetcher->fetches));
    proto_put(&node->control, fetch->counts.hits);
    proto_put(&node->control, fetch->counts.shared);
    proto_put(&node->control, fetch->counts.landed);
    proto_put(&node->control, fetch->counts.failed);
    proto_end(&node->control);
    free(fetch->wants);
    *fetch = (struct fetch){0};
}

/* Nothing of the wave is on its way any more. */
static void end_wave(struct node *node, struct fetch *fetch)
{
    for (size_t i = fetch->begin; i < fetch->end; i++) {
        if (fetch->wants[i].state == WANT_HAVE) {
            slots_unpin(&node->slots, fetch->wants[i].slot);
            fetch->wants[i].state = WANT_OVER;
        }
    }
    if (fetch->ask < fetch->count) {
        enqueue(node->fetcher, fetch);
    } else {
        settle(node, fetch);
    }
}

static void wait_for_slot(struct node *node, struct want *want, uint32_t slot)
{
    want->slot = slot;
    want->state = WANT_WAIT;
    want->next = node->fetcher->waiters[slot].first;
    node->fetcher->waiters[slot].first = want;
    want->fetch->waiting++;
}

/* False when there is no slot for it now. */
static bool deal_with(struct node *node, struct want *want, size_t *asks)
{
    struct node_fetcher *fetcher = node->fetcher;
    uint32_t slot = slots_find(&node->slots, want->id);

    if (slot != SLOT_NONE) {
        slots_pin(&node->slots, slot);
        want->shared = node->slots.at[slot].state == SLOT_PENDING;
        if (want->shared) {
            wait_for_slot(node, want, slot);
        } else {
            want->slot = slot;
            want->state = WANT_HAVE;
            want->fetch->counts.hits++;
        }
        return true;
    }
    if (node->slots.lost == node->slots.count) {
        want->state = WANT_OVER;
        want->fetch->counts.failed++;
        return true;
    }
    slot = slots_take(&node->slots, want->id);
    if (slot == SLOT_NONE) {
        return false;
    }
    poison(node, slot);
    want->shared = false;
    wait_for_slot(node, want, slot);
    fetcher->asks = cli_grow(fetcher->asks, &fetcher->ask_capacity, *asks + 1,
                             sizeof(*fetcher->asks));
    fetcher->asks[(*asks)++] = (uint64_t)(want - want->fetch->wants);
    return true;
}

static void send_need(struct node *node, const struct fetch *fetch,
                      size_t count)
{
    struct proto *control = &node->control;

    proto_begin(control, PROTO_NEED);
    proto_put(control, (uint64_t)(fetch - node->fetcher->fetches));
    proto_put(control, count);
    for (size_t i = 0; i < count; i++) {
        const struct want *want = &fetch->wants[node->fetcher->asks[i]];

        proto_put(control, want->id);
        proto_put(control, want->slot);
        proto_put(control, want->attempts);
    }
    proto_end(control);
}

/* Starts a wave; false when there was no slot for even one block. */
static bool start_wave(struct node *node, struct fetch *fetch)
{
    size_t asks = 0;
    size_t begin = fetch->ask;
    size_t i;

    for (i = begin; i < fetch->count; i++) {
        if (fetch->wants[i].state == WANT_ASK &&
            !deal_with(node, &fetch->wants[i], &asks)) {
            break;
        }
    }
    if (i == begin && i < fetch->count) {
        return false;
    }
    fetch->begin = begin;
    fetch->ask = i;
    fetch->end = i;
    if (asks > 0) {
        send_need(node, fetch, asks);
    }
    return true;
}

static void start_waves(struct node *node)
{
    struct node_fetcher *fetcher = node->fetcher;
    struct fetch *fetch;

    while ((fetch = fetcher->head) != NULL && start_wave(node, fetch)) {
        fetcher->head = fetch->next;
        if (fetcher->head == NULL) {
            fetcher->tail = &fetcher->head;
        }
        if (fetch->waiting == 0) {
            end_wave(node, fetch);
        }
    }
}

void fetcher_want(struct node *node, struct proto_message *message)
{
    uint64_t handle = proto_take(message);
    size_t count = proto_take_count(message, 1);
    struct fetch *fetch;

    if (node->fetcher == NULL || handle >= node->config.requests ||
        node->fetcher->fetches[handle].wants != NULL) {
        message->damaged = true;
        return;
    }
    fetch = &node->fetcher->fetches[handle];
    fetch->wants = cli_alloc(count, sizeof(*fetch->wants));
    fetch->count = count;
    for (size_t i = 0; i < count; i++) {
        fetch->wants[i].fetch = fetch;
        fetch->wants[i].id = proto_take(message);
    }
    enqueue(node->fetcher, fetch);
    start_waves(node);
}

/* What became of a slot's block, for all who wait for it. */
enum fate { FATE_LANDED, FATE_FAILED, FATE_AGAIN };

static void tell_waiters(struct node *node, uint32_t slot, enum fate fate)
{
    struct want *want = node->fetcher->waiters[slot].first;
    struct want *next;

    node->fetcher->waiters[slot].first = NULL;
    for (; want != NULL; want = next) {
        struct fetch *fetch = want->fetch;
        size_t position = (size_t)(want - fetch->wants);

        next = want->next;
        if (fate == FATE_LANDED) {
            want->state = WANT_HAVE;
            fetch->counts.shared += want->shared;
            fetch->counts.landed += !want->shared;
        } else if (fate == FATE_FAILED) {
            want->state = WANT_OVER;
            fetch->counts.failed++;
        } else {
            want->state = WANT_ASK;
            want->attempts++;
            fetch->ask = position < fetch->ask ? position : fetch->ask;
        }
        if (--fetch->waiting == 0) {
            end_wave(node, fetch);
        }
    }
}

/* A slot of a message, which must be one that waits for its block. */
static uint32_t take_pending(struct node *node, struct proto_message *message)
{
    uint64_t slot = proto_take(message);

    if (node->fetcher == NULL || message->damaged ||
        slot >= node->slots.count ||
        node->slots.at[slot].state != SLOT_PENDING) {
        message->damaged = true;
        return SLOT_NONE;
    }
    return (uint32_t)slot;
}

void fetcher_again(struct node *node, struct proto_message *message)
{
    size_t count = proto_take_count(message, 1);

    for (size_t i = 0; i < count; i++) {
        uint32_t slot = take_pending(node, message);

        if (slot == SLOT_NONE) {
            return;
        }
        slots_lose(&node->slots, slot);
        tell_waiters(node, slot, FATE_AGAIN);
    }
    start_waves(node);
}

static void free_slot(struct node *node, uint32_t slot)
{
    poison(node, slot);
    slots_release(&node->slots, slot, node->fetcher->poison_sums[slot]);
}

void fetcher_drop(struct node *node, struct proto_message *message)
{
    bool final = proto_take(message) != 0;
    size_t count = proto_take_count(message, 1);

    for (size_t i = 0; i < count; i++) {
        uint32_t slot = take_pending(node, message);

        if (slot == SLOT_NONE) {
            return;
        }
        if (final) {
            free_slot(node, slot);
        } else {
            slots_lose(&node->slots, slot);
        }
        tell_waiters(node, slot, FATE_FAILED);
    }
    start_waves(node);
}

/* ------------------------------------------------------------------- checks */

/* Whether a slot at rest that was not read in this round has changed. A change
 * is counted once: the new bytes are what is expected from then on. */
static bool has_changed(struct node *node, uint32_t slot)
{
    struct node_fetcher *fetcher = node->fetcher;
    uint64_t sum;

    if (slot >= node->slots.count || !slots_at_rest(&node->slots, slot) ||
        fetcher->rounds[slot] == fetcher->round) {
        return false;
    }
    fetcher->rounds[slot] = fetcher->round;
    sum = kvpool_checksum(&node->pool, slot);
    if (sum == node->slots.at[slot].checksum) {
        return false;
    }
    node->slots.at[slot].checksum = sum;
    return true;
}

/* Slots beside this one, and guards, that are not as they were. */
static uint64_t check_around(struct node *node, uint32_t slot)
{
    /* Slot 0 has no slot before it: the sum wraps and is out of range. */
    return (uint64_t)has_changed(node, slot - 1) +
           (uint64_t)has_changed(node, slot + 1);
}

static uint64_t check_guards(struct node *node)
{
    if (kvpool_guards_intact(&node->pool)) {
        return 0;
    }
    /* Counted once, like a slot. */
    kvpool_rebase_guards(&node->pool);
    return 1;
}

/* For --corrupt, before anything of a landing is read. */
static void spoil(struct node *node, uint32_t slot)
{
    struct node_fetcher *fetcher = node->fetcher;
    uint32_t beside = slot > 0 ? slot - 1 : slot + 1;

    if (fetcher->corrupt == CORRUPT_BLOCK) {
        kvpool_spoil_slot(&node->pool, slot);
    } else if (fetcher->corrupt == CORRUPT_GUARD) {
        kvpool_spoil_guard(&node->pool);
    } else if (fetcher->corrupt == CORRUPT_NEIGHBOUR &&
               beside < node->slots.count &&
               slots_at_rest(&node->slots, beside)) {
        kvpool_spoil_slot(&node->pool, beside);
    } else {
        return; /* the next landing may have a neighbour at rest */
    }
    fetcher->corrupt = CORRUPT_NOTHING;
}

/* Compares a landed block with what its key says and settles its slot. */
static bool check_block(struct node *node, uint32_t slot, uint64_t key)
{
    uint64_t expected = kvpool_expected(&node->pool.geometry, key);

    node->fetcher->rounds[slot] = node->fetcher->round;
    if (kvpool_checksum(&node->pool, slot) == expected) {
        slots_settle(&node->slots, slot, expected);
        return true;
    }
    free_slot(node, slot);
    return false;
}

static void check_landed(struct node *node, const uint32_t *slots,
                         const uint64_t *keys, size_t count,
                         uint64_t *ret_wrong, uint64_t *ret_around)
{
    uint64_t wrong = 0;
    uint64_t around = 0;

    node->fetcher->round++;
    for (size_t i = 0; i < count; i++) {
        spoil(node, slots[i]);
    }
    for (size_t i = 0; i < count; i++) {
        wrong += !check_block(node, slots[i], keys[i]);
    }
    for (size_t i = 0; i < count; i++) {
        around += check_around(node, slots[i]);
    }
    *ret_wrong = wrong;
    *ret_around = around + check_guards(node);
}

void fetcher_landed(struct node *node, struct proto_message *message)
{
    uint64_t part = proto_take(message);
    size_t count = proto_take_count(message, 2);
    uint32_t *slots = cli_alloc(count, sizeof(*slots));
    uint64_t *keys = cli_alloc(count, sizeof(*keys));
    uint64_t wrong;
    uint64_t around;

    for (size_t i = 0; i < count; i++) {
        slots[i] = take_pending(node, message);
        keys[i] = proto_take(message);
    }
    if (node->fetcher == NULL || message->damaged) {
        message->damaged = true;
        free(slots);
        free(keys);
        return;
    }
    check_landed(node, slots, keys, count, &wrong, &around);
    free(keys);
    proto_begin(&node->control, PROTO_CHECKED);
    proto_put(&node->control, part);
    proto_put(&node->control, wrong);
    proto_put(&node->control, around);
    proto_end(&node->control);

    /* After the report: the coordinator counts blocks before requests. */
    for (size_t i = 0; i < count; i++) {
        bool right = node->slots.at[slots[i]].state == SLOT_RESIDENT;

        tell_waiters(node, slots[i], right ? FATE_LANDED : FATE_FAILED);
    }
    free(slots);
    start_waves(node);
}

/* Slots that are not as they were left. */
uint64_t fetcher_sweep(const struct node *node)
{
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < node->slots.count; i++) {
        if (slots_at_rest(&node->slots, i) &&
            kvpool_checksum(&node->pool, i) != node->slots.at[i].checksum) {
            wrong++;
        }
    }
    return wrong;
}
