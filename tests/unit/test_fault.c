/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proves of the fault engine: each rule makes exactly its own trouble; what
 * reaches the core keeps to engine.h whatever the rules say (each job once,
 * FIN bits that only grow, nothing after FIN_BOTH, FIN_BOTH only when no byte
 * can move); new rules leave nothing stuck; and the text of rules is read
 * strictly.
 *
 * How: the engine is put around one in memory (fake_engine), and this file
 * plays the core: it calls job, post and turn on the test's own thread, and
 * records every report, which the inner engine's thread makes. Clocks are
 * injected through turn(); a delay of an hour passes at once.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/fault.h"
#include "fake_engine.h"

#define BLOCK 64
#define GUARD 0xa5
#define EVENTS_MAX 8
#define HOUR_NS (3600u * (uint64_t)1000000000u)
#define HOUR_MS "3600000"

/* -------------------------------------------------- the core, as recorded */

struct item {
    struct kvti_chunk *chunk;
    uint32_t count;
    uint32_t fin;
    struct kvti_outcome outcomes[EVENTS_MAX];
    unsigned char from[BLOCK];
    unsigned char to[3 * BLOCK]; /* a guard zone on either side */
};

struct core {
    struct kvti_env env;
    pthread_mutex_t lock;
    uint32_t wakes;
    uint32_t downs;
    uint32_t deads;
    uint32_t notes;
    uint32_t jobs;
    uint32_t heartbeats;
    int watches;
    bool notes_full;
    void *self;
    struct kvti_engine_traits traits;
    struct fake_engine *inner;
    struct kvti_job load;
    void *conn;
    int link; /* its address names the connection */
};

static bool no_memory;

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    return no_memory ? NULL : __real_calloc(count, size);
}

static void record_chunk(void *ctx, struct kvti_chunk *chunk,
                         const struct kvti_outcome *outcome)
{
    struct core *core = ctx;
    struct item *item = chunk->xfer;

    pthread_mutex_lock(&core->lock);
    kvti_assert(item->count < EVENTS_MAX);
    kvti_assert(item->fin != KVTI_FIN_BOTH);
    kvti_assert((item->fin & ~outcome->fin) == 0);
    if (item->count > 0 && item->outcomes[0].state != KVT_DONE) {
        kvti_assert(outcome->state == item->outcomes[0].state);
    }
    kvti_assert((outcome->code == KVT_OK) == (outcome->state == KVT_DONE));
    item->fin = outcome->fin;
    item->outcomes[item->count++] = *outcome;
    pthread_mutex_unlock(&core->lock);
}

static void record_job(void *ctx, struct kvti_job *job, int code,
                       const struct kvt_error *err)
{
    struct core *core = ctx;
    struct kvt_error *copy = job->owner;

    pthread_mutex_lock(&core->lock);
    kvti_assert(copy->code == 1);
    kvti_assert(code == KVT_OK || err != NULL);
    if (err != NULL) {
        *copy = *err;
    }
    copy->code = code;
    core->jobs++;
    pthread_mutex_unlock(&core->lock);
}

static void record_conn(void *ctx, void *link, enum kvti_conn_event event,
                        const struct kvt_error *why)
{
    struct core *core = ctx;

    pthread_mutex_lock(&core->lock);
    kvti_assert(link == &core->link);
    kvti_assert(why != NULL && why->text[0] != '\0');
    if (event == KVTI_CONN_DEAD) {
        core->deads++;
    } else {
        core->downs++;
    }
    pthread_mutex_unlock(&core->lock);
}

static bool record_note(void *ctx, const char *agent_name, const void *bytes,
                        size_t length)
{
    struct core *core = ctx;
    bool taken;

    pthread_mutex_lock(&core->lock);
    taken = !core->notes_full && strcmp(agent_name, "sender") == 0 &&
            length == 2 && memcmp(bytes, "hi", 2) == 0;
    core->notes += taken ? 1 : 0;
    pthread_mutex_unlock(&core->lock);
    return taken;
}

static int record_watch(void *ctx, struct kvti_watch *watch)
{
    (void)watch;
    ((struct core *)ctx)->watches++;
    return KVT_OK;
}

static void record_unwatch(void *ctx, struct kvti_watch *watch)
{
    (void)watch;
    ((struct core *)ctx)->watches--;
}

static void record_heartbeat(void *ctx, struct kvti_heartbeat *heartbeat)
{
    (void)heartbeat;
    ((struct core *)ctx)->heartbeats++;
}

static void record_wake(void *ctx)
{
    struct core *core = ctx;

    pthread_mutex_lock(&core->lock);
    core->wakes++;
    pthread_mutex_unlock(&core->lock);
}

static uint32_t read_count(struct core *core, const uint32_t *count)
{
    uint32_t value;

    pthread_mutex_lock(&core->lock);
    value = *count;
    pthread_mutex_unlock(&core->lock);
    return value;
}

static void init_core(struct core *core)
{
    *core = (struct core){0};
    pthread_mutex_init(&core->lock, NULL);
    core->env.ctx = core;
    core->env.report_chunk = record_chunk;
    core->env.report_job = record_job;
    core->env.report_conn = record_conn;
    core->env.report_note = record_note;
    core->env.watch = record_watch;
    core->env.unwatch = record_unwatch;
    core->env.heartbeat = record_heartbeat;
    core->env.wake = record_wake;
}

/* The code that the job was reported with; 1: not reported. */
static int job_code(struct core *core, const struct kvti_job *job)
{
    const struct kvt_error *err = job->owner;
    int code;

    pthread_mutex_lock(&core->lock);
    code = err->code;
    pthread_mutex_unlock(&core->lock);
    return code;
}

static void give_job(struct core *core, struct kvti_job *job,
                     struct kvt_error *err, uint32_t kind)
{
    *job = (struct kvti_job){.kind = kind, .owner = err};
    *err = (struct kvt_error){.code = 1};
    job->link = &core->link;
    if (kind == KVTI_JOB_CONNECT || kind == KVTI_JOB_NOTIFY ||
        kind == KVTI_JOB_UNLOAD) {
        job->conn = core->conn;
    }
    kvti_engine_fault.job(core->self, job);
}

static void turn(struct core *core, uint64_t later_ns)
{
    (void)kvti_engine_fault.turn(core->self, kvti_now_ns() + later_ns);
}

/* All that can happen without new rules and without a clock has happened. */
static void settle(struct core *core)
{
    turn(core, 0);
    fake_engine_drain(core->inner);
    turn(core, 0);
}

