/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What users of such transports reported and no other file of the suite shows:
 * a peer that comes back under everything that was its own, blocks used again
 * after a cancel, calls that must not wait for bytes or for one another, and
 * things that must change nothing (a fork, an overlap, a peer of another shape,
 * telemetry). docs/reliability.md lists all of what was reported.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

/* ---------------------------------------------------------------- comebacks */

/* B01 */
static void a_reload_takes_in_the_process_that_came_after(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    int rounds = suite.agent || suite.slow ? 3 : 10;
    struct across across = {0};
    struct kvt_run run;

    (void)state;
    node_open(&across.a, &plan);
    plan.name = "t0";
    plan.seed = suite_seed();
    child_begin(&across.child, &plan);
    across_add(&across, "t0");
    for (int i = 0; i < rounds; i++) {
        size_t length;
        void *metadata;

        (void)wait_done(across.a.t, across_write(&across, 64, NULL));
        child_kill(&across.child);
        child_forget(&across.child);
        plan.seed = suite_seed();
        child_begin(&across.child, &plan);
        metadata = child_metadata(&across.child, &length);
        run = child_run(&across.child);
        assert_kvt_ok(kvt_layout_drop(across.a.t, across.remote));
        assert_kvt_ok(
            kvt_peer_reload(across.a.t, across.peer, metadata, length, 0, ERR));
        free(metadata);
        assert_kvt_ok(kvt_prepare(across.a.t, across.peer, "pool", &run, 1,
                                  &across.remote, ERR));
        across_expect(&across, 64);
        (void)wait_done(across.a.t, across_write(&across, 64, NULL));
        child_check(&across.child, "child");
    }
    across_close(&across);
}

/* As a restart in a container is: nothing that can be read off the metadata's
 * fields tells the two apart, but for what was drawn at random. */
static void start_fixed(struct child *child, const struct node_plan *plan)
{
    child_start(child);
    child_fix_addresses(child);
    child_exec(child);
    child_open(child, plan);
}

/* B05 */
static void one_name_and_equal_addresses_are_not_one_process(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_peer_params params = {.size = sizeof params, .name = "t0"};
    struct across across = {0};
    uint64_t addr;
    kvt_peer peer = 0;
    void *old;

    (void)state;
    node_open(&across.a, &plan);
    plan.name = "t0";
    start_fixed(&across.child, &plan);
    addr = across.child.pool_addr;
    across_add(&across, "t0");
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    old = child_metadata(&across.child, &params.metadata_length);
    params.metadata = old;
    child_kill(&across.child);
    child_forget(&across.child);
    plan.seed = suite_seed();
    start_fixed(&across.child, &plan);
    assert_true(across.child.pool_addr == addr);
    assert_soon(!kvt_peer_loaded(across.a.t, across.peer));
    assert_kvt_fails(kvt_peer_reload(across.a.t, across.peer, old,
                                     params.metadata_length, 0, ERR),
                     KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_peer_add(across.a.t, &params, &peer, ERR),
                     KVT_EDISCONNECTED);
    free(old);
    child_check(&across.child, "child");
    across_add(&across, "t0");
    across_expect(&across, 64);
    (void)wait_done(across.a.t, across_write(&across, 64, NULL));
    child_check(&across.child, "child");
    across_close(&across);
}

/* The exit of a process that has copies of the writer's descriptors tells
 * nobody that the writer were gone. (B36) */
