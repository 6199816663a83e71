/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What many of a thing cost: a layout of 200 million blocks, a thousand peers
 * that each have one, ten thousand peers that come and go, a thousand
 * transports opened and closed. Times, and what is left at the end: threads,
 * descriptors, mappings, bytes of heap.
 *
 * The 51 GB behind the layout are address space that nothing touches.
 */
#include <dirent.h>
#include <jansson.h>
#include <kvt/kvt.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bench.h"
#include "cli.h"

#define RUNS 160u
#define RUN_BLOCKS UINT64_C(1250000)
#define BLOCK_BYTES UINT64_C(256)
#define PEERS 1000u
#define CHURN 10000u
#define TRANSPORTS 1000u
#define METADATA_MAX 65536u

struct counts {
    uint64_t heap_bytes;
    uint64_t threads;
    uint64_t descriptors;
    uint64_t mappings;
};

struct scale {
    kvt_transport *source;
    kvt_transport *target;
    struct kvt_region regions[RUNS];
    struct kvt_run runs[RUNS];
    unsigned char metadata[METADATA_MAX];
    size_t metadata_length;
    kvt_peer peers[PEERS];
    json_t *figures;
    bool json;
};

static uint64_t count_entries(const char *path)
{
    DIR *dir = opendir(path);
    uint64_t count = 0;

    if (dir == NULL) {
        return 0;
    }
    while (readdir(dir) != NULL) {
        count++;
    }
    (void)closedir(dir);
    return count - 2; /* "." and ".." */
}

