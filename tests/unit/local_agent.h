/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An agent of the engine `local` with one region of seeded bytes between guard
 * pages, in this process or in a child of its own that takes orders.
 */
#ifndef KVT_TEST_LOCAL_AGENT_H
#define KVT_TEST_LOCAL_AGENT_H

#include <sys/types.h>

#include "fake_env.h"

#define AGENT_PAGE 4096u
#define AGENT_PAGES 512u /* of the region: 2 MiB */
#define AGENT_BYTES ((size_t)AGENT_PAGE * AGENT_PAGES)

enum agent_memory {
    AGENT_ANON,
    AGENT_SEALED, /* memfd that cannot shrink */
    AGENT_FILE    /* memfd that can */
};

struct agent {
    struct fake_env env;
    unsigned char *base; /* guard page, region, guard page */
    unsigned char *data; /* the region */
    int fd;              /* of the memory, or -1 */
    struct kvti_mem mem;
    struct kvti_md md;
};

/* All of them stop the program when something of their own fails. */
void agent_open(struct agent *agent, const char *name, enum agent_memory memory,
                uint64_t seed);
int agent_close(struct agent *agent);
void agent_fill(struct agent *agent, uint64_t seed);
/* What agent_fill() writes at `index` of base. */
unsigned char agent_byte(uint64_t seed, size_t index);

int agent_load(struct agent *agent, const struct kvti_md *md, void *link,
               void **ret_conn, struct kvt_error *err);
void *agent_must_load(struct agent *agent, const struct kvti_md *md,
                      void *link);
void agent_unload(struct agent *agent, void *conn);
int agent_drop(struct agent *agent, uint64_t timeout_ns, struct kvt_error *err);
int agent_connect(struct agent *agent, void *conn);

/* One piece; the outcome of it. */
struct kvti_outcome agent_move(struct agent *agent, void *conn, uint32_t op,
                               const void *local, uint64_t peer, size_t length);

/* ----------------------------------------------------------------- children */

struct child {
    pid_t pid;
    int fd;
    uint8_t *blob;
    struct kvti_md md;
    uint64_t data; /* address of its region */
};

enum child_order {
    CHILD_QUIT,
    CHILD_CLOSE,    /* the transport: its code */
    CHILD_DROP,     /* its region, within `a` ns: the code */
    CHILD_UNMAP,    /* page `a` of the region */
    CHILD_TRUNCATE, /* the file to `a` pages of the region */
    CHILD_READONLY, /* page `a` of the region */
    CHILD_EXEC,     /* another program, which sleeps */
    CHILD_FORK,     /* a child that sleeps: its pid */
    CHILD_HOLD,     /* enter the gate of our parent and stay: 0 */
    CHILD_LEAVE,    /* leave it */
    CHILD_LOAD      /* our parent's metadata: the code; then its text */
};

struct child_plan {
    enum agent_memory memory;
    uint64_t seed;
    uid_t uid; /* 0: ours */
};

void local_child_start(struct child *child, const struct child_plan *plan);
int64_t local_child_ask(struct child *child, enum child_order order,
                        uint64_t a);
/* The same with this agent's metadata. */
int64_t local_child_ask_about(struct child *child, enum child_order order,
                              const struct agent *agent, struct kvt_error *err);
/* Copies the region and both guard pages out of it. */
void local_child_read(const struct child *child, unsigned char *ret);
/* Ends it by order, or by SIGKILL; either way it is reaped. */
void local_child_quit(struct child *child);
void local_child_kill(struct child *child);

/* To be called first in main: does not return in a child. */
void local_child_main(int argc, char **argv);

#endif /* KVT_TEST_LOCAL_AGENT_H */
