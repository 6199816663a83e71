/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt moves KV-cache blocks between LLM inference processes.
 *
 * A transport is one agent: an engine, one control thread, registered memory,
 * peers and transfers. The caller decides which block goes where and when and
 * carries a few opaque bytes (metadata) between the agents; kvt names remote
 * memory, drives the engine, and reports progress and errors.
 *
 * Three rules hold for the whole header.
 *
 * Threads.    Every call may be made from any thread. A call waits for the
 *             control thread only where its comment says "Waits"; every other
 *             call takes one short lock and returns. After fork() every call
 *             on a transport of the parent answers KVT_EFORKED in the child,
 *             but for kvt_close() and kvt_free(), which free memory only.
 * Ownership.  Pointer arguments are borrowed for the call: indices, copies,
 *             names, notifications and metadata are copied before it returns.
 *             Registered memory is borrowed from kvt_register() until
 *             kvt_deregister() or kvt_close() has returned KVT_OK. The blocks
 *             of a transfer are borrowed until kvt says they are quiescent.
 * Completion. A call that returns an error changed nothing, and no result of
 *             it ever comes. An accepted transfer completes exactly once, and
 *             only when no request of it can touch memory any more (but for
 *             one that is cancelled before anything of it was posted: it ends
 *             with the cancel and is not reported). If that
 *             cannot be known it completes as KVT_LOST: its memory must not be
 *             reused until a late proof lifts the quarantine (KVT_QUIESCENT
 *             appears in kvt_status(), with no second completion).
 *
 * Conventions. Functions return KVT_OK, or a count where said, or a negative
 * KVT_E code. Success outputs are called ret_… and are set on success only. A
 * `struct kvt_error *err` may be NULL; on failure it gets one sentence that
 * says what was wrong and what to do. Input structs that may grow start with
 * `size`, to be set to their sizeof; all other fields may be left zero, which
 * always means the default. Times are nanoseconds on CLOCK_MONOTONIC; a
 * timeout of 0 means the transport's `call_timeout_ns`.
 */
#ifndef KVT_KVT_H
#define KVT_KVT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The one place that holds the version: build files and packages read it. */
#define KVT_VERSION_MAJOR 0
#define KVT_VERSION_MINOR 1
#define KVT_VERSION_PATCH 0

#define KVT_API __attribute__((visibility("default")))

/* ------------------------------------------------------------------ errors */

/*
 * Codes are never renumbered, and a code this list does not know still prints.
 *   X(name, value, what it means)
 */
#define KVT_ERROR_MAP(X)                                                       \
    X(OK, 0, "success")                                                        \
    X(EINVAL, -1, "an argument is malformed")                                  \
    X(ERANGE, -2, "an index, address or size is out of range")                 \
    X(ENOENT, -3, "no such name or id, or it is gone")                         \
    X(EBUSY, -4, "still in use")                                               \
    X(EAGAIN, -5, "a limit is reached; drain or wait, then ask again")         \
    X(ENOMEM, -6, "out of memory")                                             \
    X(ETIMEDOUT, -7, "the time given is over")                                 \
    X(ECLOSED, -8, "the transport is closed")                                  \
    X(EFORKED, -9, "the transport belongs to the parent process")              \
    X(EUNSUPPORTED, -10, "the engine cannot do this")                          \
    X(EMETADATA, -11, "the metadata is damaged or not kvt's")                  \
    X(EMISMATCH, -12, "the two sides do not fit each other")                   \
    X(EDISCONNECTED, -13, "the peer is not connected")                         \
    X(ESUPERSEDED, -14, "a newer call for the same peer replaced this one")    \
    X(ECANCELED, -15, "cancelled by the caller")                               \
    X(EENGINE, -16, "the engine reported an error")                            \
    X(EREJECTED, -17, "the engine refused to start the request")               \
    X(ELOST, -18, "the engine cannot say whether the request is over")         \
    X(ENOTIFY, -19, "the data is done, its notification failed")               \
    X(EPERM, -20, "the kernel forbids access to the peer")                     \
    X(ESYSTEM, -21, "a system call failed")                                    \
    X(ESTALE, -22, "the peer took this memory back; import it again")

#define KVT_ERROR_ENUM(name, value, text) KVT_##name = (value),
enum kvt_code { KVT_ERROR_MAP(KVT_ERROR_ENUM) KVT_CODE_MIN = -22 };
#undef KVT_ERROR_ENUM

#define KVT_TEXT_MAX 240

