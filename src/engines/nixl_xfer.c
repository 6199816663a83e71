/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks, on the NIXL thread. What NIXL's statuses are worth:
 *
 *   create failed          nothing was made: final
 *   post -1, -6            refused before the backend: final
 *   post -2                refused or broken half way, and the link with it;
 *                          bytes were seen to land afterwards: not proven
 *   status 0               done, unless it had several descriptors: NIXL keeps
 *                          its backend's last request only, so an error of an
 *                          earlier one is not seen. The next request on the
 *                          link fails then: done once that was accepted.
 *   status -2              the link broke; never becomes anything else, also
 *                          not while bytes go on landing: not proven
 *   anything else          NIXL cannot tell: not proven
 *
 * A request is released to NIXL in three cases: it has status 0; its post was
 * refused before the backend; or NIXL failed it (a post or a status answered
 * with anything but "done" and "in progress"), it is a write, the peer's process
 * was seen to die, on this host, and UCX is the only backend. Releasing stops nothing and waits for
 * nothing: NIXL deletes its own part, hands UCX's requests back, which UCX keeps
 * until they are over, and lets go of the connection. So while the peer lives
 * bytes go on landing, and to destroy the agent then can abort the process. All
 * other requests are just forgotten and end with the agent, among them those
 * that were under way when their remote was loaded anew: NIXL does not tell any
 * more whether they are over. Once a request failed nothing is asked about it.
 *
 * NIXL knows memory by registration, and a descriptor must lie inside one on
 * either side; the core merges across them. So copies are cut here. A request
 * stays below the number of descriptors from which NIXL spreads it over several
 * threads, where the rule above was seen to fail; a chunk that needs more is
 * several requests, one after the other. A chunk that ends after some of them
 * is reported as failed at once, and as final when those are confirmed.
 *
 * NIXL finds a remote by its name. So nothing is posted to a remote that is
 * down: another process may have that name by now, with other memory at the
 * same addresses.
 */
#include "nixl.h"

#include <string.h>

#define POSTS_PER_ROUND 8

struct lists {
    struct nixl_xfer_dlist *local;
    struct nixl_xfer_dlist *peer;
    uint32_t count;
};

/* ----------------------------------------------------------------- outcomes */

static void report(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                   uint32_t state, uint32_t fin, int code, int status,
                   const char *text)
{
    const struct kvti_env *env = engine->env;
    struct kvti_outcome outcome = {
        .state = state, .fin = fin, .code = code, .engine_code = status};

    kvti_format(outcome.text, sizeof(outcome.text), "%s", text);
    engine->busy = true;
    if (kvti_nixl_report_begin(engine)) {
        env->report_chunk(env->ctx, chunk, &outcome);
        kvti_nixl_report_end(engine);
    }
}

/* The last report of a chunk, which is in no list any more. */
static void report_final(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                         uint32_t state, int code, int status, const char *text)
{
    struct kvti_nixl_proc *proc = kvti_nixl_chunk_priv(chunk)->proc;

    report(engine, chunk, state, KVTI_FIN_BOTH, code, status, text);
    kvti_nixl_proc_put(engine, proc);
}

static void release(struct kvti_nixl *engine, struct nixl_xfer_req *req)
{
    const struct nixl_api *api = &engine->lib->api;

    if (api->release_xfer_req(engine->agent, req) == NIXL_OK) {
        (void)api->destroy_xfer_req(req);
    }
}

static void drop_request(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    release(engine, kvti_nixl_chunk_priv(chunk)->req);
    kvti_nixl_chunk_priv(chunk)->req = NULL;
}

/* The last report of a failed chunk that is proven. Whoever waits for it does
 * not wait for NIXL. */
static void report_proven(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                          uint32_t state, int code, int status,
                          const char *text)
{
    struct nixl_xfer_req *failed = kvti_nixl_chunk_priv(chunk)->req;

    report_final(engine, chunk, state, code, status, text);
    if (failed != NULL && engine->config.release_failed) {
        kvti_nixl_enter(engine);
        release(engine, failed);
        kvti_nixl_leave(engine);
    }
}

void kvti_nixl_chunk_done(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    if (kvti_nixl_proc_same(kvti_nixl_chunk_priv(chunk)->proc)) {
        report_final(engine, chunk, KVT_DONE, KVT_OK, NIXL_OK, "");
    } else {
        kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED,
                             NIXL_OK,
                             "the peer's process has ended or runs another "
                             "program");
    }
}

