/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where libnixl_capi.so is looked for. A library that somebody named is the
 * only one tried: another one than the one asked for would hide the mistake.
 * Else, in this order:
 *
 *   beside a libnixl.so that this process has loaded, Python's nixl package for
 *   instance: two of them would bring two copies of UCX
 *   the loader's path
 *   the installation of Python that KVT_PYTHON names; nothing after it then
 *   the Python that this process runs in: the site-packages that it has loaded
 *   modules from, then what its program belongs to
 *   the virtual environment that VIRTUAL_ENV names
 *   the python3 of PATH
 *   the packages that "pip install --user" puts into the home directory
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "nixl_load.h"

#define LIBRARY "libnixl_capi.so"
#define LIBS ".nixl_cu1[23].mesonpy.libs/" LIBRARY

/* Readers of the environment, as any others (nixl_env.c). */
/* NOLINTBEGIN(concurrency-mt-unsafe) */

/* The files that a pattern finds, in the order of their names, until one is
 * taken. */
static bool try_pattern(const char *pattern, bool *seen,
                        struct kvti_nixl_lib *lib,
                        struct kvti_nixl_tried *tried)
{
    bool found = false;
    glob_t paths;

    if (glob(pattern, 0, NULL, &paths) != 0) {
        return false;
    }
    for (size_t i = 0; i < paths.gl_pathc && !found; i++) {
        *seen = true;
        found = kvti_nixl_try(paths.gl_pathv[i], lib, tried);
    }
    globfree(&paths);
    return found;
}

/* The wheels below one installation of Python. */
static bool try_prefix(const char *what, const char *prefix,
                       struct kvti_nixl_lib *lib, struct kvti_nixl_tried *tried)
{
    static const char *const folders[] = {
        "lib/python3*/site-packages", "lib64/python3*/site-packages",
        "lib/python3*/dist-packages", "local/lib/python3*/dist-packages"};
    char text[PATH_MAX + 128];
    bool seen = false;

    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        kvti_format(text, sizeof(text), "%s/%s/" LIBS, prefix, folders[i]);
        if (try_pattern(text, &seen, lib, tried)) {
            return true;
        }
    }
    if (!seen) {
        kvti_format(text, sizeof(text), "%s %s", what, prefix);
        kvti_nixl_note(tried, text, "no nixl wheel");
    }
    return false;
}

static void cut_names(char *path, int names)
{
    for (; names > 0 && strrchr(path, '/') != NULL; names--) {
        *strrchr(path, '/') = '\0';
    }
}

/* …/bin/python3 belongs to the installation …; a link may belong to a virtual
 * environment where it lies and to another one where it leads. */
static bool try_python(const char *what, const char *python,
                       struct kvti_nixl_lib *lib, struct kvti_nixl_tried *tried)
{
    char path[PATH_MAX];
    char real[PATH_MAX];

    if (access(python, F_OK) != 0) {
        char place[PATH_MAX + 64];

        kvti_format(place, sizeof(place), "%s %s", what, python);
        kvti_nixl_note(tried, place, "no such file");
        return false;
    }
    kvti_format(path, sizeof(path), "%s", python);
    cut_names(path, 2);
    if (try_prefix(what, path, lib, tried)) {
        return true;
    }
    if (realpath(python, real) == NULL) {
        return false;
    }
    cut_names(real, 2);
    return strcmp(real, path) != 0 && try_prefix(what, real, lib, tried);
}

/* pyenv's and others' wrappers tell nothing about where Python is. */
static bool is_script(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char head[2] = "";
    ssize_t got = fd >= 0 ? read(fd, head, sizeof(head)) : -1;

    if (fd >= 0) {
        (void)close(fd);
    }
    return got == 2 && memcmp(head, "#!", 2) == 0;
}

bool kvti_nixl_is_program(const char *path)
{
    struct stat info;

    return stat(path, &info) == 0 && S_ISREG(info.st_mode) &&
           access(path, X_OK) == 0;
}

/* The first program of this name in PATH. */
static bool find_program(const char *name, char *path, size_t size)
{
    const char *at = secure_getenv("PATH");

    while (at != NULL && *at != '\0') {
        size_t length = strcspn(at, ":");

        kvti_format(path, size, "%.*s/%s", (int)length, at, name);
        if (length > 0 && kvti_nixl_is_program(path) && !is_script(path)) {
            return true;
        }
        at += length + (at[length] == ':');
    }
    return false;
}

/* --------------------------------------------------------- what runs here */

#define SITES 8u

struct running {
    char nixl[PATH_MAX];         /* folder of a libnixl.so, or "" */
    char sites[SITES][PATH_MAX]; /* site-packages */
    size_t site_count;
};

static void add_site(struct running *running, const char *path, size_t length)
{
    for (size_t i = 0; i < running->site_count; i++) {
        if (strncmp(running->sites[i], path, length) == 0 &&
            running->sites[i][length] == '\0') {
            return;
        }
    }
    if (running->site_count < SITES && length < PATH_MAX) {
        kvti_format(running->sites[running->site_count], PATH_MAX, "%.*s",
                    (int)length, path);
        running->site_count++;
    }
}

