/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything at once, for the sanitizers: two threads start, cancel, release
 * and ask for transfers, one polls, two add, reload, unload, remove and declare
 * dead the same four peers, one replaces the rules of the fault engine. What
 * is proved: no report of a sanitizer, nothing in flight after close, and as
 * many completions counted as transfers accepted.
 *
 * Bounded by rounds, not by time. The seed is printed; interleavings are the
 * machine's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <kvt/kvt.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "kvt_assert.h"

#define BLOCKS 256u
#define BLOCK_BYTES 512u
#define PEERS 4u
#define BATCH 8u
#define LIST 32u
#define WRITER_ROUNDS 4000
#define CHURN_ROUNDS 3000
#define RULE_ROUNDS 1000
#define CALL_NS UINT64_C(200000000)

static char source[BLOCKS * BLOCK_BYTES];
static char target[BLOCKS * BLOCK_BYTES];

static struct {
    kvt_transport *source;
    kvt_transport *target;
    kvt_layout own;
    _Atomic kvt_peer peers[PEERS];
    unsigned char metadata[4096];
    size_t metadata_length;
    atomic_bool stop;
    atomic_uint refused_rules;
} all;

struct thread {
    pthread_t thread;
    uint64_t seed;
};

static uint32_t next_random(uint64_t *seed)
{
    *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

static uint32_t below(uint64_t *seed, uint32_t limit)
{
    return next_random(seed) % limit;
}

/* poll(2) with nothing to wait for: gives the others a turn. */
static void pause_a_little(void)
{
    (void)poll(NULL, 0, 1);
}

static struct kvt_run whole(const char *memory)
{
    return (struct kvt_run){.addr = (uint64_t)(uintptr_t)memory,
                            .block_bytes = BLOCK_BYTES,
                            .stride_bytes = BLOCK_BYTES,
                            .count = BLOCKS};
}

static bool layout_of(kvt_peer peer, kvt_layout *ret)
{
    struct kvt_run run = whole(target);

    return kvt_layout_find(all.source, peer, "kv", ret) == KVT_OK ||
           kvt_prepare(all.source, peer, "kv", &run, 1, ret, NULL) == KVT_OK;
}

static int start_one(kvt_peer peer, kvt_layout layout, uint64_t *seed,
                     kvt_xfer *ret)
{
    uint32_t own[LIST];
    uint32_t theirs[LIST];
    struct kvt_indices from = {own, LIST, KVT_INDEX_U32, 0};
    struct kvt_indices to = {theirs, LIST, KVT_INDEX_U32, 0};
    struct kvt_xfer_options options = {
        .size = sizeof options,
        .timeout_ns = below(seed, 3) == 0 ? 1000000 : 0,
        .tag = below(seed, KVT_TAG_MAX + 1),
        .note = below(seed, 8) == 0 ? "" : NULL,
    };

    for (uint32_t i = 0; i < LIST; i++) {
        own[i] = below(seed, BLOCKS);
        theirs[i] = below(seed, BLOCKS);
    }
    return kvt_write_blocks(all.source, peer, all.own, &from, layout, &to,
                            &options, ret, NULL);
}

static void end_some(kvt_xfer *ids, size_t count, uint64_t *seed)
{
    struct kvt_result result;

    switch (below(seed, 6)) {
    case 0:
        (void)kvt_cancel(all.source, ids, count, KVT_CANCEL_WAIT, ids);
        break;
    case 1:
        (void)kvt_cancel(all.source, ids, count, KVT_CANCEL_IMMEDIATE, NULL);
        break;
    case 2:
        for (size_t i = 0; i < count; i++) {
            (void)kvt_release(all.source, ids[i]);
        }
        break;
    case 3:
        for (size_t i = 0; i < count; i++) {
            (void)kvt_status(all.source, ids[i], &result);
        }
        break;
    default:
        break; /* the poller will see them */
    }
}

static void *write_all(void *arg)
{
    uint64_t seed = ((struct thread *)arg)->seed;

    for (int round = 0; round < WRITER_ROUNDS; round++) {
        kvt_peer peer = all.peers[below(&seed, PEERS)];
        kvt_xfer ids[BATCH];
        size_t count = 0;
        kvt_layout layout;

        if (!layout_of(peer, &layout)) {
            pause_a_little();
            continue;
        }
        for (unsigned i = 0; i < BATCH; i++) {
            count += start_one(peer, layout, &seed, &ids[count]) == KVT_OK;
        }
        end_some(ids, count, &seed);
    }
    return NULL;
}

static void *poll_all(void *arg)
{
    struct kvt_result results[64];
    struct kvt_notification note;

    (void)arg;
    while (!all.stop) {
        int count = kvt_poll(all.source, KVT_ANY, results, 64);

        for (unsigned i = 0; i < PEERS; i++) {
            count += kvt_poll(all.source, all.peers[i], results, 8);
        }
        while (kvt_notification(all.target, &note, NULL, 0) == 1) {
            count++;
        }
        if (count == 0) {
            pause_a_little();
        }
    }
    return NULL;
}

static void change_peer(unsigned index, uint64_t *seed)
{
    char name[8];
    struct kvt_peer_params params = {
        .size = sizeof params,
        .name = name,
        .metadata = all.metadata,
        .metadata_length = all.metadata_length,
        .timeout_ns = CALL_NS,
    };
    kvt_peer peer = all.peers[index];
    struct kvt_peer_info info;
    kvt_xfer xfer;

    (void)snprintf(name, sizeof name, "p%u", index);
    switch (below(seed, 8)) {
    case 0:
        if (kvt_peer_add(all.source, &params, &peer, NULL) == KVT_OK) {
            all.peers[index] = peer;
        }
        break;
    case 1:
        if (kvt_peer_add_async(all.source, &params, &peer, &xfer, NULL) ==
            KVT_OK) {
            all.peers[index] = peer;
        }
        break;
    case 2:
        (void)kvt_peer_reload(all.source, peer, NULL, 0, CALL_NS, NULL);
        break;
    case 3:
        (void)kvt_peer_reload(all.source, peer, all.metadata,
                              all.metadata_length, CALL_NS, NULL);
        break;
    case 4:
        (void)kvt_peer_unload(all.source, peer, CALL_NS, NULL);
        break;
    case 5:
        (void)kvt_peer_remove(all.source, peer);
        break;
    case 6:
        (void)kvt_peer_confirm_dead(all.source, peer);
        break;
    default:
        (void)kvt_peer_info(all.source, peer, &info);
        (void)kvt_notify(all.source, peer, "", 0, NULL);
        (void)kvt_warm_up(all.source, peer, NULL, &xfer, NULL);
        break;
    }
}

static void *churn_all(void *arg)
{
    uint64_t seed = ((struct thread *)arg)->seed;

    for (int round = 0; round < CHURN_ROUNDS; round++) {
        change_peer(below(&seed, PEERS), &seed);
    }
    return NULL;
}

static void *misbehave(void *arg)
{
    static const char *const rules[] = {
        "",         "reject=3;7",     "fail=2-5",      "hang=1-4",
        "hold=2-9", "unreadable=1",   "disconnect=5",  "dead=9",
        "delay=1",  "load_fail=1",    "notify_fail=1", "half=1-3",
        "inline",   "unload_delay=1", "load_delay=2",  "peer_down=6",
    };
    uint64_t seed = ((struct thread *)arg)->seed;

    for (int round = 0; round < RULE_ROUNDS; round++) {
        uint32_t rule = below(&seed, sizeof rules / sizeof rules[0]);

        all.refused_rules += kvt_fault(all.source, rules[rule], NULL) != KVT_OK;
        pause_a_little();
    }
    (void)kvt_fault(all.source, "", NULL);
    return NULL;
}

static void set_up_all(const char *engine)
{
    struct kvt_options options = {.size = sizeof options,
                                  .engine = engine,
                                  .grace_ns = 20000000,
                                  .inflight_max = 1024};
    struct kvt_region own = {.addr = (uint64_t)(uintptr_t)source,
                             .length = sizeof source};
    struct kvt_region theirs = {.addr = (uint64_t)(uintptr_t)target,
                                .length = sizeof target};
    struct kvt_run run = whole(source);

    all.stop = false;
    assert_kvt_ok(kvt_open(&options, &all.source, ERR));
    options.engine = "local";
    assert_kvt_ok(kvt_open(&options, &all.target, ERR));
    assert_kvt_ok(kvt_register(all.source, &own, 1, 0, ERR));
    assert_kvt_ok(kvt_register(all.target, &theirs, 1, 0, ERR));
    assert_kvt_ok(kvt_metadata(all.target, all.metadata, sizeof all.metadata,
                               &all.metadata_length, ERR));
    assert_kvt_ok(
        kvt_prepare(all.source, KVT_SELF, "kv", &run, 1, &all.own, ERR));
    assert_true(kvt_fd(all.source) >= 0);
}

static void run_all(const char *engine)
{
    void *(*const bodies[])(void *) = {write_all, write_all, churn_all,
                                       churn_all, misbehave};
    struct thread threads[5];
    struct thread poller = {0};
    struct kvt_stats stats;
    size_t count = strcmp(engine, "local") == 0 ? 4 : 5;

    set_up_all(engine);
    pthread_create(&poller.thread, NULL, poll_all, &poller);
    for (size_t i = 0; i < count; i++) {
        threads[i].seed = 20261129 + i;
        pthread_create(&threads[i].thread, NULL, bodies[i], &threads[i]);
    }
    for (size_t i = 0; i < count; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    all.stop = true;
    pthread_join(poller.thread, NULL);
    assert_kvt_ok(kvt_close(all.source, 0, ERR));
    assert_kvt_ok(kvt_stats(all.source, &stats, sizeof stats));
    assert_int_equal(all.refused_rules, 0);
    assert_int_equal(stats.inflight, 0);
    assert_int_equal(stats.quarantined, 0);
    assert_int_equal(stats.peers, 0);
    assert_int_equal(stats.peers_loaded, 0);
    assert_int_equal(stats.accepted, stats.done + stats.rejected +
                                         stats.failed + stats.disconnected +
                                         stats.cancelled + stats.timed_out +
                                         stats.lost);
    kvt_free(all.source);
    kvt_free(all.target);
}

/* B49 */
static void churn_on_local_leaves_nothing(void **state)
{
    (void)state;
    run_all("local");
}

static void churn_with_faults_leaves_nothing(void **state)
{
    (void)state;
    run_all("fault:local?chunk_copies=4,window=2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(churn_on_local_leaves_nothing),
        cmocka_unit_test(churn_with_faults_leaves_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
