/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sets of regions. The input is read as adds, removes, sweeps and joins of
 * regions that overlap, touch and repeat, in a window of 128 bytes at the
 * bottom or at the very top of the address space. An oracle keeps a plain list
 * and one flag for each byte; after each update every byte and many ranges are
 * asked for.
 */
#include <stdlib.h>
#include <string.h>

#include "diag.h"
#include "input.h"
#include "region.h"

#define WINDOW 128
#define KINDS 2
#define DEVICES 2
#define MEMS_MAX 24
#define STEPS_MAX 24

struct model {
    uint64_t base;
    struct kvti_mem mems[MEMS_MAX]; /* in no order */
    size_t count;
    bool only_even; /* update() opens even gate slots only */
    bool covered[KINDS][DEVICES][WINDOW];
};

static bool read_mem(struct input *input, const struct model *model,
                     struct kvti_mem *ret)
{
    uint8_t kind = next_byte(input);
    uint64_t at = next_below(input, WINDOW);

    *ret = (struct kvti_mem){.addr = model->base + at,
                             .length = next_below(input, 24),
                             .kind = kind & 1,
                             .device = kind >> 1 & 1,
                             .gate_slot = kind >> 2 & 1};
    return ret->length > 0 && at + ret->length < WINDOW;
}

static struct kvti_mem *find_same(struct model *model,
                                  const struct kvti_mem *mem)
{
    for (size_t i = 0; i < model->count; i++) {
        if (kvti_mem_order(&model->mems[i], mem) == 0) {
            return &model->mems[i];
        }
    }
    return NULL;
}

/* --------------------------------------------------------------------- steps */

static void step_add(struct input *input, struct model *model,
                     struct kvti_regions *set)
{
    struct kvti_mem mem;

    if (!read_mem(input, model, &mem) || model->count == MEMS_MAX ||
        find_same(model, &mem) != NULL) {
        return;
    }
    kvti_assert(kvti_regions_reserve(set, 1) == KVT_OK);
    kvti_regions_add(set, &mem);
    model->mems[model->count++] = mem;
}

static void step_remove(struct input *input, struct model *model,
                        struct kvti_regions *set)
{
    struct kvti_mem *mem;
    size_t at;

    if (model->count == 0) {
        return;
    }
    at = next_below(input, model->count);
    mem = kvti_regions_find(set, model->mems[at].addr, model->mems[at].length,
                            model->mems[at].kind, model->mems[at].device);
    kvti_assert(mem != NULL);
    kvti_regions_remove(set, mem);
    model->mems[at] = model->mems[--model->count];
}

static void step_sweep(struct input *input, struct model *model,
                       struct kvti_regions *set)
{
    uint64_t pick = next_bytes(input, 3);

    for (size_t i = 0; i < set->count; i++) {
        struct kvti_mem *mem = &set->mems[i];

        if ((pick >> i & 1) != 0) {
            struct kvti_mem *same = find_same(model, mem);

            mem->gone = 1;
            *same = model->mems[--model->count];
        }
    }
    kvti_regions_sweep(set);
}

static void step_join(struct input *input, struct model *model,
                      struct kvti_regions *set)
{
    struct kvti_regions more = {0};
    struct kvti_mem mem;
    size_t count = next_below(input, 8);

    kvti_assert(kvti_regions_reserve(&more, count) == KVT_OK);
    for (size_t i = 0; i < count && model->count < MEMS_MAX; i++) {
        if (!read_mem(input, model, &mem) ||
            kvti_regions_find(&more, mem.addr, mem.length, mem.kind,
                              mem.device) != NULL) {
            continue;
        }
        kvti_regions_add(&more, &mem);
        if (find_same(model, &mem) == NULL) {
            model->mems[model->count++] = mem;
        }
    }
    kvti_assert(kvti_regions_reserve(set, more.count) == KVT_OK);
    kvti_regions_join(set, &more);
    kvti_regions_fini(&more);
}

/* ------------------------------------------------------------------ checking */

static bool is_open(const struct kvti_mem *mem, void *ctx)
{
    (void)ctx;
    return mem->gate_slot == 0;
}

