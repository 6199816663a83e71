/* SPDX-License-Identifier: Apache-2.0 */
/* kvt's own rows. Each makes its rounds and prints their lines. */
#ifndef KVT_BENCH_SMALL_H
#define KVT_BENCH_SMALL_H

#include "../tools/stats.h"
#include "peer.h"

struct small {
    struct bench_shape shape;
    struct bench_rounds rounds;
    enum bench_kind kind;
    const char *engine;
    const char *row;
    const char *socket; /* where the peer listens; NULL: it is a child */
    uint64_t count;     /* transfers or calls of a round; 0: the row's own */
    uint64_t inflight;  /* at a time */
    uint64_t queued;    /* large ones ahead of each call */
    uint64_t gap_ms;    /* of idleness before each transfer */
    uint64_t peers;
    uint64_t seconds;
    bool spin; /* ask without end, or sleep on the descriptor */

    struct node node;
    struct peer *at; /* `peers` of them */
    kvt_layout own;
    kvt_layout theirs; /* the first peer's */
    uint32_t *from;
    uint32_t *to;
};

/* small.c, for the rows. */
void small_default_shape(struct small *small, uint64_t block_bytes,
                         uint64_t blocks);
bool small_set_up(struct small *small, uint64_t peers);
void small_ready(const struct small *small, unsigned lines);
/* One transfer of `count` blocks of the list from `first` on. */
bool small_submit(struct small *small, uint64_t first, uint64_t count,
                  kvt_xfer *ret);
/* Takes what has finished and waits if that is nothing; false when a transfer
 * did not end well. */
bool small_collect(struct small *small, uint64_t *ret_count);
bool small_drain(struct small *small, uint64_t count);
void small_times(const char *name, const struct histogram *histogram);

/* small_rows.c */
bool row_target(struct small *small);
bool row_move(struct small *small);
bool row_rate(struct small *small);
bool row_latency(struct small *small);
bool row_submit(struct small *small);
bool row_poll(struct small *small);
bool row_indices(struct small *small);

/* small_load.c */
bool row_idle(struct small *small);
bool row_stuck(struct small *small);
bool row_flood(struct small *small);

#endif /* KVT_BENCH_SMALL_H */
