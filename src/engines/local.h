/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the engine `local`: peers in the same process or on the same
 * host.
 *
 * Threads and who owns what; fields are tagged the same way.
 *   [const]   set before anybody else can see the object
 *   [control] the core's control thread
 *   [helper]  one thread of ours that imports and drops peers: everything
 *             that opens files, maps memory or reads another process
 *   [worker]  the copy threads
 *   [mu]      under engine->mu
 *
 * A connection holds a target (one transport in some process: its nonce, its
 * gate), a target holds a process (its pidfd). Targets and processes are made
 * and freed by the helper alone. Workers use them only through a connection
 * whose `active` count they hold, and the helper frees a connection only when
 * that count is 0.
 *
 * engine->mu is never held across a call out. The other two locks guard one
 * set of regions each and are leaves.
 */
#ifndef KVTI_LOCAL_H
#define KVTI_LOCAL_H

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "../engine.h"

#define KVTI_NEVER_NS UINT64_MAX
#define KVTI_STEP_NS 1000000u /* between two looks at a writer that is busy */

/* ------------------------------------------------------------------- gate */

#define KVTI_GATE_SLOTS 1024u
#define KVTI_GATE_ENTRIES 65536u

/* A writer's place in a target's gate. */
struct kvti_gate_slot {
    _Alignas(64) _Atomic uint64_t owner; /* kvti_gate_owner(), 0: free */
    _Atomic uint32_t busy[2]; /* chunks under way, by the epoch's parity */
};

/* The gate: shared memory that the target owns and its writers map. Neither
 * side takes an address, a length or an index from it. */
struct kvti_gate_page {
    uint32_t magic;
    uint32_t version;
    _Alignas(64) _Atomic uint64_t epoch;
    _Atomic uint32_t closed;
    _Alignas(64) _Atomic uint32_t life; /* a robust futex; see local_life.c */
    _Alignas(4096) struct kvti_gate_slot slots[KVTI_GATE_SLOTS];
    _Atomic uint32_t entries[KVTI_GATE_ENTRIES]; /* generation, 0: shut */
};

/* The target's side. [control] after open. */
struct kvti_gate {
    struct kvti_gate_page *page; /* NULL: none */
    int fd;
    uint64_t owner; /* ours, for the slots of dead writers */
    uint64_t epoch; /* what we wrote: the page's may be scribbled on */
    uint32_t next_generation;
    uint32_t hint; /* word of `taken` where a free bit was last seen */
    bool draining; /* the last flip's old parity was not seen empty yet */
    uint64_t taken[KVTI_GATE_ENTRIES / 64]; /* bit: the entry is in use */
};

/* A process as a slot's owner: 22 bits are every pid Linux can give, 42 bits
 * of clock ticks 1,300 years. One word, so that it is claimed in one step. */
#define KVTI_OWNER_START_BITS 42u
uint64_t kvti_gate_owner(int32_t pid, uint64_t start_time);

int kvti_gate_init(struct kvti_gate *gate, uint64_t owner,
                   struct kvt_error *err);
void kvti_gate_fini(struct kvti_gate *gate);
void kvti_gate_unmap(struct kvti_gate_page *page); /* NULL is a no-op */

/* An entry for a region: KVT_OK, or KVT_EAGAIN when all are in use. */
int kvti_gate_entry_open(struct kvti_gate *gate, uint32_t *ret_slot,
                         uint32_t *ret_generation);
/* No writer may use it from the next flip on; it stays in use. */
void kvti_gate_entry_shut(struct kvti_gate *gate, uint32_t slot);
/* For the next region; only after a drain that began after the shut. */
void kvti_gate_entry_free(struct kvti_gate *gate, uint32_t slot);

/* Begins a drain. Not while one is pending. */
void kvti_gate_flip(struct kvti_gate *gate);
/* Whether the pending drain is over; else names a process that is busy. */
bool kvti_gate_drained(struct kvti_gate *gate, int32_t *ret_pid);
/* Nobody enters any more. */
void kvti_gate_close(struct kvti_gate *gate);
/* After close: whether everybody is out. */
bool kvti_gate_empty(struct kvti_gate *gate, int32_t *ret_pid);

