/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and loading libnixl_capi.so, once for the process. */
#ifndef KVTI_NIXL_LOAD_H
#define KVTI_NIXL_LOAD_H

#include <limits.h>

#include "../diag.h"
#include "nixl_capi.h"

struct kvti_nixl_lib {
    struct nixl_api api;
    char path[PATH_MAX];
    char version[64]; /* of the wheel around it, or "unknown" */
};

/*
 * The library, loaded on the first call and kept for the life of the process.
 * `path` is options->nixl_library, or NULL to search. `want_efa` leaves UCX's
 * EFA module on. KVT_EUNSUPPORTED with every place that was tried and why it
 * was not taken; KVT_EINVAL when the process has another library loaded.
 */
int kvti_nixl_load(const char *path, bool want_efa,
                   const struct kvti_nixl_lib **ret, struct kvt_error *err);

/* What was tried and why it was not taken, as one line. */
struct kvti_nixl_tried {
    char text[1024];
};

void kvti_nixl_note(struct kvti_nixl_tried *tried, const char *place,
                    const char *why);

/* Takes this file whole, or notes why not. Under the lock of kvti_nixl_load(),
 * as the two below. */
bool kvti_nixl_try(const char *file, struct kvti_nixl_lib *lib,
                   struct kvti_nixl_tried *tried);

/* nixl_find.c: tries `path`, or every place there is. */
bool kvti_nixl_find(const char *path, struct kvti_nixl_lib *lib,
                    struct kvti_nixl_tried *tried);

/* Whether KVT_NIXL_LIBRARY names the library. */
bool kvti_nixl_is_named(void);

/* A file that may be executed; a folder passes access() too. */
bool kvti_nixl_is_program(const char *path);

/* nixl_env.c: what UCX is to find in the environment. */
void kvti_nixl_prepare_env(bool want_efa);

#endif /* KVTI_NIXL_LOAD_H */
