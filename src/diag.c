/* SPDX-License-Identifier: Apache-2.0 */
#include "diag.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

int(kvti_fail_errno)(struct kvt_error *err, int code, int os_errno,
                     const char *format, ...)
{
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
    room = strnlen(words, sizeof buffer) + sizeof ": ";
    room = room < sizeof err->text ? sizeof err->text - room + 1 : 1;
    va_start(args, format);
    (void)vsnprintf(err->text, room, format, args);
    va_end(args);
    used = strlen(err->text);
    kvti_format(err->text + used, sizeof err->text - used, ": %s", words);
    return code;
}

void kvti_format(char *text, size_t size, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, size, format, args);
    va_end(args);
}

void kvti_log(const struct kvti_logger *logger, int level, const char *format,
              ...)
{
    char text[LOG_TEXT_MAX];
    va_list args;

    if (logger->log == NULL) {
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
    logger->log(logger->ctx, level, text);
}

_Noreturn void kvti_assert_failed(const char *expression, const char *file,
                                  int line)
{
    (void)fprintf(stderr, "kvt: %s:%d: broken invariant: %s\n", file, line,
                  expression);
    abort();
}
