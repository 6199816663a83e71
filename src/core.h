/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The core's own structures. Two locks, never held across a call out:
 *
 *   mu     everything callers and the control thread share: tables, slots,
 *          results, counters. Held for short, bounded work.
 *   ev_mu  the queue of engine reports, so that an engine's thread never waits
 *          behind a caller.
 *
 * `mu` may be held when `ev_mu` is taken, never the other way round. Fields
 * are tagged: [const] after creation, [mu], [ev], [control] for the control
 * thread alone. Functions called …_locked need mu; kvti_ctl_… ones
 * run on the control thread.
 *
 * A peer is what the caller sees; a link is one load of it by the engine. A
 * transfer belongs to the link it was accepted for, and to no later one.
 */
#ifndef KVTI_CORE_H
#define KVTI_CORE_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine.h"
#include "idmap.h"
#include "layout.h"
#include "list.h"

#define KVTI_NEVER UINT64_MAX

/* A time that lies `ns` after another; for ever stays for ever. */
static inline uint64_t kvti_after(uint64_t from_ns, uint64_t ns)
{
    return ns >= KVTI_NEVER - 1 - from_ns ? KVTI_NEVER - 1 : from_ns + ns;
}

struct epoll_event;
struct kvti_link;
struct kvti_peer;

/* ------------------------------------------------------------------ calls */

enum kvti_call_kind {
    KVTI_CALL_JOB,    /* an engine job for a caller that waits */
    KVTI_CALL_STEP,   /* a peer's wishes changed */
    KVTI_CALL_DEAD,   /* the caller's proof of death */
    KVTI_CALL_NOTIFY, /* a notification to send */
    KVTI_CALL_RULES,  /* new fault rules */
    KVTI_CALL_CLOSE
};

/* What a caller asks of the control thread. Freed with the last reference. */
struct kvti_call {
    struct kvti_list node;  /* [mu] in t->calls until taken */
    uint32_t refs;          /* [mu] */
    uint32_t kind;          /* [const] enum kvti_call_kind */
    bool done;              /* [mu] */
    bool abandoned;         /* [mu] nobody waits any more */
    int code;               /* [mu] with done */
    struct kvt_error err;   /* [mu] with done */
    struct kvti_peer *peer; /* [const] counted in peer->users */
    char *rules;            /* [const] RULES, owned */
    uint64_t deadline_ns;   /* [const] CLOSE */
    uint64_t generation;    /* [const] NOTIFY: of the peer */
    /* JOB: runs on the control thread, mu held, before the caller is woken or
     * the abandoned call is dropped. */
    void (*finish)(struct kvt_transport *t, struct kvti_call *call);
    struct kvti_mem *mems; /* JOB: the call's own copies, owned; first those
                             * of the job, then again_count known ones */
    size_t again_count;
    struct kvti_job job;
};

/* ------------------------------------------------------------------ peers */

enum kvti_link_state {
    KVTI_LINK_LOADING,
    KVTI_LINK_UP,
    KVTI_LINK_DRAINING, /* nothing new is posted; open chunks run out */
    KVTI_LINK_UNLOADING
};

/* Transfers that wait take turns, class by class; each first in, first out. */
enum kvti_class {
    KVTI_LIGHT, /* one light chunk */
    KVTI_SMALL, /* one chunk */
    KVTI_BULK,  /* more */
    KVTI_CLASSES
};

struct kvti_link {
    struct kvti_peer *peer; /* [const] */
    void *conn;             /* [control] */
    uint64_t generation;    /* [const] the peer's when the load began */
    uint32_t state;         /* [control] enum kvti_link_state */
    uint32_t outstanding;   /* [control] posted chunks, not final nor lost */
    uint32_t light;         /* [control] light ones among them */
    bool down;              /* [control] the link broke */
    bool dead;              /* [control] proof that the process is gone */
    uint32_t turn;          /* [control] enum kvti_class that had it last */
    struct kvti_list xfers; /* [control] of this link, not proven final */
    struct kvti_list queues[KVTI_CLASSES]; /* [control] with parts to post */
    struct kvti_list ready; /* [control] in t->ready, or in none */
    struct kvti_job job;    /* [control] LOAD, later UNLOAD */

    struct kvti_list event_node; /* [ev] */
    bool event_down;             /* [ev] */
    bool event_dead;             /* [ev] */
    struct kvt_error event_err;  /* [ev] */
};

