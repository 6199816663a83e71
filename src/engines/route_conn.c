/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's connections, one on each side:
 *
 *   LOAD      near where that is possible, else far
 *   later     far as well, when something has to go that way
 *   UNLOAD    near, then far
 *
 * What waits for the load when first needed waits in the connection. That load
 * may fail, which the peer's near side survives, and the next thing that has
 * to go far has it tried again. It cannot be called off: an UNLOAD waits for
 * it.
 */
#include <stdlib.h>
#include <string.h>

#include "route.h"

struct kvti_route_conn *kvti_route_conn_new(struct kvti_route *route,
                                            const struct kvti_job *job)
{
    struct kvti_route_conn *conn = calloc(1, sizeof(*conn));

    if (conn != NULL) {
        conn->route = route;
        conn->link = job->link;
        conn->md = job->md;
        kvti_list_init(&conn->node);
        kvti_list_init(&conn->waiting_chunks);
        kvti_list_init(&conn->waiting_jobs);
        pthread_mutex_lock(&route->mu);
        kvti_list_append(&route->conns, &conn->node);
        pthread_mutex_unlock(&route->mu);
    }
    return conn;
}

void kvti_route_conn_free(struct kvti_route_conn *conn)
{
    if (conn != NULL) {
        pthread_mutex_lock(&conn->route->mu);
        kvti_list_remove(&conn->node);
        pthread_mutex_unlock(&conn->route->mu);
        free(conn);
    }
}

/* ------------------------------------------------------------------ events */

void kvti_route_conn_event(void *ctx, void *link, enum kvti_conn_event event,
                           const struct kvt_error *why)
{
    const struct kvti_route_side *side = ctx;
    struct kvti_route *route = side->route;
    struct kvti_route_conn *conn = link;

    pthread_mutex_lock(&route->mu);
    if (conn->published) {
        route->env->report_conn(route->env->ctx, conn->link, event, why);
    } else {
        conn->early[event] = true;
        conn->why[event] = *why;
    }
    pthread_mutex_unlock(&route->mu);
}

/* The core has it from now on; what happened to it meanwhile comes after. */
static void publish(struct kvti_route *route, struct kvti_route_task *task)
{
    const struct kvti_env *env = route->env;
    struct kvti_route_conn *conn = task->conn;

    pthread_mutex_lock(&route->mu);
    kvti_route_report_locked(route, task, KVT_OK, NULL);
    conn->published = true;
    for (int event = KVTI_CONN_DOWN; event <= KVTI_CONN_DEAD; event++) {
        if (conn->early[event]) {
            env->report_conn(env->ctx, conn->link, (enum kvti_conn_event)event,
                             &conn->why[event]);
        }
    }
    pthread_mutex_unlock(&route->mu);
    kvti_route_task_free(task);
}

/* -------------------------------------------------------------------- load */

/* A peer that keeps its shortcut shut has no socket for us, and opens none of
 * its regions in its gate: generation 0. */
static bool is_shut(const struct kvti_md *md)
{
    for (size_t i = 0; i < md->regions.count; i++) {
        const struct kvti_mem *mem = &md->regions.mems[i];

        if (mem->kind == KVT_DRAM && mem->gate_gen == 0) {
            return true;
        }
    }
    return md->local.socket_name[0] == '\0';
}

/* KVT_OK: the local engine may try. */
static int check_near(const struct kvti_route *route, const struct kvti_md *md,
                      struct kvt_error *err)
{
    if (route->near.self == NULL) {
        *err = route->no_near;
        return err->code;
    }
    if (!md->has_trailer) {
        return kvti_fail(err, KVT_EUNSUPPORTED, "the peer runs plain NIXL");
    }
    if (!md->has_local) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "the peer does not say which process it is");
    }
    return is_shut(md) ? kvti_fail(err, KVT_EUNSUPPORTED,
                                   "the peer has its shortcut switched off")
                       : KVT_OK;
}

static void load_failed(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;

    kvti_route_finish(route, task, task->code, &task->err);
    kvti_route_conn_free(conn);
}

static void near_loaded(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;

    if (task->code == KVT_OK) {
        conn->near = task->job->conn;
        task->job->window = route->near.traits.window;
        task->job->light = route->near.traits.light;
        task->job->share = route->near.traits.share;
        task->job->copies = route->near.traits.chunk_copies;
        publish(route, task);
    } else if (task->code == KVT_EDISCONNECTED ||
               conn->md->prefix_length == 0) {
        /* It looked: there is no such agent. Or there is no other way. */
        load_failed(route, task);
    } else {
        conn->near_err = task->err;
        kvti_route_hand(&route->far, task);
    }
}

