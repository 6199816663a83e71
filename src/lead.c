/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which of two threads is the control thread.
 *
 * A light chunk is copied by the control thread itself: handing it to another
 * one would cost more than the copy. But a copy can take for ever where the
 * peer's memory does not answer (a lock that the kernel holds, a page that
 * comes over a network), and the control thread may never wait. So it steps
 * out of its role for the copy, and a deputy looks every few milliseconds
 * whether it has come back:
 *
 *   word even  a leader is in its role: it alone touches [control] fields
 *   word odd   the leader is away, in ops->work(): nobody touches them
 *
 * The leader makes the word odd, works, and makes it even again. A deputy that
 * finds the same odd word twice makes it even itself, and leads from then on.
 * Whoever wins the compare-and-swap has the role. A leader who comes back too
 * late has become the deputy. While there is none, the leader never goes away:
 * the engine's own threads get the light chunks too.
 */
#include <errno.h>
#include <signal.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "core.h"
#include "cpu.h"

/* How long a leader may be away. Much longer than a thread of a busy machine
 * waits for its turn, much shorter than any deadline that a caller sets. */
#define WATCH_NS UINT64_C(10000000)
/* Looks without any work before the deputy stops looking. */
#define LOOKS_BEFORE_DOZE 100

static void lock(struct kvti_lead *lead)
{
    kvti_assert(pthread_mutex_lock(&lead->mu) == 0);
}

static void unlock(struct kvti_lead *lead)
{
    kvti_assert(pthread_mutex_unlock(&lead->mu) == 0);
}

/* The deputy looks in `ns`, or when it is told to earlier. */
static void set_timer(struct kvti_lead *lead, uint64_t ns)
{
    const struct itimerspec when = {.it_value.tv_nsec = (long)ns};

    kvti_assert(timerfd_settime(lead->timer_fd, 0, &when, NULL) == 0);
}

/* ----------------------------------------------------------------- leader */

bool kvti_lead_work(struct kvt_transport *t)
{
    struct kvti_lead *lead = &t->lead;
    uint64_t away = atomic_load(&lead->word) + 1;

    t->light_posted = false;
    if (!atomic_load(&lead->covered)) {
        t->ops->work(t->engine, false);
        return true;
    }
    t->ops->leave(t->engine);
    atomic_store(&lead->word, away);
    /* To set a timer costs a fraction of waking a thread. */
    if (atomic_load(&lead->dozing) && atomic_exchange(&lead->dozing, false)) {
        set_timer(lead, WATCH_NS);
    }
    t->ops->work(t->engine, true);
    return atomic_compare_exchange_strong(&lead->word, &away, away + 1);
}

static void end_lead(struct kvti_lead *lead)
{
    atomic_store(&lead->over, true);
    set_timer(lead, 1);
}

/* ----------------------------------------------------------------- deputy */

/* Until the timer is set again, by the leader. It makes the word odd before it
 * looks at `dozing`; we look in the opposite order. */
static void doze(struct kvti_lead *lead, uint64_t word)
{
    atomic_store(&lead->dozing, true);
    if ((atomic_load(&lead->over) || atomic_load(&lead->word) != word) &&
        atomic_exchange(&lead->dozing, false)) {
        set_timer(lead, WATCH_NS);
    }
}

