/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine `nixl` against a core that only records (fake_env) and a stand-in
 * for NIXL (fake_nixl_capi.c) that writes down what it is asked and answers
 * wrongly on order.
 *
 * Proved: what NIXL is told, in which order, of which kinds, devices and
 * addresses; that each of its statuses becomes the outcome that nixl_xfer.c
 * promises, no done without a later request that was accepted, and no failure
 * final without a proof; that unfinished requests are never released; how
 * remotes are shared, replaced and kept; that a thread that hangs in NIXL
 * delays neither open nor close past its deadline.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/nixl.h"
#include "engines/nixl_blob.h"
#include "fake_env.h"
#include "fake_nixl.h"
#include "unit.h"

#define BYTES 65536u
#define SECOND_NS UINT64_C(1000000000)
#define TOP_BIT (UINT64_C(1) << 63)

static const char *library;
static fake_nixl_script_fn *script;
static fake_nixl_block_fn *block;
static fake_nixl_waiting_fn *waiting;
static fake_nixl_count_fn *count_lines;
static fake_nixl_line_fn *get_line;
static fake_nixl_reset_fn *reset;

/* An agent with one registered region, guarded on both sides. */
struct side {
    struct fake_env env;
    unsigned char *base;
    unsigned char *data;
    struct kvti_mem mem;
};

/* Another agent as this one imported it. */
struct peer {
    struct kvti_buf blob;
    struct kvti_md md;
    struct kvti_job load;
    void *conn;
};

static uint64_t number(const void *addr)
{
    return (uint64_t)(uintptr_t)addr;
}

static struct kvt_options options_of(void)
{
    return (struct kvt_options){.size = sizeof(struct kvt_options),
                                .workers = 3,
                                .regions_max = 4096,
                                .nixl_library = library};
}

static void add_mem(struct side *side, struct kvti_mem *mem)
{
    struct kvti_mem *mems[] = {mem};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);

    job.mems = mems;
    job.mem_count = 1;
    if (fake_env_job(&side->env, &job) != KVT_OK) {
        fail_msg("%s", job.err.text);
    }
}

static void fill(struct side *side, uint64_t seed)
{
    struct rng rng = {.state = seed};

    for (size_t i = 0; i < 3 * BYTES; i++) {
        side->base[i] = (unsigned char)rng_next(&rng);
    }
}

static void open_with(struct side *side, const char *name,
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

static void open_side(struct side *side, const char *name)
{
    struct kvt_options options = options_of();

    open_with(side, name, &options);
}

static int close_side(struct side *side)
{
    int code = fake_env_close(&side->env, 20 * SECOND_NS);

    free(side->base);
    return code;
}

/* What the core would make of this side: NIXL's bytes and a trailer. */
static void export_side(struct side *side, struct peer *peer)
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

static int load_again(struct side *side, struct peer *peer, void *link)
{
    int code;

    peer->load = fake_job(KVTI_JOB_LOAD);
    peer->load.md = &peer->md;
    peer->load.link = link;
    code = fake_env_job(&side->env, &peer->load);
    peer->conn = peer->load.conn;
    return code;
}

static void load_peer(struct side *side, struct side *other, struct peer *peer)
{
    export_side(other, peer);
    if (load_again(side, peer, peer) != KVT_OK) {
        fail_msg("%s", peer->load.err.text);
    }
}

static void free_peer(struct peer *peer)
{
    kvti_md_fini(&peer->md);
    kvti_buf_fini(&peer->blob);
}

static void unload_peer(struct side *side, struct peer *peer)
{
    struct kvti_job job = fake_job(KVTI_JOB_UNLOAD);

    job.conn = peer->conn;
    assert_int_equal(fake_env_job(&side->env, &job), KVT_OK);
}

/* Two agents, one of them imported by the other. */
struct pair {
    struct side a;
    struct side b;
    struct peer peer;
};

static void open_pair(struct pair *pair)
{
    reset();
    open_side(&pair->a, "alpha");
    open_side(&pair->b, "beta");
    load_peer(&pair->a, &pair->b, &pair->peer);
}

static void close_pair(struct pair *pair, int code)
{
    assert_int_equal(close_side(&pair->a), code);
    assert_int_equal(close_side(&pair->b), KVT_OK);
    free_peer(&pair->peer);
    assert_int_equal(count_lines("UNFINISHED"), 0);
}

/* `count` pieces of 64 bytes, in other places on either side. */
static struct kvti_chunk *pieces(const struct pair *pair, uint32_t op,
                                 uint32_t count)
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

static void assert_moved(const struct kvti_chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        assert_memory_equal((const void *)(uintptr_t)chunk->copies[i].local,
                            (const void *)(uintptr_t)chunk->copies[i].peer,
                            chunk->copies[i].length);
    }
}

