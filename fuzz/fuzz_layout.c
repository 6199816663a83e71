/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts over registered memory. The input is read as regions and runs whose
 * numbers lie in a small window, at an edge of the address space, or anywhere.
 * An oracle that works in 128 bits and walks block by block says which run must
 * be refused and with what, and otherwise where each block lies and what a
 * range shares a byte with. Then a region goes, and the layout is checked
 * again.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "diag.h"
#include "input.h"
#include "layout.h"

#define RUNS_MAX 5
#define REGIONS_MAX 6
#define QUERIES 24
/* Blocks that the oracle looks at one by one; above it works them out. */
#define WALK_MAX 512

/* __int128 is an extension, which -Wpedantic would have marked as one. */
__extension__ typedef unsigned __int128 u128;
__extension__ typedef __int128 i128;

struct plan {
    struct kvti_mem mems[REGIONS_MAX];
    size_t mem_count;
    struct kvt_run runs[RUNS_MAX];
    size_t run_count;
    uint64_t base; /* of the window */
};

/* ------------------------------------------------------------------- reading */

static void read_regions(struct input *input, struct plan *plan)
{
    uint8_t habits = next_byte(input);
    size_t count = next_below(input, REGIONS_MAX + 1);

    plan->base = (habits & 3) == 0   ? 64
                 : (habits & 3) == 1 ? UINT64_MAX - 256
                 : (habits & 3) == 2 ? (UINT64_C(1) << 32) - 128
                                     : UINT64_MAX / 2 - 100;
    plan->mem_count = 0;
    for (size_t i = 0; i < count; i++) {
        struct kvti_mem mem = {.addr = plan->base + next_byte(input),
                               .length = next_byte(input)};
        uint8_t kind = next_byte(input);

        mem.kind = kind & 1;
        mem.device = kind >> 1 & 1;
        if (kind >= 224) {
            mem.addr = 1; /* nearly everything */
            mem.length = UINT64_MAX - 1 - (kind & 4);
        }
        if (mem.length > 0 && mem.addr <= UINT64_MAX - mem.length) {
            plan->mems[plan->mem_count++] = mem;
        }
    }
}

static void read_run(struct input *input, struct plan *plan,
                     struct kvt_run *run)
{
    uint8_t way = next_byte(input);

    *run = (struct kvt_run){.addr = plan->base + next_byte(input),
                            .block_bytes = next_below(input, 12),
                            .count = next_below(input, 24),
                            .kind = way & 1,
                            .device = way >> 1 & 1};
    run->stride_bytes = run->block_bytes + next_below(input, 8);
    if (way < 192) {
        return;
    }
    switch (way >> 2 & 7) {
    case 0:
        run->addr = next_number(input);
        break;
    case 1:
        run->block_bytes = next_number(input);
        break;
    case 2:
        run->stride_bytes = next_number(input);
        break;
    case 3:
        run->count = next_number(input);
        break;
    case 4:
        run->kind = (uint32_t)next_number(input);
        break;
    case 5:
        run->device = (uint32_t)next_number(input);
        break;
    default:
        run->addr = next_number(input);
        run->block_bytes = next_number(input);
        run->stride_bytes = next_number(input);
        run->count = next_number(input);
        break;
    }
}

/* -------------------------------------------------------------------- oracle */

/* Steps from region to region; knows nothing of spans. */
static bool is_covered(const struct plan *plan, const struct kvt_run *run)
{
    u128 at = run->addr;
    u128 end = at + (u128)(run->count - 1) * run->stride_bytes +
               run->block_bytes;

    while (at < end) {
        u128 next = at;

        for (size_t i = 0; i < plan->mem_count; i++) {
            const struct kvti_mem *mem = &plan->mems[i];
            u128 hi = (u128)mem->addr + mem->length;

            if (mem->kind == run->kind && mem->device == run->device &&
                mem->addr <= at && hi > next) {
                next = hi;
            }
        }
        if (next == at) {
            return false;
        }
        at = next;
    }
    return true;
}

