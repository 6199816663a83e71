/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt's own rows that need C: small transfers, calls, and what is spent when
 * nothing happens. The target is a process of its own, with kvt and the same
 * kind of memory; NIXL's variables and KVT_SAME_HOST mean what they mean to any
 * program. The tail of a figure is the scheduler's where it says so
 * ("preempted"): then the kernel gave our CPU away in the middle of the call.
 */
#include "small.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct row {
    const char *name;
    bool (*run)(struct small *small);
    const char *what;
} rows[] = {
    {"target", row_target, "the peer of another one, at --socket"},
    {"move", row_move, "the whole list from the call to done"},
    {"rate", row_rate, "transfers a second with --inflight of them under way"},
    {"latency", row_latency, "one transfer from the call to done"},
    {"submit", row_submit, "kvt_write_blocks() alone, --queued ones ahead"},
    {"poll", row_poll, "kvt_poll() alone, nothing finished, with --inflight"},
    {"indices", row_indices, "192 million blocks prepared, 1.31 million moved"},
    {"idle", row_idle, "CPU of a transport with --peers and nothing to do"},
    {"stuck", row_stuck, "CPU with --inflight at a stopped peer"},
    {"flood", row_flood, "calls for a healthy peer while another floods us"},
};

#define COLLECT 64u

bool small_set_up(struct small *small, uint64_t peers)
{
    uint64_t bytes;

    if (!bench_shape_check(&small->shape)) {
        return false;
    }
    bytes = small->shape.pool * small->shape.block_bytes;
    if (small->socket != NULL && peers != 1) {
        cli_error("small: this row needs peers of its own: leave --socket out");
        return false;
    }
    small->peers = peers;
    small->at = cli_alloc(peers, sizeof(*small->at));
    for (uint64_t i = 0; i < peers; i++) {
        char name[32];

        (void)snprintf(name, sizeof(name), "bench-%d-%llu", (int)getpid(),
                       (unsigned long long)i);
        if (small->socket != NULL
                ? !peer_connect(small->socket, &small->at[i])
                : !peer_start(small->engine, name, small->kind, bytes,
                              &small->at[i])) {
            cli_error("small: a peer's process does not start");
            return false;
        }
    }
    if (!node_open(small->engine, NULL, small->kind, bytes, &small->node)) {
        return false;
    }
    for (uint64_t i = 0; i < peers; i++) {
        char name[32];

        (void)snprintf(name, sizeof(name), "peer-%llu", (unsigned long long)i);
        if (!peer_add(&small->node, name, &small->at[i])) {
            return false;
        }
    }
    small->from = cli_alloc(small->shape.blocks, sizeof(*small->from));
    small->to = cli_alloc(small->shape.blocks, sizeof(*small->to));
    bench_indices(&small->shape, small->from, small->to);
    bench_fill(&small->shape, small->node.area.at);
    return peer_layouts(&small->node, &small->at[0], small->shape.block_bytes,
                        small->shape.pool, &small->own, &small->theirs);
}

void small_default_shape(struct small *small, uint64_t block_bytes,
                         uint64_t blocks)
{
    if (small->shape.block_bytes == 0) {
        small->shape.block_bytes = block_bytes;
    }
    if (small->shape.blocks == 0) {
        small->shape.blocks = blocks;
    }
}

void small_ready(const struct small *small, unsigned lines)
{
    struct kvt_peer_info info = {0};

    if (small->at != NULL) {
        (void)kvt_peer_info(small->node.transport, small->at[0].id, &info);
    }
    printf("{\"name\": \"%s\", \"ready\": true, \"lines\": %u, "
           "\"engine\": \"%s\", \"path\": \"%s\", \"memory\": \"%s\", "
           "\"block_bytes\": %llu, \"blocks\": %llu}\n",
           small->row, lines, small->engine, info.path,
           bench_kind_name(small->kind),
           (unsigned long long)small->shape.block_bytes,
           (unsigned long long)small->shape.blocks);
}

bool small_submit(struct small *small, uint64_t first, uint64_t count,
                  kvt_xfer *ret)
{
    struct kvt_indices from = {small->from + first, count, KVT_INDEX_U32, 0};
    struct kvt_indices to = {small->to + first, count, KVT_INDEX_U32, 0};
    struct kvt_error err;

    if (kvt_write_blocks(small->node.transport, small->at[0].id, small->own,
                         &from, small->theirs, &to, NULL, ret,
                         &err) != KVT_OK) {
        cli_error("small: a transfer is refused: %s", err.text);
        return false;
    }
    return true;
}

bool small_collect(struct small *small, uint64_t *ret_count)
{
    struct kvt_result results[COLLECT];
    int got;

    for (;;) {
        got = kvt_poll(small->node.transport, small->at[0].id, results,
                       COLLECT);
        if (got != 0) {
            break;
        }
        if (!small->spin) {
            struct pollfd wait = {.fd = kvt_fd(small->node.transport),
                                  .events = POLLIN};

            (void)poll(&wait, 1, -1);
        }
    }
    for (int i = 0; i < got; i++) {
        if (results[i].state != KVT_DONE) {
            cli_error("small: a transfer ended badly: %s", results[i].text);
            return false;
        }
    }
    *ret_count = (uint64_t)got;
    return got > 0;
}

