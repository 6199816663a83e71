/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening and freeing: options become a transport with every default filled
 * in, a started engine and a running control thread, or nothing at all.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "core.h"

/* What "auto" tries, in this order. */
static const char *const auto_engines[] = {"nixl", "local"};

/* ----------------------------------------------------------------- options */

static void default_u32(uint32_t *value, uint32_t otherwise)
{
    if (*value == 0) {
        *value = otherwise;
    }
}

static void default_u64(uint64_t *value, uint64_t otherwise)
{
    if (*value == 0) {
        *value = otherwise;
    }
}

static int check_limit(const char *name, uint32_t value, uint32_t most,
                       struct kvt_error *err)
{
    return value <= most
               ? KVT_OK
               : kvti_fail(err, KVT_EINVAL, "%s is %u, at most %u is possible",
                           name, value, most);
}

static int fill_options(const struct kvt_options *given,
                        struct kvt_options *ret, struct kvt_error *err)
{
    const uint32_t flags = KVT_OPEN_NO_SAME_HOST | KVT_OPEN_PROBE_METADATA |
                           KVT_OPEN_ALLOW_PTRACE | KVT_OPEN_NO_TELEMETRY;
    int code = KVT_OK;

    if (given != NULL && given->size != sizeof *given) {
        return kvti_fail(err, KVT_EINVAL,
                         "the options' size must be sizeof(struct "
                         "kvt_options)");
    }
    *ret = given != NULL ? *given : (struct kvt_options){.size = sizeof *ret};
    if ((ret->flags & ~flags) != 0) {
        return kvti_fail(err, KVT_EINVAL, "the options have unknown flags %#x",
                         ret->flags & ~flags);
    }
    default_u32(&ret->workers, 4);
    default_u32(&ret->inflight_max, 8192);
    default_u32(&ret->peers_max, 65536);
    default_u32(&ret->regions_max, 65536);
    default_u32(&ret->layouts_max, 262144);
    default_u32(&ret->notify_max, 16384);
    default_u32(&ret->notify_bytes_max, 65536);
    default_u64(&ret->runs_max, UINT64_C(1) << 24);
    default_u64(&ret->grace_ns, UINT64_C(30000000000));
    default_u64(&ret->call_timeout_ns, UINT64_C(60000000000));
    const struct {
        const char *name;
        uint32_t value;
        uint32_t most;
    } limits[] = {
        {"inflight_max", ret->inflight_max, 1u << KVTI_ID_INDEX_BITS},
        {"peers_max", ret->peers_max, 1u << KVTI_ID_INDEX_BITS},
        {"layouts_max", ret->layouts_max, 1u << KVTI_ID_INDEX_BITS},
        {"notify_bytes_max", ret->notify_bytes_max, 131072},
        {"workers", ret->workers, 1024},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0] && code == KVT_OK;
         i++) {
        code = check_limit(limits[i].name, limits[i].value, limits[i].most,
                           err);
    }
    return code;
}

static int name_agent(struct kvt_transport *t, struct kvt_error *err)
{
    const char *given = t->options.agent_name;

    if (getrandom(t->incarnation, sizeof t->incarnation, 0) !=
        (ssize_t)sizeof t->incarnation) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno, "getrandom failed");
    }
    if (given == NULL) {
        char *at = t->agent_name;

        at = stpcpy(at, "kvt-");
        for (size_t i = 0; i < sizeof t->incarnation; i++) {
            kvti_format(at, 3, "%02x", t->incarnation[i]);
            at += 2;
        }
        return KVT_OK;
    }
    if (given[0] == '\0' || strnlen(given, KVT_NAME_MAX + 1) > KVT_NAME_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "agent_name must be a string of 1 to %d bytes",
                         KVT_NAME_MAX);
    }
    memcpy(t->agent_name, given, strlen(given) + 1);
    return KVT_OK;
}

/* ------------------------------------------------------------------ engine */

static int open_engine(struct kvt_transport *t, const char *spec,
                       struct kvt_error *err)
{
    const char *rest;
    const struct kvti_engine_ops *ops = kvti_engine_find(spec, &rest, err);
    int code;

    if (ops == NULL) {
        return KVT_EUNSUPPORTED;
    }
    code = ops->open(&t->env, rest, &t->engine, &t->traits, err);
    if (code == KVT_OK) {
        t->ops = ops;
        kvti_format(t->engine_name, sizeof t->engine_name, "%s", ops->name);
    }
    return code;
}

