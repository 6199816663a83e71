/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What KVT_LOG in the environment does. Proved is that lines as serious as it
 * says reach stderr, whole and one by one, beside the hook, which gets all of
 * them; that a word which is not known is refused by name; and that a stderr
 * that is broken or full neither ends the host program nor holds it up. stderr
 * is a pipe of ours while a case runs.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../support/kvt_assert.h"
#include "diag.h"

struct capture {
    int ends[2];
    int stderr_kept;
};

static void capture(struct capture *out)
{
    assert_int_equal(pipe2(out->ends, O_CLOEXEC | O_NONBLOCK), 0);
    out->stderr_kept = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    assert_true(out->stderr_kept >= 0);
    assert_int_equal(dup2(out->ends[1], STDERR_FILENO), STDERR_FILENO);
}

static void close_reader(struct capture *out)
{
    (void)close(out->ends[0]);
    out->ends[0] = -1;
}

/* What was written, as a string; afterwards stderr is as it was. */
static void capture_end(struct capture *out, char *text, size_t size)
{
    ssize_t got = 0;

    assert_int_equal(dup2(out->stderr_kept, STDERR_FILENO), STDERR_FILENO);
    (void)close(out->stderr_kept);
    (void)close(out->ends[1]);
    if (out->ends[0] >= 0) {
        got = read(out->ends[0], text, size - 1);
        assert_true(got >= 0);
        (void)close(out->ends[0]);
    }
    text[got] = '\0';
}

static void count_line(void *ctx, int level, const char *text)
{
    (void)level;
    (void)text;
    ++*(int *)ctx;
}

static struct kvti_logger logger_of(const char *word, int *lines)
{
    struct kvti_logger logger;
    struct kvt_error err;

    assert_int_equal(setenv("KVT_LOG", word, 1), 0);
    assert_kvt_ok(kvti_logger_init(&logger, lines != NULL ? count_line : NULL,
                                   lines, &err));
    return logger;
}

static void log_each_level(const struct kvti_logger *logger)
{
    kvti_log(logger, KVT_LOG_DEBUG, "line %d", 4);
    kvti_log(logger, KVT_LOG_INFO, "line %d", 3);
    kvti_log(logger, KVT_LOG_WARNING, "line %d", 2);
    kvti_log(logger, KVT_LOG_ERROR, "line %d", 1);
}

/* Of all lines there can be, those down to a level. */
static void expect_lines(const char *text, int levels)
{
    static const char *const names[] = {"error: line 1", "warning: line 2",
                                        "info: line 3", "debug: line 4"};
    char all[512] = "";
    size_t used = 0;

    for (int i = levels - 1; i >= 0; i--) {
        used += (size_t)snprintf(all + used, sizeof all - used, "kvt[%ld] %s\n",
                                 (long)getpid(), names[i]);
    }
    assert_string_equal(text, all);
}

static void lines_as_serious_as_the_word_are_shown(void **state)
{
    static const char *const words[] = {"", "Error", "warning", "INFO",
                                        "debug"};

    (void)state;
    for (int levels = 0; levels < 5; levels++) {
        for (int hooked = 0; hooked < 2; hooked++) {
            char text[1024];
            struct capture out;
            int lines = 0;
            struct kvti_logger logger = logger_of(words[levels],
                                                  hooked ? &lines : NULL);

            capture(&out);
            log_each_level(&logger);
            capture_end(&out, text, sizeof text);
            expect_lines(text, levels);
            assert_int_equal(lines, hooked ? 4 : 0);
        }
    }
}

static void off_and_nothing_are_silent(void **state)
{
    char text[1024];
    struct capture out;
    struct kvti_logger logger = logger_of("off", NULL);

    (void)state;
    capture(&out);
    log_each_level(&logger);
    assert_int_equal(unsetenv("KVT_LOG"), 0);
    assert_kvt_ok(kvti_logger_init(&logger, NULL, NULL, NULL));
    log_each_level(&logger);
    capture_end(&out, text, sizeof text);
    assert_string_equal(text, "");
}

