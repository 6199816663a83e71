/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Invariants: a slot is in a bucket when pending or resident, in the evictable
 * list when resident without pins, in the free list when free. One thread.
 */
#include "slots.h"

#include <assert.h>
#include <stdlib.h>

#include "cli.h"

static uint32_t *bucket_of(const struct slots *slots, uint64_t id)
{
    return &slots->buckets[cli_mix(id, 0) & slots->bucket_mask];
}

void slots_open(struct slots *slots, uint32_t count)
{
    uint32_t buckets = 16;

    while (buckets < count && buckets < UINT32_C(1) << 31) {
        buckets *= 2;
    }
    *slots = (struct slots){
        .at = cli_alloc(count, sizeof(*slots->at)),
        .count = count,
        .free = SLOT_NONE,
        .oldest = SLOT_NONE,
        .newest = SLOT_NONE,
        .buckets = cli_alloc(buckets, sizeof(*slots->buckets)),
        .bucket_mask = buckets - 1,
    };
    for (uint32_t i = 0; i < buckets; i++) {
        slots->buckets[i] = SLOT_NONE;
    }
    /* Backwards, so that the first slots are taken first. */
    for (uint32_t i = count; i-- > 0;) {
        slots->at[i].older = slots->free;
        slots->free = i;
    }
}

void slots_close(struct slots *slots)
{
    free(slots->at);
    free(slots->buckets);
    *slots = (struct slots){0};
}

uint32_t slots_find(const struct slots *slots, uint64_t id)
{
    uint32_t slot = *bucket_of(slots, id);

    while (slot != SLOT_NONE && slots->at[slot].id != id) {
        slot = slots->at[slot].next;
    }
    return slot;
}

static void forget_id(struct slots *slots, uint32_t slot)
{
    uint32_t *link = bucket_of(slots, slots->at[slot].id);

    while (*link != slot) {
        link = &slots->at[*link].next;
    }
    *link = slots->at[slot].next;
}

static void append_evictable(struct slots *slots, uint32_t slot)
{
    slots->at[slot].newer = SLOT_NONE;
    slots->at[slot].older = slots->newest;
    if (slots->newest != SLOT_NONE) {
        slots->at[slots->newest].newer = slot;
    } else {
        slots->oldest = slot;
    }
    slots->newest = slot;
}

static void unlink_evictable(struct slots *slots, uint32_t slot)
{
    uint32_t older = slots->at[slot].older;
    uint32_t newer = slots->at[slot].newer;

    if (older != SLOT_NONE) {
        slots->at[older].newer = newer;
    } else {
        slots->oldest = newer;
    }
    if (newer != SLOT_NONE) {
        slots->at[newer].older = older;
    } else {
        slots->newest = older;
    }
}

uint32_t slots_take(struct slots *slots, uint64_t id)
{
    uint32_t slot = slots->free;
    uint32_t *bucket;

    if (slot != SLOT_NONE) {
        slots->free = slots->at[slot].older;
    } else if (slots->oldest != SLOT_NONE) {
        slot = slots->oldest;
        unlink_evictable(slots, slot);
        forget_id(slots, slot);
    } else {
        return SLOT_NONE;
    }
    slots->at[slot].id = id;
    slots->at[slot].state = SLOT_PENDING;
    slots->at[slot].pins = 1;
    bucket = bucket_of(slots, id);
    slots->at[slot].next = *bucket;
    *bucket = slot;
    return slot;
}

void slots_pin(struct slots *slots, uint32_t slot)
{
    struct slot *at = &slots->at[slot];

    if (at->state == SLOT_RESIDENT && at->pins == 0) {
        unlink_evictable(slots, slot);
    }
    at->pins++;
}

void slots_unpin(struct slots *slots, uint32_t slot)
{
    struct slot *at = &slots->at[slot];

    assert(at->pins > 0);
    at->pins--;
    if (at->state == SLOT_RESIDENT && at->pins == 0) {
        append_evictable(slots, slot);
    }
}

void slots_settle(struct slots *slots, uint32_t slot, uint64_t checksum)
{
    assert(slots->at[slot].state == SLOT_PENDING);
    slots->at[slot].state = SLOT_RESIDENT;
    slots->at[slot].checksum = checksum;
}

void slots_release(struct slots *slots, uint32_t slot, uint64_t checksum)
{
    assert(slots->at[slot].state == SLOT_PENDING);
    forget_id(slots, slot);
    slots->at[slot].state = SLOT_FREE;
    slots->at[slot].pins = 0;
    slots->at[slot].checksum = checksum;
    slots->at[slot].older = slots->free;
    slots->free = slot;
}

void slots_lose(struct slots *slots, uint32_t slot)
{
    assert(slots->at[slot].state == SLOT_PENDING);
    forget_id(slots, slot);
    slots->at[slot].state = SLOT_LOST;
    slots->at[slot].pins = 0;
    slots->lost++;
}

bool slots_at_rest(const struct slots *slots, uint32_t slot)
{
    return slots->at[slot].state == SLOT_FREE ||
           slots->at[slot].state == SLOT_RESIDENT;
}
