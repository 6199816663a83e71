/* SPDX-License-Identifier: Apache-2.0 */
#include "stats.h"

#include <math.h>
#include <stdlib.h>

#include "cli.h"

/* Spans before the first merge. */
#define SPANS_FIRST 4096u

static size_t bucket_of(uint64_t value)
{
    unsigned int shift;

    if (value < 64) {
        return (size_t)value;
    }
    /* The highest seven bits, and how far they were moved. */
    shift = 57u - (unsigned int)__builtin_clzll(value);
    return (size_t)shift * 64 + (size_t)(value >> shift);
}

/* The middle of what the bucket counts. */
static uint64_t value_of(size_t bucket)
{
    unsigned int shift;

    if (bucket < 128) {
        return bucket;
    }
    shift = (unsigned int)(bucket / 64 - 1);
    return ((uint64_t)(bucket % 64 + 64) << shift) +
           (UINT64_C(1) << (shift - 1));
}

void histogram_add(struct histogram *histogram, uint64_t value)
{
    histogram->count++;
    histogram->buckets[bucket_of(value)]++;
}

uint64_t histogram_percentile(const struct histogram *histogram, double percent)
{
    uint64_t rank = (uint64_t)ceil((double)histogram->count * percent / 100);
    uint64_t seen = 0;

    if (histogram->count == 0) {
        return 0;
    }
    for (size_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
        seen += histogram->buckets[i];
        if (seen >= rank && seen > 0) {
            return value_of(i);
        }
    }
    return value_of(HISTOGRAM_BUCKETS - 1);
}

static int compare_spans(const void *a, const void *b)
{
    const struct span *one = a;
    const struct span *other = b;

    return (one->begin_ns > other->begin_ns) -
           (one->begin_ns < other->begin_ns);
}

static void merge_spans(struct spans *spans)
{
    size_t kept = 0;

    if (spans->count == 0) {
        return;
    }
    qsort(spans->at, spans->count, sizeof(*spans->at), compare_spans);
    for (size_t i = 1; i < spans->count; i++) {
        struct span *last = &spans->at[kept];

        if (spans->at[i].begin_ns > last->end_ns) {
            spans->at[++kept] = spans->at[i];
        } else if (spans->at[i].end_ns > last->end_ns) {
            last->end_ns = spans->at[i].end_ns;
        }
    }
    spans->count = kept + 1;
}

void spans_add(struct spans *spans, uint64_t begin_ns, uint64_t end_ns)
{
    if (spans->count == spans->capacity) {
        merge_spans(spans);
        /* More room only when merging did not give much: a sparse run. */
        if (spans->count >= spans->capacity / 2) {
            spans->at = cli_grow(spans->at, &spans->capacity,
                                 spans->capacity > 0 ? spans->capacity + 1
                                                     : SPANS_FIRST,
                                 sizeof(*spans->at));
        }
    }
    spans->at[spans->count++] = (struct span){.begin_ns = begin_ns,
                                              .end_ns = end_ns};
}

uint64_t spans_total_ns(struct spans *spans)
{
    uint64_t total = 0;

    merge_spans(spans);
    for (size_t i = 0; i < spans->count; i++) {
        total += spans->at[i].end_ns - spans->at[i].begin_ns;
    }
    return total;
}

void spans_close(struct spans *spans)
{
    free(spans->at);
    *spans = (struct spans){0};
}
