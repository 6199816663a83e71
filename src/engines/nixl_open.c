/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of the engine `nixl`: open, close, and what a forked child does.
 *
 * The agent is made on the NIXL thread, since NIXL and the GPU's driver tie
 * things to the thread that made them, while open waits with a deadline: a
 * backend may hang in a driver. A thread that does not come back is detached
 * and all it could touch is left to it; should it come back, it destroys the
 * agent and ends. After an open that gave up it also frees the engine; after a
 * close it does not, for chunks that the core has are in the engine's lists.
 * It never touches `env` then, which may be gone: reports are refused, and what
 * setup needs of it is copied.
 *
 * close sets `stop` first. From then on nobody begins a report, and close does
 * not return while one is being made.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nixl.h"
#include "nixl_check.h"

#define CHUNK_COPIES 256u
#define CHUNK_BYTES (UINT64_C(1) << 20)
/* More unfinished chunks of a peer brought nothing over TCP. */
#define WINDOW 4u
#define LIGHT_CHUNKS 16u
#define SETUP_NS UINT64_C(60000000000) /* when the options name no timeout */

/* Descriptors that an agent may take while it is made, some 20 on a host with
 * one network interface. UCX ends the process (an assertion) when it gets none
 * for its pipe or for a connection to itself. */
#define ROOM_FDS 64u

/* The process in which NIXL was first started: its threads do not come along
 * to a child, and connections of an agent made there are never completed. */
static _Atomic pid_t home;

/* Engines whose thread hangs: kept in sight, so that a leak checker, or a
 * person with a debugger, finds out that it was meant. */
static pthread_mutex_t leak_mu = PTHREAD_MUTEX_INITIALIZER;
static struct kvti_list leaked = {&leaked, &leaked}; /* under leak_mu */

static void leak(struct kvti_nixl *engine)
{
    pthread_mutex_lock(&leak_mu);
    kvti_list_append(&leaked, &engine->leak_node);
    pthread_mutex_unlock(&leak_mu);
}

int kvti_nixl_probe(struct kvt_engine_info *ret)
{
    const struct kvti_nixl_lib *lib = NULL;
    struct kvt_error err = {.code = KVT_OK};
    char plugins[sizeof(ret->text)] = "";

    kvti_format(ret->name, sizeof(ret->name), "nixl");
    ret->kinds = 1u << KVT_DRAM | 1u << KVT_VRAM;
    ret->code = kvti_nixl_load(NULL, false, &lib, &err);
    if (ret->code == KVT_OK) {
        ret->code = kvti_nixl_plugins(lib, plugins, sizeof(plugins), &err);
    }
    kvti_format(ret->version, sizeof(ret->version), "%s",
                lib != NULL ? lib->version : "");
    if (ret->code == KVT_OK) {
        kvti_format(ret->text, sizeof(ret->text), "%s; backends: %s", lib->path,
                    plugins[0] != '\0' ? plugins : "none");
    } else {
        kvti_format(ret->text, sizeof(ret->text), "%s", err.text);
    }
    return ret->code;
}

static void init_engine(struct kvti_nixl *engine)
{
    struct kvti_list *lists[] = {
        &engine->jobs,    &engine->chunks, &engine->done,
        &engine->procs,   &engine->conns,  &engine->procs_idle,
        &engine->remotes, &engine->flying, &engine->pending,
        &engine->parked,  &engine->probes, &engine->unconfirmed,
    };
    pthread_condattr_t attr;

    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        kvti_list_init(lists[i]);
    }
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->quiet, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&engine->mu, NULL);
    atomic_init(&engine->step, "starting");
    atomic_init(&engine->detail, "");
    engine->gate.fd = -1;
    engine->wake_fd = -1;
}

static void free_engine(struct kvti_nixl *engine)
{
    kvti_nixl_checks_free(engine->checks);
    kvti_nixl_procs_sweep(engine);
    kvti_nixl_remotes_fini(engine);
    kvti_nixl_probes_fini(engine);
    kvti_nixl_mem_fini(engine);
    kvti_nixl_config_fini(&engine->config);
    kvti_nixl_gpu_fini(&engine->gpu);
    if (engine->has_self) {
        kvti_gate_fini(&engine->gate);
        kvti_ident_page_free(engine->page);
    }
    pthread_mutex_destroy(&engine->mu);
    kvti_nixl_wake_fini(engine);
    pthread_cond_destroy(&engine->quiet);
    free(engine);
}

