/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening: defaults, names, limits and what a refusal says. Shown on the
 * options alone, and by reaching each limit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static struct kvt_options options_of(const char *engine)
{
    return (struct kvt_options){.size = sizeof(struct kvt_options),
                                .engine = engine};
}

static kvt_transport *open_named(const char *name)
{
    struct kvt_options options = options_of(suite.engine);
    kvt_transport *t = NULL;

    options.agent_name = name;
    assert_kvt_ok(kvt_open(&options, &t, ERR));
    return t;
}

static void refuse(const struct kvt_options *options, int code,
                   const char *words)
{
    kvt_transport *t = NULL;

    assert_kvt_fails_with(kvt_open(options, &t, ERR), code, words);
    assert_null(t);
}

static void null_options_take_every_default(void **state)
{
    kvt_transport *t = NULL;
    kvt_transport *other = NULL;
    const char *name;

    (void)state;
    assert_int_equal(setenv("KVT_ENGINE", suite.engine, 1), 0);
    assert_kvt_ok(kvt_open(NULL, &t, ERR));
    assert_kvt_ok(kvt_open(NULL, &other, ERR));
    name = kvt_agent_name(t);
    assert_int_equal(strlen(name), 4 + 32);
    assert_memory_equal(name, "kvt-", 4);
    assert_int_equal(strspn(name + 4, "0123456789abcdef"), 32);
    assert_string_not_equal(name, kvt_agent_name(other));
    kvt_free(t);
    kvt_free(other);
    assert_int_equal(unsetenv("KVT_ENGINE"), 0);
}

/* B40 */
static void auto_opens_an_engine_that_starts(void **state)
{
    struct kvt_options options = options_of("auto");
    kvt_transport *t = NULL;

    (void)state;
    assert_kvt_ok(kvt_open(&options, &t, ERR));
    kvt_free(t);
}

/* B46 */
static void agent_names_are_kept_byte_for_byte(void **state)
{
    char longest[KVT_NAME_MAX + 1];
    const char *const names[] = {"x", "0.0.0.0:7777", "../a/b", "\xc3\xa9\x01",
                                 longest};

    (void)state;
    memset(longest, 'n', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        kvt_transport *t = open_named(names[i]);

        assert_string_equal(kvt_agent_name(t), names[i]);
        kvt_free(t);
    }
}

/* B46 */
static void agent_names_have_1_to_255_bytes(void **state)
{
    struct kvt_options options = options_of(suite.engine);
    char name[KVT_NAME_MAX + 2];

    (void)state;
    options.agent_name = "";
    refuse(&options, KVT_EINVAL, "agent_name");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    options.agent_name = name;
    refuse(&options, KVT_EINVAL, "agent_name");
}

static void unknown_engines_are_named_in_the_refusal(void **state)
{
    struct kvt_options options = options_of("no-such-engine");

    (void)state;
    refuse(&options, KVT_EUNSUPPORTED, "no-such-engine");
    options.engine = "fault:no-such-engine";
    refuse(&options, KVT_EUNSUPPORTED, "no-such-engine");
    options.engine = "fault:";
    refuse(&options, KVT_EINVAL, "fault");
}

static void an_unknown_engine_in_the_environment_is_told_apart(void **state)
{
    struct kvt_options options = options_of(NULL);

    (void)state;
    assert_int_equal(setenv("KVT_ENGINE", "no-such-engine", 1), 0);
    refuse(&options, KVT_EUNSUPPORTED,
           "correct or unset KVT_ENGINE: \"auto\" takes the first");
    options.engine = "nor-this-one";
    refuse(&options, KVT_EUNSUPPORTED, "\"auto\" takes the first");
    assert_int_equal(unsetenv("KVT_ENGINE"), 0);
}

static void malformed_fault_rules_are_refused_at_open(void **state)
{
    char spec[64] = "";
    struct kvt_options options = options_of(spec);

    (void)state;
    (void)snprintf(spec, sizeof spec, "fault:%s?nonsense=1", suite.base);
    refuse(&options, KVT_EINVAL, "nonsense");
    (void)snprintf(spec, sizeof spec, "fault:%s?fail=0", suite.base);
    refuse(&options, KVT_EINVAL, "fail");
}