static void set_rules(struct core *core, const char *rules)
{
    struct kvt_error err;

    assert_int_equal(kvti_engine_fault.rules(core->self, rules, &err), KVT_OK);
}

static void wrap(struct core *core, const char *inner, const char *rules)
{
    struct kvt_error err;

    init_core(core);
    assert_int_equal(kvti_fault_wrap(&core->env, &fake_engine_ops, inner, rules,
                                     &core->self, &core->traits, &err),
                     KVT_OK);
    core->inner = fake_engine_get();
}

static void load(struct core *core)
{
    static struct kvt_error err;

    give_job(core, &core->load, &err, KVTI_JOB_LOAD);
    settle(core);
    assert_int_equal(job_code(core, &core->load), KVT_OK);
    assert_ptr_equal(core->load.link, &core->link);
    core->conn = core->load.conn;
}

static void start(struct core *core, const char *rules)
{
    wrap(core, "", rules);
    load(core);
}

static void unload(struct core *core)
{
    struct kvti_job job;
    struct kvt_error err;

    give_job(core, &job, &err, KVTI_JOB_UNLOAD);
    settle(core);
    assert_int_equal(job_code(core, &job), KVT_OK);
    core->conn = NULL;
}

static void finish(struct core *core, int code)
{
    assert_int_equal(kvti_engine_fault.close(core->self, kvti_now_ns()), code);
    assert_int_equal(core->watches, 0);
    pthread_mutex_destroy(&core->lock);
}

/* ----------------------------------------------------------------- chunks */

static unsigned char pattern(unsigned seed, unsigned index)
{
    return (unsigned char)(seed * 37u + index * 11u + 1u);
}

static void give_post(struct core *core, struct item *item, unsigned seed)
{
    struct kvti_chunk *chunk = calloc(1, sizeof(*chunk) +
                                             sizeof(struct kvti_copy));

    *item = (struct item){.chunk = chunk};
    for (unsigned i = 0; i < BLOCK; i++) {
        item->from[i] = pattern(seed, i);
    }
    memset(item->to, GUARD, sizeof(item->to));
    chunk->conn = core->conn;
    chunk->xfer = item;
    chunk->op = KVT_OP_WRITE;
    chunk->count = 1;
    chunk->bytes = BLOCK;
    chunk->copies[0].local = (uint64_t)(uintptr_t)item->from;
    chunk->copies[0].peer = (uint64_t)(uintptr_t)(item->to + BLOCK);
    chunk->copies[0].length = BLOCK;
    kvti_engine_fault.post(core->self, chunk);
}

static void free_item(struct item *item)
{
    free(item->chunk);
}

static void assert_moved(const struct item *item, bool moved)
{
    for (unsigned i = 0; i < BLOCK; i++) {
        assert_int_equal(item->to[i], GUARD);
        assert_int_equal(item->to[2 * BLOCK + i], GUARD);
        assert_int_equal(item->to[BLOCK + i], moved ? item->from[i] : GUARD);
    }
}

static uint32_t count_reports(struct core *core, struct item *item)
{
    return read_count(core, &item->count);
}

/* Report `index` of the item: its state and its FIN bits. */
static void assert_report(struct core *core, struct item *item, uint32_t index,
                          uint32_t state, uint32_t fin)
{
    struct kvti_outcome outcome;

    assert_true(count_reports(core, item) > index);
    pthread_mutex_lock(&core->lock);
    outcome = item->outcomes[index];
    pthread_mutex_unlock(&core->lock);
    assert_int_equal(outcome.state, state);
    assert_int_equal(outcome.fin, fin);
}

static void assert_over(struct core *core, struct item *item, uint32_t reports,
                        uint32_t state)
{
    assert_int_equal(count_reports(core, item), reports);
    assert_report(core, item, reports - 1, state, KVTI_FIN_BOTH);
    assert_ptr_equal(item->chunk->conn, core->conn);
    free_item(item);
}

/* ------------------------------------------------------------------ rules */

static void rules_that_are_well_formed_are_read(void **state)
{
    struct kvti_fault_rules rules;
    struct kvt_error err;
    const struct kvti_fault_which *which;

    (void)state;
    assert_int_equal(kvti_fault_parse("", true, &rules, &err), KVT_OK);
    assert_int_equal(
        kvti_fault_parse("reject=2;5-7;9+,fail=*/3,hold,late=4/250,"
                         "delay=10,load_fail=1,unload_hang,notify_delay=7,"
                         "layout_fail=kv,close_hang,no_notify,no_strided,"
                         "chunk_copies=2,chunk_bytes=18446744073709551615,"
                         "window=1",
                         true, &rules, &err),
        KVT_OK);
    which = &rules.posts[KVTI_FAULT_REJECT];
    assert_int_equal(which->count, 3);
    for (uint64_t n = 1; n < 12; n++) {
        bool hit = n == 2 || (n >= 5 && n <= 7) || n >= 9;

        assert_int_equal(kvti_fault_hit(which, n), hit);
    }
    assert_true(kvti_fault_hit(which, UINT64_MAX));
    assert_int_equal(rules.posts[KVTI_FAULT_FAIL].extra, 3);
    assert_true(kvti_fault_hit(&rules.posts[KVTI_FAULT_FAIL], 77));
    assert_true(kvti_fault_hit(&rules.posts[KVTI_FAULT_HOLD], 1));
    assert_int_equal(rules.posts[KVTI_FAULT_LATE].extra, 250);
    assert_int_equal(rules.delay_ms, 10);
    assert_true(kvti_fault_hit(&rules.job_fail[KVTI_JOB_LOAD], 1));
    assert_true(kvti_fault_hit(&rules.job_hang[KVTI_JOB_UNLOAD], 9));
    assert_int_equal(rules.job_delay_ms[KVTI_JOB_NOTIFY], 7);
    assert_string_equal(rules.layout_name, "kv");
    assert_true(rules.layout_fail && rules.close_hang && rules.no_notify &&
                rules.no_strided);
    assert_int_equal(rules.chunk_copies, 2);
    assert_true(rules.chunk_bytes == UINT64_MAX);
    assert_int_equal(rules.window, 1);
    assert_int_equal(kvti_fault_parse("layout_fail=*", true, &rules, &err),
                     KVT_OK);
    assert_string_equal(rules.layout_name, "");
    assert_int_equal(kvti_fault_parse("reject=1;2;3;4;5;6;7;8;9;10;11;12;13;"
                                      "14;15;16",
                                      true, &rules, &err),
                     KVT_OK);
}

