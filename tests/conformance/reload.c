/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reload: the peer and every layout over it come back together or not at all,
 * ours stay valid throughout, and what an older generation left behind has no
 * say in the new one. Where things must fail, the fault engine makes them.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static int try_write_by(const struct pair *pair, kvt_layout remote,
                        kvt_xfer *ret_id)
{
    uint32_t block = 5;
    struct kvt_indices indices = indices_u32(&block, 1);

    return kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &indices,
                            remote, &indices, NULL, ret_id, NULL);
}

static int try_write(const struct pair *pair)
{
    kvt_xfer id;

    return try_write_by(pair, pair->remote, &id);
}

static int reload(const struct pair *pair)
{
    return kvt_peer_reload(pair->a.t, pair->peer, NULL, 0, 0, ERR);
}

static struct kvt_peer_info info_of(const struct pair *pair)
{
    struct kvt_peer_info info = {0};

    assert_kvt_ok(kvt_peer_info(pair->a.t, pair->peer, &info));
    return info;
}

static void assert_works(struct pair *pair)
{
    assert_int_equal(kvt_peer_loaded(pair->a.t, pair->peer), 1);
    pair_expect(pair, (uint32_t[]){5, 6}, (uint32_t[]){5, 7}, 2);
    (void)wait_done(pair->a.t, pair_write(pair, (uint32_t[]){5, 6},
                                          (uint32_t[]){5, 7}, 2, NULL));
    pair_check(pair);
}

/* Three layouts over the peer. */
static void prepare_more(const struct pair *pair, kvt_layout ret[2])
{
    struct kvt_run run = pool_run(&pair->b.pool);

    assert_kvt_ok(
        kvt_prepare(pair->a.t, pair->peer, "second", &run, 1, &ret[0], ERR));
    assert_kvt_ok(
        kvt_prepare(pair->a.t, pair->peer, "third", &run, 1, &ret[1], ERR));
}

static void reload_keeps_ids_and_layouts_and_moves_the_generation(void **state)
{
    uint64_t generation;
    struct pair pair;
    kvt_layout found = 0;

    (void)state;
    suite_pair(&pair, NULL);
    for (int i = 0; i < 3; i++) {
        generation = info_of(&pair).generation;
        assert_kvt_ok(reload(&pair));
        assert_true(info_of(&pair).generation > generation);
        assert_kvt_ok(kvt_layout_find(pair.a.t, pair.peer, "pool", &found));
        assert_int_equal(found, pair.remote);
        assert_kvt_ok(kvt_layout_find(pair.a.t, KVT_SELF, "pool", &found));
        assert_int_equal(found, pair.a.layout);
        assert_works(&pair);
    }
    assert_int_equal(stats_of(pair.a.t).peer_reloads, 3);
    pair_close(&pair);
}

/* B03 */
static void a_failed_load_leaves_the_peer_unloaded_until_one_works(void **state)
{
    struct kvt_run run;
    struct pair pair;
    kvt_layout layout;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "load_fail=1-2");
    for (int i = 0; i < 2; i++) {
        assert_kvt_fails(reload(&pair), KVT_EENGINE);
        assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
        assert_int_equal(info_of(&pair).state, KVT_PEER_UNLOADED);
        assert_int_equal(info_of(&pair).code, KVT_EENGINE);
        assert_int_equal(try_write(&pair), KVT_EDISCONNECTED);
        run = pool_run(&pair.b.pool);
        assert_kvt_fails(
            kvt_prepare(pair.a.t, pair.peer, "x", &run, 1, &layout, ERR),
            KVT_EDISCONNECTED);
    }
    assert_int_equal(info_of(&pair).layout_count, 1);
    assert_kvt_ok(reload(&pair));
    assert_works(&pair);
    pair_close(&pair);
}

