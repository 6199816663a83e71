/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a transfer gets from accepted to completed. Control thread alone.
 *
 *   submitted -> link->small or bulk -> chunks posted, window by window
 *             -> outcomes -> (notification) -> finished
 *
 * Before each chunk the transfer is claimed under mu, where a cancel would set
 * `stop`: so either the cancel comes first and the chunk is never posted, or
 * the chunk is counted as moving. kvti_ctl_advance() is the only place that
 * decides that a transfer is over: nothing left to post, and no posted chunk
 * without both FIN bits. The one other way out is the grace time: lost.
 *
 * A chunk whose transfer needs it no more (the peer's process is proven dead)
 * becomes an orphan: the engine may still hold it, so its memory stays until
 * the engine reports it final.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* Chunks posted in a turn before the control thread looks at events again. */
#define POSTS_PER_TURN 64

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void job_reported(struct kvt_transport *t, struct kvti_job *job);

struct kvti_job *kvti_ctl_job_new(uint32_t kind, void *owner, void *conn)
{
    struct kvti_job *job = calloc(1, sizeof *job);

    if (job != NULL) {
        kvti_list_init(&job->node);
        kvti_list_init(&job->event_node);
        kvti_list_init(&job->open_node);
        job->reported = job_reported;
        job->kind = kind;
        job->owner = owner;
        job->conn = conn;
        job->deadline_ns = KVTI_NEVER;
    }
    return job;
}

void kvti_ctl_job_free(struct kvti_job *job)
{
    kvti_buf_fini(&job->buf);
    free(job);
}

void kvti_ctl_hand(struct kvt_transport *t, struct kvti_job *job)
{
    if (t->engine_gone) {
        job->code = kvti_fail(&job->err, KVT_ECLOSED, "the engine is closed");
        job->reported(t, job);
        return;
    }
    kvti_list_append(&t->open_jobs, &job->open_node);
    t->ops->job(t->engine, job);
}

void kvti_ctl_flush(struct kvt_transport *t)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&t->outbox)) != NULL) {
        kvti_ctl_hand(t, kvti_container(node, struct kvti_job, node));
    }
}

static void start_grace(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_list_remove(&xfer->queue_node);
    if (xfer->grace_ns == KVTI_NEVER) {
        xfer->grace_ns = kvti_after(kvti_now_ns(), t->options.grace_ns);
        t->next_deadline_ns = sooner(t->next_deadline_ns, xfer->grace_ns);
    }
}

static void stop_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                        uint32_t state, int code, int engine_code,
                        uint32_t scope, const char *text)
{
    kvti_xfer_stop_locked(xfer, state, code, engine_code, scope, text);
    start_grace(t, xfer);
}

/* Out of the control thread's lists, but for the link's when it is lost. */
static void complete_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                            bool proven)
{
    kvti_list_remove(&xfer->queue_node);
    kvti_list_remove(&xfer->live);
    if (proven) {
        kvti_list_remove(&xfer->link_node);
        xfer->link = NULL;
    }
    if (xfer->job != NULL) {
        xfer->job->owner = NULL;
        xfer->job = NULL;
    }
    kvti_xfer_finish_locked(t, xfer, proven);
}

/* ---------------------------------------------------------------- advance */

static void show_final_locked(struct kvti_xfer *xfer)
{
    uint32_t fin = KVTI_FIN_BOTH;

    kvti_list_each(node, &xfer->chunks) {
        fin &= kvti_container(node, struct kvti_chunk, core_node)->fin;
    }
    if ((fin & KVTI_FIN_LOCAL) != 0) {
        xfer->result.flags |= KVT_LOCAL_FINAL;
    }
    if ((fin & KVTI_FIN_PEER) != 0) {
        xfer->result.flags |= KVT_PEER_FINAL;
    }
}

/* All data has landed: the notification goes out, and is waited for. */
static bool send_note_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_job *job;

    xfer->noted = true;
    job = kvti_ctl_job_new(KVTI_JOB_NOTIFY, xfer, xfer->link->conn);
    if (job == NULL ||
        kvti_buf_append(&job->buf, xfer->note, xfer->note_length) != KVT_OK) {
        if (job != NULL) {
            kvti_ctl_job_free(job);
        }
        xfer->result.code = KVT_ENOTIFY;
        kvti_format(xfer->result.text, sizeof xfer->result.text,
                    "the data is done; no memory for its notification");
        return false;
    }
    xfer->job = job;
    kvti_list_append(&t->outbox, &job->node);
    return true;
}

