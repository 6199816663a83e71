/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The history checker: what its four processes share.
 *
 *   checker ---- commands ----> initiator ---- kvt ----> target 0, target 1
 *      |  kills, stops, looks       |                        |
 *      +------------ arena: a memfd that all of them map ----+
 *
 * The arena holds every byte that kvt may move (the pools), and the ledger: what
 * each block must hold now, and which transfer may touch it. It outlives each
 * process but the checker, so what a killed initiator had in flight is known,
 * and a stopped one's memory can be looked at.
 *
 * Each 8-byte word of each block is a stamp: who wrote it (a serial that no two
 * acts share), what it is (seal, data, poison), and for which word of which
 * block of which pool it is meant. So a word says of itself whether it is late
 * or in the wrong place.
 */
#ifndef KVT_TEST_HISTORY_H
#define KVT_TEST_HISTORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include <kvt/kvt.h>

#define WORD_BITS 10u
#define BLOCK_BITS 9u
#define POOL_BITS 5u
#define KIND_BITS 2u
#define BLOCK_WORDS (1u << WORD_BITS)
#define BLOCK_BYTES (8u * BLOCK_WORDS)
#define POOL_BLOCKS (1u << BLOCK_BITS)
#define POOL_BYTES ((size_t)POOL_BLOCKS * BLOCK_BYTES)
#define POOLS (1u << POOL_BITS)
#define OWN_POOL 0u /* the initiator's; the others are the targets' */
#define TARGETS 2u
#define INITIATOR 2u /* a process's number, after the targets' */
#define PROCESSES 3u
#define ENTRIES 1024u
#define COUNT_MAX 128u /* blocks of a transfer */
#define METADATA_MAX 65536u
#define ENGINE_MAX 128u
#define TEXT_MAX 400u
/* Nothing of the local engine's can be held up but by stopping its process. */
#define CERTAIN_GRACE_NS UINT64_C(60000000000)
/* Elsewhere something has to be lost, and a slow machine may lose more. */
#define SHORT_GRACE_NS UINT64_C(300000000)

enum kind { SEAL = 1, DATA = 2, POISON = 3 };

/* One block. The owner is the entry that may touch it, plus 1. */
struct block {
    uint64_t base;  /* word i holds base + i */
    uint64_t taint; /* or taint + i, if not 0: an unproven writer died */
    _Atomic uint32_t owner;
    uint32_t reserved;
};

enum pool_state { POOL_UNUSED, POOL_LIVE, POOL_RETIRED };

struct pool {
    uint32_t state;    /* checker: enum pool_state */
    uint32_t target;   /* checker */
    uint32_t revision; /* target: how often its memory was taken back */
    uint32_t metadata_length;
    uint64_t addr; /* in its target */
    unsigned char metadata[METADATA_MAX];
    struct block blocks[POOL_BLOCKS];
};

enum entry_state {
    ENTRY_FREE,
    ENTRY_PREPARING, /* its blocks are taken, nothing is asked of kvt */
    ENTRY_ASKED,     /* perhaps accepted */
    ENTRY_ACCEPTED,  /* kvt has its blocks */
    ENTRY_CLAIMING,  /* kvt said quiescent: they are checked and overwritten */
    ENTRY_CLAIMED    /* its result is still to be drained */
};

enum entry_flag {
    ENTRY_HIDDEN = 1u << 0,   /* kvt may not report it */
    ENTRY_REPORTED = 1u << 1, /* it has */
    ENTRY_QUIET = 1u << 2,    /* KVT_XFER_NO_EVENT */
    ENTRY_LOST = 1u << 3,
    ENTRY_STOPPED = 1u << 4,     /* a process it needs was stopped */
    ENTRY_KILLED = 1u << 5,      /* its target was killed */
    ENTRY_RULED = 1u << 6,       /* a rule of the fault engine was in force */
    ENTRY_CANCELLED = 1u << 7,   /* nothing of it may be posted any more */
    ENTRY_LOCAL_FINAL = 1u << 8, /* a write's source is poisoned already */
    ENTRY_PEER_FINAL = 1u << 9,  /* its destination is sealed already */
    ENTRY_CONFIRMED = 1u << 10,  /* kvt was told that its target is dead */
    ENTRY_HURRIED = 1u << 11     /* a close had no time for it */
};

