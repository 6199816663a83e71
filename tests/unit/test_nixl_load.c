/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding and loading NIXL, against our stand-in (fake_nixl_capi.c) laid out
 * as wheels lie in an installation of Python.
 *
 * Proved: a library is taken whole or not at all, and the error names what was
 * missing and every place that was tried; a path that somebody named is the
 * only one tried; each place of the search is looked at in its order; the
 * environment for UCX is set and never overwritten; a second library is
 * refused. Since a library stays for the life of the process, each case loads
 * in a child.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/nixl_load.h"
#include "kvt_assert.h"

static char root[64];
static const char *fake;
static const char *shortened;

/* What the child found. */
struct found {
    int code;
    struct kvt_error err;
    char path[PATH_MAX];
    char version[64];
    char modules[64]; /* UCX_MODULES afterwards */
    char debug[64];   /* UCX_DEBUG_SIGNO */
    int second;       /* code of a second load of `again` */
};

static const char *variable(const char *name)
{
    const char *value = getenv(name);

    return value != NULL ? value : "(not set)";
}

static void load(const char *path, const char *again, struct found *ret)
{
    const struct kvti_nixl_lib *lib = NULL;
    struct found found = {.code = 0};

    found.code = kvti_nixl_load(path, false, &lib, &found.err);
    if (found.code == KVT_OK) {
        kvti_format(found.path, sizeof found.path, "%s", lib->path);
        kvti_format(found.version, sizeof found.version, "%s", lib->version);
    }
    kvti_format(found.modules, sizeof found.modules, "%s",
                variable("UCX_MODULES"));
    kvti_format(found.debug, sizeof found.debug, "%s",
                variable("UCX_DEBUG_SIGNO"));
    if (again != NULL) {
        found.second = kvti_nixl_load(again, false, &lib, &found.err);
    }
    *ret = found;
}

static struct found load_in_child(const char *path, const char *again)
{
    struct found found = {.code = 1};
    int ends[2];
    pid_t pid;

