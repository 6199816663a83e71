/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same-host shortcut when peers die, are loaded anew, and come and go.
 *
 * Proved: the death of a near peer is noticed when nothing is under way, by
 * both sides once NIXL has loaded it, and ends what NIXL holds of it; so does
 * a caller's word; reload, restart and a link that NIXL loses leave a peer that
 * works; a thousand peers leave nothing behind. How: as test_route.c, with real
 * children where a process has to die.
 */
#include "route_pair.h"

#include <stdlib.h>
#include <string.h>

#include "two_process.h"

#define MS UINT64_C(1000000)

/* ------------------------------------------------------------------- deaths */

struct across {
    struct node a;
    struct child child;
    kvt_peer peer;
};

static void open_across(struct across *across)
{
    const struct node_plan plan = {.engine = "nixl", .name = "beta"};
    struct node_plan own = plan;
    size_t length;
    void *blob;

    fake.reset();
    forbid_after(0, 0);
    own.name = "alpha";
    node_open(&across->a, &own);
    child_begin(&across->child, &plan);
    blob = child_metadata(&across->child, &length);
    across->peer = node_add(&across->a, "b", blob, length);
    free(blob);
}

static uint32_t peer_state(const struct across *across)
{
    struct kvt_peer_info info;

    assert_kvt_ok(kvt_peer_info(across->a.t, across->peer, &info));
    return info.state;
}

static void close_across(struct across *across)
{
    child_forget(&across->child);
    node_close(&across->a);
}

static void the_death_of_a_near_peer_is_noticed_when_idle(void **state)
{
    struct across across;

    (void)state;
    open_across(&across);
    assert_int_equal(peer_state(&across), KVT_PEER_LOADED);
    child_kill(&across.child);
    assert_soon(peer_state(&across) == KVT_PEER_DISCONNECTED);
    assert_int_equal(stats_of(across.a.t).peer_disconnects, 1);
    assert_lines("load", 0);
    close_across(&across);
}

/* NIXL has loaded it as well: each side watches the process. */
static void a_death_is_noticed_by_both_sides_and_counted_once(void **state)
{
    const struct kvt_region vram = {
        .addr = VRAM_A, .length = VRAM_BYTES, .kind = KVT_VRAM, .device = 1};
    struct kvt_copy copy = {.local_addr = VRAM_A,
                            .local_kind = KVT_VRAM,
                            .local_device = 1,
                            .length = 64};
    struct kvt_result result;
    struct across across;
    kvt_xfer id;

    (void)state;
    open_across(&across);
    assert_kvt_ok(kvt_register(across.a.t, &vram, 1, 0, ERR));
    copy.peer_addr = child_run(&across.child).addr;
    /* Never finished by NIXL: its end is the peer's. */
    fake.script("post", 1, FOR_EVER);
    fake.script("status", 1, FOR_EVER);
    assert_kvt_ok(kvt_write(across.a.t, across.peer, &copy, 1, NULL, &id, ERR));
    assert_soon(fake.count_lines("post") == 1);
    child_kill(&across.child);
    result = wait_xfer(across.a.t, id);
    assert_int_equal(result.state, KVT_DISCONNECTED);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(peer_state(&across), KVT_PEER_DISCONNECTED);
    assert_int_equal(stats_of(across.a.t).peer_disconnects, 1);
    fake.script("status", -2, 1);
    close_across(&across);
}

/* With the shortcut on, a caller's word still proves what NIXL holds. */
static void a_confirmed_death_proves_what_nixl_holds(void **state)
{
    const struct kvt_options brief = {.grace_ns = MS};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    open_nodes(&pair, &brief, NULL);
    add_b(&pair, on_another_host);
    fake.script("post", 1, FOR_EVER);
    fake.script("status", 1, FOR_EVER);
    id = pair_write_one(&pair, 1, 2, NULL);
    assert_soon(fake.count_lines("post") == 1);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL), 1);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_LOST);
    assert_int_equal(stats_of(pair.a.t).quarantined, 1);
    assert_kvt_ok(kvt_peer_confirm_dead(pair.a.t, pair.peer));
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    fake.reset();
    assert_soon(fake.count_lines("status") == 1);
    pool_accept(&pair.b.pool, 2);
    assert_kvt_ok(kvt_close(pair.a.t, 0, ERR));
    kvt_free(pair.a.t);
    pool_close(&pair.a.pool);
    node_close(&pair.b);
}