/*
 * Who this process is, for peers on this host: they watch its death. Its gate
 * has no region open, so nobody writes here past NIXL. Without it peers only
 * know less.
 */
static void find_self(struct kvti_nixl *engine)
{
    struct kvti_local_id *self = &engine->self;
    struct kvt_error err;
    uint64_t owner;

    if (kvti_ident_self(self, &err) != KVT_OK ||
        kvti_ident_page(engine->env->incarnation, &engine->page, &err) !=
            KVT_OK) {
        goto fail;
    }
    owner = kvti_gate_owner(self->pid, self->start_time);
    if (kvti_gate_init(&engine->gate, owner, &err) != KVT_OK) {
        kvti_ident_page_free(engine->page);
        engine->page = NULL;
        goto fail;
    }
    memcpy(self->nonce, engine->page->nonce, sizeof(self->nonce));
    self->nonce_addr = (uint64_t)(uintptr_t)engine->page;
    self->gate_fd = engine->gate.fd;
    self->gate_bytes = (uint32_t)sizeof(struct kvti_gate_page);
    engine->has_self = true;
    return;

fail:
    kvti_log(&engine->env->logger, KVT_LOG_WARNING,
             "nixl: peers on this host will not notice this process's end: %s",
             err.text);
}

/* "NIXL 1.5.1 with UCX, GDS" */
static void describe(struct kvti_nixl *engine)
{
    char *text = engine->text;
    size_t size = sizeof(engine->text);

    kvti_format(text, size, "NIXL %s with ", engine->lib->version);
    for (size_t i = 0; i < engine->config.backend_count; i++) {
        size_t used = strlen(text);

        kvti_format(text + used, size - used, "%s%s", i > 0 ? ", " : "",
                    engine->config.backends[i]);
    }
}

static struct timespec when(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                             .tv_nsec = (long)(ns % 1000000000u)};
}

static int start_thread(struct kvti_nixl *engine, struct kvt_error *err)
{
    sigset_t all;
    sigset_t before;
    int code;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    code = pthread_create(&engine->thread, NULL, kvti_nixl_thread, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, code,
                               "cannot start the thread that calls NIXL; check "
                               "the limit of processes (ulimit -u)");
    }
    (void)pthread_setname_np(engine->thread, "kvt-nixl");
    return KVT_OK;
}

void kvti_nixl_free_abandoned(struct kvti_nixl *engine)
{
    pthread_mutex_lock(&leak_mu);
    kvti_list_remove(&engine->leak_node);
    pthread_mutex_unlock(&leak_mu);
    free_engine(engine);
}

/* On KVT_ETIMEDOUT the engine is the thread's: it may be gone already. */
static int wait_started(struct kvti_nixl *engine, uint64_t timeout_ns,
                        struct kvt_error *err)
{
    uint64_t now_ns = kvti_now_ns();
    struct timespec until = when(
        timeout_ns > UINT64_MAX - now_ns ? UINT64_MAX : now_ns + timeout_ns);
    int rc = 0;
    int code;

    pthread_mutex_lock(&engine->mu);
    while (!engine->started && rc == 0) {
        rc = pthread_cond_timedwait(&engine->quiet, &engine->mu, &until);
    }
    code = engine->started ? engine->setup_code : KVT_ETIMEDOUT;
    if (engine->started && code != KVT_OK && err != NULL) {
        *err = engine->setup_err;
    }
    if (!engine->started) {
        kvti_fail(err, code,
                  "NIXL does not come back from %s%.60s after %.3g s: a "
                  "driver or a network interface may hang; its thread is left "
                  "behind",
                  atomic_load(&engine->step), atomic_load(&engine->detail),
                  (double)timeout_ns / 1e9);
        engine->stop = true;
        engine->abandoned = true;
        leak(engine);
        pthread_detach(engine->thread);
    }
    pthread_mutex_unlock(&engine->mu);
    return code;
}