static void a_child_of_the_writer_comes_and_goes_unnoticed(void **state)
{
    struct across across;
    struct kvt_run run;
    size_t length;
    void *metadata;
    kvt_peer back = 0;

    (void)state;
    across_open(&across, NULL);
    metadata = node_metadata(&across.a, &length);
    assert_kvt_ok(child_add(&across.child, "us", metadata, length, &back));
    free(metadata);
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    across_expect(&across, 64);
    for (int i = 0; i < 3; i++) {
        kvt_xfer id = across_write(&across, 64, NULL);
        pid_t pid = fork();
        int status = -1;

        if (pid == 0) {
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        (void)wait_done(across.a.t, id);
    }
    child_check(&across.child, "child");
    assert_int_equal(stats_of(across.a.t).peer_disconnects, 0);
    /* The other way is open too. */
    run = pool_run(&across.a.pool);
    pool_expect(&across.a.pool, 0, &across.child.pool, 0);
    child_write_on(&across.child, back,
                   child_prepare(&across.child, back, &run), 1);
    child_kill(&across.child);
    child_forget(&across.child);
    pool_check(&across.a.pool, "a");
    node_close(&across.a);
}

/* ------------------------------------------------------------------- reuse */

/* Both sides use the blocks for something else as soon as kvt says so, and a
 * later write, which goes behind all earlier ones, brings nothing of them.
 * (B09) */
static void blocks_of_a_cancelled_write_are_free_once_quiescent(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 256};
    int rounds = suite.slow ? 3 : 10;
    struct across across;

    (void)state;
    across_open(&across, &shape);
    for (int i = 0; i < rounds; i++) {
        kvt_xfer id = across_write(&across, 256, NULL);

        if (kvt_cancel(across.a.t, &id, 1, KVT_CANCEL_WAIT, NULL) == 1) {
            struct kvt_result result = wait_xfer(across.a.t, id);

            assert_true(result.state == KVT_CANCELLED ||
                        result.state == KVT_DONE);
            assert_true((result.flags & KVT_QUIESCENT) != 0);
        }
        pool_fill(&across.a.pool, suite_seed());
        child_fill(&across.child, suite_seed());
        pool_expect(&across.child.pool, 0, &across.a.pool, 0);
        (void)wait_done(across.a.t, across_write(&across, 1, NULL));
        child_check(&across.child, "child");
    }
    across_close(&across);
}

/* The same where a request has begun and its bytes have not. (B09) */
static void a_cancelled_write_holds_its_blocks_until_it_has_moved(void **state)
{
    const uint32_t odd[] = {1, 3, 5, 7};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=2", 0);
    set_rules(&pair, "hang=1-2");
    id = pair_write(&pair, odd, odd, 4, NULL);
    assert_soon(status_of(pair.a.t, id).copies == 2);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL), 1);
    assert_false(is_quiescent(pair.a.t, id));
    pair_check(&pair);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    pool_fill(&pair.a.pool, suite_seed());
    pool_fill(&pair.b.pool, suite_seed());
    pool_expect(&pair.b.pool, 9, &pair.a.pool, 8);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 8, 9, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------------ waiting */

/* Each one is accepted although nothing moves, nor will before the last call
 * has returned. (B16) */
static void large_writes_are_taken_before_a_byte_moves(void **state)
{
    enum { BLOCKS = 65536, MANY = 11 };
    const struct pool_shape shape = {.block_bytes = 64, .count = BLOCKS};
    static uint32_t from[BLOCKS];
    static uint32_t to[BLOCKS];
    struct kvt_result results[MANY];
    size_t count = suite.agent || suite.slow ? 3 : MANY;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, &shape, "", 0);
    set_rules(&pair, "hang=*");
    for (uint32_t i = 0; i < BLOCKS; i++) {
        from[i] = i * 40503 % BLOCKS;
        to[i] = i * 25717 % BLOCKS;
    }
    for (size_t i = 0; i < count; i++) {
        (void)pair_write(&pair, from, to, BLOCKS, NULL);
    }
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).inflight, count);
    assert_int_equal(stats_of(pair.a.t).bytes_written, 0);
    release_all(&pair);
    pair_expect(&pair, from, to, BLOCKS);
    wait_results(pair.a.t, pair.peer, results, count);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(results[i].state, KVT_DONE);
    }
    pair_check(&pair);
    pair_close(&pair);
}