    assert_int_equal(pipe(ends), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        load(path, again, &found);
        _exit(write(ends[1], &found, sizeof found) == (ssize_t)sizeof found
                  ? 0
                  : 1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &found, sizeof found), sizeof found);
    close(ends[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return found;
}

static void assert_says(const struct found *found, const char *words)
{
    if (strstr(found->err.text, words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", found->err.text, words);
    }
}

static void assert_found(const struct found *found, const char *end)
{
    size_t length = strlen(found->path);

    if (found->code != KVT_OK) {
        fail_msg("%s", found->err.text);
    }
    if (length < strlen(end) ||
        strcmp(found->path + length - strlen(end), end) != 0) {
        fail_msg("%s was loaded, not …%s", found->path, end);
    }
}

/* ------------------------------------------------------------------- folders */

static void make_folders(const char *path)
{
    char part[PATH_MAX];

    for (const char *at = path + 1; at != NULL;) {
        const char *slash = strchr(at, '/');
        size_t length = slash != NULL ? (size_t)(slash - path) : strlen(path);

        kvti_format(part, sizeof part, "%.*s", (int)length, path);
        (void)mkdir(part, 0700);
        at = slash != NULL ? slash + 1 : NULL;
    }
}

/* A wheel of this kind and version in root/where. */
static void make_wheel(const char *where, const char *kind, const char *version,
                       const char *library)
{
    char folder[PATH_MAX];
    char file[PATH_MAX + 32];

    kvti_format(folder, sizeof folder, "%s/%s/nixl_%s-%s.dist-info", root,
                where, kind, version);
    make_folders(folder);
    kvti_format(folder, sizeof folder, "%s/%s/.nixl_%s.mesonpy.libs", root,
                where, kind);
    make_folders(folder);
    kvti_format(file, sizeof file, "%s/libnixl_capi.so", folder);
    assert_int_equal(symlink(library, file), 0);
}

static void make_python(const char *where)
{
    char path[PATH_MAX];
    FILE *file;

    kvti_format(path, sizeof path, "%s/%s", root, where);
    make_folders(path);
    kvti_format(path, sizeof path, "%s/%s/python3", root, where);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fclose(file);
    assert_int_equal(chmod(path, 0700), 0);
}

static int remove_one(const char *path, const struct stat *st, int type,
                      struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static void set_under_root(const char *name, const char *where)
{
    char path[PATH_MAX];

    kvti_format(path, sizeof path, "%s/%s", root, where);
    assert_int_equal(setenv(name, path, 1), 0);
}

static int begin(void **state)
{
    (void)state;
    kvti_format(root, sizeof root, "/tmp/kvt-nixl-XXXXXX");
    assert_non_null(mkdtemp(root));
    unsetenv("KVT_NIXL_LIBRARY");
    unsetenv("KVT_PYTHON");
    unsetenv("VIRTUAL_ENV");
    unsetenv("FAKE_NIXL_STUB");
    unsetenv("UCX_MODULES");
    unsetenv("UCX_DEBUG_SIGNO");
    unsetenv("UCX_TLS");
    unsetenv("LD_LIBRARY_PATH");
    set_under_root("PATH", "bin");
    return 0;
}

static int end(void **state)
{
    (void)state;
    return nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* --------------------------------------------------------------------- cases */

static void a_named_library_is_loaded(void **state)
{
    struct found found = load_in_child(fake, NULL);

    (void)state;
    assert_found(&found, fake);
    assert_string_equal(found.version, "unknown");
}

static void a_named_library_is_the_only_one_tried(void **state)
{
    struct found found;

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.5.1", fake);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child("/nowhere/libnixl_capi.so", NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "/nowhere/libnixl_capi.so");
    assert_says(&found, "No such file");
    assert_null(strstr(found.err.text, "VIRTUAL_ENV"));
}

static void the_variable_names_one_too(void **state)
{
    struct found found;

    (void)state;
    setenv("KVT_NIXL_LIBRARY", fake, 1);
    found = load_in_child(NULL, NULL);
    assert_found(&found, fake);
    /* An argument goes before it. */
    found = load_in_child("/nowhere/x.so", NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
}

static void a_stub_is_refused(void **state)
{
    struct found found;

    (void)state;
    setenv("FAKE_NIXL_STUB", "1", 1);
    found = load_in_child(fake, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "stub");
}

static void a_missing_function_is_named(void **state)
{
    struct found found = load_in_child(shortened, NULL);

    (void)state;
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "it has no nixl_capi_post_xfer_req");
}

static void every_place_is_named_when_there_is_none(void **state)
{
    struct found found;

    (void)state;
    make_python("bin");
    set_under_root("KVT_PYTHON", "other/bin/python3");
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "install nixl-cu12 or set KVT_NIXL_LIBRARY");
    assert_says(&found, "libnixl_capi.so (");
    assert_says(&found, "KVT_PYTHON ");
    assert_says(&found, "VIRTUAL_ENV ");
    assert_says(&found, "python3 ");
}

static void wheels_are_found_in_the_order_of_the_search(void **state)
{
    struct found found;

    (void)state;
    make_python("bin");
    make_wheel("lib/python3.11/site-packages", "cu12", "1.3.0", fake);
    found = load_in_child(NULL, NULL);
    assert_found(&found, "lib/python3.11/site-packages/"
                         ".nixl_cu12.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.3.0");

    make_wheel("env/lib/python3.12/site-packages", "cu13", "1.5.1", fake);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_found(&found, "env/lib/python3.12/site-packages/"
                         ".nixl_cu13.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.5.1");

    make_python("third/bin");
    make_wheel("third/lib/python3.9/site-packages", "cu12", "1.4.0", fake);
    set_under_root("KVT_PYTHON", "third/bin/python3");
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.4.0");
    set_under_root("KVT_PYTHON", "third");
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.4.0");
}

static void a_wheel_that_does_not_load_is_passed_over(void **state)
{
    struct found found;

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.0.0", shortened);
    make_wheel("env/lib/python3.11/site-packages", "cu13", "1.5.1", fake);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_found(&found, ".nixl_cu13.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.5.1");
}

static void the_environment_of_ucx_is_set_but_never_overwritten(void **state)
{
    struct found found = load_in_child(fake, NULL);

    (void)state;
    assert_string_equal(found.modules, "^efa");
    assert_string_equal(found.debug, "0");
    setenv("UCX_MODULES", "tcp", 1);
    setenv("UCX_DEBUG_SIGNO", "12", 1);
    found = load_in_child(fake, NULL);
    assert_string_equal(found.modules, "tcp");
    assert_string_equal(found.debug, "12");
    unsetenv("UCX_MODULES");
    setenv("UCX_TLS", "srd,tcp", 1);
    found = load_in_child(fake, NULL);
    assert_string_equal(found.modules, "(not set)");
}

static void a_second_library_is_refused(void **state)
{
    struct found found;
    char other[PATH_MAX];

    (void)state;
    kvti_format(other, sizeof other, "%s/other.so", root);
    assert_int_equal(symlink(fake, other), 0);
    found = load_in_child(fake, other);
    assert_int_equal(found.second, KVT_OK);
    found = load_in_child(fake, shortened);
    assert_int_equal(found.second, KVT_EINVAL);
    assert_says(&found, "already");
    assert_says(&found, "the same library");
}

static void what_it_reads_of_the_interface_has_the_right_shape(void **state)
{
    (void)state;
    /* bool, bool, int, enum, unsigned, u64, u64, bool; as the library's. */
    assert_int_equal(offsetof(struct nixl_agent_config, listen_port), 4);
    assert_int_equal(offsetof(struct nixl_agent_config, thread_sync), 8);
    assert_int_equal(offsetof(struct nixl_agent_config, num_workers), 12);
    assert_int_equal(offsetof(struct nixl_agent_config, pthr_delay_us), 16);
    assert_int_equal(offsetof(struct nixl_agent_config, lthr_delay_us), 24);
    assert_int_equal(offsetof(struct nixl_agent_config, capture_telemetry), 32);
    assert_true(sizeof(struct nixl_agent_config) >= 128);
    assert_int_equal(NIXL_MEM_DRAM, KVT_DRAM);
    assert_int_equal(NIXL_MEM_VRAM, KVT_VRAM);
}

#define CASE(function) cmocka_unit_test_setup_teardown(function, begin, end)

int main(void)
{
    const struct CMUnitTest cases[] = {
        CASE(a_named_library_is_loaded),
        CASE(a_named_library_is_the_only_one_tried),
        CASE(the_variable_names_one_too),
        CASE(a_stub_is_refused),
        CASE(a_missing_function_is_named),
        CASE(every_place_is_named_when_there_is_none),
        CASE(wheels_are_found_in_the_order_of_the_search),
        CASE(a_wheel_that_does_not_load_is_passed_over),
        CASE(the_environment_of_ucx_is_set_but_never_overwritten),
        CASE(a_second_library_is_refused),
        CASE(what_it_reads_of_the_interface_has_the_right_shape),
    };

    fake = getenv("KVT_TEST_FAKE_NIXL");
    shortened = getenv("KVT_TEST_FAKE_NIXL_SHORT");
    if (fake == NULL || shortened == NULL) {
        (void)fprintf(stderr, "KVT_TEST_FAKE_NIXL and KVT_TEST_FAKE_NIXL_SHORT "
                              "name the stand-ins\n");
        return 1;
    }
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