/* Why a call failed. Written only when the call fails. */
struct kvt_error {
    int32_t code;            /* the call's return value */
    int32_t os_errno;        /* errno of the failed system call, or 0 */
    char text[KVT_TEXT_MAX]; /* one sentence, always NUL-terminated */
};

/* Pure; the strings are constants. Unknown codes give "unknown error". */
KVT_API const char *kvt_strerror(int code);

/* "KVT_EBUSY" for KVT_EBUSY; unknown codes give "KVT_E?". */
KVT_API const char *kvt_errname(int code);

/* "0.1.0" of the library that is loaded, not of this header. */
KVT_API const char *kvt_version(void);

/* ------------------------------------------------------------------- words */

typedef struct kvt_transport kvt_transport;

/* Ids are 64-bit, never 0, and never reused within a transport. */
typedef uint64_t kvt_peer;
typedef uint64_t kvt_layout;
typedef uint64_t kvt_xfer;

#define KVT_SELF ((kvt_peer)0)         /* this side, where a side is asked */
#define KVT_ANY ((kvt_peer)UINT64_MAX) /* every peer, in kvt_poll() */

/* Longest agent, peer and layout name, without the NUL. Any bytes but NUL. */
#define KVT_NAME_MAX 255

enum kvt_kind {
    KVT_DRAM = 0, /* host memory; device is 0 */
    KVT_VRAM = 1  /* device memory; device is the owner's GPU index */
};

enum kvt_region_flag {
    /* `fd` and `fd_offset` say which file backs the region. */
    KVT_REGION_FD = 1u << 0
};

/*
 * Registered memory, ours or a peer's. For a peer's only addr, length, kind
 * and device are read.
 */
struct kvt_region {
    uint64_t addr;
    uint64_t length; /* bytes */
    uint32_t kind;   /* enum kvt_kind */
    uint32_t device;
    uint32_t flags; /* enum kvt_region_flag */
    int32_t fd;     /* with KVT_REGION_FD: must stay open while registered */
    uint64_t fd_offset; /* bytes: where in the file `addr` is mapped from */
};

/* `count` blocks of `block_bytes`, the i-th at `addr + i * stride_bytes`. */
struct kvt_run {
    uint64_t addr;
    uint64_t block_bytes;
    uint64_t stride_bytes; /* start to start, at least block_bytes */
    uint64_t count;
    uint32_t kind;
    uint32_t device;
};

/* One piece of kvt_write() or kvt_read(). */
struct kvt_copy {
    uint64_t local_addr;
    uint64_t peer_addr;
    uint64_t length; /* bytes; pieces of length 0 are skipped */
    uint32_t local_kind;
    uint32_t local_device;
    uint32_t peer_kind;
    uint32_t peer_device;
};

enum kvt_index_type {
    KVT_INDEX_U32 = 0,
    KVT_INDEX_I32 = 1,
    KVT_INDEX_U64 = 2,
    KVT_INDEX_I64 = 3
};

/* Block indices in the caller's own integer type; negative ones are refused. */
struct kvt_indices {
    const void *data; /* aligned for its type */
    uint64_t count;
    uint32_t type; /* enum kvt_index_type */
    uint32_t reserved;
};

/* -------------------------------------------------------------------- open */

enum kvt_open_flag {
    /* nixl only: peers on the same host go through NIXL too. */
    KVT_OPEN_NO_SAME_HOST = 1u << 0,
    /* nixl only: metadata without kvt's trailer is first loaded in a probe
     * process, the program kvt-probe; without it kvt_open() fails
     * (EUNSUPPORTED). What crashes NIXL is then KVT_EMETADATA. */
    KVT_OPEN_PROBE_METADATA = 1u << 1,
    /* Let any process of this user write here under Yama's ptrace scope 1
     * (prctl PR_SET_PTRACER_ANY). Off by default: it is process-wide. */
    KVT_OPEN_ALLOW_PTRACE = 1u << 2,
    /* Keep the engine's own telemetry off. kvt's counters are always on. */
    KVT_OPEN_NO_TELEMETRY = 1u << 3
};

enum kvt_log_level {
    KVT_LOG_ERROR = 0,
    KVT_LOG_WARNING = 1,
    KVT_LOG_INFO = 2,
    KVT_LOG_DEBUG = 3
};

/* A parameter of one backend of the nixl engine. */
struct kvt_param {
    const char *backend;
    const char *key;
    const char *value;
};

struct kvt_options {
    uint32_t size;
    uint32_t flags; /* enum kvt_open_flag */

