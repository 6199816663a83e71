/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL is found at run time: nothing of it is needed to build or to start.
 *
 * A library is taken whole or not at all: it opens with all its own needs
 * (RTLD_NOW), says that it is no stub (NIXL's stubs abort the process when
 * called), and has every function we call. It is opened RTLD_LOCAL, so that
 * its UCX is seen by nobody else, and never closed: threads of it outlive
 * whoever opened it. One library a process: two would bring two copies of UCX,
 * which do not bear each other.
 *
 * A path that somebody named is the only one tried: falling back to another
 * library than the one asked for would hide the mistake.
 *
 * UCX reads its environment when NIXL loads it. Variables the user has set are
 * left alone; the others are set for what every program that embeds kvt wants:
 *  - UCX_MODULES=^efa: the wheel's EFA module pulls in the system's libibverbs
 *    and with it a second libnl-route; exit() then crashes in _dl_fini.
 *  - UCX_DEBUG_SIGNO=0: UCX takes SIGHUP over, to stop in a debugger.
 *  - UCX_HANDLE_ERRORS=none and UCX_ERROR_SIGNALS=: builds of UCX with
 *    debugging support take SIGSEGV and its like over as well.
 */
#include "nixl_load.h"

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIBRARY "libnixl_capi.so"

/* load_mu keeps our own calls apart; a program that changes its environment in
 * another thread meanwhile is beyond help, and glibc keeps dlerror()'s text for
 * each thread. */
/* NOLINTBEGIN(concurrency-mt-unsafe) */

/* What was tried and why it was not taken, as one line. */
struct tried {
    char text[1024];
    size_t count;
};

static pthread_mutex_t load_mu = PTHREAD_MUTEX_INITIALIZER;
static struct kvti_nixl_lib *loaded; /* under load_mu until set, then const */

static void note(struct tried *tried, const char *place, const char *why)
{
    size_t used = strlen(tried->text);

    kvti_format(tried->text + used, sizeof(tried->text) - used, "%s%s (%s)",
                tried->count > 0 ? ", " : "", place, why);
    tried->count++;
}

/* -------------------------------------------------------------- environment */

static bool mentions(const char *name, const char *word)
{
    const char *value = getenv(name);

    return value != NULL && strstr(value, word) != NULL;
}

static void prepare_ucx(bool want_efa)
{
    want_efa = want_efa || mentions("UCX_TLS", "srd") ||
               mentions("UCX_TLS", "efa") || mentions("UCX_NET_DEVICES", "efa");
    if (!want_efa) {
        (void)setenv("UCX_MODULES", "^efa", 0);
    }
    (void)setenv("UCX_DEBUG_SIGNO", "0", 0);
    (void)setenv("UCX_HANDLE_ERRORS", "none", 0);
    (void)setenv("UCX_ERROR_SIGNALS", "", 0);
}

/* ----------------------------------------------------------------- a library */

/* The one place where a data pointer becomes a function's. */
static bool find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

