/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control thread: it owns the state of every peer and transfer, never
 * makes a call that can block, and sleeps when there is nothing to do.
 *
 *   turn: calls -> new transfers -> stops -> engine reports -> peers' steps
 *         -> deadlines -> the engine's timers -> close -> posts
 *         -> the engine's light work (lead.c) -> sleep (rest.c)
 *
 * Engine threads only queue: a chunk or job holds one node and the merged
 * outcome, so a report never allocates and never waits for mu.
 *
 * To wake us for each chunk would cost the threads that copy a tenth of their
 * time. A report of success only queues, unless the chunk is awaited:
 *   - the last one of a full window, and the one in its middle: the next ones
 *     are posted before the engine runs dry;
 *   - the last one of a transfer of which nothing more will be posted: when it
 *     is reported and others are not, the last of those becomes awaited.
 * So whatever the control thread waits for, there is a chunk whose report wakes
 * it. All that was reported is handled in the turn that follows. Where that
 * chunk is stuck for ever, others may come back unnoticed behind it: so while
 * heavy chunks are on their way a turn is taken every LOOK_AGAIN_NS.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core.h"

/* An engine call that takes longer is a stall: reported, never waited for. */
#define STALL_NS UINT64_C(5000000000)
#define LOOK_AGAIN_NS UINT64_C(10000000)

/* ---------------------------------------------------- reports, any thread */

static void lock_events(struct kvt_transport *t)
{
    kvti_assert(pthread_mutex_lock(&t->ev_mu) == 0);
}

static void unlock_events(struct kvt_transport *t)
{
    kvti_assert(pthread_mutex_unlock(&t->ev_mu) == 0);
}

static void report_chunk(void *ctx, struct kvti_chunk *chunk,
                         const struct kvti_outcome *outcome)
{
    struct kvt_transport *t = ctx;
    bool awaited;
    uint32_t fin;

    lock_events(t);
    fin = chunk->outcome.fin | outcome->fin;
    if (chunk->outcome.state == KVT_DONE) {
        chunk->outcome = *outcome; /* the first that is not done decides */
    }
    chunk->outcome.fin = fin;
    if (kvti_list_empty(&chunk->event_node)) {
        kvti_list_append(&t->ev_chunks, &chunk->event_node);
    }
    awaited = chunk->awaited || fin != KVTI_FIN_BOTH ||
              chunk->outcome.state != KVT_DONE;
    unlock_events(t);
    if (awaited) {
        kvti_wake(t);
    }
}

void kvti_ctl_await(struct kvt_transport *t, struct kvti_xfer *xfer)
{
    struct kvti_chunk *last = kvti_container(xfer->chunks.prev,
                                             struct kvti_chunk, core_node);
    bool reported;

    kvti_assert(!kvti_list_empty(&xfer->chunks));
    lock_events(t);
    last->awaited = true;
    reported = !kvti_list_empty(&last->event_node);
    unlock_events(t);
    if (reported) {
        kvti_wake(t);
    }
}

static void report_job(void *ctx, struct kvti_job *job, int code,
                       const struct kvt_error *err)
{
    struct kvt_transport *t = ctx;

    lock_events(t);
    kvti_assert(kvti_list_empty(&job->event_node));
    job->code = code;
    if (code != KVT_OK) {
        if (err != NULL) {
            job->err = *err;
        } else {
            kvti_fail(&job->err, code, "%s", kvt_strerror(code));
        }
    }
    kvti_list_append(&t->ev_jobs, &job->event_node);
    unlock_events(t);
    kvti_wake(t);
}

