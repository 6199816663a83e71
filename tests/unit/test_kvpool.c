/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool of 'kvt replay' and the shapes of models in it: a pool never
 * outgrows the memory it was given, numbers that make no pool are refused,
 * wherever a product of them would wrap, and its checksums see one changed byte
 * anywhere, guards included.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>

#include "../../tools/cli.h"
#include "../../tools/geometry.h"
#include "../../tools/kvpool.h"

/* Seeded numbers: a failure can be repeated. */
struct rng {
    uint64_t state;
};

static uint64_t rng_next(struct rng *rng)
{
    return cli_mix(rng->state++, 0);
}

static uint64_t rng_below(struct rng *rng, uint64_t limit)
{
    return rng_next(rng) % limit;
}

static void models_have_their_pages(void **state)
{
    struct geometry geometry;
    char error[GEOMETRY_TEXT_MAX];

    (void)state;
    assert_true(geometry_model("llama-3.1-70b", 0, 1, &geometry, error));
    assert_int_equal(geometry.regions, 160);
    assert_int_equal(geometry.page_bytes, 32768);
    assert_int_equal(geometry_slot_pages(&geometry), 5120);
    assert_int_equal(geometry_slot_bytes(&geometry), UINT64_C(160) << 20);
    assert_true(geometry_model("deepseek-v3", 0, 8, &geometry, error));
    assert_int_equal(geometry.regions, 61);
    assert_int_equal(geometry.page_bytes, 64 * 576 * 2);
    assert_true(geometry_model("llama-3.1-8b", 32, 16, &geometry, error));
    assert_int_equal(geometry.page_bytes, 32 * 1 * 128 * 2);
    assert_int_equal(geometry.pages, 16);
    assert_false(geometry_model("llama-3.1-8b", 0, 3, &geometry, error));
    assert_false(geometry_model("llama-3.1-8b", 5, 1, &geometry, error));
    assert_false(geometry_model("none", 0, 1, &geometry, error));
    for (unsigned int i = 0; geometry_model_name(i) != NULL; i++) {
        assert_true(
            geometry_model(geometry_model_name(i), 0, 1, &geometry, error));
    }
}

static void a_pool_never_outgrows_its_memory(void **state)
{
    struct rng rng = {5000000};

    (void)state;
    for (int i = 0; i < 20000; i++) {
        struct geometry geometry = {
            .regions = 1 + rng_below(&rng, 200),
            .pages = 1 + rng_below(&rng, 64),
            .page_bytes = 1 + rng_below(&rng, 70000),
        };
        uint64_t memory = rng_below(&rng, UINT64_C(1) << (10 + i % 24));
        uint64_t slots = kvpool_slots_in(&geometry, memory);

        if (slots > 0) {
            assert_true(kvpool_region_offset(&geometry, slots,
                                             geometry.regions) <= memory);
        }
    }
}

/* Numbers of which a product or sum wraps, each at another place, some to a
 * pool that could be had; and pools without anything in them. */
static void numbers_that_make_no_pool_are_refused(void **state)
{
    static const uint64_t third = UINT64_C(0xaaaaaaaaaaaaaaab); /* x 3 = 1 */
    const struct {
        struct geometry geometry;
        uint64_t slots;
    } cases[] = {
        {{1, third, 4096, 0}, 3},
        {{1, third, 1, 0}, 3},
        {{third, 1, 4096, 0}, 3},
        {{1, UINT64_C(1) << 32, UINT64_C(1) << 32, 0}, 1},
        {{1, 1, UINT64_MAX, 0}, 1},
        {{1, 1, UINT64_MAX - 4095, 0}, 1},
        {{UINT64_C(1) << 52, 1, 1, 0}, 1},
        {{1, 1, 1, 0}, UINT64_MAX},
        {{1, 1, 1, 0}, UINT64_C(1) << 32},
        {{1, 1, 1, 0}, UINT32_MAX},
        {{0, 1, 1, 0}, 1},
        {{1, 0, 1, 0}, 1},
        {{1, 1, 0, 0}, 1},
        {{1, 1, 1, 0}, 0},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvpool pool = {0};
        struct kvt_error err = {0};
        int rc = kvpool_open(&pool, &cases[i].geometry, cases[i].slots,
                             i % 2 != 0, &err);

        if (rc != KVT_EINVAL || err.code != KVT_EINVAL || pool.base != NULL) {
            fail_msg("case %zu: %d, %s", i, rc, err.text);
        }
    }
}

/* Every byte of the pool belongs to a slot or a guard, and is watched. */
static void one_changed_byte_anywhere_is_seen(void **state)
{
    const struct geometry geometry = {
        .regions = 3, .pages = 2, .page_bytes = 37};
    enum { SLOTS = 4, KEY = 99 };
    struct kvt_error err;
    struct kvpool pool;

    (void)state;
    assert_int_equal(kvpool_open(&pool, &geometry, SLOTS, false, &err), KVT_OK);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        kvpool_fill(&pool, slot, KEY + slot);
    }
    assert_true(kvpool_guards_intact(&pool));
    for (uint64_t at = 0; at < pool.bytes; at++) {
        unsigned int seen = 0;

        pool.base[at] ^= 1;
        for (uint64_t slot = 0; slot < SLOTS; slot++) {
            seen += kvpool_checksum(&pool, slot) !=
                    kvpool_expected(&geometry, KEY + slot);
        }
        seen += !kvpool_guards_intact(&pool);
        assert_int_equal(seen, 1);
        pool.base[at] ^= 1;
    }
    kvpool_close(&pool);
}

static void no_two_pages_are_alike(void **state)
{
    const struct geometry geometry = {
        .regions = 4, .pages = 4, .page_bytes = 64};
    enum { SLOTS = 8, PAGES = 4 * 4 * SLOTS };
    struct kvt_error err;
    struct kvpool pool;
    const unsigned char *pages[PAGES];

    (void)state;
    assert_int_equal(kvpool_open(&pool, &geometry, SLOTS, false, &err), KVT_OK);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        kvpool_fill(&pool, slot, slot);
        for (uint64_t region = 0; region < geometry.regions; region++) {
            for (uint64_t page = 0; page < geometry.pages; page++) {
                uint64_t index = kvpool_index(&geometry, SLOTS, region, slot,
                                              page);

                assert_true(index < PAGES);
                pages[index] = pool.base +
                               kvpool_region_offset(&geometry, SLOTS, region) +
                               (slot * geometry.pages + page) *
                                   geometry.page_bytes;
            }
        }
    }
    for (size_t i = 0; i < PAGES; i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(pages[i], pages[j], 64);
        }
    }
    kvpool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_have_their_pages),
        cmocka_unit_test(a_pool_never_outgrows_its_memory),
        cmocka_unit_test(numbers_that_make_no_pool_are_refused),
        cmocka_unit_test(one_changed_byte_anywhere_is_seen),
        cmocka_unit_test(no_two_pages_are_alike),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
