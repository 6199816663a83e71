/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <string.h>

#include "replay.h"

#define GROUPED_TEXT 32

/* "14,162" */
static const char *group(uint64_t value, char text[GROUPED_TEXT])
{
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%llu",
                          (unsigned long long)value);
    char *to = text;

    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) {
            *to++ = ',';
        }
        *to++ = digits[i];
    }
    *to = '\0';
    return text;
}

static double to_us(uint64_t ns)
{
    return (double)ns / 1e3;
}

static double ratio(uint64_t part, uint64_t whole)
{
    return whole > 0 ? (double)part / (double)whole : 0;
}

uint64_t report_failures(const struct replay *replay)
{
    return replay->totals.wrong_blocks + replay->totals.wrong_around +
           replay->totals.wrong_at_end;
}

/* Every block of every finished request has one fate, and the holders' books
 * say the same as the fetchers'. */
bool report_accounted(const struct replay *replay)
{
    const struct fetch_counts *counts = &replay->totals.counts;
    uint64_t landed = 0;
    bool good = replay->totals.blocks ==
                counts->hits + counts->shared + counts->landed + counts->failed;

    for (uint64_t i = 0; i < replay->options.holders && replay->nodes != NULL;
         i++) {
        const struct holder_fates *fates = &replay->nodes[i].fates;

        landed += fates->landed;
        good = good && fates->asked == fates->landed + fates->wrong +
                                           fates->refetched + fates->failed;
    }
    return good && landed == counts->landed;
}

static double seconds_of(const struct replay *replay)
{
    return replay->end_ns > 0
               ? (double)(replay->end_ns - replay->begin_ns) / 1e9
               : 0;
}

static double gb_per_s(const struct replay *replay, double seconds)
{
    return seconds > 0 ? (double)replay->totals.bytes / 1e9 / seconds : 0;
}

static double scale_of(const struct replay *replay)
{
    return ratio(replay->slots, replay->slots_wanted);
}

/* Bytes that kvt says it moved by one path, all nodes together: those of
 * requests to the engine that ended well, also in transfers that did not. */
static uint64_t bytes_by(const struct replay *replay, bool local)
{
    uint64_t bytes = 0;

    for (uint64_t i = 0; i < replay->node_count && replay->nodes != NULL; i++) {
        bytes += local ? replay->nodes[i].bytes_local
                       : replay->nodes[i].bytes_nixl;
    }
    return bytes;
}

/* Both sides have to let it happen. */
static bool may_shortcut(const struct replay *replay)
{
    return !replay->options.no_same_host &&
           (replay->options.connect == NULL || replay->offer.no_same_host == 0);
}

static void print_run(const struct replay *replay)
{
    const struct replay_options *options = &replay->options;
    bool remote = options->connect != NULL;
    char count[GROUPED_TEXT];

    fprintf(stderr, "run         %s requests, %llu holder%s",
            group(replay->trace_requests, count),
            (unsigned long long)options->holders,
            options->holders > 1 ? "s" : "");
    if (remote) {
        fprintf(stderr, " at %s (engine %s)", replay->link.other,
                replay->offer.engine);
    }
    fprintf(stderr, " %s %llu fetcher%s%s, engine %s, seed %llu\n",
            options->pull ? "read by" : "write to",
            (unsigned long long)options->fetchers,
            options->fetchers > 1 ? "s" : "", remote ? " here" : "",
            options->engine, (unsigned long long)options->seed);
}

void report_shape(const struct replay *replay)
{
    const struct replay_options *options = &replay->options;
    const struct geometry *geometry = &replay->geometry;
    char size[CLI_SIZE_TEXT];
    char page[CLI_SIZE_TEXT];
    char count[GROUPED_TEXT];
    char wanted[GROUPED_TEXT];

    print_run(replay);
    fprintf(stderr, "hash block  %s",
            cli_format_size(geometry_slot_bytes(geometry), size));
    if (options->model != NULL) {
        fprintf(stderr,
                ": %s, %llu runs of %llu pages of %s (%llu tokens each)",
                options->model, (unsigned long long)geometry->regions,
                (unsigned long long)geometry->pages,
                cli_format_size(geometry->page_bytes, page),
                (unsigned long long)geometry->page_tokens);
    }
    fprintf(
        stderr, "\npool        %s slots in each process, %s; ",
        group(replay->slots, count),
        cli_format_size(replay->slots * geometry_slot_bytes(geometry), size));
    if (replay->slots < replay->slots_wanted) {
        fprintf(stderr, "scale 1:%.1f, for %s slots of --pool\n",
                1 / scale_of(replay), group(replay->slots_wanted, wanted));
    } else {
        fprintf(stderr, "scale 1:1\n");
    }
}

/* -------------------------------------------------------------------- table */

