/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads of one byte from the peer into our scratch page, on the NIXL thread.
 * One makes the connection before the first transfer. The other confirms the
 * chunks that had landed before it: it is made only when no chunk of the same
 * remote waits, since the next chunk's post would tell the same for nothing,
 * and none is under way: over TCP, NIXL 1.3 killed the peer by a read among
 * writes in 12 of 25 runs, also between two plain agents.
 *
 * Over TCP a read of memory that is not mapped any more kills the process that
 * is read. So a probe reads the scratch page of the peer's agent, which lives as
 * long as the agent. A peer that is not kvt's has none: then the byte is where
 * the first of those chunks moved something, which it has mapped for that; or,
 * for a connection, in the first memory that its metadata names.
 *
 * A probe that NIXL does not even start tells nothing about the link.
 */
#include "nixl.h"

#include <stdlib.h>

struct place {
    uint64_t addr;
    uint32_t kind;
    uint32_t device;
};

static int make_request(struct kvti_nixl *engine,
                        const struct kvti_nixl_remote *remote,
                        const struct place *at, struct nixl_xfer_req **ret)
{
    const struct nixl_api *api = &engine->lib->api;
    struct nixl_xfer_dlist *local = NULL;
    struct nixl_xfer_dlist *peer = NULL;
    int status = api->create_xfer_dlist(NIXL_MEM_DRAM, &local);

    if (status == NIXL_OK) {
        status = api->create_xfer_dlist((int)at->kind, &peer);
    }
    if (status == NIXL_OK) {
        status = api->xfer_dlist_add_desc(local, (uintptr_t)engine->scratch, 1,
                                          0);
    }
    if (status == NIXL_OK) {
        status = api->xfer_dlist_add_desc(peer, at->addr, 1, at->device);
    }
    if (status == NIXL_OK) {
        status = api->create_xfer_req(engine->agent, NIXL_READ, local, peer,
                                      remote->name, ret, engine->no_merge);
    }
    if (local != NULL) {
        (void)api->destroy_xfer_dlist(local);
    }
    if (peer != NULL) {
        (void)api->destroy_xfer_dlist(peer);
    }
    return status;
}

static void report_connect(struct kvti_nixl *engine,
                           struct kvti_nixl_probe *probe, int code,
                           const char *text)
{
    struct kvti_job *job = probe->job;
    struct kvt_error err;

    if (job != NULL) {
        probe->job = NULL;
        kvti_fail(&err, code, "%s", text);
        kvti_nixl_report_job(engine, job, code, &err);
    }
}

/* Its chunks are done, or not proven. */
static void settle_covered(struct kvti_nixl *engine,
                           struct kvti_nixl_probe *probe, int status,
                           const char *text)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&probe->covered)) != NULL) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (status == NIXL_OK) {
            kvti_nixl_chunk_done(engine, chunk);
        } else if (status == NIXL_BACKEND) {
            kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED,
                                 KVT_EDISCONNECTED, status, text);
        } else {
            kvti_nixl_chunk_park(engine, chunk, KVT_UNREADABLE, KVT_EENGINE,
                                 status, text);
        }
    }
}

/* The probe is over, with NIXL's status. Frees it. */
static void finish(struct kvti_nixl *engine, struct kvti_nixl_probe *probe,
                   int status)
{
    const struct nixl_api *api = &engine->lib->api;
    struct kvti_nixl_remote *remote = probe->remote;
    int code = status == NIXL_OK        ? KVT_OK
               : status == NIXL_BACKEND ? KVT_EDISCONNECTED
                                        : KVT_EENGINE;
    char text[KVT_RESULT_TEXT_MAX];

    kvti_format(text, sizeof(text),
                "NIXL cannot reach the peer: %s (status %d)",
                kvti_nixl_status_text(status), status);
    engine->busy = true;
    if (status == NIXL_OK &&
        api->release_xfer_req(engine->agent, probe->req) == NIXL_OK) {
        (void)api->destroy_xfer_req(probe->req);
    }
    settle_covered(engine, probe, status, text);
    report_connect(engine, probe, code, text);
    if (status == NIXL_BACKEND) {
        kvti_nixl_remote_broke(engine, remote, "%s", text);
    }
    free(probe);
    kvti_nixl_remote_check(engine, remote);
}

/* Takes the probe; it may be over when this returns. */
static void start(struct kvti_nixl *engine, struct kvti_nixl_probe *probe,
                  const struct place *at)
{
    const struct kvti_nixl_remote *remote = probe->remote;
    const struct place page = {.addr = remote->page, .kind = KVT_DRAM};
    const struct nixl_api *api = &engine->lib->api;
    int status;

    kvti_assert(!remote->stale);
    kvti_nixl_enter(engine);
    status = make_request(engine, remote, remote->has_page ? &page : at,
                          &probe->req);
    if (status == NIXL_OK) {
        status = api->post_xfer_req(engine->agent, probe->req, NULL);
    } else if (status == NIXL_BACKEND) {
        status = NIXL_EXCEPTION; /* it was never made: the link is not broken */
    }
    kvti_nixl_leave(engine);
    if (status == NIXL_IN_PROG) {
        probe->remote->flying++;
        kvti_list_append(&engine->probes, &probe->node);
    } else {
        finish(engine, probe, status);
    }
}

