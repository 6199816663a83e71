/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine `nixl`: its table, on the control thread, and the loop of the one
 * thread that calls NIXL.
 *
 * NIXL makes progress only while it is called (but see nixl_wake.c), so the
 * thread looks again and again: at once for as long as something happens and a
 * few microseconds beyond, then with naps that grow with the time that nothing
 * has happened. A transfer that takes a second is so looked at some times a
 * second, which nobody notices, and one that is stuck costs nothing. While we
 * know no peer, and none can know us since our metadata has not left the
 * process, there is nothing to look for: it just sleeps.
 */
#include "nixl.h"

#include <sched.h>

#include "nixl_check.h"

/* How long it looks without a nap: a request over shared memory takes
 * microseconds, and so does the next command. With 30 us a bulk write over TCP
 * was slower by an eighth, for its target slept in between. */
#define SPIN_NS UINT64_C(100000)
/* Naps are this part of the time that nothing has happened. */
#define NAP_PART 4u
#define NAP_LEAST_NS UINT64_C(20000)
#define NAP_MOST_NS UINT64_C(30000000)

/* ------------------------------------------------------------------ reports */

bool kvti_nixl_report_begin(struct kvti_nixl *engine)
{
    bool begun;

    pthread_mutex_lock(&engine->mu);
    begun = !engine->stop;
    engine->reporting += begun;
    pthread_mutex_unlock(&engine->mu);
    return begun;
}

void kvti_nixl_report_end(struct kvti_nixl *engine)
{
    pthread_mutex_lock(&engine->mu);
    engine->reporting--;
    if (engine->reporting == 0) {
        pthread_cond_broadcast(&engine->quiet);
    }
    pthread_mutex_unlock(&engine->mu);
}

void kvti_nixl_report_job(struct kvti_nixl *engine, struct kvti_job *job,
                          int code, const struct kvt_error *err)
{
    if (kvti_nixl_report_begin(engine)) {
        engine->env->report_job(engine->env->ctx, job, code, err);
        kvti_nixl_report_end(engine);
    }
}

/* ---------------------------------------------------------- the NIXL thread */

/* A peer is loaded; the rest of it is the control thread's. */
static void hand_back(struct kvti_nixl *engine, struct kvti_job *job)
{
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->done, &job->node);
    pthread_mutex_unlock(&engine->mu);
    if (kvti_nixl_report_begin(engine)) {
        engine->env->wake(engine->env->ctx);
        kvti_nixl_report_end(engine);
    }
}

static void run_job(struct kvti_nixl *engine, struct kvti_job *job)
{
    struct kvt_error err;
    int code = KVT_OK;

    switch (job->kind) {
    case KVTI_JOB_MEM_ADD:
        code = kvti_nixl_mem_add(engine, job, &err);
        break;
    case KVTI_JOB_MEM_DROP:
        kvti_nixl_mem_drop(engine, job);
        break;
    case KVTI_JOB_EXPORT:
        code = kvti_nixl_export(engine, job, &err);
        break;
    case KVTI_JOB_LOAD:
        if (kvti_nixl_check(engine, job)) {
            return;
        }
        code = kvti_nixl_load_peer(engine, job, &err);
        if (code == KVT_OK) {
            hand_back(engine, job);
            return;
        }
        break;
    case KVTI_JOB_CONNECT:
        kvti_nixl_connect(engine, job);
        return;
    case KVTI_JOB_UNLOAD:
        kvti_nixl_unload_peer(engine, job);
        return;
    default:
        kvti_assert(job->kind == KVTI_JOB_NOTIFY);
        kvti_nixl_notify(engine, job);
        return;
    }
    kvti_nixl_report_job(engine, job, code, &err);
}

