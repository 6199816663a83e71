/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results and the descriptor that announces them: each transfer once, per peer
 * and never a sibling's, oldest first; the descriptor is readable exactly while
 * there is something to take.
 */
#include <poll.h>
#include <stdlib.h>

#include "suite.h"

/* One mover and two targets. */
struct trio {
    struct pair pair;
    struct node other;
    kvt_peer second;
    kvt_layout layout;
};

static void trio_open(struct trio *trio)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_run run;
    size_t length;
    void *metadata;

    suite_pair(&trio->pair, NULL);
    node_open(&trio->other, &plan);
    metadata = node_metadata(&trio->other, &length);
    trio->second = node_add(&trio->pair.a, "second", metadata, length);
    free(metadata);
    run = pool_run(&trio->other.pool);
    assert_kvt_ok(kvt_prepare(trio->pair.a.t, trio->second, "pool", &run, 1,
                              &trio->layout, ERR));
}

static void trio_close(struct trio *trio)
{
    pair_close(&trio->pair);
    node_close(&trio->other);
}

static kvt_xfer write_second(const struct trio *trio, uint32_t block)
{
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id;

    assert_kvt_ok(kvt_write_blocks(trio->pair.a.t, trio->second,
                                   trio->pair.a.layout, &indices, trio->layout,
                                   &indices, NULL, &id, ERR));
    return id;
}

static void await_finished(kvt_transport *t, const kvt_xfer *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        assert_soon(is_quiescent(t, ids[i]));
    }
}

static void a_poll_never_takes_a_sibling_s_results(void **state)
{
    struct kvt_result result;
    struct trio trio;
    kvt_transport *t;

    (void)state;
    trio_open(&trio);
    t = trio.pair.a.t;
    for (uint32_t round = 0; round < 20; round++) {
        kvt_xfer ids[2];

        ids[0] = pair_write_one(&trio.pair, round, round, NULL);
        ids[1] = write_second(&trio, round);
        await_finished(t, ids, 2);
        if (round % 2 == 0) {
            assert_int_equal(kvt_poll(t, trio.second, &result, 1), 1);
            assert_int_equal(result.id, ids[1]);
            assert_int_equal(result.peer, trio.second);
            assert_int_equal(kvt_poll(t, trio.second, &result, 1), 0);
            assert_int_equal(kvt_poll(t, trio.pair.peer, &result, 1), 1);
            assert_int_equal(result.id, ids[0]);
        } else {
            assert_int_equal(kvt_poll(t, trio.pair.peer, &result, 1), 1);
            assert_int_equal(result.id, ids[0]);
            assert_true(wait_fd(t, 0));
            assert_int_equal(kvt_poll(t, KVT_ANY, &result, 1), 1);
            assert_int_equal(result.id, ids[1]);
        }
        assert_int_equal(kvt_poll(t, KVT_ANY, &result, 1), 0);
        assert_false(wait_fd(t, 0));
    }
    trio_close(&trio);
}

static void results_come_oldest_first_and_as_many_as_fit(void **state)
{
    enum { COUNT = 9 };
    struct kvt_result results[COUNT];
    kvt_xfer ids[COUNT];
    struct pair pair;
    size_t have = 0;

    (void)state;
    suite_pair(&pair, NULL);
    for (uint32_t i = 0; i < COUNT; i++) {
        ids[i] = pair_write_one(&pair, i, i, NULL);
        assert_soon(is_quiescent(pair.a.t, ids[i]));
    }
    while (have < COUNT) {
        int got = kvt_poll(pair.a.t, have % 4 == 0 ? KVT_ANY : pair.peer,
                           results + have, 2);

        assert_int_equal(got, have + 2 <= COUNT ? 2 : 1);
        have += (size_t)got;
        assert_true(wait_fd(pair.a.t, 0) == (have < COUNT));
    }
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(results[i].id, ids[i]);
    }
    pair_close(&pair);
}