/* Nobody is left whose memory a write could harm, and NIXL sends to nobody. */
static bool is_proven(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    return chunk->op == KVT_OP_WRITE &&
           kvti_nixl_proc_gone(engine, kvti_nixl_chunk_priv(chunk)->proc);
}

void kvti_nixl_chunk_park(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                          uint32_t state, int code, int status,
                          const char *text)
{
    if (is_proven(engine, chunk)) {
        report_proven(engine, chunk, state, code, status, text);
        return;
    }
    kvti_nixl_chunk_priv(chunk)->state = state;
    kvti_list_append(&engine->parked, &chunk->node);
    report(engine, chunk, state, KVTI_FIN_NONE, code, status, text);
}

void kvti_nixl_settle(struct kvti_nixl *engine)
{
    kvti_list_each(node, &engine->parked) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (is_proven(engine, chunk)) {
            kvti_list_remove(&chunk->node);
            report_proven(engine, chunk, kvti_nixl_chunk_priv(chunk)->state,
                          KVT_EDISCONNECTED, NIXL_BACKEND,
                          "the peer's process is gone");
        }
    }
}

/* ----------------------------------------------------------------- requests */

/* How many bytes from here lie in one registration. */
static uint64_t room(const struct kvti_regions *set, uint64_t addr,
                     uint32_t kind, uint32_t device)
{
    const struct kvti_mem *mem = kvti_regions_at(set, addr, kind, device);

    return mem != NULL ? mem->addr + mem->length - addr : 0;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* The next descriptors of a chunk; its cursor moves on. 0 or NIXL's
 * status; NIXL_NOT_FOUND when memory is not registered. */
static int fill_lists(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                      struct lists *lists)
{
    const struct nixl_api *api = &engine->lib->api;
    struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);
    int status = NIXL_OK;

    while (at->copy_at < chunk->count &&
           lists->count < engine->config.descs_max) {
        const struct kvti_copy *copy = &chunk->copies[at->copy_at];
        uint64_t local = copy->local + at->offset;
        uint64_t peer = copy->peer + at->offset;
        uint64_t length = copy->length - at->offset;

        length = smaller(length, room(&engine->mems, local, chunk->local_kind,
                                      chunk->local_device));
        length = smaller(length, room(&at->remote->regions, peer,
                                      chunk->peer_kind, chunk->peer_device));
        if (length == 0) {
            return NIXL_NOT_FOUND;
        }
        status = api->xfer_dlist_add_desc(lists->local, local, length,
                                          chunk->local_device);
        if (status == NIXL_OK) {
            status = api->xfer_dlist_add_desc(lists->peer, peer, length,
                                              chunk->peer_device);
        }
        if (status != NIXL_OK) {
            return status;
        }
        lists->count++;
        at->offset += length;
        if (at->offset == copy->length) {
            at->copy_at++;
            at->offset = 0;
        }
    }
    return NIXL_OK;
}

static int create_request(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    const struct nixl_api *api = &engine->lib->api;
    struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);
    int op = chunk->op == KVT_OP_WRITE ? NIXL_WRITE : NIXL_READ;
    struct lists lists = {.count = 0};
    int status;

    status = api->create_xfer_dlist((int)chunk->local_kind, &lists.local);
    if (status == NIXL_OK) {
        status = api->create_xfer_dlist((int)chunk->peer_kind, &lists.peer);
    }
    if (status == NIXL_OK) {
        status = fill_lists(engine, chunk, &lists);
    }
    if (status == NIXL_OK) {
        status = api->create_xfer_req(engine->agent, op, lists.local,
                                      lists.peer, at->remote->name, &at->req,
                                      engine->no_merge);
    }
    if (lists.local != NULL) {
        (void)api->destroy_xfer_dlist(lists.local);
    }
    if (lists.peer != NULL) {
        (void)api->destroy_xfer_dlist(lists.peer);
    }
    at->descs += lists.count;
    return status;
}

/* Whether there is more of it to post. */
static bool has_more(struct kvti_chunk *chunk)
{
    return kvti_nixl_chunk_priv(chunk)->copy_at < chunk->count;
}

