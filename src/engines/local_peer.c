/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Importing peers and letting them go.
 *
 * The helper thread does both, since both open files, map memory and read
 * other processes. Each half has a step on the control thread, which owns what
 * it watches: an import is published there (the pidfd is watched, the job
 * reported), a connection is detached there before it is handed back.
 *
 * One pidfd serves all connections to a process, one gate slot and mapping all
 * connections to a transport. Only the helper counts and frees them; a process
 * that has connections on the control thread has references here, so its
 * descriptor is closed only when nobody watches it.
 */
#include "local.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* -------------------------------------------------------------- processes */

static void proc_died(struct kvti_watch *watch, uint32_t events)
{
    struct kvti_local_proc *proc = kvti_container(watch, struct kvti_local_proc,
                                                  watch);
    const struct kvti_env *env = proc->engine->env;
    struct kvt_error why;

    (void)events;
    if (proc->gone || !kvti_ident_pidfd_dead(proc->pidfd)) {
        return;
    }
    proc->gone = true;
    proc->watched = false;
    env->unwatch(env->ctx, watch);
    kvti_fail(&why, KVT_EDISCONNECTED, "process %d has ended", proc->pid);
    kvti_list_each(node, &proc->conns) {
        struct kvti_local_conn *conn = kvti_container(
            node, struct kvti_local_conn, proc_node);

        kvti_local_out_drop(conn, why.text);
        env->report_conn(env->ctx, conn->link, KVTI_CONN_DEAD, &why);
    }
}

static int proc_open(struct kvti_local *engine, const struct kvti_local_id *id,
                     struct kvti_local_proc **ret, struct kvt_error *err)
{
    struct kvti_local_proc *proc = calloc(1, sizeof(*proc));
    uint64_t start_time = 0;
    int code;

    if (proc == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer's process");
    }
    proc->engine = engine;
    proc->pid = id->pid;
    proc->start_time = id->start_time;
    proc->pidfd = -1;
    kvti_list_init(&proc->conns);
    if (id->pid != engine->self.pid) {
        proc->pidfd = kvti_ident_pidfd_open(id->pid);
        if (proc->pidfd < 0) {
            code = errno == ESRCH
                       ? kvti_fail(
                             err, KVT_EDISCONNECTED,
                             "process %d is gone: get the metadata of the one "
                             "that took its place",
                             id->pid)
                       : kvti_fail_errno(err, KVT_ESYSTEM, errno,
                                         "cannot open a pidfd of process %d",
                                         id->pid);
            free(proc);
            return code;
        }
        proc->watch.fd = proc->pidfd;
        proc->watch.events = EPOLLIN;
        proc->watch.ready = proc_died;
    }
    code = kvti_ident_start_time(id->pid, &start_time);
    if (code == 0 && start_time == id->start_time) {
        kvti_list_append(&engine->procs, &proc->node);
        *ret = proc;
        return KVT_OK;
    }
    if (code == 0) {
        code = kvti_fail(err, KVT_EDISCONNECTED,
                         "process %d is another one than the metadata names",
                         id->pid);
    } else if (code == -ENOENT && proc->pidfd >= 0 &&
               !kvti_ident_pidfd_dead(proc->pidfd)) {
        code = kvti_ident_denied(id->pid, id->uid, err);
    } else if (code == -ENOENT || code == -ESRCH) {
        code = kvti_fail(err, KVT_EDISCONNECTED,
                         "process %d is gone: get the metadata of the one "
                         "that took its place",
                         id->pid);
    } else {
        code = kvti_fail_errno(err, KVT_ESYSTEM, -code,
                               "cannot read when process %d was started",
                               id->pid);
    }
    if (proc->pidfd >= 0) {
        close(proc->pidfd);
    }
    free(proc);
    return code;
}

static int proc_get(struct kvti_local *engine, const struct kvti_local_id *id,
                    struct kvti_local_proc **ret, struct kvt_error *err)
{
    int code = KVT_OK;

    *ret = NULL;
    kvti_list_each(node, &engine->procs) {
        struct kvti_local_proc *proc = kvti_container(
            node, struct kvti_local_proc, node);

        if (proc->pid == id->pid && proc->start_time == id->start_time) {
            *ret = proc;
            break;
        }
    }
    if (*ret == NULL) {
        code = proc_open(engine, id, ret, err);
    }
    if (code == KVT_OK) {
        kvti_assert(*ret != NULL);
        (*ret)->refs++;
    }
    return code;
}

