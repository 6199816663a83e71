/* SPDX-License-Identifier: Apache-2.0 */
/*
 * System calls, and what of libc stands for one.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "nth_call.h"

/* A call that answers -1 and sets errno. */
#define SYSTEM_CALL(type, name, parameters, arguments, ...)                    \
    PROTOTYPE(type, name, parameters)                                          \
    {                                                                          \
        ERRORS(__VA_ARGS__);                                                   \
        int error = nth_next(NTH_SYSTEM, #name, errors, ways, CALLER);         \
                                                                               \
        if (error != 0) {                                                      \
            errno = error;                                                     \
            return -1;                                                         \
        }                                                                      \
        return __real_##name arguments;                                        \
    }

/* One that answers the error itself. */
#define THREAD_CALL(name, parameters, arguments, error_)                       \
    PROTOTYPE(int, name, parameters)                                           \
    {                                                                          \
        ERRORS(error_);                                                        \
        int error = nth_next(NTH_SYSTEM, #name, errors, ways, CALLER);         \
                                                                               \
        return error != 0 ? error : __real_##name arguments;                   \
    }

SYSTEM_CALL(int, eventfd, (unsigned first, int flags), (first, flags), EMFILE,
            ENOMEM)
SYSTEM_CALL(int, epoll_create1, (int flags), (flags), EMFILE, ENOMEM)
SYSTEM_CALL(int, epoll_wait,
            (int fd, struct epoll_event *events, int max, int timeout),
            (fd, events, max, timeout), EINTR)
SYSTEM_CALL(int, timerfd_create, (int clock, int flags), (clock, flags), EMFILE,
            ENOMEM)
SYSTEM_CALL(int, madvise, (void *at, size_t length, int advice),
            (at, length, advice), ENOMEM, EINVAL)
SYSTEM_CALL(int, memfd_create, (const char *name, unsigned flags),
            (name, flags), EMFILE, ENOSYS)
SYSTEM_CALL(int, ftruncate, (int fd, off_t length), (fd, length), ENOSPC)
SYSTEM_CALL(int, fallocate, (int fd, int mode, off_t offset, off_t length),
            (fd, mode, offset, length), ENOSPC, EINTR, ENOMEM)
SYSTEM_CALL(int, stat, (const char *path, struct stat *ret), (path, ret),
            EACCES, ENOENT)
SYSTEM_CALL(int, lstat, (const char *path, struct stat *ret), (path, ret),
            EACCES, ENOENT)
SYSTEM_CALL(int, fstat, (int fd, struct stat *ret), (fd, ret), ENOMEM)
SYSTEM_CALL(int, fstatfs, (int fd, struct statfs *ret), (fd, ret), EINTR)
SYSTEM_CALL(int, access, (const char *path, int mode), (path, mode), EACCES)
SYSTEM_CALL(off_t, lseek, (int fd, off_t offset, int whence),
            (fd, offset, whence), EINVAL)
SYSTEM_CALL(int, socket, (int domain, int type, int protocol),
            (domain, type, protocol), EMFILE, EACCES)
SYSTEM_CALL(int, bind, (int fd, const struct sockaddr *at, socklen_t length),
            (fd, at, length), EADDRINUSE, EACCES)
SYSTEM_CALL(int, listen, (int fd, int backlog), (fd, backlog), EADDRINUSE)
SYSTEM_CALL(int, connect, (int fd, const struct sockaddr *at, socklen_t length),
            (fd, at, length), ECONNREFUSED, EAGAIN, EACCES)
SYSTEM_CALL(int, accept4,
            (int fd, struct sockaddr *at, socklen_t *length, int flags),
            (fd, at, length, flags), EMFILE, ECONNABORTED, EINTR)
SYSTEM_CALL(ssize_t, send,
            (int fd, const void *bytes, size_t length, int flags),
            (fd, bytes, length, flags), ENOBUFS, EAGAIN, EPIPE, EINTR)
SYSTEM_CALL(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags),
            (fd, message, flags), ENOBUFS, EAGAIN, EPIPE, EINTR)
SYSTEM_CALL(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags),
            (fd, message, flags), EINTR, EAGAIN, ECONNRESET, ENOMEM)
/* The size of a buffer can be asked for at any time. */
PROTOTYPE(int, getsockopt,
          (int fd, int level, int name, void *value, socklen_t *length))
{
    ERRORS(ENOBUFS);
    int error = name == SO_SNDBUF
                    ? 0
                    : nth_next(NTH_SYSTEM, "getsockopt", errors, ways, CALLER);

    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_getsockopt(fd, level, name, value, length);
}

