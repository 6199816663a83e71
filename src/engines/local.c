/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine `local`: its table, its jobs and its timers, all on the control
 * thread.
 *
 * Jobs that cannot block are done on the spot. LOAD, CONNECT and UNLOAD go by
 * way of the helper (local_peer.c), heavy chunks by way of the workers
 * (local_copy.c), light ones wait for the core's call of work()
 * (local_light.c), and MEM_DROP waits in turn() for the writers to be out
 * (local_mem.c). What waits for time wakes the core, so that its next sleep
 * asks turn() again.
 */
#include "local.h"

/* -------------------------------------------------------------------- chunks */

/* One more worker when there is more to do than there are idle ones. */
static int start_worker(struct kvti_local *engine)
{
    struct kvti_local_worker *worker;
    char name[16];
    bool enough;
    int code;

    pthread_mutex_lock(&engine->mu);
    enough = engine->heavy.count < engine->idle;
    pthread_mutex_unlock(&engine->mu);
    if (enough || engine->worker_count == engine->worker_max) {
        return 0;
    }
    worker = &engine->workers[engine->worker_count];
    kvti_format(name, sizeof(name), "kvt-copy-%u", engine->worker_count);
    code = kvti_local_thread(worker, kvti_local_worker, name);
    if (code == 0) {
        engine->worker_count++;
    }
    return engine->worker_count > 0 ? 0 : code;
}

void kvti_local_to_worker(struct kvti_local *engine, struct kvti_chunk *chunk)
{
    const struct kvti_env *env = engine->env;
    struct kvti_local_conn *conn = chunk->conn;
    int code = start_worker(engine);

    if (code != 0) {
        struct kvti_outcome outcome;

        kvti_local_verdict(&outcome, KVT_FAILED, KVT_ESYSTEM, code,
                           "cannot start a copy thread (errno %d): raise the "
                           "limit of processes",
                           code);
        env->report_chunk(env->ctx, chunk, &outcome);
        kvti_local_conn_release(conn, 1);
        return;
    }
    pthread_mutex_lock(&engine->mu);
    kvti_local_put_locked(&engine->heavy, chunk);
    pthread_cond_signal(&engine->work);
    pthread_mutex_unlock(&engine->mu);
}

static void local_post(void *self, struct kvti_chunk *chunk)
{
    struct kvti_local *engine = self;
    struct kvti_local_conn *conn = chunk->conn;
    bool light;

    chunk->path = KVTI_PATH_LOCAL;
    pthread_mutex_lock(&engine->mu);
    kvti_assert(!conn->closing);
    conn->active++;
    light = kvti_local_is_light_locked(engine, chunk);
    if (light) {
        kvti_local_put_locked(&engine->light, chunk);
    }
    pthread_mutex_unlock(&engine->mu);
    if (light) {
        engine->env->light(engine->env->ctx);
    } else {
        kvti_local_to_worker(engine, chunk);
    }
}

/* Chunks of a connection that nobody has begun. The core counts them as lost,
 * or it would not unload; now they are proven. */
static void drop_chunks(struct kvti_local_conn *conn)
{
    struct kvti_local *engine = conn->engine;
    const struct kvti_env *env = engine->env;
    struct kvti_list dropped;
    struct kvti_list *node;

    kvti_list_init(&dropped);
    pthread_mutex_lock(&engine->mu);
    conn->active -= kvti_local_take_all_locked(&engine->heavy, conn, &dropped);
    conn->active -= kvti_local_take_all_locked(&engine->light, conn, &dropped);
    pthread_mutex_unlock(&engine->mu);
    while ((node = kvti_list_take(&dropped)) != NULL) {
        struct kvti_outcome outcome;

        kvti_local_verdict(&outcome, KVT_DISCONNECTED, KVT_EDISCONNECTED, 0,
                           "the peer was unloaded before this was copied");
        env->report_chunk(
            env->ctx, kvti_container(node, struct kvti_chunk, node), &outcome);
    }
}