/* Who names NIXL's library wants NIXL: another engine in its place would go
 * unnoticed, until it does not reach the next host. */
static bool is_nixl_named(const struct kvt_transport *t)
{
    const char *named = t->options.nixl_library;

    if (named == NULL || named[0] == '\0') {
        named = getenv("KVT_NIXL_LIBRARY"); /* NOLINT(concurrency-mt-unsafe) */
    }
    return named != NULL && named[0] != '\0';
}

/* The first engine that starts; else every reason in one sentence. An option
 * that is wrong is one with every engine. */
static int open_auto(struct kvt_transport *t, struct kvt_error *err)
{
    char tried[KVT_TEXT_MAX] = "";

    for (size_t i = 0; i < sizeof auto_engines / sizeof auto_engines[0]; i++) {
        struct kvt_error why;
        size_t length = strlen(tried);
        int code = open_engine(t, auto_engines[i], &why);

        if (code == KVT_OK) {
            return KVT_OK;
        }
        if (code == KVT_EINVAL || (i == 0 && is_nixl_named(t))) {
            return kvti_fail(err, code, "%s", why.text);
        }
        kvti_format(tried + length, sizeof tried - length, "%s%s: %.100s",
                    length > 0 ? "; " : "", auto_engines[i], why.text);
    }
    return kvti_fail(err, KVT_EUNSUPPORTED, "no engine could start (%s)",
                     tried);
}

static int start_engine(struct kvt_transport *t, struct kvt_error *err)
{
    const char *spec = t->options.engine;

    if (spec == NULL) {
        spec = getenv("KVT_ENGINE"); /* NOLINT(concurrency-mt-unsafe) */
    }
    if (spec == NULL || spec[0] == '\0' || strcmp(spec, "auto") == 0) {
        return open_auto(t, err);
    }
    return open_engine(t, spec, err);
}

/* -------------------------------------------------------------------- open */

/* A page that a child of fork() finds zeroed: how a call knows where it is. */
static int map_fork_page(struct kvt_transport *t, struct kvt_error *err)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *mark = mmap(NULL, page, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (mark == MAP_FAILED) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno, "mmap failed");
    }
    if (madvise(mark, page, MADV_WIPEONFORK) != 0) {
        int code = kvti_fail_errno(err, KVT_ESYSTEM, errno,
                                   "madvise(MADV_WIPEONFORK) failed");

        munmap(mark, page);
        return code;
    }
    *mark = 1;
    t->fork_page = mark;
    return KVT_OK;
}

void kvti_transport_destroy(struct kvt_transport *t)
{
    struct kvti_list *node;

    if (t == NULL) {
        return;
    }
    while ((node = kvti_list_take(&t->notes)) != NULL) {
        free(kvti_container(node, struct kvti_note, node));
    }
    kvti_regions_fini(&t->regions);
    kvti_idmap_fini(&t->peers);
    kvti_names_fini(&t->peer_names);
    kvti_names_fini(&t->agent_names);
    kvti_idmap_fini(&t->layouts);
    kvti_names_fini(&t->layout_names);
    free(t->slots);
    kvti_control_fini(t);
    free(t->spare_call);
    if (t->fork_page != NULL) {
        munmap((void *)(uintptr_t)t->fork_page, (size_t)sysconf(_SC_PAGESIZE));
    }
    free(t);
}

static int start(struct kvt_transport *t, const struct kvt_options *options,
                 struct kvt_error *err)
{
    int code = fill_options(options, &t->options, err);

    if (code == KVT_OK) {
        code = kvti_logger_init(&t->logger, t->options.log, t->options.log_ctx,
                                err);
        t->env.logger = t->logger;
    }
    if (code == KVT_OK) {
        code = name_agent(t, err);
    }
    if (code == KVT_OK) {
        code = map_fork_page(t, err);
    }
    if (code == KVT_OK) {
        t->spare_call = kvti_call_new(KVTI_CALL_CLOSE, NULL);
        t->slots = calloc(t->options.inflight_max, sizeof *t->slots);
        if (t->spare_call == NULL || t->slots == NULL) {
            code = kvti_fail(err, KVT_ENOMEM, "no memory for %u transfers",
                             t->options.inflight_max);
        }
    }
    return code;
}

