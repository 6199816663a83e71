/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault engine: an engine around another one that misbehaves on order.
 * docs/fault.md is the manual of its rules.
 *
 *   core --job, post--> fault --job, post--> inner
 *   core <---reports--- fault <---reports--- inner
 *
 * Whatever the rules say, what reaches the core keeps to the contract of
 * engine.h, and what it claims about memory is true: FIN_BOTH is reported only
 * when the inner engine has said so or never had the chunk, and a peer is
 * called dead only when nothing of ours moves towards it any more.
 *
 * Every chunk and job has a record of ours from the call to its last report.
 * The chunk's and the job's own nodes and private bytes stay the inner
 * engine's. While it has one, `conn` and `link` are those that it knows, and
 * `wrapper` is our record; they are put back before anything is reported final.
 *
 * What a post or a job is told to do is fixed when it is handed over, together
 * with the epoch of the rules. New rules begin a new epoch; whatever an older
 * one held is free from then on. The next turn starts and reports it, on the
 * control thread, since only that may call the inner engine.
 *
 * Threads: job, post, turn, layout, close run on the control thread, rules on
 * any, the inner engine's reports on any. One lock guards all records. The
 * core's report functions are called with it held: they only queue, and that
 * keeps the reports of one chunk, and of one connection, in order. The inner
 * engine is never called with it held.
 */
#include "fault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ENGINE_MAX 63

void kvti_fault_lock(struct kvti_fault *fault)
{
    int rc = pthread_mutex_lock(&fault->lock);

    kvti_assert(rc == 0);
}

void kvti_fault_unlock(struct kvti_fault *fault)
{
    int rc = pthread_mutex_unlock(&fault->lock);

    kvti_assert(rc == 0);
}

/* -------------------------------------- what the inner engine asks of us */

static bool pass_note(void *ctx, const char *agent_name, const void *bytes,
                      size_t length)
{
    struct kvti_fault *fault = ctx;

    return fault->env->report_note(fault->env->ctx, agent_name, bytes, length);
}

static int pass_watch(void *ctx, struct kvti_watch *watch)
{
    struct kvti_fault *fault = ctx;

    return fault->env->watch(fault->env->ctx, watch);
}

static void pass_unwatch(void *ctx, struct kvti_watch *watch)
{
    struct kvti_fault *fault = ctx;

    fault->env->unwatch(fault->env->ctx, watch);
}

static void pass_heartbeat(void *ctx, struct kvti_heartbeat *heartbeat)
{
    struct kvti_fault *fault = ctx;

    fault->env->heartbeat(fault->env->ctx, heartbeat);
}

static void pass_wake(void *ctx)
{
    struct kvti_fault *fault = ctx;

    fault->env->wake(fault->env->ctx);
}

static void pass_light(void *ctx)
{
    struct kvti_fault *fault = ctx;

    fault->env->light(fault->env->ctx);
}

static void set_inner_env(struct kvti_fault *fault)
{
    struct kvti_env *env = &fault->inner_env;

    *env = *fault->env;
    env->ctx = fault;
    env->report_chunk = kvti_fault_chunk_back;
    env->report_job = kvti_fault_job_back;
    env->report_conn = kvti_fault_conn_event;
    env->report_note = pass_note;
    env->watch = pass_watch;
    env->unwatch = pass_unwatch;
    env->heartbeat = pass_heartbeat;
    env->wake = pass_wake;
    env->light = pass_light;
}

/* ------------------------------------------------------------------- open */

static int init_locks(struct kvti_fault *fault, struct kvt_error *err)
{
    pthread_condattr_t attr;
    int rc = pthread_mutex_init(&fault->lock, NULL);

    if (rc != 0) {
        goto failed;
    }
    rc = pthread_condattr_init(&attr);
    if (rc != 0) {
        goto failed_attr;
    }
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    rc = pthread_cond_init(&fault->inline_back, &attr);
    (void)pthread_condattr_destroy(&attr);
    if (rc != 0) {
        goto failed_attr;
    }
    return KVT_OK;

failed_attr:
    (void)pthread_mutex_destroy(&fault->lock);
failed:
    return kvti_fail_errno(err, KVT_ESYSTEM, rc,
                           "The fault engine could not make its lock");
}

void kvti_fault_post_free(struct kvti_fault_post *post)
{
    kvti_list_remove(&post->node);
    free(post);
}

void kvti_fault_job_free(struct kvti_fault_job *record)
{
    kvti_list_remove(&record->node);
    free(record);
}

void kvti_fault_conn_free(struct kvti_fault_conn *conn)
{
    kvti_list_remove(&conn->unload.node);
    kvti_list_remove(&conn->node);
    free(conn);
}

static void free_jobs(struct kvti_list *list)
{
    kvti_list_each(node, list) {
        struct kvti_fault_job *record = kvti_container(
            node, struct kvti_fault_job, node);

        if (record->kind == KVTI_JOB_LOAD) {
            kvti_fault_conn_free(record->conn);
        }
        if (record->kind != KVTI_JOB_UNLOAD) {
            kvti_fault_job_free(record);
        }
    }
}

