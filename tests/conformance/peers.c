/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Membership: an add gives a new id and the old one means nothing any more, a
 * newer call takes the place of an unfinished one, and ten thousand peers leave
 * nothing behind.
 */
#include <dirent.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "suite.h"

/* b's metadata, for a to import as often as it likes. */
struct fixture {
    struct pair pair;
    void *metadata;
    struct kvt_peer_params params;
};

static void begin_with(struct fixture *f, const char *rules)
{
    if (rules == NULL) {
        suite_pair(&f->pair, NULL);
    } else {
        suite_fault_pair(&f->pair, NULL, rules, 0);
    }
    f->params = (struct kvt_peer_params){.size = sizeof f->params,
                                         .name = "other"};
    f->metadata = node_metadata(&f->pair.b, &f->params.metadata_length);
    f->params.metadata = f->metadata;
}

static void end(struct fixture *f)
{
    free(f->metadata);
    pair_close(&f->pair);
}

static struct kvt_peer_info info_of(kvt_transport *t, kvt_peer peer)
{
    struct kvt_peer_info info = {0};

    assert_kvt_ok(kvt_peer_info(t, peer, &info));
    return info;
}

static void assert_unknown(kvt_transport *t, kvt_peer peer)
{
    struct kvt_peer_info info;

    assert_int_equal(kvt_peer_loaded(t, peer), 0);
    assert_kvt_fails(kvt_peer_info(t, peer, &info), KVT_ENOENT);
    assert_kvt_fails(kvt_peer_remove(t, peer), KVT_ENOENT);
    assert_kvt_fails(kvt_peer_unload(t, peer, 0, ERR), KVT_ENOENT);
    assert_kvt_fails(kvt_peer_reload(t, peer, NULL, 0, 0, ERR), KVT_ENOENT);
}

static int try_write(const struct pair *pair, kvt_peer peer, kvt_layout remote)
{
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id;

    return kvt_write_blocks(pair->a.t, peer, pair->a.layout, &indices, remote,
                            &indices, NULL, &id, NULL);
}

/* --------------------------------------------------------------------- add */

static void an_added_peer_is_loaded_and_found(void **state)
{
    struct kvt_peer_info info;
    struct fixture f;
    kvt_peer found = 0;

    (void)state;
    begin_with(&f, NULL);
    info = info_of(f.pair.a.t, f.pair.peer);
    assert_string_equal(info.name, "b");
    assert_string_equal(info.agent_name, kvt_agent_name(f.pair.b.t));
    assert_int_equal(info.state, KVT_PEER_LOADED);
    assert_int_equal(info.code, KVT_OK);
    assert_int_equal(info.region_count, 1);
    assert_int_equal(info.layout_count, 1);
    assert_int_equal(info.inflight, 0);
    assert_string_not_equal(info.path, "");
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, f.pair.peer), 1);
    assert_kvt_ok(kvt_peer_find(f.pair.a.t, "b", &found));
    assert_int_equal(found, f.pair.peer);
    assert_kvt_fails(kvt_peer_find(f.pair.a.t, "c", &found), KVT_ENOENT);
    assert_int_equal(stats_of(f.pair.a.t).peers, 1);
    assert_int_equal(stats_of(f.pair.a.t).peers_loaded, 1);
    end(&f);
}

static void an_async_add_reports_through_poll(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_peer peer = 0;
    kvt_xfer id = 0;

    (void)state;
    begin_with(&f, NULL);
    f.params.user_data = 4711;
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &peer, &id, ERR));
    assert_int_not_equal(peer, f.pair.peer);
    wait_results(f.pair.a.t, peer, &result, 1);
    assert_int_equal(result.id, id);
    assert_int_equal(result.peer, peer);
    assert_int_equal(result.op, KVT_OP_ADD);
    assert_int_equal(result.state, KVT_DONE);
    assert_int_equal(result.user_data, 4711);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, peer), 1);
    end(&f);
}

/* Whether each thread may run where we may. */
static bool are_all_free(void)
{
    DIR *folder = opendir("/proc/self/task");
    const struct dirent *entry;
    bool all = true;
    cpu_set_t ours;

    assert_non_null(folder);
    assert_int_equal(sched_getaffinity(0, sizeof ours, &ours), 0);
    while ((entry = readdir(folder)) != NULL) {
        pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
        cpu_set_t theirs;

        all &= thread == 0 ||
               sched_getaffinity(thread, sizeof theirs, &theirs) != 0 ||
               CPU_EQUAL(&ours, &theirs);
    }
    (void)closedir(folder);
    return all;
}