static void rules_that_are_malformed_are_refused_by_name(void **state)
{
    static const char *const cases[][2] = {
        {"rejekt=1", "rejekt"},
        {"=1", "\"\""},
        {",", "empty"},
        {"reject=1,", "empty"},
        {"reject=1,,hold=2", "empty"},
        {" reject=1", " reject"},
        {"reject=", "reject="},
        {"reject=0", "reject=0"},
        {"reject=-1", "reject=-1"},
        {"reject=3-2", "reject=3-2"},
        {"reject=1;", "reject=1;"},
        {"reject=;1", "reject=;1"},
        {"reject=1 ", "reject=1 "},
        {"reject=0x1", "reject=0x1"},
        {"reject=1-", "reject=1-"},
        {"reject=1/2", "reject=1/2"},
        {"reject=18446744073709551616", "reject=18446744073709551616"},
        {"reject=1;2;3;4;5;6;7;8;9;10;11;12;13;14;15;16;17", "reject=1;2"},
        {"reject=1,reject=2", "twice"},
        {"fail=1/", "fail=1/"},
        {"fail=1/0", "fail=1/0"},
        {"late=1", "late=1"},
        {"late", "late="},
        {"late=1/3600001", "late=1/3600001"},
        {"delay", "delay="},
        {"delay=0", "delay=0"},
        {"delay=1s", "delay=1s"},
        {"delay=1,delay=1", "twice"},
        {"load_delay=3600001", "load_delay=3600001"},
        {"load_stop=1", "load_stop"},
        {"loadfail=1", "loadfail"},
        {"close_hang=1", "close_hang"},
        {"close_hang,close_hang", "twice"},
        {"no_notify=yes", "no_notify"},
        {"no_strided=1", "no_strided"},
        {"no_strided,no_strided", "twice"},
        {"window=0", "window=0"},
        {"chunk_copies=4294967296", "chunk_copies=4294967296"},
        {"chunk_bytes=1,chunk_bytes=2", "twice"},
        {"layout_fail=", "layout_fail"},
        {"layout_fail,layout_fail=a", "twice"},
    };
    struct kvti_fault_rules rules;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvt_error err = {0};

        memset(&rules, 0x5a, sizeof(rules));
        assert_int_equal(kvti_fault_parse(cases[i][0], true, &rules, &err),
                         KVT_EINVAL);
        assert_int_equal(err.code, KVT_EINVAL);
        if (strstr(err.text, cases[i][1]) == NULL) {
            fail_msg("\"%s\" gives \"%s\"", cases[i][0], err.text);
        }
        for (size_t j = 0; j < sizeof(rules); j++) {
            assert_int_equal(((unsigned char *)&rules)[j], 0x5a);
        }
    }
    assert_int_equal(kvti_fault_parse("nonsense", true, &rules, NULL),
                     KVT_EINVAL);
}

static void an_unknown_rule_is_answered_with_all_known_ones(void **state)
{
    struct kvti_fault_rules rules;
    struct kvt_error err;
    char longest[] = "a_key_that_is_longer_than_any_real_key_is";

    (void)state;
    assert_int_equal(kvti_fault_parse(longest, true, &rules, &err), KVT_EINVAL);
    for (unsigned i = 0; i < KVTI_FAULT_POST_RULES; i++) {
        assert_non_null(
            strstr(err.text, kvti_fault_key((enum kvti_fault_post_rule)i)));
    }
    assert_non_null(strstr(err.text, " delay layout_fail close_hang "
                                     "no_{notify,strided} chunk_{copies,bytes} "
                                     "window JOB_{fail,hang,delay}."));
}

static void traits_are_refused_after_open(void **state)
{
    static const char *const cases[] = {"window=1", "chunk_copies=1",
                                        "chunk_bytes=1", "no_notify",
                                        "no_strided"};
    struct kvti_fault_rules rules;
    struct kvt_error err;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(kvti_fault_parse(cases[i], false, &rules, &err),
                         KVT_EINVAL);
        assert_non_null(strstr(err.text, "opened"));
    }
}

/* ------------------------------------------------------------------ posts */

static void without_rules_everything_goes_through(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "");
    give_post(&core, &item, 1);
    settle(&core);
    assert_moved(&item, true);
    assert_over(&core, &item, 1, KVT_DONE);
    fake_engine_set_state(core.inner, KVT_FAILED);
    give_post(&core, &item, 2);
    settle(&core);
    assert_int_equal(item.outcomes[0].engine_code, -77);
    assert_over(&core, &item, 1, KVT_FAILED);
    unload(&core);
    finish(&core, KVT_OK);
}

static void the_inner_engines_partial_reports_go_through(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    wrap(&core, "partial", "");
    load(&core);
    give_post(&core, &item, 1);
    settle(&core);
    assert_report(&core, &item, 0, KVT_DONE, KVTI_FIN_LOCAL);
    assert_over(&core, &item, 2, KVT_DONE);
    set_rules(&core, "hold");
    fake_engine_set_state(core.inner, KVT_FAILED);
    give_post(&core, &item, 2);
    settle(&core);
    assert_int_equal(count_reports(&core, &item), 0);
    set_rules(&core, "");
    settle(&core);
    assert_int_equal(item.outcomes[0].engine_code, -77);
    assert_over(&core, &item, 1, KVT_FAILED);
    finish(&core, KVT_OK);
}

static void a_rejected_post_never_reaches_the_inner_engine(void **state)
{
    struct core core;
    struct item items[4];

    (void)state;
    start(&core, "reject=2-3");
    for (unsigned i = 0; i < 4; i++) {
        give_post(&core, &items[i], i);
    }
    assert_report(&core, &items[1], 0, KVT_REJECTED, KVTI_FIN_BOTH);
    assert_int_equal(items[1].outcomes[0].code, KVT_EREJECTED);
    assert_int_equal(items[1].outcomes[0].engine_code, -1);
    assert_non_null(strstr(items[1].outcomes[0].text, "\"reject\" at post 2"));
    settle(&core);
    assert_int_equal(fake_engine_posts(core.inner), 2);
    for (unsigned i = 0; i < 4; i++) {
        bool hit = i == 1 || i == 2;

        assert_moved(&items[i], !hit);
        assert_over(&core, &items[i], 1, hit ? KVT_REJECTED : KVT_DONE);
    }
    finish(&core, KVT_OK);
}

