/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications: whole or refused, in order, never lost without a word; one
 * attached to a transfer is read only after all its data has landed, and never
 * when it has not.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

#define NOTE_MAX 65536

static void begin(struct pair *pair)
{
    need_notify();
    suite_pair(pair, NULL);
}

static kvt_xfer write_with_note(const struct pair *pair, uint32_t block,
                                const void *note, size_t length)
{
    struct kvt_xfer_options options = {
        .size = sizeof options, .note = note, .note_length = length};

    return pair_write_one(pair, block, block, &options);
}

static void assert_no_note(const struct pair *pair)
{
    struct kvt_notification note;
    char byte;

    assert_int_equal(kvt_notification(pair->b.t, &note, &byte, 1), 0);
}

/* B30 */
static void messages_of_any_size_arrive_whole(void **state)
{
    static const size_t sizes[] = {0, 1, 255, 256, 257, 4096, 65535, NOTE_MAX};
    static unsigned char sent[NOTE_MAX];
    static unsigned char got[NOTE_MAX];
    uint64_t seed = suite_seed();
    struct pair pair;

    (void)state;
    begin(&pair);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct kvt_notification note;

        for (size_t k = 0; k < sizes[i]; k++) {
            sent[k] = (unsigned char)(test_random(&seed) & 1 ? 0xff : 0);
            got[k] = 0x55;
        }
        assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, sent, sizes[i], ERR));
        note = wait_note(pair.b.t, got, sizeof got);
        assert_int_equal(note.length, sizes[i]);
        assert_memory_equal(got, sent, sizes[i]);
        assert_string_equal(note.agent_name, kvt_agent_name(pair.a.t));
        assert_int_equal(note.peer, 0); /* b never added a */
    }
    pair_close(&pair);
}

/* B30 */
static void messages_over_the_limit_are_refused(void **state)
{
    static unsigned char bytes[NOTE_MAX + 1];
    struct kvt_xfer_options options = {
        .size = sizeof options, .note = bytes, .note_length = NOTE_MAX + 1};
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    begin(&pair);
    assert_kvt_fails_with(
        kvt_notify(pair.a.t, pair.peer, bytes, NOTE_MAX + 1, ERR), KVT_ERANGE,
        "65536");
    assert_kvt_fails(kvt_notify(pair.a.t, pair.peer, NULL, 1, ERR), KVT_EINVAL);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, NULL, 0, ERR));
    assert_int_equal(wait_note(pair.b.t, bytes, 1).length, 0);
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, &options,
                                      &id, ERR),
                     KVT_ERANGE);
    assert_no_note(&pair);
    pair_check(&pair);
    pair_close(&pair);
}

/* B30 */
static void the_limit_can_be_raised_to_128_kib(void **state)
{
    static unsigned char sent[131072];
    static unsigned char got[131072];
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct pair pair;

    (void)state;
    need_notify();
    a.options.notify_bytes_max = sizeof sent;
    pair_open(&pair, &a, &b);
    for (size_t i = 0; i < sizeof sent; i++) {
        sent[i] = (unsigned char)(i % 251);
    }
    /* The receiver's own limit is for what it sends. */
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, sent, sizeof sent, ERR));
    assert_int_equal(wait_note(pair.b.t, got, sizeof got).length, sizeof sent);
    assert_memory_equal(got, sent, sizeof sent);
    pair_close(&pair);
}

/* B30 */
static void a_small_buffer_leaves_the_message_queued(void **state)
{
    struct kvt_notification note = {0};
    char bytes[8] = "unused";
    struct pair pair;

    (void)state;
    begin(&pair);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "12345", 5, ERR));
    assert_true(wait_fd(pair.b.t, test_wait_ms()));
    assert_kvt_fails(kvt_notification(pair.b.t, &note, bytes, 4), KVT_ERANGE);
    assert_int_equal(note.length, 5);
    assert_kvt_fails(kvt_notification(pair.b.t, &note, NULL, 0), KVT_ERANGE);
    assert_string_equal(bytes, "unused");
    assert_int_equal(wait_note(pair.b.t, bytes, 5).length, 5);
    assert_memory_equal(bytes, "12345", 5);
    assert_false(wait_fd(pair.b.t, 0));
    pair_close(&pair);
}

