/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine `nixl` when links break, peers die and are loaded anew at bad
 * moments, against the stand-in for NIXL (fake_nixl_capi.c).
 *
 * Proved: nothing is posted to a remote that is down, to one whose process has
 * died, or to a new process under an old name; what NIXL was told to forget is
 * not asked about; a chunk that a probe covers gets the probe's verdict even
 * when the link breaks meanwhile; a probe that was never made breaks nothing
 * and no probe touches a user's memory at a peer of kvt's; a new load gets a
 * link out of a stuck one, and a failed load leaves nothing; the news of a
 * break reach a peer that was being loaded; one peer that does not move holds
 * back no other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "nixl_pair.h"

#define FOR_EVER 1000000000

/* Pieces for more than one request, at 80-byte steps. */
static struct kvti_chunk *many_pieces(const struct pair *pair)
{
    struct kvti_chunk *chunk = fake_chunk(pair->peer.conn, KVT_OP_WRITE, 700);

    for (uint32_t i = 0; i < chunk->count; i++) {
        chunk->copies[i] = (struct kvti_copy){
            .local = number(pair->a.data) + 80 * (uint64_t)i,
            .peer = number(pair->b.data) + 80 * (uint64_t)i,
            .length = 60};
    }
    return chunk;
}

static bool was_told(struct pair *pair, const void *link,
                     enum kvti_conn_event event)
{
    struct fake_env *env = &pair->a.env;
    bool told = false;

    pthread_mutex_lock(&env->mu);
    for (size_t i = 0; i < env->event_count; i++) {
        told = told ||
               (env->events[i].link == link && env->events[i].event == event);
    }
    pthread_mutex_unlock(&env->mu);
    return told;
}

/* ------------------------------------------------------- broken, died, anew */

static void a_chunk_is_not_continued_on_a_broken_link(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;
    struct kvti_chunk *breaker;

    (void)state;
    open_pair(&pair);
    chunk = many_pieces(&pair);
    breaker = pieces(&pair, KVT_OP_WRITE, 1);
    fake.script("post", NIXL_IN_PROG, 1);
    post_and_hold(&pair, chunk);
    fake_env_post(&pair.a.env, breaker);
    fake.script("status", NIXL_IN_PROG, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake.block("status", false);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("create op=1"), 2);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
    free(breaker);
}

/* B05 */
static void a_new_process_is_not_written_for_the_old_one(void **state)
{
    struct pair pair;
    struct peer newer;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = many_pieces(&pair);
    fake.script("post", NIXL_IN_PROG, 1);
    post_and_hold(&pair, chunk);
    fake.script("status", NIXL_IN_PROG, 1);
    pair.b.env.incarnation[0] ^= 1;
    export_side(&pair.b, &newer);
    newer.load = fake_job(KVTI_JOB_LOAD);
    newer.load.md = &newer.md;
    newer.load.link = &newer;
    fake_env_submit(&pair.a.env, &newer.load);
    fake.block("status", false);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &newer.load), KVT_OK);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("create op=1"), 1);
    assert_int_equal(fake.count_lines("STALE"), 0);
    free_peer(&newer);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
}

/* Another nonce, and whatever else, in a process's page. */
static void change_memory(pid_t pid, uint64_t addr,
                          const struct kvti_nonce_page *page)
{
    struct kvti_nonce_page other = {.magic = page->magic};
    struct iovec here = {.iov_base = &other, .iov_len = sizeof other};
    struct iovec there = {.iov_base = (void *)(uintptr_t)addr,
                          .iov_len = sizeof other};

    assert_int_equal(process_vm_writev(pid, &here, 1, &there, 1, 0),
                     sizeof other);
}

static void a_dead_process_is_not_posted_to(void **state)
{
    struct pair pair;
    struct peer child;
    struct kvti_chunk *chunk;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    pid = start_child(&pair, &child);
    kill_child(pid);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DOWN);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    chunk->conn = child.conn;
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("create"), 0);
    free(chunk);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
}

static void close_is_clean_when_only_dead_peers_had_requests(void **state)
{
    struct pair pair;
    struct peer child;
    struct kvti_chunk *chunk;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    pid = start_child(&pair, &child);
    chunk = pieces(&pair, KVT_OP_READ, 3);
    chunk->conn = child.conn;
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, FOR_EVER);
    fake_env_post(&pair.a.env, chunk);
    wait_for_lines("post", 1);
    kill_child(pid);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
    free(chunk);
}

