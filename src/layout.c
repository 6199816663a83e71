/* SPDX-License-Identifier: Apache-2.0 */
#include "layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "diag.h"

static uint64_t class_key(const struct kvt_run *run)
{
    return (uint64_t)run->kind << 32 | run->device;
}

/* From the first block's first byte to the last one's end. Only for runs that
 * check_shape() accepted. */
static uint64_t extent(const struct kvt_run *run)
{
    return (run->count - 1) * run->stride_bytes + run->block_bytes;
}

static int check_shape(const struct kvt_run *run, size_t at,
                       struct kvt_error *err)
{
    uint64_t length;

    if (run->kind != KVT_DRAM && run->kind != KVT_VRAM) {
        return kvti_fail(err, KVT_EINVAL,
                         "run %zu has kind %" PRIu32
                         "; use KVT_DRAM or KVT_VRAM",
                         at, run->kind);
    }
    if (run->count == 0 || run->block_bytes == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "run %zu has %" PRIu64 " blocks of %" PRIu64
                         " bytes; both numbers must be above 0",
                         at, run->count, run->block_bytes);
    }
    if (run->stride_bytes < run->block_bytes) {
        return kvti_fail(err, KVT_EINVAL,
                         "run %zu has a stride of %" PRIu64
                         " bytes, which must be at least the block's %" PRIu64,
                         at, run->stride_bytes, run->block_bytes);
    }
    if (__builtin_mul_overflow(run->count - 1, run->stride_bytes, &length) ||
        __builtin_add_overflow(length, run->block_bytes, &length) ||
        length > UINT64_MAX - run->addr) {
        return kvti_fail(
            err, KVT_EINVAL,
            "run %zu ends past the top of the address space: %" PRIu64
            " blocks, %" PRIu64 " bytes apart, from 0x%" PRIx64,
            at, run->count, run->stride_bytes, run->addr);
    }
    return KVT_OK;
}

static int check_inside(const struct kvt_run *run, size_t at,
                        const struct kvti_regions *regions,
                        struct kvt_error *err)
{
    if (!kvti_regions_cover(regions, run->addr, extent(run), run->kind,
                            run->device)) {
        return kvti_fail(err, KVT_ERANGE,
                         "run %zu (%" PRIu64 " bytes at 0x%" PRIx64
                         ", %s, device %" PRIu32
                         ") is not inside the registered memory of its side",
                         at, extent(run), run->addr,
                         run->kind == KVT_DRAM ? "DRAM" : "VRAM", run->device);
    }
    return KVT_OK;
}

static int check_count(const struct kvt_run *runs, size_t count,
                       struct kvt_error *err)
{
    if (runs == NULL || count == 0) {
        return kvti_fail(err, KVT_EINVAL, "a layout needs at least one run");
    }
    if (count > UINT32_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "a layout can have %" PRIu32 " runs, not %zu",
                         UINT32_MAX, count);
    }
    return KVT_OK;
}

static int check_runs(const struct kvt_run *runs, size_t count,
                      const struct kvti_regions *regions, struct kvt_error *err)
{
    uint64_t blocks = 0;

    for (size_t i = 0; i < count; i++) {
        int code = check_shape(&runs[i], i, err);

        if (code == KVT_OK) {
            code = check_inside(&runs[i], i, regions, err);
        }
        if (code != KVT_OK) {
            return code;
        }
        if (__builtin_add_overflow(blocks, runs[i].count, &blocks)) {
            return kvti_fail(err, KVT_EINVAL,
                             "the runs up to run %zu have 2^64 blocks or more",
                             i);
        }
    }
    return KVT_OK;
}

static int order_keys(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;

    return (left > right) - (left < right);
}

/* Sorts and returns the number of different ones, which come first. */
static size_t distinct(uint64_t *keys, size_t count)
{
    size_t used = 1;

    qsort(keys, count, sizeof *keys, order_keys);
    for (size_t i = 1; i < count; i++) {
        if (keys[i] != keys[used - 1]) {
            keys[used++] = keys[i];
        }
    }
    return used;
}

/* Ranks the runs by kind and device, so that pairs of mixed kinds can be
 * grouped by counting. `class` is zeroed. */
static int set_classes(struct kvti_layout *layout, uint32_t *class)
{
    uint64_t *keys;
    size_t used;

    layout->class_count = 1;
    if (layout->one_kind) {
        return KVT_OK;
    }
    keys = calloc(layout->run_count, sizeof *keys);
    if (keys == NULL) {
        return KVT_ENOMEM;
    }
    for (uint32_t i = 0; i < layout->run_count; i++) {
        keys[i] = class_key(&layout->runs[i]);
    }
    used = distinct(keys, layout->run_count);
    for (uint32_t i = 0; i < layout->run_count; i++) {
        uint64_t key = class_key(&layout->runs[i]);
        const uint64_t *at = bsearch(&key, keys, used, sizeof *keys,
                                     order_keys);

        kvti_assert(at != NULL);
        class[i] = (uint32_t)(at - keys);
    }
    layout->class_count = (uint32_t)used;
    free(keys);
    return KVT_OK;
}