enum kvti_want { KVTI_WANT_LOADED, KVTI_WANT_UNLOADED, KVTI_WANT_REMOVED };

struct kvti_peer {
    kvt_peer id;               /* [const] */
    struct kvti_name name;     /* [mu] in t->peer_names until removed */
    struct kvti_name agent;    /* [mu] md's, in t->agent_names until removed */
    uint32_t users;            /* [mu] slots, calls and successors; 0 and gone:
                            * freed */
    bool gone;                 /* [mu] written by the control thread alone:
                            * removed and out of the engine */
    uint32_t state;            /* [mu] enum kvt_peer_state */
    uint64_t generation;       /* [mu] */
    int code;                  /* [mu] why it is not loaded */
    char text[KVT_TEXT_MAX];   /* [mu] */
    char path[16];             /* [mu] */
    uint32_t want;             /* [mu] enum kvti_want */
    bool fresh;                /* [mu] a load is asked for that has not begun */
    bool removed;              /* [mu] */
    bool loaded_once;          /* [mu] */
    void *blob;                /* [mu] metadata as given, owned */
    struct kvti_md md;         /* [mu] parsed, points into blob */
    void *next_blob;           /* [mu] for the next load, or NULL */
    struct kvti_md next_md;    /* [mu] */
    struct kvti_list layouts;  /* [mu] struct kvti_entry */
    uint64_t layout_count;     /* [mu] */
    struct kvti_list finished; /* [mu] slots to be polled */
    uint64_t inflight;         /* [mu] slots not completed */
    uint32_t notes_out;        /* [mu] notifications not yet sent */
    uint64_t done;             /* [mu] counters of the peer's series */
    uint64_t not_done;
    uint64_t bytes_written;
    uint64_t bytes_read;
    struct kvt_histogram complete_ns;
    struct kvti_call *waiter;      /* [mu] of add, reload or unload */
    struct kvti_xfer *add;         /* [mu] the KVT_OP_ADD slot, or NULL */
    struct kvti_peer *predecessor; /* [mu] same name, still in the engine */
    struct kvti_peer *successor;   /* [mu] that waits for this one */
    struct kvti_link *link;        /* [control] */
    struct kvti_list step;         /* [control] in t->steps */
    struct kvti_list node;         /* [mu] in t->peer_list */
};

/* A layout's entry in the tables. */
struct kvti_entry {
    kvt_layout id;
    struct kvti_name name;
    struct kvti_peer *peer; /* NULL: ours */
    struct kvti_layout *layout;
    struct kvti_list node; /* in peer->layouts or t->layouts */
};

/* -------------------------------------------------------------- transfers */

struct kvti_xfer {
    struct kvt_result result; /* [mu] id 0: a free slot */
    struct kvti_peer *peer;   /* [mu] counted in peer->users */
    uint32_t index;           /* [const] of the slot */
    uint32_t next_free;       /* [mu] index + 1 */
    uint32_t flags;           /* [const] enum kvt_xfer_flag */
    bool hidden;          /* [mu] report nothing, free the slot when proven */
    bool unknown;         /* [mu] the id means nothing to callers any more */
    bool stop;            /* [mu] nothing further may be posted */
    bool claimed;         /* [mu] a part was or is being posted */
    bool attention;       /* [mu] in t->attention */
    uint64_t accepted_ns; /* [const] */
    uint64_t deadline_ns; /* [const] KVTI_NEVER: none */
    uint64_t generation;  /* [const] of the peer */
    struct kvti_payload payload; /* [const] until proven final, then empty */
    void *note;                  /* [const] owned */
    size_t note_length;
    struct kvti_list intake;   /* [mu] in t->submitted */
    struct kvti_list attend;   /* [mu] in t->attention */
    struct kvti_list fin_peer; /* [mu] in peer->finished */
    struct kvti_list fin_all;  /* [mu] in t->finished */

    struct kvti_link *link;      /* [control] */
    struct kvti_list link_node;  /* [control] in link->xfers */
    struct kvti_list queue_node; /* [control] in link->queues */
    struct kvti_list live;       /* [control] in t->live until completed */
    struct kvti_list chunks;     /* [control] posted, not proven */
    struct kvti_cut cut;         /* [control] */
    struct kvti_job *job;        /* [control] open CONNECT or NOTIFY */
    bool noted;                  /* [control] the notification was tried */
    uint64_t grace_ns; /* [control] lost then; KVTI_NEVER before a stop */
};