static void wrong_sizes_and_flags_are_refused(void **state)
{
    struct kvt_options options = options_of(suite.engine);

    (void)state;
    options.size = 0;
    refuse(&options, KVT_EINVAL, "size");
    options.size = sizeof options - 1;
    refuse(&options, KVT_EINVAL, "size");
    options.size = sizeof options;
    options.flags = 1u << 31;
    refuse(&options, KVT_EINVAL, "flags");
}

static void limits_above_the_possible_are_refused(void **state)
{
    struct kvt_options options = options_of(suite.engine);

    (void)state;
    options.inflight_max = 1048577;
    refuse(&options, KVT_EINVAL, "inflight_max");
    options.inflight_max = 0;
    options.notify_bytes_max = 131073;
    refuse(&options, KVT_EINVAL, "notify_bytes_max");
}

static void engine_infos_end_with_enoent(void **state)
{
    struct kvt_engine_info info;
    bool found = false;
    uint32_t count = 0;

    (void)state;
    while (kvt_engine_info(count, &info) == KVT_OK) {
        assert_true(memchr(info.name, '\0', sizeof info.name) != NULL);
        assert_string_not_equal(info.name, "");
        assert_string_not_equal(info.text, "");
        found |= strcmp(info.name, suite.base) == 0 && info.code == KVT_OK &&
                 (info.kinds & 1u << KVT_DRAM) != 0;
        count++;
    }
    assert_true(found || strcmp(suite.base, "auto") == 0);
    assert_kvt_fails(kvt_engine_info(count, &info), KVT_ENOENT);
    assert_kvt_fails(kvt_engine_info(UINT32_MAX, &info), KVT_ENOENT);
}