/* The call keeps the thread that it wakes off its processor, for a moment. */
static void an_async_add_leaves_every_thread_free(void **state)
{
    struct kvt_result result;
    struct fixture f;

    (void)state;
    begin_with(&f, NULL);
    assert_soon(are_all_free());
    for (int i = 0; i < 20; i++) {
        kvt_peer peer = 0;
        kvt_xfer id = 0;

        assert_kvt_ok(
            kvt_peer_add_async(f.pair.a.t, &f.params, &peer, &id, ERR));
        if (i % 2 == 0) {
            wait_results(f.pair.a.t, peer, &result, 1);
            assert_soon(are_all_free());
        }
    }
    assert_soon(are_all_free());
    end(&f);
}

/* The first add and the first long write of a transport start threads. */
static void threads_that_an_async_add_starts_are_free(void **state)
{
    const struct pool_shape shape = {.block_bytes = 65536, .count = 64};
    struct node_plan plan = suite_plan(&shape);
    struct kvt_peer_params params = {.size = sizeof params, .name = "b"};
    struct kvt_copy copy = {.length = 64 * 65536};
    struct kvt_result result;
    struct node a;
    struct node b;
    void *metadata;
    kvt_peer peer = 0;
    kvt_xfer id = 0;

    (void)state;
    node_open(&a, &plan);
    node_open(&b, &plan);
    metadata = node_metadata(&b, &params.metadata_length);
    params.metadata = metadata;
    copy.local_addr = pool_region(&a.pool).addr;
    copy.peer_addr = pool_region(&b.pool).addr;
    assert_soon(are_all_free());
    assert_kvt_ok(kvt_peer_add_async(a.t, &params, &peer, &id, ERR));
    wait_results(a.t, peer, &result, 1);
    assert_kvt_ok(kvt_write(a.t, peer, &copy, 1, NULL, &id, ERR));
    wait_results(a.t, peer, &result, 1);
    assert_int_equal(result.state, KVT_DONE);
    assert_soon(are_all_free());
    free(metadata);
    node_close(&a);
    node_close(&b);
}

/* B15 */
static void an_unfinished_add_takes_no_work_and_no_cancel(void **state)
{
    struct kvt_run run;
    struct fixture f;
    kvt_peer peer = 0;
    kvt_layout layout;
    kvt_xfer id = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_hang=1");
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &peer, &id, ERR));
    run = pool_run(&f.pair.b.pool);
    assert_int_equal(info_of(f.pair.a.t, peer).state, KVT_PEER_ADDING);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, peer), 0);
    assert_kvt_fails(
        kvt_prepare(f.pair.a.t, peer, "pool", &run, 1, &layout, ERR),
        KVT_EDISCONNECTED);
    assert_int_equal(try_write(&f.pair, peer, f.pair.remote),
                     KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_notify(f.pair.a.t, peer, "x", 1, ERR),
                     KVT_EDISCONNECTED);
    assert_int_equal(kvt_cancel(f.pair.a.t, &id, 1, KVT_CANCEL_IMMEDIATE, NULL),
                     0);
    release_all(&f.pair);
    (void)wait_done(f.pair.a.t, id);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, peer), 1);
    end(&f);
}

static void a_failed_add_leaves_no_peer(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_peer peer = 0;
    kvt_xfer id = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_fail=1-2");
    assert_kvt_fails(kvt_peer_add(f.pair.a.t, &f.params, &peer, ERR),
                     KVT_EENGINE);
    assert_int_equal(peer, 0);
    assert_kvt_fails(kvt_peer_find(f.pair.a.t, "other", &peer), KVT_ENOENT);
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &peer, &id, ERR));
    result = wait_xfer(f.pair.a.t, id);
    assert_int_equal(result.state, KVT_FAILED);
    assert_int_equal(result.code, KVT_EENGINE);
    assert_int_equal(result.scope, KVT_SCOPE_PEER);
    assert_unknown(f.pair.a.t, peer);
    assert_int_equal(stats_of(f.pair.a.t).peers, 1);
    assert_kvt_ok(kvt_peer_add(f.pair.a.t, &f.params, &peer, ERR));
    end(&f);
}

