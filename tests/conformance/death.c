/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other process dies, stops, execs, forks or starts anew. What is proved:
 * the survivor notices without a transfer in flight, refuses with the right
 * code, never takes a new process for the old one, and goes on at once with
 * the new one.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static int try_write(const struct across *across)
{
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id;

    return kvt_write_blocks(across->a.t, across->peer, across->a.layout,
                            &indices, across->remote, &indices, NULL, &id,
                            NULL);
}

static void blocks_land_in_another_process(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 1000, .gap_bytes = 24, .count = 64};
    struct across across;

    (void)state;
    across_open(&across, &shape);
    across_expect(&across, 40);
    (void)wait_done(across.a.t, across_write(&across, 40, NULL));
    child_check(&across.child, "child");
    pool_check(&across.a.pool, "a");
    across_close(&across);
}

static void blocks_land_in_another_process_s_shared_memory(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 1000, .gap_bytes = 24, .count = 64, .shm = true};
    struct across across;

    (void)state;
    across_open(&across, &shape);
    across_expect(&across, 40);
    (void)wait_done(across.a.t, across_write(&across, 40, NULL));
    child_check(&across.child, "child");
    across_close(&across);
}

static void blocks_are_read_from_another_process(void **state)
{
    struct across across;
    uint32_t blocks[3] = {1, 2, 60};
    struct kvt_indices indices = indices_u32(blocks, 3);
    kvt_xfer id;

    (void)state;
    across_open(&across, NULL);
    for (int i = 0; i < 3; i++) {
        pool_expect(&across.a.pool, blocks[i], &across.child.pool, blocks[i]);
    }
    assert_kvt_ok(kvt_read_blocks(across.a.t, across.peer, across.a.layout,
                                  &indices, across.remote, &indices, NULL, &id,
                                  ERR));
    (void)wait_done(across.a.t, id);
    pool_check(&across.a.pool, "a");
    child_check(&across.child, "child");
    across_close(&across);
}

static void an_idle_peer_s_death_is_noticed_and_writes_refused(void **state)
{
    struct kvt_peer_info info;
    struct across across;
    struct kvt_result result;

    (void)state;
    across_open(&across, NULL);
    child_kill(&across.child);
    assert_soon(!kvt_peer_loaded(across.a.t, across.peer));
    assert_int_equal(try_write(&across), KVT_EDISCONNECTED);
    assert_kvt_ok(kvt_peer_info(across.a.t, across.peer, &info));
    assert_int_equal(info.state, KVT_PEER_DISCONNECTED);
    assert_int_equal(info.code, KVT_EDISCONNECTED);
    assert_string_not_equal(info.text, "");
    assert_int_equal(stats_of(across.a.t).peer_disconnects, 1);
    assert_int_equal(kvt_poll(across.a.t, KVT_ANY, &result, 1), 0);
    assert_kvt_fails(kvt_peer_reload(across.a.t, across.peer, NULL, 0, 0, ERR),
                     KVT_EDISCONNECTED);
    child_forget(&across.child);
    node_close(&across.a);
}

static void a_clean_exit_is_noticed_too(void **state)
{
    struct across across;

    (void)state;
    across_open(&across, NULL);
    child_end(&across.child);
    assert_soon(!kvt_peer_loaded(across.a.t, across.peer));
    assert_int_equal(try_write(&across), KVT_EDISCONNECTED);
    node_close(&across.a);
}

/* Whom NIXL posts to when it finds the link broken, it rejects. */
static void assert_done_or_gone(const struct kvt_result *result)
{
    bool gone = result->state == KVT_DISCONNECTED &&
                result->code == KVT_EDISCONNECTED;
    bool rejected = suite.nixl && result->state == KVT_REJECTED &&
                    result->code == KVT_EREJECTED;

    assert_true((result->flags & KVT_QUIESCENT) != 0);
    assert_true(result->state == KVT_DONE || gone || rejected);
    assert_true(!gone || result->scope == KVT_SCOPE_PEER);
}

static void every_write_at_a_kill_ends_once_and_quiescent(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 64};
    enum { COUNT = 32 };
    int rounds = suite.slow || suite.agent ? 3 : 10;

    (void)state;
    for (int round = 0; round < rounds; round++) {
        struct kvt_result results[COUNT];
        struct across across;
        size_t accepted = 0;

        across_open(&across, &shape);
        while (accepted < COUNT / 2) {
            (void)across_write(&across, 64, NULL);
            accepted++;
        }
        child_kill(&across.child);
        while (accepted < COUNT && try_write(&across) == KVT_OK) {
            accepted++;
        }
        wait_results(across.a.t, across.peer, results, accepted);
        for (size_t i = 0; i < accepted; i++) {
            assert_done_or_gone(&results[i]);
        }
        assert_int_equal(stats_of(across.a.t).inflight, 0);
        assert_int_equal(kvt_poll(across.a.t, KVT_ANY, results, 1), 0);
        child_forget(&across.child);
        node_close(&across.a);
    }
}

