/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads of one byte from the peer into our scratch page, on the NIXL thread.
 * One makes the connection before the first transfer. The other confirms the
 * chunks that had landed before it: it is made only when no chunk of the same
 * remote waits, since the next chunk's post would tell the same for nothing.
 * It reads where the first of them wrote, which the peer has mapped for that.
 */
#include "nixl.h"

#include <stdlib.h>

static int make_request(struct kvti_nixl *engine,
                        const struct kvti_nixl_remote *remote, uint32_t kind,
                        uint32_t device, uint64_t addr,
                        struct nixl_xfer_req **ret)
{
    const struct nixl_api *api = &engine->lib->api;
    struct nixl_xfer_dlist *local = NULL;
    struct nixl_xfer_dlist *peer = NULL;
    int status = api->create_xfer_dlist(NIXL_MEM_DRAM, &local);

    if (status == NIXL_OK) {
        status = api->create_xfer_dlist((int)kind, &peer);
    }
    if (status == NIXL_OK) {
        status = api->xfer_dlist_add_desc(local, (uintptr_t)engine->scratch, 1,
                                          0);
    }
    if (status == NIXL_OK) {
        status = api->xfer_dlist_add_desc(peer, addr, 1, device);
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

/* The probe is over, with NIXL's status. Frees it. */
static void finish(struct kvti_nixl *engine, struct kvti_nixl_probe *probe,
                   int status)
{
    const struct nixl_api *api = &engine->lib->api;
    struct kvti_nixl_remote *remote = probe->remote;
    struct kvti_list *node;
    char text[KVT_RESULT_TEXT_MAX];

    kvti_format(text, sizeof(text),
                "NIXL cannot reach the peer: %s (status %d)",
                kvti_nixl_status_text(status), status);
    engine->busy = true;
    if (status == NIXL_OK &&
        api->release_xfer_req(engine->agent, probe->req) == NIXL_OK) {
        (void)api->destroy_xfer_req(probe->req);
    }
    remote->confirming = remote->confirming && !probe->confirms;
    while ((node = kvti_list_take(&probe->covered)) != NULL) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (status == NIXL_OK) {
            kvti_nixl_chunk_done(engine, chunk);
        } else {
            kvti_nixl_chunk_park(engine, chunk, KVT_DISCONNECTED,
                                 KVT_EDISCONNECTED, status, text);
        }
    }
    report_connect(engine, probe,
                   status == NIXL_OK ? KVT_OK : KVT_EDISCONNECTED, text);
    if (status != NIXL_OK) {
        kvti_nixl_remote_broke(engine, remote, "%s", text);
    }
    free(probe);
    kvti_nixl_remote_check(engine, remote);
}

/* Takes the probe; it may be over when this returns. */
static void start(struct kvti_nixl *engine, struct kvti_nixl_probe *probe,
                  uint32_t kind, uint32_t device, uint64_t addr)
{
    const struct nixl_api *api = &engine->lib->api;
    int status;

    kvti_nixl_enter(engine);
    status = make_request(engine, probe->remote, kind, device, addr,
                          &probe->req);
    if (status == NIXL_OK) {
        status = api->post_xfer_req(engine->agent, probe->req, NULL);
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
    struct kvti_nixl_probe *probe;
    struct kvt_error err;

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
    start(engine, probe, remote->regions.mems[0].kind,
          remote->regions.mems[0].device, remote->regions.mems[0].addr);
}

static void confirm(struct kvti_nixl *engine, struct kvti_nixl_remote *remote)
{
    const struct kvti_chunk *first = kvti_container(remote->landed.next,
                                                    struct kvti_chunk, node);
    struct kvti_nixl_probe *probe = new_probe(remote);

    if (probe == NULL) {
        return; /* tried again in the next round */
    }
    kvti_list_remove(&remote->confirm);
    kvti_list_splice(&probe->covered, &remote->landed);
    probe->confirms = true;
    remote->confirming = true;
    start(engine, probe, first->peer_kind, first->peer_device,
          first->copies[0].peer);
}

void kvti_nixl_confirm_landed(struct kvti_nixl *engine)
{
    kvti_list_each(node, &engine->unconfirmed) {
        struct kvti_nixl_remote *remote = kvti_container(
            node, struct kvti_nixl_remote, confirm);

        if (remote->queued == 0 && !remote->confirming) {
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

void kvti_nixl_probes_fini(struct kvti_nixl *engine)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&engine->probes)) != NULL) {
        free(kvti_container(node, struct kvti_nixl_probe, node));
    }
}
