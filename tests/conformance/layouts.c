/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts: a run's shape is checked, names are replaced without disturbing who
 * uses the old one, and neither time nor memory depends on the number of
 * blocks. Big pools are reserved address space of which few pages exist.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "suite.h"

#define GIB (UINT64_C(1) << 30)

static void prepare_fails(const struct node *node, const struct kvt_run *runs,
                          size_t count, int code, const char *words)
{
    kvt_layout layout = 0;

    assert_kvt_fails_with(
        kvt_prepare(node->t, KVT_SELF, "bad", runs, count, &layout, ERR), code,
        words);
    assert_int_equal(layout, 0);
    assert_kvt_fails(kvt_layout_find(node->t, KVT_SELF, "bad", &layout),
                     KVT_ENOENT);
}

static void malformed_runs_are_refused_by_position(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_run runs[2];
    struct node node;

    (void)state;
    node_open(&node, &plan);
    runs[0] = pool_run(&node.pool);
#define REFUSE(field, value, code)                                             \
    runs[1] = runs[0];                                                         \
    runs[1].field = (value);                                                   \
    prepare_fails(&node, runs, 2, (code), "run 1")
    REFUSE(count, 0, KVT_EINVAL);
    REFUSE(block_bytes, 0, KVT_EINVAL);
    REFUSE(stride_bytes, runs[0].block_bytes - 1, KVT_EINVAL);
    REFUSE(kind, 9, KVT_EINVAL);
    REFUSE(count, UINT64_MAX, KVT_EINVAL);
    REFUSE(stride_bytes, UINT64_MAX / 2, KVT_EINVAL);
    REFUSE(addr, UINT64_MAX - 100, KVT_EINVAL);
    REFUSE(count, runs[0].count + 1, KVT_ERANGE);
    REFUSE(addr, runs[0].addr - 1, KVT_ERANGE);
    REFUSE(addr, runs[0].addr + 1, KVT_ERANGE);
#undef REFUSE
    prepare_fails(&node, runs, 0, KVT_EINVAL, "");
    prepare_fails(&node, NULL, 1, KVT_EINVAL, "");
    node_close(&node);
}

/* The last block ends with its bytes, not with its stride. */
static void the_gap_after_the_last_block_need_not_be_registered(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 100, .gap_bytes = 28, .count = 8};
    struct node_plan plan = suite_plan(&shape);
    struct kvt_region region;
    struct kvt_run run;
    struct node node;
    kvt_layout layout;

    (void)state;
    node_open(&node, &plan);
    region = pool_region(&node.pool);
    run = pool_run(&node.pool);
    assert_kvt_ok(kvt_deregister(node.t, &region, 1, 0, ERR));
    region.length -= 28;
    assert_kvt_ok(kvt_register(node.t, &region, 1, 0, ERR));
    assert_kvt_ok(kvt_prepare(node.t, KVT_SELF, "pool", &run, 1, &layout, ERR));
    node_close(&node);
}

static void a_peer_layout_must_lie_in_the_peer_s_regions(void **state)
{
    struct pair pair;
    struct kvt_run run;
    kvt_layout layout = 0;

    (void)state;
    suite_pair(&pair, NULL);
    run = pool_run(&pair.a.pool);
    assert_kvt_fails_with(
        kvt_prepare(pair.a.t, pair.peer, "x", &run, 1, &layout, ERR),
        KVT_ERANGE, "run 0");
    assert_kvt_fails(kvt_prepare(pair.a.t, 999, "x", &run, 1, &layout, ERR),
                     KVT_ENOENT);
    pair_close(&pair);
}

