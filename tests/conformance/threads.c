/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every call from any thread: four threads write, poll, cancel and release on
 * one peer while one adds and removes peers with work of their own and one
 * asks for everything that can be asked. Bounded by a number of rounds, and
 * exact in the end: each accepted transfer is reported once, or never when it
 * was cancelled before it was heard of. The thread sanitizer watches.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "suite.h"

enum { WORKERS = 4, ROUNDS_MAX = 4000, OWN_BLOCKS = 15 };

/* Of one accepted transfer; user_data leads to it. */
struct fate {
    atomic_uint reported;
    bool may_be_silent; /* its thread cancelled or released it */
};

struct arena {
    struct pair pair;
    struct kvt_run run; /* of the peer's pool */
    void *metadata;
    size_t length;
    uint32_t rounds;
    atomic_uint failures; /* calls with a code nobody expects */
    atomic_uint accepted;
    atomic_bool stop;
    struct fate fates[(WORKERS + 1) * ROUNDS_MAX];
};

struct worker {
    struct arena *arena;
    uint32_t number;
    uint64_t seed;
    uint32_t accepted;
};

static void expect(struct arena *arena, bool good)
{
    if (!good) {
        atomic_fetch_add(&arena->failures, 1);
    }
}

static void take_results(struct arena *arena, kvt_peer peer)
{
    struct kvt_result results[8];
    int count = kvt_poll(arena->pair.a.t, peer, results, 8);

    expect(arena, count >= 0);
    for (int i = 0; i < count; i++) {
        expect(arena, (results[i].flags & KVT_QUIESCENT) != 0);
        expect(arena, results[i].state == KVT_DONE ||
                          results[i].state == KVT_CANCELLED);
        atomic_fetch_add(&arena->fates[results[i].user_data].reported, 1);
    }
}

static bool write_from(struct worker *worker, kvt_peer peer, kvt_layout layout,
                       uint32_t block, kvt_xfer *ret_id)
{
    struct arena *arena = worker->arena;
    uint32_t slot = worker->number * ROUNDS_MAX + worker->accepted;
    struct kvt_xfer_options options = {
        .size = sizeof options, .user_data = slot, .tag = worker->number};
    struct kvt_indices indices = indices_u32(&block, 1);
    int code = kvt_write_blocks(arena->pair.a.t, peer, arena->pair.a.layout,
                                &indices, layout, &indices, &options, ret_id,
                                NULL);

    if (code == KVT_OK) {
        worker->accepted++;
        atomic_fetch_add(&arena->accepted, 1);
    }
    expect(arena, code == KVT_OK || code == KVT_EAGAIN);
    return code == KVT_OK;
}

static void end_early(struct worker *worker, kvt_xfer id)
{
    struct arena *arena = worker->arena;
    struct fate *fate =
        &arena->fates[worker->number * ROUNDS_MAX + worker->accepted - 1];
    int code;

    switch (test_random(&worker->seed) % 4) {
    case 0:
        fate->may_be_silent = true;
        expect(arena, kvt_cancel(arena->pair.a.t, &id, 1, KVT_CANCEL_IMMEDIATE,
                                 NULL) == 0);
        break;
    case 1:
        code = kvt_cancel(arena->pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL);
        expect(arena, code == 0 || code == 1);
        fate->may_be_silent = code == 0;
        break;
    case 2:
        fate->may_be_silent = true;
        code = kvt_release(arena->pair.a.t, id);
        expect(arena, code == KVT_OK || code == KVT_ENOENT);
        break;
    default:
        break;
    }
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    struct arena *arena = worker->arena;

    for (uint32_t i = 0; i < arena->rounds; i++) {
        uint32_t block = worker->number * OWN_BLOCKS +
                         (uint32_t)(test_random(&worker->seed) % OWN_BLOCKS);
        struct kvt_result result;
        kvt_xfer id;
        int code;

        if (write_from(worker, arena->pair.peer, arena->pair.remote, block,
                       &id)) {
            code = kvt_status(arena->pair.a.t, id, &result);
            expect(arena, code == KVT_OK || code == KVT_ENOENT);
            end_early(worker, id);
        }
        take_results(arena, i % 3 == 0 ? KVT_ANY : arena->pair.peer);
    }
    return NULL;
}

