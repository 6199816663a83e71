/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory and chunks of the engine `nixl`, against a core that only records
 * (fake_env) and a stand-in for NIXL (fake_nixl_capi.c) that writes down what
 * it is asked and answers wrongly on order.
 *
 * Proved: what NIXL is told, in which order, of which kinds, devices and
 * addresses; that each of its statuses becomes the outcome that nixl_xfer.c
 * promises, no done without a later request that was accepted, and no failure
 * final without a proof; that each request is released when it is over, and no
 * other ever is.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "nixl_pair.h"

/* ------------------------------------------------------------------- memory */

/* B17 */
static void touching_regions_are_one_registration_a_kind(void **state)
{
    struct kvti_mem mems[] = {
        {.addr = TOP_BIT + 4096, .length = 4096, .kind = 1, .device = 5},
        {.addr = TOP_BIT, .length = 4096, .kind = 1, .device = 5},
        {.addr = TOP_BIT + 8192, .length = 4096, .kind = 1, .device = 6},
        {.addr = 0x10000, .length = 4096},
        {.addr = 0x10800, .length = 4096},
        {.addr = 0x20000, .length = 4096}};
    struct kvti_mem *list[6];
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);
    struct side side;

    (void)state;
    fake.reset();
    open_side(&side, "alpha");
    for (size_t i = 0; i < 6; i++) {
        list[i] = &mems[i];
    }
    job.mems = list;
    job.mem_count = 6;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    /* Lines 0 and 1 are the scratch page and the side's own region. */
    assert_line("register", 2, "register 0 10000+1800@0 20000+1000@0");
    assert_line("register", 3,
                "register 1 8000000000000000+2000@5 8000000000002000+1000@6");
    assert_int_equal(fake.count_lines("register"), 4);

    job = fake_job(KVTI_JOB_MEM_DROP);
    job.mems = list;
    job.mem_count = 1;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_int_equal(fake.count_lines("deregister"), 0);
    job = fake_job(KVTI_JOB_MEM_DROP);
    job.mems = list + 1;
    job.mem_count = 5;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_line("deregister 1", 0, "8000000000000000+2000@5");
    assert_line("deregister 0", 0, "10000+1800@0 20000+1000@0");
    assert_int_equal(close_side(&side), KVT_OK);
}

/* B23 */
static void a_registration_that_fails_leaves_nothing(void **state)
{
    struct kvti_mem mems[] = {{.addr = 0x10000, .length = 4096},
                              {.addr = TOP_BIT, .length = 4096, .kind = 1}};
    struct kvti_mem *list[] = {&mems[0], &mems[1]};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);
    struct side side;

    (void)state;
    fake.reset();
    open_side(&side, "alpha");
    job.mems = list;
    job.mem_count = 2;
    fake.script("register", NIXL_OK, 1);
    fake.script("register", NIXL_BACKEND, 1);
    assert_int_equal(fake_env_job(&side.env, &job), KVT_EENGINE);
    assert_non_null(strstr(job.err.text, "VRAM"));
    assert_line("deregister 0", 0, "10000+1000@0");
    job = fake_job(KVTI_JOB_MEM_ADD);
    job.mems = list;
    job.mem_count = 2;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_int_equal(close_side(&side), KVT_OK);
}

/* ------------------------------------------------------------------- chunks */

static void bytes_move_both_ways(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    for (uint32_t op = KVT_OP_WRITE; op <= KVT_OP_READ; op++) {
        fill(&pair.a, 10 + op);
        fill(&pair.b, 20 + op);
        chunk = pieces(&pair, op, 17);
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        assert_moved(chunk);
        free(chunk);
    }
    assert_line("create op=1", 0, "create op=1 0>0 merge=0 n=17");
    assert_line("create op=0", 1, "create op=0 0>0 merge=0 n=17");
    close_pair(&pair, KVT_OK);
}

