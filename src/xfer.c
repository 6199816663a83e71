/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slots of transfers, the state that callers see, and the calls that read
 * or end it. All under mu.
 *
 * A slot lives from its acceptance until its result is drained (or released,
 * or hidden) AND no request of it can touch memory. result.id is 0 in a free
 * slot. `stop` is set once, with the verdict; `KVT_FINISHED` once, when the
 * transfer is proven final or lost; nothing else completes a transfer.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "core.h"

bool kvti_xfer_finished(const struct kvti_xfer *xfer)
{
    return (xfer->result.flags & KVT_FINISHED) != 0;
}

static struct kvti_xfer *take_slot(struct kvt_transport *t)
{
    struct kvti_xfer *xfer;

    if (t->slots_free != 0) {
        xfer = &t->slots[t->slots_free - 1];
        t->slots_free = xfer->next_free;
    } else {
        kvti_assert(t->slots_used < t->options.inflight_max);
        xfer = &t->slots[t->slots_used];
        xfer->index = t->slots_used++;
    }
    *xfer = (struct kvti_xfer){.index = xfer->index};
    kvti_list_init(&xfer->intake);
    kvti_list_init(&xfer->attend);
    kvti_list_init(&xfer->fin_peer);
    kvti_list_init(&xfer->fin_all);
    kvti_list_init(&xfer->link_node);
    kvti_list_init(&xfer->queue_node);
    kvti_list_init(&xfer->live);
    kvti_list_init(&xfer->chunks);
    t->slots_taken++;
    return xfer;
}

int kvti_xfer_room_locked(struct kvt_transport *t, struct kvt_error *err)
{
    if (t->slots_taken < t->options.inflight_max) {
        return KVT_OK;
    }
    return kvti_fail(err, KVT_EAGAIN,
                     "%u transfers are in flight or not drained, the limit of "
                     "this transport: poll or release some, or open it with a "
                     "higher inflight_max",
                     t->options.inflight_max);
}

struct kvti_xfer *kvti_xfer_new_locked(struct kvt_transport *t,
                                       struct kvti_peer *peer, uint32_t op,
                                       const struct kvt_xfer_options *options)
{
    struct kvti_xfer *xfer = take_slot(t);

    xfer->result.id = ++t->serial << KVTI_ID_INDEX_BITS | xfer->index;
    xfer->result.peer = peer->id;
    xfer->result.op = op;
    xfer->result.state = KVT_QUEUED;
    xfer->peer = peer;
    xfer->generation = peer->generation;
    xfer->accepted_ns = kvti_now_ns();
    xfer->deadline_ns = KVTI_NEVER;
    xfer->grace_ns = KVTI_NEVER;
    if (options != NULL) {
        xfer->flags = options->flags;
        xfer->result.user_data = options->user_data;
        xfer->result.tag = options->tag;
        if (options->timeout_ns != 0 &&
            options->timeout_ns < KVTI_NEVER - xfer->accepted_ns) {
            xfer->deadline_ns = xfer->accepted_ns + options->timeout_ns;
        }
    }
    peer->users++;
    peer->inflight++;
    t->stats.accepted++;
    t->stats.inflight++;
    return xfer;
}

void kvti_xfer_free_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_peer *peer = xfer->peer;

    kvti_assert(kvti_list_empty(&xfer->chunks));
    kvti_assert(kvti_list_empty(&xfer->intake));
    kvti_assert(kvti_list_empty(&xfer->link_node));
    kvti_list_remove(&xfer->attend);
    kvti_payload_fini(&xfer->payload);
    free(xfer->note);
    xfer->note = NULL;
    xfer->result.id = 0;
    xfer->peer = NULL;
    xfer->next_free = t->slots_free;
    t->slots_free = xfer->index + 1;
    t->slots_taken--;
    kvti_peer_unuse_locked(t, peer);
}

void kvti_xfer_stop_locked(struct kvti_xfer *xfer, uint32_t state, int code,
                           int engine_code, uint32_t scope, const char *text)
{
    if (xfer->stop || kvti_xfer_finished(xfer)) {
        return;
    }
    xfer->stop = true;
    xfer->result.state = state;
    xfer->result.code = code;
    xfer->result.engine_code = engine_code;
    xfer->result.scope = scope;
    kvti_format(xfer->result.text, sizeof xfer->result.text, "%s", text);
}

