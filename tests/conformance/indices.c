/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Indices and the options of a transfer. Every index error is returned by the
 * call itself, whatever the number of indices and wherever the bad one stands;
 * then nothing was sent and no id was given.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static int write_indices(const struct pair *pair,
                         const struct kvt_indices *local,
                         const struct kvt_indices *remote, kvt_xfer *ret_id)
{
    return kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, local,
                            pair->remote, remote, NULL, ret_id, ERR);
}

/* B22 */
static void every_integer_type_is_taken(void **state)
{
    const uint32_t u32[] = {1, 63};
    const int32_t i32[] = {2, 62};
    const uint64_t u64[] = {3, 61};
    const int64_t i64[] = {4, 60};
    const void *const data[] = {u32, i32, u64, i64};
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    for (uint32_t type = KVT_INDEX_U32; type <= KVT_INDEX_I64; type++) {
        const uint32_t plain[] = {type + 1, 63 - type};
        const struct kvt_indices local = {
            .data = data[type], .count = 2, .type = type};
        const struct kvt_indices remote = {
            .data = data[(type + 1) % 4], .count = 2, .type = (type + 1) % 4};
        const uint32_t next = (type + 1) % 4;
        const uint32_t to[] = {next + 1, 63 - next};
        kvt_xfer id;

        pair_expect(&pair, plain, to, 2);
        assert_kvt_ok(write_indices(&pair, &local, &remote, &id));
        (void)wait_done(pair.a.t, id);
        pair_check(&pair);
    }
    pair_close(&pair);
}

/* B29 */
static void one_bad_index_of_any_number_refuses_all(void **state)
{
    static const uint64_t counts[] = {1, 2, 63, 64, 255, 256, 1000, 65536};
    uint32_t *good = calloc(65536, sizeof *good);
    uint32_t *bad = calloc(65536, sizeof *bad);
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    assert_true(good != NULL && bad != NULL);
    suite_pair(&pair, NULL);
    for (uint32_t i = 0; i < 65536; i++) {
        good[i] = bad[i] = i % 64;
    }
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        const uint64_t at[] = {0, counts[c] / 2, counts[c] - 1};
        struct kvt_indices fine = indices_u32(good, counts[c]);
        struct kvt_indices wrong = indices_u32(bad, counts[c]);

        for (size_t i = 0; i < 3; i++) {
            bad[at[i]] = i == 1 ? UINT32_MAX : 64;
            assert_kvt_fails(write_indices(&pair, &wrong, &fine, &id),
                             KVT_ERANGE);
            assert_kvt_fails(write_indices(&pair, &fine, &wrong, &id),
                             KVT_ERANGE);
            bad[at[i]] = (uint32_t)(at[i] % 64);
        }
    }
    assert_int_equal(id, 0);
    assert_int_equal(stats_of(pair.a.t).accepted, 0);
    pair_check(&pair);
    pair_close(&pair);
    free(good);
    free(bad);
}

/* B20 */
static void negative_indices_are_out_of_range(void **state)
{
    const int32_t i32[] = {0, -1};
    const int64_t i64[] = {0, INT64_MIN};
    const int64_t wraps = (INT64_C(1) << 32) + 1;
    const uint32_t good[] = {0, 1};
    struct kvt_indices fine = indices_u32(good, 2);
    struct kvt_indices bad = {.data = i32, .count = 2, .type = KVT_INDEX_I32};
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    assert_kvt_fails_with(write_indices(&pair, &bad, &fine, &id), KVT_ERANGE,
                          "-1");
    bad.data = i64;
    bad.type = KVT_INDEX_I64;
    assert_kvt_fails(write_indices(&pair, &fine, &bad, &id), KVT_ERANGE);
    /* Must not be taken for block 1. */
    bad.data = &wraps;
    bad.count = fine.count = 1;
    assert_kvt_fails(write_indices(&pair, &bad, &fine, &id), KVT_ERANGE);
    pair_check(&pair);
    pair_close(&pair);
}

