/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of peers and the calls that change it, on callers' threads. They
 * write what is wanted under mu, shut the peer to new work at once, and leave
 * the engine to the control thread (link.c).
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

struct kvti_peer *kvti_peer_get_locked(struct kvt_transport *t, kvt_peer id)
{
    struct kvti_peer *peer = kvti_idmap_get(&t->peers, id);

    return peer != NULL && !peer->removed ? peer : NULL;
}

static void free_peer_locked(struct kvt_transport *t, struct kvti_peer *peer)
{
    kvti_assert(kvti_list_empty(&peer->finished));
    kvti_assert(kvti_list_empty(&peer->layouts));
    kvti_assert(peer->link == NULL && peer->waiter == NULL);
    kvti_idmap_remove(&t->peers, peer->id);
    kvti_list_remove(&peer->node);
    kvti_name_fini(&peer->name);
    kvti_md_fini(&peer->md);
    kvti_md_fini(&peer->next_md);
    free(peer->blob);
    free(peer->next_blob);
    free(peer);
}

void kvti_peer_unuse_locked(struct kvt_transport *t, struct kvti_peer *peer)
{
    kvti_assert(peer->users > 0);
    if (--peer->users == 0 && peer->gone) {
        free_peer_locked(t, peer);
    }
}

void kvti_peer_state_locked(struct kvt_transport *t, struct kvti_peer *peer,
                            uint32_t state, int code, const char *text)
{
    t->stats.peers_loaded -= peer->state == KVT_PEER_LOADED;
    t->stats.peers_loaded += state == KVT_PEER_LOADED;
    peer->state = state;
    peer->code = code;
    kvti_format(peer->text, sizeof peer->text, "%s", text);
}

int kvti_peer_refuse(const struct kvti_peer *peer, const char *what,
                     struct kvt_error *err)
{
    const char *why = peer->state == KVT_PEER_ADDING ? "it is still being added"
                                                     : peer->text;
    const char *hint = peer->state == KVT_PEER_DISCONNECTED
                           ? "; reload it, or add it again if its "
                             "process is a new one"
                           : "";

    return kvti_fail(err, KVT_EDISCONNECTED,
                     "peer \"%.40s\" takes no %s: %.110s%s", peer->name.text,
                     what, why, hint);
}

void kvti_peer_settle_locked(struct kvt_transport *t, struct kvti_peer *peer,
                             int code, const struct kvt_error *err)
{
    struct kvti_call *waiter = peer->waiter;
    struct kvti_xfer *add = peer->add;

    peer->waiter = NULL;
    peer->add = NULL;
    if (add != NULL) {
        if (code != KVT_OK) {
            kvti_xfer_stop_locked(add, KVT_FAILED, code, 0, KVT_SCOPE_PEER,
                                  err->text);
        }
        kvti_xfer_finish_locked(t, add, true);
    }
    if (waiter != NULL) {
        kvti_call_done_locked(t, waiter, code, err);
        kvti_call_unref_locked(t, waiter);
    }
}

void kvti_peer_await_locked(struct kvti_peer *peer, struct kvti_call *call)
{
    kvti_assert(peer->waiter == NULL && peer->add == NULL);
    call->refs++;
    peer->waiter = call;
}

void kvti_peer_supersede_locked(struct kvt_transport *t, struct kvti_peer *peer,
                                const char *by)
{
    struct kvt_error err;

    kvti_fail(&err, KVT_ESUPERSEDED,
              "a newer call (%s) for peer \"%.100s\" took this one's place", by,
              peer->name.text);
    kvti_peer_settle_locked(t, peer, KVT_ESUPERSEDED, &err);
}

void kvti_peer_shut_locked(struct kvt_transport *t, struct kvti_peer *peer,
                           uint32_t state, int code, const char *text)
{
    peer->generation++;
    kvti_peer_state_locked(t, peer, state, code, text);
}

void kvti_peer_detach_locked(struct kvt_transport *t, struct kvti_peer *peer)
{
    kvti_assert(!peer->removed);
    kvti_peer_shut_locked(t, peer, KVT_PEER_UNLOADED, KVT_ENOENT,
                          "the peer was removed");
    peer->removed = true;
    peer->want = KVTI_WANT_REMOVED;
    kvti_names_remove(&t->peer_names, &peer->name);
    kvti_names_remove(&t->agent_names, &peer->agent);
    kvti_list_each(node, &peer->layouts) {
        kvti_entry_drop_locked(t,
                               kvti_container(node, struct kvti_entry, node));
    }
    t->peer_count--;
}

