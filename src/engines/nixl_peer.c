/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers, on the NIXL thread.
 *
 * NIXL knows agents by name, and one blob a name. Connections to the same
 * incarnation share it: NIXL takes a blob of the same agent with other
 * regions on top. Whenever that is not so, a new incarnation under an old name
 * or a link that broke, what NIXL has is invalidated first: it refuses to load
 * over it, and keeps the old state. The old connections then count as broken,
 * and requests of them that NIXL still has can never be proven any more,
 * since it answers "not found" for ever while their bytes go on landing.
 *
 * For that reason a remote whose last connection was unloaded is not
 * invalidated while requests of it are under way: a late status 0 is a proof.
 */
#include "nixl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nixl_blob.h"

static struct kvti_nixl_remote *find_remote(const struct kvti_nixl *engine,
                                            const char *name)
{
    kvti_list_each(node, &engine->remotes) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, node);

        if (!remote->stale && strcmp(remote->name, name) == 0) {
            return remote;
        }
    }
    return NULL;
}

static void invalidate(struct kvti_nixl *engine,
                       struct kvti_nixl_remote *remote)
{
    kvti_nixl_enter(engine);
    (void)engine->lib->api.invalidate_remote_md(engine->agent, remote->name);
    kvti_nixl_leave(engine);
    remote->stale = true;
}

void kvti_nixl_remote_check(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote)
{
    if (!kvti_list_empty(&remote->conns) || remote->flying > 0 ||
        remote->queued > 0 || !kvti_list_empty(&remote->landed)) {
        return;
    }
    if (!remote->stale) {
        invalidate(engine, remote);
    }
    kvti_list_remove(&remote->node);
    kvti_list_remove(&remote->confirm);
    kvti_regions_fini(&remote->regions);
    free(remote);
}

void kvti_nixl_remote_broke(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote, const char *format,
                            ...)
{
    const struct kvti_env *env = engine->env;
    struct kvt_error why = {.code = KVT_EDISCONNECTED};
    struct kvti_list *node;
    va_list args;

    va_start(args, format);
    (void)vsnprintf(why.text, sizeof(why.text), format, args);
    va_end(args);
    kvti_list_remove(&remote->confirm);
    while ((node = kvti_list_take(&remote->landed)) != NULL) {
        kvti_nixl_chunk_park(
            engine, kvti_container(node, struct kvti_chunk, node),
            KVT_DISCONNECTED, KVT_EDISCONNECTED, NIXL_BACKEND, why.text);
    }
    if (remote->down || !kvti_nixl_report_begin(engine)) {
        return;
    }
    remote->down = true;
    kvti_list_each(each, &remote->conns) {
        struct kvti_nixl_conn *conn = kvti_container(
            each, struct kvti_nixl_conn, remote_node);

        env->report_conn(env->ctx, conn->link, KVTI_CONN_DOWN, &why);
    }
    kvti_nixl_report_end(engine);
}

/* -------------------------------------------------------------------- load */

static struct kvti_nixl_remote *new_remote(struct kvti_nixl *engine,
                                           const struct kvti_md *md)
{
    struct kvti_nixl_remote *remote = calloc(1, sizeof(*remote));

    if (remote != NULL) {
        kvti_format(remote->name, sizeof(remote->name), "%s", md->agent_name);
        memcpy(remote->incarnation, md->incarnation,
               sizeof(remote->incarnation));
        remote->stale = true; /* until it is loaded */
        kvti_list_init(&remote->conns);
        kvti_list_init(&remote->landed);
        kvti_list_init(&remote->confirm);
        kvti_list_append(&engine->remotes, &remote->node);
    }
    return remote;
}

static int load_md(struct kvti_nixl *engine, const struct kvti_md *md,
                   struct kvt_error *err)
{
    const struct nixl_api *api = &engine->lib->api;
    char *name = NULL;
    bool same;
    int status;

    kvti_nixl_enter(engine);
    status = api->load_remote_md(engine->agent, md->prefix, md->prefix_length,
                                 &name);
    kvti_nixl_leave(engine);
    if (status == NIXL_INVALID_PARAM) {
        return kvti_fail(err, KVT_EINVAL,
                         "NIXL does not take agent \"%.80s\" (status %d): both "
                         "agents may have the same name",
                         md->agent_name, status);
    }
    if (status != NIXL_OK) {
        return kvti_fail(err, KVT_EENGINE,
                         "NIXL cannot load agent \"%.80s\" (%s, status %d): "
                         "the two sides may have no backend in common",
                         md->agent_name, kvti_nixl_status_text(status), status);
    }
    same = name != NULL && strcmp(name, md->agent_name) == 0;
    free(name);
    return same ? KVT_OK
                : kvti_fail(err, KVT_EMETADATA,
                            "NIXL reads another agent's name than \"%.80s\" "
                            "out of the metadata",
                            md->agent_name);
}

