/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node of a replay: a process with a transport and a paged pool, told what
 * to do by the coordinator over one socket. It is one thread that sleeps in
 * poll() on two descriptors, the socket and kvt_fd().
 *
 *   node.c          the process: start, loop, report, end
 *   node_holder.c   has blocks: makes their contents in slots of its pool
 *   node_fetcher.c  wants blocks: gives them slots, checks what landed
 *   node_mover.c    starts transfers and reports how they ended; the holder's
 *                   work, or with --pull the fetcher's
 */
#ifndef KVT_TOOLS_NODE_H
#define KVT_TOOLS_NODE_H

#include <kvt/kvt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvpool.h"
#include "proto.h"
#include "slots.h"

/* The hidden word of the command that runs a node, and its socket. */
#define NODE_WORD "replay-node"
#define NODE_FD 3

enum node_role { NODE_HOLDER = 0, NODE_FETCHER = 1 };

/* What --corrupt spoils, to prove that the checks see it. */
enum node_corrupt {
    CORRUPT_NOTHING = 0,
    CORRUPT_BLOCK,     /* a byte of a block that has just landed */
    CORRUPT_NEIGHBOUR, /* a byte of a slot beside it */
    CORRUPT_GUARD      /* a byte between two regions */
};

#define NODE_ENGINE_MAX 240

struct node_config {
    uint64_t role;  /* enum node_role */
    uint64_t index; /* among its role */
    uint64_t pull;  /* fetchers read; else holders write */
    uint64_t shm;
    uint64_t workers;
    uint64_t timeout_ns; /* of one transfer; 0: none */
    uint64_t requests;   /* most at a time */
    uint64_t peers;      /* nodes of the other role */
    uint64_t slots;
    uint64_t corrupt; /* enum node_corrupt */
    uint64_t secret;  /* a holder's, or what a fetcher's poison is made of */
    uint64_t no_same_host;
    uint64_t remote; /* its coordinator is behind a link */
    struct geometry geometry;
    char engine[NODE_ENGINE_MAX];
};

void node_config_put(struct proto *proto, const struct node_config *config);
void node_config_take(struct proto_message *message, struct node_config *ret);

/* How a transfer ended. */
struct move_report {
    uint64_t state;      /* enum kvt_state; KVT_REJECTED if refused */
    uint64_t own_final;  /* our memory is touched no more */
    uint64_t peer_final; /* nor is the peer's */
    uint64_t bytes;
    uint64_t pages; /* blocks of kvt */
    uint64_t copies;
    uint64_t start_ns;    /* when the call was made, by its host's clock */
    uint64_t submit_ns;   /* how long the call took */
    uint64_t preempted;   /* whether the caller lost its CPU in the call */
    uint64_t latency_ns;  /* from accepted to completed, as kvt says */
    uint64_t bytes_local; /* of all that this node has moved so far, by path */
    uint64_t bytes_nixl;
    char text[KVT_TEXT_MAX];
};

void move_report_put(struct proto *proto, const struct move_report *report);
void move_report_take(struct proto_message *message, struct move_report *ret);

/* What became of the blocks of a request; the sum is their number. */
struct fetch_counts {
    uint64_t hits;   /* were there */
    uint64_t shared; /* were on their way for another request */
    uint64_t landed; /* moved for this request, and right */
    uint64_t failed; /* not there in the end, or wrong */
};

/* The key that the content of a holder's block is made from. */
uint64_t node_block_key(uint64_t secret, uint64_t id);

struct node_mover;
struct node_holder;
struct node_fetcher;

struct node {
    struct proto control;
    struct node_config config;
    kvt_transport *transport;
    struct kvpool pool;
    struct slots slots;
    struct node_mover *mover;
    struct node_holder *holder;   /* NULL in a fetcher */
    struct node_fetcher *fetcher; /* NULL in a holder */
};

/* Runs a node until the coordinator closes the socket. */
int node_main(void);

/* Says why to the coordinator and ends the process: there is nobody else whom
 * a node could leave a half-done job to. */
void node_fail(struct node *node, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

/* node_holder.c */
void holder_open(struct node *node);
void holder_close(struct node *node);
void holder_prepare(struct node *node, struct proto_message *message);
void holder_unpin(struct node *node, struct proto_message *message);
uint64_t holder_sweep(const struct node *node);

/* node_fetcher.c */
void fetcher_open(struct node *node);
void fetcher_close(struct node *node);
void fetcher_want(struct node *node, struct proto_message *message);
void fetcher_landed(struct node *node, struct proto_message *message);
void fetcher_again(struct node *node, struct proto_message *message);
void fetcher_drop(struct node *node, struct proto_message *message);
uint64_t fetcher_sweep(const struct node *node);

/* node_mover.c */
void mover_open(struct node *node);
void mover_close(struct node *node);
void mover_add_peer(struct node *node, struct proto_message *message);
void mover_peer_dead(struct node *node, struct proto_message *message);
void mover_move(struct node *node, struct proto_message *message);
/* Takes what has finished; costs next to nothing when nothing has. */
void mover_drain(struct node *node);

#endif /* KVT_TOOLS_NODE_H */