static void close_is_clean_when_the_core_knows_better(void **state)
{
    struct kvti_chunk *chunk;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    chunk->fin = KVTI_FIN_BOTH; /* kvt_peer_confirm_dead() */
    close_pair(&pair, KVT_OK);
    free(chunk);
}

/* As an exec leaves it: the same process with other memory. */
static void another_program_in_the_process_is_not_written(void **state)
{
    struct kvti_local_id local;
    struct kvti_nonce_page *page;
    struct kvti_chunk *chunk;
    struct kvti_chunk *later;
    struct pair pair;
    struct peer near;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &near);
    local = near.md.local;
    pid = start_process(&near);
    near.md.incarnation[0] ^= 1;
    page = (struct kvti_nonce_page *)(uintptr_t)local.nonce_addr;
    assert_int_equal(load_again(&pair.a, &near, &near), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    chunk->conn = near.conn;
    fake.script("post", NIXL_IN_PROG, 1);
    post_and_hold(&pair, chunk);
    change_memory(pid, local.nonce_addr, page);
    fake.block("status", false);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    later = pieces(&pair, KVT_OP_WRITE, 3);
    later->conn = near.conn;
    post_and_wait(&pair, later);
    assert_outcome(later, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("create op=1"), 1);
    fake_env_wait_event(&pair.a.env, &near, KVTI_CONN_DOWN);
    assert_int_equal(load_again(&pair.a, &near, &near), KVT_EDISCONNECTED);
    kill_child(pid);
    fake_env_wait_chunk(&pair.a.env, chunk); /* nothing is left to harm */
    free_peer(&near);
    close_pair(&pair, KVT_OK);
    free(chunk);
    free(later);
}

/* ----------------------------------------------------------------- confirming */

/* A chunk has landed, the probe that confirms it is under way, and another
 * chunk breaks the link; then the probe ends with `status`. */
static struct kvti_chunk *break_under_a_probe(struct pair *pair, int status,
                                              struct kvti_chunk **ret_breaker)
{
    struct kvti_chunk *chunk = pieces(pair, KVT_OP_WRITE, 5);
    struct kvti_chunk *breaker = pieces(pair, KVT_OP_WRITE, 1);

    fake.script("post", NIXL_OK, 1);
    fake.script("post", NIXL_IN_PROG, 1);
    post_and_hold(pair, chunk);
    fake_env_post(&pair->a.env, breaker);
    fake.script("status", NIXL_IN_PROG, 1);
    fake.script("status", status, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake.block("status", false);
    fake_env_wait_event(&pair->a.env, &pair->peer, KVTI_CONN_DOWN);
    wait_until_parked(pair, breaker, KVT_REJECTED, KVT_EREJECTED);
    *ret_breaker = breaker; /* the engine keeps it until it is closed */
    return chunk;
}

static void a_probe_s_verdict_holds_when_the_link_breaks_meanwhile(void **state)
{
    struct kvti_chunk *chunk;
    struct kvti_chunk *breaker;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = break_under_a_probe(&pair, NIXL_OK, &breaker);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_EBUSY);
    free(breaker);
}

static void a_probe_that_fails_with_the_link_proves_nothing(void **state)
{
    struct kvti_chunk *chunk;
    struct kvti_chunk *breaker;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = break_under_a_probe(&pair, NIXL_BACKEND, &breaker);
    wait_until_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
    free(breaker);
}

static void a_probe_that_cannot_be_made_breaks_nothing(void **state)
{
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);
    struct kvti_chunk *chunk;
    struct kvti_chunk *later;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 4);
    fake.script("create", NIXL_OK, 1);
    fake.script("create", NIXL_BACKEND, 2);
    fake_env_post(&pair.a.env, chunk);
    wait_until_parked(&pair, chunk, KVT_UNREADABLE, KVT_EENGINE);
    job.conn = pair.peer.conn;
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_EENGINE);
    later = pieces(&pair, KVT_OP_WRITE, 4);
    post_and_wait(&pair, later);
    assert_outcome(later, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_false(was_told(&pair, &pair.peer, KVTI_CONN_DOWN));
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
    free(later);
}

