/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trace reader of 'kvt replay'. Good lines give their numbers, whatever
 * their length, their line ends and their neighbours; each kind of bad line is
 * an error that names the file, the line and what is wrong with it; a pipe
 * reads like a file. Each case writes its trace to a temporary file.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../tools/trace.h"

#define HEAD "{\"timestamp\": 7, \"input_length\": 5, \"output_length\": 1, "
#define GOOD HEAD "\"hash_ids\": [1, 2, 3]}"

struct fixture {
    char path[64];
    FILE *file;
    struct trace *trace;
    struct trace_request request;
    char error[TRACE_TEXT_MAX];
};

static int set_up(void **state)
{
    static struct fixture fixture;
    int fd;

    fixture = (struct fixture){.path = "/tmp/kvt-trace-XXXXXX"};
    fd = mkstemp(fixture.path);
    fixture.file = fd >= 0 ? fdopen(fd, "w") : NULL;
    *state = &fixture;
    return fixture.file != NULL ? 0 : -1;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;

    trace_close(fixture->trace);
    if (fixture->file != NULL) {
        (void)fclose(fixture->file);
    }
    return unlink(fixture->path);
}

/* Opens a trace of these bytes. */
static void give(struct fixture *fixture, const void *bytes, size_t length)
{
    assert_int_equal(fwrite(bytes, 1, length, fixture->file), length);
    assert_int_equal(fclose(fixture->file), 0);
    fixture->file = NULL;
    fixture->trace = trace_open(fixture->path, fixture->error);
    assert_non_null(fixture->trace);
}

static void give_text(struct fixture *fixture, const char *text)
{
    give(fixture, text, strlen(text));
}

static int next(struct fixture *fixture)
{
    return trace_next(fixture->trace, &fixture->request, fixture->error);
}

/* The next line is refused as this line, with these words. */
static void assert_refused(struct fixture *fixture, unsigned int line,
                           const char *words)
{
    char place[96];

    (void)snprintf(place, sizeof(place), "%s:%u: ", fixture->path, line);
    assert_int_equal(next(fixture), -1);
    if (strncmp(fixture->error, place, strlen(place)) != 0 ||
        strstr(fixture->error, words) == NULL) {
        fail_msg("\"%s\" is not about line %u with \"%s\"", fixture->error,
                 line, words);
    }
    for (const char *c = fixture->error; *c != '\0'; c++) {
        assert_true((unsigned char)*c >= 0x20);
    }
}

static void a_line_gives_its_numbers(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, "{\"timestamp\": 27482, \"input_length\": 6955, "
                       "\"output_length\": 52, \"hash_ids\": [46, 0, 46]}\n");
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, 1);
    assert_true(fixture->request.timestamp_ms > 27481.5 &&
                fixture->request.timestamp_ms < 27482.5);
    assert_int_equal(fixture->request.input_length, 6955);
    assert_int_equal(fixture->request.output_length, 52);
    assert_int_equal(fixture->request.id_count, 3);
    assert_int_equal(fixture->request.ids[0], 46);
    assert_int_equal(fixture->request.ids[1], 0);
    assert_int_equal(fixture->request.ids[2], 46); /* twice is allowed */
    assert_int_equal(next(fixture), 0);
    assert_int_equal(next(fixture), 0);
}

static void the_last_line_needs_no_newline(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, GOOD "\n" GOOD);
    assert_int_equal(next(fixture), 1);
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, 2);
    assert_int_equal(next(fixture), 0);
}

static void carriage_returns_and_blank_lines_do_not_matter(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, "\r\n" GOOD "\r\n \t \r\n\n" GOOD "\r\n\r\n");
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, 2);
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, 5);
    assert_int_equal(next(fixture), 0);
}

static void other_fields_and_fractions_of_a_millisecond_are_fine(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, "{\"model\": {\"x\": [null]}, \"hash_ids\": [], "
                       "\"output_length\": 0, \"input_length\": 0, "
                       "\"timestamp\": 0.25}");
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.id_count, 0);
    assert_true(fixture->request.timestamp_ms > 0.2);
}

static void numbers_go_up_to_two_to_the_53(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, HEAD "\"hash_ids\": [9007199254740992]}\n" HEAD
                            "\"hash_ids\": [9007199254740993]}\n");
    assert_int_equal(next(fixture), 1);
    assert_true(fixture->request.ids[0] == TRACE_NUMBER_MAX);
    assert_refused(fixture, 2, "hash_ids[0] must be from 0 to 2^53");
}