static void post_and_wait(struct pair *pair, struct kvti_chunk *chunk)
{
    fake_env_post(&pair->a.env, chunk);
    fake_env_wait_chunk(&pair->a.env, chunk);
}

static void assert_outcome(const struct kvti_chunk *chunk, uint32_t state,
                           uint32_t fin, int code)
{
    const struct kvti_outcome *outcome = &chunk->outcome;

    if (outcome->state != state || outcome->fin != fin ||
        outcome->code != code) {
        fail_msg("state %u, fin %u, %s: %s", outcome->state, outcome->fin,
                 kvt_errname(outcome->code), outcome->text);
    }
}

static void assert_line(const char *prefix, int n, const char *words)
{
    char text[16384];

    if (!get_line(prefix, n, text, sizeof text)) {
        fail_msg("there is no line %d that begins with \"%s\"", n, prefix);
    }
    if (strstr(text, words) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", text, words);
    }
}

static void wait_for_lines(const char *prefix, int count)
{
    while (count_lines(prefix) < count) {
        sched_yield();
    }
}

static void no_op(struct fake_env *env, void *arg)
{
    (void)env;
    (void)arg;
}

/* What was reported is recorded: the control thread took a turn. */
static uint32_t recorded_state(struct pair *pair,
                               const struct kvti_chunk *chunk)
{
    uint32_t state;

    fake_env_call(&pair->a.env, no_op, NULL);
    pthread_mutex_lock(&pair->a.env.mu);
    state = chunk->outcome.state;
    pthread_mutex_unlock(&pair->a.env.mu);
    return state;
}

/* ------------------------------------------------------------ agent, memory */

static void the_agent_is_made_as_the_options_say(void **state)
{
    static const char *const backends[] = {"UCX", "GDS_MT"};
    static const struct kvt_param params[] = {{"UCX", "device_list", "mlx5_0"},
                                              {"GDS_MT", "thread_count", "7"}};
    struct kvt_options options = options_of();
    struct side side;

    (void)state;
    reset();
    open_side(&side, "alpha");
    assert_line("agent", 0,
                "agent alpha prog=1 listen=0 sync=1 delay=20000 telemetry=1");
    assert_line("backend", 0, "backend UCX num_threads=3");
    assert_int_equal(side.env.traits.window, 4);
    assert_int_equal(close_side(&side), KVT_OK);
    assert_int_equal(count_lines("destroy_agent alpha"), 1);

    reset();
    options.backends = backends;
    options.backend_count = 2;
    options.params = params;
    options.param_count = 2;
    options.flags = KVT_OPEN_NO_TELEMETRY;
    open_with(&side, "alpha", &options);
    assert_line("agent", 0, "telemetry=0");
    assert_line("backend", 0, "backend UCX device_list=mlx5_0 num_threads=3");
    assert_line("backend", 1, "backend GDS_MT thread_count=7");
    assert_int_equal(count_lines("backend"), 2);
    assert_int_equal(close_side(&side), KVT_OK);
}

static void a_backend_that_fails_or_hangs_is_named(void **state)
{
    struct kvt_options options = options_of();
    struct fake_env env;
    struct kvt_error err;

    (void)state;
    reset();
    script("backend", NIXL_BACKEND, 1);
    assert_int_equal(
        fake_env_try(&env, &kvti_engine_nixl, "alpha", &options, &err),
        KVT_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "UCX"));
    assert_int_equal(count_lines("destroy_agent alpha"), 1);

    options.call_timeout_ns = 1;
    block("backend", true);
    assert_int_equal(
        fake_env_try(&env, &kvti_engine_nixl, "alpha", &options, &err),
        KVT_ETIMEDOUT);
    wait_for_lines("agent", 2);
    block("backend", false);
    wait_for_lines("destroy_agent alpha", 2);
}