static void report_conn(void *ctx, void *name, enum kvti_conn_event event,
                        const struct kvt_error *why)
{
    struct kvt_transport *t = ctx;
    struct kvti_link *link = name;

    lock_events(t);
    link->event_down |= event == KVTI_CONN_DOWN;
    link->event_dead |= event == KVTI_CONN_DEAD;
    if (kvti_list_empty(&link->event_node)) {
        if (why != NULL) {
            link->event_err = *why;
        } else {
            kvti_fail(&link->event_err, KVT_EDISCONNECTED, "%s",
                      event == KVTI_CONN_DEAD ? "the peer's process is gone"
                                              : "the link to the peer broke");
        }
        kvti_list_append(&t->ev_links, &link->event_node);
    }
    unlock_events(t);
    kvti_wake(t);
}

/* --------------------------------------------- what an engine may ask for */

static int watch(void *ctx, struct kvti_watch *watch)
{
    struct kvt_transport *t = ctx;
    struct epoll_event event = {.events = watch->events, .data.ptr = watch};

    if (epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, watch->fd, &event) == 0) {
        return KVT_OK;
    }
    if (errno == EEXIST &&
        epoll_ctl(t->epoll_fd, EPOLL_CTL_MOD, watch->fd, &event) == 0) {
        return KVT_OK;
    }
    return KVT_ESYSTEM;
}

static void unwatch(void *ctx, struct kvti_watch *watch)
{
    struct kvt_transport *t = ctx;

    epoll_ctl(t->epoll_fd, EPOLL_CTL_DEL, watch->fd, NULL);
    for (int i = 0; i < t->batch_count; i++) {
        if (t->batch[i].data.ptr == watch) {
            t->batch[i].data.ptr = NULL;
        }
    }
}

static void add_heartbeat(void *ctx, struct kvti_heartbeat *heartbeat)
{
    struct kvt_transport *t = ctx;

    kvti_list_append(&t->heartbeats, &heartbeat->node);
}

/* Kept until the next turn: the control thread may be awake now, past the
 * engine's timers, or be the one that calls. */
static void wake(void *ctx)
{
    kvti_wake(ctx);
}

static void light(void *ctx)
{
    struct kvt_transport *t = ctx;

    t->light_posted = true;
}

/* ------------------------------------------------------------------- turns */

void kvti_ctl_call_reported(struct kvt_transport *t, struct kvti_job *job)
{
    struct kvti_call *call = job->owner;

    kvti_lock(t);
    call->finish(t, call);
    kvti_unlock(t);
    kvti_ctl_flush(t);
}

static void unref_call(struct kvt_transport *t, struct kvti_call *call)
{
    kvti_lock(t);
    kvti_call_unref_locked(t, call);
    kvti_unlock(t);
}

static void run_rules(struct kvt_transport *t, struct kvti_call *call)
{
    struct kvt_error err = {0};
    int code = t->ops->rules(t->engine, call->rules, &err);

    kvti_lock(t);
    kvti_call_done_locked(t, call, code, &err);
    kvti_call_unref_locked(t, call);
    kvti_unlock(t);
}

static void run_call(struct kvt_transport *t, struct kvti_call *call)
{
    switch (call->kind) {
    case KVTI_CALL_JOB:
        kvti_ctl_hand(t, &call->job);
        break;
    case KVTI_CALL_STEP:
        kvti_ctl_peer_want(t, call->peer);
        if (call->peer->predecessor != NULL) {
            kvti_ctl_peer_want(t, call->peer->predecessor);
        }
        kvti_ctl_steps(t);
        unref_call(t, call);
        break;
    case KVTI_CALL_DEAD:
        kvti_ctl_peer_dead(t, call->peer);
        unref_call(t, call);
        break;
    case KVTI_CALL_NOTIFY:
        kvti_ctl_notify(t, call);
        break;
    case KVTI_CALL_RULES:
        run_rules(t, call);
        break;
    default:
        t->close_call = call;
        t->close_step = KVTI_CLOSE_DRAIN;
        t->close_begin_ns = kvti_now_ns();
        break;
    }
}