/* Peers that come, get one block, and go, whatever has become of it. */
static void *churn(void *arg)
{
    struct worker *worker = arg;
    struct arena *arena = worker->arena;
    kvt_transport *t = arena->pair.a.t;

    for (uint32_t i = 0; i < arena->rounds / 4; i++) {
        struct kvt_peer_params params = {.size = sizeof params,
                                         .name = i % 2 == 0 ? "one" : "two",
                                         .metadata = arena->metadata,
                                         .metadata_length = arena->length};
        kvt_layout layout;
        kvt_peer peer;
        kvt_xfer id;

        expect(arena, kvt_peer_add(t, &params, &peer, NULL) == KVT_OK);
        expect(arena, kvt_prepare(t, peer, "pool", &arena->run, 1, &layout,
                                  NULL) == KVT_OK);
        (void)write_from(worker, peer, layout, WORKERS * OWN_BLOCKS, &id);
        if (i % 3 != 0) {
            expect(arena, kvt_peer_remove(t, peer) == KVT_OK);
        }
        take_results(arena, peer);
    }
    return NULL;
}

static void *ask(void *arg)
{
    struct worker *worker = arg;
    struct arena *arena = worker->arena;
    kvt_transport *t = arena->pair.a.t;
    struct kvt_stats stats;
    struct kvt_peer_info info;
    size_t capacity = 1 << 20;
    char *bytes = malloc(capacity);
    size_t length;

    while (bytes != NULL && !atomic_load(&arena->stop)) {
        expect(arena,
               kvt_metadata(t, bytes, capacity, &length, NULL) == KVT_OK);
        expect(arena, kvt_stats(t, &stats, sizeof stats) == KVT_OK);
        expect(arena, kvt_metrics(t, bytes, capacity, &length) == KVT_OK);
        expect(arena, kvt_peer_info(t, arena->pair.peer, &info) == KVT_OK);
        expect(arena, kvt_peer_loaded(t, arena->pair.peer) == 1);
        expect(arena, kvt_fd(t) >= 0);
    }
    free(bytes);
    return NULL;
}

static void check_fates(const struct arena *arena, const struct worker *workers)
{
    for (uint32_t w = 0; w < WORKERS + 1; w++) {
        for (uint32_t i = 0; i < workers[w].accepted; i++) {
            const struct fate *fate = &arena->fates[w * ROUNDS_MAX + i];
            unsigned reported = atomic_load(&fate->reported);

            if (reported > 1 || (reported == 0 && !fate->may_be_silent)) {
                fail_msg("transfer %u of thread %u was reported %u times", i, w,
                         reported);
            }
        }
    }
}

static void check_counters(struct arena *arena)
{
    struct kvt_stats stats = stats_of(arena->pair.a.t);

    assert_int_equal(stats.inflight, 0);
    assert_int_equal(stats.undrained, 0);
    assert_int_equal(stats.lost, 0);
    assert_int_equal(stats.failed, 0);
    assert_int_equal(stats.accepted, atomic_load(&arena->accepted));
    assert_int_equal(stats.accepted, stats.done + stats.cancelled);
}

/* Every block once more, so that each must be the source's. */
static void check_bytes(struct arena *arena)
{
    uint32_t all[64];

    for (uint32_t i = 0; i < 64; i++) {
        all[i] = i;
    }
    pair_expect(&arena->pair, all, all, 64);
    (void)wait_done(arena->pair.a.t,
                    pair_write(&arena->pair, all, all, 64, NULL));
    pair_check(&arena->pair);
}

