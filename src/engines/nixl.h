/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the engine `nixl`: peers anywhere, by NIXL's agents.
 *
 * Threads and who owns what; fields are tagged the same way.
 *   [const]   set before anybody else can see the object
 *   [control] the core's control thread
 *   [nixl]    one thread of ours that makes every call into NIXL
 *   [mu]      under engine->mu
 *
 * The control thread only queues: jobs and chunks wait in two lists under mu,
 * the NIXL thread takes them, and reports. A LOAD goes back through turn(),
 * because the peer's process can be watched on the control thread only.
 *
 * A remote is what NIXL knows under one agent name; connections share it as
 * long as they name the same incarnation. It lives until no connection and no
 * request needs it. What became of a request decides where its chunk is:
 *
 *   chunks [mu] -> pending -> flying -> remote->landed -> (confirmed) DONE
 *                               |             |
 *                               +---- parked -+   not proven; kept until its
 *                                                 peer is dead or we close
 *
 * engine->mu is a leaf and never held across a call out.
 */
#ifndef KVTI_NIXL_H
#define KVTI_NIXL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../engine.h"
#include "local.h"
#include "nixl_load.h"

/* What open was told, copied: a thread that hangs in NIXL outlives open. */
struct kvti_nixl_param {
    char *backend;
    char *key;
    char *value;
};

struct kvti_nixl_config {
    char **backends;
    size_t backend_count;
    struct kvti_nixl_param *params;
    size_t param_count;
    uint32_t workers;
    uint64_t pthr_delay_us;
    bool telemetry;
    bool confirm;
};

/* A peer's process on this host, whose death is a proof. */
struct kvti_nixl_proc {
    struct kvti_list node;    /* [mu] in engine->procs or procs_idle */
    struct kvti_nixl *engine; /* [const] */
    int32_t pid;              /* [const] */
    uint64_t start_time;      /* [const] */
    int pidfd;                /* [const] */
    uint32_t refs;            /* [mu] connections and chunks */
    bool gone;                /* [mu] */
    bool watched;             /* [control] */
    struct kvti_watch watch;  /* [control] */
};

struct kvti_nixl_remote {
    struct kvti_list node;                       /* [nixl] in engine->remotes */
    char name[KVT_NAME_MAX + 1];                 /* [const] */
    uint8_t incarnation[KVTI_INCARNATION_BYTES]; /* [const] */
    struct kvti_regions regions; /* [nixl] as NIXL registered them there */
    struct kvti_list conns;      /* [nixl] by remote_node */
    struct kvti_list landed;     /* [nixl] chunks with status 0 */
    struct kvti_list confirm;    /* [nixl] in engine->unconfirmed */
    uint32_t queued;             /* [nixl] chunks in engine->pending */
    uint32_t flying;             /* [nixl] requests that NIXL has */
    bool confirming;             /* [nixl] a probe that confirms is under way */
    bool down;  /* [nixl] the link broke; a new load is needed */
    bool stale; /* [nixl] NIXL has forgotten it */
};

struct kvti_nixl_conn {
    struct kvti_list node;           /* [control] in engine->conns */
    struct kvti_list remote_node;    /* [nixl] in remote->conns */
    void *link;                      /* [const] */
    struct kvti_nixl_remote *remote; /* [nixl] */
    struct kvti_nixl_proc *proc;     /* [const] after load; counted, or NULL */
};

/* A read of one byte into our scratch page: it makes a connection, or shows
 * that the link was sound after everything that had landed before it. */
struct kvti_nixl_probe {
    struct kvti_list node;           /* in engine->probes */
    struct kvti_nixl_remote *remote; /* counted in its `flying` */
    struct nixl_xfer_req *req;
    struct kvti_job *job; /* CONNECT, or NULL */
    bool confirms;
    struct kvti_list covered; /* chunks that it confirms */
};

/* Registered with NIXL as one piece. */
struct kvti_nixl_extent {
    uint64_t addr;
    uint64_t length;
    uint32_t kind;
    uint32_t device;
    uint32_t refs; /* regions inside it */
};

struct kvti_nixl {
    const struct kvti_env *env;      /* [const] */
    const struct kvti_nixl_lib *lib; /* [const] */
    struct kvti_nixl_config config;  /* [const] */
    char text[KVT_TEXT_MAX];         /* [const] what peers' `text` says */
    struct kvti_local_id self;       /* [const] */
    bool has_self;                   /* [const] */
    struct kvti_nonce_page *page;    /* [const] with has_self */
    struct kvti_gate gate;           /* [const] with has_self: nothing open */
    struct kvti_heartbeat heartbeat;