static void take_calls(struct kvt_transport *t)
{
    struct kvti_list calls;
    struct kvti_list *node;
    bool notes_wanted;

    if (!atomic_load(&t->calls_due)) {
        return;
    }
    kvti_list_init(&calls);
    kvti_lock(t);
    kvti_list_splice(&calls, &t->calls);
    t->stats.queued_commands = 0;
    notes_wanted = t->notes_wanted;
    t->notes_wanted = false;
    atomic_store(&t->calls_due, false);
    kvti_unlock(t);
    while ((node = kvti_list_take(&calls)) != NULL) {
        run_call(t, kvti_container(node, struct kvti_call, node));
    }
    if (notes_wanted && t->ops->notes_wanted != NULL) {
        t->ops->notes_wanted(t->engine);
    }
}

/* An engine may report a chunk again, until it is final: what a report says is
 * read while the lock is held. */
static bool take_chunks(struct kvt_transport *t)
{
    struct kvti_report reports[KVTI_REPORTS_MAX];
    size_t count = 0;

    lock_events(t);
    while (count < KVTI_REPORTS_MAX && !kvti_list_empty(&t->ev_chunks)) {
        struct kvti_chunk *chunk = kvti_container(
            kvti_list_take(&t->ev_chunks), struct kvti_chunk, event_node);

        reports[count].chunk = chunk;
        reports[count].outcome = chunk->outcome;
        count++;
    }
    unlock_events(t);
    kvti_ctl_chunks(t, reports, count);
    return count > 0;
}

static bool take_job(struct kvt_transport *t)
{
    struct kvti_list *node;
    struct kvti_job *job;

    lock_events(t);
    node = kvti_list_take(&t->ev_jobs);
    unlock_events(t);
    if (node == NULL) {
        return false;
    }
    job = kvti_container(node, struct kvti_job, event_node);
    kvti_list_remove(&job->open_node);
    job->reported(t, job);
    return true;
}

static bool take_link_event(struct kvt_transport *t)
{
    struct kvti_link *link = NULL;
    struct kvti_list *node;
    struct kvt_error err;
    bool down = false;
    bool dead = false;

    lock_events(t);
    node = kvti_list_take(&t->ev_links);
    if (node != NULL) {
        link = kvti_container(node, struct kvti_link, event_node);
        down = link->event_down;
        dead = link->event_dead;
        err = link->event_err;
    }
    unlock_events(t);
    if (link == NULL) {
        return false;
    }
    kvti_ctl_link_event(t, link, down, dead, &err);
    return true;
}

/* Jobs first: a LOAD must be known before an event of its connection. */
void kvti_ctl_take_events(struct kvt_transport *t)
{
    while (take_job(t) || take_chunks(t) || take_link_event(t)) {
    }
}

static uint64_t check_stalls(struct kvt_transport *t, uint64_t now_ns)
{
    bool busy = false;

    if (now_ns < t->next_stall_ns) {
        return t->next_stall_ns;
    }
    kvti_list_each(node, &t->heartbeats) {
        struct kvti_heartbeat *heartbeat = kvti_container(
            node, struct kvti_heartbeat, node);
        uint64_t since = atomic_load(&heartbeat->busy_since_ns);
        bool stalled = since != 0 && now_ns > since + STALL_NS;

        busy |= since != 0;
        if (stalled && !heartbeat->stalled) {
            kvti_lock(t);
            t->stats.stalls++;
            kvti_unlock(t);
            kvti_log(&t->logger, KVT_LOG_ERROR,
                     "a call into the engine does not come back: %s",
                     heartbeat->what);
        }
        heartbeat->stalled = stalled;
    }
    t->next_stall_ns = now_ns + STALL_NS / 5;
    return busy ? t->next_stall_ns : KVTI_NEVER;
}

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* When to take the next one at the latest. */
static uint64_t turn(struct kvt_transport *t)
{
    uint64_t now;
    uint64_t next;

    atomic_store(&t->news, false);
    kvti_ctl_roam(t);
    take_calls(t);
    kvti_ctl_intake(t);
    kvti_ctl_attend(t);
    kvti_ctl_take_events(t);
    kvti_ctl_steps(t);
    now = kvti_now_ns();
    kvti_ctl_deadlines(t, now);
    next = t->ops->turn == NULL ? KVTI_NEVER : t->ops->turn(t->engine, now);
    next = sooner(next, check_stalls(t, now));
    if (t->close_step != KVTI_CLOSE_NOT) {
        next = sooner(next, kvti_ctl_close_turn(t, now));
    }
    if (!t->quit) {
        kvti_ctl_steps(t);
        kvti_ctl_post(t);
    }
    if (t->heavy > 0) {
        next = sooner(next, now + LOOK_AGAIN_NS);
    }
    return sooner(next, t->next_deadline_ns);
}

