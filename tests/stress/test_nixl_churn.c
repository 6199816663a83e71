/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers to three processes over the real NIXL alone, while one of them at
 * a time is killed in the middle, killed when idle, reloaded, or removed and
 * added again, all by a seeded choice. A killed one starts anew under its name.
 *
 * Proved: no block holds anything but what it must (after a transfer that did
 * not end well on a peer that lives: what it had before, or what was written),
 * every transfer ends once and quiescent, nothing is lost, and descriptors,
 * threads and memory of this process do not grow.
 *
 * NIXL keeps the handle of each request that failed, since kvt may not release
 * it, and a little for each link that was made: memory is bounded by the number
 * of links. Descriptors are not given such room: NIXL would leak some for each
 * new link to a process that lives, which is why kvt keeps one that is sound.
 *
 * KVT_CHURN_TRANSFERS says how many transfers (600), KVT_CHURN_SEED how they
 * are chosen.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sanitizer.h"
#include "two_process.h"

#define PEERS 3u
#define BLOCKS 64u
#define BATCH 6u
#define LIST 10u

/* Connections may be in the making when they are counted. */
#define FDS_FREE 8
#define BYTES_FREE (4u << 20)
#define BYTES_PER_LINK (16u << 10)

static const struct pool_shape shape = {
    .block_bytes = 4096, .gap_bytes = 64, .count = BLOCKS};

enum event {
    EVENT_NONE,
    EVENT_KILL,
    EVENT_KILL_IDLE,
    EVENT_RELOAD,
    EVENT_ADD_AGAIN,
    EVENTS
};

struct target {
    struct child child;
    kvt_peer peer;
    kvt_layout layout;
    /* Of the round under way: which source block each block gets, or none. */
    int32_t source[BLOCKS];
    bool doubtful[BLOCKS]; /* may still be what it was */
    uint32_t started;
};

static struct {
    struct node a;
    struct target targets[PEERS];
    uint64_t random;
    uint64_t transfers;
    uint64_t done;
    uint64_t bytes;
    uint64_t events[EVENTS];
    uint64_t links;
} churn;

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(test_random(&churn.random) >> 32) % limit;
}

static uint64_t number_of(const char *variable, uint64_t usual)
{
    const char *text = getenv(variable);

    return text != NULL ? strtoull(text, NULL, 10) : usual;
}

/* ------------------------------------------------------------------- agents */

static struct node_plan make_plan(const char *name)
{
    struct node_plan plan = {.engine = "nixl",
                             .name = name,
                             .shape = shape,
                             .seed = test_random(&churn.random)};

    plan.options.flags = KVT_OPEN_NO_SAME_HOST;
    return plan;
}

static void name_of(const struct target *target, char name[8])
{
    (void)snprintf(name, 8, "p%u", (unsigned)(target - churn.targets));
}

static void prepare(struct target *target)
{
    struct kvt_run run = child_run(&target->child);

    assert_kvt_ok(kvt_prepare(churn.a.t, target->peer, "pool", &run, 1,
                              &target->layout, ERR));
}

static void add(struct target *target)
{
    char name[8];
    size_t length;
    void *metadata = child_metadata(&target->child, &length);

    name_of(target, name);
    target->peer = node_add(&churn.a, name, metadata, length);
    free(metadata);
    prepare(target);
    churn.links++;
}

static void start_target(struct target *target)
{
    struct node_plan plan;
    char name[8];

    name_of(target, name);
    plan = make_plan(name);
    child_begin(&target->child, &plan);
    add(target);
}

/* ---------------------------------------------------------------- transfers */

/* Blocks that nothing of this round writes yet. */
static uint32_t choose(struct target *target, uint32_t *local, uint32_t *remote)
{
    uint32_t want = 1 + below(LIST);
    uint32_t count = 0;

    for (uint32_t i = 0; i < want; i++) {
        uint32_t block = below(BLOCKS);

        if (target->source[block] < 0) {
            local[count] = below(BLOCKS);
            remote[count] = block;
            target->source[block] = (int32_t)local[count];
            count++;
        }
    }
    return count;
}

