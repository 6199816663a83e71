/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_env.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

struct fake_call {
    struct kvti_list node;
    void (*fn)(struct fake_env *env, void *arg);
    void *arg;
    bool done;
};

static _Noreturn void give_up(const char *what)
{
    fprintf(stderr, "fake_env: %s\n", what);
    abort();
}

static void lock(struct fake_env *env)
{
    pthread_mutex_lock(&env->mu);
}

static void unlock(struct fake_env *env)
{
    pthread_mutex_unlock(&env->mu);
}

static void wait_locked(struct fake_env *env, const char *what)
{
    uint64_t until_ns = kvti_now_ns() + FAKE_ENV_PATIENCE_NS;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                             .tv_nsec = (long)(until_ns % 1000000000u)};

    if (pthread_cond_timedwait(&env->cond, &env->mu, &until) != 0) {
        give_up(what);
    }
}

/* ----------------------------------------------------------------- reports */

static void report_chunk(void *ctx, struct kvti_chunk *chunk,
                         const struct kvti_outcome *outcome)
{
    struct fake_env *env = ctx;
    uint32_t fin;

    lock(env);
    fin = chunk->outcome.fin | outcome->fin;
    if (chunk->outcome.state == KVT_DONE) {
        chunk->outcome = *outcome;
    }
    chunk->outcome.fin = fin;
    if (fin == KVTI_FIN_BOTH) {
        kvti_assert(kvti_list_empty(&chunk->event_node));
        kvti_list_append(&env->chunks, &chunk->event_node);
        pthread_cond_broadcast(&env->cond);
    }
    unlock(env);
}

static void report_job(void *ctx, struct kvti_job *job, int code,
                       const struct kvt_error *err)
{
    struct fake_env *env = ctx;

    lock(env);
    kvti_assert(kvti_list_empty(&job->event_node));
    job->code = code;
    if (code != KVT_OK && err != NULL) {
        job->err = *err;
    }
    kvti_list_append(&env->jobs, &job->event_node);
    pthread_cond_broadcast(&env->cond);
    unlock(env);
}

static void report_conn(void *ctx, void *link, enum kvti_conn_event event,
                        const struct kvt_error *why)
{
    struct fake_env *env = ctx;
    struct fake_conn_event *seen;

    lock(env);
    if (env->event_count < FAKE_ENV_EVENTS) {
        seen = &env->events[env->event_count];
        seen->link = link;
        seen->event = event;
        kvti_format(seen->text, sizeof(seen->text), "%s",
                    why != NULL ? why->text : "");
        env->event_count++;
    }
    pthread_cond_broadcast(&env->cond);
    unlock(env);
}

static bool report_note(void *ctx, const char *agent_name, const void *bytes,
                        size_t length)
{
    struct fake_env *env = ctx;
    struct fake_note *note;

    lock(env);
    if (env->note_count >= env->note_capacity) {
        unlock(env);
        return false;
    }
    note = malloc(sizeof(*note) + length);
    if (note == NULL) {
        give_up("no memory");
    }
    kvti_list_init(&note->node);
    kvti_format(note->agent_name, sizeof(note->agent_name), "%s", agent_name);
    note->length = length;
    memcpy(note->bytes, bytes, length);
    kvti_list_append(&env->notes, &note->node);
    env->note_count++;
    pthread_cond_broadcast(&env->cond);
    unlock(env);
    return true;
}

static int watch(void *ctx, struct kvti_watch *watched)
{
    struct fake_env *env = ctx;
    struct epoll_event event = {.events = watched->events, .data.ptr = watched};

    if (epoll_ctl(env->epoll_fd, EPOLL_CTL_ADD, watched->fd, &event) != 0) {
        return KVT_ESYSTEM;
    }
    env->watch_count++;
    return KVT_OK;
}

static void unwatch(void *ctx, struct kvti_watch *watched)
{
    struct fake_env *env = ctx;

    if (epoll_ctl(env->epoll_fd, EPOLL_CTL_DEL, watched->fd, NULL) != 0) {
        give_up("unwatch of a descriptor that is not watched");
    }
    env->watch_count--;
}

static void add_heartbeat(void *ctx, struct kvti_heartbeat *heartbeat)
{
    (void)ctx;
    kvti_assert(heartbeat->what != NULL);
}

