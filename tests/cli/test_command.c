/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command as people run it: its exit statuses, its one-line errors, and
 * what 'kvt replay' says after good runs, spoiled bytes, broken transfers,
 * killed holders and interrupts. Each case starts the real command with real
 * nodes and small pools. With --json its output must be one JSON object and
 * not a byte more: jansson refuses anything behind it.
 */
#include "command_run.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -------------------------------------------------------------------- cases */

static void words_and_their_mistakes(void **state)
{
    struct run run;

    (void)state;
    RUN(&run, 0, "--version");
    assert_int_equal(strncmp(run.out[0].text, "kvt ", 4), 0);
    end(&run);
    RUN(&run, 0, "help");
    assert_says(&run.out[0], "bench submit");
    end(&run);
    RUN(&run, 0, "help", "replay");
    assert_says(&run.out[0], "--kill-holder=N@REQUEST");
    assert_says(&run.out[0], "llama-3.1-70b");
    end(&run);
    REFUSED("no word \"walk\"", "walk");
    REFUSED("\"--walk\" is no option", "info", "--walk");
    REFUSED("too many", "info", "more");
    REFUSED("which one", "bench");
    REFUSED("started by 'kvt replay'", "replay-node");
}

/* B41 */
static void info_tells_engines_and_limits(void **state)
{
    struct run run;
    json_t *object;
    const json_t *engines;
    bool local = false;

    (void)state;
    RUN(&run, 0, "info");
    assert_says(&run.out[0], "memlock");
    assert_says(&run.out[0], "ptrace scope");
    end(&run);
    RUN(&run, 0, "info", "--json");
    object = parse(&run);
    engines = json_object_get(object, "engines");
    for (size_t i = 0; i < json_array_size(engines); i++) {
        const json_t *engine = json_array_get(engines, i);
        const json_t *name = json_object_get(engine, "name");

        local = local || (strcmp(json_string_value(name), "local") == 0 &&
                          flag(engine, "available"));
    }
    assert_true(local);
    assert_true(flag(json_object_get(json_object_get(object, "host"), "pidfd"),
                     "works"));
    json_decref(object);
    end(&run);
}

static void wrong_arguments_of_replay_are_refused(void **state)
{
    (void)state;
    REFUSED("--holders wants", "replay", "--holders=0");
    REFUSED("--memory wants", "replay", "--memory=lots");
    REFUSED("--speed wants", "replay", "--speed=fast");
    REFUSED("--kill-holder wants", "replay", "--kill-holder=1");
    REFUSED("no holder", "replay", "--kill-holder=2@5");
    REFUSED("request 501", "replay", "--kill-holder=1@501");
    REFUSED("--corrupt wants", "replay", "--corrupt=all");
    REFUSED("no model \"gpt\"", "replay", "--model=gpt");
    REFUSED("need a --model", "replay", "--tp=2");
    REFUSED("leave --block-bytes", "replay", "--model=llama-3.1-8b",
            "--block-bytes=1");
    REFUSED("does not fit", "replay", "--model=llama-3.1-70b",
            "--memory=100MiB");
    REFUSED("cannot be written", "replay", "--metrics=/nonexistent/file");
    REFUSED("one trace too many", "replay", "a-trace");
    REFUSED("is no option", "replay", "--walk");
}

static void a_malformed_line_is_named(void **state)
{
    char path[] = "/tmp/kvt-command-XXXXXX";
    char *argv[] = {getenv("KVT_TEST_COMMAND"), NULL, path, NULL};
    char word[] = "replay";
    struct run run;
    FILE *file;
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    file = fdopen(fd, "w");
    assert_non_null(file);
    assert_true(fputs("{\"timestamp\": 0, \"input_length\": 1, "
                      "\"output_length\": 1, \"hash_ids\": [1]}\n"
                      "{\"timestamp\": 0, \"input_length\": -1}\n",
                      file) >= 0);
    assert_int_equal(fclose(file), 0);
    argv[1] = word;
    spawn_command(&run, argv, environ);
    finish(&run);
    assert_says(&run.out[1], path);
    assert_refused(&run, ":2: input_length must be from 0");
    assert_int_equal(unlink(path), 0);
}

