/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL is loaded at run time: nothing of it is needed to build or to start.
 *
 * A library is taken whole or not at all: it opens with all its own needs
 * (RTLD_NOW), says that it is no stub (NIXL's stubs abort the process when
 * called), and has every function we call. It is opened RTLD_LOCAL, so that
 * its UCX is seen by nobody else, and never closed: threads of it outlive
 * whoever opened it. One library a process: two would bring two copies of UCX,
 * which do not bear each other.
 *
 * load_mu keeps our own calls apart. dlopen() runs NIXL's constructors in the
 * caller's thread; they touch no device: UCX and the drivers come with the
 * first backend, on the NIXL thread, where a deadline watches.
 */
#include "nixl_load.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* glibc keeps dlerror()'s text for each thread. */
/* NOLINTBEGIN(concurrency-mt-unsafe) */

static pthread_mutex_t load_mu = PTHREAD_MUTEX_INITIALIZER;
static struct kvti_nixl_lib *loaded; /* under load_mu until set, then const */

/* Neighbours with the same reason share it: errors are short. */
void kvti_nixl_note(struct kvti_nixl_tried *tried, const char *place,
                    const char *why)
{
    size_t used = strlen(tried->text);
    size_t length = strlen(why) + strlen(" ()");

    if (used > length && tried->text[used - length] == ' ' &&
        strncmp(tried->text + used - length + 2, why, strlen(why)) == 0) {
        used -= length;
    }
    kvti_format(tried->text + used, sizeof(tried->text) - used, "%s%s (%s)",
                used > 0 ? ", " : "", place, why);
}

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

/* The loader names a file before what is wrong with it: the one that we asked
 * for, which stands in front already, or one that it needs. */
static void note_refused(struct kvti_nixl_tried *tried, const char *file)
{
    const char *text = dlerror();
    size_t length = strlen(file);

    if (text == NULL) {
        text = "cannot be loaded";
    }
    if (strncmp(text, file, length) == 0 && text[length] == ':') {
        text += length + 1;
        text += strspn(text, " ");
        if (strstr(text, "No such file") != NULL) {
            text = "not found";
        }
    }
    kvti_nixl_note(tried, file, text);
}

bool kvti_nixl_try(const char *file, struct kvti_nixl_lib *lib,
                   struct kvti_nixl_tried *tried)
{
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    const char *missing;
    char why[128];

    if (handle == NULL) {
        note_refused(tried, file);
        return false;
    }
    if (!find(handle, "nixl_capi_is_stub", &lib->api.is_stub)) {
        missing = "nixl_capi_is_stub";
    } else if (lib->api.is_stub()) {
        kvti_nixl_note(tried, file, "a stub without NIXL behind it");
        dlclose(handle);
        return false;
    } else {
        missing = find_all(handle, &lib->api);
    }
    if (missing != NULL) {
        kvti_format(why, sizeof(why), "it has no %s", missing);
        kvti_nixl_note(tried, file, why);
        dlclose(handle);
        return false;
    }
    find_path(handle, file, lib);
    find_version(lib);
    return true;
}

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

/* Cuts the middle out of what is too long: what is wrong with the first places
 * and with the last ones is what tells most. */
static void shorten(char *text, size_t most)
{
    static const char gap[] = " ... ";
    size_t length = strlen(text);
    size_t head = (most - strlen(gap)) / 2;
    size_t tail = most - strlen(gap) - head;

    if (length > most) {
        for (size_t i = 0; i < strlen(gap); i++) {
            text[head + i] = gap[i];
        }
        memmove(text + head + strlen(gap), text + length - tail, tail + 1);
    }
}

static int fail_load(const char *path, struct kvti_nixl_tried *tried,
                     struct kvt_error *err)
{
    static const char *const hints[] = {
        "install nixl-cu12 or set KVT_NIXL_LIBRARY",
        "correct or unset KVT_NIXL_LIBRARY",
        "correct the option nixl_library, or leave it out",
    };
    const char *hint = hints[path != NULL && path[0] != '\0' ? 2
                             : kvti_nixl_is_named()          ? 1
                                                             : 0];

    shorten(tried->text, KVT_TEXT_MAX -
                             sizeof "NIXL cannot be loaded; ; tried " -
                             strlen(hint));
    return kvti_fail(err, KVT_EUNSUPPORTED,
                     "NIXL cannot be loaded; %s; tried %s", hint, tried->text);
}

static int load(const char *path, struct kvt_error *err)
{
    struct kvti_nixl_tried tried = {.text = ""};
    struct kvti_nixl_lib *lib = calloc(1, sizeof(*lib));

    if (lib == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for NIXL's table");
    }
    if (!kvti_nixl_find(path, lib, &tried)) {
        free(lib);
        return fail_load(path, &tried, err);
    }
    loaded = lib;
    return KVT_OK;
}

int kvti_nixl_load(const char *path, bool want_efa,
                   const struct kvti_nixl_lib **ret, struct kvt_error *err)
{
    int code;

    pthread_mutex_lock(&load_mu);
    /* Each time: UCX comes with the first backend, which may be later. */
    kvti_nixl_prepare_env(want_efa);
    code = loaded == NULL ? load(path, err) : check_same(path, err);
    if (code == KVT_OK) {
        *ret = loaded;
    }
    pthread_mutex_unlock(&load_mu);
    return code;
}

/* NOLINTEND(concurrency-mt-unsafe) */