static void print_counts(const struct replay *replay)
{
    const struct replay_totals *totals = &replay->totals;
    const struct fetch_counts *counts = &totals->counts;
    char a[GROUPED_TEXT];
    char b[GROUPED_TEXT];
    char c[GROUPED_TEXT];
    char d[GROUPED_TEXT];
    char e[GROUPED_TEXT];
    char size[CLI_SIZE_TEXT];

    printf("requests               %12s   %s\n", group(totals->settled, a),
           replay->interrupted      ? "interrupted"
           : replay->cut[0] != '\0' ? "then the other side was gone"
                                    : "");
    printf("blocks                 %12s   %s hits, %s shared, %s moved, %s "
           "failed\n",
           group(totals->blocks, d), group(counts->hits, a),
           group(counts->shared, b), group(counts->landed, c),
           group(counts->failed, e));
    if (totals->refetched > 0) {
        printf("fetched again          %12s   from another holder\n",
               group(totals->refetched, a));
    }
    printf("bytes                  %12s   %s by the local path, ",
           group(totals->bytes, a),
           cli_format_size(bytes_by(replay, true), size));
    printf("%s by NIXL%s\n", cli_format_size(bytes_by(replay, false), size),
           may_shortcut(replay) ? "" : " (same-host shortcut off)");
    printf("hit ratio              %11.1f%%\n",
           100 * ratio(counts->hits + counts->shared, totals->blocks));
    printf("merged copies          %12s   of %s kvt blocks\n",
           group(totals->merged, a), group(totals->pages, b));
}

static void print_speeds(struct replay *replay)
{
    struct replay_totals *totals = &replay->totals;
    double active = (double)spans_total_ns(&totals->active) / 1e9;
    double whole = seconds_of(replay);

    printf("GB/s                   %12.2f   in %.2f s with transfers; the run "
           "took %.2f s with checks\n",
           gb_per_s(replay, active), active, whole);
    printf("request latency us     %12.1f   p50\n"
           "                       %12.1f   p90\n"
           "                       %12.1f   p99\n",
           to_us(histogram_percentile(&totals->latency, 50)),
           to_us(histogram_percentile(&totals->latency, 90)),
           to_us(histogram_percentile(&totals->latency, 99)));
    printf("submit us              %12.1f   p50\n"
           "                       %12.1f   p99\n"
           "  not preempted        %12.1f   p99, of %.1f%% of the calls",
           to_us(histogram_percentile(&totals->submit, 50)),
           to_us(histogram_percentile(&totals->submit, 99)),
           to_us(histogram_percentile(&totals->submit_quiet, 99)),
           100 * ratio(totals->submit_quiet.count, totals->submit.count));
    if (replay->options.model != NULL) {
        /* Short lists would only show what a call costs without any. */
        printf("; %.1f ns for each index",
               ratio(totals->quiet_ns, totals->quiet_indices));
    }
    printf("\n");
}

static void print_holders(const struct replay *replay)
{
    char size[CLI_SIZE_TEXT];

    printf("\n%-12s %10s %10s %10s %10s %10s %12s\n", "holder", "asked",
           "landed", "wrong", "refetched", "failed", "bytes");
    for (uint64_t i = 0; i < replay->options.holders; i++) {
        const struct replay_node *holder = &replay->nodes[i];
        const struct holder_fates *fates = &holder->fates;

        printf("%-2llu%-10s %10llu %10llu %10llu %10llu %10llu %12s\n",
               (unsigned long long)i, holder->killed ? " (killed)" : "",
               (unsigned long long)fates->asked,
               (unsigned long long)fates->landed,
               (unsigned long long)fates->wrong,
               (unsigned long long)fates->refetched,
               (unsigned long long)fates->failed,
               cli_format_size(fates->bytes, size));
    }
}

void report_table(struct replay *replay)
{
    const struct replay_totals *totals = &replay->totals;
    uint64_t failures = report_failures(replay);

    print_counts(replay);
    print_speeds(replay);
    printf("verification failures  %12llu", (unsigned long long)failures);
    if (failures > 0) {
        printf("   %llu blocks, %llu neighbours and guards, %llu at the end",
               (unsigned long long)totals->wrong_blocks,
               (unsigned long long)totals->wrong_around,
               (unsigned long long)totals->wrong_at_end);
    }
    printf("\n");
    if (!report_accounted(replay)) {
        printf("the books do not balance: a block has no fate, or two\n");
    }
    print_holders(replay);
}

/* --------------------------------------------------------------------- JSON */

static void set_number(json_t *object, const char *key, uint64_t value)
{
    (void)json_object_set_new(object, key, json_integer((json_int_t)value));
}

static void set_real(json_t *object, const char *key, double value)
{
    (void)json_object_set_new(object, key, json_real(value));
}

static void set_text(json_t *object, const char *key, const char *value)
{
    /* Arguments may hold any bytes, JSON only UTF-8. */
    json_t *text = json_string(value);

    (void)json_object_set_new(object, key,
                              text != NULL ? text : json_string("?"));
}

static void set_flag(json_t *object, const char *key, bool value)
{
    (void)json_object_set_new(object, key, json_boolean(value));
}