static void copies_are_cut_at_the_registrations_of_both_sides(void **state)
{
    struct pair pair;
    struct kvti_mem low;
    struct kvti_mem more;
    struct kvti_chunk *chunk;

    (void)state;
    fake.reset();
    open_side(&pair.a, "alpha");
    open_side(&pair.b, "beta");
    /* Registered later, next to the first: NIXL knows two pieces. */
    low = (struct kvti_mem){.addr = number(pair.a.data) - 4096, .length = 4096};
    add_mem(&pair.a, &low);
    more = (struct kvti_mem){.addr = number(pair.b.data) + BYTES,
                             .length = 4096};
    add_mem(&pair.b, &more);
    load_peer(&pair.a, &pair.b, &pair.peer);
    chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 1);
    chunk->copies[0] = (struct kvti_copy){
        .local = low.addr + 4000, .peer = more.addr - 200, .length = 1000};
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    assert_line("create op=1", 0, "n=3");
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void a_chunk_of_many_descriptors_is_several_requests(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 700);
    for (uint32_t i = 0; i < 700; i++) {
        chunk->copies[i] = (struct kvti_copy){
            .local = number(pair.a.data) + 80 * (uint64_t)i,
            .peer = number(pair.b.data) + 90 * (uint64_t)i,
            .length = 60};
    }
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, 3);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    assert_line("create op=1", 0, "n=512");
    assert_line("create op=1", 1, "n=188");
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void kinds_devices_and_high_addresses_reach_nixl(void **state)
{
    struct kvti_mem ours = {
        .addr = TOP_BIT + 65536, .length = 65536, .kind = 1, .device = 3};
    struct kvti_mem theirs = {
        .addr = TOP_BIT + 0x70000000, .length = 65536, .kind = 1, .device = 7};
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    fake.reset();
    open_side(&pair.a, "alpha");
    open_side(&pair.b, "beta");
    add_mem(&pair.a, &ours);
    add_mem(&pair.b, &theirs);
    load_peer(&pair.a, &pair.b, &pair.peer);
    for (uint32_t mix = 0; mix < 4; mix++) {
        char words[32];

        chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 1);
        chunk->local_kind = mix & 1;
        chunk->peer_kind = mix >> 1;
        chunk->local_device = chunk->local_kind * 3;
        chunk->peer_device = chunk->peer_kind * 7;
        chunk->copies[0] = (struct kvti_copy){
            .local = chunk->local_kind != 0 ? ours.addr : number(pair.a.data),
            .peer = chunk->peer_kind != 0 ? theirs.addr : number(pair.b.data),
            .length = 4096};
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        kvti_format(words, sizeof words, "%u>%u merge=0 n=1 ", mix & 1,
                    mix >> 1);
        assert_line("create op=1", (int)mix, words);
        free(chunk);
    }
    assert_line("create op=1", 1, "8000000000010000+1000@3");
    assert_line("remote of", 2, "8000000070000000+1000@7");
    assert_int_equal(fake.count_lines("create"), 4);
    close_pair(&pair, KVT_OK);
}

/* ------------------------------------------------------------- done, or not */

static void done_waits_for_a_later_request(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    fake.script("post", NIXL_OK, 1);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.block("status", true);
    fake_env_post(&pair.a.env, chunk);
    while (fake.waiting("status") == 0) {
        sched_yield();
    }
    /* All bytes have landed, and NIXL says so; the probe is under way. */
    assert_moved(chunk);
    assert_true(kvti_list_empty(&chunk->event_node));
    assert_line("create", 1, "create op=0 0>0 merge=0 n=1");
    fake.block("status", false);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void the_next_chunk_confirms_as_well_as_a_probe(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunks[3];

    (void)state;
    open_pair(&pair);
    fake.block("post", true);
    for (size_t i = 0; i < 3; i++) {
        chunks[i] = pieces(&pair, KVT_OP_WRITE, 4);
        fake_env_post(&pair.a.env, chunks[i]);
    }
    fake.block("post", false);
    for (size_t i = 0; i < 3; i++) {
        fake_env_wait_chunk(&pair.a.env, chunks[i]);
        assert_outcome(chunks[i], KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        free(chunks[i]);
    }
    assert_true(fake.count_lines("create op=0") <= 2);
    close_pair(&pair, KVT_OK);
}

/* The place in the whole log of the first line that begins so. */
static int place_of(const char *prefix)
{
    char text[256];
    int n = 0;

    while (fake.get_line("", n, text, sizeof text)) {
        if (strncmp(text, prefix, strlen(prefix)) == 0) {
            return n;
        }
        n++;
    }
    fail_msg("no line of the log begins with \"%s\"", prefix);
    return -1;
}

/* NIXL 1.3 over TCP dies of a read among writes. */
static void no_probe_is_made_while_a_request_is_under_way(void **state)
{
    struct pair pair;
    struct kvti_chunk *slow;
    struct kvti_chunk *landed;

    (void)state;
    open_pair(&pair);
    slow = pieces(&pair, KVT_OP_WRITE, 1);
    landed = pieces(&pair, KVT_OP_WRITE, 4);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, 100);
    fake.block("status", true);
    fake_env_post(&pair.a.env, slow);
    while (fake.waiting("status") == 0) {
        sched_yield();
    }
    fake_env_post(&pair.a.env, landed);
    fake.block("status", false);
    fake_env_wait_chunk(&pair.a.env, slow);
    fake_env_wait_chunk(&pair.a.env, landed);
    assert_outcome(landed, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_true(place_of("status") < place_of("create op=0"));
    free(slow);
    free(landed);
    close_pair(&pair, KVT_OK);
}

static void one_descriptor_needs_no_confirmation(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 1);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
    assert_int_equal(fake.count_lines("create"), 1);
}

static void a_false_done_is_found_out(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 16);
    fake.script("post", NIXL_OK, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
}

static void a_refused_post_is_final_where_nixl_never_began(void **state)
{
    static const int statuses[] = {NIXL_INVALID_PARAM, NIXL_NOT_FOUND};
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    for (size_t i = 0; i < 2; i++) {
        chunk = pieces(&pair, KVT_OP_WRITE, 3);
        fake.script("post", statuses[i], 1);
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
        assert_int_equal(chunk->outcome.engine_code, statuses[i]);
        free(chunk);
    }
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("create", NIXL_BACKEND, 1);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
    free(chunk);
    /* None of it was the link's fault. */
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void a_post_that_broke_is_not_final_and_breaks_the_link(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;
    struct kvti_chunk *later;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_parked(&pair, chunk, KVT_REJECTED, KVT_EREJECTED);
    later = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, later);
    assert_outcome(later, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("create"), 1);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
    free(later);
}

static void statuses_that_are_not_done_are_never_final(void **state)
{
    struct pair pair;
    struct kvti_chunk *broken;
    struct kvti_chunk *strange;

    (void)state;
    open_pair(&pair);
    strange = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, 5);
    fake.script("status", NIXL_NOT_FOUND, 1);
    fake_env_post(&pair.a.env, strange);
    wait_until_parked(&pair, strange, KVT_UNREADABLE, KVT_EENGINE);
    broken = pieces(&pair, KVT_OP_READ, 3);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, broken);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_parked(&pair, broken, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    assert_int_equal(fake.count_lines("release"), 0);
    free(strange);
    free(broken);
}

