/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state machine, driven by an engine that goes wrong on order. For each
 * way to end: the state, the code, the scope, whether it is quiescent and
 * when, and which bytes have moved. Needs the fault engine.
 */
#include <string.h>

#include "suite.h"

static void assert_ended(const struct kvt_result *result, uint32_t state,
                         int code, uint32_t scope)
{
    if (result->state != state || result->code != code) {
        fail_msg("state %u, %s: %s", result->state, kvt_errname(result->code),
                 result->text);
    }
    assert_int_equal(result->scope, scope);
    assert_int_equal(result->flags, KVT_LOCAL_FINAL | KVT_PEER_FINAL |
                                        KVT_QUIESCENT | KVT_FINISHED);
    assert_string_not_equal(result->text, "");
}

/* Met before its end: the state is known, the end is not. */
static struct kvt_result assert_open(const struct pair *pair, kvt_xfer id,
                                     enum kvt_state state, int code)
{
    struct kvt_region region = pool_region(&pair->a.pool);
    struct kvt_result result;

    assert_soon(in_state(pair->a.t, id, state));
    result = status_of(pair->a.t, id);
    assert_int_equal(result.code, code);
    assert_int_equal(result.flags & (KVT_QUIESCENT | KVT_FINISHED), 0);
    assert_true((result.text[0] != '\0') == (code != KVT_OK));
    assert_kvt_fails(kvt_deregister(pair->a.t, &region, 1, 0, ERR), KVT_EBUSY);
    assert_int_equal(kvt_poll(pair->a.t, KVT_ANY, &result, 1), 0);
    return status_of(pair->a.t, id);
}

/* The transport and the peer are well. */
static void assert_works(struct pair *pair)
{
    pool_expect(&pair->b.pool, 63, &pair->a.pool, 62);
    (void)wait_done(pair->a.t, pair_write_one(pair, 62, 63, NULL));
    pair_check(pair);
    assert_int_equal(stats_of(pair->a.t).inflight, 0);
    assert_int_equal(stats_of(pair->a.t).quarantined, 0);
}

static void a_rejected_post_has_moved_nothing(void **state)
{
    struct kvt_result result;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "reject=1");
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_ended(&result, KVT_REJECTED, KVT_EREJECTED, KVT_SCOPE_REQUEST);
    assert_int_equal(result.bytes_done, 0);
    assert_int_equal(result.engine_code, -1);
    assert_non_null(strstr(result.text, "reject"));
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).rejected, 1);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_rejected_post_may_be_on_the_wire(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "reject_dirty=1,hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    (void)assert_open(&pair, id, KVT_REJECTED, KVT_EREJECTED);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_ended(&result, KVT_REJECTED, KVT_EREJECTED, KVT_SCOPE_REQUEST);
    assert_int_equal(result.bytes_done, 0);
    pool_accept(&pair.b.pool, 1);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_failed_request_is_quiescent_when_it_is_over(void **state)
{
    struct kvt_result result;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "fail=1/3");
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_ended(&result, KVT_FAILED, KVT_EENGINE, KVT_SCOPE_REQUEST);
    assert_int_equal(result.bytes_done, 0);
    pool_accept(&pair.b.pool, 1);
    assert_int_equal(stats_of(pair.a.t).failed, 1);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_request_that_never_began_is_quiescent(void **state)
{
    struct kvt_result result;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "fail_unposted=1");
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_ended(&result, KVT_FAILED, KVT_EENGINE, KVT_SCOPE_REQUEST);
    assert_works(&pair);
    pair_close(&pair);
}

