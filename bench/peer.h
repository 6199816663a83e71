/* SPDX-License-Identifier: Apache-2.0 */
/* The two sides of a row of kvt's own: a node of ours, and peers that are
 * processes. */
#ifndef KVT_BENCH_PEER_H
#define KVT_BENCH_PEER_H

#include <kvt/kvt.h>
#include <sys/types.h>

#include "common.h"

/* A transport with one piece of registered memory. */
struct node {
    kvt_transport *transport;
    struct bench_area area;
};

bool node_open(const char *engine, const char *name, enum bench_kind kind,
               uint64_t bytes, struct node *ret);
void node_close(struct node *node);

/* A child with a node of its own. */
struct peer {
    pid_t pid;
    int socket;
    uint64_t addr; /* of its memory */
    void *metadata;
    uint64_t metadata_length;
    kvt_peer id; /* ours, once it is added */
};

/* Before the first transport of this process: NIXL does not bear a fork. */
bool peer_start(const char *engine, const char *name, enum bench_kind kind,
                uint64_t bytes, struct peer *ret);
/* Or a process that was started elsewhere: its side, an exit status, and
 * ours. */
int peer_serve(const char *engine, const char *path, enum bench_kind kind,
               uint64_t bytes);
bool peer_connect(const char *path, struct peer *ret);
bool peer_add(struct node *node, const char *name, struct peer *peer);

/* The peer writes all of its memory into ours again and again, or no more. */
bool peer_learn(struct peer *peer, const struct node *node);
bool peer_flood(struct peer *peer, bool on);

/* Blocks of equal size from the beginning of the memory of either side. */
bool peer_layouts(struct node *node, const struct peer *peer,
                  uint64_t block_bytes, uint64_t blocks, kvt_layout *ret_own,
                  kvt_layout *ret_peer);

#endif /* KVT_BENCH_PEER_H */
