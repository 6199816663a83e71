/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded in programs that run under valgrind.
 *
 * A program that starts itself by "/proc/self/exe" would start valgrind's own:
 * the name is looked up before the call. valgrind answers readlink() rightly.
 *
 * In a child of fork() nothing counts as a leak: kvt leaves there what threads of
 * the parent owned (free_in_child() in src/transport.c), and most children end in
 * the middle of a test.
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#include <valgrind/valgrind.h>

#define EXPORT __attribute__((visibility("default")))
#define ARGS_MAX 16

static void forget_leaks(void)
{
    VALGRIND_CLO_CHANGE("--leak-check=no");
}

__attribute__((constructor)) static void start(void)
{
    (void)pthread_atfork(NULL, NULL, forget_leaks);
}

/* Other paths are returned as they are. */
static const char *real_path(const char *path, char buffer[PATH_MAX])
{
    ssize_t length;

    if (strcmp(path, "/proc/self/exe") != 0) {
        return path;
    }
    length = readlink(path, buffer, PATH_MAX - 1);
    if (length < 0) {
        return path;
    }
    buffer[length] = '\0';
    return buffer;
}

EXPORT int execv(const char *path, char *const argv[])
{
    char buffer[PATH_MAX];

    return execve(real_path(path, buffer), argv, environ);
}

EXPORT int execl(const char *path, const char *arg, ...)
{
    char *argv[ARGS_MAX] = {(char *)(uintptr_t)arg};
    size_t count = 0;
    va_list list;

    va_start(list, arg);
    while (argv[count] != NULL) {
        if (++count == ARGS_MAX) {
            va_end(list);
            errno = E2BIG;
            return -1;
        }
        argv[count] = va_arg(list, char *);
    }
    va_end(list);
    return execv(path, argv);
}

EXPORT int posix_spawn(pid_t *restrict pid, const char *restrict path,
                       const posix_spawn_file_actions_t *restrict actions,
                       const posix_spawnattr_t *restrict attributes,
                       char *const argv[restrict], char *const env[restrict])
{
    int (*next)(pid_t *, const char *, const posix_spawn_file_actions_t *,
                const posix_spawnattr_t *, char *const *, char *const *);
    char buffer[PATH_MAX];

    *(void **)&next = dlsym(RTLD_NEXT, "posix_spawn");
    return next(pid, real_path(path, buffer), actions, attributes, argv, env);
}
