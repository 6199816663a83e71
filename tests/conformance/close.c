/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a transport: idempotent, bounded, exact about what is not
 * quiescent, without a thread, descriptor, mapping or byte left; and the one
 * other end there is, fork(): the child has nothing of it, the parent all.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

/* B38 */
static void close_twice_is_close_once(void **state)
{
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    assert_kvt_ok(kvt_close(pair.a.t, 1, ERR));
    pair_close(&pair);
}

static void close_without_end_closes_at_once(void **state)
{
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_kvt_ok(kvt_close(pair.a.t, UINT64_MAX, ERR));
    pair_close(&pair);
}

static void free_closes_and_takes_null(void **state)
{
    struct pair pair;

    (void)state;
    kvt_free(NULL);
    suite_pair(&pair, NULL);
    (void)pair_write_one(&pair, 0, 0, NULL);
    kvt_free(pair.a.t);
    kvt_free(pair.b.t);
    pool_close(&pair.a.pool);
    pool_close(&pair.b.pool);
}

static void results_are_read_after_close(void **state)
{
    struct kvt_xfer_options no_event = {.size = sizeof no_event,
                                        .flags = KVT_XFER_NO_EVENT};
    struct kvt_result result = {0};
    struct pair pair;
    kvt_xfer shown;
    kvt_xfer asked;

    (void)state;
    suite_pair(&pair, NULL);
    shown = pair_write_one(&pair, 0, 0, NULL);
    asked = pair_write_one(&pair, 1, 1, &no_event);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    assert_true(in_state(pair.a.t, shown, KVT_DONE));
    assert_true(in_state(pair.a.t, asked, KVT_DONE));
    assert_int_equal(kvt_poll(pair.a.t, pair.peer, &result, 1), 1);
    assert_int_equal(result.id, shown);
    assert_int_equal(result.state, KVT_DONE);
    assert_int_equal(stats_of(pair.a.t).done, 2);
    assert_int_equal(stats_of(pair.a.t).inflight, 0);
    assert_int_equal(stats_of(pair.a.t).regions, 0);
    assert_int_equal(stats_of(pair.a.t).peers, 0);
    assert_int_equal(stats_of(pair.a.t).layouts, 0);
    pair_close(&pair);
}

/* The longer half of what was queued when close was called still lands. */
static void close_lets_work_in_flight_finish(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 256};
    enum { COUNT = 16 };
    struct kvt_result results[COUNT];
    uint32_t all[256];
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    for (uint32_t i = 0; i < 256; i++) {
        all[i] = 255 - i; /* nothing merges */
    }
    for (int i = 0; i < COUNT; i++) {
        (void)pair_write(&pair, all, all, 256, NULL);
    }
    pair_expect(&pair, all, all, 256);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    assert_int_equal(kvt_poll(pair.a.t, pair.peer, results, COUNT), COUNT);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(results[i].state, KVT_DONE);
    }
    pair_check(&pair);
    pair_close(&pair);
}

static void close_counts_what_is_not_quiescent(void **state)
{
    struct kvt_result results[3];
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    /* The third must be done in the first half of the close's time. */
    (void)wait_done(pair.a.t, pair_write_one(&pair, 3, 3, NULL));
    set_rules(&pair, "never=1-2");
    for (uint32_t i = 0; i < 3; i++) {
        (void)pair_write_one(&pair, i, i, NULL);
    }
    assert_kvt_fails_with(kvt_close(pair.a.t, 800 * MS, ERR), KVT_EBUSY,
                          "2 transfers are not quiescent");
    assert_int_equal(kvt_poll(pair.a.t, pair.peer, results, 3), 3);
    assert_int_equal(results[0].state, KVT_DONE);
    for (int i = 1; i < 3; i++) {
        assert_int_equal(results[i].state, KVT_LOST);
        assert_int_equal(results[i].flags & KVT_QUIESCENT, 0);
    }
    assert_kvt_fails(kvt_close(pair.a.t, 0, ERR), KVT_EBUSY);
    suite_leak_pair(&pair);
}