static void advance_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    bool transfer = xfer->result.op != KVT_OP_WARM_UP;

    if (kvti_xfer_finished(xfer)) {
        if (kvti_list_empty(&xfer->chunks)) {
            kvti_list_remove(&xfer->link_node);
            xfer->link = NULL;
            kvti_xfer_prove_locked(t, xfer);
        }
        return;
    }
    if (!xfer->stop && transfer &&
        !kvti_cut_at_end(&xfer->cut, &xfer->payload)) {
        return;
    }
    show_final_locked(xfer);
    if (!kvti_list_empty(&xfer->chunks)) {
        return;
    }
    if (!xfer->stop) {
        if (xfer->job != NULL) {
            return;
        }
        if (xfer->note != NULL && !xfer->noted && send_note_locked(t, xfer)) {
            return;
        }
    }
    complete_locked(t, xfer, true);
}

void kvti_ctl_advance(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_lock(t);
    advance_locked(t, xfer);
    kvti_unlock(t);
    kvti_ctl_flush(t);
}

/* ----------------------------------------------------------------- intake */

static void queue_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_link *link = xfer->link;
    bool small = xfer->payload.count <= t->traits.chunk_copies &&
                 xfer->payload.bytes <= t->traits.chunk_bytes;

    if (xfer->result.op == KVT_OP_WARM_UP) {
        xfer->job = kvti_ctl_job_new(KVTI_JOB_CONNECT, xfer, link->conn);
        if (xfer->job == NULL) {
            stop_locked(t, xfer, KVT_FAILED, KVT_ENOMEM, 0, KVT_SCOPE_REQUEST,
                        "no memory for the request");
            advance_locked(t, xfer);
            return;
        }
        xfer->claimed = true;
        xfer->job->deadline_ns = xfer->deadline_ns;
        kvti_list_append(&t->outbox, &xfer->job->node);
        return;
    }
    kvti_list_append(small ? &link->small : &link->bulk, &xfer->queue_node);
    kvti_ctl_link_kick(t, link);
}

static void take_in_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_link *link = xfer->peer->link;
    bool mine = link != NULL && link->generation == xfer->generation;

    kvti_list_append(&t->live, &xfer->live);
    t->next_deadline_ns = sooner(t->next_deadline_ns, xfer->deadline_ns);
    if (xfer->stop) {
        advance_locked(t, xfer);
    } else if (mine && link->state == KVTI_LINK_UP && !link->down) {
        xfer->link = link;
        kvti_list_append(&link->xfers, &xfer->link_node);
        queue_locked(t, xfer);
    } else {
        bool down = mine && link->down;

        stop_locked(t, xfer, down ? KVT_DISCONNECTED : KVT_CANCELLED,
                    down ? KVT_EDISCONNECTED : KVT_ECANCELED, 0, KVT_SCOPE_PEER,
                    down ? "the link broke before anything was posted"
                         : "the peer was removed, unloaded or reloaded "
                           "before anything was posted");
        advance_locked(t, xfer);
    }
}

void kvti_ctl_intake(struct kvt_transport *t)
{
    struct kvti_list *node;

    kvti_lock(t);
    while ((node = kvti_list_take(&t->submitted)) != NULL) {
        take_in_locked(t, kvti_container(node, struct kvti_xfer, intake));
    }
    kvti_unlock(t);
    kvti_ctl_flush(t);
}

/* Transfers that a caller stopped. */
void kvti_ctl_attend(struct kvt_transport *t)
{
    struct kvti_list *node;

    kvti_lock(t);
    while ((node = kvti_list_take(&t->attention)) != NULL) {
        struct kvti_xfer *xfer = kvti_container(node, struct kvti_xfer, attend);

        if (!kvti_xfer_finished(xfer) && kvti_list_empty(&xfer->intake)) {
            start_grace(t, xfer);
            advance_locked(t, xfer);
        }
    }
    kvti_unlock(t);
}

/* ---------------------------------------------------------------- posting */

static struct kvti_chunk *new_chunk(struct kvt_transport *t,
                                    struct kvti_link *link,
                                    struct kvti_xfer *xfer)
{
    struct kvti_chunk *chunk = malloc(
        sizeof *chunk + t->traits.chunk_copies * sizeof chunk->copies[0]);

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

/* Small transfers and long ones take turns; each kind first in, first out. */
static struct kvti_xfer *pick(struct kvti_link *link)
{
    bool bulk = !kvti_list_empty(&link->bulk) &&
                (link->turn_bulk || kvti_list_empty(&link->small));
    struct kvti_list *queue = bulk ? &link->bulk : &link->small;