    /* "local", "nixl" (host memory of peers on this host by the local engine,
     * unless KVT_OPEN_NO_SAME_HOST is set or KVT_SAME_HOST in the environment
     * is 0, no, off or false; 1, yes, on, true and "" leave it on, anything
     * else is EINVAL), "auto" (default: nixl if it loads, else local, but
     * never local when nixl_library or KVT_NIXL_LIBRARY names NIXL's library
     * or an option is wrong: nixl's error is the answer then), or
     * "fault:ENGINE?RULES" (see kvt_fault()). KVT_ENGINE in the environment
     * is used when this is NULL. */
    const char *engine;
    const char *agent_name; /* default: "kvt-" and 32 random hex digits */

    uint32_t workers; /* copy threads of local (no more than processors, but
                       * two), threads of those of NIXL's backends that have
                       * use for some (not UCX); 4 */
    uint32_t device;  /* nixl: the GPU whose CUDA context it gets. 0: that of
                       * the thread that calls kvt_open(), if it has one;
                       * GPU 0 by name is the engine "nixl:gpu=0" */

    /* nixl only: backends by name (default UCX), their parameters, and an
     * explicit libnixl_capi.so. Engines without backends ignore them. */
    const char *const *backends;
    const struct kvt_param *params;
    const char *nixl_library;
    uint32_t backend_count;
    uint32_t param_count;

    /* Limits; each is an error when reached, named beside it. */
    uint32_t inflight_max;     /* transfers not yet drained: KVT_EAGAIN; 8192,
                                 * at most 1048576 */
    uint32_t peers_max;        /* KVT_EAGAIN; 65536 */
    uint32_t regions_max;      /* KVT_EAGAIN; 65536 */
    uint32_t layouts_max;      /* KVT_EAGAIN; 262144 */
    uint32_t notify_max;       /* notifications waiting, each way: 16384 */
    uint32_t notify_bytes_max; /* longest notification: KVT_ERANGE; 65536,
                                 * at most 131072 */
    uint64_t runs_max;         /* runs in all layouts: KVT_EAGAIN; 2^24 */

    uint64_t grace_ns;        /* how long a stopped transfer may stay
                               * unproven before it is lost; 30 s */
    uint64_t call_timeout_ns; /* default of calls that wait; 60 s */

    /* Called on kvt's threads with one line, no newline. It must not call
     * kvt. KVT_LOG in the environment (error, warning, info or debug; off and
     * "" are nothing, anything else is EINVAL) has lines that are at least as
     * serious written to stderr, too, with and without a hook. Nothing else of
     * kvt's own is ever printed, but for an invariant that is broken. */
    void (*log)(void *ctx, int level, const char *text);
    void *log_ctx;
};

/*
 * Opens a transport. NULL options take every default.
 * Waits: for the engine to start. Owns: the caller owns *ret, until
 * kvt_free(). Errors: EINVAL (an option, KVT_SAME_HOST, KVT_LOG),
 * EUNSUPPORTED (no such engine, or none could start: the text says which were
 * tried and why each could not), ENOMEM, ESYSTEM (threads, descriptors).
 */
KVT_API int kvt_open(const struct kvt_options *options, kvt_transport **ret,
                     struct kvt_error *err);

/*
 * Ends a transport: no more work is taken, work in flight gets half of the
 * timeout to finish, the rest is stopped, and peers, layouts and regions are
 * dropped. Idempotent. kvt_poll(), kvt_status(), kvt_stats() and
 * kvt_notification() still answer until kvt_free().
 * Waits: at most timeout_ns (0: call_timeout_ns) and a second, whatever the
 * engine does.
 * Errors: EBUSY: err says how many transfers are not quiescent; their memory,
 * and that of peers that write here and do not move, must stay mapped for the
 * life of the process. The transport is closed all the same.
 * OK speaks of our own transfers and of peers that can be shut out. A peer that
 * writes here through NIXL cannot be, and its bytes were seen to land after a
 * close over CMA: keep memory mapped and unused until it is quiescent.
 */
KVT_API int kvt_close(kvt_transport *t, uint64_t timeout_ns,
                      struct kvt_error *err);

/*
 * Gives the handle back, after kvt_close() if need be. NULL is a no-op. No
 * other thread may be in a call on t. What an engine could still touch is
 * leaked on purpose. Waits: as kvt_close() when t is not closed.
 */
KVT_API void kvt_free(kvt_transport *t);

/* The agent's name; valid until kvt_free(). NULL after fork. */
KVT_API const char *kvt_agent_name(const kvt_transport *t);

