/* SPDX-License-Identifier: Apache-2.0 */
#include "replay.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "args.h"
#include "kvpool.h"

void replay_fail(struct replay *replay, const char *format, ...)
{
    va_list args;

    if (replay->failure[0] != '\0') {
        return;
    }
    va_start(args, format);
    (void)vsnprintf(replay->failure, sizeof(replay->failure), format, args);
    va_end(args);
}

/* -------------------------------------------------------------------- set-up */

int replay_geometry(const struct replay_options *options, struct geometry *ret)
{
    char error[GEOMETRY_TEXT_MAX];

    if (options->model == NULL) {
        geometry_plain(options->block_bytes, ret);
    } else if (!geometry_model(options->model, options->page_tokens,
                               options->tp, ret, error)) {
        cli_error("replay: %s", error);
        return CLI_USAGE;
    }
    return CLI_OK;
}

static int choose_slots(struct replay *replay)
{
    const struct replay_options *options = &replay->options;
    uint64_t pool = options->pool != 0 ? options->pool : options->memory;
    char size[CLI_SIZE_TEXT];
    char memory[CLI_SIZE_TEXT];

    replay->slots_wanted = kvpool_slots_in(&replay->geometry, pool);
    replay->slots = kvpool_slots_in(&replay->geometry, options->memory);
    if (replay->slots > replay->slots_wanted) {
        replay->slots = replay->slots_wanted;
    }
    if (replay->slots > REPLAY_SLOTS_MAX) {
        replay->slots = REPLAY_SLOTS_MAX;
    }
    if (replay->slots == 0) {
        cli_error("replay: one hash block has %s and does not fit a pool of "
                  "%s: give more --memory%s",
                  cli_format_size(geometry_slot_bytes(&replay->geometry), size),
                  cli_format_size(
                      pool < options->memory ? pool : options->memory, memory),
                  options->model != NULL ? ", or a larger --tp"
                                         : ", or a smaller --block-bytes");
        return CLI_USAGE;
    }
    return CLI_OK;
}

/*
 * Reads the part of the trace that will be run, so that a malformed line is
 * reported before anything is started, and the progress bar knows the end.
 */
static int check_trace(struct replay *replay)
{
    const struct replay_options *options = &replay->options;
    struct trace_request request;
    char error[TRACE_TEXT_MAX];
    int rc = 1;

    replay->trace = trace_open(options->trace, error);
    if (replay->trace == NULL) {
        cli_error("%s", error);
        return CLI_USAGE;
    }
    while (options->requests == 0 ||
           replay->trace_requests < options->requests) {
        rc = trace_next(replay->trace, &request, error);
        if (rc <= 0) {
            break;
        }
        replay->trace_requests++;
    }
    if (rc < 0) {
        cli_error("%s", error);
        return CLI_USAGE;
    }
    if (replay->trace_requests == 0) {
        cli_error("%s: has no requests", options->trace);
        return CLI_USAGE;
    }
    trace_rewind(replay->trace);
    return CLI_OK;
}

/* Once the number of requests and of holders is known. */
static int check_kills(const struct replay *replay)
{
    const struct replay_options *options = &replay->options;

    for (size_t i = 0; i < options->kill_count; i++) {
        if (options->kills[i].holder >= options->holders) {
            cli_error("replay: --kill-holder names no holder; they count from "
                      "0 and there are %llu",
                      (unsigned long long)options->holders);
            return CLI_USAGE;
        }
        if (options->kills[i].request > replay->trace_requests) {
            cli_error("replay: --kill-holder names request %llu of a run of "
                      "%llu",
                      (unsigned long long)options->kills[i].request,
                      (unsigned long long)replay->trace_requests);
            return CLI_USAGE;
        }
    }
    return CLI_OK;
}

