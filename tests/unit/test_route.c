/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same-host shortcut: which way bytes and messages go.
 *
 * Proved: host memory of a process on this host goes by the local engine, and
 * NIXL is not even asked to load that peer; whatever else has to go makes it do
 * so, once, and what waited for that goes in its order; each way to switch the
 * shortcut off does, on either side; a peer that cannot be near is NIXL's and
 * its text says why; peers without one of the two halves work by the other; what
 * the user named and cannot be had is an error, not the other half.
 *
 * How: two agents in this process by the public interface, with the real local
 * engine and a stand-in for NIXL that writes down what it is asked. Peers
 * elsewhere are made of real metadata with one field changed.
 */
#include "route_pair.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------------- near */

static void host_memory_goes_near_and_nixl_is_not_asked(void **state)
{
    struct pair pair;
    uint32_t blocks[] = {1, 2, 9};
    uint32_t others[] = {7, 8, 3};

    (void)state;
    open_near(&pair);
    pair_expect(&pair, blocks, others, 3);
    wait_done(pair.a.t, pair_write(&pair, blocks, others, 3, NULL));
    pair_check(&pair);
    pool_expect(&pair.a.pool, 5, &pair.b.pool, 6);
    wait_done(pair.a.t,
              pair_read(&pair, &(uint32_t){5}, &(uint32_t){6}, 1, NULL));
    pair_check(&pair);
    assert_bytes(&pair, 4 * 512, 0);
    assert_lines("load", 0);
    assert_lines("create", 0);
    pair_close(&pair);
    assert_lines("invalidate", 0);
}

static void messages_and_warm_ups_go_near_too(void **state)
{
    const struct kvt_xfer_options with_note = {
        .size = sizeof with_note, .note = "landed", .note_length = 6};
    struct kvt_notification note;
    struct pair pair;
    char text[16];
    kvt_xfer id;

    (void)state;
    open_near(&pair);
    assert_kvt_ok(kvt_warm_up(pair.a.t, pair.peer, NULL, &id, ERR));
    wait_done(pair.a.t, id);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "first", 5, ERR));
    note = wait_note(pair.b.t, text, sizeof text);
    assert_string_equal(note.agent_name, "alpha");
    assert_int_equal(note.length, 5);
    pair_expect(&pair, &(uint32_t){4}, &(uint32_t){4}, 1);
    wait_done(pair.a.t, pair_write_one(&pair, 4, 4, &with_note));
    note = wait_note(pair.b.t, text, sizeof text);
    assert_memory_equal(text, "landed", 6);
    pair_check(&pair);
    assert_lines("load", 0);
    assert_lines("notif", 0);
    pair_close(&pair);
}

static void vram_makes_nixl_load_the_peer_once_and_keeps_its_order(void **state)
{
    struct pair pair;
    struct kvt_result results[3];
    char words[32];

    (void)state;
    open_near(&pair);
    fake.block("load", true);
    for (uint64_t i = 0; i < 3; i++) {
        write_vram(&pair, 4096 * i, 64, NULL);
    }
    assert_soon(fake.waiting("load") == 1);
    /* Host memory does not wait for NIXL. */
    write_and_check(&pair, 3, 5);
    assert_lines("create", 0);
    fake.block("load", false);
    wait_results(pair.a.t, KVT_ANY, results, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(results[i].state, KVT_DONE);
        (void)snprintf(words, sizeof words, " %llx+40@1",
                       (unsigned long long)(VRAM_A + 4096 * (uint64_t)i));
        assert_line("create op=1 1>1", i, words);
    }
    wait_done(pair.a.t, write_vram(&pair, 512, 64, NULL));
    assert_lines("load beta", 1);
    assert_bytes(&pair, 512, 4 * 64);
    assert_path(&pair, "local", "in this process");
    pair_close(&pair);
    assert_lines("UNFINISHED", 0);
}