/* One transfer of the initiator that lives now. */
struct entry {
    _Atomic uint32_t state;
    _Atomic uint32_t flags;
    uint32_t op;
    uint32_t target;
    uint32_t pool;
    uint32_t revision; /* of the pool, as its metadata said */
    uint32_t count;
    uint64_t serial;
    uint64_t id;
    uint64_t peer;
    uint16_t own[COUNT_MAX];
    uint16_t theirs[COUNT_MAX];
};

struct totals {
    uint64_t writes;
    uint64_t reads;
    uint64_t refused;
    uint64_t bytes;
    uint64_t claimed; /* blocks, checked and overwritten on both sides */
    uint64_t done;
    uint64_t cancelled;
    uint64_t timed_out;
    uint64_t broken; /* rejected, failed, disconnected */
    uint64_t cancels;
    uint64_t cancels_flying; /* transfers in flight at them */
    uint64_t cancels_moving; /* of those, cancelled ones that had been posted */
    uint64_t frozen;         /* looks at whether anything was posted since */
    uint64_t kills[PROCESSES];
    uint64_t kills_flying;
    uint64_t died; /* targets that a library killed, over NIXL */
    uint64_t stops[PROCESSES];
    uint64_t stops_flying;
    uint64_t changes; /* adds, reloads, unloads, removes of peers */
    uint64_t changes_failed;
    uint64_t revokes;
    uint64_t revokes_busy;
    uint64_t halves;          /* writes that were final for one side first */
    uint64_t confirms;        /* of peers whose process was dead */
    uint64_t confirms_flying; /* transfers over them at that moment */
    uint64_t confirms_lost;   /* of those, lost ones that it proved */
    uint64_t closes;
    uint64_t closes_flying;
    uint64_t closes_busy; /* the initiator had to be started anew */
    uint64_t closes_held; /* transfers that were not quiescent then */
    uint64_t looks;
    uint64_t lost_stopped;
    uint64_t lost_killed;
    uint64_t lost_ruled;
    uint64_t lost_hurried;
    uint64_t lost_slow;   /* nothing was stopped: must be proven later */
    uint64_t lost_proven; /* of all of these, proven later */
    uint64_t late_bytes;
    uint64_t findings;
};

/* What the arena starts with. Written by one process at a time: the checker
 * waits for the others' answers, but for `entry` and `block` (see there). */
struct head {
    char engine[ENGINE_MAX];
    uint32_t by_fd;      /* 1 << process: its region has a descriptor */
    uint32_t certain;    /* the engine's writers end with their process */
    uint32_t can_revoke; /* deregister shuts the peers out */
    uint64_t grace_ns;
    uint32_t has_rules;        /* the fault engine */
    uint32_t stopped;          /* 1 << process */
    uint32_t rules;            /* some are in force */
    uint32_t current[TARGETS]; /* the pool of the target that runs now */
    _Atomic uint64_t serial;
    struct totals totals;
    char finding[TEXT_MAX]; /* the first */
    struct pool pools[POOLS];
    struct entry entries[ENTRIES];
};

struct arena {
    int fd;
    struct head *head;
    unsigned char *memory; /* of pool 0; the others follow */
};

/* arena.c */
bool arena_create(struct arena *arena);
bool arena_map(struct arena *arena, int fd);
void arena_destroy(struct arena *arena);
off_t arena_offset(uint32_t pool);
uint64_t *arena_block(const struct arena *arena, uint32_t pool, uint32_t block);
__attribute__((format(printf, 2, 3))) void arena_finding(struct arena *arena,
                                                         const char *format,
                                                         ...);
uint64_t arena_serial(struct arena *arena);
void arena_reset_pool(struct arena *arena, uint32_t pool);
/* Looks at each block that no transfer may touch. */
void arena_look(struct arena *arena, const char *when);

uint64_t stamp_make(uint64_t serial, enum kind kind, uint32_t pool,
                    uint32_t block);
void stamp_fill(uint64_t *words, uint64_t stamp);
/* The bytes that are part of neither stamp; words of `other` in *ret_other. A
 * writer that breaks off may leave a word of both. */
uint64_t stamp_wrong(const uint64_t *words, uint64_t stamp, uint64_t other,
                     uint64_t *ret_other, uint32_t *ret_first);
