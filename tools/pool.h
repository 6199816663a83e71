/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A paged pool: the memory, how it lies, what is written in it, and the
 * checksums that say whether it is still so. Which slot holds what is the
 * business of slots.h.
 *
 *   | guard | region 0 | guard | region 1 | guard | … | region n-1 | guard |
 *
 * Regions are registered with kvt one by one; guards are not, and hold a
 * pattern that no transfer may change.
 */
#ifndef KVT_TOOLS_POOL_H
#define KVT_TOOLS_POOL_H

#include <kvt/kvt.h>
#include <stdbool.h>
#include <stdint.h>

#include "geometry.h"

struct pool {
    struct geometry geometry;
    uint64_t slots;
    uint64_t region_stride; /* bytes from one region to the next */
    uint64_t bytes;         /* of the whole mapping */
    unsigned char *base;
    bool is_shm;
    struct kvt_shm shm;
    uint64_t guard_sum;
};

/* How many slots fit `memory` bytes; 0: none does. */
uint64_t pool_slots_in(const struct geometry *geometry, uint64_t memory);

/* Where region `index` begins, from the pool's first byte. */
uint64_t pool_region_offset(const struct geometry *geometry, uint64_t slots,
                            uint64_t index);

/* Maps the memory and fills the guards. */
int pool_open(struct pool *pool, const struct geometry *geometry,
              uint64_t slots, bool shm, struct kvt_error *err);

void pool_close(struct pool *pool);

/* The memory to register: geometry.regions items, to be freed. */
struct kvt_region *pool_regions(const struct pool *pool);

/* The runs of a pool at `base` in some process: geometry.regions items, to be
 * freed. Both sides of a transfer have pools of the same shape. */
struct kvt_run *pool_runs(const struct geometry *geometry, uint64_t slots,
                          uint64_t base);

/* The kvt index of page `page` of a slot in region `region`. */
uint64_t pool_index(const struct geometry *geometry, uint64_t slots,
                    uint64_t region, uint64_t slot, uint64_t page);

/* Fills a slot with what `key` stands for. */
void pool_fill(struct pool *pool, uint64_t slot, uint64_t key);

/* XXH3 of what a slot holds now. */
uint64_t pool_checksum(const struct pool *pool, uint64_t slot);

/* XXH3 of what a slot holds after pool_fill() with this key, without one. */
uint64_t pool_expected(const struct geometry *geometry, uint64_t key);

/* Whether every guard byte is as it was. */
bool pool_guards_intact(const struct pool *pool);

/* Takes the guards as they are now for right, so that a change counts once. */
void pool_rebase_guards(struct pool *pool);

/* For --corrupt: spoils one byte, to see that it is noticed. */
void pool_spoil_slot(struct pool *pool, uint64_t slot);
void pool_spoil_guard(struct pool *pool);

#endif /* KVT_TOOLS_POOL_H */
