/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault engine's inside. fault.c has the design note; fault_post.c does
 * chunks, fault_job.c jobs and connections.
 */
#ifndef KVTI_FAULT_H
#define KVTI_FAULT_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine.h"
#include "fault_rules.h"

/* One job from job() to its report. Under the lock. */
struct kvti_fault_job {
    struct kvti_list node; /* one of the three lists of jobs, always */
    struct kvti_job *job;
    struct kvti_fault_conn *conn; /* NULL for memory and export */
    uint32_t kind;                /* a copy: at close the job may be gone */
    bool hang;
    bool fail;
    uint64_t epoch;
    uint64_t delay_ns;
    uint64_t due_ns; /* while late */
    int code;        /* while late */
    struct kvt_error err;
};

/* One connection; the core's conn and the inner engine's link point here. */
struct kvti_fault_conn {
    struct kvti_list node;        /* fault.conns, from the LOAD's report on */
    struct kvti_fault_job unload; /* here, so that it cannot lack memory */
    void *inner;                  /* the inner engine's conn */
    void *link;                   /* the core's, const */
    uint32_t active; /* posts that the inner engine has and may still move */
    bool loaded;     /* the LOAD is reported */
    bool shut;       /* no post gets through: dead by a rule, or unloading */
    bool doomed;     /* report DEAD when nothing is active */
    bool dead;       /* the inner engine reported DEAD */
    bool early[2];   /* enum kvti_conn_event came before the LOAD's report */
    struct kvt_error why[2];
};

/* What a post was told to do. Bits add up over the rules that match it. */
enum kvti_fault_bit {
    KVTI_FAULT_BIT_SKIP = 1u << 0,  /* never reaches the inner engine */
    KVTI_FAULT_BIT_EARLY = 1u << 1, /* its state is reported before the end */
    KVTI_FAULT_BIT_HANG = 1u << 2,
    KVTI_FAULT_BIT_HOLD = 1u << 3,
    KVTI_FAULT_BIT_HALF = 1u << 4,
    KVTI_FAULT_BIT_NEVER = 1u << 5,
    KVTI_FAULT_BIT_DOWN = 1u << 6,
    KVTI_FAULT_BIT_DEAD = 1u << 7,
    KVTI_FAULT_BIT_INLINE = 1u << 8
};

enum kvti_fault_place {
    KVTI_FAULT_WAITS, /* not started: it hangs, or is about to start */
    KVTI_FAULT_INNER, /* the inner engine has it */
    KVTI_FAULT_BACK   /* no longer (or never) there; only the report is due */
};

/* One chunk from post() to its last report. Under the lock. */
struct kvti_fault_post {
    struct kvti_list node; /* fault.posts, in the order of posting */
    struct kvti_chunk *chunk;
    struct kvti_fault_conn *conn; /* NULL once that is unloaded */
    uint64_t number;              /* counted from 1 */
    uint32_t place;               /* enum kvti_fault_place */
    uint32_t bits;                /* enum kvti_fault_bit */
    uint64_t epoch;
    uint64_t delay_ns;
    uint64_t late_ns;
    uint64_t early_due_ns;
    uint64_t back_due_ns;
    uint32_t turns; /* that the last report still waits for */
    bool ordered;   /* `outcome` is a rule's, not the inner engine's */
    bool early_sent;
    bool half_sent;
    struct kvti_outcome outcome;
};

struct kvti_fault {
    /* Const after open. */
    const struct kvti_env *env; /* the core's */
    struct kvti_env inner_env;
    const struct kvti_engine_ops *inner;
    void *inner_self;

    /* Under the lock. */
    pthread_mutex_t lock;
    pthread_cond_t inline_back;
    struct kvti_fault_post *inline_post; /* that the control thread awaits */
    struct kvti_fault_rules rules;
    uint64_t epoch; /* of the rules; what an older one held is free */
    uint64_t post_count;
    uint64_t job_count[KVTI_FAULT_JOB_KINDS];
    uint64_t unproven; /* posts that will never be reported final */
    struct kvti_list posts;
    struct kvti_list conns;
    struct kvti_list jobs_waiting; /* not started */
    struct kvti_list jobs_inner;
    struct kvti_list jobs_late; /* over, not reported */
};

/* Wraps `inner` whatever the registry says; kvti_engine_fault.open splits the
 * spec and calls this, tests bring an engine of their own. */
int kvti_fault_wrap(const struct kvti_env *env,
                    const struct kvti_engine_ops *inner, const char *inner_rest,
                    const char *rules, void **ret_self,
                    struct kvti_engine_traits *ret_traits,
                    struct kvt_error *err);

/* Whether something decided under `epoch` is held no longer. */
static inline bool kvti_fault_released(const struct kvti_fault *fault,
                                       uint64_t epoch)
{
    return epoch != fault->epoch;
}

void kvti_fault_lock(struct kvti_fault *fault);
void kvti_fault_unlock(struct kvti_fault *fault);

/* Out of their lists, and gone. An UNLOAD's record goes with its connection,
 * which it is a part of. */
void kvti_fault_post_free(struct kvti_fault_post *post);
void kvti_fault_job_free(struct kvti_fault_job *record);
void kvti_fault_conn_free(struct kvti_fault_conn *conn);

/* -- fault_post.c -- */

void kvti_fault_post(void *self, struct kvti_chunk *chunk);
void kvti_fault_chunk_back(void *ctx, struct kvti_chunk *chunk,
                           const struct kvti_outcome *outcome);

/* Starts what waits no longer, reports what is due. Control thread, without
 * the lock. Returns when to come again. */
uint64_t kvti_fault_turn_posts(struct kvti_fault *fault, uint64_t now_ns);

/* From here on no post of the connection reaches the inner engine; those that
 * wait end now, in the name of `rule`. Under the lock. */
void kvti_fault_shut(struct kvti_fault *fault, struct kvti_fault_conn *conn,
                     enum kvti_fault_post_rule rule);

/* The connection is about to be freed. Under the lock. */
void kvti_fault_orphan_posts(struct kvti_fault *fault,
                             const struct kvti_fault_conn *conn);

/* -- fault_job.c -- */

void kvti_fault_job(void *self, struct kvti_job *job);
void kvti_fault_job_back(void *ctx, struct kvti_job *job, int code,
                         const struct kvt_error *err);
void kvti_fault_conn_event(void *ctx, void *link, enum kvti_conn_event event,
                           const struct kvt_error *why);
uint64_t kvti_fault_turn_jobs(struct kvti_fault *fault, uint64_t now_ns);

/* Reports to the core, now or after the LOAD's report. Under the lock. */
void kvti_fault_tell_conn(struct kvti_fault *fault,
                          struct kvti_fault_conn *conn,
                          enum kvti_conn_event event,
                          const struct kvt_error *why);

#endif /* KVTI_FAULT_H */
