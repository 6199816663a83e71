/* SPDX-License-Identifier: Apache-2.0 */
#include "command_run.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ARGUMENTS_MAX 24

char *command_path(void)
{
    return getenv("KVT_TEST_COMMAND");
}

char *command_trace(void)
{
    static char path[4096];

    (void)snprintf(path, sizeof(path), "%s/tests/data/conversation_500.jsonl",
                   getenv("KVT_TEST_SOURCE_DIR"));
    return path;
}

bool command_is_known(void)
{
    if (command_path() != NULL && getenv("KVT_TEST_SOURCE_DIR") != NULL) {
        return true;
    }
    printf("skipped: KVT_TEST_COMMAND and KVT_TEST_SOURCE_DIR say what to "
           "test; ctest sets them\n");
    return false;
}

/* ---------------------------------------------------------------- processes */

void spawn_command(struct run *run, char *const argv[],
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

void start(struct run *run, const char *const arguments[])
{
    char *argv[ARGUMENTS_MAX + 3] = {command_path()};
    size_t count = 1;
    bool listens = false;

    assert_non_null(argv[0]);
    for (size_t i = 0; arguments[i] != NULL; i++) {
        assert_true(count < ARGUMENTS_MAX);
        argv[count++] = (char *)(uintptr_t)arguments[i];
        listens = listens || strncmp(arguments[i], "--listen", 8) == 0;
    }
    if (strcmp(arguments[0], "replay") == 0 && !listens) {
        argv[count++] = command_trace();
    }
    spawn_command(run, argv, environ);
}

bool read_output(struct run *run)
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

void read_until(struct run *run, size_t output, const char *words)
{
    const struct output *out = &run->out[output];

    while (out->length == 0 || strstr(out->text, words) == NULL) {
        if (!read_output(run)) {
            fail_msg("it ended before it said \"%s\"; stderr:\n%s", words,
                     run->out[1].text);
        }
    }
}

void finish(struct run *run)
{
    int status;

    while (read_output(run)) {
    }
    assert_int_equal(waitpid(run->pid, &status, 0), run->pid);
    run->status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void end(struct run *run)
{
    free(run->out[0].text);
    free(run->out[1].text);
}

void assert_status(const struct run *run, int status)
{
    if (run->status != status) {
        fail_msg("exit status %d, not %d; stderr:\n%s", run->status, status,
                 run->out[1].text);
    }
}

void finish_with(struct run *run, int status)
{
    finish(run);
    assert_status(run, status);
}

void start_listener(struct run *run, char option[OPTION_MAX],
                    const char *const arguments[])
{
    static const char words[] = "listening on ";
    const char *at;

    start(run, arguments);
    read_until(run, 0, "\n");
    at = strstr(run->out[0].text, words);
    assert_ptr_equal(at, run->out[0].text);
    (void)snprintf(option, OPTION_MAX, "--connect=%.*s",
                   (int)strcspn(at + strlen(words), "\n"), at + strlen(words));
}

void assert_says(const struct output *output, const char *words)
{
    if (strstr(output->text, words) == NULL) {
        fail_msg("\"%s\" is not in:\n%s", words, output->text);
    }
}

void assert_refused(struct run *run, const char *words)
{
    const char *text = run->out[1].text;

    assert_status(run, 2);
    assert_int_equal(run->out[0].length, 0);
    assert_int_equal(strncmp(text, "kvt: ", 5), 0);
    assert_says(&run->out[1], words);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    end(run);
}

/* --------------------------------------------------------------------- JSON */

json_t *parse(const struct run *run)
{
    json_error_t error;
    json_t *object = json_loads(run->out[0].text, 0, &error);

    if (!json_is_object(object)) {
        fail_msg("stdout is not one JSON object: %s\n%s", error.text,
                 run->out[0].text);
    }
    return object;
}

uint64_t number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_integer(value)) {
        fail_msg("\"%s\" is no integer", key);
    }
    return (uint64_t)json_integer_value(value);
}

double real(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_number(value)) {
        fail_msg("\"%s\" is no number", key);
    }
    return json_number_value(value);
}

bool flag(const json_t *object, const char *key)
{
    assert_true(json_is_boolean(json_object_get(object, key)));
    return json_is_true(json_object_get(object, key));
}

const char *text_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    if (!json_is_string(value)) {
        fail_msg("\"%s\" is no text", key);
    }
    return json_string_value(value);
}

void assert_accounted(const json_t *object)
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

void assert_good(const json_t *object)
{
    assert_accounted(object);
    assert_int_equal(number(object, "verification_failures"), 0);
    assert_int_equal(number(object, "blocks_failed"), 0);
    assert_int_equal(number(object, "requests"), 60);
    assert_int_equal(number(object, "blocks"), 1486);
    assert_false(flag(object, "interrupted"));
}