/* The writer's side: maps the gate of `fd` in process `pid` and claims a slot.
 * KVT_EAGAIN: full; KVT_EDISCONNECTED: closed or not a gate; KVT_EPERM. */
int kvti_gate_join(int32_t pid, int32_t fd, uint32_t uid, uint64_t owner,
                   struct kvti_gate_page **ret_page, uint32_t *ret_slot,
                   struct kvt_error *err);
void kvti_gate_part(struct kvti_gate_page *page, uint32_t slot);
/* False: closed. Regions are to be looked at again when the epoch changed. */
bool kvti_gate_enter(struct kvti_gate_page *page, uint32_t slot,
                     uint64_t *ret_epoch);
void kvti_gate_leave(struct kvti_gate_page *page, uint32_t slot,
                     uint64_t epoch);

/* ------------------------------------------- signs of life (local_life.c) */

/* The target's thread that shows it. */
struct kvti_life {
    struct robust_list_head head;
    struct robust_list node;
    struct robust_list_head
        *before; /* the C library's; NULL: nothing is shown */
    size_t before_length;
};

/* The calling thread shows that the process lives, from begin to end. Where the
 * kernel does not help nothing is shown. */
void kvti_life_begin(struct kvti_life *life, struct kvti_gate_page *page);
void kvti_life_end(struct kvti_life *life, struct kvti_gate_page *page);
/* Whether the target shows it. False: ask the kernel. Any thread of a writer. */
bool kvti_life_shown(const struct kvti_gate_page *page);

/* --------------------------------------------------------------- identity */

/* What a peer reads back before a chunk, and after it if need be: 64 bytes, in a page of
 * its own that a forked child sees as zeroes. */
struct kvti_nonce_page {
    uint64_t magic;
    uint8_t nonce[KVTI_NONCE_BYTES];
    uint8_t incarnation[KVTI_INCARNATION_BYTES];
    _Atomic uint32_t open;
    uint32_t version;
};

/* One process that we have connections to. */
struct kvti_local_proc {
    struct kvti_list node;     /* [helper] in engine->procs */
    struct kvti_local *engine; /* [const] */
    int32_t pid;               /* [const] */
    uint64_t start_time;       /* [const] */
    int pidfd;                 /* [const] -1: this process */
    uint32_t refs;             /* [helper] */
    struct kvti_watch watch;   /* [control] */
    bool watched;              /* [control] */
    bool gone;                 /* [control] */
    struct kvti_list conns;    /* [control] */
};

/* One transport in such a process. */
struct kvti_local_target {
    struct kvti_list node;           /* [helper] in engine->targets */
    struct kvti_local_proc *proc;    /* [const] counted */
    uint64_t nonce_addr;             /* [const] */
    uint8_t nonce[KVTI_NONCE_BYTES]; /* [const] */
    uint8_t incarnation[KVTI_INCARNATION_BYTES]; /* [const] */
    uint32_t uid;                /* [const] as the metadata says */
    int32_t gate_fd;             /* [const] */
    struct kvti_gate_page *gate; /* [const] */
    uint32_t gate_slot;          /* [const] */
    _Atomic uint64_t seen_ns;    /* when kvti_ident_check() was last good */
    uint32_t refs;               /* [helper] */
};

/* Field 22 of /proc/PID/stat: KVT_OK, or -errno. */
int kvti_ident_start_time(int32_t pid, uint64_t *ret);
/* Whether the process of an owner word has no thread any more; 0 names
 * nobody. */
bool kvti_ident_owner_dead(uint64_t owner);
bool kvti_ident_pidfd_dead(int pidfd);
int kvti_ident_pidfd_open(int32_t pid); /* a descriptor, or -1 and errno */

/* Reads what this process is: fills local, but for nonce, gate and socket. */
int kvti_ident_self(struct kvti_local_id *local, struct kvt_error *err);
/* Makes the nonce page. */
int kvti_ident_page(const uint8_t *incarnation, struct kvti_nonce_page **ret,
                    struct kvt_error *err);
void kvti_ident_page_free(struct kvti_nonce_page *page);

/* Is this still the transport that the metadata names? KVT_OK,
 * KVT_EDISCONNECTED, KVT_EPERM or KVT_EUNSUPPORTED. Any thread of ours. */
