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
 * A remote that is `down` is posted to no more, by nobody; one that is `stale`
 * NIXL has forgotten, or not yet heard of, and NIXL is asked nothing about it:
 * it knows names only, and would answer for the next agent of that name.
 *
 * engine->mu is a leaf and never held across a call out.
 */
#ifndef KVTI_NIXL_H
#define KVTI_NIXL_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../engine.h"
#include "local.h"
#include "nixl_load.h"

#define KVTI_NIXL_PAGE_BYTES 4096u

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
    uint64_t pthr_delay_us; /* 0: no progress thread if this NIXL
                             * can do without */
    uint64_t probe_s;       /* how long a probe process may take */
    uint32_t descs_max;     /* of one request: below what NIXL spreads over
                         * threads */
    uint64_t gpu;           /* whose context the NIXL thread has, or NO_GPU */
    bool needs_cuda;        /* without libcuda, open fails */
    bool telemetry;
    bool confirm;
    bool nic_dropped;    /* UCX_NET_DEVICES won over a device_list */
    bool release_failed; /* by nixl_xfer.c: NIXL's backend can take it */
};

#define KVTI_NIXL_NO_GPU UINT64_MAX

/* Found by the caller of open, then the NIXL thread's. */
struct kvti_nixl_gpu {
    struct kvti_nixl_cuda *cuda; /* NULL: not used */
    void *context;               /* to be current in the NIXL thread */
    int device;                  /* whose primary context is held */
    bool held;
    bool entered;
    char why[128]; /* what went wrong, or "" */
};

/* A peer's process on this host, whose death is a proof. One for each agent
 * in it, since an agent is known by its nonce. */
struct kvti_nixl_proc {
    struct kvti_list node;           /* [mu] in engine->procs or procs_idle */
    struct kvti_nixl *engine;        /* [const] */
    int32_t pid;                     /* [const] */
    uint64_t start_time;             /* [const] */
    uint64_t nonce_addr;             /* [const] */
    uint8_t nonce[KVTI_NONCE_BYTES]; /* [const] */
    bool readable;                   /* [const] we may look at its nonce */
    int pidfd;                       /* [const] */
    uint32_t refs;                   /* [mu] connections and chunks */
    bool gone;                       /* [mu] */
    bool watched;                    /* [control] */
    struct kvti_watch watch;         /* [control] */
};

struct kvti_nixl_remote {
    struct kvti_list node;                       /* [nixl] in engine->remotes */
    char name[KVT_NAME_MAX + 1];                 /* [const] */
    uint8_t incarnation[KVTI_INCARNATION_BYTES]; /* [const] */
    struct kvti_regions regions; /* [nixl] of all blobs, as NIXL has them */
    struct kvti_list conns;      /* [nixl] by remote_node */
    struct kvti_list landed;     /* [nixl] chunks with status 0 */
    struct kvti_list confirm;    /* [nixl] in engine->unconfirmed */
    uint32_t queued;             /* [nixl] chunks in engine->pending */
    uint32_t flying;             /* [nixl] requests that NIXL has */
    bool down;                   /* [nixl] the link broke: load it anew */
    bool stale;                  /* [nixl] NIXL has forgotten it */
    uint64_t idle_until_ns;      /* [nixl] 0: something needs it */
    uint64_t blob_hash;          /* [nixl] of the bytes that NIXL has */
    bool has_page;               /* [nixl] `page` is known */
    uint64_t page; /* [nixl] its agent's own page: mapped while the agent is */
};

struct kvti_nixl_conn {
    struct kvti_list node;           /* [control] in engine->conns */
    struct kvti_list remote_node;    /* [nixl] in remote->conns */
    void *link;                      /* [const] */
    struct kvti_nixl_remote *remote; /* [nixl] */
    struct kvti_nixl_proc *proc;     /* [const] after load; counted, or NULL */
    bool published;                  /* [mu] the core knows it */
    bool broke;                      /* [mu] the link did */
};

/* A read of one byte into our scratch page: it makes a connection, or shows
 * that the link was sound after everything that had landed before it. */
struct kvti_nixl_probe {
    struct kvti_list node;           /* in engine->probes */
    struct kvti_nixl_remote *remote; /* counted in its `flying` */
    struct nixl_xfer_req *req;
    struct kvti_job *job;     /* CONNECT, or NULL */
    struct kvti_list covered; /* chunks that it confirms */
};

#define KVTI_NIXL_HINTS_MAX 16u
#define KVTI_NIXL_EPOLLS_MAX 256u

/* A descriptor that is ready when NIXL may have something to do. */
struct kvti_nixl_hint {
    int fd;
    uint32_t strikes;       /* wake-ups in a row for nothing */
    uint64_t mute_until_ns; /* not looked at before */
};

