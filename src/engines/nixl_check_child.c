/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One probe process, seen from its parent; the check thread.
 *
 * It is a program of its own, kvt-probe, started by posix_spawn(): NIXL must
 * not be called in a forked child of a process that has it running, and a fork
 * would copy the page tables of a host with hundreds of gigabytes mapped. It is
 * found where it was installed, relative to the file that holds this code, so
 * that a tree can be moved; KVT_PROBE names another one. It is a file that an
 * administrator can see, label and forbid, not code unpacked into memory.
 *
 * Nothing depends on its exit status: where the host ignores SIGCHLD, or reaps
 * all children itself, the kernel or the host has it. What counts is what it
 * wrote before it ended, and that it ended, which its pidfd tells. The host
 * gets a SIGCHLD, as for any child; the signal of a child that execs cannot be
 * another one.
 *
 * Its requests lie in a memfd, so that writing them never waits for it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nixl_check.h"

#ifndef KVTI_PROBE_FROM_LIB
#error "the build says where kvt-probe is installed, seen from the library"
#endif

#define PROGRAM "kvt-probe"

/* -------------------------------------------------------------- the program */

/* The folder of the file that this code was loaded from. */
static bool find_home(char *path, size_t size)
{
    char real[PATH_MAX];
    Dl_info info;
    int (*self)(char *, size_t, struct kvt_error *) = kvti_nixl_child_find;
    void *address;

    memcpy(&address, &self, sizeof(address));
    if (dladdr(address, &info) == 0 || info.dli_fname == NULL ||
        realpath(info.dli_fname, real) == NULL) {
        return false;
    }
    *strrchr(real, '/') = '\0';
    kvti_format(path, size, "%s", real);
    return true;
}

int kvti_nixl_child_find(char *path, size_t size, struct kvt_error *err)
{
    static const char *const places[] = {KVTI_PROBE_FROM_LIB, PROGRAM};
    /* As every getenv of kvt_open(). NOLINTNEXTLINE(concurrency-mt-unsafe) */
    const char *named = secure_getenv("KVT_PROBE");
    char home[PATH_MAX] = "";

    if (named != NULL && named[0] != '\0') {
        kvti_format(path, size, "%s", named);
        return kvti_nixl_is_program(path)
                   ? KVT_OK
                   : kvti_fail(err, KVT_EUNSUPPORTED,
                               "metadata cannot be probed: KVT_PROBE is "
                               "%.120s, which is no program",
                               named);
    }
    if (find_home(home, sizeof(home))) {
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
            kvti_format(path, size, "%s/%s", home, places[i]);
            if (kvti_nixl_is_program(path)) {
                return KVT_OK;
            }
        }
    }
    return kvti_fail(err, KVT_EUNSUPPORTED,
                     "metadata cannot be probed: " PROGRAM
                     " is neither in %.80s nor at " KVTI_PROBE_FROM_LIB
                     " from there: install it, or set KVT_PROBE to its path",
                     home);
}

/* -------------------------------------------------------------------- start */

/* Above the standard descriptors, which the child gets others for. */
static int lift(int fd)
{
    int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 3);

    if (fd >= 0) {
        (void)close(fd);
    }
    return high;
}

static void shut(int *fd)
{
    if (*fd >= 0) {
        (void)close(*fd);
    }
    *fd = -1;
}

/* A file that holds the request, read from its start. */
static int request_file(const struct kvti_buf *request)
{
    int fd = lift(memfd_create("kvt-probe", MFD_CLOEXEC));
    size_t done = 0;

    while (fd >= 0 && done < request->length) {
        ssize_t n = pwrite(fd, request->data + done, request->length - done,
                           (off_t)done);

        if (n <= 0) {
            shut(&fd);
        } else {
            done += (size_t)n;
        }
    }
    return fd;
}

/* No signal is ignored or blocked in it, whatever the host does; it is in no
 * group that a terminal signals. */
static int spawn_with(pid_t *ret_pid, const char *program,
                      char *const *environment,
                      posix_spawn_file_actions_t *actions)
{
    static const char name[] = PROGRAM;
    char *argv[] = {NULL, NULL};
    posix_spawnattr_t attr;
    sigset_t none;
    sigset_t all;
    int rc = posix_spawnattr_init(&attr);

    if (rc != 0) {
        return rc;
    }
    (void)sigemptyset(&none);
    (void)sigfillset(&all);
    (void)posix_spawnattr_setsigmask(&attr, &none);
    (void)posix_spawnattr_setsigdefault(&attr, &all);
    (void)posix_spawnattr_setpgroup(&attr, 0);
    rc = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK |
                                             POSIX_SPAWN_SETSIGDEF |
                                             POSIX_SPAWN_SETPGROUP);
    argv[0] = strdup(name);
    if (rc == 0) {
        rc = argv[0] == NULL ? ENOMEM
                             : posix_spawn(ret_pid, program, actions, &attr,
                                           argv, environment);
    }
    free(argv[0]);
    (void)posix_spawnattr_destroy(&attr);
    return rc;
}

