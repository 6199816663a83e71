/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The opaque bytes between agents: read at the time of the call, checked like
 * any untrusted input, and never accepted from oneself or for somebody else.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

/* A target and one that imports it. */
struct fixture {
    struct node a;
    struct node b;
    void *metadata; /* b's */
    size_t length;
    struct kvt_peer_params params;
};

static void begin(struct fixture *f)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);

    b.name = "agent b";
    node_open(&f->a, &a);
    node_open(&f->b, &b);
    f->metadata = node_metadata(&f->b, &f->length);
    f->params = (struct kvt_peer_params){.size = sizeof f->params,
                                         .name = "peer",
                                         .metadata = f->metadata,
                                         .metadata_length = f->length};
}

static void end(struct fixture *f)
{
    free(f->metadata);
    node_close(&f->a);
    node_close(&f->b);
}

static void add_fails(struct fixture *f, int code)
{
    kvt_peer peer = 0;

    assert_kvt_fails(kvt_peer_add(f->a.t, &f->params, &peer, ERR), code);
    assert_int_equal(peer, 0);
    assert_kvt_fails(kvt_peer_find(f->a.t, "peer", &peer), KVT_ENOENT);
}

static void a_small_buffer_is_told_the_length(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct node node;
    size_t length = 0;
    size_t again = 0;
    char byte = 'x';
    char *bytes;

    (void)state;
    node_open(&node, &plan);
    assert_kvt_fails(kvt_metadata(node.t, NULL, 0, &length, ERR), KVT_ERANGE);
    assert_kvt_fails(kvt_metadata(node.t, &byte, 1, &again, ERR), KVT_ERANGE);
    assert_int_equal(byte, 'x');
    assert_int_equal(length, again);
    bytes = malloc(length);
    assert_non_null(bytes);
    assert_kvt_fails(kvt_metadata(node.t, bytes, length - 1, &again, ERR),
                     KVT_ERANGE);
    assert_kvt_ok(kvt_metadata(node.t, bytes, length, &again, ERR));
    assert_int_equal(length, again);
    free(bytes);
    node_close(&node);
}

static void metadata_covers_what_is_registered_at_the_call(void **state)
{
    struct kvt_peer_info info;
    struct kvt_region region;
    struct kvt_run run;
    struct pair pair;
    struct pool more;
    kvt_layout layout;
    size_t length;
    void *metadata;

    (void)state;
    suite_pair(&pair, NULL);
    pool_open(&more, &(struct pool_shape){0}, suite_seed());
    region = pool_region(&more);
    run = pool_run(&more);
    assert_kvt_ok(kvt_register(pair.b.t, &region, 1, 0, ERR));
    assert_kvt_fails(
        kvt_prepare(pair.a.t, pair.peer, "more", &run, 1, &layout, ERR),
        KVT_ERANGE);
    metadata = node_metadata(&pair.b, &length);
    assert_kvt_ok(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR));
    free(metadata);
    assert_kvt_ok(
        kvt_prepare(pair.a.t, pair.peer, "more", &run, 1, &layout, ERR));
    assert_kvt_ok(kvt_peer_info(pair.a.t, pair.peer, &info));
    assert_int_equal(info.region_count, 2);
    pair_close(&pair);
    pool_close(&more);
}

static void any_flipped_bit_is_refused(void **state)
{
    struct fixture f;
    unsigned char *bytes;

    (void)state;
    begin(&f);
    bytes = f.metadata;
    for (size_t i = 0; i < f.length; i++) {
        bytes[i] ^= (unsigned char)(1u << i % 8);
        add_fails(&f, KVT_EMETADATA);
        bytes[i] ^= (unsigned char)(1u << i % 8);
    }
    (void)node_add(&f.a, "peer", f.metadata, f.length);
    end(&f);
}

/* The one cut that leaves something whole: what NIXL made stands in front, then
 * kvt's section, then a footer that begins with the section's length. 0: the
 * engine has nothing of its own. */
static size_t length_of_plain(const struct fixture *f)
{
    const size_t footer = 24;
    const unsigned char *at = f->metadata;
    size_t section = 0;

    assert_true(f->length > footer);
    at += f->length - footer;
    for (int i = 4; i-- > 0;) {
        section = section << 8 | at[i];
    }
    assert_true(section <= f->length - footer);
    return f->length - footer - section;
}

static void any_shorter_or_longer_metadata_is_refused(void **state)
{
    struct fixture f;
    unsigned char *longer;
    size_t plain;

    (void)state;
    begin(&f);
    plain = length_of_plain(&f);
    assert_int_equal(plain > 0, suite.agent);
    for (size_t length = 1; length < f.length; length++) {
        /* A copy of exactly this length: a read past it is found. */
        void *shorter = malloc(length);

        assert_non_null(shorter);
        memcpy(shorter, f.metadata, length);
        f.params.metadata = shorter;
        f.params.metadata_length = length;
        if (length == plain) {
            kvt_peer peer = node_add(&f.a, "plain", shorter, length);

            assert_kvt_ok(kvt_peer_remove(f.a.t, peer));
        } else {
            add_fails(&f, KVT_EMETADATA);
        }
        free(shorter);
    }
    longer = calloc(1, f.length + 16);
    assert_non_null(longer);
    memcpy(longer, f.metadata, f.length);
    f.params.metadata = longer;
    f.params.metadata_length = f.length + 16;
    add_fails(&f, KVT_EMETADATA);
    free(longer);
    end(&f);
}