/* B34 */
static void every_transfer_ends_once_whoever_calls_what(void **state)
{
    static struct arena arena;
    struct worker workers[WORKERS + 2];
    pthread_t threads[WORKERS + 2];

    (void)state;
    memset(&arena, 0, sizeof arena);
    arena.rounds = suite.slow ? 500 : ROUNDS_MAX;
    suite_pair(&arena.pair, NULL);
    arena.run = pool_run(&arena.pair.b.pool);
    arena.metadata = node_metadata(&arena.pair.b, &arena.length);
    for (uint32_t i = 0; i < WORKERS + 2; i++) {
        workers[i] = (struct worker){
            .arena = &arena, .number = i, .seed = suite_seed()};
        assert_int_equal(pthread_create(&threads[i], NULL,
                                        i < WORKERS    ? work
                                        : i == WORKERS ? churn
                                                       : ask,
                                        &workers[i]),
                         0);
    }
    for (uint32_t i = 0; i < WORKERS + 1; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    atomic_store(&arena.stop, true);
    assert_int_equal(pthread_join(threads[WORKERS + 1], NULL), 0);
    assert_soon(stats_of(arena.pair.a.t).inflight == 0);
    while (stats_of(arena.pair.a.t).undrained > 0) {
        take_results(&arena, KVT_ANY);
    }
    assert_int_equal(atomic_load(&arena.failures), 0);
    check_fates(&arena, workers);
    check_counters(&arena);
    check_bytes(&arena);
    free(arena.metadata);
    pair_close(&arena.pair);
}

/* Writers run into the close from all sides. */
static void *write_until_closed(void *arg)
{
    struct worker *worker = arg;
    struct arena *arena = worker->arena;
    uint32_t block = worker->number;
    struct kvt_indices indices = indices_u32(&block, 1);
    int code;

    do {
        struct kvt_result results[16];
        kvt_xfer id;

        code = kvt_write_blocks(arena->pair.a.t, arena->pair.peer,
                                arena->pair.a.layout, &indices,
                                arena->pair.remote, &indices, NULL, &id, NULL);
        if (code == KVT_OK) {
            atomic_fetch_add(&arena->accepted, 1);
        }
        code = code == KVT_EAGAIN ? KVT_OK : code;
        atomic_fetch_add(
            &arena->fates[0].reported,
            (unsigned)kvt_poll(arena->pair.a.t, KVT_ANY, results, 16));
    } while (code == KVT_OK);
    expect(arena, code == KVT_ECLOSED || code == KVT_ENOENT);
    return NULL;
}

/* B34 */
static void close_under_writers_ends_every_transfer_once(void **state)
{
    int rounds = suite.slow || suite.agent ? 5 : 20;

    (void)state;
    for (int round = 0; round < rounds; round++) {
        static struct arena arena;
        struct worker workers[WORKERS];
        pthread_t threads[WORKERS];
        struct kvt_result results[16];
        unsigned reported;
        int got;

        memset(&arena, 0, sizeof arena);
        suite_pair(&arena.pair, NULL);
        for (uint32_t i = 0; i < WORKERS; i++) {
            workers[i] = (struct worker){.arena = &arena, .number = i};
            assert_int_equal(pthread_create(&threads[i], NULL,
                                            write_until_closed, &workers[i]),
                             0);
        }
        assert_soon(atomic_load(&arena.accepted) > 50);
        assert_kvt_ok(kvt_close(arena.pair.a.t, 0, ERR));
        for (uint32_t i = 0; i < WORKERS; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
        }
        reported = atomic_load(&arena.fates[0].reported);
        while ((got = kvt_poll(arena.pair.a.t, KVT_ANY, results, 16)) > 0) {
            reported += (unsigned)got;
        }
        assert_int_equal(atomic_load(&arena.failures), 0);
        assert_int_equal(reported, atomic_load(&arena.accepted));
        assert_int_equal(stats_of(arena.pair.a.t).inflight, 0);
        pair_close(&arena.pair);
    }
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(every_transfer_ends_once_whoever_calls_what),
    cmocka_unit_test(close_under_writers_ends_every_transfer_once),
};

const struct test_group threads_group = TEST_GROUP("threads", cases);
