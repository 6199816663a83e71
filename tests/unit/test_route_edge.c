/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same-host shortcut at the edges of the contract of engine.h, against a
 * core that only records (fake_env).
 *
 * Proved: every job is reported once, and before the UNLOAD of its connection;
 * a chunk that comes back after that is not given to NIXL; a break of the link
 * while it is loaded is told after the LOAD; what is open at close is as the
 * core gave it and nothing of it leaks; no memory for any of the allocations
 * of a job is an error, and nothing more.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvt_assert.h"
#include "nixl_pair.h"
#include "vm_calls.h"

/* -------------------------------------------------- memory and the kernel */

static pthread_t victim;
static atomic_int allocations_left = -1; /* -1: as many as you like */

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

/* Counts those of one thread. */
void *__wrap_calloc(size_t count, size_t size)
{
    if (atomic_load(&allocations_left) >= 0 &&
        pthread_equal(pthread_self(), victim) != 0 &&
        atomic_fetch_sub(&allocations_left, 1) == 0) {
        return NULL;
    }
    return __real_calloc(count, size);
}

static atomic_bool held;
static atomic_int holding;

/* A copy that does not come back, and then is forbidden. */
ssize_t __wrap_process_vm_writev(VM_ARGUMENTS)
{
    if (!atomic_load(&held)) {
        return __real_process_vm_writev(VM_SAME);
    }
    atomic_fetch_add(&holding, 1);
    while (atomic_load(&held)) {
        sched_yield();
    }
    atomic_fetch_sub(&holding, 1);
    errno = EPERM;
    return -1;
}

/* -------------------------------------------------------------------- agents */

/* kvti_engine_route but for what a case puts in its place. */
static struct kvti_engine_ops ops;

static void open_route(struct side *side, const char *name)
{
    const struct kvt_options options = options_of();

    *side = (struct side){.base = NULL};
    fake_env_open(&side->env, &ops, name, &options);
    side->base = malloc(3 * BYTES);
    assert_non_null(side->base);
    side->data = side->base + BYTES;
    fill(side, (unsigned char)name[0]);
    side->mem = (struct kvti_mem){
        .addr = number(side->data), .length = BYTES, .fd = -1};
    add_mem(side, &side->mem);
}

/* export_side() leaves the gate out. */
static void export_near(struct side *side, struct peer *peer)
{
    export_side(side, peer);
    peer->md.regions.mems[0].gate_slot = side->mem.gate_slot;
    peer->md.regions.mems[0].gate_gen = side->mem.gate_gen;
}

static void open_agents(struct pair *pair)
{
    fake.reset();
    ops = kvti_engine_route;
    open_route(&pair->a, "alpha");
    open_route(&pair->b, "beta");
    export_near(&pair->b, &pair->peer);
}

static void load_near(struct pair *pair)
{
    assert_int_equal(load_again(&pair->a, &pair->peer, &pair->peer), KVT_OK);
    assert_string_equal(pair->peer.load.path, "local");
}

static struct kvti_chunk *vram_chunk(const struct pair *pair)
{
    struct kvti_chunk *chunk = pieces(pair, KVT_OP_WRITE, 1);

    /* Not registered as such, so NIXL would refuse it. */
    chunk->local_kind = KVT_VRAM;
    return chunk;
}

static struct kvti_job message(void *conn, const char *text)
{
    struct kvti_job job = fake_job(KVTI_JOB_NOTIFY);

    job.conn = conn;
    assert_int_equal(kvti_buf_append(&job.buf, text, strlen(text)), KVT_OK);
    return job;
}

/* -------------------------------------------------------------------- unload */

struct two_jobs {
    struct kvti_job *first;
    struct kvti_job *second;
};

static void hand(struct fake_env *env, struct kvti_job *job)
{
    kvti_list_init(&job->node);
    kvti_list_init(&job->event_node);
    env->ops->job(env->engine, job);
}

/* No turn in between. */
static void submit_both(struct fake_env *env, void *arg)
{
    const struct two_jobs *jobs = arg;

    hand(env, jobs->first);
    hand(env, jobs->second);
}

static void a_message_on_its_way_to_nixl_ends_before_the_unload(void **state)
{
    struct kvti_job note;
    struct kvti_job unload = fake_job(KVTI_JOB_UNLOAD);
    struct two_jobs both = {&note, &unload};
    struct pair pair;

    (void)state;
    open_agents(&pair);
    pair.peer.md.local.net_ns++;
    load_near(&pair);
    note = message(pair.peer.conn, "far");
    unload.conn = pair.peer.conn;
    fake_env_call(&pair.a.env, submit_both, &both);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &unload), KVT_OK);
    assert_true(fake_env_is_reported(&pair.a.env, &note));
    assert_int_equal(fake_env_wait_job(&pair.a.env, &note), KVT_EDISCONNECTED);
    assert_int_equal(fake.count_lines("load"), 0);
    kvti_buf_fini(&note.buf);
    close_pair(&pair, KVT_OK);
}