static void one_transfer_of_both_kinds_goes_both_ways(void **state)
{
    struct pair pair;
    struct kvt_copy copies[2];
    kvt_xfer id;

    (void)state;
    open_near(&pair);
    copies[0] = (struct kvt_copy){
        .local_addr = (uintptr_t)pool_block(&pair.a.pool, 2),
        .peer_addr = (uintptr_t)pool_block(&pair.b.pool, 4),
        .length = 512};
    copies[1] = (struct kvt_copy){.local_addr = VRAM_A,
                                  .peer_addr = VRAM_B + 64,
                                  .length = 128,
                                  .local_kind = KVT_VRAM,
                                  .local_device = 1,
                                  .peer_kind = KVT_VRAM,
                                  .peer_device = 1};
    pool_expect(&pair.b.pool, 4, &pair.a.pool, 2);
    assert_kvt_ok(kvt_write(pair.a.t, pair.peer, copies, 2, NULL, &id, ERR));
    wait_done(pair.a.t, id);
    pair_check(&pair);
    assert_bytes(&pair, 512, 128);
    assert_lines("create op=1", 1);
    pair_close(&pair);
}

/* ---------------------------------------------------------------------- off */

static void expect_all_by_nixl(struct pair *pair, const char *why)
{
    assert_path(pair, "nixl", why);
    assert_path(pair, "nixl", "; not the shortcut, since ");
    write_and_check(pair, 1, 2);
    assert_bytes(pair, 0, 512);
    assert_lines("load beta", 1);
}

static void the_flag_switches_the_shortcut_off(void **state)
{
    const struct kvt_options off = {.flags = KVT_OPEN_NO_SAME_HOST};
    struct pair pair;

    (void)state;
    open_nodes(&pair, &off, NULL);
    add_b(&pair, NULL);
    expect_all_by_nixl(&pair, "it is switched off here");
    pair_close(&pair);
}

static void the_environment_switches_the_shortcut_off(void **state)
{
    struct pair pair;

    (void)state;
    assert_int_equal(setenv("KVT_SAME_HOST", "0", 1), 0);
    open_nodes(&pair, NULL, NULL);
    assert_int_equal(setenv("KVT_SAME_HOST", "1", 1), 0);
    add_b(&pair, NULL);
    expect_all_by_nixl(&pair, "it is switched off here");
    pair_close(&pair);
    open_near(&pair);
    pair_close(&pair);
    (void)unsetenv("KVT_SAME_HOST");
}

static int try_auto(const char *library, struct kvt_error *err)
{
    const struct kvt_options options = {
        .size = sizeof options, .engine = "auto", .nixl_library = library};
    kvt_transport *t = NULL;
    int code = kvt_open(&options, &t, err);

    kvt_free(t);
    return code;
}

static void the_environment_has_words_for_on_and_off(void **state)
{
    static const char *const off[] = {"no", "off", "false", "OFF"};
    static const char *const on[] = {"", "yes", "on", "True"};
    struct kvt_error err = {.code = KVT_OK};
    struct pair pair;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(setenv("KVT_SAME_HOST", off[i], 1), 0);
        open_nodes(&pair, NULL, NULL);
        add_b(&pair, NULL);
        assert_path(&pair, "nixl", "it is switched off here");
        pair_close(&pair);
        assert_int_equal(setenv("KVT_SAME_HOST", on[i], 1), 0);
        open_near(&pair);
        pair_close(&pair);
    }
    /* With the automatic engine, too: local would be all shortcut. */
    assert_int_equal(setenv("KVT_SAME_HOST", "flase", 1), 0);
    assert_int_equal(try_auto(NULL, &err), KVT_EINVAL);
    assert_non_null(strstr(err.text, "KVT_SAME_HOST must be 0, no, off or"));
    (void)unsetenv("KVT_SAME_HOST");
    assert_kvt_ok(try_auto(NULL, ERR));
}

/* Run first: a process that has a NIXL refuses another one anyway. */
static void a_named_library_is_not_replaced_by_another_engine(void **state)
{
    char *library = strdup(getenv("KVT_NIXL_LIBRARY"));
    struct kvt_error err = {.code = KVT_OK};

    (void)state;
    assert_non_null(library);
    assert_int_equal(try_auto("/etc/passwd", &err), KVT_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "/etc/passwd"));
    assert_int_equal(setenv("KVT_NIXL_LIBRARY", "/etc/passwd", 1), 0);
    assert_int_equal(try_auto(NULL, &err), KVT_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "/etc/passwd"));
    assert_int_equal(setenv("KVT_NIXL_LIBRARY", library, 1), 0);
    assert_kvt_ok(try_auto(NULL, ERR));
    free(library);
}

