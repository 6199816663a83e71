/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "nixl_pair.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit.h"

struct stand_in fake;

static bool find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

int find_stand_in(void)
{
    void *handle;

    fake.library = getenv("KVT_TEST_FAKE_NIXL");
    handle = fake.library != NULL ? dlopen(fake.library, RTLD_NOW | RTLD_LOCAL)
                                  : NULL;
    if (handle == NULL || !find(handle, "fake_nixl_script", &fake.script) ||
        !find(handle, "fake_nixl_block", &fake.block) ||
        !find(handle, "fake_nixl_waiting", &fake.waiting) ||
        !find(handle, "fake_nixl_count", &fake.count_lines) ||
        !find(handle, "fake_nixl_line", &fake.get_line) ||
        !find(handle, "fake_nixl_reset", &fake.reset) ||
        !find(handle, "fake_nixl_process", &fake.process)) {
        (void)fprintf(stderr, "KVT_TEST_FAKE_NIXL names the stand-in\n");
        return 1;
    }
    return 0;
}

uint64_t number(const void *addr)
{
    return (uint64_t)(uintptr_t)addr;
}

struct kvt_options options_of(void)
{
    return (struct kvt_options){.size = sizeof(struct kvt_options),
                                .workers = 3,
                                .regions_max = 4096,
                                .nixl_library = fake.library};
}

void add_mem(struct side *side, struct kvti_mem *mem)
{
    struct kvti_mem *mems[] = {mem};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);

    job.mems = mems;
    job.mem_count = 1;
    if (fake_env_job(&side->env, &job) != KVT_OK) {
        fail_msg("%s", job.err.text);
    }
}

void fill(struct side *side, uint64_t seed)
{
    struct rng rng = {.state = seed};

    for (size_t i = 0; i < 3 * BYTES; i++) {
        side->base[i] = (unsigned char)rng_next(&rng);
    }
}

void open_with(struct side *side, const char *name,
               const struct kvt_options *options)
{
    *side = (struct side){.base = NULL};
    fake_env_open(&side->env, &kvti_engine_nixl, name, options);
    side->base = malloc(3 * BYTES);
    assert_non_null(side->base);
    side->data = side->base + BYTES;
    fill(side, (unsigned char)name[0]);
    side->mem = (struct kvti_mem){
        .addr = number(side->data), .length = BYTES, .fd = -1};
    add_mem(side, &side->mem);
}

void open_side(struct side *side, const char *name)
{
    struct kvt_options options = options_of();

    open_with(side, name, &options);
}

int close_side(struct side *side)
{
    int code = fake_env_close(&side->env, 20 * SECOND_NS);

    free(side->base);
    return code;
}

/* What the core would make of this side: NIXL's bytes and a trailer. */
void export_side(struct side *side, struct peer *peer)
{
    struct kvti_job job = fake_job(KVTI_JOB_EXPORT);
    struct kvti_md md = {.has_local = false};
    struct kvt_error err;

    assert_int_equal(fake_env_job(&side->env, &job), KVT_OK);
    kvti_format(md.agent_name, sizeof md.agent_name, "%s",
                side->env.agent_name);
    kvti_format(md.engine, sizeof md.engine, "nixl");
    memcpy(md.incarnation, side->env.incarnation, sizeof md.incarnation);
    md.has_local = job.has_local;
    md.local = job.local;
    add_region(&md.regions, side->mem.addr, side->mem.length, KVT_DRAM, 0);
    assert_int_equal(kvti_md_encode(&md, &job.buf), KVT_OK);
    kvti_md_fini(&md);
    peer->blob = job.buf;
    if (kvti_md_decode(peer->blob.data, peer->blob.length, 4096, &peer->md,
                       &err) != KVT_OK) {
        fail_msg("%s", err.text);
    }
}

int load_again(struct side *side, struct peer *peer, void *link)
{
    int code;

    peer->load = fake_job(KVTI_JOB_LOAD);
    peer->load.md = &peer->md;
    peer->load.link = link;
    code = fake_env_job(&side->env, &peer->load);
    peer->conn = peer->load.conn;
    return code;
}

void load_peer(struct side *side, struct side *other, struct peer *peer)
{
    export_side(other, peer);
    if (load_again(side, peer, peer) != KVT_OK) {
        fail_msg("%s", peer->load.err.text);
    }
}

pid_t start_process(struct peer *peer)
{
    struct kvti_local_id *local = &peer->md.local;
    struct kvti_nonce_page *page = (struct kvti_nonce_page *)(uintptr_t)
                                       local->nonce_addr;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        /* The page was wiped by the fork. */
        memcpy(page->nonce, local->nonce, sizeof page->nonce);
        for (;;) {
            (void)raise(SIGSTOP);
        }
    }
    assert_int_equal(waitpid(pid, NULL, WUNTRACED), pid);
    local->pid = pid;
    fake.process(peer->md.agent_name, pid);
    assert_int_equal(kvti_ident_start_time(pid, &local->start_time), 0);
    return pid;
}

