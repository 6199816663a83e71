/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Over the engine `nixl` every operation is walked through each place in the
 * code that allocates, calls the system or calls NIXL, in whichever thread, and
 * in each way in which that can fail. How: walk.h. NIXL is the stand-in, which
 * does the same each time; its thread of ours polls, which is why calls are
 * counted by their place.
 *
 * "real N [CASE]" does so over NIXL itself, with one in N of the failures: an
 * agent of its own for each costs a tenth of a second. KVT_NTH_SEED says which.
 *
 * A symbol that is not found is met once in the life of a process: each in a
 * process of its own, which this program starts ("loader N").
 */
#include <dlfcn.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/nixl_capi.h"
#include "fake_nixl.h"
#include "walk.h"

static struct {
    fake_nixl_script_fn *script;
    fake_nixl_count_fn *count;
    fake_nixl_reset_fn *reset;
} fake;

static struct tally tally;

/* ------------------------------------------------------------------ grounds */

static void find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

static void begin(void)
{
    if (fake.reset == NULL) {
        void *handle = dlopen(getenv("KVT_NIXL_LIBRARY"), RTLD_NOW);

        assert_non_null(handle);
        find(handle, "fake_nixl_script", &fake.script);
        find(handle, "fake_nixl_count", &fake.count);
        find(handle, "fake_nixl_reset", &fake.reset);
    }
    fake.reset();
}

/* A post begins something, and the status says that it is over. */
static void begin_slow(void)
{
    begin();
    fake.script("post", NIXL_IN_PROG, 1000);
}

/* What was not final is never given back, and nothing is asked of a peer that
 * NIXL has forgotten. */
static void end(void)
{
    assert_int_equal(fake.count("UNFINISHED"), 0);
    assert_int_equal(fake.count("STALE"), 0);
}

/* NIXL's refusals of a post that are none, and a status that is not known. */
static bool leaves_doubt(const struct nth_seen *seen)
{
    return seen->failed && (strcmp(seen->name, "get_xfer_status") == 0 ||
                            (strcmp(seen->name, "post_xfer_req") == 0 &&
                             seen->error != NIXL_INVALID_PARAM &&
                             seen->error != NIXL_NOT_FOUND));
}

/* A backend that needs to be told something. */
static const struct kvt_param param = {"UCX", "num_workers", "1"};

#define ALONE                                                                  \
    {                                                                          \
        .grace_ns = 20000000, .flags = KVT_OPEN_NO_SAME_HOST,                  \
        .params = &param, .param_count = 1                                     \
    }

static const struct ground real = {.name = "NIXL",
                                   .engine = "nixl",
                                   .options = ALONE,
                                   .leaves_doubt = leaves_doubt};
static const struct ground at_once = {.name = "nixl",
                                      .engine = "nixl",
                                      .options = ALONE,
                                      .begin = begin,
                                      .end = end,
                                      .leaves_doubt = leaves_doubt};
static const struct ground slow = {.name = "nixl, in progress",
                                   .engine = "nixl",
                                   .options = ALONE,
                                   .begin = begin_slow,
                                   .end = end,
                                   .leaves_doubt = leaves_doubt};
/* Bytes go by the local engine, and all else by NIXL. */
static const struct ground shortcut = {.name = "the shortcut",
                                       .engine = "nixl",
                                       .options = {.grace_ns = 20000000},
                                       .begin = begin,
                                       .end = end,
                                       .leaves_doubt = leaves_doubt};

/* -------------------------------------------------------------------- cases */

#define KINDS (NTH_MEMORY | NTH_SYSTEM | NTH_NIXL)

/* Where the cases stand that are run over the stand-in and over NIXL. */
static const struct ground *either = &at_once;

static void walk_on(const struct ground *ground, const char *name)
{
    walk_once(ground);
    walk_places(ground, name, KINDS, &tally);
}