static void an_engine_that_is_not_there_is_an_error(void **state)
{
    struct run run;
    json_t *object;

    (void)state;
    RUN(&run, 1, "replay", SMALL, "--engine=none", "--json");
    assert_says(&run.out[1], "kvt: ");
    object = parse(&run);
    assert_true(json_is_string(json_object_get(object, "error")));
    json_decref(object);
    end(&run);
}

static void run_good(const char *a, const char *b)
{
    struct run run;
    json_t *object;

    RUN(&run, 0, "replay", SMALL, "--json", "--seed=1", a, b);
    object = parse(&run);
    assert_good(object);
    assert_int_equal(number(object, "bytes"),
                     number(object, "blocks_moved") * 16384);
    assert_int_equal(number(json_object_get(object, "bytes_by_path"), "local"),
                     number(object, "bytes"));
    assert_true(real(object, "hit_ratio") > 0);
    assert_true(real(object, "gb_per_s") > 0);
    assert_true(real(json_object_get(object, "latency_us"), "p99") > 0);
    assert_true(real(json_object_get(object, "submit_us"), "p50") > 0);
    json_decref(object);
    end(&run);
}

static void holders_write_every_block(void **state)
{
    (void)state;
    run_good("--holders=2", "--fetchers=1");
    run_good("--holders=4", "--fetchers=2");
    run_good("--shm", "--inflight=5");
}

static void fetchers_read_every_block(void **state)
{
    (void)state;
    run_good("--pull", "--holders=3");
    run_good("--pull", "--shm");
}

/* Three slots for requests of up to 119 blocks: they go in waves. */
static void pools_may_be_smaller_than_a_request(void **state)
{
    (void)state;
    run_good("--memory=60KiB", "--fetchers=2");
    run_good("--memory=60KiB", "--pull");
}

static void a_model_is_many_runs_of_pages(void **state)
{
    struct run run;
    json_t *object;

    (void)state;
    RUN(&run, 0, "replay", "--model=qwen2.5-0.5b", "--memory=40MiB",
        "--pool=400MiB", "--requests=5", "--json");
    object = parse(&run);
    assert_accounted(object);
    assert_int_equal(number(object, "verification_failures"), 0);
    assert_int_equal(number(object, "runs"), 48);
    assert_int_equal(number(object, "pages_per_run"), 32);
    assert_int_equal(number(object, "page_bytes"), 4096);
    assert_int_equal(number(object, "slots"), 6);
    assert_true(real(object, "scale") < 0.11);
    assert_int_equal(number(object, "kvt_blocks"),
                     number(object, "blocks_moved") * 48 * 32);
    /* The 32 pages of a block are adjacent in each run, on both sides; a few
     * of these runs are cut by the end of a request. */
    assert_true(number(object, "merged_copies") >=
                number(object, "blocks_moved") * 48 * 30);
    assert_says(&run.out[1], "scale 1:");
    json_decref(object);
    end(&run);
}

static void one_spoiled_byte_fails_the_run(void **state)
{
    static const char *const spoil[] = {
        "--corrupt=block", "--corrupt=neighbour", "--corrupt=guard"};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct run run;
        json_t *object;

        RUN(&run, 1, "replay", SMALL, "--json", spoil[i]);
        object = parse(&run);
        assert_accounted(object);
        assert_int_equal(number(object, "verification_failures"), 1);
        assert_int_equal(number(object, "wrong_blocks"), i == 0);
        assert_int_equal(number(object, "blocks_failed") > 0, i == 0);
        json_decref(object);
        end(&run);
    }
}

static void blocks_of_a_killed_holder_come_from_others(void **state)
{
    static const char *const direction[] = {"--workers=1", "--pull"};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct run run;
        json_t *object;
        const json_t *holders;

        RUN(&run, 0, "replay", SMALL, "--json", "--holders=3",
            "--kill-holder=1@12", "--kill-holder=2@30", direction[i]);
        object = parse(&run);
        assert_good(object);
        holders = json_object_get(object, "holders");
        assert_false(flag(json_array_get(holders, 0), "killed"));
        assert_true(flag(json_array_get(holders, 1), "killed"));
        assert_true(flag(json_array_get(holders, 2), "killed"));
        assert_int_equal(number(json_array_get(holders, 0), "refetched"), 0);
        json_decref(object);
        end(&run);
    }
}

