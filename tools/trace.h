/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a request trace: one JSON object a line, in the format of Mooncake's
 * published traces. Memory does not depend on the number of lines.
 */
#ifndef KVT_TOOLS_TRACE_H
#define KVT_TOOLS_TRACE_H

#include <stddef.h>
#include <stdint.h>

/* What a double, and so every JSON reader, holds exactly. */
#define TRACE_NUMBER_MAX (UINT64_C(1) << 53)

/* Longest line. A prompt of 100 million tokens has a line of some 2 MB. */
#define TRACE_LINE_MAX ((size_t)64 << 20)

/* Tokens that one hash id stands for. */
#define TRACE_BLOCK_TOKENS 512u

#define TRACE_TEXT_MAX 400

struct trace_request {
    uint64_t line;          /* in the file, from 1 */
    double timestamp_ms;    /* since the start of the trace */
    uint64_t input_length;  /* tokens */
    uint64_t output_length; /* tokens */
    const uint64_t *ids;    /* valid until the next call for this trace */
    size_t id_count;
};

struct trace;

/*
 * Opens a trace. What is no regular file (a pipe) is copied to a temporary
 * file first, since a trace is read twice: once to check it, once to run it.
 * NULL with one sentence in `error` if that fails.
 */
struct trace *trace_open(const char *path, char error[TRACE_TEXT_MAX]);

void trace_close(struct trace *trace);

/*
 * The next request: 1, 0 at the end, -1 with one sentence that begins with
 * "FILE:LINE: ". Blank lines are skipped.
 */
int trace_next(struct trace *trace, struct trace_request *ret,
               char error[TRACE_TEXT_MAX]);

/* Starts again at the first line. */
void trace_rewind(struct trace *trace);

#endif /* KVT_TOOLS_TRACE_H */