static void a_dirty_rejection_is_final_only_with_the_inner_engine(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "reject_dirty=1");
    fake_engine_pause(core.inner, true);
    give_post(&core, &item, 3);
    turn(&core, HOUR_NS);
    assert_int_equal(count_reports(&core, &item), 1);
    assert_report(&core, &item, 0, KVT_REJECTED, KVTI_FIN_NONE);
    fake_engine_pause(core.inner, false);
    settle(&core);
    assert_moved(&item, true);
    assert_over(&core, &item, 2, KVT_REJECTED);
    finish(&core, KVT_OK);
}

static void a_failure_moves_its_bytes_and_comes_after_its_turns(void **state)
{
    struct core core;
    struct item items[2];

    (void)state;
    start(&core, "fail=1;2/2");
    give_post(&core, &items[0], 1);
    give_post(&core, &items[1], 2);
    fake_engine_drain(core.inner);
    turn(&core, 0);
    assert_int_equal(count_reports(&core, &items[0]), 0);
    turn(&core, 0);
    for (unsigned i = 0; i < 2; i++) {
        assert_moved(&items[i], true);
        assert_int_equal(items[i].outcomes[0].code, KVT_EENGINE);
        assert_over(&core, &items[i], 1, KVT_FAILED);
    }
    finish(&core, KVT_OK);
}

static void while_turns_are_counted_the_next_is_wanted_at_once(void **state)
{
    struct core core;
    struct item item;
    uint64_t now_ns = kvti_now_ns() + HOUR_NS;

    (void)state;
    start(&core, "fail=1/3");
    give_post(&core, &item, 1);
    fake_engine_drain(core.inner);
    assert_true(kvti_engine_fault.turn(core.self, now_ns) == now_ns);
    assert_true(kvti_engine_fault.turn(core.self, now_ns) == now_ns);
    assert_true(kvti_engine_fault.turn(core.self, now_ns) > now_ns);
    assert_over(&core, &item, 1, KVT_FAILED);
    finish(&core, KVT_OK);
}

static void a_failure_unposted_moves_nothing(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "fail_unposted");
    give_post(&core, &item, 1);
    assert_int_equal(fake_engine_posts(core.inner), 0);
    assert_moved(&item, false);
    assert_over(&core, &item, 1, KVT_FAILED);
    finish(&core, KVT_OK);
}

static void a_hanging_post_goes_on_under_new_rules(void **state)
{
    struct core core;
    struct item items[2];

    (void)state;
    start(&core, "hang");
    give_post(&core, &items[0], 1);
    give_post(&core, &items[1], 2);
    settle(&core);
    turn(&core, HOUR_NS);
    assert_int_equal(fake_engine_posts(core.inner), 0);
    assert_moved(&items[0], false);
    assert_int_equal(count_reports(&core, &items[0]), 0);
    /* New rules hold new posts only. */
    set_rules(&core, "hang");
    settle(&core);
    for (unsigned i = 0; i < 2; i++) {
        assert_moved(&items[i], true);
        assert_over(&core, &items[i], 1, KVT_DONE);
    }
    give_post(&core, &items[0], 3);
    settle(&core);
    assert_int_equal(count_reports(&core, &items[0]), 0);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &items[0], 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void a_hanging_post_ends_with_its_connection(void **state)
{
    struct core core;
    struct item item;
    void *conn;

    (void)state;
    start(&core, "hang");
    give_post(&core, &item, 1);
    settle(&core);
    conn = core.conn;
    unload(&core);
    core.conn = conn;
    assert_int_equal(fake_engine_posts(core.inner), 0);
    assert_moved(&item, false);
    assert_over(&core, &item, 1, KVT_DISCONNECTED);

    load(&core);
    give_post(&core, &item, 2);
    fake_engine_report_conn(core.inner, KVTI_CONN_DEAD);
    settle(&core);
    assert_int_equal(read_count(&core, &core.deads), 1);
    assert_int_equal(fake_engine_posts(core.inner), 1);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void a_held_report_waits_for_new_rules(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "hold=1");
    give_post(&core, &item, 1);
    settle(&core);
    turn(&core, HOUR_NS);
    assert_moved(&item, true);
    assert_int_equal(count_reports(&core, &item), 0);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void a_held_report_outlives_its_connection(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "hold");
    give_post(&core, &item, 1);
    settle(&core);
    unload(&core);
    assert_int_equal(count_reports(&core, &item), 0);
    set_rules(&core, "");
    settle(&core);
    assert_report(&core, &item, 0, KVT_DONE, KVTI_FIN_BOTH);
    free_item(&item);
    finish(&core, KVT_OK);
}

static void an_unreadable_post_is_proven_under_new_rules(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "unreadable=1");
    give_post(&core, &item, 1);
    assert_int_equal(count_reports(&core, &item), 1);
    assert_report(&core, &item, 0, KVT_UNREADABLE, KVTI_FIN_NONE);
    assert_int_equal(item.outcomes[0].code, KVT_ELOST);
    settle(&core);
    assert_moved(&item, true);
    assert_int_equal(count_reports(&core, &item), 1);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &item, 2, KVT_UNREADABLE);
    finish(&core, KVT_OK);
}

static void a_post_that_is_never_proven_keeps_close_busy(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "never");
    give_post(&core, &item, 1);
    settle(&core);
    set_rules(&core, "");
    settle(&core);
    unload(&core);
    assert_int_equal(count_reports(&core, &item), 1);
    assert_report(&core, &item, 0, KVT_UNREADABLE, KVTI_FIN_NONE);
    finish(&core, KVT_EBUSY);
    free_item(&item);
}

static void half_a_proof_comes_first(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "half=1");
    give_post(&core, &item, 1);
    settle(&core);
    assert_int_equal(count_reports(&core, &item), 1);
    assert_report(&core, &item, 0, KVT_DONE, KVTI_FIN_LOCAL);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &item, 2, KVT_DONE);
    finish(&core, KVT_OK);
}

static void a_disconnect_breaks_the_link_and_proves_later(void **state)
{
    struct core core;
    struct item items[2];

    (void)state;
    start(&core, "disconnect=1;2,hold=2");
    fake_engine_pause(core.inner, true);
    give_post(&core, &items[0], 1);
    give_post(&core, &items[1], 2);
    assert_int_equal(read_count(&core, &core.downs), 2);
    assert_report(&core, &items[0], 0, KVT_DISCONNECTED, KVTI_FIN_NONE);
    assert_int_equal(count_reports(&core, &items[0]), 1);
    fake_engine_pause(core.inner, false);
    settle(&core);
    assert_over(&core, &items[0], 2, KVT_DISCONNECTED);
    assert_int_equal(count_reports(&core, &items[1]), 1);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &items[1], 2, KVT_DISCONNECTED);
    finish(&core, KVT_OK);
}

