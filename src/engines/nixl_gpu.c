/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The GPU of the NIXL thread. UCX and the drivers behind the other backends
 * tie what they make to the CUDA context that is current in the thread, so it
 * is set in the very thread that makes the backends, before the first of them,
 * and stays until the last of them is gone.
 *
 * Which context: that of the GPU that was asked for, its primary one, which is
 * the one that CUDA's runtime, and so PyTorch, uses; else the one that is
 * current where kvt_open() was called; else none.
 *
 * CUDA is called through libcuda at run time. Who asked for no GPU gets no
 * libcuda either: a process that has not loaded it has no context. Primary
 * contexts are counted by the driver, and ours is held as long as NIXL may use
 * it. Others belong to their makers, who must keep them.
 *
 * Everything that can take time is done on the NIXL thread, in open's deadline.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "nixl.h"

#define LIBRARY "libcuda.so.1"

/* CUresult. */
enum { CUDA_OK = 0, CUDA_NOT_INITIALIZED = 3 };

/* X(field, symbol, arguments): as in libcuda; CUdevice is an int, CUcontext a
 * pointer. */
#define CUDA_FUNCTIONS(X)                                                      \
    X(init, cuInit, (unsigned int flags))                                      \
    X(device_get, cuDeviceGet, (int *ret, int ordinal))                        \
    X(primary_state, cuDevicePrimaryCtxGetState,                               \
      (int device, unsigned int *ret_flags, int *ret_active))                  \
    X(primary_retain, cuDevicePrimaryCtxRetain, (void **ret, int device))      \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (int device))             \
    X(get_current, cuCtxGetCurrent, (void **ret))                              \
    X(set_current, cuCtxSetCurrent, (void *context))                           \
    X(get_device, cuCtxGetDevice, (int *ret))                                  \
    X(error_name, cuGetErrorName, (int result, const char **ret))

/* Arguments cannot stand in parentheses of their own. */
/* NOLINTBEGIN(bugprone-macro-parentheses) */
struct kvti_nixl_cuda {
#define FIELD(field, symbol, arguments) int(*field) arguments;
    CUDA_FUNCTIONS(FIELD)
#undef FIELD
};
/* NOLINTEND(bugprone-macro-parentheses) */

/* The library stays open: the host uses it, or NIXL does from here on. */
static int load(struct kvti_nixl_gpu *gpu, int flags)
{
    void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | flags);
    struct kvti_nixl_cuda *cuda;

    if (handle == NULL) {
        return KVT_ENOENT;
    }
    cuda = calloc(1, sizeof(*cuda));
    if (cuda == NULL) {
        kvti_format(gpu->why, sizeof(gpu->why), "out of memory");
        return KVT_ENOMEM;
    }
#define FIND(field, symbol, arguments)                                         \
    {                                                                          \
        void *at = dlsym(handle, #symbol);                                     \
                                                                               \
        if (at == NULL) {                                                      \
            kvti_format(gpu->why, sizeof(gpu->why),                            \
                        LIBRARY " has no " #symbol);                           \
            free(cuda);                                                        \
            return KVT_EUNSUPPORTED;                                           \
        }                                                                      \
        memcpy(&cuda->field, &at, sizeof(at));                                 \
    }
    CUDA_FUNCTIONS(FIND)
#undef FIND
    gpu->cuda = cuda;
    return KVT_OK;
}

static int failed(struct kvti_nixl_gpu *gpu, const char *function, int result)
{
    const char *name = NULL;

    if (result == CUDA_OK) {
        return KVT_OK;
    }
    if (gpu->cuda->error_name(result, &name) != CUDA_OK || name == NULL) {
        name = "error";
    }
    kvti_format(gpu->why, sizeof(gpu->why), "%s answered %s (%d)", function,
                name, result);
    return KVT_EUNSUPPORTED;
}

/* ---------------------------------------------------------- caller's thread */

/* A primary context is held, so that it outlives its other users. To retain one
 * that is not there would make it, with all the memory it takes. */
static void hold(struct kvti_nixl_gpu *gpu)
{
    const struct kvti_nixl_cuda *cuda = gpu->cuda;
    unsigned int flags;
    void *primary = NULL;
    int active = 0;
    int device;

    if (cuda->get_device(&device) != CUDA_OK ||
        cuda->primary_state(device, &flags, &active) != CUDA_OK ||
        active == 0 || cuda->primary_retain(&primary, device) != CUDA_OK) {
        return;
    }
    gpu->held = primary == gpu->context;
    gpu->device = device;
    if (!gpu->held) {
        (void)cuda->primary_release(device);
    }
}

void kvti_nixl_gpu_find(struct kvti_nixl_gpu *gpu, uint64_t number)
{
    int result;

    if (number != KVTI_NIXL_NO_GPU || load(gpu, RTLD_NOLOAD) != KVT_OK) {
        return;
    }
    result = gpu->cuda->get_current(&gpu->context);
    if (result == CUDA_OK && gpu->context != NULL) {
        hold(gpu);
    } else if (result != CUDA_NOT_INITIALIZED) {
        (void)failed(gpu, "cuCtxGetCurrent", result);
    }
}

/* -------------------------------------------------------------- NIXL thread */

static int retain(struct kvti_nixl_gpu *gpu, uint64_t number)
{
    int code = load(gpu, 0);

    if (code != KVT_OK) {
        return code;
    }
    code = failed(gpu, "cuInit", gpu->cuda->init(0));
    if (code == KVT_OK) {
        code = failed(gpu, "cuDeviceGet",
                      gpu->cuda->device_get(&gpu->device, (int)number));
    }
    if (code == KVT_OK) {
        code = failed(gpu, "cuDevicePrimaryCtxRetain",
                      gpu->cuda->primary_retain(&gpu->context, gpu->device));
        gpu->held = code == KVT_OK;
    }
    return code;
}

int kvti_nixl_gpu_enter(struct kvti_nixl_gpu *gpu, uint64_t number,
                        bool needs_cuda, struct kvt_error *err)
{
    bool asked = number != KVTI_NIXL_NO_GPU;
    int code = asked ? retain(gpu, number) : KVT_OK;

    if (code == KVT_ENOENT && !needs_cuda) {
        return KVT_OK;
    }
    if (code == KVT_ENOENT) {
        kvti_format(gpu->why, sizeof(gpu->why),
                    LIBRARY " cannot be loaded: there is no NVIDIA driver");
    }
    if (code == KVT_OK && gpu->context != NULL) {
        code = failed(gpu, "cuCtxSetCurrent",
                      gpu->cuda->set_current(gpu->context));
        gpu->entered = code == KVT_OK;
    }
    if (code == KVT_OK || !asked) {
        return KVT_OK;
    }
    return kvti_fail(err, KVT_EUNSUPPORTED,
                     "GPU %llu cannot be selected: %s; name one that this "
                     "process sees, or none",
                     (unsigned long long)number, gpu->why);
}

/* ------------------------------------------------------------------- the end */

void kvti_nixl_gpu_fini(struct kvti_nixl_gpu *gpu)
{
    if (gpu->held) {
        (void)gpu->cuda->primary_release(gpu->device);
        gpu->held = false;
    }
    free(gpu->cuda);
    gpu->cuda = NULL;
}
