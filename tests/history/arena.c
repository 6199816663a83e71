/* SPDX-License-Identifier: Apache-2.0 */
/* The arena, its stamps, and the look at what nobody may touch. */
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "history.h"

#define PAGE 4096u

static size_t head_bytes(void)
{
    return (sizeof(struct head) + PAGE - 1) / PAGE * PAGE;
}

static size_t arena_bytes(void)
{
    return head_bytes() + (size_t)POOLS * POOL_BYTES;
}

bool arena_map(struct arena *arena, int fd)
{
    void *at = mmap(NULL, arena_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                    0);

    if (at == MAP_FAILED) {
        return false;
    }
    arena->fd = fd;
    arena->head = at;
    arena->memory = (unsigned char *)at + head_bytes();
    return true;
}

bool arena_create(struct arena *arena)
{
    int fd = memfd_create("history", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0) {
        return false;
    }
    /* Sealed: a peer may then write it by memcpy. */
    if (ftruncate(fd, (off_t)arena_bytes()) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0 ||
        !arena_map(arena, fd)) {
        (void)close(fd);
        return false;
    }
    return true;
}

void arena_destroy(struct arena *arena)
{
    (void)munmap(arena->head, arena_bytes());
    (void)close(arena->fd);
}

off_t arena_offset(uint32_t pool)
{
    return (off_t)(head_bytes() + (size_t)pool * POOL_BYTES);
}

uint64_t *arena_block(const struct arena *arena, uint32_t pool, uint32_t block)
{
    void *at = arena->memory + (size_t)pool * POOL_BYTES +
               (size_t)block * BLOCK_BYTES;

    return at;
}

void arena_finding(struct arena *arena, const char *format, ...)
{
    va_list list;

    if (arena->head->totals.findings++ == 0) {
        va_start(list, format);
        (void)vsnprintf(arena->head->finding, TEXT_MAX, format, list);
        va_end(list);
    }
}

uint64_t arena_serial(struct arena *arena)
{
    return atomic_fetch_add(&arena->head->serial, 1) + 1;
}

/* ------------------------------------------------------------------ stamps */

uint64_t stamp_make(uint64_t serial, enum kind kind, uint32_t pool,
                    uint32_t block)
{
    uint64_t stamp = serial << KIND_BITS | (uint64_t)kind;

    stamp = stamp << POOL_BITS | pool;
    stamp = stamp << BLOCK_BITS | block;
    return stamp << WORD_BITS;
}

void stamp_fill(uint64_t *words, uint64_t stamp)
{
    for (uint32_t i = 0; i < BLOCK_WORDS; i++) {
        words[i] = stamp + i;
    }
}

static bool is_torn(uint64_t word, uint64_t one, uint64_t other)
{
    for (uint32_t shift = 0; shift < 64; shift += 8) {
        uint8_t byte = (uint8_t)(word >> shift);

        if (byte != (uint8_t)(one >> shift) &&
            byte != (uint8_t)(other >> shift)) {
            return false;
        }
    }
    return true;
}

uint64_t stamp_wrong(const uint64_t *words, uint64_t stamp, uint64_t other,
                     uint64_t *ret_other, uint32_t *ret_first)
{
    uint64_t wrong = 0;
    uint64_t others = 0;

    for (uint32_t i = 0; i < BLOCK_WORDS; i++) {
        uint64_t word = words[i];

        if (word == stamp + i) {
            continue;
        }
        if (other != 0 && word == other + i) {
            others++;
        } else if (other == 0 || !is_torn(word, stamp + i, other + i)) {
            if (wrong == 0) {
                *ret_first = i;
            }
            wrong += sizeof word;
        }
    }
    *ret_other = others;
    return wrong;
}

void stamp_seal(struct arena *arena, uint32_t pool, uint32_t block)
{
    struct block *entry = &arena->head->pools[pool].blocks[block];
    uint64_t stamp = stamp_make(arena_serial(arena), SEAL, pool, block);

    stamp_fill(arena_block(arena, pool, block), stamp);
    entry->base = stamp;
    entry->taint = 0;
}

void arena_reset_pool(struct arena *arena, uint32_t pool)
{
    for (uint32_t i = 0; i < POOL_BLOCKS; i++) {
        stamp_seal(arena, pool, i);
        atomic_store(&arena->head->pools[pool].blocks[i].owner, 0);
    }
}

/* -------------------------------------------------------------------- look */

static const char *kind_name(uint64_t word)
{
    static const char *const names[] = {"nothing", "a seal", "data", "poison"};

    return names[word >> (WORD_BITS + BLOCK_BITS + POOL_BITS) &
                 ((1u << KIND_BITS) - 1)];
}

static unsigned long long serial_of(uint64_t word)
{
    return word >> (WORD_BITS + BLOCK_BITS + POOL_BITS + KIND_BITS);
}

static void tell_late(struct arena *arena, uint32_t pool, uint32_t block,
                      uint32_t word, const char *when)
{
    uint64_t found = arena_block(arena, pool, block)[word];
    uint64_t base = arena->head->pools[pool].blocks[block].base;

    arena_finding(arena,
                  "%s: pool %u, block %u, word %u holds %s of serial %llu "
                  "(for pool %u, block %u) in place of %s of serial %llu",
                  when, pool, block, word, kind_name(found), serial_of(found),
                  (unsigned)(found >> (WORD_BITS + BLOCK_BITS) & (POOLS - 1)),
                  (unsigned)(found >> WORD_BITS & (POOL_BLOCKS - 1)),
                  kind_name(base), serial_of(base));
}

static void look_at(struct arena *arena, uint32_t pool, uint32_t index,
                    const char *when)
{
    const struct block *block = &arena->head->pools[pool].blocks[index];
    uint32_t first = 0;
    uint64_t others;
    uint64_t wrong;

    if (atomic_load(&block->owner) != 0) {
        return;
    }
    wrong = stamp_wrong(arena_block(arena, pool, index), block->base,
                        block->taint, &others, &first);
    if (wrong > 0) {
        arena->head->totals.late_bytes += wrong;
        tell_late(arena, pool, index, first, when);
    }
}

/* The memory of a dead target is nobody's, and its death is proof enough that
 * nothing is harmed any more; it is only here that its pages live on. The local
 * engine's own copies must be over all the same. */
static bool is_watched(const struct arena *arena, uint32_t pool)
{
    uint32_t state = arena->head->pools[pool].state;

    return state == POOL_LIVE ||
           (state == POOL_RETIRED && arena->head->certain != 0);
}

void arena_look(struct arena *arena, const char *when)
{
    arena->head->totals.looks++;
    for (uint32_t pool = 0; pool < POOLS; pool++) {
        if (!is_watched(arena, pool)) {
            continue;
        }
        for (uint32_t i = 0; i < POOL_BLOCKS; i++) {
            look_at(arena, pool, i, when);
        }
    }
}
