/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sets of regions against an oracle that asks every entry about every byte of
 * a small address space: what is covered, which entry holds an address, which
 * one is exactly this one; with overlaps, nesting, touching neighbours, two
 * kinds, two devices, removals, and entries that a filter leaves out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "unit.h"

#define SPACE 48
#define SPACES 4 /* two kinds, two devices */

/* The entries that were added and not removed, in no order. */
struct oracle {
    struct kvti_mem mems[64];
    size_t count;
};

static bool is_open(const struct kvti_mem *mem, void *ctx)
{
    (void)ctx;
    return mem->gate_gen != 0;
}

static bool holds(const struct kvti_mem *mem, uint64_t byte, uint32_t kind,
                  uint32_t device)
{
    return mem->kind == kind && mem->device == device && mem->addr <= byte &&
           byte < mem->addr + mem->length;
}

static bool oracle_covers(const struct oracle *oracle, uint64_t addr,
                          uint64_t length, uint32_t kind, uint32_t device)
{
    for (uint64_t byte = addr; byte < addr + length; byte++) {
        bool found = false;

        for (size_t i = 0; i < oracle->count && !found; i++) {
            found = oracle->mems[i].gate_gen != 0 &&
                    holds(&oracle->mems[i], byte, kind, device);
        }
        if (!found) {
            return false;
        }
    }
    return length > 0;
}

/* The lowest entry, by address and then length, that holds the byte. */
static const struct kvti_mem *oracle_at(const struct oracle *oracle,
                                        uint64_t addr, uint32_t kind,
                                        uint32_t device)
{
    const struct kvti_mem *best = NULL;

    for (size_t i = 0; i < oracle->count; i++) {
        const struct kvti_mem *mem = &oracle->mems[i];

        if (holds(mem, addr, kind, device) &&
            (best == NULL || kvti_mem_order(mem, best) < 0)) {
            best = mem;
        }
    }
    return best;
}

static void compare_bytes(const struct kvti_regions *set,
                          const struct oracle *oracle, uint32_t kind,
                          uint32_t device)
{
    for (uint64_t addr = 0; addr < SPACE + 2; addr++) {
        const struct kvti_mem *want = oracle_at(oracle, addr, kind, device);
        const struct kvti_mem *got = kvti_regions_at(set, addr, kind, device);

        assert_int_equal(got == NULL, want == NULL);
        if (want != NULL) {
            assert_int_equal(kvti_mem_order(got, want), 0);
        }
        for (uint64_t length = 0; length < SPACE + 2 - addr; length++) {
            assert_int_equal(
                kvti_regions_cover(set, addr, length, kind, device),
                oracle_covers(oracle, addr, length, kind, device));
        }
    }
}

static void compare(struct kvti_regions *set, const struct oracle *oracle)
{
    assert_int_equal(set->count, oracle->count);
    for (size_t i = 1; i < set->count; i++) {
        assert_true(kvti_mem_order(&set->mems[i - 1], &set->mems[i]) <= 0);
    }
    for (size_t i = 0; i < oracle->count; i++) {
        const struct kvti_mem *mem = &oracle->mems[i];
        const struct kvti_mem *got = kvti_regions_find(
            set, mem->addr, mem->length, mem->kind, mem->device);

        assert_non_null(got);
        assert_int_equal(kvti_mem_order(got, mem), 0);
    }
    for (uint32_t space = 0; space < SPACES; space++) {
        compare_bytes(set, oracle, space & 1, space >> 1);
    }
}

static void add_random(struct rng *rng, struct kvti_regions *set,
                       struct oracle *oracle)
{
    uint64_t addr = rng_below(rng, SPACE);
    const struct kvti_mem mem = {
        .addr = addr,
        .length = 1 + rng_below(rng, rng_below(rng, 4) == 0 ? SPACE - addr
                                     : addr < SPACE - 4     ? 4
                                                            : SPACE - addr),
        .kind = (uint32_t)rng_below(rng, 2),
        .device = (uint32_t)rng_below(rng, 2),
        .gate_gen = (uint32_t)rng_below(rng, 5)};

