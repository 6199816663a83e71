/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the pure parts share: seeded numbers and region sets. */
#ifndef KVT_UNIT_H
#define KVT_UNIT_H

#include <stddef.h>
#include <stdint.h>

#include "region.h"

/* splitmix64: any seed will do, and a failure can be repeated. */
struct rng {
    uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng)
{
    uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* 0 to limit - 1. */
static inline uint64_t rng_below(struct rng *rng, uint64_t limit)
{
    return rng_next(rng) % limit;
}

/* Adds one open region; the test fails by the assert in add if it cannot. */
static inline void add_region(struct kvti_regions *set, uint64_t addr,
                              uint64_t length, uint32_t kind, uint32_t device)
{
    const struct kvti_mem mem = {.addr = addr,
                                 .length = length,
                                 .kind = kind,
                                 .device = device,
                                 .fd = -1};

    if (kvti_regions_reserve(set, 1) == KVT_OK) {
        kvti_regions_add(set, &mem);
        kvti_regions_update(set, NULL, NULL);
    }
}

#endif /* KVT_UNIT_H */