static void an_unreadable_request_is_not_quiescent_until_proven(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "unreadable=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    result = assert_open(&pair, id, KVT_UNREADABLE, KVT_ELOST);
    assert_int_equal(result.bytes_done, 0);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    /* Over, and nothing says that it went well. */
    assert_int_not_equal(result.state, KVT_DONE);
    assert_int_equal(result.code, KVT_ELOST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    pool_accept(&pair.b.pool, 1);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_broken_link_refuses_new_work_until_reload(void **state)
{
    uint32_t block = 2;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct kvt_peer_info info;
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;
    kvt_xfer none = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "disconnect=1,hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    result = assert_open(&pair, id, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    assert_int_equal(result.scope, KVT_SCOPE_PEER);
    assert_soon(!kvt_peer_loaded(pair.a.t, pair.peer));
    assert_kvt_ok(kvt_peer_info(pair.a.t, pair.peer, &info));
    assert_int_equal(info.state, KVT_PEER_DISCONNECTED);
    assert_int_equal(info.code, KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, NULL,
                                      &none, ERR),
                     KVT_EDISCONNECTED);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_ended(&result, KVT_DISCONNECTED, KVT_EDISCONNECTED, KVT_SCOPE_PEER);
    assert_int_equal(stats_of(pair.a.t).peer_disconnects, 1);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    pool_accept(&pair.b.pool, 1);
    assert_works(&pair);
    pair_close(&pair);
}

/* Every transfer of a broken link ends, posted or not, each exactly once. */
static void a_broken_link_ends_all_its_transfers(void **state)
{
    struct kvt_result results[4];
    struct pair pair;
    kvt_xfer first;

    (void)state;
    suite_fault_pair(&pair, NULL, "window=1", 0);
    set_rules(&pair, "hang=1,disconnect=1");
    first = pair_write_one(&pair, 0, 0, NULL);
    for (uint32_t i = 1; i < 4; i++) {
        (void)pair_write_one(&pair, i, i, NULL);
    }
    assert_soon(in_state(pair.a.t, first, KVT_IN_PROGRESS));
    release_all(&pair);
    wait_results(pair.a.t, pair.peer, results, 4);
    for (int i = 0; i < 4; i++) {
        assert_ended(&results[i], KVT_DISCONNECTED, KVT_EDISCONNECTED,
                     KVT_SCOPE_PEER);
    }
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, results, 1), 0);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    pool_accept(&pair.b.pool, 0);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_link_that_breaks_without_a_request_disconnects(void **state)
{
    struct kvt_result result;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "peer_down=1");
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    assert_true(result.state == KVT_DONE || result.state == KVT_DISCONNECTED);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_soon(!kvt_peer_loaded(pair.a.t, pair.peer));
    pair_close(&pair);
}

static void a_dead_peer_ends_everything_at_once(void **state)
{
    struct kvt_result results[3];
    struct pair pair;
    kvt_xfer first;

    (void)state;
    suite_fault_pair(&pair, NULL, "window=1", 0);
    set_rules(&pair, "hang=1,dead=1");
    first = pair_write_one(&pair, 0, 0, NULL);
    for (uint32_t i = 1; i < 3; i++) {
        (void)pair_write_one(&pair, i, i, NULL);
    }
    assert_soon(in_state(pair.a.t, first, KVT_IN_PROGRESS));
    release_all(&pair);
    wait_results(pair.a.t, pair.peer, results, 3);
    for (int i = 0; i < 3; i++) {
        assert_ended(&results[i], KVT_DISCONNECTED, KVT_EDISCONNECTED,
                     KVT_SCOPE_PEER);
    }
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    pair_check(&pair);
    pair_close(&pair);
}

static void completion_inside_the_post_is_reported_once(void **state)
{
    struct kvt_result results[8];
    uint32_t blocks[8];
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=1", 0);
    set_rules(&pair, "inline=*");
    for (uint32_t i = 0; i < 8; i++) {
        blocks[i] = 2 * i;
    }
    pair_expect(&pair, blocks, blocks, 8);
    (void)wait_done(pair.a.t, pair_write(&pair, blocks, blocks, 8, NULL));
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, results, 8), 0);
    assert_works(&pair);
    pair_close(&pair);
}

static void delays_change_no_result(void **state)
{
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "delay=5,load_delay=5,mem_delay=5", 0);
    assert_works(&pair);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 1, 2, NULL));
    pool_accept(&pair.b.pool, 2);
    set_rules(&pair, "late=1/20");
    assert_works(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------ several parts */

/* B08 */
static void a_rejected_part_waits_for_the_posted_ones(void **state)
{
    const uint32_t blocks[] = {0, 2, 4, 6, 8, 10};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=2", 0);
    set_rules(&pair, "hold=1,reject=2");
    id = pair_write(&pair, blocks, blocks, 6, NULL);
    (void)assert_open(&pair, id, KVT_REJECTED, KVT_EREJECTED);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_ended(&result, KVT_REJECTED, KVT_EREJECTED, KVT_SCOPE_REQUEST);
    /* The third and later parts were never posted. */
    assert_int_equal(result.copies, 2);
    assert_int_equal(result.bytes_done, 256);
    pair_expect(&pair, blocks, blocks, 1);
    pair_check(&pair);
    assert_works(&pair);
    pair_close(&pair);
}

/* B08 */
static void the_first_error_of_several_is_kept(void **state)
{
    const uint32_t blocks[] = {0, 2, 4};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=3", 0);
    set_rules(&pair, "hold=1,fail=1,reject=2,late=3/1");
    id = pair_write(&pair, blocks, blocks, 3, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_REJECTED));
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_ended(&result, KVT_REJECTED, KVT_EREJECTED, KVT_SCOPE_REQUEST);
    pair_close(&pair);
}

