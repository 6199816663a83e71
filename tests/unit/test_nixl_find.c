/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding NIXL, where our stand-in (fake_nixl_capi.c) lies as wheels lie in an
 * installation of Python.
 *
 * Proved: each place of the search is looked at in its order, the Python that
 * the process runs in among them (this program, copied under that name), and
 * each is named when there is none.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nixl_wheel.h"
#include "sanitizer.h"

/* B40 */
static void every_place_is_named_when_there_is_none(void **state)
{
    struct found found;

    (void)state;
    make_python("bin");
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "install nixl-cu12 or set KVT_NIXL_LIBRARY");
    assert_says(&found, "libnixl_capi.so (not found)");
    assert_says(&found, "VIRTUAL_ENV ");
    assert_says(&found, "python3 ");
    assert_says(&found, "HOME ");
}

static void a_long_list_of_places_keeps_both_its_ends(void **state)
{
    struct found found;
    char place[201];

    (void)state;
    make_python("bin");
    memset(place, 'x', sizeof place - 1);
    place[sizeof place - 1] = '\0';
    set_under_root("VIRTUAL_ENV", place);
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "tried libnixl_capi.so (not found), VIRTUAL_ENV ");
    assert_says(&found, "xx ... ");
    assert_says(&found, ".local (no nixl wheel)");
    assert_int_equal(strlen(found.err.text), KVT_TEXT_MAX - 1);
}

static void a_named_python_is_the_only_one_tried(void **state)
{
    struct found found;

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.5.1",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    set_under_root("KVT_PYTHON", "other/bin/python3");
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "other/bin/python3 (no such file)");
    make_python("other/bin");
    found = load_in_child(NULL, NULL);
    assert_int_equal(found.code, KVT_EUNSUPPORTED);
    assert_says(&found, "other (no nixl wheel)");
}

static void wheels_are_found_in_the_order_of_the_search(void **state)
{
    struct found found;

    (void)state;
    make_wheel("home/.local/lib/python3.11/site-packages", "cu12", "1.2.0",
               stand_ins.whole);
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.2.0");

    make_python("bin");
    make_wheel("lib/python3.11/site-packages", "cu12", "1.3.0",
               stand_ins.whole);
    found = load_in_child(NULL, NULL);
    assert_found(&found, "lib/python3.11/site-packages/"
                         ".nixl_cu12.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.3.0");

    make_wheel("env/lib/python3.12/site-packages", "cu13", "1.5.1",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_found(&found, "env/lib/python3.12/site-packages/"
                         ".nixl_cu13.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.5.1");

    make_python("third/bin");
    make_wheel("third/lib/python3.9/site-packages", "cu12", "1.4.0",
               stand_ins.whole);
    set_under_root("KVT_PYTHON", "third/bin/python3");
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.4.0");
    set_under_root("KVT_PYTHON", "third");
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.4.0");
}

/* As an extension module of the package kvt would be. */
static void the_site_packages_of_loaded_modules_come_first(void **state)
{
    struct ask ask = {.path = NULL};
    struct found found;
    char module[PATH_MAX];

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.3.0",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    make_wheel("odd/site-packages", "cu13", "1.4.0", stand_ins.whole);
    make_link(stand_ins.shortened, "odd/site-packages/kvt/module.so");
    kvti_format(module, sizeof module, "%s/odd/site-packages/kvt/module.so",
                root);
    ask.preload = module;
    found = ask_child(&ask, NULL, NULL);
    assert_found(&found, "odd/site-packages/.nixl_cu13.mesonpy.libs/"
                         "libnixl_capi.so");
}

/* As Python's package nixl would have. */
static void a_nixl_that_is_loaded_already_is_shared(void **state)
{
    struct ask ask = {.path = NULL};
    struct found found;
    char there[PATH_MAX];

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.3.0",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    make_wheel("anywhere", "cu12", "1.5.1", stand_ins.whole);
    make_link(stand_ins.shortened,
              "anywhere/.nixl_cu12.mesonpy.libs/libnixl.so");
    kvti_format(there, sizeof there,
                "%s/anywhere/.nixl_cu12.mesonpy.libs/libnixl.so", root);
    ask.preload = there;
    found = ask_child(&ask, NULL, NULL);
    assert_found(&found, "anywhere/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.5.1");
}

static void the_python_that_runs_is_looked_at(void **state)
{
    struct found found;
    char venv[PATH_MAX];
    char base[PATH_MAX];

    (void)state;
    copy_self("base/bin/python3.11");
    kvti_format(base, sizeof base, "%s/base/bin/python3.11", root);
    kvti_format(venv, sizeof venv, "%s/venv/bin/python", root);
    make_link(base, "venv/bin/python");
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.3.0",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    make_wheel("base/lib/python3.11/site-packages", "cu12", "1.4.0",
               stand_ins.whole);

    /* Nothing in its virtual environment, but in what it is made from. */
    found = ask_child(NULL, venv, venv);
    assert_string_equal(found.version, "1.4.0");
    make_wheel("venv/lib/python3.11/site-packages", "cu12", "1.5.1",
               stand_ins.whole);
    found = ask_child(NULL, venv, venv);
    assert_string_equal(found.version, "1.5.1");
    set_under_root("PATH", "venv/bin");
    found = ask_child(NULL, venv, "python");
    assert_string_equal(found.version, "1.5.1");
    /* Some programs give themselves another name. Under valgrind none can. */
    if (!BUILT_FOR_VALGRIND) {
        found = ask_child(NULL, venv, "engine core");
        assert_string_equal(found.version, "1.4.0");
    }
}

