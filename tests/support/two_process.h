/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second, real process with an agent of its own, for the cases that are
 * about two. It is this test program started again (fork and exec before it
 * opens any transport), and does what it is told over a socket. It dies with
 * the process that started it.
 *
 * `pool` is this side's picture of the child's pool: the image is what it must
 * hold, child_check() fetches what it does hold.
 */
#ifndef KVT_TEST_TWO_PROCESS_H
#define KVT_TEST_TWO_PROCESS_H

#include <sys/types.h>

#include "node.h"

struct child {
    pid_t pid;
    int fd;
    struct pool pool;
    uint64_t pool_addr; /* of block 0, in the child */
};

/* First thing in main(): never returns in a child. */
void child_main(int argc, char **argv);

/* A process without a transport; child_open() gives it one. */
void child_start(struct child *child);
void child_open(struct child *child, const struct node_plan *plan);
/* Both. */
void child_begin(struct child *child, const struct node_plan *plan);
/* Tells it to close (KVT_OK) and exit, and reaps it. */
void child_end(struct child *child);
/* Frees this side's half of one that was killed or sent away. */
void child_forget(struct child *child);

void child_kill(struct child *child); /* SIGKILL, reaped */
/* The same, but it may have died of another signal before. */
void child_bury(struct child *child);
void child_stop(struct child *child);     /* SIGSTOP, and it has stopped */
void child_continue(struct child *child); /* SIGCONT */
/* Without address randomization from its next exec on, which so brings the
 * same addresses as the exec before it. */
void child_fix_addresses(struct child *child);
/* It execs itself: same process, other memory, no transport. */
void child_exec(struct child *child);
/* It forks a process that does nothing and exits. */
void child_fork(struct child *child);
/* It becomes another user; false where it may not. */
bool child_drop_user(struct child *child, uint32_t id);

void *child_metadata(struct child *child, size_t *ret_length);
/* Every block of its pool, as a peer describes it. */
struct kvt_run child_run(const struct child *child);
/* pool.memory is what it holds now. */
void child_fetch(struct child *child);
/* Its pool, fetched, is the image. */
void child_check(struct child *child, const char *what);
void child_fill(struct child *child, uint64_t seed);
/* It unmaps whole pages of its pool, from a block on. */
void child_unmap(struct child *child, uint64_t block, uint64_t bytes);

/* What the calls of the same name returned there. */
int child_deregister(struct child *child, uint64_t timeout_ns);
int child_register(struct child *child);
int child_close(struct child *child, uint64_t timeout_ns);
int child_notify(struct child *child, kvt_peer peer, const void *bytes,
                 size_t length);
/* Waits for a notification there; returns its length. */
size_t child_note(struct child *child, void *buffer, size_t capacity);
int child_add(struct child *child, const char *name, const void *metadata,
              size_t length, kvt_peer *ret_peer);
kvt_layout child_prepare(struct child *child, kvt_peer peer,
                         const struct kvt_run *run);

/*
 * It writes its blocks 0 … count - 1 to the same blocks of the peer's layout,
 * again and again, until a write is refused or does not end as done. The call
 * returns when the first round is done.
 */
void child_write_on(struct child *child, kvt_peer peer, kvt_layout layout,
                    uint32_t count);
/* Waits for that end: the code of the refusal or of the result, and whether
 * the last result was quiescent. */
int child_written(struct child *child, uint64_t *ret_rounds,
                  bool *ret_quiescent);

#endif /* KVT_TEST_TWO_PROCESS_H */
