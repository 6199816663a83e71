/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks and their way. A chunk of host memory on both sides is the local
 * engine's where that reaches the peer. Leave to write there may be lost in
 * mid-life, by a change of user or of the process's dumpable flag: the local
 * engine then refuses before it moved a byte of the piece, or after some that
 * will be written again with the same contents. Such a chunk is posted once
 * more, to NIXL, and so is everything after it.
 */
#include "route.h"

static void post_to(const struct kvti_route_side *side, void *conn,
                    struct kvti_chunk *chunk)
{
    chunk->conn = conn;
    side->ops->post(side->self, chunk);
}

static void post_far(struct kvti_route_conn *conn, struct kvti_chunk *chunk)
{
    if (conn->far_state == KVTI_FAR_UP) {
        post_to(&conn->route->far, conn->far, chunk);
        return;
    }
    kvti_list_append(&conn->waiting_chunks, &chunk->node);
    kvti_route_want_far(conn);
}

void kvti_route_post(void *self, struct kvti_chunk *chunk)
{
    struct kvti_route *route = self;
    struct kvti_route_conn *conn = chunk->conn;
    bool dram = chunk->local_kind == KVT_DRAM && chunk->peer_kind == KVT_DRAM;

    chunk->route = conn;
    if (dram && conn->near != NULL && !conn->denied) {
        post_to(&route->near, conn->near, chunk);
    } else {
        post_far(conn, chunk);
    }
}

void kvti_route_flush_chunks(struct kvti_route_conn *conn)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&conn->waiting_chunks)) != NULL) {
        post_far(conn, kvti_container(node, struct kvti_chunk, node));
    }
}

/* Nothing of it is on its way. Only a peer that is gone takes the whole link
 * with it: what is near goes on when NIXL cannot load the peer. */
static void report_unposted(struct kvti_route_conn *conn,
                            struct kvti_chunk *chunk,
                            const struct kvt_error *why)
{
    const struct kvti_env *env = conn->route->env;
    struct kvti_outcome outcome = {.state = why->code == KVT_EDISCONNECTED
                                                ? KVT_DISCONNECTED
                                                : KVT_REJECTED,
                                   .fin = KVTI_FIN_BOTH,
                                   .code = why->code};

    kvti_format(outcome.text, sizeof(outcome.text), "%s", why->text);
    chunk->conn = conn;
    env->report_chunk(env->ctx, chunk, &outcome);
}

void kvti_route_drop_chunks(struct kvti_route_conn *conn,
                            const struct kvt_error *why)
{
    struct kvti_route *route = conn->route;
    struct kvti_list *node;

    pthread_mutex_lock(&route->mu);
    kvti_list_each(each, &route->retry) {
        if (kvti_container(each, struct kvti_chunk, node)->route == conn) {
            kvti_list_remove(each);
            kvti_list_append(&conn->waiting_chunks, each);
        }
    }
    pthread_mutex_unlock(&route->mu);
    while ((node = kvti_list_take(&conn->waiting_chunks)) != NULL) {
        report_unposted(conn, kvti_container(node, struct kvti_chunk, node),
                        why);
    }
}

/* Takes what the local engine was not allowed, for NIXL to try. */
static bool take_denied(struct kvti_chunk *chunk,
                        const struct kvti_outcome *outcome)
{
    struct kvti_route_conn *conn = chunk->route;
    struct kvti_route *route = conn->route;
    bool taken;

    pthread_mutex_lock(&route->mu);
    taken = !conn->leaving && conn->md->prefix_length > 0;
    if (taken) {
        kvti_fail(&conn->near_err, outcome->code, "%s", outcome->text);
        kvti_list_append(&route->retry, &chunk->node);
    }
    pthread_mutex_unlock(&route->mu);
    return taken;
}

void kvti_route_chunk_back(const struct kvti_route_side *side,
                           struct kvti_chunk *chunk,
                           const struct kvti_outcome *outcome)
{
    struct kvti_route *route = side->route;
    const struct kvti_env *env = route->env;

    if (outcome->fin != KVTI_FIN_BOTH) {
        env->report_chunk(env->ctx, chunk, outcome); /* the side still has it */
        return;
    }
    if (side == &route->near && kvti_route_is_denied(outcome->code) &&
        take_denied(chunk, outcome)) {
        env->wake(env->ctx);
        return;
    }
    chunk->conn = chunk->route;
    env->report_chunk(env->ctx, chunk, outcome);
}

static void deny(struct kvti_route_conn *conn)
{
    struct kvti_route *route = conn->route;
    struct kvt_error why;

    conn->denied = true;
    pthread_mutex_lock(&route->mu);
    why = conn->near_err;
    pthread_mutex_unlock(&route->mu);
    kvti_log(&route->env->logger, KVT_LOG_WARNING,
             "nixl: NIXL takes over what goes to agent \"%.80s\", since %s",
             conn->md->agent_name, why.text);
}

void kvti_route_turn_chunks(struct kvti_route *route)
{
    struct kvti_list again;
    struct kvti_list *node;

    kvti_list_init(&again);
    pthread_mutex_lock(&route->mu);
    kvti_list_splice(&again, &route->retry);
    pthread_mutex_unlock(&route->mu);
    while ((node = kvti_list_take(&again)) != NULL) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);
        struct kvti_route_conn *conn = chunk->route;

        if (!conn->denied) {
            deny(conn);
        }
        post_far(conn, chunk);
    }
}