/* One engine of this build, whether or not it can start here. */
struct kvt_engine_info {
    char name[32];
    char version[64];        /* of the library behind it, "" if none */
    int32_t code;            /* KVT_OK, or why it cannot start */
    uint32_t kinds;          /* bit 1 << enum kvt_kind */
    char text[KVT_TEXT_MAX]; /* what it is, or why it cannot start */
};

/*
 * Fills *ret for the engine with this index, counted from 0. Needs no
 * transport. Errors: ENOENT past the last one.
 */
KVT_API int kvt_engine_info(uint32_t index, struct kvt_engine_info *ret);

/* ------------------------------------------------------------------ memory */

/*
 * Registers regions, all or none. A region of length 0 is skipped before any
 * other check; the same region given again is counted. Overlaps are fine.
 * Waits. Errors: EINVAL (null, address wraps, unmapped, an fd that does not
 * back the memory: the text names the region's position), EUNSUPPORTED (a kind
 * the engine cannot move), EAGAIN (regions_max), EBUSY (an earlier timed-out
 * call for one of them is not finished), ETIMEDOUT (undone in the background),
 * ENOMEM, ECLOSED.
 */
KVT_API int kvt_register(kvt_transport *t, const struct kvt_region *regions,
                         size_t count, uint64_t timeout_ns,
                         struct kvt_error *err);

/*
 * Takes registrations back, all or none; a region leaves when each of its
 * registrations is taken back. kvt peers on the same host are shut out before
 * this returns KVT_OK: no byte of theirs lands afterwards. Peers that write
 * through NIXL cannot be shut out: keep such memory mapped until they are
 * known to be quiescent. Layouts over a region that leaves are dropped.
 * Waits. Errors: ENOENT (not registered), EBUSY (a transfer of ours that is
 * not final uses it: nothing changed; or a peer's process is stopped in the
 * middle of a write: new writes are shut out already, ask again), ETIMEDOUT
 * (goes on in the background: ask again, ENOENT then means that it is done),
 * ENOMEM, ECLOSED.
 */
KVT_API int kvt_deregister(kvt_transport *t, const struct kvt_region *regions,
                           size_t count, uint64_t timeout_ns,
                           struct kvt_error *err);

/* Memory that same-host peers write by memcpy: a sealed memfd, mapped. */
struct kvt_shm {
    void *addr;
    uint64_t length; /* bytes, as asked */
    int32_t fd;
    uint32_t reserved;
};

/*
 * Creates zeroed shared memory whose size is sealed and whose pages exist.
 * Register it with KVT_REGION_FD, fd and fd_offset 0. Needs no transport.
 * Errors: EINVAL (size 0), ESYSTEM (text names the call; ENOSPC or ENOMEM when
 * the host has not this much memory).
 */
KVT_API int kvt_shm_create(uint64_t size, struct kvt_shm *ret,
                           struct kvt_error *err);

/* Unmaps and closes; deregister first. *shm is zeroed, its fd set to -1. */
KVT_API void kvt_shm_destroy(struct kvt_shm *shm);

/*
 * Copies the opaque bytes that let a peer import this agent and the memory
 * registered so far. *ret_length is set on success and on ERANGE.
 * Waits. Errors: ERANGE (capacity too small; the bytes may grow with each
 * registration), ETIMEDOUT, ENOMEM, ECLOSED.
 */
KVT_API int kvt_metadata(kvt_transport *t, void *buffer, size_t capacity,
                         size_t *ret_length, struct kvt_error *err);

/* ------------------------------------------------------------------- peers */

struct kvt_peer_params {
    uint32_t size;
    uint32_t region_count;
    const char *name; /* ours for this peer; the key of adding again */
    const void *metadata;
    size_t metadata_length;
    /* What the caller was told by other ways, checked against the metadata. */
    const char *agent_name;           /* NULL: not checked */
    const struct kvt_region *regions; /* each must lie inside the metadata's */
    uint64_t timeout_ns;              /* of kvt_peer_add() */
    uint64_t user_data;               /* of kvt_peer_add_async() */
};

/*
 * Imports a peer and waits until it can be written to. A known name is torn
 * down first: from the call on its old id is gone, its unfinished transfers
 * complete by the one rule, and an unfinished add of it fails with
 * ESUPERSEDED. Every add gives a new id.
 * Waits. Errors: EINVAL (a name; this transport's own metadata or name),
 * EMETADATA, EMISMATCH (agent_name), ERANGE (regions), EPERM (with the kernel
 * setting to change), EDISCONNECTED (the process is gone), ESUPERSEDED,
 * ETIMEDOUT (goes on in the background; add again or remove), EAGAIN, ENOMEM,
 * ECLOSED. After a failure that comes from the engine the peer does not exist.
 */