static void the_engine_s_own_settings_are_read(void **state)
{
    static const char *const bad[] = {
        "pthr_delay_us",   "pthr_delay_us=",     "pthr_delay_us=0",
        "confirm=2",       "pthr_delay_us=-1",   "pthr_delay_us=1000001",
        "something=1",     "confirm=1,confirm=", "=",
        "pthr_delay_us=9x"};
    struct kvt_options options = options_of();
    struct kvti_nixl_config config;
    struct kvt_error err;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(kvti_nixl_config_init(&config, &options, bad[i], &err),
                         KVT_EINVAL);
    }
    assert_int_equal(kvti_nixl_config_init(&config, &options,
                                           "confirm=0,pthr_delay_us=50", &err),
                     KVT_OK);
    assert_false(config.confirm);
    assert_int_equal(config.pthr_delay_us, 50);
    kvti_nixl_config_fini(&config);
}

static void touching_regions_are_one_registration_a_kind(void **state)
{
    struct kvti_mem mems[] = {
        {.addr = TOP_BIT + 4096, .length = 4096, .kind = 1, .device = 5},
        {.addr = TOP_BIT, .length = 4096, .kind = 1, .device = 5},
        {.addr = TOP_BIT + 8192, .length = 4096, .kind = 1, .device = 6},
        {.addr = 0x10000, .length = 4096},
        {.addr = 0x10800, .length = 4096},
        {.addr = 0x20000, .length = 4096}};
    struct kvti_mem *list[6];
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);
    struct side side;

    (void)state;
    reset();
    open_side(&side, "alpha");
    for (size_t i = 0; i < 6; i++) {
        list[i] = &mems[i];
    }
    job.mems = list;
    job.mem_count = 6;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    /* Lines 0 and 1 are the scratch page and the side's own region. */
    assert_line("register", 2, "register 0 10000+1800@0 20000+1000@0");
    assert_line("register", 3,
                "register 1 8000000000000000+2000@5 8000000000002000+1000@6");
    assert_int_equal(count_lines("register"), 4);

    job = fake_job(KVTI_JOB_MEM_DROP);
    job.mems = list;
    job.mem_count = 1;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_int_equal(count_lines("deregister"), 0);
    job = fake_job(KVTI_JOB_MEM_DROP);
    job.mems = list + 1;
    job.mem_count = 5;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_line("deregister 1", 0, "8000000000000000+2000@5");
    assert_line("deregister 0", 0, "10000+1800@0 20000+1000@0");
    assert_int_equal(close_side(&side), KVT_OK);
}

static void a_registration_that_fails_leaves_nothing(void **state)
{
    struct kvti_mem mems[] = {{.addr = 0x10000, .length = 4096},
                              {.addr = TOP_BIT, .length = 4096, .kind = 1}};
    struct kvti_mem *list[] = {&mems[0], &mems[1]};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);
    struct side side;

    (void)state;
    reset();
    open_side(&side, "alpha");
    job.mems = list;
    job.mem_count = 2;
    script("register", NIXL_OK, 1);
    script("register", NIXL_BACKEND, 1);
    assert_int_equal(fake_env_job(&side.env, &job), KVT_EENGINE);
    assert_non_null(strstr(job.err.text, "VRAM"));
    assert_line("deregister 0", 0, "10000+1000@0");
    job = fake_job(KVTI_JOB_MEM_ADD);
    job.mems = list;
    job.mem_count = 2;
    assert_int_equal(fake_env_job(&side.env, &job), KVT_OK);
    assert_int_equal(close_side(&side), KVT_OK);
}

/* ------------------------------------------------------------------- chunks */

static void bytes_move_both_ways(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    for (uint32_t op = KVT_OP_WRITE; op <= KVT_OP_READ; op++) {
        fill(&pair.a, 10 + op);
        fill(&pair.b, 20 + op);
        chunk = pieces(&pair, op, 17);
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        assert_moved(chunk);
        free(chunk);
    }
    assert_line("create op=1", 0, "create op=1 0>0 merge=0 n=17");
    assert_line("create op=0", 1, "create op=0 0>0 merge=0 n=17");
    close_pair(&pair, KVT_OK);
}