static uint64_t count_lines(const char *path)
{
    FILE *file = fopen(path, "re");
    uint64_t lines = 0;
    int c;

    while (file != NULL && (c = getc(file)) != EOF) {
        lines += c == '\n';
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return lines;
}

static struct counts count_now(void)
{
    struct mallinfo2 info;

    (void)malloc_trim(0);
    info = mallinfo2();
    return (struct counts){
        .heap_bytes = info.uordblks + info.hblkhd,
        .threads = count_entries("/proc/self/task"),
        .descriptors = count_entries("/proc/self/fd") - 1, /* its own */
        .mappings = count_lines("/proc/self/maps"),
    };
}

static void figure(struct scale *scale, const char *name, double value,
                   const char *unit, const char *what)
{
    if (!scale->json) {
        printf("%-34s %14.1f %-6s %s\n", name, value, unit, what);
    }
    (void)json_object_set_new(scale->figures, name, json_real(value));
}

static void figure_left(struct scale *scale, const char *of,
                        const struct counts *before, const struct counts *now)
{
    const struct {
        const char *name;
        uint64_t now;
        uint64_t before;
    } rows[] = {
        {"threads", now->threads, before->threads},
        {"descriptors", now->descriptors, before->descriptors},
        {"mappings", now->mappings, before->mappings},
        {"heap", now->heap_bytes, before->heap_bytes},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char name[64];

        (void)snprintf(name, sizeof(name), "%s_left_%s", of, rows[i].name);
        figure(scale, name, (double)rows[i].now - (double)rows[i].before,
               i == 3 ? "B" : "", "more than before");
    }
}

static int fail(const char *what, const struct kvt_error *err)
{
    cli_error("bench: %s: %s", what, err->text);
    return CLI_FAILED;
}

static int open_agent(const char *engine, const char *name, kvt_transport **ret)
{
    struct kvt_options options = {
        .size = sizeof(options), .engine = engine, .agent_name = name};
    struct kvt_error err = {0};

    return kvt_open(&options, ret, &err) == KVT_OK
               ? CLI_OK
               : fail("the engine does not start", &err);
}

static int set_up(struct scale *scale, const char *engine)
{
    struct kvt_error err = {0};
    uint64_t bytes = RUN_BLOCKS * BLOCK_BYTES;

    if (open_agent(engine, "scale-source", &scale->source) != CLI_OK ||
        open_agent(engine, "scale-target", &scale->target) != CLI_OK) {
        return CLI_FAILED;
    }
    for (size_t i = 0; i < RUNS; i++) {
        void *area = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (area == MAP_FAILED) {
            cli_error("bench: 51 GB of address space cannot be mapped");
            return CLI_FAILED;
        }
        scale->regions[i] = (struct kvt_region){
            .addr = (uint64_t)(uintptr_t)area, .length = bytes};
        scale->runs[i] = (struct kvt_run){.addr = scale->regions[i].addr,
                                          .block_bytes = BLOCK_BYTES,
                                          .stride_bytes = BLOCK_BYTES,
                                          .count = RUN_BLOCKS};
    }
    if (kvt_register(scale->target, scale->regions, RUNS, 0, &err) != KVT_OK ||
        kvt_metadata(scale->target, scale->metadata, METADATA_MAX,
                     &scale->metadata_length, &err) != KVT_OK) {
        return fail("memory cannot be registered", &err);
    }
    return CLI_OK;
}

static int add_peer(struct scale *scale, unsigned index, kvt_peer *ret)
{
    char name[32];
    struct kvt_peer_params params = {
        .size = sizeof(params),
        .name = name,
        .metadata = scale->metadata,
        .metadata_length = scale->metadata_length,
    };
    struct kvt_error err = {0};

    (void)snprintf(name, sizeof(name), "peer-%u", index);
    return kvt_peer_add(scale->source, &params, ret, &err) == KVT_OK
               ? CLI_OK
               : fail("a peer cannot be added", &err);
}

static int prepare(struct scale *scale, kvt_peer peer)
{
    struct kvt_error err = {0};
    kvt_layout layout;

    return kvt_prepare(scale->source, peer, "kv", scale->runs, RUNS, &layout,
                       &err) == KVT_OK
               ? CLI_OK
               : fail("a layout cannot be prepared", &err);
}

static int measure_layouts(struct scale *scale)
{
    struct counts before;
    struct counts peers;
    uint64_t begin;

    before = count_now();
    begin = cli_now_ns();
    for (unsigned i = 0; i < PEERS; i++) {
        if (add_peer(scale, i, &scale->peers[i]) != CLI_OK) {
            return CLI_FAILED;
        }
    }
    figure(scale, "add_peer_us", (double)(cli_now_ns() - begin) / 1e3 / PEERS,
           "us", "a peer of 160 regions, mean of 1,000");
    peers = count_now();
    figure(scale, "add_peer_heap",
           (double)(peers.heap_bytes - before.heap_bytes) / PEERS, "B",
           "a peer of 160 regions");
    begin = cli_now_ns();
    for (unsigned i = 0; i < PEERS; i++) {
        if (prepare(scale, scale->peers[i]) != CLI_OK) {
            return CLI_FAILED;
        }
    }
    figure(scale, "layout_us", (double)(cli_now_ns() - begin) / 1e3 / PEERS,
           "us", "a layout of 200 million blocks in 160 runs");
    figure(scale, "layout_heap",
           (double)(count_now().heap_bytes - peers.heap_bytes) / PEERS, "B",
           "such a layout");
    figure(scale, "peers_descriptors",
           (double)count_now().descriptors - (double)before.descriptors, "",
           "more, for 1,000 peers");
    return CLI_OK;
}

static int measure_churn(struct scale *scale)
{
    struct counts before;
    struct counts after;
    uint64_t begin;
    uint64_t spent;
    size_t left;

    /* Unload waits for the engine, so that nothing of them is left below. */
    for (unsigned i = 0; i < PEERS; i++) {
        (void)kvt_peer_unload(scale->source, scale->peers[i], 0, NULL);
        (void)kvt_peer_remove(scale->source, scale->peers[i]);
    }
    before = count_now();
    begin = cli_now_ns();
    for (unsigned i = 0; i < CHURN; i++) {
        kvt_peer peer;

        if (add_peer(scale, i, &peer) != CLI_OK ||
            prepare(scale, peer) != CLI_OK) {
            return CLI_FAILED;
        }
        (void)kvt_peer_unload(scale->source, peer, 0, NULL);
        (void)kvt_peer_remove(scale->source, peer);
    }
    spent = cli_now_ns() - begin;
    /* Remove does not wait; this does, behind the last of them. */
    (void)kvt_metadata(scale->source, NULL, 0, &left, NULL);
    after = count_now();
    figure(scale, "churn_us", (double)spent / 1e3 / CHURN, "us",
           "add, prepare and remove, mean of 10,000");
    figure_left(scale, "churn", &before, &after);
    return CLI_OK;
}

static int measure_transports(struct scale *scale, const char *engine)
{
    struct counts before;
    struct counts after;
    uint64_t begin = 0;
    uint64_t spent;

    for (unsigned i = 0; i <= TRANSPORTS; i++) {
        kvt_transport *transport = NULL;

        if (i == 1) {
            /* The first one paid for what the process keeps. */
            before = count_now();
            begin = cli_now_ns();
        }
        if (open_agent(engine, NULL, &transport) != CLI_OK) {
            return CLI_FAILED;
        }
        kvt_free(transport);
    }
    spent = cli_now_ns() - begin;
    after = count_now();
    figure(scale, "open_close_us", (double)spent / 1e3 / TRANSPORTS, "us",
           "a transport, mean of 1,000");
    figure_left(scale, "open_close", &before, &after);
    return CLI_OK;
}

int bench_scale(const char *engine, bool json)
{
    static struct scale scale;
    int rc;

    scale.json = json;
    scale.figures = json_object();
    rc = set_up(&scale, engine);
    if (rc == CLI_OK) {
        rc = measure_layouts(&scale);
    }
    if (rc == CLI_OK) {
        rc = measure_churn(&scale);
    }
    kvt_free(scale.source);
    kvt_free(scale.target);
    for (size_t i = 0; i < RUNS; i++) {
        if (scale.regions[i].addr != 0) {
            (void)munmap((void *)(uintptr_t)scale.regions[i].addr,
                         scale.regions[i].length);
        }
    }
    if (rc == CLI_OK) {
        rc = measure_transports(&scale, engine);
    }
    if (json && rc == CLI_OK) {
        (void)json_dumpf(scale.figures, stdout, JSON_INDENT(2));
        (void)putchar('\n');
    }
    json_decref(scale.figures);
    return rc;
}