static void layout_names_are_bounded_and_per_side(void **state)
{
    char name[KVT_NAME_MAX + 2];
    struct kvt_run run;
    struct pair pair;
    kvt_layout one = 0;
    kvt_layout two = 0;
    kvt_layout found = 0;

    (void)state;
    suite_pair(&pair, NULL);
    run = pool_run(&pair.a.pool);
    memset(name, 'n', sizeof name);
    name[KVT_NAME_MAX] = '\0';
    assert_kvt_ok(kvt_prepare(pair.a.t, KVT_SELF, name, &run, 1, &one, ERR));
    run = pool_run(&pair.b.pool);
    assert_kvt_ok(kvt_prepare(pair.a.t, pair.peer, name, &run, 1, &two, ERR));
    assert_int_not_equal(one, two);
    assert_kvt_ok(kvt_layout_find(pair.a.t, KVT_SELF, name, &found));
    assert_int_equal(found, one);
    assert_kvt_ok(kvt_layout_find(pair.a.t, pair.peer, name, &found));
    assert_int_equal(found, two);
    name[KVT_NAME_MAX] = 'n';
    name[KVT_NAME_MAX + 1] = '\0';
    assert_kvt_fails(kvt_prepare(pair.a.t, pair.peer, name, &run, 1, &two, ERR),
                     KVT_EINVAL);
    assert_kvt_fails(kvt_prepare(pair.a.t, pair.peer, "", &run, 1, &two, ERR),
                     KVT_EINVAL);
    pair_close(&pair);
}

static int write_by(const struct pair *pair, kvt_layout local,
                    kvt_layout remote, uint32_t block, kvt_xfer *ret_id)
{
    struct kvt_indices indices = indices_u32(&block, 1);

    return kvt_write_blocks(pair->a.t, pair->peer, local, &indices, remote,
                            &indices, NULL, ret_id, NULL);
}

static void dropped_and_replaced_layouts_are_gone(void **state)
{
    struct kvt_run run;
    struct pair pair;
    kvt_layout newer = 0;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    run = pool_run(&pair.b.pool);
    run.count = 8;
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "pool", &run, 1, &newer, ERR));
    assert_int_not_equal(newer, pair.remote);
    assert_int_equal(write_by(&pair, pair.a.layout, pair.remote, 0, &id),
                     KVT_ENOENT);
    assert_kvt_fails(kvt_layout_drop(pair.a.t, pair.remote), KVT_ENOENT);
    assert_int_equal(write_by(&pair, pair.a.layout, newer, 8, &id), KVT_ERANGE);
    assert_int_equal(write_by(&pair, pair.a.layout, newer, 7, &id), KVT_OK);
    (void)wait_done(pair.a.t, id);
    assert_kvt_ok(kvt_layout_drop(pair.a.t, newer));
    assert_kvt_fails(kvt_layout_drop(pair.a.t, newer), KVT_ENOENT);
    assert_int_equal(write_by(&pair, pair.a.layout, newer, 0, &id), KVT_ENOENT);
    pair_close(&pair);
}

static void a_replaced_layout_serves_who_uses_it(void **state)
{
    struct kvt_run run;
    struct pair pair;
    kvt_layout newer;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "window=1,chunk_copies=1", 0);
    set_rules(&pair, "hang=1");
    id = pair_write(&pair, (uint32_t[]){1, 3, 5}, (uint32_t[]){10, 20, 30}, 3,
                    NULL);
    assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    /* Its name means other blocks from here on, on both sides. */
    run = pool_run(&pair.b.pool);
    run.addr += 32 * run.stride_bytes;
    run.count = 32;
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "pool", &run, 1, &newer, ERR));
    assert_kvt_ok(kvt_layout_drop(pair.a.t, pair.a.layout));
    pair_expect(&pair, (uint32_t[]){1, 3, 5}, (uint32_t[]){10, 20, 30}, 3);
    release_all(&pair);
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_layout_of_the_wrong_side_is_refused(void **state)
{
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    assert_int_equal(write_by(&pair, pair.remote, pair.remote, 0, &id),
                     KVT_EINVAL);
    assert_int_equal(write_by(&pair, pair.a.layout, pair.a.layout, 0, &id),
                     KVT_EINVAL);
    assert_int_equal(write_by(&pair, pair.remote, pair.a.layout, 0, &id),
                     KVT_EINVAL);
    assert_int_equal(id, 0);
    pair_close(&pair);
}

/* --------------------------------------------------------------- big pools */

/* Address space with few real pages, on both sides. */
struct big {
    unsigned char *memory[2];
    uint64_t bytes;
    struct kvt_run run[2];
};

