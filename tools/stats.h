/* SPDX-License-Identifier: Apache-2.0 */
/* Figures of a run in little memory, however long it is. */
#ifndef KVT_TOOLS_STATS_H
#define KVT_TOOLS_STATS_H

#include <stddef.h>
#include <stdint.h>

/* 64 buckets for each power of two: values are within 1.6 % of the truth. */
#define HISTOGRAM_BUCKETS ((size_t)59 * 64)

struct histogram {
    uint64_t count;
    uint64_t buckets[HISTOGRAM_BUCKETS];
};

void histogram_add(struct histogram *histogram, uint64_t value);

/* The value that `percent` of all values do not exceed; 0 without values. */
uint64_t histogram_percentile(const struct histogram *histogram,
                              double percent);

struct span {
    uint64_t begin_ns;
    uint64_t end_ns;
};

/*
 * How long at least one of many overlapping things went on. Spans are kept
 * until they are many, then merged: those of a busy run become one.
 */
struct spans {
    struct span *at;
    size_t count;
    size_t capacity;
};

void spans_add(struct spans *spans, uint64_t begin_ns, uint64_t end_ns);

/* The length of the union. */
uint64_t spans_total_ns(struct spans *spans);

void spans_close(struct spans *spans);

#endif /* KVT_TOOLS_STATS_H */
