/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs the caller to start a transfer: kvt_write_blocks() alone, for
 * lists of 1, 64 and 4096 blocks of 4 KiB and 1 MiB. Two transports of one
 * process; the bytes are not what is measured, so each transfer is cancelled
 * as soon as it is accepted, and the next one waits until it is quiescent.
 *
 * 4096 blocks of 1 MiB would be 4 GiB on either side. A layout may name the
 * same memory several times, so it is 64 runs over the same 64 blocks, and a
 * list is checked against 64 runs, like those of a model of 32 layers.
 */
#include "bench.h"

#include <jansson.h>
#include <kvt/kvt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "args.h"
#include "cli.h"
#include "stats.h"

#define RUNS 64u
#define RUN_BLOCKS 64u
#define BLOCKS (RUNS * RUN_BLOCKS)
#define BLOCK_BYTES_MAX (UINT64_C(1) << 20)
#define AREA_BYTES (RUN_BLOCKS * BLOCK_BYTES_MAX)

/* Calls timed in each row, and before them, so that a p99 is a tenth-worst
 * and first-time costs are not in it. */
#define CALLS 1000u
#define WARM_CALLS 50u

static const uint64_t counts[] = {1, 64, 4096};
static const uint64_t sizes[] = {UINT64_C(4) << 10, BLOCK_BYTES_MAX};

struct side {
    kvt_transport *transport;
    void *area;
};

struct bench {
    struct side source;
    struct side target;
    kvt_peer peer;
    kvt_layout own;   /* over the source's area */
    kvt_layout peers; /* over the target's */
    uint32_t own_list[BLOCKS];
    uint32_t peer_list[BLOCKS];
};

struct row {
    uint64_t count;
    uint64_t block_bytes;
    struct histogram ns;
    struct histogram quiet_ns; /* of the calls that were not preempted */
    bool own_refused;          /* a bad index at the end of our list */
    bool peer_refused;
};

static int fail(const char *what, const struct kvt_error *err)
{
    cli_error("bench: %s: %s", what, err->text);
    return CLI_FAILED;
}

static int open_side(struct side *side, const char *engine, const char *name)
{
    struct kvt_options options = {
        .size = sizeof(options),
        .engine = engine,
        .agent_name = name,
    };
    struct kvt_region region = {.length = AREA_BYTES, .kind = KVT_DRAM};
    struct kvt_error err = {0};

    if (kvt_open(&options, &side->transport, &err) != KVT_OK) {
        return fail("the engine does not start", &err);
    }
    side->area = mmap(NULL, AREA_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (side->area == MAP_FAILED) {
        side->area = NULL;
        cli_error("bench: 64 MiB cannot be mapped");
        return CLI_FAILED;
    }
    region.addr = (uint64_t)(uintptr_t)side->area;
    if (kvt_register(side->transport, &region, 1, 0, &err) != KVT_OK) {
        return fail("memory cannot be registered", &err);
    }
    return CLI_OK;
}

static void close_side(struct side *side)
{
    if (side->transport != NULL &&
        kvt_close(side->transport, 0, NULL) == KVT_OK && side->area != NULL) {
        (void)munmap(side->area, AREA_BYTES);
    }
    kvt_free(side->transport);
}

static int add_target(struct bench *bench)
{
    static unsigned char metadata[65536];
    struct kvt_peer_params params = {
        .size = sizeof(params),
        .name = "target",
        .metadata = metadata,
    };
    struct kvt_error err = {0};

    if (kvt_metadata(bench->target.transport, metadata, sizeof(metadata),
                     &params.metadata_length, &err) != KVT_OK) {
        return fail("there is no metadata", &err);
    }
    if (kvt_peer_add(bench->source.transport, &params, &bench->peer, &err) !=
        KVT_OK) {
        return fail("the other transport cannot be added", &err);
    }
    return CLI_OK;
}

static int prepare_side(struct bench *bench, kvt_peer side, const void *area,
                        uint64_t block_bytes, kvt_layout *ret)
{
    struct kvt_run runs[RUNS] = {0};
    struct kvt_error err = {0};

    for (size_t i = 0; i < RUNS; i++) {
        runs[i].addr = (uint64_t)(uintptr_t)area;
        runs[i].block_bytes = block_bytes;
        runs[i].stride_bytes = block_bytes;
        runs[i].count = RUN_BLOCKS;
        runs[i].kind = KVT_DRAM;
    }
    if (kvt_prepare(bench->source.transport, side, "area", runs, RUNS, ret,
                    &err) != KVT_OK) {
        return fail("a layout is refused", &err);
    }
    return CLI_OK;
}

/* A permutation, the same in every run: no two neighbours in the list are
 * neighbours in memory, so nothing is cheap by merging. */
static void shuffle(uint32_t list[BLOCKS], uint64_t seed)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        list[i] = i;
    }
    for (uint32_t i = BLOCKS - 1; i > 0; i--) {
        uint32_t other = (uint32_t)(cli_mix(seed, i) % (i + 1));
        uint32_t kept = list[i];

        list[i] = list[other];
        list[other] = kept;
    }
}