static void big_open(struct big *big, struct pair *pair, uint64_t block_bytes,
                     uint64_t count)
{
    struct kvt_region region;
    size_t length;
    void *metadata;

    suite_pair(pair, NULL);
    big->bytes = block_bytes * count;
    for (int side = 0; side < 2; side++) {
        const struct node *node = side == 0 ? &pair->a : &pair->b;

        big->memory[side] = mmap(
            NULL, (size_t)big->bytes, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_ptr_not_equal(big->memory[side], MAP_FAILED);
        region = (struct kvt_region){.addr = (uintptr_t)big->memory[side],
                                     .length = big->bytes};
        assert_kvt_ok(kvt_register(node->t, &region, 1, 0, ERR));
        big->run[side] = (struct kvt_run){.addr = region.addr,
                                          .block_bytes = block_bytes,
                                          .stride_bytes = block_bytes,
                                          .count = count};
    }
    metadata = node_metadata(&pair->b, &length);
    assert_true(length < 65536);
    assert_kvt_ok(
        kvt_peer_reload(pair->a.t, pair->peer, metadata, length, 0, ERR));
    free(metadata);
    assert_kvt_ok(kvt_prepare(pair->a.t, KVT_SELF, "big", &big->run[0], 1,
                              &pair->a.layout, ERR));
    assert_kvt_ok(kvt_prepare(pair->a.t, pair->peer, "big", &big->run[1], 1,
                              &pair->remote, ERR));
}

static void big_close(struct big *big, struct pair *pair)
{
    pair_close(pair);
    (void)munmap(big->memory[0], (size_t)big->bytes);
    (void)munmap(big->memory[1], (size_t)big->bytes);
}

/* Stamps our block, writes it, and finds the stamp there alone. */
static void big_write(struct big *big, struct pair *pair, uint32_t index)
{
    uint64_t at = index * big->run[0].stride_bytes;
    uint64_t stamp = UINT64_C(0x5bd1e995) * (index + 1);
    uint64_t seen;
    kvt_xfer id;

    memcpy(big->memory[0] + at, &stamp, sizeof stamp);
    assert_int_equal(write_by(pair, pair->a.layout, pair->remote, index, &id),
                     KVT_OK);
    (void)wait_done(pair->a.t, id);
    memcpy(&seen, big->memory[1] + at, sizeof seen);
    assert_true(seen == stamp);
}

/* B20 */
static void blocks_beyond_4_gib_go_to_their_own_address(void **state)
{
    const uint32_t good[] = {32767, 32768, 65535, 65536, 98303};
    const int64_t bad[] = {98304, -1, INT32_MAX, UINT32_MAX, INT64_MAX};
    uint64_t stamped;
    uint64_t word;
    struct pair pair;
    struct big big;
    kvt_xfer id = 0;

    (void)state;
    if (suite.tsan) {
        skip_case("the thread sanitizer's shadow of 12 GiB is too large");
    }
    big_open(&big, &pair, 65536, 98304);
    for (size_t i = 0; i < 5; i++) {
        big_write(&big, &pair, good[i]);
    }
    for (size_t i = 0; i < 5; i++) {
        const struct kvt_indices indices = {
            .data = &bad[i], .count = 1, .type = KVT_INDEX_I64};

        assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                          &indices, pair.remote, &indices, NULL,
                                          &id, ERR),
                         KVT_ERANGE);
    }
    /* Block 65536 would have landed on block 0 with 32-bit arithmetic, and
     * 98303 on 32767, whose stamp big_write() has seen before. */
    memcpy(&word, big.memory[1], sizeof word);
    assert_true(word == 0);
    stamped = UINT64_C(0x5bd1e995) * (good[0] + 1);
    memcpy(&word, big.memory[1] + good[0] * UINT64_C(65536), sizeof word);
    assert_true(word == stamped);
    big_close(&big, &pair);
}

/* In use more while so many blocks of 64 bytes are registered, imported and
 * laid out. */
static uint64_t heap_of(uint64_t count)
{
    uint64_t before = usage_now().heap_bytes;
    uint64_t during;
    struct pair pair;
    struct big big;

    big_open(&big, &pair, 64, count);
    during = usage_now().heap_bytes;
    big_close(&big, &pair);
    return during > before ? during - before : 0;
}

/* B19 */
static void ten_million_blocks_cost_no_memory(void **state)
{
    const uint32_t some[] = {0, 1, 4999999, 5000001, 9999999};
    uint64_t of_one;
    struct pair pair;
    struct big big;

    (void)state;
    /* The agents need some memory of their own, for any number of blocks. */
    of_one = heap_of(1);
    assert_true(heap_of(10000000) < of_one + (uint64_t)4 * 1048576);
    big_open(&big, &pair, 64, 10000000);
    for (size_t i = 0; i < 5; i++) {
        big_write(&big, &pair, some[i]);
    }
    big_close(&big, &pair);
}

