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
#ifndef KVT_TOOLS_KVPOOL_H
#define KVT_TOOLS_KVPOOL_H

#include <kvt/kvt.h>
#include <stdbool.h>
#include <stdint.h>

#include "geometry.h"

struct kvpool {
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
uint64_t kvpool_slots_in(const struct geometry *geometry, uint64_t memory);

/* Where region `index` begins, from the pool's first byte. */
uint64_t kvpool_region_offset(const struct geometry *geometry, uint64_t slots,
                              uint64_t index);

/* Maps the memory and fills the guards. KVT_EINVAL where the numbers make no
 * pool, as those of a stranger may. */
int kvpool_open(struct kvpool *pool, const struct geometry *geometry,
                uint64_t slots, bool shm, struct kvt_error *err);

void kvpool_close(struct kvpool *pool);

/* The memory to register: geometry.regions items, to be freed. */
struct kvt_region *kvpool_regions(const struct kvpool *pool);

/* The runs of a pool at `base` in some process: geometry.regions items, to be
 * freed. Both sides of a transfer have pools of the same shape. */
struct kvt_run *kvpool_runs(const struct geometry *geometry, uint64_t slots,
                            uint64_t base);

/* The kvt index of page `page` of a slot in region `region`. */
uint64_t kvpool_index(const struct geometry *geometry, uint64_t slots,
                      uint64_t region, uint64_t slot, uint64_t page);

/* Fills a slot with what `key` stands for. */
void kvpool_fill(struct kvpool *pool, uint64_t slot, uint64_t key);

/* XXH3 of what a slot holds now. */
uint64_t kvpool_checksum(const struct kvpool *pool, uint64_t slot);

/* XXH3 of what a slot holds after kvpool_fill() with this key, without one. */
uint64_t kvpool_expected(const struct geometry *geometry, uint64_t key);

/* Whether every guard byte is as it was. */
bool kvpool_guards_intact(const struct kvpool *pool);

/* Takes the guards as they are now for right, so that a change counts once. */
void kvpool_rebase_guards(struct kvpool *pool);

/* For --corrupt: spoils one byte, to see that it is noticed. */
void kvpool_spoil_slot(struct kvpool *pool, uint64_t slot);
void kvpool_spoil_guard(struct kvpool *pool);

#endif /* KVT_TOOLS_KVPOOL_H */