static void arbitrary_bytes_are_refused(void **state)
{
    uint64_t seed = suite_seed();
    unsigned char bytes[512];
    struct fixture f;

    (void)state;
    begin(&f);
    f.params.metadata = bytes;
    for (size_t round = 0; round < 200; round++) {
        f.params.metadata_length = 1 + test_random(&seed) % sizeof bytes;
        for (size_t i = 0; i < sizeof bytes; i++) {
            bytes[i] = (unsigned char)test_random(&seed);
        }
        add_fails(&f, KVT_EMETADATA);
    }
    f.params.metadata_length = 0;
    add_fails(&f, KVT_EINVAL);
    f.params.metadata = NULL;
    add_fails(&f, KVT_EINVAL);
    end(&f);
}

static void damaged_metadata_does_not_reload(void **state)
{
    struct pair pair;
    size_t length;
    unsigned char *metadata;

    (void)state;
    suite_pair(&pair, NULL);
    metadata = node_metadata(&pair.b, &length);
    metadata[length / 2] ^= 1;
    assert_kvt_fails(
        kvt_peer_reload(pair.a.t, pair.peer, metadata, length, 0, ERR),
        KVT_EMETADATA);
    /* A refused call changed nothing. */
    assert_int_equal(kvt_peer_loaded(pair.a.t, pair.peer), 1);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    free(metadata);
    pair_close(&pair);
}

/* B46 */
static void a_transport_is_not_its_own_peer(void **state)
{
    struct fixture f;
    void *own;

    (void)state;
    begin(&f);
    own = node_metadata(&f.a, &f.params.metadata_length);
    f.params.metadata = own;
    add_fails(&f, KVT_EINVAL);
    free(own);
    end(&f);
}

/* B46 */
static void two_agents_of_one_name_do_not_meet(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_peer_params params = {.size = sizeof params, .name = "peer"};
    struct node one;
    struct node two;
    kvt_peer peer;
    void *metadata;

    (void)state;
    plan.name = "0.0.0.0:7777";
    node_open(&one, &plan);
    node_open(&two, &plan);
    metadata = node_metadata(&two, &params.metadata_length);
    params.metadata = metadata;
    assert_kvt_fails_with(kvt_peer_add(one.t, &params, &peer, ERR), KVT_EINVAL,
                          "0.0.0.0:7777");
    free(metadata);
    node_close(&one);
    node_close(&two);
}

static void an_agent_name_must_be_the_metadata_s(void **state)
{
    struct fixture f;
    kvt_peer peer = 0;

    (void)state;
    begin(&f);
    f.params.agent_name = "agent c";
    add_fails(&f, KVT_EMISMATCH);
    f.params.agent_name = "";
    add_fails(&f, KVT_EMISMATCH);
    f.params.agent_name = "agent b";
    assert_kvt_ok(kvt_peer_add(f.a.t, &f.params, &peer, ERR));
    end(&f);
}

static void claimed_regions_must_lie_inside_the_metadata_s(void **state)
{
    struct fixture f;
    struct kvt_region claims[2];
    kvt_peer peer = 0;

    (void)state;
    begin(&f);
    claims[0] = pool_region(&f.b.pool);
    claims[1] = claims[0];
    f.params.regions = claims;
    f.params.region_count = 2;
    claims[1].length++;
    add_fails(&f, KVT_ERANGE);
    claims[1].length = 1;
    claims[1].addr--;
    add_fails(&f, KVT_ERANGE);
    claims[1].addr = UINT64_MAX;
    claims[1].length = 2;
    add_fails(&f, KVT_ERANGE);
    claims[1] = claims[0];
    claims[1].kind = KVT_VRAM;
    add_fails(&f, KVT_ERANGE);
    claims[1] = (struct kvt_region){.addr = 5, .length = 0};
    assert_kvt_ok(kvt_peer_add(f.a.t, &f.params, &peer, ERR));
    f.params.regions = NULL;
    f.params.name = "other";
    assert_kvt_fails(kvt_peer_add(f.a.t, &f.params, &peer, ERR), KVT_EINVAL);
    end(&f);
}

static void an_engine_that_cannot_export_says_so(void **state)
{
    struct pair pair;
    char bytes[4096];
    size_t length = 0;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "export_fail=1");
    assert_kvt_fails(kvt_metadata(pair.a.t, bytes, sizeof bytes, &length, ERR),
                     KVT_EENGINE);
    assert_int_equal(length, 0);
    assert_kvt_ok(kvt_metadata(pair.a.t, bytes, sizeof bytes, &length, ERR));
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_small_buffer_is_told_the_length),
    cmocka_unit_test(metadata_covers_what_is_registered_at_the_call),
    cmocka_unit_test(any_flipped_bit_is_refused),
    cmocka_unit_test(any_shorter_or_longer_metadata_is_refused),
    cmocka_unit_test(arbitrary_bytes_are_refused),
    cmocka_unit_test(damaged_metadata_does_not_reload),
    cmocka_unit_test(a_transport_is_not_its_own_peer),
    cmocka_unit_test(two_agents_of_one_name_do_not_meet),
    cmocka_unit_test(an_agent_name_must_be_the_metadata_s),
    cmocka_unit_test(claimed_regions_must_lie_inside_the_metadata_s),
    cmocka_unit_test(an_engine_that_cannot_export_says_so),
};

const struct test_group metadata_group = TEST_GROUP("metadata", cases);
