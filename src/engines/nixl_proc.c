/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes of peers on this host. NIXL cannot tell a dead peer from a broken
 * link; a pidfd can. It is opened on the NIXL thread when a peer is loaded and
 * watched on the control thread until neither a connection nor a chunk that is
 * not proven needs it any more: also a lost write becomes final when its
 * peer's process ends.
 *
 * A process that execs keeps its pid and its pidfd, and the kernel's copies
 * between processes, which go by pid, then land in the new program: 256 of 256
 * bytes did, and NIXL called it done. So the nonce of the agent is read back
 * before a chunk is posted or goes on and before it is called done. Where we may not read
 * it, the kernel does not copy for NIXL either.
 */
#include "nixl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

static void died(struct kvti_watch *watch, uint32_t events)
{
    struct kvti_nixl_proc *proc = kvti_container(watch, struct kvti_nixl_proc,
                                                 watch);
    struct kvti_nixl *engine = proc->engine;
    const struct kvti_env *env = engine->env;
    struct kvt_error why;

    (void)events;
    if (!proc->watched || !kvti_ident_pidfd_dead(proc->pidfd)) {
        return;
    }
    proc->watched = false;
    env->unwatch(env->ctx, watch);
    pthread_mutex_lock(&engine->mu);
    proc->gone = true;
    engine->settle = true;
    kvti_nixl_wake_locked(engine);
    pthread_mutex_unlock(&engine->mu);
    kvti_fail(&why, KVT_EDISCONNECTED, "process %d has ended", proc->pid);
    kvti_list_each(node, &engine->conns) {
        struct kvti_nixl_conn *conn = kvti_container(
            node, struct kvti_nixl_conn, node);

        if (conn->proc == proc) {
            env->report_conn(env->ctx, conn->link, KVTI_CONN_DEAD, &why);
        }
    }
}

/* Whether the metadata names a process that we can see, and not this one. */
static bool is_near(const struct kvti_nixl *engine, const struct kvti_md *md)
{
    return md->has_local && engine->has_self &&
           strcmp(md->local.boot_id, engine->self.boot_id) == 0 &&
           md->local.pid_ns == engine->self.pid_ns &&
           md->local.pid != engine->self.pid;
}

static int gone(int32_t pid, struct kvt_error *err)
{
    return kvti_fail(err, KVT_EDISCONNECTED,
                     "process %d is gone: get metadata from the process that "
                     "took its place",
                     (int)pid);
}

/* Reads the nonce that should be there: 0 when it is, else why not; EFAULT
 * when it is another. */
static int check_nonce(int32_t pid, uint64_t addr, const uint8_t *nonce)
{
    struct kvti_nonce_page seen;
    struct iovec here = {.iov_base = &seen, .iov_len = sizeof(seen)};
    struct iovec there = {.iov_base = (void *)(uintptr_t)addr,
                          .iov_len = sizeof(seen)};
    ssize_t got;

    do {
        got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return errno;
    }
    return got == (ssize_t)sizeof(seen) &&
                   memcmp(seen.nonce, nonce, sizeof(seen.nonce)) == 0
               ? 0
               : EFAULT;
}

bool kvti_nixl_proc_same(const struct kvti_nixl_proc *proc)
{
    int code;

    if (proc == NULL || !proc->readable) {
        return true;
    }
    code = check_nonce(proc->pid, proc->nonce_addr, proc->nonce);
    return code == 0 || code == EPERM || code == ENOSYS;
}

/* *ret stays NULL when the process cannot be watched. */
static int open_proc(struct kvti_nixl *engine, const struct kvti_local_id *id,
                     struct kvti_nixl_proc **ret, struct kvt_error *err)
{
    struct kvti_nixl_proc *proc;
    uint64_t start_time = 0;
    int pidfd = kvti_ident_pidfd_open(id->pid);
    int unreadable;
    int code;

    if (pidfd < 0) {
        return errno == ESRCH ? gone(id->pid, err) : KVT_OK;
    }
    code = kvti_ident_start_time(id->pid, &start_time);
    unreadable = check_nonce(id->pid, id->nonce_addr, id->nonce);
    if (kvti_ident_pidfd_dead(pidfd) || unreadable == EFAULT ||
        (code == 0 && start_time != id->start_time)) {
        close(pidfd);
        return gone(id->pid, err);
    }
    proc = code == 0 ? calloc(1, sizeof(*proc)) : NULL;
    if (proc == NULL) {
        close(pidfd); /* hidden from us, or no memory: not watched */
        return KVT_OK;
    }
    proc->engine = engine;
    proc->pid = id->pid;
    proc->start_time = start_time;
    proc->nonce_addr = id->nonce_addr;
    memcpy(proc->nonce, id->nonce, sizeof(proc->nonce));
    proc->readable = unreadable == 0;
    proc->pidfd = pidfd;
    proc->refs = 1;
    proc->watch.fd = pidfd;
    proc->watch.events = EPOLLIN;
    proc->watch.ready = died;
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->procs, &proc->node);
    pthread_mutex_unlock(&engine->mu);
    *ret = proc;
    return KVT_OK;
}