/* ------------------------------------------------------------------- release */

static struct kvti_chunk *pieces_for(const struct pair *pair,
                                     const struct peer *peer, uint32_t op)
{
    struct kvti_chunk *chunk = pieces(pair, op, 3);

    chunk->conn = peer->conn;
    return chunk;
}

/* Three writes to a child, with the NIXL thread inside a status call: NIXL will
 * say of each in another way that it failed. */
static void post_to_fail(struct pair *pair, const struct peer *child,
                         struct kvti_chunk *chunks[3])
{
    for (size_t i = 0; i < 3; i++) {
        chunks[i] = pieces_for(pair, child, KVT_OP_WRITE);
    }
    fake.script("post", NIXL_IN_PROG, 2);
    post_and_hold(pair, chunks[0]);
    fake_env_post(&pair->a.env, chunks[1]);
    fake_env_post(&pair->a.env, chunks[2]);
    fake.script("status", NIXL_IN_PROG, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake.script("status", NIXL_BACKEND, 1);
    fake.script("status", NIXL_NOT_FOUND, 1);
}

static void what_failed_is_released_when_its_peer_dies(void **state)
{
    struct kvti_chunk *chunks[3];
    struct peer child;
    struct pair pair;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    pid = start_child(&pair, &child);
    post_to_fail(&pair, &child, chunks);
    fake.block("status", false);
    wait_until_parked(&pair, chunks[2], KVT_REJECTED, KVT_EREJECTED);
    wait_until_parked(&pair, chunks[0], KVT_DISCONNECTED, KVT_EDISCONNECTED);
    wait_until_parked(&pair, chunks[1], KVT_UNREADABLE, KVT_EENGINE);
    assert_int_equal(fake.count_lines("release"), 0);
    kill_child(pid);
    for (size_t i = 0; i < 3; i++) {
        fake_env_wait_chunk(&pair.a.env, chunks[i]);
        assert_int_equal(chunks[i]->outcome.fin, KVTI_FIN_BOTH);
        free(chunks[i]);
    }
    wait_for_lines("release", 3);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
    assert_int_equal(fake.count_lines("create"), 3);
    assert_int_equal(fake.count_lines("release"), 3);
}

static void what_fails_after_its_peer_died_is_released(void **state)
{
    static const char *const calls[] = {"post", "status"};
    struct kvti_chunk *chunk;
    struct peer child;
    struct pair pair;
    pid_t pid;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        open_pair(&pair);
        pid = start_child(&pair, &child);
        chunk = pieces_for(&pair, &child, KVT_OP_WRITE);
        fake.script("post", NIXL_IN_PROG, (int)i);
        fake.script(calls[i], NIXL_BACKEND, 1);
        fake.block(calls[i], true);
        fake_env_post(&pair.a.env, chunk);
        while (fake.waiting(calls[i]) == 0) {
            sched_yield();
        }
        kill_child(pid);
        fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DEAD);
        fake.block(calls[i], false);
        fake_env_wait_chunk(&pair.a.env, chunk);
        assert_int_equal(chunk->outcome.fin, KVTI_FIN_BOTH);
        wait_for_lines("release", 1);
        free(chunk);
        free_peer(&child);
        close_pair(&pair, KVT_OK);
        assert_int_equal(fake.count_lines("create"), 1);
        assert_int_equal(fake.count_lines("release"), 1);
    }
}

