/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications, on the NIXL thread. NIXL takes any number of them and never
 * says that the peer does not read, so the limits are the core's. Received
 * ones are taken out of NIXL only while the core has room: what it refused is
 * kept where it is, in NIXL's own map, and offered again.
 */
#include "nixl.h"

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

/* Goes on where it stopped. False: the core is full. */
static bool deliver_all(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    size_t agents = 0;

    (void)api->notif_map_size(engine->notes, &agents);
    for (; engine->note_agent < agents; engine->note_agent++) {
        const char *name = NULL;
        size_t count = 0;

        if (api->notif_map_get_agent_at(engine->notes, engine->note_agent,
                                        &name) != NIXL_OK ||
            api->notif_map_get_notifs_size(engine->notes, name, &count) !=
                NIXL_OK) {
            continue;
        }
        for (; engine->note_index < count; engine->note_index++) {
            const void *bytes = NULL;
            size_t length = 0;

            if (api->notif_map_get_notif(engine->notes, name,
                                         engine->note_index, &bytes,
                                         &length) == NIXL_OK &&
                !deliver(engine, name, bytes, length)) {
                return false;
            }
        }
        engine->note_index = 0;
    }
    return true;
}

void kvti_nixl_poll_notes(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    size_t agents = 0;
    bool wanted;

    if (!engine->listening) {
        return;
    }
    if (engine->holding) {
        pthread_mutex_lock(&engine->mu);
        wanted = engine->notes_wanted;
        engine->notes_wanted = false;
        pthread_mutex_unlock(&engine->mu);
        if (!wanted) {
            return;
        }
    } else {
        kvti_nixl_enter(engine);
        (void)api->get_notifs(engine->agent, engine->notes, NULL);
        kvti_nixl_leave(engine);
        (void)api->notif_map_size(engine->notes, &agents);
        if (agents == 0) {
            return;
        }
        engine->note_agent = 0;
        engine->note_index = 0;
    }
    engine->busy = true;
    engine->holding = !deliver_all(engine);
    if (!engine->holding) {
        (void)api->notif_map_clear(engine->notes);
    }
}
