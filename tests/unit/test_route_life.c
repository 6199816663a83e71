/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same-host shortcut in the course of a peer's life.
 *
 * Proved: what the kernel forbids in mid-life goes by NIXL, every byte of it,
 * with counters, path and log that say so, and no message overtakes another;
 * memory is registered on both sides or on none, and same-host writers are out
 * before NIXL forgets it; a NIXL that cannot load a peer, or hangs in it,
 * costs what has to go that way and nothing else, and neither unload nor close
 * waits for it beyond its time. How: as test_route.c.
 */
#include "route_pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engines/local.h"

#define MS UINT64_C(1000000)

/* ----------------------------------------------------------- leave is lost */

static void expect_taken_over(struct pair *pair)
{
    assert_path(pair, "nixl", "NIXL took over in mid-life");
    assert_true(is_logged("NIXL takes over what goes to agent \"beta\", since "
                          "the kernel keeps this process out"));
    assert_lines("load beta", 1);
}

/* B42 */
static void what_the_kernel_forbids_in_mid_life_goes_by_nixl(void **state)
{
    struct pair pair;

    (void)state;
    open_near(&pair);
    write_and_check(&pair, 1, 2);
    forbid_after(0, EPERM);
    write_and_check(&pair, 3, 4);
    expect_taken_over(&pair);
    pool_expect(&pair.a.pool, 5, &pair.b.pool, 6);
    wait_done(pair.a.t,
              pair_read(&pair, &(uint32_t){5}, &(uint32_t){6}, 1, NULL));
    pair_check(&pair);
    assert_bytes(&pair, 512, 2 * 512);
    /* Not tried again, whatever the kernel says now. */
    forbid_after(0, 0);
    write_and_check(&pair, 7, 8);
    assert_bytes(&pair, 512, 3 * 512);
    expect_taken_over(&pair);
    /* A reload is a new beginning. */
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    assert_path(&pair, "local", "in this process");
    write_and_check(&pair, 9, 10);
    assert_bytes(&pair, 2 * 512, 3 * 512);
    pair_close(&pair);
}

/* A writer of this process in beta's gate, as a peer's copy thread would be. */
struct writer {
    struct kvti_gate_page *gate;
    uint32_t slot;
    uint64_t epoch;
};

static void enter_gate(const struct node *node, struct writer *writer)
{
    struct kvti_local_id self;
    struct kvti_md md;
    size_t length;
    void *blob = node_metadata(node, &length);

    assert_kvt_ok(kvti_md_decode(blob, length, 4096, &md, ERR));
    assert_kvt_ok(kvti_ident_self(&self, ERR));
    assert_kvt_ok(kvti_gate_join(self.pid, md.local.gate_fd, md.local.uid,
                                 kvti_gate_owner(self.pid, self.start_time),
                                 &writer->gate, &writer->slot, ERR));
    assert_true(kvti_gate_enter(writer->gate, writer->slot, &writer->epoch));
    kvti_md_fini(&md);
    free(blob);
}

static void leave_gate(struct writer *writer)
{
    kvti_gate_leave(writer->gate, writer->slot, writer->epoch);
    kvti_gate_part(writer->gate, writer->slot);
}

/* As where the kernel has no robust futexes. */
static void hide_life(const struct node *node)
{
    struct writer writer;

    enter_gate(node, &writer);
    assert_soon(kvti_life_shown(writer.gate));
    atomic_store(&writer.gate->life, 0);
    leave_gate(&writer);
}

/* Before the identity, before the bytes, and after them: where the peer shows
 * that it lives nobody asks a third time. */
static void leave_may_be_lost_at_any_call(void **state)
{
    const struct kvt_options one = {.workers = 1};

    (void)state;
    for (int calls = 0; calls < 3; calls++) {
        struct pair pair;

        open_nodes(&pair, &one, NULL);
        add_b(&pair, NULL);
        if (calls == 2) {
            hide_life(&pair.b);
        }
        forbid_after(calls, EPERM);
        write_and_check(&pair, 11, 12);
        expect_taken_over(&pair);
        assert_bytes(&pair, 0, 512);
        pair_close(&pair);
    }
}

static void everything_in_flight_is_taken_over(void **state)
{
    struct kvt_result results[40];
    struct pair pair;

    (void)state;
    open_near(&pair);
    forbid_after(1, ENOSYS);
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t k = 63 - i;

        pair_expect(&pair, &i, &k, 1);
        pair_write_one(&pair, i, k, NULL);
    }
    wait_results(pair.a.t, KVT_ANY, results, 40);
    for (int i = 0; i < 40; i++) {
        assert_int_equal(results[i].state, KVT_DONE);
    }
    pair_check(&pair);
    assert_path(&pair, "nixl", "NIXL took over in mid-life");
    assert_lines("load beta", 1);
    pair_close(&pair);
}

