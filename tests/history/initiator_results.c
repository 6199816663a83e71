/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvt says of transfers, believed at once and compared with what it said
 * before.
 */
#include "initiator.h"

#define RESULTS 64

static void count_state(struct initiator *self, uint32_t state)
{
    struct totals *totals = totals_of(self);

    switch (state) {
    case KVT_DONE:
        totals->done++;
        break;
    case KVT_CANCELLED:
        totals->cancelled++;
        break;
    case KVT_TIMED_OUT:
        totals->timed_out++;
        break;
    default:
        totals->broken++;
        break;
    }
}

/* Lost for good may be what needs a process that was stopped, what a close had
 * no time for, and what the engine cannot tell: NIXL after the other side's
 * death, the fault engine by its rules. */
bool initiator_excused(const struct initiator *self, const struct entry *entry)
{
    return has_flag(entry, ENTRY_STOPPED | ENTRY_RULED | ENTRY_HURRIED) ||
           (has_flag(entry, ENTRY_KILLED) && self->arena->head->certain == 0);
}

static void count_lost(struct initiator *self, struct entry *entry)
{
    struct totals *totals = totals_of(self);
    const struct head *head = self->arena->head;

    if (has_flag(entry, ENTRY_LOST)) {
        return;
    }
    set_flag(entry, ENTRY_LOST);
    if (has_flag(entry, ENTRY_STOPPED)) {
        totals->lost_stopped++;
    } else if (has_flag(entry, ENTRY_KILLED) && head->certain == 0) {
        totals->lost_killed++;
    } else if (has_flag(entry, ENTRY_RULED)) {
        totals->lost_ruled++;
    } else if (has_flag(entry, ENTRY_HURRIED)) {
        totals->lost_hurried++;
    } else {
        totals->lost_slow++;
    }
    if (!initiator_excused(self, entry) && head->grace_ns == CERTAIN_GRACE_NS) {
        arena_finding(self->arena,
                      "serial %llu is lost, though nothing was stopped",
                      (unsigned long long)entry->serial);
    }
}

/* Gone for good as soon as kvt says nothing more of it. */
void initiator_retire(struct entry *entry)
{
    if (atomic_load(&entry->state) == ENTRY_CLAIMED &&
        has_flag(entry, ENTRY_HIDDEN | ENTRY_REPORTED)) {
        atomic_store(&entry->state, ENTRY_FREE);
    }
}

static void believe(struct initiator *self, struct entry *entry,
                    const struct kvt_result *result)
{
    bool quiescent = (result->flags & KVT_QUIESCENT) != 0;

    if (!quiescent && is_open(entry)) {
        ledger_half(self->arena, entry, result->flags);
    }
    if ((result->flags & KVT_FINISHED) == 0) {
        if (quiescent) {
            ledger_claim(self->arena, entry, false, result->bytes_done);
        }
        return;
    }
    if (result->state == KVT_LOST) {
        count_lost(self, entry);
    } else if (is_open(entry)) {
        count_state(self, result->state);
    }
    if (quiescent && is_open(entry)) {
        ledger_claim(self->arena, entry, result->state == KVT_DONE,
                     result->bytes_done);
    }
}

static void take_result(struct initiator *self, const struct kvt_result *result)
{
    struct entry *entry = &self->arena->head->entries[result->user_data - 1];

    if (result->user_data == 0 || result->user_data > ENTRIES ||
        entry->id != result->id) {
        arena_finding(self->arena, "a result of a transfer that is over");
        return;
    }
    if (has_flag(entry, ENTRY_REPORTED | ENTRY_HIDDEN | ENTRY_QUIET)) {
        arena_finding(self->arena, "serial %llu is reported %s",
                      (unsigned long long)entry->serial,
                      has_flag(entry, ENTRY_REPORTED) ? "twice"
                                                      : "against a promise");
        return;
    }
    set_flag(entry, ENTRY_REPORTED);
    if ((result->flags & KVT_QUIESCENT) == 0 && result->state != KVT_LOST) {
        arena_finding(self->arena,
                      "serial %llu is reported, neither quiescent nor lost",
                      (unsigned long long)entry->serial);
    }
    believe(self, entry, result);
    initiator_retire(entry);
}

int initiator_poll(struct initiator *self)
{
    struct kvt_result results[RESULTS];
    int count;

    do {
        count = kvt_poll(self->t, KVT_ANY, results, RESULTS);
        for (int i = 0; i < count; i++) {
            take_result(self, &results[i]);
        }
    } while (count == RESULTS);
    return count < 0 ? count : KVT_OK;
}

/* An unknown id is over: it was drained, hidden or released before. */
void initiator_look(struct initiator *self, struct entry *entry)
{
    struct kvt_result result;
    int code = kvt_status(self->t, entry->id, &result);

    if (code == KVT_OK) {
        believe(self, entry, &result);
        if ((result.flags & KVT_FINISHED) != 0 &&
            has_flag(entry, ENTRY_QUIET) && !has_flag(entry, ENTRY_HIDDEN)) {
            set_flag(entry, ENTRY_HIDDEN);
            code = kvt_release(self->t, entry->id);
            if (code != KVT_OK) {
                arena_finding(self->arena,
                              "a release of a finished transfer "
                              "says %s",
                              kvt_errname(code));
            }
        }
    } else if (has_flag(entry, ENTRY_HIDDEN | ENTRY_REPORTED)) {
        ledger_claim(self->arena, entry, false, 0);
    } else {
        arena_finding(self->arena,
                      "serial %llu is unknown to kvt_status(), but was "
                      "never reported",
                      (unsigned long long)entry->serial);
        set_flag(entry, ENTRY_HIDDEN);
    }
    initiator_retire(entry);
}

int initiator_look_all(struct initiator *self)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &self->arena->head->entries[i];

        if (is_open(entry)) {
            initiator_look(self, entry);
        }
    }
    return KVT_OK;
}

/* ------------------------------------------------------------------ frozen */

static uint64_t posted_chunks(const struct initiator *self)
{
    struct kvt_stats stats = {0};

    (void)kvt_stats(self->t, &stats, sizeof stats);
    return stats.chunks;
}

/* After a cancel: parts not yet posted are never posted. */
void initiator_freeze(struct initiator *self)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &self->arena->head->entries[i];

        if (is_open(entry) && !has_flag(entry, ENTRY_CANCELLED)) {
            return;
        }
    }
    self->chunks = posted_chunks(self);
    self->frozen = true;
}

void initiator_check_frozen(struct initiator *self)
{
    uint64_t now;

    if (!self->frozen) {
        return;
    }
    now = posted_chunks(self);
    totals_of(self)->frozen++;
    if (now != self->chunks) {
        arena_finding(self->arena,
                      "%llu parts were posted after everything was cancelled",
                      (unsigned long long)(now - self->chunks));
        self->frozen = false;
    }
}
