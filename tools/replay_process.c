/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node's process: this program again, started with a hidden word and its end
 * of a socket pair. Whoever starts it has opened no transport, so nothing of
 * kvt is ever forked.
 */
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "replay.h"

/* Starts the process with its end of the pair as descriptor NODE_FD. */
static int spawn(int fd, pid_t *ret)
{
    static char program[] = "kvt";
    static char word[] = NODE_WORD;
    char *argv[] = {program, word, NULL};
    posix_spawn_file_actions_t actions;
    int rc = posix_spawn_file_actions_init(&actions);

    if (rc != 0) {
        return rc;
    }
    /* Also where fd is NODE_FD already: then it takes close-on-exec away. */
    rc = posix_spawn_file_actions_adddup2(&actions, fd, NODE_FD);
    if (rc == 0) {
        rc = posix_spawn(ret, "/proc/self/exe", &actions, NULL, argv, environ);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return rc;
}

int process_start(struct proto *control, pid_t *ret)
{
    int pair[2];
    int rc;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                   pair) != 0) {
        return errno;
    }
    rc = spawn(pair[1], ret);
    (void)close(pair[1]);
    if (rc != 0) {
        (void)close(pair[0]);
        return rc;
    }
    proto_open(control, pair[0], PROTO_PAYLOAD_MAX);
    return 0;
}

int process_wait(pid_t pid)
{
    int status = 0;

    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

int process_kill(pid_t pid)
{
    (void)kill(pid, SIGKILL);
    return process_wait(pid);
}