/* B38 */
static void close_returns_although_the_engine_does_not_stop(void **state)
{
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "close_hang", 0);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    assert_kvt_fails(kvt_close(pair.a.t, 200 * MS, ERR), KVT_EBUSY);
    suite_leak_pair(&pair);
}

static void close_stops_what_does_not_finish(void **state)
{
    struct kvt_result result = {0};
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=1", 0);
    set_rules(&pair, "late=1/3000");
    (void)pair_write(&pair, (uint32_t[]){0, 2, 4}, (uint32_t[]){0, 2, 4}, 3,
                     NULL);
    pool_expect(&pair.b.pool, 0, &pair.a.pool, 0);
    /* The first part is final in the second half; then nothing is posted. */
    assert_kvt_ok(kvt_close(pair.a.t, 5000 * MS, ERR));
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 1);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.code, KVT_ECLOSED);
    assert_int_equal(result.scope, KVT_SCOPE_TRANSPORT);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(result.copies, 1);
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------- nothing left */

static void open_and_close(void)
{
    struct kvt_options options = {
        .size = sizeof options, .engine = suite.engine, .inflight_max = 16};
    kvt_transport *t = NULL;

    assert_kvt_ok(kvt_open(&options, &t, ERR));
    assert_true(kvt_fd(t) >= 0);
    assert_kvt_ok(kvt_close(t, 0, ERR));
    kvt_free(t);
}

static void assert_same_usage(struct usage before, struct usage after,
                              uint64_t slack_bytes)
{
    assert_int_equal(after.threads, before.threads);
    assert_int_equal(after.fds, before.fds);
    /* A sanitizer's own allocator maps as it likes. */
    assert_true(suite.slow || after.maps <= before.maps + 2);
    assert_true(after.heap_bytes <= before.heap_bytes + slack_bytes);
}

/* B38 */
static void a_thousand_transports_leave_nothing(void **state)
{
    int rounds = suite.agent ? 12 : suite.slow ? 200 : 1000;
    int warm = suite.agent ? 3 : 10;
    struct usage before;

    (void)state;
    for (int i = 0; i < warm; i++) {
        open_and_close();
    }
    before = usage_now();
    for (int i = 0; i < rounds; i++) {
        open_and_close();
    }
    assert_same_usage(before, usage_now(), suite.slow ? 65536 : 4096);
}

/* B49 */
static void pairs_with_work_leave_nothing(void **state)
{
    /* UCX allocates 4 to 9 KiB once, in whichever pair comes to need it. */
    uint64_t slack_bytes = suite.slow ? 65536 : suite.agent ? 32768 : 4096;
    struct usage before = {0};

    (void)state;
    for (int i = 0; i < 40; i++) {
        struct pair pair;

        if (i == 10) {
            before = usage_now();
        }
        suite_pair(&pair, NULL);
        (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
        (void)pair_write_one(&pair, 1, 1, NULL);
        pair_close(&pair);
    }
    assert_same_usage(before, usage_now(), slack_bytes);
}

static void read_signals(char *text, size_t size)
{
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    size_t used = 0;

    assert_non_null(file);
    text[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        bool wanted = strncmp(line, "SigBlk", 6) == 0 ||
                      strncmp(line, "SigIgn", 6) == 0 ||
                      strncmp(line, "SigCgt", 6) == 0;

        if (wanted && used + sizeof line < size) {
            used += (size_t)snprintf(text + used, size - used, "%s", line);
        }
    }
    (void)fclose(file);
}

/* B37 */
static void signal_dispositions_and_masks_stay(void **state)
{
    char before[2048];
    char during[2048];
    char after[2048];
    struct pair pair;

    (void)state;
    read_signals(before, sizeof before);
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    read_signals(during, sizeof during);
    pair_close(&pair);
    read_signals(after, sizeof after);
    assert_string_equal(before, during);
    assert_string_equal(before, after);
}

/* -------------------------------------------------------------------- fork */

static void reap(pid_t pid)
{
    int status = -1;

    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("the forked child failed: status 0x%x", status);
    }
}

