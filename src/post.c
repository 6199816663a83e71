/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which part of which transfer goes to the engine next, and whether there is
 * room for it. Control thread alone.
 *
 * A link's light chunks have a window of their own: they wait neither for a
 * place among the heavy ones nor for their turn behind a long transfer.
 */
#include <stdlib.h>

#include "core.h"

/* Chunks posted in a turn before the control thread looks at events again. */
#define POSTS_PER_TURN 64
/* Of those that are claimed under one hold of mu. */
#define BATCH_MAX 32

/* ----------------------------------------------------------------- windows */

/* A link's own limit, where it has one, within that of the engine. */
static uint32_t limit(uint32_t own, uint32_t most)
{
    return own == 0 || own > most ? most : own;
}

uint32_t kvti_ctl_copies_max(const struct kvt_transport *t,
                             const struct kvti_link *link)
{
    return limit(link->job.copies, t->traits.chunk_copies);
}

/* Light ones do not wait for a place among the heavy. */
static bool has_room(const struct kvt_transport *t,
                     const struct kvti_link *link, enum kvti_class class)
{
    if (class == KVTI_LIGHT && t->traits.light > 0) {
        return link->light < limit(link->job.light, t->traits.light);
    }
    return link->outstanding - link->light <
           limit(link->job.window, t->traits.window);
}

static enum kvti_class next_class(const struct kvt_transport *t,
                                  const struct kvti_link *link)
{
    for (uint32_t i = 1; i <= KVTI_CLASSES; i++) {
        enum kvti_class class = (link->turn + i) % KVTI_CLASSES;

        if (!kvti_list_empty(&link->queues[class]) &&
            has_room(t, link, class)) {
            return class;
        }
    }
    return KVTI_CLASSES;
}

void kvti_ctl_link_kick(struct kvt_transport *t, struct kvti_link *link)
{
    if (link->state == KVTI_LINK_DRAINING) {
        kvti_ctl_peer_want(t, link->peer);
    } else if (link->state == KVTI_LINK_UP && kvti_list_empty(&link->ready) &&
               next_class(t, link) != KVTI_CLASSES) {
        kvti_list_append(&t->ready, &link->ready);
    }
}

/* ----------------------------------------------------------------- posting */

static struct kvti_chunk *new_chunk(struct kvt_transport *t,
                                    struct kvti_link *link,
                                    struct kvti_xfer *xfer)
{
    /* One item is one copy, or part of one. */
    uint64_t left = xfer->payload.count - xfer->cut.item;
    uint64_t most = kvti_ctl_copies_max(t, link);
    uint64_t room = left < most ? left : most;
    struct kvti_chunk *chunk = malloc(sizeof *chunk +
                                      room * sizeof chunk->copies[0]);

    if (chunk == NULL) {
        return NULL;
    }
    *chunk = (struct kvti_chunk){.conn = link->conn,
                                 .xfer = xfer,
                                 .state = KVT_DONE,
                                 .op = xfer->result.op,
                                 .outcome.state = KVT_DONE};
    kvti_list_init(&chunk->node);
    kvti_list_init(&chunk->core_node);
    kvti_list_init(&chunk->event_node);
    return chunk;
}

static void take_place(struct kvt_transport *t, struct kvti_link *link,
                       struct kvti_chunk *chunk)
{
    /* By its class, not its size: what waits for a place among the heavy must
     * take one. */
    chunk->light = link->turn == KVTI_LIGHT && t->traits.light > 0;
    link->outstanding++;
    if (chunk->light) {
        link->light++;
    } else {
        t->heavy++;
    }
}

void kvti_ctl_give_place(struct kvt_transport *t, struct kvti_link *link,
                         const struct kvti_chunk *chunk)
{
    link->outstanding--;
    if (chunk->light) {
        link->light--;
    } else {
        t->heavy--;
    }
}

/* See control.c. Light ones are reported by the control thread itself. */
static bool is_awaited(const struct kvt_transport *t,
                       const struct kvti_chunk *chunk)
{
    const struct kvti_xfer *xfer = chunk->xfer;
    const struct kvti_link *link = xfer->link;
    uint32_t window = limit(link->job.window, t->traits.window);
    uint32_t heavy = link->outstanding - link->light;

    return chunk->light || kvti_cut_at_end(&xfer->cut, &xfer->payload) ||
           heavy == window || heavy == window / 2;
}

/* Chunks that are cut and not posted yet. */
struct batch {
    struct kvti_chunk *chunks[BATCH_MAX];
    uint64_t merged[BATCH_MAX]; /* copies that cutting saved */
    bool mine[BATCH_MAX];       /* false: a caller's stop came first */
    size_t count;
};

