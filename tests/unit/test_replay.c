/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of 'kvt replay' that no engine has to run for: the table of slots
 * against a plain list, frames cut at every byte, streams over a link between
 * hosts and its silence, texts of strangers, addresses, percentiles and spans
 * against sorted values, and sizes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "../../tools/cli.h"
#include "../../tools/link.h"
#include "../../tools/link_socket.h"
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
    proto_open(a, pair[0], PROTO_PAYLOAD_MAX);
    proto_open(b, pair[1], PROTO_PAYLOAD_MAX);
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

/* What a terminal obeys comes to nothing; the end of the string is its own. */
static void texts_are_shown_as_plain_characters(void **state)
{
    static const char sent[] = "a\033[2J\x9b\xc2\x9b\r\n\a\0b\x7f~";
    struct proto_message message;
    struct proto from;
    struct proto to;
    char text[32];

    (void)state;
    open_pair(&from, &to);
    for (size_t capacity = 1; capacity <= sizeof(text); capacity++) {
        size_t length = capacity <= sizeof(sent) - 1 ? capacity - 1
                                                     : sizeof(sent) - 1;

        proto_begin(&from, 1);
        proto_put_bytes(&from, sent, sizeof(sent) - 1);
        proto_end(&from);
        assert_true(proto_flush(&from));
        assert_true(proto_fill(&to));
        assert_int_equal(proto_next(&to, &message), 1);
        proto_take_text(&message, text, capacity);
        assert_int_equal(strlen(text), length);
        assert_memory_equal(text, "a?[2J???????b?~", length);
    }
    proto_close(&from);
    proto_close(&to);
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

/* -------------------------------------------------------------------- links */

static void open_links(struct link *a, struct link *b)
{
    *a = (struct link){
        .signal_fd = -1, .heard_ns = cli_now_ns(), .spoke_ns = cli_now_ns()};
    *b = *a;
    open_pair(&a->proto, &b->proto);
    a->proto.payload_max = LINK_PAYLOAD_MAX;
    b->proto.payload_max = LINK_PAYLOAD_MAX;
}

static void put_numbers(struct proto *proto, uint64_t first, uint64_t count)
{
    proto_begin(proto, 7);
    proto_put(proto, first);
    proto_put(proto, count);
    for (uint64_t i = 0; i < count; i++) {
        proto_put(proto, first + i);
    }
    proto_end(proto);
}

static uint64_t check_numbers(struct proto *proto, uint64_t first)
{
    struct proto_message message;
    uint64_t found = 0;

    while (proto_next(proto, &message) == 1) {
        uint64_t count;

        assert_int_equal(proto_take(&message), first + found);
        count = proto_take_count(&message, 1);
        for (uint64_t i = 0; i < count; i++) {
            assert_int_equal(proto_take(&message), first + found + i);
        }
        found += count;
    }
    return found;
}

/* Frames of two holders, much longer than those of the link, sent in pieces of
 * every small size. */
static void streams_survive_the_link_wherever_they_are_cut(void **state)
{
    enum { ROUNDS = 40, COUNT = 20000 };
    static const uint64_t begin[2] = {0, UINT64_C(1) << 40};
    struct proto from[2];
    struct proto to[2];
    uint64_t found[2] = {0, 0};
    char error[CLI_TEXT_MAX];
    struct link near;
    struct link far;

    (void)state;
    open_links(&near, &far);
    for (size_t i = 0; i < 2; i++) {
        proto_open(&from[i], -1, PROTO_PAYLOAD_MAX_REMOTE);
        proto_open(&to[i], -1, PROTO_PAYLOAD_MAX_REMOTE);
    }
    for (uint64_t round = 0; round < ROUNDS; round++) {
        struct proto_message message;

        for (size_t i = 0; i < 2; i++) {
            put_numbers(&from[i], begin[i] + round * COUNT, COUNT);
            link_carry(&near, i, &from[i].out);
            assert_false(proto_unsent(&from[i]));
        }
        while (proto_unsent(&near.proto)) {
            assert_true(link_turn(&near, error));
            assert_true(link_fill(&far, error));
            while (proto_next(&far.proto, &message) == 1) {
                const unsigned char *bytes;
                uint64_t holder;
                size_t length;
                size_t cut;

                if (message.type == LINK_PING) {
                    continue; /* on a machine that is slow */
                }
                assert_int_equal(message.type, LINK_BYTES);
                holder = proto_take(&message);
                bytes = proto_take_bytes(&message, &length);
                cut = round + 1 < length ? round + 1 : length;
                assert_true(holder < 2 && length > 0);
                proto_append(&to[holder].in, bytes, cut);
                found[holder] += check_numbers(&to[holder],
                                               begin[holder] + found[holder]);
                proto_append(&to[holder].in, bytes + cut, length - cut);
                found[holder] += check_numbers(&to[holder],
                                               begin[holder] + found[holder]);
            }
        }
    }
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(found[i], ROUNDS * COUNT);
        proto_close(&from[i]);
        proto_close(&to[i]);
    }
    link_close(&near);
    link_close(&far);
}