static void take_chunks(struct kvti_nixl *engine, struct kvti_list *chunks)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(chunks)) != NULL) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);
        struct kvti_nixl_conn *conn = chunk->conn;
        struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);

        *at = (struct kvti_nixl_chunk){
            .remote = conn->remote,
            .proc = kvti_nixl_proc_share(engine, conn->proc),
        };
        conn->remote->queued++;
        kvti_list_append(&engine->pending, &chunk->node);
    }
}

/* False: the end. */
static bool take_in(struct kvti_nixl *engine)
{
    struct kvti_list jobs;
    struct kvti_list chunks;
    struct kvti_list *node;
    bool settle;
    bool stop;

    kvti_list_init(&jobs);
    kvti_list_init(&chunks);
    pthread_mutex_lock(&engine->mu);
    stop = engine->stop;
    if (!stop) {
        kvti_list_splice(&jobs, &engine->jobs);
        kvti_list_splice(&chunks, &engine->chunks);
    }
    settle = engine->settle;
    engine->settle = false;
    pthread_mutex_unlock(&engine->mu);
    /* Chunks first: an UNLOAD reports those of its connection. */
    take_chunks(engine, &chunks);
    if (settle) {
        kvti_nixl_remotes_settle(engine);
        kvti_nixl_settle(engine);
    }
    while ((node = kvti_list_take(&jobs)) != NULL) {
        engine->busy = true;
        run_job(engine, kvti_container(node, struct kvti_job, node));
    }
    return !stop;
}

/* How long to sleep at most; 0: not at all, there is something to do soon. */
static uint64_t nap_for(const struct kvti_nixl *engine, uint64_t idle_ns)
{
    bool under_way = !kvti_list_empty(&engine->flying) ||
                     !kvti_list_empty(&engine->probes) ||
                     !kvti_list_empty(&engine->unconfirmed);
    uint64_t nap_ns = idle_ns / NAP_PART;

    if (idle_ns < SPIN_NS) {
        return 0;
    }
    if (!under_way && !kvti_nixl_is_open(engine)) {
        return UINT64_MAX;
    }
    nap_ns = nap_ns < NAP_LEAST_NS ? NAP_LEAST_NS : nap_ns;
    return nap_ns > NAP_MOST_NS ? NAP_MOST_NS : nap_ns;
}

static void rest(struct kvti_nixl *engine)
{
    uint64_t now_ns = kvti_now_ns();
    uint64_t nap_ns;

    if (engine->busy) {
        engine->active_ns = now_ns;
        kvti_nixl_hints_worked(&engine->hints);
        return;
    }
    if (!kvti_list_empty(&engine->pending)) {
        return;
    }
    nap_ns = nap_for(engine, now_ns - engine->active_ns);
    if (nap_ns == 0) {
        sched_yield();
    } else if (kvti_nixl_sleep(engine, now_ns, nap_ns)) {
        engine->active_ns = kvti_now_ns();
    }
}

/* What it does takes long for a thread that was just woken, and those who wake
 * it, the caller among them, want to go on. */
