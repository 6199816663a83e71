/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL by its C interface, with nothing of kvt's above it: what a program could
 * reach that drives NIXL itself and knows the best settings for this machine.
 *
 * An initiator writes the shape's list into a target. Without --socket the
 * target is its child; with it, `--role target` listens there (a path, so that
 * it works between network namespaces) and `--role initiator` connects. UCX
 * reads its own variables, so UCX_TLS=tcp means here what it means anywhere.
 *
 * A round is timed from before the first descriptor list is made until every
 * request has status 0. Ways to make the requests:
 *
 *   create    new lists and a new request for each part
 *   prepared  both sides' blocks prepared once before the rounds, requests made
 *             of indices; every block is a descriptor then
 *   kept      requests made before the rounds and posted again in each: only
 *             for a transfer that is always the same one
 *
 * Neighbours are merged before NIXL sees them (but for `prepared`), as kvt does
 * it. A part is at most --split descriptors; --inflight parts are under way at
 * a time. The agent's settings hold for the process: run several to compare.
 */
#include "raw_nixl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORDS_MAX 8u

static const char *const makings[] = {"create", "prepared", "kept"};
static const char *const waitings[] = {"spin", "yield", "sleep"};

/* ------------------------------------------------------------------- rounds */

static void print_settings(const struct raw *raw)
{
    printf("\"from\": \"%s\", \"to\": \"%s\", \"order\": \"%s\", "
           "\"block_bytes\": %llu, \"blocks\": %llu, \"pool\": %llu, "
           "\"copies\": %zu, \"progress\": %s, \"pthr_delay_us\": %llu, "
           "\"target_pthr_delay_us\": %llu, \"wait\": \"%s\", "
           "\"skip_merge\": %s, \"params\": \"",
           bench_kind_name(raw->from_kind), bench_kind_name(raw->to_kind),
           bench_order_name(raw->shape.order),
           (unsigned long long)raw->shape.block_bytes,
           (unsigned long long)raw->shape.blocks,
           (unsigned long long)raw->shape.pool, raw->copy_count,
           raw->initiator.progress ? "true" : "false",
           (unsigned long long)raw->initiator.pthr_delay_us,
           (unsigned long long)raw->target.pthr_delay_us,
           waitings[raw->waiting], raw->skip_merge ? "true" : "false");
    for (size_t i = 0; i < raw->param_count; i++) {
        printf("%s%s", i > 0 ? "," : "", raw->params[i]);
    }
    printf("\"");
}

static void print_line(const struct raw *raw, const struct raw_config *config,
                       uint64_t ns)
{
    uint64_t bytes = bench_shape_bytes(&raw->shape);

    printf("{\"name\": \"raw_nixl_%s_%zux%zu\", \"lists\": \"%s\", "
           "\"split\": %zu, \"inflight\": %zu, ",
           makings[config->making], config->split, config->inflight,
           makings[config->making], config->split, config->inflight);
    print_settings(raw);
    printf(", \"bytes\": %llu, \"seconds\": %.9f, \"gb_per_s\": %.3f}\n",
           (unsigned long long)bytes, (double)ns / 1e9,
           (double)bytes / (double)ns);
}

static bool prove(struct raw *raw, struct raw_config *config)
{
    uint64_t ns;

    if (config->making == MAKE_KEPT && !raw_keep(raw, config)) {
        return false;
    }
    if (!raw_ask_target(raw, 'c') || !raw_run(raw, config, &ns)) {
        return false;
    }
    if (!raw_ask_target(raw, 'k')) {
        cli_error("raw_nixl: the target has something wrong");
        return false;
    }
    return true;
}

static bool run_rounds(struct raw *raw)
{
    for (size_t i = 0; i < raw->config_count; i++) {
        if (!prove(raw, &raw->configs[i])) {
            return false;
        }
    }
    printf("{\"name\": \"raw_nixl\", \"ready\": true, \"lines\": %zu, ",
           raw->config_count);
    print_settings(raw);
    printf("}\n");
    while (bench_next(&raw->rounds)) {
        for (size_t i = 0; i < raw->config_count; i++) {
            uint64_t ns;

            if (!raw_run(raw, &raw->configs[i], &ns)) {
                return false;
            }
            print_line(raw, &raw->configs[i], ns);
        }
    }
    return true;
}

