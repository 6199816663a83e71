/* SPDX-License-Identifier: Apache-2.0 */
#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef __has_feature
#define __has_feature(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define SUITE_TSAN true
#else
#define SUITE_TSAN false
#endif

#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define SUITE_SLOW true
#else
#define SUITE_SLOW SUITE_TSAN
#endif

struct suite suite;

static bool read_kinds(void)
{
    struct kvt_engine_info info;
    bool known = strcmp(suite.base, "auto") == 0;

    for (uint32_t i = 0; kvt_engine_info(i, &info) == KVT_OK; i++) {
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

int suite_begin(const char *engine)
{
    struct kvt_options options = {.size = sizeof options, .engine = engine};
    kvt_transport *t = NULL;
    struct kvt_error err;
    const char *base = engine;

    suite.engine = engine;
    suite.slow = SUITE_SLOW;
    suite.tsan = SUITE_TSAN;
    if (strncmp(engine, "fault:", 6) == 0) {
        suite.fault = true;
        base += 6;
    }
    (void)snprintf(suite.base, sizeof suite.base, "%.*s",
                   (int)strcspn(base, "?"), base);
    suite.local = strcmp(suite.base, "local") == 0;
    if (!read_kinds()) {
        return 77;
    }
    if (kvt_open(&options, &t, &err) != KVT_OK) {
        (void)fprintf(stderr, "kvt_open: %s: %s\n", kvt_errname(err.code),
                      err.text);
        return 1;
    }
    suite.notify = kvt_notify(t, 1, NULL, 0, NULL) != KVT_EUNSUPPORTED;
    kvt_free(t);
    return 0;
}

void need_fault(void)
{
    if (!suite.fault) {
        skip_case("needs the fault engine around %s", suite.base);
    }
}

void need_notify(void)
{
    if (!suite.notify) {
        skip_case("engine %s has no notifications", suite.engine);
    }
}

void need_local(void)
{
    if (!suite.local) {
        skip_case("engine %s does not watch the peer's process", suite.base);
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
    struct node_plan a = suite_plan(shape);
    struct node_plan b = suite_plan(shape);

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
    kvt_free(pair->a.t);
    (void)kvt_close(pair->b.t, 100 * MS, NULL);
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