    link->turn_bulk = !bulk;
    return kvti_container(queue->next, struct kvti_xfer, queue_node);
}

/* False when a caller's stop came first. */
static bool claim(struct kvt_transport *t, struct kvti_xfer *xfer,
                  const struct kvti_chunk *chunk, uint64_t merged)
{
    bool mine;

    kvti_lock(t);
    mine = !xfer->stop;
    if (mine) {
        if (!xfer->claimed) {
            xfer->claimed = true;
            xfer->result.state = KVT_IN_PROGRESS;
            kvti_histogram_add(&t->stats.post_ns,
                               kvti_now_ns() - xfer->accepted_ns);
        }
        xfer->result.copies += chunk->count;
        t->stats.copies += chunk->count;
        t->stats.merged += merged;
        t->stats.chunks++;
    }
    kvti_unlock(t);
    return mine;
}

static void post_one(struct kvt_transport *t, struct kvti_link *link)
{
    struct kvti_xfer *xfer = pick(link);
    struct kvti_chunk *chunk = new_chunk(t, link, xfer);
    uint64_t merged = xfer->cut.merged;

    if (chunk == NULL) {
        kvti_lock(t);
        stop_locked(t, xfer, KVT_FAILED, KVT_ENOMEM, 0, KVT_SCOPE_REQUEST,
                    "no memory for the next part; nothing more was posted");
        advance_locked(t, xfer);
        kvti_unlock(t);
        return;
    }
    kvti_payload_cut(&xfer->payload, &xfer->cut, t->traits.chunk_copies,
                     t->traits.chunk_bytes, chunk);
    if (!claim(t, xfer, chunk, xfer->cut.merged - merged)) {
        free(chunk);
        kvti_list_remove(&xfer->queue_node); /* attend() completes it */
        return;
    }
    if (kvti_cut_at_end(&xfer->cut, &xfer->payload)) {
        kvti_list_remove(&xfer->queue_node);
    }
    kvti_list_append(&xfer->chunks, &chunk->core_node);
    link->outstanding++;
    t->ops->post(t->engine, chunk);
}

/* Round robin over the links that have work and room in their window. */
void kvti_ctl_post(struct kvt_transport *t)
{
    struct kvti_list *node;

    for (int i = 0; i < POSTS_PER_TURN; i++) {
        struct kvti_link *link;

        node = kvti_list_take(&t->ready);
        if (node == NULL) {
            return;
        }
        link = kvti_container(node, struct kvti_link, ready);
        /* What was queued may have been stopped since. */
        if (!kvti_list_empty(&link->small) || !kvti_list_empty(&link->bulk)) {
            post_one(t, link);
            kvti_ctl_link_kick(t, link);
        }
    }
}

/* --------------------------------------------------------------- outcomes */

static uint32_t scope_of(uint32_t state)
{
    return state == KVT_DISCONNECTED ? KVT_SCOPE_PEER : KVT_SCOPE_REQUEST;
}

static void chunk_final_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                               struct kvti_chunk *chunk)
{
    struct kvti_peer *peer = xfer->peer;

    kvti_list_remove(&chunk->core_node);
    if (!kvti_xfer_finished(xfer)) {
        xfer->link->outstanding--;
    }
    if (chunk->state != KVT_DONE) {
        return;
    }
    xfer->result.bytes_done += chunk->bytes;
    if (chunk->op == KVT_OP_WRITE) {
        t->stats.bytes_written += chunk->bytes;
        peer->bytes_written += chunk->bytes;
    } else {
        t->stats.bytes_read += chunk->bytes;
        peer->bytes_read += chunk->bytes;
    }
    if (strcmp(peer->path, "local") == 0) {
        t->stats.bytes_local += chunk->bytes;
    } else {
        t->stats.bytes_nixl += chunk->bytes;
    }
}

void kvti_ctl_chunk(struct kvt_transport *t, struct kvti_chunk *chunk,
                    const struct kvti_outcome *outcome)
{
    struct kvti_xfer *xfer = chunk->xfer;
    struct kvti_link *link;
    /* A proven death adds bits of our own: the engine may not be done yet. */
    bool returned = outcome->fin == KVTI_FIN_BOTH;
    bool final;

    chunk->fin |= outcome->fin;
    final = chunk->fin == KVTI_FIN_BOTH;
    if (xfer == NULL) {
        if (returned) {
            kvti_list_remove(&chunk->core_node);
            free(chunk);
        }
        return;
    }
    link = xfer->link;
    kvti_lock(t);
    if (outcome->state != KVT_DONE && chunk->state == KVT_DONE) {
        chunk->state = outcome->state;
        if (!kvti_xfer_finished(xfer)) {
            stop_locked(t, xfer, outcome->state, outcome->code,
                        outcome->engine_code, scope_of(outcome->state),
                        outcome->text);
        }
    }
    if (final) {
        chunk_final_locked(t, xfer, chunk);
    }
    advance_locked(t, xfer);
    kvti_unlock(t);
    kvti_ctl_flush(t);
    if (link != NULL && outcome->state == KVT_DISCONNECTED && !link->down) {
        struct kvt_error why;

        kvti_fail(&why, KVT_EDISCONNECTED, "%s", outcome->text);
        kvti_ctl_link_event(t, link, true, false, &why);
    }
    if (returned) {
        free(chunk);
    } else if (final) {
        chunk->xfer = NULL;
        kvti_list_append(&t->orphans, &chunk->core_node);
    }
    if (link != NULL) {
        kvti_ctl_link_kick(t, link);
    }
}

