/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's life in the engine. Control thread alone, but where mu is named.
 *
 *   caller sets peer->want (and `fresh` for a new load) under mu, then asks
 *   for a step; the step compares what is wanted with the link that exists and
 *   takes the one next action:
 *
 *   no link, loaded wanted   -> LOAD          link LOADING
 *   LOAD reported            -> layouts are checked, the peer is published
 *   link not wanted any more -> its transfers stop       link DRAINING
 *   no open chunk but lost   -> UNLOAD        link UNLOADING
 *   UNLOAD reported          -> no link: the next step begins
 *
 * So there is one link at most, an older generation is out of the engine
 * before a newer one loads, and an add waits for the removed peer of the same
 * name (its predecessor).
 */
#include <stdlib.h>

#include "core.h"

void kvti_ctl_peer_want(struct kvt_transport *t, struct kvti_peer *peer)
{
    /* A gone peer may be freed by any thread: never back into the list. */
    if (!peer->gone && kvti_list_empty(&peer->step)) {
        kvti_list_append(&t->steps, &peer->step);
    }
}

static struct kvti_link *new_link(struct kvti_peer *peer, uint64_t generation)
{
    struct kvti_link *link = calloc(1, sizeof *link);

    if (link == NULL) {
        return NULL;
    }
    link->peer = peer;
    link->generation = generation;
    link->state = KVTI_LINK_LOADING;
    kvti_list_init(&link->xfers);
    for (size_t i = 0; i < KVTI_CLASSES; i++) {
        kvti_list_init(&link->queues[i]);
    }
    kvti_list_init(&link->ready);
    kvti_list_init(&link->event_node);
    kvti_list_init(&link->job.node);
    kvti_list_init(&link->job.event_node);
    kvti_list_init(&link->job.open_node);
    link->job.owner = link;
    link->job.link = link;
    link->job.deadline_ns = KVTI_NEVER;
    return link;
}

static void free_link(struct kvt_transport *t, struct kvti_link *link)
{
    /* What is still here is lost: it keeps its chunks, not its link. */
    kvti_list_each(node, &link->xfers) {
        kvti_container(node, struct kvti_xfer, link_node)->link = NULL;
        kvti_list_remove(node);
    }
    kvti_list_remove(&link->ready);
    pthread_mutex_lock(&t->ev_mu);
    kvti_list_remove(&link->event_node);
    pthread_mutex_unlock(&t->ev_mu);
    free(link);
}

/* ------------------------------------------------------------------- load */

static void swap_metadata_locked(struct kvt_transport *t,
                                 struct kvti_peer *peer)
{
    if (peer->next_blob == NULL) {
        return;
    }
    kvti_names_remove(&t->agent_names, &peer->agent);
    kvti_md_fini(&peer->md);
    free(peer->blob);
    peer->blob = peer->next_blob;
    peer->md = peer->next_md;
    peer->next_blob = NULL;
    peer->next_md = (struct kvti_md){0};
    if (!peer->removed) {
        kvti_name_borrow(&peer->agent, 0, peer->md.agent_name);
        kvti_names_add(&t->agent_names, &peer->agent);
    }
}

/* The load is over without a link: the waiting call fails. */
static void load_failed_locked(struct kvt_transport *t, struct kvti_peer *peer,
                               int code, const struct kvt_error *err)
{
    kvti_peer_state_locked(t, peer, KVT_PEER_UNLOADED, code, err->text);
    kvti_peer_settle_locked(t, peer, code, err);
    if (!peer->loaded_once && !peer->removed) {
        kvti_peer_detach_locked(t, peer); /* it never existed */
    }
    kvti_ctl_peer_want(t, peer);
}

static void loaded(struct kvt_transport *t, struct kvti_job *job);

static void begin_load(struct kvt_transport *t, struct kvti_peer *peer)
{
    struct kvti_link *link;
    struct kvt_error err;

    kvti_lock(t);
    swap_metadata_locked(t, peer);
    peer->fresh = false;
    link = new_link(peer, peer->generation + 1);
    if (link == NULL) {
        kvti_fail(&err, KVT_ENOMEM, "out of memory while loading the peer");
        load_failed_locked(t, peer, KVT_ENOMEM, &err);
        kvti_unlock(t);
        return;
    }
    peer->generation = link->generation;
    kvti_unlock(t);
    peer->link = link;
    link->job.kind = KVTI_JOB_LOAD;
    link->job.reported = loaded;
    link->job.generation = (uint32_t)link->generation;
    link->job.md = &peer->md;
    kvti_ctl_hand(t, &link->job);
}