/* -------------------------------------------------------------------- add */

static int check_name(const char *name, const char *what, struct kvt_error *err)
{
    if (name == NULL || name[0] == '\0' ||
        strnlen(name, KVT_NAME_MAX + 1) > KVT_NAME_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "%s must be a string of 1 to %d bytes", what,
                         KVT_NAME_MAX);
    }
    return KVT_OK;
}

static int check_identity(const struct kvt_transport *t,
                          const struct kvti_md *md, struct kvt_error *err)
{
    if (memcmp(md->incarnation, t->incarnation, sizeof t->incarnation) == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "this is the transport's own metadata: a transport "
                         "cannot be its own peer");
    }
    if (strcmp(md->agent_name, t->agent_name) == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "both agents are called \"%.100s\": give one of them "
                         "another agent_name",
                         md->agent_name);
    }
    return KVT_OK;
}

/* Copies and parses metadata; on success *ret_blob is owned by the caller. */
int kvti_peer_metadata(const struct kvt_transport *t, const void *metadata,
                       size_t length, void **ret_blob, struct kvti_md *ret_md,
                       struct kvt_error *err)
{
    void *blob;
    int code;

    if (metadata == NULL || length == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "the metadata is empty: pass what the peer's "
                         "kvt_metadata() gave");
    }
    blob = malloc(length);
    if (blob == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu bytes of metadata",
                         length);
    }
    memcpy(blob, metadata, length);
    code = kvti_md_decode(blob, length, t->options.regions_max, ret_md, err);
    if (code == KVT_OK) {
        code = check_identity(t, ret_md, err);
        if (code != KVT_OK) {
            kvti_md_fini(ret_md);
        }
    }
    if (code != KVT_OK) {
        free(blob);
        return code;
    }
    *ret_blob = blob;
    return KVT_OK;
}

static int check_claims(const struct kvt_peer_params *params,
                        const struct kvti_md *md, struct kvt_error *err)
{
    if (params->agent_name != NULL &&
        strcmp(params->agent_name, md->agent_name) != 0) {
        return kvti_fail(err, KVT_EMISMATCH,
                         "the metadata is of agent \"%.90s\", not of "
                         "\"%.90s\"",
                         md->agent_name, params->agent_name);
    }
    if (params->regions == NULL && params->region_count > 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "regions is NULL, region_count is "
                         "%u",
                         params->region_count);
    }
    for (uint32_t i = 0; i < params->region_count; i++) {
        const struct kvt_region *region = &params->regions[i];

        if (region->length != 0 &&
            !kvti_regions_cover(&md->regions, region->addr, region->length,
                                region->kind, region->device)) {
            return kvti_fail(err, KVT_ERANGE,
                             "region %u (%llu bytes) lies outside the memory "
                             "that the peer's metadata registers",
                             i, (unsigned long long)region->length);
        }
    }
    return KVT_OK;
}

static int check_params(const struct kvt_transport *t,
                        const struct kvt_peer_params *params,
                        struct kvt_error *err)
{
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (params == NULL || params->size != sizeof *params) {
        return kvti_fail(err, KVT_EINVAL,
                         "params must be given, with its size set to "
                         "sizeof(struct kvt_peer_params)");
    }
    return check_name(params->name, "the peer's name", err);
}

static void discard_peer(struct kvti_peer *peer)
{
    kvti_md_fini(&peer->md);
    free(peer->blob);
    kvti_name_fini(&peer->name);
    free(peer);
}

/* A peer that is in no table yet. */
static struct kvti_peer *new_peer(const struct kvt_transport *t,
                                  const struct kvt_peer_params *params,
                                  int *ret_code, struct kvt_error *err)
{
    struct kvti_peer *peer = calloc(1, sizeof *peer);
    int code;

    if (peer == NULL ||
        kvti_name_init(&peer->name, 0, params->name) != KVT_OK) {
        free(peer);
        *ret_code = kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
        return NULL;
    }
    code = kvti_peer_metadata(t, params->metadata, params->metadata_length,
                              &peer->blob, &peer->md, err);
    if (code == KVT_OK) {
        code = check_claims(params, &peer->md, err);
    }
    if (code != KVT_OK) {
        discard_peer(peer);
        *ret_code = code;
        return NULL;
    }
    peer->state = KVT_PEER_ADDING;
    peer->want = KVTI_WANT_LOADED;
    peer->fresh = true;
    kvti_list_init(&peer->layouts);
    kvti_list_init(&peer->finished);
    kvti_list_init(&peer->step);
    kvti_list_init(&peer->node);
    return peer;
}

