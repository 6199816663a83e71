/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGES_MAX 64
#define HOUR_NS (3600u * (uint64_t)1000000000u)

struct fake_conn {
    struct kvti_list node;
    void *link;
};

/* One thing to do; either chunk or job. In the thing's own private bytes. */
struct work {
    struct kvti_list node;
    struct kvti_chunk *chunk;
    struct kvti_job *job;
};

struct fake_engine {
    const struct kvti_env *env;
    bool partial;
    struct kvti_heartbeat heartbeat;
    struct kvti_watch watch;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    /* Under the lock. */
    struct kvti_list queue;
    bool busy;
    bool paused;
    bool quit;
    bool stuck;
    uint32_t state;
    uint64_t posts;
    uint64_t wants;
    uint64_t jobs[KVTI_JOB_NOTIFY + 1];
    struct kvti_list conns;
    struct fake_conn *newest;
    char messages[MESSAGES_MAX + 1];
};

_Static_assert(sizeof(struct work) <= KVTI_PRIV_BYTES, "fits priv");

static struct fake_engine *newest_engine;

struct fake_engine *fake_engine_get(void)
{
    return newest_engine;
}

static void copy_chunk(const struct kvti_chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        void *local = (void *)(uintptr_t)chunk->copies[i].local;
        void *peer = (void *)(uintptr_t)chunk->copies[i].peer;

        if (chunk->op == KVT_OP_READ) {
            memcpy(local, peer, chunk->copies[i].length);
        } else {
            memcpy(peer, local, chunk->copies[i].length);
        }
    }
}

static void do_chunk(struct fake_engine *engine, struct kvti_chunk *chunk,
                     uint32_t state)
{
    struct kvti_outcome outcome = {
        .state = state,
        .fin = KVTI_FIN_BOTH,
        .code = state == KVT_DONE ? KVT_OK : KVT_EENGINE,
        .engine_code = state == KVT_DONE ? 0 : -77,
    };

    copy_chunk(chunk);
    if (engine->partial) {
        struct kvti_outcome first = outcome;

        first.fin = KVTI_FIN_LOCAL;
        engine->env->report_chunk(engine->env->ctx, chunk, &first);
    }
    engine->env->report_chunk(engine->env->ctx, chunk, &outcome);
}

static void do_job(struct fake_engine *engine, struct kvti_job *job)
{
    struct fake_conn *conn = job->conn;

    if (job->kind == KVTI_JOB_LOAD) {
        conn = calloc(1, sizeof(*conn));
        kvti_assert(conn != NULL);
        conn->link = job->link;
        job->conn = conn;
        kvti_format(job->path, sizeof(job->path), "fake");
        pthread_mutex_lock(&engine->lock);
        kvti_list_append(&engine->conns, &conn->node);
        engine->newest = conn;
        pthread_mutex_unlock(&engine->lock);
    } else if (job->kind == KVTI_JOB_UNLOAD) {
        pthread_mutex_lock(&engine->lock);
        if (engine->newest == conn) {
            engine->newest = NULL;
        }
        kvti_list_remove(&conn->node);
        pthread_mutex_unlock(&engine->lock);
        free(conn);
    } else if (job->kind == KVTI_JOB_NOTIFY) {
        pthread_mutex_lock(&engine->lock);
        kvti_format(engine->messages + strlen(engine->messages), 2, "%c",
                    job->buf.data[0]);
        pthread_mutex_unlock(&engine->lock);
    }
    engine->env->report_job(engine->env->ctx, job, KVT_OK, NULL);
}

static void *run(void *arg)
{
    struct fake_engine *engine = arg;

    pthread_mutex_lock(&engine->lock);
    while (!engine->quit) {
        struct kvti_list *node = NULL;
        struct work work;
        uint32_t state = engine->state;

        if (!engine->paused) {
            node = kvti_list_take(&engine->queue);
        }
        if (node == NULL) {
            pthread_cond_wait(&engine->cond, &engine->lock);
            continue;
        }
        work = *kvti_container(node, struct work, node);
        engine->busy = true;
        pthread_mutex_unlock(&engine->lock);
        if (work.chunk != NULL) {
            do_chunk(engine, work.chunk, state);
        } else {
            do_job(engine, work.job);
        }
        pthread_mutex_lock(&engine->lock);
        engine->busy = false;
        pthread_cond_broadcast(&engine->cond);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static int open_engine(const struct kvti_env *env, const char *rest,
                       void **ret_self, struct kvti_engine_traits *ret_traits,
                       struct kvt_error *err)
{
    struct fake_engine *engine;

    if (strcmp(rest, "refuse") == 0) {
        return kvti_fail(err, KVT_ESYSTEM, "the fake engine was told so");
    }
    engine = calloc(1, sizeof(*engine));
    kvti_assert(engine != NULL);
    engine->env = env;
    engine->partial = strcmp(rest, "partial") == 0;
    engine->state = KVT_DONE;
    kvti_list_init(&engine->queue);
    kvti_list_init(&engine->conns);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->cond, NULL);
    kvti_assert(pthread_create(&engine->thread, NULL, run, engine) == 0);
    engine->watch.fd = -1;
    engine->heartbeat.what = "the fake engine's thread";
    env->heartbeat(env->ctx, &engine->heartbeat);
    kvti_assert(env->watch(env->ctx, &engine->watch) == KVT_OK);
    newest_engine = engine;
    *ret_self = engine;
    *ret_traits = (struct kvti_engine_traits){
        .caps = KVTI_CAP_DRAM | KVTI_CAP_NOTIFY,
        .chunk_copies = 64,
        .chunk_bytes = 1 << 20,
        .window = 4,
        .dead_fin = KVTI_FIN_BOTH,
    };
    return KVT_OK;
}

static void free_conns(struct fake_engine *engine)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&engine->conns)) != NULL) {
        free(kvti_container(node, struct fake_conn, node));
    }
}