static json_t *percentiles(const struct histogram *histogram, bool with_p90)
{
    json_t *object = json_object();

    set_real(object, "p50", to_us(histogram_percentile(histogram, 50)));
    if (with_p90) {
        set_real(object, "p90", to_us(histogram_percentile(histogram, 90)));
    }
    set_real(object, "p99", to_us(histogram_percentile(histogram, 99)));
    return object;
}

static json_t *list_holders(const struct replay *replay)
{
    json_t *list = json_array();

    for (uint64_t i = 0; i < replay->options.holders; i++) {
        const struct replay_node *holder = &replay->nodes[i];
        json_t *object = json_object();

        set_number(object, "holder", i);
        set_flag(object, "killed", holder->killed);
        set_number(object, "asked", holder->fates.asked);
        set_number(object, "landed", holder->fates.landed);
        set_number(object, "wrong", holder->fates.wrong);
        set_number(object, "refetched", holder->fates.refetched);
        set_number(object, "failed", holder->fates.failed);
        set_number(object, "bytes", holder->fates.bytes);
        (void)json_array_append_new(list, object);
    }
    return list;
}

static void set_shape(json_t *object, const struct replay *replay)
{
    const struct replay_options *options = &replay->options;

    set_text(object, "engine", options->engine);
    set_text(object, "version", kvt_version());
    set_text(object, "trace", options->trace);
    if (options->model != NULL) {
        set_text(object, "model", options->model);
    }
    set_flag(object, "same_host_shortcut", may_shortcut(replay));
    if (options->connect != NULL) {
        set_text(object, "holders_at", replay->link.other);
        set_text(object, "holders_engine", replay->offer.engine);
    }
    set_text(object, "direction", options->pull ? "read" : "write");
    set_number(object, "fetchers", options->fetchers);
    set_number(object, "inflight", options->inflight);
    set_number(object, "seed", options->seed);
    set_number(object, "block_bytes", geometry_slot_bytes(&replay->geometry));
    set_number(object, "page_bytes", replay->geometry.page_bytes);
    set_number(object, "runs", replay->geometry.regions);
    set_number(object, "pages_per_run", replay->geometry.pages);
    set_number(object, "slots", replay->slots);
    set_real(object, "scale", scale_of(replay));
}

static void set_blocks(json_t *object, const struct replay *replay)
{
    const struct replay_totals *totals = &replay->totals;
    const struct fetch_counts *counts = &totals->counts;
    json_t *paths = json_object();

    set_number(object, "requests", totals->settled);
    set_number(object, "blocks", totals->blocks);
    set_number(object, "blocks_hit", counts->hits);
    set_number(object, "blocks_shared", counts->shared);
    set_number(object, "blocks_moved", counts->landed);
    set_number(object, "blocks_failed", counts->failed);
    set_number(object, "blocks_refetched", totals->refetched);
    set_number(object, "bytes", totals->bytes);
    set_number(paths, "local", bytes_by(replay, true));
    set_number(paths, "nixl", bytes_by(replay, false));
    (void)json_object_set_new(object, "bytes_by_path", paths);
    set_real(object, "hit_ratio",
             ratio(counts->hits + counts->shared, totals->blocks));
    set_number(object, "transfers", totals->transfers);
    set_number(object, "kvt_blocks", totals->pages);
    set_number(object, "merged_copies", totals->merged);
}

static void set_submit(json_t *object, const struct replay_totals *totals)
{
    (void)json_object_set_new(object, "submit_us",
                              percentiles(&totals->submit, false));
    (void)json_object_set_new(object, "submit_not_preempted_us",
                              percentiles(&totals->submit_quiet, false));
    set_number(object, "submit_preempted",
               totals->submit.count - totals->submit_quiet.count);
    set_real(object, "submit_ns_per_index",
             ratio(totals->quiet_ns, totals->quiet_indices));
}

void report_json(struct replay *replay)
{
    struct replay_totals *totals = &replay->totals;
    double active = (double)spans_total_ns(&totals->active) / 1e9;
    json_t *object = json_object();

    set_blocks(object, replay);
    set_real(object, "gb_per_s", gb_per_s(replay, active));
    set_real(object, "transfer_seconds", active);
    set_real(object, "seconds", seconds_of(replay));
    (void)json_object_set_new(object, "latency_us",
                              percentiles(&totals->latency, true));
    set_submit(object, totals);
    set_number(object, "verification_failures", report_failures(replay));
    set_number(object, "wrong_blocks", totals->wrong_blocks);
    set_number(object, "wrong_neighbours", totals->wrong_around);
    set_number(object, "wrong_at_end", totals->wrong_at_end);
    set_flag(object, "accounted", report_accounted(replay));
    set_flag(object, "interrupted", replay->interrupted);
    if (replay->failure[0] != '\0' || replay->cut[0] != '\0') {
        set_text(object, "error",
                 replay->failure[0] != '\0' ? replay->failure : replay->cut);
    }
    set_shape(object, replay);
    (void)json_object_set_new(object, "holders", list_holders(replay));
    (void)json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(object);
}