bool small_drain(struct small *small, uint64_t count)
{
    while (count > 0) {
        uint64_t got;

        if (!small_collect(small, &got)) {
            return false;
        }
        count -= got;
    }
    return true;
}

void small_times(const char *name, const struct histogram *histogram)
{
    printf("\"%s\": {\"count\": %llu, \"p50_ns\": %llu, \"p90_ns\": %llu, "
           "\"p99_ns\": %llu, \"max_ns\": %llu}",
           name, (unsigned long long)histogram->count,
           (unsigned long long)histogram_percentile(histogram, 50),
           (unsigned long long)histogram_percentile(histogram, 90),
           (unsigned long long)histogram_percentile(histogram, 99),
           (unsigned long long)histogram_percentile(histogram, 100));
}

/* ---------------------------------------------------------------- arguments */

static void usage(void)
{
    printf("usage: small --row ROW [OPTIONS]\n\n");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        printf("  %-10s %s\n", rows[i].name, rows[i].what);
    }
    printf("\n"
           "  --engine SPEC        as kvt_open() takes it (local)\n"
           "  --memory KIND        anon, memfd or shm (anon)\n"
           "  --count N            transfers or calls of a round\n"
           "  --inflight N         transfers under way\n"
           "  --queued N           whole lists ahead of each call (0)\n"
           "  --gap-ms N           idleness before each transfer (0)\n"
           "  --peers N            of the rows idle and stuck (4, 1)\n"
           "  --seconds N          of the rows idle and stuck (3)\n"
           "  --socket PATH        where the peer listens (it is a child)\n"
           "  --wait HOW           fd (sleep on it) or spin (on kvt_poll)\n"
           "  Block sizes and counts have defaults of each row's own.\n"
           "" BENCH_SHAPE_USAGE BENCH_ROUND_USAGE);
}

static bool take(int key, const char *arg, struct small *small)
{
    switch (key) {
    case 'R':
        small->row = arg;
        return true;
    case 'e':
        small->engine = arg;
        return true;
    case 'm':
        return bench_kind_parse(arg, &small->kind);
    case 'c':
        return cli_parse_u64(arg, 1, 100000000, &small->count);
    case 'i':
        return cli_parse_u64(arg, 0, 8000, &small->inflight);
    case 'q':
        return cli_parse_u64(arg, 0, 1000, &small->queued);
    case 'g':
        return cli_parse_u64(arg, 0, 10000, &small->gap_ms);
    case 'P':
        return cli_parse_u64(arg, 1, 64, &small->peers);
    case 't':
        return cli_parse_u64(arg, 1, 60, &small->seconds);
    case 'u':
        small->socket = arg;
        return true;
    case 'w':
        small->spin = strcmp(arg, "spin") == 0;
        return small->spin || strcmp(arg, "fd") == 0;
    default:
        return bench_shape_option(key, arg, &small->shape) ||
               bench_round_option(key, arg, &small->rounds);
    }
}

static int parse(int argc, char **argv, struct small *small)
{
    static const struct option options[] = {
        BENCH_SHAPE_OPTIONS,
        BENCH_ROUND_OPTIONS,
        {"row", required_argument, NULL, 'R'},
        {"engine", required_argument, NULL, 'e'},
        {"memory", required_argument, NULL, 'm'},
        {"count", required_argument, NULL, 'c'},
        {"inflight", required_argument, NULL, 'i'},
        {"queued", required_argument, NULL, 'q'},
        {"gap-ms", required_argument, NULL, 'g'},
        {"peers", required_argument, NULL, 'P'},
        {"seconds", required_argument, NULL, 't'},
        {"wait", required_argument, NULL, 'w'},
        {"socket", required_argument, NULL, 'u'},
        {"help", no_argument, NULL, 'h'},
        {0}};
    bool good = true;
    int key;

    while (good && (key = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (key == 'h') {
            usage();
            return CLI_INTERRUPTED;
        }
        good = take(key, optarg, small);
    }
    if (!good || optind != argc || small->row == NULL) {
        cli_error("small: malformed arguments, see --help");
        return CLI_USAGE;
    }
    return CLI_OK;
}

int main(int argc, char **argv)
{
    static struct small small = {
        .rounds = {.left = 5}, .engine = "local", .seconds = 3};
    int rc;

    bench_follow_parent();
    /* Block sizes and counts of 0 become the row's own. */
    small.shape = (struct bench_shape){.seed = 1};
    rc = parse(argc, argv, &small);
    if (rc != CLI_OK) {
        return rc == CLI_INTERRUPTED ? CLI_OK : rc;
    }
    rc = CLI_USAGE;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(small.row, rows[i].name) == 0) {
            rc = rows[i].run(&small) ? CLI_OK : CLI_FAILED;
            node_close(&small.node);
        }
    }
    if (rc == CLI_USAGE) {
        cli_error("small: there is no row \"%s\"", small.row);
    }
    return rc;
}