static void a_link_can_break_without_a_failed_post(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "peer_down=1");
    give_post(&core, &item, 1);
    assert_int_equal(read_count(&core, &core.downs), 1);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void a_peer_is_dead_only_when_nothing_moves(void **state)
{
    struct core core;
    struct item items[4];
    struct kvti_job job;
    struct kvt_error err;

    (void)state;
    start(&core, "hang=1,dead=3");
    fake_engine_pause(core.inner, true);
    for (unsigned i = 0; i < 4; i++) {
        give_post(&core, &items[i], i);
    }
    assert_over(&core, &items[0], 1, KVT_DISCONNECTED);
    assert_over(&core, &items[2], 1, KVT_DISCONNECTED);
    assert_over(&core, &items[3], 1, KVT_DISCONNECTED);
    give_job(&core, &job, &err, KVTI_JOB_CONNECT);
    assert_int_equal(job_code(&core, &job), KVT_EDISCONNECTED);
    turn(&core, HOUR_NS);
    assert_int_equal(read_count(&core, &core.deads), 0);
    fake_engine_pause(core.inner, false);
    settle(&core);
    assert_over(&core, &items[1], 1, KVT_DONE);
    assert_int_equal(read_count(&core, &core.deads), 1);
    assert_int_equal(fake_engine_posts(core.inner), 1);
    unload(&core);
    finish(&core, KVT_OK);
}

static void reports_wait_for_their_delay(void **state)
{
    struct core core;
    struct item items[3];

    (void)state;
    start(&core, "delay=" HOUR_MS ",reject_dirty=2,late=1/" HOUR_MS);
    for (unsigned i = 0; i < 3; i++) {
        give_post(&core, &items[i], i);
    }
    assert_true(read_count(&core, &core.wakes) > 0);
    settle(&core);
    for (unsigned i = 0; i < 3; i++) {
        assert_moved(&items[i], true);
        assert_int_equal(count_reports(&core, &items[i]), 0);
    }
    turn(&core, HOUR_NS);
    assert_int_equal(count_reports(&core, &items[0]), 0);
    assert_over(&core, &items[1], 2, KVT_REJECTED);
    assert_over(&core, &items[2], 1, KVT_DONE);
    turn(&core, 2 * HOUR_NS);
    assert_over(&core, &items[0], 1, KVT_DONE);

    give_post(&core, &items[0], 7);
    settle(&core);
    assert_int_equal(count_reports(&core, &items[0]), 0);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &items[0], 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void an_inline_post_is_reported_before_it_returns(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "inline");
    for (unsigned i = 0; i < 50; i++) {
        give_post(&core, &item, i);
        assert_moved(&item, true);
        assert_over(&core, &item, 1, KVT_DONE);
    }
    finish(&core, KVT_OK);
}

static void an_inline_post_gives_up_on_an_engine_that_hangs(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "inline");
    fake_engine_pause(core.inner, true);
    give_post(&core, &item, 1);
    assert_int_equal(count_reports(&core, &item), 0);
    fake_engine_pause(core.inner, false);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void rules_on_one_post_add_up(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "hang=1,reject_dirty=1,never=1,half=1,fail=1");
    give_post(&core, &item, 1);
    settle(&core);
    assert_int_equal(count_reports(&core, &item), 0);
    set_rules(&core, "");
    settle(&core);
    assert_moved(&item, true);
    assert_int_equal(count_reports(&core, &item), 1);
    assert_report(&core, &item, 0, KVT_REJECTED, KVTI_FIN_NONE);
    finish(&core, KVT_EBUSY);
    free_item(&item);
}

static void new_rules_count_from_one_and_bad_ones_change_nothing(void **state)
{
    struct core core;
    struct item item;
    struct kvt_error err;

    (void)state;
    start(&core, "reject=2");
    give_post(&core, &item, 1);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    assert_int_equal(kvti_engine_fault.rules(core.self, "reject=x", &err),
                     KVT_EINVAL);
    give_post(&core, &item, 1);
    assert_over(&core, &item, 1, KVT_REJECTED);
    set_rules(&core, "reject=2");
    give_post(&core, &item, 1);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    give_post(&core, &item, 1);
    assert_over(&core, &item, 1, KVT_REJECTED);
    finish(&core, KVT_OK);
}

/* ------------------------------------------------------------------- jobs */

static const char *const job_names[KVTI_FAULT_JOB_KINDS] = {
    [KVTI_JOB_MEM_ADD] = "mem",     [KVTI_JOB_MEM_DROP] = "drop",
    [KVTI_JOB_EXPORT] = "export",   [KVTI_JOB_LOAD] = "load",
    [KVTI_JOB_CONNECT] = "connect", [KVTI_JOB_UNLOAD] = "unload",
    [KVTI_JOB_NOTIFY] = "notify",
};

/* Rules for the kind, and a job of it that they concern. */
static void order_job(struct core *core, uint32_t kind, const char *suffix,
                      struct kvti_job *job, struct kvt_error *err)
{
    static unsigned char byte = 'n';
    char rules[64];

    kvti_format(rules, sizeof(rules), "%s_%s", job_names[kind], suffix);
    start(core, "");
    set_rules(core, rules);
    *job = (struct kvti_job){0};
    if (kind == KVTI_JOB_NOTIFY) {
        *err = (struct kvt_error){.code = 1};
        job->kind = kind;
        job->owner = err;
        job->conn = core->conn;
        job->buf.data = &byte;
        job->buf.length = 1;
        kvti_engine_fault.job(core->self, job);
    } else {
        give_job(core, job, err, kind);
    }
}

static void each_kind_of_job_fails_on_order(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < KVTI_FAULT_JOB_KINDS; kind++) {
        struct core core;
        struct kvti_job job;
        struct kvt_error err;
        bool forwarded = kind == KVTI_JOB_UNLOAD;

        order_job(&core, kind, "fail=1", &job, &err);
        settle(&core);
        assert_int_equal(job_code(&core, &job),
                         kind == KVTI_JOB_MEM_DROP ? KVT_EBUSY : KVT_EENGINE);
        assert_non_null(strstr(err.text, "told to fail"));
        assert_int_equal(fake_engine_jobs(core.inner, kind) -
                             (kind == KVTI_JOB_LOAD ? 1 : 0),
                         forwarded ? 1 : 0);
        finish(&core, KVT_OK);
    }
}