static void bad_lines_say_what_is_wrong(void **state)
{
    static const struct {
        const char *line;
        const char *words;
    } cases[] = {
        {"{", "not valid JSON"},
        {"garbage", "not valid JSON"},
        {GOOD " " GOOD, "not valid JSON"},
        {GOOD ",", "not valid JSON"},
        {"\x01\x1b[31m\xff", "not valid JSON"},
        {"7", "must be an object and is an integer"},
        {"[]", "must be an object and is an array"},
        {"null", "must be an object and is null"},
        {"{}", "\"timestamp\" is missing"},
        {"{\"timestamp\": 1}", "\"input_length\" is missing"},
        {"{\"timestamp\": 1, \"input_length\": 1}",
         "\"output_length\" is missing"},
        {HEAD "\"ids\": []}", "\"hash_ids\" is missing"},
        {HEAD "\"timestamp\": 8, \"hash_ids\": []}", "duplicate"},
        {"{\"timestamp\": \"7\", \"input_length\": 1}", "is a string"},
        {"{\"timestamp\": -1, \"input_length\": 1}", "from 0 to 2^53"},
        {"{\"timestamp\": 1e300, \"input_length\": 1}", "from 0 to 2^53"},
        {"{\"timestamp\": 1, \"input_length\": 1.5}",
         "input_length must be an integer"},
        {HEAD "\"hash_ids\": 5}", "must be an array"},
        {HEAD "\"hash_ids\": {\"0\": 1}}", "and is an object"},
        {HEAD "\"hash_ids\": [1, \"2\"]}", "hash_ids[1]"},
        {HEAD "\"hash_ids\": [1, 2, -3]}", "hash_ids[2]"},
        {HEAD "\"hash_ids\": [1e3]}", "hash_ids[0] must be an integer"},
        {HEAD "\"hash_ids\": [true]}", "is a boolean"},
        {HEAD "\"hash_ids\": [[]]}", "is an array"},
        {HEAD "\"hash_ids\": [99999999999999999999999]}", "big"},
    };
    struct fixture *fixture = *state;
    size_t count = sizeof(cases) / sizeof(cases[0]);

    for (size_t i = 0; i < count; i++) {
        assert_true(fprintf(fixture->file, "%s\n", cases[i].line) > 0);
    }
    give_text(fixture, GOOD);
    for (size_t i = 0; i < count; i++) {
        assert_refused(fixture, (unsigned int)i + 1, cases[i].words);
    }
    /* An error leaves the reader at the next line. */
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, count + 1);
}

static void a_nul_byte_is_no_end_of_line(void **state)
{
    static const char bytes[] = "{\0}\n" GOOD;
    struct fixture *fixture = *state;

    give(fixture, bytes, sizeof(bytes) - 1);
    assert_refused(fixture, 1, "not valid JSON");
    assert_int_equal(next(fixture), 1);
}

static void a_line_of_a_million_ids_is_read(void **state)
{
    enum { COUNT = 1000000 };
    struct fixture *fixture = *state;

    assert_true(fprintf(fixture->file, "%s\"hash_ids\": [0", HEAD) > 0);
    for (int i = 1; i < COUNT; i++) {
        assert_true(fprintf(fixture->file, ",%d", i) > 0);
    }
    give_text(fixture, "]}\n" GOOD);
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.id_count, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        assert_int_equal(fixture->request.ids[i], i);
    }
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.id_count, 3);
}

static void a_line_without_end_is_refused_at_the_limit(void **state)
{
    struct fixture *fixture = *state;
    char *blanks = malloc(TRACE_LINE_MAX + 1);

    assert_non_null(blanks);
    memset(blanks, ' ', TRACE_LINE_MAX + 1);
    give(fixture, blanks, TRACE_LINE_MAX + 1);
    free(blanks);
    assert_refused(fixture, 1, "longer than 64 MiB");
}

static void a_rewound_trace_begins_again(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, GOOD "\n\nbad\n");
    assert_int_equal(next(fixture), 1);
    assert_refused(fixture, 3, "not valid JSON");
    trace_rewind(fixture->trace);
    assert_int_equal(next(fixture), 1);
    assert_int_equal(fixture->request.line, 1);
}

static void an_empty_trace_has_no_requests(void **state)
{
    struct fixture *fixture = *state;

    give_text(fixture, "");
    assert_int_equal(next(fixture), 0);
}

static void a_pipe_reads_twice_like_a_file(void **state)
{
    struct fixture *fixture = *state;
    int ends[2];
    char path[32];

    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], GOOD "\n", sizeof(GOOD)), sizeof(GOOD));
    assert_int_equal(close(ends[1]), 0);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", ends[0]);
    fixture->trace = trace_open(path, fixture->error);
    assert_non_null(fixture->trace);
    assert_int_equal(close(ends[0]), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(next(fixture), 1);
        assert_int_equal(next(fixture), 0);
        trace_rewind(fixture->trace);
    }
}

static void what_cannot_be_opened_says_why(void **state)
{
    struct fixture *fixture = *state;

    assert_null(trace_open("/tmp/kvt-no-such-trace", fixture->error));
    assert_non_null(strstr(fixture->error, "kvt-no-such-trace"));
    assert_non_null(strstr(fixture->error, "cannot be opened"));
    assert_null(trace_open("/tmp", fixture->error));
    assert_non_null(strstr(fixture->error, "directory"));
    trace_close(NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_line_gives_its_numbers),
        TEST(the_last_line_needs_no_newline),
        TEST(carriage_returns_and_blank_lines_do_not_matter),
        TEST(other_fields_and_fractions_of_a_millisecond_are_fine),
        TEST(numbers_go_up_to_two_to_the_53),
        TEST(bad_lines_say_what_is_wrong),
        TEST(a_nul_byte_is_no_end_of_line),
        TEST(a_line_of_a_million_ids_is_read),
        TEST(a_line_without_end_is_refused_at_the_limit),
        TEST(a_rewound_trace_begins_again),
        TEST(an_empty_trace_has_no_requests),
        TEST(a_pipe_reads_twice_like_a_file),
        TEST(what_cannot_be_opened_says_why),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
