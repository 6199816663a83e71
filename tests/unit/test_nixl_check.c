/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Probing metadata, seen from the parent, against the stand-in for NIXL
 * (fake_nixl_capi.c). tests/nixl/interop/test_probe.py does the rest, with the
 * real program and the real NIXL.
 *
 * Proved: a job that waits for a free process is reported at its own deadline,
 * whatever the processes do; a folder is not taken for the program. How: a
 * script in the program's place that never ends.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvt_assert.h"
#include "nixl_pair.h"
#include "sanitizer.h"

#define PROCESSES 4 /* at a time */

static char folder[] = "/tmp/kvt-check-XXXXXX";
static char script[PATH_MAX];

/* KVT_PROBE names a program that hangs. */
static void make_script(void)
{
    FILE *file;

    assert_non_null(mkdtemp(folder));
    kvti_format(script, sizeof script, "%s/hangs", folder);
    file = fopen(script, "w");
    assert_non_null(file);
    assert_true(fputs("#!/bin/sh\nexec sleep 1000\n", file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(script, 0700), 0);
    assert_int_equal(setenv("KVT_PROBE", script, 1), 0);
}

static void remove_script(void)
{
    (void)unsetenv("KVT_PROBE");
    assert_int_equal(unlink(script), 0);
    assert_int_equal(rmdir(folder), 0);
}

static void a_job_that_waits_for_a_process_ends_by_its_own_deadline(
    void **state)
{
    struct kvt_options options = options_of();
    struct kvti_job busy[PROCESSES];
    struct kvti_job late = fake_job(KVTI_JOB_LOAD);
    struct kvt_error err;
    struct peer plain;
    struct kvti_md md;
    struct side a;
    struct side b;

    (void)state;
    if (BUILT_FOR_VALGRIND) {
        skip_case("valgrind knows no pidfd_send_signal()");
    }
    fake.reset();
    make_script();
    options.flags = KVT_OPEN_PROBE_METADATA;
    open_with(&a, "alpha", &options);
    open_side(&b, "beta");
    export_side(&b, &plain);
    assert_int_equal(kvti_md_decode(plain.md.prefix, plain.md.prefix_length,
                                    4096, &md, &err),
                     KVT_OK);
    for (size_t i = 0; i < PROCESSES; i++) {
        busy[i] = fake_job(KVTI_JOB_LOAD);
        busy[i].md = &md;
        fake_env_submit(&a.env, &busy[i]);
    }
    late.md = &md;
    late.deadline_ns = 1;
    assert_int_equal(fake_env_job(&a.env, &late), KVT_ETIMEDOUT);
    assert_non_null(strstr(late.err.text, "were busy"));
    for (size_t i = 0; i < PROCESSES; i++) {
        assert_false(fake_env_is_reported(&a.env, &busy[i]));
    }
    assert_int_equal(close_side(&a), KVT_OK);
    assert_int_equal(close_side(&b), KVT_OK);
    assert_int_equal(fake.count_lines("load"), 0);
    kvti_md_fini(&md);
    free_peer(&plain);
    remove_script();
}

static void a_folder_is_no_program(void **state)
{
    struct kvt_options options = options_of();

    (void)state;
    options.flags = KVT_OPEN_PROBE_METADATA;
    assert_int_equal(setenv("KVT_PROBE", "/", 1), 0);
    assert_refused(&options, KVT_EUNSUPPORTED, "which is no program");
    (void)unsetenv("KVT_PROBE");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(
            a_job_that_waits_for_a_process_ends_by_its_own_deadline),
        cmocka_unit_test(a_folder_is_no_program),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