static void proc_put(struct kvti_local_proc *proc)
{
    proc->refs--;
    if (proc->refs > 0) {
        return;
    }
    kvti_assert(kvti_list_empty(&proc->conns));
    kvti_list_remove(&proc->node);
    if (proc->pidfd >= 0) {
        close(proc->pidfd);
    }
    free(proc);
}

/* ---------------------------------------------------------------- targets */

static struct kvti_list *target_bucket(struct kvti_local *engine,
                                       const struct kvti_local_id *id)
{
    return &engine->targets[id->nonce[0] % KVTI_TARGET_BUCKETS];
}

static bool is_target(const struct kvti_local_target *target,
                      const struct kvti_md *md)
{
    const struct kvti_local_id *id = &md->local;

    return target->proc->pid == id->pid &&
           target->proc->start_time == id->start_time &&
           target->nonce_addr == id->nonce_addr &&
           target->gate_fd == id->gate_fd &&
           memcmp(target->nonce, id->nonce, sizeof(id->nonce)) == 0 &&
           memcmp(target->incarnation, md->incarnation,
                  sizeof(md->incarnation)) == 0;
}

static int target_open(struct kvti_local *engine, const struct kvti_md *md,
                       struct kvti_local_target **ret, struct kvt_error *err)
{
    const struct kvti_local_id *id = &md->local;
    struct kvti_local_target *target = calloc(1, sizeof(*target));
    int code;

    if (target == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
    }
    code = proc_get(engine, id, &target->proc, err);
    if (code != KVT_OK) {
        goto fail;
    }
    target->nonce_addr = id->nonce_addr;
    memcpy(target->nonce, id->nonce, sizeof(target->nonce));
    memcpy(target->incarnation, md->incarnation, sizeof(target->incarnation));
    target->uid = id->uid;
    target->gate_fd = id->gate_fd;
    target->refs = 1;
    code = kvti_ident_check(target, err);
    if (code == KVT_OK) {
        code = kvti_gate_join(id->pid, id->gate_fd, id->uid, engine->owner,
                              &target->gate, &target->gate_slot, err);
    }
    if (code != KVT_OK) {
        goto fail_proc;
    }
    kvti_list_append(target_bucket(engine, id), &target->node);
    *ret = target;
    return KVT_OK;

fail_proc:
    proc_put(target->proc);
fail:
    free(target);
    return code;
}

static int target_get(struct kvti_local *engine, const struct kvti_md *md,
                      struct kvti_local_target **ret, struct kvt_error *err)
{
    struct kvti_list *bucket = target_bucket(engine, &md->local);

    kvti_list_each(node, bucket) {
        struct kvti_local_target *target = kvti_container(
            node, struct kvti_local_target, node);

        if (is_target(target, md)) {
            target->refs++;
            *ret = target;
            return KVT_OK;
        }
    }
    return target_open(engine, md, ret, err);
}

static void target_put(struct kvti_local_target *target)
{
    target->refs--;
    if (target->refs > 0) {
        return;
    }
    kvti_list_remove(&target->node);
    kvti_gate_part(target->gate, target->gate_slot);
    proc_put(target->proc);
    free(target);
}

/* ------------------------------------------------------------ connections */

struct kvti_local_conn *kvti_local_conn_new(struct kvti_local *engine,
                                            void *link)
{
    struct kvti_local_conn *conn = calloc(1, sizeof(*conn));

    if (conn == NULL || pthread_rwlock_init(&conn->lock, NULL) != 0) {
        free(conn);
        return NULL;
    }
    conn->engine = engine;
    conn->link = link;
    kvti_list_init(&conn->node);
    kvti_list_init(&conn->proc_node);
    kvti_local_out_init(&conn->out);
    return conn;
}

static void free_maps(struct kvti_local_conn *conn)
{
    for (size_t i = 0; conn->maps != NULL && i < conn->regions.count; i++) {
        kvti_local_map_close(&conn->maps[i]);
    }
    free(conn->maps);
    conn->maps = NULL;
}

void kvti_local_conn_free(struct kvti_local_conn *conn)
{
    free_maps(conn);
    kvti_regions_fini(&conn->regions);
    if (conn->target != NULL) {
        target_put(conn->target);
    }
    pthread_rwlock_destroy(&conn->lock);
    free(conn);
}

/* ------------------------------------------------------------- the helper */

/* What another host or container writes there is none of our business, and
 * says which of the two it is. */
static int check_host(const struct kvti_local *engine, const struct kvti_md *md,
                      struct kvt_error *err)
{
    const struct kvti_local_id *id = &md->local;

