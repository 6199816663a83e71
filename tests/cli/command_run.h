/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts the real command and reads what it says, for the tests of it. A run
 * is waited for through its output, so no case depends on a time.
 */
#ifndef KVT_TESTS_COMMAND_RUN_H
#define KVT_TESTS_COMMAND_RUN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdbool.h>
#include <sys/types.h>

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

/* The path of the command, and of the sample trace. */
char *command_path(void);
char *command_trace(void);

/* Prints why and returns false where ctest has not said what to test. */
bool command_is_known(void);

void spawn_command(struct run *run, char *const argv[],
                   char *const environment[]);

/* The command with these arguments up to NULL; a replay gets the sample trace,
 * but for one that listens. */
void start(struct run *run, const char *const arguments[]);

/* Reads what is there; false once both ends are closed. */
bool read_output(struct run *run);

/* Reads until these words have come on stdout (0) or stderr (1). */
void read_until(struct run *run, size_t output, const char *words);

/* To the end, and then what it was. */
void finish(struct run *run);
void end(struct run *run);

void assert_status(const struct run *run, int status);
void assert_says(const struct output *output, const char *words);

/* Refused: status 2, nothing on stdout, one line on stderr. Ends the run. */
void assert_refused(struct run *run, const char *words);

#define OPTION_MAX 128

/* Starts a listener and turns what it prints into the other side's option. */
void start_listener(struct run *run, char option[OPTION_MAX],
                    const char *const arguments[]);

void finish_with(struct run *run, int status);

#define LISTEN "replay", "--engine=local"
#define CONNECT "replay", "--engine=local", "--json"

/* Shapes and requests of SMALL without its memory. */
#define SHAPE "--block-bytes=16KiB", "--requests=60"

#define START_LISTENER(run, option, ...)                                       \
    do {                                                                       \
        const char *const arguments_[] = {LISTEN, __VA_ARGS__, NULL};          \
                                                                               \
        start_listener((run), (option), arguments_);                           \
    } while (0)

#define START(run, ...)                                                        \
    do {                                                                       \
        const char *const arguments_[] = {__VA_ARGS__, NULL};                  \
                                                                               \
        start((run), arguments_);                                              \
    } while (0)

/* Runs to the end and expects the status. */
#define RUN(run, want, ...)                                                    \
    do {                                                                       \
        const char *const arguments_[] = {__VA_ARGS__, NULL};                  \
                                                                               \
        start((run), arguments_);                                              \
        finish(run);                                                           \
        assert_status((run), (want));                                          \
    } while (0)

#define REFUSED(words, ...)                                                    \
    do {                                                                       \
        struct run run_;                                                       \
                                                                               \
        RUN(&run_, 2, __VA_ARGS__);                                            \
        assert_refused(&run_, (words));                                        \
    } while (0)

/* stdout is one JSON object and not a byte more. */
json_t *parse(const struct run *run);
uint64_t number(const json_t *object, const char *key);
double real(const json_t *object, const char *key);
bool flag(const json_t *object, const char *key);
const char *text_of(const json_t *object, const char *key);

/* Every block has one fate, in the whole run and at each holder. */
void assert_accounted(const json_t *object);

/* A run of SMALL in which all blocks came, and right. */
void assert_good(const json_t *object);

#endif /* KVT_TESTS_COMMAND_RUN_H */