int kvti_ident_check(const struct kvti_local_target *target,
                     struct kvt_error *err);
/* KVT_EPERM with the setting that is in the way. */
int kvti_ident_denied(int32_t pid, uint32_t uid, struct kvt_error *err);

/* ------------------------------------------------------------ connections */

/* A file-backed region of the peer in our own address space. */
struct kvti_local_map {
    unsigned char *base; /* NULL: not mapped */
    size_t length;
    uint64_t skip;             /* from base to the region's first byte */
    bool sealed;               /* memcpy cannot fault */
    _Atomic uint64_t *touched; /* bits: extents whose pages are there; NULL: not
                                * kept */
};

/* What is queued for the peer's notification socket, and the socket. */
struct kvti_local_out {
    int fd; /* -1: none */
    bool broken;
    bool watched;
    uint32_t limit; /* bytes that one packet may have */
    struct kvti_watch watch;
    struct kvti_list jobs; /* NOTIFY and CONNECT, in order */
    struct kvti_list node; /* in engine->out_waiting while jobs wait */
    uint64_t retry_ns;     /* KVTI_NEVER_NS: the socket will tell */
};

struct kvti_local_conn {
    struct kvti_local *engine;        /* [const] */
    void *link;                       /* [const] */
    struct kvti_local_target *target; /* [const] after load */
    struct kvti_local_map *maps;      /* [const] beside regions.mems, or NULL */
    char socket_name[KVTI_SOCKET_NAME_MAX]; /* [const] */
    bool reachable;                         /* [const] by the socket */

    pthread_rwlock_t lock;
    struct kvti_regions regions; /* spans: [lock]; mems: [const] after load */
    uint64_t epoch;              /* [lock] of the gate when spans were made */

    uint32_t active; /* [mu] chunks, and CONNECT jobs at the helper */
    bool closing;    /* [mu] written by control */

    struct kvti_list node;      /* [control] in engine->conns or unloading,
                                 * then [mu] in engine->reap */
    struct kvti_list proc_node; /* [control] in target->proc->conns */
    struct kvti_job *unload;    /* [control] NULL when reported */
    struct kvti_local_out out;  /* [control] */
};

/* A peer's connection to our notification socket. [control] */
struct kvti_local_in {
    struct kvti_list node; /* in engine->ins, or engine->ins_dead */
    struct kvti_local *engine;
    struct kvti_watch watch;
    bool watched; /* not while the core's queue is full */
    bool greeted;
    char agent_name[KVT_NAME_MAX + 1];
};

/* ----------------------------------------------------------------- engine */

struct kvti_local_worker {
    struct kvti_local *engine; /* [const] */
    pthread_t thread;          /* [control] */
    atomic_int cpu;            /* where it copies; -1: it does not */
    struct kvti_heartbeat heartbeat;
};

/* Chunks that nobody has begun: first in, first out. */
struct kvti_local_queue {
    struct kvti_list chunks;
    uint32_t count;
    uint64_t bytes;
};

#define KVTI_TARGET_BUCKETS 256u

struct kvti_local {
    const struct kvti_env *env; /* [const] */
    struct kvti_local_id self;  /* [const] */
    struct kvti_nonce_page *page;
    uint64_t owner; /* [const] our word in other gates */
    struct kvti_gate gate;
    struct kvti_life life; /* [helper] */

    pthread_rwlock_t mem_lock;
    struct kvti_regions mems; /* [mem_lock] ours */
    int maps_fd;              /* [const] kvti_local_maps_open() */

    pthread_mutex_t mu;
    pthread_cond_t work;           /* [mu] something for the workers */
    pthread_cond_t errand;         /* [mu] something for the helper */
    pthread_cond_t quiet;          /* [mu] a thread ended or a report is out */
    struct kvti_local_queue heavy; /* [mu] for the workers */
    struct kvti_local_queue light; /* [mu] for kvti_local_work() */
    uint32_t idle;                 /* [mu] workers that wait */
    struct kvti_list jobs; /* [mu] LOAD, CONNECT, UNLOAD for the helper */
    struct kvti_list reap; /* [mu] connections nobody waits for */
    struct kvti_list done; /* [mu] jobs for turn() to go on with */
    uint32_t living;       /* [mu] threads that have not ended */
    uint32_t reporting;    /* [mu] threads inside a report */
    bool stop;             /* [mu] end; report nothing any more */