static void error_names_and_texts_are_constants(void **state)
{
#define CHECK(name, value, text)                                               \
    assert_string_equal(kvt_errname(value), "KVT_" #name);                     \
    assert_string_equal(kvt_strerror(value), text);

    (void)state;
    KVT_ERROR_MAP(CHECK)
#undef CHECK
    assert_string_equal(kvt_errname(1), "KVT_E?");
    assert_string_equal(kvt_errname(KVT_CODE_MIN - 1), "KVT_E?");
    assert_string_equal(kvt_strerror(INT32_MIN), "unknown error");
    assert_ptr_equal(kvt_strerror(KVT_EBUSY), kvt_strerror(KVT_EBUSY));
}

static void the_version_is_the_header_s(void **state)
{
    char version[32];

    (void)state;
    (void)snprintf(version, sizeof version, "%d.%d.%d", KVT_VERSION_MAJOR,
                   KVT_VERSION_MINOR, KVT_VERSION_PATCH);
    assert_string_equal(kvt_version(), version);
}

/* ------------------------------------------------------------------- limits */

static void transfers_in_flight_are_limited(void **state)
{
    struct node_plan a = suite_plan(NULL);
    struct node_plan b = suite_plan(NULL);
    struct kvt_result results[2];
    struct pair pair;
    uint32_t block = 0;
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id = 0;

    (void)state;
    a.options.inflight_max = 2;
    pair_open(&pair, &a, &b);
    (void)pair_write_one(&pair, 0, 0, NULL);
    (void)pair_write_one(&pair, 0, 0, NULL);
    /* Finished or not: what is not drained holds its place. */
    for (int i = 0; i < 3; i++) {
        assert_kvt_fails_with(
            kvt_write_blocks(pair.a.t, pair.peer, pair.a.layout, &indices,
                             pair.remote, &indices, NULL, &id, ERR),
            KVT_EAGAIN, "inflight_max");
    }
    assert_int_equal(id, 0);
    wait_results(pair.a.t, pair.peer, results, 2);
    (void)wait_done(pair.a.t, pair_write_one(&pair, 0, 0, NULL));
    pair_close(&pair);
}

static void peers_are_limited(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct node_plan other = suite_plan(NULL);
    struct kvt_peer_params params = {.size = sizeof params, .name = "two"};
    struct node node;
    struct node target;
    kvt_peer peer = 0;
    kvt_peer one;
    void *metadata;

    (void)state;
    plan.options.peers_max = 1;
    node_open(&node, &plan);
    node_open(&target, &other);
    metadata = node_metadata(&target, &params.metadata_length);
    params.metadata = metadata;
    one = node_add(&node, "one", metadata, params.metadata_length);
    assert_kvt_fails_with(kvt_peer_add(node.t, &params, &peer, ERR), KVT_EAGAIN,
                          "peers_max");
    assert_int_equal(peer, 0);
    assert_int_equal(kvt_peer_loaded(node.t, one), 1);
    /* The same name again takes its own place. */
    one = node_add(&node, "one", metadata, params.metadata_length);
    assert_kvt_ok(kvt_peer_remove(node.t, one));
    assert_kvt_ok(kvt_peer_add(node.t, &params, &peer, ERR));
    free(metadata);
    node_close(&node);
    node_close(&target);
}

static void regions_are_limited(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_region region;
    struct node node;
    struct pool more;

    (void)state;
    plan.options.regions_max = 1;
    node_open(&node, &plan);
    pool_open(&more, &plan.shape, suite_seed());
    region = pool_region(&more);
    assert_kvt_fails_with(kvt_register(node.t, &region, 1, 0, ERR), KVT_EAGAIN,
                          "regions_max");
    /* Again is no new one. */
    region = pool_region(&node.pool);
    assert_kvt_ok(kvt_register(node.t, &region, 1, 0, ERR));
    node_close(&node);
    pool_close(&more);
}

static void layouts_and_runs_are_limited(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_run runs[3];
    struct node node;
    kvt_layout layout = 0;

    (void)state;
    plan.options.layouts_max = 2;
    plan.options.runs_max = 3;
    node_open(&node, &plan);
    for (size_t i = 0; i < 3; i++) {
        runs[i] = pool_run(&node.pool);
    }
    assert_kvt_fails_with(
        kvt_prepare(node.t, KVT_SELF, "two", runs, 3, &layout, ERR), KVT_EAGAIN,
        "runs_max");
    assert_kvt_ok(kvt_prepare(node.t, KVT_SELF, "two", runs, 1, &layout, ERR));
    assert_kvt_fails_with(
        kvt_prepare(node.t, KVT_SELF, "three", runs, 1, &layout, ERR),
        KVT_EAGAIN, "layouts_max");
    /* A replaced one gives its runs back. */
    assert_kvt_ok(kvt_prepare(node.t, KVT_SELF, "two", runs, 2, &layout, ERR));
    assert_kvt_ok(kvt_layout_drop(node.t, layout));
    assert_kvt_ok(
        kvt_prepare(node.t, KVT_SELF, "three", runs, 2, &layout, ERR));
    node_close(&node);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(null_options_take_every_default),
    cmocka_unit_test(auto_opens_an_engine_that_starts),
    cmocka_unit_test(agent_names_are_kept_byte_for_byte),
    cmocka_unit_test(agent_names_have_1_to_255_bytes),
    cmocka_unit_test(unknown_engines_are_named_in_the_refusal),
    cmocka_unit_test(an_unknown_engine_in_the_environment_is_told_apart),
    cmocka_unit_test(malformed_fault_rules_are_refused_at_open),
    cmocka_unit_test(wrong_sizes_and_flags_are_refused),
    cmocka_unit_test(limits_above_the_possible_are_refused),
    cmocka_unit_test(engine_infos_end_with_enoent),
    cmocka_unit_test(error_names_and_texts_are_constants),
    cmocka_unit_test(the_version_is_the_header_s),
    cmocka_unit_test(transfers_in_flight_are_limited),
    cmocka_unit_test(peers_are_limited),
    cmocka_unit_test(regions_are_limited),
    cmocka_unit_test(layouts_and_runs_are_limited),
};

const struct test_group open_group = TEST_GROUP("open", cases);
