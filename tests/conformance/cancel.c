/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stopping: cancel in both modes, deadlines, release. What is proved in each
 * case is that nothing further is posted, that what was posted is waited for,
 * and that the result comes once, or, where it was asked for, never.
 *
 * The fault engine holds a request back, so that a transfer can be met in any
 * state: `hang` before it moves, `hold` after.
 */
#include <string.h>

#include "suite.h"

static const uint32_t odd[] = {1, 3, 5, 7};

/* A transfer of four requests, one at a time, of which the first is held. */
static kvt_xfer half_posted(struct pair *pair, const char *rule,
                            const struct kvt_xfer_options *options)
{
    kvt_xfer id;

    suite_fault_pair(pair, NULL, "chunk_copies=1,window=1", 0);
    set_rules(pair, rule);
    id = pair_write(pair, odd, odd, 4, options);
    assert_soon(status_of(pair->a.t, id).copies == 1);
    return id;
}

static void assert_nothing_to_poll(struct pair *pair)
{
    struct kvt_result result;

    assert_int_equal(kvt_poll(pair->a.t, KVT_ANY, &result, 1), 0);
    assert_int_equal(kvt_poll(pair->a.t, pair->peer, &result, 1), 0);
    assert_false(wait_fd(pair->a.t, 0));
}

/* B09 */
static void cancel_waits_for_what_was_posted_and_posts_no_more(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer moving = 0;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hold=1", NULL);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &moving), 1);
    assert_int_equal(moving, id);
    result = status_of(pair.a.t, id);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.flags & (KVT_QUIESCENT | KVT_FINISHED), 0);
    assert_nothing_to_poll(&pair);
    /* Again: still moving. */
    moving = 0;
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &moving), 1);
    assert_int_equal(moving, id);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.code, KVT_ECANCELED);
    assert_int_equal(result.scope, KVT_SCOPE_REQUEST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(result.copies, 1);
    assert_int_equal(result.bytes_done, 256);
    pair_expect(&pair, odd, odd, 1);
    pair_check(&pair);
    assert_nothing_to_poll(&pair);
    pair_close(&pair);
}

static void immediate_cancel_reports_nothing_more(void **state)
{
    struct kvt_region region;
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hold=1", NULL);
    region = pool_region(&pair.a.pool);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_IMMEDIATE, NULL),
                     0);
    /* Its memory is still in use, and status still answers. */
    assert_true(in_state(pair.a.t, id, KVT_CANCELLED));
    assert_false(is_quiescent(pair.a.t, id));
    assert_kvt_fails(kvt_deregister(pair.a.t, &region, 1, 0, ERR), KVT_EBUSY);
    release_all(&pair);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_nothing_to_poll(&pair);
    pair_expect(&pair, odd, odd, 1);
    pair_check(&pair);
    assert_kvt_ok(kvt_deregister(pair.a.t, &region, 1, 0, ERR));
    pair_close(&pair);
}

static void wait_then_immediate_takes_the_report_back(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hold=1", NULL);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &id), 1);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_IMMEDIATE, NULL),
                     0);
    release_all(&pair);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_nothing_to_poll(&pair);
    pair_close(&pair);
}

static void cancel_of_a_queued_transfer_is_quiescent_at_once(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer first;
    kvt_xfer second;
    kvt_xfer third;

    (void)state;
    first = half_posted(&pair, "hold=1", NULL);
    second = pair_write_one(&pair, 20, 20, NULL);
    third = pair_write_one(&pair, 21, 21, NULL);
    assert_true(in_state(pair.a.t, second, KVT_QUEUED));
    assert_int_equal(kvt_cancel(pair.a.t, &second, 1, KVT_CANCEL_WAIT, NULL),
                     0);
    assert_int_equal(
        kvt_cancel(pair.a.t, &third, 1, KVT_CANCEL_IMMEDIATE, NULL), 0);
    /* Nothing of them was posted, so nothing of them is heard again. */
    assert_kvt_fails(kvt_status(pair.a.t, second, &result), KVT_ENOENT);
    assert_kvt_fails(kvt_status(pair.a.t, third, &result), KVT_ENOENT);
    release_all(&pair);
    (void)wait_done(pair.a.t, first);
    assert_nothing_to_poll(&pair);
    pair_expect(&pair, odd, odd, 4);
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).cancelled, 2);
    assert_int_equal(stats_of(pair.a.t).inflight, 0);
    pair_close(&pair);
}

