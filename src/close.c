/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a transport, as steps that the control thread takes turn by turn.
 * Each step has a share of the caller's time, so that the whole returns by the
 * deadline whatever the engine does:
 *
 *   to 1/2   DRAIN    work in flight finishes
 *   to 3/4   STOP     the rest is stopped, posted parts run out; then lost
 *   to 7/8   UNLOAD   peers leave the engine
 *   to 15/16 MEMORY   same-host peers are shut out of our memory
 *            END      the engine stops its threads and is gone
 */
#include <errno.h>
#include <stdlib.h>

#include "core.h"

/* How long a thread has to come back when the engine could not stop. */
#define STUCK_NS UINT64_C(200000000)

/* The end of a step's share, in sixteenths of the caller's time. */
static uint64_t share(const struct kvt_transport *t, uint64_t sixteenths)
{
    uint64_t begin = t->close_begin_ns;
    uint64_t end = t->close_call->deadline_ns;

    return end <= begin ? begin : begin + (end - begin) / 16 * sixteenths;
}

static void stop_all(struct kvt_transport *t)
{
    struct kvt_error err;

    kvti_fail(&err, KVT_ECLOSED, "the transport is being closed");
    kvti_list_each(node, &t->live) {
        struct kvti_xfer *xfer = kvti_container(node, struct kvti_xfer, live);

        kvti_lock(t);
        kvti_xfer_stop_locked(xfer, KVT_CANCELLED, KVT_ECLOSED, 0,
                              KVT_SCOPE_TRANSPORT, err.text);
        kvti_list_remove(&xfer->queue_node);
        kvti_unlock(t);
        kvti_ctl_advance(t, xfer);
    }
    kvti_lock(t);
    kvti_list_each(node, &t->peer_list) {
        kvti_peer_settle_locked(t, kvti_container(node, struct kvti_peer, node),
                                KVT_ECLOSED, &err);
    }
    kvti_unlock(t);
}

static void lose_all(struct kvt_transport *t)
{
    kvti_list_each(node, &t->live) {
        kvti_ctl_lose(t, kvti_container(node, struct kvti_xfer, live));
    }
}

static void unload_all(struct kvt_transport *t)
{
    kvti_lock(t);
    kvti_list_each(node, &t->peer_list) {
        struct kvti_peer *peer = kvti_container(node, struct kvti_peer, node);

        if (!peer->removed) {
            kvti_peer_detach_locked(t, peer);
        }
        kvti_ctl_peer_want(t, peer);
    }
    kvti_unlock(t);
}

static bool all_gone(struct kvt_transport *t)
{
    bool gone;

    kvti_lock(t);
    gone = t->peers_engine == 0;
    kvti_unlock(t);
    return gone;
}

/* --------------------------------------------------------------- memory */

static void dropped(struct kvt_transport *t, struct kvti_call *call)
{
    kvti_call_done_locked(t, call, call->job.code, &call->job.err);
}

/* Takes back all memory; *t->drop_call says when that is done. */
static bool drop_memory(struct kvt_transport *t)
{
    struct kvti_call *call = kvti_call_new(KVTI_CALL_JOB, NULL);
    size_t count = t->regions.count;

    if (call == NULL) {
        return false;
    }
    call->mems = calloc(count + 1, sizeof *call->mems);
    call->job.mems = calloc(count + 1, sizeof(struct kvti_mem *));
    if (call->mems == NULL || call->job.mems == NULL) {
        free(call->mems);
        free(call->job.mems);
        free(call);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        call->mems[i] = t->regions.mems[i];
        call->job.mems[i] = &call->mems[i];
    }
    call->job.kind = KVTI_JOB_MEM_DROP;
    call->job.mem_count = count;
    call->job.deadline_ns = share(t, 15);
    call->job.reported = kvti_ctl_call_reported;
    call->finish = dropped;
    t->drop_call = call;
    kvti_ctl_hand(t, &call->job);
    return true;
}

static void end_drop(struct kvt_transport *t)
{
    struct kvti_call *call = t->drop_call;

    if (call != NULL && call->done) {
        kvti_lock(t);
        kvti_call_unref_locked(t, call);
        kvti_call_unref_locked(t, call);
        kvti_unlock(t);
    }
    t->drop_call = NULL;
}

/* ------------------------------------------------------------------- end */

/* What an engine or a stuck thread may touch for ever. It is kept in sight, so
 * that a leak checker, or a person with a debugger, sees that it was meant. */
