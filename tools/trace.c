/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trace reader. A line is untrusted input: its length, its JSON, and each
 * number are checked here, and nowhere else.
 */
#include "trace.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

struct trace {
    char *path;
    FILE *file;
    uint64_t line; /* the last one read */
    char *text;    /* of that line, not terminated */
    size_t text_length;
    size_t text_capacity;
    uint64_t *ids;
    size_t id_capacity;
};

static int complain(const struct trace *trace, char error[TRACE_TEXT_MAX],
                    const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static int complain(const struct trace *trace, char error[TRACE_TEXT_MAX],
                    const char *format, ...)
{
    va_list args;
    int used;

    used = snprintf(error, TRACE_TEXT_MAX, "%s:%llu: ", trace->path,
                    (unsigned long long)trace->line);
    if (used < 0 || used >= TRACE_TEXT_MAX) {
        return -1;
    }
    va_start(args, format);
    (void)vsnprintf(error + used, TRACE_TEXT_MAX - (size_t)used, format, args);
    va_end(args);
    /* JSON errors quote the line, which may hold anything. */
    for (char *c = error; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) {
            *c = '?';
        }
    }
    return -1;
}

/* Copies a pipe to a file that has no name and goes when it is closed. */
static FILE *spool(FILE *from)
{
    FILE *to = tmpfile();
    char buffer[65536];
    size_t got;

    if (to == NULL) {
        return NULL;
    }
    while ((got = fread(buffer, 1, sizeof(buffer), from)) > 0) {
        if (fwrite(buffer, 1, got, to) != got) {
            break;
        }
    }
    if (ferror(from) || ferror(to) || fflush(to) != 0) {
        (void)fclose(to);
        return NULL;
    }
    rewind(to);
    return to;
}

struct trace *trace_open(const char *path, char error[TRACE_TEXT_MAX])
{
    struct trace *trace;
    struct stat status;
    FILE *file = fopen(path, "re");

    if (file == NULL || fstat(fileno(file), &status) != 0) {
        (void)snprintf(error, TRACE_TEXT_MAX, "%s: cannot be opened: %s", path,
                       strerror(errno));
        goto fail;
    }
    if (S_ISDIR(status.st_mode)) {
        (void)snprintf(error, TRACE_TEXT_MAX,
                       "%s: is a directory, give a trace in it", path);
        goto fail;
    }
    if (!S_ISREG(status.st_mode)) {
        FILE *copy = spool(file);

        if (copy == NULL) {
            (void)snprintf(error, TRACE_TEXT_MAX,
                           "%s: cannot be copied to a temporary file: %s", path,
                           strerror(errno));
            goto fail;
        }
        (void)fclose(file);
        file = copy;
    }
    trace = cli_alloc(1, sizeof(*trace));
    trace->file = file;
    trace->path = strdup(path);
    if (trace->path == NULL) {
        trace_close(trace);
        (void)snprintf(error, TRACE_TEXT_MAX, "out of memory");
        return NULL;
    }
    return trace;

fail:
    if (file != NULL) {
        (void)fclose(file);
    }
    return NULL;
}

void trace_close(struct trace *trace)
{
    if (trace == NULL) {
        return;
    }
    (void)fclose(trace->file);
    free(trace->path);
    free(trace->text);
    free(trace->ids);
    free(trace);
}

void trace_rewind(struct trace *trace)
{
    rewind(trace->file);
    trace->line = 0;
}

/*
 * Reads a line of any length up to the limit: 1, 0 at the end of the file.
 * getline() would take a file without newlines into memory whole.
 */
static int read_line(struct trace *trace, char error[TRACE_TEXT_MAX])
{
    int c = EOF;

    trace->line++;
    trace->text_length = 0;
    while ((c = getc_unlocked(trace->file)) != EOF && c != '\n') {
        if (trace->text_length == TRACE_LINE_MAX) {
            return complain(trace, error, "the line is longer than %zu MiB",
                            TRACE_LINE_MAX >> 20);
        }
        trace->text = cli_grow(trace->text, &trace->text_capacity,
                               trace->text_length + 1, 1);
        trace->text[trace->text_length++] = (char)c;
    }
    if (ferror(trace->file)) {
        return complain(trace, error, "cannot be read: %s", strerror(errno));
    }
    return c == EOF && trace->text_length == 0 ? 0 : 1;
}

static bool is_blank(const struct trace *trace)
{
    for (size_t i = 0; i < trace->text_length; i++) {
        if (strchr(" \t\r", trace->text[i]) == NULL || trace->text[i] == '\0') {
            return false;
        }
    }
    return true;
}