/* 160 runs, as the layers and halves of a large model. (B19) */
static void two_hundred_million_blocks_take_under_64_kib(void **state)
{
    enum { RUNS = 160 };
    const uint64_t count = 1250000;
    const uint64_t bytes = RUNS * count * 16;
    struct node_plan plan = suite_plan(NULL);
    static struct kvt_run runs[RUNS];
    struct kvt_region region;
    uint64_t least = UINT64_MAX;
    struct node node;
    kvt_layout layout;
    void *memory;

    (void)state;
    node_open(&node, &plan);
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    region = (struct kvt_region){.addr = (uintptr_t)memory, .length = bytes};
    assert_kvt_ok(kvt_register(node.t, &region, 1, 0, ERR));
    for (size_t i = 0; i < RUNS; i++) {
        runs[i] = (struct kvt_run){.addr = region.addr + i * count * 16,
                                   .block_bytes = 16,
                                   .stride_bytes = 16,
                                   .count = count};
    }
    /* An engine's own threads may allocate meanwhile, but not each time. */
    for (unsigned i = 0; i < 5; i++) {
        char name[] = {'h', 'u', 'g', 'e', (char)('0' + i), '\0'};
        uint64_t before = usage_now().heap_bytes;
        uint64_t after;

        assert_kvt_ok(
            kvt_prepare(node.t, KVT_SELF, name, runs, RUNS, &layout, ERR));
        after = usage_now().heap_bytes;
        if (after - before < least) {
            least = after - before;
        }
        assert_int_equal(stats_of(node.t).runs, (i + 1) * RUNS + 1);
    }
    assert_true(least < 65536);
    node_close(&node);
    (void)munmap(memory, bytes);
}

/* --------------------------------------------------------------- shrinking */

/* B29 */
static void a_peer_that_shrank_refuses_its_old_indices(void **state)
{
    struct kvt_region region;
    struct kvt_run run;
    struct pair pair;
    size_t length;
    void *metadata;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    region = pool_region(&pair.b.pool);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    region.length /= 4;
    assert_kvt_ok(kvt_register(pair.b.t, &region, 1, 0, ERR));
    metadata = node_metadata(&pair.b, &length);
    /* Its layout does not fit any more: nothing over it is reachable. */
    assert_kvt_fails_with(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR),
        KVT_ERANGE, "pool");
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    assert_int_equal(write_by(&pair, pair.a.layout, pair.remote, 0, &id),
                     KVT_EDISCONNECTED);
    assert_kvt_ok(kvt_layout_drop(pair.a.t, pair.remote));
    assert_kvt_ok(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR));
    free(metadata);
    run = pool_run(&pair.b.pool);
    run.count /= 4;
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "pool", &run, 1, &pair.remote, ERR));
    assert_int_equal(write_by(&pair, pair.a.layout, pair.remote, 16, &id),
                     KVT_ERANGE);
    assert_int_equal(write_by(&pair, pair.a.layout, pair.remote, 15, &id),
                     KVT_OK);
    pool_expect(&pair.b.pool, 15, &pair.a.pool, 15);
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(malformed_runs_are_refused_by_position),
    cmocka_unit_test(the_gap_after_the_last_block_need_not_be_registered),
    cmocka_unit_test(a_peer_layout_must_lie_in_the_peer_s_regions),
    cmocka_unit_test(layout_names_are_bounded_and_per_side),
    cmocka_unit_test(dropped_and_replaced_layouts_are_gone),
    cmocka_unit_test(a_replaced_layout_serves_who_uses_it),
    cmocka_unit_test(a_layout_of_the_wrong_side_is_refused),
    cmocka_unit_test(blocks_beyond_4_gib_go_to_their_own_address),
    cmocka_unit_test(ten_million_blocks_cost_no_memory),
    cmocka_unit_test(two_hundred_million_blocks_take_under_64_kib),
    cmocka_unit_test(a_peer_that_shrank_refuses_its_old_indices),
};

const struct test_group layouts_group = TEST_GROUP("layouts", cases);