/* Everything that follows from the runs but the classes. */
static void set_facts(struct kvti_layout *layout, uint64_t *first)
{
    const struct kvt_run *runs = layout->runs;

    layout->one_kind = true;
    layout->block_bytes = runs[0].block_bytes;
    layout->run_blocks = runs[0].count;
    for (uint32_t i = 0; i < layout->run_count; i++) {
        first[i] = layout->block_count;
        layout->block_count += runs[i].count;
        if (class_key(&runs[i]) != class_key(&runs[0])) {
            layout->one_kind = false;
        }
        if (runs[i].block_bytes != runs[0].block_bytes) {
            layout->block_bytes = 0;
        }
        if (runs[i].count != runs[0].count) {
            layout->run_blocks = 0;
        }
    }
    first[layout->run_count] = layout->block_count;
}

int kvti_layout_new(const struct kvt_run *runs, size_t count,
                    const struct kvti_regions *regions,
                    struct kvti_layout **ret, struct kvt_error *err)
{
    const size_t run_size = sizeof *runs + sizeof(uint64_t) + sizeof(uint32_t);
    struct kvti_layout *layout;
    uint64_t *first;
    uint32_t *class;
    int code = check_count(runs, count, err);

    if (code != KVT_OK) {
        return code;
    }
    if (count > (SIZE_MAX / 2) / run_size) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu runs", count);
    }
    layout = calloc(1, sizeof *layout + count * run_size + sizeof *first);
    if (layout == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu runs", count);
    }
    atomic_init(&layout->refs, 1);
    layout->run_count = (uint32_t)count;
    memcpy(layout->runs, runs, count * sizeof *runs);
    /* The copy: another thread may change the caller's. */
    code = check_runs(layout->runs, count, regions, err);
    if (code != KVT_OK) {
        free(layout);
        return code;
    }
    first = (uint64_t *)(void *)&layout->runs[count];
    class = (uint32_t *)(void *)&first[count + 1];
    layout->first = first;
    layout->class = class;
    set_facts(layout, first);
    if (set_classes(layout, class) != KVT_OK) {
        free(layout);
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu runs", count);
    }
    *ret = layout;
    return KVT_OK;
}

void kvti_layout_ref(struct kvti_layout *layout)
{
    uint32_t refs = atomic_fetch_add_explicit(&layout->refs, 1,
                                              memory_order_relaxed);

    kvti_assert(refs > 0 && refs < UINT32_MAX);
}

void kvti_layout_unref(struct kvti_layout *layout)
{
    uint32_t refs;

    if (layout == NULL) {
        return;
    }
    /* Release: our reads come before the free; acquire: the free comes after
     * everybody's. */
    refs = atomic_fetch_sub_explicit(&layout->refs, 1, memory_order_acq_rel);
    kvti_assert(refs > 0);
    if (refs == 1) {
        free(layout);
    }
}

int kvti_layout_check(const struct kvti_layout *layout,
                      const struct kvti_regions *regions, struct kvt_error *err)
{
    for (uint32_t i = 0; i < layout->run_count; i++) {
        int code = check_inside(&layout->runs[i], i, regions, err);

        if (code != KVT_OK) {
            return code;
        }
    }
    return KVT_OK;
}

/* `last` is the region's last byte, so that one that ends at the top of the
 * address space needs no special case. */
static bool run_overlaps(const struct kvt_run *run, uint64_t addr,
                         uint64_t last)
{
    uint64_t end = run->addr + run->block_bytes;
    uint64_t index = 0;

    /* The first block that ends above `addr`. */
    if (addr >= end) {
        index = (addr - end) / run->stride_bytes + 1;
    }
    return index < run->count && run->addr + index * run->stride_bytes <= last;
}

bool kvti_layout_overlaps(const struct kvti_layout *layout, uint64_t addr,
                          uint64_t length, uint32_t kind, uint32_t device)
{
    uint64_t last;

    if (length == 0) {
        return false;
    }
    if (__builtin_add_overflow(addr, length - 1, &last)) {
        last = UINT64_MAX;
    }
    for (uint32_t i = 0; i < layout->run_count; i++) {
        const struct kvt_run *run = &layout->runs[i];

        if (run->kind == kind && run->device == device &&
            run_overlaps(run, addr, last)) {
            return true;
        }
    }
    return false;
}

uint32_t kvti_layout_run(const struct kvti_layout *layout, uint64_t index)
{
    uint32_t low = 0;
    uint32_t high = layout->run_count;

    kvti_assert(index < layout->block_count);
    if (layout->run_count == 1) {
        return 0;
    }
    if (layout->run_blocks != 0) {
        return (uint32_t)(index / layout->run_blocks);
    }
    /* The run before the first one that starts above `index`. */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (layout->first[middle] <= index) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - 1;
}

const struct kvt_run *kvti_layout_block(const struct kvti_layout *layout,
                                        uint64_t index, uint64_t *ret_addr)
{
    uint32_t at = kvti_layout_run(layout, index);
    const struct kvt_run *run = &layout->runs[at];

    *ret_addr = run->addr + (index - layout->first[at]) * run->stride_bytes;
    return run;
}
