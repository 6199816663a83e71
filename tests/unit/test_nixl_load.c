/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading NIXL, against our stand-in (fake_nixl_capi.c).
 *
 * Proved: a library is taken whole or not at all, and the error names what was
 * missing; a path that somebody named is the only one tried; a second library
 * is refused; the environment for UCX is set, never overwritten, and never
 * changed in place; our declarations have the shape of NIXL's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nixl_wheel.h"

static void a_named_library_is_loaded(void **state)
{
    struct found found = load_in_child(stand_ins.whole, NULL);

    (void)state;
    assert_found(&found, stand_ins.whole);
    assert_string_equal(found.version, "unknown");
    assert_false(found.global);
}

static void a_named_library_is_the_only_one_tried(void **state)
{
    struct found found;

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.5.1",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child("/nowhere/libnixl_capi.so", NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "correct the option nixl_library, or leave it out");
    assert_says(&found, "/nowhere/libnixl_capi.so (not found)");
    assert_null(strstr(found.err.text, "VIRTUAL_ENV"));
}

static void the_variable_names_one_too(void **state)
{
    struct found found;

    (void)state;
    setenv("KVT_NIXL_LIBRARY", stand_ins.whole, 1);
    found = load_in_child(NULL, NULL);
    assert_found(&found, stand_ins.whole);
    setenv("KVT_NIXL_LIBRARY", "/nowhere/y.so", 1);
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "correct or unset KVT_NIXL_LIBRARY");
    assert_says(&found, "/nowhere/y.so (not found)");
    /* An argument goes before it. */
    found = load_in_child("/nowhere/x.so", NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
}

static void a_stub_is_refused(void **state)
{
    struct found found;

    (void)state;
    setenv("FAKE_NIXL_STUB", "1", 1);
    found = load_in_child(stand_ins.whole, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "stub");
}

static void a_missing_function_is_named(void **state)
{
    struct found found = load_in_child(stand_ins.shortened, NULL);

    (void)state;
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "it has no nixl_capi_post_xfer_req");
}

/* B41 */
static void a_missing_library_of_its_own_is_named(void **state)
{
    struct found found = load_in_child(stand_ins.orphan, NULL);

    (void)state;
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, stand_ins.orphan);
    assert_says(&found, "(libfake_gone.so: cannot open shared object file");
}

/* B49 */
static void the_environment_of_ucx_is_set_but_never_overwritten(void **state)
{
    struct found found = load_in_child(stand_ins.whole, NULL);

    (void)state;
    assert_string_equal(found.modules, "^efa");
    assert_string_equal(found.debug, "0");
    setenv("UCX_MODULES", "tcp", 1);
    setenv("UCX_DEBUG_SIGNO", "12", 1);
    found = load_in_child(stand_ins.whole, NULL);
    assert_string_equal(found.modules, "tcp");
    assert_string_equal(found.debug, "12");
    unsetenv("UCX_MODULES");
    setenv("UCX_TLS", "srd,tcp", 1);
    found = load_in_child(stand_ins.whole, NULL);
    assert_string_equal(found.modules, "(not set)");
}

static void who_wants_efa_takes_back_what_a_parent_set(void **state)
{
    const struct ask ask = {.path = stand_ins.whole, .want_efa = true};
    struct found found = ask_child(&ask, NULL, NULL);

    (void)state;
    assert_string_equal(found.modules, "(not set)");
    setenv("UCX_MODULES", "^efa", 1);
    found = ask_child(&ask, NULL, NULL);
    assert_string_equal(found.modules, "(not set)");
    setenv("UCX_MODULES", "^efa,cuda", 1);
    found = ask_child(&ask, NULL, NULL);
    assert_string_equal(found.modules, "^efa,cuda");
}

/* Another thread may be walking it. */
static void the_environment_is_never_changed_in_place(void **state)
{
    char **before = environ;
    size_t count = 0;
    char **copy;

    (void)state;
    while (before[count] != NULL) {
        count++;
    }
    copy = calloc(count + 1, sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, before, count * sizeof *copy);
    kvti_nixl_prepare_env(false);
    assert_ptr_not_equal(environ, before);
    assert_memory_equal(before, copy, (count + 1) * sizeof *copy);
    assert_string_equal(variable("UCX_MODULES"), "^efa");
    /* libc goes on from ours. */
    assert_int_equal(setenv("KVT_TEST_LATER", "1", 1), 0);
    assert_string_equal(variable("UCX_DEBUG_SIGNO"), "0");
    assert_int_equal(unsetenv("KVT_TEST_LATER"), 0);
    /* And nothing is done twice. */
    before = environ;
    kvti_nixl_prepare_env(false);
    assert_ptr_equal(environ, before);
    free(copy);
}

