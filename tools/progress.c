/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

/* Often enough to look alive, too seldom to cost anything. */
#define DRAW_MS 200u
#define BAR_CELLS 24u

void progress_open(struct progress *progress, uint64_t total)
{
    *progress = (struct progress){
        .terminal = isatty(STDERR_FILENO) == 1,
        .total = total,
        .begin_ns = cli_now_ns(),
    };
}

int progress_wait_ms(const struct progress *progress)
{
    return progress->terminal ? (int)DRAW_MS : -1;
}

static void describe(const struct progress *progress, uint64_t done,
                     uint64_t bytes, char *text, size_t capacity)
{
    double seconds = (double)(cli_now_ns() - progress->begin_ns) / 1e9;
    double left = 0;
    char size[CLI_SIZE_TEXT];

    if (done > 0) {
        left = seconds / (double)done * (double)(progress->total - done);
    }
    if (seconds < 1e-3) {
        seconds = 1e-3;
    }
    (void)snprintf(
        text, capacity,
        "%llu/%llu requests, %s, %.*f requests/s, %.2f GB/s, "
        "ETA %.0f s",
        (unsigned long long)done, (unsigned long long)progress->total,
        cli_format_size(bytes, size), (double)done / seconds < 10 ? 1 : 0,
        (double)done / seconds, (double)bytes / 1e9 / seconds, left);
}

static void draw_bar(uint64_t cells, const char *text)
{
    char bar[BAR_CELLS + 1];

    memset(bar, '.', BAR_CELLS);
    memset(bar, '#', cells);
    bar[BAR_CELLS] = '\0';
    /* Back to the line's begin, and what is left of the last one cleared. */
    fprintf(stderr, "\r[%s] %s\033[K", bar, text);
    (void)fflush(stderr);
}

void progress_update(struct progress *progress, uint64_t done, uint64_t bytes)
{
    uint64_t now = cli_now_ns();
    char text[200];

    if (progress->total == 0) {
        return;
    }
    if (progress->terminal) {
        if (now - progress->drawn_ns < DRAW_MS * UINT64_C(1000000)) {
            return;
        }
        progress->drawn_ns = now;
        describe(progress, done, bytes, text, sizeof(text));
        draw_bar(done * BAR_CELLS / progress->total, text);
    } else if (done * 4 / progress->total > progress->quarters) {
        progress->quarters = done * 4 / progress->total;
        describe(progress, done, bytes, text, sizeof(text));
        fprintf(stderr, "%s\n", text);
    }
}

void progress_close(struct progress *progress)
{
    if (progress->terminal && progress->drawn_ns != 0) {
        fprintf(stderr, "\r\033[K");
        (void)fflush(stderr);
    }
}
