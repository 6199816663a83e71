/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers of the engine `nixl`, against a core that only records (fake_env) and a
 * stand-in for NIXL (fake_nixl_capi.c) that writes down what it is asked and
 * answers wrongly on order.
 *
 * Proved: how remotes are shared, replaced and kept; that an older blob takes
 * nothing away and a changed key does not go unnoticed; that chunks of a remote
 * which NIXL forgot are not confirmed by another; that metadata which NIXL
 * cannot use never reaches it; that the death of a peer's process is noticed
 * and is a proof; warm-ups; that notifications keep their order.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/nixl_blob.h"
#include "nixl_pair.h"

/* -------------------------------------------------------------------- peers */

static void a_broken_link_is_invalidated_before_it_is_loaded_again(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;
    struct kvti_chunk *lost; /* the engine's until it is closed */

    (void)state;
    open_pair(&pair);
    lost = pieces(&pair, KVT_OP_WRITE, 1);
    fake.script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, lost);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 5);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    assert_int_equal(close_side(&pair.a), KVT_EBUSY);
    free(lost);
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free_peer(&pair.peer);
}

static void another_incarnation_ends_the_old_connections(void **state)
{
    struct pair pair;
    struct peer newer;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    pair.b.env.incarnation[0] ^= 1;
    load_peer(&pair.a, &pair.b, &newer);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    chunk->conn = newer.conn;
    chunk->outcome = (struct kvti_outcome){.state = KVT_DONE};
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    /* The old one's unload must not take the new one away. */
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    unload_peer(&pair.a, &newer);
    wait_for_lines("invalidate beta", 2);
    free_peer(&newer);
    close_pair(&pair, KVT_OK);
}

static void one_incarnation_is_shared_and_counted(void **state)
{
    struct pair pair;
    struct peer second;

    (void)state;
    open_pair(&pair);
    load_peer(&pair.a, &pair.b, &second);
    assert_int_equal(fake.count_lines("invalidate"), 0);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(fake.count_lines("invalidate"), 0);
    unload_peer(&pair.a, &second);
    wait_for_lines("invalidate beta", 1); /* it lingers for a while */
    free_peer(&second);
    close_pair(&pair, KVT_OK);
}

static void older_metadata_takes_nothing_from_the_others(void **state)
{
    struct kvti_mem more;
    struct kvti_chunk *chunk;
    struct pair pair;
    struct peer grown;

    (void)state;
    open_pair(&pair);
    more = (struct kvti_mem){.addr = number(pair.b.data) + BYTES,
                             .length = 8192};
    add_mem(&pair.b, &more);
    export_side(&pair.b, &grown);
    assert_int_equal(load_again(&pair.a, &grown, &grown), KVT_OK);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    chunk->conn = grown.conn;
    for (uint32_t i = 0; i < chunk->count; i++) {
        chunk->copies[i].peer += BYTES;
    }
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    free(chunk);
    assert_int_equal(fake.count_lines("invalidate"), 0);
    free_peer(&grown);
    close_pair(&pair, KVT_OK);
}

/* NIXL would go on with the old key. */
static void another_key_for_the_same_memory_is_loaded_afresh(void **state)
{
    struct pair pair;
    struct peer newer;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &newer);
    /* The last byte of the last region's key; the separator follows. */
    assert_ptr_equal(newer.md.prefix, newer.blob.data);
    newer.blob.data[newer.md.prefix_length - 2] ^= 1;
    assert_int_equal(load_again(&pair.a, &newer, &newer), KVT_OK);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    free_peer(&newer);
    close_pair(&pair, KVT_OK);
}

/* NIXL forgets all of the agent when it cannot take a blob of it. */
static void a_load_that_fails_is_told_to_the_others(void **state)
{
    struct pair pair;
    struct peer second;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &second);
    fake.script("load", NIXL_BACKEND, 1);
    assert_int_equal(load_again(&pair.a, &second, &second), KVT_EENGINE);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(fake.count_lines("invalidate beta"), 1);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    free_peer(&second);
    close_pair(&pair, KVT_OK);
}

