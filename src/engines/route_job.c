/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs, one side after the other:
 *
 *   MEM_ADD   far, then near; taken back from far when near refuses
 *   MEM_DROP  near, which shuts writers out and may fail; then far
 *   EXPORT    far's bytes, then near's identity
 *   CONNECT   the side that moves the peer's host memory
 *   NOTIFY    near, or far where the peer's socket cannot be reached
 *
 * LOAD and UNLOAD are in route_conn.c. Messages have no order across the
 * sides, so those of a connection go the way of its first one for good: near's
 * socket needs no leave that could be lost.
 */
#include <stdlib.h>
#include <string.h>

#include "route.h"

/* ------------------------------------------------------------------- tasks */

void kvti_route_hand(const struct kvti_route_side *side,
                     const struct kvti_route_task *task)
{
    side->ops->job(side->self, task->job);
}

void kvti_route_task_free(struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;

    /* Loops that take and finish: the analyzer loses track of the links. */
    free(task->dram); /* NOLINT(clang-analyzer-unix.Malloc) */
    if (conn == NULL ||
        (task != &conn->unload_task && task != &conn->load_task)) {
        free(task);
    }
}

/* As the core gave it, but for what the job is to set. */
static void restore(const struct kvti_route_task *task, int code)
{
    struct kvti_job *job = task->job;

    job->kind = task->kind;
    job->mems = task->mems;
    job->mem_count = task->mem_count;
    if (task->conn != NULL) {
        bool none = task->kind == KVTI_JOB_LOAD && code != KVT_OK;

        job->conn = none ? NULL : task->conn;
        job->link = task->conn->link;
    }
}

void kvti_route_report_locked(struct kvti_route *route,
                              struct kvti_route_task *task, int code,
                              const struct kvt_error *err)
{
    const struct kvti_env *env = route->env;

    restore(task, code);
    kvti_list_remove(&task->all);
    env->report_job(env->ctx, task->job, code, err);
}

void kvti_route_finish(struct kvti_route *route, struct kvti_route_task *task,
                       int code, const struct kvt_error *err)
{
    pthread_mutex_lock(&route->mu);
    kvti_route_report_locked(route, task, code, err);
    pthread_mutex_unlock(&route->mu);
    kvti_route_task_free(task);
}

static void finish_as_is(struct kvti_route *route, struct kvti_route_task *task)
{
    kvti_route_finish(route, task, task->code, &task->err);
}

void kvti_route_tasks_fini(struct kvti_route *route)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&route->tasks)) != NULL) {
        struct kvti_route_task *task = kvti_container(
            node, struct kvti_route_task, all);

        restore(task, KVT_ECLOSED);
        kvti_route_task_free(task);
    }
}

/* ------------------------------------------------------- memory and export */

static void mems_to_near(struct kvti_route *route, struct kvti_route_task *task)
{
    task->job->mems = task->dram;
    task->job->mem_count = task->dram_count;
    kvti_route_hand(&route->near, task);
}

static void mems_to_far(struct kvti_route *route, struct kvti_route_task *task)
{
    task->job->mems = task->mems;
    task->job->mem_count = task->mem_count;
    kvti_route_hand(&route->far, task);
}

/* Only near has a limit of its own, and one can do without near. */
static void explain_full(struct kvti_route_task *task)
{
    char *text = task->err.text;
    size_t length = strlen(text);

    if (task->code == KVT_EAGAIN) {
        kvti_format(text + length, sizeof(task->err.text) - length,
                    ", or open with KVT_OPEN_NO_SAME_HOST");
    }
}

static void go_on_add(struct kvti_route *route, struct kvti_route_task *task)
{
    if (!task->undo && task->from == &route->near && task->code != KVT_OK) {
        explain_full(task);
        task->undo = true;
        task->job->kind = KVTI_JOB_MEM_DROP;
        mems_to_far(route, task);
    } else if (task->from == &route->far && task->code == KVT_OK &&
               task->dram_count > 0) {
        mems_to_near(route, task);
    } else {
        finish_as_is(route, task);
    }
}

