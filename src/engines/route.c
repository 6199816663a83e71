/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine that callers open as `nixl`: NIXL, and the local engine for host
 * memory of peers on this host. NIXL has to start; the local engine may be
 * switched off (KVT_OPEN_NO_SAME_HOST, KVT_SAME_HOST=0) or be unable to, and
 * then everything goes by NIXL.
 *
 * close ends both sides, near first and in half of the time, so that a copy
 * that does not come back leaves time to destroy NIXL's agent. When a side has
 * a thread that does not come back, what it could still touch, and so this
 * too, is leaked.
 */
#include "route.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* In sight of a leak checker. */
static _Atomic(struct kvti_route *) leaked;

static void leak(struct kvti_route *route)
{
    route->leaked_next = atomic_load(&leaked);
    while (!atomic_compare_exchange_weak(&leaked, &route->leaked_next, route)) {
    }
}

/* ------------------------------------------- what a side gets from the core */

static void side_chunk(void *ctx, struct kvti_chunk *chunk,
                       const struct kvti_outcome *outcome)
{
    kvti_route_chunk_back(ctx, chunk, outcome);
}

static void side_job(void *ctx, struct kvti_job *job, int code,
                     const struct kvt_error *err)
{
    kvti_route_job_back(ctx, job, code, err);
}

static const struct kvti_env *core_of(void *ctx)
{
    const struct kvti_route_side *side = ctx;

    return side->route->env;
}

static bool side_note(void *ctx, const char *agent_name, const void *bytes,
                      size_t length)
{
    const struct kvti_env *env = core_of(ctx);

    return env->report_note(env->ctx, agent_name, bytes, length);
}

static int side_watch(void *ctx, struct kvti_watch *watch)
{
    const struct kvti_env *env = core_of(ctx);

    return env->watch(env->ctx, watch);
}

static void side_unwatch(void *ctx, struct kvti_watch *watch)
{
    const struct kvti_env *env = core_of(ctx);

    env->unwatch(env->ctx, watch);
}

static void side_heartbeat(void *ctx, struct kvti_heartbeat *heartbeat)
{
    const struct kvti_env *env = core_of(ctx);

    env->heartbeat(env->ctx, heartbeat);
}

static void side_wake(void *ctx)
{
    const struct kvti_env *env = core_of(ctx);

    env->wake(env->ctx);
}

static void side_light(void *ctx)
{
    const struct kvti_env *env = core_of(ctx);

    env->light(env->ctx);
}

static int open_side(struct kvti_route *route, struct kvti_route_side *side,
                     const struct kvti_engine_ops *ops, const char *rest,
                     struct kvt_error *err)
{
    side->route = route;
    side->ops = ops;
    side->env = *route->env;
    side->env.ctx = side;
    side->env.report_chunk = side_chunk;
    side->env.report_job = side_job;
    side->env.report_conn = kvti_route_conn_event;
    side->env.report_note = side_note;
    side->env.watch = side_watch;
    side->env.unwatch = side_unwatch;
    side->env.heartbeat = side_heartbeat;
    side->env.wake = side_wake;
    side->env.light = side_light;
    return ops->open(&side->env, rest, &side->self, &side->traits, err);
}

/* -------------------------------------------------------------- open, close */

/* What KVT_SAME_HOST says, or -1 for a word that is not known. A setting that
 * was meant and not understood must not be ignored: who switches the shortcut
 * off may have to. */
static int same_host(void)
{
    static const char *const words[][4] = {{"0", "no", "off", "false"},
                                           {"1", "yes", "on", "true"}};
    /* NOLINTNEXTLINE(concurrency-mt-unsafe): as every getenv of kvt_open() */
    const char *text = getenv("KVT_SAME_HOST");

    if (text == NULL || text[0] == '\0') {
        return 1;
    }
    for (int value = 0; value < 2; value++) {
        for (size_t i = 0; i < sizeof(words[0]) / sizeof(words[0][0]); i++) {
            if (strcasecmp(text, words[value][i]) == 0) {
                return value;
            }
        }
    }
    return -1;
}

static bool is_wanted(const struct kvt_options *options)
{
    return (options->flags & KVT_OPEN_NO_SAME_HOST) == 0 && same_host() != 0;
}

static void open_near(struct kvti_route *route)
{
    if (!is_wanted(route->env->options)) {
        kvti_fail(&route->no_near, KVT_EUNSUPPORTED, "it is switched off here");
    } else if (open_side(route, &route->near, &kvti_engine_local, "",
                         &route->no_near) != KVT_OK) {
        route->near.self = NULL;
        kvti_log(&route->env->logger, KVT_LOG_WARNING,
                 "nixl: peers on this host go through NIXL too: %s",
                 route->no_near.text);
    }
}