/* B32 */
static void a_thousand_unread_messages_keep_their_order(void **state)
{
    struct pair pair;

    (void)state;
    begin(&pair);
    for (uint32_t i = 0; i < 1000; i++) {
        assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, &i, sizeof i, ERR));
    }
    for (uint32_t i = 0; i < 1000; i++) {
        uint32_t got = 0;

        assert_int_equal(wait_note(pair.b.t, &got, sizeof got).length, 4);
        assert_int_equal(got, i);
    }
    assert_soon(stats_of(pair.a.t).notes_sent == 1000);
    assert_int_equal(stats_of(pair.b.t).notes_received, 1000);
    pair_close(&pair);
}

/* B32 */
static void a_sender_is_named_by_its_peer_id_once_added(void **state)
{
    struct pair pair;
    size_t length;
    void *metadata;
    kvt_peer back;
    char byte;

    (void)state;
    begin(&pair);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR));
    /* Kept from before b knew the sender. */
    assert_true(wait_fd(pair.b.t, test_wait_ms()));
    metadata = node_metadata(&pair.a, &length);
    back = node_add(&pair.b, "a", metadata, length);
    free(metadata);
    assert_int_equal(wait_note(pair.b.t, &byte, 1).peer, back);
    assert_kvt_ok(kvt_peer_remove(pair.b.t, back));
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "y", 1, ERR));
    assert_int_equal(wait_note(pair.b.t, &byte, 1).peer, 0);
    assert_int_equal(byte, 'y');
    pair_close(&pair);
}

/* A restarted process has another agent's name under the same peer. */
static void a_sender_is_known_by_the_metadata_of_the_last_reload(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct pair pair;
    struct node other;
    kvt_peer to_b;
    kvt_peer back;
    size_t length;
    void *metadata;
    char byte;

    (void)state;
    begin(&pair);
    metadata = node_metadata(&pair.a, &length);
    back = node_add(&pair.b, "a", metadata, length);
    free(metadata);
    node_open(&other, &plan);
    metadata = node_metadata(&pair.b, &length);
    to_b = node_add(&other, "b", metadata, length);
    free(metadata);
    metadata = node_metadata(&other, &length);
    assert_kvt_ok(kvt_peer_reload(pair.b.t, back, metadata, length, 0, ERR));
    free(metadata);
    assert_kvt_ok(kvt_notify(other.t, to_b, "o", 1, ERR));
    assert_int_equal(wait_note(pair.b.t, &byte, 1).peer, back);
    assert_int_equal(byte, 'o');
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "a", 1, ERR));
    assert_int_equal(wait_note(pair.b.t, &byte, 1).peer, 0);
    assert_int_equal(byte, 'a');
    node_close(&other);
    pair_close(&pair);
}

/* Both queues are full, the sender hears it, and nothing is lost. (B32) */
static void a_peer_that_does_not_read_pushes_back(void **state)
{
    enum { LIMIT = 8 };
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    static unsigned char bytes[NOTE_MAX];
    struct pair pair;
    uint32_t accepted = 0;
    int code = KVT_OK;

    (void)state;
    need_notify();
    need_local("NIXL takes any number of messages and never pushes back");
    a.options.notify_max = b.options.notify_max = LIMIT;
    pair_open(&pair, &a, &b);
    /* The way between the two holds some more; it ends too. */
    while (accepted < 100000) {
        uint64_t until = test_now_ns() + 200 * MS;

        memcpy(bytes, &accepted, sizeof accepted);
        do {
            code = kvt_notify(pair.a.t, pair.peer, bytes, sizeof bytes, NULL);
            if (code == KVT_EAGAIN) {
                test_yield();
            }
        } while (code == KVT_EAGAIN && test_now_ns() < until);
        if (code != KVT_OK) {
            break;
        }
        accepted++;
    }
    assert_int_equal(code, KVT_EAGAIN);
    assert_true(accepted >= LIMIT);
    assert_kvt_fails(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR), KVT_EAGAIN);
    for (uint32_t i = 0; i < accepted; i++) {
        uint32_t got;

        assert_int_equal(wait_note(pair.b.t, bytes, sizeof bytes).length,
                         sizeof bytes);
        memcpy(&got, bytes, sizeof got);
        assert_int_equal(got, i);
    }
    assert_no_note(&pair);
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR));
    assert_int_equal(wait_note(pair.b.t, bytes, sizeof bytes).length, 1);
    pair_close(&pair);
}

