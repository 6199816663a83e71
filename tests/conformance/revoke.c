/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory taken back by its owner while others write it: no byte lands after
 * deregister or close has said so, the writer hears why, and nothing is lost.
 * The owner marks its blocks after the answer and looks at every byte in the
 * end. NIXL can neither shut a writer out nor tell it.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

#define NO_GATE "NIXL cannot shut a writer out of memory"

static void a_writer_hears_that_memory_was_taken_back(void **state)
{
    struct kvt_region region;
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    need_local(NO_GATE);
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    pair_expect(&pair, (uint32_t[]){0}, (uint32_t[]){0}, 1);
    region = pool_region(&pair.b.pool);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    id = pair_write_one(&pair, 1, 1, NULL);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.code, KVT_ESTALE);
    assert_int_not_equal(result.state, KVT_DONE);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_int_equal(result.bytes_done, 0);
    /* Only that memory: the peer itself is well. */
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    pair_check(&pair);
    pair_close(&pair);
}

static void memory_given_again_needs_a_new_import(void **state)
{
    struct kvt_region region;
    struct pair pair;
    size_t length;
    void *metadata;

    (void)state;
    need_local(NO_GATE);
    suite_pair(&pair, NULL);
    region = pool_region(&pair.b.pool);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    assert_kvt_ok(kvt_register(pair.b.t, &region, 1, 0, ERR));
    assert_int_equal(
        wait_xfer(pair.a.t, pair_write_one(&pair, 1, 1, NULL)).code,
        KVT_ESTALE);
    metadata = node_metadata(&pair.b, &length);
    assert_kvt_ok(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR));
    free(metadata);
    pair_expect(&pair, (uint32_t[]){1}, (uint32_t[]){1}, 1);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 1, 1, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

static void other_memory_stays_open(void **state)
{
    struct kvt_region region;
    struct kvt_run run;
    struct pair pair;
    struct pool more;
    kvt_layout ours;
    kvt_layout theirs;
    size_t length;
    void *metadata;
    uint32_t block = 3;
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    pool_open(&more, &(struct pool_shape){0}, suite_seed());
    region = pool_region(&more);
    assert_kvt_ok(kvt_register(pair.b.t, &region, 1, 0, ERR));
    metadata = node_metadata(&pair.b, &length);
    assert_kvt_ok(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR));
    free(metadata);
    run = pool_run(&more);
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "more", &run, 1, &theirs, ERR));
    region = pool_region(&pair.b.pool);
    assert_kvt_ok(kvt_deregister(pair.b.t, &region, 1, 0, ERR));
    ours = pair.a.layout;
    pool_expect(&more, 3, &pair.a.pool, 3);
    assert_kvt_ok(kvt_write_blocks(pair.a.t, pair.peer, ours, &indices, theirs,
                                   &indices, NULL, &id, ERR));
    (void)wait_done(pair.a.t, id);
    pool_check(&more, "more");
    pair_check(&pair);
    pair_close(&pair);
    pool_close(&more);
}

/* NIXL cannot know what became of it while the other process lives. */
static void assert_ended_by_the_close(const struct kvt_result *result)
{
    assert_int_equal(result->bytes_done, 0);
    if (suite.nixl) {
        assert_int_equal(result->state, KVT_LOST);
        assert_int_equal(result->code, KVT_ELOST);
        assert_int_equal(result->flags & KVT_QUIESCENT, 0);
    } else {
        assert_int_equal(result->state, KVT_DISCONNECTED);
        assert_int_equal(result->code, KVT_EDISCONNECTED);
        assert_true((result->flags & KVT_QUIESCENT) != 0);
    }
}

static void a_write_to_a_closed_transport_is_disconnected(void **state)
{
    struct kvt_indices indices;
    struct kvt_result result;
    uint32_t block = 1;
    struct pair pair;
    kvt_xfer id;
    int code;

    (void)state;
    suite_pair_with_grace(&pair, NULL, 50 * MS);
    assert_kvt_ok(kvt_close(pair.b.t, 0, ERR));
    indices = indices_u32(&block, 1);
    code = kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout, &indices,
                            pair.remote, &indices, NULL, &id, NULL);
    if (code == KVT_OK) {
        result = wait_xfer(pair.a.t, id);
        assert_ended_by_the_close(&result);
        code = KVT_EDISCONNECTED;
    }
    assert_int_equal(code, KVT_EDISCONNECTED);
    assert_soon(!kvt_peer_loaded(pair.a.t, pair.peer));
    if (suite.nixl) {
        /* Not done, and yet it may have landed: the kernel's copy needs no
         * agent, and the link is found broken only afterwards. */
        pool_accept(&pair.b.pool, block);
        pair_check(&pair);
        suite_leak_pair(&pair);
        return;
    }
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------ two processes */

/* Eight requests' worth: some writer thread is nearly always in the middle of
 * one. */
enum { WRITERS_BLOCKS = 128 };

struct writers {
    struct node node; /* the target, here */
    struct child child;
    kvt_peer peer; /* the target, as the child knows it */
    kvt_layout layout;
};

static void writers_begin(struct writers *writers, bool shm)
{
    const struct pool_shape shape = {
        .block_bytes = 65536, .count = WRITERS_BLOCKS, .shm = shm};
    struct node_plan here = suite_plan(&shape);
    struct node_plan there = suite_plan(&shape);
    struct kvt_run run;
    size_t length;
    void *metadata;

    node_open(&writers->node, &here);
    child_begin(&writers->child, &there);
    metadata = node_metadata(&writers->node, &length);
    assert_kvt_ok(
        child_add(&writers->child, "target", metadata, length, &writers->peer));
    free(metadata);
    run = pool_run(&writers->node.pool);
    writers->layout = child_prepare(&writers->child, writers->peer, &run);
    child_write_on(&writers->child, writers->peer, writers->layout,
                   WRITERS_BLOCKS);
}

