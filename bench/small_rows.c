/* SPDX-License-Identifier: Apache-2.0 */
/* Rows in which something is moved or called. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "small.h"

static uint64_t or_default(uint64_t value, uint64_t otherwise)
{
    return value != 0 ? value : otherwise;
}

/* ------------------------------------------------------------------ transfers */

bool row_target(struct small *small)
{
    small_default_shape(small, UINT64_C(64) << 10, 1024);
    if (small->socket == NULL || !bench_shape_check(&small->shape)) {
        cli_error("small: a target needs --socket");
        return false;
    }
    return peer_serve(small->engine, small->socket, small->kind,
                      small->shape.pool * small->shape.block_bytes) == CLI_OK;
}

/* One transfer of the whole list, as limits and raw_nixl make it. */
bool row_move(struct small *small)
{
    uint64_t bytes;
    kvt_xfer xfer;

    small_default_shape(small, UINT64_C(64) << 10, 1024);
    if (!small_set_up(small, 1) ||
        !small_submit(small, 0, small->shape.blocks, &xfer) ||
        !small_drain(small, 1)) {
        return false;
    }
    bytes = bench_shape_bytes(&small->shape);
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        uint64_t begin = cli_now_ns();
        uint64_t ns;

        if (!small_submit(small, 0, small->shape.blocks, &xfer) ||
            !small_drain(small, 1)) {
            return false;
        }
        ns = cli_now_ns() - begin;
        printf(
            "{\"name\": \"kvt\", \"wait\": \"%s\", \"order\": \"%s\", "
            "\"block_bytes\": %llu, \"blocks\": %llu, \"bytes\": %llu, "
            "\"seconds\": %.9f, \"gb_per_s\": %.3f}\n",
            small->spin ? "spin" : "fd", bench_order_name(small->shape.order),
            (unsigned long long)small->shape.block_bytes,
            (unsigned long long)small->shape.blocks, (unsigned long long)bytes,
            (double)ns / 1e9, (double)bytes / (double)ns);
    }
    return true;
}

static bool run_many(struct small *small, uint64_t count, uint64_t inflight)
{
    uint64_t begun = 0;
    uint64_t ended = 0;

    while (ended < count) {
        uint64_t got;

        while (begun < count && begun - ended < inflight) {
            kvt_xfer xfer;

            if (!small_submit(small, begun % small->shape.blocks, 1, &xfer)) {
                return false;
            }
            begun++;
        }
        if (!small_collect(small, &got)) {
            return false;
        }
        ended += got;
    }
    return true;
}

bool row_rate(struct small *small)
{
    uint64_t count = or_default(small->count, 10000);
    uint64_t inflight = or_default(small->inflight, 32);

    small_default_shape(small, 64, 4096);
    if (!small_set_up(small, 1) || !run_many(small, 1000, inflight)) {
        return false;
    }
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        uint64_t begin = cli_now_ns();
        uint64_t ns;

        if (!run_many(small, count, inflight)) {
            return false;
        }
        ns = cli_now_ns() - begin;
        printf("{\"name\": \"rate\", \"wait\": \"%s\", \"inflight\": %llu, "
               "\"block_bytes\": %llu, \"transfers\": %llu, "
               "\"seconds\": %.9f, \"per_second\": %.0f}\n",
               small->spin ? "spin" : "fd", (unsigned long long)inflight,
               (unsigned long long)small->shape.block_bytes,
               (unsigned long long)count, (double)ns / 1e9,
               (double)count * 1e9 / (double)ns);
    }
    return true;
}

static void rest(uint64_t ms)
{
    struct timespec gap = {.tv_sec = (time_t)(ms / 1000),
                           .tv_nsec = (long)(ms % 1000) * 1000000};

    if (ms > 0) {
        (void)nanosleep(&gap, NULL);
    }
}

bool row_latency(struct small *small)
{
    static struct histogram times;
    uint64_t count = or_default(small->count, small->gap_ms > 0 ? 5 : 5000);

    small_default_shape(small, 64, 1);
    if (!small_set_up(small, 1)) {
        return false;
    }
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        memset(&times, 0, sizeof(times));
        for (uint64_t i = 0; i < count; i++) {
            uint64_t begin;
            kvt_xfer xfer;

            rest(small->gap_ms);
            begin = cli_now_ns();
            if (!small_submit(small, 0, small->shape.blocks, &xfer) ||
                !small_drain(small, 1)) {
                return false;
            }
            histogram_add(&times, cli_now_ns() - begin);
        }
        printf("{\"name\": \"latency\", \"wait\": \"%s\", \"gap_ms\": %llu, "
               "\"bytes\": %llu, ",
               small->spin ? "spin" : "fd", (unsigned long long)small->gap_ms,
               (unsigned long long)bench_shape_bytes(&small->shape));
        small_times("done", &times);
        printf("}\n");
    }
    return true;
}