static const char *type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or exponent";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    default:
        return "something else";
    }
}

/* An integer in [0, 2^53]; `what` names it in the error. */
static int take_integer(const struct trace *trace, const json_t *value,
                        const char *what, uint64_t *ret,
                        char error[TRACE_TEXT_MAX])
{
    json_int_t number;

    if (!json_is_integer(value)) {
        return complain(trace, error, "%s must be an integer and is %s", what,
                        type_name(value));
    }
    number = json_integer_value(value);
    if (number < 0 || (uint64_t)number > TRACE_NUMBER_MAX) {
        return complain(trace, error, "%s must be from 0 to 2^53 and is %lld",
                        what, (long long)number);
    }
    *ret = (uint64_t)number;
    return 0;
}

static const json_t *find_field(const struct trace *trace, const json_t *object,
                                const char *name, char error[TRACE_TEXT_MAX])
{
    const json_t *value = json_object_get(object, name);

    if (value == NULL) {
        (void)complain(trace, error, "the field \"%s\" is missing", name);
    }
    return value;
}

static int take_timestamp(const struct trace *trace, const json_t *object,
                          double *ret, char error[TRACE_TEXT_MAX])
{
    const json_t *value = find_field(trace, object, "timestamp", error);
    double number;

    if (value == NULL) {
        return -1;
    }
    if (!json_is_number(value)) {
        return complain(trace, error,
                        "timestamp must be a number of milliseconds and is %s",
                        type_name(value));
    }
    number = json_number_value(value);
    if (!(number >= 0 && number <= (double)TRACE_NUMBER_MAX)) {
        return complain(trace, error,
                        "timestamp must be from 0 to 2^53 and is %g", number);
    }
    *ret = number;
    return 0;
}

static int take_length(const struct trace *trace, const json_t *object,
                       const char *name, uint64_t *ret,
                       char error[TRACE_TEXT_MAX])
{
    const json_t *value = find_field(trace, object, name, error);

    if (value == NULL) {
        return -1;
    }
    return take_integer(trace, value, name, ret, error);
}

static int take_ids(struct trace *trace, const json_t *object, size_t *ret,
                    char error[TRACE_TEXT_MAX])
{
    const json_t *array = find_field(trace, object, "hash_ids", error);
    size_t count;

    if (array == NULL) {
        return -1;
    }
    if (!json_is_array(array)) {
        return complain(trace, error,
                        "hash_ids must be an array of integers and is %s",
                        type_name(array));
    }
    count = json_array_size(array);
    trace->ids = cli_grow(trace->ids, &trace->id_capacity, count,
                          sizeof(*trace->ids));
    for (size_t i = 0; i < count; i++) {
        char what[48];

        (void)snprintf(what, sizeof(what), "hash_ids[%zu]", i);
        if (take_integer(trace, json_array_get(array, i), what, &trace->ids[i],
                         error) != 0) {
            return -1;
        }
    }
    *ret = count;
    return 0;
}

static int take_request(struct trace *trace, const json_t *object,
                        struct trace_request *ret, char error[TRACE_TEXT_MAX])
{
    struct trace_request request = {.line = trace->line};

    if (!json_is_object(object)) {
        return complain(trace, error, "the line must be an object and is %s",
                        type_name(object));
    }
    if (take_timestamp(trace, object, &request.timestamp_ms, error) != 0 ||
        take_length(trace, object, "input_length", &request.input_length,
                    error) != 0 ||
        take_length(trace, object, "output_length", &request.output_length,
                    error) != 0 ||
        take_ids(trace, object, &request.id_count, error) != 0) {
        return -1;
    }
    request.ids = trace->ids;
    *ret = request;
    return 1;
}

int trace_next(struct trace *trace, struct trace_request *ret,
               char error[TRACE_TEXT_MAX])
{
    json_error_t reason;
    json_t *object;
    int rc;

    do {
        rc = read_line(trace, error);
        if (rc <= 0) {
            return rc;
        }
    } while (is_blank(trace));

    /* Without JSON_DECODE_ANY "7" would be "not an array or object"; with it
     * the error can say what the line is. */
    object = json_loadb(trace->text, trace->text_length,
                        JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &reason);
    if (object == NULL) {
        return complain(trace, error, "is not valid JSON at byte %d: %s",
                        reason.position, reason.text);
    }
    rc = take_request(trace, object, ret, error);
    json_decref(object);
    return rc;
}
