/* SPDX-License-Identifier: Apache-2.0 */
#include "kvt_assert.h"

#include <fnmatch.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

_Thread_local struct kvt_error kvt_test_error;

static unsigned skipped;
static unsigned left;

void kvt_test_clear(void)
{
    memset(&kvt_test_error, 0, sizeof kvt_test_error);
}

static void fail_call(const char *call, int code, int want, const char *why,
                      const char *file, int line)
{
    print_error("%s\n    returned %s (%d), wanted %s (%d)%s%s\n    text: %s\n",
                call, kvt_errname(code), code, kvt_errname(want), want,
                why[0] == '\0' ? "" : ": ", why, kvt_test_error.text);
    _fail(file, line);
}

void kvt_test_expect(int code, int want, const char *words, const char *call,
                     const char *file, int line)
{
    const struct kvt_error *err = &kvt_test_error;

    if (code != want) {
        fail_call(call, code, want, "", file, line);
    }
    if (memchr(err->text, '\0', sizeof err->text) == NULL) {
        fail_call(call, code, want, "the text does not end", file, line);
    }
    if (code == KVT_OK && err->code != KVT_OK) {
        fail_call(call, code, want,
                  "an error was written by a call that "
                  "succeeded",
                  file, line);
    }
    if (err->code != KVT_OK && (err->code != code || err->text[0] == '\0')) {
        fail_call(call, code, want, "the error's code or text is another", file,
                  line);
    }
    if (words != NULL && strstr(err->text, words) == NULL) {
        print_error("missing words: %s\n", words);
        fail_call(call, code, want, "words are missing", file, line);
    }
}

__attribute__((format(printf, 2, 0))) static void say(const char *what,
                                                      const char *format,
                                                      va_list args)
{
    char reason[256];

    (void)vsnprintf(reason, sizeof reason, format, args);
    print_message("    %s: %s\n", what, reason);
}

void kvt_test_count_skip(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    say("skipped", format, args);
    va_end(args);
    skipped++;
}

void kvt_test_count_left(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    say("elsewhere", format, args);
    va_end(args);
    left++;
}

uint64_t test_now_ns(void)
{
    struct timespec now;

    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) {
        abort();
    }
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

uint64_t test_wait_ns(void)
{
    const char *seconds = getenv("KVT_TEST_WAIT_S");
    uint64_t number = seconds == NULL ? 0 : strtoull(seconds, NULL, 10);

    return (number == 0 ? 30 : number) * UINT64_C(1000000000);
}

int test_wait_ms(void)
{
    return (int)(test_wait_ns() / 1000000);
}

void test_yield(void)
{
    (void)poll(NULL, 0, 1);
}

int kvt_test_main(const struct test_group *groups, size_t count,
                  const char *pattern)
{
    size_t ran = 0;
    int failures = 0;

    for (size_t i = 0; i < count; i++) {
        const struct test_group *group = &groups[i];
        struct CMUnitTest *chosen = calloc(group->count, sizeof *chosen);
        size_t kept = 0;

        if (chosen == NULL) {
            return EXIT_FAILURE;
        }
        for (size_t k = 0; k < group->count; k++) {
            if (pattern == NULL || fnmatch(pattern, group->name, 0) == 0 ||
                fnmatch(pattern, group->cases[k].name, 0) == 0) {
                chosen[kept++] = group->cases[k];
            }
        }
        if (kept > 0) {
            failures += _cmocka_run_group_tests(group->name, chosen, kept, NULL,
                                                NULL);
        }
        ran += kept;
        free(chosen);
    }
    if (ran == 0) {
        print_error("no case matches %s\n", pattern == NULL ? "" : pattern);
        return EXIT_FAILURE;
    }
    print_message("%zu cases, %u run elsewhere, %u skipped, %d failed\n", ran,
                  left, skipped, failures);
    if (failures != 0) {
        return EXIT_FAILURE;
    }
    return ran == (size_t)skipped + left ? 77 : EXIT_SUCCESS;
}