static void a_timed_out_add_goes_on(void **state)
{
    struct fixture f;
    kvt_peer peer = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_hang=1");
    f.params.timeout_ns = 20 * MS;
    assert_kvt_fails(kvt_peer_add(f.pair.a.t, &f.params, &peer, ERR),
                     KVT_ETIMEDOUT);
    assert_int_equal(peer, 0);
    assert_kvt_ok(kvt_peer_find(f.pair.a.t, "other", &peer));
    release_all(&f.pair);
    assert_soon(kvt_peer_loaded(f.pair.a.t, peer));
    end(&f);
}

/* B15 */
static void a_hung_add_does_not_hold_another(void **state)
{
    struct fixture f;
    kvt_peer slow = 0;
    kvt_peer other = 0;
    kvt_xfer id = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_hang=1");
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &slow, &id, ERR));
    f.params.name = "quick";
    assert_kvt_ok(kvt_peer_add(f.pair.a.t, &f.params, &other, ERR));
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, other), 1);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, slow), 0);
    (void)wait_done(f.pair.a.t, pair_write_one(&f.pair, 0, 0, NULL));
    release_all(&f.pair);
    (void)wait_done(f.pair.a.t, id);
    end(&f);
}

/* -------------------------------------------------------------------- again */

static void adding_again_gives_a_new_id_and_ends_the_old_one(void **state)
{
    struct fixture f;
    kvt_peer again = 0;
    kvt_peer found = 0;
    kvt_layout layout;

    (void)state;
    begin_with(&f, NULL);
    f.params.name = "b";
    assert_kvt_ok(kvt_peer_add(f.pair.a.t, &f.params, &again, ERR));
    assert_int_not_equal(again, f.pair.peer);
    assert_unknown(f.pair.a.t, f.pair.peer);
    assert_kvt_ok(kvt_peer_find(f.pair.a.t, "b", &found));
    assert_int_equal(found, again);
    assert_int_equal(try_write(&f.pair, f.pair.peer, f.pair.remote),
                     KVT_ENOENT);
    /* The layouts were the old registration's. */
    assert_int_equal(try_write(&f.pair, again, f.pair.remote), KVT_ENOENT);
    assert_kvt_fails(kvt_layout_find(f.pair.a.t, again, "pool", &layout),
                     KVT_ENOENT);
    assert_int_equal(info_of(f.pair.a.t, again).layout_count, 0);
    assert_int_equal(stats_of(f.pair.a.t).peers, 1);
    end(&f);
}

static void adding_again_completes_unfinished_transfers_once(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_peer again = 0;
    kvt_xfer add = 0;
    kvt_xfer write;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "hold=1");
    write = pair_write_one(&f.pair, 0, 0, NULL);
    assert_soon(in_state(f.pair.a.t, write, KVT_IN_PROGRESS));
    f.params.name = "b";
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &again, &add, ERR));
    assert_soon(in_state(f.pair.a.t, write, KVT_CANCELLED));
    assert_false(is_quiescent(f.pair.a.t, write));
    /* The engine loads the new one only when the old one is out; a third,
     * asked for later, is there already. */
    (void)node_add(&f.pair.a, "third", f.metadata, f.params.metadata_length);
    assert_int_equal(info_of(f.pair.a.t, again).state, KVT_PEER_ADDING);
    release_all(&f.pair);
    wait_results(f.pair.a.t, f.pair.peer, &result, 1);
    assert_int_equal(result.id, write);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.scope, KVT_SCOPE_PEER);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    wait_results(f.pair.a.t, again, &result, 1);
    assert_int_equal(result.id, add);
    assert_int_equal(result.state, KVT_DONE);
    end(&f);
}

static void a_newer_add_supersedes_an_unfinished_one(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_peer first = 0;
    kvt_peer second = 0;
    kvt_xfer one = 0;
    kvt_xfer two = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_hang=1");
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &first, &one, ERR));
    node_settle(&f.pair.a); /* the first one has begun */
    assert_kvt_ok(
        kvt_peer_add_async(f.pair.a.t, &f.params, &second, &two, ERR));
    result = wait_xfer(f.pair.a.t, one);
    assert_int_equal(result.state, KVT_FAILED);
    assert_int_equal(result.code, KVT_ESUPERSEDED);
    release_all(&f.pair);
    (void)wait_done(f.pair.a.t, two);
    assert_unknown(f.pair.a.t, first);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, second), 1);
    assert_int_equal(stats_of(f.pair.a.t).peers_loaded, 2);
    end(&f);
}