static void cancel_of_a_finished_transfer_takes_it_off_the_list(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer ids[2];

    (void)state;
    suite_pair(&pair, NULL);
    ids[0] = pair_write_one(&pair, 0, 0, NULL);
    ids[1] = pair_write_one(&pair, 1, 1, NULL);
    assert_soon(is_quiescent(pair.a.t, ids[0]) &&
                is_quiescent(pair.a.t, ids[1]));
    assert_true(wait_fd(pair.a.t, 0));
    assert_int_equal(kvt_cancel(pair.a.t, ids, 1, KVT_CANCEL_WAIT, NULL), 0);
    assert_int_equal(
        kvt_cancel(pair.a.t, ids + 1, 1, KVT_CANCEL_IMMEDIATE, NULL), 0);
    assert_kvt_fails(kvt_status(pair.a.t, ids[0], &result), KVT_ENOENT);
    assert_nothing_to_poll(&pair);
    assert_int_equal(stats_of(pair.a.t).undrained, 0);
    pair_close(&pair);
}

static void unknown_ids_are_skipped(void **state)
{
    struct pair pair;
    kvt_xfer ids[4] = {0, UINT64_MAX, 12345, 0};
    kvt_xfer moving[4] = {7, 7, 7, 7};

    (void)state;
    ids[3] = half_posted(&pair, "hold=1", NULL);
    assert_int_equal(kvt_cancel(pair.a.t, ids, 4, KVT_CANCEL_WAIT, moving), 1);
    assert_int_equal(moving[0], ids[3]);
    assert_int_equal(moving[1], 7);
    assert_int_equal(kvt_cancel(pair.a.t, NULL, 0, KVT_CANCEL_WAIT, NULL), 0);
    assert_kvt_fails(kvt_cancel(pair.a.t, NULL, 1, KVT_CANCEL_WAIT, NULL),
                     KVT_EINVAL);
    assert_kvt_fails(kvt_cancel(pair.a.t, ids, 4, 2, moving), KVT_EINVAL);
    release_all(&pair);
    (void)wait_xfer(pair.a.t, ids[3]);
    pair_close(&pair);
}

/* The list of those still moving may take the place of the list asked. */
static void moving_ids_may_alias_the_ids(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer ids[3];
    kvt_xfer posted;

    (void)state;
    posted = half_posted(&pair, "hold=1", NULL);
    ids[0] = pair_write_one(&pair, 20, 20, NULL);
    ids[1] = posted;
    ids[2] = pair_write_one(&pair, 21, 21, NULL);
    assert_int_equal(kvt_cancel(pair.a.t, ids, 3, KVT_CANCEL_WAIT, ids), 1);
    assert_int_equal(ids[0], posted);
    release_all(&pair);
    result = wait_xfer(pair.a.t, posted);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_nothing_to_poll(&pair);
    pair_close(&pair);
}

/* A request that the engine has not begun was posted all the same. */
static void cancel_waits_for_a_request_that_has_not_begun(void **state)
{
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hang=1", NULL);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL), 1);
    assert_false(is_quiescent(pair.a.t, id));
    pair_check(&pair);
    release_all(&pair);
    assert_int_equal(wait_xfer(pair.a.t, id).state, KVT_CANCELLED);
    pool_accept(&pair.b.pool, 1);
    pair_check(&pair);
    pair_close(&pair);
}

/* --------------------------------------------------------- racing the posts */

