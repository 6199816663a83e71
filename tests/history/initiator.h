/* SPDX-License-Identifier: Apache-2.0 */
/* The initiator's own, shared by its files. One thread uses it. */
#ifndef KVT_TEST_HISTORY_INITIATOR_H
#define KVT_TEST_HISTORY_INITIATOR_H

#include "history.h"

/* A transfer that has not ended by then hangs. */
#define HANG_S 100

struct remote {
    kvt_peer peer;
    kvt_layout layout;
    uint32_t pool;     /* that its metadata names */
    uint32_t revision; /* of that pool then */
    bool known;
};

struct initiator {
    struct arena *arena;
    kvt_transport *t;
    kvt_layout layout;
    struct remote remotes[TARGETS];
    bool ruled;      /* some rule of the fault engine was in force */
    bool frozen;     /* all that is open is cancelled: nothing is posted */
    uint64_t chunks; /* had been posted then */
};

static inline struct totals *totals_of(const struct initiator *self)
{
    return &self->arena->head->totals;
}

static inline bool has_flag(const struct entry *entry, uint32_t flag)
{
    return (atomic_load(&entry->flags) & flag) != 0;
}

static inline void set_flag(struct entry *entry, uint32_t flag)
{
    atomic_fetch_or(&entry->flags, flag);
}

static inline bool is_open(const struct entry *entry)
{
    return atomic_load(&entry->state) == ENTRY_ACCEPTED;
}

/* initiator.c */
int initiator_open(struct initiator *self);
/* A burst: target, transfers, seed, enum act. */
int initiator_burst(struct initiator *self, const struct op *op);
uint64_t initiator_now_s(void);

/* initiator_end.c */
int initiator_confirm(struct initiator *self, uint32_t target);
int initiator_close(struct initiator *self, const struct op *op);

/* initiator_peers.c */
struct kvt_run initiator_run(uint64_t addr);
int initiator_add(struct initiator *self, uint32_t target);
/* With the newest metadata of the process that it is; another process is
 * another peer. */
int initiator_reload(struct initiator *self, uint32_t target);
int initiator_unload(struct initiator *self, uint32_t target);
int initiator_forget(struct initiator *self, uint32_t target);

/* initiator_results.c */
int initiator_poll(struct initiator *self);
void initiator_look(struct initiator *self, struct entry *entry);
int initiator_look_all(struct initiator *self);
void initiator_retire(struct entry *entry);
bool initiator_excused(const struct initiator *self, const struct entry *entry);
void initiator_freeze(struct initiator *self);
void initiator_check_frozen(struct initiator *self);

#endif /* KVT_TEST_HISTORY_INITIATOR_H */