static void remove_supersedes_an_unfinished_add(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_peer peer = 0;
    kvt_xfer id = 0;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "load_hang=1");
    assert_kvt_ok(kvt_peer_add_async(f.pair.a.t, &f.params, &peer, &id, ERR));
    node_settle(&f.pair.a);
    assert_kvt_ok(kvt_peer_remove(f.pair.a.t, peer));
    result = wait_xfer(f.pair.a.t, id);
    assert_int_equal(result.code, KVT_ESUPERSEDED);
    assert_unknown(f.pair.a.t, peer);
    release_all(&f.pair);
    assert_int_equal(stats_of(f.pair.a.t).peers, 1);
    end(&f);
}

/* --------------------------------------------------------- unload and remove */

static void an_unloaded_peer_comes_back_with_its_layouts(void **state)
{
    struct kvt_peer_info before;
    struct kvt_peer_info info;
    struct fixture f;

    (void)state;
    begin_with(&f, NULL);
    before = info_of(f.pair.a.t, f.pair.peer);
    assert_kvt_ok(kvt_peer_unload(f.pair.a.t, f.pair.peer, 0, ERR));
    assert_kvt_ok(kvt_peer_unload(f.pair.a.t, f.pair.peer, 0, ERR));
    info = info_of(f.pair.a.t, f.pair.peer);
    assert_int_equal(info.state, KVT_PEER_UNLOADED);
    assert_true(info.generation > before.generation);
    assert_int_equal(info.layout_count, 1);
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, f.pair.peer), 0);
    assert_int_equal(try_write(&f.pair, f.pair.peer, f.pair.remote),
                     KVT_EDISCONNECTED);
    assert_kvt_ok(kvt_peer_reload(f.pair.a.t, f.pair.peer, NULL, 0, 0, ERR));
    assert_true(info_of(f.pair.a.t, f.pair.peer).generation > info.generation);
    pair_expect(&f.pair, (uint32_t[]){0}, (uint32_t[]){0}, 1);
    (void)wait_done(f.pair.a.t, pair_write_one(&f.pair, 0, 0, NULL));
    pair_check(&f.pair);
    end(&f);
}

static void a_removed_peer_s_results_are_still_drained(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_xfer id;

    (void)state;
    begin_with(&f, NULL);
    id = pair_write_one(&f.pair, 0, 0, NULL);
    assert_soon(in_state(f.pair.a.t, id, KVT_DONE));
    assert_kvt_ok(kvt_peer_remove(f.pair.a.t, f.pair.peer));
    assert_unknown(f.pair.a.t, f.pair.peer);
    assert_true(in_state(f.pair.a.t, id, KVT_DONE));
    assert_int_equal(kvt_poll(f.pair.a.t, f.pair.peer, &result, 1), 1);
    assert_int_equal(result.id, id);
    assert_int_equal(result.peer, f.pair.peer);
    end(&f);
}

static void remove_cancels_posted_work_then_reports_it(void **state)
{
    struct kvt_result result;
    struct fixture f;
    kvt_xfer id;

    (void)state;
    begin_with(&f, "");
    set_rules(&f.pair, "hold=1");
    id = pair_write_one(&f.pair, 0, 0, NULL);
    assert_soon(in_state(f.pair.a.t, id, KVT_IN_PROGRESS));
    assert_kvt_ok(kvt_peer_remove(f.pair.a.t, f.pair.peer));
    assert_soon(in_state(f.pair.a.t, id, KVT_CANCELLED));
    assert_false(is_quiescent(f.pair.a.t, id));
    assert_int_equal(kvt_poll(f.pair.a.t, KVT_ANY, &result, 1), 0);
    release_all(&f.pair);
    wait_results(f.pair.a.t, f.pair.peer, &result, 1);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.code, KVT_ECANCELED);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(kvt_poll(f.pair.a.t, f.pair.peer, &result, 1), 0);
    end(&f);
}