    assert_int_equal(kvti_regions_reserve(set, 1), KVT_OK);
    assert_int_equal(kvti_mem_order(kvti_regions_add(set, &mem), &mem), 0);
    oracle->mems[oracle->count++] = mem;
}

/* Of equal entries any one may go; the oracle drops the one that is like it. */
static void remove_random(struct rng *rng, struct kvti_regions *set,
                          struct oracle *oracle)
{
    struct kvti_mem *victim = &set->mems[rng_below(rng, set->count)];

    for (size_t i = 0; i < oracle->count; i++) {
        if (kvti_mem_order(&oracle->mems[i], victim) == 0 &&
            oracle->mems[i].gate_gen == victim->gate_gen) {
            oracle->mems[i] = oracle->mems[--oracle->count];
            break;
        }
    }
    kvti_regions_remove(set, victim);
}

static void random_sets_match_the_oracle(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct rng rng = {seed};
        struct kvti_regions set = {0};
        struct oracle oracle = {.count = 0};

        for (size_t round = 0; round < 10; round++) {
            size_t adds = 1 + rng_below(&rng, 5);

            for (size_t i = 0; i < adds; i++) {
                add_random(&rng, &set, &oracle);
            }
            for (size_t i = rng_below(&rng, 4); i > 0 && set.count > 0; i--) {
                remove_random(&rng, &set, &oracle);
            }
            kvti_regions_update(&set, is_open, NULL);
            compare(&set, &oracle);
        }
        kvti_regions_fini(&set);
    }
}

static void an_empty_set_covers_nothing(void **state)
{
    struct kvti_regions set = {0};

    (void)state;
    kvti_regions_update(&set, NULL, NULL);
    assert_false(kvti_regions_cover(&set, 0, 1, KVT_DRAM, 0));
    assert_null(kvti_regions_at(&set, 0, KVT_DRAM, 0));
    assert_null(kvti_regions_find(&set, 0, 1, KVT_DRAM, 0));
    kvti_regions_fini(&set);
    kvti_regions_fini(NULL);
}

static void zero_and_wrapping_lengths_are_not_covered(void **state)
{
    struct kvti_regions set = {0};

    (void)state;
    add_region(&set, UINT64_MAX - 10, 10, KVT_DRAM, 0);
    assert_true(kvti_regions_cover(&set, UINT64_MAX - 10, 10, KVT_DRAM, 0));
    assert_true(kvti_regions_cover(&set, UINT64_MAX - 1, 1, KVT_DRAM, 0));
    assert_false(kvti_regions_cover(&set, UINT64_MAX - 10, 0, KVT_DRAM, 0));
    assert_false(kvti_regions_cover(&set, UINT64_MAX - 10, 11, KVT_DRAM, 0));
    assert_false(
        kvti_regions_cover(&set, UINT64_MAX - 10, UINT64_MAX, KVT_DRAM, 0));
    assert_false(kvti_regions_cover(&set, UINT64_MAX, 1, KVT_DRAM, 0));
    kvti_regions_fini(&set);
}

static void touching_regions_are_joined(void **state)
{
    struct kvti_regions set = {0};

    (void)state;
    add_region(&set, 100, 10, KVT_DRAM, 0);
    add_region(&set, 120, 10, KVT_DRAM, 0);
    assert_false(kvti_regions_cover(&set, 105, 20, KVT_DRAM, 0));
    add_region(&set, 110, 10, KVT_DRAM, 0);
    assert_true(kvti_regions_cover(&set, 105, 20, KVT_DRAM, 0));
    assert_int_equal(set.span_count, 1);
    kvti_regions_fini(&set);
}

static void entries_in_any_order_end_up_sorted(void **state)
{
    const size_t count = 4096;
    struct kvti_regions set = {0};

    (void)state;
    assert_int_equal(kvti_regions_reserve(&set, count), KVT_OK);
    for (size_t i = 0; i < count; i++) {
        /* An odd factor visits every number below the power of two once. */
        uint64_t at = i * 1237 % count;
        const struct kvti_mem mem = {.addr = 4096 * (at + 1), .length = 4096};

        kvti_regions_add(&set, &mem);
    }
    kvti_regions_update(&set, NULL, NULL);
    assert_int_equal(set.span_count, 1);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(set.mems[i].addr, 4096 * (i + 1));
    }
    kvti_regions_fini(&set);
}

