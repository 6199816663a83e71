/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a transfer moves: every byte that should change has changed, and no
 * other, in either direction, for every way in which blocks can touch, jump,
 * repeat and be cut into requests. pair_check() looks at all bytes of both
 * pools, gaps and guards included.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static const struct pool_shape touching = {.block_bytes = 256, .count = 64};
static const struct pool_shape apart = {
    .block_bytes = 200, .gap_bytes = 56, .count = 64};

struct list {
    const char *what;
    uint32_t local[8];
    uint32_t remote[8];
    uint32_t count;
    uint64_t copies; /* of blocks that touch */
};

static const struct list lists[] = {
    {"one", {3}, {9}, 1, 1},
    {"the first and the last", {0, 63}, {63, 0}, 2, 2},
    {"adjacent on both sides", {4, 5, 6, 7}, {20, 21, 22, 23}, 4, 1},
    {"adjacent here only", {4, 5, 6, 7}, {20, 22, 24, 26}, 4, 4},
    {"adjacent there only", {4, 6, 8, 10}, {20, 21, 22, 23}, 4, 4},
    {"two groups", {0, 1, 2, 10, 11}, {8, 9, 10, 40, 41}, 5, 2},
    {"a step back", {5, 6, 5, 6}, {1, 2, 3, 4}, 4, 2},
    {"descending", {9, 8, 7}, {9, 8, 7}, 3, 3},
    {"one block twice", {7, 7}, {30, 31}, 2, 2},
    {"adjacent, then a hole", {1, 2, 4, 5}, {1, 2, 3, 4}, 4, 2},
};

static void expect_list(struct pair *pair, const struct list *list, bool read)
{
    for (uint32_t i = 0; i < list->count; i++) {
        if (read) {
            pool_expect(&pair->a.pool, list->local[i], &pair->b.pool,
                        list->remote[i]);
        } else {
            pool_expect(&pair->b.pool, list->remote[i], &pair->a.pool,
                        list->local[i]);
        }
    }
}

static void move_lists(const struct pool_shape *shape, bool read, bool merges)
{
    struct pair pair;

    suite_pair(&pair, shape);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        const struct list *list = &lists[i];
        struct kvt_result result;
        kvt_xfer id;

        if (read && strcmp(list->what, "a step back") == 0) {
            continue; /* two sources for one destination */
        }
        expect_list(&pair, list, read);
        id = read ? pair_read(&pair, list->local, list->remote, list->count,
                              NULL)
                  : pair_write(&pair, list->local, list->remote, list->count,
                               NULL);
        result = wait_done(pair.a.t, id);
        assert_int_equal(result.op, read ? KVT_OP_READ : KVT_OP_WRITE);
        assert_int_equal(result.blocks, list->count);
        assert_int_equal(result.bytes, list->count * shape->block_bytes);
        if (result.copies != (merges ? list->copies : list->count)) {
            fail_msg("%s: %llu copies", list->what,
                     (unsigned long long)result.copies);
        }
        pair_check(&pair);
    }
    pair_close(&pair);
}

static void adjacent_blocks_go_as_one_copy(void **state)
{
    (void)state;
    move_lists(&touching, false, true);
}

static void blocks_with_gaps_go_one_by_one(void **state)
{
    (void)state;
    move_lists(&apart, false, false);
}

static void reads_move_the_other_way(void **state)
{
    (void)state;
    move_lists(&touching, true, true);
    move_lists(&apart, true, false);
}

