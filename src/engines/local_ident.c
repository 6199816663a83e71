/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who a process is, ours and a peer's.
 *
 * No single mark is enough. The boot id is shared by clones of a snapshot; a
 * pid is reused; pid, start time and pidfd survive an exec; a forked child
 * has its parent's memory. The nonce, read out of the process' memory, says that
 * this memory is still that of the transport, and so that the process lives:
 * nobody else has those bytes, and their page is wiped on fork and gone after
 * exec and close. An address space that is gone does not come back, so two good
 * reads bracket what was written between them. The second is spared where the
 * process shows that it lives (local_life.c). A bad one is explained by the
 * pidfd, which was checked against the start time once: it tells a process that
 * is gone from one that took its pid.
 */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NONCE_MAGIC UINT64_C(0x6b76746e6f6e6365) /* "kvtnonce" */
#define NONCE_VERSION 1u

_Static_assert(sizeof(struct kvti_nonce_page) == 64,
               "the page's content is part of the protocol");

/* The text of a small file of /proc, NUL-terminated, or -errno. */
static int read_text(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length;
    int code;

    if (fd < 0) {
        return -errno;
    }
    do {
        length = read(fd, text, size - 1);
    } while (length < 0 && errno == EINTR);
    code = length < 0 ? -errno : 0;
    close(fd);
    if (code == 0) {
        text[length] = '\0';
        text[strcspn(text, "\n")] = '\0';
    }
    return code;
}

int kvti_ident_start_time(int32_t pid, uint64_t *ret)
{
    char path[40];
    char text[1024];
    char *at;
    int code;

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    code = read_text(path, text, sizeof(text));
    if (code != 0) {
        return code;
    }
    /* Field 2 is the command's name and may hold anything, ")" too. */
    at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    if (at == NULL) {
        return -EPROTO;
    }
    *ret = strtoull(at + 1, NULL, 10);
    return 0;
}

int kvti_ident_pidfd_open(int32_t pid)
{
    return (int)syscall(SYS_pidfd_open, (pid_t)pid, 0u);
}

bool kvti_ident_pidfd_dead(int pidfd)
{
    struct pollfd fd = {.fd = pidfd, .events = POLLIN};
    int count;

    do {
        count = poll(&fd, 1, 0);
    } while (count < 0 && errno == EINTR);
    return count > 0;
}

bool kvti_ident_owner_dead(uint64_t owner)
{
    int32_t pid = (int32_t)(owner >> KVTI_OWNER_START_BITS);
    uint64_t start_time = 0;
    bool dead;
    int pidfd;

    if (owner == 0) {
        return true;
    }
    pidfd = kvti_ident_pidfd_open(pid);
    if (pidfd < 0) {
        return errno == ESRCH;
    }
    dead = (kvti_ident_start_time(pid, &start_time) == 0 &&
            kvti_gate_owner(pid, start_time) != owner) ||
           kvti_ident_pidfd_dead(pidfd);
    close(pidfd);
    return dead;
}

/* ---------------------------------------------------------------- ourselves */

static int read_namespace(const char *name, uint64_t *ret,
                          struct kvt_error *err)
{
    char path[40];
    struct stat st;

    (void)snprintf(path, sizeof(path), "/proc/self/ns/%s", name);
    if (stat(path, &st) != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot read %s, which the local engine needs "
                               "to name this process",
                               path);
    }
    *ret = st.st_ino;
    return KVT_OK;
}

int kvti_ident_self(struct kvti_local_id *local, struct kvt_error *err)
{
    const char *path = "/proc/sys/kernel/random/boot_id";
    int code;

    memset(local, 0, sizeof(*local));
    local->pid = getpid();
    local->uid = geteuid();
    code = read_text(path, local->boot_id, sizeof(local->boot_id));
    if (code == 0) {
        path = "/proc/PID/stat";
        code = kvti_ident_start_time(local->pid, &local->start_time);
    }
    if (code != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, -code,
                               "cannot read %s, which the local engine needs "
                               "to name this process",
                               path);
    }
    code = read_namespace("pid", &local->pid_ns, err);
    if (code == KVT_OK) {
        code = read_namespace("net", &local->net_ns, err);
    }
    return code;
}

int kvti_ident_page(const uint8_t *incarnation, struct kvti_nonce_page **ret,
                    struct kvt_error *err)
{
    size_t length = (size_t)sysconf(_SC_PAGESIZE);
    struct kvti_nonce_page *page;
    void *mapped = mmap(NULL, length, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (mapped == MAP_FAILED) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot map the page that names this agent");
    }
    page = mapped;
    if (madvise(page, length, MADV_WIPEONFORK) != 0 ||
        getrandom(page->nonce, sizeof(page->nonce), 0) !=
            (ssize_t)sizeof(page->nonce)) {
        kvti_fail_errno(err, KVT_ESYSTEM, errno,
                        "cannot fill the page that names this agent");
        munmap(page, length);
        return KVT_ESYSTEM;
    }
    page->magic = NONCE_MAGIC;
    page->version = NONCE_VERSION;
    memcpy(page->incarnation, incarnation, sizeof(page->incarnation));
    atomic_store(&page->open, 1);
    *ret = page;
    return KVT_OK;
}

