/* SPDX-License-Identifier: Apache-2.0 */
/* What every part of the command needs: errors, memory, sizes, the clock. */
#ifndef KVT_TOOLS_CLI_H
#define KVT_TOOLS_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exit statuses of the command; an interrupted run ends as shells expect. */
enum cli_exit {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2, /* arguments or input that the user has to change */
    CLI_INTERRUPTED = 130
};

#define CLI_TEXT_MAX 512

/* One line on stderr: "kvt: …". */
void cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Zeroed memory, or the end of the process: the command has nothing better
 * to do without memory, and its peers see the closed socket. */
void *cli_alloc(size_t count, size_t size);

/* Makes room for `need` items in an array of `*capacity` items. */
void *cli_grow(void *items, size_t *capacity, size_t need, size_t size);

/* Decimal digits only, within [min, max]. */
bool cli_parse_u64(const char *text, uint64_t min, uint64_t max, uint64_t *ret);

/* A finite number from min to max. */
bool cli_parse_real(const char *text, double min, double max, double *ret);

/* Bytes: "4096", "64k", "64KiB", "1.5G"; every unit is a power of 1024. */
bool cli_parse_size(const char *text, uint64_t *ret);

#define CLI_SIZE_TEXT 24

/* "4 KiB", "1.5 GiB"; returns `text`. */
const char *cli_format_size(uint64_t bytes, char text[CLI_SIZE_TEXT]);

/* Text of another process, perhaps of a stranger, may hold what a terminal
 * obeys or JSON cannot hold: '?' for every byte that is not printable ASCII,
 * but for line ends where `lines`. */
void cli_make_plain(char *text, size_t length, bool lines);

/* CLOCK_MONOTONIC, which all processes of one host share. */
uint64_t cli_now_ns(void);

/* The shorter of two timeouts of poll(), where -1 means for ever. */
int cli_earlier_ms(int a, int b);

/* How often the calling thread was made to give its CPU to another. */
uint64_t cli_preemptions(void);

/* A key for the contents of the run's blocks: every bit of both arguments
 * matters. Not cryptographic. */
uint64_t cli_mix(uint64_t a, uint64_t b);

#endif /* KVT_TOOLS_CLI_H */