/* NULL, or the name that is missing. */
static const char *find_all(void *handle, struct nixl_api *api)
{
#define FIND(name, arguments)                                                  \
    if (!find(handle, "nixl_capi_" #name, &api->name)) {                       \
        return "nixl_capi_" #name;                                             \
    }
    KVTI_NIXL_FUNCTIONS(FIND)
#undef FIND
    return NULL;
}

/* The wheel's version stands in the name of a directory beside it:
 * …/nixl_cu12-1.5.1.dist-info. */
static void find_version(struct kvti_nixl_lib *lib)
{
    char pattern[PATH_MAX + 32];
    const char *end = strrchr(lib->path, '/');
    glob_t found;

    kvti_format(lib->version, sizeof(lib->version), "unknown");
    if (end == NULL) {
        return;
    }
    kvti_format(pattern, sizeof(pattern), "%.*s/../nixl_cu1[23]-*.dist-info",
                (int)(end - lib->path), lib->path);
    /* Wheels of both kinds may lie side by side: the folder says which. */
    if (strstr(lib->path, "nixl_cu12") != NULL ||
        strstr(lib->path, "nixl_cu13") != NULL) {
        char *kind = strstr(pattern, "/../nixl_cu1[23]-");
        const char *ours = strstr(lib->path, "nixl_cu1");

        kvti_format(kind, sizeof(pattern) - (size_t)(kind - pattern),
                    "/../nixl_cu1%c-*.dist-info", ours[8]);
    }
    if (glob(pattern, 0, NULL, &found) == 0) {
        const char *name = strrchr(found.gl_pathv[0], '/') + 1;
        const char *version = strchr(name, '-') + 1;

        kvti_format(lib->version, sizeof(lib->version), "%.*s",
                    (int)(strlen(version) - strlen(".dist-info")), version);
        globfree(&found);
    }
}

static void find_path(void *handle, const char *asked,
                      struct kvti_nixl_lib *lib)
{
    struct link_map *map = NULL;
    const char *name = asked;

    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != NULL &&
        map->l_name[0] != '\0') {
        name = map->l_name;
    }
    /* Links are kept: the version stands beside the wheel's own file. */
    kvti_format(lib->path, sizeof(lib->path), "%s", name);
}

static bool try_library(const char *file, struct kvti_nixl_lib *lib,
                        struct tried *tried)
{
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    const char *missing;
    char why[128];

    if (handle == NULL) {
        const char *text = dlerror();
        const char *words = text != NULL ? strstr(text, ": ") : NULL;

        /* The loader names the file first, and so do we. */
        note(tried, file, words != NULL ? words + 2 : "cannot be loaded");
        return false;
    }
    if (!find(handle, "nixl_capi_is_stub", &lib->api.is_stub)) {
        missing = "nixl_capi_is_stub";
    } else if (lib->api.is_stub()) {
        note(tried, file, "a stub without NIXL behind it");
        dlclose(handle);
        return false;
    } else {
        missing = find_all(handle, &lib->api);
    }
    if (missing != NULL) {
        kvti_format(why, sizeof(why), "it has no %s", missing);
        note(tried, file, why);
        dlclose(handle);
        return false;
    }
    find_path(handle, file, lib);
    find_version(lib);
    return true;
}

/* ----------------------------------------------------------------- searching */

/* The wheels below one installation of Python. */
static bool try_prefix(const char *what, const char *prefix,
                       struct kvti_nixl_lib *lib, struct tried *tried)
{
    static const char *const folders[] = {
        "lib/python3*/site-packages", "lib64/python3*/site-packages",
        "lib/python3*/dist-packages", "local/lib/python3*/dist-packages"};
    char place[PATH_MAX + 64];
    bool found = false;
    bool seen = false;

    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        char pattern[PATH_MAX + 128];
        glob_t paths;

        kvti_format(pattern, sizeof(pattern),
                    "%s/%s/.nixl_cu1[23].mesonpy.libs/" LIBRARY, prefix,
                    folders[i]);
        if (glob(pattern, 0, NULL, &paths) != 0) {
            continue;
        }
        for (size_t k = 0; k < paths.gl_pathc && !found; k++) {
            seen = true;
            found = try_library(paths.gl_pathv[k], lib, tried);
        }
        globfree(&paths);
        if (found) {
            return true;
        }
    }
    if (!seen) {
        kvti_format(place, sizeof(place), "%s %s", what, prefix);
        note(tried, place, "no nixl wheel");
    }
    return false;
}

/* …/bin/python3 belongs to the installation …; a link may belong to a virtual
 * environment where it lies and to another one where it leads. */
static bool try_python(const char *what, const char *python,
                       struct kvti_nixl_lib *lib, struct tried *tried)
{
    char path[PATH_MAX];
    char real[PATH_MAX];

