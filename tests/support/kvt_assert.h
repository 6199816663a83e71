/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Assertions that name a code and repeat the library's own sentence, cases
 * that are skipped with a reason, and the main function of a test program.
 * Only for the thread that runs the case: cmocka leaves by longjmp.
 */
#ifndef KVT_TEST_ASSERT_H
#define KVT_TEST_ASSERT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <kvt/kvt.h>
#include <cmocka.h>

/* Every wait of a test ends by then, and the test with it: 30 s, or the number
 * of seconds in KVT_TEST_WAIT_S. */
uint64_t test_wait_ns(void);
int test_wait_ms(void);

/* For a call's `err`: cleared by the assertion around the call, printed when
 * it fails. */
#define ERR (&kvt_test_error)
extern _Thread_local struct kvt_error kvt_test_error;

#define assert_kvt_ok(call)                                                    \
    (kvt_test_clear(),                                                         \
     kvt_test_expect((call), KVT_OK, NULL, #call, __FILE__, __LINE__))

/* Also: a call that was given ERR wrote the same code and a sentence. */
#define assert_kvt_fails(call, want)                                           \
    (kvt_test_clear(),                                                         \
     kvt_test_expect((call), (want), NULL, #call, __FILE__, __LINE__))

/* And the sentence has these words in it. */
#define assert_kvt_fails_with(call, want, words)                               \
    (kvt_test_clear(),                                                         \
     kvt_test_expect((call), (want), (words), #call, __FILE__, __LINE__))

/* Polls a condition that no descriptor announces. */
#define assert_soon(condition)                                                 \
    do {                                                                       \
        uint64_t until_ = test_now_ns() + test_wait_ns();                      \
                                                                               \
        while (!(condition)) {                                                 \
            if (test_now_ns() > until_) {                                      \
                fail_msg("not in time: %s", #condition);                       \
            }                                                                  \
            test_yield();                                                      \
        }                                                                      \
    } while (0)

/* Ends the case as skipped, with the reason on the output. */
#define skip_case(...)                                                         \
    do {                                                                       \
        kvt_test_count_skip(__VA_ARGS__);                                      \
        skip();                                                                \
    } while (0)

void kvt_test_clear(void);
void kvt_test_expect(int code, int want, const char *words, const char *call,
                     const char *file, int line);
__attribute__((format(printf, 1, 2))) void kvt_test_count_skip(
    const char *format, ...);
__attribute__((format(printf, 1, 2))) void kvt_test_count_left(
    const char *format, ...);

uint64_t test_now_ns(void);
/* Lets others run before the condition is looked at again. */
void test_yield(void);

/* The same for one that another test of the same build runs: not a skip. */
#define leave_case(...)                                                        \
    do {                                                                       \
        kvt_test_count_left(__VA_ARGS__);                                      \
        skip();                                                                \
    } while (0)

/* Cases by subject. */
struct test_group {
    const char *name;
    const struct CMUnitTest *cases;
    size_t count;
};

#define TEST_GROUP(subject, table)                                             \
    {                                                                          \
        .name = (subject), .cases = (table),                                   \
        .count = sizeof(table) / sizeof((table)[0])                            \
    }

/*
 * Runs the cases whose name, or whose group's, matches the shell pattern (NULL:
 * all). Returns 0 or 1, or 77 when no case was run: cmocka's own count of
 * failures would read as a skip at 77 and as a pass at 256.
 */
int kvt_test_main(const struct test_group *groups, size_t count,
                  const char *pattern);

#endif /* KVT_TEST_ASSERT_H */
