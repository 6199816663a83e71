/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU of the NIXL thread, against stand-ins for NIXL and for NVIDIA's
 * libcuda (fake_libcuda.c, found by LD_LIBRARY_PATH). As the real backends do,
 * the stand-in for NIXL looks which context is current in the thread that
 * creates a backend, and writes it down.
 *
 * Proved: the GPU that was asked for, or the context of the thread that opens,
 * is current in that thread before the first backend is created and until the
 * agent is gone; primary contexts are held for just as long and none is made
 * that was not there; what CUDA refuses is an error for who asked for a GPU and
 * a line in the log for who did not.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nixl_pair.h"

#define INVALID_DEVICE 101
#define OUT_OF_MEMORY 2

static struct {
    int (*init)(unsigned int flags);
    int (*retain)(void **ret, int device);
    int (*release)(int device);
    int (*create)(void **ret, unsigned int flags, int device);
    int (*get_current)(void **ret);
    int (*set_current)(void *context);
    void (*answer)(const char *function, int result);
    int (*uses)(int device);
    int (*made)(int device);
} cuda;

/* Runs before CUDA is loaded into the process: main() lists it first. (B26) */
static void who_does_not_use_cuda_does_not_get_it(void **state)
{
    struct side side;

    (void)state;
    fake.reset();
    open_side(&side, "alpha");
    assert_null(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD));
    assert_int_equal(fake.count_lines("backend UCX"), 1);
    assert_int_equal(fake.count_lines("gpu"), 0);
    assert_int_equal(close_side(&side), KVT_OK);
}

static void find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    assert_non_null(symbol);
    memcpy(function, &symbol, sizeof symbol);
}

static void load_cuda(void)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);

    if (handle == NULL || dlsym(handle, "fake_cuda_fail") == NULL) {
        fail_msg("LD_LIBRARY_PATH does not lead to the stand-in for libcuda");
    }
    find(handle, "cuInit", &cuda.init);
    find(handle, "cuDevicePrimaryCtxRetain", &cuda.retain);
    find(handle, "cuDevicePrimaryCtxRelease_v2", &cuda.release);
    find(handle, "cuCtxCreate_v2", &cuda.create);
    find(handle, "cuCtxGetCurrent", &cuda.get_current);
    find(handle, "cuCtxSetCurrent", &cuda.set_current);
    find(handle, "fake_cuda_fail", &cuda.answer);
    find(handle, "fake_cuda_uses", &cuda.uses);
    find(handle, "fake_cuda_made", &cuda.made);
}

static int begin(void **state)
{
    (void)state;
    fake.reset();
    load_cuda();
    cuda.answer("", 0);
    return 0;
}

static struct kvt_options options_for(const char *engine, struct lines *lines)
{
    struct kvt_options options = options_of();

    *lines = (struct lines){.text = ""};
    options.engine = engine;
    options.log = keep_line;
    options.log_ctx = lines;
    return options;
}

static void assert_logged(const struct lines *lines, const char *words)
{
    if (strstr(lines->text, words) == NULL) {
        fail_msg("\"%s\" is not in the log:\n%s", words, lines->text);
    }
}

/* In the process, but never used: there is no context. */
static void cuda_that_nobody_started_is_left_alone(void **state)
{
    struct kvt_options options;
    struct lines lines;
    struct side side;

    (void)state;
    options = options_for("nixl", &lines);
    open_with(&side, "alpha", &options);
    assert_line("gpu backend UCX", 0, "none");
    assert_null(strstr(lines.text, "CUDA"));
    assert_int_equal(close_side(&side), KVT_OK);
}

static void the_gpu_asked_for_is_there_first_and_last(void **state)
{
    static const char *const backends[] = {"UCX", "GDS_MT"};
    struct kvt_options options;
    struct lines lines;
    struct side side;
    void *context;

    (void)state;
    options = options_for("nixl:gpu=0", &lines);
    options.backends = backends;
    options.backend_count = 2;
    for (int device = 0; device < 3; device += 2) {
        fake.reset();
        if (device > 0) { /* by the option; 0 would say nothing */
            options.engine = "nixl";
            options.device = (uint32_t)device;
        }
        assert_int_equal(cuda.uses(device), 0);
        open_with(&side, "alpha", &options);
        assert_line("gpu backend UCX", 0, device == 0 ? " 0" : " 2");
        assert_line("gpu backend GDS_MT", 0, device == 0 ? " 0" : " 2");
        assert_logged(&lines, device == 0 ? "runs on GPU 0" : "runs on GPU 2");
        assert_int_equal(cuda.uses(device), 1);
        assert_int_equal(close_side(&side), KVT_OK);
        assert_line("gpu end alpha", 0, device == 0 ? " 0" : " 2");
        assert_int_equal(cuda.uses(device), 0);
    }
    /* Nothing changed for the thread that opened. */
    assert_int_equal(cuda.get_current(&context), 0);
    assert_null(context);
}

