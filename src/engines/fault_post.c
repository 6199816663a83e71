/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks through the fault engine. A record goes WAITS -> INNER -> BACK, or
 * straight to BACK when it never reaches the inner engine. What it was told to
 * do is fixed when it is posted; advance() is the only place that reports, so
 * a chunk's reports keep their order (early, half, last) whoever calls it.
 */
#include "fault.h"

#include <stdlib.h>
#include <time.h>

#define NS_PER_MS 1000000u

/* `inline` gives up after this: the control thread stands still meanwhile,
 * and the core's watchdog counts a stall after 5 s. */
#define INLINE_MAX_NS (1000u * (uint64_t)NS_PER_MS)
#define INLINE_NAP_NS NS_PER_MS

/* What a rule does to the posts it matches. State 0: leaves the state alone;
 * of several the first in the order of the enum decides. */
static const struct effect {
    uint32_t state;
    uint32_t bits;
} effects[KVTI_FAULT_POST_RULES] = {
    [KVTI_FAULT_DEAD] = {KVT_DISCONNECTED,
                         KVTI_FAULT_BIT_SKIP | KVTI_FAULT_BIT_DEAD},
    [KVTI_FAULT_REJECT] = {KVT_REJECTED, KVTI_FAULT_BIT_SKIP},
    [KVTI_FAULT_FAIL_UNPOSTED] = {KVT_FAILED, KVTI_FAULT_BIT_SKIP},
    [KVTI_FAULT_REJECT_DIRTY] = {KVT_REJECTED, KVTI_FAULT_BIT_EARLY},
    [KVTI_FAULT_DISCONNECT] = {KVT_DISCONNECTED,
                               KVTI_FAULT_BIT_EARLY | KVTI_FAULT_BIT_DOWN},
    [KVTI_FAULT_UNREADABLE] = {KVT_UNREADABLE,
                               KVTI_FAULT_BIT_EARLY | KVTI_FAULT_BIT_HOLD},
    [KVTI_FAULT_NEVER] = {KVT_UNREADABLE,
                          KVTI_FAULT_BIT_EARLY | KVTI_FAULT_BIT_NEVER},
    [KVTI_FAULT_FAIL] = {KVT_FAILED, 0},
    [KVTI_FAULT_HANG] = {0, KVTI_FAULT_BIT_HANG},
    [KVTI_FAULT_HOLD] = {0, KVTI_FAULT_BIT_HOLD},
    [KVTI_FAULT_HALF] = {0, KVTI_FAULT_BIT_HALF},
    [KVTI_FAULT_LATE] = {0, 0},
    [KVTI_FAULT_PEER_DOWN] = {0, KVTI_FAULT_BIT_DOWN},
    [KVTI_FAULT_INLINE] = {0, KVTI_FAULT_BIT_INLINE},
};

static int code_of(uint32_t state)
{
    switch (state) {
    case KVT_REJECTED:
        return KVT_EREJECTED;
    case KVT_DISCONNECTED:
        return KVT_EDISCONNECTED;
    case KVT_UNREADABLE:
        return KVT_ELOST;
    default:
        return KVT_EENGINE;
    }
}

static void order_outcome(struct kvti_fault_post *post, uint32_t state,
                          const char *key)
{
    post->ordered = true;
    post->outcome.state = state;
    post->outcome.fin = KVTI_FIN_NONE;
    post->outcome.code = code_of(state);
    post->outcome.engine_code = -1;
    kvti_format(post->outcome.text, sizeof(post->outcome.text),
                "the fault engine's rule \"%s\" at post %llu", key,
                (unsigned long long)post->number);
}

/* Fixes what the post is told to do. Under the lock. */
static void plan(struct kvti_fault *fault, struct kvti_fault_post *post)
{
    const struct kvti_fault_rules *rules = &fault->rules;

    post->number = ++fault->post_count;
    post->epoch = fault->epoch;
    post->delay_ns = (uint64_t)rules->delay_ms * NS_PER_MS;
    for (uint32_t i = 0; i < KVTI_FAULT_POST_RULES; i++) {
        if (!kvti_fault_hit(&rules->posts[i], post->number)) {
            continue;
        }
        post->bits |= effects[i].bits;
        if (effects[i].state != 0 && !post->ordered) {
            order_outcome(post, effects[i].state,
                          kvti_fault_key((enum kvti_fault_post_rule)i));
        }
        if (i == KVTI_FAULT_FAIL) {
            post->turns = rules->posts[i].extra;
        } else if (i == KVTI_FAULT_LATE) {
            post->late_ns = (uint64_t)rules->posts[i].extra * NS_PER_MS;
        }
    }
}