static void messages_wait_at_an_unloaded_peer_for_none(void **state)
{
    struct pair pair;

    (void)state;
    begin(&pair);
    assert_kvt_ok(kvt_peer_unload(pair.a.t, pair.peer, 0, ERR));
    assert_kvt_fails(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR),
                     KVT_EDISCONNECTED);
    assert_kvt_ok(kvt_peer_reload(pair.a.t, pair.peer, NULL, 0, 0, ERR));
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "y", 1, ERR));
    assert_kvt_fails(kvt_notify(pair.a.t, 999, "x", 1, ERR), KVT_ENOENT);
    pair_close(&pair);
}

/* ------------------------------------------------------ with a transfer's data */

static void a_message_with_a_write_comes_after_its_data(void **state)
{
    const struct pool_shape shape = {.block_bytes = 16384, .count = 64};
    struct kvt_xfer_options options = {.size = sizeof options};
    uint32_t all[64];
    struct pair pair;

    (void)state;
    need_notify();
    suite_pair(&pair, &shape);
    for (uint32_t i = 0; i < 64; i++) {
        all[i] = i ^ 1;
    }
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t got = 77;
        kvt_xfer id;

        pool_fill(&pair.a.pool, suite_seed());
        pair_expect(&pair, all, all, 64);
        options.note = &round;
        options.note_length = sizeof round;
        id = pair_write(&pair, all, all, 64, &options);
        (void)wait_note(pair.b.t, &got, sizeof got);
        assert_int_equal(got, round);
        pool_check(&pair.b.pool, "at the message");
        (void)wait_done(pair.a.t, id);
    }
    pair_close(&pair);
}

static void a_message_with_a_write_waits_for_the_last_part(void **state)
{
    const uint32_t blocks[] = {1, 3, 5};
    struct kvt_xfer_options options = {
        .size = sizeof options, .note = "done", .note_length = 4};
    struct pair pair;
    char got[4];
    kvt_xfer id;

    (void)state;
    need_notify();
    suite_fault_pair(&pair, NULL, "chunk_copies=1,window=3", 0);
    set_rules(&pair, "hang=2");
    pair_expect(&pair, blocks, blocks, 3);
    id = pair_write(&pair, blocks, blocks, 3, &options);
    assert_soon(status_of(pair.a.t, id).bytes_done == 512);
    /* A later message overtakes: it belongs to no unfinished write. */
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "next", 4, ERR));
    assert_int_equal(wait_note(pair.b.t, got, 4).length, 4);
    assert_memory_equal(got, "next", 4);
    assert_no_note(&pair);
    release_all(&pair);
    (void)wait_note(pair.b.t, got, 4);
    assert_memory_equal(got, "done", 4);
    pair_check(&pair);
    (void)wait_done(pair.a.t, id);
    pair_close(&pair);
}

static void no_message_is_sent_for_a_write_that_did_not_end_well(void **state)
{
    static const char *const rules[] = {"fail=1", "reject=1",
                                        "fail_unposted=1"};
    struct pair pair;
    char got[4];

    (void)state;
    need_notify();
    suite_fault_pair(&pair, NULL, "", 0);
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        kvt_xfer id;

        set_rules(&pair, rules[i]);
        id = write_with_note(&pair, 1, "bad", 3);
        assert_int_not_equal(wait_xfer(pair.a.t, id).state, KVT_DONE);
    }
    set_rules(&pair, "hold=1");
    {
        kvt_xfer id = write_with_note(&pair, 1, "bad", 3);

        assert_soon(in_state(pair.a.t, id, KVT_IN_PROGRESS));
        assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, NULL),
                         1);
        release_all(&pair);
        assert_int_equal(wait_xfer(pair.a.t, id).state, KVT_CANCELLED);
    }
    /* Messages keep their order: had one been sent, it would come first. */
    assert_kvt_ok(kvt_notify(pair.a.t, pair.peer, "end", 3, ERR));
    (void)wait_note(pair.b.t, got, 4);
    assert_memory_equal(got, "end", 3);
    assert_no_note(&pair);
    pair_close(&pair);
}