/* B01 */
static void a_restart_under_the_same_name_works_at_once(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    int rounds = suite.agent ? 4 : suite.slow ? 10 : 50;
    struct across across;

    (void)state;
    plan.name = "t0";
    across_open(&across, NULL);
    child_end(&across.child);
    assert_kvt_ok(kvt_peer_remove(across.a.t, across.peer));
    for (int i = 0; i < rounds; i++) {
        plan.seed = suite_seed();
        child_begin(&across.child, &plan);
        across_add(&across, "t0");
        across_expect(&across, 64);
        (void)wait_done(across.a.t, across_write(&across, 64, NULL));
        child_check(&across.child, "child");
        child_kill(&across.child);
        child_forget(&across.child);
    }
    assert_int_equal(stats_of(across.a.t).peers, 1);
    node_close(&across.a);
}

/* B05 */
static void an_old_blob_is_not_taken_for_the_new_process(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_peer_params params = {.size = sizeof params, .name = "child"};
    struct across across;
    kvt_peer peer = 0;
    void *old;

    (void)state;
    across_open(&across, NULL);
    old = child_metadata(&across.child, &params.metadata_length);
    params.metadata = old;
    child_kill(&across.child);
    child_forget(&across.child);
    plan.name = "t0";
    child_begin(&across.child, &plan);
    assert_kvt_fails(kvt_peer_add(across.a.t, &params, &peer, ERR),
                     KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_peer_find(across.a.t, "child", &peer), KVT_ENOENT);
    child_check(&across.child, "child");
    free(old);
    child_end(&across.child);
    node_close(&across.a);
}

/* pid and start time survive an exec, and without randomization so do the
 * addresses: only what is read back from the process tells. (B05) */
static void a_process_that_execs_is_another_one(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct across across = {0};
    struct kvt_result result;
    int code;

    (void)state;
    node_open(&across.a, &plan);
    child_start(&across.child);
    child_fix_addresses(&across.child);
    child_exec(&across.child);
    child_open(&across.child, &plan);
    across_add(&across, "child");
    across_expect(&across, 1);
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    child_check(&across.child, "child");
    child_exec(&across.child);
    plan.seed = suite_seed();
    child_open(&across.child, &plan);
    code = try_write(&across);
    if (code == KVT_OK) {
        wait_results(across.a.t, across.peer, &result, 1);
        assert_true((result.flags & KVT_QUIESCENT) != 0);
        assert_int_equal(result.bytes_done, 0);
        code = result.code;
    }
    assert_int_equal(code, KVT_EDISCONNECTED);
    child_check(&across.child, "child");
    assert_int_equal(kvt_peer_loaded(across.a.t, across.peer), 0);
    /* The new agent in it is a peer like any other. */
    across_add(&across, "child");
    across_expect(&across, 3);
    (void)wait_done(across.a.t, across_write(&across, 3, NULL));
    child_check(&across.child, "child");
    across_close(&across);
}

/* B36 */
static void a_target_that_forks_stays_the_target(void **state)
{
    struct across across;

    (void)state;
    across_open(&across, NULL);
    across_expect(&across, 8);
    for (int i = 0; i < 5; i++) {
        kvt_xfer id = across_write(&across, 8, NULL);

        child_fork(&across.child);
        (void)wait_done(across.a.t, id);
        (void)wait_done(across.a.t, across_write(&across, 8, NULL));
    }
    assert_int_equal(kvt_peer_loaded(across.a.t, across.peer), 1);
    assert_int_equal(stats_of(across.a.t).peer_disconnects, 0);
    child_check(&across.child, "child");
    across_close(&across);
}

/* One-sided: the target's threads need not run once there is a connection. NIXL
 * calls a write done while the end of its connecting may still need the peer,
 * so there it is done now or when the peer goes on. (B13) */
static void a_stopped_target_is_written_all_the_same(void **state)
{
    struct across across;
    kvt_xfer id;

    (void)state;
    need_no_tcp("over TCP the target's own thread receives");
    across_open(&across, NULL);
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    child_stop(&across.child);
    across_expect(&across, 64);
    id = across_write(&across, 64, NULL);
    if (suite.local || wait_fd(across.a.t, 500)) {
        (void)wait_done(across.a.t, id);
        child_continue(&across.child);
    } else {
        child_continue(&across.child);
        (void)wait_done(across.a.t, id);
    }
    child_check(&across.child, "child");
    across_close(&across);
}

/* Where it takes part, a deadline ends the wait and not the write: that is
 * quiescent when the target goes on, and not before. (B13) */
static void a_write_to_a_stopped_target_ends_when_it_goes_on(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 256};
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = 200 * MS};
    struct kvt_result result;
    struct across across;
    kvt_xfer id;

    (void)state;
    if (!suite.tcp) {
        leave_case("over TCP, where a stopped target takes part");
    }
    across_open(&across, &shape);
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    child_stop(&across.child);
    id = across_write(&across, 256, &options);
    assert_false(wait_fd(across.a.t, 500));
    assert_false(is_quiescent(across.a.t, id));
    child_continue(&across.child);
    result = wait_xfer(across.a.t, id);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    (void)wait_done(across.a.t, across_write(&across, 256, NULL));
    across_expect(&across, 256);
    child_check(&across.child, "child");
    across_close(&across);
}