KVT_API int kvt_peer_add(kvt_transport *t, const struct kvt_peer_params *params,
                         kvt_peer *ret_peer, struct kvt_error *err);

/*
 * The same without waiting: *ret_peer can be removed at once and written to
 * once the add is done. The add itself is a transfer of op KVT_OP_ADD that
 * completes through kvt_poll(); it cannot be cancelled, only removed.
 */
KVT_API int kvt_peer_add_async(kvt_transport *t,
                               const struct kvt_peer_params *params,
                               kvt_peer *ret_peer, kvt_xfer *ret_xfer,
                               struct kvt_error *err);

/* The id behind a name. Errors: ENOENT. */
KVT_API int kvt_peer_find(kvt_transport *t, const char *name,
                          kvt_peer *ret_peer);

/* 1 when writes are taken, 0 when not (also for unknown ids). Errors: below 0
 * for NULL and in a forked child. */
KVT_API int kvt_peer_loaded(kvt_transport *t, kvt_peer peer);

/*
 * Unloads, then loads again: the kept metadata, or the new one if given.
 * Layouts over the peer are checked against its regions again, and nothing
 * over it is reachable before all are back; if one does not fit or the engine
 * fails, the peer stays unloaded until a later reload works. A restarted peer
 * has new addresses: drop the layouts over it, reload with its new metadata,
 * prepare them anew; or add it again, which drops them. Memory that the peer
 * took back (ESTALE) comes back with new metadata only.
 * Waits: also for the peer's posted requests to be final or lost. Errors: as
 * kvt_peer_add(), and ENOENT.
 */
KVT_API int kvt_peer_reload(kvt_transport *t, kvt_peer peer,
                            const void *metadata, size_t metadata_length,
                            uint64_t timeout_ns, struct kvt_error *err);

/*
 * Stops new work at once and takes the peer from the engine when its posted
 * requests are final or lost; metadata and layouts are kept for a reload.
 * Unposted parts complete as cancelled. Unloaded peers are KVT_OK at once.
 * Waits. Errors: ENOENT, ESUPERSEDED, ETIMEDOUT (goes on in the background),
 * ENOMEM, ECLOSED.
 */
KVT_API int kvt_peer_unload(kvt_transport *t, kvt_peer peer,
                            uint64_t timeout_ns, struct kvt_error *err);

/*
 * Forgets a peer: as unload, then its layouts go, and its id means nothing
 * any more but to kvt_poll(), which still drains its results. Does not wait.
 * Errors: ENOENT, ENOMEM, ECLOSED.
 */
KVT_API int kvt_peer_remove(kvt_transport *t, kvt_peer peer);

/*
 * The caller's proof that the peer's process is gone: its requests that can
 * write only into that process are final, and lost ones leave the quarantine.
 * The peer counts as disconnected. Works for removed peers as well.
 * Errors: ENOENT, ENOMEM, ECLOSED.
 */
KVT_API int kvt_peer_confirm_dead(kvt_transport *t, kvt_peer peer);

enum kvt_peer_state {
    KVT_PEER_ADDING = 0,
    KVT_PEER_LOADED = 1,
    KVT_PEER_DISCONNECTED = 2, /* seen in a post, a poll, or its death */
    KVT_PEER_UNLOADED = 3,
    KVT_PEER_RELOADING = 4
};

struct kvt_peer_info {
    char name[KVT_NAME_MAX + 1];
    char agent_name[KVT_NAME_MAX + 1];
    uint64_t generation;     /* grows with every add, reload, unload, remove */
    uint64_t region_count;   /* of the metadata */
    uint64_t layout_count;   /* over this peer */
    uint64_t inflight;       /* transfers not final */
    uint32_t state;          /* enum kvt_peer_state */
    int32_t code;            /* why it is not loaded, or KVT_OK */
    char path[16];           /* "local" or "nixl": which way its DRAM goes */
    char text[KVT_TEXT_MAX]; /* why this path, or why it is not loaded */
};

/* Errors: ENOENT. */
KVT_API int kvt_peer_info(kvt_transport *t, kvt_peer peer,
                          struct kvt_peer_info *ret);

/*
 * Makes the engine's connection before the first real transfer: a transfer of
 * op KVT_OP_WARM_UP and 0 bytes. Errors: as kvt_write().
 */
struct kvt_xfer_options;
KVT_API int kvt_warm_up(kvt_transport *t, kvt_peer peer,
                        const struct kvt_xfer_options *options,
                        kvt_xfer *ret_xfer, struct kvt_error *err);

/* ----------------------------------------------------------------- layouts */