int kvti_nixl_proc_get(struct kvti_nixl *engine, const struct kvti_md *md,
                       struct kvti_nixl_proc **ret, struct kvt_error *err)
{
    const struct kvti_local_id *id = &md->local;
    bool dead = false;

    *ret = NULL;
    if (!is_near(engine, md)) {
        return KVT_OK;
    }
    pthread_mutex_lock(&engine->mu);
    kvti_list_each(node, &engine->procs) {
        struct kvti_nixl_proc *proc = kvti_container(
            node, struct kvti_nixl_proc, node);

        if (proc->pid == id->pid && proc->start_time == id->start_time &&
            memcmp(proc->nonce, id->nonce, sizeof(proc->nonce)) == 0) {
            dead = proc->gone;
            *ret = dead ? NULL : proc;
            proc->refs += !dead;
            break;
        }
    }
    pthread_mutex_unlock(&engine->mu);
    if (*ret != NULL && !kvti_nixl_proc_same(*ret)) {
        kvti_nixl_proc_put(engine, *ret);
        *ret = NULL;
        dead = true;
    }
    if (dead) {
        return gone(id->pid, err);
    }
    return *ret != NULL ? KVT_OK : open_proc(engine, id, ret, err);
}

struct kvti_nixl_proc *kvti_nixl_proc_share(struct kvti_nixl *engine,
                                            struct kvti_nixl_proc *proc)
{
    if (proc != NULL) {
        pthread_mutex_lock(&engine->mu);
        proc->refs++;
        pthread_mutex_unlock(&engine->mu);
    }
    return proc;
}

void kvti_nixl_proc_put(struct kvti_nixl *engine, struct kvti_nixl_proc *proc)
{
    bool last;

    if (proc == NULL) {
        return;
    }
    pthread_mutex_lock(&engine->mu);
    proc->refs--;
    last = proc->refs == 0;
    if (last) {
        kvti_list_remove(&proc->node);
        kvti_list_append(&engine->procs_idle, &proc->node);
    }
    pthread_mutex_unlock(&engine->mu);
    if (last && kvti_nixl_report_begin(engine)) {
        engine->env->wake(engine->env->ctx);
        kvti_nixl_report_end(engine);
    }
}

bool kvti_nixl_proc_gone(struct kvti_nixl *engine,
                         const struct kvti_nixl_proc *proc)
{
    bool gone_now = false;

    if (proc != NULL) {
        pthread_mutex_lock(&engine->mu);
        gone_now = proc->gone;
        pthread_mutex_unlock(&engine->mu);
    }
    return gone_now;
}

/* Unwatched, its death is not seen; the links' own errors still are. */
void kvti_nixl_proc_watch(struct kvti_nixl_proc *proc)
{
    const struct kvti_env *env = proc->engine->env;

    if (proc->watched || proc->gone) {
        return;
    }
    proc->watched = env->watch(env->ctx, &proc->watch) == KVT_OK;
    if (!proc->watched) {
        kvti_log(&env->logger, KVT_LOG_WARNING,
                 "nixl: process %d cannot be watched", (int)proc->pid);
    }
}

static void unwatch(struct kvti_nixl_proc *proc)
{
    const struct kvti_env *env = proc->engine->env;

    if (proc->watched) {
        proc->watched = false;
        env->unwatch(env->ctx, &proc->watch);
    }
}

/* Not in the middle of the core's events: it may hold one for the watch. */
void kvti_nixl_procs_sweep(struct kvti_nixl *engine)
{
    struct kvti_list idle;
    struct kvti_list *node;

    kvti_list_init(&idle);
    pthread_mutex_lock(&engine->mu);
    kvti_list_splice(&idle, &engine->procs_idle);
    pthread_mutex_unlock(&engine->mu);
    while ((node = kvti_list_take(&idle)) != NULL) {
        struct kvti_nixl_proc *proc = kvti_container(
            node, struct kvti_nixl_proc, node);

        unwatch(proc);
        close(proc->pidfd);
        free(proc);
    }
}

void kvti_nixl_procs_unwatch(struct kvti_nixl *engine)
{
    pthread_mutex_lock(&engine->mu);
    kvti_list_splice(&engine->procs_idle, &engine->procs);
    kvti_list_each(node, &engine->procs_idle) {
        unwatch(kvti_container(node, struct kvti_nixl_proc, node));
    }
    pthread_mutex_unlock(&engine->mu);
}