/* Nine chunks: a round of the NIXL thread posts eight, and while the ninth
 * waits nothing is confirmed. So the eighth has landed, and is not confirmed,
 * when its peer is unloaded and twice loaded, the first time in vain. */
static void what_landed_is_not_confirmed_by_another_agent(void **state)
{
    enum { CHUNKS = 9 };
    struct kvti_job unload = fake_job(KVTI_JOB_UNLOAD);
    struct kvti_job loads[2] = {fake_job(KVTI_JOB_LOAD),
                                fake_job(KVTI_JOB_LOAD)};
    struct kvti_chunk *chunks[CHUNKS];
    struct kvti_chunk *first;
    struct pair pair;

    (void)state;
    open_pair(&pair);
    fake.block("post", true);
    first = pieces(&pair, KVT_OP_WRITE, 1);
    fake_env_post(&pair.a.env, first);
    while (fake.waiting("post") == 0) {
        sched_yield();
    }
    for (size_t i = 0; i < CHUNKS; i++) {
        chunks[i] = pieces(&pair, KVT_OP_WRITE, 2);
        fake_env_post(&pair.a.env, chunks[i]);
    }
    (void)recorded(&pair, first);
    fake.block("create", true);
    fake.block("post", false);
    while (fake.waiting("create") == 0) {
        sched_yield();
    }
    fake.script("load", NIXL_BACKEND, 1);
    unload.conn = pair.peer.conn;
    fake_env_submit(&pair.a.env, &unload);
    for (size_t i = 0; i < 2; i++) {
        loads[i].md = &pair.peer.md;
        loads[i].link = &pair.peer;
        fake_env_submit(&pair.a.env, &loads[i]);
    }
    (void)recorded(&pair, first);
    fake.block("create", false);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &unload), KVT_OK);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &loads[0]), KVT_EENGINE);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &loads[1]), KVT_OK);
    for (size_t i = 0; i < 7; i++) {
        fake_env_wait_chunk(&pair.a.env, chunks[i]);
        assert_outcome(chunks[i], KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    }
    assert_parked(&pair, chunks[7], KVT_DISCONNECTED, KVT_EDISCONNECTED);
    fake_env_wait_chunk(&pair.a.env, chunks[8]);
    assert_outcome(chunks[8], KVT_DISCONNECTED, KVTI_FIN_BOTH,
                   KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    free(first);
    for (size_t i = 0; i < CHUNKS; i++) {
        free(chunks[i]);
    }
}

static void a_late_success_of_an_unloaded_peer_is_still_a_proof(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 6);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.block("status", true);
    fake_env_post(&pair.a.env, chunk);
    wait_for_lines("post", 1);
    fake.script("status", NIXL_IN_PROG, 40);
    fake.block("status", false);
    unload_peer(&pair.a, &pair.peer); /* the core gave the chunk up as lost */
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    wait_for_lines("invalidate beta", 1);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void metadata_that_nixl_cannot_use_is_refused(void **state)
{
    struct pair pair;
    struct peer bad;
    struct kvti_md md;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &bad);
    md = bad.md;
    bad.md.prefix_length = 0;
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EUNSUPPORTED);
    bad.md = md;
    bad.md.prefix_length--;
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EMETADATA);
    bad.md = md;
    kvti_format(bad.md.agent_name, sizeof bad.md.agent_name, "gamma");
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EMETADATA);
    assert_int_equal(fake.count_lines("load"), 1);
    bad.md = md;
    bad.md.incarnation[0] ^= 1;
    fake.script("load", NIXL_BACKEND, 1);
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EENGINE);
    bad.md = md;
    free_peer(&bad);
    close_pair(&pair, KVT_OK);
}

static void the_death_of_a_peer_on_this_host_is_a_proof(void **state)
{
    struct pair pair;
    struct peer child;
    struct kvti_chunk *chunk;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &child);
    pid = start_process(&child);
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    chunk->conn = child.conn;
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DOWN);
    assert_parked(&pair, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED);
    /* Lost and unloaded; its end still counts. */
    unload_peer(&pair.a, &child);
    assert_int_equal(kill(pid, SIGKILL), 0);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_int_equal(chunk->outcome.fin, KVTI_FIN_BOTH);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_EDISCONNECTED);
    free(chunk);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
}