static void copies_are_cut_at_the_registrations_of_both_sides(void **state)
{
    struct pair pair;
    struct kvti_mem low;
    struct kvti_mem more;
    struct kvti_chunk *chunk;

    (void)state;
    reset();
    open_side(&pair.a, "alpha");
    open_side(&pair.b, "beta");
    /* Registered later, next to the first: NIXL knows two pieces. */
    low = (struct kvti_mem){.addr = number(pair.a.data) - 4096, .length = 4096};
    add_mem(&pair.a, &low);
    more = (struct kvti_mem){.addr = number(pair.b.data) + BYTES,
                             .length = 4096};
    add_mem(&pair.b, &more);
    load_peer(&pair.a, &pair.b, &pair.peer);
    chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 1);
    chunk->copies[0] = (struct kvti_copy){
        .local = low.addr + 4000, .peer = more.addr - 200, .length = 1000};
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    assert_line("create op=1", 0, "n=3");
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void a_chunk_of_many_descriptors_is_several_requests(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 700);
    for (uint32_t i = 0; i < 700; i++) {
        chunk->copies[i] = (struct kvti_copy){
            .local = number(pair.a.data) + 80 * (uint64_t)i,
            .peer = number(pair.b.data) + 90 * (uint64_t)i,
            .length = 60};
    }
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_IN_PROG, 3);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    assert_moved(chunk);
    assert_line("create op=1", 0, "n=512");
    assert_line("create op=1", 1, "n=188");
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void kinds_devices_and_high_addresses_reach_nixl(void **state)
{
    struct kvti_mem ours = {
        .addr = TOP_BIT + 65536, .length = 65536, .kind = 1, .device = 3};
    struct kvti_mem theirs = {
        .addr = TOP_BIT + 0x70000000, .length = 65536, .kind = 1, .device = 7};
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    reset();
    open_side(&pair.a, "alpha");
    open_side(&pair.b, "beta");
    add_mem(&pair.a, &ours);
    add_mem(&pair.b, &theirs);
    load_peer(&pair.a, &pair.b, &pair.peer);
    for (uint32_t mix = 0; mix < 4; mix++) {
        char words[32];

        chunk = fake_chunk(pair.peer.conn, KVT_OP_WRITE, 1);
        chunk->local_kind = mix & 1;
        chunk->peer_kind = mix >> 1;
        chunk->local_device = chunk->local_kind * 3;
        chunk->peer_device = chunk->peer_kind * 7;
        chunk->copies[0] = (struct kvti_copy){
            .local = chunk->local_kind != 0 ? ours.addr : number(pair.a.data),
            .peer = chunk->peer_kind != 0 ? theirs.addr : number(pair.b.data),
            .length = 4096};
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        kvti_format(words, sizeof words, "%u>%u merge=0 n=1 ", mix & 1,
                    mix >> 1);
        assert_line("create op=1", (int)mix, words);
        free(chunk);
    }
    assert_line("create op=1", 1, "8000000000010000+1000@3");
    assert_line("remote of", 2, "8000000070000000+1000@7");
    assert_int_equal(count_lines("create"), 4);
    close_pair(&pair, KVT_OK);
}

/* ------------------------------------------------------------- done, or not */

static void done_waits_for_a_later_request(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    script("post", NIXL_OK, 1);
    script("post", NIXL_IN_PROG, 1);
    block("status", true);
    fake_env_post(&pair.a.env, chunk);
    while (waiting("status") == 0) {
        sched_yield();
    }
    /* All bytes have landed, and NIXL says so; the probe is under way. */
    assert_moved(chunk);
    assert_true(kvti_list_empty(&chunk->event_node));
    assert_line("create", 1, "create op=0 0>0 merge=0 n=1");
    block("status", false);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void the_next_chunk_confirms_as_well_as_a_probe(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunks[3];

    (void)state;
    open_pair(&pair);
    block("post", true);
    for (size_t i = 0; i < 3; i++) {
        chunks[i] = pieces(&pair, KVT_OP_WRITE, 4);
        fake_env_post(&pair.a.env, chunks[i]);
    }
    block("post", false);
    for (size_t i = 0; i < 3; i++) {
        fake_env_wait_chunk(&pair.a.env, chunks[i]);
        assert_outcome(chunks[i], KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
        free(chunks[i]);
    }
    assert_true(count_lines("create op=0") <= 2);
    close_pair(&pair, KVT_OK);
}

static void one_descriptor_needs_no_confirmation(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 1);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
    assert_int_equal(count_lines("create"), 1);
}

static void a_false_done_is_found_out(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 16);
    script("post", NIXL_OK, 1);
    script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(recorded_state(&pair, chunk), KVT_DISCONNECTED);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_NONE, KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
}