static int start(struct kvti_nixl *engine, struct kvt_error *err)
{
    uint64_t timeout_ns = engine->env->options->call_timeout_ns;
    int code = start_thread(engine, err);

    if (code != KVT_OK) {
        free_engine(engine);
        return code;
    }
    code = wait_started(engine, timeout_ns == 0 ? SETUP_NS : timeout_ns, err);
    if (code != KVT_OK && code != KVT_ETIMEDOUT) {
        pthread_join(engine->thread, NULL);
        free_engine(engine);
    }
    return code;
}

/* What an operator may wonder about later. */
static void say_how(const struct kvti_nixl *engine)
{
    const struct kvti_logger *logger = &engine->env->logger;
    const struct kvti_nixl_gpu *gpu = &engine->gpu;

    kvti_log(logger, KVT_LOG_INFO, "nixl: %s, from %s", engine->text,
             engine->lib->path);
    if (engine->config.nic_dropped) {
        kvti_log(logger, KVT_LOG_WARNING,
                 "nixl: UCX_NET_DEVICES is set in the environment and wins "
                 "over device_list");
    }
    if (gpu->why[0] != '\0') {
        kvti_log(logger, KVT_LOG_WARNING,
                 "nixl: no CUDA context where NIXL runs: %s", gpu->why);
    } else if (gpu->entered && engine->config.gpu != KVTI_NIXL_NO_GPU) {
        kvti_log(logger, KVT_LOG_INFO, "nixl: runs on GPU %llu",
                 (unsigned long long)engine->config.gpu);
    } else if (gpu->entered) {
        kvti_log(logger, KVT_LOG_INFO,
                 "nixl: runs in the CUDA context of the thread that opened it");
    }
}

static int check_home(struct kvt_error *err)
{
    pid_t none = 0;
    pid_t self = getpid();

    if (!atomic_compare_exchange_strong(&home, &none, self) && none != self) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "NIXL was started before this process was forked and "
                         "does not work in both: open the first transport "
                         "after the fork, or exec");
    }
    return KVT_OK;
}

/* By taking them: what /proc says of a limit is not what is left of it. */
static int check_room(int any_fd, struct kvt_error *err)
{
    int taken[ROOM_FDS];
    size_t count = 0;
    int why = 0;

    while (count < ROOM_FDS && why == 0) {
        taken[count] = fcntl(any_fd, F_DUPFD_CLOEXEC, 0);
        if (taken[count] < 0) {
            why = errno;
        } else {
            count++;
        }
    }
    for (size_t i = 0; i < count; i++) {
        close(taken[i]);
    }
    if (why == 0) {
        return KVT_OK;
    }
    return kvti_fail_errno(err, KVT_ESYSTEM, why,
                           "NIXL needs up to %u descriptors and may end the "
                           "process without them, but only %zu are left",
                           ROOM_FDS, count);
}

int kvti_nixl_open(const struct kvti_env *env, const char *rest,
                   void **ret_self, struct kvti_engine_traits *ret_traits,
                   struct kvt_error *err)
{
    struct kvti_nixl *engine = calloc(1, sizeof(*engine));
    int code;

