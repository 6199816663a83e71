/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts against an oracle that lists every block of small random runs: the
 * address behind each index, and whether a range shares a byte with a block
 * (gaps between blocks do not count). Refused shapes name the run, change no
 * output, and cover every overflow; memory depends on runs and not on blocks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <malloc.h>
#include <string.h>

#include "layout.h"
#include "unit.h"

#define SPACE 256
#define RUNS_MAX 6

struct fixture {
    struct kvti_regions regions;
};

static int set_up(void **state)
{
    static struct fixture fixture;

    fixture = (struct fixture){0};
    for (uint32_t space = 0; space < 4; space++) {
        add_region(&fixture.regions, 0, SPACE, space & 1, space >> 1);
    }
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;

    kvti_regions_fini(&fixture->regions);
    return 0;
}

/* A run that fits into the space. */
static struct kvt_run random_run(struct rng *rng)
{
    struct kvt_run run = {.kind = (uint32_t)rng_below(rng, 2),
                          .device = (uint32_t)rng_below(rng, 2)};

    run.block_bytes = 1 + rng_below(rng, 8);
    run.stride_bytes = run.block_bytes + rng_below(rng, 2) * rng_below(rng, 9);
    run.count = 1 + rng_below(rng, 10);
    run.addr = rng_below(rng, SPACE - 10 * 17);
    return run;
}

/* Makes some layouts uniform, which is another path to the run. */
static size_t random_runs(struct rng *rng, struct kvt_run *runs)
{
    size_t count = 1 + rng_below(rng, RUNS_MAX);
    bool uniform = rng_below(rng, 2) == 0;

    for (size_t i = 0; i < count; i++) {
        runs[i] = random_run(rng);
        if (uniform) {
            runs[i].count = runs[0].count;
            runs[i].kind = runs[0].kind;
            runs[i].device = runs[0].device;
        }
    }
    return count;
}

static void compare_blocks(const struct kvti_layout *layout,
                           const struct kvt_run *runs, size_t count)
{
    uint64_t index = 0;

    for (size_t i = 0; i < count; i++) {
        for (uint64_t block = 0; block < runs[i].count; block++, index++) {
            uint64_t addr;
            const struct kvt_run *run = kvti_layout_block(layout, index, &addr);

            assert_ptr_equal(run, &layout->runs[i]);
            assert_int_equal(kvti_layout_run(layout, index), i);
            assert_int_equal(addr, runs[i].addr + block * runs[i].stride_bytes);
        }
    }
    assert_int_equal(layout->block_count, index);
}

static void mark_bytes(const struct kvt_run *runs, size_t count, uint32_t kind,
                       uint32_t device, bool *bytes)
{
    memset(bytes, 0, SPACE * sizeof *bytes);
    for (size_t i = 0; i < count; i++) {
        const struct kvt_run *run = &runs[i];

        if (run->kind != kind || run->device != device) {
            continue;
        }
        for (uint64_t block = 0; block < run->count; block++) {
            memset(bytes + run->addr + block * run->stride_bytes, 1,
                   run->block_bytes * sizeof *bytes);
        }
    }
}

static void compare_overlaps(const struct kvti_layout *layout,
                             const struct kvt_run *runs, size_t count,
                             uint32_t kind, uint32_t device)
{
    bool bytes[SPACE];

    mark_bytes(runs, count, kind, device, bytes);
    for (uint64_t addr = 0; addr < SPACE; addr++) {
        bool hit = false;

        assert_false(kvti_layout_overlaps(layout, addr, 0, kind, device));
        for (uint64_t length = 1; length <= SPACE - addr; length++) {
            hit = hit || bytes[addr + length - 1];
            assert_int_equal(
                kvti_layout_overlaps(layout, addr, length, kind, device), hit);
        }
    }
}

static void random_layouts_match_the_oracle(void **state)
{
    struct fixture *fixture = *state;

    for (uint64_t seed = 0; seed < 100; seed++) {
        struct rng rng = {seed};
        struct kvt_run runs[RUNS_MAX];
        size_t count = random_runs(&rng, runs);
        struct kvti_layout *layout;

        assert_int_equal(
            kvti_layout_new(runs, count, &fixture->regions, &layout, NULL),
            KVT_OK);
        compare_blocks(layout, runs, count);
        for (uint32_t space = 0; space < 4; space++) {
            compare_overlaps(layout, runs, count, space & 1, space >> 1);
        }
        kvti_layout_unref(layout);
    }
}

