/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proves the one rule of kvt, that memory comes back by completion alone, by
 * histories: random writes, reads, cancels, deadlines, removals, reloads,
 * kills, stops and resumes over three processes, with a stamp in every word.
 * Whatever kvt calls quiescent is overwritten on both sides at that moment, and
 * no word may change after that. docs/history.md says how to use it.
 *
 * A history that fails is shrunk and printed; with its file it can be run
 * again.
 */
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "history.h"

#define SOCKET_FD 3
#define ARENA_FD 4

struct settings {
    const char *engine;
    const char *replay;
    const char *save;
    uint64_t seed;
    uint64_t ops;
    uint32_t length; /* operations of one history */
    uint32_t shrink_runs;
    uint32_t repeat; /* of a replay */
};

static const struct option options[] = {
    {"engine", required_argument, NULL, 'e'},
    {"seed", required_argument, NULL, 's'},
    {"ops", required_argument, NULL, 'o'},
    {"length", required_argument, NULL, 'l'},
    {"replay", required_argument, NULL, 'r'},
    {"repeat", required_argument, NULL, 'n'},
    {"save", required_argument, NULL, 'w'},
    {"shrink", required_argument, NULL, 'k'},
    {"initiator", no_argument, NULL, 'I'},
    {"target", no_argument, NULL, 'T'},
    {NULL, 0, NULL, 0}};

static const char usage[] =
    "usage: history_checker [--engine ENGINE] [--seed N] [--ops N] "
    "[--length N]\n"
    "           [--save FILE] [--shrink RUNS]\n"
    "       history_checker --replay FILE [--repeat N] [--save FILE]\n";

static void be_process(int role)
{
    struct arena arena;

    if (!arena_map(&arena, ARENA_FD)) {
        exit(1); /* NOLINT(concurrency-mt-unsafe) */
    }
    if (role == 'I') {
        initiator_main(&arena, SOCKET_FD);
    }
    target_main(&arena, SOCKET_FD);
}