void kvti_ident_page_free(struct kvti_nonce_page *page)
{
    if (page != NULL) {
        munmap(page, (size_t)sysconf(_SC_PAGESIZE));
    }
}

/* ------------------------------------------------------------------ a peer */

static int explain_yama(int32_t pid, int scope, struct kvt_error *err)
{
    if (scope == 1) {
        return kvti_fail(err, KVT_EPERM,
                         "kernel.yama.ptrace_scope is 1, which keeps this "
                         "process out of process %d: open the peer's "
                         "transport with KVT_OPEN_ALLOW_PTRACE or set it to 0",
                         (int)pid);
    }
    return kvti_fail(err, KVT_EPERM,
                     "kernel.yama.ptrace_scope is %d, which keeps this process "
                     "out of process %d: set it to 0, or to 1 with "
                     "KVT_OPEN_ALLOW_PTRACE",
                     scope, (int)pid);
}

int kvti_ident_denied(int32_t pid, uint32_t uid, struct kvt_error *err)
{
    char path[40];
    char text[16];
    struct stat st;
    bool seen;

    if (uid != UINT32_MAX && uid != geteuid()) {
        return kvti_fail(err, KVT_EPERM,
                         "process %d belongs to user %u and this one to user "
                         "%u: run both as one user, or this one with "
                         "CAP_SYS_PTRACE",
                         (int)pid, uid, (uint32_t)geteuid());
    }
    /* Not the directory, which is always the user's. */
    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    seen = stat(path, &st) == 0;
    if (!seen) {
        return kvti_fail(err, KVT_EPERM,
                         "%s is hidden from this process: mount /proc without "
                         "hidepid",
                         path);
    }
    /* The kernel gives the files of a process that is not dumpable to root. */
    if (st.st_uid == 0 && geteuid() != 0) {
        return kvti_fail(err, KVT_EPERM,
                         "process %d is not dumpable: it must not clear "
                         "PR_SET_DUMPABLE, gain privileges, or be unreadable "
                         "to its user",
                         (int)pid);
    }
    if (read_text("/proc/sys/kernel/yama/ptrace_scope", text, sizeof(text)) ==
            0 &&
        strcmp(text, "0") != 0) {
        return explain_yama(pid, (int)strtol(text, NULL, 10), err);
    }
    return kvti_fail(err, KVT_EPERM,
                     "the kernel keeps this process out of process %d: they "
                     "are in two user namespaces, or a seccomp filter or "
                     "security module forbids ptrace access",
                     (int)pid);
}

static int explain_read(const struct kvti_local_target *target, int os_errno,
                        struct kvt_error *err)
{
    const struct kvti_local_proc *proc = target->proc;
    int pid = proc->pid;

    if (proc->pidfd >= 0 && kvti_ident_pidfd_dead(proc->pidfd)) {
        os_errno = ESRCH;
    }
    switch (os_errno) {
    case ESRCH:
        return kvti_fail(err, KVT_EDISCONNECTED, "process %d is gone", pid);
    case EFAULT:
        return kvti_fail(err, KVT_EDISCONNECTED,
                         "process %d holds this agent no more: it closed it "
                         "or runs another program",
                         pid);
    case EPERM:
        return kvti_ident_denied(pid, target->uid, err);
    case ENOSYS:
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "process_vm_readv is missing: this kernel lacks it "
                         "or a seccomp filter forbids it");
    default:
        return kvti_fail_errno(err, KVT_ESYSTEM, os_errno,
                               "cannot read the nonce of process %d", pid);
    }
}

int kvti_ident_check(const struct kvti_local_target *target,
                     struct kvt_error *err)
{
    struct kvti_nonce_page seen;
    struct iovec here = {.iov_base = &seen, .iov_len = sizeof(seen)};
    struct iovec there = {.iov_base = (void *)(uintptr_t)target->nonce_addr,
                          .iov_len = sizeof(seen)};
    ssize_t got;

    do {
        got = process_vm_readv(target->proc->pid, &here, 1, &there, 1, 0);
    } while (got < 0 && errno == EINTR);
    if (got != (ssize_t)sizeof(seen)) {
        return explain_read(target, got < 0 ? errno : EFAULT, err);
    }
    if (seen.magic != NONCE_MAGIC || seen.version != NONCE_VERSION ||
        memcmp(seen.nonce, target->nonce, sizeof(seen.nonce)) != 0 ||
        memcmp(seen.incarnation, target->incarnation,
               sizeof(seen.incarnation)) != 0) {
        return explain_read(target, EFAULT, err);
    }
    if (atomic_load(&seen.open) == 0) {
        return kvti_fail(err, KVT_EDISCONNECTED,
                         "the transport in process %d is closed",
                         target->proc->pid);
    }
    return KVT_OK;
}