/*
 * Names a list of runs on one side: KVT_SELF or a peer. A block's index is its
 * position in the runs, counted in order. Costs O(runs) for any number of
 * blocks. Each run must lie inside registered memory of its kind and device
 * (for a peer: inside its metadata's regions). The same name again replaces
 * the old layout; transfers that use the old one go on with it. Does not wait.
 * Errors: EINVAL (a run's shape; the text names its position), EUNSUPPORTED (a
 * kind that the engine does not move; several blocks in a run, where the fault
 * engine forbids it), ERANGE (outside), ENOENT (peer), EDISCONNECTED (peer not
 * loaded), EAGAIN (layouts_max, runs_max), ENOMEM, ECLOSED.
 */
KVT_API int kvt_prepare(kvt_transport *t, kvt_peer side, const char *name,
                        const struct kvt_run *runs, size_t count,
                        kvt_layout *ret_layout, struct kvt_error *err);

/* The current layout of a name. Errors: ENOENT. */
KVT_API int kvt_layout_find(kvt_transport *t, kvt_peer side, const char *name,
                            kvt_layout *ret_layout);

/* Forgets a layout; transfers that use it go on. Errors: ENOENT. */
KVT_API int kvt_layout_drop(kvt_transport *t, kvt_layout layout);

/* --------------------------------------------------------------- transfers */

enum kvt_xfer_flag {
    /* No result in kvt_poll(): the caller asks kvt_status() and must call
     * kvt_release(). */
    KVT_XFER_NO_EVENT = 1u << 0
};

#define KVT_TAG_MAX 15

struct kvt_xfer_options {
    uint32_t size;
    uint32_t flags;      /* enum kvt_xfer_flag */
    uint64_t timeout_ns; /* from now; 0: no deadline */
    uint64_t user_data;  /* comes back in the result */
    /* A notification that the peer can read only after all the data has landed;
     * NULL: none. The transfer is done when it is on its way: a peer that does
     * not read can hold it back until the deadline. */
    const void *note;
    size_t note_length; /* bytes */
    uint32_t tag;       /* 0 to KVT_TAG_MAX: a class of traffic, in results
                           * and as a label in metrics */
    uint32_t reserved;
};

/*
 * Starts one transfer of any list of pieces, as one id, also when kinds
 * differ. Local ranges must lie in registered memory, peer ranges in the
 * peer's regions. Bytes have no order inside a transfer, and neither have two
 * transfers; pieces must not overlap each other at the destination unless
 * either result will do. Does not wait: its cost depends on `count` and never
 * on bytes.
 * Errors: EINVAL (nothing to copy, a wrapping address), ERANGE (the text
 * names the piece), ENOENT (peer), EDISCONNECTED (peer not loaded: reload),
 * EUNSUPPORTED (a kind), EAGAIN (inflight_max), ENOMEM, ECLOSED.
 */
KVT_API int kvt_write(kvt_transport *t, kvt_peer peer,
                      const struct kvt_copy *copies, size_t count,
                      const struct kvt_xfer_options *options,
                      kvt_xfer *ret_xfer, struct kvt_error *err);

/* The other direction: from the peer's memory into ours. */
KVT_API int kvt_read(kvt_transport *t, kvt_peer peer,
                     const struct kvt_copy *copies, size_t count,
                     const struct kvt_xfer_options *options, kvt_xfer *ret_xfer,
                     struct kvt_error *err);

/*
 * Writes block local[i] of local_layout to block remote[i] of peer_layout,
 * for all i. Counts must be equal and above 0, every index in range, block
 * lengths equal pair by pair. Blocks that are adjacent on both sides and in
 * the list are moved as one copy. Otherwise as kvt_write().
 * Errors: as kvt_write(); EMISMATCH (counts or block lengths differ, both
 * values in the text), ENOENT (layout), EINVAL (a layout of the wrong side).
 */
KVT_API int kvt_write_blocks(kvt_transport *t, kvt_peer peer,
                             kvt_layout local_layout,
                             const struct kvt_indices *local,
                             kvt_layout peer_layout,
                             const struct kvt_indices *remote,
                             const struct kvt_xfer_options *options,
                             kvt_xfer *ret_xfer, struct kvt_error *err);

/* The other direction: block remote[i] of the peer into block local[i]. */
KVT_API int kvt_read_blocks(kvt_transport *t, kvt_peer peer,
                            kvt_layout local_layout,
                            const struct kvt_indices *local,
                            kvt_layout peer_layout,
                            const struct kvt_indices *remote,
                            const struct kvt_xfer_options *options,
                            kvt_xfer *ret_xfer, struct kvt_error *err);