static void a_peer_that_has_it_off_is_left_alone(void **state)
{
    const struct kvt_options off = {.flags = KVT_OPEN_NO_SAME_HOST};
    struct kvt_region region;
    struct pair pair;

    (void)state;
    open_nodes(&pair, NULL, &off);
    add_b(&pair, NULL);
    expect_all_by_nixl(&pair, "the peer has its shortcut switched off");
    /* Also one that has no host memory. */
    assert_kvt_ok(kvt_peer_remove(pair.a.t, pair.peer));
    region = pool_region(&pair.b.pool);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    assert_kvt_ok(try_add_b(&pair, NULL, ERR));
    assert_path(&pair, "nixl", "the peer has its shortcut switched off");
    pair_close(&pair);
}

/* ---------------------------------------------------------------------- far */

static void a_plain_nixl_peer_goes_by_nixl(void **state)
{
    struct kvt_peer_params params = {.size = sizeof params, .name = "b"};
    struct kvt_run run;
    struct kvti_md md;
    struct pair pair;
    size_t length;
    void *blob;

    (void)state;
    open_nodes(&pair, NULL, NULL);
    blob = node_metadata(&pair.b, &length);
    assert_kvt_ok(kvti_md_decode(blob, length, 4096, &md, ERR));
    params.metadata = md.prefix;
    params.metadata_length = md.prefix_length;
    assert_kvt_ok(kvt_peer_add(pair.a.t, &params, &pair.peer, ERR));
    kvti_md_fini(&md);
    free(blob);
    run = pool_run(&pair.b.pool);
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "pool", &run, 1, &pair.remote, ERR));
    expect_all_by_nixl(&pair, "the peer runs plain NIXL");
    pair_close(&pair);
}

static void a_peer_on_another_host_goes_by_nixl(void **state)
{
    struct pair pair;
    char text[8];

    (void)state;
    open_nodes(&pair, NULL, NULL);
    add_b(&pair, on_another_host);
    expect_all_by_nixl(&pair, "is on another host");
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "far", 3, ERR));
    assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 3);
    assert_lines("notif beta", 1);
    pair_close(&pair);
}

/* B42 */
static void a_peer_that_the_kernel_keeps_from_us_goes_by_nixl(void **state)
{
    struct pair pair;

    (void)state;
    open_nodes(&pair, NULL, NULL);
    forbid_after(0, EPERM);
    add_b(&pair, NULL);
    expect_all_by_nixl(&pair, "the kernel keeps this process out");
    pair_close(&pair);
}

static void an_agent_that_is_gone_is_refused_without_nixl(void **state)
{
    struct pair pair;

    (void)state;
    open_nodes(&pair, NULL, NULL);
    assert_kvt_fails_with(try_add_b(&pair, of_another_agent, ERR),
                          KVT_EDISCONNECTED, "holds this agent no more");
    assert_lines("load", 0);
    pair_close(&pair);
}

/* Posts `count` transfers of `blocks` blocks that NIXL keeps: how many of them
 * it gets is the window. */
static void fill_window(struct pair *pair, uint32_t blocks, uint32_t count,
                        uint32_t window)
{
    const struct kvt_options options = {.workers = 6};
    struct kvt_xfer_options none = {.size = sizeof none};
    kvt_xfer ids[32];
    uint32_t all[64];

    open_nodes(pair, &options, NULL);
    add_b(pair, on_another_host);
    fake.script("post", 1, FOR_EVER);
    fake.script("status", 1, FOR_EVER);
    for (uint32_t i = 0; i < 64; i++) {
        all[i] = i;
    }
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = pair_write(pair, all, all, blocks, &none);
    }
    assert_soon(fake.count_lines("post") == (int)window);
    node_settle(&pair->a);
    node_settle(&pair->a);
    assert_lines("post", (int)window);
    assert_true(in_state(pair->a.t, ids[window - 1], KVT_IN_PROGRESS));
    assert_true(in_state(pair->a.t, ids[window], KVT_QUEUED));
    fake.reset();
    pair_expect(pair, all, all, blocks);
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_result result;

        wait_results(pair->a.t, KVT_ANY, &result, 1);
        assert_int_equal(result.state, KVT_DONE);
    }
    pair_check(pair);
    pair_close(pair);
}