/* ---------------------------------------------------------------------- calls */

bool row_submit(struct small *small)
{
    static struct histogram times;
    static struct histogram quiet;
    uint64_t count = or_default(small->count, 200);

    small_default_shape(small, UINT64_C(64) << 10, 1024);
    if (!small_set_up(small, 1)) {
        return false;
    }
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        memset(&times, 0, sizeof(times));
        memset(&quiet, 0, sizeof(quiet));
        for (uint64_t i = 0; i < count; i++) {
            uint64_t preemptions;
            uint64_t begin;
            kvt_xfer xfer;

            for (uint64_t j = 0; j < small->queued; j++) {
                if (!small_submit(small, 0, small->shape.blocks, &xfer)) {
                    return false;
                }
            }
            preemptions = cli_preemptions();
            begin = cli_now_ns();
            if (!small_submit(small, 0, small->shape.blocks, &xfer)) {
                return false;
            }
            begin = cli_now_ns() - begin;
            histogram_add(&times, begin);
            if (cli_preemptions() == preemptions) {
                histogram_add(&quiet, begin);
            }
            if (!small_drain(small, small->queued + 1)) {
                return false;
            }
        }
        printf("{\"name\": \"submit\", \"queued\": %llu, \"blocks\": %llu, "
               "\"block_bytes\": %llu, ",
               (unsigned long long)small->queued,
               (unsigned long long)small->shape.blocks,
               (unsigned long long)small->shape.block_bytes);
        small_times("call", &times);
        printf(", ");
        small_times("not_preempted", &quiet);
        printf("}\n");
    }
    return true;
}

#define POLL_BATCHES 200u
#define POLL_BATCH 1000u

static bool time_polls(const struct small *small, uint64_t inflight)
{
    double best = 0;
    double sum = 0;

    for (unsigned i = 0; i < POLL_BATCHES; i++) {
        uint64_t begin = cli_now_ns();
        struct kvt_result result;
        double ns;

        for (unsigned j = 0; j < POLL_BATCH; j++) {
            if (kvt_poll(small->node.transport, small->at[0].id, &result, 1) !=
                0) {
                cli_error("small: a transfer that hangs has ended");
                return false;
            }
        }
        ns = (double)(cli_now_ns() - begin) / POLL_BATCH;
        best = i == 0 || ns < best ? ns : best;
        sum += ns;
    }
    printf("{\"name\": \"poll\", \"inflight\": %llu, \"calls\": %u, "
           "\"ns_a_call\": %.2f, \"ns_a_call_min\": %.2f}\n",
           (unsigned long long)inflight, POLL_BATCHES * POLL_BATCH,
           sum / POLL_BATCHES, best);
    return true;
}

/* The fault engine holds the requests back, and lets them go after each
 * round. */
static bool set_rules(const struct small *small, const char *rules)
{
    struct kvt_error err;

    if (kvt_fault(small->node.transport, rules, &err) != KVT_OK) {
        cli_error("small: %s", err.text);
        return false;
    }
    return true;
}

bool row_poll(struct small *small)
{
    uint64_t inflight = or_default(small->inflight, 1000);
    char engine[256];

    (void)snprintf(engine, sizeof(engine), "fault:%s?hang=*", small->engine);
    small->engine = engine;
    small_default_shape(small, 64, 64);
    if (!small_set_up(small, 1)) {
        return false;
    }
    small_ready(small, 2);
    while (bench_next(&small->rounds)) {
        kvt_xfer xfer;

        if (!set_rules(small, "hang=*") || !time_polls(small, 0)) {
            return false;
        }
        for (uint64_t i = 0; i < inflight; i++) {
            if (!small_submit(small, 0, 1, &xfer)) {
                return false;
            }
        }
        if (!time_polls(small, inflight) || !set_rules(small, "") ||
            !small_drain(small, inflight)) {
            return false;
        }
    }
    return true;
}

/* -------------------------------------------------------------------- indices */

#define RUNS 160u
#define RUN_BLOCKS UINT64_C(1200000)
#define RUN_BLOCK_BYTES UINT64_C(256)
#define MANY_INDICES 1310720u

/* Both sides are of this process and have the same memory, which is address
 * space that nothing touches but the first chunks of a transfer. */
struct vast {
    kvt_transport *target;
    struct kvt_region regions[RUNS];
    struct kvt_run runs[RUNS];
};

