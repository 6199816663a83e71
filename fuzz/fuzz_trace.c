/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trace reader. An input is read in two ways. As the bytes of a file: each
 * answer must be about the next line that is not blank, name it when it is
 * refused, hold sane numbers when it is taken, and be the same again after a
 * rewind. As orders to write a file of lines, well formed in many ways or wrong
 * in one: then it is known which lines are taken and what they say.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../tools/trace.h"
#include "diag.h"
#include "input.h"

#define LINES_MAX 6
#define IDS_MAX 12

struct line {
    bool good;
    uint64_t number; /* in the file */
    uint64_t timestamp;
    bool half; /* of a millisecond more */
    uint64_t input_length;
    uint64_t output_length;
    uint64_t ids[IDS_MAX];
    size_t id_count;
};

/* ---------------------------------------------------------------------- file */

/* A file without a name, and one that all inputs share. */
static const char *write_file(const void *data, size_t size)
{
    static char path[64];
    static int fd = -1;
    size_t done = 0;

    if (fd < 0) {
        fd = memfd_create("trace", MFD_CLOEXEC);
        kvti_assert(fd >= 0);
        (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    kvti_assert(ftruncate(fd, 0) == 0);
    while (done < size) {
        ssize_t wrote = pwrite(fd, (const char *)data + done, size - done,
                               (off_t)done);

        kvti_assert(wrote > 0);
        done += (size_t)wrote;
    }
    return path;
}

static struct trace *open_file(const char *path)
{
    char error[TRACE_TEXT_MAX];
    struct trace *trace = trace_open(path, error);

    kvti_assert(trace != NULL);
    return trace;
}

static void check_refusal(const char *path, uint64_t line, const char *error)
{
    char place[96];

    (void)snprintf(place, sizeof place, "%s:%" PRIu64 ": ", path, line);
    kvti_assert(strncmp(error, place, strlen(place)) == 0);
    kvti_assert(strlen(error) > strlen(place) &&
                strlen(error) < TRACE_TEXT_MAX);
    for (const char *c = error; *c != '\0'; c++) {
        kvti_assert((unsigned char)*c >= 0x20 && *c != 0x7f);
    }
}

/* ----------------------------------------------------------------- any bytes */

struct text {
    const uint8_t *at;
    size_t left;
    uint64_t line; /* the last one taken */
};

/* The next line that is not blank: its number, or 0. */
static uint64_t next_line(struct text *text)
{
    while (text->left > 0) {
        const uint8_t *end = memchr(text->at, '\n', text->left);
        size_t length = end != NULL ? (size_t)(end - text->at) : text->left;
        bool blank = true;

        for (size_t i = 0; i < length; i++) {
            blank = blank && (text->at[i] == ' ' || text->at[i] == '\t' ||
                              text->at[i] == '\r');
        }
        text->line++;
        text->left -= end != NULL ? length + 1 : length;
        text->at += end != NULL ? length + 1 : length;
        if (!blank) {
            return text->line;
        }
    }
    return 0;
}

static void check_numbers(const struct trace_request *request)
{
    kvti_assert(request->timestamp_ms >= 0 &&
                request->timestamp_ms <= (double)TRACE_NUMBER_MAX);
    kvti_assert(request->input_length <= TRACE_NUMBER_MAX &&
                request->output_length <= TRACE_NUMBER_MAX);
    for (size_t i = 0; i < request->id_count; i++) {
        kvti_assert(request->ids[i] <= TRACE_NUMBER_MAX);
    }
}

static uint64_t add_up(uint64_t sum, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        sum = (sum ^ ((const uint8_t *)data)[i]) * UINT64_C(1099511628211);
    }
    return sum;
}

/* Reads to the end and returns a sum of all answers. */
static uint64_t read_all(struct trace *trace, const char *path,
                         const uint8_t *data, size_t size)
{
    struct text text = {.at = data, .left = size};
    uint64_t sum = 0;
    int rc;

    do {
        struct trace_request request;
        char error[TRACE_TEXT_MAX];
        uint64_t line = next_line(&text);

        rc = trace_next(trace, &request, error);
        kvti_assert((rc == 0) == (line == 0));
        if (rc < 0) {
            check_refusal(path, line, error);
            sum = add_up(sum, error, strlen(error));
        } else if (rc > 0) {
            kvti_assert(request.line == line);
            check_numbers(&request);
            sum = add_up(sum, &request.timestamp_ms, sizeof(double));
            sum = add_up(sum, &request.input_length, sizeof(uint64_t));
            sum = add_up(sum, &request.output_length, sizeof(uint64_t));
            sum = add_up(sum, request.ids, request.id_count * sizeof(uint64_t));
        }
    } while (rc != 0);
    return sum;
}

static void check_bytes(const uint8_t *data, size_t size)
{
    const char *path = write_file(data, size);
    struct trace *trace = open_file(path);
    uint64_t sum = read_all(trace, path, data, size);

    trace_rewind(trace);
    kvti_assert(read_all(trace, path, data, size) == sum);
    trace_close(trace);
}

/* -------------------------------------------------------------- written lines */

static uint64_t next_value(struct input *input)
{
    uint64_t value = next_number(input);

    return value <= TRACE_NUMBER_MAX ? value : value % (TRACE_NUMBER_MAX + 1);
}

static void put_gap(struct input *input, FILE *to)
{
    static const char *const gaps[] = {"", "", " ", "\t", " \r "};

    (void)fputs(gaps[next_below(input, 5)], to);
}

/* What no reader of traces may take for a length or an id. */
static void put_wrong(struct input *input, FILE *to)
{
    static const char *const wrong[] = {
        "-1",    "9007199254740993",     "1.5", "1e3", "\"1\"", "null",
        "[1]",   "99999999999999999999", "0x1", "1 2", "[]",    "nan",
        "true",  "-9223372036854775808", "{}",  "+1",  "01",    "1.0",
        "1e999", "18446744073709551616"};

    (void)fputs(wrong[next_below(input, sizeof wrong / sizeof *wrong)], to);
}

enum flaw {
    FLAW_NONE,
    FLAW_TIMESTAMP,
    FLAW_INPUT,
    FLAW_OUTPUT,
    FLAW_ID,
    FLAW_MISSING,
    FLAW_TWICE,
    FLAW_CUT,
    FLAW_AFTER
};

static void put_timestamp(struct input *input, FILE *to, struct line *line,
                          enum flaw flaw)
{
    static const char *const wrong[] = {"-1",   "1e17", "\"7\"", "null",
                                        "-0.5", "[]",   "1e400", "false"};

    if (flaw == FLAW_TIMESTAMP) {
        (void)fputs(wrong[next_below(input, 8)], to);
        return;
    }
    line->half = (line->timestamp & 1) != 0 && line->timestamp < 1u << 30;
    (void)fprintf(to, "%" PRIu64 "%s", line->timestamp, line->half ? ".5" : "");
}

static void put_ids(struct input *input, FILE *to, struct line *line,
                    enum flaw flaw)
{
    size_t wrong = flaw == FLAW_ID && line->id_count > 0
                       ? next_below(input, line->id_count)
                       : SIZE_MAX;

    if (flaw == FLAW_ID && line->id_count == 0) {
        (void)fputs("7", to);
        return;
    }
    (void)fputc('[', to);
    for (size_t i = 0; i < line->id_count; i++) {
        (void)fputs(i > 0 ? "," : "", to);
        put_gap(input, to);
        if (i == wrong) {
            put_wrong(input, to);
        } else {
            (void)fprintf(to, "%" PRIu64, line->ids[i]);
        }
    }
    (void)fputc(']', to);
}

static void put_field(struct input *input, FILE *to, struct line *line,
                      size_t which, enum flaw flaw)
{
    static const char *const names[] = {"timestamp", "input_length",
                                        "output_length", "hash_ids"};

    (void)fprintf(to, "\"%s\"", names[which]);
    put_gap(input, to);
    (void)fputc(':', to);
    put_gap(input, to);
    switch (which) {
    case 0:
        put_timestamp(input, to, line, flaw);
        break;
    case 1:
    case 2:
        if (flaw == (which == 1 ? FLAW_INPUT : FLAW_OUTPUT)) {
            put_wrong(input, to);
        } else {
            (void)fprintf(to, "%" PRIu64,
                          which == 1 ? line->input_length
                                     : line->output_length);
        }
        break;
    default:
        put_ids(input, to, line, flaw);
        break;
    }
}

static void put_fields(struct input *input, FILE *to, struct line *line,
                       enum flaw flaw)
{
    size_t turn = next_below(input, 4);
    size_t gone = flaw == FLAW_MISSING ? next_below(input, 4) : 4;
    size_t twice = flaw == FLAW_TWICE ? next_below(input, 4) : 4;
    const char *comma = "";

    (void)fputc('{', to);
    for (size_t i = 0; i < 4; i++) {
        size_t which = (i + turn) % 4;

        if (which == gone) {
            continue;
        }
        (void)fputs(comma, to);
        put_gap(input, to);
        put_field(input, to, line, which, flaw);
        if (which == twice) {
            (void)fputc(',', to);
            put_field(input, to, line, which, flaw);
        }
        comma = ",";
    }
    if (next_byte(input) >= 192) {
        (void)fputs(",\"extra\":{\"hash_ids\":[-1,null]}", to);
    }
    (void)fputs(flaw == FLAW_CUT ? "" : "}", to);
    (void)fputs(flaw == FLAW_AFTER ? "]" : "", to);
}

/* Blank lines come before it; returns how many lines that makes. */
static uint64_t put_line(struct input *input, FILE *to, struct line *line,
                         uint64_t number)
{
    uint8_t way = next_byte(input);
    enum flaw flaw = way < 160 ? FLAW_NONE
                               : (enum flaw)(1 + (way - 160) % FLAW_AFTER);

    if (number > 0) {
        (void)fputs((way & 1) != 0 ? "\r\n" : "\n", to);
    }
    number++;
    for (; (way & 6) == 6; way ^= 4) {
        (void)fputs(" \t\r\n", to);
        number++;
    }
    *line = (struct line){.good = flaw == FLAW_NONE,
                          .number = number,
                          .timestamp = next_value(input),
                          .input_length = next_value(input),
                          .output_length = next_value(input),
                          .id_count = next_below(input, IDS_MAX + 1)};
    for (size_t i = 0; i < line->id_count; i++) {
        line->ids[i] = next_value(input);
    }
    put_fields(input, to, line, flaw);
    return number;
}

static void check_line(struct trace *trace, const char *path,
                       const struct line *line)
{
    struct trace_request request;
    char error[TRACE_TEXT_MAX];
    double timestamp = (double)line->timestamp + (line->half ? 0.5 : 0);
    int rc = trace_next(trace, &request, error);

    kvti_assert(rc == (line->good ? 1 : -1));
    if (!line->good) {
        check_refusal(path, line->number, error);
        return;
    }
    kvti_assert(request.line == line->number);
    /* Halves below 2^31 and integers up to 2^53 are exact. */
    kvti_assert(memcmp(&request.timestamp_ms, &timestamp, sizeof timestamp) ==
                0);
    kvti_assert(request.input_length == line->input_length &&
                request.output_length == line->output_length &&
                request.id_count == line->id_count);
    kvti_assert(line->id_count == 0 ||
                memcmp(request.ids, line->ids,
                       line->id_count * sizeof *line->ids) == 0);
}

static void check_written(struct input *input)
{
    struct line lines[LINES_MAX];
    size_t count = next_below(input, LINES_MAX + 1);
    struct trace_request request;
    char error[TRACE_TEXT_MAX];
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    struct trace *trace;
    const char *path;
    uint64_t number = 0;

    kvti_assert(to != NULL);
    for (size_t i = 0; i < count; i++) {
        number = put_line(input, to, &lines[i], number);
    }
    (void)fputs((next_byte(input) & 1) != 0 ? "\n" : "", to);
    kvti_assert(fclose(to) == 0);
    path = write_file(text, length);
    trace = open_file(path);
    for (size_t i = 0; i < count; i++) {
        check_line(trace, path, &lines[i]);
    }
    kvti_assert(trace_next(trace, &request, error) == 0);
    trace_close(trace);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {.at = data, .left = size};

    if (next_byte(&input) < 128) {
        check_written(&input);
    } else {
        check_bytes(input.at, input.left);
    }
    return 0;
}