/* All that was posted of it has status 0. */
static void landed(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);
    struct kvti_nixl_remote *remote = at->remote;

    engine->busy = true;
    if (!engine->config.confirm || at->descs == 1) {
        kvti_nixl_chunk_done(engine, chunk);
        return;
    }
    if (remote->down) {
        kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED,
                             NIXL_BACKEND,
                             "the link broke before the write was confirmed");
        return;
    }
    kvti_list_append(&remote->landed, &chunk->node);
    if (kvti_list_empty(&remote->confirm)) {
        kvti_list_append(&engine->unconfirmed, &remote->confirm);
    }
}

static void confirm_all(struct kvti_nixl *engine, struct kvti_list *chunks)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(chunks)) != NULL) {
        kvti_nixl_chunk_done(engine,
                             kvti_container(node, struct kvti_chunk, node));
    }
}

/* Nothing more of it is posted; what was, has status 0. */
static void end_early(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                      uint32_t state, int code, int status, const char *text)
{
    report(engine, chunk, state, KVTI_FIN_NONE, code, status, text);
    landed(engine, chunk);
}

/* A request that nothing of is on its way. */
static void refuse(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                   bool first, int status, const char *what)
{
    char text[KVT_RESULT_TEXT_MAX];

    kvti_format(text, sizeof(text), "NIXL refused to %s: %s (status %d)", what,
                kvti_nixl_status_text(status), status);
    if (first) {
        report_final(engine, chunk, KVT_REJECTED, KVT_EREJECTED, status, text);
        return;
    }
    end_early(engine, chunk, KVT_REJECTED, KVT_EREJECTED, status, text);
}

static void posted(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                   bool first, int status)
{
    struct kvti_nixl_remote *remote = kvti_nixl_chunk_priv(chunk)->remote;
    char text[KVT_RESULT_TEXT_MAX];

    if (status == NIXL_INVALID_PARAM || status == NIXL_NOT_FOUND) {
        drop_request(engine, chunk);
        refuse(engine, chunk, first, status, "start a request");
        return;
    }
    kvti_format(text, sizeof(text), "NIXL refused a post: %s (status %d)",
                kvti_nixl_status_text(status), status);
    kvti_nixl_chunk_park(engine, chunk, KVT_REJECTED, KVT_EREJECTED, status,
                         text);
    kvti_nixl_remote_broke(engine, remote, "%s", text);
}

/* Posts one request of a chunk, in no list now. True: it has status 0 already
 * and there is more to post. */
static bool post_request(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    const struct nixl_api *api = &engine->lib->api;
    struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);
    struct kvti_nixl_remote *remote = at->remote;
    struct kvti_list before;
    bool first = at->descs == 0;
    int status;

    kvti_list_init(&before);
    kvti_nixl_enter(engine);
    status = create_request(engine, chunk);
    if (status != NIXL_OK) {
        kvti_nixl_leave(engine);
        refuse(engine, chunk, first, status, "make a request");
        return false;
    }
    kvti_list_splice(&before, &remote->landed);
    status = api->post_xfer_req(engine->agent, at->req, NULL);
    if (status == NIXL_OK) {
        drop_request(engine, chunk);
    }
    kvti_nixl_leave(engine);
    if (status < NIXL_OK) {
        kvti_list_splice(&remote->landed, &before);
        posted(engine, chunk, first, status);
        return false;
    }
    if (!kvti_list_empty(&before)) {
        kvti_list_remove(&remote->confirm);
        confirm_all(engine, &before);
    }
    if (status != NIXL_OK) {
        kvti_list_append(&engine->flying, &chunk->node);
        remote->flying++;
        return false;
    }
    if (has_more(chunk)) {
        return true;
    }
    landed(engine, chunk);
    return false;
}

/* ------------------------------------------------------------------- rounds */

static void never_posted(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                         const char *why)
{
    report_final(engine, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED, NIXL_OK,
                 why);
}

/* Then the link is down. */
static bool is_other_program(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    const struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);

    if (kvti_nixl_proc_same(at->proc)) {
        return false;
    }
    kvti_nixl_remote_broke(engine, at->remote,
                           "process %d has ended or runs another program",
                           (int)at->proc->pid);
    return true;
}