static int open_metrics(struct replay *replay)
{
    if (replay->options.metrics == NULL) {
        return CLI_OK;
    }
    replay->metrics_file = fopen(replay->options.metrics, "we");
    if (replay->metrics_file == NULL) {
        cli_error("replay: %s cannot be written: %s", replay->options.metrics,
                  strerror(errno));
        return CLI_USAGE;
    }
    return CLI_OK;
}

/*
 * Signals are read from a descriptor. They stay blocked in the nodes, which
 * inherit that: an interrupt of the whole process group ends the run in order.
 */
int replay_signals(int *ret_fd)
{
    sigset_t set;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, &set, NULL);
    *ret_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (*ret_fd < 0) {
        cli_error("replay: no descriptor for signals: %s", strerror(errno));
        return CLI_FAILED;
    }
    return CLI_OK;
}

/* A number that JSON readers hold exactly, so that a run can be repeated. */
static uint64_t choose_seed(void)
{
    uint64_t seed;

    if (getrandom(&seed, sizeof(seed), 0) != sizeof(seed)) {
        seed = cli_now_ns();
    }
    return seed % TRACE_NUMBER_MAX;
}

static int prepare(struct replay *replay)
{
    struct replay_options *options = &replay->options;
    int rc = replay_geometry(options, &replay->geometry);

    if (rc == CLI_OK) {
        rc = choose_slots(replay);
    }
    if (rc == CLI_OK) {
        rc = check_trace(replay);
    }
    if (rc == CLI_OK && options->connect != NULL) {
        /* Before signals wait to be read: an interrupt ends it at once. */
        rc = remote_open(replay);
    }
    if (rc == CLI_OK) {
        rc = check_kills(replay);
    }
    if (rc == CLI_OK) {
        rc = open_metrics(replay);
    }
    if (rc == CLI_OK) {
        rc = replay_signals(&replay->signal_fd);
    }
    if (rc != CLI_OK) {
        return rc;
    }
    if (!options->seed_given) {
        options->seed = choose_seed();
    }
    replay->node_count = options->holders + options->fetchers;
    replay->nodes = cli_alloc(replay->node_count, sizeof(*replay->nodes));
    for (uint64_t i = 0; i < replay->node_count; i++) {
        proto_open(&replay->nodes[i].control, -1, PROTO_PAYLOAD_MAX);
    }
    flow_open(replay);
    return CLI_OK;
}

static void clean_up(struct replay *replay)
{
    for (uint64_t i = 0; i < replay->node_count; i++) {
        proto_close(&replay->nodes[i].control);
        free(replay->nodes[i].metadata);
        free(replay->nodes[i].local);
    }
    free(replay->nodes);
    link_leave(&replay->link, NULL);
    flow_close(replay);
    spans_close(&replay->totals.active);
    trace_close(replay->trace);
    free(replay->metrics_text);
    if (replay->metrics_file != NULL) {
        (void)fclose(replay->metrics_file);
    }
    if (replay->signal_fd >= 0) {
        (void)close(replay->signal_fd);
    }
}

/* ----------------------------------------------------------------------- run */

static void kill_holders(struct replay *replay)
{
    struct replay_options *options = &replay->options;

    for (size_t i = 0; i < options->kill_count; i++) {
        struct replay_kill *order = &options->kills[i];
        struct replay_node *holder = nodes_holder(replay, order->holder);

        if (order->done || replay->totals.started < order->request) {
            continue;
        }
        order->done = true;
        nodes_kill(replay, holder);
    }
}

/* When a request is to be started. */
static uint64_t due_ns(const struct replay *replay, double first_ms,
                       const struct trace_request *request)
{
    double after_ms = request->timestamp_ms - first_ms;

    if (replay->options.speed <= 0 || after_ms <= 0) {
        return replay->begin_ns;
    }
    return replay->begin_ns +
           (uint64_t)(after_ms * 1e6 / replay->options.speed);
}

