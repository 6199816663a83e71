/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader, and NIXL's functions, which it finds.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
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

enum undone { NOT_DONE, DONE_ALL_THE_SAME };

/* A function that gives something back has done so, whatever it answers: what
 * it would leave behind would be NIXL's, not ours. */
static enum undone after(const char *name)
{
    return strstr(name, "destroy") != NULL || strstr(name, "release") != NULL ||
                   strstr(name, "deregister") != NULL ||
                   strstr(name, "invalidate") != NULL ||
                   strstr(name, "clear") != NULL
               ? DONE_ALL_THE_SAME
               : NOT_DONE;
}

/* A message that NIXL does not hand out, for another reason than that it failed,
 * is left out by design (nixl_note.c). */
static bool reads_map(const char *name)
{
    return strncmp(name, "notif_map_get_", strlen("notif_map_get_")) == 0;
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

static int through(any_function *real, const char *name, const void *caller,
                   const long *at)
{
    ERRORS(NIXL_BACKEND, NIXL_INVALID_PARAM, NIXL_EXCEPTION, NIXL_NOT_FOUND);
    int error = nth_next(NTH_NIXL, name, errors, reads_map(name) ? 1 : ways,
                         caller);

    if (error != 0 && after(name) == NOT_DONE) {
        return error;
    }
    {
        int code = real(at[0], at[1], at[2], at[3], at[4], at[5], at[6]);

        nth_handled(handles_of(name, code));
        return error != 0 ? error : code;
    }
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