static void each_kind_of_job_hangs_until_new_rules(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < KVTI_FAULT_JOB_KINDS; kind++) {
        struct core core;
        struct kvti_job job;
        struct kvt_error err;

        order_job(&core, kind, "hang", &job, &err);
        settle(&core);
        turn(&core, HOUR_NS);
        assert_int_equal(job_code(&core, &job), 1);
        set_rules(&core, "");
        settle(&core);
        assert_int_equal(job_code(&core, &job), KVT_OK);
        if (kind == KVTI_JOB_LOAD) {
            core.conn = job.conn;
            unload(&core);
            core.conn = core.load.conn;
        }
        finish(&core, KVT_OK);
    }
}

static void each_kind_of_job_is_reported_after_its_delay(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < KVTI_FAULT_JOB_KINDS; kind++) {
        struct core core;
        struct kvti_job job;
        struct kvt_error err;

        order_job(&core, kind, "delay=" HOUR_MS, &job, &err);
        settle(&core);
        assert_int_equal(job_code(&core, &job), 1);
        turn(&core, HOUR_NS);
        assert_int_equal(job_code(&core, &job), KVT_OK);
        if (kind == KVTI_JOB_LOAD) {
            core.conn = job.conn;
            unload(&core);
        }
        finish(&core, KVT_OK);
    }
}

static void hanging_jobs_do_not_keep_close(void **state)
{
    struct core core;
    struct kvti_job jobs[4];
    struct kvt_error errs[4];

    (void)state;
    start(&core, "mem_hang,load_hang=2,unload_hang,connect_delay=" HOUR_MS);
    give_job(&core, &jobs[0], &errs[0], KVTI_JOB_MEM_ADD);
    give_job(&core, &jobs[1], &errs[1], KVTI_JOB_LOAD);
    give_job(&core, &jobs[2], &errs[2], KVTI_JOB_CONNECT);
    give_job(&core, &jobs[3], &errs[3], KVTI_JOB_UNLOAD);
    settle(&core);
    finish(&core, KVT_OK);
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(errs[i].code, 1);
    }
}

static void give_message(struct core *core, struct kvti_job *job,
                         struct kvt_error *err, unsigned char *byte)
{
    *err = (struct kvt_error){.code = 1};
    *job = (struct kvti_job){
        .kind = KVTI_JOB_NOTIFY,
        .owner = err,
        .conn = core->conn,
        .buf = {.data = byte, .length = 1, .capacity = 1},
    };
    kvti_engine_fault.job(core->self, job);
}

static void messages_stay_in_order_behind_one_that_hangs(void **state)
{
    struct core core;
    struct kvti_job jobs[4];
    struct kvt_error errs[4];
    unsigned char bytes[4] = {'a', 'b', 'c', 'd'};
    char sent[8];

    (void)state;
    start(&core, "notify_hang=2");
    for (unsigned i = 0; i < 3; i++) {
        give_message(&core, &jobs[i], &errs[i], &bytes[i]);
    }
    settle(&core);
    fake_engine_messages(core.inner, sent, sizeof(sent));
    assert_string_equal(sent, "a");
    set_rules(&core, "");
    give_message(&core, &jobs[3], &errs[3], &bytes[3]);
    settle(&core);
    fake_engine_messages(core.inner, sent, sizeof(sent));
    assert_string_equal(sent, "abcd");
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(job_code(&core, &jobs[i]), KVT_OK);
    }
    finish(&core, KVT_OK);
}

static void an_unload_ends_what_is_open_on_its_connection(void **state)
{
    struct core core;
    struct kvti_job jobs[3];
    struct kvt_error errs[3];
    struct kvti_job other;
    struct kvt_error other_err;
    unsigned char byte = 'x';

    (void)state;
    start(&core, "notify_hang=1,connect_delay=" HOUR_MS ",connect_hang=1");
    give_message(&core, &jobs[0], &errs[0], &byte);
    give_job(&core, &jobs[1], &errs[1], KVTI_JOB_CONNECT);
    give_job(&core, &jobs[2], &errs[2], KVTI_JOB_CONNECT);
    give_job(&core, &other, &other_err, KVTI_JOB_EXPORT);
    settle(&core);
    assert_int_equal(read_count(&core, &core.jobs), 2);
    unload(&core);
    assert_int_equal(read_count(&core, &core.jobs), 6);
    assert_int_equal(job_code(&core, &jobs[0]), KVT_EDISCONNECTED);
    assert_int_equal(job_code(&core, &jobs[1]), KVT_EDISCONNECTED);
    assert_int_equal(job_code(&core, &jobs[2]), KVT_OK);
    finish(&core, KVT_OK);
}

static void events_wait_for_the_delayed_load(void **state)
{
    struct core core;
    struct kvt_error err;

    (void)state;
    wrap(&core, "", "load_delay=" HOUR_MS);
    give_job(&core, &core.load, &err, KVTI_JOB_LOAD);
    settle(&core);
    fake_engine_report_conn(core.inner, KVTI_CONN_DOWN);
    fake_engine_report_conn(core.inner, KVTI_CONN_DEAD);
    assert_int_equal(
        read_count(&core, &core.downs) + read_count(&core, &core.deads), 0);
    turn(&core, HOUR_NS);
    assert_int_equal(job_code(&core, &core.load), KVT_OK);
    assert_int_equal(read_count(&core, &core.downs), 1);
    assert_int_equal(read_count(&core, &core.deads), 1);
    finish(&core, KVT_OK);
}

/* ----------------------------------------------------------- open and close */

static void traits_are_lowered_and_never_raised(void **state)
{
    static const char *const raised[] = {"chunk_copies=65", "window=5",
                                         "chunk_bytes=1048577"};
    struct core core;
    struct kvt_error err;

    (void)state;
    wrap(&core, "",
         "chunk_copies=3,chunk_bytes=4096,window=1,no_notify,no_strided");
    assert_int_equal(core.traits.chunk_copies, 3);
    assert_int_equal(core.traits.chunk_bytes, 4096);
    assert_int_equal(core.traits.window, 1);
    assert_int_equal(core.traits.caps, KVTI_CAP_DRAM);
    assert_true(core.traits.no_strided);
    assert_int_equal(core.traits.dead_fin, KVTI_FIN_BOTH);
    assert_int_equal(core.heartbeats, 1);
    finish(&core, KVT_OK);
    for (unsigned i = 0; i < 3; i++) {
        init_core(&core);
        assert_int_equal(kvti_fault_wrap(&core.env, &fake_engine_ops, "",
                                         raised[i], &core.self, &core.traits,
                                         &err),
                         KVT_EINVAL);
        assert_non_null(strstr(err.text, raised[i]));
        assert_null(core.self);
        assert_int_equal(core.watches, 0);
        pthread_mutex_destroy(&core.lock);
    }
}