static int check_prefix(const struct kvti_md *md, struct kvti_regions *regions,
                        struct kvt_error *err)
{
    char name[KVT_NAME_MAX + 1];
    int code;

    if (md->prefix_length == 0) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "the metadata of \"%.80s\" was made by engine "
                         "\"%.31s\" and has no part of NIXL's: open the peer's "
                         "transport with nixl",
                         md->agent_name, md->engine);
    }
    code = kvti_nixl_blob_parse(md->prefix, md->prefix_length, UINT32_MAX, name,
                                regions, err);
    if (code == KVT_OK && strcmp(name, md->agent_name) != 0) {
        kvti_regions_fini(regions);
        return kvti_fail(err, KVT_EMETADATA,
                         "NIXL's part of the metadata is of agent \"%.80s\", "
                         "kvt's of \"%.80s\"",
                         name, md->agent_name);
    }
    return code;
}

/* What NIXL still knows under this name, when it can be used; else gone. */
static struct kvti_nixl_remote *reuse(struct kvti_nixl *engine,
                                      const struct kvti_md *md)
{
    struct kvti_nixl_remote *remote = find_remote(engine, md->agent_name);

    if (remote == NULL) {
        return NULL;
    }
    if (!remote->down && memcmp(remote->incarnation, md->incarnation,
                                sizeof(md->incarnation)) == 0) {
        return remote;
    }
    invalidate(engine, remote);
    kvti_nixl_remote_broke(engine, remote,
                           "the agent \"%.80s\" was imported again: reload "
                           "this peer",
                           md->agent_name);
    kvti_nixl_remote_check(engine, remote);
    return NULL;
}

static int load_remote(struct kvti_nixl *engine, const struct kvti_md *md,
                       struct kvti_nixl_remote **ret, struct kvt_error *err)
{
    struct kvti_regions regions = {0};
    struct kvti_nixl_remote *remote;
    int code = check_prefix(md, &regions, err);

    if (code != KVT_OK) {
        return code;
    }
    remote = reuse(engine, md);
    if (remote == NULL) {
        remote = new_remote(engine, md);
    }
    code = remote == NULL ? kvti_fail(err, KVT_ENOMEM, "no memory for a peer")
                          : load_md(engine, md, err);
    if (code != KVT_OK) {
        kvti_regions_fini(&regions);
        if (remote != NULL) {
            kvti_nixl_remote_check(engine, remote);
        }
        return code;
    }
    remote->stale = false;
    kvti_regions_fini(&remote->regions);
    remote->regions = regions;
    *ret = remote;
    return KVT_OK;
}

int kvti_nixl_load_peer(struct kvti_nixl *engine, struct kvti_job *job,
                        struct kvt_error *err)
{
    struct kvti_nixl_conn *conn = calloc(1, sizeof(*conn));
    int code;

    if (conn == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
    }
    conn->link = job->link;
    kvti_list_init(&conn->node);
    code = kvti_nixl_proc_get(engine, job->md, &conn->proc, err);
    if (code == KVT_OK) {
        code = load_remote(engine, job->md, &conn->remote, err);
    }
    if (code != KVT_OK) {
        kvti_nixl_proc_put(engine, conn->proc);
        free(conn);
        return code;
    }
    kvti_list_append(&conn->remote->conns, &conn->remote_node);
    *kvti_nixl_job_conn(job) = conn;
    return KVT_OK;
}

/* ------------------------------------------------------------------ unload */

void kvti_nixl_unload_peer(struct kvti_nixl *engine, struct kvti_job *job)
{
    struct kvti_nixl_conn *conn = job->conn;
    struct kvti_nixl_remote *remote = conn->remote;

    kvti_nixl_drop_connects(engine, conn);
    kvti_nixl_drop_pending(engine, conn);
    kvti_list_remove(&conn->remote_node);
    kvti_nixl_remote_check(engine, remote);
    kvti_nixl_proc_put(engine, conn->proc);
    free(conn);
    kvti_nixl_report_job(engine, job, KVT_OK, NULL);
}

void kvti_nixl_remotes_fini(struct kvti_nixl *engine)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&engine->remotes)) != NULL) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, node);

        while ((node = kvti_list_take(&remote->conns)) != NULL) {
            free(kvti_container(node, struct kvti_nixl_conn, remote_node));
        }
        kvti_regions_fini(&remote->regions);
        free(remote);
    }
}