/* The bytes of a chunk have to suit both sides; its pieces and the window are
 * each connection's own, below these. A copy thread may still be reading for a peer that has just died,
 * and the core knows which chunks may be such a thread's. */
static struct kvti_engine_traits join_traits(const struct kvti_route *route)
{
    const struct kvti_engine_traits *near = &route->near.traits;
    struct kvti_engine_traits traits = route->far.traits;

    if (route->near.self == NULL) {
        return traits;
    }
    if (near->chunk_copies > traits.chunk_copies) {
        traits.chunk_copies = near->chunk_copies;
    }
    if (near->chunk_bytes < traits.chunk_bytes) {
        traits.chunk_bytes = near->chunk_bytes;
    }
    if (near->window > traits.window) {
        traits.window = near->window;
    }
    if (near->light > traits.light) {
        traits.light = near->light;
    }
    traits.dead_fin &= near->dead_fin;
    return traits;
}

/* Both sides are closed. */
static void free_route(struct kvti_route *route)
{
    struct kvti_list *node;

    kvti_route_tasks_fini(route);
    while ((node = kvti_list_take(&route->conns)) != NULL) {
        free(kvti_container(node, struct kvti_route_conn, node));
    }
    pthread_mutex_destroy(&route->mu);
    free(route);
}

static int open_route(const struct kvti_env *env, const char *rest,
                      void **ret_self, struct kvti_engine_traits *ret_traits,
                      struct kvt_error *err)
{
    struct kvti_route *route = calloc(1, sizeof(*route));
    int code;

    if (route == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for the nixl engine");
    }
    if (is_wanted(env->options) && same_host() < 0) {
        free(route);
        return kvti_fail(err, KVT_EINVAL,
                         "KVT_SAME_HOST must be 0, no, off or false, or 1, "
                         "yes, on or true; or unset it");
    }
    route->env = env;
    pthread_mutex_init(&route->mu, NULL);
    kvti_list_init(&route->tasks);
    kvti_list_init(&route->done);
    kvti_list_init(&route->retry);
    kvti_list_init(&route->conns);
    code = open_side(route, &route->far, &kvti_engine_nixl, rest, err);
    if (code != KVT_OK) {
        free_route(route);
        return code;
    }
    open_near(route);
    *ret_traits = join_traits(route);
    *ret_self = route;
    return KVT_OK;
}

static int close_route(void *self, uint64_t deadline_ns)
{
    struct kvti_route *route = self;
    uint64_t now_ns = kvti_now_ns();
    uint64_t half_ns = deadline_ns > now_ns ? (deadline_ns - now_ns) / 2 : 0;
    int code = KVT_OK;

    if (route->near.self != NULL) {
        code = route->near.ops->close(route->near.self, now_ns + half_ns);
    }
    if (route->far.ops->close(route->far.self, deadline_ns) != KVT_OK) {
        code = KVT_EBUSY;
    }
    if (code != KVT_OK) {
        leak(route);
        return code;
    }
    free_route(route);
    return KVT_OK;
}

/* The local engine's memory costs a child nothing, and ours next to it. */
static void after_fork(void *self)
{
    struct kvti_route *route = self;

    route->far.ops->after_fork(route->far.self);
}

/* ------------------------------------------------------------- other calls */

static uint64_t turn(void *self, uint64_t now_ns)
{
    struct kvti_route *route = self;
    uint64_t next_ns = route->far.ops->turn(route->far.self, now_ns);

    if (route->near.self != NULL) {
        uint64_t near_ns = route->near.ops->turn(route->near.self, now_ns);

        next_ns = near_ns < next_ns ? near_ns : next_ns;
    }
    kvti_route_turn_jobs(route);
    kvti_route_turn_chunks(route);
    return next_ns;
}

/* NIXL has a thread of its own for everything. */
static void work(void *self, bool here)
{
    struct kvti_route *route = self;

    if (route->near.self != NULL) {
        route->near.ops->work(route->near.self, here);
    }
}

static void leave(void *self)
{
    struct kvti_route *route = self;

    if (route->near.self != NULL) {
        route->near.ops->leave(route->near.self);
    }
}

static void notes_wanted(void *self)
{
    struct kvti_route *route = self;

    if (route->near.self != NULL) {
        route->near.ops->notes_wanted(route->near.self);
    }
    route->far.ops->notes_wanted(route->far.self);
}

static int probe(struct kvt_engine_info *ret)
{
    return kvti_engine_nixl.probe(ret);
}

const struct kvti_engine_ops kvti_engine_route = {
    .name = "nixl",
    .probe = probe,
    .open = open_route,
    .close = close_route,
    .job = kvti_route_job,
    .post = kvti_route_post,
    .work = work,
    .leave = leave,
    .turn = turn,
    .notes_wanted = notes_wanted,
    .after_fork = after_fork,
};