static bool is_shaped(const struct kvt_run *run)
{
    return (run->kind == KVT_DRAM || run->kind == KVT_VRAM) && run->count > 0 &&
           run->block_bytes > 0 && run->stride_bytes >= run->block_bytes &&
           (u128)run->addr + (u128)(run->count - 1) * run->stride_bytes +
                   run->block_bytes <=
               UINT64_MAX;
}

/* What new() must answer, and about which run. */
static int foretell(const struct plan *plan, size_t *ret_run)
{
    u128 blocks = 0;

    for (size_t i = 0; i < plan->run_count; i++) {
        *ret_run = i;
        if (!is_shaped(&plan->runs[i])) {
            return KVT_EINVAL;
        }
        if (!is_covered(plan, &plan->runs[i])) {
            return KVT_ERANGE;
        }
        blocks += plan->runs[i].count;
        if (blocks > UINT64_MAX) {
            return KVT_EINVAL;
        }
    }
    return plan->run_count > 0 ? KVT_OK : KVT_EINVAL;
}

static bool run_shares(const struct kvt_run *run, u128 addr, u128 end)
{
    i128 index = 0;

    if (run->count <= WALK_MAX) {
        for (uint64_t i = 0; i < run->count; i++) {
            u128 at = run->addr + (u128)i * run->stride_bytes;

            if (at < end && addr < at + run->block_bytes) {
                return true;
            }
        }
        return false;
    }
    /* The first block that ends above `addr` is the only one to look at. */
    if (addr >= (u128)run->addr + run->block_bytes) {
        index = (i128)((addr - run->addr - run->block_bytes) /
                       run->stride_bytes) +
                1;
    }
    return index < (i128)run->count &&
           run->addr + (u128)index * run->stride_bytes < end;
}

static bool shares(const struct plan *plan, uint64_t addr, uint64_t length,
                   uint32_t kind, uint32_t device)
{
    for (size_t i = 0; length > 0 && i < plan->run_count; i++) {
        const struct kvt_run *run = &plan->runs[i];

        if (run->kind == kind && run->device == device &&
            run_shares(run, addr, (u128)addr + length)) {
            return true;
        }
    }
    return false;
}

/* ------------------------------------------------------------------ checking */

static void check_error(const struct kvt_error *err, int code, size_t run)
{
    char name[32];

    (void)snprintf(name, sizeof name, "run %zu", run);
    kvti_assert(err->code == code);
    kvti_assert(strstr(err->text, name) != NULL);
}

static void check_facts(const struct plan *plan,
                        const struct kvti_layout *layout)
{
    const struct kvt_run *first = &plan->runs[0];
    uint64_t blocks = 0;
    uint32_t classes = 0;
    bool same_kind = true;
    bool same_bytes = true;
    bool same_count = true;

    for (size_t i = 0; i < plan->run_count; i++) {
        const struct kvt_run *run = &plan->runs[i];
        bool is_new = true;

        for (size_t j = 0; j < i; j++) {
            bool same = plan->runs[j].kind == run->kind &&
                        plan->runs[j].device == run->device;

            is_new = is_new && !same;
            kvti_assert((layout->class[i] == layout->class[j]) == same ||
                        layout->class_count == 1);
        }
        classes += is_new;
        blocks += run->count;
        same_kind = same_kind && run->kind == first->kind &&
                    run->device == first->device;
        same_bytes = same_bytes && run->block_bytes == first->block_bytes;
        same_count = same_count && run->count == first->count;
        kvti_assert(layout->class[i] < layout -> class_count);
    }
    kvti_assert(layout->run_count == plan->run_count &&
                layout->block_count == blocks &&
                layout->class_count == classes);
    kvti_assert(layout->one_kind == same_kind);
    kvti_assert(layout->block_bytes == (same_bytes ? first->block_bytes : 0));
    kvti_assert(layout->run_blocks == (same_count ? first->count : 0));
}