static void without_holders_blocks_fail_and_none_is_wrong(void **state)
{
    struct run run;
    json_t *object;

    (void)state;
    RUN(&run, 1, "replay", SMALL, "--json", "--kill-holder=0@20",
        "--kill-holder=1@20");
    object = parse(&run);
    assert_accounted(object);
    assert_int_equal(number(object, "requests"), 60);
    assert_true(number(object, "blocks_failed") > 0);
    assert_int_equal(number(object, "verification_failures"), 0);
    json_decref(object);
    end(&run);
}

static void failed_transfers_are_made_up_for(void **state)
{
    static const char *const engines[] = {
        "--engine=fault:local?reject=2;5",
        "--engine=fault:local?fail=3",
        "--engine=fault:local?disconnect=4",
    };

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct run run;
        json_t *object;

        RUN(&run, 0, "replay", SMALL, "--json", engines[i]);
        object = parse(&run);
        assert_good(object);
        assert_true(number(object, "blocks_refetched") > 0);
        json_decref(object);
        end(&run);
    }
}

/*
 * At this speed the trace's eleventh request is due in weeks. The first line
 * of progress shows that requests were settled, and that is when the interrupt
 * comes.
 */
static void an_interrupted_run_still_reports(void **state)
{
    static const char *const arguments[] = {"replay",
                                            "--memory=4MiB",
                                            "--block-bytes=16KiB",
                                            "--requests=20",
                                            "--speed=0.000001",
                                            "--json",
                                            NULL};
    struct run run;
    json_t *object;

    (void)state;
    start(&run, arguments);
    read_until(&run, 1, "requests/s");
    assert_int_equal(kill(run.pid, SIGINT), 0);
    finish(&run);
    assert_status(&run, 130);
    object = parse(&run);
    assert_true(flag(object, "interrupted"));
    assert_accounted(object);
    assert_true(number(object, "requests") > 0);
    assert_true(number(object, "requests") < 20);
    assert_int_equal(number(object, "verification_failures"), 0);
    json_decref(object);
    end(&run);
}

static void the_table_and_the_metrics_are_written(void **state)
{
    char path[] = "/tmp/kvt-metrics-XXXXXX";
    char option[64];
    char line[256];
    struct run run;
    FILE *file;
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    (void)snprintf(option, sizeof(option), "--metrics=%s", path);
    RUN(&run, 0, "replay", SMALL, option);
    assert_says(&run.out[0], "hit ratio");
    assert_says(&run.out[0], "verification failures             0");
    end(&run);
    file = fdopen(fd, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    assert_int_equal(strncmp(line, "# HELP kvt_", 11), 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(unlink(path), 0);
}

static void bench_refuses_bad_indices_at_every_size(void **state)
{
    struct run run;
    json_t *object;
    const json_t *rows;

    (void)state;
    RUN(&run, 0, "bench", "submit", "--json");
    object = parse(&run);
    rows = json_object_get(object, "rows");
    assert_int_equal(json_array_size(rows), 6);
    for (size_t i = 0; i < 6; i++) {
        assert_true(flag(json_array_get(rows, i), "bad_index_refused"));
    }
    json_decref(object);
    end(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_and_their_mistakes),
        cmocka_unit_test(info_tells_engines_and_limits),
        cmocka_unit_test(wrong_arguments_of_replay_are_refused),
        cmocka_unit_test(a_malformed_line_is_named),
        cmocka_unit_test(an_engine_that_is_not_there_is_an_error),
        cmocka_unit_test(holders_write_every_block),
        cmocka_unit_test(fetchers_read_every_block),
        cmocka_unit_test(pools_may_be_smaller_than_a_request),
        cmocka_unit_test(a_model_is_many_runs_of_pages),
        cmocka_unit_test(one_spoiled_byte_fails_the_run),
        cmocka_unit_test(blocks_of_a_killed_holder_come_from_others),
        cmocka_unit_test(without_holders_blocks_fail_and_none_is_wrong),
        cmocka_unit_test(failed_transfers_are_made_up_for),
        cmocka_unit_test(an_interrupted_run_still_reports),
        cmocka_unit_test(the_table_and_the_metrics_are_written),
        cmocka_unit_test(bench_refuses_bad_indices_at_every_size),
    };

    if (!command_is_known()) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