struct kvti_nixl_hints {
    struct kvti_nixl_hint of[KVTI_NIXL_HINTS_MAX];
    uint32_t count;
    bool all_known; /* `before` is complete */
    uint32_t before_count;
    int before[KVTI_NIXL_EPOLLS_MAX];
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
    const struct kvti_env *env;        /* [const] */
    const struct kvti_nixl_lib *lib;   /* [const] */
    struct kvti_nixl_config config;    /* [const] */
    char agent_name[KVT_NAME_MAX + 1]; /* [const] */
    char text[KVT_TEXT_MAX];           /* [const] what peers' `text` says */
    struct kvti_local_id self;         /* [const] */
    bool has_self;                     /* [const] */
    struct kvti_nonce_page *page;      /* [const] with has_self */
    struct kvti_gate gate;             /* [const] with has_self: nothing open */
    struct kvti_nixl_checks *checks;   /* [const] NULL: nothing is probed */
    struct kvti_heartbeat heartbeat;

    pthread_mutex_t mu;
    pthread_cond_t quiet;         /* [mu] it ended, or a report is out */
    struct kvti_list jobs;        /* [mu] */
    struct kvti_list chunks;      /* [mu] */
    struct kvti_list done;        /* [mu] LOADs for turn() to publish */
    struct kvti_list procs;       /* [mu] */
    struct kvti_list procs_idle;  /* [mu] to be unwatched and freed */
    bool started;                 /* [mu] setup is over: setup_code */
    bool ended;                   /* [mu] the thread touches nothing more */
    bool stop;                    /* [mu] end; report nothing any more */
    bool abandoned;               /* [mu] open gave up: the thread frees all */
    bool settle;                  /* [mu] a peer's process died */
    bool notes_wanted;            /* [mu] the core has room again */
    bool sleeping;                /* [mu] or about to: write wake_fd */
    uint32_t reporting;           /* [mu] threads inside a report */
    int setup_code;               /* [mu] */
    struct kvt_error setup_err;   /* [mu] */
    _Atomic(const char *) step;   /* what setup is doing */
    _Atomic(const char *) detail; /* with which backend, or "" */

    int wake_fd; /* [const] */

    pthread_t thread;           /* [control] */
    struct kvti_list conns;     /* [control] published */
    struct kvti_list leak_node; /* in the list of nixl_open.c, under its lock */

    struct kvti_nixl_gpu gpu; /* [const] when started */

    /* [nixl] */
    struct nixl_agent *agent;
    struct nixl_backend **backends; /* config.backend_count of them */
    struct nixl_opt_args *no_merge;
    struct nixl_notif_map *notes; /* being delivered */
    struct nixl_notif_map *later; /* what came meanwhile */
    struct nixl_reg_dlist *scratch_list;
    unsigned char *scratch;
    struct kvti_regions mems; /* our extents; cookie is the extent */
    struct kvti_list remotes;
    struct kvti_list pending;
    struct kvti_list flying;
    struct kvti_list parked;
    struct kvti_list probes;
    struct kvti_list unconfirmed; /* remotes with landed chunks */
    uint32_t lingering;           /* remotes that nothing needs */
    bool listening; /* our metadata is out: notifications may come */
    bool holding;   /* `notes` holds some that the core has not taken */
    bool unread;    /* NIXL did not hand some out, or clear it: asked again */
    size_t note_agent;
    size_t note_index;
    struct kvti_nixl_hints hints;
    uint64_t active_ns; /* when something last happened */
    bool busy;          /* something happened in this round */
};