/* A CONNECT, or the notification of a transfer. */
static void job_reported(struct kvt_transport *t, struct kvti_job *job)
{
    struct kvti_xfer *xfer = job->owner;

    kvti_lock(t);
    if (job->kind == KVTI_JOB_NOTIFY) {
        if (job->code == KVT_OK) {
            t->stats.notes_sent++;
        } else {
            t->stats.notes_failed++;
        }
    }
    if (xfer != NULL) {
        xfer->job = NULL;
        if (job->code != KVT_OK && job->kind == KVTI_JOB_NOTIFY) {
            /* Still done: the data has landed. */
            xfer->result.code = KVT_ENOTIFY;
            xfer->result.scope = KVT_SCOPE_REQUEST;
            kvti_format(xfer->result.text, sizeof xfer->result.text, "%s",
                        job->err.text);
        } else if (job->code != KVT_OK) {
            stop_locked(t, xfer, KVT_FAILED, job->code, 0, KVT_SCOPE_REQUEST,
                        job->err.text);
        }
        advance_locked(t, xfer);
    }
    kvti_unlock(t);
    kvti_ctl_job_free(job);
}

/* ------------------------------------------------------- stops and proofs */

void kvti_ctl_stop_link(struct kvt_transport *t, struct kvti_link *link,
                        uint32_t state, int code, uint32_t scope,
                        const char *text)
{
    kvti_lock(t);
    kvti_list_each(node, &link->xfers) {
        struct kvti_xfer *xfer = kvti_container(node, struct kvti_xfer,
                                                link_node);

        if (!kvti_xfer_finished(xfer)) {
            stop_locked(t, xfer, state, code, 0, scope, text);
            advance_locked(t, xfer);
        }
    }
    kvti_unlock(t);
}

/* Nobody waits for the chunk any more; the engine may still hold it. */
static void orphan(struct kvt_transport *t, struct kvti_xfer *xfer,
                   struct kvti_chunk *chunk)
{
    if (!kvti_xfer_finished(xfer)) {
        xfer->link->outstanding--;
    }
    chunk->xfer = NULL;
    kvti_list_remove(&chunk->core_node);
    kvti_list_append(&t->orphans, &chunk->core_node);
}

void kvti_ctl_prove_dead(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    uint32_t fin = KVTI_FIN_PEER;

    if (xfer->result.op == KVT_OP_WRITE) {
        fin |= t->traits.dead_fin;
    }
    kvti_lock(t);
    kvti_list_each(node, &xfer->chunks) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  core_node);

        if ((chunk->fin | fin) == KVTI_FIN_BOTH) {
            orphan(t, xfer, chunk);
        } else {
            chunk->fin |= fin;
        }
    }
    if (!kvti_xfer_finished(xfer)) {
        stop_locked(t, xfer, KVT_DISCONNECTED, KVT_EDISCONNECTED, 0,
                    KVT_SCOPE_PEER, "the peer's process is gone");
    }
    advance_locked(t, xfer);
    kvti_unlock(t);
}

void kvti_ctl_lose(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_link *link = xfer->link;
    bool proven = kvti_list_empty(&xfer->chunks);

    kvti_lock(t);
    kvti_list_each(node, &xfer->chunks) {
        link->outstanding--;
    }
    complete_locked(t, xfer, proven);
    kvti_unlock(t);
    if (!proven) {
        kvti_log(&t->logger, KVT_LOG_WARNING,
                 "a transfer is lost: its memory is quarantined");
    }
    if (link != NULL) {
        kvti_ctl_link_kick(t, link);
    }
}

void kvti_ctl_deadlines(struct kvt_transport *t, uint64_t now_ns)
{
    uint64_t next = KVTI_NEVER;

    if (now_ns < t->next_deadline_ns) {
        return;
    }
    kvti_list_each(node, &t->live) {
        struct kvti_xfer *xfer = kvti_container(node, struct kvti_xfer, live);
        bool over = false;
        uint64_t ends;

        kvti_lock(t);
        if (!xfer->stop && xfer->deadline_ns <= now_ns) {
            stop_locked(t, xfer, KVT_TIMED_OUT, KVT_ETIMEDOUT, 0,
                        KVT_SCOPE_REQUEST, "the deadline has passed");
            over = true;
        }
        ends = xfer->stop ? xfer->grace_ns : xfer->deadline_ns;
        kvti_unlock(t);
        if (xfer->grace_ns <= now_ns) {
            kvti_ctl_lose(t, xfer);
            continue;
        }
        next = sooner(next, ends);
        if (over) {
            kvti_ctl_advance(t, xfer);
        }
    }
    t->next_deadline_ns = next;
}