static void data_done_and_message_failed_has_a_code_of_its_own(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    need_notify();
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "notify_fail=1");
    pair_expect(&pair, (uint32_t[]){4}, (uint32_t[]){4}, 1);
    id = write_with_note(&pair, 4, "x", 1);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_DONE);
    assert_int_equal(result.code, KVT_ENOTIFY);
    assert_int_equal(result.bytes_done, 256);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    assert_string_not_equal(result.text, "");
    assert_no_note(&pair);
    pair_check(&pair);
    assert_int_equal(stats_of(pair.a.t).notes_failed, 1);
    assert_int_equal(stats_of(pair.a.t).notes_sent, 0);
    pair_close(&pair);
}

static void an_empty_message_with_a_write_is_still_one(void **state)
{
    struct pair pair;
    char byte;

    (void)state;
    begin(&pair);
    (void)wait_done(pair.a.t, write_with_note(&pair, 1, "", 0));
    assert_int_equal(wait_note(pair.b.t, &byte, 1).length, 0);
    pair_close(&pair);
}

static void reads_carry_messages_too(void **state)
{
    struct kvt_xfer_options options = {
        .size = sizeof options, .note = "read", .note_length = 4};
    struct pair pair;
    uint32_t block = 9;
    char got[4];

    (void)state;
    begin(&pair);
    pool_expect(&pair.a.pool, 9, &pair.b.pool, 9);
    (void)wait_done(pair.a.t, pair_read(&pair, &block, &block, 1, &options));
    (void)wait_note(pair.b.t, got, 4);
    assert_memory_equal(got, "read", 4);
    pair_check(&pair);
    pair_close(&pair);
}

static void without_notifications_the_engine_says_so(void **state)
{
    struct kvt_xfer_options options = {
        .size = sizeof options, .note = "x", .note_length = 1};
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "no_notify", 0);
    assert_kvt_fails(kvt_notify(pair.a.t, pair.peer, "x", 1, ERR),
                     KVT_EUNSUPPORTED);
    assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                      &indices, pair.remote, &indices, &options,
                                      &id, ERR),
                     KVT_EUNSUPPORTED);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    pair_close(&pair);
}

static void messages_cross_processes_both_ways(void **state)
{
    struct across across;
    char got[16];
    size_t length;
    void *metadata;
    kvt_peer back;

    (void)state;
    need_notify();
    across_open(&across, NULL);
    metadata = node_metadata(&across.a, &length);
    assert_kvt_ok(child_add(&across.child, "a", metadata, length, &back));
    free(metadata);
    assert_kvt_ok(kvt_notify(across.a.t, across.peer, "to child", 8, ERR));
    assert_int_equal(child_note(&across.child, got, sizeof got), 8);
    assert_memory_equal(got, "to child", 8);
    assert_int_equal(child_notify(&across.child, back, "to us", 5), KVT_OK);
    {
        struct kvt_notification note = wait_note(across.a.t, got, sizeof got);

        assert_int_equal(note.length, 5);
        assert_int_equal(note.peer, across.peer);
    }
    assert_memory_equal(got, "to us", 5);
    across_close(&across);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(messages_of_any_size_arrive_whole),
    cmocka_unit_test(messages_over_the_limit_are_refused),
    cmocka_unit_test(the_limit_can_be_raised_to_128_kib),
    cmocka_unit_test(a_small_buffer_leaves_the_message_queued),
    cmocka_unit_test(a_thousand_unread_messages_keep_their_order),
    cmocka_unit_test(a_sender_is_named_by_its_peer_id_once_added),
    cmocka_unit_test(a_sender_is_known_by_the_metadata_of_the_last_reload),
    cmocka_unit_test(a_peer_that_does_not_read_pushes_back),
    cmocka_unit_test(messages_wait_at_an_unloaded_peer_for_none),
    cmocka_unit_test(a_message_with_a_write_comes_after_its_data),
    cmocka_unit_test(a_message_with_a_write_waits_for_the_last_part),
    cmocka_unit_test(no_message_is_sent_for_a_write_that_did_not_end_well),
    cmocka_unit_test(data_done_and_message_failed_has_a_code_of_its_own),
    cmocka_unit_test(an_empty_message_with_a_write_is_still_one),
    cmocka_unit_test(reads_carry_messages_too),
    cmocka_unit_test(without_notifications_the_engine_says_so),
    cmocka_unit_test(messages_cross_processes_both_ways),
};

const struct test_group notes_group = TEST_GROUP("notes", cases);
