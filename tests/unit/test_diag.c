/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Error codes and texts: every code of the list has a name and words of its
 * own, any other number still prints, texts are cut and never overflow (guard
 * bytes behind them), and a broken invariant ends the process.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "diag.h"

static const struct {
    int code;
    const char *name;
    const char *text;
} codes[] = {
#define ROW(name, value, text) {KVT_##name, "KVT_" #name, text},
    KVT_ERROR_MAP(ROW)
#undef ROW
};

#define CODE_COUNT (sizeof codes / sizeof *codes)

static void every_code_has_its_name_and_words(void **state)
{
    (void)state;
    for (size_t i = 0; i < CODE_COUNT; i++) {
        assert_int_equal(codes[i].code, -(int)i);
        assert_string_equal(kvt_errname(codes[i].code), codes[i].name);
        assert_string_equal(kvt_strerror(codes[i].code), codes[i].text);
    }
    assert_int_equal(CODE_COUNT, 1 - KVT_CODE_MIN);
}

static void unknown_codes_still_print(void **state)
{
    const int unknown[] = {KVT_CODE_MIN - 1, 1, INT_MIN, INT_MAX};

    (void)state;
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        assert_string_equal(kvt_errname(unknown[i]), "KVT_E?");
        assert_string_equal(kvt_strerror(unknown[i]), "unknown error");
    }
}

static void version_is_the_headers(void **state)
{
    char text[32];

    (void)state;
    kvti_format(text, sizeof text, "%d.%d.%d", KVT_VERSION_MAJOR,
                KVT_VERSION_MINOR, KVT_VERSION_PATCH);
    assert_string_equal(kvt_version(), text);
}

static void fail_fills_the_error_and_returns_the_code(void **state)
{
    struct kvt_error err;

    (void)state;
    memset(&err, 0xa5, sizeof err);
    assert_int_equal(kvti_fail(&err, KVT_EBUSY, "%d of %s", 3, "x"), KVT_EBUSY);
    assert_int_equal(err.code, KVT_EBUSY);
    assert_int_equal(err.os_errno, 0);
    assert_string_equal(err.text, "3 of x");
}

static void fail_takes_no_error_to_fill(void **state)
{
    (void)state;
    assert_int_equal(kvti_fail(NULL, KVT_EINVAL, "%d", 1), KVT_EINVAL);
    assert_int_equal(kvti_fail_errno(NULL, KVT_ESYSTEM, EIO, "%d", 1),
                     KVT_ESYSTEM);
}

static void a_long_text_is_cut(void **state)
{
    struct {
        struct kvt_error err;
        unsigned char guard[32];
    } at;
    char longer[2 * KVT_TEXT_MAX];

    (void)state;
    memset(&at, 0xa5, sizeof at);
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    kvti_fail(&at.err, KVT_EINVAL, "%s", longer);
    assert_int_equal(strlen(at.err.text), KVT_TEXT_MAX - 1);
    for (size_t i = 0; i < sizeof at.guard; i++) {
        assert_int_equal(at.guard[i], 0xa5);
    }
}

static void errno_adds_number_and_words(void **state)
{
    struct kvt_error err;

    (void)state;
    assert_int_equal(
        kvti_fail_errno(&err, KVT_ESYSTEM, EFAULT, "read of %d", 7),
        KVT_ESYSTEM);
    assert_int_equal(err.code, KVT_ESYSTEM);
    assert_int_equal(err.os_errno, EFAULT);
    assert_string_equal(err.text, "read of 7: Bad address");
}

static void errno_words_survive_a_long_text(void **state)
{
    const char words[] = ": Bad address";
    struct kvt_error err;
    char longer[2 * KVT_TEXT_MAX];

    (void)state;
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    kvti_fail_errno(&err, KVT_ESYSTEM, EFAULT, "%s", longer);
    assert_int_equal(strlen(err.text), KVT_TEXT_MAX - 1);
    assert_string_equal(err.text + KVT_TEXT_MAX - sizeof words, words);
}

