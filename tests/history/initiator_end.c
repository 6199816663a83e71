/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a target, which the caller knows of and tells kvt, and the end of
 * the transport itself, with transfers in flight. What either proves is
 * believed at once, as any other word of kvt's.
 */
#include <poll.h>

#include "initiator.h"

/* ---------------------------------------------------------- confirmed death */

/* True: it lives on, or has nothing that could be proven. */
static bool is_open_at(const struct initiator *self, const struct entry *entry,
                       uint32_t target)
{
    return is_open(entry) && entry->target == target &&
           ledger_dead(self->arena, entry);
}

static void tell_death(struct initiator *self, kvt_peer peer)
{
    int code = kvt_peer_confirm_dead(self->t, peer);

    totals_of(self)->confirms++;
    /* A peer that was removed is forgotten with its last transfer. */
    if (code != KVT_OK && code != KVT_ENOENT) {
        arena_finding(self->arena, "a confirmed death ends with %s",
                      kvt_errname(code));
    }
}

/* The transfers of a dead target, each peer's confirmed once. */
static void confirm_entries(struct initiator *self, uint32_t target)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];
        bool told = false;

        if (!is_open_at(self, entry, target)) {
            continue;
        }
        for (uint32_t k = 0; k < i && !told; k++) {
            const struct entry *other = &self->arena->head->entries[k];

            told = is_open(other) && other->peer == entry->peer &&
                   has_flag(other, ENTRY_CONFIRMED);
        }
        if (!told) {
            tell_death(self, entry->peer);
        }
        set_flag(entry, ENTRY_CONFIRMED);
        totals_of(self)->confirms_flying++;
    }
}

/* A read writes here, and the target's death does not end that. */
static bool is_proven(struct initiator *self, uint32_t target)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (!is_open(entry) || !has_flag(entry, ENTRY_CONFIRMED)) {
            continue;
        }
        initiator_look(self, entry);
        if (!is_open(entry)) {
            totals_of(self)->confirms_lost += has_flag(entry, ENTRY_LOST);
        } else if (entry->op == KVT_OP_WRITE && entry->target == target) {
            return false;
        }
    }
    return true;
}

/* Only of a process that the checker has buried: what runs under its name now
 * is another peer. */
int initiator_confirm(struct initiator *self, uint32_t target)
{
    const struct remote *remote = &self->remotes[target];
    uint64_t end = initiator_now_s() + HANG_S;

    confirm_entries(self, target);
    if (remote->known && remote->pool != self->arena->head->current[target]) {
        tell_death(self, remote->peer);
    }
    while (!is_proven(self, target)) {
        if (initiator_now_s() > end) {
            arena_finding(self->arena, "a write is not quiescent, though its "
                                       "target's death is confirmed");
            return KVT_ETIMEDOUT;
        }
        (void)poll(NULL, 0, 1);
    }
    return KVT_OK;
}

/* -------------------------------------------------------------------- close */

static void claim_open(struct initiator *self)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (is_open(entry)) {
            ledger_claim(self->arena, entry, false, 0);
            initiator_retire(entry);
        }
    }
}

static uint32_t count_open(const struct initiator *self)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < ENTRIES; i++) {
        count += is_open(&self->arena->head->entries[i]);
    }
    return count;
}

/* What nobody is told of is asked for. */
static void ask_for_quiet(struct initiator *self)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (atomic_load(&entry->state) == ENTRY_CLAIMED &&
            has_flag(entry, ENTRY_QUIET)) {
            initiator_look(self, entry);
        }
    }
}

/* All memory is ours again: half of the time it is overwritten before anything
 * else is asked. Each transfer is over, and says so. */
static int end_well(struct initiator *self, bool at_once)
{
    struct kvt_stats stats = {0};
    int code;

    if (at_once) {
        claim_open(self);
    }
    code = initiator_poll(self);
    (void)initiator_look_all(self);
    (void)kvt_stats(self->t, &stats, sizeof stats);
    if (stats.quarantined > 0 || count_open(self) > 0) {
        arena_finding(self->arena,
                      "closed with KVT_OK, and %u transfers are not quiescent, "
                      "%llu quarantined",
                      count_open(self), (unsigned long long)stats.quarantined);
    }
    ask_for_quiet(self);
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (atomic_load(&entry->state) != ENTRY_FREE) {
            arena_finding(self->arena,
                          "closed, and serial %llu was never reported",
                          (unsigned long long)entry->serial);
            atomic_store(&entry->state, ENTRY_FREE);
        }
    }
    kvt_free(self->t);
    *self = (struct initiator){.arena = self->arena};
    return code == KVT_OK ? initiator_open(self) : code;
}

/* Some memory may never be used again: the process ends for that. What kvt
 * calls quiescent is ours all the same. The fault engine is busy for what a rule
 * keeps for ever, though kvt knows by now that it is over. */
static void end_busy(struct initiator *self, const struct kvt_error *err,
                     bool had_time)
{
    bool excused = !had_time || self->ruled ||
                   self->arena->head->certain == 0 ||
                   self->arena->head->stopped != 0;

    (void)initiator_poll(self);
    (void)initiator_look_all(self);
    totals_of(self)->closes_busy++;
    totals_of(self)->closes_held += count_open(self);
    if (!excused) {
        arena_finding(self->arena,
                      "a close had time and nothing in its way: %.200s",
                      err->text);
    }
}

/* With less than this a copy may be cut short. */
#define ENOUGH_US 1000000u

int initiator_close(struct initiator *self, const struct op *op)
{
    const struct op burst = {
        .verb = VERB_BURST,
        .arg = {op->arg[0] % TARGETS, op->arg[1], op->arg[2], ACT_NONE}};
    struct kvt_error err = {.text = ""};
    int code = initiator_burst(self, &burst);

    if (code != KVT_OK) {
        return code;
    }
    initiator_check_frozen(self);
    totals_of(self)->closes++;
    totals_of(self)->closes_flying += ledger_flying(self->arena, INITIATOR);
    if (op->arg[3] < ENOUGH_US) {
        ledger_flag(self->arena, INITIATOR, ENTRY_HURRIED);
    }
    code = kvt_close(self->t, op->arg[3] * 1000, &err);
    if (code == KVT_OK) {
        return end_well(self, op->arg[2] % 2 == 0);
    }
    if (code == KVT_EBUSY) {
        end_busy(self, &err, op->arg[3] >= ENOUGH_US);
    }
    return code;
}