static void an_open_that_cannot_be_says_why(void **state)
{
    static const struct {
        const char *rest;
        int code;
        const char *text;
    } cases[] = {
        {"", KVT_EINVAL, "fault:ENGINE?RULES"},
        {"?reject=1", KVT_EINVAL, "fault:ENGINE?RULES"},
        {"teleport?reject=1", KVT_EUNSUPPORTED, "teleport"},
        {"teleport?reject=1", KVT_EUNSUPPORTED, "fault"},
        {"fault:local", KVT_EINVAL, "itself"},
        {"local?nonsense", KVT_EINVAL, "nonsense"},
    };
    struct core core;
    struct kvt_error err;

    (void)state;
    init_core(&core);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(kvti_engine_fault.open(&core.env, cases[i].rest,
                                                &core.self, &core.traits, &err),
                         cases[i].code);
        assert_non_null(strstr(err.text, cases[i].text));
    }
    assert_int_equal(kvti_fault_wrap(&core.env, &fake_engine_ops, "refuse", "",
                                     &core.self, &core.traits, &err),
                     KVT_ESYSTEM);
    no_memory = true;
    assert_int_equal(kvti_fault_wrap(&core.env, &fake_engine_ops, "", "",
                                     &core.self, &core.traits, &err),
                     KVT_ENOMEM);
    no_memory = false;
    assert_null(core.self);
    pthread_mutex_destroy(&core.lock);
}

static void layouts_are_refused_by_name(void **state)
{
    struct core core;
    struct kvt_error err;

    (void)state;
    start(&core, "layout_fail=kv");
    assert_false(core.traits.no_strided);
    assert_int_equal(kvti_engine_fault.layout(core.self, core.conn, "kv", &err),
                     KVT_EENGINE);
    assert_non_null(strstr(err.text, "\"kv\""));
    assert_int_equal(
        kvti_engine_fault.layout(core.self, core.conn, "kv2", &err), KVT_OK);
    assert_int_equal(
        kvti_engine_fault.layout(core.self, core.conn, "inner", &err),
        KVT_EUNSUPPORTED);
    set_rules(&core, "layout_fail");
    assert_int_equal(
        kvti_engine_fault.layout(core.self, core.conn, "kv2", &err),
        KVT_EENGINE);
    finish(&core, KVT_OK);
}

static void messages_received_go_through(void **state)
{
    struct core core;

    (void)state;
    start(&core, "");
    assert_true(fake_engine_receive(core.inner, "hi"));
    core.notes_full = true;
    assert_false(fake_engine_receive(core.inner, "hi"));
    kvti_engine_fault.notes_wanted(core.self);
    assert_int_equal(read_count(&core, &core.notes), 1);
    assert_int_equal(fake_engine_wants(core.inner), 1);
    finish(&core, KVT_OK);
}

static void a_close_is_busy_while_a_report_is_held(void **state)
{
    struct core core;
    struct item items[2];

    (void)state;
    start(&core, "hold=1,hang=2");
    give_post(&core, &items[0], 1);
    give_post(&core, &items[1], 2);
    settle(&core);
    finish(&core, KVT_EBUSY);
    free_item(&items[0]);
    free_item(&items[1]);
}

static void a_close_that_hangs_answers_busy(void **state)
{
    struct core core;

    (void)state;
    start(&core, "close_hang");
    finish(&core, KVT_EBUSY);
    start(&core, "close_hang");
    set_rules(&core, "");
    finish(&core, KVT_OK);
}

static void a_stuck_inner_engine_keeps_its_environment(void **state)
{
    struct core core;
    struct item item;

    (void)state;
    start(&core, "");
    fake_engine_stick(core.inner);
    assert_int_equal(kvti_engine_fault.close(core.self, kvti_now_ns()),
                     KVT_EBUSY);
    give_post(&core, &item, 1);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void without_memory_nothing_is_handed_on(void **state)
{
    struct core core;
    struct kvti_job job;
    struct kvt_error err;
    struct item item;

    (void)state;
    start(&core, "");
    for (uint32_t kind = 0; kind < KVTI_FAULT_JOB_KINDS; kind++) {
        if (kind == KVTI_JOB_UNLOAD) {
            continue;
        }
        no_memory = true;
        give_job(&core, &job, &err, kind);
        no_memory = false;
        assert_int_equal(job_code(&core, &job), KVT_ENOMEM);
    }
    give_post(&core, &item, 1);
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);

    /* The chunk exists already: only the record is missing. */
    give_post(&core, &item, 2);
    settle(&core);
    item.count = 0;
    item.fin = 0;
    no_memory = true;
    kvti_engine_fault.post(core.self, item.chunk);
    no_memory = false;
    assert_int_equal(item.outcomes[0].code, KVT_ENOMEM);
    assert_over(&core, &item, 1, KVT_FAILED);

    no_memory = true;
    unload(&core);
    no_memory = false;
    finish(&core, KVT_OK);
}