struct kvti_note {
    struct kvti_list node;
    char agent_name[KVT_NAME_MAX + 1];
    size_t length;
    unsigned char bytes[];
};

/* -------------------------------------------------------------- transport */

/* Who is the control thread (lead.c). */
struct kvti_lead {
    _Atomic uint64_t word; /* odd: the leader is away; never goes back */
    atomic_bool covered;   /* a deputy watches */
    atomic_bool dozing;    /* it does not, until the leader sets the timer */
    atomic_bool over;      /* no leader any more */
    int timer_fd;          /* [const] the deputy reads it */
    pthread_mutex_t mu;    /* a leaf */
    pthread_cond_t cond;   /* [lead.mu] a thread has ended */
    uint32_t living;       /* [lead.mu] threads that have not */
    uint32_t started;      /* [const] of `threads` */
    pthread_t threads[2];  /* [const] */
};

enum kvti_phase { KVTI_OPEN, KVTI_CLOSING, KVTI_CLOSED };

/* How far kvt_close() has come, on the control thread. */
enum kvti_close_step {
    KVTI_CLOSE_NOT,
    KVTI_CLOSE_DRAIN,  /* work in flight may still finish */
    KVTI_CLOSE_STOP,   /* the rest is stopped, posted parts run out */
    KVTI_CLOSE_UNLOAD, /* peers leave the engine */
    KVTI_CLOSE_MEMORY, /* same-host peers are shut out */
    KVTI_CLOSE_END
};

struct kvt_transport {
    /* [const] after open */
    struct kvt_options options; /* every default filled in; strings owned */
    char agent_name[KVT_NAME_MAX + 1];
    /* Not [const], but here: whoever waits for one of these shares no cache line
     * with those who work. */
    atomic_bool sleeping;      /* the control thread may need waking */
    atomic_bool news;          /* for the control thread's next turn */
    atomic_bool calls_due;     /* written under mu: `calls` has one, or
                                * notes_wanted is set */
    atomic_bool attention_due; /* likewise: `attention` has one */
    atomic_int caller_cpu;     /* of the last submission; -1: none */
    atomic_int leader;         /* the control thread's number */
    atomic_bool is_kept_off;   /* written under mu: see kvti_ctl_roam() */
    uint8_t incarnation[KVTI_INCARNATION_BYTES];
    char engine_name[32];
    struct kvti_logger logger;
    const struct kvti_engine_ops *ops;
    void *engine;
    struct kvti_engine_traits traits;
    /* Likewise, for callers that poll; written under mu. */
    _Atomic uint64_t finished_count;
    struct kvti_env env;
    const unsigned char *fork_page; /* 1 here, 0 in a child */
    struct kvti_lead lead;
    int wake_fd;
    int epoll_fd;
    int user_fd;
    struct kvti_watch wake_watch;

    pthread_mutex_t mu;
    pthread_cond_t cond; /* a call is done, or a turn is free */
    /* [mu] */
    uint32_t phase; /* enum kvti_phase */
    int close_code;
    struct kvt_error close_err;
    /* The close's, until it is asked for: a transport that cannot be closed for
     * want of memory would never give its own back. */
    struct kvti_call *spare_call;
    bool engine_leaked;     /* the engine may still use what we own */
    bool kept;              /* a thread that is away may come back to us */
    struct kvti_list grave; /* once freed while `kept` */
    struct kvti_list calls;
    struct kvti_list submitted;
    struct kvti_list attention;
    struct kvti_idmap peers;
    struct kvti_names peer_names;
    struct kvti_names agent_names;
    struct kvti_list peer_list;
    uint32_t peer_count;         /* not removed */
    uint32_t peers_engine;       /* not gone */
    struct kvti_regions regions; /* busy: closing, ask deregister again */
    bool memory_turn;            /* a register or deregister is under way */
    struct kvti_idmap layouts;
    struct kvti_names layout_names;
    struct kvti_list own_layouts;
    uint64_t run_count;
    struct kvti_xfer *slots;
    uint32_t slots_used;
    uint32_t slots_free; /* index + 1 */
    uint32_t slots_taken;
    uint64_t serial;
    struct kvti_list finished;
    struct kvti_list notes;
    uint32_t note_count;
    bool notes_full;      /* the engine waits for room */
    bool notes_wanted;    /* tell it so */
    atomic_bool fd_asked; /* written under mu */
    bool fd_signalled;
    bool wake_due;     /* kvti_wake() when mu is given back */
    pid_t kept_off;    /* the thread that is kept off... */
    int kept_off_cpu;  /* ...this processor... */
    cpu_set_t allowed; /* ...and where it may run else */
    struct kvt_stats stats;
    uint64_t tag_done[KVT_TAG_MAX + 1];
    uint64_t tag_bytes[KVT_TAG_MAX + 1];

