/* SPDX-License-Identifier: Apache-2.0 */
#include "diag.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define QUOTE(x) #x
#define QUOTE_VALUE(x) QUOTE(x)

#define LOG_TEXT_MAX 512

const char *kvt_strerror(int code)
{
    switch (code) {
#define TEXT_OF(name, value, text)                                             \
    case (value):                                                              \
        return text;
        KVT_ERROR_MAP(TEXT_OF)
#undef TEXT_OF
    default:
        return "unknown error";
    }
}

const char *kvt_errname(int code)
{
    switch (code) {
#define NAME_OF(name, value, text)                                             \
    case (value):                                                              \
        return "KVT_" #name;
        KVT_ERROR_MAP(NAME_OF)
#undef NAME_OF
    default:
        return "KVT_E?";
    }
}

const char *kvt_version(void)
{
    return QUOTE_VALUE(KVT_VERSION_MAJOR) "." QUOTE_VALUE(
        KVT_VERSION_MINOR) "." QUOTE_VALUE(KVT_VERSION_PATCH);
}

int(kvti_fail)(struct kvt_error *err, int code, const char *format, ...)
{
    va_list args;

    if (err == NULL) {
        return code;
    }
    err->code = code;
    err->os_errno = 0;
    va_start(args, format);
    (void)vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    return code;
}

/* What to do, where the system's words leave that open. */
static const char *remedy(int os_errno)
{
    switch (os_errno) {
    case EMFILE:
        return "; raise the limit of open files (ulimit -n)";
    case ENFILE:
        return "; raise the machine's limit of open files (fs.file-max)";
    default:
        return "";
    }
}

int(kvti_fail_errno)(struct kvt_error *err, int code, int os_errno,
                     const char *format, ...)
{
    const char *more = remedy(os_errno);
    char buffer[128];
    const char *words;
    size_t room;
    size_t used;
    va_list args;

    if (err == NULL) {
        return code;
    }
    err->code = code;
    err->os_errno = os_errno;
    words = strerror_r(os_errno, buffer, sizeof buffer);
    /* The system's words tell more than the end of a long name: it is our
     * own part that is cut. */
    room = strnlen(words, sizeof buffer) + strlen(more) + sizeof ": ";
    room = room < sizeof err->text ? sizeof err->text - room + 1 : 1;
    va_start(args, format);
    (void)vsnprintf(err->text, room, format, args);
    va_end(args);
    used = strlen(err->text);
    kvti_format(err->text + used, sizeof err->text - used, ": %s%s", words,
                more);
    return code;
}

void kvti_format(char *text, size_t size, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, size, format, args);
    va_end(args);
}

/* The more serious ones first, as in enum kvt_log_level. */
static const char *const level_names[] = {"error", "warning", "info", "debug"};

#define LEVELS (int)(sizeof level_names / sizeof level_names[0])

int kvti_logger_init(struct kvti_logger *logger,
                     void (*log)(void *ctx, int level, const char *text),
                     void *ctx, struct kvt_error *err)
{
    const char *word = getenv("KVT_LOG"); /* NOLINT(concurrency-mt-unsafe) */
    int shown = 0;

    if (word != NULL && word[0] != '\0' && strcasecmp(word, "off") != 0) {
        while (shown < LEVELS && strcasecmp(word, level_names[shown]) != 0) {
            shown++;
        }
        if (shown == LEVELS) {
            return kvti_fail(err, KVT_EINVAL,
                             "KVT_LOG is \"%.40s\" in the environment: set it "
                             "to error, warning, info, debug or off",
                             word);
        }
        shown++;
    }
    *logger = (struct kvti_logger){log, ctx, shown};
    return KVT_OK;
}

/*
 * One line, by one call. stderr is the host program's: if its reader is gone
 * that must not end the program, and if it does not read, the line is dropped
 * rather than that a thread of ours waits, perhaps with a lock.
 */
static void show(int level, const char *text)
{
    static const struct timespec now = {0};
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    char line[LOG_TEXT_MAX + 64];
    sigset_t broken_pipe;
    sigset_t pending;
    sigset_t mask;

    kvti_format(line, sizeof line, "kvt[%ld] %s: %s\n", (long)getpid(),
                level_names[level], text);
    (void)sigemptyset(&pending);
    (void)sigemptyset(&broken_pipe);
    (void)sigaddset(&broken_pipe, SIGPIPE);
    (void)sigpending(&pending);
    (void)pthread_sigmask(SIG_BLOCK, &broken_pipe, &mask);
    if (poll(&out, 1, 0) == 1 && write(STDERR_FILENO, line, strlen(line)) < 0 &&
        errno == EPIPE && sigismember(&pending, SIGPIPE) == 0) {
        while (sigtimedwait(&broken_pipe, NULL, &now) < 0 && errno == EINTR) {
        }
    }
    (void)pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

void kvti_log(const struct kvti_logger *logger, int level, const char *format,
              ...)
{
    char text[LOG_TEXT_MAX];
    int saved = errno;
    va_list args;

    if (logger->log == NULL && level >= logger->shown) {
        return;
    }
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* A name may hold any byte; the hook is promised one line, and a peer
     * must not be able to forge a second one. */
    for (char *at = text; *at != '\0'; at++) {
        if ((unsigned char)*at < ' ' || *at == '\x7f') {
            *at = '?';
        }
    }
    if (level < logger->shown) {
        show(level, text);
    }
    if (logger->log != NULL) {
        logger->log(logger->ctx, level, text);
    }
    errno = saved;
}

_Noreturn void kvti_assert_failed(const char *expression, const char *file,
                                  int line)
{
    (void)fprintf(stderr, "kvt: %s:%d: broken invariant: %s\n", file, line,
                  expression);
    abort();
}