SYSTEM_CALL(int, setsockopt,
            (int fd, int level, int name, const void *value, socklen_t length),
            (fd, level, name, value, length), ENOBUFS)
/* Without descriptors it is how the tests pause. */
PROTOTYPE(int, poll, (struct pollfd * fds, nfds_t count, int timeout))
{
    ERRORS(EINTR, ENOMEM);
    int error = fds == NULL
                    ? 0
                    : nth_next(NTH_SYSTEM, "poll", errors, ways, CALLER);

    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_poll(fds, count, timeout);
}

SYSTEM_CALL(int, ppoll,
            (struct pollfd * fds, nfds_t count, const struct timespec *timeout,
             const sigset_t *mask),
            (fds, count, timeout, mask), EINTR, ENOMEM)
SYSTEM_CALL(ssize_t, getrandom, (void *bytes, size_t length, unsigned flags),
            (bytes, length, flags), ENOSYS, EINTR)
SYSTEM_CALL(int, sched_getaffinity, (pid_t pid, size_t size, cpu_set_t *ret),
            (pid, size, ret), EINVAL)
SYSTEM_CALL(ssize_t, write, (int fd, const void *bytes, size_t length),
            (fd, bytes, length), EINTR)
SYSTEM_CALL(ssize_t, pwrite,
            (int fd, const void *bytes, size_t length, off_t offset),
            (fd, bytes, length, offset), EINTR, ENOSPC)
SYSTEM_CALL(ssize_t, readlink, (const char *path, char *text, size_t size),
            (path, text, size), EACCES)
SYSTEM_CALL(ssize_t, readlinkat,
            (int fd, const char *path, char *text, size_t size),
            (fd, path, text, size), EACCES)
SYSTEM_CALL(int, pipe2, (int *fds, int flags), (fds, flags), EMFILE)

THREAD_CALL(pthread_create,
            (pthread_t * thread, const pthread_attr_t *attributes,
             void *(*run)(void *), void *argument),
            (thread, attributes, run, argument), EAGAIN)
THREAD_CALL(pthread_attr_init, (pthread_attr_t * attributes), (attributes),
            ENOMEM)
THREAD_CALL(pthread_rwlock_init,
            (pthread_rwlock_t * lock, const pthread_rwlockattr_t *attributes),
            (lock, attributes), ENOMEM)
THREAD_CALL(posix_spawn,
            (pid_t * pid, const char *path,
             const posix_spawn_file_actions_t *actions,
             const posix_spawnattr_t *attributes, char *const *argv,
             char *const *envp),
            (pid, path, actions, attributes, argv, envp), EAGAIN)

PROTOTYPE(int, epoll_ctl,
          (int fd, int what, int other, struct epoll_event *event))
{
    ERRORS(ENOSPC, ENOMEM);
    int error = what == EPOLL_CTL_DEL
                    ? 0
                    : nth_next(NTH_SYSTEM, "epoll_ctl", errors, ways, CALLER);

    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_epoll_ctl(fd, what, other, event);
}

PROTOTYPE(ssize_t, read, (int fd, void *bytes, size_t length))
{
    ERRORS(EINTR, EIO, NTH_LESS);
    int error = nth_next(NTH_SYSTEM, "read", errors, ways, CALLER);

    if (error == NTH_LESS) {
        return 0;
    }
    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_read(fd, bytes, length);
}

/* Half of what the first piece was to move: the rest is the caller's. */
static bool half(const struct iovec *from, struct iovec *ret)
{
    *ret = from[0];
    ret->iov_len = from[0].iov_len / 2;
    return ret->iov_len > 0;
}

#define VM_CALL(name)                                                          \
    PROTOTYPE(ssize_t, name,                                                   \
              (pid_t pid, const struct iovec *here, unsigned long here_count,  \
               const struct iovec *there, unsigned long there_count,           \
               unsigned long flags))                                           \
    {                                                                          \
        ERRORS(EFAULT, NTH_LESS, EPERM, EINTR);                                \
        int error = nth_next(NTH_SYSTEM, #name, errors, ways, CALLER);         \
        struct iovec less;                                                     \
                                                                               \
        if (error == NTH_LESS && half(here, &less)) {                          \
            return __real_##name(pid, &less, 1, there, there_count, flags);    \
        }                                                                      \
        if (error > 0) {                                                       \
            errno = error;                                                     \
            return -1;                                                         \
        }                                                                      \
        return __real_##name(pid, here, here_count, there, there_count,        \
                             flags);                                           \
    }

