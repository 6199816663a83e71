/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command as people run it: its exit statuses, its one-line errors, and
 * what 'kvt replay' says after good runs, spoiled bytes, broken transfers,
 * killed holders and interrupts. Each case starts the real command with real
 * nodes and small pools. With --json its output must be one JSON object and
 * not a byte more: jansson refuses anything behind it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ARGUMENTS_MAX 24

/* Small enough for a sanitizer, large enough to evict, wait and share. */
#define SMALL "--memory=4MiB", "--block-bytes=16KiB", "--requests=60"

struct output {
    char *text;
    size_t length;
};

struct run {
    pid_t pid;
    int fds[2]; /* its stdout and stderr */
    struct output out[2];
    int status; /* its exit status, or -1 */
};

static char trace_path[4096];

/* ---------------------------------------------------------------- processes */

static void spawn_command(struct run *run, char *const argv[],
                          char *const environment[])
{
    posix_spawn_file_actions_t actions;
    int out[2];
    int err[2];

    *run = (struct run){0};
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    assert_int_equal(pipe2(err, O_CLOEXEC), 0);
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, out[1], 1), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, err[1], 2), 0);
    assert_int_equal(
        posix_spawn(&run->pid, argv[0], &actions, NULL, argv, environment), 0);
    (void)posix_spawn_file_actions_destroy(&actions);
    (void)close(out[1]);
    (void)close(err[1]);
    run->fds[0] = out[0];
    run->fds[1] = err[0];
}

/* The command with these arguments; a replay is one of the sample. */
static void start(struct run *run, const char *const arguments[])
{
    char *argv[ARGUMENTS_MAX + 3] = {getenv("KVT_TEST_COMMAND")};
    size_t count = 1;

    assert_non_null(argv[0]);
    for (size_t i = 0; arguments[i] != NULL; i++) {
        assert_true(count < ARGUMENTS_MAX);
        argv[count++] = (char *)(uintptr_t)arguments[i];
    }
    if (strcmp(arguments[0], "replay") == 0) {
        argv[count++] = trace_path;
    }
    spawn_command(run, argv, environ);
}

/* Reads what is there; false once both ends are closed. */
static bool read_output(struct run *run)
{
    struct pollfd fds[2] = {
        {.fd = run->fds[0], .events = POLLIN},
        {.fd = run->fds[1], .events = POLLIN},
    };

    if (run->fds[0] < 0 && run->fds[1] < 0) {
        return false;
    }
    assert_true(poll(fds, 2, -1) > 0);
    for (size_t i = 0; i < 2; i++) {
        struct output *output = &run->out[i];
        ssize_t got;

        if (fds[i].fd < 0 || fds[i].revents == 0) {
            continue;
        }
        output->text = realloc(output->text, output->length + 65537);
        assert_non_null(output->text);
        got = read(run->fds[i], output->text + output->length, 65536);
        assert_true(got >= 0);
        output->length += (size_t)got;
        output->text[output->length] = '\0';
        if (got == 0) {
            (void)close(run->fds[i]);
            run->fds[i] = -1;
        }
    }
    return true;
}