enum kvt_op {
    KVT_OP_WRITE = 0,
    KVT_OP_READ = 1,
    KVT_OP_WARM_UP = 2,
    KVT_OP_ADD = 3
};

enum kvt_state {
    KVT_QUEUED = 0,       /* accepted, nothing posted yet */
    KVT_IN_PROGRESS = 1,  /* something posted that is not final */
    KVT_DONE = 2,         /* all bytes are visible at the destination */
    KVT_REJECTED = 3,     /* the engine refused a post */
    KVT_FAILED = 4,       /* the engine reported an error */
    KVT_DISCONNECTED = 5, /* the link to the peer broke */
    KVT_UNREADABLE = 6,   /* the engine cannot tell the state; proven later, it
                           * completes as KVT_FAILED */
    KVT_CANCELLED = 7,    /* by the caller, or by remove, unload, close */
    KVT_TIMED_OUT = 8,    /* by its deadline */
    KVT_LOST = 9          /* given up unproven; its memory is quarantined */
};

/* How much is damaged by a failure: drop that much, keep the rest. */
enum kvt_scope {
    KVT_SCOPE_NONE = 0,
    KVT_SCOPE_REQUEST = 1,
    KVT_SCOPE_PEER = 2,
    KVT_SCOPE_TRANSPORT = 3
};

enum kvt_result_flag {
    KVT_LOCAL_FINAL = 1u << 0, /* our memory is touched no more */
    KVT_PEER_FINAL = 1u << 1,  /* the peer's memory is touched no more */
    KVT_QUIESCENT = 1u << 2,   /* both: the blocks may be reused */
    KVT_FINISHED = 1u << 3     /* completed; state changes no more */
};

#define KVT_RESULT_TEXT_MAX 120

/* One transfer, as kvt_status() sees it now or as kvt_poll() reports it. */
struct kvt_result {
    kvt_xfer id;
    kvt_peer peer;
    uint64_t user_data;
    uint64_t bytes;      /* of the whole transfer */
    uint64_t bytes_done; /* proven to have landed */
    uint64_t blocks;     /* blocks or pieces asked for */
    uint64_t copies;     /* engine descriptors they were merged into so far */
    uint64_t latency_ns; /* from accepted to completed; 0 before */
    uint32_t op;         /* enum kvt_op */
    uint32_t state;      /* enum kvt_state */
    uint32_t flags;      /* enum kvt_result_flag */
    uint32_t tag;
    int32_t code;        /* KVT_OK, or the first error */
    int32_t engine_code; /* the engine's own number for it, or 0 */
    uint32_t scope;      /* enum kvt_scope */
    uint32_t reserved;
    char text[KVT_RESULT_TEXT_MAX]; /* the engine's words, "" if all is well */
};

/*
 * What is known of a transfer now. Never consumes a result.
 * Errors: ENOENT (unknown, drained, or released and quiescent).
 */
KVT_API int kvt_status(kvt_transport *t, kvt_xfer xfer, struct kvt_result *ret);

/*
 * Takes up to `capacity` finished transfers of one peer (or KVT_ANY), oldest
 * first, and returns their number. Each is reported once, when it is quiescent
 * or lost, and forgotten; a lost one stays known to kvt_status() until it is
 * proven. Nothing finished costs one atomic load.
 */
KVT_API int kvt_poll(kvt_transport *t, kvt_peer peer, struct kvt_result *ret,
                     size_t capacity);

enum kvt_cancel_mode {
    /* Nothing more of them is reported; status answers until quiescent. */
    KVT_CANCEL_IMMEDIATE = 0,
    /* The ids still not quiescent are returned; they surface in kvt_poll(). */
    KVT_CANCEL_WAIT = 1
};

/*
 * Stops transfers: parts not yet posted are never posted, finished ones that
 * were not drained are forgotten. Unknown ids are skipped. Does not wait, in
 * either mode. Returns the number of ids written to ret_moving (mode wait;
 * room for `count`, may alias `ids`; NULL if not wanted), which may be 0. A
 * lost id that was drained is returned too, and so are moving ones that were
 * released, or cancelled before in mode immediate; these never surface: only
 * kvt_status() tells when they are quiescent. A notification that the engine holds
 * already may still arrive.
 * Errors: EINVAL (mode).
 */
KVT_API int kvt_cancel(kvt_transport *t, const kvt_xfer *ids, size_t count,
                       int mode, kvt_xfer *ret_moving);

