/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator of a replay. It opens no transport and moves no block: it
 * starts the nodes, and tells each what to do.
 *
 *   replay_args.c     the options
 *   replay.c          the run from start to end
 *   replay_process.c  the process of a node
 *   replay_nodes.c    nodes and messages
 *   replay_remote.c   holders on another host, as if they were here
 *   replay_serve.c    the other host: no coordinator, but a relay to its holders
 *   replay_flow.c     requests and their blocks: the state machine
 *   replay_report.c   the table and the JSON object
 *   progress.c        the line that moves
 */
#ifndef KVT_TOOLS_REPLAY_H
#define KVT_TOOLS_REPLAY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "cli.h"
#include "geometry.h"
#include "link.h"
#include "node.h"
#include "progress.h"
#include "proto.h"
#include "stats.h"
#include "trace.h"

#define REPLAY_NODES_MAX LINK_NODES_MAX
#define REPLAY_INFLIGHT_MAX 4096u
#define REPLAY_KILLS_MAX 16u

/* Times that a block is asked for before it counts as failed: more than any
 * single fault needs, and few enough for a run that cannot work to end. */
#define REPLAY_ATTEMPTS_MAX 5u

/* Most slots of a pool. Each costs some 100 bytes in tables beside the pool,
 * which would outgrow a pool of tiny blocks. */
#define REPLAY_SLOTS_MAX (UINT64_C(1) << 20)

struct replay_kill {
    uint64_t holder;
    uint64_t request; /* once so many were started */
    bool done;
};

struct replay_options {
    const char *trace;
    const char *engine;
    const char *model; /* NULL: plain blocks */
    const char *metrics;
    const char *listen;  /* run the holders for somebody who connects here */
    const char *connect; /* the holders run there; NULL: on this host */
    uint64_t holders;
    uint64_t fetchers;
    uint64_t memory; /* bytes that one process may use for its pool */
    uint64_t pool;   /* bytes that it should have; 0: memory */
    uint64_t block_bytes;
    uint64_t page_tokens; /* 0: the model's */
    uint64_t tp;
    uint64_t inflight;
    uint64_t workers; /* 0: kvt's default */
    double speed;     /* 0: as fast as possible */
    double timeout_s;
    uint64_t requests; /* 0: all */
    uint64_t seed;
    uint64_t corrupt; /* enum node_corrupt */
    bool seed_given;
    bool block_bytes_given;
    bool keep; /* listen again after a run */
    bool no_same_host;
    bool pull;
    bool shm;
    bool json;
    struct replay_kill kills[REPLAY_KILLS_MAX];
    size_t kill_count;
};

/* What became of the blocks that a holder was asked for, attempt by attempt:
 * asked = landed + wrong + refetched + failed. */
struct holder_fates {
    uint64_t asked;
    uint64_t landed;    /* and verified */
    uint64_t wrong;     /* landed with other bytes than expected */
    uint64_t refetched; /* did not land, and were asked for again */
    uint64_t failed;    /* did not land, and were given up */
    uint64_t bytes;     /* of transfers that ended well */
};

struct replay_node {
    enum node_role role;
    uint64_t index;       /* among its role */
    pid_t pid;            /* of a process of this host */
    bool remote;          /* behind the link: there is no pid */
    struct proto control; /* fd -1 if remote */
    bool alive;
    bool ready;    /* sent its metadata */
    bool reported; /* sent its last report */
    bool killed;   /* by --kill-holder */
    uint64_t pool; /* address, there */
    unsigned char *metadata;
    size_t metadata_length;
    bool *local;          /* by peer: memory goes by the local path */
    uint64_t added;       /* peers */
    uint64_t bytes_local; /* that it moved by each path, as its kvt says */
    uint64_t bytes_nixl;
    uint64_t secret; /* a holder's; a fetcher's poison */
    uint64_t active; /* requests at a fetcher */
    struct holder_fates fates;
};

struct replay_totals {
    uint64_t started; /* requests */
    uint64_t settled;
    uint64_t blocks; /* of settled requests */
    struct fetch_counts counts;
    uint64_t refetched;
    uint64_t bytes;
    uint64_t pages;
    uint64_t merged;
    uint64_t transfers;
    uint64_t quiet_ns; /* of the calls that were not preempted */
    uint64_t quiet_indices;
    uint64_t wrong_blocks;
    uint64_t wrong_around; /* neighbours and guards, when a block landed */
    uint64_t wrong_at_end; /* slots and guards in the last sweep */
    struct histogram latency;
    struct histogram submit;
    struct histogram submit_quiet; /* the calls that were not preempted */
    struct spans active;
};

struct request;
struct part;

