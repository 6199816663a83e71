/* SPDX-License-Identifier: Apache-2.0 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

void cli_error(const char *format, ...)
{
    char text[CLI_TEXT_MAX];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    /* One call, so that lines of several processes do not mix. */
    fprintf(stderr, "kvt: %s\n", text);
}

void cli_make_plain(char *text, size_t length, bool lines)
{
    for (size_t i = 0; i < length; i++) {
        if ((text[i] < ' ' || text[i] > '~') && !(lines && text[i] == '\n')) {
            text[i] = '?';
        }
    }
}

void *cli_alloc(size_t count, size_t size)
{
    void *memory = calloc(count > 0 ? count : 1, size);

    if (memory == NULL) {
        cli_error("out of memory");
        _Exit(CLI_FAILED);
    }
    return memory;
}

void *cli_grow(void *items, size_t *capacity, size_t need, size_t size)
{
    size_t wanted = *capacity > 0 ? *capacity : 16;
    void *grown;

    if (need <= *capacity) {
        return items;
    }
    while (wanted < need) {
        wanted *= 2;
    }
    grown = reallocarray(items, wanted, size);
    if (grown == NULL) {
        cli_error("out of memory");
        _Exit(CLI_FAILED);
    }
    *capacity = wanted;
    return grown;
}

bool cli_parse_u64(const char *text, uint64_t min, uint64_t max, uint64_t *ret)
{
    unsigned long long value;
    char *end;

    /* strtoull() takes signs and leading blanks. */
    if (text[0] < '0' || text[0] > '9') {
        return false;
    }
    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < min || value > max) {
        return false;
    }
    *ret = value;
    return true;
}

bool cli_parse_real(const char *text, double min, double max, double *ret)
{
    double value;
    char *end;

    if (text[0] < '0' || text[0] > '9') {
        return false;
    }
    errno = 0;
    value = strtod(text, &end);
    if (errno != 0 || *end != '\0' || !isfinite(value) || value < min ||
        value > max) {
        return false;
    }
    *ret = value;
    return true;
}

/* The power of two behind a unit, or -1. */
static int unit_shift(const char *unit)
{
    static const char letters[] = "kmgt";
    char letter = (char)(*unit | 0x20);
    const char *found;

    if (unit[0] == '\0' || strcmp(unit, "B") == 0) {
        return 0;
    }
    found = strchr(letters, letter);
    if (found == NULL || *found == '\0') {
        return -1;
    }
    if (unit[1] != '\0' && strcmp(unit + 1, "B") != 0 &&
        strcmp(unit + 1, "iB") != 0) {
        return -1;
    }
    return (int)(found - letters + 1) * 10;
}

bool cli_parse_size(const char *text, uint64_t *ret)
{
    char number[32];
    size_t digits = strspn(text, "0123456789.");
    const char *unit = text + digits;
    double value;
    int shift;

    if (digits == 0 || digits >= sizeof(number)) {
        return false;
    }
    memcpy(number, text, digits);
    number[digits] = '\0';
    if (*unit == ' ') {
        unit++;
    }
    shift = unit_shift(unit);
    if (shift < 0 || !cli_parse_real(number, 0, 0x1p53, &value)) {
        return false;
    }
    value *= (double)(UINT64_C(1) << shift);
    if (value > 0x1p53) {
        return false;
    }
    *ret = (uint64_t)value;
    return true;
}

const char *cli_format_size(uint64_t bytes, char text[CLI_SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;

    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    /* Whole numbers without a fraction: sizes are mostly powers of two. */
    if (value - floor(value) < 0.05 || unit == 0) {
        (void)snprintf(text, CLI_SIZE_TEXT, "%.0f %s", floor(value),
                       units[unit]);
    } else {
        (void)snprintf(text, CLI_SIZE_TEXT, "%.1f %s", value, units[unit]);
    }
    return text;
}

uint64_t cli_now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int cli_earlier_ms(int a, int b)
{
    if (a < 0 || b < 0) {
        return a < 0 ? b : a;
    }
    return a < b ? a : b;
}

uint64_t cli_preemptions(void)
{
    struct rusage usage = {0};

    (void)getrusage(RUSAGE_THREAD, &usage);
    return (uint64_t)usage.ru_nivcsw;
}

uint64_t cli_mix(uint64_t a, uint64_t b)
{
    uint64_t x = a ^ (b * UINT64_C(0x9e3779b97f4a7c15));

    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x += b;
    x *= UINT64_C(0xd6e8feb86659fd93);
    return x ^ (x >> 32);
}