    if (engine == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for the nixl engine");
    }
    engine->env = env;
    kvti_format(engine->agent_name, sizeof(engine->agent_name), "%s",
                env->agent_name);
    init_engine(engine);
    code = kvti_nixl_config_init(&engine->config, env->options, rest, err);
    if (code == KVT_OK) {
        code = kvti_nixl_load(env->options->nixl_library,
                              kvti_nixl_config_wants_efa(&engine->config),
                              &engine->lib, err);
    }
    if (code == KVT_OK) {
        code = check_home(err);
    }
    if (code == KVT_OK) {
        code = kvti_nixl_wake_init(engine, err);
    }
    if (code == KVT_OK) {
        code = check_room(engine->wake_fd, err);
    }
    if (code == KVT_OK &&
        (env->options->flags & KVT_OPEN_PROBE_METADATA) != 0) {
        code = kvti_nixl_checks_new(engine, err);
    }
    if (code != KVT_OK) {
        free_engine(engine);
        return code;
    }
    find_self(engine);
    describe(engine);
    kvti_nixl_gpu_find(&engine->gpu, engine->config.gpu);
    engine->heartbeat.what = "calling NIXL";
    code = start(engine, err);
    if (code != KVT_OK) {
        return code;
    }
    say_how(engine);
    env->heartbeat(env->ctx, &engine->heartbeat);
    *ret_traits = (struct kvti_engine_traits){
        .caps = KVTI_CAP_DRAM | KVTI_CAP_VRAM | KVTI_CAP_NOTIFY,
        .chunk_copies = CHUNK_COPIES,
        .light = LIGHT_CHUNKS,
        .share = 1,
        .chunk_bytes = CHUNK_BYTES,
        .window = WINDOW,
        .dead_fin = KVTI_FIN_BOTH,
    };
    *ret_self = engine;
    return KVT_OK;
}

/* Whether the thread ended. Reports under way are waited for in any case: they
 * only queue. */
static bool stop_thread(struct kvti_nixl *engine, uint64_t deadline_ns)
{
    struct timespec until = when(deadline_ns);
    bool ended;
    int code = 0;

    pthread_mutex_lock(&engine->mu);
    engine->stop = true;
    kvti_nixl_wake_locked(engine);
    while (!engine->ended && code == 0) {
        code = pthread_cond_timedwait(&engine->quiet, &engine->mu, &until);
    }
    while (engine->reporting > 0) {
        pthread_cond_wait(&engine->quiet, &engine->mu);
    }
    ended = engine->ended;
    pthread_mutex_unlock(&engine->mu);
    (ended ? pthread_join(engine->thread, NULL)
           : pthread_detach(engine->thread));
    return ended;
}

/* The agent is gone, so our own memory is safe; the peer's is not, unless its
 * process is gone too, or the core has been told so. */
static bool are_proven(const struct kvti_list *chunks)
{
    kvti_list_each(node, chunks) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);
        const struct kvti_nixl_proc *proc = kvti_nixl_chunk_priv(chunk)->proc;

        if (chunk->fin != KVTI_FIN_BOTH &&
            (proc == NULL || !kvti_ident_pidfd_dead(proc->pidfd))) {
            return false;
        }
    }
    return true;
}

/* Whether no chunk that was posted is unproven. */
static bool is_proven(const struct kvti_nixl *engine)
{
    if (!are_proven(&engine->flying) || !are_proven(&engine->parked)) {
        return false;
    }
    kvti_list_each(node, &engine->remotes) {
        if (!are_proven(
                &kvti_container(node, struct kvti_nixl_remote, node)->landed)) {
            return false;
        }
    }
    kvti_list_each(node, &engine->probes) {
        if (!are_proven(
                &kvti_container(node, struct kvti_nixl_probe, node)->covered)) {
            return false;
        }
    }
    return true;
}

int kvti_nixl_close(void *self, uint64_t deadline_ns)
{
    struct kvti_nixl *engine = self;
    bool proven;

    if (engine->has_self) {
        atomic_store(&engine->page->open, 0);
        kvti_gate_close(&engine->gate);
    }
    kvti_nixl_checks_stop(engine->checks);
    if (!stop_thread(engine, deadline_ns)) {
        kvti_nixl_procs_unwatch(engine);
        leak(engine);
        return KVT_EBUSY;
    }
    kvti_nixl_procs_unwatch(engine);
    proven = is_proven(engine);
    free_engine(engine);
    return proven ? KVT_OK : KVT_EBUSY;
}

/* What the NIXL thread owns may be in the middle of a change: it is left. */
void kvti_nixl_after_fork(void *self)
{
    struct kvti_nixl *engine = self;

    kvti_nixl_checks_after_fork(engine->checks);
    kvti_nixl_config_fini(&engine->config);
    free(engine->gpu.cuda);
    if (engine->has_self) {
        kvti_gate_unmap(engine->gate.page);
        kvti_ident_page_free(engine->page);
    }
    free(engine);
}