static void go_on_drop(struct kvti_route *route, struct kvti_route_task *task)
{
    if (task->from == &route->near && task->code == KVT_OK) {
        mems_to_far(route, task);
    } else {
        finish_as_is(route, task);
    }
}

static void go_on_export(struct kvti_route *route, struct kvti_route_task *task)
{
    if (task->from == &route->far && task->code == KVT_OK &&
        route->near.self != NULL) {
        kvti_route_hand(&route->near, task);
    } else {
        finish_as_is(route, task);
    }
}

/* -------------------------------------------------------- connect and notify */

static void to_far(struct kvti_route_conn *conn, struct kvti_route_task *task)
{
    if (conn->far_state == KVTI_FAR_UP) {
        task->job->conn = conn->far;
        kvti_route_hand(&conn->route->far, task);
        return;
    }
    kvti_list_append(&conn->waiting_jobs, &task->node);
    kvti_route_want_far(conn);
}

void kvti_route_flush_calls(struct kvti_route_conn *conn)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&conn->waiting_jobs)) != NULL) {
        to_far(conn, kvti_container(node, struct kvti_route_task, node));
    }
}

void kvti_route_drop_calls(struct kvti_route_conn *conn,
                           const struct kvt_error *why)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&conn->waiting_jobs)) != NULL) {
        kvti_route_finish(conn->route,
                          kvti_container(node, struct kvti_route_task, node),
                          why->code, why);
    }
}

static void start_call(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;
    bool message = task->kind == KVTI_JOB_NOTIFY;
    bool near = conn->near != NULL && !conn->denied;

    if (message) {
        near = conn->near != NULL && !conn->notes_far &&
               (conn->notes_near || near);
        conn->notes_near |= near;
        conn->notes_far |= !near;
    }
    if (near) {
        task->job->conn = conn->near;
        kvti_route_hand(&route->near, task);
    } else {
        to_far(conn, task);
    }
}

/* Near cannot: its socket is in another network namespace, or leave to reach
 * the process was lost. NIXL may. */
static bool goes_far(const struct kvti_route_task *task)
{
    return task->from == &task->conn->route->near &&
           kvti_route_is_denied(task->code) &&
           task->conn->md->prefix_length > 0;
}

static void go_on_call(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;
    struct kvt_error err;

    kvti_assert(goes_far(task));
    if (conn->unload != NULL) {
        kvti_fail(&err, KVT_EDISCONNECTED, "the peer was unloaded");
        kvti_route_finish(route, task, err.code, &err);
        return;
    }
    conn->notes_far |= task->kind == KVTI_JOB_NOTIFY;
    to_far(conn, task);
}

/* ------------------------------------------------------------------- both */

static void go_on(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;

    switch (task->kind) {
    case KVTI_JOB_MEM_ADD:
        go_on_add(route, task);
        break;
    case KVTI_JOB_MEM_DROP:
        go_on_drop(route, task);
        break;
    case KVTI_JOB_EXPORT:
        go_on_export(route, task);
        break;
    case KVTI_JOB_LOAD:
        if (task == &conn->load_task) {
            kvti_route_far_loaded(conn);
        } else {
            kvti_route_load_on(route, task);
        }
        break;
    case KVTI_JOB_UNLOAD:
        kvti_route_unload_on(conn);
        break;
    default:
        go_on_call(route, task);
        break;
    }
}

/* What the first side said stays where both are asked whatever it says: an
 * UNLOAD, and a MEM_ADD that is taken back. */
static void keep(struct kvti_route_task *task,
                 const struct kvti_route_side *side, int code,
                 const struct kvt_error *err)
{
    bool both = task->undo || task->kind == KVTI_JOB_UNLOAD;

    task->from = side;
    if (both && task->code != KVT_OK) {
        return;
    }
    task->code = code;
    if (code != KVT_OK && err != NULL) {
        task->err = *err;
    }
}

