/* SPDX-License-Identifier: Apache-2.0 */
#include "limits.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define WORDS_MAX 8u

const char *const limits_ways[WAYS] = {"memcpy", "nt", "pvw", "self"};

struct words {
    const char *at[WORDS_MAX];
    size_t count;
};

static void usage(void)
{
    printf("usage: limits [OPTIONS]\n\n"
           "  --method LIST        of memcpy, nt, pvw, self (pvw)\n"
           "  --threads LIST       (1 and all cores)\n"
           "  --iov LIST           copies a system call or turn (64)\n"
           "  --from KIND          anon, memfd or shm (anon)\n"
           "  --to KIND            the same\n"
           "  --piece SIZE         most bytes of a merged copy (1MiB)\n"
           "  --pin                each thread to a core of its own\n"
           "" BENCH_SHAPE_USAGE BENCH_ROUND_USAGE);
}

static bool to_way(const char *word, enum way *ret)
{
    for (unsigned i = 0; i < WAYS; i++) {
        if (strcmp(word, limits_ways[i]) == 0) {
            *ret = (enum way)i;
            return i != WAY_NT || limits_has_nt();
        }
    }
    return false;
}

static bool add_config(struct limits *limits, enum way way, const char *threads,
                       const char *iov)
{
    struct limits_config *config = &limits->configs[limits->config_count];
    uint64_t thread_count;
    uint64_t batch;

    if (limits->config_count ==
            sizeof(limits->configs) / sizeof(limits->configs[0]) ||
        !cli_parse_u64(threads, 1, LIMITS_THREADS_MAX, &thread_count) ||
        !cli_parse_u64(iov, 1, LIMITS_IOV_MAX, &batch)) {
        cli_error("limits: no threads \"%s\" or batch \"%s\"", threads, iov);
        return false;
    }
    config->way = way;
    config->threads = (unsigned)thread_count;
    config->batch = (unsigned)batch;
    limits->used[way] = true;
    limits->config_count++;
    return true;
}

/* A batch means nothing to memcpy but the size of a turn: its first is taken. */
static bool add_configs(struct limits *limits, const struct words *methods,
                        const struct words *threads, const struct words *iovs)
{
    for (size_t i = 0; i < methods->count; i++) {
        enum way way;

        if (!to_way(methods->at[i], &way)) {
            cli_error("limits: there is no method \"%s\" here", methods->at[i]);
            return false;
        }
        for (size_t j = 0; j < threads->count; j++) {
            for (size_t k = 0; k < iovs->count; k++) {
                if (k > 0 && way != WAY_PVW && way != WAY_SELF) {
                    break;
                }
                if (!add_config(limits, way, threads->at[j], iovs->at[k])) {
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

int limits_parse(int argc, char **argv, struct limits *limits)
{
    static const struct option options[] = {
        BENCH_SHAPE_OPTIONS,
        BENCH_ROUND_OPTIONS,
        {"method", required_argument, NULL, 'm'},
        {"threads", required_argument, NULL, 't'},
        {"iov", required_argument, NULL, 'i'},
        {"from", required_argument, NULL, 'f'},
        {"to", required_argument, NULL, 'd'},
        {"piece", required_argument, NULL, 'P'},
        {"pin", no_argument, NULL, 'c'},
        {"help", no_argument, NULL, 'h'},
        {0}};
    static char cores[16];
    struct words methods = {.at = {"pvw"}, .count = 1};
    struct words threads = {.at = {"1", cores}, .count = 2};
    struct words iovs = {.at = {"64"}, .count = 1};
    bool good = true;
    int key;

    (void)snprintf(cores, sizeof(cores), "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    while (good && (key = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (key) {
        case 'h':
            usage();
            return CLI_INTERRUPTED;
        case 'm':
            split(optarg, &methods);
            break;
        case 't':
            split(optarg, &threads);
            break;
        case 'i':
            split(optarg, &iovs);
            break;
        case 'f':
            good = bench_kind_parse(optarg, &limits->from_kind);
            break;
        case 'd':
            good = bench_kind_parse(optarg, &limits->to_kind);
            break;
        case 'P':
            good = cli_parse_size(optarg, &limits->piece);
            break;
        case 'c':
            limits->pin = true;
            break;
        default:
            good = bench_shape_option(key, optarg, &limits->shape) ||
                   bench_round_option(key, optarg, &limits->rounds);
            break;
        }
    }
    good = good && optind == argc && bench_shape_check(&limits->shape) &&
           add_configs(limits, &methods, &threads, &iovs);
    return good ? CLI_OK : CLI_USAGE;
}