/*
 * Forgets a result; of an unfinished transfer when it is quiescent (it goes
 * on, but is not reported). Errors: ENOENT.
 */
KVT_API int kvt_release(kvt_transport *t, kvt_xfer xfer);

/* ----------------------------------------------------------- notifications */

/*
 * Queues a short message to a peer; in order with other messages to this peer
 * and generation, and with notifications of transfers that are done.
 * Errors: EINVAL (NULL with a length), ERANGE (over notify_bytes_max), EAGAIN
 * (notify_max wait already: the peer does not read), ENOENT, EDISCONNECTED,
 * EUNSUPPORTED, ENOMEM, ECLOSED.
 */
KVT_API int kvt_notify(kvt_transport *t, kvt_peer peer, const void *bytes,
                       size_t length, struct kvt_error *err);

struct kvt_notification {
    kvt_peer peer; /* the one with this agent name, of several the one added or
                    * reloaded last; 0: there is none */
    size_t length; /* bytes */
    char agent_name[KVT_NAME_MAX + 1]; /* the sender's */
};

/*
 * Takes the oldest received notification: 1, or 0 when there is none.
 * Errors: ERANGE (capacity too small: ret->length is set, it stays queued).
 */
KVT_API int kvt_notification(kvt_transport *t, struct kvt_notification *ret,
                             void *buffer, size_t capacity);

/* ------------------------------------------------------------- observation */

/*
 * A descriptor that is readable while kvt_poll(KVT_ANY) or kvt_notification()
 * has something. It belongs to the transport: wait on it, never read it.
 */
KVT_API int kvt_fd(kvt_transport *t);

#define KVT_HISTOGRAM_BUCKETS 40

/* Bucket i counts values below 2^i ns that no lower bucket counts. */
struct kvt_histogram {
    uint64_t count;
    uint64_t sum_ns;
    uint64_t buckets[KVT_HISTOGRAM_BUCKETS];
};

struct kvt_stats {
    uint64_t accepted; /* transfers since open */
    uint64_t refused;  /* submissions that returned an error */
    uint64_t done;
    uint64_t rejected;
    uint64_t failed;
    uint64_t disconnected;
    uint64_t cancelled;
    uint64_t timed_out;
    uint64_t lost;            /* ever */
    uint64_t quarantined;     /* lost and not proven, now */
    uint64_t inflight;        /* not completed, now */
    uint64_t undrained;       /* completed, not drained or released, now */
    uint64_t queued_commands; /* not yet seen by the control thread, now */
    uint64_t bytes_written;   /* of requests that ended well */
    uint64_t bytes_read;
    uint64_t bytes_local; /* of the above by path */
    uint64_t bytes_nixl;
    uint64_t blocks; /* asked for */
    uint64_t copies; /* engine descriptors posted */
    uint64_t merged; /* blocks that rode in another's copy */
    uint64_t chunks; /* engine requests posted */
    uint64_t notes_sent;
    uint64_t notes_failed;
    uint64_t notes_received;
    uint64_t peers; /* now */
    uint64_t peers_loaded;
    uint64_t peer_adds;
    uint64_t peer_reloads;
    uint64_t peer_disconnects;
    uint64_t mismatches; /* EMISMATCH returned */
    uint64_t regions;    /* now */
    uint64_t layouts;
    uint64_t runs;
    uint64_t stalls; /* engine calls that did not come back in 5 s */
    struct kvt_histogram post_ns;     /* accepted to first post */
    struct kvt_histogram complete_ns; /* accepted to completed */
};

/* Copies the first `size` bytes of the counters. Errors: EINVAL (size). */
KVT_API int kvt_stats(kvt_transport *t, struct kvt_stats *ret, size_t size);

/*
 * Writes everything as Prometheus text (with per-peer and per-tag series) and
 * a NUL. *ret_length, without the NUL, is set on success and on ERANGE.
 */
KVT_API int kvt_metrics(kvt_transport *t, char *buffer, size_t capacity,
                        size_t *ret_length);

/* ---------------------------------------------------------- fault injection */

/*
 * Replaces the rules of a transport opened as "fault:ENGINE?RULES"; "" takes
 * all rules away. Requests that a rule holds go on as if it had not held them.
 * Rules are KEY[=VALUE] joined by commas; docs/fault.md lists them.
 * Errors: EINVAL (a rule), EUNSUPPORTED (not a fault transport), ENOMEM,
 * ECLOSED.
 */
KVT_API int kvt_fault(kvt_transport *t, const char *rules,
                      struct kvt_error *err);

#ifdef __cplusplus
}
#endif

#endif /* KVT_KVT_H */
