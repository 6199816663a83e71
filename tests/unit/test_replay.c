/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of 'kvt replay' that no engine has to run for: the table of slots
 * against a plain list, frames cut at every byte, percentiles and spans
 * against sorted values, the shapes of models, and that a pool's checksum sees
 * one changed byte anywhere, guards included.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "../../tools/cli.h"
#include "../../tools/geometry.h"
#include "../../tools/kvpool.h"
#include "../../tools/proto.h"
#include "../../tools/slots.h"
#include "../../tools/stats.h"

/* Seeded numbers: a failure can be repeated. */
struct rng {
    uint64_t state;
};

static uint64_t rng_next(struct rng *rng)
{
    return cli_mix(rng->state++, 0);
}

static uint64_t rng_below(struct rng *rng, uint64_t limit)
{
    return rng_next(rng) % limit;
}

/* -------------------------------------------------------------------- slots */

#define LRU_SLOTS 7
#define LRU_IDS 20

/* What the table must do, said in the simplest way: ids, oldest first. */
struct lru {
    uint64_t ids[LRU_SLOTS];
    size_t count;
};

static size_t lru_find(const struct lru *lru, uint64_t id)
{
    size_t i = 0;

    while (i < lru->count && lru->ids[i] != id) {
        i++;
    }
    return i;
}

static void lru_touch(struct lru *lru, uint64_t id)
{
    size_t at = lru_find(lru, id);

    if (at == lru->count && lru->count == LRU_SLOTS) {
        at = 0;
    }
    if (at < lru->count) {
        memmove(&lru->ids[at], &lru->ids[at + 1],
                (lru->count - at - 1) * sizeof(lru->ids[0]));
        lru->count--;
    }
    lru->ids[lru->count++] = id;
}

static void the_least_recently_used_block_goes_first(void **state)
{
    struct rng rng = {1000000};
    struct lru lru = {0};
    struct slots slots;

    (void)state;
    slots_open(&slots, LRU_SLOTS);
    for (int round = 0; round < 20000; round++) {
        uint64_t id = rng_below(&rng, LRU_IDS);
        uint32_t slot = slots_find(&slots, id);

        assert_int_equal(slot != SLOT_NONE, lru_find(&lru, id) < lru.count);
        if (slot == SLOT_NONE) {
            slot = slots_take(&slots, id);
            assert_true(slot < LRU_SLOTS);
            slots_settle(&slots, slot, id);
        } else {
            assert_int_equal(slots.at[slot].checksum, id);
            slots_pin(&slots, slot);
        }
        slots_unpin(&slots, slot);
        lru_touch(&lru, id);
    }
    slots_close(&slots);
}

static void pinned_pending_and_lost_slots_are_not_taken(void **state)
{
    struct slots slots;
    uint32_t a;
    uint32_t b;
    uint32_t c;

    (void)state;
    slots_open(&slots, 3);
    a = slots_take(&slots, 1);
    b = slots_take(&slots, 2);
    c = slots_take(&slots, 3);
    assert_int_equal(slots_take(&slots, 4), SLOT_NONE);
    slots_settle(&slots, a, 0);
    assert_int_equal(slots_take(&slots, 4), SLOT_NONE); /* still pinned */
    slots_lose(&slots, b);
    assert_int_equal(slots_find(&slots, 2), SLOT_NONE);
    assert_int_equal(slots_take(&slots, 4), SLOT_NONE);
    slots_release(&slots, c, 0);
    assert_true(slots_at_rest(&slots, a));
    assert_false(slots_at_rest(&slots, b));
    assert_true(slots_at_rest(&slots, c));
    assert_int_equal(slots_take(&slots, 4), c);
    slots_unpin(&slots, a);
    assert_int_equal(slots_take(&slots, 5), a);
    assert_int_equal(slots_find(&slots, 1), SLOT_NONE);
    slots_close(&slots);
}

/* ------------------------------------------------------------------- frames */

static void open_pair(struct proto *a, struct proto *b)
{
    int pair[2];

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair),
                     0);
    proto_open(a, pair[0]);
    proto_open(b, pair[1]);
}

static void frames_arrive_whole_wherever_they_are_cut(void **state)
{
    struct proto from;
    struct proto to;
    struct proto_message message;
    char text[8];
    size_t frames = 0;

    (void)state;
    open_pair(&from, &to);
    for (uint64_t i = 0; i < 50; i++) {
        proto_begin(&from, (uint32_t)i);
        proto_put(&from, i * i);
        proto_put_bytes(&from, "abcdefgh", i % 9);
        proto_end(&from);
    }
    for (size_t at = from.out.begin; at < from.out.end; at++) {
        assert_int_equal(send(from.fd, &from.out.bytes[at], 1, 0), 1);
        assert_true(proto_fill(&to));
        while (proto_next(&to, &message) == 1) {
            assert_int_equal(message.type, frames);
            assert_int_equal(proto_take(&message), frames * frames);
            proto_take_text(&message, text, sizeof(text));
            assert_int_equal(strlen(text), frames % 9 < 7 ? frames % 9 : 7);
            assert_false(message.damaged);
            assert_ptr_equal(message.at, message.end);
            frames++;
        }
    }
    assert_int_equal(frames, 50);
    proto_close(&from);
    assert_false(proto_fill(&to));
    proto_close(&to);
}

