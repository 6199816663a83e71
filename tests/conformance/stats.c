/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters say what was done, the text says what the counters say, and asking
 * changes nothing.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "suite.h"

/* malloc()ed. */
static char *metrics_of(kvt_transport *t)
{
    size_t length = 0;
    size_t again = 0;
    char *text;

    assert_kvt_fails(kvt_metrics(t, NULL, 0, &length), KVT_ERANGE);
    text = malloc(length + 1);
    assert_non_null(text);
    assert_kvt_ok(kvt_metrics(t, text, length + 1, &again));
    assert_int_equal(length, again);
    assert_int_equal(strlen(text), length);
    return text;
}

/* The value of the one line that begins with `name` and has `label` in it. */
static unsigned long long value_of(const char *text, const char *name,
                                   const char *label)
{
    size_t length = strlen(name);
    unsigned long long value = 0;
    int found = 0;

    for (const char *line = text; *line != '\0';) {
        const char *end = strchr(line, '\n');
        char copy[1024];

        assert_non_null(end);
        (void)snprintf(copy, sizeof copy, "%.*s", (int)(end - line), line);
        if (strncmp(copy, name, length) == 0 && copy[length] == '{' &&
            strstr(copy, label) != NULL) {
            value = strtoull(strrchr(copy, ' '), NULL, 10);
            found++;
        }
        line = end + 1;
    }
    if (found != 1) {
        fail_msg("%d lines of %s with %s", found, name, label);
    }
    return value;
}

/* B51 */
static void counters_say_what_was_done(void **state)
{
    const uint32_t blocks[] = {0, 1, 2, 10, 20};
    struct kvt_stats before;
    struct kvt_stats stats;
    struct pair pair;
    uint32_t bad = 64;
    struct kvt_indices indices = indices_u32(&bad, 1);
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    before = stats_of(pair.a.t);
    (void)wait_done(pair.a.t, pair_write(&pair, blocks, blocks, 5, NULL));
    (void)wait_done(pair.a.t, pair_read(&pair, blocks, blocks, 2, NULL));
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, NULL,
                                      &id, ERR),
                     KVT_ERANGE);
    stats = stats_of(pair.a.t);
    assert_int_equal(stats.accepted, 2);
    assert_int_equal(stats.refused, 1);
    assert_int_equal(stats.done, 2);
    assert_int_equal(stats.blocks, 7);
    assert_int_equal(stats.copies, 4); /* 0-2, 10, 20; 0-1 */
    assert_int_equal(stats.merged, 3);
    assert_true(stats.chunks >= 2);
    assert_int_equal(stats.bytes_written, 5 * 256);
    assert_int_equal(stats.bytes_read, 2 * 256);
    assert_int_equal(stats.bytes_local + stats.bytes_nixl, 7 * 256);
    assert_int_equal(stats.inflight, 0);
    assert_int_equal(stats.undrained, 0);
    assert_int_equal(stats.rejected + stats.failed + stats.disconnected +
                         stats.cancelled + stats.timed_out + stats.lost,
                     0);
    assert_int_equal(stats.peers, 1);
    assert_int_equal(stats.peers_loaded, 1);
    assert_int_equal(stats.peer_adds, 1);
    assert_int_equal(stats.regions, 1);
    assert_int_equal(stats.layouts, 2);
    assert_int_equal(stats.runs, 2);
    assert_int_equal(stats.stalls, 0);
    assert_int_equal(stats.complete_ns.count - before.complete_ns.count, 2);
    assert_int_equal(stats.post_ns.count - before.post_ns.count, 2);
    pair_close(&pair);
}