static void wait_for_timer(const struct kvti_lead *lead)
{
    uint64_t count;

    while (read(lead->timer_fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

static bool take_over(struct kvti_lead *lead, uint64_t away)
{
    atomic_store(&lead->covered, false);
    if (atomic_compare_exchange_strong(&lead->word, &away, away + 1)) {
        return true;
    }
    atomic_store(&lead->covered, true);
    return false;
}

/* True when the calling thread leads; false when it is over. */
static bool follow(struct kvt_transport *t)
{
    struct kvti_lead *lead = &t->lead;
    uint64_t seen = atomic_load(&lead->word);
    unsigned looks = 0;

    atomic_store(&lead->covered, true);
    set_timer(lead, WATCH_NS);
    for (;;) {
        uint64_t word;

        wait_for_timer(lead);
        if (atomic_load(&lead->over)) {
            return false;
        }
        word = atomic_load(&lead->word);
        if (word == seen && word % 2 != 0 && take_over(lead, word)) {
            break;
        }
        looks = word == seen ? looks + 1 : 0;
        seen = word;
        if (looks < LOOKS_BEFORE_DOZE) {
            set_timer(lead, WATCH_NS);
        } else {
            looks = 0;
            doze(lead, word);
        }
    }
    t->light_posted = true; /* what the other one has not begun */
    kvti_log(&t->logger, KVT_LOG_DEBUG,
             "a copy takes long: another thread goes on meanwhile");
    return true;
}

/* ---------------------------------------------------------- life of threads */

static void end_thread(struct kvti_lead *lead)
{
    lock(lead);
    lead->living--;
    pthread_cond_broadcast(&lead->cond);
    unlock(lead);
}

/* kvti_ctl_run() returns when the role is lost, or when all is over. */
static bool lead_on(struct kvt_transport *t)
{
    struct kvti_lead *lead = &t->lead;

    if (!kvti_ctl_run(t)) {
        return true;
    }
    end_lead(lead);
    return false;
}

static void *first_leader(void *arg)
{
    struct kvt_transport *t = arg;

    kvti_cpu_prompt();
    while (lead_on(t) && follow(t)) {
    }
    end_thread(&t->lead);
    return NULL;
}

static void *first_deputy(void *arg)
{
    struct kvt_transport *t = arg;

    kvti_cpu_prompt();
    while (follow(t) && lead_on(t)) {
    }
    end_thread(&t->lead);
    return NULL;
}

int kvti_lead_init(struct kvt_transport *t)
{
    struct kvti_lead *lead = &t->lead;
    pthread_condattr_t attr;

    pthread_mutex_init(&lead->mu, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&lead->cond, &attr);
    pthread_condattr_destroy(&attr);
    lead->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    return lead->timer_fd < 0 ? -errno : 0;
}

void kvti_lead_fini(struct kvt_transport *t)
{
    if (t->lead.timer_fd >= 0) {
        close(t->lead.timer_fd);
    }
    pthread_cond_destroy(&t->lead.cond);
    pthread_mutex_destroy(&t->lead.mu);
}

static int start_thread(struct kvti_lead *lead, void *(*run)(void *),
                        struct kvt_transport *t, const char *name)
{
    pthread_t *thread = &lead->threads[lead->started];
    int failed;

    lock(lead);
    lead->living++;
    unlock(lead);
    failed = pthread_create(thread, NULL, run, t);
    if (failed == 0) {
        lead->started++;
        pthread_setname_np(*thread, name);
    } else {
        lock(lead);
        lead->living--;
        unlock(lead);
    }
    return failed;
}

int kvti_lead_start(struct kvt_transport *t, struct kvt_error *err)
{
    struct kvti_lead *lead = &t->lead;
    sigset_t all;
    sigset_t old;
    int failed;

    /* The host program's signals are its own threads' business. The deputy
     * comes first: it can be taken back before anything has begun. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    failed = start_thread(lead, first_deputy, t, "kvt-deputy");
    if (failed == 0) {
        failed = start_thread(lead, first_leader, t, "kvt-control");
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed == 0) {
        return KVT_OK;
    }
    end_lead(lead);
    kvti_lead_join(t, KVTI_NEVER);
    return kvti_fail_errno(err, KVT_ESYSTEM, failed,
                           "cannot start the control thread");
}

bool kvti_lead_join(struct kvt_transport *t, uint64_t deadline_ns)
{
    struct kvti_lead *lead = &t->lead;
    const struct timespec until = {
        .tv_sec = (time_t)(deadline_ns / UINT64_C(1000000000)),
        .tv_nsec = (long)(deadline_ns % UINT64_C(1000000000)),
    };
    bool ended;

    lock(lead);
    while (lead->living > 0 && pthread_cond_timedwait(&lead->cond, &lead->mu,
                                                      &until) != ETIMEDOUT) {
    }
    ended = lead->living == 0;
    unlock(lead);
    for (uint32_t i = 0; i < lead->started; i++) {
        (ended ? pthread_join(lead->threads[i], NULL)
               : pthread_detach(lead->threads[i]));
    }
    return ended;
}