/* A failed write to a process that dies, with an agent like that. */
static void check_kept(const struct kvt_options *options)
{
    struct kvti_chunk *chunk;
    struct peer child;
    struct pair pair;
    pid_t pid;

    fake.reset();
    open_with(&pair.a, "alpha", options);
    open_side(&pair.b, "beta");
    load_peer(&pair.a, &pair.b, &pair.peer);
    pid = start_child(&pair, &child);
    chunk = pieces_for(&pair, &child, KVT_OP_WRITE);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    wait_until_parked(&pair, chunk, KVT_REJECTED, KVT_EREJECTED);
    kill_child(pid);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
    free(chunk);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
    assert_int_equal(fake.count_lines("create"), 1);
    assert_int_equal(fake.count_lines("release"), 0);
}

/* Those delete what is still under way. */
static void other_backends_get_no_failed_request_back(void **state)
{
    static const char *const backends[] = {"UCX", "LIBFABRIC"};
    static const struct kvt_param spread[] = {{"UCX", "split_batch_size", "1"}};
    struct kvt_options options = options_of();

    (void)state;
    assert_int_equal(setenv("NIXL_UCX_SGL_ENABLE", "1", 1), 0);
    check_kept(&options);
    assert_int_equal(unsetenv("NIXL_UCX_SGL_ENABLE"), 0);
    options.backends = backends;
    options.backend_count = 2;
    check_kept(&options);
    options = options_of();
    options.params = spread;
    options.param_count = 1;
    check_kept(&options);
}

/* Of a read, bytes may still be on their way to us. */
static void a_failed_read_is_never_released(void **state)
{
    struct kvti_chunk *chunk;
    struct peer child;
    struct pair pair;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    pid = start_child(&pair, &child);
    chunk = pieces_for(&pair, &child, KVT_OP_READ);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    kill_child(pid);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DEAD);
    assert_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
    assert_int_equal(fake.count_lines("release"), 0);
    free(chunk);
}

/* NIXL never said that it failed, and does not say any more what it does. */
static void what_was_under_way_at_a_new_load_is_never_released(void **state)
{
    struct kvti_chunk *chunk;
    struct peer child;
    struct peer newer;
    struct pair pair;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    pid = start_child(&pair, &child);
    chunk = pieces_for(&pair, &child, KVT_OP_WRITE);
    fake.script("post", NIXL_IN_PROG, 1);
    post_and_hold(&pair, chunk);
    fake.script("status", NIXL_IN_PROG, 1);
    export_side(&pair.b, &newer);
    newer.md.incarnation[0] ^= 2;
    newer.load = fake_job(KVTI_JOB_LOAD);
    newer.load.md = &newer.md;
    newer.load.link = &newer;
    fake_env_submit(&pair.a.env, &newer.load);
    fake.block("status", false);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &newer.load), KVT_OK);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    kill_child(pid);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    free_peer(&child);
    free_peer(&newer);
    close_pair(&pair, KVT_OK);
    assert_int_equal(fake.count_lines("create"), 1);
    assert_int_equal(fake.count_lines("release"), 0);
    free(chunk);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(touching_regions_are_one_registration_a_kind),
        cmocka_unit_test(a_registration_that_fails_leaves_nothing),
        cmocka_unit_test(bytes_move_both_ways),
        cmocka_unit_test(copies_are_cut_at_the_registrations_of_both_sides),
        cmocka_unit_test(a_chunk_of_many_descriptors_is_several_requests),
        cmocka_unit_test(kinds_devices_and_high_addresses_reach_nixl),
        cmocka_unit_test(done_waits_for_a_later_request),
        cmocka_unit_test(the_next_chunk_confirms_as_well_as_a_probe),
        cmocka_unit_test(no_probe_is_made_while_a_request_is_under_way),
        cmocka_unit_test(one_descriptor_needs_no_confirmation),
        cmocka_unit_test(a_false_done_is_found_out),
        cmocka_unit_test(a_refused_post_is_final_where_nixl_never_began),
        cmocka_unit_test(a_post_that_broke_is_not_final_and_breaks_the_link),
        cmocka_unit_test(statuses_that_are_not_done_are_never_final),
        cmocka_unit_test(what_failed_is_released_when_its_peer_dies),
        cmocka_unit_test(what_fails_after_its_peer_died_is_released),
        cmocka_unit_test(other_backends_get_no_failed_request_back),
        cmocka_unit_test(a_failed_read_is_never_released),
        cmocka_unit_test(what_was_under_way_at_a_new_load_is_never_released),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
