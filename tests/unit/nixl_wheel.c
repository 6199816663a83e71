/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "nixl_wheel.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

char root[64];
struct stand_ins stand_ins;

const char *variable(const char *name)
{
    const char *value = getenv(name);

    return value != NULL ? value : "(not set)";
}

static void load(const struct ask *ask, struct found *ret)
{
    const struct kvti_nixl_lib *lib = NULL;
    struct found found = {.code = 0};

    if (ask->preload != NULL && dlopen(ask->preload, RTLD_NOW) == NULL) {
        abort();
    }
    found.code = kvti_nixl_load(ask->path, ask->want_efa, &lib, &found.err);
    if (found.code == KVT_OK) {
        kvti_format(found.path, sizeof found.path, "%s", lib->path);
        kvti_format(found.version, sizeof found.version, "%s", lib->version);
    }
    kvti_format(found.modules, sizeof found.modules, "%s",
                variable("UCX_MODULES"));
    kvti_format(found.debug, sizeof found.debug, "%s",
                variable("UCX_DEBUG_SIGNO"));
    found.global = dlsym(RTLD_DEFAULT, "nixl_capi_is_stub") != NULL;
    if (ask->again != NULL) {
        found.second = kvti_nixl_load(ask->again, false, &lib, &found.err);
    }
    *ret = found;
}

static bool hand_over(int fd, const struct found *found)
{
    return write(fd, found, sizeof *found) == (ssize_t)sizeof *found;
}

struct found ask_child(const struct ask *ask, const char *program,
                       const char *name)
{
    struct found found = {.code = 1};
    int ends[2];
    pid_t pid;

    assert_int_equal(pipe(ends), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (program != NULL) {
            (void)dup2(ends[1], STDOUT_FILENO);
            execl(program, name, "--load", (char *)NULL);
            _exit(1);
        }
        load(ask, &found);
        _exit(hand_over(ends[1], &found) ? 0 : 1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &found, sizeof found), sizeof found);
    close(ends[0]);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return found;
}

struct found load_in_child(const char *path, const char *again)
{
    const struct ask ask = {.path = path, .again = again};

    return ask_child(&ask, NULL, NULL);
}

int run_child(void)
{
    const struct ask ask = {.path = NULL};
    struct found found;

    load(&ask, &found);
    return hand_over(STDOUT_FILENO, &found) ? 0 : 1;
}

void assert_says(const struct found *found, const char *words)
{
    if (strstr(found->err.text, words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", found->err.text, words);
    }
}

void assert_found(const struct found *found, const char *end_of_path)
{
    size_t length = strlen(found->path);

    if (found->code != KVT_OK) {
        fail_msg("%s", found->err.text);
    }
    if (length < strlen(end_of_path) ||
        strcmp(found->path + length - strlen(end_of_path), end_of_path) != 0) {
        fail_msg("%s was loaded, not …%s", found->path, end_of_path);
    }
}

/* ------------------------------------------------------------------- folders */

static void make_folders(const char *path)
{
    char part[PATH_MAX];

    for (const char *at = path + 1; at != NULL;) {
        const char *slash = strchr(at, '/');
        size_t length = slash != NULL ? (size_t)(slash - path) : strlen(path);

        kvti_format(part, sizeof part, "%.*s", (int)length, path);
        (void)mkdir(part, 0700);
        at = slash != NULL ? slash + 1 : NULL;
    }
}

/* A wheel of this kind and version in root/where. */
void make_wheel(const char *where, const char *kind, const char *version,
                const char *library)
{
    char folder[PATH_MAX];
    char file[PATH_MAX + 32];

    kvti_format(folder, sizeof folder, "%s/%s/nixl_%s-%s.dist-info", root,
                where, kind, version);
    make_folders(folder);
    kvti_format(folder, sizeof folder, "%s/%s/.nixl_%s.mesonpy.libs", root,
                where, kind);
    make_folders(folder);
    kvti_format(file, sizeof file, "%s/libnixl_capi.so", folder);
    assert_int_equal(symlink(library, file), 0);
}

void make_python(const char *where)
{
    char path[PATH_MAX];
    FILE *file;

    kvti_format(path, sizeof path, "%s/%s", root, where);
    make_folders(path);
    kvti_format(path, sizeof path, "%s/%s/python3", root, where);
    file = fopen(path, "w");
    assert_non_null(file);
    (void)fclose(file);
    assert_int_equal(chmod(path, 0700), 0);
}

/* This program as root/where. */
void copy_self(const char *where)
{
    char path[PATH_MAX];
    struct stat st;
    int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int to;

    kvti_format(path, sizeof path, "%s/%s", root, where);
    *strrchr(path, '/') = '\0';
    make_folders(path);
    kvti_format(path, sizeof path, "%s/%s", root, where);
    to = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
    assert_true(from >= 0 && to >= 0);
    assert_int_equal(fstat(from, &st), 0);
    for (off_t left = st.st_size; left > 0;) {
        ssize_t count = sendfile(to, from, NULL, (size_t)left);

        assert_true(count > 0);
        left -= count;
    }
    close(from);
    assert_int_equal(close(to), 0);
}

void make_link(const char *target, const char *where)
{
    char path[PATH_MAX];

    kvti_format(path, sizeof path, "%s/%s", root, where);
    *strrchr(path, '/') = '\0';
    make_folders(path);
    kvti_format(path, sizeof path, "%s/%s", root, where);
    assert_int_equal(symlink(target, path), 0);
}

static int remove_one(const char *path, const struct stat *st, int type,
                      struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

void set_under_root(const char *name, const char *where)
{
    char path[PATH_MAX];

    kvti_format(path, sizeof path, "%s/%s", root, where);
    assert_int_equal(setenv(name, path, 1), 0);
}

int begin(void **state)
{
    (void)state;
    kvti_format(root, sizeof root, "/tmp/kvt-nixl-XXXXXX");
    assert_non_null(mkdtemp(root));
    unsetenv("KVT_NIXL_LIBRARY");
    unsetenv("KVT_PYTHON");
    unsetenv("VIRTUAL_ENV");
    unsetenv("FAKE_NIXL_STUB");
    set_under_root("HOME", "home");
    unsetenv("UCX_MODULES");
    unsetenv("UCX_DEBUG_SIGNO");
    unsetenv("UCX_ERROR_SIGNALS");
    unsetenv("UCX_TLS");
    unsetenv("UCX_NET_DEVICES");
    unsetenv("LD_LIBRARY_PATH");
    set_under_root("PATH", "bin");
    return 0;
}

int end(void **state)
{
    (void)state;
    return nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

bool is_child(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "--load") == 0;
}

int find_stand_ins(void)
{
    stand_ins.whole = getenv("KVT_TEST_FAKE_NIXL");
    stand_ins.shortened = getenv("KVT_TEST_FAKE_NIXL_SHORT");
    stand_ins.orphan = getenv("KVT_TEST_FAKE_NIXL_ORPHAN");
    if (stand_ins.whole != NULL && stand_ins.shortened != NULL &&
        stand_ins.orphan != NULL) {
        return 0;
    }
    (void)fprintf(stderr, "KVT_TEST_FAKE_NIXL, KVT_TEST_FAKE_NIXL_SHORT and "
                          "KVT_TEST_FAKE_NIXL_ORPHAN name the stand-ins\n");
    return 1;
}