/* Into the tables, in the place of a known peer of the same name. */
static int insert_locked(struct kvt_transport *t, struct kvti_peer *peer,
                         struct kvt_error *err)
{
    struct kvti_name *name = kvti_names_find(&t->peer_names, 0,
                                             peer->name.text);

    if (name == NULL && t->peer_count >= t->options.peers_max) {
        return kvti_fail(err, KVT_EAGAIN,
                         "this transport has its %u peers: remove one, or "
                         "open it with a higher peers_max",
                         t->options.peers_max);
    }
    if (kvti_names_reserve(&t->peer_names) != KVT_OK ||
        kvti_names_reserve(&t->agent_names) != KVT_OK ||
        (peer->id = kvti_idmap_add(&t->peers, peer)) == 0) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a peer");
    }
    if (name != NULL) {
        struct kvti_peer *old = kvti_container(name, struct kvti_peer, name);

        kvti_peer_supersede_locked(t, old, "add");
        kvti_peer_detach_locked(t, old);
        peer->predecessor = old;
        old->successor = peer;
        old->users++;
    }
    kvti_names_add(&t->peer_names, &peer->name);
    kvti_name_borrow(&peer->agent, 0, peer->md.agent_name);
    kvti_names_add(&t->agent_names, &peer->agent);
    kvti_list_append(&t->peer_list, &peer->node);
    t->peer_count++;
    t->peers_engine++;
    return KVT_OK;
}

/*
 * The shared part of both adds. mu is held on success, and *ret_call has been
 * pushed; it is the caller's to wait for or to drop.
 */
static int add_locked(struct kvt_transport *t,
                      const struct kvt_peer_params *params, bool async,
                      struct kvti_peer **ret_peer, struct kvti_call **ret_call,
                      struct kvt_error *err)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    int code = check_params(t, params, err);

    if (code != KVT_OK) {
        return code;
    }
    peer = new_peer(t, params, &code, err);
    if (peer == NULL) {
        return code;
    }
    call = kvti_call_new(KVTI_CALL_STEP, NULL);
    code = call == NULL ? kvti_fail(err, KVT_ENOMEM, "no memory for a call")
                        : kvti_lock_open(t, err);
    if (code != KVT_OK) {
        free(call);
        discard_peer(peer);
        return code;
    }
    if (async) {
        code = kvti_xfer_room_locked(t, err);
    }
    if (code == KVT_OK) {
        code = insert_locked(t, peer, err);
    }
    if (code != KVT_OK) {
        kvti_unlock(t);
        free(call);
        discard_peer(peer);
        return code;
    }
    call->peer = peer;
    peer->users++;
    *ret_peer = peer;
    *ret_call = call;
    return KVT_OK;
}

int kvt_peer_add(kvt_transport *t, const struct kvt_peer_params *params,
                 kvt_peer *ret_peer, struct kvt_error *err)
{
    struct kvti_peer *peer;
    struct kvti_call *call;
    kvt_peer id;
    int code;

    if (ret_peer == NULL) {
        return kvti_fail(err, KVT_EINVAL, "ret_peer is NULL");
    }
    code = add_locked(t, params, false, &peer, &call, err);
    if (code != KVT_OK) {
        return code;
    }
    id = peer->id;
    kvti_peer_await_locked(peer, call);
    kvti_call_push_locked(t, call);
    code = kvti_call_wait_locked(t, call, kvti_deadline(t, params->timeout_ns),
                                 err);
    kvti_unlock(t);
    if (code == KVT_OK) {
        *ret_peer = id;
    }
    return code;
}

int kvt_peer_add_async(kvt_transport *t, const struct kvt_peer_params *params,
                       kvt_peer *ret_peer, kvt_xfer *ret_xfer,
                       struct kvt_error *err)
{
    struct kvt_xfer_options options = {0};
    struct kvti_peer *peer;
    struct kvti_call *call;
    int code;

    if (ret_peer == NULL || ret_xfer == NULL) {
        return kvti_fail(err, KVT_EINVAL, "ret_peer or ret_xfer is NULL");
    }
    code = add_locked(t, params, true, &peer, &call, err);
    if (code != KVT_OK) {
        return code;
    }
    options.user_data = params->user_data;
    peer->add = kvti_xfer_new_locked(t, peer, KVT_OP_ADD, &options);
    *ret_peer = peer->id;
    *ret_xfer = peer->add->result.id;
    kvti_call_send_locked(t, call);
    kvti_keep_off_locked(t);
    kvti_unlock(t);
    return KVT_OK;
}