bool kvti_ctl_run(struct kvt_transport *t)
{
    atomic_store(&t->leader, gettid());
    while (!t->quit) {
        uint64_t next_ns = turn(t);

        if (t->quit) {
            break;
        }
        if (t->light_posted) {
            if (!kvti_lead_work(t)) {
                return false;
            }
            kvti_ctl_linger(t);
        }
        kvti_ctl_rest(t, next_ns);
    }
    return true;
}

/* ----------------------------------------------------------- start and end */

static void drain_wake(struct kvti_watch *woken, uint32_t events)
{
    uint64_t count;

    (void)events;
    while (read(woken->fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

static void init_lists(struct kvt_transport *t)
{
    kvti_list_init(&t->calls);
    kvti_list_init(&t->submitted);
    kvti_list_init(&t->attention);
    kvti_list_init(&t->peer_list);
    kvti_list_init(&t->own_layouts);
    kvti_list_init(&t->finished);
    kvti_list_init(&t->notes);
    kvti_list_init(&t->ev_chunks);
    kvti_list_init(&t->ev_jobs);
    kvti_list_init(&t->ev_links);
    kvti_list_init(&t->live);
    kvti_list_init(&t->ready);
    kvti_list_init(&t->steps);
    kvti_list_init(&t->orphans);
    kvti_list_init(&t->heartbeats);
    kvti_list_init(&t->outbox);
    kvti_list_init(&t->open_jobs);
    t->next_deadline_ns = KVTI_NEVER;
}

static void init_locks(struct kvt_transport *t)
{
    pthread_condattr_t attr;

    kvti_short_mutex_init(&t->mu);
    kvti_short_mutex_init(&t->ev_mu);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&t->cond, &attr);
    pthread_condattr_destroy(&attr);
}

int kvti_control_init(struct kvt_transport *t, struct kvt_error *err)
{
    int failed = kvti_lead_init(t);

    init_lists(t);
    init_locks(t);
    t->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->user_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (failed != 0 || t->wake_fd < 0 || t->user_fd < 0 || t->epoll_fd < 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot open an event descriptor");
    }
    t->wake_watch = (struct kvti_watch){
        .fd = t->wake_fd, .events = EPOLLIN, .ready = drain_wake};
    if (watch(t, &t->wake_watch) != KVT_OK) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno, "epoll_ctl failed");
    }
    t->env = (struct kvti_env){
        .ctx = t,
        .report_chunk = report_chunk,
        .report_job = report_job,
        .report_conn = report_conn,
        .report_note = kvti_note_received,
        .watch = watch,
        .unwatch = unwatch,
        .heartbeat = add_heartbeat,
        .wake = wake,
        .light = light,
        .agent_name = t->agent_name,
        .incarnation = t->incarnation,
        .options = &t->options,
    };
    return KVT_OK;
}

static void close_fd(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

void kvti_control_fini(struct kvt_transport *t)
{
    close_fd(t->wake_fd);
    close_fd(t->user_fd);
    close_fd(t->epoll_fd);
    kvti_lead_fini(t);
    pthread_cond_destroy(&t->cond);
    pthread_mutex_destroy(&t->mu);
    pthread_mutex_destroy(&t->ev_mu);
}