static void reserved_room_does_not_move(void **state)
{
    struct kvti_regions set = {0};
    const struct kvti_mem *mems;

    (void)state;
    assert_int_equal(kvti_regions_reserve(&set, 100), KVT_OK);
    mems = set.mems;
    for (uint64_t i = 0; i < 100; i++) {
        const struct kvti_mem mem = {.addr = 1 + 2 * i, .length = 1};

        kvti_regions_add(&set, &mem);
    }
    assert_ptr_equal(set.mems, mems);
    kvti_regions_update(&set, NULL, NULL);
    assert_int_equal(set.span_count, 100);
    kvti_regions_fini(&set);
}

static void a_join_adds_what_is_new_and_keeps_what_is_there(void **state)
{
    struct kvti_regions set = {0};
    struct kvti_regions more = {0};

    (void)state;
    for (uint64_t i = 1; i <= 8; i++) {
        /* Both have 2, 6; the rest lie before, between and behind. */
        if (i % 2 == 0) {
            add_region(&set, 100 * i, 10, KVT_DRAM, 0);
        }
        if (i % 4 != 0) {
            add_region(&more, 100 * i, 10, KVT_DRAM, 0);
        }
    }
    set.mems[0].key_hash = 1;
    assert_int_equal(kvti_regions_reserve(&set, more.count), KVT_OK);
    kvti_regions_join(&set, &more);
    kvti_regions_join(&set, &(struct kvti_regions){0});
    assert_int_equal(set.count, 8);
    for (uint64_t i = 1; i <= 8; i++) {
        assert_int_equal(set.mems[i - 1].addr, 100 * i);
    }
    assert_int_equal(set.mems[1].key_hash, 1);
    kvti_regions_fini(&set);
    assert_int_equal(kvti_regions_reserve(&set, more.count), KVT_OK);
    kvti_regions_join(&set, &more);
    kvti_regions_update(&set, NULL, NULL);
    assert_int_equal(set.count, 6);
    assert_true(kvti_regions_cover(&set, 700, 10, KVT_DRAM, 0));
    kvti_regions_fini(&set);
    kvti_regions_fini(&more);
}

static void absurd_room_is_refused(void **state)
{
    struct kvti_regions set = {0};

    (void)state;
    add_region(&set, 100, 10, KVT_DRAM, 0);
    assert_int_equal(kvti_regions_reserve(&set, SIZE_MAX), KVT_ENOMEM);
    assert_int_equal(kvti_regions_reserve(&set, SIZE_MAX / 64), KVT_ENOMEM);
    assert_true(kvti_regions_cover(&set, 100, 10, KVT_DRAM, 0));
    kvti_regions_fini(&set);
}

static void find_tells_lengths_apart(void **state)
{
    struct kvti_regions set = {0};

    (void)state;
    add_region(&set, 100, 10, KVT_DRAM, 0);
    add_region(&set, 100, 20, KVT_DRAM, 0);
    add_region(&set, 100, 20, KVT_VRAM, 3);
    assert_int_equal(kvti_regions_find(&set, 100, 20, KVT_DRAM, 0)->length, 20);
    assert_int_equal(kvti_regions_find(&set, 100, 20, KVT_VRAM, 3)->device, 3);
    assert_null(kvti_regions_find(&set, 100, 15, KVT_DRAM, 0));
    assert_null(kvti_regions_find(&set, 100, 20, KVT_VRAM, 0));
    assert_null(kvti_regions_find(&set, 101, 10, KVT_DRAM, 0));
    kvti_regions_fini(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_sets_match_the_oracle),
        cmocka_unit_test(an_empty_set_covers_nothing),
        cmocka_unit_test(zero_and_wrapping_lengths_are_not_covered),
        cmocka_unit_test(touching_regions_are_joined),
        cmocka_unit_test(entries_in_any_order_end_up_sorted),
        cmocka_unit_test(reserved_room_does_not_move),
        cmocka_unit_test(a_join_adds_what_is_new_and_keeps_what_is_there),
        cmocka_unit_test(absurd_room_is_refused),
        cmocka_unit_test(find_tells_lengths_apart),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