static void what_waits_for_nixl_ends_before_the_unload(void **state)
{
    struct kvti_job note;
    struct kvti_job unload = fake_job(KVTI_JOB_UNLOAD);
    struct kvti_chunk *chunk;
    struct pair pair;

    (void)state;
    open_agents(&pair);
    pair.peer.md.local.net_ns++;
    load_near(&pair);
    fake.block("load", true);
    note = message(pair.peer.conn, "far");
    fake_env_submit(&pair.a.env, &note);
    chunk = vram_chunk(&pair);
    fake_env_post(&pair.a.env, chunk);
    while (fake.waiting("load") == 0) {
        sched_yield();
    }
    unload.conn = pair.peer.conn;
    fake_env_submit(&pair.a.env, &unload);
    /* At once, though NIXL hangs. */
    assert_int_equal(fake_env_wait_job(&pair.a.env, &note), KVT_EDISCONNECTED);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    assert_ptr_equal(chunk->conn, pair.peer.conn);
    assert_false(fake_env_is_reported(&pair.a.env, &unload));
    fake.block("load", false);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &unload), KVT_OK);
    assert_int_equal(fake.count_lines("create"), 0);
    free(chunk);
    kvti_buf_fini(&note.buf);
    close_pair(&pair, KVT_OK);
}

static void a_copy_that_outlives_its_peer_is_not_nixl_s(void **state)
{
    struct kvti_job unload = fake_job(KVTI_JOB_UNLOAD);
    struct kvti_chunk *chunk;
    struct peer next;
    struct pair pair;

    (void)state;
    open_agents(&pair);
    load_near(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 1);
    atomic_store(&held, true);
    fake_env_post(&pair.a.env, chunk);
    while (atomic_load(&holding) == 0) {
        sched_yield();
    }
    unload.conn = pair.peer.conn;
    unload.deadline_ns = 1;
    assert_int_equal(fake_env_job(&pair.a.env, &unload), KVT_EBUSY);
    /* What was freed would be given to the next. */
    export_near(&pair.b, &next);
    assert_int_equal(load_again(&pair.a, &next, &next), KVT_OK);
    assert_ptr_not_equal(next.conn, pair.peer.conn);
    atomic_store(&held, false);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_FAILED, KVTI_FIN_BOTH, KVT_EPERM);
    assert_int_equal(fake.count_lines("load"), 0);
    unload_peer(&pair.a, &next);
    free_peer(&next);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

/* --------------------------------------------------------------------- events */

struct breaking {
    struct pair *pair;
    struct peer *second;
    struct kvti_chunk *chunk;
};

/* The control thread stays in here while NIXL loads a peer and loses it. */
static void load_and_break(struct fake_env *env, void *arg)
{
    struct breaking *breaking = arg;

    hand(env, &breaking->second->load);
    wait_for_lines("load beta", 2);
    fake.script("post", NIXL_BACKEND, 1);
    env->ops->post(env->engine, breaking->chunk);
    wait_for_lines("post", 1);
}

static void a_break_during_the_load_is_told_after_it(void **state)
{
    struct breaking breaking;
    struct peer second;
    struct pair pair;

    (void)state;
    open_agents(&pair);
    pair.peer.md.has_local = false;
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    export_near(&pair.b, &second);
    second.md.has_local = false;
    second.load = fake_job(KVTI_JOB_LOAD);
    second.load.md = &second.md;
    second.load.link = &second;
    breaking = (struct breaking){&pair, &second,
                                 pieces(&pair, KVT_OP_WRITE, 1)};
    fake_env_call(&pair.a.env, load_and_break, &breaking);
    assert_int_equal(fake_env_wait_job(&pair.a.env, &second.load), KVT_OK);
    fake_env_wait_event(&pair.a.env, &second, KVTI_CONN_DOWN);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    second.conn = second.load.conn;
    unload_peer(&pair.a, &second);
    free_peer(&second);
    free_peer(&pair.peer);
    assert_int_equal(close_side(&pair.a), KVT_EBUSY);
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free(breaking.chunk);
}

/* ---------------------------------------------------------------------- close */

#define OPEN_JOBS 5

static struct kvti_job open_jobs[OPEN_JOBS];
static const struct kvti_md *open_md;
static struct kvti_mem open_mem;
static struct kvti_mem *open_mems[] = {&open_mem};
static void *open_conn;

/* Hands jobs over that nobody is left to answer: no turn comes any more. */
static int close_with_open_jobs(void *self, uint64_t deadline_ns)
{
    static const uint32_t kinds[OPEN_JOBS] = {KVTI_JOB_MEM_ADD, KVTI_JOB_EXPORT,
                                              KVTI_JOB_LOAD, KVTI_JOB_NOTIFY,
                                              KVTI_JOB_UNLOAD};

    for (int i = 0; i < OPEN_JOBS; i++) {
        struct kvti_job *job = &open_jobs[i];

        *job = fake_job(kinds[i]);
        kvti_list_init(&job->node);
        kvti_list_init(&job->event_node);
        if (kinds[i] == KVTI_JOB_MEM_ADD) {
            job->mems = open_mems;
            job->mem_count = 1;
        } else if (kinds[i] == KVTI_JOB_LOAD) {
            job->md = open_md;
            job->link = job;
        } else {
            job->conn = open_conn;
        }
        kvti_engine_route.job(self, job);
    }
    return kvti_engine_route.close(self, deadline_ns);
}

