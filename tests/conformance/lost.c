/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What cannot be known. A stopped transfer that nothing proves final within
 * the grace time completes as lost: once, not quiescent, its memory in
 * quarantine. A late proof of any kind lifts the quarantine and completes
 * nothing a second time. Needs the fault engine.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

#define GRACE (30 * MS)
/* Long enough for the first request to be posted on a busy machine: without one
 * there is nothing to lose. */
#define DEADLINE (150 * MS)

static void assert_lost(const struct kvt_result *result)
{
    assert_int_equal(result->state, KVT_LOST);
    assert_int_equal(result->code, KVT_ELOST);
    assert_true((result->flags & KVT_FINISHED) != 0);
    assert_int_equal(result->flags & KVT_QUIESCENT, 0);
    assert_string_not_equal(result->text, "");
}

/* Two requests, one at a time, of which the first is posted. */
static kvt_xfer lose_one(struct pair *pair, const char *rule, uint32_t flags)
{
    struct kvt_xfer_options deadline = {
        .size = sizeof deadline, .flags = flags, .timeout_ns = DEADLINE};

    suite_fault_pair(pair, NULL, "chunk_copies=1,window=1", GRACE);
    set_rules(pair, rule);
    return pair_write(pair, (uint32_t[]){1, 3}, (uint32_t[]){1, 3}, 2,
                      &deadline);
}

static void assert_quarantined(const struct pair *pair, uint64_t count)
{
    struct kvt_region region = pool_region(&pair->a.pool);

    assert_int_equal(stats_of(pair->a.t).quarantined, count);
    assert_int_equal(stats_of(pair->a.t).inflight, 0);
    if (count > 0) {
        assert_kvt_fails(kvt_deregister(pair->a.t, &region, 1, 0, ERR),
                         KVT_EBUSY);
    } else {
        assert_kvt_ok(kvt_deregister(pair->a.t, &region, 1, 0, ERR));
    }
}

static void assert_no_second_completion(const struct pair *pair)
{
    struct kvt_result result;

    assert_int_equal(kvt_poll(pair->a.t, KVT_ANY, &result, 1), 0);
    assert_int_equal(kvt_poll(pair->a.t, pair->peer, &result, 1), 0);
    assert_false(wait_fd(pair->a.t, 0));
    assert_int_equal(stats_of(pair->a.t).lost, 1);
}

static void a_hung_transfer_is_lost_after_the_grace_time(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "hold=1", 0);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    assert_int_equal(result.copies, 1);
    /* Reported, and still known until it is proven. */
    result = status_of(pair.a.t, id);
    assert_lost(&result);
    assert_quarantined(&pair, 1);
    release_all(&pair);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_no_second_completion(&pair);
    assert_quarantined(&pair, 0);
    pair_expect(&pair, (uint32_t[]){1}, (uint32_t[]){1}, 1);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_late_proof_shows_in_status_only(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "hold=1", KVT_XFER_NO_EVENT);
    assert_soon(in_state(pair.a.t, id, KVT_LOST));
    result = status_of(pair.a.t, id);
    assert_lost(&result);
    release_all(&pair);
    assert_soon(is_quiescent(pair.a.t, id));
    result = status_of(pair.a.t, id);
    assert_int_equal(result.state, KVT_LOST);
    assert_int_equal(result.code, KVT_ELOST);
    assert_no_second_completion(&pair);
    assert_kvt_ok(kvt_release(pair.a.t, id));
    assert_kvt_fails(kvt_status(pair.a.t, id, &result), KVT_ENOENT);
    assert_quarantined(&pair, 0);
    pair_close(&pair);
}

static void an_undrained_lost_one_proves_before_it_is_drained(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "hold=1", 0);
    assert_soon(in_state(pair.a.t, id, KVT_LOST));
    release_all(&pair);
    assert_soon(is_quiescent(pair.a.t, id));
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_LOST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_kvt_fails(kvt_status(pair.a.t, id, &result), KVT_ENOENT);
    assert_no_second_completion(&pair);
    assert_quarantined(&pair, 0);
    pair_close(&pair);
}

static void proof_of_death_lifts_the_quarantine(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "never=1", 0);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    assert_int_equal(stats_of(pair.a.t).quarantined, 1);
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_no_second_completion(&pair);
    pool_accept(&pair.b.pool, 1);
    pair_check(&pair);
    suite_leak_pair(&pair);
}

static void proof_of_death_is_taken_for_removed_peers_too(void **state)
{
    struct kvt_result result;
    size_t length;
    void *metadata;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "never=1", 0);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    assert_kvt_ok(kvt_peer_remove(pair.a.t, pair.peer));
    assert_int_equal(stats_of(pair.a.t).quarantined, 1);
    /* Out of the engine too: a new peer of its name waits for that. */
    metadata = node_metadata(&pair.b, &length);
    (void)node_add(&pair.a, "b", metadata, length);
    free(metadata);
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    assert_no_second_completion(&pair);
    suite_leak_pair(&pair);
}

static void proof_of_death_ends_what_is_still_in_flight(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "never=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_UNREADABLE));
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    result = wait_xfer(pair.a.t, id);
    assert_int_not_equal(result.state, KVT_LOST);
    assert_int_not_equal(result.state, KVT_DONE);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(stats_of(pair.a.t).lost, 0);
    suite_leak_pair(&pair);
}

/* The chunk stays the engine's until the engine itself is done with it. */
static void a_death_does_not_take_a_read_from_the_engine(void **state)
{
    struct kvt_result result;
    struct pair pair;
    uint32_t block = 4;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "half=1,late=1/50");
    id = pair_read(&pair, &block, &block, 1, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_DISCONNECTED);
    release_all(&pair);
    pair_close(&pair);
}

