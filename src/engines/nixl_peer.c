/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers, on the NIXL thread.
 *
 * NIXL knows agents by name, and one set of memory a name. Connections to the
 * same incarnation share it: NIXL adds to it what a blob has that is new, and
 * takes nothing out, so neither do we. An older blob once replaced our set, and
 * the peers that knew of more were refused. Whenever NIXL cannot add, what it
 * has is invalidated first: a new incarnation under an old name, a link that
 * broke, or another key for memory that it knows, which it would not take. The
 * old connections then count as broken, and requests of them that NIXL still
 * has can never be proven any more, since it answers "not found" for ever while
 * their bytes go on landing: it is not even asked. A load that fails ends them
 * the same way: NIXL forgets all of the agent then, or half.
 *
 * For that reason a remote whose last connection was unloaded is not
 * invalidated while requests of it are under way: a late status 0 is a proof.
 * But a new load of it does: the core gave those requests up, so nothing has
 * moved for a long time, and a link that is stuck stays so until NIXL makes
 * another.
 *
 * A link that is sound outlives its last connection by a second, for a peer
 * that is unloaded to be loaded again: NIXL leaks some 14 sockets each time that
 * it connects anew to a process that lives, and that of 1.3 crashes that process
 * at times (UCX, over TCP). It is tried before it is used again, since NIXL says
 * that a link broke only when something is posted. Other metadata than NIXL has is always loaded
 * afresh: the same address may have another key by now.
 *
 * A broken link of one connection is one of all: they are told. One whose LOAD
 * is not published yet is told after that.
 */
#include "nixl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "nixl_blob.h"

#define LINGER_NS UINT64_C(1000000000)

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

static void need(struct kvti_nixl *engine, struct kvti_nixl_remote *remote)
{
    if (remote->idle_until_ns != 0) {
        remote->idle_until_ns = 0;
        engine->lingering--;
    }
}

static void forget(struct kvti_nixl *engine, struct kvti_nixl_remote *remote)
{
    need(engine, remote);
    if (!remote->stale) {
        invalidate(engine, remote);
        engine->busy = true; /* NIXL has its connections to take down */
    }
    kvti_list_remove(&remote->node);
    kvti_list_remove(&remote->confirm);
    kvti_regions_fini(&remote->regions);
    free(remote);
}

void kvti_nixl_remote_check(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote)
{
    if (!kvti_list_empty(&remote->conns) || remote->flying > 0 ||
        remote->queued > 0 || !kvti_list_empty(&remote->landed)) {
        return;
    }
    if (remote->stale || remote->down) {
        forget(engine, remote);
    } else if (remote->idle_until_ns == 0) {
        remote->idle_until_ns = kvti_now_ns() + LINGER_NS;
        engine->lingering++;
    }
}

void kvti_nixl_remotes_sweep(struct kvti_nixl *engine)
{
    uint64_t now_ns = engine->lingering > 0 ? kvti_now_ns() : 0;

    kvti_list_each(node, &engine->remotes) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, node);

        /* One that is being tried is not idle. */
        if (remote->idle_until_ns != 0 && remote->idle_until_ns <= now_ns &&
            remote->flying == 0) {
            forget(engine, remote);
        }
    }
}

/* If not, whoever publishes it tells that its link broke. */
static bool is_published(struct kvti_nixl *engine, struct kvti_nixl_conn *conn)
{
    bool published;

    pthread_mutex_lock(&engine->mu);
    published = conn->published;
    conn->broke = true;
    pthread_mutex_unlock(&engine->mu);
    return published;
}

void kvti_nixl_remote_broke(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote, const char *format,
                            ...)
{
    const struct kvti_env *env = engine->env;
    struct kvt_error why = {.code = KVT_EDISCONNECTED};
    struct kvti_list *node;
    va_list args;
    bool was_down;

    va_start(args, format);
    (void)vsnprintf(why.text, sizeof(why.text), format, args);
    va_end(args);
    was_down = remote->down;
    remote->down = true;
    kvti_list_remove(&remote->confirm);
    while ((node = kvti_list_take(&remote->landed)) != NULL) {
        kvti_nixl_chunk_park(
            engine, kvti_container(node, struct kvti_chunk, node),
            KVT_DISCONNECTED, KVT_EDISCONNECTED, NIXL_BACKEND, why.text);
    }
    if (was_down || !kvti_nixl_report_begin(engine)) {
        return;
    }
    kvti_list_each(each, &remote->conns) {
        struct kvti_nixl_conn *conn = kvti_container(
            each, struct kvti_nixl_conn, remote_node);

        if (is_published(engine, conn)) {
            env->report_conn(env->ctx, conn->link, KVTI_CONN_DOWN, &why);
        }
    }
    kvti_nixl_report_end(engine);
}

void kvti_nixl_remotes_settle(struct kvti_nixl *engine)
{
    kvti_list_each(node, &engine->remotes) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, node);

        kvti_list_each(each, &remote->conns) {
            const struct kvti_nixl_conn *conn = kvti_container(
                each, struct kvti_nixl_conn, remote_node);

            if (kvti_nixl_proc_gone(engine, conn->proc)) {
                kvti_nixl_remote_broke(engine, remote, "process %d has ended",
                                       (int)conn->proc->pid);
                break;
            }
        }
    }
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

