/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of the engine `local`: open, threads, close.
 *
 * open makes what is cheap: the page that names the agent, the gate, the
 * notification socket. Threads are started by the first job or chunk that
 * needs them.
 *
 * close sets `stop` first. From then on nobody begins a report, and close does
 * not return while one is being made, so that what it leaves behind when a
 * thread is stuck never calls into a core that is gone.
 */
#include "local.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define CHUNK_COPIES 1024u
#define CHUNK_BYTES (UINT64_C(1) << 20)
/* One to copy and some in hand, so that the control thread need not hurry. */
#define CHUNKS_PER_WORKER 4u
/* As many as one system call of the control thread may copy. */
#define LIGHT_CHUNKS KVTI_LIGHT_COPIES
/* Two batches of iovecs and a few sentences; sanitizers want more. */
#define STACK_BYTES (512UL * 1024UL)

/* ------------------------------------------------------ threads and reports */

bool kvti_local_report_begin(struct kvti_local *engine)
{
    bool begun;

    pthread_mutex_lock(&engine->mu);
    begun = !engine->stop;
    engine->reporting += begun;
    pthread_mutex_unlock(&engine->mu);
    return begun;
}

void kvti_local_report_end(struct kvti_local *engine)
{
    pthread_mutex_lock(&engine->mu);
    engine->reporting--;
    if (engine->reporting == 0) {
        pthread_cond_broadcast(&engine->quiet);
    }
    pthread_mutex_unlock(&engine->mu);
}

void kvti_local_thread_end_locked(struct kvti_local *engine)
{
    engine->living--;
    pthread_cond_broadcast(&engine->quiet);
}

int kvti_local_thread(struct kvti_local_worker *worker, void *(*run)(void *),
                      const char *name)
{
    struct kvti_local *engine = worker->engine;
    pthread_attr_t attr;
    sigset_t all;
    sigset_t before;
    int code = pthread_attr_init(&attr);

    if (code != 0) {
        return code;
    }
    pthread_mutex_lock(&engine->mu);
    engine->living++;
    pthread_mutex_unlock(&engine->mu);
    (void)pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    code = pthread_create(&worker->thread, &attr, run, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (code == 0) {
        (void)pthread_setname_np(worker->thread, name);
    } else {
        pthread_mutex_lock(&engine->mu);
        engine->living--;
        pthread_mutex_unlock(&engine->mu);
    }
    return code;
}

/* -------------------------------------------------------------- open, close */

int kvti_local_probe(struct kvt_engine_info *ret)
{
    struct kvti_local_id id;
    struct kvt_error err = {.code = KVT_OK};
    int pidfd = kvti_ident_pidfd_open(getpid());

    kvti_format(ret->name, sizeof(ret->name), "local");
    kvti_format(ret->version, sizeof(ret->version), "%s", kvt_version());
    ret->kinds = 1u << KVT_DRAM;
    if (pidfd < 0) {
        kvti_fail_errno(&err, KVT_EUNSUPPORTED, errno,
                        "the local engine needs Linux 5.4 or newer: "
                        "pidfd_open failed");
    } else {
        close(pidfd);
        kvti_ident_self(&id, &err);
    }
    ret->code = err.code;
    kvti_format(ret->text, sizeof(ret->text), "%s",
                err.code == KVT_OK
                    ? "peers in this process and on this host, host memory"
                    : err.text);
    return ret->code;
}

static void init_lists(struct kvti_local *engine)
{
    struct kvti_list *lists[] = {
        &engine->heavy.chunks, &engine->light.chunks, &engine->jobs,
        &engine->reap,         &engine->done,         &engine->procs,
        &engine->conns,        &engine->drops,        &engine->unloading,
        &engine->ins,          &engine->ins_dead,     &engine->out_waiting,
    };

    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        kvti_list_init(lists[i]);
    }
    for (size_t i = 0; i < KVTI_TARGET_BUCKETS; i++) {
        kvti_list_init(&engine->targets[i]);
    }
}

/* None of these fail with glibc; a condition is asked for a clock. */
static void init_locks(struct kvti_local *engine)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->quiet, &attr);
    pthread_condattr_destroy(&attr);
    pthread_cond_init(&engine->work, NULL);
    pthread_cond_init(&engine->errand, NULL);
    kvti_short_mutex_init(&engine->mu);
    pthread_rwlock_init(&engine->mem_lock, NULL);
}