static void what_is_open_at_close_is_as_the_core_gave_it(void **state)
{
    struct pair pair;

    (void)state;
    open_agents(&pair);
    pair.peer.md.local.net_ns++; /* the message waits for NIXL */
    load_near(&pair);
    open_md = &pair.peer.md;
    open_conn = pair.peer.conn;
    open_mem = pair.a.mem;
    open_mem.length = 64;
    ops.close = close_with_open_jobs;
    assert_int_equal(close_side(&pair.a), KVT_OK);
    assert_ptr_equal(open_jobs[0].mems, open_mems);
    assert_int_equal(open_jobs[0].mem_count, 1);
    assert_int_equal(open_jobs[0].kind, KVTI_JOB_MEM_ADD);
    assert_null(open_jobs[2].conn);
    assert_ptr_equal(open_jobs[2].link, &open_jobs[2]);
    assert_ptr_equal(open_jobs[4].conn, open_conn);
    for (int i = 0; i < OPEN_JOBS; i++) {
        kvti_buf_fini(&open_jobs[i].buf);
    }
    ops.close = kvti_engine_route.close;
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free_peer(&pair.peer);
}

/* ----------------------------------------------------------------- no memory */

static void be_the_victim(struct fake_env *env, void *arg)
{
    (void)env;
    (void)arg;
    victim = pthread_self();
}

/* The code of a job whose n-th allocation fails, from 0. */
static int starved(struct pair *pair, struct kvti_job *job, int n)
{
    int code;

    kvti_buf_fini(&job->buf);
    job->buf = (struct kvti_buf){0};
    fake_env_call(&pair->a.env, be_the_victim, NULL);
    atomic_store(&allocations_left, n);
    code = fake_env_job(&pair->a.env, job);
    atomic_store(&allocations_left, -1);
    return code;
}

static void no_memory_is_an_error_and_nothing_more(void **state)
{
    struct kvti_mem mem;
    struct kvti_mem *mems[] = {&mem};
    struct kvti_job job;
    struct pair pair;
    int n;

    (void)state;
    open_agents(&pair);
    mem = (struct kvti_mem){.addr = pair.a.mem.addr, .length = 64, .fd = -1};
    job = fake_job(KVTI_JOB_MEM_ADD);
    job.mems = mems;
    job.mem_count = 1;
    for (n = 0; starved(&pair, &job, n) != KVT_OK; n++) {
        assert_int_equal(job.code, KVT_ENOMEM);
        assert_ptr_equal(job.mems, mems);
    }
    assert_true(n >= 2); /* the task, its list */
    job.kind = KVTI_JOB_MEM_DROP;
    for (n = 0; starved(&pair, &job, n) != KVT_OK; n++) {
        assert_int_equal(job.code, KVT_EBUSY);
    }
    assert_true(n >= 2);
    job = fake_job(KVTI_JOB_EXPORT);
    assert_int_equal(starved(&pair, &job, 0), KVT_ENOMEM);
    assert_int_equal(starved(&pair, &job, 1), KVT_OK);
    kvti_buf_fini(&job.buf);
    job = fake_job(KVTI_JOB_LOAD);
    job.md = &pair.peer.md;
    job.link = &job;
    for (n = 0; n < 2; n++) { /* the task, the connection */
        assert_int_equal(starved(&pair, &job, n), KVT_ENOMEM);
    }
    /* What near lacks, far may have. */
    assert_int_equal(starved(&pair, &job, n), KVT_OK);
    assert_string_equal(job.path, "nixl");
    assert_non_null(strstr(job.text, "no memory"));
    pair.peer.conn = job.conn;
    job = fake_job(KVTI_JOB_CONNECT);
    job.conn = pair.peer.conn;
    assert_int_equal(starved(&pair, &job, 0), KVT_ENOMEM);
    assert_ptr_equal(job.conn, pair.peer.conn);
    job = fake_job(KVTI_JOB_UNLOAD);
    job.conn = pair.peer.conn;
    assert_int_equal(starved(&pair, &job, 0), KVT_OK);
    load_near(&pair);
    close_pair(&pair, KVT_OK);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_message_on_its_way_to_nixl_ends_before_the_unload),
    cmocka_unit_test(what_waits_for_nixl_ends_before_the_unload),
    cmocka_unit_test(a_copy_that_outlives_its_peer_is_not_nixl_s),
    cmocka_unit_test(a_break_during_the_load_is_told_after_it),
    cmocka_unit_test(what_is_open_at_close_is_as_the_core_gave_it),
    cmocka_unit_test(no_memory_is_an_error_and_nothing_more),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("edge", cases)};

    if (find_stand_in() != 0) {
        return 1;
    }
    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