static void a_refused_post_is_final_where_nixl_never_began(void **state)
{
    static const int statuses[] = {NIXL_INVALID_PARAM, NIXL_NOT_FOUND};
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    for (size_t i = 0; i < 2; i++) {
        chunk = pieces(&pair, KVT_OP_WRITE, 3);
        script("post", statuses[i], 1);
        post_and_wait(&pair, chunk);
        assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
        assert_int_equal(chunk->outcome.engine_code, statuses[i]);
        free(chunk);
    }
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    script("create", NIXL_BACKEND, 1);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_BOTH, KVT_EREJECTED);
    free(chunk);
    /* None of it was the link's fault. */
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void a_post_that_broke_is_not_final_and_breaks_the_link(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;
    struct kvti_chunk *later;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(recorded_state(&pair, chunk), KVT_REJECTED);
    assert_outcome(chunk, KVT_REJECTED, KVTI_FIN_NONE, KVT_EREJECTED);
    later = pieces(&pair, KVT_OP_WRITE, 3);
    post_and_wait(&pair, later);
    assert_outcome(later, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    assert_int_equal(count_lines("create"), 1);
    close_pair(&pair, KVT_EBUSY);
    free(chunk);
    free(later);
}

static void statuses_that_are_not_done_are_never_final(void **state)
{
    struct pair pair;
    struct kvti_chunk *broken;
    struct kvti_chunk *strange;

    (void)state;
    open_pair(&pair);
    strange = pieces(&pair, KVT_OP_WRITE, 3);
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_IN_PROG, 5);
    script("status", NIXL_NOT_FOUND, 1);
    fake_env_post(&pair.a.env, strange);
    while (recorded_state(&pair, strange) == KVT_DONE) {
        sched_yield();
    }
    assert_outcome(strange, KVT_UNREADABLE, KVTI_FIN_NONE, KVT_EENGINE);
    broken = pieces(&pair, KVT_OP_READ, 3);
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, broken);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(recorded_state(&pair, broken), KVT_DISCONNECTED);
    assert_outcome(broken, KVT_DISCONNECTED, KVTI_FIN_NONE, KVT_EDISCONNECTED);
    close_pair(&pair, KVT_EBUSY);
    assert_int_equal(count_lines("release"), 0);
    free(strange);
    free(broken);
}

/* -------------------------------------------------------------------- peers */

static void a_broken_link_is_invalidated_before_it_is_loaded_again(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 1);
    script("post", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(count_lines("invalidate beta"), 1);
    assert_int_equal(load_again(&pair.a, &pair.peer, &pair.peer), KVT_OK);
    free(chunk);
    chunk = pieces(&pair, KVT_OP_WRITE, 5);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    assert_int_equal(close_side(&pair.a), KVT_EBUSY);
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free_peer(&pair.peer);
}

static void another_incarnation_ends_the_old_connections(void **state)
{
    struct pair pair;
    struct peer newer;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    pair.b.env.incarnation[0] ^= 1;
    load_peer(&pair.a, &pair.b, &newer);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(count_lines("invalidate beta"), 1);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DISCONNECTED, KVTI_FIN_BOTH, KVT_EDISCONNECTED);
    chunk->conn = newer.conn;
    chunk->outcome = (struct kvti_outcome){.state = KVT_DONE};
    post_and_wait(&pair, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    free(chunk);
    /* The old one's unload must not take the new one away. */
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(count_lines("invalidate beta"), 1);
    unload_peer(&pair.a, &newer);
    assert_int_equal(count_lines("invalidate beta"), 2);
    free_peer(&newer);
    close_pair(&pair, KVT_OK);
}

static void one_incarnation_is_shared_and_counted(void **state)
{
    struct pair pair;
    struct peer second;

    (void)state;
    open_pair(&pair);
    load_peer(&pair.a, &pair.b, &second);
    assert_int_equal(count_lines("invalidate"), 0);
    unload_peer(&pair.a, &pair.peer);
    assert_int_equal(count_lines("invalidate"), 0);
    unload_peer(&pair.a, &second);
    assert_int_equal(count_lines("invalidate beta"), 1);
    free_peer(&second);
    close_pair(&pair, KVT_OK);
}

