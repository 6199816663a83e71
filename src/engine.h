/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an engine is to the core: one table of functions, called by the control
 * thread alone (but for open), none of which may block, and a set of reports
 * that the engine makes from any of its threads.
 *
 * The contract in short.
 *  - Everything that takes time is a job or a chunk: the engine takes it, does
 *    it on a thread of its own, and reports. It may report before the call
 *    that handed it over has returned, on the control thread too: reports
 *    only queue.
 *  - A job is reported exactly once. The core keeps it until then.
 *  - A chunk is reported until a report says KVTI_FIN_BOTH; that report is the
 *    last one. A chunk that can never be proven gets no such report; the core
 *    then keeps it as long as the engine lives. FIN bits never go back.
 *  - A connection handed out by a LOAD job lives until its UNLOAD job is
 *    reported. The core sends UNLOAD only when each of its chunks is reported
 *    final or counted as lost. NOTIFY and CONNECT jobs of it that are still
 *    open are reported (KVT_EDISCONNECTED) before the UNLOAD is.
 *  - Memory dropped while a chunk of ours uses it: the core never asks that.
 *  - `node`, `wrapper`, `route`, `conn` and `link` of a chunk or job are the
 *    engine's to change while it holds it: an engine around another one puts
 *    its own there. Before a chunk is reported with both FIN bits, and a job at
 *    all, `conn` and `link` are what the core gave (but for a LOAD's `conn`).
 *  - Reports about a connection (down, dead) may come at any time between the
 *    LOAD's report and the UNLOAD's, more than once.
 */
#ifndef KVTI_ENGINE_H
#define KVTI_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "diag.h"
#include "list.h"
#include "metadata.h"
#include "region.h"

enum kvti_fin {
    KVTI_FIN_NONE = 0,
    KVTI_FIN_LOCAL = 1, /* our memory is touched no more */
    KVTI_FIN_PEER = 2,  /* the peer's memory is touched no more */
    KVTI_FIN_BOTH = 3
};

/* What became of a chunk. `state` of the first report that is not KVT_DONE
 * decides; later ones only add FIN bits. */
struct kvti_outcome {
    uint32_t state;                 /* KVT_DONE, REJECTED, FAILED, DISCONNECTED,
                          * UNREADABLE */
    uint32_t fin;                   /* enum kvti_fin */
    int32_t code;                   /* KVT_OK with KVT_DONE, else why */
    int32_t engine_code;            /* the engine's own number, or 0 */
    char text[KVT_RESULT_TEXT_MAX]; /* the engine's words */
};

struct kvti_copy {
    uint64_t local;
    uint64_t peer;
    uint64_t length;
};

#define KVTI_PRIV_BYTES 64

/* A light chunk costs less to copy than to hand to another thread. */
#define KVTI_LIGHT_BYTES 16384u
#define KVTI_LIGHT_COPIES 64u

static inline bool kvti_is_light(uint64_t copies, uint64_t bytes)
{
    return copies <= KVTI_LIGHT_COPIES && bytes <= KVTI_LIGHT_BYTES;
}

/* Which way bytes go. */
enum kvti_path { KVTI_PATH_LOCAL, KVTI_PATH_NIXL };

/* One engine request: up to the connection's number of pieces, all of one pair
 * of kinds. Allocated by the core; `copies` is its tail. */
struct kvti_chunk {
    struct kvti_list node; /* the engine's while it holds the chunk */
    void *conn;            /* the engine's, from its LOAD */
    void *wrapper;         /* the fault engine keeps its own */
    void *route;           /* and so does the shortcut, inside it */
    uint32_t op;           /* KVT_OP_WRITE or KVT_OP_READ */
    uint32_t count;
    uint32_t path; /* enum kvti_path: the engine's, set when it is posted */
    uint64_t bytes;
    uint32_t local_kind;
    uint32_t local_device;
    uint32_t peer_kind;
    uint32_t peer_device;

    /* The core's. */
    void *xfer;
    bool light;     /* control thread: in link->light, not in the window */
    uint32_t fin;   /* control thread: bits proven so far, by anybody */
    uint32_t state; /* control thread: first outcome that was not done */
    struct kvti_list core_node;

    /* The event queue's, under its lock. */
    struct kvti_list event_node;
    struct kvti_outcome outcome;
    bool awaited; /* its report wakes the control thread */

    _Alignas(16) unsigned char priv[KVTI_PRIV_BYTES]; /* the engine's */
    struct kvti_copy copies[];
};

enum kvti_job_kind {
    KVTI_JOB_MEM_ADD,  /* mems: sets cookie, gate_slot, gate_gen; all or none */
    KVTI_JOB_MEM_DROP, /* mems: afterwards no same-host peer can write them;
                        * KVT_EBUSY at the deadline if that is not certain:
                        * they stay registered but shut */
    KVTI_JOB_EXPORT,   /* buf: appends the library's own bytes; local: the
                       * process's identity, has_local says whether it is set */
    KVTI_JOB_LOAD,     /* md -> conn, path, text. md is borrowed until this
                        * failed or the UNLOAD is reported */
    KVTI_JOB_CONNECT,  /* conn: makes the connection */
    KVTI_JOB_UNLOAD,   /* conn: gone when reported, whatever the code */
    KVTI_JOB_NOTIFY    /* conn, buf: in order per connection; reported when the
                       * message is on its way */
};

struct kvti_job {
    struct kvti_list node; /* the engine's while it holds the job */
    uint32_t kind;         /* enum kvti_job_kind */
    uint32_t generation;   /* of the peer: LOAD */
    uint64_t deadline_ns;  /* CLOCK_MONOTONIC; report by then if that is in the
                            * engine's power; UINT64_MAX: none */
    void *owner;           /* the core's */
    void (*reported)(struct kvt_transport *t, struct kvti_job *job); /* too */
    struct kvti_list open_node; /* too: handed over and not reported */
    void *wrapper;              /* as in a chunk */
    void *route;                /* as in a chunk */
    void *conn;                 /* in: CONNECT, UNLOAD, NOTIFY; out: LOAD */
    void *link;                 /* LOAD: the core's name of the connection, for
                            * report_conn */
    struct kvti_mem **mems;     /* MEM_ADD, MEM_DROP */
    size_t mem_count;
    const struct kvti_md *md;   /* LOAD */
    struct kvti_buf buf;        /* EXPORT: out; NOTIFY: the message */
    struct kvti_local_id local; /* EXPORT: out */
    bool has_local;             /* EXPORT: out */
    uint32_t window;         /* LOAD, out: unfinished chunks of the connection;
                            * 0, and at most: the trait */
    uint32_t light;          /* LOAD, out: as window, of light chunks */
    uint32_t share;          /* LOAD, out: as in the traits, 0: the same */
    uint32_t copies;         /* LOAD, out: as window, pieces of one chunk */
    char path[16];           /* LOAD, out: "local", "nixl" */
    char text[KVT_TEXT_MAX]; /* LOAD, out: why this path */

    /* The event queue's, under its lock. */
    struct kvti_list event_node;
    int code;
    struct kvt_error err;

    _Alignas(16) unsigned char priv[KVTI_PRIV_BYTES]; /* the engine's */
};

enum kvti_conn_event {
    KVTI_CONN_DOWN, /* the link broke; requests may still be moving */
    KVTI_CONN_DEAD  /* proof: the peer's process is gone */
};

/* A descriptor that the control thread watches for the engine. `ready` runs
 * on the control thread with epoll's bits. The engine owns the struct. */
struct kvti_watch {
    int fd;
    uint32_t events; /* EPOLLIN, … */
    void (*ready)(struct kvti_watch *watch, uint32_t events);
};

/* One per engine thread: set around each call that might not come back. */
struct kvti_heartbeat {
    struct kvti_list node;
    _Atomic uint64_t busy_since_ns; /* 0: idle */
    const char *what;               /* const after registration */
    bool stalled;                   /* control thread */
};

/* What the core gives an engine. Const after open; functions may be called
 * from any thread where not said otherwise. */
struct kvti_env {
    void *ctx;
    void (*report_chunk)(void *ctx, struct kvti_chunk *chunk,
                         const struct kvti_outcome *outcome);
    /* err may be NULL when code is KVT_OK. */
    void (*report_job)(void *ctx, struct kvti_job *job, int code,
                       const struct kvt_error *err);
    void (*report_conn)(void *ctx, void *link, enum kvti_conn_event event,
                        const struct kvt_error *why);
    /* A received notification, copied. False: the queue is full; keep it, stop
     * reading, and wait for ops->notes_wanted(). */
    bool (*report_note)(void *ctx, const char *agent_name, const void *bytes,
                        size_t length);
    /* Control thread only, or inside open. */
    int (*watch)(void *ctx, struct kvti_watch *watch);
    void (*unwatch)(void *ctx, struct kvti_watch *watch);
    /* Inside open only. */
    void (*heartbeat)(void *ctx, struct kvti_heartbeat *heartbeat);
    /* Makes the control thread take a turn (and so call ops->turn). What it is to
     * find must have been put under a lock that it takes, or be sequentially
     * consistent: this call may be no more than a read. */
    void (*wake)(void *ctx);
    /* Control thread only: post() kept a light chunk, ops->work is to be
     * called before the control thread rests. */
    void (*light)(void *ctx);

    struct kvti_logger logger;
    const char *agent_name;
    const uint8_t *incarnation; /* KVTI_INCARNATION_BYTES */
    /* Every default filled in; its strings and arrays are valid inside open
     * only. */
    const struct kvt_options *options;
};

enum kvti_cap {
    KVTI_CAP_DRAM = 1u << KVT_DRAM,
    KVTI_CAP_VRAM = 1u << KVT_VRAM,
    KVTI_CAP_NOTIFY = 1u << 8
};

/* What an opened engine is like. */
struct kvti_engine_traits {
    uint32_t caps;         /* enum kvti_cap */
    uint32_t chunk_copies; /* most pieces of one chunk of any connection */
    uint64_t chunk_bytes;  /* most bytes of one chunk */
    uint32_t window;       /* unfinished chunks of one connection */
    uint32_t light;        /* unfinished light ones beside them; 0: they count
                            * as all others */
    uint32_t share;        /* chunks that a transfer is cut into at least, if
                            * it is long enough: kvti_cut_share(); or 0 */
    bool no_strided;       /* layouts may only have runs of one block */
    uint32_t dead_fin;     /* enum kvti_fin: what the proven death of the peer's
                        * process proves of a write to it. An engine that may
                        * then still read our memory, and would crash if it
                        * were unmapped, says KVTI_FIN_PEER. What goes by
                        * NIXL is over for both sides in any case. */
};

struct kvti_engine_ops {
    const char *name;

    /* Whether it could start here: version and text for kvt_engine_info(). */
    int (*probe)(struct kvt_engine_info *ret);

    /* Caller's thread, in kvt_open(), before the control thread exists. All
     * or nothing. `rest` is what follows "NAME" and a colon in the engine's
     * spec, or "". */
    int (*open)(const struct kvti_env *env, const char *rest, void **ret_self,
                struct kvti_engine_traits *ret_traits, struct kvt_error *err);

    /*
     * The last call. Stops the engine's threads by the deadline and frees all;
     * KVT_EBUSY when a thread is stuck or a chunk is not final: then what it
     * could still touch is leaked, and nothing is reported any more either way.
     */
    int (*close)(void *self, uint64_t deadline_ns);

    void (*job)(void *self, struct kvti_job *job);
    void (*post)(void *self, struct kvti_chunk *chunk);

    /*
     * Copies light chunks that post() kept, on the calling thread, however
     * long their memory takes to answer. The core calls it outside the control
     * thread's role, which another thread may take over meanwhile: it uses
     * nothing that is the control thread's. With `here` false the control
     * thread calls: the chunks go to threads of the engine. NULL in an engine
     * whose post() keeps none.
     */
    void (*work)(void *self, bool here);

    /* Control thread: a call of work() with `here` follows, however late. Until
     * it is over, close() waits for it as for a thread of the engine. NULL
     * where work is. */
    void (*leave)(void *self);

    /* Once a turn of the control thread: the engine's own timers. Returns when
     * it wants the next turn at the latest (UINT64_MAX: no wish). May be
     * NULL. */
    uint64_t (*turn)(void *self, uint64_t now_ns);

    /* May a layout over this connection be published under this name? The
     * core's lock is held: answer at once, report nothing. May be NULL
     * (always). */
    int (*layout)(void *self, void *conn, const char *name,
                  struct kvt_error *err);

    /* The caller has drained notifications. May be NULL. */
    void (*notes_wanted)(void *self);

    /* New rules, "" for none: only the fault engine. May be NULL. */
    int (*rules)(void *self, const char *rules, struct kvt_error *err);

    /* In a child after fork: frees memory, touches no thread, lock or
     * descriptor that the parent uses. May be NULL. */
    void (*after_fork)(void *self);
};

extern const struct kvti_engine_ops kvti_engine_local;
extern const struct kvti_engine_ops kvti_engine_nixl;  /* NIXL alone */
extern const struct kvti_engine_ops kvti_engine_route; /* "nixl" to callers */
extern const struct kvti_engine_ops kvti_engine_fault;

/* Engines of this build, in the order of kvt_engine_info(); NULL past it. */
const struct kvti_engine_ops *kvti_engine_at(size_t index);

/* Splits "NAME" or "NAME:rest"; NULL with an error when NAME is unknown. */
const struct kvti_engine_ops *kvti_engine_find(const char *spec,
                                               const char **ret_rest,
                                               struct kvt_error *err);

/* A mutex that is never held for long: who finds it taken looks a few times
 * more before it sleeps, since to be woken takes longer than most holders do. */
void kvti_short_mutex_init(pthread_mutex_t *mutex);

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t kvti_now_ns(void);

#endif /* KVTI_ENGINE_H */