/* A cancel that returns no id says that nothing moves any more. */
static void assert_nothing_lands(struct pair *pair)
{
    struct kvt_result result;

    pool_take(&pair->b.pool);
    assert_int_equal(kvt_poll(pair->a.t, KVT_ANY, &result, 1), 0);
    assert_soon(stats_of(pair->a.t).inflight == 0);
    pair_check(pair);
}

static void assert_ends_once(struct pair *pair, kvt_xfer id)
{
    struct kvt_result result = wait_xfer(pair->a.t, id);

    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_true(result.state == KVT_CANCELLED || result.state == KVT_DONE);
    assert_nothing_lands(pair);
}

static void a_cancel_at_any_moment_ends_once_and_is_true(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 4000, .gap_bytes = 96, .count = 64};
    int rounds = suite.slow ? 100 : 1000;
    uint64_t seed = suite_seed();
    uint32_t all[64];
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    for (uint32_t i = 0; i < 64; i++) {
        all[i] = i;
    }
    for (int round = 0; round < rounds; round++) {
        kvt_xfer id;
        int moving;

        memset(pool_block(&pair.a.pool, 0), round, 64 * 4096 - 96);
        pool_take(&pair.a.pool);
        id = pair_write(&pair, all, all, 64, NULL);
        for (uint64_t spin = test_random(&seed) % 20000; spin > 0; spin--) {
            __asm__ volatile("" ::: "memory");
        }
        moving = kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL);
        if (moving == 0) {
            assert_nothing_lands(&pair);
        } else {
            assert_int_equal(moving, 1);
            assert_ends_once(&pair, id);
        }
        assert_int_equal(stats_of(pair.a.t).undrained, 0);
    }
    pair_close(&pair);
}

enum { BURST = 32 };

/* Writes a burst, cancels it at a random moment, and returns how many of it
 * the cancel calls still moving. */
static size_t cancel_a_burst(struct pair *pair, uint64_t *seed)
{
    kvt_xfer ids[BURST];
    int moving;

    for (uint32_t i = 0; i < BURST; i++) {
        ids[i] = pair_write_one(pair, i, i, NULL);
    }
    for (uint64_t spin = test_random(seed) % 20000; spin > 0; spin--) {
        __asm__ volatile("" ::: "memory");
    }
    moving = kvt_cancel(pair->a.t, ids, BURST, KVT_CANCEL_WAIT, ids);
    assert_in_range(moving, 0, BURST);
    return (size_t)moving;
}

/* An id that cancel does not return was finished, or never posted: counted by
 * what the engine was given in the end. (B09) */
static void what_cancel_calls_stopped_was_never_posted(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 4000, .gap_bytes = 96, .count = BURST};
    int rounds = suite.slow ? 100 : 1000;
    uint64_t seed = suite_seed();
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    for (int round = 0; round < rounds; round++) {
        struct kvt_stats before = stats_of(pair.a.t);
        struct kvt_result results[BURST];
        size_t moving = cancel_a_burst(&pair, &seed);
        uint64_t never_posted;
        struct kvt_stats after;

        wait_results(pair.a.t, pair.peer, results, moving);
        assert_soon(stats_of(pair.a.t).inflight == 0);
        after = stats_of(pair.a.t);
        never_posted = after.cancelled - before.cancelled;
        for (size_t i = 0; i < moving; i++) {
            never_posted -= results[i].state == KVT_CANCELLED;
        }
        assert_int_equal(after.copies - before.copies, BURST - never_posted);
        assert_int_equal(after.undrained, 0);
    }
    pair_close(&pair);
}

/* ---------------------------------------------------------------- deadlines */

/* B13 */
static void a_deadline_stops_a_transfer_and_waits_for_its_posts(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = 150 * MS};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hold=1", &options);
    assert_soon(in_state(pair.a.t, id, KVT_TIMED_OUT));
    result = status_of(pair.a.t, id);
    assert_int_equal(result.code, KVT_ETIMEDOUT);
    assert_int_equal(result.flags & (KVT_QUIESCENT | KVT_FINISHED), 0);
    assert_nothing_to_poll(&pair);
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_int_equal(result.code, KVT_ETIMEDOUT);
    assert_int_equal(result.scope, KVT_SCOPE_REQUEST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(result.copies, 1);
    pair_expect(&pair, odd, odd, 1);
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).timed_out, 1);
    pair_close(&pair);
}