static int spawn_on(pid_t *ret_pid, const char *program,
                    char *const *environment, int request, int answer)
{
    posix_spawn_file_actions_t actions;
    int rc = posix_spawn_file_actions_init(&actions);

    if (rc != 0) {
        return rc;
    }
    rc = posix_spawn_file_actions_adddup2(&actions, request, STDIN_FILENO);
    if (rc == 0) {
        rc = posix_spawn_file_actions_adddup2(&actions, answer, STDOUT_FILENO);
    }
    if (rc == 0) {
        /* What NIXL prints about damaged metadata is not the host's. */
        rc = posix_spawn_file_actions_addopen(&actions, STDERR_FILENO,
                                              "/dev/null", O_WRONLY, 0);
    }
    if (rc == 0) {
        rc = spawn_with(ret_pid, program, environment, &actions);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return rc;
}

int kvti_nixl_child_start(struct kvti_nixl_child *child, const char *program,
                          char *const *environment,
                          const struct kvti_buf *request, struct kvt_error *err)
{
    int ends[2] = {-1, -1};
    int file = request_file(request);
    int rc;

    *child = (struct kvti_nixl_child){.pid = -1, .pidfd = -1, .answer = -1};
    if (file < 0 || pipe2(ends, O_CLOEXEC) != 0) {
        rc = errno;
        goto fail;
    }
    ends[0] = lift(ends[0]);
    ends[1] = lift(ends[1]);
    if (ends[0] < 0 || ends[1] < 0) {
        rc = errno;
        goto fail;
    }
    rc = spawn_on(&child->pid, program, environment, file, ends[1]);
    if (rc != 0) {
        goto fail;
    }
    shut(&file);
    shut(&ends[1]);
    child->answer = ends[0];
    /* It takes much longer than this to end. If it is gone all the same, and
     * its number with it, there is nothing to wait for. */
    child->pidfd = (int)syscall(SYS_pidfd_open, child->pid, 0);
    if (child->pidfd < 0 && errno != ESRCH) {
        rc = errno;
        (void)kill(child->pid, SIGKILL);
        (void)waitpid(child->pid, NULL, 0);
        shut(&child->answer);
        goto fail;
    }
    return KVT_OK;

fail:
    shut(&file);
    shut(&ends[0]);
    shut(&ends[1]);
    return kvti_fail_errno(err, KVT_ESYSTEM, rc,
                           "cannot start %.100s, which probes metadata",
                           program);
}

void kvti_nixl_child_kill(const struct kvti_nixl_child *child)
{
    if (child->pidfd >= 0) {
        (void)syscall(SYS_pidfd_send_signal, child->pidfd, SIGKILL, NULL, 0);
    }
}

/* ---------------------------------------------------------------------- end */

static void reap(const struct kvti_nixl_child *child, char *text, size_t size)
{
    siginfo_t info = {0};
    int rc = -1;
    int number;

    if (child->pidfd >= 0) {
        do {
            rc = waitid((idtype_t)P_PIDFD, (id_t)child->pidfd, &info,
                        WEXITED | WNOHANG);
        } while (rc != 0 && errno == EINTR);
    }
    if (rc != 0 || info.si_pid == 0) {
        kvti_format(text, size, "it ended");
        return;
    }
    number = info.si_status;
    if (info.si_code == CLD_EXITED && number < KVTI_NIXL_SIGNAL_STATUS) {
        kvti_format(text, size, "exit status %d", number);
        return;
    }
    number -= info.si_code == CLD_EXITED ? KVTI_NIXL_SIGNAL_STATUS : 0;
    kvti_format(text, size, "signal %d", number);
}

void kvti_nixl_child_end(struct kvti_nixl_child *child,
                         struct kvti_nixl_verdict *ret)
{
    char bytes[sizeof(ret->text)];
    ssize_t length;

    *ret = (struct kvti_nixl_verdict){.ready = false};
    reap(child, ret->text, sizeof(ret->text));
    do {
        length = read(child->answer, bytes, sizeof(bytes) - 1);
    } while (length < 0 && errno == EINTR);
    shut(&child->answer);
    shut(&child->pidfd);
    if (length <= 0) {
        return;
    }
    bytes[length] = '\0';
    if (bytes[0] == KVTI_NIXL_SAYS_FAILED) {
        kvti_format(ret->text, sizeof(ret->text), "%s", bytes + 1);
        return;
    }
    ret->ready = bytes[0] == KVTI_NIXL_SAYS_READY;
    if (ret->ready && length == 2 + (ssize_t)sizeof(ret->status) &&
        bytes[1] == KVTI_NIXL_SAYS_VERDICT) {
        ret->spoke = true;
        ret->text[0] = '\0';
        memcpy(&ret->status, bytes + 2, sizeof(ret->status));
    }
}
