/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is done to a known peer: reload, unload, remove, proof of death, and
 * questions about it. Callers' threads; the table itself is peer.c's.
 */
#include <stdlib.h>

#include "core.h"

/* Waits for the peer's next settling on behalf of this call. */
static int wait_locked(struct kvt_transport *t, struct kvti_peer *peer,
                       struct kvti_call *call, uint64_t timeout_ns,
                       struct kvt_error *err)
{
    kvti_peer_await_locked(peer, call);
    kvti_call_push_locked(t, call);
    return kvti_call_wait_locked(t, call, kvti_deadline(t, timeout_ns), err);
}

int kvt_peer_reload(kvt_transport *t, kvt_peer id, const void *metadata,
                    size_t metadata_length, uint64_t timeout_ns,
                    struct kvt_error *err)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    struct kvti_md md = {0};
    void *blob = NULL;
    int code = kvti_guard(t, err);

    if (code == KVT_OK && (metadata != NULL || metadata_length != 0)) {
        code = kvti_peer_metadata(t, metadata, metadata_length, &blob, &md,
                                  err);
    }
    if (code != KVT_OK) {
        return code;
    }
    code = kvti_lock_open(t, err);
    if (code == KVT_OK) {
        peer = kvti_peer_get_locked(t, id);
        if (peer == NULL) {
            code = kvti_fail(err, KVT_ENOENT, "no peer has this id");
        } else if ((call = kvti_call_new(KVTI_CALL_STEP, peer)) == NULL) {
            code = kvti_fail(err, KVT_ENOMEM, "no memory for a call");
        } else {
            kvti_peer_supersede_locked(t, peer, "reload");
            if (blob != NULL) {
                free(peer->next_blob);
                kvti_md_fini(&peer->next_md);
                peer->next_blob = blob;
                peer->next_md = md;
                blob = NULL;
                md = (struct kvti_md){0};
            }
            kvti_peer_shut_locked(t, peer, KVT_PEER_RELOADING,
                                  KVT_EDISCONNECTED,
                                  "the peer is being reloaded");
            peer->want = KVTI_WANT_LOADED;
            peer->fresh = true;
            code = wait_locked(t, peer, call, timeout_ns, err);
        }
        kvti_unlock(t);
    }
    kvti_md_fini(&md);
    free(blob);
    return code;
}

int kvt_peer_unload(kvt_transport *t, kvt_peer id, uint64_t timeout_ns,
                    struct kvt_error *err)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    int code = kvti_guard(t, err);

    if (code == KVT_OK) {
        code = kvti_lock_open(t, err);
    }
    if (code != KVT_OK) {
        return code;
    }
    peer = kvti_peer_get_locked(t, id);
    if (peer == NULL) {
        code = kvti_fail(err, KVT_ENOENT, "no peer has this id");
    } else if ((call = kvti_call_new(KVTI_CALL_STEP, peer)) == NULL) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for a call");
    } else {
        kvti_peer_supersede_locked(t, peer, "unload");
        kvti_peer_shut_locked(t, peer, KVT_PEER_UNLOADED, KVT_EDISCONNECTED,
                              "the peer was unloaded: reload it");
        peer->want = KVTI_WANT_UNLOADED;
        peer->fresh = false;
        code = wait_locked(t, peer, call, timeout_ns, err);
    }
    kvti_unlock(t);
    return code;
}

int kvt_peer_remove(kvt_transport *t, kvt_peer id)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    int code = kvti_guard(t, NULL);

    if (code == KVT_OK) {
        code = kvti_lock_open(t, NULL);
    }
    if (code != KVT_OK) {
        return code;
    }
    peer = kvti_peer_get_locked(t, id);
    if (peer == NULL) {
        code = KVT_ENOENT;
    } else {
        call = kvti_call_new(KVTI_CALL_STEP, peer);
        if (call == NULL) {
            code = KVT_ENOMEM;
        } else {
            kvti_peer_supersede_locked(t, peer, "remove");
            kvti_peer_detach_locked(t, peer);
            kvti_call_send_locked(t, call);
        }
    }
    kvti_unlock(t);
    return code;
}

int kvt_peer_confirm_dead(kvt_transport *t, kvt_peer id)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    int code = kvti_guard(t, NULL);

    if (code == KVT_OK) {
        code = kvti_lock_open(t, NULL);
    }
    if (code != KVT_OK) {
        return code;
    }
    peer = kvti_idmap_get(&t->peers, id);
    call = peer == NULL ? NULL : kvti_call_new(KVTI_CALL_DEAD, peer);
    if (peer == NULL) {
        code = KVT_ENOENT;
    } else if (call == NULL) {
        code = KVT_ENOMEM;
    } else {
        if (peer->state == KVT_PEER_LOADED) {
            kvti_peer_state_locked(
                t, peer, KVT_PEER_DISCONNECTED, KVT_EDISCONNECTED,
                "the caller confirmed that the peer's process is gone");
        }
        kvti_call_send_locked(t, call);
    }
    kvti_unlock(t);
    return code;
}

/* ------------------------------------------------------------------ asking */

int kvt_peer_find(kvt_transport *t, const char *name, kvt_peer *ret_peer)
{
    struct kvti_name *found;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (name == NULL || ret_peer == NULL) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    found = kvti_names_find(&t->peer_names, 0, name);
    if (found == NULL) {
        code = KVT_ENOENT;
    } else {
        *ret_peer = kvti_container(found, struct kvti_peer, name)->id;
    }
    kvti_unlock(t);
    return code;
}

int kvt_peer_loaded(kvt_transport *t, kvt_peer id)
{
    struct kvti_peer *peer;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    kvti_lock(t);
    peer = kvti_peer_get_locked(t, id);
    code = peer != NULL && peer->state == KVT_PEER_LOADED;
    kvti_unlock(t);
    return code;
}

int kvt_peer_info(kvt_transport *t, kvt_peer id, struct kvt_peer_info *ret)
{
    struct kvti_peer *peer;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret == NULL) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    peer = kvti_peer_get_locked(t, id);
    if (peer == NULL) {
        code = KVT_ENOENT;
    } else {
        *ret = (struct kvt_peer_info){
            .generation = peer->generation,
            .region_count = peer->md.regions.count,
            .layout_count = peer->layout_count,
            .inflight = peer->inflight,
            .state = peer->state,
            .code = peer->code,
        };
        kvti_format(ret->name, sizeof ret->name, "%s", peer->name.text);
        kvti_format(ret->agent_name, sizeof ret->agent_name, "%s",
                    peer->md.agent_name);
        kvti_format(ret->path, sizeof ret->path, "%s", peer->path);
        kvti_format(ret->text, sizeof ret->text, "%s", peer->text);
    }
    kvti_unlock(t);
    return code;
}
