/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between the checker and its processes, and how these start. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "history.h"

#define SOCKET_FD 3
#define ARENA_FD 4

bool wire_send(int fd, const void *message, size_t length)
{
    return send(fd, message, length, MSG_NOSIGNAL) == (ssize_t)length;
}

int wire_receive(int fd, void *message, size_t length, int wait_ms)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int count;

    do {
        count = poll(&ready, 1, wait_ms);
    } while (count < 0 && errno == EINTR);
    if (count == 0) {
        return 0;
    }
    return count == 1 && recv(fd, message, length, 0) == (ssize_t)length ? 1
                                                                         : -1;
}

static _Noreturn void become(const char *role, int socket_fd, int arena_fd)
{
    char name[] = "history";
    char *argv[] = {name, NULL, NULL};
    char argument[16];
    int spare;

    (void)snprintf(argument, sizeof argument, "--%s", role);
    argv[1] = argument;
    /* The numbers may be in use the other way round. */
    spare = fcntl(arena_fd, F_DUPFD, ARENA_FD + 1);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || spare < 0 ||
        dup2(socket_fd, SOCKET_FD) != SOCKET_FD ||
        dup2(spare, ARENA_FD) != ARENA_FD ||
        close_range(ARENA_FD + 1, UINT_MAX, 0) != 0) {
        _exit(1);
    }
    (void)execv("/proc/self/exe", argv);
    _exit(1);
}

pid_t wire_start(const struct arena *arena, const char *role, int *ret_fd)
{
    int fds[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) {
        return -1;
    }
    pid = fork();
    if (pid == 0) {
        become(role, fds[1], arena->fd);
    }
    (void)close(fds[1]);
    if (pid < 0) {
        (void)close(fds[0]);
        return -1;
    }
    *ret_fd = fds[0];
    return pid;
}