static void mark(struct model *model)
{
    memset(model->covered, 0, sizeof model->covered);
    for (size_t i = 0; i < model->count; i++) {
        const struct kvti_mem *mem = &model->mems[i];

        if (!model->only_even || is_open(mem, NULL)) {
            memset(&model->covered[mem->kind][mem->device]
                                  [mem->addr - model->base],
                   1, mem->length * sizeof(bool));
        }
    }
}

static void check_entries(struct model *model, const struct kvti_regions *set)
{
    kvti_assert(set->count == model->count);
    for (size_t i = 0; i < set->count; i++) {
        const struct kvti_mem *mem = &set->mems[i];
        const struct kvti_mem *same = find_same(model, mem);

        kvti_assert(i == 0 || kvti_mem_order(mem - 1, mem) < 0);
        kvti_assert(same != NULL && same->gate_slot == mem->gate_slot);
        kvti_assert(kvti_regions_find(set, mem->addr, mem->length, mem->kind,
                                      mem->device) == mem);
    }
}

/* The span of a covered byte: as long as it can be. */
static void check_span(const struct model *model, const bool *row, uint64_t at,
                       const struct kvti_span *span)
{
    uint64_t lo = at;
    uint64_t hi = at;

    while (lo > 0 && row[lo - 1]) {
        lo--;
    }
    while (hi < WINDOW && row[hi]) {
        hi++;
    }
    kvti_assert(span != NULL && span->lo == model->base + lo &&
                span->hi == model->base + hi);
}

static void check_at(const struct kvti_regions *set, uint64_t addr,
                     uint32_t kind, uint32_t device)
{
    const struct kvti_mem *want = NULL;

    for (size_t i = 0; i < set->count && want == NULL; i++) {
        const struct kvti_mem *mem = &set->mems[i];

        if (mem->kind == kind && mem->device == device && mem->addr <= addr &&
            addr - mem->addr < mem->length) {
            want = mem;
        }
    }
    kvti_assert(kvti_regions_at(set, addr, kind, device) == want);
}

static void check_bytes(struct model *model, const struct kvti_regions *set)
{
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t device = 0; device < DEVICES; device++) {
            const bool *row = model->covered[kind][device];

            for (uint64_t at = 0; at < WINDOW; at++) {
                const struct kvti_span *span = kvti_regions_span(
                    set, model->base + at, 1, kind, device);

                if (row[at]) {
                    check_span(model, row, at, span);
                } else {
                    kvti_assert(span == NULL);
                }
                check_at(set, model->base + at, kind, device);
            }
        }
    }
}

static void check_ranges(struct input *input, struct model *model,
                         const struct kvti_regions *set)
{
    for (size_t i = 0; i < 16; i++) {
        uint8_t kind = next_byte(input);
        uint64_t at = next_below(input, WINDOW);
        uint64_t length = kind < 240 ? next_below(input, 32)
                                     : next_number(input);
        const bool *row = model->covered[kind & 1][kind >> 1 & 1];
        bool want = length > 0 && length <= WINDOW - at;

        for (uint64_t j = 0; want && j < length; j++) {
            want = row[at + j];
        }
        kvti_assert(kvti_regions_cover(set, model->base + at, length, kind & 1,
                                       kind >> 1 & 1) == want);
    }
    kvti_assert(!kvti_regions_cover(set, model->base, 1, KINDS, 0));
    kvti_assert(!kvti_regions_cover(set, model->base, 1, 0, DEVICES));
}

static void check_all(struct input *input, struct model *model,
                      struct kvti_regions *set)
{
    model->only_even = (next_byte(input) & 1) != 0;
    kvti_regions_update(set, model->only_even ? is_open : NULL, NULL);
    mark(model);
    check_entries(model, set);
    check_bytes(model, set);
    check_ranges(input, model, set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const steps[])(struct input *, struct model *,
                                 struct kvti_regions *) = {
        step_add, step_add, step_remove, step_sweep, step_join, check_all};
    static struct model model;
    struct input input = {.at = data, .left = size};
    struct kvti_regions set = {0};
    size_t count = next_below(&input, STEPS_MAX);

    memset(&model, 0, sizeof model);
    model.base = (next_byte(&input) & 1) != 0 ? UINT64_MAX - WINDOW : 64;
    for (size_t i = 0; i < count; i++) {
        steps[next_below(&input, sizeof steps / sizeof *steps)](&input, &model,
                                                                &set);
    }
    check_all(&input, &model, &set);
    kvti_regions_fini(&set);
    return 0;
}