int kvti_nixl_fail_load(const struct kvti_md *md, int status,
                        struct kvt_error *err)
{
    if (status == NIXL_INVALID_PARAM) {
        return kvti_fail(err, KVT_EINVAL,
                         "NIXL does not take agent \"%.80s\" (status %d): both "
                         "agents may have the same name",
                         md->agent_name, status);
    }
    return kvti_fail(err, KVT_EENGINE,
                     "NIXL cannot load agent \"%.80s\" (%s, status %d): the "
                     "two sides may have no backend in common, or the metadata "
                     "may be damaged",
                     md->agent_name, kvti_nixl_status_text(status), status);
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
    if (status != NIXL_OK) {
        return kvti_nixl_fail_load(md, status, err);
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

/* Nothing of it is NIXL's any more: its chunks are parked, for a newer agent
 * of that name would answer for it, and its connections are told. */
static void drop(struct kvti_nixl *engine, struct kvti_nixl_remote *remote,
                 const char *why)
{
    invalidate(engine, remote);
    remote->flying++; /* it stays for as long as we need it */
    kvti_nixl_remote_broke(engine, remote, "the agent \"%.80s\" %s",
                           remote->name, why);
    kvti_nixl_drop_flying(engine, remote);
    kvti_nixl_drop_probes(engine, remote);
    remote->flying--;
    kvti_nixl_remote_check(engine, remote);
}

static uint64_t hash_of(const struct kvti_md *md)
{
    return XXH3_64bits(md->prefix, md->prefix_length);
}

/* Nobody uses the link, and the core gave up what is under way on it, or the
 * peer's memory is not what NIXL knows. */
static bool is_outdated(const struct kvti_nixl_remote *remote,
                        const struct kvti_md *md)
{
    return kvti_list_empty(&remote->conns) &&
           (remote->flying > 0 || remote->blob_hash != hash_of(md));
}

/* Memory that was registered anew, at the address that NIXL has an old key for.
 * It would keep that one. */
static bool has_other_keys(const struct kvti_nixl_remote *remote,
                           const struct kvti_regions *regions)
{
    for (size_t i = 0; i < regions->count; i++) {
        const struct kvti_mem *mem = &regions->mems[i];
        const struct kvti_mem *old = kvti_regions_find(
            &remote->regions, mem->addr, mem->length, mem->kind, mem->device);

        if (old != NULL && old->key_hash != mem->key_hash) {
            return true;
        }
    }
    return false;
}

/* What NIXL still knows under this name, when it can be used; else gone. */
static struct kvti_nixl_remote *reuse(struct kvti_nixl *engine,
                                      const struct kvti_md *md,
                                      const struct kvti_regions *regions)
{
    struct kvti_nixl_remote *remote = find_remote(engine, md->agent_name);
    bool outdated;

    if (remote == NULL) {
        return NULL;
    }
    outdated = is_outdated(remote, md) || has_other_keys(remote, regions);
    if (!outdated && remote->idle_until_ns != 0) {
        kvti_nixl_try_link(engine, remote);
    }
    if (!outdated && !remote->down &&
        memcmp(remote->incarnation, md->incarnation, sizeof(md->incarnation)) ==
            0) {
        return remote;
    }
    drop(engine, remote, "was imported again: reload this peer");
    return NULL;
}

/* Where a probe can read without touching a user's memory, which the peer may
 * have taken back since: the page of kvt's own that only NIXL knows of. */
static void find_page(struct kvti_nixl_remote *remote, const struct kvti_md *md,
                      const struct kvti_regions *regions)
{
    remote->has_page = false;
    for (size_t i = 0; md->has_trailer && i < regions->count; i++) {
        const struct kvti_mem *mem = &regions->mems[i];

        if (mem->kind == KVT_DRAM && mem->length == KVTI_NIXL_PAGE_BYTES &&
            !kvti_regions_cover(&md->regions, mem->addr, mem->length, mem->kind,
                                mem->device)) {
            remote->has_page = true;
            remote->page = mem->addr;
            return;
        }
    }
}

static int load_regions(struct kvti_nixl *engine, const struct kvti_md *md,
                        const struct kvti_regions *regions,
                        struct kvti_nixl_remote **ret, struct kvt_error *err)
{
    struct kvti_nixl_remote *remote = reuse(engine, md, regions);
    int code;

    if (remote == NULL) {
        remote = new_remote(engine, md);
    }
    if (remote == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
    }
    if (kvti_regions_reserve(&remote->regions, regions->count) != KVT_OK) {
        kvti_nixl_remote_check(engine, remote);
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer's regions");
    }
    code = load_md(engine, md, err);
    if (code != KVT_OK) {
        drop(engine, remote, "was imported again, in vain: reload this peer");
        return code;
    }
    remote->stale = false;
    kvti_regions_join(&remote->regions, regions);
    kvti_regions_update(&remote->regions, NULL, NULL);
    remote->blob_hash = hash_of(md);
    need(engine, remote);
    find_page(remote, md, regions);
    *ret = remote;
    return KVT_OK;
}

static int load_remote(struct kvti_nixl *engine, const struct kvti_md *md,
                       struct kvti_nixl_remote **ret, struct kvt_error *err)
{
    struct kvti_regions regions = {0};
    int code = check_prefix(md, &regions, err);

    if (code == KVT_OK) {
        code = load_regions(engine, md, &regions, ret, err);
    }
    kvti_regions_fini(&regions);
    return code;
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