static void report(struct kvti_fault *fault, const struct kvti_fault_post *post,
                   uint32_t fin)
{
    struct kvti_outcome outcome = post->outcome;

    outcome.fin = fin;
    fault->env->report_chunk(fault->env->ctx, post->chunk, &outcome);
}

static void send_early(struct kvti_fault *fault, struct kvti_fault_post *post)
{
    struct kvt_error why;

    post->early_sent = true;
    if ((post->bits & KVTI_FAULT_BIT_EARLY) != 0) {
        report(fault, post, KVTI_FIN_NONE);
    }
    if ((post->bits & KVTI_FAULT_BIT_DOWN) != 0 && post->conn != NULL) {
        (void)kvti_fail(&why, KVT_EDISCONNECTED,
                        "The fault engine was told to break this link.");
        kvti_fault_tell_conn(fault, post->conn, KVTI_CONN_DOWN, &why);
    }
}

/*
 * Makes the reports that are due and may free the post. Returns when the next
 * one is due; UINT64_MAX: an event decides. Under the lock.
 */
static uint64_t advance(struct kvti_fault *fault, struct kvti_fault_post *post,
                        uint64_t now_ns)
{
    bool released = kvti_fault_released(fault, post->epoch);
    uint32_t held = KVTI_FAULT_BIT_HOLD | KVTI_FAULT_BIT_HALF;

    if (post->place == KVTI_FAULT_WAITS) {
        return UINT64_MAX;
    }
    if (!post->early_sent) {
        if (!released && now_ns < post->early_due_ns) {
            return post->early_due_ns;
        }
        send_early(fault, post);
    }
    if (post->place == KVTI_FAULT_INNER) {
        return UINT64_MAX;
    }
    if ((post->bits & KVTI_FAULT_BIT_NEVER) != 0) {
        fault->unproven++;
        kvti_fault_post_free(post);
        return UINT64_MAX;
    }
    if (!released && now_ns < post->back_due_ns) {
        return post->back_due_ns;
    }
    if ((post->bits & KVTI_FAULT_BIT_HALF) != 0 && !post->half_sent) {
        post->half_sent = true;
        report(fault, post, KVTI_FIN_LOCAL);
    }
    if (!released && (post->bits & held) != 0) {
        return UINT64_MAX;
    }
    if (!released && post->turns > 0) {
        return now_ns;
    }
    report(fault, post, KVTI_FIN_BOTH);
    kvti_fault_post_free(post);
    return UINT64_MAX;
}

/* Only when nothing of ours can move any more may the core hear that the
 * peer's process is dead: it takes that for a proof. */
static void check_doomed(struct kvti_fault *fault, struct kvti_fault_conn *conn)
{
    struct kvt_error why;

    if (!conn->doomed || conn->active > 0) {
        return;
    }
    conn->doomed = false;
    (void)kvti_fail(&why, KVT_EDISCONNECTED,
                    "The fault engine was told that this peer is dead.");
    kvti_fault_tell_conn(fault, conn, KVTI_CONN_DEAD,
                         conn->dead ? &conn->why[KVTI_CONN_DEAD] : &why);
}

static void come_back(struct kvti_fault_post *post, uint64_t now_ns)
{
    post->place = KVTI_FAULT_BACK;
    post->back_due_ns = now_ns + post->delay_ns + post->late_ns;
}

static bool waits(const struct kvti_fault *fault,
                  const struct kvti_fault_post *post)
{
    return (post->bits & KVTI_FAULT_BIT_HANG) != 0 &&
           !kvti_fault_released(fault, post->epoch) && !post->conn->dead &&
           !post->conn->shut;
}

/* Leaves WAITS without the inner engine, and may free the post. */
static void end_unposted(struct kvti_fault *fault, struct kvti_fault_post *post,
                         uint64_t now_ns)
{
    post->early_due_ns = now_ns + post->delay_ns;
    come_back(post, now_ns);
    (void)advance(fault, post, now_ns);
}