/* Posts request after request, for as long as each is done at once. */
static void post_on(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    while (post_request(engine, chunk)) {
    }
}

void kvti_nixl_post_pending(struct kvti_nixl *engine)
{
    for (int i = 0; i < POSTS_PER_ROUND; i++) {
        struct kvti_list *node = kvti_list_take(&engine->pending);
        struct kvti_nixl_remote *remote;
        struct kvti_chunk *chunk;

        if (node == NULL) {
            return;
        }
        chunk = kvti_container(node, struct kvti_chunk, node);
        remote = kvti_nixl_chunk_priv(chunk)->remote;
        remote->queued--;
        engine->busy = true;
        if (remote->down) {
            never_posted(engine, chunk, "the link is down: nothing was posted");
        } else if (is_other_program(engine, chunk)) {
            never_posted(engine, chunk,
                         "the peer's process has ended or runs another "
                         "program: nothing was posted");
        } else {
            post_on(engine, chunk);
        }
    }
}

void kvti_nixl_drop_pending(struct kvti_nixl *engine,
                            const struct kvti_nixl_conn *conn)
{
    kvti_list_each(node, &engine->pending) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (chunk->conn == conn) {
            kvti_list_remove(&chunk->node);
            conn->remote->queued--;
            never_posted(engine, chunk,
                         "the peer was unloaded before this was posted");
        }
    }
    kvti_list_each(node, &engine->flying) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (chunk->conn == conn) {
            kvti_nixl_chunk_priv(chunk)->cut = true;
        }
    }
}

static void failed(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                   int status)
{
    struct kvti_nixl_remote *remote = kvti_nixl_chunk_priv(chunk)->remote;
    char text[KVT_RESULT_TEXT_MAX];

    if (status == NIXL_BACKEND) {
        kvti_format(text, sizeof(text),
                    "NIXL lost the link to the peer (status %d)", status);
        kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED,
                             status, text);
        kvti_nixl_remote_broke(engine, remote, "%s", text);
        return;
    }
    kvti_format(text, sizeof(text),
                "NIXL cannot tell the request's state: %s (status %d)",
                kvti_nixl_status_text(status), status);
    kvti_nixl_chunk_park(engine, chunk, KVT_UNREADABLE, KVT_EENGINE, status,
                         text);
}

/* A request has status 0: what next? */
static void finished(struct kvti_nixl *engine, struct kvti_chunk *chunk)
{
    const struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);

    if (!has_more(chunk)) {
        landed(engine, chunk);
    } else if (at->remote->down || at->cut || is_other_program(engine, chunk)) {
        end_early(engine, chunk, KVT_DISCONNECTED, KVT_EDISCONNECTED, NIXL_OK,
                  at->cut ? "the peer was unloaded before all was posted"
                          : "the link broke before all was posted");
    } else {
        post_on(engine, chunk);
    }
}

void kvti_nixl_drop_flying(struct kvti_nixl *engine,
                           struct kvti_nixl_remote *remote)
{
    kvti_list_each(node, &engine->flying) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (kvti_nixl_chunk_priv(chunk)->remote == remote) {
            kvti_list_remove(&chunk->node);
            remote->flying--;
            kvti_nixl_chunk_priv(chunk)->req = NULL; /* never released */
            kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED,
                                 KVT_EDISCONNECTED, NIXL_NOT_FOUND,
                                 "the peer was loaded anew while this was "
                                 "under way");
        }
    }
}

void kvti_nixl_poll_flying(struct kvti_nixl *engine)
{
    kvti_list_each(node, &engine->flying) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);
        struct kvti_nixl_chunk *at = kvti_nixl_chunk_priv(chunk);
        struct kvti_nixl_remote *remote = at->remote;
        int status;

        kvti_nixl_enter(engine);
        status = engine->lib->api.get_xfer_status(engine->agent, at->req);
        if (status == NIXL_OK) {
            drop_request(engine, chunk);
        }
        kvti_nixl_leave(engine);
        if (status == NIXL_IN_PROG) {
            continue;
        }
        engine->busy = true;
        kvti_list_remove(&chunk->node);
        remote->flying--;
        if (status != NIXL_OK) {
            failed(engine, chunk, status);
        } else {
            finished(engine, chunk);
        }
        kvti_nixl_remote_check(engine, remote);
    }
}