void kvti_route_job_back(const struct kvti_route_side *side,
                         struct kvti_job *job, int code,
                         const struct kvt_error *err)
{
    struct kvti_route *route = side->route;
    struct kvti_route_task *task = job->route;
    bool call = task->kind == KVTI_JOB_NOTIFY || task->kind == KVTI_JOB_CONNECT;

    keep(task, side, code, err);
    if (call && !goes_far(task)) {
        finish_as_is(route, task);
        return;
    }
    pthread_mutex_lock(&route->mu);
    kvti_list_append(&route->done, &task->node);
    pthread_mutex_unlock(&route->mu);
    route->env->wake(route->env->ctx);
}

void kvti_route_turn_jobs(struct kvti_route *route)
{
    struct kvti_list *node;

    for (;;) {
        pthread_mutex_lock(&route->mu);
        node = kvti_list_take(&route->done);
        pthread_mutex_unlock(&route->mu);
        if (node == NULL) {
            return;
        }
        go_on(route, kvti_container(node, struct kvti_route_task, node));
    }
}

/* The job's regions of host memory, when there is somebody to give them to. */
static bool pick_dram(const struct kvti_route *route,
                      struct kvti_route_task *task)
{
    if (route->near.self == NULL || task->mem_count == 0) {
        return true;
    }
    task->dram = calloc(task->mem_count, sizeof(struct kvti_mem *));
    if (task->dram == NULL) {
        return false;
    }
    for (size_t i = 0; i < task->mem_count; i++) {
        if (task->mems[i]->kind == KVT_DRAM) {
            task->dram[task->dram_count++] = task->mems[i];
        }
    }
    return true;
}

static bool prepare(struct kvti_route *route, struct kvti_route_task *task)
{
    switch (task->kind) {
    case KVTI_JOB_MEM_ADD:
    case KVTI_JOB_MEM_DROP:
        return pick_dram(route, task);
    case KVTI_JOB_EXPORT:
        return true;
    case KVTI_JOB_LOAD:
        task->conn = kvti_route_conn_new(route, task->job);
        return task->conn != NULL;
    default:
        task->conn = task->job->conn;
        return true;
    }
}

/* NULL: no memory. */
static struct kvti_route_task *new_task(struct kvti_route *route,
                                        struct kvti_job *job)
{
    struct kvti_route_conn *conn = job->conn;
    struct kvti_route_task *task = job->kind == KVTI_JOB_UNLOAD
                                       ? &conn->unload_task
                                       : calloc(1, sizeof(*task));

    if (task == NULL) {
        return NULL;
    }
    task->job = job;
    task->kind = job->kind;
    task->mems = job->mems;
    task->mem_count = job->mem_count;
    kvti_list_init(&task->node);
    if (!prepare(route, task)) {
        free(task);
        return NULL;
    }
    pthread_mutex_lock(&route->mu);
    kvti_list_append(&route->tasks, &task->all);
    pthread_mutex_unlock(&route->mu);
    return task;
}

static void start(struct kvti_route *route, struct kvti_route_task *task)
{
    switch (task->kind) {
    case KVTI_JOB_MEM_ADD:
        mems_to_far(route, task);
        break;
    case KVTI_JOB_MEM_DROP:
        (task->dram_count > 0 ? mems_to_near : mems_to_far)(route, task);
        break;
    case KVTI_JOB_EXPORT:
        kvti_route_hand(&route->far, task);
        break;
    case KVTI_JOB_LOAD:
        kvti_route_load(route, task);
        break;
    case KVTI_JOB_UNLOAD:
        kvti_route_unload(task);
        break;
    default:
        start_call(route, task);
        break;
    }
}

void kvti_route_job(void *self, struct kvti_job *job)
{
    struct kvti_route *route = self;
    struct kvti_route_task *task = new_task(route, job);
    struct kvt_error err;

    if (task == NULL) {
        int code = job->kind == KVTI_JOB_MEM_DROP ? KVT_EBUSY : KVT_ENOMEM;

        kvti_fail(&err, code, "no memory for what the engine has to do");
        route->env->report_job(route->env->ctx, job, code, &err);
        return;
    }
    job->route = task;
    start(route, task);
}
