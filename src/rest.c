/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the control thread waits for news: whatever somebody appended to one of
 * its queues and told of by kvti_wake().
 *
 * After light work it lingers, awake and looking at nothing but that flag: to
 * be woken would cost the next small transfer, and its caller, many times what
 * the copy costs. It does not linger while heavy chunks are on their way,
 * since the threads that copy them need the processor more, nor on the
 * processor of the caller, which it leaves if it can. Then it sleeps, and an
 * idle transport uses no processor at all.
 */
#include <sys/epoll.h>

#include "core.h"
#include "cpu.h"

#define EPOLL_BATCH 32

/* A few times what a caller takes from one result to its next transfer, Python
 * included. */
#define LINGER_NS UINT64_C(50000)
/* Descriptors are looked at this often while there is no time to sleep. */
#define LOOK_NS UINT64_C(50000)
/* Looks at the flag between two at the clock. */
#define LOOKS 64
/* No more than one move in this time: the kernel may know better. */
#define MOVE_NS UINT64_C(1000000)

static bool has_news(const struct kvt_transport *t)
{
    return atomic_load(&t->news) || !kvti_list_empty(&t->ready) ||
           !kvti_list_empty(&t->steps);
}

void kvti_ctl_linger(struct kvt_transport *t)
{
    t->linger_ns = kvti_now_ns() + LINGER_NS;
}

/* Whether we are on another processor than who submitted last. Where one wakes
 * the other and both go on running, each would wait for the other. */
bool kvti_ctl_step_aside(struct kvt_transport *t)
{
    int caller = atomic_load_explicit(&t->caller_cpu, memory_order_relaxed);
    uint64_t now;
    cpu_set_t busy;

    if (caller < 0 || caller != kvti_cpu_now()) {
        return true;
    }
    now = kvti_now_ns();
    if (now < t->move_ns) {
        return false;
    }
    t->move_ns = now + MOVE_NS;
    CPU_ZERO(&busy);
    CPU_SET((size_t)caller, &busy);
    return kvti_cpu_leave(&busy);
}

/*
 * The kernel often wakes us on the processor of the caller, and at once: what
 * we do then would be part of its call. To step aside comes too late for that,
 * and costs it the move. So the caller itself says where we may not run, before
 * it wakes us. Under mu, which we take before we could step aside.
 */
void kvti_keep_off_locked(struct kvt_transport *t)
{
    pid_t leader = atomic_load(&t->leader);
    int cpu = kvti_cpu_now();

    if (atomic_load(&t->sleeping) && !atomic_load(&t->is_kept_off) &&
        leader != 0 && kvti_cpu_allowed(leader, &t->allowed) &&
        kvti_cpu_keep_off(leader, cpu, &t->allowed)) {
        t->kept_off = leader;
        t->kept_off_cpu = cpu;
        atomic_store(&t->is_kept_off, true);
    }
}

void kvti_ctl_roam(struct kvt_transport *t)
{
    cpu_set_t allowed;
    pid_t thread;
    int cpu;

    if (!atomic_load(&t->is_kept_off)) {
        return;
    }
    kvti_lock(t);
    thread = t->kept_off;
    cpu = t->kept_off_cpu;
    allowed = t->allowed;
    atomic_store(&t->is_kept_off, false);
    kvti_unlock(t);
    kvti_cpu_roam(thread, cpu, &allowed);
}

/* True as soon as there is news. */
static bool linger(struct kvt_transport *t)
{
    bool news = has_news(t);

    if (news || t->heavy > 0 || kvti_now_ns() >= t->linger_ns ||
        !kvti_ctl_step_aside(t)) {
        return news;
    }
    while (!news && kvti_now_ns() < t->linger_ns) {
        for (int i = 0; i < LOOKS && !news; i++) {
            kvti_cpu_relax();
            news = atomic_load_explicit(&t->news, memory_order_relaxed);
        }
    }
    return news;
}

static void handle_batch(struct kvt_transport *t, struct epoll_event *batch,
                         int count)
{
    t->batch = batch;
    t->batch_count = count;
    for (int i = 0; i < count; i++) {
        struct kvti_watch *ready = batch[i].data.ptr;

        if (ready != NULL) {
            ready->ready(ready, batch[i].events);
        }
    }
    t->batch_count = 0;
}

static int timeout_ms(uint64_t until_ns)
{
    uint64_t now = kvti_now_ns();
    uint64_t ms = until_ns <= now ? 0 : (until_ns - now + 999999) / 1000000;

    if (until_ns == KVTI_NEVER) {
        return -1;
    }
    return ms > INT32_MAX ? INT32_MAX : (int)ms;
}

void kvti_ctl_rest(struct kvt_transport *t, uint64_t until_ns)
{
    struct epoll_event batch[EPOLL_BATCH];
    int timeout = 0;
    int count;

    if (linger(t) && kvti_now_ns() < t->look_ns) {
        return;
    }
    /* Against kvti_wake(), which tells first and then looks at `sleeping`. */
    atomic_store(&t->sleeping, true);
    if (!has_news(t)) {
        timeout = timeout_ms(until_ns);
    }
    count = epoll_wait(t->epoll_fd, batch, EPOLL_BATCH, timeout);
    atomic_store(&t->sleeping, false);
    handle_batch(t, batch, count);
    t->look_ns = kvti_now_ns() + LOOK_NS;
}