static struct kvti_nixl_probe *new_probe(struct kvti_nixl_remote *remote)
{
    struct kvti_nixl_probe *probe = calloc(1, sizeof(*probe));

    if (probe != NULL) {
        probe->remote = remote;
        kvti_list_init(&probe->node);
        kvti_list_init(&probe->covered);
    }
    return probe;
}

void kvti_nixl_connect(struct kvti_nixl *engine, struct kvti_job *job)
{
    struct kvti_nixl_conn *conn = job->conn;
    struct kvti_nixl_remote *remote = conn->remote;
    const struct kvti_mem *mem = remote->regions.mems;
    struct kvti_nixl_probe *probe;
    struct kvt_error err;
    struct place at;

    if (remote->down) {
        kvti_fail(&err, KVT_EDISCONNECTED,
                  "the link to the peer is down: reload it");
        kvti_nixl_report_job(engine, job, KVT_EDISCONNECTED, &err);
        return;
    }
    if (remote->regions.count == 0) {
        /* There is nothing to move and so nothing to connect for. */
        kvti_nixl_report_job(engine, job, KVT_OK, NULL);
        return;
    }
    probe = new_probe(remote);
    if (probe == NULL) {
        kvti_fail(&err, KVT_ENOMEM, "no memory for a request");
        kvti_nixl_report_job(engine, job, KVT_ENOMEM, &err);
        return;
    }
    probe->job = job;
    at = (struct place){mem->addr, mem->kind, mem->device};
    start(engine, probe, &at);
}

void kvti_nixl_try_link(struct kvti_nixl *engine,
                        struct kvti_nixl_remote *remote)
{
    const struct kvti_mem *mem = remote->regions.mems;
    struct kvti_nixl_probe *probe = new_probe(remote);
    struct place at;

    if (probe == NULL || remote->regions.count == 0) {
        free(probe);
        return;
    }
    at = (struct place){mem->addr, mem->kind, mem->device};
    remote->flying++; /* it stays, whatever comes of it */
    start(engine, probe, &at);
    remote->flying--;
}

static void confirm(struct kvti_nixl *engine, struct kvti_nixl_remote *remote)
{
    const struct kvti_chunk *first = kvti_container(remote->landed.next,
                                                    struct kvti_chunk, node);
    const struct place at = {first->copies[0].peer, first->peer_kind,
                             first->peer_device};
    struct kvti_nixl_probe *probe = new_probe(remote);

    if (probe == NULL) {
        return; /* tried again in the next round */
    }
    kvti_list_remove(&remote->confirm);
    kvti_list_splice(&probe->covered, &remote->landed);
    start(engine, probe, &at);
}

void kvti_nixl_confirm_landed(struct kvti_nixl *engine)
{
    kvti_list_each(node, &engine->unconfirmed) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, confirm);

        if (remote->queued == 0 && remote->flying == 0) {
            confirm(engine, remote);
        }
    }
}

void kvti_nixl_poll_probes(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    uint64_t now_ns = kvti_list_empty(&engine->probes) ? 0 : kvti_now_ns();

    kvti_list_each(node, &engine->probes) {
        struct kvti_nixl_probe *probe = kvti_container(
            node, struct kvti_nixl_probe, node);
        int status;

        kvti_nixl_enter(engine);
        status = api->get_xfer_status(engine->agent, probe->req);
        kvti_nixl_leave(engine);
        if (status != NIXL_IN_PROG) {
            kvti_list_remove(&probe->node);
            probe->remote->flying--;
            finish(engine, probe, status);
        } else if (probe->job != NULL && probe->job->deadline_ns <= now_ns) {
            report_connect(engine, probe, KVT_ETIMEDOUT,
                           "the peer does not answer: its process may be "
                           "stopped");
        }
    }
}

void kvti_nixl_drop_connects(struct kvti_nixl *engine,
                             const struct kvti_nixl_conn *conn)
{
    kvti_list_each(node, &engine->probes) {
        struct kvti_nixl_probe *probe = kvti_container(
            node, struct kvti_nixl_probe, node);

        if (probe->job != NULL && probe->job->conn == conn) {
            report_connect(engine, probe, KVT_EDISCONNECTED,
                           "the peer was unloaded");
        }
    }
}

void kvti_nixl_drop_probes(struct kvti_nixl *engine,
                           struct kvti_nixl_remote *remote)
{
    kvti_list_each(node, &engine->probes) {
        struct kvti_nixl_probe *probe = kvti_container(
            node, struct kvti_nixl_probe, node);

        if (probe->remote == remote) {
            kvti_list_remove(&probe->node);
            remote->flying--;
            finish(engine, probe, NIXL_BACKEND);
        }
    }
}

void kvti_nixl_probes_fini(struct kvti_nixl *engine)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&engine->probes)) != NULL) {
        free(kvti_container(node, struct kvti_nixl_probe, node));
    }
}