static bool map_vast(struct vast *vast)
{
    uint64_t bytes = RUN_BLOCKS * RUN_BLOCK_BYTES;

    for (size_t i = 0; i < RUNS; i++) {
        void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (at == MAP_FAILED) {
            cli_error("small: 49 GB of address space cannot be mapped");
            return false;
        }
        vast->regions[i] = (struct kvt_region){.addr = (uint64_t)(uintptr_t)at,
                                               .length = bytes};
        vast->runs[i] = (struct kvt_run){.addr = vast->regions[i].addr,
                                         .block_bytes = RUN_BLOCK_BYTES,
                                         .stride_bytes = RUN_BLOCK_BYTES,
                                         .count = RUN_BLOCKS};
    }
    return true;
}

static bool open_vast(struct small *small, struct vast *vast)
{
    static unsigned char metadata[1 << 20];
    struct kvt_options options = {.size = sizeof(options)};
    struct kvt_peer_params params = {
        .size = sizeof(params), .name = "target", .metadata = metadata};
    struct kvt_error err = {0};
    char engine[256];
    bool good;

    (void)snprintf(engine, sizeof(engine), "fault:%s?hang=*", small->engine);
    options.engine = engine;
    good = map_vast(vast) &&
           kvt_open(&options, &small->node.transport, &err) == KVT_OK;
    options.engine = small->engine;
    small->at = cli_alloc(1, sizeof(*small->at));
    good = good && kvt_open(&options, &vast->target, &err) == KVT_OK &&
           kvt_register(small->node.transport, vast->regions, RUNS, 0, &err) ==
               KVT_OK &&
           kvt_register(vast->target, vast->regions, RUNS, 0, &err) == KVT_OK &&
           kvt_metadata(vast->target, metadata, sizeof(metadata),
                        &params.metadata_length, &err) == KVT_OK &&
           kvt_peer_add(small->node.transport, &params, &small->at[0].id,
                        &err) == KVT_OK;
    if (!good) {
        cli_error("small: %s", err.text);
    }
    return good;
}

static uint64_t heap_now(void)
{
    struct mallinfo2 info = mallinfo2();

    return info.uordblks + info.hblkhd;
}

static bool prepare_vast(struct small *small, const struct vast *vast,
                         kvt_peer side, kvt_layout *ret)
{
    uint64_t heap = heap_now();
    uint64_t begin = cli_now_ns();
    struct kvt_error err = {0};

    if (kvt_prepare(small->node.transport, side, "kv", vast->runs, RUNS, ret,
                    &err) != KVT_OK) {
        cli_error("small: %s", err.text);
        return false;
    }
    begin = cli_now_ns() - begin;
    printf("{\"name\": \"prepare\", \"side\": \"%s\", \"blocks\": %llu, "
           "\"runs\": %u, \"ns\": %llu, \"heap_bytes\": %lld}\n",
           side == KVT_SELF ? "own" : "peer",
           (unsigned long long)(RUNS * RUN_BLOCKS), RUNS,
           (unsigned long long)begin, (long long)(heap_now() - heap));
    return true;
}

bool row_indices(struct small *small)
{
    static struct vast vast;
    struct kvt_result result;

    small->shape.blocks = MANY_INDICES;
    small->from = cli_alloc(MANY_INDICES, sizeof(*small->from));
    small->to = cli_alloc(MANY_INDICES, sizeof(*small->to));
    for (uint64_t i = 0; i < MANY_INDICES; i++) {
        small->from[i] = (uint32_t)(cli_mix(1, i) % (RUNS * RUN_BLOCKS));
        small->to[i] = (uint32_t)(cli_mix(2, i) % (RUNS * RUN_BLOCKS));
    }
    if (!open_vast(small, &vast)) {
        return false;
    }
    small_ready(small, 3);
    while (bench_next(&small->rounds)) {
        kvt_xfer xfer;
        uint64_t begin;

        if (!set_rules(small, "hang=*") ||
            !prepare_vast(small, &vast, KVT_SELF, &small->own) ||
            !prepare_vast(small, &vast, small->at[0].id, &small->theirs)) {
            return false;
        }
        begin = cli_now_ns();
        if (!small_submit(small, 0, MANY_INDICES, &xfer)) {
            return false;
        }
        begin = cli_now_ns() - begin;
        printf("{\"name\": \"indices\", \"count\": %u, \"ns\": %llu, "
               "\"ns_an_index\": %.2f}\n",
               MANY_INDICES, (unsigned long long)begin,
               (double)begin / MANY_INDICES);
        (void)kvt_cancel(small->node.transport, &xfer, 1, KVT_CANCEL_WAIT,
                         NULL);
        if (!set_rules(small, "")) {
            return false;
        }
        /* Cancelled or not: only that it is over matters. */
        while (kvt_status(small->node.transport, xfer, &result) == KVT_OK &&
               kvt_poll(small->node.transport, KVT_ANY, &result, 1) == 0) {
        }
    }
    kvt_free(vast.target);
    return true;
}