static void polling_for_nothing_takes_nothing(void **state)
{
    struct kvt_result result = {.id = 77};
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 0);
    assert_int_equal(kvt_poll(pair.a.t, pair.peer, &result, 0), 0);
    assert_int_equal(kvt_poll(pair.a.t, 424242, &result, 1), 0);
    id = pair_write_one(&pair, 0, 0, NULL);
    assert_soon(is_quiescent(pair.a.t, id));
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, NULL, 0), 0);
    assert_int_equal(kvt_poll(pair.a.t, pair.peer, &result, 0), 0);
    assert_int_equal(kvt_poll(pair.a.t, 424242, &result, 1), 0);
    assert_int_equal(kvt_poll(pair.a.t, KVT_SELF, &result, 1), 0);
    assert_kvt_fails(kvt_poll(pair.a.t, KVT_ANY, NULL, 1), KVT_EINVAL);
    assert_int_equal(result.id, 77);
    (void)wait_done(pair.a.t, id);
    pair_close(&pair);
}

/* Without kvt_fd() in between, which would look for itself. */
static bool is_readable(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int count = poll(&ready, 1, 0);

    assert_true(count >= 0);
    return count == 1;
}

static void the_descriptor_is_readable_while_there_is_something(void **state)
{
    struct pair pair;
    int fd;

    (void)state;
    suite_pair(&pair, NULL);
    fd = kvt_fd(pair.a.t);
    assert_true(fd >= 0);
    assert_false(is_readable(fd));
    for (uint32_t i = 0; i < 50; i++) {
        kvt_xfer ids[2];

        ids[0] = pair_write_one(&pair, i, i, NULL);
        ids[1] = pair_write_one(&pair, i, i, NULL);
        await_finished(pair.a.t, ids, 1);
        assert_true(is_readable(fd));
        await_finished(pair.a.t, ids + 1, 1);
        assert_true(is_readable(fd));
        assert_kvt_ok(kvt_release(pair.a.t, ids[0]));
        assert_true(is_readable(fd));
        (void)wait_done(pair.a.t, ids[1]);
        assert_false(is_readable(fd));
    }
    assert_int_equal(kvt_fd(pair.a.t), fd);
    pair_close(&pair);
}

/* Asked for only after something has finished. */
static void the_descriptor_shows_what_was_there_before_it(void **state)
{
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    id = pair_write_one(&pair, 0, 0, NULL);
    assert_soon(is_quiescent(pair.a.t, id));
    assert_true(wait_fd(pair.a.t, 0));
    (void)wait_done(pair.a.t, id);
    assert_false(wait_fd(pair.a.t, 0));
    pair_close(&pair);
}

static void release_of_the_last_result_makes_it_unreadable(void **state)
{
    struct pair pair;
    kvt_xfer ids[2];

    (void)state;
    suite_pair(&pair, NULL);
    ids[0] = pair_write_one(&pair, 0, 0, NULL);
    ids[1] = pair_write_one(&pair, 1, 1, NULL);
    await_finished(pair.a.t, ids, 2);
    assert_kvt_ok(kvt_release(pair.a.t, ids[0]));
    assert_true(wait_fd(pair.a.t, 0));
    assert_kvt_ok(kvt_release(pair.a.t, ids[1]));
    assert_false(wait_fd(pair.a.t, 0));
    pair_close(&pair);
}

static void a_finished_add_makes_it_readable(void **state)
{
    struct kvt_peer_params params = {.size = sizeof params, .name = "more"};
    struct pair pair;
    void *metadata;
    kvt_peer peer;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    metadata = node_metadata(&pair.b, &params.metadata_length);
    params.metadata = metadata;
    assert_false(wait_fd(pair.a.t, 0));
    assert_kvt_ok(kvt_peer_add_async(pair.a.t, &params, &peer, &id, ERR));
    assert_true(wait_fd(pair.a.t, test_wait_ms()));
    (void)wait_done(pair.a.t, id);
    assert_false(wait_fd(pair.a.t, 0));
    free(metadata);
    pair_close(&pair);
}