static void a_late_success_of_an_unloaded_peer_is_still_a_proof(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 6);
    script("post", NIXL_IN_PROG, 1);
    block("status", true);
    fake_env_post(&pair.a.env, chunk);
    wait_for_lines("post", 1);
    script("status", NIXL_IN_PROG, 40);
    block("status", false);
    unload_peer(&pair.a, &pair.peer); /* the core gave the chunk up as lost */
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_outcome(chunk, KVT_DONE, KVTI_FIN_BOTH, KVT_OK);
    wait_for_lines("invalidate beta", 1);
    free(chunk);
    close_pair(&pair, KVT_OK);
}

static void metadata_that_nixl_cannot_use_is_refused(void **state)
{
    struct pair pair;
    struct peer bad;
    struct kvti_md md;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &bad);
    md = bad.md;
    bad.md.prefix_length = 0;
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EUNSUPPORTED);
    bad.md = md;
    bad.md.prefix_length--;
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EMETADATA);
    bad.md = md;
    kvti_format(bad.md.agent_name, sizeof bad.md.agent_name, "gamma");
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EMETADATA);
    assert_int_equal(count_lines("load"), 1);
    bad.md = md;
    bad.md.incarnation[0] ^= 1;
    script("load", NIXL_BACKEND, 1);
    assert_int_equal(load_again(&pair.a, &bad, &bad), KVT_EENGINE);
    bad.md = md;
    free_peer(&bad);
    close_pair(&pair, KVT_OK);
}

/* A child that waits to be killed. */
static pid_t start_child(void)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        for (;;) {
            pause();
        }
    }
    return pid;
}

static void the_death_of_a_peer_on_this_host_is_a_proof(void **state)
{
    struct pair pair;
    struct peer child;
    struct kvti_chunk *chunk;
    pid_t pid;
    uint64_t start_time = 0;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &child);
    pid = start_child();
    assert_int_equal(kvti_ident_start_time(pid, &start_time), 0);
    child.md.local.pid = pid;
    child.md.local.start_time = start_time;
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_OK);
    chunk = pieces(&pair, KVT_OP_WRITE, 2);
    chunk->conn = child.conn;
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_BACKEND, 1);
    fake_env_post(&pair.a.env, chunk);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DOWN);
    assert_int_equal(recorded_state(&pair, chunk), KVT_DISCONNECTED);
    assert_int_equal(chunk->outcome.fin, KVTI_FIN_NONE);
    /* Lost and unloaded; its end still counts. */
    unload_peer(&pair.a, &child);
    assert_int_equal(kill(pid, SIGKILL), 0);
    fake_env_wait_chunk(&pair.a.env, chunk);
    assert_int_equal(chunk->outcome.fin, KVTI_FIN_BOTH);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_EDISCONNECTED);
    free(chunk);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
}

static void a_peer_that_dies_idle_is_reported(void **state)
{
    struct pair pair;
    struct peer child;
    pid_t pid;
    uint64_t start_time = 0;

    (void)state;
    open_pair(&pair);
    export_side(&pair.b, &child);
    pid = start_child();
    assert_int_equal(kvti_ident_start_time(pid, &start_time), 0);
    child.md.local.pid = pid;
    child.md.local.start_time = start_time;
    assert_int_equal(load_again(&pair.a, &child, &child), KVT_OK);
    assert_int_equal(kill(pid, SIGKILL), 0);
    fake_env_wait_event(&pair.a.env, &child, KVTI_CONN_DEAD);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    unload_peer(&pair.a, &child);
    free_peer(&child);
    close_pair(&pair, KVT_OK);
}

/* ------------------------------------------------------ connect, notify, end */

static void a_warm_up_reads_one_byte(void **state)
{
    struct pair pair;
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    job.conn = pair.peer.conn;
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_IN_PROG, 3);
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_OK);
    assert_line("create", 0, "create op=0 0>0 merge=0 n=1");
    close_pair(&pair, KVT_OK);
}

