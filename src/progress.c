/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a transfer gets from accepted to completed. Control thread alone.
 *
 *   submitted -> link->queues -> chunks posted, window by window
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

#include "core.h"

/* New transfers taken in at once, while callers wait for the lock. */
#define INTAKE_BATCH 32

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

void kvti_ctl_stop_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
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
        } else {
            kvti_ctl_await(t, xfer);
        }
        return;
    }
    if (!xfer->stop && transfer &&
        !kvti_cut_at_end(&xfer->cut, &xfer->payload)) {
        return;
    }
    show_final_locked(xfer);
    if (!kvti_list_empty(&xfer->chunks)) {
        kvti_ctl_await(t, xfer);
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

static enum kvti_class class_of(const struct kvt_transport *t,
                                const struct kvti_link *link,
                                const struct kvti_payload *payload)
{
    if (kvti_is_light(payload->count, payload->bytes)) {
        return KVTI_LIGHT;
    }
    return payload->count <= kvti_ctl_copies_max(t, link) &&
                   payload->bytes <= t->traits.chunk_bytes
               ? KVTI_SMALL
               : KVTI_BULK;
}

static void queue_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_link *link = xfer->link;
    if (xfer->result.op == KVT_OP_WARM_UP) {
        xfer->job = kvti_ctl_job_new(KVTI_JOB_CONNECT, xfer, link->conn);
        if (xfer->job == NULL) {
            kvti_ctl_stop_locked(t, xfer, KVT_FAILED, KVT_ENOMEM, 0,
                                 KVT_SCOPE_REQUEST,
                                 "no memory for the request");
            advance_locked(t, xfer);
            return;
        }
        xfer->claimed = true;
        xfer->job->deadline_ns = xfer->deadline_ns;
        kvti_list_append(&t->outbox, &xfer->job->node);
        return;
    }
    kvti_list_append(&link->queues[class_of(t, link, &xfer->payload)],
                     &xfer->queue_node);
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

        kvti_ctl_stop_locked(
            t, xfer, down ? KVT_DISCONNECTED : KVT_CANCELLED,
            down ? KVT_EDISCONNECTED : KVT_ECANCELED, 0, KVT_SCOPE_PEER,
            down ? "the link broke before anything was posted"
                 : "the peer was removed, unloaded or reloaded "
                   "before anything was posted");
        advance_locked(t, xfer);
    }
}

void kvti_ctl_intake(struct kvt_transport *t)
{
    struct kvti_list *node = NULL;

    do {
        kvti_lock(t);
        for (int i = 0; i < INTAKE_BATCH; i++) {
            node = kvti_list_take(&t->submitted);
            if (node == NULL) {
                break;
            }
            take_in_locked(t, kvti_container(node, struct kvti_xfer, intake));
        }
        kvti_unlock(t);
        kvti_ctl_flush(t);
    } while (node != NULL);
}

/* Transfers that a caller stopped. */
void kvti_ctl_attend(struct kvt_transport *t)
{
    struct kvti_list *node;

    if (!atomic_load(&t->attention_due)) {
        return;
    }
    kvti_lock(t);
    atomic_store(&t->attention_due, false);
    while ((node = kvti_list_take(&t->attention)) != NULL) {
        struct kvti_xfer *xfer = kvti_container(node, struct kvti_xfer, attend);

        if (!kvti_xfer_finished(xfer) && kvti_list_empty(&xfer->intake)) {
            start_grace(t, xfer);
            advance_locked(t, xfer);
        }
    }
    kvti_unlock(t);
}

/* --------------------------------------------------------------- outcomes */

static uint32_t scope_of(uint32_t state)
{
    return state == KVT_DISCONNECTED ? KVT_SCOPE_PEER : KVT_SCOPE_REQUEST;
}

static void chunk_final_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                               struct kvti_chunk *chunk)
{
    kvti_list_remove(&chunk->core_node);
    if (!kvti_xfer_finished(xfer)) {
        kvti_ctl_give_place(t, xfer->link, chunk);
    }
    if (chunk->state != KVT_DONE) {
        return;
    }
    xfer->result.bytes_done += chunk->bytes;
    kvti_stats_moved_locked(t, xfer, chunk);
}

/* A chunk of a transfer that still wants it. */
static void chunk_back_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                              struct kvti_chunk *chunk,
                              const struct kvti_outcome *outcome)
{
    if (outcome->state != KVT_DONE && chunk->state == KVT_DONE) {
        chunk->state = outcome->state;
        if (!kvti_xfer_finished(xfer)) {
            kvti_ctl_stop_locked(t, xfer, outcome->state, outcome->code,
                                 outcome->engine_code, scope_of(outcome->state),
                                 outcome->text);
        }
    }
    if (chunk->fin == KVTI_FIN_BOTH) {
        chunk_final_locked(t, xfer, chunk);
    }
    advance_locked(t, xfer);
}