/* Every layout over the peer must fit the regions that were loaded, and the
 * engine must agree, before any of them can be used again. */
static int check_layouts(struct kvt_transport *t, struct kvti_peer *peer,
                         struct kvt_error *err)
{
    int code = KVT_OK;

    kvti_lock(t);
    kvti_list_each(node, &peer->layouts) {
        struct kvti_entry *entry = kvti_container(node, struct kvti_entry,
                                                  node);
        struct kvt_error why;

        code = kvti_layout_check(entry->layout, &peer->md.regions, &why);
        if (code == KVT_OK && t->ops->layout != NULL) {
            code = t->ops->layout(t->engine, peer->link->conn, entry->name.text,
                                  &why);
        }
        if (code != KVT_OK) {
            kvti_fail(err, code,
                      "layout \"%.60s\" does not fit the reloaded peer "
                      "(%.70s): drop it, reload, prepare it anew; or add the "
                      "peer again",
                      entry->name.text, why.text);
            break;
        }
    }
    kvti_unlock(t);
    return code;
}

/* Whether no newer call came while this link was loaded. */
static bool is_wanted_locked(const struct kvti_peer *peer,
                             const struct kvti_link *link)
{
    return peer->want == KVTI_WANT_LOADED && !peer->fresh &&
           peer->generation == link->generation;
}

/* In the same critical section as the last look at what is wanted. */
static void publish_locked(struct kvt_transport *t, struct kvti_peer *peer)
{
    struct kvti_link *link = peer->link;

    if (peer->loaded_once) {
        t->stats.peer_reloads++;
    } else {
        t->stats.peer_adds++;
    }
    peer->loaded_once = true;
    kvti_format(peer->path, sizeof peer->path, "%s", link->job.path);
    kvti_peer_state_locked(t, peer, KVT_PEER_LOADED, KVT_OK, link->job.text);
    kvti_peer_settle_locked(t, peer, KVT_OK, NULL);
}

static void loaded(struct kvt_transport *t, struct kvti_job *job)
{
    struct kvti_link *link = job->owner;
    struct kvti_peer *peer = link->peer;
    struct kvt_error err;
    int code = link->job.code;
    bool wanted;

    if (code != KVT_OK) {
        err = link->job.err;
        peer->link = NULL;
        free_link(t, link);
        kvti_lock(t);
        if (peer->want == KVTI_WANT_LOADED && !peer->fresh) {
            load_failed_locked(t, peer, code, &err);
        }
        kvti_unlock(t);
        kvti_ctl_peer_want(t, peer);
        return;
    }
    link->conn = link->job.conn;
    link->state = KVTI_LINK_UP;
    kvti_lock(t);
    wanted = is_wanted_locked(peer, link);
    kvti_unlock(t);
    if (!wanted) {
        kvti_ctl_peer_want(t, peer);
        return;
    }
    code = check_layouts(t, peer, &err);
    if (code == KVT_OK && link->dead) {
        code = kvti_fail(&err, KVT_EDISCONNECTED,
                         "the peer's process ended while it was loaded");
    }
    kvti_lock(t);
    if (!is_wanted_locked(peer, link)) {
        kvti_ctl_peer_want(t, peer);
    } else if (code == KVT_OK) {
        publish_locked(t, peer);
    } else {
        peer->want = KVTI_WANT_UNLOADED;
        load_failed_locked(t, peer, code, &err);
    }
    kvti_unlock(t);
}

/* ----------------------------------------------------------------- unload */

static void unloaded(struct kvt_transport *t, struct kvti_job *job)
{
    struct kvti_link *link = job->owner;
    struct kvti_peer *peer = link->peer;

    peer->link = NULL;
    free_link(t, link);
    kvti_ctl_peer_want(t, peer);
}