static void a_peer_cannot_forge_a_line(void **state)
{
    char text[1024];
    struct capture out;
    struct kvti_logger logger = logger_of("error", NULL);

    (void)state;
    capture(&out);
    kvti_log(&logger, KVT_LOG_ERROR, "peer %s", "a\nkvt[1] error: b\x1b[2J");
    capture_end(&out, text, sizeof text);
    assert_non_null(strstr(text, "peer a?kvt[1] error: b?[2J\n"));
}

static void another_word_is_refused_by_name(void **state)
{
    kvt_transport *t = NULL;
    struct kvt_error err;

    (void)state;
    assert_int_equal(setenv("KVT_LOG", "loud", 1), 0);
    assert_kvt_fails(kvt_open(NULL, &t, &err), KVT_EINVAL);
    assert_non_null(strstr(err.text, "KVT_LOG"));
    assert_non_null(strstr(err.text, "\"loud\""));
    assert_non_null(strstr(err.text, "warning"));
    assert_null(t);
}

/* SIGPIPE would end this program. */
static void a_stderr_without_a_reader_ends_nobody(void **state)
{
    char text[1024];
    struct capture out;
    sigset_t before;
    sigset_t after;
    struct kvti_logger logger = logger_of("error", NULL);

    (void)state;
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &before), 0);
    assert_int_equal(sigismember(&before, SIGPIPE), 0);
    capture(&out);
    close_reader(&out);
    errno = EDOM;
    kvti_log(&logger, KVT_LOG_ERROR, "line");
    assert_int_equal(errno, EDOM);
    capture_end(&out, text, sizeof text);
    assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &after), 0);
    assert_int_equal(sigismember(&after, SIGPIPE), 0);
    assert_int_equal(sigpending(&after), 0);
    assert_int_equal(sigismember(&after, SIGPIPE), 0);
}

/* The host's own signal stays with it. */
static void a_signal_that_was_pending_stays_so(void **state)
{
    char text[1024];
    struct capture out;
    sigset_t set;
    int got = 0;
    struct kvti_logger logger = logger_of("error", NULL);

    (void)state;
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGPIPE);
    assert_int_equal(pthread_sigmask(SIG_BLOCK, &set, NULL), 0);
    assert_int_equal(raise(SIGPIPE), 0);
    capture(&out);
    close_reader(&out);
    kvti_log(&logger, KVT_LOG_ERROR, "line");
    capture_end(&out, text, sizeof text);
    assert_int_equal(sigwait(&set, &got), 0);
    assert_int_equal(got, SIGPIPE);
    assert_int_equal(pthread_sigmask(SIG_UNBLOCK, &set, NULL), 0);
}

/* If it did wait, this case would not end. */
static void a_full_stderr_keeps_nobody_waiting(void **state)
{
    static char text[1 << 20];
    struct capture out;
    int flags;
    struct kvti_logger logger = logger_of("error", NULL);

    (void)state;
    capture(&out);
    while (write(out.ends[1], text, sizeof text) > 0) {
    }
    assert_int_equal(errno, EAGAIN);
    flags = fcntl(STDERR_FILENO, F_GETFL);
    assert_int_equal(fcntl(STDERR_FILENO, F_SETFL, flags & ~O_NONBLOCK), 0);
    kvti_log(&logger, KVT_LOG_ERROR, "line");
    capture_end(&out, text, sizeof text);
    assert_null(strstr(text, "line"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_as_serious_as_the_word_are_shown),
        cmocka_unit_test(off_and_nothing_are_silent),
        cmocka_unit_test(a_peer_cannot_forge_a_line),
        cmocka_unit_test(another_word_is_refused_by_name),
        cmocka_unit_test(a_stderr_without_a_reader_ends_nobody),
        cmocka_unit_test(a_signal_that_was_pending_stays_so),
        cmocka_unit_test(a_full_stderr_keeps_nobody_waiting),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