    if (access(python, F_OK) != 0) {
        char place[PATH_MAX + 64];

        kvti_format(place, sizeof(place), "%s %s", what, python);
        note(tried, place, "no such file");
        return false;
    }
    kvti_format(path, sizeof(path), "%s", python);
    for (int up = 0; up < 2 && strrchr(path, '/') != NULL; up++) {
        *strrchr(path, '/') = '\0';
    }
    if (try_prefix(what, path, lib, tried)) {
        return true;
    }
    if (realpath(python, real) == NULL) {
        return false;
    }
    for (int up = 0; up < 2 && strrchr(real, '/') != NULL; up++) {
        *strrchr(real, '/') = '\0';
    }
    return strcmp(real, path) != 0 && try_prefix(what, real, lib, tried);
}

/* The first python3 in the directories of PATH. */
static bool find_python(char *path, size_t size)
{
    const char *at = getenv("PATH");

    while (at != NULL && *at != '\0') {
        size_t length = strcspn(at, ":");

        kvti_format(path, size, "%.*s/python3", (int)length, at);
        if (length > 0 && access(path, X_OK) == 0) {
            return true;
        }
        at += length + (at[length] == ':');
    }
    return false;
}

static bool is_folder(const char *path)
{
    char inside[PATH_MAX];

    kvti_format(inside, sizeof(inside), "%s/.", path);
    return access(inside, F_OK) == 0;
}

static const char *set_variable(const char *name)
{
    const char *value = getenv(name);

    return value != NULL && value[0] != '\0' ? value : NULL;
}

static bool search(const char *path, struct kvti_nixl_lib *lib,
                   struct tried *tried)
{
    const char *value = path != NULL && path[0] != '\0'
                            ? path
                            : set_variable("KVT_NIXL_LIBRARY");
    char python[PATH_MAX];

    if (value != NULL) {
        return try_library(value, lib, tried);
    }
    if (try_library(LIBRARY, lib, tried)) {
        return true;
    }
    value = set_variable("KVT_PYTHON");
    if (value != NULL &&
        (is_folder(value) ? try_prefix("KVT_PYTHON", value, lib, tried)
                          : try_python("KVT_PYTHON", value, lib, tried))) {
        return true;
    }
    value = set_variable("VIRTUAL_ENV");
    if (value != NULL && try_prefix("VIRTUAL_ENV", value, lib, tried)) {
        return true;
    }
    if (!find_python(python, sizeof(python))) {
        note(tried, "python3", "not in PATH");
        return false;
    }
    return try_python("python3", python, lib, tried);
}

/* ------------------------------------------------------------------- loading */

/* Another path than the loaded library's is refused, another name for the same
 * file is not. */
static int check_same(const char *path, struct kvt_error *err)
{
    struct stat asked;
    struct stat have;

    if (path == NULL || path[0] == '\0' || strcmp(path, loaded->path) == 0 ||
        (stat(path, &asked) == 0 && stat(loaded->path, &have) == 0 &&
         asked.st_dev == have.st_dev && asked.st_ino == have.st_ino)) {
        return KVT_OK;
    }
    return kvti_fail(err, KVT_EINVAL,
                     "this process uses NIXL from %.90s already and cannot "
                     "use %.70s too: name the same library everywhere",
                     loaded->path, path);
}

int kvti_nixl_load(const char *path, bool want_efa,
                   const struct kvti_nixl_lib **ret, struct kvt_error *err)
{
    struct tried tried = {.count = 0};
    struct kvti_nixl_lib *lib;
    int code = KVT_OK;

    pthread_mutex_lock(&load_mu);
    if (loaded == NULL) {
        lib = calloc(1, sizeof(*lib));
        if (lib == NULL) {
            code = kvti_fail(err, KVT_ENOMEM, "no memory for NIXL's table");
        } else {
            prepare_ucx(want_efa);
            if (search(path, lib, &tried)) {
                loaded = lib;
            } else {
                free(lib);
                code = kvti_fail(err, KVT_EUNSUPPORTED,
                                 "NIXL cannot be loaded; install nixl-cu12 or "
                                 "set KVT_NIXL_LIBRARY; tried %s",
                                 tried.text);
            }
        }
    } else {
        code = check_same(path, err);
    }
    if (code == KVT_OK) {
        *ret = loaded;
    }
    pthread_mutex_unlock(&load_mu);
    return code;
}

/* NOLINTEND(concurrency-mt-unsafe) */