static void finish(struct run *run)
{
    int status;

    while (read_output(run)) {
    }
    assert_int_equal(waitpid(run->pid, &status, 0), run->pid);
    run->status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void end(struct run *run)
{
    free(run->out[0].text);
    free(run->out[1].text);
}

static void assert_status(const struct run *run, int status)
{
    if (run->status != status) {
        fail_msg("exit status %d, not %d; stderr:\n%s", run->status, status,
                 run->out[1].text);
    }
}

/* Runs to the end and expects the status. */
#define RUN(run, want, ...)                                                    \
    do {                                                                       \
        const char *const arguments_[] = {__VA_ARGS__, NULL};                  \
                                                                               \
        start((run), arguments_);                                              \
        finish(run);                                                           \
        assert_status((run), (want));                                          \
    } while (0)

static void assert_says(const struct output *output, const char *words)
{
    if (strstr(output->text, words) == NULL) {
        fail_msg("\"%s\" is not in:\n%s", words, output->text);
    }
}

/* Refused: status 2, nothing on stdout, one line on stderr. */
static void assert_refused(struct run *run, const char *words)
{
    const char *text = run->out[1].text;

    assert_status(run, 2);
    assert_int_equal(run->out[0].length, 0);
    assert_int_equal(strncmp(text, "kvt: ", 5), 0);
    assert_says(&run->out[1], words);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    end(run);
}

#define REFUSED(words, ...)                                                    \
    do {                                                                       \
        struct run run_;                                                       \
                                                                               \
        RUN(&run_, 2, __VA_ARGS__);                                            \
        assert_refused(&run_, (words));                                        \
    } while (0)

/* --------------------------------------------------------------------- JSON */

static json_t *parse(const struct run *run)
{
    json_error_t error;
    json_t *object = json_loads(run->out[0].text, 0, &error);

    if (!json_is_object(object)) {
        fail_msg("stdout is not one JSON object: %s\n%s", error.text,
                 run->out[0].text);
    }
    return object;
}

static uint64_t number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_integer(value)) {
        fail_msg("\"%s\" is no integer", key);
    }
    return (uint64_t)json_integer_value(value);
}

static double real(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_number(value)) {
        fail_msg("\"%s\" is no number", key);
    }
    return json_number_value(value);
}

static bool flag(const json_t *object, const char *key)
{
    assert_true(json_is_boolean(json_object_get(object, key)));
    return json_is_true(json_object_get(object, key));
}

/* Every block has one fate, in the whole run and at each holder. */
static void assert_accounted(const json_t *object)
{
    const json_t *holders = json_object_get(object, "holders");
    uint64_t landed = 0;
    uint64_t bytes = 0;

    assert_int_equal(
        number(object, "blocks"),
        number(object, "blocks_hit") + number(object, "blocks_shared") +
            number(object, "blocks_moved") + number(object, "blocks_failed"));
    for (size_t i = 0; i < json_array_size(holders); i++) {
        const json_t *holder = json_array_get(holders, i);

        assert_int_equal(number(holder, "asked"),
                         number(holder, "landed") + number(holder, "wrong") +
                             number(holder, "refetched") +
                             number(holder, "failed"));
        landed += number(holder, "landed");
        bytes += number(holder, "bytes");
    }
    assert_int_equal(landed, number(object, "blocks_moved"));
    assert_int_equal(bytes, number(object, "bytes"));
    assert_true(flag(object, "accounted"));
}

/* A run in which all blocks came, and right. */
static void assert_good(const json_t *object)
{
    assert_accounted(object);
    assert_int_equal(number(object, "verification_failures"), 0);
    assert_int_equal(number(object, "blocks_failed"), 0);
    assert_int_equal(number(object, "requests"), 60);
    assert_int_equal(number(object, "blocks"), 1486);
    assert_false(flag(object, "interrupted"));
}

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
    /* The 32 pages of a block are adjacent in each run, on both sides. */
    assert_true(number(object, "merged_copies") >=
                number(object, "blocks_moved") * 48 * 31);
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
    while (run.out[1].length == 0 ||
           strstr(run.out[1].text, "requests/s") == NULL) {
        assert_true(read_output(&run));
    }
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

    if (getenv("KVT_TEST_COMMAND") == NULL ||
        getenv("KVT_TEST_SOURCE_DIR") == NULL) {
        printf("skipped: KVT_TEST_COMMAND and KVT_TEST_SOURCE_DIR say what to "
               "test; ctest sets them\n");
        return 77;
    }
    (void)snprintf(trace_path, sizeof(trace_path),
                   "%s/tests/data/conversation_500.jsonl",
                   getenv("KVT_TEST_SOURCE_DIR"));
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