    uint32_t worker_max;               /* [const] */
    uint32_t worker_count;             /* [control] started */
    struct kvti_local_worker *workers; /* [const] worker_max of them */
    struct kvti_local_worker helper;   /* [control] */
    struct kvti_heartbeat quick;       /* of the thread in kvti_local_work() */
    bool helper_started;               /* [control] */
    struct kvti_list procs;            /* [helper] */
    struct kvti_list targets[KVTI_TARGET_BUCKETS]; /* [helper] by nonce */

    /* [control] */
    bool closed; /* report nothing from the control thread either */
    struct kvti_list conns;
    struct kvti_list unloading; /* connections that wait for their chunks */
    struct kvti_list drops;     /* MEM_DROP jobs, in order */
    struct kvti_watch listener;
    bool listening;
    uint64_t listen_ns; /* when to listen again after EMFILE */
    struct kvti_list ins;
    struct kvti_list ins_dead; /* closed; freed by the next turn, since the
                                * core may hold an event for it */
    uint32_t in_count;
    unsigned char *packet; /* the last packet received */
    bool held; /* the packet waits, since the core's queue is full */
    size_t held_length;
    char held_name[KVT_NAME_MAX + 1];
    struct kvti_list out_waiting;
};

/* What a job of ours carries while the engine has it. */
struct kvti_local_job {
    struct kvti_local_conn *conn;
    bool flipped; /* MEM_DROP: its drain has begun */
};

_Static_assert(sizeof(struct kvti_local_job) <= KVTI_PRIV_BYTES,
               "a job has room for this much");

static inline struct kvti_local_job *kvti_local_job_priv(struct kvti_job *job)
{
    return (struct kvti_local_job *)(void *)job->priv;
}

static inline struct kvti_local_conn *kvti_local_job_conn(struct kvti_job *job)
{
    return kvti_local_job_priv(job)->conn;
}

/* local_open.c */
int kvti_local_probe(struct kvt_engine_info *ret);
int kvti_local_open(const struct kvti_env *env, const char *rest,
                    void **ret_self, struct kvti_engine_traits *ret_traits,
                    struct kvt_error *err);
int kvti_local_close(void *self, uint64_t deadline_ns);

/* local_mem.c; control thread */
int kvti_local_mem_add(struct kvti_local *engine, struct kvti_job *job,
                       struct kvt_error *err);
/* Queues the job; it is reported by the turns. */
void kvti_local_mem_drop(struct kvti_local *engine, struct kvti_job *job);
uint64_t kvti_local_mem_turn(struct kvti_local *engine, uint64_t now_ns);

/* A mapping of ours that may be written. */
struct kvti_writable {
    uint64_t lo;
    uint64_t hi;
};

/* What kvti_local_find_writable() asks: a descriptor, or -1 before Linux
 * 6.11. */
int kvti_local_maps_open(void);
/* Any thread. False: not known, or read-only. */
bool kvti_local_find_writable(int fd, uint64_t addr, struct kvti_writable *ret);

/* local_open.c: a report may be made between begin and end only; false: we are
 * closed, and whoever would hear it is gone. */
bool kvti_local_report_begin(struct kvti_local *engine);
void kvti_local_report_end(struct kvti_local *engine);
int kvti_local_thread(struct kvti_local_worker *worker, void *(*run)(void *),
                      const char *name);
/* The last thing that a thread does. */
void kvti_local_thread_end_locked(struct kvti_local *engine);

/* local_peer.c */
void *kvti_local_helper(void *arg); /* thread; arg is a worker */
struct kvti_local_conn *kvti_local_conn_new(struct kvti_local *engine,
                                            void *link);
/* Helper, or when it has ended. */
void kvti_local_conn_free(struct kvti_local_conn *conn);
/* Control thread: a loaded connection becomes the core's. */
void kvti_local_conn_publish(struct kvti_local_conn *conn,
                             struct kvti_job *job);
void kvti_local_conn_detach(struct kvti_local_conn *conn);