static void strides_may_differ_between_the_sides(void **state)
{
    const struct pool_shape wide = {
        .block_bytes = 200, .gap_bytes = 300, .count = 64};
    struct node_plan a = suite_plan(&apart);
    struct node_plan b = suite_plan(&wide);
    const uint32_t from[] = {0, 1, 16, 17};
    const uint32_t to[] = {2, 3, 17, 63};
    struct pair pair;

    (void)state;
    pair_open(&pair, &a, &b);
    pair_expect(&pair, from, to, 4);
    (void)wait_done(pair.a.t, pair_write(&pair, from, to, 4, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

static void a_gap_of_one_byte_is_a_gap(void **state)
{
    const struct pool_shape none = {.block_bytes = 100, .count = 64};
    const struct pool_shape one = {
        .block_bytes = 100, .gap_bytes = 1, .count = 64};
    const uint32_t blocks[] = {4, 5, 6, 7};

    (void)state;
    for (int side = 0; side < 2; side++) {
        struct node_plan a = suite_plan(side == 0 ? &one : &none);
        struct node_plan b = suite_plan(side == 0 ? &none : &one);
        struct pair pair;

        pair_open(&pair, &a, &b);
        pair_expect(&pair, blocks, blocks, 4);
        assert_int_equal(
            wait_done(pair.a.t, pair_write(&pair, blocks, blocks, 4, NULL))
                .copies,
            4);
        pair_check(&pair);
        pair_close(&pair);
    }
}

/* Index = region * blocks + slot, as the frameworks lay their layers out. */
static void blocks_are_counted_through_the_runs_in_order(void **state)
{
    struct kvt_run runs[3];
    struct pair pair;
    kvt_layout ours = 0;
    kvt_layout theirs = 0;
    uint32_t from[] = {0, 7, 8, 23, 24, 63};
    uint32_t to[] = {63, 8, 7, 24, 23, 0};
    struct kvt_indices local = indices_u32(from, 6);
    struct kvt_indices remote = indices_u32(to, 6);
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, &apart);
    for (int side = 0; side < 2; side++) {
        struct kvt_run run = pool_run(side == 0 ? &pair.a.pool : &pair.b.pool);

        runs[0] = run;
        runs[0].count = 8;
        runs[1] = run;
        runs[1].addr += 8 * run.stride_bytes;
        runs[1].count = 16;
        runs[2] = run;
        runs[2].addr += 24 * run.stride_bytes;
        runs[2].count = 40;
        assert_kvt_ok(kvt_prepare(pair.a.t, side == 0 ? KVT_SELF : pair.peer,
                                  "runs", runs, 3, side == 0 ? &ours : &theirs,
                                  ERR));
    }
    pair_expect(&pair, from, to, 6);
    assert_kvt_ok(kvt_write_blocks(pair.a.t, pair.peer, ours, &local, theirs,
                                   &remote, NULL, &id, ERR));
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

/* Block lengths must fit pair by pair, not layout by layout. (B27) */
static void block_lengths_are_compared_pair_by_pair(void **state)
{
    struct kvt_run runs[2];
    struct pair pair;
    kvt_layout ours = 0;
    kvt_layout theirs = 0;
    uint32_t from[] = {0, 33};
    uint32_t to[] = {1, 34};
    struct kvt_indices local = indices_u32(from, 2);
    struct kvt_indices remote = indices_u32(to, 2);
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, &apart);
    for (int side = 0; side < 2; side++) {
        struct kvt_run run = pool_run(side == 0 ? &pair.a.pool : &pair.b.pool);

        runs[0] = run;
        runs[0].count = 32;
        runs[1] = run;
        runs[1].addr += 32 * run.stride_bytes;
        runs[1].block_bytes = 100;
        runs[1].count = 32;
        assert_kvt_ok(kvt_prepare(pair.a.t, side == 0 ? KVT_SELF : pair.peer,
                                  "mixed", runs, 2, side == 0 ? &ours : &theirs,
                                  ERR));
    }
    pool_expect(&pair.b.pool, 1, &pair.a.pool, 0);
    pool_expect_bytes(&pair.b.pool, (uintptr_t)pool_block(&pair.b.pool, 34),
                      &pair.a.pool, (uintptr_t)pool_block(&pair.a.pool, 33),
                      100);
    assert_kvt_ok(kvt_write_blocks(pair.a.t, pair.peer, ours, &local, theirs,
                                   &remote, NULL, &id, ERR));
    assert_int_equal(wait_done(pair.a.t, id).bytes, 300);
    pair_check(&pair);
    to[1] = 2;
    assert_kvt_fails_with(kvt_write_blocks(pair.a.t, pair.peer, ours, &local,
                                           theirs, &remote, NULL, &id, ERR),
                          KVT_EMISMATCH, "200");
    pair_check(&pair);
    pair_close(&pair);
}

static void random_lists_land_exactly(void **state)
{
    uint64_t seed = suite_seed();
    int rounds = suite.slow ? 30 : 200;
    struct pair pair;

    (void)state;
    suite_pair(&pair, &touching);
    for (int round = 0; round < rounds; round++) {
        uint32_t local[64];
        uint32_t remote[64];
        uint32_t count = (uint32_t)(test_random(&seed) % 64) + 1;

        for (uint32_t i = 0; i < 64; i++) {
            uint32_t k = (uint32_t)(test_random(&seed) % (i + 1));

            local[i] = (uint32_t)(test_random(&seed) % 64);
            if (i > 0 && local[i] % 3 != 0) {
                local[i] = (local[i - 1] + 1) % 64;
            }
            remote[i] = i; /* each destination once */
            if (round % 2 == 0) {
                remote[i] = remote[k];
                remote[k] = i;
            }
        }
        pair_expect(&pair, local, remote, count);
        (void)wait_done(pair.a.t,
                        pair_write(&pair, local, remote, count, NULL));
        pair_check(&pair);
    }
    pair_close(&pair);
}

/* --------------------------------------------------------------------- cuts */

static void any_cut_into_requests_lands_exactly(void **state)
{
    static const char *const rules[] = {
        "chunk_copies=1", "chunk_copies=3,window=1", "chunk_bytes=1000",
        "chunk_bytes=64,window=2", "chunk_bytes=1,chunk_copies=7,window=1"};
    const uint32_t from[] = {0, 1, 2, 3, 9, 20, 21, 40, 41, 42, 43, 63};
    const uint32_t to[] = {8, 9, 10, 11, 0, 50, 51, 33, 35, 36, 37, 1};

    (void)state;
    need_fault();
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const struct pool_shape shape = {.block_bytes = 97, .count = 64};
        struct kvt_result result;
        struct pair pair;

        suite_fault_pair(&pair, &shape, rules[i], 0);
        pair_expect(&pair, from, to, 12);
        result = wait_done(pair.a.t, pair_write(&pair, from, to, 12, NULL));
        assert_int_equal(result.blocks, 12);
        assert_int_equal(result.bytes, 12 * 97);
        pair_check(&pair);
        pair_close(&pair);
    }
}

/* B16 */
static void sixty_five_thousand_blocks_in_any_order(void **state)
{
    enum { COUNT = 65536 };
    const struct pool_shape shape = {.block_bytes = 64, .count = COUNT};
    uint32_t *order = calloc(COUNT, sizeof *order);
    uint32_t *all = calloc(COUNT, sizeof *all);
    uint64_t seed = suite_seed();
    struct pair pair;

    (void)state;
    assert_true(order != NULL && all != NULL);
    for (uint32_t i = 0; i < COUNT; i++) {
        uint32_t k = (uint32_t)(test_random(&seed) % (i + 1));

        all[i] = i;
        order[i] = order[k];
        order[k] = i;
    }
    suite_pair(&pair, &shape);
    pair_expect(&pair, all, order, COUNT);
    (void)wait_done(pair.a.t, pair_write(&pair, all, order, COUNT, NULL));
    pair_check(&pair);
    pair_expect(&pair, all, all, COUNT);
    (void)wait_done(pair.a.t, pair_write(&pair, all, all, COUNT, NULL));
    pair_check(&pair);
    pair_close(&pair);
    free(order);
    free(all);
}

static void one_huge_block_is_moved_whole(void **state)
{
    const struct pool_shape shape = {.block_bytes = 48 * 1048576 + 13,
                                     .count = 1};
    struct kvt_result result;
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    pair_expect(&pair, (uint32_t[]){0}, (uint32_t[]){0}, 1);
    result = wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    assert_int_equal(result.blocks, 1);
    pair_check(&pair);
    pair_close(&pair);
}

static void blocks_of_one_byte_are_moved(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 1, .gap_bytes = 2, .count = 100};
    const uint32_t from[] = {0, 99, 50};
    const uint32_t to[] = {99, 0, 51};
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    pair_expect(&pair, from, to, 3);
    (void)wait_done(pair.a.t, pair_write(&pair, from, to, 3, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------------- pieces */

static struct kvt_copy piece_at(const struct pair *pair, uint64_t local,
                                uint64_t remote, uint64_t length)
{
    return (struct kvt_copy){
        .local_addr = pool_region(&pair->a.pool).addr + local,
        .peer_addr = pool_region(&pair->b.pool).addr + remote,
        .length = length};
}

static void pieces_of_any_length_are_one_transfer(void **state)
{
    struct kvt_copy pieces[5];
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, &apart);
    pieces[0] = piece_at(&pair, 0, 4000, 1);
    pieces[1] = piece_at(&pair, 17, 9, 3000);
    pieces[2] = (struct kvt_copy){.local_addr = 1, .peer_addr = UINT64_MAX};
    pieces[3] = piece_at(&pair, 5000, 5001, 4096);
    pieces[4] = piece_at(&pair, 17 + 3000, 9 + 3000, 500);
    for (int i = 0; i < 5; i++) {
        if (pieces[i].length > 0) {
            pool_expect_bytes(&pair.b.pool, pieces[i].peer_addr, &pair.a.pool,
                              pieces[i].local_addr, (size_t)pieces[i].length);
        }
    }
    assert_kvt_ok(kvt_write(pair.a.t, pair.peer, pieces, 5, NULL, &id, ERR));
    result = wait_done(pair.a.t, id);
    assert_int_equal(result.bytes, 1 + 3000 + 4096 + 500);
    pair_check(&pair);
    assert_kvt_ok(kvt_read(pair.a.t, pair.peer, &pieces[3], 1, NULL, &id, ERR));
    pool_expect_bytes(&pair.a.pool, pieces[3].local_addr, &pair.b.pool,
                      pieces[3].peer_addr, 4096);
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

static void pieces_outside_registered_memory_are_refused(void **state)
{
    struct kvt_copy pieces[2];
    uint64_t length;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, &touching);
    length = pool_region(&pair.a.pool).length;
    pieces[0] = piece_at(&pair, 0, 0, 16);
#define REFUSE(piece, code, words)                                             \
    pieces[1] = (piece);                                                       \
    assert_kvt_fails_with(                                                     \
        kvt_write(pair.a.t, pair.peer, pieces, 2, NULL, &id, ERR), (code),     \
        (words));                                                              \
    assert_kvt_fails(kvt_read(pair.a.t, pair.peer, pieces, 2, NULL, &id, ERR), \
                     (code))
    REFUSE(piece_at(&pair, length - 15, 0, 16), KVT_ERANGE, "piece 1");
    REFUSE(piece_at(&pair, 0, length - 15, 16), KVT_ERANGE, "piece 1");
    REFUSE(piece_at(&pair, UINT64_MAX, 0, 1), KVT_ERANGE, "piece 1");
    REFUSE(piece_at(&pair, 0, 0, UINT64_MAX), KVT_EINVAL, "piece 1");
#undef REFUSE
    pieces[0].length = 0;
    assert_kvt_fails(kvt_write(pair.a.t, pair.peer, pieces, 1, NULL, &id, ERR),
                     KVT_EINVAL);
    assert_kvt_fails(kvt_write(pair.a.t, pair.peer, pieces, 0, NULL, &id, ERR),
                     KVT_EINVAL);
    assert_int_equal(id, 0);
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(adjacent_blocks_go_as_one_copy),
    cmocka_unit_test(blocks_with_gaps_go_one_by_one),
    cmocka_unit_test(reads_move_the_other_way),
    cmocka_unit_test(strides_may_differ_between_the_sides),
    cmocka_unit_test(a_gap_of_one_byte_is_a_gap),
    cmocka_unit_test(blocks_are_counted_through_the_runs_in_order),
    cmocka_unit_test(block_lengths_are_compared_pair_by_pair),
    cmocka_unit_test(random_lists_land_exactly),
    cmocka_unit_test(any_cut_into_requests_lands_exactly),
    cmocka_unit_test(sixty_five_thousand_blocks_in_any_order),
    cmocka_unit_test(one_huge_block_is_moved_whole),
    cmocka_unit_test(blocks_of_one_byte_are_moved),
    cmocka_unit_test(pieces_of_any_length_are_one_transfer),
    cmocka_unit_test(pieces_outside_registered_memory_are_refused),
};

const struct test_group writes_group = TEST_GROUP("writes", cases);