void kvti_fault_shut(struct kvti_fault *fault, struct kvti_fault_conn *conn,
                     enum kvti_fault_post_rule rule)
{
    uint64_t now_ns = kvti_now_ns();

    conn->shut = true;
    kvti_list_each(node, &fault->posts) {
        struct kvti_fault_post *post = kvti_container(
            node, struct kvti_fault_post, node);

        if (post->conn == conn && post->place == KVTI_FAULT_WAITS) {
            post->bits = KVTI_FAULT_BIT_SKIP;
            order_outcome(post, KVT_DISCONNECTED, kvti_fault_key(rule));
            end_unposted(fault, post, now_ns);
        }
    }
}

/* The rule `dead`: the post ends first, then all others that wait. */
static void kill_conn(struct kvti_fault *fault, struct kvti_fault_conn *conn)
{
    conn->doomed = true;
    kvti_fault_shut(fault, conn, KVTI_FAULT_DEAD);
    check_doomed(fault, conn);
}

/*
 * Leaves WAITS. True: the caller gives the chunk to the inner engine, when it
 * has let go of the lock. Else the post may be freed. Under the lock.
 */
static bool start(struct kvti_fault *fault, struct kvti_fault_post *post)
{
    struct kvti_fault_conn *conn = post->conn;
    uint64_t now_ns = kvti_now_ns();

    if (conn->shut) {
        kvti_fault_shut(fault, conn, KVTI_FAULT_DEAD);
        return false;
    }
    if ((post->bits & KVTI_FAULT_BIT_SKIP) != 0) {
        bool dead = (post->bits & KVTI_FAULT_BIT_DEAD) != 0;

        end_unposted(fault, post, now_ns);
        if (dead) {
            kill_conn(fault, conn);
        }
        return false;
    }
    post->early_due_ns = now_ns + post->delay_ns;
    post->place = KVTI_FAULT_INNER;
    conn->active++;
    post->chunk->wrapper = post;
    post->chunk->conn = conn->inner;
    if ((post->bits & KVTI_FAULT_BIT_INLINE) != 0) {
        fault->inline_post = post;
    }
    (void)advance(fault, post, now_ns);
    return true;
}

void kvti_fault_orphan_posts(struct kvti_fault *fault,
                             const struct kvti_fault_conn *conn)
{
    kvti_list_each(node, &fault->posts) {
        struct kvti_fault_post *post = kvti_container(
            node, struct kvti_fault_post, node);

        if (post->conn == conn) {
            post->conn = NULL;
        }
    }
}

/* Some inner engines make their reports in turn(), so it gets turns. */
static void wait_inline(struct kvti_fault *fault)
{
    uint64_t give_up_ns = kvti_now_ns() + INLINE_MAX_NS;

    for (;;) {
        uint64_t now_ns = kvti_now_ns();
        uint64_t nap_ns = now_ns + INLINE_NAP_NS;
        struct timespec until = {.tv_sec = (time_t)(nap_ns / 1000000000u),
                                 .tv_nsec = (long)(nap_ns % 1000000000u)};
        bool over;

        kvti_fault_lock(fault);
        if (fault->inline_post != NULL && now_ns < give_up_ns) {
            (void)pthread_cond_timedwait(&fault->inline_back, &fault->lock,
                                         &until);
        }
        over = fault->inline_post == NULL || now_ns >= give_up_ns;
        if (over) {
            fault->inline_post = NULL;
        }
        kvti_fault_unlock(fault);
        if (over) {
            return;
        }
        if (fault->inner->turn != NULL) {
            (void)fault->inner->turn(fault->inner_self, now_ns);
        }
    }
}

static struct kvti_fault_post *next_ready(struct kvti_fault *fault)
{
    kvti_list_each(node, &fault->posts) {
        struct kvti_fault_post *post = kvti_container(
            node, struct kvti_fault_post, node);

        if (post->place == KVTI_FAULT_WAITS && !waits(fault, post)) {
            return post;
        }
    }
    return NULL;
}