    pthread_mutex_t ev_mu;
    struct kvti_list ev_chunks; /* [ev] */
    struct kvti_list ev_jobs;   /* [ev] */
    struct kvti_list ev_links;  /* [ev] */

    /* [control] */
    struct kvti_list live;    /* slots not completed */
    struct kvti_list ready;   /* links with something to post */
    struct kvti_list steps;   /* peers whose wishes or links changed */
    struct kvti_list orphans; /* chunks nobody waits for any more */
    struct kvti_list heartbeats;
    struct kvti_list outbox;    /* jobs to hand over once mu is free */
    struct kvti_list open_jobs; /* with the engine */
    uint32_t heavy;             /* posted chunks that are not light */
    bool light_posted;          /* light chunks wait for ops->work() */
    uint64_t linger_ns;         /* no sleep before, unless heavy > 0 */
    uint64_t move_ns;           /* no other change of processor before */
    uint64_t look_ns;           /* when to look at descriptors again */
    uint64_t next_deadline_ns;  /* no deadline or grace ends before */
    uint64_t next_stall_ns;
    uint32_t close_step;
    struct kvti_call *close_call;
    uint64_t close_begin_ns;
    struct kvti_call *drop_call; /* the close's own MEM_DROP */
    struct epoll_event *batch;   /* being handled: unwatch() clears these */
    int batch_count;
    bool engine_gone; /* nothing may be asked of it */
    bool quit;
    bool joined; /* [mu] */
};

/* ---------------------------------------------------------- guard (call.c) */

/* KVT_OK, or KVT_EINVAL (null) or KVT_EFORKED with a sentence. */
int kvti_guard(const struct kvt_transport *t, struct kvt_error *err);
/* Locks mu when open; else unlocked and KVT_ECLOSED. */
int kvti_lock_open(struct kvt_transport *t, struct kvt_error *err);
void kvti_lock(struct kvt_transport *t);
void kvti_unlock(struct kvt_transport *t);

/* --------------------------------------------------------- calls (call.c) */

/* Two references: the caller's and the control thread's. NULL: no memory. */
struct kvti_call *kvti_call_new(uint32_t kind, struct kvti_peer *peer);
void kvti_call_unref_locked(struct kvt_transport *t, struct kvti_call *call);
void kvti_call_push_locked(struct kvt_transport *t, struct kvti_call *call);
/* Pushes a call that nobody waits for. */
void kvti_call_send_locked(struct kvt_transport *t, struct kvti_call *call);
void kvti_call_done_locked(struct kvt_transport *t, struct kvti_call *call,
                           int code, const struct kvt_error *err);
/* Waits for done or the deadline, when the call is abandoned; then drops the
 * caller's reference. */
int kvti_call_wait_locked(struct kvt_transport *t, struct kvti_call *call,
                          uint64_t deadline_ns, struct kvt_error *err);
uint64_t kvti_deadline(const struct kvt_transport *t, uint64_t timeout_ns);
/* timedwait on t->cond; false when the deadline has passed. */
bool kvti_wait_locked(struct kvt_transport *t, uint64_t deadline_ns);

/* Makes the control thread look at its queues. */
void kvti_wake(struct kvt_transport *t);

/* ------------------------------------------------------ transfers (xfer.c) */

/* KVT_EAGAIN when every slot is taken. */
int kvti_xfer_room_locked(struct kvt_transport *t, struct kvt_error *err);
/* A slot for a peer, with id and accepted time, after room was found; the
 * caller links it. */
struct kvti_xfer *kvti_xfer_new_locked(struct kvt_transport *t,
                                       struct kvti_peer *peer, uint32_t op,
                                       const struct kvt_xfer_options *options);
/* Frees note and payload; the slot is free. Unlinked everywhere. */
void kvti_xfer_free_locked(struct kvt_transport *t, struct kvti_xfer *xfer);
/* The first verdict stays; nothing further is posted. */
void kvti_xfer_stop_locked(struct kvti_xfer *xfer, uint32_t state, int code,
                           int engine_code, uint32_t scope, const char *text);
