/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each transfer may touch, and the checks at its end.
 *
 * A block belongs to one transfer from before kvt is asked until kvt calls the
 * transfer quiescent. At that moment, and in this order: the destination is
 * checked (each word is what it was or what was sent; all of it is what was
 * sent when kvt says done), the destination is overwritten with a new seal,
 * the source with poison. From then on whatever changes a word is late: the
 * next look finds it.
 *
 * The initiator runs this, so that nothing comes between kvt's word and the
 * overwriting. It may be killed at any instruction: `state` and the blocks'
 * owners are written in an order that lets the checker take over.
 */
#include "history.h"

uint64_t next_random(uint64_t *seed)
{
    uint64_t mixed = *seed += UINT64_C(0x9e3779b97f4a7c15);

    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ mixed >> 31;
}

uint32_t random_below(uint64_t *seed, uint32_t limit)
{
    return (uint32_t)(next_random(seed) % limit);
}

/* ----------------------------------------------------------------- prepare */

static struct entry *free_entry(struct arena *arena)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        if (atomic_load(&arena->head->entries[i].state) == ENTRY_FREE) {
            return &arena->head->entries[i];
        }
    }
    return NULL;
}

/* Up to `count` blocks that nobody has: in a row as far as there are such, or
 * strewn over the pool. */
static uint32_t take_blocks(struct arena *arena, uint32_t pool,
                            const struct entry *entry, uint32_t count,
                            uint64_t *seed, uint16_t *ret)
{
    uint32_t owner = (uint32_t)(entry - arena->head->entries) + 1;
    uint32_t at = random_below(seed, POOL_BLOCKS);
    uint32_t step = random_below(seed, 2) == 0
                        ? 1
                        : random_below(seed, POOL_BLOCKS) | 1;
    uint32_t taken = 0;

    for (uint32_t i = 0; i < POOL_BLOCKS && taken < count; i++) {
        struct block *block = &arena->head->pools[pool].blocks[at];

        if (atomic_load(&block->owner) == 0 && block->taint == 0) {
            atomic_store(&block->owner, owner);
            ret[taken++] = (uint16_t)at;
        }
        at = (at + step) % POOL_BLOCKS;
    }
    return taken;
}

static void give_blocks(struct arena *arena, uint32_t pool,
                        const uint16_t *blocks, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < count; i++) {
        atomic_store(&arena->head->pools[pool].blocks[blocks[i]].owner, 0);
    }
}

static struct block *own_block(struct arena *arena, const struct entry *entry,
                               uint32_t i)
{
    return &arena->head->pools[OWN_POOL].blocks[entry->own[i]];
}

static struct block *their_block(struct arena *arena, const struct entry *entry,
                                 uint32_t i)
{
    return &arena->head->pools[entry->pool].blocks[entry->theirs[i]];
}

static uint64_t data_stamp(const struct entry *entry, uint32_t i)
{
    return stamp_make(entry->serial, DATA, entry->pool, entry->theirs[i]);
}

/* Sources hold what the destination is to hold. */
static void stamp_sources(struct arena *arena, const struct entry *entry)
{
    for (uint32_t i = 0; i < entry->count; i++) {
        uint64_t stamp = data_stamp(entry, i);

        stamp_fill(arena_block(arena, OWN_POOL, entry->own[i]), stamp);
        own_block(arena, entry, i)->base = stamp;
    }
}

struct entry *ledger_prepare(struct arena *arena, uint32_t op, uint32_t target,
                             uint32_t pool, uint32_t count, uint64_t seed)
{
    struct entry *entry = free_entry(arena);
    uint32_t own;
    uint32_t theirs;

    if (entry == NULL) {
        return NULL;
    }
    entry->op = op;
    entry->target = target;
    entry->pool = pool;
    entry->count = 0;
    entry->id = 0;
    entry->serial = arena_serial(arena);
    atomic_store(&entry->flags, 0);
    atomic_store(&entry->state, ENTRY_PREPARING);
    theirs = take_blocks(arena, pool, entry, count, &seed, entry->theirs);
    own = take_blocks(arena, OWN_POOL, entry, theirs, &seed, entry->own);
    give_blocks(arena, pool, entry->theirs, own, theirs);
    entry->count = own;
    if (own == 0) {
        atomic_store(&entry->state, ENTRY_FREE);
        return NULL;
    }
    if (op == KVT_OP_WRITE) {
        stamp_sources(arena, entry);
    }
    return entry;
}

/* --------------------------------------------------------------------- end */