static void a_removed_peer_is_drained_and_then_unknown(void **state)
{
    struct kvt_result result;
    struct trio trio;
    kvt_transport *t;
    kvt_xfer ids[3];

    (void)state;
    trio_open(&trio);
    t = trio.pair.a.t;
    for (uint32_t i = 0; i < 3; i++) {
        ids[i] = write_second(&trio, i);
        await_finished(t, &ids[i], 1);
    }
    assert_kvt_ok(kvt_peer_remove(t, trio.second));
    assert_int_equal(kvt_poll(t, trio.pair.peer, &result, 1), 0);
    assert_int_equal(kvt_poll(t, trio.second, &result, 1), 1);
    assert_int_equal(result.id, ids[0]);
    assert_int_equal(kvt_poll(t, KVT_ANY, &result, 1), 1);
    assert_int_equal(result.id, ids[1]);
    assert_int_equal(result.peer, trio.second);
    assert_int_equal(kvt_poll(t, trio.second, &result, 1), 1);
    assert_int_equal(kvt_poll(t, trio.second, &result, 1), 0);
    assert_false(wait_fd(t, 0));
    trio_close(&trio);
}

static void status_takes_nothing(void **state)
{
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    id = pair_write_one(&pair, 0, 0, NULL);
    assert_soon(is_quiescent(pair.a.t, id));
    for (int i = 0; i < 3; i++) {
        assert_true(in_state(pair.a.t, id, KVT_DONE));
        assert_true(wait_fd(pair.a.t, 0));
    }
    (void)wait_done(pair.a.t, id);
    pair_close(&pair);
}

/* A second peer's small transfer is not stuck behind a long one. (B13) */
static void a_held_peer_does_not_hold_another(void **state)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct node_plan c = suite_plan(NULL);
    struct kvt_result result;
    struct trio trio;
    struct kvt_run run;
    size_t length;
    void *metadata;
    kvt_xfer held[8];
    kvt_xfer id;

    (void)state;
    need_fault();
    a.engine = suite_engine("window=2");
    /* Light ones would have a window of their own. */
    a.shape.block_bytes = b.shape.block_bytes = c.shape.block_bytes = 32768;
    pair_open(&trio.pair, &a, &b);
    node_open(&trio.other, &c);
    metadata = node_metadata(&trio.other, &length);
    trio.second = node_add(&trio.pair.a, "second", metadata, length);
    free(metadata);
    run = pool_run(&trio.other.pool);
    assert_kvt_ok(kvt_prepare(trio.pair.a.t, trio.second, "pool", &run, 1,
                              &trio.layout, ERR));
    set_rules(&trio.pair, "hold=1-2");
    for (uint32_t i = 0; i < 8; i++) {
        held[i] = pair_write_one(&trio.pair, i, i, NULL);
    }
    assert_soon(in_state(trio.pair.a.t, held[1], KVT_IN_PROGRESS));
    id = write_second(&trio, 9);
    wait_results(trio.pair.a.t, trio.second, &result, 1);
    assert_int_equal(result.id, id);
    assert_int_equal(result.state, KVT_DONE);
    assert_true(in_state(trio.pair.a.t, held[7], KVT_QUEUED));
    release_all(&trio.pair);
    for (int i = 0; i < 8; i++) {
        wait_results(trio.pair.a.t, trio.pair.peer, &result, 1);
        assert_int_equal(result.state, KVT_DONE);
    }
    trio_close(&trio);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_poll_never_takes_a_sibling_s_results),
    cmocka_unit_test(results_come_oldest_first_and_as_many_as_fit),
    cmocka_unit_test(polling_for_nothing_takes_nothing),
    cmocka_unit_test(the_descriptor_is_readable_while_there_is_something),
    cmocka_unit_test(the_descriptor_shows_what_was_there_before_it),
    cmocka_unit_test(release_of_the_last_result_makes_it_unreadable),
    cmocka_unit_test(a_finished_add_makes_it_readable),
    cmocka_unit_test(a_removed_peer_is_drained_and_then_unknown),
    cmocka_unit_test(status_takes_nothing),
    cmocka_unit_test(a_held_peer_does_not_hold_another),
};

const struct test_group polls_group = TEST_GROUP("polls", cases);