/* B48 */
static void one_stuck_add_of_sixteen_holds_no_other(void **state)
{
    enum { COUNT = 16 };
    struct kvt_peer_params params = {.size = sizeof params};
    struct kvt_result results[COUNT];
    struct pair pair;
    void *metadata;
    kvt_peer stuck = 0;
    kvt_peer peers[COUNT];
    kvt_xfer ids[COUNT];

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    metadata = node_metadata(&pair.b, &params.metadata_length);
    params.metadata = metadata;
    set_rules(&pair, "load_hang=3");
    for (int i = 0; i < COUNT; i++) {
        const char name[] = {(char)('A' + i), '\0'};

        params.name = name;
        assert_kvt_ok(
            kvt_peer_add_async(pair.a.t, &params, &peers[i], &ids[i], ERR));
    }
    wait_results(pair.a.t, KVT_ANY, results, COUNT - 1);
    for (int i = 0; i < COUNT - 1; i++) {
        assert_int_equal(results[i].op, KVT_OP_ADD);
        assert_int_equal(results[i].state, KVT_DONE);
    }
    for (int i = 0; i < COUNT; i++) {
        if (!kvt_peer_loaded(pair.a.t, peers[i])) {
            assert_int_equal(stuck, 0);
            stuck = peers[i];
        }
    }
    assert_int_not_equal(stuck, 0);
    assert_int_equal(stats_of(pair.a.t).peers_loaded, COUNT);
    release_all(&pair);
    wait_results(pair.a.t, stuck, results, 1);
    assert_int_equal(results[0].state, KVT_DONE);
    free(metadata);
    pair_close(&pair);
}

/* ------------------------------------------------ what must change nothing */

#define KIB UINT64_C(1024)

/* a's blocks 0, 1, 2 go to blocks at the beginning, in the middle and near the
 * end of what the layout covers. */
static void write_three(struct pair *pair, kvt_layout layout,
                        unsigned char *memory, uint32_t last)
{
    const uint32_t from[] = {0, 1, 2};
    const uint32_t to[] = {0, last / 2, last};
    const struct kvt_indices ours = indices_u32(from, 3);
    const struct kvt_indices theirs = indices_u32(to, 3);
    kvt_xfer id = 0;

    memset(memory, 0, (size_t)last * 256 + 256);
    assert_kvt_ok(kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &ours,
                                   layout, &theirs, NULL, &id, ERR));
    (void)wait_done(pair->a.t, id);
    for (uint32_t i = 0; i < 3; i++) {
        assert_memory_equal(memory + (size_t)to[i] * 256,
                            pool_block(&pair->a.pool, i), 256);
    }
    assert_int_equal(memory[256], 0);
}

/* b's memory as it is registered now, for a to write. */
static kvt_layout import_over(struct pair *pair, const unsigned char *memory,
                              uint64_t bytes)
{
    const struct kvt_run run = {.addr = (uintptr_t)memory,
                                .block_bytes = 256,
                                .stride_bytes = 256,
                                .count = bytes / 256};
    kvt_layout layout = 0;
    size_t length;
    void *metadata = node_metadata(&pair->b, &length);

    assert_kvt_ok(
        kvt_peer_reload(pair->a.t, pair->peer, metadata, length, 0, ERR));
    free(metadata);
    assert_kvt_ok(
        kvt_prepare(pair->a.t, pair->peer, "over", &run, 1, &layout, ERR));
    return layout;
}

