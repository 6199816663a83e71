/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The initiator: asks kvt for what the history says, believes each of its
 * answers at once (ledger_claim), and checks that they agree with each other: a
 * result comes once, not at all where that was promised, and only of what was
 * accepted. One thread.
 */
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "initiator.h"

/* ------------------------------------------------------------------- start */

static int ask(struct initiator *self, struct entry *entry,
               const struct kvt_xfer_options *options)
{
    const struct remote *remote = &self->remotes[entry->target];
    uint32_t own[COUNT_MAX];
    uint32_t theirs[COUNT_MAX];
    struct kvt_indices from = {own, entry->count, KVT_INDEX_U32, 0};
    struct kvt_indices to = {theirs, entry->count, KVT_INDEX_U32, 0};

    for (uint32_t i = 0; i < entry->count; i++) {
        own[i] = entry->own[i];
        theirs[i] = entry->theirs[i];
    }
    return entry->op == KVT_OP_WRITE
               ? kvt_write_blocks(self->t, remote->peer, self->layout, &from,
                                  remote->layout, &to, options, &entry->id,
                                  NULL)
               : kvt_read_blocks(self->t, remote->peer, self->layout, &from,
                                 remote->layout, &to, options, &entry->id,
                                 NULL);
}

static bool is_ready(struct initiator *self, uint32_t target, uint64_t seed)
{
    const struct remote *remote = &self->remotes[target];

    if (remote->known && kvt_peer_loaded(self->t, remote->peer) == 1) {
        return true;
    }
    /* Now and then it is tried all the same, to be refused. */
    if (seed % 8 != 0 || !remote->known) {
        return initiator_add(self, target) == KVT_OK;
    }
    return true;
}

static void count_accepted(struct initiator *self, struct entry *entry)
{
    struct head *head = self->arena->head;

    if (entry->op == KVT_OP_WRITE) {
        head->totals.writes++;
    } else {
        head->totals.reads++;
    }
    head->totals.bytes += (uint64_t)entry->count * BLOCK_BYTES;
    if ((head->stopped & (1u << INITIATOR | 1u << entry->target)) != 0) {
        set_flag(entry, ENTRY_STOPPED);
    }
    if (head->current[entry->target] != entry->pool) {
        set_flag(entry, ENTRY_KILLED);
    }
    if (head->rules != 0) {
        set_flag(entry, ENTRY_RULED);
    }
}

/* One transfer; timeout in us, 0 for none. */
static struct entry *start(struct initiator *self, uint32_t op, uint32_t target,
                           uint32_t count, uint64_t seed, uint64_t timeout_us)
{
    struct remote *remote = &self->remotes[target];
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = timeout_us * 1000};
    struct entry *entry;
    int code;

    if (!is_ready(self, target, seed)) {
        return NULL;
    }
    entry = ledger_prepare(self->arena, op, target, remote->pool, count, seed);
    if (entry == NULL) {
        return NULL;
    }
    entry->revision = remote->revision;
    entry->peer = remote->peer;
    options.user_data = (uint64_t)(entry - self->arena->head->entries) + 1;
    if (seed % 16 == 1) {
        options.flags = KVT_XFER_NO_EVENT;
        set_flag(entry, ENTRY_QUIET);
    }
    atomic_store(&entry->state, ENTRY_ASKED);
    initiator_check_frozen(self);
    self->frozen = false;
    code = ask(self, entry, &options);
    if (code != KVT_OK) {
        totals_of(self)->refused++;
        ledger_refused(self->arena, entry);
        return NULL;
    }
    count_accepted(self, entry);
    atomic_store(&entry->state, ENTRY_ACCEPTED);
    return entry;
}

/* ------------------------------------------------------------------- cancel */

static void cancelled(struct initiator *self, struct entry *entry, bool moving)
{
    if (moving) {
        totals_of(self)->cancels_moving++;
        return;
    }
    set_flag(entry, ENTRY_HIDDEN);
    if (is_open(entry)) {
        totals_of(self)->cancelled++;
        ledger_claim(self->arena, entry, false, 0);
    }
    initiator_retire(entry);
}

static bool is_among(kvt_xfer id, const kvt_xfer *ids, int count)
{
    for (int i = 0; i < count; i++) {
        if (ids[i] == id) {
            return true;
        }
    }
    return false;
}

