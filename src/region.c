/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two sorted arrays. `mems` are the entries as they came, which may overlap;
 * `spans` are the bytes they cover, disjoint, so that a bounds check is one
 * binary search whatever the entries look like. Both are allocated by
 * reserve() alone; there are never more spans than entries.
 */
#include "region.h"

#include <stdlib.h>
#include <string.h>

#include "diag.h"

#define CAPACITY_MIN 16

void kvti_regions_fini(struct kvti_regions *set)
{
    if (set == NULL) {
        return;
    }
    free(set->mems);
    free(set->spans);
    *set = (struct kvti_regions){0};
}

int kvti_regions_reserve(struct kvti_regions *set, size_t extra)
{
    size_t wanted;
    size_t doubled;

    if (extra > SIZE_MAX / 2 / sizeof *set->mems - set->count) {
        return KVT_ENOMEM;
    }
    wanted = set->count + extra;
    doubled = set->capacity > 0 ? 2 * set->capacity : CAPACITY_MIN;
    if (wanted > set->capacity) {
        size_t capacity = wanted > doubled ? wanted : doubled;
        struct kvti_mem *mems = realloc(set->mems, capacity * sizeof *mems);

        if (mems == NULL) {
            return KVT_ENOMEM;
        }
        set->mems = mems;
        set->capacity = capacity;
    }
    if (set->span_capacity < set->capacity) {
        struct kvti_span *spans = realloc(set->spans,
                                          set->capacity * sizeof *spans);

        if (spans == NULL) {
            return KVT_ENOMEM;
        }
        set->spans = spans;
        set->span_capacity = set->capacity;
    }
    return KVT_OK;
}