/* See progress.c. */
static bool claim_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                         const struct kvti_chunk *chunk, uint64_t merged,
                         uint64_t now_ns)
{
    if (xfer->stop) {
        return false;
    }
    if (!xfer->claimed) {
        xfer->claimed = true;
        xfer->result.state = KVT_IN_PROGRESS;
        kvti_histogram_add(&t->stats.post_ns, now_ns - xfer->accepted_ns);
    }
    xfer->result.copies += chunk->count;
    t->stats.copies += chunk->count;
    t->stats.merged += merged;
    t->stats.chunks++;
    return true;
}

static void claim(struct kvt_transport *t, struct batch *batch)
{
    kvti_lock(t);
    /* Behind the lock: not before the last of them was accepted. */
    uint64_t now_ns = kvti_now_ns();

    for (size_t i = 0; i < batch->count; i++) {
        struct kvti_chunk *chunk = batch->chunks[i];

        batch->mine[i] = claim_locked(t, chunk->xfer, chunk, batch->merged[i],
                                      now_ns);
    }
    kvti_unlock(t);
}

/* attend() completes its transfer. */
static void discard(struct kvt_transport *t, struct kvti_chunk *chunk)
{
    struct kvti_xfer *xfer = chunk->xfer;
    struct kvti_link *link = xfer->link;

    kvti_list_remove(&xfer->queue_node);
    kvti_list_remove(&chunk->core_node);
    kvti_ctl_give_place(t, link, chunk);
    free(chunk);
    kvti_ctl_link_kick(t, link);
}

static void post_batch(struct kvt_transport *t, struct batch *batch)
{
    if (batch->count == 0) {
        return;
    }
    claim(t, batch);
    for (size_t i = 0; i < batch->count; i++) {
        struct kvti_chunk *chunk = batch->chunks[i];

        if (!batch->mine[i]) {
            discard(t, chunk);
            continue;
        }
        if (!chunk->light && t->heavy == 1) {
            /* Else the engine's threads that we wake here would run before the
             * caller who woke us does, and keep it in its call for
             * milliseconds. */
            (void)kvti_ctl_step_aside(t);
        }
        chunk->awaited = is_awaited(t, chunk);
        t->ops->post(t->engine, chunk);
    }
    batch->count = 0;
}

static void no_memory(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_lock(t);
    kvti_ctl_stop_locked(t, xfer, KVT_FAILED, KVT_ENOMEM, 0, KVT_SCOPE_REQUEST,
                         "no memory for the next part; nothing more was "
                         "posted");
    kvti_unlock(t);
    kvti_ctl_advance(t, xfer);
}

/* The next chunk of a link, into the batch. */
static void cut_one(struct kvt_transport *t, struct kvti_link *link,
                    struct batch *batch)
{
    struct kvti_xfer *xfer = kvti_container(link->queues[link->turn].next,
                                            struct kvti_xfer, queue_node);
    struct kvti_chunk *chunk = new_chunk(t, link, xfer);
    uint64_t merged = xfer->cut.merged;
    uint32_t share = link->job.share != 0 ? link->job.share : t->traits.share;
    uint64_t bytes_max = kvti_cut_share(&xfer->payload, &xfer->cut, share,
                                        t->traits.chunk_bytes);

    if (chunk == NULL) {
        post_batch(t, batch); /* an earlier part of it may be there */
        no_memory(t, xfer);
        return;
    }
    kvti_payload_cut(&xfer->payload, &xfer->cut, kvti_ctl_copies_max(t, link),
                     bytes_max, chunk);
    if (kvti_cut_at_end(&xfer->cut, &xfer->payload)) {
        kvti_list_remove(&xfer->queue_node);
    }
    kvti_list_append(&xfer->chunks, &chunk->core_node);
    take_place(t, link, chunk);
    batch->chunks[batch->count] = chunk;
    batch->merged[batch->count] = xfer->cut.merged - merged;
    batch->count++;
}

/* Light chunks are claimed together, a heavy one ends the batch. */
static bool is_full(const struct batch *batch)
{
    return batch->count == BATCH_MAX ||
           (batch->count > 0 && !batch->chunks[batch->count - 1]->light);
}

/* Round robin over the links that have work and room in their window. */
void kvti_ctl_post(struct kvt_transport *t)
{
    struct batch batch = {.count = 0};
    struct kvti_list *node;

    for (int i = 0; i < POSTS_PER_TURN; i++) {
        enum kvti_class class;
        struct kvti_link *link;

        node = kvti_list_take(&t->ready);
        if (node == NULL) {
            break;
        }
        link = kvti_container(node, struct kvti_link, ready);
        /* What was queued may have been stopped since. */
        class = next_class(t, link);
        if (class == KVTI_CLASSES) {
            continue;
        }
        link->turn = class;
        cut_one(t, link, &batch);
        if (is_full(&batch)) {
            post_batch(t, &batch);
        }
        kvti_ctl_link_kick(t, link);
    }
    post_batch(t, &batch);
}
