/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of raw_nixl: its agent and target, its requests, its rounds. */
#ifndef KVT_BENCH_RAW_NIXL_H
#define KVT_BENCH_RAW_NIXL_H

#include "../src/engines/nixl_load.h"
#include "common.h"

#define RAW_CONFIGS_MAX 64u
#define RAW_PARAMS_MAX 8u

/* What kvt does not call; the words of nixl_capi.h. */
struct nixl_lists;

struct raw_extra_api {
    int (*prep_xfer_dlist)(struct nixl_agent *agent, const char *name,
                           struct nixl_xfer_dlist *list,
                           struct nixl_lists **ret, struct nixl_opt_args *args);
    int (*release_xfer_dlist_handle)(struct nixl_agent *agent,
                                     struct nixl_lists *lists);
    int (*make_xfer_req)(struct nixl_agent *agent, int op,
                         struct nixl_lists *local, const int *local_indices,
                         size_t local_count, struct nixl_lists *remote,
                         const int *remote_indices, size_t remote_count,
                         struct nixl_xfer_req **ret,
                         struct nixl_opt_args *args);
};

enum making { MAKE_CREATE, MAKE_PREPARED, MAKE_KEPT, MAKINGS };

enum waiting { WAIT_SPIN, WAIT_YIELD, WAIT_SLEEP, WAITINGS };

struct raw_config {
    enum making making;
    size_t split;
    size_t inflight;
    struct nixl_xfer_req **kept; /* one a part */
};

struct raw_agent_options {
    bool progress;
    uint64_t pthr_delay_us;
};

struct raw {
    struct bench_shape shape;
    struct bench_rounds rounds;
    enum bench_kind from_kind;
    enum bench_kind to_kind;
    uint64_t piece;
    const char *role;   /* NULL: both */
    const char *socket; /* NULL: a pair */
    struct raw_agent_options initiator;
    struct raw_agent_options target;
    const char *params[RAW_PARAMS_MAX]; /* "key=value" of UCX, both sides */
    size_t param_count;
    enum waiting waiting;
    bool skip_merge;
    struct raw_config configs[RAW_CONFIGS_MAX];
    size_t config_count;

    const struct nixl_api *api;
    struct raw_extra_api extra;
    struct nixl_agent *agent;
    struct nixl_backend *backend;
    struct nixl_opt_args *args;
    struct bench_area area; /* ours, whichever side we are */
    int peer;               /* a socket */
    uint64_t remote;        /* the target's memory */
    char *remote_name;
    struct bench_copy *copies;
    size_t copy_count;
    uint32_t *from; /* indices, for `prepared` */
    uint32_t *to;
    struct nixl_lists *local_lists;
    struct nixl_lists *remote_lists;
    struct nixl_xfer_req **flying;
};

/* raw_nixl_agent.c */
bool raw_fail(const char *what, int status); /* false, after a line */
bool raw_open_agent(struct raw *raw, const char *name, enum bench_kind kind,
                    const struct raw_agent_options *options);
/* The target's side until its initiator is gone: an exit status. */
int raw_run_target(struct raw *raw);
/* As a child; before the agent of this process. */
bool raw_fork_target(struct raw *raw);
/* Loads the metadata of the target, wherever it is. */
bool raw_meet_target(struct raw *raw);
/* 'c': clear the memory; 'k': is it right? */
bool raw_ask_target(const struct raw *raw, unsigned char order);

/* raw_nixl_xfer.c */
bool raw_prepare(struct raw *raw, bool remote, struct nixl_lists **ret);
/* Makes the requests that MAKE_KEPT posts again and again. */
bool raw_keep(struct raw *raw, struct raw_config *config);
bool raw_run(struct raw *raw, const struct raw_config *config,
             uint64_t *ret_ns);

#endif /* KVT_BENCH_RAW_NIXL_H */