    pthread_mutex_t mu;
    pthread_cond_t work;          /* [mu] something for the NIXL thread */
    pthread_cond_t quiet;         /* [mu] it ended, or a report is out */
    struct kvti_list jobs;        /* [mu] */
    struct kvti_list chunks;      /* [mu] */
    struct kvti_list done;        /* [mu] LOADs for turn() to publish */
    struct kvti_list procs;       /* [mu] */
    struct kvti_list procs_idle;  /* [mu] to be unwatched and freed */
    bool started;                 /* [mu] setup is over: setup_code */
    bool ended;                   /* [mu] the thread touches nothing more */
    bool stop;                    /* [mu] end; report nothing any more */
    bool settle;                  /* [mu] a peer's process died */
    bool notes_wanted;            /* [mu] the core has room again */
    uint32_t reporting;           /* [mu] threads inside a report */
    int setup_code;               /* [mu] */
    struct kvt_error setup_err;   /* [mu] */
    _Atomic(const char *) step;   /* what setup is doing */
    _Atomic(const char *) detail; /* with which backend, or "" */

    pthread_t thread;              /* [control] */
    struct kvti_list conns;        /* [control] published */
    struct kvti_nixl *leaked_next; /* [control] */

    /* [nixl] */
    struct nixl_agent *agent;
    struct nixl_backend **backends; /* config.backend_count of them */
    struct nixl_opt_args *no_merge;
    struct nixl_notif_map *notes;
    struct nixl_reg_dlist *scratch_list;
    unsigned char *scratch;
    struct kvti_regions mems; /* our extents; cookie is the extent */
    struct kvti_list remotes;
    struct kvti_list pending;
    struct kvti_list flying;
    struct kvti_list parked;
    struct kvti_list probes;
    struct kvti_list unconfirmed; /* remotes with landed chunks */
    bool listening; /* our metadata is out: notifications may come */
    bool holding;   /* `notes` holds some that the core has not taken */
    size_t note_agent;
    size_t note_index;
    uint32_t idle_rounds;
    bool busy; /* something happened in this round */
};

/* What a chunk of ours carries while the engine has it. [nixl] */
struct kvti_nixl_chunk {
    struct nixl_xfer_req *req;
    struct kvti_nixl_remote *remote;
    struct kvti_nixl_proc *proc; /* counted, or NULL */
    uint64_t offset;             /* into copies[copy_at], where to go on */
    uint32_t copy_at;
    uint32_t descs; /* posted so far */
    uint32_t state; /* parked: as reported */
    bool cut;       /* its connection is gone: post nothing more of it */
};

_Static_assert(sizeof(struct kvti_nixl_chunk) <= KVTI_PRIV_BYTES,
               "a chunk has room for this much");

static inline struct kvti_nixl_chunk *kvti_nixl_chunk_priv(
    struct kvti_chunk *chunk)
{
    return (struct kvti_nixl_chunk *)(void *)chunk->priv;
}

/* LOAD, between the NIXL thread and turn(). */
static inline struct kvti_nixl_conn **kvti_nixl_job_conn(struct kvti_job *job)
{
    return (struct kvti_nixl_conn **)(void *)job->priv;
}

/* nixl_open.c */
int kvti_nixl_probe(struct kvt_engine_info *ret);
int kvti_nixl_open(const struct kvti_env *env, const char *rest,
                   void **ret_self, struct kvti_engine_traits *ret_traits,
                   struct kvt_error *err);
int kvti_nixl_close(void *self, uint64_t deadline_ns);
void kvti_nixl_after_fork(void *self);

/* nixl_config.c: copies the options and reads the engine's own part of the
 * specification. */
int kvti_nixl_config_init(struct kvti_nixl_config *config,
                          const struct kvt_options *options, const char *rest,
                          struct kvt_error *err);
void kvti_nixl_config_fini(struct kvti_nixl_config *config);
bool kvti_nixl_config_wants_efa(const struct kvti_nixl_config *config);

/* nixl_agent.c; NIXL thread. setup makes the agent and its backends, all or
 * nothing; teardown destroys them whatever is in flight. */
int kvti_nixl_setup(struct kvti_nixl *engine, struct kvt_error *err);
void kvti_nixl_teardown(struct kvti_nixl *engine);
const char *kvti_nixl_status_text(int status);