pid_t start_child(struct pair *pair, struct peer *child)
{
    pid_t pid;

    export_side(&pair->b, child);
    pid = start_process(child);
    child->md.incarnation[0] ^= 1;
    assert_int_equal(load_again(&pair->a, child, child), KVT_OK);
    return pid;
}

void kill_child(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

void free_peer(struct peer *peer)
{
    kvti_md_fini(&peer->md);
    kvti_buf_fini(&peer->blob);
}

void unload_peer(struct side *side, struct peer *peer)
{
    struct kvti_job job = fake_job(KVTI_JOB_UNLOAD);

    job.conn = peer->conn;
    assert_int_equal(fake_env_job(&side->env, &job), KVT_OK);
}

void open_pair(struct pair *pair)
{
    fake.reset();
    open_side(&pair->a, "alpha");
    open_side(&pair->b, "beta");
    load_peer(&pair->a, &pair->b, &pair->peer);
}

void close_pair(struct pair *pair, int code)
{
    assert_int_equal(close_side(&pair->a), code);
    assert_int_equal(close_side(&pair->b), KVT_OK);
    free_peer(&pair->peer);
    assert_int_equal(fake.count_lines("UNFINISHED"), 0);
    assert_int_equal(fake.count_lines("UNRELEASED"), 0);
}

/* `count` pieces of 64 bytes, in other places on either side. */
struct kvti_chunk *pieces(const struct pair *pair, uint32_t op, uint32_t count)
{
    struct kvti_chunk *chunk = fake_chunk(pair->peer.conn, op, count);

    for (uint32_t i = 0; i < count; i++) {
        chunk->copies[i] = (struct kvti_copy){
            .local = number(pair->a.data) + 128 * (uint64_t)i,
            .peer = number(pair->b.data) + 192 * (uint64_t)(count - 1 - i),
            .length = 64};
        chunk->bytes += 64;
    }
    return chunk;
}

void assert_moved(const struct kvti_chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        assert_memory_equal((const void *)(uintptr_t)chunk->copies[i].local,
                            (const void *)(uintptr_t)chunk->copies[i].peer,
                            chunk->copies[i].length);
    }
}

void post_and_wait(struct pair *pair, struct kvti_chunk *chunk)
{
    fake_env_post(&pair->a.env, chunk);
    fake_env_wait_chunk(&pair->a.env, chunk);
}

void post_and_hold(struct pair *pair, struct kvti_chunk *chunk)
{
    fake.block("status", true);
    fake_env_post(&pair->a.env, chunk);
    while (fake.waiting("status") == 0) {
        sched_yield();
    }
}

void assert_outcome(const struct kvti_chunk *chunk, uint32_t state,
                    uint32_t fin, int code)
{
    const struct kvti_outcome *outcome = &chunk->outcome;

    if (outcome->state != state || outcome->fin != fin ||
        outcome->code != code) {
        fail_msg("state %u, fin %u, %s: %s", outcome->state, outcome->fin,
                 kvt_errname(outcome->code), outcome->text);
    }
}

void assert_line(const char *prefix, int n, const char *words)
{
    char text[16384];

    if (!fake.get_line(prefix, n, text, sizeof text)) {
        fail_msg("there is no line %d that begins with \"%s\"", n, prefix);
    }
    if (strstr(text, words) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", text, words);
    }
}

void wait_for_lines(const char *prefix, int count)
{
    while (fake.count_lines(prefix) < count) {
        sched_yield();
    }
}

static void no_op(struct fake_env *env, void *arg)
{
    (void)env;
    (void)arg;
}

/* What was reported is recorded: the control thread took a turn. */
struct kvti_outcome recorded(struct pair *pair, const struct kvti_chunk *chunk)
{
    struct kvti_outcome outcome;

    fake_env_call(&pair->a.env, no_op, NULL);
    pthread_mutex_lock(&pair->a.env.mu);
    outcome = chunk->outcome;
    pthread_mutex_unlock(&pair->a.env.mu);
    return outcome;
}

void assert_parked(struct pair *pair, const struct kvti_chunk *chunk,
                   uint32_t state, int code)
{
    struct kvti_outcome outcome = recorded(pair, chunk);

    assert_int_equal(outcome.state, state);
    assert_int_equal(outcome.fin, KVTI_FIN_NONE);
    assert_int_equal(outcome.code, code);
}

void wait_until_parked(struct pair *pair, const struct kvti_chunk *chunk,
                       uint32_t state, int code)
{
    while (recorded(pair, chunk).state == KVT_DONE) {
        sched_yield();
    }
    assert_parked(pair, chunk, state, code);
}

void keep_line(void *ctx, int level, const char *text)
{
    struct lines *lines = ctx;
    size_t used = strlen(lines->text);

    (void)level;
    kvti_format(lines->text + used, sizeof lines->text - used, "%s\n", text);
}

void assert_refused(const struct kvt_options *options, int code,
                    const char *words)
{
    struct fake_env env;
    struct kvt_error err = {.code = KVT_OK};
    int got = fake_env_try(&env, &kvti_engine_nixl, "alpha", options, &err);

    if (got != code || strstr(err.text, words) == NULL) {
        fail_msg("%s: \"%s\" does not say \"%s\"", kvt_errname(got), err.text,
                 words);
    }
}