/* The loader's lock is held: nothing is loaded here. */
static int look_at(struct dl_phdr_info *info, size_t size, void *arg)
{
    static const char *const folders[] = {"/site-packages/", "/dist-packages/"};
    struct running *running = arg;
    const char *name = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *end = strrchr(name, '/');

    (void)size;
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        const char *at = strstr(name, folders[i]);

        if (at != NULL) {
            add_site(running, name,
                     (size_t)(at - name) + strlen(folders[i]) - 1);
        }
    }
    if (end != NULL && strcmp(end, "/libnixl.so") == 0) {
        kvti_format(running->nixl, sizeof(running->nixl), "%.*s",
                    (int)(end - name), name);
    }
    return 0;
}

/* This program's own path as it was called, if it is a Python: the link by
 * which it was called is what makes a virtual environment. */
static bool find_self(char *path, size_t size)
{
    char exe[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    const char *name;

    if (length <= 0) {
        return false;
    }
    exe[length] = '\0';
    name = strrchr(exe, '/');
    if (name == NULL || strncmp(name + 1, "python", 6) != 0) {
        return false;
    }
    kvti_format(path, size, "%s", exe);
    /* Programs that rename themselves write over this name. */
    name = program_invocation_name;
    if (strchr(name, '/') == NULL && find_program(name, exe, sizeof(exe))) {
        name = exe;
    }
    if (strchr(name, '/') != NULL && kvti_nixl_is_program(name)) {
        kvti_format(path, size, "%s", name);
    }
    return true;
}

static bool try_running(const struct running *running,
                        struct kvti_nixl_lib *lib,
                        struct kvti_nixl_tried *tried)
{
    char path[PATH_MAX + 64];
    bool seen = false;

    for (size_t i = 0; i < running->site_count; i++) {
        kvti_format(path, sizeof(path), "%s/" LIBS, running->sites[i]);
        if (try_pattern(path, &seen, lib, tried)) {
            return true;
        }
    }
    return find_self(path, sizeof(path)) &&
           try_python("this Python", path, lib, tried);
}

/* ----------------------------------------------------------------- the order */

static const char *set_variable(const char *name)
{
    const char *value = secure_getenv(name);

    return value != NULL && value[0] != '\0' ? value : NULL;
}

static bool try_named_python(const char *value, struct kvti_nixl_lib *lib,
                             struct kvti_nixl_tried *tried)
{
    char inside[PATH_MAX];

    kvti_format(inside, sizeof(inside), "%s/.", value);
    return access(inside, F_OK) == 0
               ? try_prefix("KVT_PYTHON", value, lib, tried)
               : try_python("KVT_PYTHON", value, lib, tried);
}

static bool try_around(struct kvti_nixl_lib *lib, struct kvti_nixl_tried *tried)
{
    const char *value = set_variable("VIRTUAL_ENV");
    char path[PATH_MAX];

    if (value != NULL && try_prefix("VIRTUAL_ENV", value, lib, tried)) {
        return true;
    }
    if (!find_program("python3", path, sizeof(path))) {
        kvti_nixl_note(tried, "python3", "not in PATH");
    } else if (try_python("python3", path, lib, tried)) {
        return true;
    }
    value = set_variable("HOME");
    if (value == NULL) {
        return false;
    }
    kvti_format(path, sizeof(path), "%s/.local", value);
    return try_prefix("HOME", path, lib, tried);
}

static bool try_all(const struct running *running, struct kvti_nixl_lib *lib,
                    struct kvti_nixl_tried *tried)
{
    const char *value = set_variable("KVT_PYTHON");
    char path[PATH_MAX + 32];

    if (running->nixl[0] != '\0') {
        kvti_format(path, sizeof(path), "%s/" LIBRARY, running->nixl);
        if (kvti_nixl_try(path, lib, tried)) {
            return true;
        }
    }
    if (kvti_nixl_try(LIBRARY, lib, tried)) {
        return true;
    }
    if (value != NULL) {
        return try_named_python(value, lib, tried);
    }
    return try_running(running, lib, tried) || try_around(lib, tried);
}

bool kvti_nixl_is_named(void)
{
    return set_variable("KVT_NIXL_LIBRARY") != NULL;
}

bool kvti_nixl_find(const char *path, struct kvti_nixl_lib *lib,
                    struct kvti_nixl_tried *tried)
{
    const char *value = path != NULL && path[0] != '\0'
                            ? path
                            : set_variable("KVT_NIXL_LIBRARY");
    struct running *running;
    bool found;

    if (value != NULL) {
        return kvti_nixl_try(value, lib, tried);
    }
    running = calloc(1, sizeof(*running));
    if (running == NULL) {
        kvti_nixl_note(tried, "nothing", "out of memory");
        return false;
    }
    (void)dl_iterate_phdr(look_at, running);
    found = try_all(running, lib, tried);
    free(running);
    return found;
}

/* NOLINTEND(concurrency-mt-unsafe) */