static void start_one(struct target *target)
{
    struct kvt_xfer_options options = {.size = sizeof options};
    uint32_t local[LIST];
    uint32_t remote[LIST];
    uint32_t count = choose(target, local, remote);
    struct kvt_indices ours = indices_u32(local, count);
    struct kvt_indices theirs = indices_u32(remote, count);
    uint64_t blocks = 0;
    kvt_xfer id;

    if (count == 0) {
        return;
    }
    assert_int_equal(BLOCKS, 64);
    for (uint32_t i = 0; i < count; i++) {
        blocks |= UINT64_C(1) << remote[i];
    }
    options.user_data = blocks;
    assert_kvt_ok(kvt_write_blocks(churn.a.t, target->peer, churn.a.layout,
                                   &ours, target->layout, &theirs, &options,
                                   &id, ERR));
    target->started++;
    churn.transfers++;
}

static void take_result(struct target *target, const struct kvt_result *result)
{
    assert_true((result->flags & KVT_QUIESCENT) != 0);
    assert_int_not_equal(result->state, KVT_LOST);
    if (result->state == KVT_DONE) {
        churn.done++;
        churn.bytes += result->bytes;
        return;
    }
    assert_string_not_equal(result->text, "");
    for (uint32_t i = 0; i < BLOCKS; i++) {
        target->doubtful[i] |= (result->user_data >> i & 1) != 0;
    }
}

static void wait_for(struct target *target, kvt_peer peer)
{
    while (target->started > 0) {
        struct kvt_result result;

        wait_results(churn.a.t, peer, &result, 1);
        take_result(target, &result);
        target->started--;
    }
}

/* What is there decides about the doubtful blocks, if it is one of two. */
static void check(struct target *target)
{
    struct pool *pool = &target->child.pool;
    const struct pool *ours = &churn.a.pool;

    child_fetch(&target->child);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        bool written = target->source[i] >= 0;

        if (written && target->doubtful[i]) {
            written = memcmp(pool_block(pool, i),
                             pool_block(ours, (uint64_t)target->source[i]),
                             shape.block_bytes) == 0;
        }
        if (written) {
            pool_expect(pool, i, ours, (uint64_t)target->source[i]);
        }
    }
    pool_check(pool, "a target");
}

/* ------------------------------------------------------------------- rounds */

static void begin_round(void)
{
    pool_fill(&churn.a.pool, test_random(&churn.random));
    for (uint32_t i = 0; i < PEERS; i++) {
        struct target *target = &churn.targets[i];
        uint32_t count = 1 + below(BATCH);

        for (uint32_t k = 0; k < BLOCKS; k++) {
            target->source[k] = -1;
            target->doubtful[k] = false;
        }
        for (uint32_t k = 0; k < count; k++) {
            start_one(target);
        }
    }
}

static void restart(struct target *target, kvt_peer old)
{
    wait_for(target, old);
    child_forget(&target->child);
    start_target(target);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        target->source[i] = -1;
    }
}

static void disturb(struct target *target, enum event event)
{
    kvt_peer old = target->peer;

    churn.events[event]++;
    switch (event) {
    case EVENT_KILL:
        child_kill(&target->child);
        restart(target, old);
        break;
    case EVENT_KILL_IDLE:
        wait_for(target, old);
        check(target);
        child_kill(&target->child);
        restart(target, old);
        break;
    case EVENT_RELOAD:
        assert_kvt_ok(kvt_peer_reload(churn.a.t, old, NULL, 0, 0, ERR));
        churn.links++;
        break;
    case EVENT_ADD_AGAIN:
        add(target);
        break;
    default:
        break;
    }
    wait_for(target, old);
}

static enum event next_event(void)
{
    static const uint32_t percent[EVENTS] = {
        [EVENT_KILL] = 12,
        [EVENT_KILL_IDLE] = 5,
        [EVENT_RELOAD] = 12,
        [EVENT_ADD_AGAIN] = 8,
    };
    uint32_t dice = below(100);

    for (uint32_t i = EVENT_KILL; i < EVENTS; i++) {
        if (dice < percent[i]) {
            return (enum event)i;
        }
        dice -= percent[i];
    }
    return EVENT_NONE;
}

