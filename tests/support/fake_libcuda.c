/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NVIDIA's libcuda.so.1 with four GPUs, for tests that find it
 * by LD_LIBRARY_PATH. It keeps what the real one keeps and kvt relies on: a
 * current context for each thread, a counted primary context for each GPU.
 * Contexts that are used when they are gone abort.
 *
 * A test makes it fail with fake_cuda_fail(): the function of that name answers
 * this until told otherwise.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define GPUS 4

enum {
    OK = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201
};

struct context {
    int device;
    int uses; /* of a primary one */
    int made; /* how often it came to be */
};

EXPORT int cuInit(unsigned int flags);
EXPORT int cuDeviceGet(int *ret, int ordinal);
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned int *ret_flags,
                                      int *ret_active);
EXPORT int cuDevicePrimaryCtxRetain(void **ret, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxCreate_v2(void **ret, unsigned int flags, int device);
EXPORT int cuCtxGetCurrent(void **ret);
EXPORT int cuCtxSetCurrent(void *context);
EXPORT int cuCtxGetDevice(int *ret);
EXPORT int cuGetErrorName(int result, const char **ret);
EXPORT void fake_cuda_fail(const char *function, int result);
EXPORT int fake_cuda_uses(int device);
EXPORT int fake_cuda_made(int device);

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct context primary[GPUS] = {
    {.device = 0}, {.device = 1}, {.device = 2}, {.device = 3}};
static struct context created = {.device = 1}; /* by cuCtxCreate */
static char failing[48];
static int failure;
static int initialized;
static __thread struct context *current;

static int enter(const char *function, int needs_init)
{
    pthread_mutex_lock(&mu);
    if (strcmp(failing, function) == 0) {
        return failure;
    }
    return needs_init && !initialized ? NOT_INITIALIZED : OK;
}

static int leave(int result)
{
    pthread_mutex_unlock(&mu);
    return result;
}

void fake_cuda_fail(const char *function, int result)
{
    pthread_mutex_lock(&mu);
    (void)snprintf(failing, sizeof failing, "%s", function);
    failure = result;
    pthread_mutex_unlock(&mu);
}

int fake_cuda_uses(int device)
{
    int uses;

    pthread_mutex_lock(&mu);
    uses = primary[device].uses;
    pthread_mutex_unlock(&mu);
    return uses;
}

int fake_cuda_made(int device)
{
    int count;

    pthread_mutex_lock(&mu);
    count = primary[device].made;
    pthread_mutex_unlock(&mu);
    return count;
}

int cuInit(unsigned int flags)
{
    int result = enter("cuInit", 0);

    if (result == OK && flags != 0) {
        result = INVALID_VALUE;
    }
    initialized |= result == OK;
    return leave(result);
}

int cuDeviceGet(int *ret, int ordinal)
{
    int result = enter("cuDeviceGet", 1);

    if (result == OK && (ordinal < 0 || ordinal >= GPUS)) {
        result = INVALID_DEVICE;
    }
    if (result == OK) {
        *ret = ordinal;
    }
    return leave(result);
}

int cuDevicePrimaryCtxGetState(int device, unsigned int *ret_flags,
                               int *ret_active)
{
    int result = enter("cuDevicePrimaryCtxGetState", 1);

    if (result == OK) {
        *ret_flags = 0;
        *ret_active = primary[device].uses > 0;
    }
    return leave(result);
}

int cuDevicePrimaryCtxRetain(void **ret, int device)
{
    int result = enter("cuDevicePrimaryCtxRetain", 1);

    if (result == OK) {
        primary[device].made += primary[device].uses++ == 0;
        *ret = &primary[device];
    }
    return leave(result);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    int result = enter("cuDevicePrimaryCtxRelease_v2", 1);

    if (result == OK && primary[device].uses-- == 0) {
        abort();
    }
    return leave(result);
}

int cuCtxCreate_v2(void **ret, unsigned int flags, int device)
{
    int result = enter("cuCtxCreate_v2", 1);

    (void)flags;
    if (result == OK) {
        created.device = device;
        current = &created;
        *ret = &created;
    }
    return leave(result);
}

int cuCtxGetCurrent(void **ret)
{
    int result = enter("cuCtxGetCurrent", 1);

    if (result == OK) {
        *ret = current;
    }
    return leave(result);
}

int cuCtxSetCurrent(void *context)
{
    int result = enter("cuCtxSetCurrent", 1);

    if (result == OK) {
        current = context;
    }
    return leave(result);
}

int cuCtxGetDevice(int *ret)
{
    int result = enter("cuCtxGetDevice", 1);

    if (result == OK && current == NULL) {
        result = INVALID_CONTEXT;
    }
    if (result == OK) {
        if (current != &created && current->uses == 0) {
            abort();
        }
        *ret = current->device;
    }
    return leave(result);
}

int cuGetErrorName(int result, const char **ret)
{
    *ret = result == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : NULL;
    return *ret != NULL ? OK : INVALID_VALUE;
}