static void an_endless_grace_loses_nothing(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = MS};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", UINT64_MAX);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, &options);
    assert_soon(in_state(pair.a.t, id, KVT_TIMED_OUT));
    release_all(&pair);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    pair_close(&pair);
}

/* Our own memory may still be written by a read: the peer's death proves
 * nothing of it on every engine, so it must at least not be called done. */
static void a_lost_read_is_lost(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = DEADLINE};
    struct kvt_result result;
    struct pair pair;
    uint32_t block = 4;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", GRACE);
    set_rules(&pair, "hold=1");
    id = pair_read(&pair, &block, &block, 1, &options);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    assert_quarantined(&pair, 1);
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    assert_no_second_completion(&pair);
    pair_close(&pair);
}

static void a_lost_one_is_not_forgotten_by_cancel_or_release(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer moving = 0;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "hold=1", 0);
    assert_soon(in_state(pair.a.t, id, KVT_LOST));
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &moving), 1);
    assert_int_equal(moving, id);
    assert_kvt_ok(kvt_release(pair.a.t, id));
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 0);
    assert_quarantined(&pair, 1);
    release_all(&pair);
    assert_soon(kvt_status(pair.a.t, id, &result) == KVT_ENOENT);
    assert_quarantined(&pair, 0);
    pair_close(&pair);
}

static void a_cancelled_one_can_be_lost(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", GRACE);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL), 1);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    assert_no_second_completion(&pair);
    pair_close(&pair);
}

/* A healthy transfer may take as long as it likes: another one's deadline
 * shows that the control thread has looked at both. */
static void without_a_stop_nothing_is_lost(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options, .timeout_ns = 1};
    struct pair pair;
    kvt_xfer other;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "window=1", 1);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    for (int i = 0; i < 5; i++) {
        other = pair_write_one(&pair, 2, 2, &options);
        assert_int_equal(wait_xfer(pair.a.t, other).state, KVT_TIMED_OUT);
        assert_true(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    }
    release_all(&pair);
    (void)wait_done(pair.a.t, id);
    pair_close(&pair);
}

static void a_lost_one_does_not_hold_up_its_peer(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    id = lose_one(&pair, "hold=1", 0);
    result = wait_xfer(pair.a.t, id);
    assert_lost(&result);
    /* The window of one is free again. */
    pair_expect(&pair, (uint32_t[]){1, 9}, (uint32_t[]){1, 9}, 2);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 9, 9, NULL));
    pair_check(&pair);
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    pair_close(&pair);
}

static void lost_ones_keep_their_place_in_the_limit(void **state)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = DEADLINE};
    uint32_t block = 2;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id;
    kvt_xfer none = 0;

    (void)state;
    need_fault();
    a.engine = suite_engine("");
    a.options.inflight_max = 1;
    a.options.grace_ns = GRACE;
    pair_open(&pair, &a, &b);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, &options);
    assert_int_equal(wait_xfer(pair.a.t, id).state, KVT_LOST);
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, NULL,
                                      &none, ERR),
                     KVT_EAGAIN);
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 2, 2, NULL));
    pair_close(&pair);
}

struct log {
    unsigned lines;
    unsigned malformed;
};

/* On kvt's threads: before the transport is closed they are gone. */
static void take_line(void *ctx, int level, const char *text)
{
    struct log *log = ctx;

    log->lines += level <= KVT_LOG_WARNING;
    log->malformed += level < KVT_LOG_ERROR || level > KVT_LOG_DEBUG ||
                      text[0] == '\0' || strchr(text, '\n') != NULL;
}

/* B11 */
static void a_loss_is_logged_once_and_in_one_line(void **state)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = DEADLINE};
    struct log log = {0};
    struct pair pair;
    kvt_xfer id;

    (void)state;
    need_fault();
    a.engine = suite_engine("");
    a.options.grace_ns = GRACE;
    a.options.log = take_line;
    a.options.log_ctx = &log;
    pair_open(&pair, &a, &b);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, &options);
    assert_int_equal(wait_xfer(pair.a.t, id).state, KVT_LOST);
    for (int i = 0; i < 10; i++) {
        assert_true(in_state(pair.a.t, id, KVT_LOST));
    }
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    pair_close(&pair);
    assert_int_equal(log.lines, 1);
    assert_int_equal(log.malformed, 0);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_hung_transfer_is_lost_after_the_grace_time),
    cmocka_unit_test(a_late_proof_shows_in_status_only),
    cmocka_unit_test(an_undrained_lost_one_proves_before_it_is_drained),
    cmocka_unit_test(proof_of_death_lifts_the_quarantine),
    cmocka_unit_test(proof_of_death_is_taken_for_removed_peers_too),
    cmocka_unit_test(proof_of_death_ends_what_is_still_in_flight),
    cmocka_unit_test(a_death_does_not_take_a_read_from_the_engine),
    cmocka_unit_test(an_endless_grace_loses_nothing),
    cmocka_unit_test(a_lost_read_is_lost),
    cmocka_unit_test(a_lost_one_is_not_forgotten_by_cancel_or_release),
    cmocka_unit_test(a_cancelled_one_can_be_lost),
    cmocka_unit_test(without_a_stop_nothing_is_lost),
    cmocka_unit_test(a_lost_one_does_not_hold_up_its_peer),
    cmocka_unit_test(lost_ones_keep_their_place_in_the_limit),
    cmocka_unit_test(a_loss_is_logged_once_and_in_one_line),
};

const struct test_group lost_group = TEST_GROUP("lost", cases);