static void count_finished(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    const struct kvt_result *result = &xfer->result;
    struct kvti_peer *peer = xfer->peer;
    uint64_t *const counters[] = {
        [KVT_DONE] = &t->stats.done,
        [KVT_REJECTED] = &t->stats.rejected,
        [KVT_FAILED] = &t->stats.failed,
        [KVT_DISCONNECTED] = &t->stats.disconnected,
        [KVT_CANCELLED] = &t->stats.cancelled,
        [KVT_TIMED_OUT] = &t->stats.timed_out,
        [KVT_LOST] = &t->stats.lost,
    };

    (*counters[result->state])++;
    t->stats.inflight--;
    peer->inflight--;
    if (result->op == KVT_OP_WRITE || result->op == KVT_OP_READ) {
        kvti_histogram_add(&t->stats.complete_ns, result->latency_ns);
        kvti_histogram_add(&peer->complete_ns, result->latency_ns);
    }
    if (result->state == KVT_DONE) {
        peer->done++;
        t->tag_done[result->tag]++;
        t->tag_bytes[result->tag] += result->bytes_done;
    } else {
        peer->not_done++;
    }
}

static void set_proven(struct kvti_xfer *xfer)
{
    xfer->result.flags |= KVT_LOCAL_FINAL | KVT_PEER_FINAL | KVT_QUIESCENT;
    kvti_payload_fini(&xfer->payload);
}

void kvti_signal_locked(struct kvt_transport *t)
{
    uint64_t one = 1;

    if (t->fd_asked && !t->fd_signalled) {
        t->fd_signalled = true;
        while (write(t->user_fd, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
}

void kvti_unsignal_locked(struct kvt_transport *t)
{
    uint64_t count;

    if (t->fd_signalled && kvti_list_empty(&t->finished) &&
        kvti_list_empty(&t->notes)) {
        t->fd_signalled = false;
        while (read(t->user_fd, &count, sizeof count) < 0 && errno == EINTR) {
        }
    }
}

int kvt_fd(kvt_transport *t)
{
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    /* Some ask before each sleep. */
    if (!atomic_load_explicit(&t->fd_asked, memory_order_acquire)) {
        kvti_lock(t);
        atomic_store(&t->fd_asked, true);
        if (!kvti_list_empty(&t->finished) || !kvti_list_empty(&t->notes)) {
            kvti_signal_locked(t);
        }
        kvti_unlock(t);
    }
    return t->user_fd;
}

/* Onto the lists that kvt_poll() drains, unless nobody wants to hear of it. */
static void publish(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    t->stats.undrained++;
    if ((xfer->flags & KVT_XFER_NO_EVENT) != 0) {
        return;
    }
    kvti_list_append(&xfer->peer->finished, &xfer->fin_peer);
    kvti_list_append(&t->finished, &xfer->fin_all);
    atomic_fetch_add(&t->finished_count, 1);
    kvti_signal_locked(t);
}

void kvti_xfer_finish_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                             bool proven)
{
    kvti_assert(!kvti_xfer_finished(xfer));
    if (!proven) {
        char why[KVT_RESULT_TEXT_MAX];

        kvti_format(why, sizeof why, "%s", xfer->result.text);
        kvti_format(xfer->result.text, sizeof xfer->result.text,
                    "given up unproven: %s", why);
        xfer->result.state = KVT_LOST;
        xfer->result.code = KVT_ELOST;
        t->stats.quarantined++;
    } else if (xfer->result.state == KVT_UNREADABLE) {
        /* It is over after all, and nothing says that it went well. */
        xfer->result.state = KVT_FAILED;
    } else if (!xfer->stop) {
        xfer->result.state = KVT_DONE;
    }
    xfer->result.latency_ns = kvti_now_ns() - xfer->accepted_ns;
    xfer->result.flags |= KVT_FINISHED;
    if (proven) {
        set_proven(xfer);
    }
    count_finished(t, xfer);
    if (!xfer->hidden) {
        publish(t, xfer);
    } else if (proven) {
        kvti_xfer_free_locked(t, xfer);
    }
}

void kvti_xfer_prove_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_assert(xfer->result.state == KVT_LOST &&
                (xfer->result.flags & KVT_QUIESCENT) == 0);
    set_proven(xfer);
    t->stats.quarantined--;
    if (xfer->hidden) {
        kvti_xfer_free_locked(t, xfer);
    }
}

/* The slot of an id that callers may know, or NULL. */
static struct kvti_xfer *find_locked(struct kvt_transport *t, kvt_xfer id)
{
    uint64_t index = id & ((UINT64_C(1) << KVTI_ID_INDEX_BITS) - 1);

    if (id == 0 || index >= t->slots_used || t->slots[index].result.id != id ||
        t->slots[index].unknown) {
        return NULL;
    }
    return &t->slots[index];
}

int kvt_status(kvt_transport *t, kvt_xfer id, struct kvt_result *ret)
{
    struct kvti_xfer *xfer;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret == NULL) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    xfer = find_locked(t, id);
    if (xfer == NULL) {
        code = KVT_ENOENT;
    } else {
        *ret = xfer->result;
    }
    kvti_unlock(t);
    return code;
}