void stamp_seal(struct arena *arena, uint32_t pool, uint32_t block);

/* ledger.c */
uint64_t next_random(uint64_t *seed);
uint32_t random_below(uint64_t *seed, uint32_t limit);
/* NULL when there is no place or no block for it. */
struct entry *ledger_prepare(struct arena *arena, uint32_t op, uint32_t target,
                             uint32_t pool, uint32_t count, uint64_t seed);
/* kvt refused it: nothing of it may ever land. */
void ledger_refused(struct arena *arena, struct entry *entry);
/* kvt says that it is quiescent. `done`: and that all of it has landed. */
void ledger_claim(struct arena *arena, struct entry *entry, bool done,
                  uint64_t bytes_done);
/* kvt says so of one side: that one is overwritten before the other. */
void ledger_half(struct arena *arena, struct entry *entry, uint32_t flags);
/* The initiator is dead. */
void ledger_bury(struct arena *arena);
/* Whether its target is dead for certain. */
bool ledger_dead(const struct arena *arena, const struct entry *entry);
uint32_t ledger_flying(const struct arena *arena, uint32_t process);
void ledger_flag(struct arena *arena, uint32_t process, uint32_t flag);
bool ledger_claiming(const struct arena *arena);
bool ledger_uses(const struct arena *arena, uint32_t pool);

/* wire.c */
enum verb {
    VERB_OPEN,  /* target: pool; returns when it can be imported */
    VERB_WRITE, /* target, count, seed, timeout in us */
    VERB_READ,
    VERB_BURST,  /* target, transfers, seed, enum act */
    VERB_CANCEL, /* mode, seed, percent */
    VERB_POLL,
    VERB_STATUS,
    VERB_SETTLE, /* 1 << target of those that are stopped */
    VERB_RULES,  /* seed; 0: none */
    VERB_ADD,    /* target */
    VERB_RELOAD,
    VERB_UNLOAD,
    VERB_REMOVE,
    VERB_REVOKE,  /* target */
    VERB_CONFIRM, /* target: it was killed, and kvt is told so */
    VERB_CLOSE,   /* target, transfers, seed, timeout in us */
    /* The checker's own. */
    VERB_KILL, /* process, transfers sent before it, seed */
    VERB_STOP, /* as kill */
    VERB_CONT,
    VERB_LOOK,
    VERB_COUNT
};

enum act {
    ACT_NONE,
    ACT_CANCEL_WAIT,
    ACT_CANCEL_IMMEDIATE,
    ACT_RELEASE,
    ACT_REMOVE,
    ACT_UNLOAD,
    ACT_RELOAD,
    ACT_COUNT
};

#define ARGUMENTS 4u

struct op {
    uint32_t verb;
    uint32_t unused; /* what is sent has no padding */
    uint64_t arg[ARGUMENTS];
};

struct answer {
    uint32_t verb;
    int32_t code;
};

bool wire_send(int fd, const void *message, size_t length);
/* 1: received; 0: nothing for `wait_ms` (-1: for ever); below 0: the other side
 * is gone. */
int wire_receive(int fd, void *message, size_t length, int wait_ms);
pid_t wire_start(const struct arena *arena, const char *role, int *ret_fd);

/* initiator.c, target.c: never return. What is sent to an initiator that has
 * answered a close with KVT_EBUSY is not read. */
_Noreturn void initiator_main(struct arena *arena, int fd);
_Noreturn void target_main(struct arena *arena, int fd);

/* ops.c */
struct history {
    char engine[ENGINE_MAX];
    uint32_t by_fd;
    uint32_t count;
    struct op *ops;
};

bool history_make(struct history *history, const char *engine, uint64_t seed,
                  uint32_t count);
bool history_copy(struct history *to, const struct history *from);
void history_free(struct history *history);
void history_print(const struct history *history, FILE *file);
bool history_read(struct history *history, FILE *file);

/* checker.c */
struct outcome {
    bool failed;
    uint32_t skipped; /* operations that had nothing to work on */
    char finding[TEXT_MAX];
    struct totals totals;
};

/* False when it could not be run at all. */
bool checker_run(const struct history *history, struct outcome *ret);

/* shrink.c: *history, which fails, without what is not needed for that. */
void shrink(struct history *history, uint32_t runs);

#endif /* KVT_TEST_HISTORY_H */