/* nixl.c */
void *kvti_nixl_thread(void *arg); /* thread; arg is the engine */
/* A report may be made between begin and end only; false: we are closed, and
 * whoever would hear it is gone. */
bool kvti_nixl_report_begin(struct kvti_nixl *engine);
void kvti_nixl_report_end(struct kvti_nixl *engine);
void kvti_nixl_report_job(struct kvti_nixl *engine, struct kvti_job *job,
                          int code, const struct kvt_error *err);

/* Around calls into NIXL. */
static inline void kvti_nixl_enter(struct kvti_nixl *engine)
{
    atomic_store(&engine->heartbeat.busy_since_ns, kvti_now_ns());
}

static inline void kvti_nixl_leave(struct kvti_nixl *engine)
{
    atomic_store(&engine->heartbeat.busy_since_ns, 0);
}

/* nixl_mem.c; NIXL thread */
int kvti_nixl_mem_add(struct kvti_nixl *engine, struct kvti_job *job,
                      struct kvt_error *err);
void kvti_nixl_mem_drop(struct kvti_nixl *engine, struct kvti_job *job);
int kvti_nixl_export(struct kvti_nixl *engine, struct kvti_job *job,
                     struct kvt_error *err);
void kvti_nixl_mem_fini(struct kvti_nixl *engine);

/* nixl_peer.c; NIXL thread where not said otherwise */
int kvti_nixl_load_peer(struct kvti_nixl *engine, struct kvti_job *job,
                        struct kvt_error *err);
void kvti_nixl_unload_peer(struct kvti_nixl *engine, struct kvti_job *job);
/* Tells its connections; what had landed unconfirmed is parked. */
void kvti_nixl_remote_broke(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote, const char *format,
                            ...) KVTI_PRINTF(3, 4);
/* Forgets it when nothing needs it any more. */
void kvti_nixl_remote_check(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote);
void kvti_nixl_remotes_fini(struct kvti_nixl *engine);

/* nixl_proc.c */
int kvti_nixl_proc_get(struct kvti_nixl *engine, const struct kvti_md *md,
                       struct kvti_nixl_proc **ret, struct kvt_error *err);
struct kvti_nixl_proc *kvti_nixl_proc_share(struct kvti_nixl *engine,
                                            struct kvti_nixl_proc *proc);
void kvti_nixl_proc_put(struct kvti_nixl *engine, struct kvti_nixl_proc *proc);
bool kvti_nixl_proc_gone(struct kvti_nixl *engine,
                         const struct kvti_nixl_proc *proc);
void kvti_nixl_proc_watch(struct kvti_nixl_proc *proc); /* control thread */
void kvti_nixl_procs_sweep(struct kvti_nixl *engine);   /* control thread */
void kvti_nixl_procs_unwatch(struct kvti_nixl *engine); /* control thread */

/* nixl_xfer.c; NIXL thread */
void kvti_nixl_post_pending(struct kvti_nixl *engine);
void kvti_nixl_poll_flying(struct kvti_nixl *engine);
/* Reports the chunks of a connection that were never posted, and stops those
 * that are not wholly posted. */
void kvti_nixl_drop_pending(struct kvti_nixl *engine,
                            const struct kvti_nixl_conn *conn);
/* Its bytes have landed for certain. */
void kvti_nixl_chunk_done(struct kvti_nixl *engine, struct kvti_chunk *chunk);
/* It failed and may still be moving. */
void kvti_nixl_chunk_park(struct kvti_nixl *engine, struct kvti_chunk *chunk,
                          uint32_t state, int code, int status,
                          const char *text);
/* Parked writes to processes that are dead become final. */
void kvti_nixl_settle(struct kvti_nixl *engine);

/* nixl_probe.c; NIXL thread */
void kvti_nixl_connect(struct kvti_nixl *engine, struct kvti_job *job);
void kvti_nixl_confirm_landed(struct kvti_nixl *engine);
void kvti_nixl_poll_probes(struct kvti_nixl *engine);
/* Reports CONNECT jobs of a connection that is being unloaded. */
void kvti_nixl_drop_connects(struct kvti_nixl *engine,
                             const struct kvti_nixl_conn *conn);
void kvti_nixl_probes_fini(struct kvti_nixl *engine);

/* nixl_note.c; NIXL thread */
void kvti_nixl_notify(struct kvti_nixl *engine, struct kvti_job *job);
void kvti_nixl_poll_notes(struct kvti_nixl *engine);

#endif /* KVTI_NIXL_H */