/* local_map.c: maps the region if that is possible and safe. */
void kvti_local_map_open(const struct kvti_local_proc *proc,
                         const struct kvti_mem *mem,
                         struct kvti_local_map *ret);
void kvti_local_map_close(struct kvti_local_map *map);
/* Before `length` bytes at base + skip, above 0, are used: makes their pages
 * and those around them appear, once. Workers. */
void kvti_local_map_touch(struct kvti_local_map *map, uint64_t skip,
                          uint64_t length);

/* local_stream.c: memcpy for pieces that nobody is about to read; complete
 * only after stream_end() of the same thread. */
#define KVTI_STREAM_MIN 4096u /* shorter ones are plain memcpy */
void kvti_local_stream(void *to, const void *from, size_t length);
void kvti_local_stream_end(void);

/* `count` less of `active`. The connection may be gone afterwards. */
void kvti_local_conn_release(struct kvti_local_conn *conn, uint32_t count);

/* local.c; control thread. The chunk's connection counts it already. */
void kvti_local_to_worker(struct kvti_local *engine, struct kvti_chunk *chunk);

/* local_light.c */
void kvti_local_put_locked(struct kvti_local_queue *queue,
                           struct kvti_chunk *chunk);
/* The next chunk, or NULL. */
struct kvti_chunk *kvti_local_take_locked(struct kvti_local_queue *queue);
/* Appends those of a connection to `ret`, and counts them. */
uint32_t kvti_local_take_all_locked(struct kvti_local_queue *queue,
                                    const struct kvti_local_conn *conn,
                                    struct kvti_list *ret);
/* Whether the calling thread of kvti_local_work() should copy a chunk. */
bool kvti_local_is_light_locked(const struct kvti_local *engine,
                                const struct kvti_chunk *chunk);
void kvti_local_work(void *self, bool here); /* the table's `work` */
void kvti_local_leave(void *self);           /* and its `leave` */

/* local_copy.c */
void *kvti_local_worker(void *arg); /* thread; arg is a worker */
/* Copies one chunk, with everything that has to be looked at. */
void kvti_local_run(struct kvti_local_conn *conn,
                    const struct kvti_chunk *chunk, struct kvti_outcome *ret);
/* Moves the chunk's bytes, inside the gate. */
void kvti_local_move(struct kvti_local_conn *conn,
                     const struct kvti_chunk *chunk, struct kvti_outcome *ret);
/* The outcome of a chunk that never began, or ended: always final. */
void kvti_local_verdict(struct kvti_outcome *ret, uint32_t state, int code,
                        int os_errno, const char *format, ...)
    KVTI_PRINTF(5, 6);

/* local_note.c, local_note_in.c; all on the control thread */
int kvti_local_listen(struct kvti_local *engine, struct kvt_error *err);
void kvti_local_unlisten(struct kvti_local *engine);
void kvti_local_ins_sweep(struct kvti_local *engine);
uint64_t kvti_local_listen_turn(struct kvti_local *engine, uint64_t now_ns);
void kvti_local_out_init(struct kvti_local_out *out);
void kvti_local_out_add(struct kvti_local_conn *conn, struct kvti_job *job);
/* Closes the socket and reports what still waits as KVT_EDISCONNECTED. */
void kvti_local_out_drop(struct kvti_local_conn *conn, const char *why);
uint64_t kvti_local_out_turn(struct kvti_local *engine, uint64_t now_ns);
void kvti_local_notes_wanted(void *self);

#define KVTI_NOTE_MAX 131072u /* kvt.h's most for notify_bytes_max */

/* The first packet of a connection, and what precedes each message. */
struct kvti_note_hello {
    uint32_t magic;
    uint32_t version;
    uint8_t sender[KVTI_INCARNATION_BYTES];
    uint8_t target[KVTI_INCARNATION_BYTES];
    char agent_name[KVT_NAME_MAX + 1];
};

struct kvti_note_head {
    uint32_t magic;
    uint32_t length;
};

#define KVTI_NOTE_MAGIC 0x6b76746eu /* "kvtn" */
#define KVTI_NOTE_VERSION 1u

#endif /* KVTI_LOCAL_H */
