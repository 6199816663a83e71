/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a caller's thread reaches the control thread: the guard, the lock, the
 * wake-up, and calls that wait.
 *
 * A call is referenced by its caller, by the queue and then the control thread,
 * and by a peer it waits for. On time-out it is abandoned, and whoever finishes
 * it sees that nobody waits.
 */
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core.h"
#include "cpu.h"

int kvti_guard(const struct kvt_transport *t, struct kvt_error *err)
{
    if (t == NULL) {
        return kvti_fail(err, KVT_EINVAL,
                         "the transport is NULL: pass one that kvt_open() "
                         "gave");
    }
    if (*t->fork_page == 0) {
        return kvti_fail(err, KVT_EFORKED,
                         "this transport belongs to the parent process: open "
                         "a new one in the child");
    }
    return KVT_OK;
}

/* Looks at a mutex that is taken, before its own few looks and a sleep: some 5 to
 * 20 us, more than holders need. To sleep and be woken takes longer. */
#define LOCK_TRIES 50
#define LOCK_PAUSES 8

void kvti_lock(struct kvt_transport *t)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (pthread_mutex_trylock(&t->mu) == 0) {
            return;
        }
        for (int pause = 0; pause < LOCK_PAUSES; pause++) {
            kvti_cpu_relax();
        }
    }
    kvti_assert(pthread_mutex_lock(&t->mu) == 0);
}

void kvti_unlock(struct kvt_transport *t)
{
    bool wake = t->wake_due;

    t->wake_due = false;
    kvti_assert(pthread_mutex_unlock(&t->mu) == 0);
    if (wake) {
        kvti_wake(t);
    }
}

int kvti_lock_open(struct kvt_transport *t, struct kvt_error *err)
{
    kvti_lock(t);
    if (t->phase != KVTI_OPEN) {
        kvti_unlock(t);
        return kvti_fail(err, KVT_ECLOSED,
                         "the transport is closed: open a new one");
    }
    return KVT_OK;
}

void kvti_wake(struct kvt_transport *t)
{
    uint64_t one = 1;

    /* The producer's append and these flags, against the control thread, which
     * clears `news` and then looks at the queues, and sets `sleeping` and then
     * looks at `news`: sequentially consistent on both sides, so that one of the
     * two sees the other. A flag that is set already is only read: the control
     * thread keeps its cache line. */
    if (!atomic_load(&t->news)) {
        atomic_store(&t->news, true);
    }
    if (atomic_load(&t->sleeping) && atomic_exchange(&t->sleeping, false)) {
        while (write(t->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }
}

struct kvti_call *kvti_call_new(uint32_t kind, struct kvti_peer *peer)
{
    struct kvti_call *call = calloc(1, sizeof *call);

    if (call == NULL) {
        return NULL;
    }
    kvti_list_init(&call->node);
    kvti_list_init(&call->job.node);
    kvti_list_init(&call->job.event_node);
    kvti_list_init(&call->job.open_node);
    call->job.owner = call;
    call->job.deadline_ns = KVTI_NEVER;
    call->refs = 2;
    call->kind = kind;
    call->peer = peer;
    if (peer != NULL) {
        peer->users++;
    }
    return call;
}

void kvti_call_unref_locked(struct kvt_transport *t, struct kvti_call *call)
{
    kvti_assert(call->refs > 0);
    if (--call->refs > 0) {
        return;
    }
    if (call->peer != NULL) {
        kvti_peer_unuse_locked(t, call->peer);
    }
    free(call->job.mems);
    free(call->mems);
    free(call->rules);
    kvti_buf_fini(&call->job.buf);
    free(call);
}

void kvti_call_push_locked(struct kvt_transport *t, struct kvti_call *call)
{
    kvti_list_append(&t->calls, &call->node);
    t->stats.queued_commands++;
    atomic_store(&t->calls_due, true);
    t->wake_due = true;
}

void kvti_call_send_locked(struct kvt_transport *t, struct kvti_call *call)
{
    call->abandoned = true;
    kvti_call_push_locked(t, call);
    kvti_call_unref_locked(t, call);
}

void kvti_call_done_locked(struct kvt_transport *t, struct kvti_call *call,
                           int code, const struct kvt_error *err)
{
    kvti_assert(!call->done);
    call->done = true;
    call->code = code;
    if (err != NULL) {
        call->err = *err;
    }
    pthread_cond_broadcast(&t->cond);
}

uint64_t kvti_deadline(const struct kvt_transport *t, uint64_t timeout_ns)
{
    return kvti_after(kvti_now_ns(), timeout_ns != 0
                                         ? timeout_ns
                                         : t->options.call_timeout_ns);
}

bool kvti_wait_locked(struct kvt_transport *t, uint64_t deadline_ns)
{
    struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / UINT64_C(1000000000)),
        .tv_nsec = (long)(deadline_ns % UINT64_C(1000000000)),
    };

    if (t->wake_due) {
        t->wake_due = false;
        kvti_wake(t);
    }
    return pthread_cond_timedwait(&t->cond, &t->mu, &until) != ETIMEDOUT;
}

int kvti_call_wait_locked(struct kvt_transport *t, struct kvti_call *call,
                          uint64_t deadline_ns, struct kvt_error *err)
{
    int code;

    while (!call->done && kvti_wait_locked(t, deadline_ns)) {
    }
    if (call->done) {
        code = call->code;
        if (code != KVT_OK && err != NULL) {
            *err = call->err;
        }
    } else {
        call->abandoned = true;
        code = kvti_fail(err, KVT_ETIMEDOUT,
                         "the control thread or the engine did not answer in "
                         "the time given: ask again, or give more time");
    }
    kvti_call_unref_locked(t, call);
    return code;
}