/* NIXL's window for what is NIXL's, the local engine's, which is wider, for
 * what is near. */
static void each_way_has_its_own_window(void **state)
{
    struct pair pair;

    (void)state;
    fill_window(&pair, 64, 8, 4);
}

static void light_transfers_have_a_window_of_their_own(void **state)
{
    struct pair pair;

    (void)state;
    fill_window(&pair, 1, 24, 16);
}

/* The parts of a write of 600 words, none beside another. */
static uint64_t parts_of_many_words(edit_fn *edit)
{
    struct kvt_stats stats;
    struct kvt_copy copies[600];
    struct pair pair;
    kvt_xfer id;

    open_nodes(&pair, NULL, NULL);
    add_b(&pair, edit);
    for (size_t i = 0; i < 600; i++) {
        copies[i] = (struct kvt_copy){
            .local_addr = pool_region(&pair.a.pool).addr + 32 * i,
            .peer_addr = pool_region(&pair.b.pool).addr + 32 * i,
            .length = 8};
        pool_expect_bytes(&pair.b.pool, copies[i].peer_addr, &pair.a.pool,
                          copies[i].local_addr, 8);
    }
    assert_kvt_ok(kvt_write(pair.a.t, pair.peer, copies, 600, NULL, &id, ERR));
    wait_done(pair.a.t, id);
    pair_check(&pair);
    assert_kvt_ok(kvt_stats(pair.a.t, &stats, sizeof stats));
    pair_close(&pair);
    return stats.chunks;
}

static void each_way_has_its_own_number_of_pieces(void **state)
{
    (void)state;
    assert_int_equal(parts_of_many_words(NULL), 1);
    assert_int_equal(parts_of_many_words(on_another_host), 3);
}

/* ------------------------------------------------------------ half of a peer */

/* It has no part of NIXL's: what only NIXL could move is refused, and no more
 * than that. */
static void a_peer_of_the_local_engine_is_near_and_no_more(void **state)
{
    const struct kvt_options local = {.engine = "local"};
    struct kvt_result result;
    struct kvt_copy copy;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    open_nodes(&pair, NULL, &local);
    add_b(&pair, NULL);
    assert_path(&pair, "local", "in this process");
    copy = (struct kvt_copy){
        .local_addr = VRAM_A,
        .local_kind = KVT_VRAM,
        .local_device = 1,
        .peer_addr = (uintptr_t)pool_block(&pair.b.pool, 0),
        .length = 64};
    for (int i = 0; i < 2; i++) {
        assert_kvt_ok(kvt_write(pair.a.t, pair.peer, &copy, 1, NULL, &id, ERR));
        result = wait_xfer(pair.a.t, id);
        assert_int_equal(result.state, KVT_REJECTED);
        assert_int_equal(result.code, KVT_EUNSUPPORTED);
        assert_int_equal(result.scope, KVT_SCOPE_REQUEST);
        assert_true((result.flags & KVT_QUIESCENT) != 0);
        assert_non_null(strstr(result.text, "no part of NIXL's"));
        write_and_check(&pair, 3, 4);
    }
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "near", 4, ERR));
    assert_int_equal(wait_note(pair.b.t, &(char[8]){0}, 8).length, 4);
    assert_lines("load", 0);
    pair_close(&pair);
}

static void a_peer_of_the_local_engine_out_of_reach_says_why(void **state)
{
    const struct kvt_options local = {.engine = "local"};
    struct pair pair;

    (void)state;
    open_nodes(&pair, NULL, &local);
    assert_kvt_fails_with(try_add_b(&pair, on_another_host, ERR),
                          KVT_EUNSUPPORTED, "is on another host");
    forbid_after(0, EPERM);
    assert_kvt_fails_with(try_add_b(&pair, NULL, ERR), KVT_EPERM, "kernel");
    forbid_after(0, 0);
    assert_kvt_ok(try_add_b(&pair, NULL, ERR));
    pair_close(&pair);
}