static int order_u64(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

int kvti_mem_order(const struct kvti_mem *a, const struct kvti_mem *b)
{
    int order = order_u64(a->kind, b->kind);

    if (order == 0) {
        order = order_u64(a->device, b->device);
    }
    if (order == 0) {
        order = order_u64(a->addr, b->addr);
    }
    return order != 0 ? order : order_u64(a->length, b->length);
}

/* The first entry that is above `mem`. */
static size_t upper_bound(const struct kvti_regions *set,
                          const struct kvti_mem *mem)
{
    size_t low = 0;
    size_t high = set->count;

    /* Metadata and most callers come in order. */
    if (high > 0 && kvti_mem_order(&set->mems[high - 1], mem) <= 0) {
        return high;
    }
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (kvti_mem_order(&set->mems[middle], mem) <= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

struct kvti_mem *kvti_regions_find(const struct kvti_regions *set,
                                   uint64_t addr, uint64_t length,
                                   uint32_t kind, uint32_t device)
{
    const struct kvti_mem key = {
        .addr = addr, .length = length, .kind = kind, .device = device};
    size_t index = upper_bound(set, &key);

    if (index == 0 || kvti_mem_order(&set->mems[index - 1], &key) != 0) {
        return NULL;
    }
    return &set->mems[index - 1];
}

struct kvti_mem *kvti_regions_add(struct kvti_regions *set,
                                  const struct kvti_mem *mem)
{
    size_t index = upper_bound(set, mem);
    struct kvti_mem *at;

    kvti_assert(set->count < set->capacity);
    kvti_assert(mem->length > 0 && mem->addr <= UINT64_MAX - mem->length);
    at = &set->mems[index];
    memmove(at + 1, at, (set->count - index) * sizeof *at);
    *at = *mem;
    at->reach = 0;
    set->count++;
    return at;
}

/* From the back, where there is room: the gap that equal entries leave behind
 * lies between what was merged and what was not. */
void kvti_regions_join(struct kvti_regions *set,
                       const struct kvti_regions *more)
{
    size_t left = set->count;
    size_t total = set->count + more->count;
    size_t out = total;

    kvti_assert(set->capacity - set->count >= more->count);
    for (size_t i = more->count; i > 0;) {
        int order = left == 0 ? -1
                              : kvti_mem_order(&set->mems[left - 1],
                                               &more->mems[i - 1]);

        if (order > 0) {
            set->mems[--out] = set->mems[--left];
            continue;
        }
        i--;
        if (order < 0) {
            set->mems[--out] = more->mems[i];
        }
    }
    if (out > left) {
        memmove(&set->mems[left], &set->mems[out],
                (total - out) * sizeof set->mems[0]);
    }
    set->count = left + total - out;
}

void kvti_regions_remove(struct kvti_regions *set, struct kvti_mem *mem)
{
    size_t index = (size_t)(mem - set->mems);

    kvti_assert(index < set->count);
    set->count--;
    memmove(mem, mem + 1, (set->count - index) * sizeof *mem);
}

void kvti_regions_sweep(struct kvti_regions *set)
{
    size_t kept = 0;

    for (size_t i = 0; i < set->count; i++) {
        if (set->mems[i].gone == 0) {
            set->mems[kept++] = set->mems[i];
        }
    }
    set->count = kept;
}

static bool same_space(uint32_t kind, uint32_t device,
                       const struct kvti_mem *mem)
{
    return kind == mem->kind && device == mem->device;
}

static void set_reaches(struct kvti_regions *set)
{
    for (size_t i = 0; i < set->count; i++) {
        struct kvti_mem *mem = &set->mems[i];

        mem->reach = mem->addr + mem->length;
        if (i > 0 && same_space(mem->kind, mem->device, mem - 1) &&
            mem[-1].reach > mem->reach) {
            mem->reach = mem[-1].reach;
        }
    }
}

void kvti_regions_update(struct kvti_regions *set,
                         bool (*open)(const struct kvti_mem *mem, void *ctx),
                         void *ctx)
{
    struct kvti_span *last = NULL;

    kvti_assert(set->span_capacity >= set->count);
    set_reaches(set);
    set->span_count = 0;
    for (size_t i = 0; i < set->count; i++) {
        const struct kvti_mem *mem = &set->mems[i];
        uint64_t hi = mem->addr + mem->length;

        if (open != NULL && !open(mem, ctx)) {
            continue;
        }
        if (last != NULL && same_space(last->kind, last->device, mem) &&
            mem->addr <= last->hi) {
            last->hi = hi > last->hi ? hi : last->hi;
            continue;
        }
        last = &set->spans[set->span_count++];
        *last = (struct kvti_span){.lo = mem->addr,
                                   .hi = hi,
                                   .kind = mem->kind,
                                   .device = mem->device};
    }
}

/*
 * Whether something of this kind and device that ends at `end` lies wholly
 * before `addr` of the other: the order in which spans and reaches ascend.
 */
static bool ends_before(uint32_t kind, uint32_t device, uint64_t end,
                        const struct kvti_span *at)
{
    if (kind != at->kind) {
        return kind < at->kind;
    }
    if (device != at->device) {
        return device < at->device;
    }
    return end <= at->lo;
}

const struct kvti_span *kvti_regions_span(const struct kvti_regions *set,
                                          uint64_t addr, uint64_t length,
                                          uint32_t kind, uint32_t device)
{
    const struct kvti_span key = {.lo = addr, .kind = kind, .device = device};
    const struct kvti_span *span;
    size_t low = 0;
    size_t high = set->span_count;

    if (length == 0 || addr > UINT64_MAX - length) {
        return NULL;
    }
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        span = &set->spans[middle];
        if (ends_before(span->kind, span->device, span->hi, &key)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == set->span_count) {
        return NULL;
    }
    span = &set->spans[low];
    return span->kind == kind && span->device == device && span->lo <= addr &&
                   addr + length <= span->hi
               ? span
               : NULL;
}

bool kvti_regions_cover(const struct kvti_regions *set, uint64_t addr,
                        uint64_t length, uint32_t kind, uint32_t device)
{
    return kvti_regions_span(set, addr, length, kind, device) != NULL;
}

const struct kvti_mem *kvti_regions_at(const struct kvti_regions *set,
                                       uint64_t addr, uint32_t kind,
                                       uint32_t device)
{
    const struct kvti_span key = {.lo = addr, .kind = kind, .device = device};
    const struct kvti_mem *mem;
    size_t low = 0;
    size_t high = set->count;

    /* Reaches ascend, so the first one above `addr` belongs to the first
     * entry that ends above it; if that one starts too late, all do. */
    while (low < high) {
        size_t middle = low + (high - low) / 2;

        mem = &set->mems[middle];
        if (ends_before(mem->kind, mem->device, mem->reach, &key)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == set->count) {
        return NULL;
    }
    mem = &set->mems[low];
    return same_space(kind, device, mem) && mem->addr <= addr ? mem : NULL;
}
