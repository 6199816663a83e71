/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying past the caches. An ordinary store first reads the line that it is
 * going to overwrite; a streaming one does not, so a third less goes over the
 * bus. Two threads wrote scattered blocks of 4, 16 and 64 KiB and 1 MiB at
 * 11.6, 15.9, 17.4 and 17.9 GB/s instead of memcpy's 10.0, 11.5, 11.5 and 11.8
 * (Ice Lake); and with all of it read by another core at once, the sum of both
 * times was lower too, from 64 KiB to 64 MiB. Wider registers gained nothing
 * once four pages were written in turn, so that the baseline of the processor
 * is enough; below a page memcpy wins.
 *
 * Streaming stores have no place in the order of the others. Whoever says that
 * the bytes are there says kvti_local_stream_end() first.
 */
#include "local.h"

#include <string.h>

#ifdef __SSE2__

#include <emmintrin.h>

#define LINE ((size_t)64)
#define LANE ((size_t)4096)
#define LANES ((size_t)4)

static inline void stream_line(unsigned char *to, const unsigned char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + 48));

    _mm_stream_si128((__m128i *)(void *)to, a);
    _mm_stream_si128((__m128i *)(void *)(to + 16), b);
    _mm_stream_si128((__m128i *)(void *)(to + 32), c);
    _mm_stream_si128((__m128i *)(void *)(to + 48), d);
}

/* A line of each page in turn: more pages are under way in memory at once. */
static void stream_lanes(unsigned char *to, const unsigned char *from)
{
    for (size_t at = 0; at < LANE; at += LINE) {
        for (size_t lane = 0; lane < LANES; lane++) {
            stream_line(to + lane * LANE + at, from + lane * LANE + at);
        }
    }
}

void kvti_local_stream(void *to, const void *from, size_t length)
{
    unsigned char *out = to;
    const unsigned char *in = from;
    size_t head = (LINE - (uintptr_t)to % LINE) % LINE;

    if (length < KVTI_STREAM_MIN) {
        memcpy(to, from, length);
        return;
    }
    memcpy(out, in, head);
    out += head;
    in += head;
    length -= head;
    for (; length >= LANES * LANE; length -= LANES * LANE) {
        stream_lanes(out, in);
        out += LANES * LANE;
        in += LANES * LANE;
    }
    for (; length >= LINE; length -= LINE) {
        stream_line(out, in);
        out += LINE;
        in += LINE;
    }
    memcpy(out, in, length);
}

void kvti_local_stream_end(void)
{
    _mm_sfence();
}

#else

void kvti_local_stream(void *to, const void *from, size_t length)
{
    memcpy(to, from, length);
}

void kvti_local_stream_end(void)
{
}

#endif