/* Bucket i holds what is below 2^i and not below 2^(i-1). */
static void histograms_add_up(void **state)
{
    struct kvt_stats stats;
    uint64_t count = 0;
    uint64_t least = 0;
    uint64_t most = 0;
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    for (uint32_t i = 0; i < 50; i++) {
        (void)wait_done(pair.a.t, pair_write_one(&pair, i, i, NULL));
    }
    stats = stats_of(pair.a.t);
    for (int i = 0; i < KVT_HISTOGRAM_BUCKETS; i++) {
        count += stats.complete_ns.buckets[i];
        least += stats.complete_ns.buckets[i] * (UINT64_C(1) << i) / 2;
        most += stats.complete_ns.buckets[i] * (UINT64_C(1) << i);
    }
    assert_int_equal(count, 50);
    assert_int_equal(stats.complete_ns.count, 50);
    assert_true(stats.complete_ns.sum_ns >= least &&
                stats.complete_ns.sum_ns <= most);
    pair_close(&pair);
}

static void undrained_and_in_flight_are_told_apart(void **state)
{
    struct pair pair;
    kvt_xfer ids[2];

    (void)state;
    suite_fault_pair(&pair, NULL, "window=1", 0);
    ids[0] = pair_write_one(&pair, 0, 0, NULL);
    assert_soon(is_quiescent(pair.a.t, ids[0]));
    set_rules(&pair, "hold=1");
    ids[1] = pair_write_one(&pair, 1, 1, NULL);
    assert_int_equal(stats_of(pair.a.t).undrained, 1);
    assert_int_equal(stats_of(pair.a.t).inflight, 1);
    (void)wait_done(pair.a.t, ids[0]);
    assert_int_equal(stats_of(pair.a.t).undrained, 0);
    release_all(&pair);
    (void)wait_done(pair.a.t, ids[1]);
    assert_int_equal(stats_of(pair.a.t).inflight, 0);
    pair_close(&pair);
}