static void a_link_takes_no_frame_beyond_its_bound(void **state)
{
    uint32_t header[2] = {LINK_PAYLOAD_MAX + 1, LINK_BYTES};
    struct proto_message message;
    char error[CLI_TEXT_MAX];
    struct link near;
    struct link far;

    (void)state;
    open_links(&near, &far);
    assert_int_equal(send(near.proto.fd, header, sizeof(header), 0),
                     sizeof(header));
    assert_true(link_fill(&far, error));
    assert_int_equal(proto_next(&far.proto, &message), -1);
    assert_false(link_expect(&far, LINK_OFFER, &message, error));
    assert_non_null(strstr(error, "too long"));
    link_close(&near);
    link_close(&far);
}

/* The clock is not waited for: what was heard last is put into the past. */
static void silence_ends_a_link_and_pings_break_it(void **state)
{
    struct proto_message message;
    char error[CLI_TEXT_MAX];
    struct link near;
    struct link far;

    (void)state;
    open_links(&near, &far);
    near.spoke_ns = 0;
    assert_true(link_turn(&near, error));
    far.heard_ns = 0;
    assert_true(link_fill(&far, error));
    assert_int_equal(proto_next(&far.proto, &message), 1);
    assert_int_equal(message.type, LINK_PING);
    assert_true(link_turn(&far, error));
    far.heard_ns = 0;
    assert_false(link_turn(&far, error));
    assert_non_null(strstr(error, "silent for 30 s"));
    link_close(&near);
    assert_false(link_fill(&far, error));
    assert_non_null(strstr(error, "closed the connection"));
    link_close(&far);
}

static void a_refusal_comes_before_the_end(void **state)
{
    struct proto_message message;
    char error[CLI_TEXT_MAX];
    struct link near;
    struct link far;

    (void)state;
    open_links(&near, &far);
    /* What the other end never reads must not take the reason with it. */
    put_numbers(&far.proto, 0, 1000);
    assert_true(link_turn(&far, error));
    assert_int_equal(shutdown(far.proto.fd, SHUT_WR), 0);
    link_leave(&near, "because");
    assert_false(link_is_open(&near));
    assert_false(link_expect(&far, LINK_START, &message, error));
    assert_non_null(strstr(error, "refuses: because"));
    link_close(&far);
}

static void addresses_have_a_host_and_a_port(void **state)
{
    static const struct {
        const char *address;
        const char *host; /* NULL: refused */
        const char *port;
    } cases[] = {
        {"10.0.0.1:4711", "10.0.0.1", "4711"},
        {"[fe80::1%eth0]:1", "fe80::1%eth0", "1"},
        {"host.example:65535", "host.example", "65535"},
        {":0", "", "0"},
        {"[]:5", "", "5"},
        {"host", NULL, NULL},
        {"host:", NULL, NULL},
        {"host:65536", NULL, NULL},
        {"host:-1", NULL, NULL},
        {"host:ssh", NULL, NULL},
        {"::1:4711", NULL, NULL},
        {"[::1]", NULL, NULL},
        {"[::1]4711", NULL, NULL},
        {"[::1:4711", NULL, NULL},
        {"", NULL, NULL},
    };
    char host[SOCKET_HOST_MAX];
    char port[SOCKET_PORT_MAX];
    char error[CLI_TEXT_MAX];
    char text[400];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool good = socket_split(cases[i].address, host, port, error);

        assert_int_equal(good, cases[i].host != NULL);
        if (good) {
            assert_string_equal(host, cases[i].host);
            assert_string_equal(port, cases[i].port);
        }
    }
    memset(text, 'a', sizeof(text));
    memcpy(&text[sizeof(text) - 3], ":1", 3);
    assert_false(socket_split(text, host, port, error));
    assert_true(socket_split(&text[sizeof(text) - 3 - (SOCKET_HOST_MAX - 1)],
                             host, port, error));
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_recently_used_block_goes_first),
        cmocka_unit_test(pinned_pending_and_lost_slots_are_not_taken),
        cmocka_unit_test(frames_arrive_whole_wherever_they_are_cut),
        cmocka_unit_test(a_full_socket_keeps_the_rest_for_later),
        cmocka_unit_test(short_frames_are_damaged_and_read_as_nothing),
        cmocka_unit_test(texts_are_shown_as_plain_characters),
        cmocka_unit_test(a_length_without_end_is_refused),
        cmocka_unit_test(streams_survive_the_link_wherever_they_are_cut),
        cmocka_unit_test(a_link_takes_no_frame_beyond_its_bound),
        cmocka_unit_test(silence_ends_a_link_and_pings_break_it),
        cmocka_unit_test(a_refusal_comes_before_the_end),
        cmocka_unit_test(addresses_have_a_host_and_a_port),
        cmocka_unit_test(percentiles_are_within_two_percent),
        cmocka_unit_test(spans_count_no_time_twice),
        cmocka_unit_test(sizes_are_powers_of_1024),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
