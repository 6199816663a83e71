/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metadata that is not kvt's is first loaded by a process of its own, if the
 * transport was opened so: NIXL crashes on some damaged bytes whose structure
 * is sound, and then only that process dies.
 */
#ifndef KVTI_NIXL_CHECK_H
#define KVTI_NIXL_CHECK_H

#include <stdbool.h>
#include <sys/types.h>

#include "nixl.h"

/* Finds the program and sets engine->checks. In open, after NIXL was loaded,
 * since the environment is copied. KVT_EUNSUPPORTED with the places where the
 * program is not. */
int kvti_nixl_checks_new(struct kvti_nixl *engine, struct kvt_error *err);

/* NIXL thread; a LOAD. True: the job is taken. It comes back into the engine's
 * list when its metadata has passed, and is then not taken again; or it is
 * reported with what was wrong. */
bool kvti_nixl_check(struct kvti_nixl *engine, struct kvti_job *job);

/* Ends the processes and the thread, by a bounded time; jobs are dropped. All
 * three take NULL; after_fork frees memory only. */
void kvti_nixl_checks_stop(struct kvti_nixl_checks *checks);
void kvti_nixl_checks_free(struct kvti_nixl_checks *checks);
void kvti_nixl_checks_after_fork(struct kvti_nixl_checks *checks);

/* nixl_check_child.c: one process. */
struct kvti_nixl_child {
    pid_t pid;
    int pidfd;  /* readable when it has ended */
    int answer; /* what it says, never so much that it would have to wait */
};

struct kvti_nixl_verdict {
    bool ready;     /* it had started NIXL and went on to the metadata */
    bool spoke;     /* `status` is NIXL's answer */
    int status;     /* enum nixl_status */
    char text[200]; /* why it was not ready, or how it ended; "" if it spoke */
};

int kvti_nixl_child_find(char *path, size_t size, struct kvt_error *err);
int kvti_nixl_child_start(struct kvti_nixl_child *child, const char *program,
                          char *const *environment,
                          const struct kvti_buf *request,
                          struct kvt_error *err);
void kvti_nixl_child_kill(const struct kvti_nixl_child *child);
/* It has ended: reaps it and frees what it had. */
void kvti_nixl_child_end(struct kvti_nixl_child *child,
                         struct kvti_nixl_verdict *ret);

/* nixl_check_wire.c: what the program is told. */
struct kvti_nixl_request {
    const char *library;
    const char *agent_name;
    struct kvti_nixl_config config;
    uint32_t limit_s; /* it ends itself after so long */
    const uint8_t *blob;
    size_t blob_length;
};

int kvti_nixl_request_encode(const struct kvti_nixl_request *request,
                             struct kvti_buf *out);
/* *ret points into the bytes; its config is to be freed, also on failure. */
int kvti_nixl_request_decode(const uint8_t *data, size_t length,
                             struct kvti_nixl_request *ret,
                             struct kvt_error *err);

/* What the program says: F and a text; or R when it is ready, and then V and
 * the status in the machine's own form. */
#define KVTI_NIXL_SAYS_FAILED 'F'
#define KVTI_NIXL_SAYS_READY 'R'
#define KVTI_NIXL_SAYS_VERDICT 'V'
/* And its exit status after a fatal signal. */
#define KVTI_NIXL_SIGNAL_STATUS 128

#endif /* KVTI_NIXL_CHECK_H */
