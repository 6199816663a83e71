/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which slot of a pool holds which hash block: a table with the least recently
 * used block going first. Memory is untouched here.
 *
 * A slot is at rest when it is free or resident: then `checksum` is that of
 * its bytes, and anybody may check that they are still so. A slot is pinned
 * while somebody relies on its block; only resident slots without pins are
 * taken for another block.
 */
#ifndef KVT_TOOLS_SLOTS_H
#define KVT_TOOLS_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#define SLOT_NONE UINT32_MAX

enum slot_state {
    SLOT_FREE,     /* holds no block */
    SLOT_PENDING,  /* its block is on the way */
    SLOT_RESIDENT, /* holds a block */
    SLOT_LOST      /* somebody may still write here: never used again */
};

struct slot {
    uint64_t id;       /* of the block; pending and resident */
    uint64_t checksum; /* of the bytes; at rest */
    uint32_t state;    /* enum slot_state */
    uint32_t pins;
    uint32_t older; /* in the list of evictable slots, or of free ones */
    uint32_t newer;
    uint32_t next; /* in the bucket of its id */
};

struct slots {
    struct slot *at;
    uint32_t count;
    uint32_t lost;
    uint32_t free;   /* head of the free slots, linked by `older` */
    uint32_t oldest; /* ends of the evictable slots */
    uint32_t newest;
    uint32_t *buckets;
    uint32_t bucket_mask;
};

void slots_open(struct slots *slots, uint32_t count);
void slots_close(struct slots *slots);

/* The slot of a block, pending or resident, or SLOT_NONE. */
uint32_t slots_find(const struct slots *slots, uint64_t id);

/*
 * A slot for a block that is not there: a free one, else the least recently
 * used one, whose block is gone then. It is pending with one pin. SLOT_NONE
 * when all are pinned or lost.
 */
uint32_t slots_take(struct slots *slots, uint64_t id);

void slots_pin(struct slots *slots, uint32_t slot);
void slots_unpin(struct slots *slots, uint32_t slot);

/* The block has come. */
void slots_settle(struct slots *slots, uint32_t slot, uint64_t checksum);

/* Pending and its block will not come: free again, with its pins gone. */
void slots_release(struct slots *slots, uint32_t slot, uint64_t checksum);

/* Pending and nobody knows whether it is still written: lost. */
void slots_lose(struct slots *slots, uint32_t slot);

bool slots_at_rest(const struct slots *slots, uint32_t slot);

#endif /* KVT_TOOLS_SLOTS_H */