    if (!md->has_local) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "the metadata of \"%.64s\" names no process, so the "
                         "local engine cannot reach it",
                         md->agent_name);
    }
    if (strncmp(id->boot_id, engine->self.boot_id, sizeof(id->boot_id)) != 0) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "agent \"%.64s\" is on another host, which the local "
                         "engine cannot reach: use nixl",
                         md->agent_name);
    }
    if (id->pid_ns != engine->self.pid_ns) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "agent \"%.64s\" is in another pid namespace, which "
                         "the local engine cannot reach: share it between the "
                         "containers, or use nixl",
                         md->agent_name);
    }
    return KVT_OK;
}

static int check_numbers(const struct kvti_md *md, struct kvt_error *err)
{
    const struct kvti_local_id *id = &md->local;

    if (id->pid <= 0 || id->gate_fd < 0 ||
        id->gate_bytes != sizeof(struct kvti_gate_page) ||
        id->nonce_addr == 0 ||
        id->nonce_addr > UINT64_MAX - sizeof(struct kvti_nonce_page) ||
        memchr(id->socket_name, '\0', sizeof(id->socket_name)) == NULL) {
        return kvti_fail(err, KVT_EMETADATA,
                         "the metadata of \"%.64s\" names its process in a "
                         "way that this version does not know",
                         md->agent_name);
    }
    for (size_t i = 0; i < md->regions.count; i++) {
        const struct kvti_mem *mem = &md->regions.mems[i];

        if (mem->kind == KVT_DRAM && mem->gate_slot >= KVTI_GATE_ENTRIES) {
            return kvti_fail(err, KVT_EMETADATA,
                             "region %zu of \"%.64s\" has no place in its "
                             "gate",
                             i, md->agent_name);
        }
    }
    return KVT_OK;
}

static int copy_regions(struct kvti_local_conn *conn,
                        const struct kvti_regions *regions)
{
    bool files = false;

    if (kvti_regions_reserve(&conn->regions, regions->count) != KVT_OK) {
        return KVT_ENOMEM;
    }
    for (size_t i = 0; i < regions->count; i++) {
        kvti_regions_add(&conn->regions, &regions->mems[i]);
        files = files || (regions->mems[i].flags & KVTI_MEM_FD) != 0;
    }
    kvti_regions_update(&conn->regions, NULL, NULL);
    if (files) {
        conn->maps = calloc(regions->count, sizeof(*conn->maps));
    }
    return files && conn->maps == NULL ? KVT_ENOMEM : KVT_OK;
}

/* The kernel allows 65,530 mappings a process, and the caller wants some. */
#define MAPS_MAX 4096u

static size_t map_files(struct kvti_local_conn *conn)
{
    size_t mapped = 0;

    for (size_t i = 0; conn->maps != NULL && i < conn->regions.count; i++) {
        if (mapped < MAPS_MAX) {
            kvti_local_map_open(conn->target->proc, &conn->regions.mems[i],
                                &conn->maps[i]);
            mapped += conn->maps[i].base != NULL;
        }
    }
    return mapped;
}

static int load(struct kvti_local_conn *conn, struct kvti_job *job,
                struct kvt_error *err)
{
    struct kvti_local *engine = conn->engine;
    const struct kvti_md *md = job->md;
    size_t mapped;
    int code = check_host(engine, md, err);

    if (code == KVT_OK) {
        code = check_numbers(md, err);
    }
    if (code == KVT_OK) {
        code = target_get(engine, md, &conn->target, err);
    }
    if (code != KVT_OK) {
        return code;
    }
    if (copy_regions(conn, &md->regions) != KVT_OK) {
        return kvti_fail(err, KVT_ENOMEM,
                         "no memory for the %zu regions of "
                         "\"%.64s\"",
                         md->regions.count, md->agent_name);
    }
    mapped = map_files(conn);
    /* What was opened through /proc/PID belongs to this process only if it
     * still lives now. */
    code = kvti_ident_check(conn->target, err);
    if (code != KVT_OK) {
        return code;
    }
    memcpy(conn->socket_name, md->local.socket_name, sizeof(conn->socket_name));
    conn->reachable = md->local.net_ns == engine->self.net_ns &&
                      conn->socket_name[0] != '\0';
    kvti_format(job->path, sizeof(job->path), "local");
    kvti_format(job->text, sizeof(job->text),
                "%s on this host, %zu of %zu regions through shared files",
                conn->target->proc->pidfd < 0 ? "in this process"
                                              : "another process",
                mapped, md->regions.count);
    return KVT_OK;
}

/* Reports from the helper, unless the engine is closed. */
static void report(struct kvti_local *engine, struct kvti_job *job, int code,
                   const struct kvt_error *err)
{
    if (kvti_local_report_begin(engine)) {
        engine->env->report_job(engine->env->ctx, job, code, err);
        kvti_local_report_end(engine);
    }
}