static void malformed_index_lists_are_refused(void **state)
{
    _Alignas(8) unsigned char bytes[64] = {0};
    const uint32_t good[] = {0, 1};
    struct kvt_indices fine = indices_u32(good, 2);
    struct kvt_indices bad;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    bad = (struct kvt_indices){.data = NULL, .count = 2};
    assert_kvt_fails(write_indices(&pair, &bad, &fine, &id), KVT_EINVAL);
    bad = (struct kvt_indices){.data = good, .count = 2, .type = 4};
    assert_kvt_fails(write_indices(&pair, &fine, &bad, &id), KVT_EINVAL);
    bad = (struct kvt_indices){.data = bytes + 2, .count = 2};
    assert_kvt_fails(write_indices(&pair, &bad, &fine, &id), KVT_EINVAL);
    bad = (struct kvt_indices){
        .data = bytes + 4, .count = 2, .type = KVT_INDEX_U64};
    assert_kvt_fails(write_indices(&pair, &bad, &fine, &id), KVT_EINVAL);
    assert_kvt_fails(write_indices(&pair, NULL, &fine, &id), KVT_EINVAL);
    assert_kvt_fails(write_indices(&pair, &fine, NULL, &id), KVT_EINVAL);
    bad = indices_u32(good, 1);
    assert_kvt_fails_with(write_indices(&pair, &bad, &fine, &id), KVT_EMISMATCH,
                          "2");
    bad = indices_u32(good, 0);
    assert_kvt_fails(write_indices(&pair, &bad, &bad, &id), KVT_EINVAL);
    bad = indices_u32(NULL, 0);
    assert_kvt_fails(write_indices(&pair, &bad, &bad, &id), KVT_EINVAL);
    assert_int_equal(id, 0);
    pair_check(&pair);
    pair_close(&pair);
}

/* B27 */
static void unequal_block_lengths_are_a_mismatch_with_both_values(void **state)
{
    const struct pool_shape small = {.block_bytes = 4096, .count = 8};
    const struct pool_shape large = {.block_bytes = 8192, .count = 4};
    struct node_plan a = suite_plan(&small);
    struct node_plan b = suite_plan(&large);
    const uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    pair_open(&pair, &a, &b);
    assert_kvt_fails_with(write_indices(&pair, &indices, &indices, &id),
                          KVT_EMISMATCH, "4096");
    assert_non_null(strstr(ERR->text, "8192"));
    assert_int_equal(stats_of(pair.a.t).mismatches, 1);
    assert_int_equal(stats_of(pair.a.t).refused, 1);
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    pair_check(&pair);
    pair_close(&pair);
}

/* B22 */
static void one_destination_twice_holds_either_source(void **state)
{
    const uint32_t from[] = {1, 2, 3};
    const uint32_t to[] = {9, 9, 10};
    const unsigned char *landed;
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    (void)wait_done(pair.a.t, pair_write(&pair, from, to, 3, NULL));
    landed = pool_block(&pair.b.pool, 9);
    assert_true(memcmp(landed, pool_block(&pair.a.pool, 1), 256) == 0 ||
                memcmp(landed, pool_block(&pair.a.pool, 2), 256) == 0);
    pool_accept(&pair.b.pool, 9);
    pool_expect(&pair.b.pool, 10, &pair.a.pool, 3);
    pair_check(&pair);
    pair_close(&pair);
}

/* ------------------------------------------------------------------ options */

static void user_data_and_tag_come_back(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .user_data = UINT64_MAX - 1,
                                       .tag = KVT_TAG_MAX};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    id = pair_write_one(&pair, 0, 0, &options);
    result = wait_done(pair.a.t, id);
    assert_true(result.user_data == UINT64_MAX - 1);
    assert_int_equal(result.tag, KVT_TAG_MAX);
    assert_int_equal(result.peer, pair.peer);
    assert_true(result.latency_ns > 0);
    pair_close(&pair);
}