static int cancel(struct initiator *self, struct entry *const *entries,
                  uint32_t count, int mode)
{
    kvt_xfer ids[ENTRIES];
    kvt_xfer moving[ENTRIES];
    int left;

    for (uint32_t i = 0; i < count; i++) {
        ids[i] = entries[i]->id;
        set_flag(entries[i], ENTRY_CANCELLED);
    }
    totals_of(self)->cancels++;
    totals_of(self)->cancels_flying += ledger_flying(self->arena, INITIATOR);
    left = kvt_cancel(self->t, ids, count, mode, moving);
    initiator_freeze(self);
    for (uint32_t i = 0; i < count && left >= 0; i++) {
        if (mode == KVT_CANCEL_WAIT) {
            cancelled(self, entries[i], is_among(ids[i], moving, left));
        } else {
            set_flag(entries[i], ENTRY_HIDDEN);
            if (is_open(entries[i])) {
                initiator_look(self, entries[i]);
                totals_of(self)->cancels_moving += is_open(entries[i]);
            }
            initiator_retire(entries[i]);
        }
    }
    return left < 0 ? left : KVT_OK;
}

static int cancel_some(struct initiator *self, int mode, uint64_t seed,
                       uint32_t percent)
{
    struct entry *entries[ENTRIES];
    uint32_t count = 0;

    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (is_open(entry) && random_below(&seed, 100) < percent) {
            entries[count++] = entry;
        }
    }
    return count == 0 ? KVT_OK : cancel(self, entries, count, mode);
}

static int release_all(struct initiator *self, struct entry *const *entries,
                       uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!has_flag(entries[i], ENTRY_HIDDEN)) {
            set_flag(entries[i], ENTRY_HIDDEN);
            if (kvt_release(self->t, entries[i]->id) != KVT_OK) {
                arena_finding(self->arena, "a release is refused");
            }
        }
    }
    return KVT_OK;
}

/* Many at once, and something that happens to them at once. */
int initiator_burst(struct initiator *self, const struct op *op)
{
    struct entry *entries[ENTRIES];
    uint32_t target = (uint32_t)op->arg[0];
    uint64_t seed = op->arg[2];
    uint32_t count = 0;

    for (uint64_t i = 0; i < op->arg[1] && count < ENTRIES; i++) {
        uint32_t kind = random_below(&seed, 4) == 0 ? KVT_OP_READ
                                                    : KVT_OP_WRITE;
        uint32_t blocks = 1 + random_below(&seed, COUNT_MAX / 2);

        uint64_t timeout_us = random_below(&seed, 8) == 0
                                  ? 1 + random_below(&seed, 1000)
                                  : 0;

        entries[count] = start(self, kind, target, blocks, next_random(&seed),
                               timeout_us);
        count += entries[count] != NULL;
    }
    switch (op->arg[3]) {
    case ACT_CANCEL_WAIT:
        return cancel(self, entries, count, KVT_CANCEL_WAIT);
    case ACT_CANCEL_IMMEDIATE:
        return cancel(self, entries, count, KVT_CANCEL_IMMEDIATE);
    case ACT_RELEASE:
        return release_all(self, entries, count);
    case ACT_REMOVE:
        return initiator_forget(self, target);
    case ACT_UNLOAD:
        return initiator_unload(self, target);
    case ACT_RELOAD:
        return initiator_reload(self, target);
    default:
        return KVT_OK;
    }
}

/* ------------------------------------------------------------------- settle */

static const char *const rule_sets[] = {
    "",
    "hold=1-6",
    "hang=2;5;9",
    "late=1-8/2",
    "fail=2;4",
    "reject=1;3",
    "reject_dirty=1-3",
    "disconnect=3,hold=3",
    "unreadable=2",
    "never=2",
    "half=1-4",
    "hold=2+",
    "delay=1",
    "fail=3,late=2-9/3",
    "peer_down=4",
};

static int set_rules(struct initiator *self, uint64_t seed)
{
    struct head *head = self->arena->head;
    size_t count = sizeof rule_sets / sizeof rule_sets[0];
    const char *rules = rule_sets[seed % count];

    if (head->has_rules == 0) {
        return KVT_OK;
    }
    head->rules = rules[0] != '\0';
    self->ruled |= rules[0] != '\0';
    ledger_flag(self->arena, INITIATOR, ENTRY_RULED);
    return kvt_fault(self->t, rules, NULL);
}

static bool is_settled(const struct initiator *self)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &self->arena->head->entries[i];
        uint32_t state = atomic_load(&entry->state);

        if ((state == ENTRY_ACCEPTED && !(has_flag(entry, ENTRY_LOST) &&
                                          initiator_excused(self, entry))) ||
            (state != ENTRY_FREE &&
             !has_flag(entry, ENTRY_HIDDEN | ENTRY_REPORTED))) {
            return false;
        }
    }
    return true;
}