static void be_patient(void)
{
    const struct sched_param none = {.sched_priority = 0};

    /* Who runs the host program at a policy of its own knows why. */
    if (sched_getscheduler(0) == SCHED_OTHER) {
        (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
    }
}

static void serve(struct kvti_nixl *engine)
{
    be_patient();
    while (take_in(engine)) {
        kvti_nixl_post_pending(engine);
        kvti_nixl_poll_flying(engine);
        kvti_nixl_poll_probes(engine);
        kvti_nixl_confirm_landed(engine);
        kvti_nixl_poll_notes(engine);
        kvti_nixl_remotes_sweep(engine);
        rest(engine);
        engine->busy = false;
    }
}

void *kvti_nixl_thread(void *arg)
{
    struct kvti_nixl *engine = arg;
    struct kvt_error err = {.code = KVT_OK};
    int code = kvti_nixl_setup(engine, &err);
    bool abandoned;

    pthread_mutex_lock(&engine->mu);
    engine->started = true;
    engine->setup_code = code;
    engine->setup_err = err;
    pthread_cond_broadcast(&engine->quiet);
    pthread_mutex_unlock(&engine->mu);
    if (code == KVT_OK) {
        serve(engine);
        kvti_nixl_teardown(engine);
    }
    pthread_mutex_lock(&engine->mu);
    engine->ended = true;
    abandoned = engine->abandoned;
    pthread_cond_broadcast(&engine->quiet);
    pthread_mutex_unlock(&engine->mu);
    if (abandoned) {
        kvti_nixl_free_abandoned(engine);
    }
    return NULL;
}

/* --------------------------------------------------------- control thread */

static void publish(struct kvti_nixl *engine, struct kvti_job *job)
{
    const struct kvti_env *env = engine->env;
    struct kvti_nixl_conn *conn = *kvti_nixl_job_conn(job);
    struct kvt_error why;
    bool broke;

    kvti_list_append(&engine->conns, &conn->node);
    if (conn->proc != NULL) {
        kvti_nixl_proc_watch(conn->proc);
    }
    job->conn = conn;
    kvti_format(job->path, sizeof(job->path), "nixl");
    kvti_format(job->text, sizeof(job->text), "%s", engine->text);
    env->report_job(env->ctx, job, KVT_OK, NULL);
    pthread_mutex_lock(&engine->mu);
    conn->published = true;
    broke = conn->broke;
    pthread_mutex_unlock(&engine->mu);
    if (conn->proc != NULL && conn->proc->gone) {
        kvti_fail(&why, KVT_EDISCONNECTED, "process %d has ended",
                  (int)conn->proc->pid);
        env->report_conn(env->ctx, conn->link, KVTI_CONN_DEAD, &why);
    } else if (broke) {
        kvti_fail(&why, KVT_EDISCONNECTED,
                  "the link broke while the peer was loaded: reload it");
        env->report_conn(env->ctx, conn->link, KVTI_CONN_DOWN, &why);
    }
}

static uint64_t nixl_turn(void *self, uint64_t now_ns)
{
    struct kvti_nixl *engine = self;
    struct kvti_list done;
    struct kvti_list *node;

    (void)now_ns;
    kvti_list_init(&done);
    pthread_mutex_lock(&engine->mu);
    kvti_list_splice(&done, &engine->done);
    pthread_mutex_unlock(&engine->mu);
    while ((node = kvti_list_take(&done)) != NULL) {
        publish(engine, kvti_container(node, struct kvti_job, node));
    }
    kvti_nixl_procs_sweep(engine);
    return UINT64_MAX;
}

static void nixl_job(void *self, struct kvti_job *job)
{
    struct kvti_nixl *engine = self;

    if (job->kind == KVTI_JOB_UNLOAD) {
        struct kvti_nixl_conn *conn = job->conn;

        kvti_list_remove(&conn->node);
    }
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->jobs, &job->node);
    kvti_nixl_wake_locked(engine);
    pthread_mutex_unlock(&engine->mu);
}

static void nixl_post(void *self, struct kvti_chunk *chunk)
{
    struct kvti_nixl *engine = self;

    chunk->path = KVTI_PATH_NIXL;
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->chunks, &chunk->node);
    kvti_nixl_wake_locked(engine);
    pthread_mutex_unlock(&engine->mu);
}

static void nixl_notes_wanted(void *self)
{
    struct kvti_nixl *engine = self;

    pthread_mutex_lock(&engine->mu);
    engine->notes_wanted = true;
    kvti_nixl_wake_locked(engine);
    pthread_mutex_unlock(&engine->mu);
}

const struct kvti_engine_ops kvti_engine_nixl = {
    .name = "nixl",
    .probe = kvti_nixl_probe,
    .open = kvti_nixl_open,
    .close = kvti_nixl_close,
    .job = nixl_job,
    .post = nixl_post,
    .turn = nixl_turn,
    .notes_wanted = nixl_notes_wanted,
    .after_fork = kvti_nixl_after_fork,
};