static void check_block(const struct plan *plan,
                        const struct kvti_layout *layout, uint64_t index)
{
    uint64_t left = index;
    uint32_t at = 0;
    uint64_t addr;
    const struct kvt_run *run;

    while (left >= plan->runs[at].count) {
        left -= plan->runs[at++].count;
    }
    run = kvti_layout_block(layout, index, &addr);
    kvti_assert(run == &layout->runs[at] &&
                kvti_layout_run(layout, index) == at);
    kvti_assert(memcmp(run, &plan->runs[at], sizeof *run) == 0);
    kvti_assert(addr == run->addr + left * run->stride_bytes);
}

static void check_queries(struct input *input, const struct plan *plan,
                          const struct kvti_layout *layout)
{
    for (size_t i = 0; i < plan->run_count; i++) {
        const uint64_t first = layout->first[i];

        check_block(plan, layout, first);
        check_block(plan, layout, first + plan->runs[i].count - 1);
    }
    for (size_t i = 0; i < QUERIES; i++) {
        uint8_t way = next_byte(input);
        uint64_t addr = way < 240 ? plan->base + next_byte(input)
                                  : next_number(input);
        uint64_t length = way < 240 ? next_below(input, 9) : next_number(input);

        if (length > UINT64_MAX - addr) {
            length = UINT64_MAX - addr;
        }
        kvti_assert(
            kvti_layout_overlaps(layout, addr, length, way & 1, way >> 1 & 1) ==
            shares(plan, addr, length, way & 1, way >> 1 & 1));
        check_block(plan, layout, next_number(input) % layout->block_count);
    }
}

static void fill_regions(const struct plan *plan, struct kvti_regions *ret)
{
    *ret = (struct kvti_regions){0};
    kvti_assert(kvti_regions_reserve(ret, REGIONS_MAX) == KVT_OK);
    for (size_t i = 0; i < plan->mem_count; i++) {
        kvti_regions_add(ret, &plan->mems[i]);
    }
    kvti_regions_update(ret, NULL, NULL);
}

/* One region less: what was inside may not be any more. */
static void check_again(struct input *input, struct plan *plan,
                        const struct kvti_layout *layout)
{
    struct kvti_regions regions;
    struct kvt_error err;
    size_t run;
    int want;

    if (plan->mem_count > 0) {
        size_t gone = next_below(input, plan->mem_count);

        plan->mems[gone] = plan->mems[--plan->mem_count];
    }
    fill_regions(plan, &regions);
    want = foretell(plan, &run);
    kvti_assert(kvti_layout_check(layout, &regions, &err) == want);
    if (want != KVT_OK) {
        check_error(&err, want, run);
    }
    kvti_regions_fini(&regions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {.at = data, .left = size};
    struct plan plan = {0};
    struct kvti_layout *layout = NULL;
    struct kvti_regions regions;
    struct kvt_error err;
    size_t run = 0;
    int want;

    read_regions(&input, &plan);
    plan.run_count = next_below(&input, RUNS_MAX + 1);
    for (size_t i = 0; i < plan.run_count; i++) {
        read_run(&input, &plan, &plan.runs[i]);
    }
    fill_regions(&plan, &regions);
    want = foretell(&plan, &run);
    kvti_assert(kvti_layout_new(plan.runs, plan.run_count, &regions, &layout,
                                &err) == want);
    kvti_assert((layout != NULL) == (want == KVT_OK));
    if (want == KVT_OK) {
        check_facts(&plan, layout);
        check_queries(&input, &plan, layout);
        check_again(&input, &plan, layout);
    } else if (plan.run_count > 0) {
        check_error(&err, want, run);
    }
    kvti_layout_unref(layout);
    kvti_regions_fini(&regions);
    return 0;
}
