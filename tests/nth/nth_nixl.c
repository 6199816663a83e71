/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader, and NIXL's functions, which it finds.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engines/nixl_capi.h"
#include "nth_call.h"

/* What dlerror() says of a failure of ours. */
static _Thread_local const char *loader_error;

/*
 * Ours in the place of NIXL's. All arguments are integers and pointers, seven
 * at most, and are handed on as words: where the calling convention has them
 * in registers and 8-byte places this is all there is to know of their types.
 */
typedef int any_function(long, long, long, long, long, long, long);

struct ways {
    int errors[5];
    size_t count;
};

#define ALL_OF(done)                                                           \
    NIXL_BACKEND + (done), NIXL_INVALID_PARAM + (done),                        \
        NIXL_EXCEPTION + (done), NIXL_NOT_FOUND + (done)

static bool is_one_of(const char *name, const char *const *of, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(name, of[i]) == 0) {
            return true;
        }
    }
    return false;
}

#define IS_ONE_OF(name, of) is_one_of(name, of, sizeof(of) / sizeof((of)[0]))

static const struct ways *ways_of(const char *name)
{
    static const char *const act[] = {"register_mem", "load_remote_md",
                                      "post_xfer_req", "gen_notif",
                                      "get_notifs"};
    static const char *const undo[] = {"deregister_mem", "invalidate_remote_md",
                                       "release_xfer_req", "notif_map_clear"};
    static const struct ways plain = {{ALL_OF(0)}, 4};
    /* Half a job is one for which there is an error. */
    static const struct ways acting = {{ALL_OF(0), NIXL_BACKEND + NTH_DONE}, 5};
    static const struct ways undoing = {{ALL_OF(NTH_DONE), NIXL_BACKEND}, 5};
    /* What it would leave behind would be NIXL's, not ours. */
    static const struct ways ending = {{ALL_OF(NTH_DONE)}, 4};
    /* A message that NIXL does not hand out, for another reason than that it
     * failed, is left out by design (nixl_note.c). */
    static const struct ways reading = {{NIXL_BACKEND}, 1};

    if (strncmp(name, "destroy_", strlen("destroy_")) == 0) {
        return &ending;
    }
    if (strncmp(name, "notif_map_get_", strlen("notif_map_get_")) == 0) {
        return &reading;
    }
    if (IS_ONE_OF(name, act)) {
        return &acting;
    }
    return IS_ONE_OF(name, undo) ? &undoing : &plain;
}

/* What a call that was made does to the number of handles. */
static long handles_of(const char *name, int code)
{
    if (strstr(name, "xfer_req") != NULL) {
        return 0;
    }
    if (strncmp(name, "destroy_", strlen("destroy_")) == 0) {
        return -1;
    }
    return code == NIXL_OK &&
           (strncmp(name, "create_", strlen("create_")) == 0 ||
            strcmp(name, "get_available_plugins") == 0);
}

/* A call that failed has handed nothing out, whatever it has done. */
static void take_back(const char *name, const long *at)
{
    if (strcmp(name, "load_remote_md") == 0) {
        char **ret_name = (char **)at[3];

        free(*ret_name);
        *ret_name = NULL;
    }
}

static int through(any_function *real, const char *name, const void *caller,
                   const long *at)
{
    const struct ways *ways = ways_of(name);
    int error = nth_next(NTH_NIXL, name, ways->errors, ways->count, caller);
    int code;

    if (error < 0 && error > NTH_DONE) {
        return error;
    }
    code = real(at[0], at[1], at[2], at[3], at[4], at[5], at[6]);
    nth_handled(handles_of(name, code));
    if (error == 0) {
        return code;
    }
    take_back(name, at);
    return error - NTH_DONE;
}

#define SHIM(name, arguments)                                                  \
    static any_function *real_##name;                                          \
    static int shim_##name(long a, long b, long c, long d, long e, long f,     \
                           long g)                                             \
    {                                                                          \
        const long at[] = {a, b, c, d, e, f, g};                               \
                                                                               \
        return through(real_##name, #name, CALLER, at);                        \
    }
KVTI_NIXL_FUNCTIONS(SHIM)
#undef SHIM

static void *instead(const char *name, void *found)
{
#define ENTRY(name_, arguments)                                                \
    if (strcmp(name, "nixl_capi_" #name_) == 0) {                              \
        any_function *ours = shim_##name_;                                     \
                                                                               \
        memcpy(&real_##name_, &found, sizeof found);                           \
        memcpy(&found, &ours, sizeof found);                                   \
    }
    KVTI_NIXL_FUNCTIONS(ENTRY)
#undef ENTRY
    return found;
}

PROTOTYPE(void *, dlopen, (const char *file, int flags))
{
    ERRORS(ENOMEM);

    if (nth_next(NTH_LOADER, "dlopen", errors, ways, CALLER) != 0) {
        loader_error = "the Nth call fails";
        return NULL;
    }
    return __real_dlopen(file, flags);
}

PROTOTYPE(void *, dlsym, (void *handle, const char *name))
{
    ERRORS(ENOENT);
    void *found;

    if (nth_next(NTH_LOADER, name, errors, ways, CALLER) != 0) {
        loader_error = "the Nth call fails";
        return NULL;
    }
    found = __real_dlsym(handle, name);
    return found != NULL ? instead(name, found) : NULL;
}

PROTOTYPE(char *, dlerror, (void))
{
    static char text[64];
    const char *ours = loader_error;

    loader_error = NULL;
    if (ours == NULL) {
        return __real_dlerror();
    }
    (void)snprintf(text, sizeof text, "%s", ours);
    return text;
}