VM_CALL(process_vm_readv)
VM_CALL(process_vm_writev)

PROTOTYPE(void *, mmap,
          (void *at, size_t length, int protection, int flags, int fd,
           off_t offset))
{
    ERRORS(ENOMEM, EACCES);
    int error = nth_next(NTH_SYSTEM, "mmap", errors, ways, CALLER);
    void *mapped;

    if (error != 0) {
        errno = error;
        return MAP_FAILED;
    }
    mapped = __real_mmap(at, length, protection, flags, fd, offset);
    nth_mapped(mapped != MAP_FAILED);
    return mapped;
}

PROTOTYPE(int, munmap, (void *at, size_t length))
{
    int code = __real_munmap(at, length);

    nth_mapped(code == 0 ? -1 : 0);
    return code;
}

PROTOTYPE(int, open, (const char *path, int flags, ...))
{
    ERRORS(EMFILE, EACCES, ENOENT);
    int error = nth_next(NTH_SYSTEM, "open", errors, ways, CALLER);
    mode_t mode = 0;

    if (error != 0) {
        errno = error;
        return -1;
    }
    if ((flags & O_CREAT) != 0) {
        va_list more;

        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    return __real_open(path, flags, mode);
}

/* Every command of ours takes a number or nothing. */
PROTOTYPE(int, fcntl, (int fd, int command, ...))
{
    ERRORS(EPERM, EINVAL);
    int error = nth_next(NTH_SYSTEM, "fcntl", errors, ways, CALLER);
    va_list more;
    long argument;

    if (error != 0) {
        errno = error;
        return -1;
    }
    va_start(more, command);
    argument = command == F_GET_SEALS ? 0 : va_arg(more, int);
    va_end(more);
    return __real_fcntl(fd, command, argument);
}

PROTOTYPE(int, ioctl, (int fd, unsigned long command, ...))
{
    ERRORS(ENOTTY);
    int error = nth_next(NTH_SYSTEM, "ioctl", errors, ways, CALLER);
    va_list more;
    void *argument;

    if (error != 0) {
        errno = error;
        return -1;
    }
    va_start(more, command);
    argument = va_arg(more, void *);
    va_end(more);
    return __real_ioctl(fd, command, argument);
}

/* Of the numbers that are called only pidfd_open() may fail: the others are
 * wishes. At most four arguments. */
PROTOTYPE(long, syscall, (long number, ...))
{
    ERRORS(EMFILE, ENOSYS);
    int error = number != SYS_pidfd_open
                    ? 0
                    : nth_next(NTH_SYSTEM, "pidfd_open", errors, ways, CALLER);
    va_list more;
    long a;
    long b;
    long c;
    long d;

    if (error != 0) {
        errno = error;
        return -1;
    }
    va_start(more, number);
    a = va_arg(more, long);
    b = va_arg(more, long);
    c = va_arg(more, long);
    d = va_arg(more, long);
    va_end(more);
    return __real_syscall(number, a, b, c, d);
}

/* Those that answer NULL. */
#define NULL_CALL(type, name, parameters, arguments, error_)                   \
    PROTOTYPE(type, name, parameters)                                          \
    {                                                                          \
        ERRORS(error_);                                                        \
        int error = nth_next(NTH_SYSTEM, #name, errors, ways, CALLER);         \
                                                                               \
        if (error != 0) {                                                      \
            errno = error;                                                     \
            return NULL;                                                       \
        }                                                                      \
        return __real_##name arguments;                                        \
    }

NULL_CALL(FILE *, fopen, (const char *path, const char *mode), (path, mode),
          EMFILE)
NULL_CALL(DIR *, opendir, (const char *path), (path), EMFILE)
NULL_CALL(char *, realpath, (const char *path, char *ret), (path, ret), EACCES)

PROTOTYPE(int, glob,
          (const char *pattern, int flags, int (*error)(const char *, int),
           glob_t *ret))
{
    ERRORS(GLOB_NOSPACE, GLOB_NOMATCH);
    int code = nth_next(NTH_SYSTEM, "glob", errors, ways, CALLER);

    return code != 0 ? code : __real_glob(pattern, flags, error, ret);
}