static void a_full_socket_keeps_the_rest_for_later(void **state)
{
    enum { WORDS = 1000000 };
    struct proto from;
    struct proto to;
    struct proto_message message;

    (void)state;
    open_pair(&from, &to);
    proto_begin(&from, 1);
    proto_put(&from, WORDS);
    for (uint64_t i = 0; i < WORDS; i++) {
        proto_put(&from, i);
    }
    proto_end(&from);
    do {
        assert_true(proto_flush(&from));
        assert_true(proto_fill(&to));
    } while (proto_unsent(&from));
    assert_int_equal(proto_next(&to, &message), 1);
    assert_int_equal(proto_take_count(&message, 1), WORDS);
    for (uint64_t i = 0; i < WORDS; i++) {
        assert_int_equal(proto_take(&message), i);
    }
    proto_close(&from);
    proto_close(&to);
}

static void short_frames_are_damaged_and_read_as_nothing(void **state)
{
    uint64_t words[2] = {1, 100};
    struct proto_message message = {
        .at = (const unsigned char *)words,
        .end = (const unsigned char *)&words[2],
    };
    size_t length;

    (void)state;
    assert_int_equal(proto_take(&message), 1);
    assert_int_equal(proto_take_count(&message, 1), 0);
    assert_true(message.damaged);
    (void)proto_take_bytes(&message, &length);
    assert_int_equal(length, 0);
    assert_int_equal(proto_take(&message), 0);
}

static void a_length_without_end_is_refused(void **state)
{
    uint32_t header[2] = {UINT32_MAX, 1};
    struct proto from;
    struct proto to;
    struct proto_message message;

    (void)state;
    open_pair(&from, &to);
    assert_int_equal(send(from.fd, header, sizeof(header), 0), sizeof(header));
    assert_true(proto_fill(&to));
    assert_int_equal(proto_next(&to, &message), -1);
    proto_close(&from);
    proto_close(&to);
}

/* ------------------------------------------------------------------ figures */

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void percentiles_are_within_two_percent(void **state)
{
    enum { COUNT = 5000 };
    static uint64_t values[COUNT];
    static struct histogram histogram;
    struct rng rng = {3000000};

    (void)state;
    assert_int_equal(histogram_percentile(&histogram, 99), 0);
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = rng_next(&rng) >> (i % 64);
        histogram_add(&histogram, values[i]);
    }
    qsort(values, COUNT, sizeof(values[0]), compare);
    for (unsigned int percent = 1; percent <= 100; percent++) {
        double truth = (double)values[COUNT / 100 * percent - 1];
        double got = (double)histogram_percentile(&histogram, percent);

        assert_true(got >= truth * 0.98 - 1 && got <= truth * 1.02 + 1);
    }
}

static void spans_count_no_time_twice(void **state)
{
    enum { SPACE = 1 << 20, COUNT = 20000 };
    static unsigned char covered[SPACE];
    struct rng rng = {4000000};
    struct spans spans = {0};
    uint64_t truth = 0;

    (void)state;
    for (int i = 0; i < COUNT; i++) {
        uint64_t begin = rng_below(&rng, SPACE - 64);
        uint64_t length = rng_below(&rng, 64);

        spans_add(&spans, begin, begin + length);
        memset(&covered[begin], 1, length);
    }
    for (size_t i = 0; i < SPACE; i++) {
        truth += covered[i];
    }
    assert_int_equal(spans_total_ns(&spans), truth);
    assert_int_equal(spans_total_ns(&spans), truth);
    spans_close(&spans);
}

static void sizes_are_powers_of_1024(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"1", 1},          {"64k", 65536},      {"64KiB", 65536},
        {"1.5M", 1572864}, {"2GB", 2147483648}, {"7B", 7},
        {"4 KiB", 4096},
    };
    static const char *const bad[] = {"",    "k",     "-1",   "1x",
                                      "1kk", "1.2.3", "inf",  "1e99",
                                      "+1",  " 1",    "1KiBx"};
    uint64_t got;

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        assert_true(cli_parse_size(good[i].text, &got));
        assert_int_equal(got, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_false(cli_parse_size(bad[i], &got));
    }
}

/* ------------------------------------------------------------------- memory */