/* -------------------------------------------------------------------- peers */

static void to_helper(struct kvti_local *engine, struct kvti_job *job)
{
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->jobs, &job->node);
    pthread_cond_signal(&engine->errand);
    pthread_mutex_unlock(&engine->mu);
}

static int start_helper(struct kvti_local *engine, struct kvt_error *err)
{
    int code = 0;

    if (!engine->helper_started) {
        code = kvti_local_thread(&engine->helper, kvti_local_helper,
                                 "kvt-local");
    }
    if (code != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, code,
                               "cannot start the thread that imports peers");
    }
    engine->helper_started = true;
    return KVT_OK;
}

static int start_load(struct kvti_local *engine, struct kvti_job *job,
                      struct kvt_error *err)
{
    int code = start_helper(engine, err);

    if (code != KVT_OK) {
        return code;
    }
    kvti_local_job_priv(job)->conn = kvti_local_conn_new(engine, job->link);
    if (kvti_local_job_conn(job) == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
    }
    to_helper(engine, job);
    return KVT_OK;
}

static void start_connect(struct kvti_local *engine, struct kvti_job *job)
{
    struct kvti_local_conn *conn = job->conn;

    kvti_local_job_priv(job)->conn = conn;
    pthread_mutex_lock(&engine->mu);
    conn->active++;
    pthread_mutex_unlock(&engine->mu);
    to_helper(engine, job);
}

static void start_unload(struct kvti_local *engine, struct kvti_job *job)
{
    struct kvti_local_conn *conn = job->conn;

    pthread_mutex_lock(&engine->mu);
    conn->closing = true;
    pthread_mutex_unlock(&engine->mu);
    kvti_local_conn_detach(conn);
    drop_chunks(conn);
    kvti_local_job_priv(job)->conn = conn;
    conn->unload = job;
    kvti_list_remove(&conn->node);
    kvti_list_append(&engine->unloading, &conn->node);
}

void kvti_local_conn_release(struct kvti_local_conn *conn, uint32_t count)
{
    struct kvti_local *engine = conn->engine;
    bool last;

    pthread_mutex_lock(&engine->mu);
    conn->active -= count;
    last = conn->active == 0 && conn->closing;
    pthread_mutex_unlock(&engine->mu);
    if (last && kvti_local_report_begin(engine)) {
        engine->env->wake(engine->env->ctx);
        kvti_local_report_end(engine);
    }
}

/* Hands connections whose last chunk is over to the helper. */
static uint64_t turn_unloads(struct kvti_local *engine, uint64_t now_ns)
{
    const struct kvti_env *env = engine->env;
    uint64_t next_ns = KVTI_NEVER_NS;

    kvti_list_each(node, &engine->unloading) {
        struct kvti_local_conn *conn = kvti_container(
            node, struct kvti_local_conn, node);
        struct kvti_job *job = conn->unload;
        struct kvt_error err;
        bool idle;

        pthread_mutex_lock(&engine->mu);
        idle = conn->active == 0;
        if (idle) {
            kvti_list_remove(&conn->node);
            kvti_list_append(job != NULL ? &engine->jobs : &engine->reap,
                             job != NULL ? &job->node : &conn->node);
            pthread_cond_signal(&engine->errand);
        }
        pthread_mutex_unlock(&engine->mu);
        if (idle || job == NULL) {
            continue;
        }
        if (now_ns < job->deadline_ns) {
            next_ns = job->deadline_ns < next_ns ? job->deadline_ns : next_ns;
            continue;
        }
        conn->unload = NULL;
        kvti_fail(&err, KVT_EBUSY,
                  "a copy to or from process %d does not come back, so what "
                  "is mapped of it stays mapped until it does",
                  conn->target->proc->pid);
        env->report_job(env->ctx, job, KVT_EBUSY, &err);
    }
    return next_ns;
}