static void free_engine(struct kvti_local *engine)
{
    kvti_local_unlisten(engine);
    kvti_gate_fini(&engine->gate);
    kvti_ident_page_free(engine->page);
    kvti_regions_fini(&engine->mems);
    pthread_rwlock_destroy(&engine->mem_lock);
    pthread_mutex_destroy(&engine->mu);
    pthread_cond_destroy(&engine->errand);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->quiet);
    if (engine->maps_fd >= 0) {
        close(engine->maps_fd);
    }
    free(engine->workers);
    free(engine);
}

/*
 * More threads than processors copy no faster: on two of them, four threads
 * only took turns. The default of four is what fills a memory bus; it took
 * two to get from 11 to 18 GB/s. But never fewer than two, where that many are
 * allowed: memory that does not answer keeps one of them.
 */
static uint32_t count_workers(uint32_t wanted)
{
    cpu_set_t cpus;
    uint32_t usable = 0;

    if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) {
        usable = (uint32_t)CPU_COUNT(&cpus);
    }
    if (usable == 0 || wanted <= usable) {
        return wanted;
    }
    return usable > 2 || wanted < 2 ? usable : 2;
}

/* Everything that can fail, in an order in which nobody can see half of it:
 * the watches of the core come last. */
static int start_engine(struct kvti_local *engine, struct kvt_error *err)
{
    const struct kvti_env *env = engine->env;
    struct kvti_local_id *self = &engine->self;
    int code = kvti_ident_self(self, err);

    if (code == KVT_OK) {
        code = kvti_ident_page(env->incarnation, &engine->page, err);
    }
    if (code != KVT_OK) {
        return code;
    }
    memcpy(self->nonce, engine->page->nonce, sizeof(self->nonce));
    self->nonce_addr = (uint64_t)(uintptr_t)engine->page;
    engine->owner = kvti_gate_owner(self->pid, self->start_time);
    code = kvti_gate_init(&engine->gate, engine->owner, err);
    if (code != KVT_OK) {
        return code;
    }
    self->gate_fd = engine->gate.fd;
    self->gate_bytes = (uint32_t)sizeof(struct kvti_gate_page);
    return kvti_local_listen(engine, err);
}

static void init_threads(struct kvti_local *engine)
{
    const struct kvti_env *env = engine->env;

    for (uint32_t i = 0; i < engine->worker_max; i++) {
        struct kvti_local_worker *worker = &engine->workers[i];

        worker->engine = engine;
        atomic_init(&worker->cpu, -1);
        worker->heartbeat.what = "copying to or from a peer";
        env->heartbeat(env->ctx, &worker->heartbeat);
    }
    engine->quick.what = "copying a small transfer";
    env->heartbeat(env->ctx, &engine->quick);
    engine->helper.engine = engine;
    engine->helper.heartbeat.what = "importing or dropping a peer";
    env->heartbeat(env->ctx, &engine->helper.heartbeat);
}

int kvti_local_open(const struct kvti_env *env, const char *rest,
                    void **ret_self, struct kvti_engine_traits *ret_traits,
                    struct kvt_error *err)
{
    struct kvti_local *engine;
    int code;

    if (rest[0] != '\0') {
        return kvti_fail(err, KVT_EINVAL,
                         "the engine local takes no parameters, but got "
                         "\"%.64s\"",
                         rest);
    }
    engine = calloc(1, sizeof(*engine));
    if (engine == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for the local engine");
    }
    engine->env = env;
    engine->maps_fd = kvti_local_maps_open();
    engine->worker_max = count_workers(env->options->workers);
    init_lists(engine);
    init_locks(engine);
    engine->workers = calloc(engine->worker_max, sizeof(*engine->workers));
    if (engine->workers == NULL) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %u workers",
                         engine->worker_max);
        goto fail;
    }
    code = start_engine(engine, err);
    if (code != KVT_OK) {
        goto fail;
    }
    init_threads(engine);
    if ((env->options->flags & KVT_OPEN_ALLOW_PTRACE) != 0) {
        /* EINVAL without Yama, where it is not needed. */
        (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    }
    ret_traits->caps = KVTI_CAP_DRAM | KVTI_CAP_NOTIFY;
    ret_traits->chunk_copies = CHUNK_COPIES;
    ret_traits->chunk_bytes = CHUNK_BYTES;
    ret_traits->window = CHUNKS_PER_WORKER * engine->worker_max;
    ret_traits->light = LIGHT_CHUNKS;
    ret_traits->share = 2 * engine->worker_max;
    /* A worker may still be reading our side by memcpy for a peer that has
     * just died. */
    ret_traits->dead_fin = KVTI_FIN_PEER;
    *ret_self = engine;
    return KVT_OK;

fail:
    free_engine(engine);
    return code;
}

