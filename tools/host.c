/* SPDX-License-Identifier: Apache-2.0 */
#include "host.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

/* Inodes of the namespaces that a kernel starts with: fixed in its sources. */
#define FIRST_USER_NAMESPACE "user:[4026531837]"
#define FIRST_PID_NAMESPACE "pid:[4026531836]"

/* Long enough for a loaded host to end a killed child. */
#define DEATH_TIMEOUT_MS 10000

static void look_limit(__rlimit_resource_t resource, struct host_limit *ret)
{
    struct rlimit limit = {0};

    (void)getrlimit(resource, &limit);
    ret->soft = limit.rlim_cur == RLIM_INFINITY ? HOST_UNLIMITED
                                                : limit.rlim_cur;
    ret->hard = limit.rlim_max == RLIM_INFINITY ? HOST_UNLIMITED
                                                : limit.rlim_max;
}

/* The number in a file of /proc, or `otherwise`. */
static int64_t read_number(const char *path, int64_t otherwise)
{
    char text[32] = "";
    FILE *file = fopen(path, "re");
    int64_t value = otherwise;
    char *end;

    if (file == NULL) {
        return otherwise;
    }
    if (fgets(text, sizeof(text), file) != NULL) {
        value = strtoll(text, &end, 10);
        value = end == text ? otherwise : value;
    }
    (void)fclose(file);
    return value;
}

static void look_namespace(const char *path, char *text, size_t capacity)
{
    ssize_t length = readlink(path, text, capacity - 1);

    text[length > 0 ? length : 0] = '\0';
}

static void look_shm(struct host_facts *facts)
{
    struct statvfs status;

    facts->shm_exists = statvfs("/dev/shm", &status) == 0;
    if (facts->shm_exists) {
        facts->shm_bytes = (uint64_t)status.f_blocks * status.f_frsize;
        facts->shm_free_bytes = (uint64_t)status.f_bavail * status.f_frsize;
    }
}

static void explain(struct host_probe *probe, const char *call)
{
    probe->works = false;
    (void)snprintf(probe->why, sizeof(probe->why), "%s: %s", call,
                   strerror(errno));
}

/* Writes a word of a child's memory and reads it back. */
static void probe_vm_write(pid_t child, struct host_probe *ret)
{
    static uint64_t word; /* at the same address in the child */
    uint64_t sent = UINT64_C(0x6b76742d70726f62);
    uint64_t back = 0;
    struct iovec there = {.iov_base = &word, .iov_len = sizeof(word)};
    struct iovec from = {.iov_base = &sent, .iov_len = sizeof(sent)};
    struct iovec to = {.iov_base = &back, .iov_len = sizeof(back)};

    if (process_vm_writev(child, &from, 1, &there, 1, 0) != sizeof(sent)) {
        explain(ret, "process_vm_writev");
    } else if (process_vm_readv(child, &to, 1, &there, 1, 0) != sizeof(back)) {
        explain(ret, "process_vm_readv");
    } else if (back != sent) {
        (void)snprintf(ret->why, sizeof(ret->why),
                       "what was written is not what is read");
    } else {
        ret->works = true;
    }
}

/* Kills the child and sees it die. */
static void probe_pidfd(pid_t child, struct host_probe *ret)
{
    int fd = (int)syscall(SYS_pidfd_open, child, 0);
    struct pollfd wait = {.fd = fd, .events = POLLIN};

    if (fd < 0) {
        explain(ret, "pidfd_open");
    }
    (void)kill(child, SIGKILL);
    if (fd < 0) {
        return;
    }
    if (poll(&wait, 1, DEATH_TIMEOUT_MS) == 1) {
        ret->works = true;
    } else {
        (void)snprintf(ret->why, sizeof(ret->why),
                       "a child's death was not seen");
    }
    (void)close(fd);
}

static void probe_child(struct host_facts *facts)
{
    pid_t child = fork();

    if (child < 0) {
        explain(&facts->vm_write, "fork");
        explain(&facts->pidfd, "fork");
        return;
    }
    if (child == 0) {
        for (;;) {
            (void)pause();
        }
    }
    probe_vm_write(child, &facts->vm_write);
    probe_pidfd(child, &facts->pidfd);
    (void)waitpid(child, NULL, 0);
}

void host_look(struct host_facts *ret)
{
    struct host_facts facts = {0};
    struct utsname name;

    if (uname(&name) == 0) {
        (void)snprintf(facts.kernel, sizeof(facts.kernel), "%.60s %.60s",
                       name.sysname, name.release);
    }
    look_limit(RLIMIT_MEMLOCK, &facts.memlock_bytes);
    look_limit(RLIMIT_NOFILE, &facts.open_files);
    facts.ptrace_scope = read_number("/proc/sys/kernel/yama/ptrace_scope", -1);
    facts.max_map_count = (uint64_t)read_number("/proc/sys/vm/max_map_count",
                                                0);
    look_shm(&facts);
    look_namespace("/proc/self/ns/user", facts.user_namespace,
                   sizeof(facts.user_namespace));
    look_namespace("/proc/self/ns/pid", facts.pid_namespace,
                   sizeof(facts.pid_namespace));
    facts.initial_user_namespace = strcmp(facts.user_namespace,
                                          FIRST_USER_NAMESPACE) == 0;
    facts.initial_pid_namespace = strcmp(facts.pid_namespace,
                                         FIRST_PID_NAMESPACE) == 0;
    probe_child(&facts);
    *ret = facts;
}
