/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the engine `nixl` share: the stand-in for NIXL, and two
 * agents of this process over it, one of them imported by the other. Whatever
 * goes wrong in here fails the case.
 */
#ifndef KVT_TEST_NIXL_PAIR_H
#define KVT_TEST_NIXL_PAIR_H

#include <sys/types.h>

#include "engines/nixl.h"
#include "fake_env.h"
#include "fake_nixl.h"

#define BYTES 65536u /* of a side's region */
#define SECOND_NS UINT64_C(1000000000)
#define TOP_BIT (UINT64_C(1) << 63)

/* The functions of fake_nixl.h, in the library that the engine loads. */
struct stand_in {
    const char *library;
    fake_nixl_script_fn *script;
    fake_nixl_block_fn *block;
    fake_nixl_waiting_fn *waiting;
    fake_nixl_count_fn *count_lines;
    fake_nixl_line_fn *get_line;
    fake_nixl_reset_fn *reset;
    fake_nixl_process_fn *process;
};

extern struct stand_in fake;

/* An agent with one registered region, guarded on both sides. */
struct side {
    struct fake_env env;
    unsigned char *base;
    unsigned char *data;
    struct kvti_mem mem;
};

/* Another agent as this one imported it. */
struct peer {
    struct kvti_buf blob;
    struct kvti_md md;
    struct kvti_job load;
    void *conn;
};

struct pair {
    struct side a;
    struct side b;
    struct peer peer;
};

/* Once, in main(): nonzero, and a line for people, when there is none. */
int find_stand_in(void);

uint64_t number(const void *addr);
struct kvt_options options_of(void);

void open_side(struct side *side, const char *name);
void open_with(struct side *side, const char *name,
               const struct kvt_options *options);
int close_side(struct side *side);
void fill(struct side *side, uint64_t seed);
void add_mem(struct side *side, struct kvti_mem *mem);

/* What the core would make of this side: NIXL's bytes and a trailer. */
void export_side(struct side *side, struct peer *peer);
void load_peer(struct side *side, struct side *other, struct peer *peer);
int load_again(struct side *side, struct peer *peer, void *link);
void unload_peer(struct side *side, struct peer *peer);
void free_peer(struct peer *peer);

/* A process that does nothing, and the peer is said to be in it: call it
 * between export and load. */
pid_t start_process(struct peer *peer);
/* The second side again, in such a process, as a peer of the first. */
pid_t start_child(struct pair *pair, struct peer *child);
void kill_child(pid_t pid);

/* Forgets what the stand-in knows. */
void open_pair(struct pair *pair);
/* `code` is what closing the first side answers; no unfinished request was
 * released. */
void close_pair(struct pair *pair, int code);

/* `count` pieces of 64 bytes, in other places on either side. */
struct kvti_chunk *pieces(const struct pair *pair, uint32_t op, uint32_t count);
void post_and_wait(struct pair *pair, struct kvti_chunk *chunk);
/* Posts a chunk and returns with the NIXL thread inside its status call. */
void post_and_hold(struct pair *pair, struct kvti_chunk *chunk);
void assert_moved(const struct kvti_chunk *chunk);
void assert_outcome(const struct kvti_chunk *chunk, uint32_t state,
                    uint32_t fin, int code);
/* What was said of a chunk so far; more may come at any time, and from another
 * thread, so that nothing reads chunk->outcome before its last report. */
struct kvti_outcome recorded(struct pair *pair, const struct kvti_chunk *chunk);
/* Its state is known, its end not: bytes of it may still move. */
void assert_parked(struct pair *pair, const struct kvti_chunk *chunk,
                   uint32_t state, int code);
void wait_until_parked(struct pair *pair, const struct kvti_chunk *chunk,
                       uint32_t state, int code);

/* The n-th line of the stand-in's log that begins so holds these words. */
void assert_line(const char *prefix, int n, const char *words);
void wait_for_lines(const char *prefix, int count);

/* What the engine logged, for options.log and its log_ctx. */
struct lines {
    char text[4096]; /* each with a newline */
};

void keep_line(void *ctx, int level, const char *text);

/* Opening with these options must fail, and with these words. */
void assert_refused(const struct kvt_options *options, int code,
                    const char *words);

#endif /* KVT_TEST_NIXL_PAIR_H */