static void a_forked_child_frees_its_copy(void **state)
{
    struct core core;
    struct item item;
    int status;
    pid_t child;

    (void)state;
    start(&core, "hang");
    give_post(&core, &item, 1);
    settle(&core);
    child = fork();
    if (child == 0) {
        kvti_engine_fault.after_fork(core.self);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    set_rules(&core, "");
    settle(&core);
    assert_over(&core, &item, 1, KVT_DONE);
    finish(&core, KVT_OK);
}

static void every_engine_is_found_by_its_name(void **state)
{
    struct kvt_engine_info info = {0};
    const char *rest = NULL;
    struct kvt_error err;
    size_t count = 0;

    (void)state;
    assert_int_equal(kvti_engine_fault.probe(&info), KVT_OK);
    assert_non_null(strstr(info.text, "fault:ENGINE?RULES"));
    assert_ptr_equal(kvti_engine_find("fault:local?hang=1", &rest, &err),
                     &kvti_engine_fault);
    assert_string_equal(rest, "local?hang=1");
    assert_ptr_equal(kvti_engine_find("local", &rest, &err),
                     &kvti_engine_local);
    assert_string_equal(rest, "");
    rest = NULL;
    assert_null(kvti_engine_find("loc", &rest, &err));
    assert_null(kvti_engine_find("", &rest, NULL));
    assert_null(rest);
    assert_int_equal(err.code, KVT_EUNSUPPORTED);
    while (kvti_engine_at(count) != NULL) {
        const struct kvti_engine_ops *ops = kvti_engine_at(count);

        assert_ptr_equal(kvti_engine_find(ops->name, &rest, &err), ops);
        count++;
    }
    assert_true(count >= 2);
    assert_null(kvti_engine_at(SIZE_MAX));
}

/* ------------------------------------------------------------------- storm */

#define STORM_POSTS 2000
#define STORM_SEED 20240607u

struct storm {
    struct core *core;
    atomic_bool over;
};

static uint32_t draw(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void draw_rules(uint32_t *seed, char *rules, size_t size)
{
    static const char *const keys[] = {
        "reject",     "fail_unposted", "reject_dirty", "disconnect",
        "unreadable", "fail",          "hang",         "hold",
        "half",       "peer_down",     "inline",
    };
    unsigned count = sizeof(keys) / sizeof(keys[0]);
    unsigned first = draw(seed) % count;
    unsigned second = (first + 1 + draw(seed) % (count - 1)) % count;

    kvti_format(rules, size, "%s=%u-%u,%s=%u+,late=%u/1,delay=1", keys[first],
                1 + draw(seed) % 5, 5 + draw(seed) % 5, keys[second],
                3 + draw(seed) % 20, 1 + draw(seed) % 5);
}

static void *change_rules(void *arg)
{
    struct storm *storm = arg;
    uint32_t seed = STORM_SEED;
    char rules[128];

    while (!atomic_load(&storm->over)) {
        struct kvt_error err;

        draw_rules(&seed, rules, sizeof(rules));
        kvti_assert(kvti_engine_fault.rules(storm->core->self, rules, &err) ==
                    KVT_OK);
        sched_yield();
    }
    return NULL;
}

static void nothing_stays_stuck_while_rules_change(void **state)
{
    struct core core;
    struct storm storm = {.core = &core};
    struct item *items = calloc(STORM_POSTS, sizeof(*items));
    pthread_t thread;

    (void)state;
    assert_non_null(items);
    wrap(&core, "partial", "");
    load(&core);
    assert_int_equal(pthread_create(&thread, NULL, change_rules, &storm), 0);
    for (unsigned i = 0; i < STORM_POSTS; i++) {
        give_post(&core, &items[i], i);
        turn(&core, 0);
    }
    atomic_store(&storm.over, true);
    pthread_join(thread, NULL);
    set_rules(&core, "");
    settle(&core);
    for (unsigned i = 0; i < STORM_POSTS; i++) {
        uint32_t last = count_reports(&core, &items[i]) - 1;
        const struct kvti_outcome *outcome = &items[i].outcomes[last];

        assert_int_equal(outcome->fin, KVTI_FIN_BOTH);
        if (outcome->state == KVT_DONE) {
            assert_moved(&items[i], true);
        }
        free_item(&items[i]);
    }
    unload(&core);
    finish(&core, KVT_OK);
    free(items);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_that_are_well_formed_are_read),
        cmocka_unit_test(rules_that_are_malformed_are_refused_by_name),
        cmocka_unit_test(an_unknown_rule_is_answered_with_all_known_ones),
        cmocka_unit_test(traits_are_refused_after_open),
        cmocka_unit_test(without_rules_everything_goes_through),
        cmocka_unit_test(the_inner_engines_partial_reports_go_through),
        cmocka_unit_test(a_rejected_post_never_reaches_the_inner_engine),
        cmocka_unit_test(a_dirty_rejection_is_final_only_with_the_inner_engine),
        cmocka_unit_test(a_failure_moves_its_bytes_and_comes_after_its_turns),
        cmocka_unit_test(while_turns_are_counted_the_next_is_wanted_at_once),
        cmocka_unit_test(a_failure_unposted_moves_nothing),
        cmocka_unit_test(a_hanging_post_goes_on_under_new_rules),
        cmocka_unit_test(a_hanging_post_ends_with_its_connection),
        cmocka_unit_test(a_held_report_waits_for_new_rules),
        cmocka_unit_test(a_held_report_outlives_its_connection),
        cmocka_unit_test(an_unreadable_post_is_proven_under_new_rules),
        cmocka_unit_test(a_post_that_is_never_proven_keeps_close_busy),
        cmocka_unit_test(half_a_proof_comes_first),
        cmocka_unit_test(a_disconnect_breaks_the_link_and_proves_later),
        cmocka_unit_test(a_link_can_break_without_a_failed_post),
        cmocka_unit_test(a_peer_is_dead_only_when_nothing_moves),
        cmocka_unit_test(reports_wait_for_their_delay),
        cmocka_unit_test(an_inline_post_is_reported_before_it_returns),
        cmocka_unit_test(an_inline_post_gives_up_on_an_engine_that_hangs),
        cmocka_unit_test(rules_on_one_post_add_up),
        cmocka_unit_test(new_rules_count_from_one_and_bad_ones_change_nothing),
        cmocka_unit_test(each_kind_of_job_fails_on_order),
        cmocka_unit_test(each_kind_of_job_hangs_until_new_rules),
        cmocka_unit_test(each_kind_of_job_is_reported_after_its_delay),
        cmocka_unit_test(hanging_jobs_do_not_keep_close),
        cmocka_unit_test(messages_stay_in_order_behind_one_that_hangs),
        cmocka_unit_test(an_unload_ends_what_is_open_on_its_connection),
        cmocka_unit_test(events_wait_for_the_delayed_load),
        cmocka_unit_test(traits_are_lowered_and_never_raised),
        cmocka_unit_test(an_open_that_cannot_be_says_why),
        cmocka_unit_test(layouts_are_refused_by_name),
        cmocka_unit_test(messages_received_go_through),
        cmocka_unit_test(a_close_is_busy_while_a_report_is_held),
        cmocka_unit_test(a_close_that_hangs_answers_busy),
        cmocka_unit_test(a_stuck_inner_engine_keeps_its_environment),
        cmocka_unit_test(without_memory_nothing_is_handed_on),
        cmocka_unit_test(a_forked_child_frees_its_copy),
        cmocka_unit_test(every_engine_is_found_by_its_name),
        cmocka_unit_test(nothing_stays_stuck_while_rules_change),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