static void facts_tell_uniform_from_mixed(void **state)
{
    struct fixture *fixture = *state;
    struct kvt_run runs[3];
    struct kvti_layout *layout;

    for (size_t i = 0; i < 3; i++) {
        runs[i] = (struct kvt_run){
            .addr = 32 * i, .block_bytes = 4, .stride_bytes = 8, .count = 3};
    }
    assert_int_equal(kvti_layout_new(runs, 3, &fixture->regions, &layout, NULL),
                     KVT_OK);
    assert_int_equal(layout->block_bytes, 4);
    assert_int_equal(layout->run_blocks, 3);
    assert_int_equal(layout->block_count, 9);
    assert_true(layout->one_kind);
    assert_int_equal(layout->class_count, 1);
    kvti_layout_unref(layout);

    runs[1].block_bytes = 5;
    runs[1].count = 2;
    runs[1].kind = KVT_VRAM;
    assert_int_equal(kvti_layout_new(runs, 3, &fixture->regions, &layout, NULL),
                     KVT_OK);
    assert_int_equal(layout->block_bytes, 0);
    assert_int_equal(layout->run_blocks, 0);
    assert_int_equal(layout->block_count, 8);
    assert_false(layout->one_kind);
    assert_int_equal(layout->class_count, 2);
    assert_int_equal(layout->class[0], layout -> class[2]);
    assert_int_not_equal(layout->class[0], layout -> class[1]);
    kvti_layout_unref(layout);
}

/* The layout is refused, the output untouched, and the text names the run. */
static void expect_refused(const struct kvti_regions *regions,
                           const struct kvt_run *runs, size_t count, int code,
                           const char *part)
{
    struct kvti_layout *layout = (struct kvti_layout *)(void *)&layout;
    struct kvt_error err = {0};

    assert_int_equal(kvti_layout_new(runs, count, regions, &layout, &err),
                     code);
    assert_ptr_equal(layout, &layout);
    assert_int_equal(err.code, code);
    if (strstr(err.text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, part);
    }
}

static void bad_shapes_are_refused_by_position(void **state)
{
    struct fixture *fixture = *state;
    const struct kvt_run good = {
        .addr = 8, .block_bytes = 4, .stride_bytes = 8, .count = 4};
    struct kvt_run runs[2] = {good, good};

    expect_refused(&fixture->regions, NULL, 1, KVT_EINVAL, "at least one");
    expect_refused(&fixture->regions, runs, 0, KVT_EINVAL, "at least one");
    expect_refused(&fixture->regions, runs, (size_t)UINT32_MAX + 1, KVT_EINVAL,
                   "4294967296");
    runs[1].count = 0;
    expect_refused(&fixture->regions, runs, 2, KVT_EINVAL, "run 1 ");
    runs[1] = good;
    runs[1].block_bytes = 0;
    expect_refused(&fixture->regions, runs, 2, KVT_EINVAL, "run 1 ");
    runs[1] = good;
    runs[1].stride_bytes = 3;
    expect_refused(&fixture->regions, runs, 2, KVT_EINVAL, "run 1 ");
    runs[1] = good;
    runs[1].kind = 2;
    expect_refused(&fixture->regions, runs, 2, KVT_EINVAL, "run 1 ");
}

static void wrapping_runs_are_refused(void **state)
{
    struct fixture *fixture = *state;
    const struct kvt_run wrapping[] = {
        {.addr = UINT64_MAX, .block_bytes = 1, .stride_bytes = 1, .count = 1},
        {.addr = UINT64_MAX - 6,
         .block_bytes = 4,
         .stride_bytes = 4,
         .count = 2},
        {.addr = 8,
         .block_bytes = 1,
         .stride_bytes = UINT64_C(1) << 33,
         .count = UINT64_C(1) << 33},
        {.addr = 8,
         .block_bytes = UINT64_MAX - 4,
         .stride_bytes = UINT64_MAX,
         .count = 1},
        {.addr = 8, .block_bytes = 4, .stride_bytes = UINT64_MAX, .count = 2},
        {.addr = 0,
         .block_bytes = UINT64_C(1) << 63,
         .stride_bytes = UINT64_C(1) << 63,
         .count = 2},
    };

    for (size_t i = 0; i < sizeof wrapping / sizeof *wrapping; i++) {
        expect_refused(&fixture->regions, &wrapping[i], 1, KVT_EINVAL,
                       "run 0 ends past the top");
    }
}

static void too_many_blocks_in_all_are_refused(void **state)
{
    struct kvti_regions regions = {0};
    const struct kvt_run half = {.addr = 0,
                                 .block_bytes = 1,
                                 .stride_bytes = 1,
                                 .count = UINT64_C(1) << 63};
    const struct kvt_run runs[2] = {half, half};

    (void)state;
    add_region(&regions, 0, UINT64_MAX, KVT_DRAM, 0);
    expect_refused(&regions, runs, 2, KVT_EINVAL, "run 1 ");
    kvti_regions_fini(&regions);
}