static void a_wrapper_of_python_is_passed_over(void **state)
{
    struct found found;
    char path[PATH_MAX];
    FILE *file;

    (void)state;
    make_python("shims");
    kvti_format(path, sizeof path, "%s/shims/python3", root);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fputs("#!/bin/sh\n", file);
    (void)fclose(file);
    make_python("real/bin");
    make_wheel("real/lib/python3.11/site-packages", "cu12", "1.5.1",
               stand_ins.whole);
    kvti_format(path, sizeof path, "%s/shims:%s/real/bin", root, root);
    assert_int_equal(setenv("PATH", path, 1), 0);
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.5.1");
}

static void a_folder_is_no_python(void **state)
{
    struct found found;
    char path[PATH_MAX];

    (void)state;
    make_wheel("not/bin/python3", "cu12", "1.4.0", stand_ins.whole);
    make_python("real/bin");
    make_wheel("real/lib/python3.11/site-packages", "cu12", "1.5.1",
               stand_ins.whole);
    kvti_format(path, sizeof path, "%s/not/bin:%s/real/bin", root, root);
    assert_int_equal(setenv("PATH", path, 1), 0);
    found = load_in_child(NULL, NULL);
    assert_string_equal(found.version, "1.5.1");
}

static void a_wheel_that_does_not_load_is_passed_over(void **state)
{
    struct found found;

    (void)state;
    make_wheel("env/lib/python3.11/site-packages", "cu12", "1.0.0",
               stand_ins.shortened);
    make_wheel("env/lib/python3.11/site-packages", "cu13", "1.5.1",
               stand_ins.whole);
    set_under_root("VIRTUAL_ENV", "env");
    found = load_in_child(NULL, NULL);
    assert_found(&found, ".nixl_cu13.mesonpy.libs/libnixl_capi.so");
    assert_string_equal(found.version, "1.5.1");
}

#define CASE(function) cmocka_unit_test_setup_teardown(function, begin, end)

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        CASE(every_place_is_named_when_there_is_none),
        CASE(a_long_list_of_places_keeps_both_its_ends),
        CASE(a_named_python_is_the_only_one_tried),
        CASE(wheels_are_found_in_the_order_of_the_search),
        CASE(the_site_packages_of_loaded_modules_come_first),
        CASE(a_nixl_that_is_loaded_already_is_shared),
        CASE(the_python_that_runs_is_looked_at),
        CASE(a_wrapper_of_python_is_passed_over),
        CASE(a_folder_is_no_python),
        CASE(a_wheel_that_does_not_load_is_passed_over),
    };

    if (is_child(argc, argv)) {
        return run_child();
    }
    if (find_stand_ins() != 0) {
        return 1;
    }
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