/* Nobody else can take over then. */
static void a_peer_without_nixl_keeps_the_kernel_s_answer(void **state)
{
    const struct kvt_options local = {.engine = "local"};
    struct kvt_result result;
    struct pair pair;

    (void)state;
    open_nodes(&pair, NULL, &local);
    add_b(&pair, NULL);
    forbid_after(0, EPERM);
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    assert_int_equal(result.state, KVT_FAILED);
    assert_int_equal(result.code, KVT_EPERM);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    forbid_after(0, 0);
    write_and_check(&pair, 2, 3);
    assert_path(&pair, "local", "in this process");
    pair_close(&pair);
}

static void messages_stay_on_the_way_of_the_first(void **state)
{
    struct pair pair;
    char text[8];

    (void)state;
    open_near(&pair);
    for (char i = 'a'; i < 'e'; i++) {
        assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, &i, 1, ERR));
        if (i == 'b') {
            forbid_after(0, EPERM);
            write_and_check(&pair, 3, 4);
        }
    }
    for (char i = 'a'; i < 'e'; i++) {
        assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 1);
        assert_int_equal(text[0], i);
    }
    assert_lines("notif", 0);
    pair_close(&pair);
    open_near(&pair);
    forbid_after(0, EPERM);
    write_and_check(&pair, 3, 4);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR));
    assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 1);
    assert_lines("notif beta", 1);
    pair_close(&pair);
}

/* ------------------------------------------------------------------- memory */

static void a_full_gate_takes_the_registration_back_from_nixl(void **state)
{
    const uint32_t count = KVTI_GATE_ENTRIES + 1;
    const struct kvt_options many = {.regions_max = 2 * count};
    struct kvt_region *regions = calloc(count, sizeof *regions);
    unsigned char *memory = calloc(count, 1);
    struct pair pair;

    (void)state;
    assert_non_null(regions);
    assert_non_null(memory);
    open_nodes(&pair, &many, NULL);
    for (uint32_t i = 0; i < count; i++) {
        regions[i].addr = (uintptr_t)memory + i;
        regions[i].length = 1;
    }
    assert_kvt_fails_with(kvt_register(pair.a.t, regions, count, 0, ERR),
                          KVT_EAGAIN, "or open with KVT_OPEN_NO_SAME_HOST");
    assert_lines("deregister 0", 1);
    assert_int_equal(stats_of(pair.a.t).regions, 2);
    /* One place is the pool's. */
    assert_kvt_ok(kvt_register(pair.a.t, regions, count - 2, 0, ERR));
    assert_kvt_fails(kvt_register(pair.a.t, regions + count - 2, 2, 0, ERR),
                     KVT_EAGAIN);
    assert_kvt_ok(kvt_deregister(pair.a.t, regions, count - 2, 0, ERR));
    add_b(&pair, NULL);
    write_and_check(&pair, 1, 1);
    pair_close(&pair);
    free(regions);
    free(memory);
}

static void writers_are_out_before_nixl_forgets_the_memory(void **state)
{
    struct kvt_region region;
    struct writer writer;
    struct pair pair;

    (void)state;
    open_near(&pair);
    region = pool_region(&pair.b.pool);
    enter_gate(&pair.b, &writer);
    assert_kvt_fails_with(kvt_deregister(pair.b.t, &region, 1, 20 * MS, ERR),
                          KVT_EBUSY, "does not move on with a write");
    assert_lines("deregister", 0);
    /* New writes are shut out already. */
    assert_int_equal(
        wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL)).code,
        KVT_ESTALE);
    leave_gate(&writer);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    assert_lines("deregister 0", 1);
    pair_check(&pair);
    pair_close(&pair);
}

/* VRAM waits for nobody: it is NIXL's alone. */
static void vram_is_registered_with_nixl_alone(void **state)
{
    const struct kvt_region region = {
        .addr = VRAM_B, .length = VRAM_BYTES, .kind = KVT_VRAM, .device = 1};
    struct writer writer;
    struct pair pair;

    (void)state;
    open_near(&pair);
    assert_lines("register 1", 2);
    enter_gate(&pair.b, &writer);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    assert_lines("deregister 1", 1);
    leave_gate(&writer);
    pair_close(&pair);
}

/* ------------------------------------------------------ NIXL cannot load it */