/* ----------------------------------------------------------------- messages */

/* DRAM does not need the network namespace, the notification socket does. */
static void messages_to_another_net_go_by_nixl_in_order(void **state)
{
    struct pair pair;
    char text[8];

    (void)state;
    open_nodes(&pair, NULL, NULL);
    add_b(&pair, in_another_net);
    assert_path(&pair, "local", "in this process");
    write_and_check(&pair, 1, 2);
    assert_lines("load", 0);
    fake.block("load", true);
    for (char i = 'a'; i < 'k'; i++) {
        assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, &i, 1, ERR));
        if (i == 'e') {
            assert_soon(fake.waiting("load") == 1);
        }
    }
    fake.block("load", false);
    for (char i = 'a'; i < 'k'; i++) {
        assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 1);
        assert_int_equal(text[0], i);
    }
    assert_lines("load beta", 1);
    assert_lines("notif beta", 10);
    write_and_check(&pair, 3, 4);
    assert_bytes(&pair, 1024, 0);
    pair_close(&pair);
}

static void a_note_of_a_write_follows_its_data_over_nixl(void **state)
{
    const struct kvt_xfer_options with_note = {
        .size = sizeof with_note, .note = "landed", .note_length = 6};
    struct pair pair;
    char text[8];

    (void)state;
    open_nodes(&pair, NULL, NULL);
    add_b(&pair, in_another_net);
    pair_expect(&pair, &(uint32_t){6}, &(uint32_t){7}, 1);
    wait_done(pair.a.t, pair_write_one(&pair, 6, 7, &with_note));
    pair_check(&pair);
    assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 6);
    assert_lines("notif beta", 1);
    pair_close(&pair);
}

static const struct CMUnitTest near_cases[] = {
    cmocka_unit_test(host_memory_goes_near_and_nixl_is_not_asked),
    cmocka_unit_test(messages_and_warm_ups_go_near_too),
    cmocka_unit_test(vram_makes_nixl_load_the_peer_once_and_keeps_its_order),
    cmocka_unit_test(one_transfer_of_both_kinds_goes_both_ways),
};

static const struct CMUnitTest named_cases[] = {
    cmocka_unit_test(a_named_library_is_not_replaced_by_another_engine),
};

static const struct CMUnitTest off_cases[] = {
    cmocka_unit_test(the_flag_switches_the_shortcut_off),
    cmocka_unit_test(the_environment_switches_the_shortcut_off),
    cmocka_unit_test(the_environment_has_words_for_on_and_off),
    cmocka_unit_test(a_peer_that_has_it_off_is_left_alone),
};

static const struct CMUnitTest far_cases[] = {
    cmocka_unit_test(a_plain_nixl_peer_goes_by_nixl),
    cmocka_unit_test(a_peer_on_another_host_goes_by_nixl),
    cmocka_unit_test(a_peer_that_the_kernel_keeps_from_us_goes_by_nixl),
    cmocka_unit_test(an_agent_that_is_gone_is_refused_without_nixl),
    cmocka_unit_test(each_way_has_its_own_window),
    cmocka_unit_test(each_way_has_its_own_number_of_pieces),
    cmocka_unit_test(light_transfers_have_a_window_of_their_own),
    cmocka_unit_test(a_peer_of_the_local_engine_is_near_and_no_more),
    cmocka_unit_test(a_peer_of_the_local_engine_out_of_reach_says_why),
};

static const struct CMUnitTest message_cases[] = {
    cmocka_unit_test(messages_to_another_net_go_by_nixl_in_order),
    cmocka_unit_test(a_note_of_a_write_follows_its_data_over_nixl),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {
        TEST_GROUP("named", named_cases),      TEST_GROUP("near", near_cases),
        TEST_GROUP("off", off_cases),          TEST_GROUP("far", far_cases),
        TEST_GROUP("messages", message_cases),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    return kvt_test_main(groups, sizeof groups / sizeof groups[0],
                         argc > 1 ? argv[1] : NULL);
}