/* What is left to do for a report when no lock is held. `link` is that of the
 * transfer, if it still had one. */
static void report_done(struct kvt_transport *t,
                        const struct kvti_report *report,
                        struct kvti_link *link)
{
    const struct kvti_outcome *outcome = &report->outcome;
    struct kvti_chunk *chunk = report->chunk;

    if (link != NULL && outcome->state == KVT_DISCONNECTED && !link->down) {
        struct kvt_error why;

        kvti_fail(&why, KVT_EDISCONNECTED, "%s", outcome->text);
        kvti_ctl_link_event(t, link, true, false, &why);
    }
    /* A proven death adds bits of our own: the engine may not be done yet. */
    if (outcome->fin == KVTI_FIN_BOTH) {
        kvti_list_remove(&chunk->core_node);
        free(chunk);
    } else if (chunk->fin == KVTI_FIN_BOTH && chunk->xfer != NULL) {
        chunk->xfer = NULL;
        kvti_list_append(&t->orphans, &chunk->core_node);
    }
    if (link != NULL) {
        kvti_ctl_link_kick(t, link);
    }
}

void kvti_ctl_chunks(struct kvt_transport *t, struct kvti_report *reports,
                     size_t count)
{
    struct kvti_link *links[KVTI_REPORTS_MAX] = {NULL};

    kvti_assert(count <= KVTI_REPORTS_MAX);
    kvti_lock(t);
    for (size_t i = 0; i < count; i++) {
        struct kvti_chunk *chunk = reports[i].chunk;
        struct kvti_xfer *xfer = chunk->xfer;

        chunk->fin |= reports[i].outcome.fin;
        if (xfer != NULL) {
            links[i] = xfer->link;
            chunk_back_locked(t, xfer, chunk, &reports[i].outcome);
        }
    }
    kvti_unlock(t);
    kvti_ctl_flush(t);
    for (size_t i = 0; i < count; i++) {
        report_done(t, &reports[i], links[i]);
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
            kvti_ctl_stop_locked(t, xfer, KVT_FAILED, job->code, 0,
                                 KVT_SCOPE_REQUEST, job->err.text);
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
            kvti_ctl_stop_locked(t, xfer, state, code, 0, scope, text);
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
        kvti_ctl_give_place(t, xfer->link, chunk);
    }
    chunk->xfer = NULL;
    chunk->fin = KVTI_FIN_BOTH; /* an engine may ask at its close */
    kvti_list_remove(&chunk->core_node);
    kvti_list_append(&t->orphans, &chunk->core_node);
}

/* What the proven death of the peer's process proves of a chunk. NIXL sends
 * to nobody, whatever an engine's other way is like. */
static uint32_t dead_fin(const struct kvt_transport *t,
                         const struct kvti_chunk *chunk)
{
    if (chunk->op != KVT_OP_WRITE) {
        return KVTI_FIN_PEER;
    }
    return chunk->path == KVTI_PATH_NIXL ? KVTI_FIN_BOTH
                                         : KVTI_FIN_PEER | t->traits.dead_fin;
}

void kvti_ctl_prove_dead(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_lock(t);
    kvti_list_each(node, &xfer->chunks) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  core_node);

        chunk->fin |= dead_fin(t, chunk);
        if (chunk->fin == KVTI_FIN_BOTH) {
            orphan(t, xfer, chunk);
        }
    }
    if (!kvti_xfer_finished(xfer)) {
        kvti_ctl_stop_locked(t, xfer, KVT_DISCONNECTED, KVT_EDISCONNECTED, 0,
                             KVT_SCOPE_PEER, "the peer's process is gone");
    }
    advance_locked(t, xfer);
    kvti_unlock(t);
}

void kvti_ctl_lose(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_link *link = xfer->link;
    bool proven = kvti_list_empty(&xfer->chunks);

    if (!proven) { /* before a caller that is told may end the process */
        kvti_log(&t->logger, KVT_LOG_WARNING,
                 "a transfer is lost: its memory is quarantined");
    }
    kvti_lock(t);
    kvti_list_each(node, &xfer->chunks) {
        const struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                        core_node);

        kvti_ctl_give_place(t, link, chunk);
    }
    complete_locked(t, xfer, proven);
    kvti_unlock(t);
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
            kvti_ctl_stop_locked(t, xfer, KVT_TIMED_OUT, KVT_ETIMEDOUT, 0,
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