static void a_load_that_fails_costs_one_transfer(void **state)
{
    struct kvt_result result;
    struct pair pair;

    (void)state;
    open_near(&pair);
    fake.script("load", -2, 1);
    result = wait_xfer(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_int_equal(result.state, KVT_REJECTED);
    assert_int_equal(result.code, KVT_EENGINE);
    assert_int_equal(result.scope, KVT_SCOPE_REQUEST);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_non_null(strstr(result.text, "NIXL cannot load agent \"beta\""));
    write_and_check(&pair, 1, 2);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    assert_lines("load beta", 2);
    assert_int_equal(stats_of(pair.a.t).peer_disconnects, 0);
    pair_close(&pair);
}

static void a_load_that_fails_fails_the_message(void **state)
{
    const struct kvt_xfer_options with_note = {
        .size = sizeof with_note, .note = "one", .note_length = 3};
    struct kvt_result result;
    struct pair pair;
    char text[8];

    (void)state;
    open_nodes(&pair, NULL, NULL);
    add_b(&pair, in_another_net);
    fake.script("load", -2, 1);
    pair_expect(&pair, &(uint32_t){1}, &(uint32_t){2}, 1);
    result = wait_xfer(pair.a.t, pair_write_one(&pair, 1, 2, &with_note));
    assert_int_equal(result.state, KVT_DONE);
    assert_int_equal(result.code, KVT_ENOTIFY);
    assert_non_null(strstr(result.text, "NIXL cannot load agent \"beta\""));
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).notes_failed, 1);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "again", 5, ERR));
    assert_int_equal(wait_note(pair.b.t, text, sizeof text).length, 5);
    pair_close(&pair);
}

/* ---------------------------------------------------- NIXL hangs in a load */

static void an_unload_waits_for_the_load_under_way(void **state)
{
    const struct kvt_options brief = {.grace_ns = MS};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    open_nodes(&pair, &brief, NULL);
    add_b(&pair, NULL);
    fake.block("load", true);
    id = write_vram(&pair, 0, 64, NULL);
    assert_soon(fake.waiting("load") == 1);
    assert_kvt_fails(kvt_peer_unload(pair.a.t, pair.peer, 20 * MS, ERR),
                     KVT_ETIMEDOUT);
    /* Its grace time is over; the unload proves that it was never posted. */
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_LOST);
    assert_soon(stats_of(pair.a.t).quarantined == 0);
    fake.block("load", false);
    assert_kvt_ok(kvt_peer_unload(pair.a.t, pair.peer, 0, ERR));
    assert_lines("create", 0);
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    write_and_check(&pair, 1, 2);
    wait_done(pair.a.t, write_vram(&pair, 0, 64, NULL));
    pair_close(&pair);
}

static void a_close_does_not_wait_for_the_load_beyond_its_time(void **state)
{
    struct pair pair;

    (void)state;
    open_near(&pair);
    fake.block("load", true);
    write_vram(&pair, 0, 64, NULL);
    assert_soon(fake.waiting("load") == 1);
    assert_kvt_fails(kvt_close(pair.a.t, 100 * MS, ERR), KVT_EBUSY);
    kvt_free(pair.a.t);
    fake.block("load", false);
    /* The thread comes back, and ends what it can. */
    assert_soon(fake.count_lines("destroy_agent alpha") == 1);
    assert_lines("create", 0);
    node_close(&pair.b);
    pool_check(&pair.a.pool, "a");
    /* Its memory stays: the close said so. */
}

static const struct CMUnitTest leave_cases[] = {
    cmocka_unit_test(what_the_kernel_forbids_in_mid_life_goes_by_nixl),
    cmocka_unit_test(leave_may_be_lost_at_any_call),
    cmocka_unit_test(everything_in_flight_is_taken_over),
    cmocka_unit_test(a_peer_without_nixl_keeps_the_kernel_s_answer),
    cmocka_unit_test(messages_stay_on_the_way_of_the_first),
};

static const struct CMUnitTest memory_cases[] = {
    cmocka_unit_test(a_full_gate_takes_the_registration_back_from_nixl),
    cmocka_unit_test(writers_are_out_before_nixl_forgets_the_memory),
    cmocka_unit_test(vram_is_registered_with_nixl_alone),
};

static const struct CMUnitTest load_cases[] = {
    cmocka_unit_test(a_load_that_fails_costs_one_transfer),
    cmocka_unit_test(a_load_that_fails_fails_the_message),
    cmocka_unit_test(an_unload_waits_for_the_load_under_way),
    cmocka_unit_test(a_close_does_not_wait_for_the_load_beyond_its_time),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {
        TEST_GROUP("leave", leave_cases),
        TEST_GROUP("memory", memory_cases),
        TEST_GROUP("load", load_cases),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    return kvt_test_main(groups, sizeof groups / sizeof groups[0],
                         argc > 1 ? argv[1] : NULL);
}