/* Takes a finished slot off the lists; nobody will hear of it again. */
static void forget_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    kvti_assert(kvti_xfer_finished(xfer) && !xfer->hidden);
    if (!kvti_list_empty(&xfer->fin_all)) {
        kvti_list_remove(&xfer->fin_peer);
        kvti_list_remove(&xfer->fin_all);
        atomic_fetch_sub(&t->finished_count, 1);
    }
    t->stats.undrained--;
    xfer->hidden = true;
    if ((xfer->result.flags & KVT_QUIESCENT) != 0) {
        kvti_xfer_free_locked(t, xfer);
    }
}

int kvt_poll(kvt_transport *t, kvt_peer id, struct kvt_result *ret,
             size_t capacity)
{
    struct kvti_list *list;
    struct kvti_peer *peer;
    int count = 0;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret == NULL && capacity > 0) {
        return KVT_EINVAL;
    }
    if (atomic_load_explicit(&t->finished_count, memory_order_acquire) == 0) {
        return 0;
    }
    if (capacity > INT32_MAX) {
        capacity = INT32_MAX;
    }
    kvti_lock(t);
    peer = id == KVT_ANY ? NULL : kvti_idmap_get(&t->peers, id);
    if (peer != NULL || id == KVT_ANY) {
        list = peer == NULL ? &t->finished : &peer->finished;
        if (peer != NULL) {
            peer->users++; /* its last slot may go while we walk its list */
        }
        while ((size_t)count < capacity && !kvti_list_empty(list)) {
            struct kvti_xfer *xfer =
                peer == NULL
                    ? kvti_container(list->next, struct kvti_xfer, fin_all)
                    : kvti_container(list->next, struct kvti_xfer, fin_peer);

            ret[count++] = xfer->result;
            forget_locked(t, xfer);
        }
        if (peer != NULL) {
            kvti_peer_unuse_locked(t, peer);
        }
        kvti_unsignal_locked(t);
    }
    kvti_unlock(t);
    return count;
}

static void attend_locked(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    if (kvti_list_empty(&xfer->attend)) {
        kvti_list_append(&t->attention, &xfer->attend);
        atomic_store(&t->attention_due, true);
        t->wake_due = true;
    }
}

/* One id of a cancel. True when it is still moving. */
static bool cancel_locked(struct kvt_transport *t, kvt_xfer id, int mode)
{
    struct kvti_xfer *xfer = find_locked(t, id);

    if (xfer == NULL || xfer->result.op == KVT_OP_ADD) {
        return false;
    }
    if (kvti_xfer_finished(xfer)) {
        bool quiescent = (xfer->result.flags & KVT_QUIESCENT) != 0;

        /* A lost one stays on the list for a caller who waits for it. */
        if (!xfer->hidden && (quiescent || mode == KVT_CANCEL_IMMEDIATE)) {
            forget_locked(t, xfer);
        }
        return !quiescent;
    }
    kvti_xfer_stop_locked(xfer, KVT_CANCELLED, KVT_ECANCELED, 0,
                          KVT_SCOPE_REQUEST, "cancelled by the caller");
    attend_locked(t, xfer);
    if (!xfer->claimed) {
        /* Nothing was posted, and now nothing will be: quiescent already. */
        xfer->hidden = true;
        xfer->unknown = true;
        return false;
    }
    if (mode == KVT_CANCEL_IMMEDIATE) {
        xfer->hidden = true;
    }
    /* Hidden by an earlier call or not: its memory is not the caller's. */
    return true;
}

int kvt_cancel(kvt_transport *t, const kvt_xfer *ids, size_t count, int mode,
               kvt_xfer *ret_moving)
{
    int moving = 0;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if ((ids == NULL && count > 0) ||
        (mode != KVT_CANCEL_IMMEDIATE && mode != KVT_CANCEL_WAIT)) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    for (size_t i = 0; i < count; i++) {
        kvt_xfer id = ids[i];

        if (cancel_locked(t, id, mode) && mode == KVT_CANCEL_WAIT) {
            if (ret_moving != NULL) {
                ret_moving[moving] = id;
            }
            moving++;
        }
    }
    kvti_unsignal_locked(t);
    kvti_unlock(t);
    return moving;
}

int kvt_release(kvt_transport *t, kvt_xfer id)
{
    struct kvti_xfer *xfer;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    kvti_lock(t);
    xfer = find_locked(t, id);
    if (xfer == NULL || (kvti_xfer_finished(xfer) && xfer->hidden)) {
        code = KVT_ENOENT;
    } else if (kvti_xfer_finished(xfer)) {
        forget_locked(t, xfer);
        kvti_unsignal_locked(t);
    } else {
        xfer->hidden = true;
    }
    kvti_unlock(t);
    return code;
}
