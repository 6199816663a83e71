/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the bench programs share: the shape of a transfer, memory of a kind,
 * and the protocol by which a harness interleaves them.
 *
 * Each program prints one JSON object a line on stdout: first one with
 * "ready": true, whose "lines" says how many lines a round gives, then those of
 * each round. Without --serve it makes --rounds rounds by itself. With it, it
 * sleeps until stdin says "round" and ends with "quit" or the end of stdin.
 */
#ifndef KVT_BENCH_COMMON_H
#define KVT_BENCH_COMMON_H

#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../tools/cli.h"

/* ----------------------------------------------------------------- memory */

enum bench_kind {
    BENCH_ANON,  /* private and anonymous */
    BENCH_MEMFD, /* shared, a memfd that cannot shrink */
    BENCH_SHM    /* shared, an unlinked file in /dev/shm */
};

struct bench_area {
    unsigned char *at;
    uint64_t bytes;
    int fd; /* -1 for BENCH_ANON */
    enum bench_kind kind;
};

const char *bench_kind_name(enum bench_kind kind);
bool bench_kind_parse(const char *text, enum bench_kind *ret);

/* Mapped, and every page of it is there. */
bool bench_area_open(enum bench_kind kind, uint64_t bytes,
                     struct bench_area *ret);
void bench_area_close(struct bench_area *area);

/* ------------------------------------------------------------------ shapes */

enum bench_order {
    BENCH_SCATTERED,  /* no two blocks of the list are neighbours */
    BENCH_HALF,       /* pairs of neighbours, so half of the blocks merge */
    BENCH_CONTIGUOUS, /* the whole list is one run */
    BENCH_ORDERS
};

struct bench_shape {
    uint64_t block_bytes;
    uint64_t blocks; /* of one transfer */
    uint64_t pool;   /* blocks on each side, at least `blocks` */
    enum bench_order order;
    uint64_t seed;
};

#define BENCH_SHAPE_OPTIONS                                                    \
    {"block-bytes", required_argument, NULL, 'b'},                             \
        {"blocks", required_argument, NULL, 'n'},                              \
        {"pool", required_argument, NULL, 'p'},                                \
        {"order", required_argument, NULL, 'o'},                               \
    {                                                                          \
        "seed", required_argument, NULL, 's'                                   \
    }

#define BENCH_SHAPE_USAGE                                                      \
    "  --block-bytes SIZE   bytes of a block (64KiB)\n"                        \
    "  --blocks N           blocks of a transfer (1024)\n"                     \
    "  --pool N             blocks on each side (as many as a transfer has)\n" \
    "  --order ORDER        scattered, half (pairs merge) or contiguous\n"     \
    "  --seed N             of the permutations (1)\n"

struct bench_shape bench_shape_default(void);
/* False: not one of ours, or malformed. */
bool bench_shape_option(int key, const char *arg, struct bench_shape *shape);
/* Fills in what follows from the rest; says what does not fit. */
bool bench_shape_check(struct bench_shape *shape);
const char *bench_order_name(enum bench_order order);
uint64_t bench_shape_bytes(const struct bench_shape *shape);

/* Where the i-th block comes from and goes to: shape->blocks indices each. */
void bench_indices(const struct bench_shape *shape, uint32_t *from,
                   uint32_t *to);

struct bench_copy {
    uint64_t from; /* offsets */
    uint64_t to;
    uint64_t length;
};

/* The list as copies, neighbours merged up to `piece` bytes. The caller frees
 * them. */
size_t bench_copies(const struct bench_shape *shape, uint64_t piece,
                    struct bench_copy **ret);

/* Every word of every block of the pool differs from every other. */
void bench_fill(const struct bench_shape *shape, unsigned char *at);
/* Whether each block of the transfer stands where it belongs. */
bool bench_check(const struct bench_shape *shape, const unsigned char *at);

/* ------------------------------------------------------------------ rounds */

struct bench_rounds {
    bool serve;
    uint64_t left;
};

#define BENCH_ROUND_OPTIONS                                                    \
    {"rounds", required_argument, NULL, 'r'},                                  \
    {                                                                          \
        "serve", no_argument, NULL, 'S'                                        \
    }

#define BENCH_ROUND_USAGE                                                      \
    "  --rounds N           rounds to make (5)\n"                              \
    "  --serve              make one for each \"round\" on stdin instead\n"

bool bench_round_option(int key, const char *arg, struct bench_rounds *rounds);

/* All of it, or false. */
bool bench_send(int fd, const void *bytes, size_t length);
bool bench_receive(int fd, void *bytes, size_t length);

/* The program ends with its parent. Children call it too. */
void bench_follow_parent(void);

/* Waits for the next round; false when there is none. */
bool bench_next(struct bench_rounds *rounds);

/* Splits "a,b,c" in place; the number of words, at most `max`. */
size_t bench_split(char *text, const char **words, size_t max);

/* The i-th CPU that this process may use, counted round and round. */
void bench_pin(unsigned index);

#endif /* KVT_BENCH_COMMON_H */
