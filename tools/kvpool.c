/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contents. A slot's bytes come from one 64-bit key: word w of the slot's
 * piece in region r is a scrambled key + (r, w). So a page that lands in the
 * wrong slot, region or place, twice, in part or not at all changes the
 * checksum, and whoever has not the key cannot make the bytes.
 */
#include "kvpool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "cli.h"
#include "slots.h"

#define GUARD_BYTES UINT64_C(4096)
#define GUARD_BYTE 0xa5

/* Bytes made at a time when only their checksum is wanted: fits the L1. */
#define SCRATCH_BYTES 8192u

static uint64_t round_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) / to * to;
}

static uint64_t region_bytes(const struct geometry *geometry, uint64_t slots)
{
    return slots * geometry_piece_bytes(geometry);
}

static uint64_t stride_of(const struct geometry *geometry, uint64_t slots)
{
    return round_up(region_bytes(geometry, slots), GUARD_BYTES) + GUARD_BYTES;
}

uint64_t kvpool_slots_in(const struct geometry *geometry, uint64_t memory)
{
    uint64_t share;

    if (memory < GUARD_BYTES) {
        return 0;
    }
    /* Of each region, whole pages of memory and one guard. */
    share = (memory - GUARD_BYTES) / geometry->regions / GUARD_BYTES *
            GUARD_BYTES;
    if (share < GUARD_BYTES) {
        return 0;
    }
    return (share - GUARD_BYTES) / geometry_piece_bytes(geometry);
}

uint64_t kvpool_region_offset(const struct geometry *geometry, uint64_t slots,
                              uint64_t index)
{
    return GUARD_BYTES + index * stride_of(geometry, slots);
}

uint64_t kvpool_index(const struct geometry *geometry, uint64_t slots,
                      uint64_t region, uint64_t slot, uint64_t page)
{
    return (region * slots + slot) * geometry->pages + page;
}

/* The bytes between the end of region `index` and the next region. */
static unsigned char *guard_after(const struct kvpool *pool, uint64_t index,
                                  uint64_t *ret_length)
{
    uint64_t used = region_bytes(&pool->geometry, pool->slots);

    *ret_length = pool->region_stride - used;
    return pool->base +
           kvpool_region_offset(&pool->geometry, pool->slots, index) + used;
}

static void fill_guards(struct kvpool *pool)
{
    memset(pool->base, GUARD_BYTE, GUARD_BYTES);
    for (uint64_t r = 0; r < pool->geometry.regions; r++) {
        uint64_t length;
        unsigned char *guard = guard_after(pool, r, &length);

        memset(guard, GUARD_BYTE, length);
    }
}

static uint64_t sum_guards(const struct kvpool *pool)
{
    XXH3_state_t state;

    (void)XXH3_64bits_reset(&state);
    (void)XXH3_64bits_update(&state, pool->base, GUARD_BYTES);
    for (uint64_t r = 0; r < pool->geometry.regions; r++) {
        uint64_t length;
        const unsigned char *guard = guard_after(pool, r, &length);

        (void)XXH3_64bits_update(&state, guard, length);
    }
    return XXH3_64bits_digest(&state);
}

bool kvpool_guards_intact(const struct kvpool *pool)
{
    return sum_guards(pool) == pool->guard_sum;
}

void kvpool_rebase_guards(struct kvpool *pool)
{
    pool->guard_sum = sum_guards(pool);
}

/* Whether every number that is made of these fits: bytes of all kinds, and
 * indices of pages. The functions above rely on it. */
static bool is_measurable(const struct geometry *geometry, uint64_t slots)
{
    uint64_t piece;
    uint64_t bytes;

    if (geometry->regions < 1 || geometry->pages < 1 ||
        geometry->page_bytes < 1 || slots < 1 || slots >= SLOT_NONE ||
        __builtin_mul_overflow(geometry->pages, geometry->page_bytes, &piece) ||
        __builtin_mul_overflow(piece, slots, &bytes) ||
        /* One for the rounding up, one guard behind it. */
        __builtin_add_overflow(bytes, 2 * GUARD_BYTES, &bytes) ||
        __builtin_mul_overflow(bytes, geometry->regions, &bytes) ||
        __builtin_add_overflow(bytes, GUARD_BYTES, &bytes)) {
        return false;
    }
    /* No page is empty, so their number is below that of the bytes. */
    return bytes <= PTRDIFF_MAX;
}