static void drain(struct kvt_transport *t, struct kvti_peer *peer)
{
    struct kvti_link *link = peer->link;

    if (link->state == KVTI_LINK_UP) {
        link->state = KVTI_LINK_DRAINING;
        kvti_list_remove(&link->ready);
        kvti_ctl_stop_link(t, link, KVT_CANCELLED, KVT_ECANCELED,
                           KVT_SCOPE_PEER,
                           "the peer was removed, unloaded or reloaded");
    }
    if (link->state == KVTI_LINK_DRAINING && link->outstanding == 0) {
        link->state = KVTI_LINK_UNLOADING;
        link->job.kind = KVTI_JOB_UNLOAD;
        link->job.reported = unloaded;
        link->job.conn = link->conn;
        kvti_ctl_hand(t, &link->job);
    }
}

/* ------------------------------------------------------------------- step */

/* The peer is out of the engine for good. */
static void gone(struct kvt_transport *t, struct kvti_peer *peer)
{
    kvti_lock(t);
    peer->gone = true;
    t->peers_engine--;
    if (peer->successor != NULL) {
        peer->successor->predecessor = NULL;
        kvti_ctl_peer_want(t, peer->successor);
        peer->successor = NULL;
        peer->users--;
    }
    peer->users++;
    kvti_peer_unuse_locked(t, peer);
    kvti_unlock(t);
}

static void step(struct kvt_transport *t, struct kvti_peer *peer)
{
    uint32_t want;
    bool fresh;
    bool blocked;

    kvti_lock(t);
    want = peer->want;
    fresh = peer->fresh;
    blocked = peer->predecessor != NULL;
    kvti_unlock(t);
    if (peer->link != NULL) {
        if (want != KVTI_WANT_LOADED || fresh) {
            drain(t, peer);
        }
        return;
    }
    if (want == KVTI_WANT_REMOVED) {
        if (!blocked && !peer->gone) {
            gone(t, peer);
        }
    } else if (want == KVTI_WANT_LOADED && fresh) {
        if (!blocked) {
            begin_load(t, peer);
        }
    } else if (want == KVTI_WANT_UNLOADED) {
        kvti_lock(t);
        kvti_peer_settle_locked(t, peer, KVT_OK, NULL);
        kvti_unlock(t);
    }
}

void kvti_ctl_steps(struct kvt_transport *t)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&t->steps)) != NULL) {
        step(t, kvti_container(node, struct kvti_peer, step));
    }
}

/* ----------------------------------------------------------------- events */

static void link_broke(struct kvt_transport *t, struct kvti_link *link,
                       const struct kvt_error *why)
{
    struct kvti_peer *peer = link->peer;

    link->down = true;
    kvti_lock(t);
    t->stats.peer_disconnects++;
    if (peer->state == KVT_PEER_LOADED) {
        kvti_peer_state_locked(t, peer, KVT_PEER_DISCONNECTED,
                               KVT_EDISCONNECTED, why->text);
    }
    kvti_unlock(t);
    kvti_ctl_stop_link(t, link, KVT_DISCONNECTED, KVT_EDISCONNECTED,
                       KVT_SCOPE_PEER, why->text);
}

void kvti_ctl_link_event(struct kvt_transport *t, struct kvti_link *link,
                         bool down, bool dead, const struct kvt_error *err)
{
    if ((down || dead) && !link->down) {
        link_broke(t, link, err);
    }
    if (dead && !link->dead) {
        link->dead = true;
        kvti_list_each(node, &link->xfers) {
            kvti_ctl_prove_dead(
                t, kvti_container(node, struct kvti_xfer, link_node));
        }
    }
    kvti_ctl_link_kick(t, link);
}

void kvti_ctl_peer_dead(struct kvt_transport *t, struct kvti_peer *peer)
{
    struct kvt_error why;
    uint32_t used;

    kvti_fail(&why, KVT_EDISCONNECTED,
              "the caller confirmed that the peer's process is gone");
    if (peer->link != NULL && peer->link->state != KVTI_LINK_LOADING) {
        kvti_ctl_link_event(t, peer->link, true, true, &why);
    }
    /* Lost transfers of links that are no more. */
    kvti_lock(t);
    used = t->slots_used;
    kvti_unlock(t);
    for (uint32_t i = 0; i < used; i++) {
        struct kvti_xfer *xfer = &t->slots[i];
        bool lost;

        kvti_lock(t);
        lost = xfer->result.id != 0 && xfer->peer == peer &&
               xfer->result.state == KVT_LOST &&
               (xfer->result.flags & KVT_QUIESCENT) == 0;
        kvti_unlock(t);
        if (lost) {
            kvti_ctl_prove_dead(t, xfer);
        }
    }
}