/* What a chunk of ours carries while the engine has it. [nixl] */
struct kvti_nixl_chunk {
    struct nixl_xfer_req *req;
    struct kvti_nixl_remote *remote;
    struct kvti_nixl_proc *proc; /* counted, or NULL */
    uint64_t offset;             /* into copies[copy_at], where to go on */
    uint32_t copy_at;
    uint32_t descs; /* made so far */
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
/* NIXL thread, the last thing it does: `engine` was left to it. */
void kvti_nixl_free_abandoned(struct kvti_nixl *engine);

/* nixl_config.c: copies the options and reads the engine's own part of the
 * specification. */
int kvti_nixl_config_init(struct kvti_nixl_config *config,
                          const struct kvt_options *options, const char *rest,
                          struct kvt_error *err);
void kvti_nixl_config_fini(struct kvti_nixl_config *config);
bool kvti_nixl_config_wants_efa(const struct kvti_nixl_config *config);

/* nixl_gpu.c. find: caller's thread, whose context counts when no number is
 * given. enter: NIXL thread, before all that NIXL does, until it ends. fini:
 * any thread, after that. */
void kvti_nixl_gpu_find(struct kvti_nixl_gpu *gpu, uint64_t number);
int kvti_nixl_gpu_enter(struct kvti_nixl_gpu *gpu, uint64_t number,
                        bool needs_cuda, struct kvt_error *err);
void kvti_nixl_gpu_fini(struct kvti_nixl_gpu *gpu);

/* nixl_agent.c; NIXL thread. setup makes the agent and its backends, all or
 * nothing; teardown destroys them whatever is in flight. */
int kvti_nixl_setup(struct kvti_nixl *engine, struct kvt_error *err);
void kvti_nixl_teardown(struct kvti_nixl *engine);
const char *kvti_nixl_status_text(int status);
/* Whether this NIXL gets a progress thread though nobody asked for it. */
bool kvti_nixl_needs_thread(const char *version);
/* Any thread: the names of NIXL's backends as files, "GDS, POSIX, UCX". */
int kvti_nixl_plugins(const struct kvti_nixl_lib *lib, char *text, size_t size,
                      struct kvt_error *err);

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

/* nixl_wake.c */
int kvti_nixl_wake_init(struct kvti_nixl *engine, struct kvt_error *err);
void kvti_nixl_wake_fini(struct kvti_nixl *engine);
/* Any thread: there is something for the NIXL thread, put there under mu. */
void kvti_nixl_wake_locked(struct kvti_nixl *engine);
/* NIXL thread, around the making of the backends. */
void kvti_nixl_hints_before(struct kvti_nixl_hints *hints);
void kvti_nixl_hints_after(struct kvti_nixl_hints *hints);
/* NIXL thread: NIXL had something to do. */
void kvti_nixl_hints_worked(struct kvti_nixl_hints *hints);
/* NIXL thread: until it is woken, a hint is ready or the nap is over, which is
 * false. UINT64_MAX: no nap. */
bool kvti_nixl_sleep(struct kvti_nixl *engine, uint64_t now_ns,
                     uint64_t nap_ns);

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
/* Any thread: the error for NIXL's answer to metadata. */
int kvti_nixl_fail_load(const struct kvti_md *md, int status,
                        struct kvt_error *err);
/* Tells its connections; what had landed unconfirmed is parked. */
void kvti_nixl_remote_broke(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote, const char *format,
                            ...) KVTI_PRINTF(3, 4);
/* Forgets it when nothing needs it any more, at once or some time later. */
void kvti_nixl_remote_check(struct kvti_nixl *engine,
                            struct kvti_nixl_remote *remote);
/* The links of peers whose process has died are down. */
void kvti_nixl_remotes_settle(struct kvti_nixl *engine);
/* Forgets those whose time is over. */
void kvti_nixl_remotes_sweep(struct kvti_nixl *engine);
void kvti_nixl_remotes_fini(struct kvti_nixl *engine);

/* nixl_proc.c */
int kvti_nixl_proc_get(struct kvti_nixl *engine, const struct kvti_md *md,
                       struct kvti_nixl_proc **ret, struct kvt_error *err);
struct kvti_nixl_proc *kvti_nixl_proc_share(struct kvti_nixl *engine,
                                            struct kvti_nixl_proc *proc);
void kvti_nixl_proc_put(struct kvti_nixl *engine, struct kvti_nixl_proc *proc);
bool kvti_nixl_proc_gone(struct kvti_nixl *engine,
                         const struct kvti_nixl_proc *proc);
/* Whether it still is the program that we know, as far as can be seen. */
bool kvti_nixl_proc_same(const struct kvti_nixl_proc *proc);
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
/* NIXL has forgotten the remote: its requests are parked, unasked. */
void kvti_nixl_drop_flying(struct kvti_nixl *engine,
                           struct kvti_nixl_remote *remote);
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
/* A link that was idle: down afterwards if NIXL knows that it broke. */
void kvti_nixl_try_link(struct kvti_nixl *engine,
                        struct kvti_nixl_remote *remote);
void kvti_nixl_poll_probes(struct kvti_nixl *engine);
/* Reports CONNECT jobs of a connection that is being unloaded. */
void kvti_nixl_drop_connects(struct kvti_nixl *engine,
                             const struct kvti_nixl_conn *conn);
/* Ends those of a remote that NIXL has forgotten. */
void kvti_nixl_drop_probes(struct kvti_nixl *engine,
                           struct kvti_nixl_remote *remote);
void kvti_nixl_probes_fini(struct kvti_nixl *engine);

/* NIXL thread: somebody can write to us, or we to somebody. */
static inline bool kvti_nixl_is_open(const struct kvti_nixl *engine)
{
    return engine->listening || !kvti_list_empty(&engine->remotes);
}

/* nixl_note.c; NIXL thread */
void kvti_nixl_notify(struct kvti_nixl *engine, struct kvti_job *job);
void kvti_nixl_poll_notes(struct kvti_nixl *engine);

#endif /* KVTI_NIXL_H */
