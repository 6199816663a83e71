/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every string a user sees is made here: errors, log lines, and the one
 * assertion macro, which is on in all builds: a broken invariant in a library
 * that writes other processes' memory must stop it.
 */
#ifndef KVTI_DIAG_H
#define KVTI_DIAG_H

#include <stdint.h>

#include <kvt/kvt.h>

#define KVTI_PRINTF(text_at, first_at)                                         \
    __attribute__((format(printf, text_at, first_at)))

/*
 * Fills *err (may be NULL) and returns `code`, so that a failing path reads
 * `return kvti_fail(err, KVT_EINVAL, "…")`. Text that is too long is cut.
 */
int kvti_fail(struct kvt_error *err, int code, const char *format, ...)
    KVTI_PRINTF(3, 4);

/* The same with errno's number and words appended: "…: Bad address". */
int kvti_fail_errno(struct kvt_error *err, int code, int os_errno,
                    const char *format, ...) KVTI_PRINTF(4, 5);

/* A failing path returns the code it names: said so that the compiler and the
 * static analyzer know it too. */
static inline int kvti_failed(int same, int code)
{
    (void)same;
    return code;
}
#define kvti_fail(err, code, ...)                                              \
    kvti_failed((kvti_fail)((err), (code), __VA_ARGS__), (code))
#define kvti_fail_errno(err, code, ...)                                        \
    kvti_failed((kvti_fail_errno)((err), (code), __VA_ARGS__), (code))

/* snprintf that ignores truncation on purpose. */
void kvti_format(char *text, size_t size, const char *format, ...)
    KVTI_PRINTF(3, 4);

/* Where log lines go: the options' hook, and stderr as KVT_LOG says. */
struct kvti_logger {
    void (*log)(void *ctx, int level, const char *text);
    void *ctx;
    int shown; /* levels below this one go to stderr, too; 0: none does */
};

/* Reads KVT_LOG: for kvt_open() alone. Errors: EINVAL. */
int kvti_logger_init(struct kvti_logger *logger,
                     void (*log)(void *ctx, int level, const char *text),
                     void *ctx, struct kvt_error *err);

void kvti_log(const struct kvti_logger *logger, int level, const char *format,
              ...) KVTI_PRINTF(3, 4);

_Noreturn void kvti_assert_failed(const char *expression, const char *file,
                                  int line);

#define kvti_assert(expression)                                                \
    ((expression) ? (void)0                                                    \
                  : kvti_assert_failed(#expression, __FILE__, __LINE__))

#endif /* KVTI_DIAG_H */