static void probes_read_the_peer_s_own_page(void **state)
{
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);
    struct kvti_chunk *chunk;
    struct pair pair;
    char page[64] = "";
    char line[256];
    char *end;

    (void)state;
    open_pair(&pair);
    /* The second side registered its page first of all: "register 0 ADDR+…" */
    assert_true(fake.get_line("register", 2, line, sizeof line));
    end = strchr(line + strlen("register 0 "), '+');
    assert_non_null(end);
    *end = '\0';
    kvti_format(page, sizeof page, " %s+1@0", line + strlen("register 0 "));
    job.conn = pair.peer.conn;
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_OK);
    assert_line("remote of", 0, page);
    chunk = pieces(&pair, KVT_OP_WRITE, 4);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_line("remote of", 2, page);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void probes_of_a_plain_peer_read_where_the_chunk_wrote(void **state)
{
    struct kvti_chunk *chunk;
    struct pair pair;
    struct peer plain;
    char place[64];

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &plain);
    plain.md.has_trailer = false;
    plain.md.incarnation[0] ^= 1;
    assert_int_equal(load_again(&pair.a, &plain, &plain), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 4);
    chunk->conn = plain.conn;
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    kvti_format(place, sizeof place, " %llx+1@0",
                (unsigned long long)chunk->copies[0].peer);
    assert_line("remote of", 1, place);
    free(chunk);
    free_peer(&plain);
    close_pair(&pair, KVT_OK);
}

static void a_refusal_half_way_is_final_once_the_rest_is_confirmed(void **state)
{
    struct kvti_chunk *chunk;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = many_pieces(&pair);
    fake.script("create", NIXL_OK, 1);
    fake.script("create", NIXL_BACKEND, 1);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void requests_stay_below_what_nixl_spreads_over_threads(void **state)
{
    static const struct kvt_param params[] = {{"UCX", "split_batch_size", "8"}};
    struct kvt_options options = options_of();
    struct kvti_chunk *chunk;
    struct pair pair;

    (void)state;
    fake.reset();
    options.params = params;
    options.param_count = 1;
    open_with(&pair.a, "alpha", &options);
    open_side(&pair.b, "beta");
    load_peer(&pair.a, &pair.b, &pair.peer);
    chunk = pieces(&pair, KVT_OP_WRITE, 20);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    assert_line("create op=1", 0, "n=7");
    assert_line("create op=1", 2, "n=6");
    free(chunk);
    close_pair(&pair, KVT_OK);
}

/* -------------------------------------------------------------------- loads */

static void a_new_load_gets_out_of_a_stuck_link(void **state)
{
    struct kvti_chunk *stuck;
    struct kvti_chunk *later;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    stuck = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, FOR_EVER);
    fake_env_post(&pair.a.env, stuck);
    wait_for_lines("post", 1);
    unload_peer(&pair.a, &pair.peer); /* the core gave it up as lost */
    assert_int_equal(fake.count_lines("invalidate beta"), 0);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    wait_until_parked(&pair, stuck, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    later = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, later);
    assert_outcome(later, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_int_equal(fake.count_lines("STALE"), 0);
    close_pair(&pair, KVT_EBUSY);
    free(stuck);
    free(later);
}

static void a_failed_load_leaves_nothing_in_nixl(void **state)
{
    struct pair pair;
    struct peer newer;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &newer);
    newer.md.incarnation[0] ^= 1;
    fake.script("load", NIXL_BACKEND, 1);
    assert_int_equal(load_again(&pair.a, &newer, &newer), KVT_EENGINE);
    /* Once for what was there, once for what may be left. */
    assert_int_equal(fake.count_lines("invalidate beta"), 2);
    assert_int_equal(load_again(&pair.a, &newer, &newer), KVT_OK);
    free_peer(&newer);
    close_pair(&pair, KVT_OK);
}

/* NIXL pays for each new connection to a process that lives. */
static void a_reload_keeps_a_sound_link(void **state)
{
    struct kvti_mem more;
    struct kvti_chunk *chunk;
    struct pair pair;
    struct peer grown;

    (void)state;
    open_pair(&pair);
    for (int i = 0; i < 3; i++) {
        unload_peer(&pair.a, &pair.peer);
        assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
        chunk = pieces(&pair, KVT_OP_WRITE, 3);
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        free(chunk);
    }
    assert_int_equal(fake.count_lines("invalidate"), 0);
    /* Other memory may be behind the same addresses: afresh. */
    more = (struct kvti_mem){.addr = number(pair.b.data) + BYTES,
                             .length = 4096};
    add_mem(&pair.b, &more);
    export_side(&pair.b, &grown);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(load_again(&pair.a, &grown, &grown), KVT_OK);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    free_peer(&grown);
    close_pair(&pair, KVT_OK);
}

