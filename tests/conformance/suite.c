/* SPDX-License-Identifier: Apache-2.0 */
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sanitizer.h"

struct suite suite;

static bool is_set(const char *variable, const char *value)
{
    const char *have = getenv(variable);

    return have != NULL && strcmp(have, value) == 0;
}

static bool read_kinds(void)
{
    bool any = strcmp(suite.base, "auto") == 0;
    struct kvt_engine_info info;
    bool known = any;

    for (uint32_t i = 0; kvt_engine_info(i, &info) == KVT_OK; i++) {
        if (strcmp(info.name, "nixl") == 0) {
            suite.agent = strcmp(suite.base, "nixl") == 0 ||
                          (any && info.code == KVT_OK);
        }
        if (strcmp(info.name, suite.base) == 0) {
            known = true;
            suite.vram = (info.kinds & 1u << KVT_VRAM) != 0;
            if (info.code != KVT_OK) {
                (void)fprintf(stderr, "%s cannot start: %s\n", suite.base,
                              info.text);
                return false;
            }
        }
    }
    if (!known) {
        (void)fprintf(stderr, "this build has no engine %s\n", suite.base);
    }
    return known;
}

/* Which way DRAM goes between two agents on this host. */
static int read_path(kvt_transport *a, kvt_transport *b, struct kvt_error *err)
{
    static unsigned char metadata[65536];
    struct kvt_peer_params params = {
        .size = sizeof params, .name = "b", .metadata = metadata};
    struct kvt_peer_info info;
    kvt_peer peer = 0;
    int code;

    code = kvt_metadata(b, metadata, sizeof metadata, &params.metadata_length,
                        err);
    if (code == KVT_OK) {
        code = kvt_peer_add(a, &params, &peer, err);
    }
    if (code != KVT_OK) {
        return code;
    }
    (void)kvt_peer_info(a, peer, &info);
    suite.local = strcmp(info.path, "local") == 0;
    suite.nixl = strcmp(info.path, "nixl") == 0;
    suite.tcp = suite.nixl && is_set("UCX_TLS", "tcp");
    suite.notify = kvt_notify(a, peer, NULL, 0, NULL) != KVT_EUNSUPPORTED;
    return KVT_OK;
}

static int read_engine(const char *engine)
{
    struct kvt_options options = {.size = sizeof options, .engine = engine};
    struct kvt_error err = {0};
    kvt_transport *a = NULL;
    kvt_transport *b = NULL;
    int code = kvt_open(&options, &a, &err);

    if (code == KVT_OK) {
        code = kvt_open(&options, &b, &err);
    }
    if (code == KVT_OK) {
        code = read_path(a, b, &err);
    }
    kvt_free(a);
    kvt_free(b);
    if (code != KVT_OK) {
        (void)fprintf(stderr, "%s: %s: %s\n", engine, kvt_errname(code),
                      err.text);
        return 1;
    }
    if (suite.local == suite.nixl ||
        (suite.local && suite.agent && is_set("KVT_SAME_HOST", "0"))) {
        (void)fprintf(stderr, "%s: DRAM goes the wrong way on this host\n",
                      engine);
        return 1;
    }
    return 0;
}

int suite_begin(const char *engine)
{
    const char *base = engine;

    suite.engine = engine;
    suite.slow = BUILT_WITH_ASAN || BUILT_WITH_TSAN || BUILT_FOR_VALGRIND;
    suite.tsan = BUILT_WITH_TSAN;
    if (strncmp(engine, "fault:", 6) == 0) {
        suite.fault = true;
        base += 6;
    }
    (void)snprintf(suite.base, sizeof suite.base, "%.*s",
                   (int)strcspn(base, "?"), base);
    return read_kinds() ? read_engine(engine) : 77;
}

int suite_end(int status, bool all)
{
    bool wrong = (suite.nixl && moved_bytes.local > 0) ||
                 (suite.local && moved_bytes.nixl > 0) ||
                 (all && status == 0 &&
                  moved_bytes.local + moved_bytes.nixl == 0);

    (void)printf("bytes moved by the agents that were closed: %llu local, "
                 "%llu nixl%s\n",
                 (unsigned long long)moved_bytes.local,
                 (unsigned long long)moved_bytes.nixl,
                 wrong ? ": FAILED, they went the wrong way" : "");
    return wrong ? 1 : status;
}