static void failures_are_counted_by_their_kind(void **state)
{
    static const char *const rules[] = {"reject=1", "fail=1",
                                        "fail_unposted=1"};
    struct kvt_stats stats;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    for (int i = 0; i < 3; i++) {
        set_rules(&pair, rules[i]);
        (void)wait_xfer(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    }
    set_rules(&pair, "disconnect=1");
    (void)wait_xfer(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    stats = stats_of(pair.a.t);
    assert_int_equal(stats.rejected, 1);
    assert_int_equal(stats.failed, 2);
    assert_int_equal(stats.disconnected, 1);
    assert_int_equal(stats.done, 0);
    assert_int_equal(stats.accepted, 4);
    /* Only bytes that are known to have landed. */
    assert_int_equal(stats.bytes_written, 0);
    assert_int_equal(stats.peers_loaded, 0);
    assert_int_equal(stats.peer_disconnects, 1);
    pair_close(&pair);
}

static void a_shorter_struct_gets_its_part(void **state)
{
    struct kvt_stats stats;
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    memset(&stats, 0xee, sizeof stats);
    assert_kvt_ok(
        kvt_stats(pair.a.t, &stats, offsetof(struct kvt_stats, done)));
    assert_int_equal(stats.accepted, 1);
    assert_true(stats.done == UINT64_C(0xeeeeeeeeeeeeeeee));
    assert_kvt_fails(kvt_stats(pair.a.t, &stats, 0), KVT_EINVAL);
    assert_kvt_fails(kvt_stats(pair.a.t, &stats, sizeof stats + 1), KVT_EINVAL);
    assert_kvt_fails(kvt_stats(pair.a.t, NULL, sizeof stats), KVT_EINVAL);
    pair_close(&pair);
}

/* ------------------------------------------------------------------ text */

static bool is_name(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == ':';
}

/* NAME{LABELS} VALUE, with quotes, backslashes and newlines escaped. */
static void check_line(const char *line, size_t length)
{
    size_t at = 0;
    bool quoted = false;
    char *end;

    while (at < length && is_name(line[at])) {
        at++;
    }
    assert_true(at > 0 && at < length && line[at] == '{');
    for (at++; at < length && (quoted || line[at] != '}'); at++) {
        if (quoted && line[at] == '\\') {
            at++;
            assert_true(at < length && strchr("\\\"n", line[at]) != NULL);
        } else if (line[at] == '"') {
            quoted = !quoted;
        }
    }
    assert_true(at + 2 < length && line[at + 1] == ' ');
    (void)strtod(line + at + 2, &end);
    assert_ptr_equal(end, line + length);
}

static void check_format(const char *text)
{
    for (const char *line = text; *line != '\0';) {
        const char *end = strchr(line, '\n');

        assert_non_null(end);
        if (line[0] == '#') {
            assert_true(strncmp(line, "# HELP kvt_", 11) == 0 ||
                        strncmp(line, "# TYPE kvt_", 11) == 0);
        } else {
            check_line(line, (size_t)(end - line));
        }
        line = end + 1;
    }
}

static void the_text_says_what_the_counters_say(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options, .tag = 7};
    struct kvt_stats stats;
    struct pair pair;
    char *text;

    (void)state;
    suite_pair(&pair, NULL);
    for (uint32_t i = 0; i < 5; i++) {
        (void)wait_done(pair.a.t, pair_write_one(&pair, i, i, &options));
    }
    stats = stats_of(pair.a.t);
    text = metrics_of(pair.a.t);
    check_format(text);
    assert_int_equal(value_of(text, "kvt_transfers_accepted_total", ""),
                     stats.accepted);
    assert_int_equal(
        value_of(text, "kvt_transfers_completed_total", "state=\"done\""), 5);
    assert_int_equal(
        value_of(text, "kvt_transfers_completed_total", "state=\"lost\""), 0);
    assert_int_equal(value_of(text, "kvt_bytes_total", "op=\"write\""),
                     stats.bytes_written);
    assert_int_equal(
        value_of(text, "kvt_peer_bytes_total", "peer=\"b\",op=\"write\""),
        stats.bytes_written);
    assert_int_equal(value_of(text, "kvt_peer_transfers_total",
                              "peer=\"b\",result=\"done\""),
                     5);
    assert_int_equal(value_of(text, "kvt_tag_transfers_total", "tag=\"7\""), 5);
    assert_int_equal(value_of(text, "kvt_transfer_seconds_count", ""), 5);
    assert_int_equal(
        value_of(text, "kvt_transfer_seconds_bucket", "le=\"+Inf\""), 5);
    free(text);
    pair_close(&pair);
}

static void names_are_escaped_in_the_text(void **state)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct node one;
    struct node two;
    size_t length;
    void *metadata;
    char *text;

    (void)state;
    a.name = "a \"quoted\\\nname}";
    node_open(&one, &a);
    node_open(&two, &b);
    metadata = node_metadata(&two, &length);
    (void)node_add(&one, "peer \"\\\n} 1", metadata, length);
    free(metadata);
    text = metrics_of(one.t);
    check_format(text);
    assert_non_null(strstr(text, "agent=\"a \\\"quoted\\\\\\nname}\""));
    assert_non_null(strstr(text, "peer=\"peer \\\"\\\\\\n} 1\""));
    free(text);
    node_close(&one);
    node_close(&two);
}

static void a_small_buffer_is_never_overrun(void **state)
{
    struct pair pair;
    size_t full = 0;
    size_t length;

    (void)state;
    suite_pair(&pair, NULL);
    assert_kvt_fails(kvt_metrics(pair.a.t, NULL, 0, &full), KVT_ERANGE);
    for (size_t capacity = 1; capacity <= full; capacity += 97) {
        char *text = malloc(capacity);

        assert_non_null(text);
        assert_kvt_fails(kvt_metrics(pair.a.t, text, capacity, &length),
                         KVT_ERANGE);
        assert_int_equal(length, full);
        assert_int_equal(text[capacity - 1], '\0');
        free(text);
    }
    assert_kvt_fails(kvt_metrics(pair.a.t, NULL, 1, &length), KVT_EINVAL);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(counters_say_what_was_done),
    cmocka_unit_test(histograms_add_up),
    cmocka_unit_test(undrained_and_in_flight_are_told_apart),
    cmocka_unit_test(failures_are_counted_by_their_kind),
    cmocka_unit_test(a_shorter_struct_gets_its_part),
    cmocka_unit_test(the_text_says_what_the_counters_say),
    cmocka_unit_test(names_are_escaped_in_the_text),
    cmocka_unit_test(a_small_buffer_is_never_overrun),
};

const struct test_group stats_group = TEST_GROUP("stats", cases);