static bool wants(const struct raw *raw, enum making making)
{
    for (size_t i = 0; i < raw->config_count; i++) {
        if (raw->configs[i].making == making) {
            return true;
        }
    }
    return false;
}

static int run_initiator(struct raw *raw)
{
    if ((raw->socket == NULL && !raw_fork_target(raw)) ||
        !raw_open_agent(raw, "raw-initiator", raw->from_kind,
                        &raw->initiator) ||
        !raw_meet_target(raw)) {
        return CLI_FAILED;
    }
    bench_fill(&raw->shape, raw->area.at);
    raw->copy_count = bench_copies(&raw->shape, raw->piece, &raw->copies);
    raw->flying = cli_alloc(raw->shape.blocks, sizeof(struct nixl_xfer_req *));
    raw->from = cli_alloc(raw->shape.blocks, sizeof(*raw->from));
    raw->to = cli_alloc(raw->shape.blocks, sizeof(*raw->to));
    bench_indices(&raw->shape, raw->from, raw->to);
    if (wants(raw, MAKE_PREPARED) &&
        (!raw_prepare(raw, false, &raw->local_lists) ||
         !raw_prepare(raw, true, &raw->remote_lists))) {
        return CLI_FAILED;
    }
    return run_rounds(raw) ? CLI_OK : CLI_FAILED;
}
/* ---------------------------------------------------------------- arguments */

struct words {
    const char *at[WORDS_MAX];
    size_t count;
};

static void usage(void)
{
    printf("usage: raw_nixl [OPTIONS]\n\n"
           "  --lists LIST         of create, prepared, kept (create)\n"
           "  --split LIST         descriptors of a request, 0: all (256)\n"
           "  --inflight LIST      requests under way (4)\n"
           "  --wait HOW           spin, yield or sleep between polls (spin)\n"
           "  --no-progress        no progress thread at the initiator\n"
           "  --pthr-delay US      of the initiator's progress thread (0)\n"
           "  --target-pthr-delay US\n"
           "  --param KEY=VALUE    of the backend UCX, e.g. num_threads=2\n"
           "  --skip-merge         NIXL does not look for neighbours\n"
           "  --from KIND          anon, memfd or shm (anon)\n"
           "  --to KIND            the same\n"
           "  --piece SIZE         most bytes of a merged copy (1MiB)\n"
           "  --socket PATH        where the target listens\n"
           "  --role ROLE          target or initiator, with --socket\n"
           "" BENCH_SHAPE_USAGE BENCH_ROUND_USAGE);
}

static bool find_word(const char *word, const char *const *words, unsigned max,
                      unsigned *ret)
{
    for (unsigned i = 0; i < max; i++) {
        if (strcmp(word, words[i]) == 0) {
            *ret = i;
            return true;
        }
    }
    cli_error("raw_nixl: \"%s\" is none of the words allowed there", word);
    return false;
}

static bool add_config(struct raw *raw, const char *making, const char *split,
                       const char *inflight)
{
    struct raw_config *config = &raw->configs[raw->config_count];
    uint64_t split_count;
    uint64_t inflight_count;
    unsigned found;

    if (raw->config_count == RAW_CONFIGS_MAX ||
        !find_word(making, makings, MAKINGS, &found) ||
        !cli_parse_u64(split, 0, UINT32_MAX, &split_count) ||
        !cli_parse_u64(inflight, 1, 1024, &inflight_count)) {
        return false;
    }
    *config = (struct raw_config){.making = (enum making)found,
                                  .split = split_count > 0 ? split_count
                                                           : raw->shape.blocks,
                                  .inflight = inflight_count};
    raw->config_count++;
    return true;
}

static bool add_configs(struct raw *raw, const struct words *lists,
                        const struct words *splits,
                        const struct words *inflights)
{
    for (size_t i = 0; i < lists->count; i++) {
        for (size_t j = 0; j < splits->count; j++) {
            for (size_t k = 0; k < inflights->count; k++) {
                if (!add_config(raw, lists->at[i], splits->at[j],
                                inflights->at[k])) {
                    return false;
                }
            }
        }
    }
    return true;
}