static void an_empty_environment_will_do(void **state)
{
    char **before = environ;

    (void)state;
    environ = NULL;
    kvti_nixl_prepare_env(false);
    assert_string_equal(variable("UCX_MODULES"), "^efa");
    environ = before;
}

static void the_information_tells_version_path_and_backends(void **state)
{
    struct kvt_engine_info info;
    pid_t pid = fork();
    int status;

    (void)state;
    if (pid == 0) {
        setenv("KVT_NIXL_LIBRARY", stand_ins.whole, 1);
        _exit(kvti_nixl_probe(&info) == KVT_OK &&
                      strcmp(info.name, "nixl") == 0 &&
                      strcmp(info.version, "unknown") == 0 &&
                      strstr(info.text, stand_ins.whole) == info.text &&
                      strstr(info.text, "; backends: GDS_MT, OBJ, POSIX, UCX")
                  ? 0
                  : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void a_second_library_is_refused(void **state)
{
    struct found found;
    char other[PATH_MAX];

    (void)state;
    kvti_format(other, sizeof other, "%s/other.so", root);
    assert_int_equal(symlink(stand_ins.whole, other), 0);
    found = load_in_child(stand_ins.whole, other);
    assert_int_equal(found.second, KVT_OK);
    found = load_in_child(stand_ins.whole, stand_ins.shortened);
    assert_int_equal(found.second, KVT_EINVAL);
    assert_says(&found, "already");
    assert_says(&found, "the same library");
}

/* As NIXL's header for Rust declares it. */
struct theirs {
    bool enable_prog_thread;
    bool enable_listen_thread;
    int listen_port;
    enum theirs_sync { THEIR_NONE, THEIR_STRICT, THEIR_RW } thread_sync;
    unsigned int num_workers;
    uint64_t pthr_delay_us;
    uint64_t lthr_delay_us;
    bool capture_telemetry;
};

#define SAME(field)                                                            \
    assert_int_equal(offsetof(struct nixl_agent_config, field),                \
                     offsetof(struct theirs, field));                          \
    assert_int_equal(sizeof(((struct nixl_agent_config *)0)->field),           \
                     sizeof(((struct theirs *)0)->field))

static void what_it_reads_of_the_interface_has_the_right_shape(void **state)
{
    (void)state;
    SAME(enable_prog_thread);
    SAME(enable_listen_thread);
    SAME(listen_port);
    SAME(thread_sync);
    SAME(num_workers);
    SAME(pthr_delay_us);
    SAME(lthr_delay_us);
    SAME(capture_telemetry);
    assert_int_equal(NIXL_SYNC_NONE, THEIR_NONE);
    assert_int_equal(NIXL_SYNC_STRICT, THEIR_STRICT);
    assert_int_equal(NIXL_SYNC_RW, THEIR_RW);
    /* Zeroed room for what a newer one may read. */
    assert_true(sizeof(struct nixl_agent_config) >= 128);
    assert_int_equal(NIXL_MEM_DRAM, KVT_DRAM);
    assert_int_equal(NIXL_MEM_VRAM, KVT_VRAM);
}

#define CASE(function) cmocka_unit_test_setup_teardown(function, begin, end)

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        CASE(a_named_library_is_loaded),
        CASE(a_named_library_is_the_only_one_tried),
        CASE(the_variable_names_one_too),
        CASE(a_stub_is_refused),
        CASE(a_missing_function_is_named),
        CASE(a_missing_library_of_its_own_is_named),
        CASE(the_environment_of_ucx_is_set_but_never_overwritten),
        CASE(who_wants_efa_takes_back_what_a_parent_set),
        CASE(the_environment_is_never_changed_in_place),
        CASE(an_empty_environment_will_do),
        CASE(the_information_tells_version_path_and_backends),
        CASE(a_second_library_is_refused),
        CASE(what_it_reads_of_the_interface_has_the_right_shape),
    };

    if (is_child(argc, argv)) {
        return run_child();
    }
    if (find_stand_ins() != 0) {
        return 1;
    }
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