void need_fault(void)
{
    if (!suite.fault) {
        leave_case("on fault:%s", suite.base);
    }
}

void need_notify(void)
{
    if (!suite.notify) {
        skip_case("engine %s has no notifications", suite.engine);
    }
}

void need_local(const char *why)
{
    if (!suite.local) {
        skip_case("%s", why);
    }
}

void need_no_tcp(const char *why)
{
    if (suite.tcp) {
        skip_case("%s", why);
    }
}

uint64_t suite_seed(void)
{
    static uint64_t seed = 20250823;

    return seed++;
}

struct node_plan suite_plan(const struct pool_shape *shape)
{
    struct node_plan plan = {.engine = suite.engine, .seed = suite_seed()};

    if (shape != NULL) {
        plan.shape = *shape;
    }
    plan.options.flags = KVT_OPEN_ALLOW_PTRACE;
    return plan;
}

const char *suite_engine(const char *rules)
{
    static char spec[256];

    (void)snprintf(spec, sizeof spec, "fault:%s%s%s", suite.base,
                   rules[0] == '\0' ? "" : "?", rules);
    return spec;
}

void suite_pair(struct pair *pair, const struct pool_shape *shape)
{
    suite_pair_with_grace(pair, shape, 0);
}

void suite_pair_with_grace(struct pair *pair, const struct pool_shape *shape,
                           uint64_t grace_ns)
{
    struct node_plan a = suite_plan(shape);
    struct node_plan b = suite_plan(shape);

    a.options.grace_ns = grace_ns;
    pair_open(pair, &a, &b);
}

void suite_fault_pair(struct pair *pair, const struct pool_shape *shape,
                      const char *rules, uint64_t grace_ns)
{
    struct node_plan a = suite_plan(shape);
    struct node_plan b = suite_plan(shape);

    need_fault();
    a.engine = suite_engine(rules);
    a.options.grace_ns = grace_ns;
    pair_open(pair, &a, &b);
}

void suite_leak_pair(struct pair *pair)
{
    count_bytes(pair->a.t);
    kvt_free(pair->a.t);
    (void)kvt_close(pair->b.t, 100 * MS, NULL);
    count_bytes(pair->b.t);
    kvt_free(pair->b.t);
    *pair = (struct pair){0};
}

void set_rules(const struct pair *pair, const char *rules)
{
    assert_kvt_ok(kvt_fault(pair->a.t, rules, ERR));
}

void release_all(const struct pair *pair)
{
    set_rules(pair, "");
}

/* ------------------------------------------------------------ two processes */

void across_add(struct across *across, const char *name)
{
    struct kvt_run run = child_run(&across->child);
    size_t length;
    void *metadata = child_metadata(&across->child, &length);

    across->peer = node_add(&across->a, name, metadata, length);
    free(metadata);
    assert_kvt_ok(kvt_prepare(across->a.t, across->peer, "pool", &run, 1,
                              &across->remote, ERR));
}

void across_open(struct across *across, const struct pool_shape *shape)
{
    struct node_plan a = suite_plan(shape);
    struct node_plan b = suite_plan(shape);

    *across = (struct across){0};
    node_open(&across->a, &a);
    child_begin(&across->child, &b);
    across_add(across, "child");
}

void across_close(struct across *across)
{
    node_close(&across->a);
    child_end(&across->child);
}

kvt_xfer across_write(const struct across *across, uint32_t count,
                      const struct kvt_xfer_options *options)
{
    uint32_t *data = calloc(count, sizeof *data);
    struct kvt_indices indices = indices_u32(data, count);
    kvt_xfer id = 0;

    assert_non_null(data);
    for (uint32_t i = 0; i < count; i++) {
        data[i] = i;
    }
    assert_kvt_ok(kvt_write_blocks(across->a.t, across->peer, across->a.layout,
                                   &indices, across->remote, &indices, options,
                                   &id, ERR));
    free(data);
    return id;
}

void across_expect(struct across *across, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        pool_expect(&across->child.pool, i, &across->a.pool, i);
    }
}
