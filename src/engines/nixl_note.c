/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications, on the NIXL thread. NIXL takes any number of them and never
 * says that the peer does not read, so the limits are the core's. Received
 * ones are taken out of NIXL only while the core has room: what it refused is
 * kept where it is, in NIXL's own map, and offered again.
 *
 * To ask for them is also what moves NIXL on: what we sent and the network did
 * not take yet, and what peers write to us. So we go on asking while the core is
 * full, into a second map.
 */
#include "nixl.h"

/* A call that takes longer than this has moved something. */
#define WORK_NS UINT64_C(5000)

void kvti_nixl_notify(struct kvti_nixl *engine, struct kvti_job *job)
{
    struct kvti_nixl_conn *conn = job->conn;
    struct kvti_nixl_remote *remote = conn->remote;
    const void *bytes = job->buf.length > 0 ? (const void *)job->buf.data : "";
    struct kvt_error err;
    int status;

    if (remote->down) {
        kvti_fail(&err, KVT_EDISCONNECTED,
                  "the link to the peer is down: reload it");
        kvti_nixl_report_job(engine, job, KVT_EDISCONNECTED, &err);
        return;
    }
    kvti_nixl_enter(engine);
    status = engine->lib->api.gen_notif(engine->agent, remote->name, bytes,
                                        job->buf.length, NULL);
    kvti_nixl_leave(engine);
    if (status == NIXL_OK) {
        kvti_nixl_report_job(engine, job, KVT_OK, NULL);
        return;
    }
    kvti_fail(&err, status == NIXL_BACKEND ? KVT_EDISCONNECTED : KVT_EENGINE,
              "NIXL cannot send a notification: %s (status %d)",
              kvti_nixl_status_text(status), status);
    kvti_nixl_report_job(engine, job, err.code, &err);
    if (status == NIXL_BACKEND) {
        kvti_nixl_remote_broke(engine, remote, "%s", err.text);
    }
}

/* False: the core is full, or we are closed. */
static bool deliver(struct kvti_nixl *engine, const char *agent,
                    const void *bytes, size_t length)
{
    const struct kvti_env *env = engine->env;
    char name[KVT_NAME_MAX + 1];
    bool taken;

    if (!kvti_nixl_report_begin(engine)) {
        return false;
    }
    kvti_format(name, sizeof(name), "%s", agent);
    taken = env->report_note(env->ctx, name, bytes, length);
    kvti_nixl_report_end(engine);
    return taken;
}

/* NIXL had no memory for its answer, or the like: it is asked again. */
static bool is_for_later(struct kvti_nixl *engine, int status)
{
    engine->unread = status == NIXL_BACKEND;
    return engine->unread;
}

/* Those of one sender. False: the rest of them comes later. What NIXL does not
 * hand out for another reason is left out: a sender whose name holds a NUL is in
 * its map and never found there. */
static bool deliver_one(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    const char *name = NULL;
    size_t count = 0;
    int status = api->notif_map_get_agent_at(engine->notes, engine->note_agent,
                                             &name);

    if (status == NIXL_OK) {
        status = api->notif_map_get_notifs_size(engine->notes, name, &count);
    }
    if (status != NIXL_OK) {
        return !is_for_later(engine, status);
    }
    for (; engine->note_index < count; engine->note_index++) {
        const void *bytes = NULL;
        size_t length = 0;

        status = api->notif_map_get_notif(engine->notes, name,
                                          engine->note_index, &bytes, &length);
        if (status == NIXL_OK ? !deliver(engine, name, bytes, length)
                              : is_for_later(engine, status)) {
            return false;
        }
    }
    return true;
}

/* Goes on where it stopped. False: not all of them are delivered. */
static bool deliver_all(struct kvti_nixl *engine)
{
    size_t agents = 0;

    engine->unread = engine->lib->api.notif_map_size(engine->notes, &agents) !=
                     NIXL_OK;
    if (engine->unread) {
        return false;
    }
    for (; engine->note_agent < agents; engine->note_agent++) {
        if (!deliver_one(engine)) {
            return false;
        }
        engine->note_index = 0;
    }
    return true;
}

/* What is being delivered stays as it is: more would change its order. */
static void fetch(struct kvti_nixl *engine)
{
    uint64_t begun_ns = kvti_now_ns();

    atomic_store(&engine->heartbeat.busy_since_ns, begun_ns);
    (void)engine->lib->api.get_notifs(
        engine->agent, engine->holding ? engine->later : engine->notes, NULL);
    kvti_nixl_leave(engine);
    if (kvti_now_ns() - begun_ns > WORK_NS) {
        kvti_nixl_hints_worked(&engine->hints);
    }
}

static bool take_wanted(struct kvti_nixl *engine)
{
    bool wanted;

    pthread_mutex_lock(&engine->mu);
    wanted = engine->notes_wanted;
    engine->notes_wanted = false;
    pthread_mutex_unlock(&engine->mu);
    return wanted;
}

void kvti_nixl_poll_notes(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    struct nixl_notif_map *delivered = engine->notes;
    size_t agents = 0;

    fetch(engine);
    if (engine->holding) {
        if (!take_wanted(engine) && !engine->unread) {
            return;
        }
    } else {
        (void)api->notif_map_size(engine->notes, &agents);
        if (agents == 0) {
            return;
        }
        engine->note_agent = 0;
        engine->note_index = 0;
    }
    engine->holding = !deliver_all(engine);
    if (!engine->holding && api->notif_map_clear(delivered) != NIXL_OK) {
        /* They would come again with the next: it is asked again. */
        engine->holding = true;
        engine->unread = true;
    }
    engine->busy |= !engine->unread;
    if (!engine->holding) {
        engine->notes = engine->later;
        engine->later = delivered;
    }
}
