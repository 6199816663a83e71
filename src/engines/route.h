/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the engine that callers know as `nixl`: two engines in one. What
 * is near, host memory of a process on this host, goes by the local engine;
 * everything else is far and goes by NIXL.
 *
 * Threads, as the fields are tagged:
 *   [const]   set before anybody else can see the object
 *   [control] the core's control thread
 *   [mu]      under route->mu
 *
 * Both engines report to us from any of their threads. What needs a next step
 * is queued under mu and goes on in turn(), on the control thread. route->mu
 * is a leaf but for reports to the core, which only queue.
 *
 * A connection outlives every chunk that near has of it: near reports its
 * UNLOAD after them. If it could not wait for one, the connection stays until
 * we close. Chunks that far has may outlive it, so it is not looked at for
 * those.
 */
#ifndef KVTI_ROUTE_H
#define KVTI_ROUTE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../engine.h"

struct kvti_route;
struct kvti_route_conn;

/* One of the two engines. [const] */
struct kvti_route_side {
    struct kvti_route *route;
    const struct kvti_engine_ops *ops;
    void *self; /* NULL: it is not there */
    struct kvti_env env;
    struct kvti_engine_traits traits;
};

/* A job, from job() to its report: what the core gave, and how far it is. It
 * is one side's or in one list. */
struct kvti_route_task {
    struct kvti_list all;         /* [mu] in route->tasks until reported */
    struct kvti_list node;        /* [mu] in route->done, or
                                   * [control] in conn->waiting_jobs */
    struct kvti_job *job;         /* [const] */
    uint32_t kind;                /* [const] enum kvti_job_kind, the core's */
    struct kvti_route_conn *conn; /* [const] NULL for memory and export */
    struct kvti_mem **mems;       /* [const] the core's */
    size_t mem_count;             /* [const] */
    struct kvti_mem **dram;       /* [const] those of them that are near's */
    size_t dram_count;            /* [const] */
    /* Of whoever has the task. */
    const struct kvti_route_side *from; /* that had it last */
    bool undo;                          /* a MEM_ADD that is taken back */
    int code;                           /* of that side; undo: the reason */
    struct kvt_error err;
};

enum kvti_route_far { KVTI_FAR_NONE, KVTI_FAR_LOADING, KVTI_FAR_UP };

struct kvti_route_conn {
    struct kvti_list node;     /* [mu] in route->conns */
    struct kvti_route *route;  /* [const] */
    void *link;                /* [const] the core's */
    const struct kvti_md *md;  /* [const] valid until the UNLOAD's report */
    void *near;                /* [control] the local engine's, or NULL */
    void *far;                 /* [control] NIXL's, with KVTI_FAR_UP */
    uint32_t far_state;        /* [control] enum kvti_route_far */
    bool denied;               /* [control] near may not write any more */
    bool notes_near;           /* [control] messages went this way: the next */
    bool notes_far;            /* ones too, or they would lose their order */
    bool published;            /* [mu] the core has it: events may go there */
    bool leaving;              /* [mu] being unloaded: near's word is final */
    bool early[2];             /* [mu] enum kvti_conn_event before that */
    struct kvt_error why[2];   /* [mu] */
    struct kvt_error near_err; /* [mu] why it is not near, or not any more */
    struct kvti_list waiting_chunks;    /* [control] for NIXL to load it */
    struct kvti_list waiting_jobs;      /* [control] CONNECT and NOTIFY */
    struct kvti_route_task *unload;     /* [control] or NULL */
    struct kvti_route_task unload_task; /* here: it cannot lack memory */
    struct kvti_route_task load_task;   /* of the load when first needed */
    struct kvti_job load_job;
};

struct kvti_route {
    const struct kvti_env *env;  /* [const] the core's */
    struct kvti_route_side near; /* [const] local */
    struct kvti_route_side far;  /* [const] NIXL */
    struct kvt_error no_near;    /* [const] why there is none */
    struct kvti_route *leaked_next;
    pthread_mutex_t mu;
    struct kvti_list tasks; /* [mu] every job that the core waits for */
    struct kvti_list done;  /* [mu] tasks that came back */
    struct kvti_list retry; /* [mu] chunks that near was not allowed */
    struct kvti_list conns; /* [mu] */
};

/* Whether a side says that the kernel keeps it from the peer, or that it has
 * no way there: the other side may have one. */
static inline bool kvti_route_is_denied(int code)
{
    return code == KVT_EPERM || code == KVT_EUNSUPPORTED;
}

/* route_job.c; control thread where not said otherwise */
void kvti_route_job(void *self, struct kvti_job *job);
/* A side is done with a job; any thread. */
void kvti_route_job_back(const struct kvti_route_side *side,
                         struct kvti_job *job, int code,
                         const struct kvt_error *err);
void kvti_route_turn_jobs(struct kvti_route *route);
/* Gives the job to a side. */
void kvti_route_hand(const struct kvti_route_side *side,
                     const struct kvti_route_task *task);
/* The job is the core's again, as it gave it; the task is gone. Any thread;
 * with mu held, the caller frees the task. */
void kvti_route_report_locked(struct kvti_route *route,
                              struct kvti_route_task *task, int code,
                              const struct kvt_error *err);
void kvti_route_finish(struct kvti_route *route, struct kvti_route_task *task,
                       int code, const struct kvt_error *err);
void kvti_route_task_free(struct kvti_route_task *task);
/* Both sides are closed: what they had not answered is as the core gave it. */
void kvti_route_tasks_fini(struct kvti_route *route);
/* CONNECT and NOTIFY jobs that wait for NIXL to load the peer: they go there,
 * or fail. */
void kvti_route_flush_calls(struct kvti_route_conn *conn);
void kvti_route_drop_calls(struct kvti_route_conn *conn,
                           const struct kvt_error *why);

/* route_conn.c; control thread where not said otherwise */
struct kvti_route_conn *kvti_route_conn_new(struct kvti_route *route,
                                            const struct kvti_job *job);
void kvti_route_conn_free(struct kvti_route_conn *conn);
/* A LOAD begins, and goes on when a side is done with it. */
void kvti_route_load(struct kvti_route *route, struct kvti_route_task *task);
void kvti_route_load_on(struct kvti_route *route, struct kvti_route_task *task);
/* The same of an UNLOAD. */
void kvti_route_unload(struct kvti_route_task *task);
void kvti_route_unload_on(struct kvti_route_conn *conn);
/* Has NIXL load the peer, unless it did. What waits goes on afterwards. */
void kvti_route_want_far(struct kvti_route_conn *conn);
/* That load is over. */
void kvti_route_far_loaded(struct kvti_route_conn *conn);
/* Any thread. */
void kvti_route_conn_event(void *ctx, void *link, enum kvti_conn_event event,
                           const struct kvt_error *why);

/* route_post.c; control thread where not said otherwise */
void kvti_route_post(void *self, struct kvti_chunk *chunk);
/* Any thread. */
void kvti_route_chunk_back(const struct kvti_route_side *side,
                           struct kvti_chunk *chunk,
                           const struct kvti_outcome *outcome);
void kvti_route_turn_chunks(struct kvti_route *route);
/* NIXL has loaded the peer: what waited is posted. */
void kvti_route_flush_chunks(struct kvti_route_conn *conn);
/* What was not posted never will be. */
void kvti_route_drop_chunks(struct kvti_route_conn *conn,
                            const struct kvt_error *why);

#endif /* KVTI_ROUTE_H */