static void one_layout_that_fails_keeps_all_of_them_back(void **state)
{
    kvt_layout more[2];
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    prepare_more(&pair, more);
    set_rules(&pair, "layout_fail=second");
    assert_kvt_fails_with(reload(&pair), KVT_EENGINE, "second");
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    assert_int_equal(info_of(&pair).layout_count, 3);
    assert_int_equal(try_write_by(&pair, pair.remote, &id), KVT_EDISCONNECTED);
    assert_int_equal(try_write_by(&pair, more[0], &id), KVT_EDISCONNECTED);
    assert_int_equal(try_write_by(&pair, more[1], &id), KVT_EDISCONNECTED);
    assert_kvt_fails(reload(&pair), KVT_EENGINE);
    release_all(&pair);
    assert_kvt_ok(reload(&pair));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(try_write_by(&pair, more[i], &id), KVT_OK);
        (void)wait_done(pair.a.t, id);
    }
    pool_expect(&pair.b.pool, 5, &pair.a.pool, 5);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_failed_prepare_is_not_retried_by_reload(void **state)
{
    struct kvt_run run;
    struct pair pair;
    kvt_layout layout = 0;

    (void)state;
    suite_pair(&pair, NULL);
    run = pool_run(&pair.a.pool); /* not the peer's memory */
    assert_kvt_fails(
        kvt_prepare(pair.a.t, pair.peer, "x", &run, 1, &layout, ERR),
        KVT_ERANGE);
    assert_kvt_ok(reload(&pair));
    assert_kvt_fails(kvt_layout_find(pair.a.t, pair.peer, "x", &layout),
                     KVT_ENOENT);
    assert_works(&pair);
    pair_close(&pair);
}

struct reloader {
    const struct pair *pair;
    int code;
};

static void *reload_on(void *arg)
{
    struct reloader *reloader = arg;

    reloader->code = kvt_peer_reload(reloader->pair->a.t, reloader->pair->peer,
                                     NULL, 0, 0, NULL);
    return NULL;
}

/* A reload that stands at its load: nothing over the peer can be reached. */
static void while_it_reloads_the_peer_takes_no_work(void **state)
{
    struct reloader reloader;
    struct kvt_xfer_options options = {.size = sizeof options};
    pthread_t thread;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "load_hang=1");
    reloader = (struct reloader){.pair = &pair, .code = 1};
    assert_int_equal(pthread_create(&thread, NULL, reload_on, &reloader), 0);
    assert_soon(info_of(&pair).state == KVT_PEER_RELOADING);
    assert_int_equal(try_write(&pair), KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_warm_up(pair.a.t, pair.peer, &options, &id, ERR),
                     KVT_EDISCONNECTED);
    assert_kvt_fails(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR),
                     KVT_EDISCONNECTED);
    release_all(&pair);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(reloader.code, KVT_OK);
    assert_works(&pair);
    pair_close(&pair);
}

static void a_timed_out_reload_goes_on(void **state)
{
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "load_hang=1");
    assert_kvt_fails(
        kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 20 * MS, ERR),
        KVT_ETIMEDOUT);
    assert_int_equal(try_write(&pair), KVT_EDISCONNECTED);
    release_all(&pair);
    assert_soon(kvt_peer_loaded(pair.a.t, pair.peer));
    assert_works(&pair);
    pair_close(&pair);
}

static void a_newer_reload_supersedes_an_unfinished_one(void **state)
{
    struct reloader reloader;
    pthread_t thread;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "load_hang=1");
    reloader = (struct reloader){.pair = &pair, .code = 1};
    assert_int_equal(pthread_create(&thread, NULL, reload_on, &reloader), 0);
    assert_soon(info_of(&pair).state == KVT_PEER_RELOADING);
    assert_kvt_fails(
        kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 20 * MS, ERR),
        KVT_ETIMEDOUT);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(reloader.code, KVT_ESUPERSEDED);
    release_all(&pair);
    assert_soon(kvt_peer_loaded(pair.a.t, pair.peer));
    assert_works(&pair);
    pair_close(&pair);
}