static void a_reload_notices_that_the_link_broke_meanwhile(void **state)
{
    struct kvti_chunk *chunk;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    unload_peer(&pair.a, &pair.peer);
    fake.script("post", NIXL_BACKEND, 1);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void an_unloaded_peer_is_forgotten_in_the_end(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    unload_peer(&pair.a, &pair.peer);
    wait_for_lines("invalidate beta", 1);
    close_pair(&pair, KVT_OK);
}

struct scene {
    struct pair *pair;
    struct peer second;
    struct kvti_chunk *breaker;
};

/* On the control thread, which so cannot publish what is loaded: a peer is
 * loaded over a link, and the link breaks. */
static void break_while_loading(struct fake_env *env, void *arg)
{
    struct scene *scene = arg;
    struct pair *pair = scene->pair;

    kvti_list_init(&scene->second.load.event_node);
    env->ops->job(env->engine, &scene->second.load);
    wait_for_lines("load beta", 2);
    env->ops->post(env->engine, scene->breaker);
    while (!was_told(pair, &pair->peer, KVTI_CONN_DOWN)) {
        sched_yield();
    }
    assert_false(was_told(pair, &scene->second, KVTI_CONN_DOWN));
}

static void a_break_is_told_after_the_load_and_not_before(void **state)
{
    struct pair pair;
    struct scene scene = {.pair = &pair};

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &scene.second);
    scene.second.load = fake_job(KVTI_JOB_LOAD);
    scene.second.load.md = &scene.second.md;
    scene.second.load.link = &scene.second;
    scene.breaker = pieces(&pair, KVT_OP_WRITE, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_call(&pair.a.env, break_while_loading, &scene);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &scene.second.load),
                     KVT_OK);
    fake_env_wait_event(&pair.a.env, &scene.second, KVTI_CONN_DOWN);
    free_peer(&scene.second);
    close_pair(&pair, KVT_EBUSY);
    free(scene.breaker);
}

/* B13 */
static void a_peer_that_does_not_move_holds_back_no_other(void **state)
{
    struct kvti_chunk *stuck[4];
    struct kvti_chunk *other;
    struct peer second;
    struct side c;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    open_side(&c, "gamma");
    load_peer(&pair.a, &c, &second);
    fake.script("post", NIXL_IN_PROG, 4);
    fake.script("status", NIXL_IN_PROG, FOR_EVER);
    for (size_t i = 0; i < 4; i++) {
        stuck[i] = pieces(&pair, KVT_OP_WRITE, 3);
        fake_env_post(&pair.a.env, stuck[i]);
    }
    wait_for_lines("post", 4);
    other = pieces(&pair, KVT_OP_WRITE, 3);
    other->conn = second.conn;
    for (uint32_t i = 0; i < other->count; i++) {
        other->copies[i].peer += number(c.data) - number(pair.b.data);
    }
    post_and_wait(&pair, other);
    assert_outcome(other, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(other);
    close_pair(&pair, KVT_EBUSY);
    assert_int_equal(close_side(&c), KVT_OK);
    free_peer(&second);
    for (size_t i = 0; i < 4; i++) {
        free(stuck[i]);
    }
    free(other);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(a_chunk_is_not_continued_on_a_broken_link),
        cmocka_unit_test(a_new_process_is_not_written_for_the_old_one),
        cmocka_unit_test(a_dead_process_is_not_posted_to),
        cmocka_unit_test(close_is_clean_when_only_dead_peers_had_requests),
        cmocka_unit_test(close_is_clean_when_the_core_knows_better),
        cmocka_unit_test(another_program_in_the_process_is_not_written),
        cmocka_unit_test(
            a_probe_s_verdict_holds_when_the_link_breaks_meanwhile),
        cmocka_unit_test(a_probe_that_fails_with_the_link_proves_nothing),
        cmocka_unit_test(a_probe_that_cannot_be_made_breaks_nothing),
        cmocka_unit_test(probes_read_the_peer_s_own_page),
        cmocka_unit_test(probes_of_a_plain_peer_read_where_the_chunk_wrote),
        cmocka_unit_test(
            a_refusal_half_way_is_final_once_the_rest_is_confirmed),
        cmocka_unit_test(requests_stay_below_what_nixl_spreads_over_threads),
        cmocka_unit_test(a_new_load_gets_out_of_a_stuck_link),
        cmocka_unit_test(a_failed_load_leaves_nothing_in_nixl),
        cmocka_unit_test(a_reload_keeps_a_sound_link),
        cmocka_unit_test(a_reload_notices_that_the_link_broke_meanwhile),
        cmocka_unit_test(an_unloaded_peer_is_forgotten_in_the_end),
        cmocka_unit_test(a_break_is_told_after_the_load_and_not_before),
        cmocka_unit_test(a_peer_that_does_not_move_holds_back_no_other),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