static void a_deadline_passes_for_a_queued_transfer_too(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options, .timeout_ns = 1};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer first;
    kvt_xfer second;

    (void)state;
    first = half_posted(&pair, "hold=1", NULL);
    second = pair_write_one(&pair, 20, 20, &options);
    result = wait_xfer(pair.a.t, second);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(result.copies, 0);
    release_all(&pair);
    (void)wait_done(pair.a.t, first);
    pair_expect(&pair, odd, odd, 4);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_far_deadline_never_passes(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = UINT64_MAX};
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, &options));
    options.timeout_ns = UINT64_MAX / 2;
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, &options));
    pair_close(&pair);
}

/* ------------------------------------------------------------------ release */

/* B06 */
static void release_before_quiescent_lets_it_go_on_unreported(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = half_posted(&pair, "hold=1", NULL);
    assert_kvt_ok(kvt_release(pair.a.t, id));
    assert_false(is_quiescent(pair.a.t, id));
    release_all(&pair);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_nothing_to_poll(&pair);
    pair_expect(&pair, odd, odd, 4);
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).done, 1);
    pair_close(&pair);
}

/* Or its memory would be taken for free. */
static void cancel_returns_moving_ones_that_are_reported_no_more(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer moving = 0;
    kvt_xfer id;

    (void)state;
    for (int released = 0; released < 2; released++) {
        id = half_posted(&pair, "hold=1", NULL);
        if (released != 0) {
            assert_kvt_ok(kvt_release(pair.a.t, id));
        } else {
            assert_int_equal(
                kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_IMMEDIATE, NULL), 0);
        }
        assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &moving),
                         1);
        assert_int_equal(moving, id);
        release_all(&pair);
        assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
        assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL),
                         0);
        assert_nothing_to_poll(&pair);
        pair_close(&pair);
    }
}

/* Two hundred unfinished ones, forgotten, and a close right behind. (B06) */
static void many_released_transfers_are_no_trouble_at_close(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 64};
    uint32_t all[64];
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    for (uint32_t i = 0; i < 64; i++) {
        all[i] = i ^ 1;
    }
    for (int i = 0; i < 200; i++) {
        assert_kvt_ok(
            kvt_release(pair.a.t, pair_write(&pair, all, all, 64, NULL)));
    }
    pair_expect(&pair, all, all, 64);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(cancel_waits_for_what_was_posted_and_posts_no_more),
    cmocka_unit_test(immediate_cancel_reports_nothing_more),
    cmocka_unit_test(wait_then_immediate_takes_the_report_back),
    cmocka_unit_test(cancel_of_a_queued_transfer_is_quiescent_at_once),
    cmocka_unit_test(cancel_of_a_finished_transfer_takes_it_off_the_list),
    cmocka_unit_test(unknown_ids_are_skipped),
    cmocka_unit_test(moving_ids_may_alias_the_ids),
    cmocka_unit_test(cancel_waits_for_a_request_that_has_not_begun),
    cmocka_unit_test(a_cancel_at_any_moment_ends_once_and_is_true),
    cmocka_unit_test(what_cancel_calls_stopped_was_never_posted),
    cmocka_unit_test(a_deadline_stops_a_transfer_and_waits_for_its_posts),
    cmocka_unit_test(a_deadline_passes_for_a_queued_transfer_too),
    cmocka_unit_test(a_far_deadline_never_passes),
    cmocka_unit_test(release_before_quiescent_lets_it_go_on_unreported),
    cmocka_unit_test(cancel_returns_moving_ones_that_are_reported_no_more),
    cmocka_unit_test(many_released_transfers_are_no_trouble_at_close),
};

const struct test_group cancel_group = TEST_GROUP("cancel", cases);