static void our_memory_may_be_final_before_theirs(void **state)
{
    struct kvt_region region;
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    region = pool_region(&pair.a.pool);
    set_rules(&pair, "half=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    assert_soon((status_of(pair.a.t, id).flags & KVT_LOCAL_FINAL) != 0);
    result = status_of(pair.a.t, id);
    assert_int_equal(result.flags, KVT_LOCAL_FINAL);
    assert_int_equal(result.state, KVT_IN_PROGRESS);
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 0);
    /* Which is all that deregister asks for. */
    assert_kvt_ok(kvt_deregister(pair.a.t, &region, 1, 0, ERR));
    release_all(&pair);
    pair_expect(&pair, (uint32_t[]){1}, (uint32_t[]){1}, 1);
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

/* B08 */
static void all_parts_must_be_final_for_a_side_to_be(void **state)
{
    const uint32_t blocks[] = {0, 2, 4};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=3", 0);
    set_rules(&pair, "half=2,hold=3");
    id = pair_write(&pair, blocks, blocks, 3, NULL);
    assert_soon(status_of(pair.a.t, id).copies == 3 &&
                status_of(pair.a.t, id).bytes_done == 256);
    result = assert_open(&pair, id, KVT_IN_PROGRESS, KVT_OK);
    assert_int_equal(result.flags, 0);
    release_all(&pair);
    pair_expect(&pair, blocks, blocks, 3);
    (void)wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------------ results */

static void a_final_result_never_changes(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .flags = KVT_XFER_NO_EVENT};
    struct kvt_result before;
    struct kvt_result after;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "fail=1");
    id = pair_write_one(&pair, 1, 1, &options);
    assert_soon(is_quiescent(pair.a.t, id));
    before = status_of(pair.a.t, id);
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    after = status_of(pair.a.t, id);
    assert_memory_equal(&before, &after, sizeof before);
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    assert_kvt_ok(kvt_peer_remove(pair.a.t, pair.peer));
    after = status_of(pair.a.t, id);
    assert_memory_equal(&before, &after, sizeof before);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    after = status_of(pair.a.t, id);
    assert_memory_equal(&before, &after, sizeof before);
    assert_kvt_ok(kvt_release(pair.a.t, id));
    pair_close(&pair);
}

/* B47 */
static void a_failed_warm_up_is_a_failed_request(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "connect_fail=1");
    assert_kvt_ok(kvt_warm_up(pair.a.t, pair.peer, NULL, &id, ERR));
    result = wait_xfer(pair.a.t, id);
    assert_ended(&result, KVT_FAILED, KVT_EENGINE, KVT_SCOPE_REQUEST);
    assert_works(&pair);
    pair_close(&pair);
}

/* B11 */
static void one_failed_of_eight_ends_alone(void **state)
{
    struct kvt_result results[8];
    struct pair pair;
    int done = 0;
    int failed = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "unreadable=3");
    for (uint32_t i = 0; i < 8; i++) {
        (void)pair_write_one(&pair, i, i, NULL);
    }
    wait_results(pair.a.t, pair.peer, results, 7);
    release_all(&pair);
    wait_results(pair.a.t, pair.peer, results + 7, 1);
    for (int i = 0; i < 8; i++) {
        done += results[i].state == KVT_DONE;
        failed += results[i].state == KVT_FAILED;
        for (int k = 0; k < i; k++) {
            assert_true(results[k].id != results[i].id);
        }
    }
    assert_int_equal(done, 7);
    assert_int_equal(failed, 1);
    assert_int_equal(results[7].state, KVT_FAILED);
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, results, 8), 0);
    assert_int_equal(stats_of(pair.a.t).inflight, 0);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_rejected_post_has_moved_nothing),
    cmocka_unit_test(a_rejected_post_may_be_on_the_wire),
    cmocka_unit_test(a_failed_request_is_quiescent_when_it_is_over),
    cmocka_unit_test(a_request_that_never_began_is_quiescent),
    cmocka_unit_test(an_unreadable_request_is_not_quiescent_until_proven),
    cmocka_unit_test(a_broken_link_refuses_new_work_until_reload),
    cmocka_unit_test(a_broken_link_ends_all_its_transfers),
    cmocka_unit_test(a_link_that_breaks_without_a_request_disconnects),
    cmocka_unit_test(a_dead_peer_ends_everything_at_once),
    cmocka_unit_test(completion_inside_the_post_is_reported_once),
    cmocka_unit_test(delays_change_no_result),
    cmocka_unit_test(a_rejected_part_waits_for_the_posted_ones),
    cmocka_unit_test(the_first_error_of_several_is_kept),
    cmocka_unit_test(our_memory_may_be_final_before_theirs),
    cmocka_unit_test(all_parts_must_be_final_for_a_side_to_be),
    cmocka_unit_test(a_final_result_never_changes),
    cmocka_unit_test(a_failed_warm_up_is_a_failed_request),
    cmocka_unit_test(one_failed_of_eight_ends_alone),
};

const struct test_group states_group = TEST_GROUP("states", cases);