static void malformed_options_are_refused(void **state)
{
    const struct kvt_xfer_options bad[] = {
        {.size = 0},
        {.size = sizeof(struct kvt_xfer_options) + 1},
        {.size = sizeof(struct kvt_xfer_options), .flags = 1u << 5},
        {.size = sizeof(struct kvt_xfer_options), .tag = KVT_TAG_MAX + 1},
        {.size = sizeof(struct kvt_xfer_options), .note_length = 3},
    };
    const uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_kvt_fails(kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout,
                                          &indices, pair.remote, &indices,
                                          &bad[i], &id, ERR),
                         KVT_EINVAL);
        assert_kvt_fails(kvt_warm_up(pair.a.t, pair.peer, &bad[i], &id, ERR),
                         KVT_EINVAL);
    }
    assert_int_equal(id, 0);
    pair_close(&pair);
}

static void without_an_event_status_alone_tells(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .flags = KVT_XFER_NO_EVENT};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    id = pair_write_one(&pair, 0, 0, &options);
    assert_soon(is_quiescent(pair.a.t, id));
    assert_true(in_state(pair.a.t, id, KVT_DONE));
    assert_true(in_state(pair.a.t, id, KVT_DONE));
    assert_int_equal(kvt_poll(pair.a.t, KVT_ANY, &result, 1), 0);
    assert_false(wait_fd(pair.a.t, 0));
    assert_kvt_ok(kvt_release(pair.a.t, id));
    assert_kvt_fails(kvt_status(pair.a.t, id, &result), KVT_ENOENT);
    assert_kvt_fails(kvt_release(pair.a.t, id), KVT_ENOENT);
    pair_close(&pair);
}

static void a_drained_result_is_forgotten(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_pair(&pair, NULL);
    id = pair_write_one(&pair, 0, 0, NULL);
    assert_soon(is_quiescent(pair.a.t, id));
    (void)wait_done(pair.a.t, id);
    assert_kvt_fails(kvt_status(pair.a.t, id, &result), KVT_ENOENT);
    assert_kvt_fails(kvt_release(pair.a.t, id), KVT_ENOENT);
    pair_close(&pair);
}

static void ids_are_never_used_again(void **state)
{
    enum { COUNT = 1000 };
    static kvt_xfer ids[COUNT];
    struct pair pair;

    (void)state;
    suite_pair(&pair, NULL);
    for (int i = 0; i < COUNT; i++) {
        ids[i] = pair_write_one(&pair, 0, 0, NULL);
        (void)wait_done(pair.a.t, ids[i]);
        for (int k = i - 20 < 0 ? 0 : i - 20; k < i; k++) {
            assert_true(ids[k] != ids[i]);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        assert_true(ids[i] != ids[0] || i == 0);
    }
    pair_close(&pair);
}

/* B47 */
static void warm_up_is_a_transfer_without_bytes(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options, .user_data = 5};
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    assert_kvt_ok(kvt_warm_up(pair.a.t, pair.peer, &options, &id, ERR));
    result = wait_done(pair.a.t, id);
    assert_int_equal(result.op, KVT_OP_WARM_UP);
    assert_int_equal(result.bytes, 0);
    assert_int_equal(result.user_data, 5);
    assert_kvt_fails(kvt_warm_up(pair.a.t, 999, NULL, &id, ERR), KVT_ENOENT);
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(every_integer_type_is_taken),
    cmocka_unit_test(one_bad_index_of_any_number_refuses_all),
    cmocka_unit_test(negative_indices_are_out_of_range),
    cmocka_unit_test(malformed_index_lists_are_refused),
    cmocka_unit_test(unequal_block_lengths_are_a_mismatch_with_both_values),
    cmocka_unit_test(one_destination_twice_holds_either_source),
    cmocka_unit_test(user_data_and_tag_come_back),
    cmocka_unit_test(malformed_options_are_refused),
    cmocka_unit_test(without_an_event_status_alone_tells),
    cmocka_unit_test(a_drained_result_is_forgotten),
    cmocka_unit_test(ids_are_never_used_again),
    cmocka_unit_test(warm_up_is_a_transfer_without_bytes),
};

const struct test_group indices_group = TEST_GROUP("indices", cases);