/* What a stopped target holds up would not end by itself. */
static int cancel_stopped(struct initiator *self, uint64_t stopped)
{
    struct entry *entries[ENTRIES];
    uint32_t count = 0;

    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (is_open(entry) && (stopped >> entry->target & 1) != 0) {
            entries[count++] = entry;
        }
    }
    return count == 0 ? KVT_OK : cancel(self, entries, count, KVT_CANCEL_WAIT);
}

uint64_t initiator_now_s(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

/* Until each transfer is over, or lost with reason, and reported where that is due. */
static int settle(struct initiator *self, uint64_t stopped)
{
    uint64_t end = initiator_now_s() + HANG_S;
    struct pollfd wait = {.fd = kvt_fd(self->t), .events = POLLIN};
    int code = set_rules(self, 0);

    if (code == KVT_OK) {
        code = cancel_stopped(self, stopped);
    }
    while (code == KVT_OK) {
        code = initiator_poll(self);
        (void)initiator_look_all(self);
        if (is_settled(self)) {
            break;
        }
        if (initiator_now_s() > end) {
            arena_finding(self->arena, "a transfer does not end");
            return KVT_ETIMEDOUT;
        }
        (void)poll(&wait, 1, 2);
    }
    return code;
}

/* -------------------------------------------------------------------- main */

int initiator_open(struct initiator *self)
{
    struct head *head = self->arena->head;
    struct kvt_options options = {.size = sizeof options,
                                  .engine = head->engine,
                                  .agent_name = "initiator",
                                  .grace_ns = head->grace_ns};
    struct kvt_region region = {
        .addr = (uint64_t)(uintptr_t)arena_block(self->arena, OWN_POOL, 0),
        .length = POOL_BYTES};
    struct kvt_run run = initiator_run(region.addr);
    int code = kvt_open(&options, &self->t, NULL);

    head->rules = 0; /* they are a transport's */
    if (code != KVT_OK) {
        return code;
    }
    if ((head->by_fd >> INITIATOR & 1) != 0) {
        region.flags = KVT_REGION_FD;
        region.fd = self->arena->fd;
        region.fd_offset = (uint64_t)arena_offset(OWN_POOL);
    }
    code = kvt_register(self->t, &region, 1, 0, NULL);
    return code != KVT_OK ? code
                          : kvt_prepare(self->t, KVT_SELF, "pool", &run, 1,
                                        &self->layout, NULL);
}

static int obey(struct initiator *self, const struct op *op)
{
    uint32_t target = (uint32_t)(op->arg[0] % TARGETS);

    switch (op->verb) {
    case VERB_OPEN:
        return initiator_open(self);
    case VERB_WRITE:
    case VERB_READ:
        (void)start(self, op->verb == VERB_WRITE ? KVT_OP_WRITE : KVT_OP_READ,
                    target, (uint32_t)op->arg[1], op->arg[2], op->arg[3]);
        return KVT_OK;
    case VERB_BURST:
        return initiator_burst(self, op);
    case VERB_CANCEL:
        return cancel_some(self, (int)op->arg[0], op->arg[1],
                           (uint32_t)op->arg[2]);
    case VERB_POLL:
        return initiator_poll(self);
    case VERB_STATUS:
        return initiator_look_all(self);
    case VERB_SETTLE:
        return settle(self, op->arg[0]);
    case VERB_RULES:
        return set_rules(self, op->arg[0]);
    case VERB_ADD:
        return initiator_add(self, target);
    case VERB_RELOAD:
        return initiator_reload(self, target);
    case VERB_UNLOAD:
        return initiator_unload(self, target);
    case VERB_REMOVE:
        return initiator_forget(self, target);
    case VERB_CONFIRM:
        return initiator_confirm(self, target);
    case VERB_CLOSE:
        return initiator_close(self, op);
    default:
        return KVT_EINVAL;
    }
}

_Noreturn void initiator_main(struct arena *arena, int fd)
{
    struct initiator self = {.arena = arena};
    struct op op;

    while (wire_receive(fd, &op, sizeof op, -1) > 0) {
        struct answer answer = {.verb = op.verb};

        answer.code = obey(&self, &op);
        if (self.t != NULL) {
            initiator_check_frozen(&self);
        }
        if (!wire_send(fd, &answer, sizeof answer)) {
            break;
        }
    }
    _exit(0);
}