/* Completes: `proven` says that no request can touch memory any more. */
void kvti_xfer_finish_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                             bool proven);
/* A lost one is proven after all. */
void kvti_xfer_prove_locked(struct kvt_transport *t, struct kvti_xfer *xfer);
bool kvti_xfer_finished(const struct kvti_xfer *xfer);
/* Signals kvt_fd when there is something and it is not signalled. */
void kvti_signal_locked(struct kvt_transport *t);
/* The opposite, when there is nothing any more. */
void kvti_unsignal_locked(struct kvt_transport *t);

/* -------------------------------------------- progress on the control thread */

/* progress.c: transfers */
void kvti_ctl_intake(struct kvt_transport *t);
void kvti_ctl_attend(struct kvt_transport *t);
/* Chunks that an engine reported, handled at once while callers wait for mu. */
#define KVTI_REPORTS_MAX 16
struct kvti_report {
    struct kvti_chunk *chunk;
    struct kvti_outcome outcome;
};
void kvti_ctl_chunks(struct kvt_transport *t, struct kvti_report *reports,
                     size_t count);
/* The first verdict stays; the rest of the transfer's time is its grace. */
void kvti_ctl_stop_locked(struct kvt_transport *t, struct kvti_xfer *xfer,
                          uint32_t state, int code, int engine_code,
                          uint32_t scope, const char *text);
/* Completes what can be completed. */
void kvti_ctl_advance(struct kvt_transport *t, struct kvti_xfer *xfer);
/* The last of its chunks wakes us when it is reported. There is one. */
void kvti_ctl_await(struct kvt_transport *t, struct kvti_xfer *xfer);
/* Stops every unfinished transfer of a link. */
void kvti_ctl_stop_link(struct kvt_transport *t, struct kvti_link *link,
                        uint32_t state, int code, uint32_t scope,
                        const char *text);
/* The peer's process is gone: what can only write there is final. */
void kvti_ctl_prove_dead(struct kvt_transport *t, struct kvti_xfer *xfer);
void kvti_ctl_deadlines(struct kvt_transport *t, uint64_t now_ns);
/* Gives up on the unproven now. */
void kvti_ctl_lose(struct kvt_transport *t, struct kvti_xfer *xfer);

/* A job without a caller, freed when it is reported. NULL: no memory. */
struct kvti_job *kvti_ctl_job_new(uint32_t kind, void *owner, void *conn);
/* Jobs that were made while mu was held go to the engine. */
void kvti_ctl_flush(struct kvt_transport *t);
/* The one way of a job to the engine. */
void kvti_ctl_hand(struct kvt_transport *t, struct kvti_job *job);
void kvti_ctl_job_free(struct kvti_job *job);

/* post.c */
void kvti_ctl_post(struct kvt_transport *t);
/* Puts a link with work and room for it into t->ready. */
void kvti_ctl_link_kick(struct kvt_transport *t, struct kvti_link *link);
/* Pieces of a chunk of this link. */
uint32_t kvti_ctl_copies_max(const struct kvt_transport *t,
                             const struct kvti_link *link);
/* The chunk is final, lost or nobody's: its place in a window is free. */
void kvti_ctl_give_place(struct kvt_transport *t, struct kvti_link *link,
                         const struct kvti_chunk *chunk);

/* link.c: peers */
void kvti_ctl_peer_want(struct kvt_transport *t, struct kvti_peer *peer);
void kvti_ctl_steps(struct kvt_transport *t);
void kvti_ctl_link_event(struct kvt_transport *t, struct kvti_link *link,
                         bool down, bool dead, const struct kvt_error *err);
void kvti_ctl_peer_dead(struct kvt_transport *t, struct kvti_peer *peer);

/* close.c */
/* Keeps for ever, and in sight, what a stuck thread may still touch. */
void kvti_bury(struct kvti_list *node);
/* Returns when it wants the next turn. */
uint64_t kvti_ctl_close_turn(struct kvt_transport *t, uint64_t now_ns);

/* rest.c */
/* Light work was done: the next sleep waits a little. */
void kvti_ctl_linger(struct kvt_transport *t);
/* Onto another processor than that of who submitted last; false if we are on
 * the same one and stay there. */
bool kvti_ctl_step_aside(struct kvt_transport *t);
/* For a caller that is about to wake the control thread and goes on. */
void kvti_keep_off_locked(struct kvt_transport *t);
/* The opposite, when it has woken up elsewhere; before it makes any thread, which
 * would have its processors. */
void kvti_ctl_roam(struct kvt_transport *t);
/* Until news, a ready descriptor, or `until_ns`. */
void kvti_ctl_rest(struct kvt_transport *t, uint64_t until_ns);