static void a_limit_of_open_files_is_named_with_the_remedy(void **state)
{
    const char words[] = ": Too many open files; raise the limit of open files "
                         "(ulimit -n)";
    struct kvt_error err;
    char longer[2 * KVT_TEXT_MAX];

    (void)state;
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    kvti_fail_errno(&err, KVT_ESYSTEM, EMFILE, "%s", longer);
    assert_int_equal(strlen(err.text), KVT_TEXT_MAX - 1);
    assert_string_equal(err.text + KVT_TEXT_MAX - sizeof words, words);
    kvti_fail_errno(&err, KVT_ESYSTEM, ENFILE, "x");
    assert_non_null(strstr(err.text, "fs.file-max"));
}

static void unknown_errno_still_prints(void **state)
{
    struct kvt_error err;

    (void)state;
    kvti_fail_errno(&err, KVT_ESYSTEM, 123456, "x");
    assert_string_equal(err.text, "x: Unknown error 123456");
}

static void format_never_writes_past_its_size(void **state)
{
    char text[8] = "0123456";

    (void)state;
    kvti_format(text, 4, "%s", "abcdef");
    assert_memory_equal(text,
                        "abc\0"
                        "456",
                        8);
    kvti_format(text, 0, "%s", "abcdef");
    assert_memory_equal(text,
                        "abc\0"
                        "456",
                        8);
}

struct logged {
    int calls;
    int level;
    char text[1024];
};

static void keep_line(void *ctx, int level, const char *text)
{
    struct logged *logged = ctx;

    logged->calls++;
    logged->level = level;
    kvti_format(logged->text, sizeof logged->text, "%s", text);
}

static void log_reaches_the_hook_as_one_line(void **state)
{
    struct logged logged = {0};
    const struct kvti_logger logger = {.log = keep_line, .ctx = &logged};

    (void)state;
    kvti_log(&logger, KVT_LOG_WARNING, "peer \"%s\" %d", "a\nb\x1b\x7f", 4);
    assert_int_equal(logged.calls, 1);
    assert_int_equal(logged.level, KVT_LOG_WARNING);
    assert_string_equal(logged.text, "peer \"a?b??\" 4");
}

static void log_keeps_letters_beyond_ascii(void **state)
{
    struct logged logged = {0};
    const struct kvti_logger logger = {.log = keep_line, .ctx = &logged};

    (void)state;
    kvti_log(&logger, KVT_LOG_INFO, "%s", "Z\xc3\xbcrich");
    assert_string_equal(logged.text, "Z\xc3\xbcrich");
}

static void log_without_a_hook_is_nothing(void **state)
{
    const struct kvti_logger logger = {0};

    (void)state;
    kvti_log(&logger, KVT_LOG_ERROR, "%d", 1);
}

static void a_broken_invariant_ends_the_process(void **state)
{
    int status;
    pid_t pid = fork();

    (void)state;
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

        (void)dup2(null, STDERR_FILENO);
        (void)signal(SIGABRT, SIG_DFL);
        kvti_assert(1 + 1 == 2);
        kvti_assert(1 + 1 == 3);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_has_its_name_and_words),
        cmocka_unit_test(unknown_codes_still_print),
        cmocka_unit_test(version_is_the_headers),
        cmocka_unit_test(fail_fills_the_error_and_returns_the_code),
        cmocka_unit_test(fail_takes_no_error_to_fill),
        cmocka_unit_test(a_long_text_is_cut),
        cmocka_unit_test(errno_adds_number_and_words),
        cmocka_unit_test(errno_words_survive_a_long_text),
        cmocka_unit_test(a_limit_of_open_files_is_named_with_the_remedy),
        cmocka_unit_test(unknown_errno_still_prints),
        cmocka_unit_test(format_never_writes_past_its_size),
        cmocka_unit_test(log_reaches_the_hook_as_one_line),
        cmocka_unit_test(log_keeps_letters_beyond_ascii),
        cmocka_unit_test(log_without_a_hook_is_nothing),
        cmocka_unit_test(a_broken_invariant_ends_the_process),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