int kvt_open(const struct kvt_options *options, kvt_transport **ret,
             struct kvt_error *err)
{
    struct kvt_transport *t;
    int code;

    if (ret == NULL) {
        return kvti_fail(err, KVT_EINVAL, "ret is NULL");
    }
    t = calloc(1, sizeof *t);
    if (t == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a transport");
    }
    t->wake_fd = t->user_fd = t->epoll_fd = -1;
    atomic_init(&t->caller_cpu, -1);
    kvti_list_init(&t->grave);
    code = kvti_control_init(t, err);
    if (code == KVT_OK) {
        code = start(t, options, err);
    }
    if (code == KVT_OK) {
        code = start_engine(t, err);
    }
    if (code == KVT_OK) {
        code = kvti_lead_start(t, err);
        if (code != KVT_OK) {
            t->ops->close(t->engine, kvti_now_ns() + UINT64_C(1000000000));
        }
    }
    if (code != KVT_OK) {
        kvti_transport_destroy(t);
        return code;
    }
    *ret = t;
    return KVT_OK;
}

/* -------------------------------------------------------------------- free */

static void drop_all_locked(struct kvt_transport *t)
{
    for (uint32_t i = 0; i < t->slots_used; i++) {
        struct kvti_xfer *xfer = &t->slots[i];

        if (xfer->result.id != 0) {
            kvti_list_remove(&xfer->fin_peer);
            kvti_list_remove(&xfer->fin_all);
            kvti_list_remove(&xfer->link_node);
            kvti_xfer_free_locked(t, xfer);
        }
    }
}

/*
 * A child cannot know in what state fork() found what other threads owned, so
 * it gives back the one large table, if mu was free, and leaves the rest.
 */
static void free_in_child(struct kvt_transport *t)
{
    if (pthread_mutex_trylock(&t->mu) == 0) {
        free(t->slots);
        t->slots = NULL;
        t->slots_used = 0;
    }
    if (t->ops->after_fork != NULL) {
        t->ops->after_fork(t->engine);
    }
}

void kvt_free(kvt_transport *t)
{
    if (t == NULL) {
        return;
    }
    if (*t->fork_page == 0) {
        free_in_child(t);
        return;
    }
    kvt_close(t, 0, NULL);
    kvti_lock(t);
    if (t->phase != KVTI_CLOSED || t->kept) {
        kvti_unlock(t);
        kvti_bury(&t->grave); /* a thread of ours is stuck, may come back */
        return;
    }
    drop_all_locked(t);
    kvti_unlock(t);
    kvti_transport_destroy(t);
}

const char *kvt_agent_name(const kvt_transport *t)
{
    return kvti_guard(t, NULL) == KVT_OK ? t->agent_name : NULL;
}

int kvt_engine_info(uint32_t index, struct kvt_engine_info *ret)
{
    const struct kvti_engine_ops *ops = kvti_engine_at(index);
    struct kvt_engine_info info = {0};

    if (ret == NULL) {
        return KVT_EINVAL;
    }
    if (ops == NULL) {
        return KVT_ENOENT;
    }
    info.code = ops->probe(&info);
    kvti_format(info.name, sizeof info.name, "%s", ops->name);
    *ret = info;
    return KVT_OK;
}

int kvt_fault(kvt_transport *t, const char *rules, struct kvt_error *err)
{
    struct kvti_call *call;
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (rules == NULL) {
        return kvti_fail(err, KVT_EINVAL, "rules is NULL: \"\" means none");
    }
    if (t->ops->rules == NULL) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "engine \"%s\" takes no fault rules: open the "
                         "transport as \"fault:%s\"",
                         t->engine_name, t->engine_name);
    }
    call = kvti_call_new(KVTI_CALL_RULES, NULL);
    if (call == NULL || (call->rules = strdup(rules)) == NULL) {
        free(call);
        return kvti_fail(err, KVT_ENOMEM, "no memory for the rules");
    }
    code = kvti_lock_open(t, err);
    if (code != KVT_OK) {
        free(call->rules);
        free(call);
        return code;
    }
    kvti_call_push_locked(t, call);
    code = kvti_call_wait_locked(t, call, kvti_deadline(t, 0), err);
    kvti_unlock(t);
    return code;
}
