/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of the engine `nixl`: open, close, and what a forked child does.
 *
 * The agent is made on the NIXL thread, since NIXL and the GPU's driver tie
 * things to the thread that made them, while open waits with a deadline: a
 * backend may hang in a driver. A thread that does not come back is detached
 * and all it could touch is leaked; it ends by itself should it come back.
 *
 * close sets `stop` first. From then on nobody begins a report, and close does
 * not return while one is being made.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nixl.h"

#define CHUNK_COPIES 256u
#define CHUNK_BYTES (UINT64_C(1) << 20)
/* More unfinished chunks of a peer brought nothing over TCP. */
#define WINDOW 4u
#define SETUP_NS UINT64_C(60000000000) /* when the options name no timeout */

/* The process in which NIXL was first started: its threads do not come along
 * to a child, and connections of an agent made there are never completed. */
static _Atomic pid_t home;

/* Engines whose thread hung: kept in sight, so that a leak checker, or a person
 * with a debugger, finds out that it was meant. */
static _Atomic(struct kvti_nixl *) leaked;

static void leak(struct kvti_nixl *engine)
{
    engine->leaked_next = atomic_load(&leaked);
    while (
        !atomic_compare_exchange_weak(&leaked, &engine->leaked_next, engine)) {
    }
}

int kvti_nixl_probe(struct kvt_engine_info *ret)
{
    const struct kvti_nixl_lib *lib = NULL;
    struct kvt_error err = {.code = KVT_OK};

    kvti_format(ret->name, sizeof(ret->name), "nixl");
    ret->kinds = 1u << KVT_DRAM | 1u << KVT_VRAM;
    ret->code = kvti_nixl_load(NULL, false, &lib, &err);
    if (ret->code != KVT_OK) {
        ret->version[0] = '\0';
        kvti_format(ret->text, sizeof(ret->text), "%s", err.text);
        return ret->code;
    }
    kvti_format(ret->version, sizeof(ret->version), "%s", lib->version);
    kvti_format(ret->text, sizeof(ret->text), "%s", lib->path);
    return KVT_OK;
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
    pthread_cond_init(&engine->work, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&engine->mu, NULL);
    atomic_init(&engine->step, "starting");
    atomic_init(&engine->detail, "");
    engine->gate.fd = -1;
}

static void free_engine(struct kvti_nixl *engine)
{
    kvti_nixl_procs_sweep(engine);
    kvti_nixl_remotes_fini(engine);
    kvti_nixl_probes_fini(engine);
    kvti_nixl_mem_fini(engine);
    kvti_nixl_config_fini(&engine->config);
    if (engine->has_self) {
        kvti_gate_fini(&engine->gate);
        kvti_ident_page_free(engine->page);
    }
    pthread_mutex_destroy(&engine->mu);
    pthread_cond_destroy(&engine->work);
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
                               "cannot start the thread that calls NIXL");
    }
    (void)pthread_setname_np(engine->thread, "kvt-nixl");
    return KVT_OK;
}

/* False: the thread hangs; it ends by itself if it ever comes back, and the
 * engine is not to be touched. */
static bool wait_started(struct kvti_nixl *engine, uint64_t deadline_ns)
{
    struct timespec until = when(deadline_ns);
    int code = 0;
    bool started;

    pthread_mutex_lock(&engine->mu);
    while (!engine->started && code == 0) {
        code = pthread_cond_timedwait(&engine->quiet, &engine->mu, &until);
    }
    started = engine->started;
    engine->stop = !started;
    pthread_mutex_unlock(&engine->mu);
    return started;
}

static int start(struct kvti_nixl *engine, struct kvt_error *err)
{
    uint64_t timeout_ns = engine->env->options->call_timeout_ns;
    uint64_t now_ns = kvti_now_ns();
    int code = start_thread(engine, err);

    if (code != KVT_OK) {
        free_engine(engine);
        return code;
    }
    timeout_ns = timeout_ns == 0 ? SETUP_NS : timeout_ns;
    if (!wait_started(engine, timeout_ns > UINT64_MAX - now_ns
                                  ? UINT64_MAX
                                  : now_ns + timeout_ns)) {
        pthread_detach(engine->thread);
        leak(engine);
        return kvti_fail(err, KVT_ETIMEDOUT,
                         "NIXL does not come back from %s%.60s after %.3g s: "
                         "a driver or a network interface may hang",
                         atomic_load(&engine->step),
                         atomic_load(&engine->detail),
                         (double)timeout_ns / 1e9);
    }
    if (engine->setup_code != KVT_OK) {
        code = engine->setup_code;
        if (err != NULL) {
            *err = engine->setup_err;
        }
        pthread_join(engine->thread, NULL);
        free_engine(engine);
        return code;
    }
    return KVT_OK;
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
    if (code != KVT_OK) {
        free_engine(engine);
        return code;
    }
    find_self(engine);
    describe(engine);
    engine->heartbeat.what = "calling NIXL";
    code = start(engine, err);
    if (code != KVT_OK) {
        return code;
    }
    env->heartbeat(env->ctx, &engine->heartbeat);
    *ret_traits = (struct kvti_engine_traits){
        .caps = KVTI_CAP_DRAM | KVTI_CAP_VRAM | KVTI_CAP_NOTIFY,
        .chunk_copies = CHUNK_COPIES,
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
    pthread_cond_broadcast(&engine->work);
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

/* Whether a chunk was posted and is not proven. The agent is gone, so our own
 * memory is safe; the peer's is not. */
static bool has_unproven(const struct kvti_nixl *engine)
{
    if (!kvti_list_empty(&engine->flying) ||
        !kvti_list_empty(&engine->parked)) {
        return true;
    }
    kvti_list_each(node, &engine->remotes) {
        if (!kvti_list_empty(
                &kvti_container(node, struct kvti_nixl_remote, node)->landed)) {
            return true;
        }
    }
    kvti_list_each(node, &engine->probes) {
        if (!kvti_list_empty(
                &kvti_container(node, struct kvti_nixl_probe, node)->covered)) {
            return true;
        }
    }
    return false;
}

int kvti_nixl_close(void *self, uint64_t deadline_ns)
{
    struct kvti_nixl *engine = self;
    bool unproven;

    if (engine->has_self) {
        atomic_store(&engine->page->open, 0);
        kvti_gate_close(&engine->gate);
    }
    if (!stop_thread(engine, deadline_ns)) {
        kvti_nixl_procs_unwatch(engine);
        leak(engine);
        return KVT_EBUSY;
    }
    kvti_nixl_procs_unwatch(engine);
    unproven = has_unproven(engine);
    free_engine(engine);
    return unproven ? KVT_EBUSY : KVT_OK;
}

/* What the NIXL thread owns may be in the middle of a change: it is left. */
void kvti_nixl_after_fork(void *self)
{
    struct kvti_nixl *engine = self;

    kvti_nixl_config_fini(&engine->config);
    if (engine->has_self) {
        kvti_gate_unmap(engine->gate.page);
        kvti_ident_page_free(engine->page);
    }
    free(engine);
}