static void models_have_their_pages(void **state)
{
    struct geometry geometry;
    char error[GEOMETRY_TEXT_MAX];

    (void)state;
    assert_true(geometry_model("llama-3.1-70b", 0, 1, &geometry, error));
    assert_int_equal(geometry.regions, 160);
    assert_int_equal(geometry.page_bytes, 32768);
    assert_int_equal(geometry_slot_pages(&geometry), 5120);
    assert_int_equal(geometry_slot_bytes(&geometry), UINT64_C(160) << 20);
    assert_true(geometry_model("deepseek-v3", 0, 8, &geometry, error));
    assert_int_equal(geometry.regions, 61);
    assert_int_equal(geometry.page_bytes, 64 * 576 * 2);
    assert_true(geometry_model("llama-3.1-8b", 32, 16, &geometry, error));
    assert_int_equal(geometry.page_bytes, 32 * 1 * 128 * 2);
    assert_int_equal(geometry.pages, 16);
    assert_false(geometry_model("llama-3.1-8b", 0, 3, &geometry, error));
    assert_false(geometry_model("llama-3.1-8b", 5, 1, &geometry, error));
    assert_false(geometry_model("none", 0, 1, &geometry, error));
    for (unsigned int i = 0; geometry_model_name(i) != NULL; i++) {
        assert_true(
            geometry_model(geometry_model_name(i), 0, 1, &geometry, error));
    }
}

static void a_pool_never_outgrows_its_memory(void **state)
{
    struct rng rng = {5000000};

    (void)state;
    for (int i = 0; i < 20000; i++) {
        struct geometry geometry = {
            .regions = 1 + rng_below(&rng, 200),
            .pages = 1 + rng_below(&rng, 64),
            .page_bytes = 1 + rng_below(&rng, 70000),
        };
        uint64_t memory = rng_below(&rng, UINT64_C(1) << (10 + i % 24));
        uint64_t slots = kvpool_slots_in(&geometry, memory);

        if (slots > 0) {
            assert_true(kvpool_region_offset(&geometry, slots,
                                             geometry.regions) <= memory);
        }
    }
}

/* Every byte of the pool belongs to a slot or a guard, and is watched. */
static void one_changed_byte_anywhere_is_seen(void **state)
{
    const struct geometry geometry = {
        .regions = 3, .pages = 2, .page_bytes = 37};
    enum { SLOTS = 4, KEY = 99 };
    struct kvt_error err;
    struct kvpool pool;

    (void)state;
    assert_int_equal(kvpool_open(&pool, &geometry, SLOTS, false, &err), KVT_OK);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        kvpool_fill(&pool, slot, KEY + slot);
    }
    assert_true(kvpool_guards_intact(&pool));
    for (uint64_t at = 0; at < pool.bytes; at++) {
        unsigned int seen = 0;

        pool.base[at] ^= 1;
        for (uint64_t slot = 0; slot < SLOTS; slot++) {
            seen += kvpool_checksum(&pool, slot) !=
                    kvpool_expected(&geometry, KEY + slot);
        }
        seen += !kvpool_guards_intact(&pool);
        assert_int_equal(seen, 1);
        pool.base[at] ^= 1;
    }
    kvpool_close(&pool);
}

static void no_two_pages_are_alike(void **state)
{
    const struct geometry geometry = {
        .regions = 4, .pages = 4, .page_bytes = 64};
    enum { SLOTS = 8, PAGES = 4 * 4 * SLOTS };
    struct kvt_error err;
    struct kvpool pool;
    const unsigned char *pages[PAGES];

    (void)state;
    assert_int_equal(kvpool_open(&pool, &geometry, SLOTS, false, &err), KVT_OK);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        kvpool_fill(&pool, slot, slot);
        for (uint64_t region = 0; region < geometry.regions; region++) {
            for (uint64_t page = 0; page < geometry.pages; page++) {
                uint64_t index = kvpool_index(&geometry, SLOTS, region, slot,
                                              page);

                assert_true(index < PAGES);
                pages[index] = pool.base +
                               kvpool_region_offset(&geometry, SLOTS, region) +
                               (slot * geometry.pages + page) *
                                   geometry.page_bytes;
            }
        }
    }
    for (size_t i = 0; i < PAGES; i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(pages[i], pages[j], 64);
        }
    }
    kvpool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_recently_used_block_goes_first),
        cmocka_unit_test(pinned_pending_and_lost_slots_are_not_taken),
        cmocka_unit_test(frames_arrive_whole_wherever_they_are_cut),
        cmocka_unit_test(a_full_socket_keeps_the_rest_for_later),
        cmocka_unit_test(short_frames_are_damaged_and_read_as_nothing),
        cmocka_unit_test(a_length_without_end_is_refused),
        cmocka_unit_test(percentiles_are_within_two_percent),
        cmocka_unit_test(spans_count_no_time_twice),
        cmocka_unit_test(sizes_are_powers_of_1024),
        cmocka_unit_test(models_have_their_pages),
        cmocka_unit_test(a_pool_never_outgrows_its_memory),
        cmocka_unit_test(one_changed_byte_anywhere_is_seen),
        cmocka_unit_test(no_two_pages_are_alike),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