static pthread_mutex_t graveyard_mu = PTHREAD_MUTEX_INITIALIZER;
static struct kvti_list graveyard = {&graveyard, &graveyard};

void kvti_bury(struct kvti_list *node)
{
    pthread_mutex_lock(&graveyard_mu);
    if (kvti_list_empty(node)) {
        kvti_list_append(&graveyard, node);
    }
    pthread_mutex_unlock(&graveyard_mu);
}

static void end_chunks(struct kvti_list *chunks, bool leaked)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(chunks)) != NULL) {
        if (leaked) {
            kvti_bury(node);
        } else {
            free(kvti_container(node, struct kvti_chunk, core_node));
        }
    }
}

/* What no report will end any more. */
static void end_all_chunks(struct kvt_transport *t, bool leaked)
{
    end_chunks(&t->orphans, leaked);
    for (uint32_t i = 0; i < t->slots_used; i++) {
        if (t->slots[i].result.id != 0) {
            end_chunks(&t->slots[i].chunks, leaked);
        }
    }
}

/* The engine is gone and has not answered these: it never will. */
static void end_jobs(struct kvt_transport *t, bool leaked)
{
    struct kvti_list *node;

    kvti_ctl_take_events(t);
    while ((node = kvti_list_take(&t->open_jobs)) != NULL) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, open_node);

        if (leaked) {
            kvti_bury(node);
        } else {
            job->code = kvti_fail(&job->err, KVT_ECLOSED,
                                  "the transport was closed meanwhile");
            job->reported(t, job);
        }
    }
}

static void forget_links_locked(struct kvt_transport *t, bool leaked)
{
    kvti_list_each(node, &t->peer_list) {
        struct kvti_peer *peer = kvti_container(node, struct kvti_peer, node);

        if (!leaked) {
            free(peer->link);
        } else if (peer->link != NULL) {
            peer->users++; /* a load may still be reading its metadata */
        }
        peer->link = NULL;
        if (peer->predecessor != NULL) {
            peer->predecessor->successor = NULL;
            peer->predecessor->users--;
            peer->predecessor = NULL;
        }
    }
    kvti_list_each(node, &t->peer_list) {
        struct kvti_peer *peer = kvti_container(node, struct kvti_peer, node);

        kvti_list_remove(&peer->step);
        peer->gone = true;
        peer->users++;
        kvti_peer_unuse_locked(t, peer);
    }
}

/* Calls that came too late, and those whose job was never answered. */
static void refuse_rest_locked(struct kvt_transport *t)
{
    struct kvti_list *node;
    struct kvt_error err;

    kvti_fail(&err, KVT_ECLOSED, "the transport was closed meanwhile");
    while ((node = kvti_list_take(&t->calls)) != NULL) {
        struct kvti_call *call = kvti_container(node, struct kvti_call, node);

        if (!call->done) {
            kvti_call_done_locked(t, call, KVT_ECLOSED, &err);
        }
        kvti_call_unref_locked(t, call);
    }
    t->memory_turn = false;
}

static void end(struct kvt_transport *t)
{
    struct kvti_call *call = t->close_call;
    int drop_code = t->drop_call == NULL ? KVT_OK
                    : t->drop_call->done ? t->drop_call->code
                                         : KVT_EBUSY;
    struct kvt_error drop_err;
    bool leaked;

    kvti_fail(&drop_err, KVT_EBUSY, "the engine did not answer");
    if (t->drop_call != NULL && t->drop_call->done) {
        drop_err = t->drop_call->err;
    }
    leaked = t->ops->close(t->engine, call->deadline_ns) != KVT_OK;
    t->engine_gone = true;
    end_jobs(t, leaked);
    end_drop(t);
    kvti_lock(t);
    end_all_chunks(t, leaked);
    forget_links_locked(t, leaked);
    kvti_layouts_drop_locked(t);
    refuse_rest_locked(t);
    t->engine_leaked = leaked;
    t->close_code = KVT_OK;
    if (t->stats.quarantined > 0) {
        t->close_code = kvti_fail(
            &t->close_err, KVT_EBUSY,
            "%llu transfers are not quiescent: their memory must stay mapped "
            "for the life of the process",
            (unsigned long long)t->stats.quarantined);
    } else if (drop_code != KVT_OK) {
        t->close_code = kvti_fail(
            &t->close_err, KVT_EBUSY,
            "a peer may still write here, keep the registered memory mapped: "
            "%.140s",
            drop_err.text);
    } else if (leaked) {
        t->close_code = kvti_fail(
            &t->close_err, KVT_EBUSY,
            "the engine did not stop: keep the registered memory mapped for "
            "the life of the process");
    }
    if (t->close_code == KVT_OK) {
        kvti_regions_fini(&t->regions); /* else some must stay mapped */
    }
    t->phase = KVTI_CLOSED;
    t->quit = true;
    kvti_call_done_locked(t, call, t->close_code, &t->close_err);
    kvti_call_unref_locked(t, call);
    kvti_unlock(t);
}