static int submit(struct bench *bench, uint64_t count, kvt_xfer *ret,
                  struct kvt_error *err)
{
    struct kvt_indices own = {bench->own_list, count, KVT_INDEX_U32, 0};
    struct kvt_indices peers = {bench->peer_list, count, KVT_INDEX_U32, 0};

    return kvt_write_blocks(bench->source.transport, bench->peer, bench->own,
                            &own, bench->peers, &peers, NULL, ret, err);
}

/* Stops a transfer and waits until its memory is free again. */
static int finish(struct bench *bench, kvt_xfer xfer)
{
    struct pollfd wait = {
        .fd = kvt_fd(bench->source.transport),
        .events = POLLIN,
    };
    struct kvt_result result;

    /* Wait mode: it surfaces in kvt_poll() unless it is over already. */
    if (kvt_cancel(bench->source.transport, &xfer, 1, KVT_CANCEL_WAIT, &xfer) ==
        0) {
        return CLI_OK;
    }
    while (kvt_poll(bench->source.transport, KVT_ANY, &result, 1) == 0) {
        (void)poll(&wait, 1, -1);
    }
    if ((result.flags & KVT_QUIESCENT) == 0) {
        cli_error("bench: a transfer is lost: %s", result.text);
        return CLI_FAILED;
    }
    return CLI_OK;
}

/* Whether the call itself refuses a list with one bad index at its end. */
static bool refuses(struct bench *bench, uint32_t *list, uint64_t count)
{
    uint32_t kept = list[count - 1];
    struct kvt_error err;
    kvt_xfer xfer;
    int rc;

    list[count - 1] = BLOCKS;
    rc = submit(bench, count, &xfer, &err);
    list[count - 1] = kept;
    if (rc == KVT_OK) {
        (void)finish(bench, xfer);
    }
    return rc == KVT_ERANGE;
}

static int measure(struct bench *bench, struct row *row)
{
    struct kvt_error err = {0};
    int rc;

    rc = prepare_side(bench, KVT_SELF, bench->source.area, row->block_bytes,
                      &bench->own);
    if (rc == CLI_OK) {
        rc = prepare_side(bench, bench->peer, bench->target.area,
                          row->block_bytes, &bench->peers);
    }
    for (uint32_t i = 0; rc == CLI_OK && i < WARM_CALLS + CALLS; i++) {
        uint64_t preemptions = cli_preemptions();
        uint64_t begin = cli_now_ns();
        kvt_xfer xfer;
        uint64_t ns;

        if (submit(bench, row->count, &xfer, &err) != KVT_OK) {
            return fail("a transfer is refused", &err);
        }
        ns = cli_now_ns() - begin;
        if (i >= WARM_CALLS) {
            histogram_add(&row->ns, ns);
            if (cli_preemptions() == preemptions) {
                histogram_add(&row->quiet_ns, ns);
            }
        }
        rc = finish(bench, xfer);
    }
    row->own_refused = refuses(bench, bench->own_list, row->count);
    row->peer_refused = refuses(bench, bench->peer_list, row->count);
    return rc;
}

static double to_us(const struct histogram *histogram, double percent)
{
    return (double)histogram_percentile(histogram, percent) / 1e3;
}

static double per_index_ns(const struct histogram *histogram, double percent,
                           uint64_t count)
{
    return (double)histogram_percentile(histogram, percent) / (double)count;
}

static void print_head(void)
{
    printf("%7s %11s %9s %9s %9s %9s %9s  %s\n", "blocks", "block", "p50",
           "p99", "p99 quiet", "p50", "p99 quiet", "a bad");
    printf("%7s %11s %9s %9s %9s %9s %9s  %s\n", "", "", "us", "us", "us",
           "ns/index", "ns/index", "index is");
}