static void the_callers_primary_context_is_used_and_held(void **state)
{
    struct kvt_options options;
    struct lines lines;
    struct side side;
    void *context;

    (void)state;
    assert_int_equal(cuda.init(0), 0);
    assert_int_equal(cuda.retain(&context, 3), 0);
    assert_int_equal(cuda.set_current(context), 0);
    options = options_for("nixl", &lines);
    open_with(&side, "alpha", &options);
    assert_line("gpu backend UCX", 0, " 3");
    assert_logged(&lines, "the CUDA context of the thread that opened it");
    assert_int_equal(cuda.uses(3), 2);
    /* The framework goes first, as at the end of a Python program. */
    assert_int_equal(cuda.set_current(NULL), 0);
    assert_int_equal(cuda.release(3), 0);
    assert_int_equal(close_side(&side), KVT_OK);
    assert_line("gpu end alpha", 0, " 3");
    assert_int_equal(cuda.uses(3), 0);
}

static void another_context_is_used_and_no_primary_one_is_made(void **state)
{
    struct side side;
    void *context;
    void *primary;

    (void)state;
    assert_int_equal(cuda.init(0), 0);
    assert_int_equal(cuda.create(&context, 0, 1), 0);
    open_side(&side, "alpha");
    assert_line("gpu backend UCX", 0, " 1");
    assert_int_equal(cuda.made(1), 0);
    assert_int_equal(close_side(&side), KVT_OK);

    /* There is a primary one, but it is not the current one. */
    assert_int_equal(cuda.retain(&primary, 1), 0);
    open_side(&side, "alpha");
    assert_int_equal(cuda.uses(1), 1);
    assert_int_equal(close_side(&side), KVT_OK);
    assert_int_equal(cuda.release(1), 0);
    assert_int_equal(cuda.set_current(NULL), 0);
}

static void the_gpu_asked_for_wins_over_the_callers(void **state)
{
    struct kvt_options options;
    struct lines lines;
    struct side side;
    void *context;

    (void)state;
    assert_int_equal(cuda.init(0), 0);
    assert_int_equal(cuda.retain(&context, 3), 0);
    assert_int_equal(cuda.set_current(context), 0);
    options = options_for("nixl:gpu=1", &lines);
    open_with(&side, "alpha", &options);
    assert_line("gpu backend UCX", 0, " 1");
    assert_int_equal(cuda.uses(3), 1);
    assert_int_equal(close_side(&side), KVT_OK);
    assert_int_equal(cuda.uses(1), 0);
    assert_int_equal(cuda.release(3), 0);
    assert_int_equal(cuda.set_current(NULL), 0);
}

static void what_cuda_refuses_is_an_error_for_who_asked(void **state)
{
    struct kvt_options options;
    struct lines lines;

    (void)state;
    options = options_for("nixl:gpu=9", &lines);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "GPU 9 cannot be selected: cuDeviceGet answered "
                   "CUDA_ERROR_INVALID_DEVICE (101)");
    options.engine = "nixl:gpu=2";
    cuda.answer("cuInit", INVALID_DEVICE);
    assert_refused(&options, KVT_EUNSUPPORTED, "cuInit answered");
    cuda.answer("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "cuDevicePrimaryCtxRetain answered error (2)");
    cuda.answer("cuCtxSetCurrent", OUT_OF_MEMORY);
    assert_refused(&options, KVT_EUNSUPPORTED, "cuCtxSetCurrent answered");
    assert_int_equal(cuda.uses(2), 0);
    /* None of them came as far as NIXL. */
    assert_int_equal(fake.count_lines("agent"), 0);
}

static void what_cuda_refuses_is_a_line_for_who_did_not_ask(void **state)
{
    struct kvt_options options;
    struct lines lines;
    struct side side;
    void *context;

    (void)state;
    assert_int_equal(cuda.init(0), 0);
    options = options_for("nixl", &lines);
    cuda.answer("cuCtxGetCurrent", OUT_OF_MEMORY);
    open_with(&side, "alpha", &options);
    assert_logged(&lines, "cuCtxGetCurrent answered error (2)");
    assert_int_equal(close_side(&side), KVT_OK);

    cuda.answer("", 0);
    assert_int_equal(cuda.retain(&context, 3), 0);
    assert_int_equal(cuda.set_current(context), 0);
    options = options_for("nixl", &lines);
    cuda.answer("cuCtxSetCurrent", OUT_OF_MEMORY);
    open_with(&side, "alpha", &options);
    assert_logged(&lines, "cuCtxSetCurrent answered error (2)");
    assert_line("gpu backend UCX", 0, "none");
    assert_int_equal(close_side(&side), KVT_OK);
    cuda.answer("", 0);
    assert_int_equal(cuda.release(3), 0);
    assert_int_equal(cuda.uses(3), 0);
    assert_int_equal(cuda.set_current(NULL), 0);
}

static void a_backend_that_fails_gives_the_gpu_back(void **state)
{
    struct kvt_options options;
    struct lines lines;

    (void)state;
    options = options_for("nixl:gpu=2", &lines);
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED, "UCX");
    assert_int_equal(cuda.uses(2), 0);
}

#define CASE(function) cmocka_unit_test_setup(function, begin)

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(who_does_not_use_cuda_does_not_get_it),
        CASE(cuda_that_nobody_started_is_left_alone),
        CASE(the_gpu_asked_for_is_there_first_and_last),
        CASE(the_callers_primary_context_is_used_and_held),
        CASE(another_context_is_used_and_no_primary_one_is_made),
        CASE(the_gpu_asked_for_wins_over_the_callers),
        CASE(what_cuda_refuses_is_an_error_for_who_asked),
        CASE(what_cuda_refuses_is_a_line_for_who_did_not_ask),
        CASE(a_backend_that_fails_gives_the_gpu_back),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