/* After the answer the memory is the owner's alone: it marks every block, and
 * a writer that is still at one of them would take the mark away. */
static void mark_blocks(struct pool *pool)
{
    for (uint64_t i = pool->shape.count; i-- > 0;) {
        *pool_block(pool, i) ^= 0xff;
    }
    pool_take(pool);
}

static void assert_marks_stay(struct writers *writers, int code_wanted,
                              int other_code)
{
    uint64_t rounds;
    bool quiescent;
    int code = child_written(&writers->child, &rounds, &quiescent);

    assert_true(rounds > 0);
    if (code != code_wanted && code != other_code) {
        fail_msg("the writer ended with %s", kvt_errname(code));
    }
    assert_true(quiescent);
    pool_check(&writers->node.pool, "target");
}

static void deregister_under_writes(bool shm)
{
    int rounds = suite.slow ? 3 : 10;

    need_local(NO_GATE);
    for (int i = 0; i < rounds; i++) {
        struct writers writers;
        struct kvt_region region;

        writers_begin(&writers, shm);
        region = pool_region(&writers.node.pool);
        assert_kvt_ok(kvt_deregister(writers.node.t, &region, 1, 0, ERR));
        mark_blocks(&writers.node.pool);
        assert_marks_stay(&writers, KVT_ESTALE, KVT_ESTALE);
        child_end(&writers.child);
        node_close(&writers.node);
    }
}

/* B09 */
static void deregister_shuts_out_another_process(void **state)
{
    (void)state;
    deregister_under_writes(false);
}

static void deregister_shuts_out_of_shared_memory_too(void **state)
{
    (void)state;
    deregister_under_writes(true);
}

static void close_shuts_out_another_process(void **state)
{
    int rounds = suite.slow ? 3 : 10;

    (void)state;
    need_local(NO_GATE);
    for (int i = 0; i < rounds; i++) {
        struct writers writers;

        writers_begin(&writers, false);
        assert_kvt_ok(kvt_close(writers.node.t, 0, ERR));
        mark_blocks(&writers.node.pool);
        assert_marks_stay(&writers, KVT_EDISCONNECTED, KVT_ESTALE);
        child_end(&writers.child);
        node_close(&writers.node);
    }
}

/* Stops the writer wherever it is; whether it could be shut out there. */
static bool shut_out_stopped(bool shm)
{
    struct writers writers;
    struct kvt_region region;
    int code;

    writers_begin(&writers, shm);
    region = pool_region(&writers.node.pool);
    child_stop(&writers.child);
    code = kvt_deregister(writers.node.t, &region, 1, 100 * MS, NULL);
    if (code == KVT_OK) {
        mark_blocks(&writers.node.pool);
        child_continue(&writers.child);
    } else {
        int again;

        /* On a slow machine it may go on in the background. */
        assert_true(code == KVT_EBUSY || code == KVT_ETIMEDOUT);
        child_continue(&writers.child);
        again = kvt_deregister(writers.node.t, &region, 1, 0, NULL);
        assert_true(again == KVT_OK ||
                    (code == KVT_ETIMEDOUT && again == KVT_ENOENT));
        mark_blocks(&writers.node.pool);
    }
    assert_marks_stay(&writers, KVT_ESTALE, KVT_ESTALE);
    child_end(&writers.child);
    node_close(&writers.node);
    return code == KVT_OK;
}

/*
 * A writer that is stopped in the middle of a chunk cannot be shut out: the
 * answer is then EBUSY, and the memory is shut to new writes already. Stopped
 * anywhere else it can be. Either way no byte lands after an OK. Into shared
 * memory the bytes go by instructions, which stop anywhere, else by system
 * calls, which are over before the process stops. Tried until both answers
 * were seen, for a number of rounds.
 */
static void a_stopped_writer_is_waited_for_or_shut_out(void **state)
{
    int rounds = suite.slow ? 10 : 60;
    int shut_out = 0;
    int busy = 0;

    (void)state;
    need_local(NO_GATE);
    for (int i = 0; i < rounds && (shut_out < 2 || busy < 3); i++) {
        if (shut_out_stopped(i % 4 != 0)) {
            shut_out++;
        } else {
            busy++;
        }
    }
}

/* B09 */
static void a_killed_writer_blocks_nobody(void **state)
{
    int rounds = suite.slow || suite.agent ? 3 : 10;

    (void)state;
    need_no_tcp("what a dead writer had sent over TCP may still be read");
    for (int i = 0; i < rounds; i++) {
        struct writers writers;
        struct kvt_region region;

        writers_begin(&writers, i % 2 == 0);
        region = pool_region(&writers.node.pool);
        child_kill(&writers.child);
        assert_kvt_ok(kvt_deregister(writers.node.t, &region, 1, 0, ERR));
        pool_fill(&writers.node.pool, suite_seed());
        pool_check(&writers.node.pool, "target");
        child_forget(&writers.child);
        node_close(&writers.node);
    }
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_writer_hears_that_memory_was_taken_back),
    cmocka_unit_test(memory_given_again_needs_a_new_import),
    cmocka_unit_test(other_memory_stays_open),
    cmocka_unit_test(a_write_to_a_closed_transport_is_disconnected),
    cmocka_unit_test(deregister_shuts_out_another_process),
    cmocka_unit_test(deregister_shuts_out_of_shared_memory_too),
    cmocka_unit_test(close_shuts_out_another_process),
    cmocka_unit_test(a_stopped_writer_is_waited_for_or_shut_out),
    cmocka_unit_test(a_killed_writer_blocks_nobody),
};

const struct test_group revoke_group = TEST_GROUP("revoke", cases);