/* What the helper did well goes on here. */
static void turn_done(struct kvti_local *engine)
{
    const struct kvti_env *env = engine->env;
    struct kvti_list done;
    struct kvti_list *node;

    kvti_list_init(&done);
    pthread_mutex_lock(&engine->mu);
    kvti_list_splice(&done, &engine->done);
    pthread_mutex_unlock(&engine->mu);
    while ((node = kvti_list_take(&done)) != NULL) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, node);
        struct kvti_local_conn *conn = kvti_local_job_conn(job);

        if (job->kind == KVTI_JOB_LOAD) {
            kvti_local_conn_publish(conn, job);
        } else if (conn->closing) {
            struct kvt_error err;

            kvti_fail(&err, KVT_EDISCONNECTED, "the peer was unloaded");
            env->report_job(env->ctx, job, KVT_EDISCONNECTED, &err);
            kvti_local_conn_release(conn, 1);
        } else {
            kvti_local_out_add(conn, job);
            kvti_local_conn_release(conn, 1);
        }
    }
}

static uint64_t earlier(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns < b_ns ? a_ns : b_ns;
}

static uint64_t local_turn(void *self, uint64_t now_ns)
{
    struct kvti_local *engine = self;
    uint64_t next_ns;

    kvti_local_ins_sweep(engine);
    turn_done(engine);
    next_ns = kvti_local_mem_turn(engine, now_ns);
    next_ns = earlier(next_ns, turn_unloads(engine, now_ns));
    next_ns = earlier(next_ns, kvti_local_listen_turn(engine, now_ns));
    return earlier(next_ns, kvti_local_out_turn(engine, now_ns));
}

static void export_id(struct kvti_local *engine, struct kvti_job *job)
{
    job->local = engine->self;
    job->has_local = true;
}

static void wake_for(struct kvti_local *engine, uint64_t next_ns)
{
    if (next_ns != KVTI_NEVER_NS) {
        engine->env->wake(engine->env->ctx);
    }
}

static void local_job(void *self, struct kvti_job *job)
{
    struct kvti_local *engine = self;
    const struct kvti_env *env = engine->env;
    struct kvti_local_conn *conn;
    struct kvt_error err;
    int code;

    switch (job->kind) {
    case KVTI_JOB_MEM_ADD:
        code = kvti_local_mem_add(engine, job, &err);
        env->report_job(env->ctx, job, code, &err);
        break;
    case KVTI_JOB_MEM_DROP:
        kvti_local_mem_drop(engine, job);
        wake_for(engine, kvti_local_mem_turn(engine, kvti_now_ns()));
        break;
    case KVTI_JOB_EXPORT:
        /* For its sign of life; without one our peers only ask more. */
        (void)start_helper(engine, &err);
        export_id(engine, job);
        env->report_job(env->ctx, job, KVT_OK, NULL);
        break;
    case KVTI_JOB_LOAD:
        code = start_load(engine, job, &err);
        if (code != KVT_OK) {
            env->report_job(env->ctx, job, code, &err);
        }
        break;
    case KVTI_JOB_CONNECT:
        start_connect(engine, job);
        break;
    case KVTI_JOB_UNLOAD:
        start_unload(engine, job);
        wake_for(engine, turn_unloads(engine, kvti_now_ns()));
        break;
    default:
        kvti_assert(job->kind == KVTI_JOB_NOTIFY);
        conn = job->conn;
        kvti_local_out_add(conn, job);
        wake_for(engine, kvti_list_empty(&conn->out.jobs) ? KVTI_NEVER_NS : 0);
        break;
    }
}

const struct kvti_engine_ops kvti_engine_local = {
    .name = "local",
    .probe = kvti_local_probe,
    .open = kvti_local_open,
    .close = kvti_local_close,
    .job = local_job,
    .post = local_post,
    .work = kvti_local_work,
    .leave = kvti_local_leave,
    .turn = local_turn,
    .notes_wanted = kvti_local_notes_wanted,
    /* No after_fork: fork() may have cut any list of ours in half, and what
     * is mapped costs the child nothing. */
};