static void wake(void *ctx)
{
    struct fake_env *env = ctx;
    uint64_t one = 1;

    while (write(env->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
}

static void light(void *ctx)
{
    ((struct fake_env *)ctx)->light = true;
}

/* --------------------------------------------------------- control thread */

static void drain_wake(struct kvti_watch *woken, uint32_t events)
{
    uint64_t count;

    (void)events;
    while (read(woken->fd, &count, sizeof(count)) < 0 && errno == EINTR) {
    }
}

static void run_calls(struct fake_env *env)
{
    struct kvti_list *node;

    lock(env);
    while ((node = kvti_list_take(&env->calls)) != NULL) {
        struct fake_call *call = kvti_container(node, struct fake_call, node);

        unlock(env);
        call->fn(env, call->arg);
        lock(env);
        call->done = true;
        pthread_cond_broadcast(&env->cond);
    }
    unlock(env);
}

static void rest(struct fake_env *env, uint64_t until_ns)
{
    struct epoll_event event;
    uint64_t now_ns = kvti_now_ns();
    int timeout = -1;
    int count;

    if (until_ns != UINT64_MAX) {
        timeout = until_ns <= now_ns
                      ? 0
                      : (int)((until_ns - now_ns + 999999) / 1000000);
    }
    count = epoll_wait(env->epoll_fd, &event, 1, timeout);
    if (count == 1) {
        struct kvti_watch *ready = event.data.ptr;

        ready->ready(ready, event.events);
    }
}

static void *run(void *arg)
{
    struct fake_env *env = arg;

    while (!env->quit) {
        uint64_t next_ns = UINT64_MAX;

        run_calls(env);
        if (!env->quit && env->engine != NULL && env->ops->turn != NULL) {
            next_ns = env->ops->turn(env->engine, kvti_now_ns());
        }
        if (!env->quit && env->light) {
            /* What does not answer may not stop the test. */
            env->light = false;
            env->ops->work(env->engine, false);
        }
        if (!env->quit) {
            rest(env, next_ns);
        }
    }
    return NULL;
}

void fake_env_call(struct fake_env *env,
                   void (*fn)(struct fake_env *env, void *arg), void *arg)
{
    struct fake_call call = {.fn = fn, .arg = arg};

    kvti_list_init(&call.node);
    lock(env);
    kvti_list_append(&env->calls, &call.node);
    wake(env);
    while (!call.done) {
        wait_locked(env, "a call on the control thread does not come back");
    }
    unlock(env);
}

/* -------------------------------------------------------------- open, close */

static void init(struct fake_env *env, const struct kvti_engine_ops *ops,
                 const char *agent_name, const struct kvt_options *options)
{
    pthread_condattr_t attr;

    memset(env, 0, sizeof(*env));
    env->ops = ops;
    if (options != NULL) {
        env->options = *options;
    }
    if (env->options.workers == 0) {
        env->options.workers = 2;
    }
    kvti_format(env->agent_name, sizeof(env->agent_name), "%s", agent_name);
    if (getrandom(env->incarnation, sizeof(env->incarnation), 0) !=
        (ssize_t)sizeof(env->incarnation)) {
        give_up("no random bytes");
    }
    env->note_capacity = SIZE_MAX;
    kvti_list_init(&env->calls);
    kvti_list_init(&env->jobs);
    kvti_list_init(&env->chunks);
    kvti_list_init(&env->notes);
    pthread_mutex_init(&env->mu, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&env->cond, &attr);
    pthread_condattr_destroy(&attr);
    env->env = (struct kvti_env){
        .ctx = env,
        .report_chunk = report_chunk,
        .report_job = report_job,
        .report_conn = report_conn,
        .report_note = report_note,
        .watch = watch,
        .unwatch = unwatch,
        .heartbeat = add_heartbeat,
        .wake = wake,
        .light = light,
        .agent_name = env->agent_name,
        .incarnation = env->incarnation,
        .options = &env->options,
        .logger = {.log = env->options.log, .ctx = env->options.log_ctx},
    };
}

static void fini(struct fake_env *env)
{
    struct fake_note *note;

    while ((note = fake_env_take_note(env)) != NULL) {
        free(note);
    }
    close(env->epoll_fd);
    close(env->wake_fd);
    pthread_cond_destroy(&env->cond);
    pthread_mutex_destroy(&env->mu);
}

int fake_env_try(struct fake_env *env, const struct kvti_engine_ops *ops,
                 const char *agent_name, const struct kvt_options *options,
                 struct kvt_error *err)
{
    const char *rest = NULL;
    int code;

    init(env, ops, agent_name, options);
    if (env->options.engine != NULL) {
        rest = strchr(env->options.engine, ':');
    }
    env->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    env->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    env->wake_watch = (struct kvti_watch){
        .fd = env->wake_fd, .events = EPOLLIN, .ready = drain_wake};
    if (watch(env, &env->wake_watch) != KVT_OK) {
        give_up("no epoll");
    }
    code = ops->open(&env->env, rest != NULL ? rest + 1 : "", &env->engine,
                     &env->traits, err);
    if (code != KVT_OK) {
        if (env->watch_count != 1) {
            give_up("a failed open left a watch");
        }
        fini(env);
        return code;
    }
    if (pthread_create(&env->thread, NULL, run, env) != 0) {
        give_up("no thread");
    }
    return KVT_OK;
}

void fake_env_open(struct fake_env *env, const struct kvti_engine_ops *ops,
                   const char *agent_name, const struct kvt_options *options)
{
    struct kvt_error err;

    if (fake_env_try(env, ops, agent_name, options, &err) != KVT_OK) {
        give_up(err.text);
    }
}

struct closing {
    uint64_t timeout_ns;
    int code;
};

static void close_engine(struct fake_env *env, void *arg)
{
    struct closing *closing = arg;

    closing->code = env->ops->close(env->engine,
                                    kvti_now_ns() + closing->timeout_ns);
    env->engine = NULL;
    env->quit = true;
    if (env->watch_count != 1) {
        give_up("a closed engine left a watch");
    }
}

int fake_env_close(struct fake_env *env, uint64_t timeout_ns)
{
    struct closing closing = {.timeout_ns = timeout_ns};

    fake_env_call(env, close_engine, &closing);
    pthread_join(env->thread, NULL);
    fini(env);
    return closing.code;
}

/* --------------------------------------------------------- jobs and chunks */

struct kvti_job fake_job(uint32_t kind)
{
    return (struct kvti_job){.kind = kind, .deadline_ns = UINT64_MAX};
}

static void submit_job(struct fake_env *env, void *arg)
{
    env->ops->job(env->engine, arg);
}

void fake_env_submit(struct fake_env *env, struct kvti_job *job)
{
    kvti_list_init(&job->node);
    kvti_list_init(&job->event_node);
    fake_env_call(env, submit_job, job);
}

bool fake_env_is_reported(struct fake_env *env, struct kvti_job *job)
{
    bool reported;

    lock(env);
    reported = !kvti_list_empty(&job->event_node);
    unlock(env);
    return reported;
}

int fake_env_wait_job(struct fake_env *env, struct kvti_job *job)
{
    int code;

    lock(env);
    while (kvti_list_empty(&job->event_node)) {
        wait_locked(env, "a job is not reported");
    }
    kvti_list_remove(&job->event_node);
    code = job->code;
    unlock(env);
    return code;
}

int fake_env_job(struct fake_env *env, struct kvti_job *job)
{
    fake_env_submit(env, job);
    return fake_env_wait_job(env, job);
}

static void post_chunk(struct fake_env *env, void *arg)
{
    env->ops->post(env->engine, arg);
}

void fake_env_post(struct fake_env *env, struct kvti_chunk *chunk)
{
    fake_env_call(env, post_chunk, chunk);
}

void fake_env_wait_chunk(struct fake_env *env, struct kvti_chunk *chunk)
{
    lock(env);
    while (kvti_list_empty(&chunk->event_node)) {
        wait_locked(env, "a chunk is not reported");
    }
    kvti_list_remove(&chunk->event_node);
    unlock(env);
}

struct kvti_chunk *fake_chunk(void *conn, uint32_t op, uint32_t count)
{
    size_t size = sizeof(struct kvti_chunk) + count * sizeof(struct kvti_copy);
    struct kvti_chunk *chunk = aligned_alloc(16, (size + 15) / 16 * 16);

    if (chunk == NULL) {
        give_up("no memory");
    }
    memset(chunk, 0, size);
    kvti_list_init(&chunk->node);
    kvti_list_init(&chunk->event_node);
    chunk->conn = conn;
    chunk->op = op;
    chunk->count = count;
    chunk->outcome.state = KVT_DONE;
    return chunk;
}

/* ------------------------------------------------------ events and messages */

static bool has_event(const struct fake_env *env, const void *link,
                      enum kvti_conn_event event)
{
    for (size_t i = 0; i < env->event_count; i++) {
        if (env->events[i].link == link && env->events[i].event == event) {
            return true;
        }
    }
    return false;
}

void fake_env_wait_event(struct fake_env *env, void *link,
                         enum kvti_conn_event event)
{
    lock(env);
    while (!has_event(env, link, event)) {
        wait_locked(env, "an event of a connection is not reported");
    }
    unlock(env);
}

void fake_env_wait_notes(struct fake_env *env, size_t count)
{
    lock(env);
    while (env->note_count < count) {
        wait_locked(env, "a notification does not arrive");
    }
    unlock(env);
}

struct fake_note *fake_env_take_note(struct fake_env *env)
{
    struct kvti_list *node;

    lock(env);
    node = kvti_list_take(&env->notes);
    env->note_count -= node != NULL;
    unlock(env);
    return node != NULL ? kvti_container(node, struct fake_note, node) : NULL;
}

static void tell_wanted(struct fake_env *env, void *arg)
{
    (void)arg;
    env->ops->notes_wanted(env->engine);
}

void fake_env_want_notes(struct fake_env *env, size_t capacity)
{
    lock(env);
    env->note_capacity = capacity;
    unlock(env);
    fake_env_call(env, tell_wanted, NULL);
}