int kvpool_open(struct kvpool *pool, const struct geometry *geometry,
                uint64_t slots, bool shm, struct kvt_error *err)
{
    struct kvpool made;

    if (!is_measurable(geometry, slots)) {
        *err = (struct kvt_error){.code = KVT_EINVAL};
        (void)snprintf(err->text, sizeof(err->text),
                       "a pool of %llu slots of %llu x %llu pages of %llu "
                       "bytes does not fit the address space, or has nothing "
                       "in it; use other sizes",
                       (unsigned long long)slots,
                       (unsigned long long)geometry->regions,
                       (unsigned long long)geometry->pages,
                       (unsigned long long)geometry->page_bytes);
        return KVT_EINVAL;
    }
    made = (struct kvpool){
        .geometry = *geometry,
        .slots = slots,
        .region_stride = stride_of(geometry, slots),
        .bytes = kvpool_region_offset(geometry, slots, geometry->regions),
        .is_shm = shm,
    };
    if (shm) {
        int rc = kvt_shm_create(made.bytes, &made.shm, err);

        if (rc != KVT_OK) {
            return rc;
        }
        made.base = made.shm.addr;
    } else {
        /* Populated, as a serving engine's pool is: else the run would mostly
         * measure the kernel that clears pages. */
        void *base = mmap(NULL, made.bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

        if (base == MAP_FAILED) {
            err->code = KVT_ENOMEM;
            err->os_errno = errno;
            (void)snprintf(err->text, sizeof(err->text),
                           "a pool of %llu bytes cannot be mapped: %s; use a "
                           "smaller --memory",
                           (unsigned long long)made.bytes, strerror(errno));
            return KVT_ENOMEM;
        }
        made.base = base;
    }
    fill_guards(&made);
    made.guard_sum = sum_guards(&made);
    *pool = made;
    return KVT_OK;
}

void kvpool_close(struct kvpool *pool)
{
    if (pool->base == NULL) {
        return;
    }
    if (pool->is_shm) {
        kvt_shm_destroy(&pool->shm);
    } else {
        (void)munmap(pool->base, pool->bytes);
    }
    pool->base = NULL;
}

struct kvt_region *kvpool_regions(const struct kvpool *pool)
{
    uint64_t count = pool->geometry.regions;
    struct kvt_region *regions = cli_alloc(count, sizeof(*regions));

    for (uint64_t r = 0; r < count; r++) {
        uint64_t offset = kvpool_region_offset(&pool->geometry, pool->slots, r);

        regions[r].addr = (uint64_t)(uintptr_t)pool->base + offset;
        regions[r].length = region_bytes(&pool->geometry, pool->slots);
        regions[r].kind = KVT_DRAM;
        if (pool->is_shm) {
            regions[r].flags = KVT_REGION_FD;
            regions[r].fd = pool->shm.fd;
            regions[r].fd_offset = offset;
        }
    }
    return regions;
}

struct kvt_run *kvpool_runs(const struct geometry *geometry, uint64_t slots,
                            uint64_t base)
{
    struct kvt_run *runs = cli_alloc(geometry->regions, sizeof(*runs));

    for (uint64_t r = 0; r < geometry->regions; r++) {
        runs[r].addr = base + kvpool_region_offset(geometry, slots, r);
        runs[r].block_bytes = geometry->page_bytes;
        runs[r].stride_bytes = geometry->page_bytes;
        runs[r].count = slots * geometry->pages;
        runs[r].kind = KVT_DRAM;
    }
    return runs;
}

static unsigned char *piece_of(const struct kvpool *pool, uint64_t slot,
                               uint64_t region)
{
    return pool->base +
           kvpool_region_offset(&pool->geometry, pool->slots, region) +
           slot * geometry_piece_bytes(&pool->geometry);
}

/* Bytes [first, first + length) of a piece; first is a multiple of 8. */
static void make_bytes(unsigned char *to, uint64_t length, uint64_t piece_key,
                       uint64_t first)
{
    uint64_t counter = piece_key + first / 8;
    uint64_t whole = length / 8;
    uint64_t word;

    for (uint64_t i = 0; i < whole; i++) {
        word = (counter + i) * UINT64_C(0x9e3779b97f4a7c15);
        word ^= word >> 29;
        memcpy(to + i * 8, &word, 8);
    }
    if (length % 8 != 0) {
        word = (counter + whole) * UINT64_C(0x9e3779b97f4a7c15);
        word ^= word >> 29;
        memcpy(to + whole * 8, &word, length % 8);
    }
}

void kvpool_fill(struct kvpool *pool, uint64_t slot, uint64_t key)
{
    uint64_t bytes = geometry_piece_bytes(&pool->geometry);

    for (uint64_t r = 0; r < pool->geometry.regions; r++) {
        make_bytes(piece_of(pool, slot, r), bytes, cli_mix(key, r), 0);
    }
}

uint64_t kvpool_checksum(const struct kvpool *pool, uint64_t slot)
{
    uint64_t bytes = geometry_piece_bytes(&pool->geometry);
    XXH3_state_t state;

    (void)XXH3_64bits_reset(&state);
    for (uint64_t r = 0; r < pool->geometry.regions; r++) {
        (void)XXH3_64bits_update(&state, piece_of(pool, slot, r), bytes);
    }
    return XXH3_64bits_digest(&state);
}

uint64_t kvpool_expected(const struct geometry *geometry, uint64_t key)
{
    uint64_t bytes = geometry_piece_bytes(geometry);
    _Alignas(64) unsigned char scratch[SCRATCH_BYTES];
    XXH3_state_t state;

    (void)XXH3_64bits_reset(&state);
    for (uint64_t r = 0; r < geometry->regions; r++) {
        uint64_t piece_key = cli_mix(key, r);

        for (uint64_t at = 0; at < bytes; at += SCRATCH_BYTES) {
            uint64_t length = bytes - at < SCRATCH_BYTES ? bytes - at
                                                         : SCRATCH_BYTES;

            make_bytes(scratch, length, piece_key, at);
            (void)XXH3_64bits_update(&state, scratch, length);
        }
    }
    return XXH3_64bits_digest(&state);
}

void kvpool_spoil_slot(struct kvpool *pool, uint64_t slot)
{
    uint64_t last = pool->geometry.regions - 1;

    /* The very last byte: a check that stops early would miss it. */
    piece_of(pool, slot,
             last)[geometry_piece_bytes(&pool->geometry) - 1] ^= 0x40;
}

void kvpool_spoil_guard(struct kvpool *pool)
{
    pool->base[pool->bytes - 1] ^= 0x40;
}