static void runs_outside_the_memory_are_refused(void **state)
{
    struct fixture *fixture = *state;
    struct kvt_run runs[2] = {
        {.addr = 0, .block_bytes = 4, .stride_bytes = 4, .count = SPACE / 4},
        {.addr = 1, .block_bytes = 4, .stride_bytes = 4, .count = SPACE / 4}};

    expect_refused(&fixture->regions, runs, 2, KVT_ERANGE, "run 1 ");
    runs[1] = runs[0];
    runs[1].device = 7;
    expect_refused(&fixture->regions, runs, 2, KVT_ERANGE, "device 7");
}

static void check_sees_that_memory_left(void **state)
{
    struct fixture *fixture = *state;
    const struct kvt_run run = {
        .addr = 0, .block_bytes = 4, .stride_bytes = 8, .count = 4};
    struct kvti_regions smaller = {0};
    struct kvti_layout *layout;
    struct kvt_error err;

    assert_int_equal(kvti_layout_new(&run, 1, &fixture->regions, &layout, NULL),
                     KVT_OK);
    assert_int_equal(kvti_layout_check(layout, &fixture->regions, NULL),
                     KVT_OK);
    add_region(&smaller, 0, 27, KVT_DRAM, 0);
    assert_int_equal(kvti_layout_check(layout, &smaller, &err), KVT_ERANGE);
    assert_non_null(strstr(err.text, "run 0 "));
    add_region(&smaller, 27, 1, KVT_DRAM, 0);
    assert_int_equal(kvti_layout_check(layout, &smaller, NULL), KVT_OK);
    kvti_regions_fini(&smaller);
    kvti_layout_unref(layout);
}

static void memory_depends_on_runs_and_not_on_blocks(void **state)
{
    const uint64_t blocks = 1200000;
    const uint64_t run_bytes = blocks * 65536;
    struct kvti_regions regions = {0};
    struct kvt_run runs[160];
    struct kvti_layout *layout;
    uint64_t addr;

    (void)state;
    add_region(&regions, run_bytes, 160 * run_bytes, KVT_DRAM, 0);
    for (uint64_t i = 0; i < 160; i++) {
        runs[i] = (struct kvt_run){.addr = (i + 1) * run_bytes,
                                   .block_bytes = 65536,
                                   .stride_bytes = 65536,
                                   .count = blocks};
    }
    assert_int_equal(kvti_layout_new(runs, 160, &regions, &layout, NULL),
                     KVT_OK);
    assert_true(malloc_usable_size(layout) < (size_t)64 * 1024);
    assert_int_equal(layout->block_count, 160 * blocks);
    kvti_layout_block(layout, 160 * blocks - 1, &addr);
    assert_int_equal(addr, run_bytes + 160 * run_bytes - 65536);
    kvti_layout_unref(layout);
    kvti_regions_fini(&regions);
}

static void ranges_at_the_top_of_the_address_space_work(void **state)
{
    struct kvti_regions regions = {0};
    const struct kvt_run run = {.addr = UINT64_MAX - 100,
                                .block_bytes = 10,
                                .stride_bytes = 45,
                                .count = 3};
    struct kvti_layout *layout;

    (void)state;
    add_region(&regions, UINT64_MAX - 100, 100, KVT_DRAM, 0);
    assert_int_equal(kvti_layout_new(&run, 1, &regions, &layout, NULL), KVT_OK);
    assert_true(kvti_layout_overlaps(layout, UINT64_MAX - 1, 1, KVT_DRAM, 0));
    assert_true(
        kvti_layout_overlaps(layout, UINT64_MAX - 20, 500, KVT_DRAM, 0));
    assert_false(kvti_layout_overlaps(layout, UINT64_MAX, 1, KVT_DRAM, 0));
    assert_false(
        kvti_layout_overlaps(layout, UINT64_MAX - 90, 35, KVT_DRAM, 0));
    assert_true(kvti_layout_overlaps(layout, UINT64_MAX - 90, 36, KVT_DRAM, 0));
    kvti_layout_unref(layout);
    kvti_regions_fini(&regions);
}

static void references_keep_a_layout(void **state)
{
    struct fixture *fixture = *state;
    const struct kvt_run run = {
        .addr = 0, .block_bytes = 4, .stride_bytes = 8, .count = 4};
    struct kvti_layout *layout;

    assert_int_equal(kvti_layout_new(&run, 1, &fixture->regions, &layout, NULL),
                     KVT_OK);
    kvti_layout_ref(layout);
    kvti_layout_unref(layout);
    assert_int_equal(layout->block_count, 4);
    kvti_layout_unref(layout);
    kvti_layout_unref(NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(random_layouts_match_the_oracle),
        TEST(facts_tell_uniform_from_mixed),
        TEST(bad_shapes_are_refused_by_position),
        TEST(wrapping_runs_are_refused),
        TEST(too_many_blocks_in_all_are_refused),
        TEST(runs_outside_the_memory_are_refused),
        TEST(check_sees_that_memory_left),
        TEST(memory_depends_on_runs_and_not_on_blocks),
        TEST(ranges_at_the_top_of_the_address_space_work),
        TEST(references_keep_a_layout),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