static int close_engine(void *self, uint64_t deadline_ns)
{
    struct fake_engine *engine = self;
    bool stuck;

    (void)deadline_ns;
    pthread_mutex_lock(&engine->lock);
    stuck = engine->stuck;
    engine->stuck = false;
    engine->quit = !stuck;
    pthread_cond_broadcast(&engine->cond);
    pthread_mutex_unlock(&engine->lock);
    if (stuck) {
        return KVT_EBUSY;
    }
    pthread_join(engine->thread, NULL);
    engine->env->unwatch(engine->env->ctx, &engine->watch);
    free_conns(engine);
    pthread_cond_destroy(&engine->cond);
    pthread_mutex_destroy(&engine->lock);
    newest_engine = NULL;
    free(engine);
    return KVT_OK;
}

static void hand_over(struct fake_engine *engine, struct work *work)
{
    kvti_list_append(&engine->queue, &work->node);
    pthread_cond_broadcast(&engine->cond);
    pthread_mutex_unlock(&engine->lock);
}

static void take_job(void *self, struct kvti_job *job)
{
    struct fake_engine *engine = self;
    struct work *work = (struct work *)(void *)job->priv;

    *work = (struct work){.job = job};
    pthread_mutex_lock(&engine->lock);
    engine->jobs[job->kind]++;
    hand_over(engine, work);
}

static void take_chunk(void *self, struct kvti_chunk *chunk)
{
    struct fake_engine *engine = self;
    struct work *work = (struct work *)(void *)chunk->priv;

    *work = (struct work){.chunk = chunk};
    pthread_mutex_lock(&engine->lock);
    engine->posts++;
    hand_over(engine, work);
}

static uint64_t turn(void *self, uint64_t now_ns)
{
    struct fake_engine *engine = self;

    engine->env->wake(engine->env->ctx);
    return now_ns + HOUR_NS;
}

static int layout(void *self, void *conn, const char *name,
                  struct kvt_error *err)
{
    struct fake_engine *engine = self;
    bool known;

    pthread_mutex_lock(&engine->lock);
    known = conn == engine->newest;
    pthread_mutex_unlock(&engine->lock);
    kvti_assert(known);
    if (strcmp(name, "inner") == 0) {
        return kvti_fail(err, KVT_EUNSUPPORTED, "not this name");
    }
    return KVT_OK;
}

static void notes_wanted(void *self)
{
    struct fake_engine *engine = self;

    pthread_mutex_lock(&engine->lock);
    engine->wants++;
    pthread_mutex_unlock(&engine->lock);
}

/* The parent's thread is not here; its engine is a copy to be freed. */
static void after_fork(void *self)
{
    struct fake_engine *engine = self;

    free_conns(engine);
    free(engine);
}

void fake_engine_pause(struct fake_engine *engine, bool paused)
{
    pthread_mutex_lock(&engine->lock);
    engine->paused = paused;
    pthread_cond_broadcast(&engine->cond);
    pthread_mutex_unlock(&engine->lock);
}

void fake_engine_drain(struct fake_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    while (engine->busy || !kvti_list_empty(&engine->queue)) {
        pthread_cond_wait(&engine->cond, &engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
}

uint64_t fake_engine_posts(struct fake_engine *engine)
{
    uint64_t posts;

    pthread_mutex_lock(&engine->lock);
    posts = engine->posts;
    pthread_mutex_unlock(&engine->lock);
    return posts;
}

uint64_t fake_engine_jobs(struct fake_engine *engine, uint32_t kind)
{
    uint64_t jobs;

    pthread_mutex_lock(&engine->lock);
    jobs = engine->jobs[kind];
    pthread_mutex_unlock(&engine->lock);
    return jobs;
}

void fake_engine_set_state(struct fake_engine *engine, uint32_t state)
{
    pthread_mutex_lock(&engine->lock);
    engine->state = state;
    pthread_mutex_unlock(&engine->lock);
}

void fake_engine_report_conn(struct fake_engine *engine,
                             enum kvti_conn_event event)
{
    struct kvt_error why;
    void *link;

    pthread_mutex_lock(&engine->lock);
    link = engine->newest->link;
    pthread_mutex_unlock(&engine->lock);
    (void)kvti_fail(&why, KVT_EDISCONNECTED, "the fake engine's own event");
    engine->env->report_conn(engine->env->ctx, link, event, &why);
}

bool fake_engine_receive(struct fake_engine *engine, const char *text)
{
    return engine->env->report_note(engine->env->ctx, "sender", text,
                                    strlen(text));
}

uint64_t fake_engine_wants(struct fake_engine *engine)
{
    uint64_t wants;

    pthread_mutex_lock(&engine->lock);
    wants = engine->wants;
    pthread_mutex_unlock(&engine->lock);
    return wants;
}

void fake_engine_stick(struct fake_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    engine->stuck = true;
    pthread_mutex_unlock(&engine->lock);
}

void fake_engine_messages(struct fake_engine *engine, char *text, size_t size)
{
    pthread_mutex_lock(&engine->lock);
    kvti_format(text, size, "%s", engine->messages);
    pthread_mutex_unlock(&engine->lock);
}

const struct kvti_engine_ops fake_engine_ops = {
    .name = "fake",
    .open = open_engine,
    .close = close_engine,
    .job = take_job,
    .post = take_chunk,
    .turn = turn,
    .layout = layout,
    .notes_wanted = notes_wanted,
    .after_fork = after_fork,
};