static void split(char *text, struct words *ret)
{
    ret->count = bench_split(text, ret->at, WORDS_MAX);
}

static bool agent_option(int key, char *arg, struct raw *raw)
{
    unsigned found;

    switch (key) {
    case 'w':
        if (!find_word(arg, waitings, WAITINGS, &found)) {
            return false;
        }
        raw->waiting = (enum waiting)found;
        return true;
    case 'N':
        raw->initiator.progress = false;
        return true;
    case 'D':
        return cli_parse_u64(arg, 0, 1000000, &raw->initiator.pthr_delay_us);
    case 'T':
        return cli_parse_u64(arg, 0, 1000000, &raw->target.pthr_delay_us);
    case 'a':
        raw->params[raw->param_count++] = arg;
        return raw->param_count < RAW_PARAMS_MAX;
    case 'M':
        raw->skip_merge = true;
        return true;
    case 'f':
        return bench_kind_parse(arg, &raw->from_kind);
    case 'd':
        return bench_kind_parse(arg, &raw->to_kind);
    case 'P':
        return cli_parse_size(arg, &raw->piece);
    case 'u':
        raw->socket = arg;
        return true;
    case 'R':
        raw->role = arg;
        return strcmp(arg, "target") == 0 || strcmp(arg, "initiator") == 0;
    default:
        return bench_shape_option(key, arg, &raw->shape) ||
               bench_round_option(key, arg, &raw->rounds);
    }
}

static int parse(int argc, char **argv, struct raw *raw)
{
    static const struct option options[] = {
        BENCH_SHAPE_OPTIONS,
        BENCH_ROUND_OPTIONS,
        {"lists", required_argument, NULL, 'l'},
        {"split", required_argument, NULL, 'k'},
        {"inflight", required_argument, NULL, 'i'},
        {"wait", required_argument, NULL, 'w'},
        {"no-progress", no_argument, NULL, 'N'},
        {"pthr-delay", required_argument, NULL, 'D'},
        {"target-pthr-delay", required_argument, NULL, 'T'},
        {"param", required_argument, NULL, 'a'},
        {"skip-merge", no_argument, NULL, 'M'},
        {"from", required_argument, NULL, 'f'},
        {"to", required_argument, NULL, 'd'},
        {"piece", required_argument, NULL, 'P'},
        {"socket", required_argument, NULL, 'u'},
        {"role", required_argument, NULL, 'R'},
        {"help", no_argument, NULL, 'h'},
        {0}};
    struct words lists = {.at = {"create"}, .count = 1};
    struct words splits = {.at = {"256"}, .count = 1};
    struct words inflights = {.at = {"4"}, .count = 1};
    bool good = true;
    int key;

    while (good && (key = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (key) {
        case 'h':
            usage();
            return CLI_INTERRUPTED;
        case 'l':
            split(optarg, &lists);
            break;
        case 'k':
            split(optarg, &splits);
            break;
        case 'i':
            split(optarg, &inflights);
            break;
        default:
            good = agent_option(key, optarg, raw);
            break;
        }
    }
    if (!good || optind != argc ||
        (raw->role != NULL) != (raw->socket != NULL)) {
        cli_error("raw_nixl: malformed arguments, see --help");
        return CLI_USAGE;
    }
    good = bench_shape_check(&raw->shape) &&
           add_configs(raw, &lists, &splits, &inflights);
    return good ? CLI_OK : CLI_USAGE;
}

int main(int argc, char **argv)
{
    static struct raw raw = {.piece = UINT64_C(1) << 20,
                             .rounds = {.left = 5},
                             .initiator = {.progress = true},
                             .target = {.progress = true}};
    int rc;

    bench_follow_parent();
    raw.shape = bench_shape_default();
    rc = parse(argc, argv, &raw);
    if (rc != CLI_OK) {
        return rc == CLI_INTERRUPTED ? CLI_OK : rc;
    }
    rc = raw.role != NULL && strcmp(raw.role, "target") == 0
             ? raw_run_target(&raw)
             : run_initiator(&raw);
    (void)fflush(stdout);
    _exit(rc);
}