static void two_ids_of_one_agent_live_apart(void **state)
{
    struct fixture f;
    struct kvt_run run;
    kvt_peer other = 0;

    (void)state;
    begin_with(&f, NULL);
    run = pool_run(&f.pair.b.pool);
    assert_kvt_ok(kvt_peer_add(f.pair.a.t, &f.params, &other, ERR));
    assert_int_not_equal(other, f.pair.peer);
    assert_kvt_ok(kvt_peer_remove(f.pair.a.t, f.pair.peer));
    assert_int_equal(kvt_peer_loaded(f.pair.a.t, other), 1);
    f.pair.peer = other;
    assert_kvt_ok(
        kvt_prepare(f.pair.a.t, other, "pool", &run, 1, &f.pair.remote, ERR));
    pair_expect(&f.pair, (uint32_t[]){7}, (uint32_t[]){7}, 1);
    (void)wait_done(f.pair.a.t, pair_write_one(&f.pair, 7, 7, NULL));
    pair_check(&f.pair);
    end(&f);
}

/* --------------------------------------------------------------------- many */

static void add_and_remove(struct fixture *f, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        kvt_peer peer = 0;

        assert_kvt_ok(kvt_peer_add(f->pair.a.t, &f->params, &peer, ERR));
        assert_kvt_ok(kvt_peer_remove(f->pair.a.t, peer));
    }
}

/* B49 */
static void ten_thousand_peers_leave_nothing(void **state)
{
    struct usage before;
    struct usage after;
    struct fixture f;
    const int half = suite.slow ? 1000 : 5000;

    (void)state;
    begin_with(&f, NULL);
    /* What is made once is made late on a busy machine: NIXL's threads. */
    add_and_remove(&f, half);
    (void)kvt_peer_add(f.pair.a.t, &f.params, &f.pair.peer, NULL);
    before = usage_now();
    add_and_remove(&f, half);
    (void)kvt_peer_add(f.pair.a.t, &f.params, &f.pair.peer, NULL);
    after = usage_now();
    assert_int_equal(after.threads, before.threads);
    /* The first load's connections may be made after `before` was taken. */
    assert_true(after.fds <= before.fds + (suite.agent ? 40 : 0));
    assert_true(suite.slow || after.maps <= before.maps + 2);
    /* The last ones may be on their way out yet. A connection of UCX's takes
     * 67 KB when it is made at last; anything left by each peer would be more. */
    assert_soon(usage_now().heap_bytes <=
                before.heap_bytes + (suite.agent ? 262144 : 16384));
    assert_int_equal(stats_of(f.pair.a.t).peers, 2);
    end(&f);
}

/* B48 */
static void a_thousand_peers_at_once_are_all_usable(void **state)
{
    enum { COUNT = 1000 };
    static kvt_peer peers[COUNT];
    struct fixture f;
    char name[16] = "peer 000";

    (void)state;
    begin_with(&f, NULL);
    f.params.name = name;
    for (int i = 0; i < COUNT; i++) {
        name[5] = (char)('0' + i / 100);
        name[6] = (char)('0' + i / 10 % 10);
        name[7] = (char)('0' + i % 10);
        assert_kvt_ok(kvt_peer_add(f.pair.a.t, &f.params, &peers[i], ERR));
    }
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(kvt_peer_loaded(f.pair.a.t, peers[i]), 1);
    }
    assert_int_equal(stats_of(f.pair.a.t).peers_loaded, COUNT + 1);
    end(&f);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(an_added_peer_is_loaded_and_found),
    cmocka_unit_test(an_async_add_reports_through_poll),
    cmocka_unit_test(an_async_add_leaves_every_thread_free),
    cmocka_unit_test(threads_that_an_async_add_starts_are_free),
    cmocka_unit_test(an_unfinished_add_takes_no_work_and_no_cancel),
    cmocka_unit_test(a_failed_add_leaves_no_peer),
    cmocka_unit_test(a_timed_out_add_goes_on),
    cmocka_unit_test(a_hung_add_does_not_hold_another),
    cmocka_unit_test(adding_again_gives_a_new_id_and_ends_the_old_one),
    cmocka_unit_test(adding_again_completes_unfinished_transfers_once),
    cmocka_unit_test(a_newer_add_supersedes_an_unfinished_one),
    cmocka_unit_test(remove_supersedes_an_unfinished_add),
    cmocka_unit_test(an_unloaded_peer_comes_back_with_its_layouts),
    cmocka_unit_test(a_removed_peer_s_results_are_still_drained),
    cmocka_unit_test(remove_cancels_posted_work_then_reports_it),
    cmocka_unit_test(two_ids_of_one_agent_live_apart),
    cmocka_unit_test(ten_thousand_peers_leave_nothing),
    cmocka_unit_test(a_thousand_peers_at_once_are_all_usable),
};

const struct test_group peers_group = TEST_GROUP("peers", cases);