/* ------------------------------------------------------------ coming and going */

static void a_reload_takes_both_sides_down_and_one_up(void **state)
{
    struct pair pair;

    (void)state;
    open_near(&pair);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    write_and_check(&pair, 1, 2);
    assert_lines("load beta", 1);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_lines("load beta", 2);
    assert_kvt_ok(kvt_peer_unload(pair.a.t, pair.peer, 0, ERR));
    assert_kvt_ok(kvt_peer_unload(pair.a.t, pair.peer, 0, ERR));
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    write_and_check(&pair, 3, 4);
    pair_close(&pair);
}

/* B01 */
static void a_restart_under_the_same_name_takes_its_place(void **state)
{
    struct pair pair;
    struct pair second;

    (void)state;
    open_near(&pair);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    node_close(&pair.b);
    assert_int_equal(
        wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL)).state,
        KVT_DISCONNECTED);
    open_nodes(&second, NULL, NULL); /* another beta; its alpha is idle */
    pair.b = second.b;
    add_b(&pair, NULL);
    write_and_check(&pair, 3, 4);
    assert_lines("load", 0);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_lines("load beta", 1);
    pair_close(&pair);
    node_close(&second.a);
}

static void a_link_that_nixl_loses_takes_the_peer_down(void **state)
{
    const struct kvt_options brief = {.grace_ns = MS};
    struct kvt_result result;
    struct kvt_peer_info info;
    struct pair pair;

    (void)state;
    open_nodes(&pair, &brief, NULL);
    add_b(&pair, NULL);
    fake.script("post", -2, 1);
    result = wait_xfer(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_int_equal(result.state, KVT_LOST);
    assert_kvt_ok(kvt_peer_info(pair.a.t, pair.peer, &info));
    assert_int_equal(info.state, KVT_PEER_DISCONNECTED);
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    write_and_check(&pair, 1, 2);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_kvt_fails_with(kvt_close(pair.a.t, 0, ERR), KVT_EBUSY,
                          "1 transfers are not quiescent");
    kvt_free(pair.a.t);
    pool_close(&pair.a.pool);
    node_close(&pair.b);
}

static void a_thousand_peers_leave_nothing(void **state)
{
    struct usage before;
    struct usage after;
    struct pair pair;

    (void)state;
    open_near(&pair);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_kvt_ok(kvt_peer_remove(pair.a.t, pair.peer));
    for (int i = 0; i < 1010; i++) {
        add_b(&pair, i % 3 == 0 ? in_another_net : NULL);
        if (i % 5 == 0) {
            wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
        }
        assert_kvt_ok(kvt_peer_remove(pair.a.t, pair.peer));
        if (i == 9) {
            fake.reset();
            assert_soon(stats_of(pair.a.t).peers == 0);
            node_settle(&pair.a);
            before = usage_now();
        }
        if (i % 100 == 0) {
            fake.reset(); /* its log */
        }
    }
    fake.reset();
    node_settle(&pair.a);
    after = usage_now();
    assert_int_equal(after.threads, before.threads);
    assert_int_equal(after.fds, before.fds);
    assert_true(after.heap_bytes <= before.heap_bytes + 16384);
    add_b(&pair, NULL);
    write_and_check(&pair, 0, 0);
    pair_close(&pair);
}

static const struct CMUnitTest death_cases[] = {
    cmocka_unit_test(the_death_of_a_near_peer_is_noticed_when_idle),
    cmocka_unit_test(a_death_is_noticed_by_both_sides_and_counted_once),
    cmocka_unit_test(a_confirmed_death_proves_what_nixl_holds),
    cmocka_unit_test(a_reload_takes_both_sides_down_and_one_up),
    cmocka_unit_test(a_restart_under_the_same_name_takes_its_place),
    cmocka_unit_test(a_link_that_nixl_loses_takes_the_peer_down),
    cmocka_unit_test(a_thousand_peers_leave_nothing),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("death", death_cases)};

    child_main(argc, argv);
    if (find_stand_in() != 0) {
        return 1;
    }
    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
