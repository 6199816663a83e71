/* SPDX-License-Identifier: Apache-2.0 */
/* What limits measures, and its arguments. */
#ifndef KVT_BENCH_LIMITS_H
#define KVT_BENCH_LIMITS_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "common.h"

#define LIMITS_THREADS_MAX 64u
#define LIMITS_IOV_MAX 1024u
/* Lists that take turns, as many as in bench/jobs/common.py: the same one over
 * and over would be half in the caches, and a limit that nobody reaches. */
#define LIMITS_LISTS 4u

enum way { WAY_MEMCPY, WAY_NT, WAY_PVW, WAY_SELF, WAYS };

struct limits_config {
    enum way way;
    unsigned threads;
    unsigned batch; /* copies that a thread takes at once */
};

struct limits_list {
    struct bench_copy *copies;
    size_t count;
};

/* A round's work. Const while helpers run, but for the counter. */
struct limits_work {
    struct limits_config config;
    struct limits_list list;
    const unsigned char *from;
    unsigned char *to; /* in the process that is written to */
    pid_t pid;
    _Atomic size_t next;
    atomic_bool failed;
};

/* Helpers wait for `round` to grow and count themselves out. All under mu. */
struct limits_team {
    pthread_mutex_t mu;
    pthread_cond_t begin;
    pthread_cond_t end;
    unsigned round;
    unsigned wanted; /* helpers 1 to wanted - 1 take part */
    unsigned busy;
    bool pin;
    struct limits_work work;
};

/* The process behind pvw. */
struct limits_owner {
    pid_t pid; /* 0: none */
    int socket;
    unsigned char *at; /* in it */
};

struct limits {
    struct bench_shape shape;
    struct bench_rounds rounds;
    enum bench_kind from_kind;
    enum bench_kind to_kind;
    uint64_t piece;
    bool pin;
    struct limits_config configs[256];
    size_t config_count;
    bool used[WAYS];
    struct bench_area from;
    struct bench_area to; /* ours; unused by pvw into private memory */
    struct limits_owner owner;
    struct limits_list lists[LIMITS_LISTS]; /* of shape.seed and the next */
    unsigned turn;
    struct limits_team team;
};

/* limits_args.c */
extern const char *const limits_ways[WAYS];
/* An exit status, or CLI_INTERRUPTED when help was printed. */
int limits_parse(int argc, char **argv, struct limits *limits);

/* limits.c: whether this CPU has the non-temporal stores we use. */
bool limits_has_nt(void);

#endif /* KVT_BENCH_LIMITS_H */