/* ------------------------------------------------------------------ steps */

/* One step, if its time has come. False: not yet. */
static bool take_step(struct kvt_transport *t, uint64_t now_ns)
{
    switch (t->close_step) {
    case KVTI_CLOSE_DRAIN:
        if (!kvti_list_empty(&t->live) && now_ns < share(t, 8)) {
            return false;
        }
        stop_all(t);
        t->close_step = KVTI_CLOSE_STOP;
        return true;
    case KVTI_CLOSE_STOP:
        if (!kvti_list_empty(&t->live) && now_ns < share(t, 12)) {
            return false;
        }
        lose_all(t);
        unload_all(t);
        t->close_step = KVTI_CLOSE_UNLOAD;
        return true;
    case KVTI_CLOSE_UNLOAD:
        kvti_ctl_steps(t);
        if (!all_gone(t) && now_ns < share(t, 14)) {
            return false;
        }
        t->close_step = drop_memory(t) ? KVTI_CLOSE_MEMORY : KVTI_CLOSE_END;
        return true;
    case KVTI_CLOSE_MEMORY:
        if (!t->drop_call->done && now_ns < share(t, 15)) {
            return false;
        }
        t->close_step = KVTI_CLOSE_END;
        return true;
    default:
        end(t);
        return false;
    }
}

uint64_t kvti_ctl_close_turn(struct kvt_transport *t, uint64_t now_ns)
{
    static const uint64_t shares[] = {
        [KVTI_CLOSE_DRAIN] = 8,   [KVTI_CLOSE_STOP] = 12,
        [KVTI_CLOSE_UNLOAD] = 14, [KVTI_CLOSE_MEMORY] = 15,
        [KVTI_CLOSE_END] = 16,
    };

    while (take_step(t, now_ns)) {
    }
    return t->quit ? KVTI_NEVER : share(t, shares[t->close_step]);
}

static int wait_closed_locked(struct kvt_transport *t, uint64_t deadline_ns,
                              struct kvt_error *err)
{
    while (t->phase != KVTI_CLOSED && kvti_wait_locked(t, deadline_ns)) {
    }
    if (t->phase != KVTI_CLOSED) {
        return kvti_fail(err, KVT_EBUSY,
                         "the control thread did not come back: all "
                         "registered memory must stay mapped");
    }
    if (t->close_code != KVT_OK && err != NULL) {
        *err = t->close_err;
    }
    return t->close_code;
}

int kvt_close(kvt_transport *t, uint64_t timeout_ns, struct kvt_error *err)
{
    uint64_t deadline;
    bool join;
    int code = kvti_guard(t, NULL);

    if (code == KVT_EFORKED) {
        return KVT_OK;
    }
    if (code != KVT_OK) {
        return kvti_guard(t, err);
    }
    deadline = kvti_deadline(t, timeout_ns);
    kvti_lock(t);
    if (t->phase == KVTI_OPEN) {
        struct kvti_call *call = t->spare_call;

        t->spare_call = NULL;
        call->deadline_ns = deadline;
        t->phase = KVTI_CLOSING;
        kvti_call_send_locked(t, call);
    }
    /* The last step may end a little after its share. */
    code = wait_closed_locked(t, kvti_after(deadline, UINT64_C(1000000000)),
                              err);
    join = t->phase == KVTI_CLOSED && !t->joined;
    t->joined |= join;
    kvti_unlock(t);
    /* Only an engine that leaks can have kept a thread. */
    if (join && !kvti_lead_join(t, t->engine_leaked
                                       ? kvti_after(kvti_now_ns(), STUCK_NS)
                                       : KVTI_NEVER)) {
        kvti_lock(t);
        t->kept = true;
        kvti_unlock(t);
    }
    return code;
}