static void print_row(const struct row *row)
{
    char size[CLI_SIZE_TEXT];

    printf("%7llu %11s %9.2f %9.2f %9.2f %9.1f %9.1f  %s\n",
           (unsigned long long)row->count,
           cli_format_size(row->block_bytes, size), to_us(&row->ns, 50),
           to_us(&row->ns, 99), to_us(&row->quiet_ns, 99),
           per_index_ns(&row->ns, 50, row->count),
           per_index_ns(&row->quiet_ns, 99, row->count),
           row->own_refused && row->peer_refused ? "refused" : "ACCEPTED");
}

static json_t *row_object(const struct row *row)
{
    return json_pack(
        "{sI, sI, s{sf, sf, sf}, s{sf, sf}, sI, sb}", "blocks",
        (json_int_t)row->count, "block_bytes", (json_int_t)row->block_bytes,
        "submit_us", "p50", to_us(&row->ns, 50), "p99", to_us(&row->ns, 99),
        "p99_not_preempted", to_us(&row->quiet_ns, 99), "ns_per_index", "p50",
        per_index_ns(&row->ns, 50, row->count), "p99_not_preempted",
        per_index_ns(&row->quiet_ns, 99, row->count), "preempted",
        (json_int_t)(row->ns.count - row->quiet_ns.count), "bad_index_refused",
        row->own_refused && row->peer_refused);
}

static int run_rows(struct bench *bench, bool json)
{
    json_t *rows = json_array();
    int rc = CLI_OK;
    bool good = true;

    if (!json) {
        print_head();
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (size_t j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
            struct row row = {.count = counts[j], .block_bytes = sizes[i]};

            rc = measure(bench, &row);
            if (rc != CLI_OK) {
                json_decref(rows);
                return rc;
            }
            good = good && row.own_refused && row.peer_refused;
            if (json) {
                (void)json_array_append_new(rows, row_object(&row));
            } else {
                print_row(&row);
            }
        }
    }
    if (json) {
        json_t *object = json_pack("{ss, si, sO}", "version", kvt_version(),
                                   "calls", (int)CALLS, "rows", rows);

        (void)json_dumpf(object, stdout,
                         JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        printf("\n");
        json_decref(object);
    }
    json_decref(rows);
    return good ? CLI_OK : CLI_FAILED;
}

struct arguments {
    const char *engine;
    bool json;
    const char *bench;
};

static error_t take_option(int key, char *arg, struct argp_state *state)
{
    struct arguments *arguments = state->input;

    switch (key) {
    case 'j':
        arguments->json = true;
        return 0;
    case 'e':
        arguments->engine = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (arguments->bench != NULL ||
            (strcmp(arg, "submit") != 0 && strcmp(arg, "scale") != 0)) {
            return args_refuse(
                "bench: \"%s\" is no bench; 'submit' and 'scale' are", arg);
        }
        arguments->bench = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int bench_main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {.name = "engine",
         .key = 'e',
         .arg = "SPEC",
         .doc = "The engine, as kvt_open() takes it (local)"},
        {.name = "json", .key = 'j', .doc = "Print one JSON object"},
        {0}};
    static const struct argp argp = {
        .options = options,
        .parser = take_option,
        .args_doc = "submit|scale",
        .doc = "Times kvt_write_blocks() alone, for 1, 64 and 4096 blocks of "
               "4 KiB and 1 MiB, and checks that a list of each size with a "
               "bad index is refused by the call. Quiet calls are those in "
               "which the kernel did not give the CPU to another thread.",
    };
    static struct bench bench;
    struct arguments arguments = {.engine = "local"};
    int rc;

    rc = args_parse(&argp, argc, argv, &arguments);
    if (rc != CLI_OK) {
        return rc == ARGS_HELPED ? CLI_OK : rc;
    }
    if (arguments.bench == NULL) {
        cli_error("bench: which one? 'submit' and 'scale' are there");
        return CLI_USAGE;
    }
    if (strcmp(arguments.bench, "scale") == 0) {
        return bench_scale(arguments.engine, arguments.json);
    }
    shuffle(bench.own_list, 1);
    shuffle(bench.peer_list, 2);
    rc = open_side(&bench.source, arguments.engine, "bench-source");
    if (rc == CLI_OK) {
        rc = open_side(&bench.target, arguments.engine, "bench-target");
    }
    if (rc == CLI_OK) {
        rc = add_target(&bench);
    }
    if (rc == CLI_OK) {
        rc = run_rows(&bench, arguments.json);
    }
    close_side(&bench.source);
    close_side(&bench.target);
    return rc;
}