struct replay {
    struct replay_options options;
    struct geometry geometry;
    uint64_t slots;        /* of every pool */
    uint64_t slots_wanted; /* without the scale */
    struct trace *trace;
    uint64_t trace_requests;   /* that this run is made of */
    struct replay_node *nodes; /* holders, then fetchers */
    uint64_t node_count;
    struct link link;         /* to the holders' host, or closed */
    struct link_offer offer;  /* what that host said it has */
    bool remote_ending;       /* told to end its holders */
    char cut[CLI_TEXT_MAX];   /* why no more requests are started, or "" */
    struct request *requests; /* options.inflight of them */
    uint64_t active;          /* requests */
    struct part **parts;      /* by handle; NULL: unused */
    size_t part_count;
    size_t part_capacity;
    size_t part_hint; /* no handle below it is unused */
    struct replay_totals totals;
    struct progress progress;
    int signal_fd;
    FILE *metrics_file;
    char *metrics_text;
    size_t metrics_length;
    uint64_t begin_ns;
    uint64_t end_ns;
    bool trace_ended;
    bool interrupted;
    bool failure_told;          /* of a transfer, the first one */
    char failure[CLI_TEXT_MAX]; /* why the run could not go on, or "" */
};

/* 0, or ARGS_HELPED, or an exit status after one line on stderr. */
int replay_parse(int argc, char **argv, struct replay_options *ret);

int replay_main(int argc, char **argv);

/* Stops the run: the first reason stays. */
void replay_fail(struct replay *replay, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* A descriptor for SIGINT and SIGTERM, and the shape of the blocks: CLI_OK, or
 * an exit status after one line on stderr. */
int replay_signals(int *ret_fd);
int replay_geometry(const struct replay_options *options, struct geometry *ret);

/* replay_args.c: "nixl", "nixl:…" and "fault:nixl…" are for NIXL alone. */
bool replay_is_nixl(const char *engine);

/* replay_process.c */
/* Starts a node and gives the other end of its socket; 0 or an errno. */
int process_start(struct proto *control, pid_t *ret);
/* Its wait status, once it has ended, or after making it end. */
int process_wait(pid_t pid);
int process_kill(pid_t pid);

/* replay_serve.c */
int serve_main(const struct replay_options *options);

/* replay_remote.c */
/* Connects and learns how many holders there are: an exit status. */
int remote_open(struct replay *replay);
/* Has the holders started, once the run's shape and secrets are known. */
void remote_start(struct replay *replay);
/* Sends what was written to the holders, and receives what they say. False:
 * the link was lost just now. */
bool remote_send(struct replay *replay);
void remote_receive(struct replay *replay);
void remote_kill(struct replay *replay, const struct replay_node *holder);
/* Has the holders end in order; GONE says when each has. */
void remote_end(struct replay *replay);
/* Leaves; the other side kills what it still has. */
void remote_abort(struct replay *replay, const char *why);

/* replay_nodes.c */
bool nodes_start(struct replay *replay);
/* Sends, waits for at most timeout_ms (-1: for ever), receives, handles. */
void nodes_turn(struct replay *replay, int timeout_ms);
void nodes_end(struct replay *replay);
void nodes_kill_all(struct replay *replay);
void nodes_kill(struct replay *replay, struct replay_node *holder);
/* All nodes are there and know each other. */
bool nodes_started(const struct replay *replay);
/* Handles the whole frames that have come; false when the stream is damaged. */
bool nodes_hear(struct replay *replay, struct replay_node *node);
/* What a node's death means, once it counts as dead: `status` is as waitpid()
 * says. `proven`: it was reaped, so nothing of it can write any more. */
void nodes_bury(struct replay *replay, struct replay_node *node, int status,
                bool proven);
struct replay_node *nodes_holder(struct replay *replay, uint64_t index);
struct replay_node *nodes_fetcher(struct replay *replay, uint64_t index);
uint64_t nodes_holders_alive(const struct replay *replay);

/* replay_flow.c */
void flow_open(struct replay *replay);
void flow_close(struct replay *replay);
/* Starts a request that the trace has next; there must be room for it. */
void flow_start(struct replay *replay, const struct trace_request *from);
/* A message of a node about blocks; false when it is damaged. */
bool flow_message(struct replay *replay, struct replay_node *node,
                  struct proto_message *message);
/* A holder is gone: what it had in hand goes to the others. `proven`: its
 * process was reaped. */
void flow_holder_dead(struct replay *replay, struct replay_node *holder,
                      bool proven);

/* replay_report.c */
/* The run's shape, on stderr before it starts. */
void report_shape(const struct replay *replay);
void report_table(struct replay *replay);
void report_json(struct replay *replay);
uint64_t report_failures(const struct replay *replay);
bool report_accounted(const struct replay *replay);

#endif /* KVT_TOOLS_REPLAY_H */