/* B25 */
static void overlapping_memory_is_written_until_the_last_of_it_leaves(
    void **state)
{
    struct kvt_region regions[3];
    unsigned char *memory;
    struct pair pair;
    kvt_layout layout;

    (void)state;
    suite_pair(&pair, NULL);
    memory = mmap(NULL, 2048 * KIB, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    regions[0] = (struct kvt_region){.addr = (uintptr_t)memory,
                                     .length = 1024 * KIB};
    regions[1] = regions[0];
    regions[2] = (struct kvt_region){.addr = (uintptr_t)memory + 512 * KIB,
                                     .length = 1536 * KIB};
    for (int i = 0; i < 3; i++) {
        assert_kvt_ok(kvt_register(pair.b.t, &regions[i], 1, 0, ERR));
    }
    layout = import_over(&pair, memory, 2048 * KIB);
    write_three(&pair, layout, memory, 8191);
    /* One of two registrations of the same range: it stays. */
    assert_kvt_ok(kvt_deregister(pair.b.t, &regions[1], 1, 0, ERR));
    write_three(&pair, layout, memory, 8191);
    assert_kvt_ok(kvt_layout_drop(pair.a.t, layout));
    assert_kvt_ok(kvt_deregister(pair.b.t, &regions[2], 1, 0, ERR));
    layout = import_over(&pair, memory, 1024 * KIB);
    write_three(&pair, layout, memory, 4095);
    pair_close(&pair);
    (void)munmap(memory, 2048 * KIB);
}

/* B27 */
static void a_peer_of_another_shape_leaves_the_others_alone(void **state)
{
    const struct pool_shape ours = {.block_bytes = 4096, .count = 8};
    const struct pool_shape theirs = {.block_bytes = 8192, .count = 4};
    struct node_plan a = suite_plan(&ours);
    struct node_plan b = suite_plan(&theirs);
    struct node_plan c = suite_plan(&ours);
    const uint32_t block = 3;
    const struct kvt_indices indices = indices_u32(&block, 1);
    struct node third;
    struct pair pair;
    struct kvt_run run;
    kvt_layout layout = 0;
    kvt_peer peer;
    kvt_xfer id = 0;
    size_t length;
    void *metadata;

    (void)state;
    pair_open(&pair, &a, &b);
    node_open(&third, &c);
    metadata = node_metadata(&third, &length);
    peer = node_add(&pair.a, "third", metadata, length);
    free(metadata);
    run = pool_run(&third.pool);
    assert_kvt_ok(kvt_prepare(pair.a.t, peer, "pool", &run, 1, &layout, ERR));
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, NULL,
                                      &id, ERR),
                     KVT_EMISMATCH);
    pool_expect(&third.pool, 3, &pair.a.pool, 3);
    assert_kvt_ok(kvt_write_blocks(pair.a.t, peer, pair.a.layout, &indices,
                                   layout, &indices, NULL, &id, ERR));
    (void)wait_done(pair.a.t, id);
    assert_int_equal(stats_of(pair.a.t).mismatches, 1);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    pool_check(&third.pool, "third");
    pair_check(&pair);
    pair_close(&pair);
    node_close(&third);
}

static void count_hundred(uint32_t flags)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct pair pair;

    a.options.flags |= flags;
    pair_open(&pair, &a, &b);
    for (uint32_t i = 1; i <= 100; i++) {
        struct kvt_stats stats;

        (void)wait_done(pair.a.t, pair_write_one(&pair, i % 64, 7, NULL));
        stats = stats_of(pair.a.t);
        assert_int_equal(stats.done, i);
        assert_int_equal(stats.accepted, i);
        assert_int_equal(stats.bytes_written, i * 256);
        assert_int_equal(stats.complete_ns.count, i);
    }
    pair_close(&pair);
}

/* B51 */
static void counters_need_no_telemetry_of_the_engine(void **state)
{
    /* The suite has one thread of its own, and the environment is the
     * engine's to read when it starts. */
    (void)state;
    count_hundred(0);
    count_hundred(KVT_OPEN_NO_TELEMETRY);
    if (suite.agent) {
        assert_int_equal(setenv("NIXL_TELEMETRY_ENABLE", "n", 1), 0);
        count_hundred(0);
        assert_int_equal(unsetenv("NIXL_TELEMETRY_ENABLE"), 0);
    }
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_reload_takes_in_the_process_that_came_after),
    cmocka_unit_test(one_name_and_equal_addresses_are_not_one_process),
    cmocka_unit_test(a_child_of_the_writer_comes_and_goes_unnoticed),
    cmocka_unit_test(blocks_of_a_cancelled_write_are_free_once_quiescent),
    cmocka_unit_test(a_cancelled_write_holds_its_blocks_until_it_has_moved),
    cmocka_unit_test(large_writes_are_taken_before_a_byte_moves),
    cmocka_unit_test(one_stuck_add_of_sixteen_holds_no_other),
    cmocka_unit_test(overlapping_memory_is_written_until_the_last_of_it_leaves),
    cmocka_unit_test(a_peer_of_another_shape_leaves_the_others_alone),
    cmocka_unit_test(counters_need_no_telemetry_of_the_engine),
};

const struct test_group reported_group = TEST_GROUP("reported", cases);
