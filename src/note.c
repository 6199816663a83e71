/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications: what callers send by themselves, and what was received and
 * not yet taken. (Those attached to a transfer are sent by progress.c.)
 *
 * Nothing is dropped: a full queue here makes the engine stop reading, a
 * sender whose peer does not read gets KVT_EAGAIN.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

static int check_notify_locked(const struct kvt_transport *t,
                               const struct kvti_peer *peer,
                               struct kvt_error *err)
{
    if (peer == NULL) {
        return kvti_fail(err, KVT_ENOENT, "no peer has this id");
    }
    if (peer->state != KVT_PEER_LOADED) {
        return kvti_peer_refuse(peer, "notifications", err);
    }
    if (peer->notes_out >= t->options.notify_max) {
        return kvti_fail(err, KVT_EAGAIN,
                         "%u notifications wait for peer \"%.100s\" already, "
                         "which does not read them",
                         peer->notes_out, peer->name.text);
    }
    return KVT_OK;
}

int kvt_notify(kvt_transport *t, kvt_peer id, const void *bytes, size_t length,
               struct kvt_error *err)
{
    struct kvti_call *call;
    struct kvti_peer *peer;
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (bytes == NULL && length > 0) {
        return kvti_fail(err, KVT_EINVAL, "the bytes are NULL");
    }
    if ((t->traits.caps & KVTI_CAP_NOTIFY) == 0) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "engine \"%s\" has no notifications", t->engine_name);
    }
    if (length > t->options.notify_bytes_max) {
        return kvti_fail(err, KVT_ERANGE,
                         "the notification has %zu bytes, this transport's "
                         "limit is %u",
                         length, t->options.notify_bytes_max);
    }
    call = kvti_call_new(KVTI_CALL_NOTIFY, NULL);
    if (call == NULL ||
        kvti_buf_append(&call->job.buf, bytes, length) != KVT_OK) {
        free(call);
        return kvti_fail(err, KVT_ENOMEM, "no memory for the notification");
    }
    kvti_lock(t);
    peer = t->phase == KVTI_OPEN ? kvti_peer_get_locked(t, id) : NULL;
    code = t->phase == KVTI_OPEN
               ? check_notify_locked(t, peer, err)
               : kvti_fail(err, KVT_ECLOSED, "the transport is closed");
    if (code == KVT_OK) {
        call->peer = peer;
        call->generation = peer->generation;
        peer->users++;
        peer->notes_out++;
        kvti_call_send_locked(t, call);
    } else {
        kvti_call_unref_locked(t, call);
        kvti_call_unref_locked(t, call);
    }
    kvti_unlock(t);
    return code;
}

static void sent(struct kvt_transport *t, struct kvti_call *call, int code,
                 const char *why)
{
    kvti_lock(t);
    if (code == KVT_OK) {
        t->stats.notes_sent++;
    } else {
        t->stats.notes_failed++;
    }
    call->peer->notes_out--;
    kvti_call_unref_locked(t, call);
    kvti_unlock(t);
    if (code != KVT_OK) {
        kvti_log(&t->logger, KVT_LOG_WARNING, "a notification was not sent: %s",
                 why);
    }
}

static void reported(struct kvt_transport *t, struct kvti_job *job)
{
    sent(t, job->owner, job->code, job->err.text);
}

void kvti_ctl_notify(struct kvt_transport *t, struct kvti_call *call)
{
    struct kvti_link *link = call->peer->link;

    if (link == NULL || link->state != KVTI_LINK_UP || link->down ||
        link->generation != call->generation) {
        sent(t, call, KVT_EDISCONNECTED,
             "the peer was disconnected, removed or reloaded");
        return;
    }
    call->job.kind = KVTI_JOB_NOTIFY;
    call->job.reported = reported;
    call->job.conn = link->conn;
    kvti_ctl_hand(t, &call->job);
}

/* --------------------------------------------------------------- receiving */

/* The engine is told that there is room, in the next turn. */
static void want_notes_locked(struct kvt_transport *t)
{
    t->notes_wanted = true;
    atomic_store(&t->calls_due, true);
    t->wake_due = true;
}

bool kvti_note_received(void *ctx, const char *agent_name, const void *bytes,
                        size_t length)
{
    struct kvt_transport *t = ctx;
    struct kvti_note *note = malloc(sizeof *note + length);
    bool room;

    if (note == NULL) {
        /* Nobody will make room: the engine asks again at once, and stays
         * awake until there is memory. To wait for kvt_notification() would
         * be for ever if nothing else is queued. */
        kvti_lock(t);
        want_notes_locked(t);
        kvti_unlock(t);
        return false;
    }
    kvti_format(note->agent_name, sizeof note->agent_name, "%s", agent_name);
    note->length = length;
    if (length > 0) {
        memcpy(note->bytes, bytes, length);
    }
    kvti_lock(t);
    room = t->note_count < t->options.notify_max;
    if (room) {
        kvti_list_append(&t->notes, &note->node);
        t->note_count++;
        t->stats.notes_received++;
        kvti_signal_locked(t);
    } else {
        t->notes_full = true;
    }
    kvti_unlock(t);
    if (!room) {
        free(note);
    }
    return room;
}

static kvt_peer sender_locked(const struct kvt_transport *t,
                              const char *agent_name)
{
    struct kvti_name *agent = kvti_names_find(&t->agent_names, 0, agent_name);

    return agent == NULL ? 0
                         : kvti_container(agent, struct kvti_peer, agent)->id;
}

int kvt_notification(kvt_transport *t, struct kvt_notification *ret,
                     void *buffer, size_t capacity)
{
    struct kvti_note *note;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret == NULL || (buffer == NULL && capacity > 0)) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    if (kvti_list_empty(&t->notes)) {
        kvti_unlock(t);
        return 0;
    }
    note = kvti_container(t->notes.next, struct kvti_note, node);
    if (note->length > capacity) {
        ret->length = note->length;
        kvti_unlock(t);
        return KVT_ERANGE;
    }
    kvti_list_remove(&note->node);
    t->note_count--;
    if (t->notes_full && t->note_count <= t->options.notify_max / 2) {
        t->notes_full = false;
        want_notes_locked(t);
    }
    kvti_unsignal_locked(t);
    ret->peer = sender_locked(t, note->agent_name);
    kvti_unlock(t);
    ret->length = note->length;
    memcpy(ret->agent_name, note->agent_name, sizeof ret->agent_name);
    if (note->length > 0) {
        memcpy(buffer, note->bytes, note->length);
    }
    free(note);
    return 1;
}
