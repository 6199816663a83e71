/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder that looks like an installation of Python with NIXL's wheels in it,
 * and children that load NIXL: a library stays for the life of the process.
 * Whatever goes wrong in here fails the case.
 */
#ifndef KVT_TEST_NIXL_WHEEL_H
#define KVT_TEST_NIXL_WHEEL_H

#include "engines/nixl.h"

/* Of fake_nixl_capi.c: as it is, without one function, and with a library
 * behind it that is nowhere. */
struct stand_ins {
    const char *whole;
    const char *shortened;
    const char *orphan;
};

extern struct stand_ins stand_ins;

/* Of the case; its path holds no link. */
extern char root[64];

/* What a child is to do. */
struct ask {
    const char *path;    /* of the library, or NULL */
    const char *again;   /* of a second load, or NULL */
    const char *preload; /* a library that is there before, or NULL */
    bool want_efa;
};

/* What it found. */
struct found {
    int code;
    struct kvt_error err;
    char path[PATH_MAX];
    char version[64];
    char modules[64]; /* UCX_MODULES afterwards */
    char debug[64];   /* UCX_DEBUG_SIGNO */
    int second;       /* code of a second load of `again` */
    bool global;      /* others see its symbols */
};

/* main() of both tests: finds the stand-ins, and serves copies of the program
 * that ask_child() runs. Nonzero: there is nothing to test. */
bool is_child(int argc, char **argv);
int run_child(void);
int find_stand_ins(void);

/* For each case: an empty root, and an environment that leads nowhere. */
int begin(void **state);
int end(void **state);

/* In a copy of this process; or, with a program, in that one under this name:
 * a copy of this program then, which asks for nothing in particular. */
struct found ask_child(const struct ask *ask, const char *program,
                       const char *name);
struct found load_in_child(const char *path, const char *again);

void assert_says(const struct found *found, const char *words);
void assert_found(const struct found *found, const char *end_of_path);

/* All below root. A wheel of this kind ("cu12") and version in a folder; the
 * file bin/python3 of an installation; this program; a link. */
void make_wheel(const char *where, const char *kind, const char *version,
                const char *library);
void make_python(const char *where);
void copy_self(const char *where);
void make_link(const char *target, const char *where);
void set_under_root(const char *name, const char *where);

/* Of the environment, or "(not set)". */
const char *variable(const char *name);

#endif /* KVT_TEST_NIXL_WHEEL_H */
