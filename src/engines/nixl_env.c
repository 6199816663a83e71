/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What UCX finds in the environment when NIXL loads it. What the user has set
 * is left alone; the rest is what every program that embeds kvt wants:
 *  - UCX_MODULES=^efa: the wheel's EFA module pulls in the system's libibverbs
 *    and with it a second libnl-route; exit() then crashes in _dl_fini.
 *  - UCX_DEBUG_SIGNO=0: UCX takes SIGHUP over, to stop in a debugger.
 *  - UCX_ERROR_SIGNALS=: builds of UCX with debugging support take SIGSEGV and
 *    its like over as well.
 *
 * kvt is a guest in its process, and another thread may be in getenv() at any
 * time (getaddrinfo() and localtime() are). setenv() frees the array that such
 * a reader walks. So nothing is changed in place: a new array is published in
 * one store, the old one stays as it was, and ours are never freed. A thread
 * that changes the environment in the microseconds in between loses its change
 * or makes us lose ours; no program can have both, since libc keeps the lock
 * to itself.
 *
 * Children inherit the variables. One that wants EFA takes UCX_MODULES back if
 * it holds exactly what we would have set.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nixl_load.h"

/* An array that we published, before `at` the one before it: a leak checker
 * finds all. */
struct published {
    struct published *before;
    char *at[];
};

static struct published *last; /* under the lock of kvti_nixl_load() */

static char modules[] = "UCX_MODULES=^efa";
static char debug_signo[] = "UCX_DEBUG_SIGNO=0";
static char error_signals[] = "UCX_ERROR_SIGNALS=";

static char *const wanted[] = {modules, debug_signo, error_signals};

#define WANTED (sizeof(wanted) / sizeof(wanted[0]))

/* The name with its "=". */
static size_t name_length(const char *text)
{
    return strcspn(text, "=") + 1;
}

static bool has(char *const *list, const char *text)
{
    for (size_t i = 0; list != NULL && list[i] != NULL; i++) {
        if (strncmp(list[i], text, name_length(text)) == 0) {
            return true;
        }
    }
    return false;
}

static size_t count(char *const *list)
{
    size_t n = 0;

    while (list != NULL && list[n] != NULL) {
        n++;
    }
    return n;
}

/* The list as it should be, or NULL if it is (or memory is short: UCX then
 * behaves as it does for everybody). */
static struct published *renew(char *const *list, bool want_efa)
{
    size_t length = count(list);
    struct published *fresh = malloc(sizeof(*fresh) +
                                     (length + WANTED + 1) * sizeof(char *));
    bool changed = false;
    size_t n = 0;

    if (fresh == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < length; i++) {
        if (want_efa && strcmp(list[i], modules) == 0) {
            changed = true;
        } else {
            fresh->at[n++] = list[i];
        }
    }
    for (size_t i = 0; i < WANTED; i++) {
        if (!has(list, wanted[i]) && !(want_efa && wanted[i] == modules)) {
            fresh->at[n++] = wanted[i];
            changed = true;
        }
    }
    fresh->at[n] = NULL;
    if (!changed) {
        free(fresh);
        return NULL;
    }
    return fresh;
}

static bool mentions(const char *name, const char *word)
{
    /* A reader like any other. NOLINTNEXTLINE(concurrency-mt-unsafe) */
    const char *value = getenv(name);

    return value != NULL && strstr(value, word) != NULL;
}

void kvti_nixl_prepare_env(bool want_efa)
{
    want_efa = want_efa || mentions("UCX_TLS", "srd") ||
               mentions("UCX_TLS", "efa") || mentions("UCX_NET_DEVICES", "efa");
    for (;;) {
        char **seen = __atomic_load_n(&environ, __ATOMIC_ACQUIRE);
        struct published *fresh = renew(seen, want_efa);

        if (fresh == NULL) {
            return;
        }
        if (__atomic_compare_exchange_n(&environ, &seen, fresh->at, false,
                                        __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
            fresh->before = last;
            last = fresh;
            return;
        }
        free(fresh);
    }
}