static bool is_shut(const struct arena *arena, const struct entry *entry)
{
    return entry->revision != arena->head->pools[entry->pool].revision;
}

/* Whether its destination was sealed while it was in flight. */
static bool is_closed(const struct arena *arena, const struct entry *entry)
{
    return is_shut(arena, entry) ||
           (atomic_load(&entry->flags) & ENTRY_PEER_FINAL) != 0;
}

/* What has landed of one block, in bytes. */
static uint64_t check_landed(struct arena *arena, const struct entry *entry,
                             uint32_t i, bool done)
{
    bool write = entry->op == KVT_OP_WRITE;
    uint32_t pool = write ? entry->pool : OWN_POOL;
    uint32_t index = write ? entry->theirs[i] : entry->own[i];
    const struct block *target = &arena->head->pools[pool].blocks[index];
    uint64_t sent = write ? data_stamp(entry, i)
                          : their_block(arena, entry, i)->base;
    uint64_t landed;
    uint32_t first = 0;
    uint64_t wrong;

    if (write && is_closed(arena, entry)) {
        sent = 0; /* since it was sealed nothing may land */
    }
    wrong = stamp_wrong(arena_block(arena, pool, index), target->base, sent,
                        &landed, &first);
    if (wrong > 0) {
        arena->head->totals.late_bytes += wrong;
        arena_finding(
            arena,
            "at the end of serial %llu: pool %u, block %u, word %u "
            "holds %llx, neither %llx, which stood there, nor %llx, "
            "which was sent",
            (unsigned long long)entry->serial, pool, index, first,
            (unsigned long long)arena_block(arena, pool, index)[first],
            (unsigned long long)target->base + first,
            (unsigned long long)(sent == 0 ? 0 : sent + first));
    } else if (done && landed != BLOCK_WORDS && !is_closed(arena, entry)) {
        arena_finding(arena,
                      "serial %llu is done, but pool %u, block %u has %llu of "
                      "its %u words",
                      (unsigned long long)entry->serial, pool, index,
                      (unsigned long long)landed, BLOCK_WORDS);
    }
    return landed * sizeof(uint64_t);
}

/* The source changes for anybody who still reads it. */
static void poison(struct arena *arena, const struct entry *entry, uint32_t i)
{
    uint64_t stamp = stamp_make(entry->serial, POISON, entry->pool,
                                entry->theirs[i]);

    stamp_fill(arena_block(arena, OWN_POOL, entry->own[i]), stamp);
    own_block(arena, entry, i)->base = stamp;
}

static void release_blocks(struct arena *arena, const struct entry *entry)
{
    give_blocks(arena, entry->pool, entry->theirs, 0, entry->count);
    give_blocks(arena, OWN_POOL, entry->own, 0, entry->count);
}

/* First every seal, then every poison: a copy that goes on shows by either. */
static void overwrite(struct arena *arena, const struct entry *entry)
{
    for (uint32_t i = 0; i < entry->count; i++) {
        stamp_seal(arena, entry->pool, entry->theirs[i]);
    }
    for (uint32_t i = 0; i < entry->count; i++) {
        if (entry->op == KVT_OP_WRITE) {
            poison(arena, entry, i);
        } else {
            stamp_seal(arena, OWN_POOL, entry->own[i]);
        }
    }
}

void ledger_claim(struct arena *arena, struct entry *entry, bool done,
                  uint64_t bytes_done)
{
    bool unknown = entry->op == KVT_OP_READ && is_shut(arena, entry);
    uint64_t landed = 0;

    atomic_store(&entry->state, ENTRY_CLAIMING);
    for (uint32_t i = 0; i < entry->count && !unknown; i++) {
        landed += check_landed(arena, entry, i, done);
    }
    if (landed < bytes_done && !is_closed(arena, entry)) {
        arena_finding(arena,
                      "serial %llu: %llu bytes are said to have landed, %llu "
                      "have",
                      (unsigned long long)entry->serial,
                      (unsigned long long)bytes_done,
                      (unsigned long long)landed);
    }
    overwrite(arena, entry);
    arena->head->totals.claimed += entry->count;
    if ((atomic_load(&entry->flags) & ENTRY_LOST) != 0) {
        arena->head->totals.lost_proven++;
    }
    release_blocks(arena, entry);
    atomic_store(&entry->state, ENTRY_CLAIMED);
}