/* No assertion may fail in the child: it has no test to end. */
static _Noreturn void use_in_child(const struct pair *pair)
{
    struct kvt_result result;
    struct kvt_error err = {0};
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id = 0;
    bool good;

    good = kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &indices,
                            pair->remote, &indices, NULL, &id,
                            &err) == KVT_EFORKED &&
           err.code == KVT_EFORKED && err.text[0] != '\0' &&
           kvt_poll(pair->a.t, KVT_ANY, &result, 1) == KVT_EFORKED &&
           kvt_agent_name(pair->a.t) == NULL &&
           kvt_close(pair->a.t, 0, NULL) == KVT_OK &&
           kvt_close(pair->a.t, 0, NULL) == KVT_OK;
    kvt_free(pair->a.t);
    (void)kvt_close(pair->b.t, 0, NULL);
    kvt_free(pair->b.t);
    _exit(good ? 0 : 1);
}

/* B36 */
static void a_forked_child_has_nothing_and_disturbs_nothing(void **state)
{
    const struct pool_shape shape = {.block_bytes = 16384, .count = 512};
    enum { COUNT = 8 };
    struct kvt_result results[COUNT];
    uint32_t all[512];
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    for (uint32_t i = 0; i < 512; i++) {
        all[i] = i ^ 1; /* nothing merges */
    }
    for (int round = 0; round < 2; round++) {
        pid_t pid;

        for (int i = 0; i < COUNT; i++) {
            (void)pair_write(&pair, all, all, 512, NULL);
        }
        pid = fork();
        if (pid == 0 && round == 0) {
            use_in_child(&pair);
        } else if (pid == 0) {
            _exit(0);
        }
        reap(pid);
        wait_results(pair.a.t, pair.peer, results, COUNT);
        for (int i = 0; i < COUNT; i++) {
            assert_int_equal(results[i].state, KVT_DONE);
        }
        assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    }
    pair_expect(&pair, all, all, 512);
    pair_check(&pair);
    pair_close(&pair);
}

/* B36 */
static void a_forked_child_opens_its_own(void **state)
{
    struct pair pair;
    pid_t pid;

    (void)state;
    if (suite.tsan) {
        skip_case("thread sanitizer ends a child that starts threads");
    }
    if (suite.agent) {
        skip_case("UCX has no thread left in a forked child");
    }
    suite_pair(&pair, NULL);
    pid = fork();
    if (pid == 0) {
        struct kvt_options options = {.size = sizeof options,
                                      .engine = suite.engine};
        kvt_transport *t = NULL;
        int code = kvt_open(&options, &t, NULL);

        if (code == KVT_OK) {
            code = kvt_close(t, 0, NULL);
            kvt_free(t);
        }
        _exit(code == KVT_OK ? 0 : 1);
    }
    reap(pid);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(close_twice_is_close_once),
    cmocka_unit_test(close_without_end_closes_at_once),
    cmocka_unit_test(free_closes_and_takes_null),
    cmocka_unit_test(results_are_read_after_close),
    cmocka_unit_test(close_lets_work_in_flight_finish),
    cmocka_unit_test(close_counts_what_is_not_quiescent),
    cmocka_unit_test(close_returns_although_the_engine_does_not_stop),
    cmocka_unit_test(close_stops_what_does_not_finish),
    cmocka_unit_test(a_thousand_transports_leave_nothing),
    cmocka_unit_test(pairs_with_work_leave_nothing),
    cmocka_unit_test(signal_dispositions_and_masks_stay),
    cmocka_unit_test(a_forked_child_has_nothing_and_disturbs_nothing),
    cmocka_unit_test(a_forked_child_opens_its_own),
};

const struct test_group close_group = TEST_GROUP("close", cases);