static bool parse(int argc, char **argv, struct settings *settings)
{
    int which;

    /* NOLINTNEXTLINE(concurrency-mt-unsafe) */
    while ((which = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (which) {
        case 'e':
            settings->engine = optarg;
            break;
        case 's':
            settings->seed = strtoull(optarg, NULL, 0);
            break;
        case 'o':
            settings->ops = strtoull(optarg, NULL, 0);
            break;
        case 'l':
            settings->length = (uint32_t)strtoul(optarg, NULL, 0);
            break;
        case 'r':
            settings->replay = optarg;
            break;
        case 'n':
            settings->repeat = (uint32_t)strtoul(optarg, NULL, 0);
            break;
        case 'w':
            settings->save = optarg;
            break;
        case 'k':
            settings->shrink_runs = (uint32_t)strtoul(optarg, NULL, 0);
            break;
        case 'I':
        case 'T':
            be_process(which);
            break;
        default:
            return false;
        }
    }
    return settings->length > 0 && optind == argc;
}

/* ------------------------------------------------------------------- report */

/* Each counter of totals is 64 bits. */
static void add_totals(struct totals *to, const struct totals *from)
{
    uint64_t sums[sizeof *to / sizeof(uint64_t)];
    uint64_t more[sizeof *to / sizeof(uint64_t)];

    memcpy(sums, to, sizeof sums);
    memcpy(more, from, sizeof more);
    for (size_t i = 0; i < sizeof sums / sizeof sums[0]; i++) {
        sums[i] += more[i];
    }
    memcpy(to, sums, sizeof sums);
}

#define N(value) ((unsigned long long)(value))

static void report(const struct totals *all, uint64_t histories, uint64_t ops,
                   uint64_t skipped)
{
    printf("%llu histories, %llu operations (%llu with nothing to do)\n",
           N(histories), N(ops), N(skipped));
    printf("  writes %llu, reads %llu, %llu MiB, refused %llu; done %llu, "
           "cancelled %llu, timed out %llu, broken %llu\n",
           N(all->writes), N(all->reads), N(all->bytes >> 20), N(all->refused),
           N(all->done), N(all->cancelled), N(all->timed_out), N(all->broken));
    printf("  cancels %llu, in flight at them %llu, of these cancelled and "
           "moving %llu; looks at whether more was posted %llu\n",
           N(all->cancels), N(all->cancels_flying), N(all->cancels_moving),
           N(all->frozen));
    printf("  kills of targets %llu, of the initiator %llu, in flight at them "
           "%llu\n",
           N(all->kills[0] + all->kills[1]), N(all->kills[INITIATOR]),
           N(all->kills_flying));
    if (all->died > 0) {
        printf("  targets that a library aborted %llu\n", N(all->died));
    }
    printf("  stops of targets %llu, of the initiator %llu, in flight at them "
           "%llu\n",
           N(all->stops[0] + all->stops[1]), N(all->stops[INITIATOR]),
           N(all->stops_flying));
    printf("  deaths confirmed %llu, in flight at them %llu, lost ones that "
           "they proved %llu\n",
           N(all->confirms), N(all->confirms_flying), N(all->confirms_lost));
    printf("  closes %llu, in flight at them %llu; busy %llu, not quiescent at "
           "these %llu\n",
           N(all->closes), N(all->closes_flying), N(all->closes_busy),
           N(all->closes_held));
    printf("  changes of peers %llu (failed %llu), memory taken back %llu "
           "(busy %llu)\n",
           N(all->changes), N(all->changes_failed), N(all->revokes),
           N(all->revokes_busy));
    printf("  lost: stopped %llu, target killed %llu, by a rule %llu, "
           "by a short close %llu, slow %llu; proven later %llu\n",
           N(all->lost_stopped), N(all->lost_killed), N(all->lost_ruled),
           N(all->lost_hurried), N(all->lost_slow), N(all->lost_proven));
    printf("  blocks checked and overwritten %llu, looks %llu, late bytes "
           "%llu\n",
           N(all->claimed), N(all->looks), N(all->late_bytes));
    printf("  writes final for one side first %llu\n", N(all->halves));
}

static void save(const struct history *history, const char *path)
{
    FILE *file = path != NULL ? fopen(path, "w") : NULL;

    if (file != NULL) {
        history_print(history, file);
        (void)fclose(file);
        printf("saved as %s\n", path);
    }
}

static void tell_failure(struct history *history, const char *finding,
                         const struct settings *settings)
{
    printf("FAILED: %s\n", finding);
    if (settings->shrink_runs > 0) {
        printf("shrinking %u operations\n", history->count);
        (void)fflush(stdout);
        shrink(history, settings->shrink_runs);
    }
    printf("what is left, %u operations (history_checker --replay FILE runs "
           "them again):\n",
           history->count);
    history_print(history, stdout);
    save(history, settings->save);
}

/* --------------------------------------------------------------------- runs */

static int run_replay(const struct settings *settings)
{
    FILE *file = fopen(settings->replay, "r");
    struct totals all = {0};
    struct history history;
    struct outcome outcome;
    uint64_t failed = 0;

    if (file == NULL || !history_read(&history, file)) {
        (void)fprintf(stderr, "%s is no history\n", settings->replay);
        return 2;
    }
    (void)fclose(file);
    for (uint32_t i = 0; i < settings->repeat; i++) {
        if (!checker_run(&history, &outcome)) {
            return 2;
        }
        add_totals(&all, &outcome.totals);
        if (outcome.failed) {
            failed++;
            printf("FAILED: %s\n", outcome.finding);
        }
    }
    report(&all, settings->repeat, (uint64_t)settings->repeat * history.count,
           0);
    printf("%llu of %u runs failed\n", N(failed), settings->repeat);
    history_free(&history);
    return failed > 0;
}

static int run_all(const struct settings *settings)
{
    struct totals all = {0};
    uint64_t ops = 0;
    uint64_t skipped = 0;
    uint64_t histories = 0;

    printf("engine %s, seed %llu\n", settings->engine, N(settings->seed));
    (void)fflush(stdout);
    while (ops < settings->ops) {
        struct history history;
        struct outcome outcome;
        uint64_t left = settings->ops - ops;
        uint32_t count = left < settings->length ? (uint32_t)left
                                                 : settings->length;

        if (!history_make(&history, settings->engine,
                          settings->seed + histories, count) ||
            !checker_run(&history, &outcome)) {
            (void)fprintf(stderr, "cannot run a history\n");
            return 2;
        }
        histories++;
        ops += count;
        skipped += outcome.skipped;
        add_totals(&all, &outcome.totals);
        if (outcome.failed) {
            report(&all, histories, ops, skipped);
            tell_failure(&history, outcome.finding, settings);
            history_free(&history);
            return 1;
        }
        history_free(&history);
    }
    report(&all, histories, ops, skipped);
    return 0;
}

int main(int argc, char **argv)
{
    struct settings settings = {.engine = "local",
                                .seed = 20261130,
                                .ops = 1000,
                                .length = 200,
                                .shrink_runs = 150,
                                .repeat = 1};

    if (!parse(argc, argv, &settings)) {
        (void)fputs(usage, stderr);
        return 2;
    }
    return settings.replay != NULL ? run_replay(&settings) : run_all(&settings);
}