/* The next request of the run: false at its end. */
static bool next_request(struct replay *replay, struct trace_request *ret)
{
    char error[TRACE_TEXT_MAX];
    int rc = 0;

    if (replay->totals.started < replay->trace_requests) {
        rc = trace_next(replay->trace, ret, error);
    }
    if (rc < 0) {
        /* It was well when it was checked: somebody writes to it. */
        replay_fail(replay, "%s", error);
    }
    replay->trace_ended = rc <= 0;
    return rc > 0;
}

/* No request is started any more; those that were are brought to their end. */
static bool is_stopped(const struct replay *replay)
{
    return replay->interrupted || replay->cut[0] != '\0';
}

static void run(struct replay *replay)
{
    struct trace_request next;
    bool has_next = next_request(replay, &next);
    double first_ms = has_next ? next.timestamp_ms : 0;

    replay->begin_ns = cli_now_ns();
    progress_open(&replay->progress, replay->trace_requests);
    while (replay->failure[0] == '\0') {
        int wait_ms = progress_wait_ms(&replay->progress);

        while (has_next && !is_stopped(replay) &&
               replay->active < replay->options.inflight) {
            uint64_t now = cli_now_ns();
            uint64_t due = due_ns(replay, first_ms, &next);

            if (due > now) {
                uint64_t ms = (due - now) / 1000000 + 1;

                wait_ms = cli_earlier_ms(wait_ms, ms < 1000 ? (int)ms : 1000);
                break;
            }
            flow_start(replay, &next);
            kill_holders(replay);
            has_next = next_request(replay, &next);
        }
        if (replay->active == 0 && (!has_next || is_stopped(replay))) {
            break;
        }
        nodes_turn(replay, wait_ms);
        progress_update(&replay->progress, replay->totals.settled,
                        replay->totals.bytes);
    }
    replay->end_ns = cli_now_ns();
    progress_close(&replay->progress);
}

static void write_metrics(struct replay *replay)
{
    FILE *file = replay->metrics_file;
    bool good;

    if (file == NULL) {
        return;
    }
    good = fwrite(replay->metrics_text, 1, replay->metrics_length, file) ==
           replay->metrics_length;
    replay->metrics_file = NULL;
    if (fclose(file) != 0 || !good) {
        replay_fail(replay, "%s cannot be written: %s", replay->options.metrics,
                    strerror(errno));
    }
}

static int exit_status(const struct replay *replay)
{
    if (replay->failure[0] != '\0' || replay->cut[0] != '\0' ||
        report_failures(replay) > 0 || replay->totals.counts.failed > 0 ||
        !report_accounted(replay)) {
        return CLI_FAILED;
    }
    return replay->interrupted ? CLI_INTERRUPTED : CLI_OK;
}

static void run_all(struct replay *replay)
{
    report_shape(replay);
    if (nodes_start(replay)) {
        run(replay);
    }
    if (replay->end_ns == 0 || replay->failure[0] != '\0') {
        nodes_kill_all(replay);
    } else {
        nodes_end(replay);
    }
    write_metrics(replay);
    if (replay->failure[0] != '\0') {
        cli_error("%s", replay->failure);
    }
    if (replay->options.json) {
        report_json(replay);
    } else if (replay->begin_ns != 0) {
        report_table(replay);
    }
}

int replay_main(int argc, char **argv)
{
    /* Large, because of its histograms, but it lives as long as the process. */
    static struct replay replay = {
        .signal_fd = -1,
        .link = {.proto = {.fd = -1}},
    };
    int rc = replay_parse(argc, argv, &replay.options);

    if (rc == CLI_OK && replay.options.listen != NULL) {
        return serve_main(&replay.options);
    }
    if (rc == CLI_OK) {
        rc = prepare(&replay);
    }
    if (rc == CLI_OK) {
        run_all(&replay);
        rc = exit_status(&replay);
    }
    clean_up(&replay);
    return rc == ARGS_HELPED ? CLI_OK : rc;
}