static void free_all(struct kvti_fault *fault)
{
    kvti_list_each(node, &fault->posts) {
        kvti_fault_post_free(
            kvti_container(node, struct kvti_fault_post, node));
    }
    free_jobs(&fault->jobs_waiting);
    free_jobs(&fault->jobs_inner);
    free_jobs(&fault->jobs_late);
    kvti_list_each(node, &fault->conns) {
        kvti_fault_conn_free(
            kvti_container(node, struct kvti_fault_conn, node));
    }
    free(fault);
}

static void destroy(struct kvti_fault *fault)
{
    (void)pthread_cond_destroy(&fault->inline_back);
    (void)pthread_mutex_destroy(&fault->lock);
    free_all(fault);
}

/* A chunk made for the fault engine goes on to the inner one as it is, so the
 * limits can only be lowered. */
static int lower(const char *key, uint64_t ordered, uint64_t *limit,
                 struct kvt_error *err)
{
    if (ordered > *limit) {
        return kvti_fail(err, KVT_EINVAL,
                         "The fault rule %s=%llu is above the engine's own "
                         "limit of %llu; it can only be lowered.",
                         key, (unsigned long long)ordered,
                         (unsigned long long)*limit);
    }
    if (ordered != 0) {
        *limit = ordered;
    }
    return KVT_OK;
}

static int apply_traits(const struct kvti_fault_rules *rules,
                        struct kvti_engine_traits *traits,
                        struct kvt_error *err)
{
    uint64_t copies = traits->chunk_copies;
    uint64_t window = traits->window;
    int rc = lower("chunk_copies", rules->chunk_copies, &copies, err);

    if (rc == KVT_OK) {
        rc = lower("window", rules->window, &window, err);
    }
    if (rc == KVT_OK) {
        rc = lower("chunk_bytes", rules->chunk_bytes, &traits->chunk_bytes,
                   err);
    }
    if (rc != KVT_OK) {
        return rc;
    }
    traits->chunk_copies = (uint32_t)copies;
    traits->window = (uint32_t)window;
    if (rules->window != 0 && rules->window < traits->light) {
        traits->light = rules->window;
    }
    if (rules->no_notify) {
        traits->caps &= ~(uint32_t)KVTI_CAP_NOTIFY;
    }
    traits->no_strided = rules->no_strided;
    return KVT_OK;
}

int kvti_fault_wrap(const struct kvti_env *env,
                    const struct kvti_engine_ops *inner, const char *inner_rest,
                    const char *rules, void **ret_self,
                    struct kvti_engine_traits *ret_traits,
                    struct kvt_error *err)
{
    struct kvti_engine_traits traits = {0};
    struct kvti_fault *fault = calloc(1, sizeof(*fault));
    int rc;

    if (fault == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "The fault engine has no memory.");
    }
    fault->env = env;
    fault->inner = inner;
    kvti_list_init(&fault->posts);
    kvti_list_init(&fault->conns);
    kvti_list_init(&fault->jobs_waiting);
    kvti_list_init(&fault->jobs_inner);
    kvti_list_init(&fault->jobs_late);
    set_inner_env(fault);
    rc = init_locks(fault, err);
    if (rc != KVT_OK) {
        free(fault);
        return rc;
    }
    rc = kvti_fault_parse(rules, true, &fault->rules, err);
    if (rc == KVT_OK) {
        rc = inner->open(&fault->inner_env, inner_rest, &fault->inner_self,
                         &traits, err);
    }
    if (rc != KVT_OK) {
        destroy(fault);
        return rc;
    }
    rc = apply_traits(&fault->rules, &traits, err);
    if (rc != KVT_OK) {
        /* Nothing was given to it yet: it has nothing to wait for. */
        if (inner->close(fault->inner_self, kvti_now_ns()) == KVT_OK) {
            destroy(fault);
        }
        return rc;
    }
    /* As an engine without same-host tricks: a write to a dead process is
     * over, so that tests of quarantine can lift it by a death. */
    traits.dead_fin = KVTI_FIN_BOTH;
    *ret_self = fault;
    *ret_traits = traits;
    return KVT_OK;
}

/* "ENGINE?RULES" or "ENGINE". */
static int open_fault(const struct kvti_env *env, const char *rest,
                      void **ret_self, struct kvti_engine_traits *ret_traits,
                      struct kvt_error *err)
{
    const struct kvti_engine_ops *inner;
    const char *inner_rest;
    char spec[ENGINE_MAX + 1];
    size_t length = strcspn(rest, "?");
    const char *rules = rest + length + (rest[length] == '?' ? 1 : 0);

    if (length == 0 || length > ENGINE_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "The fault engine needs an engine to wrap, of at "
                         "most %d bytes: fault:ENGINE?RULES, for instance "
                         "fault:local?reject=3.",
                         ENGINE_MAX);
    }
    memcpy(spec, rest, length);
    spec[length] = '\0';
    inner = kvti_engine_find(spec, &inner_rest, err);
    if (inner == NULL) {
        return KVT_EUNSUPPORTED;
    }
    if (inner == &kvti_engine_fault) {
        return kvti_fail(err, KVT_EINVAL,
                         "The fault engine cannot wrap itself; join the rules "
                         "of both with a comma.");
    }
    return kvti_fault_wrap(env, inner, inner_rest, rules, ret_self, ret_traits,
                           err);
}