/* Control thread, without the lock. */
static void run_posts(struct kvti_fault *fault)
{
    struct kvti_fault_post *post;

    kvti_fault_lock(fault);
    while ((post = next_ready(fault)) != NULL) {
        struct kvti_chunk *chunk = post->chunk;
        bool wait = (post->bits & KVTI_FAULT_BIT_INLINE) != 0;

        if (!start(fault, post)) {
            continue;
        }
        kvti_fault_unlock(fault);
        fault->inner->post(fault->inner_self, chunk);
        if (wait) {
            if (fault->inner->work != NULL) {
                fault->inner->work(fault->inner_self, false);
            }
            wait_inline(fault);
        }
        kvti_fault_lock(fault);
    }
    kvti_fault_unlock(fault);
}

void kvti_fault_post(void *self, struct kvti_chunk *chunk)
{
    struct kvti_fault *fault = self;
    struct kvti_fault_post *post = calloc(1, sizeof(*post));
    bool timed;

    if (post == NULL) {
        struct kvti_outcome outcome = {.state = KVT_FAILED,
                                       .fin = KVTI_FIN_BOTH,
                                       .code = KVT_ENOMEM,
                                       .text = "the fault engine is out of "
                                               "memory"};

        fault->env->report_chunk(fault->env->ctx, chunk, &outcome);
        return;
    }
    post->chunk = chunk;
    post->conn = chunk->conn;
    kvti_fault_lock(fault);
    plan(fault, post);
    timed = post->delay_ns > 0 || post->late_ns > 0 || post->turns > 0;
    kvti_list_append(&fault->posts, &post->node);
    kvti_fault_unlock(fault);
    run_posts(fault);
    if (timed) {
        fault->env->wake(fault->env->ctx);
    }
}

/* Whether the inner engine's reports go out as they are. */
static bool transparent(const struct kvti_fault *fault,
                        const struct kvti_fault_post *post)
{
    uint32_t held = KVTI_FAULT_BIT_EARLY | KVTI_FAULT_BIT_HOLD |
                    KVTI_FAULT_BIT_HALF | KVTI_FAULT_BIT_NEVER;

    if (post->ordered) {
        return false;
    }
    return kvti_fault_released(fault, post->epoch) ||
           ((post->bits & held) == 0 && post->delay_ns == 0 &&
            post->late_ns == 0);
}

void kvti_fault_chunk_back(void *ctx, struct kvti_chunk *chunk,
                           const struct kvti_outcome *outcome)
{
    struct kvti_fault *fault = ctx;
    struct kvti_fault_post *post;
    uint64_t next_ns = UINT64_MAX;

    kvti_fault_lock(fault);
    post = chunk->wrapper;
    /* The first state that is not done decides; it may have come before. */
    if (!post->ordered && (post->outcome.state == KVT_QUEUED ||
                           post->outcome.state == KVT_DONE)) {
        post->outcome = *outcome;
    }
    if (outcome->fin == KVTI_FIN_BOTH) {
        struct kvti_fault_conn *conn = post->conn;
        uint64_t now_ns = kvti_now_ns();

        chunk->conn = conn;
        chunk->wrapper = NULL;
        come_back(post, now_ns);
        if (fault->inline_post == post) {
            fault->inline_post = NULL;
            (void)pthread_cond_signal(&fault->inline_back);
        }
        next_ns = advance(fault, post, now_ns);
        if (conn != NULL) {
            conn->active--;
            check_doomed(fault, conn);
        }
    } else if (transparent(fault, post)) {
        report(fault, post, outcome->fin);
    }
    kvti_fault_unlock(fault);
    if (next_ns != UINT64_MAX) {
        fault->env->wake(fault->env->ctx);
    }
}

uint64_t kvti_fault_turn_posts(struct kvti_fault *fault, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;

    run_posts(fault);
    kvti_fault_lock(fault);
    kvti_list_each(node, &fault->posts) {
        struct kvti_fault_post *post = kvti_container(
            node, struct kvti_fault_post, node);
        uint64_t due_ns;

        if (post->place == KVTI_FAULT_BACK && post->turns > 0) {
            post->turns--;
        }
        due_ns = advance(fault, post, now_ns);
        next_ns = due_ns < next_ns ? due_ns : next_ns;
    }
    kvti_fault_unlock(fault);
    return next_ns;
}
