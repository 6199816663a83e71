/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Agents with pools. A pool is seeded bytes: a guard, blocks with gaps between
 * them, a guard. Beside it lies its image, what every byte of it must be: a
 * case says which blocks it expects to change (pool_expect), and pool_check()
 * compares all bytes, those that must not have changed among them.
 *
 * The functions end the case when something goes wrong.
 */
#ifndef KVT_TEST_NODE_H
#define KVT_TEST_NODE_H

#include <stdbool.h>

#include "kvt_assert.h"

#define POOL_GUARD_BYTES 4096u

/* Zero fields take the default. */
struct pool_shape {
    uint64_t block_bytes; /* 256 */
    uint64_t gap_bytes;   /* none: blocks touch each other */
    uint64_t count;       /* 64 */
    bool shm;             /* memory of kvt_shm_create() */
};

struct pool {
    struct pool_shape shape;
    unsigned char *memory;
    unsigned char *image;
    size_t bytes; /* of each */
    struct kvt_shm shm;
};

void pool_open(struct pool *pool, const struct pool_shape *shape,
               uint64_t seed);
void pool_close(struct pool *pool);
/* The image is what is there. */
void pool_take(struct pool *pool);
/* Other bytes everywhere, image included. */
void pool_fill(struct pool *pool, uint64_t seed);
unsigned char *pool_block(const struct pool *pool, uint64_t index);
uint64_t pool_stride(const struct pool *pool);
/* All blocks and gaps, without the guards. */
struct kvt_region pool_region(const struct pool *pool);
struct kvt_run pool_run(const struct pool *pool);
/* dst's block will hold what src's block holds now. */
void pool_expect(struct pool *dst, uint64_t dst_index, const struct pool *src,
                 uint64_t src_index);
/* The same for bytes at an address inside each pool. */
void pool_expect_bytes(struct pool *dst, uint64_t dst_addr,
                       const struct pool *src, uint64_t src_addr,
                       size_t length);
/* One block's bytes are of no interest: the image takes what is there. */
void pool_accept(struct pool *pool, uint64_t index);
void pool_check(const struct pool *pool, const char *what);
/* Deterministic bytes and numbers. */
uint64_t test_random(uint64_t *state);

/* ------------------------------------------------------------------ agents */

struct node_plan {
    const char *engine; /* specification */
    const char *name;   /* of the agent; NULL: the library's default */
    struct pool_shape shape;
    uint64_t seed;
    struct kvt_options options; /* engine and agent_name are overwritten */
};

struct node {
    kvt_transport *t;
    struct pool pool;
    kvt_layout layout; /* "pool": every block */
};

void node_open(struct node *node, const struct node_plan *plan);
/* Closes with KVT_OK and frees. */
void node_close(struct node *node);

/* Bytes moved by the agents of this test program, by their path. */
struct path_bytes {
    uint64_t local;
    uint64_t nixl;
};

extern struct path_bytes moved_bytes;

/* Adds those of a transport that is closed or about to be left alone;
 * node_close() does. */
void count_bytes(kvt_transport *t);
/* malloc()ed. */
void *node_metadata(const struct node *node, size_t *ret_length);
kvt_peer node_add(const struct node *node, const char *name,
                  const void *metadata, size_t length);
/* Returns when the control thread has taken all that was asked before. */
void node_settle(const struct node *node);

/* `a` moves, `b` is moved to and from. */
struct pair {
    struct node a;
    struct node b;
    kvt_peer peer;     /* b, as a knows it */
    kvt_layout remote; /* b's pool, as a knows it */
};

void pair_open(struct pair *pair, const struct node_plan *a,
               const struct node_plan *b);
void pair_close(struct pair *pair);

/* --------------------------------------------------------------- transfers */

struct kvt_indices indices_u32(const uint32_t *data, uint64_t count);

kvt_xfer pair_write(const struct pair *pair, const uint32_t *local,
                    const uint32_t *remote, uint64_t count,
                    const struct kvt_xfer_options *options);
kvt_xfer pair_read(const struct pair *pair, const uint32_t *local,
                   const uint32_t *remote, uint64_t count,
                   const struct kvt_xfer_options *options);
/* One block each way of looking at it: local block i to remote block k. */
kvt_xfer pair_write_one(const struct pair *pair, uint32_t i, uint32_t k,
                        const struct kvt_xfer_options *options);
/* What a write of these leaves in b's pool. */
void pair_expect(struct pair *pair, const uint32_t *local,
                 const uint32_t *remote, uint64_t count);
void pair_check(const struct pair *pair);

/* Waits on kvt_fd() until `count` results of the peer are there. */
void wait_results(kvt_transport *t, kvt_peer peer, struct kvt_result *ret,
                  size_t count);
/* The next result of all is this transfer's. */
struct kvt_result wait_xfer(kvt_transport *t, kvt_xfer id);
/* And it is well: done, quiescent, no error, all bytes. */
struct kvt_result wait_done(kvt_transport *t, kvt_xfer id);
struct kvt_result status_of(kvt_transport *t, kvt_xfer id);
/* True when kvt_status() says so. */
bool in_state(kvt_transport *t, kvt_xfer id, enum kvt_state state);
bool is_quiescent(kvt_transport *t, kvt_xfer id);
/* Waits until kvt_fd() is readable; false after `timeout_ms`. */
bool wait_fd(kvt_transport *t, int timeout_ms);
struct kvt_stats stats_of(kvt_transport *t);
/* Waits for one notification. */
struct kvt_notification wait_note(kvt_transport *t, void *buffer,
                                  size_t capacity);

/* ------------------------------------------------------------ this process */

struct usage {
    long threads;
    long fds;
    long maps;
    uint64_t heap_bytes; /* in use, by malloc's own count */
};

struct usage usage_now(void);

#endif /* KVT_TEST_NODE_H */