static void unmapped_memory_at_the_target_fails_the_request_only(void **state)
{
    const struct pool_shape shape = {.block_bytes = 4096, .count = 16};
    struct across across;
    struct kvt_result result;

    (void)state;
    need_local("by NIXL a hole breaks the link, or is not even seen");
    across_open(&across, &shape);
    child_unmap(&across.child, 8, 8192);
    across_write(&across, 16, NULL);
    wait_results(across.a.t, across.peer, &result, 1);
    assert_int_equal(result.state, KVT_FAILED);
    assert_int_equal(result.code, KVT_EENGINE);
    assert_int_equal(result.scope, KVT_SCOPE_REQUEST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_string_not_equal(result.text, "");
    assert_int_equal(kvt_peer_loaded(across.a.t, across.peer), 1);
    (void)wait_done(across.a.t, across_write(&across, 8, NULL));
    child_kill(&across.child);
    child_forget(&across.child);
    node_close(&across.a);
}

/* The hole is where the request begins, and only the death of the process, by
 * us or over TCP by the hole itself, ends the doubt. */
static void a_hole_at_the_target_is_in_doubt_until_its_end(void **state)
{
    const struct pool_shape shape = {.block_bytes = 4096, .count = 16};
    struct across across;
    struct kvt_result result;
    kvt_xfer id;

    (void)state;
    if (!suite.nixl) {
        leave_case("by NIXL, where a hole breaks the link");
    }
    across_open(&across, &shape);
    (void)wait_done(across.a.t, across_write(&across, 1, NULL));
    child_unmap(&across.child, 0, 8192);
    id = across_write(&across, 1, NULL);
    assert_soon(!kvt_peer_loaded(across.a.t, across.peer));
    assert_int_equal(try_write(&across), KVT_EDISCONNECTED);
    if (!suite.tcp) {
        assert_false(is_quiescent(across.a.t, id));
    }
    child_bury(&across.child);
    result = wait_xfer(across.a.t, id);
    assert_true(result.state == KVT_REJECTED ||
                result.state == KVT_DISCONNECTED);
    assert_int_equal(result.bytes_done, 0);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    child_forget(&across.child);
    node_close(&across.a);
}

static void one_peer_s_death_leaves_the_others(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct across across;
    struct across other;

    (void)state;
    across_open(&across, NULL);
    other = across;
    child_begin(&other.child, &plan);
    across_add(&other, "other");
    child_kill(&across.child);
    other.a = across.a;
    across_expect(&other, 16);
    (void)wait_done(other.a.t, across_write(&other, 16, NULL));
    assert_soon(!kvt_peer_loaded(across.a.t, across.peer));
    assert_int_equal(kvt_peer_loaded(other.a.t, other.peer), 1);
    child_check(&other.child, "other");
    child_forget(&across.child);
    child_end(&other.child);
    node_close(&across.a);
}

static void confirm_dead_needs_a_peer_and_disconnects_it(void **state)
{
    struct kvt_peer_info info;
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    assert_kvt_fails(kvt_peer_confirm_dead(pair.a.t, 12345), KVT_ENOENT);
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    assert_kvt_ok(kvt_peer_info(pair.a.t, pair.peer, &info));
    assert_int_equal(info.state, KVT_PEER_DISCONNECTED);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(blocks_land_in_another_process),
    cmocka_unit_test(blocks_land_in_another_process_s_shared_memory),
    cmocka_unit_test(blocks_are_read_from_another_process),
    cmocka_unit_test(an_idle_peer_s_death_is_noticed_and_writes_refused),
    cmocka_unit_test(a_clean_exit_is_noticed_too),
    cmocka_unit_test(every_write_at_a_kill_ends_once_and_quiescent),
    cmocka_unit_test(a_restart_under_the_same_name_works_at_once),
    cmocka_unit_test(an_old_blob_is_not_taken_for_the_new_process),
    cmocka_unit_test(a_process_that_execs_is_another_one),
    cmocka_unit_test(a_target_that_forks_stays_the_target),
    cmocka_unit_test(a_stopped_target_is_written_all_the_same),
    cmocka_unit_test(a_write_to_a_stopped_target_ends_when_it_goes_on),
    cmocka_unit_test(unmapped_memory_at_the_target_fails_the_request_only),
    cmocka_unit_test(a_hole_at_the_target_is_in_doubt_until_its_end),
    cmocka_unit_test(one_peer_s_death_leaves_the_others),
    cmocka_unit_test(confirm_dead_needs_a_peer_and_disconnects_it),
};

const struct test_group death_group = TEST_GROUP("death", cases);