void ledger_half(struct arena *arena, struct entry *entry, uint32_t flags)
{
    uint32_t known = atomic_load(&entry->flags);
    bool seal = (flags & KVT_PEER_FINAL) != 0 &&
                (known & ENTRY_PEER_FINAL) == 0 && !is_shut(arena, entry) &&
                arena->head->pools[entry->pool].state == POOL_LIVE;
    bool spoil = (flags & KVT_LOCAL_FINAL) != 0 &&
                 (known & ENTRY_LOCAL_FINAL) == 0;

    if (entry->op != KVT_OP_WRITE || (!seal && !spoil)) {
        return;
    }
    arena->head->totals.halves++;
    atomic_store(&entry->state, ENTRY_CLAIMING);
    for (uint32_t i = 0; i < entry->count; i++) {
        if (seal) {
            (void)check_landed(arena, entry, i, false);
            stamp_seal(arena, entry->pool, entry->theirs[i]);
        }
        if (spoil) {
            poison(arena, entry, i);
        }
    }
    atomic_fetch_or(&entry->flags, (seal ? ENTRY_PEER_FINAL : 0u) |
                                       (spoil ? ENTRY_LOCAL_FINAL : 0u));
    atomic_store(&entry->state, ENTRY_ACCEPTED);
}

void ledger_refused(struct arena *arena, struct entry *entry)
{
    ledger_claim(arena, entry, false, 0);
    atomic_store(&entry->state, ENTRY_FREE);
}

/* ------------------------------------------------------------------- bury */

/* A write whose initiator died: its bytes are where they are; or, over engines
 * that leave some on their way, they may land for as long as the target lives,
 * but no others. */
static void bury_write(struct arena *arena, const struct entry *entry)
{
    for (uint32_t i = 0; i < entry->count; i++) {
        struct block *block = their_block(arena, entry, i);

        (void)check_landed(arena, entry, i, false);
        if (arena->head->certain != 0) {
            stamp_seal(arena, entry->pool, entry->theirs[i]);
        } else if (!is_closed(arena, entry)) {
            block->taint = data_stamp(entry, i);
        }
    }
}

void ledger_bury(struct arena *arena)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &arena->head->entries[i];

        switch (atomic_load(&entry->state)) {
        case ENTRY_ASKED:
        case ENTRY_ACCEPTED:
            if (entry->op == KVT_OP_WRITE) {
                bury_write(arena, entry);
            }
            break;
        case ENTRY_CLAIMING:
            for (uint32_t k = 0; k < entry->count; k++) {
                stamp_seal(arena, entry->pool, entry->theirs[k]);
            }
            break;
        default:
            break;
        }
        atomic_store(&entry->state, ENTRY_FREE);
    }
    for (uint32_t pool = 1; pool < POOLS; pool++) {
        for (uint32_t i = 0; i < POOL_BLOCKS; i++) {
            atomic_store(&arena->head->pools[pool].blocks[i].owner, 0);
        }
    }
    arena_reset_pool(arena, OWN_POOL);
}

/* ------------------------------------------------------------------ looking */

static bool is_flying(const struct entry *entry)
{
    uint32_t state = atomic_load(&entry->state);

    return state == ENTRY_ASKED || state == ENTRY_ACCEPTED;
}

bool ledger_dead(const struct arena *arena, const struct entry *entry)
{
    return arena->head->pools[entry->pool].state == POOL_RETIRED;
}

uint32_t ledger_flying(const struct arena *arena, uint32_t process)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < ENTRIES; i++) {
        const struct entry *entry = &arena->head->entries[i];

        count += is_flying(entry) &&
                 (atomic_load(&entry->flags) & ENTRY_LOST) == 0 &&
                 (process == INITIATOR ||
                  arena->head->current[process] == entry->pool);
    }
    return count;
}

void ledger_flag(struct arena *arena, uint32_t process, uint32_t flag)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &arena->head->entries[i];

        if (is_flying(entry) &&
            (process == INITIATOR || process == entry->target)) {
            atomic_fetch_or(&entry->flags, flag);
        }
    }
}

bool ledger_claiming(const struct arena *arena)
{
    for (uint32_t i = 0; i < ENTRIES; i++) {
        if (atomic_load(&arena->head->entries[i].state) == ENTRY_CLAIMING) {
            return true;
        }
    }
    return false;
}

bool ledger_uses(const struct arena *arena, uint32_t pool)
{
    for (uint32_t i = 0; i < POOL_BLOCKS; i++) {
        if (atomic_load(&arena->head->pools[pool].blocks[i].owner) != 0) {
            return true;
        }
    }
    return false;
}