/* lead.c */
/* 0 or -errno. */
int kvti_lead_init(struct kvt_transport *t);
void kvti_lead_fini(struct kvt_transport *t);
/* Starts the control thread and its deputy. */
int kvti_lead_start(struct kvt_transport *t, struct kvt_error *err);
/* Has the engine copy light chunks. False: another thread leads now, and
 * nothing of the control thread's may be touched. */
bool kvti_lead_work(struct kvt_transport *t);
/* After the end: false when a thread is still away at the deadline. It will
 * look at the transport once more if it ever comes back. */
bool kvti_lead_join(struct kvt_transport *t, uint64_t deadline_ns);

/* control.c */
/* Handles every report that is queued. */
void kvti_ctl_take_events(struct kvt_transport *t);
/* A JOB call's job is reported: runs its `finish`. */
void kvti_ctl_call_reported(struct kvt_transport *t, struct kvti_job *job);
int kvti_control_init(struct kvt_transport *t, struct kvt_error *err);
/* Turns until the end, true, or until the role is lost. */
bool kvti_ctl_run(struct kvt_transport *t);
void kvti_control_fini(struct kvt_transport *t);

/* ----------------------------------------------------------- peers (peer.c) */

struct kvti_peer *kvti_peer_get_locked(struct kvt_transport *t, kvt_peer id);
/* One user less; frees a gone peer that nobody uses. */
void kvti_peer_unuse_locked(struct kvt_transport *t, struct kvti_peer *peer);
/* Copies and parses metadata, refuses our own; *ret_blob is the caller's. */
int kvti_peer_metadata(const struct kvt_transport *t, const void *metadata,
                       size_t length, void **ret_blob, struct kvti_md *ret_md,
                       struct kvt_error *err);
/* The call is done when the peer settles next. */
void kvti_peer_await_locked(struct kvti_peer *peer, struct kvti_call *call);
/* Settles what waits, in favour of the newer call `by`. */
void kvti_peer_supersede_locked(struct kvt_transport *t, struct kvti_peer *peer,
                                const char *by);
/* Ends the add, reload or unload that waits, if any. */
void kvti_peer_settle_locked(struct kvt_transport *t, struct kvti_peer *peer,
                             int code, const struct kvt_error *err);
/* The public part of remove: no new work, name and layouts gone. */
void kvti_peer_detach_locked(struct kvt_transport *t, struct kvti_peer *peer);
/* KVT_EDISCONNECTED: the peer is not loaded. */
int kvti_peer_refuse(const struct kvti_peer *peer, const char *what,
                     struct kvt_error *err);
void kvti_peer_state_locked(struct kvt_transport *t, struct kvti_peer *peer,
                            uint32_t state, int code, const char *text);
/* Nothing new reaches the peer; its generation moves on. */
void kvti_peer_shut_locked(struct kvt_transport *t, struct kvti_peer *peer,
                           uint32_t state, int code, const char *text);

/* ------------------------------------------------------ memory (memory.c) */

/* Not being deregistered; for kvti_regions_update(). */
bool kvti_mem_is_open(const struct kvti_mem *mem, void *ctx);

/* ------------------------------------------------- layouts (layout_table.c) */

void kvti_entry_drop_locked(struct kvt_transport *t, struct kvti_entry *entry);
/* Drops all our layouts. */
void kvti_layouts_drop_locked(struct kvt_transport *t);
/* Drops our layouts that no longer lie in registered memory. */
void kvti_layouts_sweep_locked(struct kvt_transport *t);
/* Whether a kind is one the engine moves. */
bool kvti_kind_ok(const struct kvt_transport *t, uint32_t kind);

/* ----------------------------------------------------------- notes (note.c) */

bool kvti_note_received(void *ctx, const char *agent_name, const void *bytes,
                        size_t length);
void kvti_ctl_notify(struct kvt_transport *t, struct kvti_call *call);

/* ---------------------------------------------------------- stats (stats.c) */

void kvti_histogram_add(struct kvt_histogram *histogram, uint64_t ns);
/* A chunk ended well. */
void kvti_stats_moved_locked(struct kvt_transport *t,
                             const struct kvti_xfer *xfer,
                             const struct kvti_chunk *chunk);

/* ------------------------------------------------------ open (transport.c) */

void kvti_transport_destroy(struct kvt_transport *t);

#endif /* KVTI_CORE_H */