static void four_threads_may_reload_at_once(void **state)
{
    struct reloader reloaders[4];
    pthread_t threads[4];
    struct pair pair;
    int good = 0;

    (void)state;
    suite_pair(&pair, NULL);
    for (int i = 0; i < 4; i++) {
        reloaders[i] = (struct reloader){.pair = &pair, .code = 1};
        assert_int_equal(
            pthread_create(&threads[i], NULL, reload_on, &reloaders[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        good += reloaders[i].code == KVT_OK;
        assert_true(reloaders[i].code == KVT_OK ||
                    reloaders[i].code == KVT_ESUPERSEDED);
    }
    assert_true(good >= 1);
    assert_works(&pair);
    pair_close(&pair);
}

/* ---------------------------------------------------------- old generations */

static void reload_waits_for_posted_requests(void **state)
{
    struct reloader reloader;
    struct kvt_result result;
    pthread_t thread;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    reloader = (struct reloader){.pair = &pair, .code = 1};
    assert_int_equal(pthread_create(&thread, NULL, reload_on, &reloader), 0);
    assert_soon(in_state(pair.a.t, id, KVT_CANCELLED));
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    assert_false(is_quiescent(pair.a.t, id));
    release_all(&pair);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(reloader.code, KVT_OK);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_int_equal(result.scope, KVT_SCOPE_PEER);
    pair_expect(&pair, (uint32_t[]){1}, (uint32_t[]){1}, 1);
    assert_works(&pair);
    pair_close(&pair);
}

/* The trap of one engine: asking for an old request's state after a reload
 * broke the peer again. An old result is never asked for again. */
static void an_unreadable_transfer_of_old_harms_no_reload(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 20 * MS);
    assert_works(&pair); /* there is a connection from here on */
    set_rules(&pair, "unreadable=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_LOST);
    assert_kvt_ok(reload(&pair));
    for (int i = 0; i < 3; i++) {
        assert_true(in_state(pair.a.t, id, KVT_LOST));
        assert_false(is_quiescent(pair.a.t, id));
        assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    }
    pool_accept(&pair.b.pool, 1);
    assert_works(&pair);
    /* Its proof may come generations later. */
    release_all(&pair);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 0);
    assert_works(&pair);
    pair_close(&pair);
}

/* B03 */
static void a_reload_repairs_a_broken_link(void **state)
{
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    for (int i = 0; i < 3; i++) {
        set_rules(&pair, "peer_down=1");
        (void)wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
        assert_soon(!kvt_peer_loaded(pair.a.t, pair.peer));
        assert_int_equal(try_write(&pair), KVT_EDISCONNECTED);
        assert_kvt_ok(reload(&pair));
        pool_accept(&pair.b.pool, 1);
        assert_works(&pair);
    }
    pair_close(&pair);
}

static void what_a_broken_link_refuses_says_what_to_do(void **state)
{
    uint32_t block = 5;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "peer_down=1");
    (void)wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_soon(!kvt_peer_loaded(pair.a.t, pair.peer));
    assert_kvt_fails_with(
        kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout, &indices,
                         pair.remote, &indices, NULL, &id, ERR),
        KVT_EDISCONNECTED, "add it again if its process is a new one");
    assert_kvt_fails_with(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR),
                          KVT_EDISCONNECTED,
                          "add it again if its process is a new one");
    pair_close(&pair);
}

static void other_metadata_takes_the_place_of_the_old(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct node other;
    struct pair pair;
    struct kvt_peer_info info;
    size_t length;
    void *metadata;

    (void)state;
    suite_pair(&pair, NULL);
    plan.name = "another agent";
    node_open(&other, &plan);
    metadata = node_metadata(&other, &length);
    /* Its memory lies elsewhere: the layout does not fit it. */
    assert_kvt_fails(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR),
        KVT_ERANGE);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 0);
    assert_kvt_ok(kvt_layout_drop(pair.a.t, pair.remote));
    assert_kvt_ok(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR));
    info = info_of(&pair);
    assert_string_equal(info.agent_name, "another agent");
    assert_string_equal(info.name, "b");
    free(metadata);
    pair_close(&pair);
    node_close(&other);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(reload_keeps_ids_and_layouts_and_moves_the_generation),
    cmocka_unit_test(a_failed_load_leaves_the_peer_unloaded_until_one_works),
    cmocka_unit_test(one_layout_that_fails_keeps_all_of_them_back),
    cmocka_unit_test(a_failed_prepare_is_not_retried_by_reload),
    cmocka_unit_test(while_it_reloads_the_peer_takes_no_work),
    cmocka_unit_test(a_timed_out_reload_goes_on),
    cmocka_unit_test(a_newer_reload_supersedes_an_unfinished_one),
    cmocka_unit_test(four_threads_may_reload_at_once),
    cmocka_unit_test(reload_waits_for_posted_requests),
    cmocka_unit_test(an_unreadable_transfer_of_old_harms_no_reload),
    cmocka_unit_test(a_reload_repairs_a_broken_link),
    cmocka_unit_test(what_a_broken_link_refuses_says_what_to_do),
    cmocka_unit_test(other_metadata_takes_the_place_of_the_old),
};

const struct test_group reload_group = TEST_GROUP("reload", cases);