static int probe(struct kvt_engine_info *ret)
{
    ret->kinds = 1u << KVT_DRAM;
    kvti_format(ret->text, sizeof(ret->text),
                "wraps another engine and makes it misbehave on order, for "
                "tests: fault:ENGINE?RULES");
    return KVT_OK;
}

/* ------------------------------------------------------------------ close */

static void wait_until(uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};

    if (deadline_ns == UINT64_MAX) {
        return;
    }
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) ==
           EINTR) {
    }
}

static int close_fault(void *self, uint64_t deadline_ns)
{
    struct kvti_fault *fault = self;
    int rc = fault->inner->close(fault->inner_self, deadline_ns);

    if (rc != KVT_OK) {
        /* Its threads may still hold our environment: leaked with it. */
        return rc;
    }
    if (!kvti_list_empty(&fault->posts) || fault->unproven > 0) {
        rc = KVT_EBUSY;
    }
    if (fault->rules.close_hang) {
        wait_until(deadline_ns);
        rc = KVT_EBUSY;
    }
    destroy(fault);
    return rc;
}

/*
 * The lock was copied in whatever state the parent's threads had it. If one of
 * them was inside, the lists may be in the middle of a change: then the
 * child's copies of the records stay allocated. The condition is not destroyed:
 * that would wait for a thread that does not exist here.
 */
static void after_fork(void *self)
{
    struct kvti_fault *fault = self;

    if (fault->inner->after_fork != NULL) {
        fault->inner->after_fork(fault->inner_self);
    }
    if (pthread_mutex_trylock(&fault->lock) == 0) {
        (void)pthread_mutex_unlock(&fault->lock);
        free_all(fault);
    }
}

/* ------------------------------------------------------------ other calls */

static uint64_t turn(void *self, uint64_t now_ns)
{
    struct kvti_fault *fault = self;
    uint64_t jobs_ns = kvti_fault_turn_jobs(fault, now_ns);
    uint64_t next_ns = kvti_fault_turn_posts(fault, now_ns);

    next_ns = jobs_ns < next_ns ? jobs_ns : next_ns;
    if (fault->inner->turn != NULL) {
        uint64_t inner_ns = fault->inner->turn(fault->inner_self, now_ns);

        next_ns = inner_ns < next_ns ? inner_ns : next_ns;
    }
    return next_ns;
}

static void work(void *self, bool here)
{
    struct kvti_fault *fault = self;

    if (fault->inner->work != NULL) {
        fault->inner->work(fault->inner_self, here);
    }
}

static void leave(void *self)
{
    struct kvti_fault *fault = self;

    if (fault->inner->leave != NULL) {
        fault->inner->leave(fault->inner_self);
    }
}

static int layout(void *self, void *conn, const char *name,
                  struct kvt_error *err)
{
    struct kvti_fault *fault = self;
    struct kvti_fault_conn *own = conn;
    bool refused;

    kvti_fault_lock(fault);
    refused = fault->rules.layout_fail &&
              (fault->rules.layout_name[0] == '\0' ||
               strcmp(fault->rules.layout_name, name) == 0);
    kvti_fault_unlock(fault);
    if (refused) {
        return kvti_fail(err, KVT_EENGINE,
                         "The fault engine was told to refuse the layout "
                         "\"%.64s\".",
                         name);
    }
    if (fault->inner->layout == NULL) {
        return KVT_OK;
    }
    return fault->inner->layout(fault->inner_self, own->inner, name, err);
}

static void notes_wanted(void *self)
{
    struct kvti_fault *fault = self;

    if (fault->inner->notes_wanted != NULL) {
        fault->inner->notes_wanted(fault->inner_self);
    }
}

static int replace_rules(void *self, const char *text, struct kvt_error *err)
{
    struct kvti_fault *fault = self;
    struct kvti_fault_rules rules;
    int rc = kvti_fault_parse(text, false, &rules, err);

    if (rc != KVT_OK) {
        return rc;
    }
    kvti_fault_lock(fault);
    fault->rules = rules;
    fault->epoch++;
    fault->post_count = 0;
    memset(fault->job_count, 0, sizeof(fault->job_count));
    kvti_fault_unlock(fault);
    fault->env->wake(fault->env->ctx);
    return KVT_OK;
}

const struct kvti_engine_ops kvti_engine_fault = {
    .name = "fault",
    .probe = probe,
    .open = open_fault,
    .close = close_fault,
    .job = kvti_fault_job,
    .post = kvti_fault_post,
    .work = work,
    .leave = leave,
    .turn = turn,
    .layout = layout,
    .notes_wanted = notes_wanted,
    .rules = replace_rules,
    .after_fork = after_fork,
};