static void a_peer_that_dies_idle_is_reported(void **state)
{
    struct pair pair;
    struct peer child;
    pid_t pid;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &child);
    pid = start_process(&child);
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_OK);
    assert_int_equal(kill(pid, SIGKILL), 0);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DEAD);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    unload_peer(&pair.a, &child);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
}

/* ------------------------------------------------------ connect, notify, end */

/* B47 */
static void a_warm_up_reads_one_byte(void **state)
{
    struct pair pair;
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    job.conn = pair.peer.conn;
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, 3);
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_OK);
    assert_line("create", 0, "create op=0 0>0 merge=0 n=1");
    close_pair(&pair, KVT_OK);
}

/* B47 */
static void a_warm_up_ends_by_its_deadline_or_with_its_peer(void **state)
{
    struct pair pair;
    struct kvti_job late = fake_job(KVTI_JOB_CONNECT);
    struct kvti_job open = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    fake.script("post", NIXL_IN_PROG, 2);
    fake.script("status", NIXL_IN_PROG, 1000000000);
    late.conn = pair.peer.conn;
    late.deadline_ns = 1;
    assert_int_equal(fake_env_job(&pair.a.env, &late), KVT_ETIMEDOUT);
    open.conn = pair.peer.conn;
    fake_env_submit(&pair.a.env, &open);
    unload_peer(&pair.a, &pair.peer);
    assert_true(fake_env_is_reported(&pair.a.env, &open));
    assert_int_equal(fake_env_wait_job(&pair.a.env, &open), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static void a_warm_up_that_fails_breaks_the_link(void **state)
{
    struct pair pair;
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    job.conn = pair.peer.conn;
    fake.script("post", NIXL_BACKEND, 1);
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_EDISCONNECTED);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    job = fake_job(KVTI_JOB_CONNECT);
    job.conn = pair.peer.conn;
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static int notify(struct pair *pair, const char *text)
{
    struct kvti_job job = fake_job(KVTI_JOB_NOTIFY);
    int code;

    job.conn = pair->peer.conn;
    assert_int_equal(kvti_buf_append(&job.buf, text, strlen(text)), KVT_OK);
    code = fake_env_job(&pair->a.env, &job);
    kvti_buf_fini(&job.buf);
    return code;
}

static void notifications_keep_their_order_and_none_is_lost(void **state)
{
    static const char *const words[] = {"one", "", "three", "four", "five"};
    struct pair pair;

    (void)state;
    open_pair(&pair);
    fake_env_want_notes(&pair.b.env, 2);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(notify(&pair, words[i]), KVT_OK);
    }
    fake_env_wait_notes(&pair.b.env, 2);
    fake_env_want_notes(&pair.b.env, 3);
    fake_env_wait_notes(&pair.b.env, 3);
    fake_env_want_notes(&pair.b.env, 100);
    fake_env_wait_notes(&pair.b.env, 5);
    for (size_t i = 0; i < 5; i++) {
        struct fake_note *note = fake_env_take_note(&pair.b.env);

        assert_string_equal(note->agent_name, "alpha");
        assert_int_equal(note->length, strlen(words[i]));
        assert_memory_equal(note->bytes, words[i], note->length);
        free(note);
    }
    close_pair(&pair, KVT_OK);
}

/* A sender whose name holds a NUL is one that NIXL names and does not find. */
static void messages_not_handed_out_come_later_or_are_left_out(void **state)
{
    static const char *const words[] = {"late", "next"};
    struct pair pair;
    int looks;

    (void)state;
    open_pair(&pair);
    fake_env_want_notes(&pair.b.env, 100);
    fake.script("sender", NIXL_BACKEND, 1);
    assert_int_equal(notify(&pair, "late"), KVT_OK);
    fake_env_wait_notes(&pair.b.env, 1);
    looks = fake.count_lines("sender");
    fake.script("sender", NIXL_INVALID_PARAM, 1);
    assert_int_equal(notify(&pair, "never"), KVT_OK);
    wait_for_lines("sender", looks + 1);
    assert_int_equal(notify(&pair, "next"), KVT_OK);
    fake_env_wait_notes(&pair.b.env, 2);
    for (size_t i = 0; i < 2; i++) {
        struct fake_note *note = fake_env_take_note(&pair.b.env);

        assert_int_equal(note->length, strlen(words[i]));
        assert_memory_equal(note->bytes, words[i], note->length);
        free(note);
    }
    close_pair(&pair, KVT_OK);
}

static void a_notification_that_fails_says_so(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    fake.script("notif", NIXL_INVALID_PARAM, 1);
    assert_int_equal(notify(&pair, "x"), KVT_EENGINE);
    assert_int_equal(notify(&pair, "x"), KVT_OK);
    fake.script("notif", NIXL_BACKEND, 1);
    assert_int_equal(notify(&pair, "x"), KVT_EDISCONNECTED);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(notify(&pair, "x"), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static void plain_nixl_metadata_is_read_by_its_structure(void **state)
{
    struct pair pair;
    struct kvti_md md;
    struct kvt_error err;
    uint8_t *bytes;
    size_t length;

    (void)state;
    open_pair(&pair);
    length = pair.peer.md.prefix_length;
    bytes = malloc(length + 1);
    assert_non_null(bytes);
    memcpy(bytes, pair.peer.md.prefix, length);
    bytes[length] = 0;
    assert_int_equal(kvti_md_decode(bytes, length, 16, &md, &err), KVT_OK);
    assert_false(md.has_trailer);
    assert_false(md.has_local);
    assert_string_equal(md.agent_name, "beta");
    assert_string_equal(md.engine, "nixl");
    assert_true(kvti_regions_cover(&md.regions, number(pair.b.data), BYTES,
                                   KVT_DRAM, 0));
    kvti_md_fini(&md);
    for (size_t i = 0; i < length; i++) {
        assert_int_equal(kvti_md_decode(bytes, i, 16, &md, &err),
                         KVT_EMETADATA);
    }
    assert_int_equal(kvti_md_decode(bytes, length + 1, 16, &md, &err),
                     KVT_EMETADATA);
    assert_int_equal(kvti_md_decode(bytes, length, 1, &md, &err),
                     KVT_EMETADATA);
    free(bytes);
    close_pair(&pair, KVT_OK);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(
            a_broken_link_is_invalidated_before_it_is_loaded_again),
        cmocka_unit_test(another_incarnation_ends_the_old_connections),
        cmocka_unit_test(one_incarnation_is_shared_and_counted),
        cmocka_unit_test(older_metadata_takes_nothing_from_the_others),
        cmocka_unit_test(another_key_for_the_same_memory_is_loaded_afresh),
        cmocka_unit_test(a_load_that_fails_is_told_to_the_others),
        cmocka_unit_test(what_landed_is_not_confirmed_by_another_agent),
        cmocka_unit_test(a_late_success_of_an_unloaded_peer_is_still_a_proof),
        cmocka_unit_test(metadata_that_nixl_cannot_use_is_refused),
        cmocka_unit_test(the_death_of_a_peer_on_this_host_is_a_proof),
        cmocka_unit_test(a_peer_that_dies_idle_is_reported),
        cmocka_unit_test(a_warm_up_reads_one_byte),
        cmocka_unit_test(a_warm_up_ends_by_its_deadline_or_with_its_peer),
        cmocka_unit_test(a_warm_up_that_fails_breaks_the_link),
        cmocka_unit_test(notifications_keep_their_order_and_none_is_lost),
        cmocka_unit_test(messages_not_handed_out_come_later_or_are_left_out),
        cmocka_unit_test(a_notification_that_fails_says_so),
        cmocka_unit_test(plain_nixl_metadata_is_read_by_its_structure),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