static void a_warm_up_ends_by_its_deadline_or_with_its_peer(void **state)
{
    struct pair pair;
    struct kvti_job late = fake_job(KVTI_JOB_CONNECT);
    struct kvti_job open = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    script("post", NIXL_IN_PROG, 2);
    script("status", NIXL_IN_PROG, 1000000000);
    late.conn = pair.peer.conn;
    late.deadline_ns = 1;
    assert_int_equal(fake_env_job(&pair.a.env, &late), KVT_ETIMEDOUT);
    open.conn = pair.peer.conn;
    fake_env_submit(&pair.a.env, &open);
    unload_peer(&pair.a, &pair.peer);
    assert_true(fake_env_is_reported(&pair.a.env, &open));
    assert_int_equal(fake_env_wait_job(&pair.a.env, &open), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static void a_warm_up_that_fails_breaks_the_link(void **state)
{
    struct pair pair;
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);

    (void)state;
    open_pair(&pair);
    job.conn = pair.peer.conn;
    script("post", NIXL_BACKEND, 1);
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_EDISCONNECTED);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    job = fake_job(KVTI_JOB_CONNECT);
    job.conn = pair.peer.conn;
    assert_int_equal(fake_env_job(&pair.a.env, &job), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static int notify(struct pair *pair, const char *text)
{
    struct kvti_job job = fake_job(KVTI_JOB_NOTIFY);
    int code;

    job.conn = pair->peer.conn;
    assert_int_equal(kvti_buf_append(&job.buf, text, strlen(text)), KVT_OK);
    code = fake_env_job(&pair->a.env, &job);
    kvti_buf_fini(&job.buf);
    return code;
}

static void notifications_keep_their_order_and_none_is_lost(void **state)
{
    static const char *const words[] = {"one", "", "three", "four", "five"};
    struct pair pair;

    (void)state;
    open_pair(&pair);
    fake_env_want_notes(&pair.b.env, 2);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(notify(&pair, words[i]), KVT_OK);
    }
    fake_env_wait_notes(&pair.b.env, 2);
    fake_env_want_notes(&pair.b.env, 3);
    fake_env_wait_notes(&pair.b.env, 3);
    fake_env_want_notes(&pair.b.env, 100);
    fake_env_wait_notes(&pair.b.env, 5);
    for (size_t i = 0; i < 5; i++) {
        struct fake_note *note = fake_env_take_note(&pair.b.env);

        assert_string_equal(note->agent_name, "alpha");
        assert_int_equal(note->length, strlen(words[i]));
        assert_memory_equal(note->bytes, words[i], note->length);
        free(note);
    }
    close_pair(&pair, KVT_OK);
}

static void a_notification_that_fails_says_so(void **state)
{
    struct pair pair;

    (void)state;
    open_pair(&pair);
    script("notif", NIXL_INVALID_PARAM, 1);
    assert_int_equal(notify(&pair, "x"), KVT_EENGINE);
    assert_int_equal(notify(&pair, "x"), KVT_OK);
    script("notif", NIXL_BACKEND, 1);
    assert_int_equal(notify(&pair, "x"), KVT_EDISCONNECTED);
    fake_env_wait_event(&pair.a.env, &pair.peer, KVTI_CONN_DOWN);
    assert_int_equal(notify(&pair, "x"), KVT_EDISCONNECTED);
    close_pair(&pair, KVT_OK);
}

static void close_destroys_the_agent_and_releases_nothing(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    script("post", NIXL_IN_PROG, 1);
    script("status", NIXL_IN_PROG, 1000000000);
    fake_env_post(&pair.a.env, chunk);
    wait_for_lines("post", 1);
    close_pair(&pair, KVT_EBUSY);
    assert_int_equal(count_lines("release"), 0);
    assert_int_equal(count_lines("destroy_agent alpha"), 1);
    free(chunk);
}

static void close_returns_while_a_call_hangs(void **state)
{
    static struct kvti_chunk *chunk; /* the hung thread may keep it */
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    script("post", NIXL_IN_PROG, 1);
    block("status", true);
    fake_env_post(&pair.a.env, chunk);
    while (waiting("status") == 0) {
        sched_yield();
    }
    assert_int_equal(fake_env_close(&pair.a.env, 1), KVT_EBUSY);
    block("status", false);
    /* It comes back, reports nothing, and takes the agent down. */
    wait_for_lines("destroy_agent alpha", 1);
    free(pair.a.base);
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free_peer(&pair.peer);
}

static void plain_nixl_metadata_is_read_by_its_structure(void **state)
{
    struct pair pair;
    struct kvti_md md;
    struct kvt_error err;
    uint8_t *bytes;
    size_t length;

    (void)state;
    open_pair(&pair);
    length = pair.peer.md.prefix_length;
    bytes = malloc(length + 1);
    assert_non_null(bytes);
    memcpy(bytes, pair.peer.md.prefix, length);
    bytes[length] = 0;
    assert_int_equal(kvti_md_decode(bytes, length, 16, &md, &err), KVT_OK);
    assert_false(md.has_trailer);
    assert_false(md.has_local);
    assert_string_equal(md.agent_name, "beta");
    assert_string_equal(md.engine, "nixl");
    assert_true(kvti_regions_cover(&md.regions, number(pair.b.data), BYTES,
                                   KVT_DRAM, 0));
    kvti_md_fini(&md);
    for (size_t i = 0; i < length; i++) {
        assert_int_equal(kvti_md_decode(bytes, i, 16, &md, &err),
                         KVT_EMETADATA);
    }
    assert_int_equal(kvti_md_decode(bytes, length + 1, 16, &md, &err),
                     KVT_EMETADATA);
    assert_int_equal(kvti_md_decode(bytes, length, 1, &md, &err),
                     KVT_EMETADATA);
    free(bytes);
    close_pair(&pair, KVT_OK);
}

static int find_fake(void)
{
    void *handle;

    library = getenv("KVT_TEST_FAKE_NIXL");
    handle = library != NULL ? dlopen(library, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (handle == NULL) {
        (void)fprintf(stderr, "KVT_TEST_FAKE_NIXL names the stand-in\n");
        return 1;
    }
    *(void **)(void *)&script = dlsym(handle, "fake_nixl_script");
    *(void **)(void *)&block = dlsym(handle, "fake_nixl_block");
    *(void **)(void *)&waiting = dlsym(handle, "fake_nixl_waiting");
    *(void **)(void *)&count_lines = dlsym(handle, "fake_nixl_count");
    *(void **)(void *)&get_line = dlsym(handle, "fake_nixl_line");
    *(void **)(void *)&reset = dlsym(handle, "fake_nixl_reset");
    return 0;
}

int main(void)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(the_agent_is_made_as_the_options_say),
        cmocka_unit_test(a_backend_that_fails_or_hangs_is_named),
        cmocka_unit_test(the_engine_s_own_settings_are_read),
        cmocka_unit_test(touching_regions_are_one_registration_a_kind),
        cmocka_unit_test(a_registration_that_fails_leaves_nothing),
        cmocka_unit_test(bytes_move_both_ways),
        cmocka_unit_test(copies_are_cut_at_the_registrations_of_both_sides),
        cmocka_unit_test(a_chunk_of_many_descriptors_is_several_requests),
        cmocka_unit_test(kinds_devices_and_high_addresses_reach_nixl),
        cmocka_unit_test(done_waits_for_a_later_request),
        cmocka_unit_test(the_next_chunk_confirms_as_well_as_a_probe),
        cmocka_unit_test(one_descriptor_needs_no_confirmation),
        cmocka_unit_test(a_false_done_is_found_out),
        cmocka_unit_test(a_refused_post_is_final_where_nixl_never_began),
        cmocka_unit_test(a_post_that_broke_is_not_final_and_breaks_the_link),
        cmocka_unit_test(statuses_that_are_not_done_are_never_final),
        cmocka_unit_test(
            a_broken_link_is_invalidated_before_it_is_loaded_again),
        cmocka_unit_test(another_incarnation_ends_the_old_connections),
        cmocka_unit_test(one_incarnation_is_shared_and_counted),
        cmocka_unit_test(a_late_success_of_an_unloaded_peer_is_still_a_proof),
        cmocka_unit_test(metadata_that_nixl_cannot_use_is_refused),
        cmocka_unit_test(the_death_of_a_peer_on_this_host_is_a_proof),
        cmocka_unit_test(a_peer_that_dies_idle_is_reported),
        cmocka_unit_test(a_warm_up_reads_one_byte),
        cmocka_unit_test(a_warm_up_ends_by_its_deadline_or_with_its_peer),
        cmocka_unit_test(a_warm_up_that_fails_breaks_the_link),
        cmocka_unit_test(notifications_keep_their_order_and_none_is_lost),
        cmocka_unit_test(a_notification_that_fails_says_so),
        cmocka_unit_test(close_destroys_the_agent_and_releases_nothing),
        cmocka_unit_test(close_returns_while_a_call_hangs),
        cmocka_unit_test(plain_nixl_metadata_is_read_by_its_structure),
    };

    if (find_fake() != 0) {
        return 1;
    }
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