#define CASE(name)                                                             \
    static void name##_survives_each_failure(void **state)                     \
    {                                                                          \
        (void)state;                                                           \
        walk_on(either, #name);                                                \
    }

CASES(CASE)

/* What takes its time takes other ways through the engine. */
#define SLOW_CASES(X)                                                          \
    X(write)                                                                   \
    X(read)                                                                    \
    X(write_note)                                                              \
    X(warm_up)                                                                 \
    X(cancel)                                                                  \
    X(close)

#define SLOW_CASE(name)                                                        \
    static void name##_in_progress_survives_each_failure(void **state)         \
    {                                                                          \
        (void)state;                                                           \
        walk_on(&slow, #name);                                                 \
    }

SLOW_CASES(SLOW_CASE)

#define SHORTCUT_CASES(X)                                                      \
    X(open)                                                                    \
    X(register)                                                                \
    X(deregister)                                                              \
    X(metadata)                                                                \
    X(add)                                                                     \
    X(write)                                                                   \
    X(write_note)                                                              \
    X(cancel)                                                                  \
    X(reload_new)                                                              \
    X(remove)                                                                  \
    X(close)

#define SHORTCUT_CASE(name)                                                    \
    static void name##_by_the_shortcut_survives_each_failure(void **state)     \
    {                                                                          \
        (void)state;                                                           \
        walk_on(&shortcut, #name);                                             \
    }

SHORTCUT_CASES(SHORTCUT_CASE)

/* After all the others. */
static void every_function_of_nixl_has_failed(void **state)
{
    (void)state;
#define ROW(name, arguments)                                                   \
    if (!walk_has_failed(#name)) {                                             \
        fail_msg("no walk made %s fail", #name);                               \
    }
    KVTI_NIXL_FUNCTIONS(ROW)
#undef ROW
    print_message(
        "%zu places, %zu failures (%zu in pairs), %zu places missed\n",
        tally.places, tally.failures, tally.pairs, tally.missed);
}

/* ------------------------------------------------------------------- loader */

enum { FAILED_WELL = 0, NO_CALL = 3 };

/* Nothing of NIXL's is loaded by it; a sanitizer gets its own thread. */
static const struct ground without_nixl = {.name = "local", .engine = "local"};

static int be_child(const char *number)
{
    walk_once(&without_nixl);
    return walk_loader(either, strtol(number, NULL, 10)) ? FAILED_WELL
                                                         : NO_CALL;
}

static int run_child(long n)
{
    char path[] = "/proc/self/exe";
    char verb[] = "loader";
    char number[24];
    char name[] = "real";
    char *argv[] = {path, verb, number, either == &real ? name : NULL, NULL};
    pid_t pid;
    int status;

    (void)snprintf(number, sizeof number, "%ld", n);
    assert_int_equal(posix_spawn(&pid, path, NULL, NULL, argv, environ), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Of the loader's calls each so many-th. */
static long stride = 1;

static void open_survives_each_missing_symbol(void **state)
{
    long n = 0;
    int code;

    (void)state;
    while ((code = run_child(n)) == FAILED_WELL) {
        n += stride;
    }
    assert_int_equal(code, NO_CALL);
    print_message("one in %ld of the loader's first %ld calls\n", stride, n);
#define COUNT(name, arguments) +1
    assert_true(n > 0 KVTI_NIXL_FUNCTIONS(COUNT));
#undef COUNT
}

#define ROW(name) cmocka_unit_test(name##_survives_each_failure),
#define SLOW_ROW(name)                                                         \
    cmocka_unit_test(name##_in_progress_survives_each_failure),
#define SHORTCUT_ROW(name)                                                     \
    cmocka_unit_test(name##_by_the_shortcut_survives_each_failure),

/* False, and a word on stderr: there is none. */
static bool choose_nixl(void)
{
    const char *library = getenv(either == &real ? "KVT_NIXL_LIBRARY"
                                                 : "KVT_TEST_FAKE_NIXL");

    if (library == NULL || setenv("KVT_NIXL_LIBRARY", library, 1) != 0 ||
        unsetenv("KVT_SAME_HOST") != 0) {
        (void)fprintf(stderr, "%s\n",
                      either == &real
                          ? "KVT_NIXL_LIBRARY names no NIXL"
                          : "KVT_TEST_FAKE_NIXL does not name the stand-in");
        return false;
    }
    return true;
}

static int walk_real(const char *one_of, const char *pattern)
{
    /* clang-format off */
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(open_survives_each_missing_symbol),
        CASES(ROW)
        cmocka_unit_test(every_function_of_nixl_has_failed)};
    /* clang-format on */
    const struct test_group groups[] = {TEST_GROUP("nixl", cases)};
    const char *seed_text = getenv("KVT_NTH_SEED");
    uint64_t seed = seed_text == NULL ? 1 : strtoull(seed_text, NULL, 10);

    stride = strtol(one_of, NULL, 10);
    if (stride < 1) {
        (void)fprintf(stderr, "\"%s\" is no number from 1 on\n", one_of);
        return EXIT_FAILURE;
    }
    walk_sample((uint64_t)stride, seed);
    return kvt_test_main(groups, 1, pattern);
}

static int walk_stand_in(const char *pattern)
{
    /* clang-format off */
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(open_survives_each_missing_symbol),
        CASES(ROW)
        SLOW_CASES(SLOW_ROW)
        SHORTCUT_CASES(SHORTCUT_ROW)
        cmocka_unit_test(every_function_of_nixl_has_failed)};
    /* clang-format on */
    const struct test_group groups[] = {TEST_GROUP("nixl", cases)};

    return kvt_test_main(groups, 1, pattern);
}

int main(int argc, char **argv)
{
    bool child = argc >= 3 && strcmp(argv[1], "loader") == 0;
    const char *which = argc >= 3 ? argv[child ? 3 : 1] : NULL;

    if (which != NULL && strcmp(which, "real") == 0) {
        either = &real;
    }
    if (!choose_nixl()) {
        return EXIT_FAILURE;
    }
    if (child) {
        return be_child(argv[2]);
    }
    if (either == &real) {
        return walk_real(argv[2], argc > 3 ? argv[3] : NULL);
    }
    return walk_stand_in(argc > 1 ? argv[1] : NULL);
}