/* Whether all threads ended. Reports under way are waited for in any case:
 * they only queue. */
static bool stop_threads(struct kvti_local *engine, uint64_t deadline_ns)
{
    struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / 1000000000u),
        .tv_nsec = (long)(deadline_ns % 1000000000u),
    };
    bool ended;
    int code = 0;

    pthread_mutex_lock(&engine->mu);
    engine->stop = true;
    pthread_cond_broadcast(&engine->work);
    pthread_cond_broadcast(&engine->errand);
    while (engine->living > 0 && code == 0) {
        code = pthread_cond_timedwait(&engine->quiet, &engine->mu, &until);
    }
    while (engine->reporting > 0) {
        pthread_cond_wait(&engine->quiet, &engine->mu);
    }
    ended = engine->living == 0;
    pthread_mutex_unlock(&engine->mu);
    for (uint32_t i = 0; i < engine->worker_count; i++) {
        (ended ? pthread_join(engine->workers[i].thread, NULL)
               : pthread_detach(engine->workers[i].thread));
    }
    if (engine->helper_started) {
        (ended ? pthread_join(engine->helper.thread, NULL)
               : pthread_detach(engine->helper.thread));
    }
    return ended;
}

static bool wait_for_writers(struct kvti_local *engine, uint64_t deadline_ns)
{
    const struct timespec step = {.tv_nsec = KVTI_STEP_NS};
    int32_t pid = 0;

    while (!kvti_gate_empty(&engine->gate, &pid)) {
        if (kvti_now_ns() >= deadline_ns) {
            kvti_log(&engine->env->logger, KVT_LOG_WARNING,
                     "local: process %d is in the middle of a write at close",
                     (int)pid);
            return false;
        }
        nanosleep(&step, NULL);
    }
    return true;
}

/* Connections whose jobs were still somewhere. */
static void free_job_conns(struct kvti_list *jobs, struct kvti_list *conns)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(jobs)) != NULL) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, node);
        struct kvti_local_conn *conn = kvti_local_job_conn(job);

        /* A CONNECT's is among the others already. */
        if (job->kind == KVTI_JOB_LOAD || job->kind == KVTI_JOB_UNLOAD) {
            kvti_list_append(conns, &conn->node);
        }
    }
}

/* Every connection in one list, in no list of its own any more. */
static void gather_conns(struct kvti_local *engine, struct kvti_list *ret)
{
    kvti_list_init(ret);
    kvti_list_splice(ret, &engine->conns);
    kvti_list_splice(ret, &engine->unloading);
    kvti_list_splice(ret, &engine->reap);
    free_job_conns(&engine->jobs, ret);
    free_job_conns(&engine->done, ret);
}

/* The core's descriptors and everything that can call back. */
static void unwatch_all(struct kvti_local *engine)
{
    kvti_list_each(node, &engine->conns) {
        struct kvti_local_conn *conn = kvti_container(
            node, struct kvti_local_conn, node);

        kvti_local_conn_detach(conn);
    }
    kvti_local_unlisten(engine);
}

int kvti_local_close(void *self, uint64_t deadline_ns)
{
    struct kvti_local *engine = self;
    struct kvti_list conns;
    struct kvti_list *node;
    bool ended;
    bool empty;

    engine->closed = true;
    atomic_store(&engine->page->open, 0);
    kvti_gate_close(&engine->gate);
    ended = stop_threads(engine, deadline_ns);
    unwatch_all(engine);
    empty = wait_for_writers(engine, deadline_ns);
    if (!ended) {
        return KVT_EBUSY;
    }
    gather_conns(engine, &conns);
    while ((node = kvti_list_take(&conns)) != NULL) {
        kvti_local_conn_free(
            kvti_container(node, struct kvti_local_conn, node));
    }
    free_engine(engine);
    return empty ? KVT_OK : KVT_EBUSY;
}