static void loaded_far(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;
    struct kvti_job *job = task->job;
    size_t length;

    if (task->code != KVT_OK) {
        load_failed(route, task);
        return;
    }
    conn->far = job->conn;
    conn->far_state = KVTI_FAR_UP;
    job->window = route->far.traits.window;
    job->light = route->far.traits.light;
    job->share = route->far.traits.share;
    job->copies = route->far.traits.chunk_copies;
    length = strlen(job->text);
    kvti_format(job->text + length, sizeof(job->text) - length,
                "; not the shortcut, since %s", conn->near_err.text);
    publish(route, task);
}

void kvti_route_load_on(struct kvti_route *route, struct kvti_route_task *task)
{
    (task->from == &route->near ? near_loaded : loaded_far)(route, task);
}

void kvti_route_load(struct kvti_route *route, struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;
    int code = check_near(route, conn->md, &conn->near_err);

    task->job->link = conn;
    kvti_route_hand(code == KVT_OK ? &route->near : &route->far, task);
}

/* ------------------------------------------------------- the load for later */

void kvti_route_want_far(struct kvti_route_conn *conn)
{
    struct kvti_job *job = &conn->load_job;

    kvti_assert(conn->unload == NULL);
    if (conn->far_state != KVTI_FAR_NONE) {
        return;
    }
    conn->far_state = KVTI_FAR_LOADING;
    conn->load_task = (struct kvti_route_task){
        .job = job, .kind = KVTI_JOB_LOAD, .conn = conn};
    kvti_list_init(&conn->load_task.all);
    kvti_list_init(&conn->load_task.node);
    *job = (struct kvti_job){.kind = KVTI_JOB_LOAD,
                             .deadline_ns = UINT64_MAX,
                             .owner = conn,
                             .link = conn,
                             .md = conn->md,
                             .route = &conn->load_task};
    kvti_list_init(&job->node);
    kvti_list_init(&job->open_node);
    kvti_list_init(&job->event_node);
    kvti_route_hand(&conn->route->far, &conn->load_task);
}

void kvti_route_far_loaded(struct kvti_route_conn *conn)
{
    const struct kvti_route_task *task = &conn->load_task;

    if (task->code == KVT_OK) {
        conn->far_state = KVTI_FAR_UP;
        conn->far = conn->load_job.conn;
        kvti_route_flush_calls(conn);
        kvti_route_flush_chunks(conn);
    } else {
        conn->far_state = KVTI_FAR_NONE;
        kvti_route_drop_calls(conn, &task->err);
        kvti_route_drop_chunks(conn, &task->err);
    }
    if (conn->unload != NULL) {
        kvti_route_unload_on(conn);
    }
}

/* ------------------------------------------------------------------ unload */

void kvti_route_unload_on(struct kvti_route_conn *conn)
{
    struct kvti_route *route = conn->route;
    struct kvti_route_task *task = conn->unload;
    struct kvt_error err;
    int code;

    if (conn->near != NULL) {
        task->job->conn = conn->near;
        conn->near = NULL;
        kvti_route_hand(&route->near, task);
    } else if (conn->far_state == KVTI_FAR_UP) {
        task->job->conn = conn->far;
        conn->far_state = KVTI_FAR_NONE;
        kvti_route_hand(&route->far, task);
    } else {
        code = task->code;
        err = task->err;
        kvti_route_finish(route, task, code, &err);
        if (code != KVT_EBUSY) { /* else a chunk of near's comes back yet */
            kvti_route_conn_free(conn);
        }
    }
}

void kvti_route_unload(struct kvti_route_task *task)
{
    struct kvti_route_conn *conn = task->conn;
    struct kvt_error why;

    conn->unload = task;
    pthread_mutex_lock(&conn->route->mu);
    conn->leaving = true;
    pthread_mutex_unlock(&conn->route->mu);
    kvti_fail(&why, KVT_EDISCONNECTED,
              "the peer was unloaded before NIXL had this");
    kvti_route_drop_calls(conn, &why);
    kvti_route_drop_chunks(conn, &why);
    if (conn->far_state != KVTI_FAR_LOADING) {
        kvti_route_unload_on(conn);
    }
}