/* Gives a job that went well back to turn(). */
static void hand_over(struct kvti_local *engine, struct kvti_job *job)
{
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->done, &job->node);
    pthread_mutex_unlock(&engine->mu);
    if (kvti_local_report_begin(engine)) {
        engine->env->wake(engine->env->ctx);
        kvti_local_report_end(engine);
    }
}

static void run_job(struct kvti_local *engine, struct kvti_job *job)
{
    struct kvti_local_conn *conn = kvti_local_job_conn(job);
    struct kvt_error err;
    int code;

    switch (job->kind) {
    case KVTI_JOB_LOAD:
        code = load(conn, job, &err);
        if (code == KVT_OK) {
            hand_over(engine, job);
        } else {
            kvti_local_conn_free(conn);
            report(engine, job, code, &err);
        }
        break;
    case KVTI_JOB_CONNECT:
        code = kvti_ident_check(conn->target, &err);
        (void)atomic_load(&conn->target->gate->epoch);
        if (code == KVT_OK) {
            hand_over(engine, job);
        } else {
            report(engine, job, code, &err);
            kvti_local_conn_release(conn, 1);
        }
        break;
    default:
        kvti_assert(job->kind == KVTI_JOB_UNLOAD);
        kvti_local_conn_free(conn);
        report(engine, job, KVT_OK, NULL);
        break;
    }
}

void *kvti_local_helper(void *arg)
{
    struct kvti_local_worker *helper = arg;
    struct kvti_local *engine = helper->engine;

    kvti_life_begin(&engine->life, engine->gate.page);
    pthread_mutex_lock(&engine->mu);
    while (!engine->stop) {
        struct kvti_list *job = kvti_list_take(&engine->jobs);
        struct kvti_list *conn = NULL;

        if (job == NULL) {
            conn = kvti_list_take(&engine->reap);
        }
        if (job == NULL && conn == NULL) {
            pthread_cond_wait(&engine->errand, &engine->mu);
            continue;
        }
        pthread_mutex_unlock(&engine->mu);
        atomic_store(&helper->heartbeat.busy_since_ns, kvti_now_ns());
        if (job != NULL) {
            run_job(engine, kvti_container(job, struct kvti_job, node));
        } else {
            kvti_local_conn_free(
                kvti_container(conn, struct kvti_local_conn, node));
        }
        atomic_store(&helper->heartbeat.busy_since_ns, 0);
        pthread_mutex_lock(&engine->mu);
    }
    kvti_life_end(&engine->life, engine->gate.page);
    kvti_local_thread_end_locked(engine);
    pthread_mutex_unlock(&engine->mu);
    return NULL;
}

/* ----------------------------------------------------- the control thread */

void kvti_local_conn_publish(struct kvti_local_conn *conn, struct kvti_job *job)
{
    struct kvti_local *engine = conn->engine;
    const struct kvti_env *env = engine->env;
    struct kvti_local_proc *proc = conn->target->proc;
    struct kvt_error err;

    if (proc->pidfd >= 0 && !proc->watched && !proc->gone) {
        if (env->watch(env->ctx, &proc->watch) != KVT_OK) {
            /* Without the watch its death would go unseen. */
            pthread_mutex_lock(&engine->mu);
            kvti_list_append(&engine->reap, &conn->node);
            pthread_cond_signal(&engine->errand);
            pthread_mutex_unlock(&engine->mu);
            kvti_fail(&err, KVT_ESYSTEM,
                      "cannot watch process %d: the limit of descriptors or "
                      "epoll watches is reached",
                      proc->pid);
            env->report_job(env->ctx, job, err.code, &err);
            return;
        }
        proc->watched = true;
    }
    kvti_list_append(&engine->conns, &conn->node);
    kvti_list_append(&proc->conns, &conn->proc_node);
    job->conn = conn;
    env->report_job(env->ctx, job, KVT_OK, NULL);
    if (proc->gone) {
        kvti_fail(&err, KVT_EDISCONNECTED, "process %d has ended", proc->pid);
        env->report_conn(env->ctx, conn->link, KVTI_CONN_DEAD, &err);
    }
}

void kvti_local_conn_detach(struct kvti_local_conn *conn)
{
    struct kvti_local_proc *proc = conn->target->proc;
    const struct kvti_env *env = conn->engine->env;

    kvti_local_out_drop(conn, "the connection is closed");
    kvti_list_remove(&conn->proc_node);
    if (kvti_list_empty(&proc->conns) && proc->watched) {
        env->unwatch(env->ctx, &proc->watch);
        proc->watched = false;
    }
}