static void run_round(void)
{
    struct target *victim = &churn.targets[below(PEERS)];
    enum event event = next_event();

    begin_round();
    disturb(victim, event);
    for (uint32_t i = 0; i < PEERS; i++) {
        wait_for(&churn.targets[i], churn.targets[i].peer);
        check(&churn.targets[i]);
    }
}

/* -------------------------------------------------------------------- growth */

struct size {
    struct usage usage;
    uint64_t resident;
    uint64_t links;
};

static struct size measure(void)
{
    struct size size = {.usage = usage_now(), .links = churn.links};
    FILE *file = fopen("/proc/self/statm", "re");
    unsigned long long pages = 0;

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*u %llu", &pages), 1);
    (void)fclose(file);
    size.resident = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return size;
}

static void tell(const char *what, const struct size *size)
{
    print_message("  %s: %llu transfers, %llu done, %ld descriptors, %ld "
                  "threads, %.1f MB resident, %.1f MB heap\n",
                  what, (unsigned long long)churn.transfers,
                  (unsigned long long)churn.done, size->usage.fds,
                  size->usage.threads, (double)size->resident / 1e6,
                  (double)size->usage.heap_bytes / 1e6);
}

static void assert_no_growth(const struct size *before,
                             const struct size *after)
{
    uint64_t links = after->links - before->links;

    assert_int_equal(after->usage.threads, before->usage.threads);
    assert_true(after->usage.fds <= before->usage.fds + FDS_FREE);
    /* Both keep what was freed. */
    if (!BUILT_WITH_ASAN && !BUILT_FOR_VALGRIND) {
        assert_true(after->resident <=
                    before->resident + BYTES_FREE + BYTES_PER_LINK * links);
    }
}

static void open_all(uint64_t seed)
{
    struct node_plan plan;

    churn.random = seed;
    plan = make_plan("a");
    node_open(&churn.a, &plan);
    for (uint32_t i = 0; i < PEERS; i++) {
        start_target(&churn.targets[i]);
    }
}

static void close_all(void)
{
    struct kvt_stats stats = stats_of(churn.a.t);

    assert_int_equal(stats.accepted, churn.transfers);
    assert_int_equal(stats.done, churn.done);
    assert_int_equal(stats.lost, 0);
    assert_int_equal(stats.inflight, 0);
    assert_int_equal(stats.bytes_local, 0);
    assert_true(stats.bytes_nixl >= churn.bytes);
    assert_int_equal(stats.peers, PEERS);
    node_close(&churn.a);
    for (uint32_t i = 0; i < PEERS; i++) {
        child_end(&churn.targets[i].child);
    }
}

/* B49 */
static void churn_writes_no_wrong_block_and_leaves_nothing(void **state)
{
    uint64_t total = number_of("KVT_CHURN_TRANSFERS", 600);
    uint64_t seed = number_of("KVT_CHURN_SEED", 20261129);
    struct size before;
    struct size after;

    (void)state;
    open_all(seed);
    while (churn.transfers < total / 5) {
        run_round();
    }
    before = measure();
    tell("after a fifth", &before);
    while (churn.transfers < total) {
        run_round();
    }
    after = measure();
    tell("at the end", &after);
    print_message("  seed %llu: %llu killed in the middle, %llu idle, %llu "
                  "reloaded, %llu added again, %llu links\n",
                  (unsigned long long)seed,
                  (unsigned long long)churn.events[EVENT_KILL],
                  (unsigned long long)churn.events[EVENT_KILL_IDLE],
                  (unsigned long long)churn.events[EVENT_RELOAD],
                  (unsigned long long)churn.events[EVENT_ADD_AGAIN],
                  (unsigned long long)churn.links);
    close_all();
    assert_no_growth(&before, &after);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(churn_writes_no_wrong_block_and_leaves_nothing),
};

int main(int argc, char **argv)
{
    const struct test_group group = TEST_GROUP("nixl_churn", cases);

    /* NIXL alone, in the children too. */
    if (setenv("KVT_SAME_HOST", "0", 1) != 0) {
        return 1;
    }
    child_main(argc, argv);
    return kvt_test_main(&group, 1, NULL);
}
