/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One word says what is to fail, so that a thread that comes late reads either
 * the whole plan or none: 0 is disarmed.
 */
#include "nth.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "nth_call.h"

#define ARMED (1u << 31)
#define LASTING (1u << 30)
#define PLACES (1u << 29)
#define VARIANT_SHIFT 8

extern char __executable_start;

static _Atomic unsigned armed;
static _Atomic long calls;
static _Atomic long nth;
static _Atomic(const char *) failed_name;
static _Atomic int failed_error;
static _Atomic size_t failed_caller;
static _Atomic bool caused;

static size_t offset_of(const void *caller)
{
    return (size_t)((uintptr_t)caller - (uintptr_t)&__executable_start);
}

/* The first one. */
static void keep(const char *name, int error, size_t caller)
{
    const char *none = NULL;

    if (atomic_compare_exchange_strong(&failed_name, &none, name)) {
        atomic_store(&failed_error, error);
        atomic_store(&failed_caller, caller);
    }
}

static int at_place(const struct nth_place *here, const int *errors,
                    bool lasting)
{
    unsigned variant = 0;

    if (lasting && atomic_load(&failed_name) != NULL) {
        return errors[0];
    }
    switch (nth_at_place(here, &variant)) {
    case NTH_HIT:
        keep(here->name, errors[variant], here->caller);
        return errors[variant];
    case NTH_CAUSE:
        atomic_store(&caused, true);
        return errors[variant];
    default:
        return 0;
    }
}

int nth_next(unsigned kind, const char *name, const int *errors, size_t count,
             const void *caller)
{
    unsigned plan = atomic_load(&armed);
    size_t variant = (plan >> VARIANT_SHIFT) & 0xff;
    long i;

    if ((plan & kind) == 0) {
        return 0;
    }
    if ((plan & PLACES) != 0) {
        const struct nth_place here = {kind, (unsigned)count, name,
                                       offset_of(caller)};

        return at_place(&here, errors, (plan & LASTING) != 0);
    }
    if (variant >= count) {
        return 0;
    }
    i = atomic_fetch_add(&calls, 1);
    if (i != atomic_load(&nth) &&
        ((plan & LASTING) == 0 || i < atomic_load(&nth))) {
        return 0;
    }
    keep(name, errors[variant], offset_of(caller));
    return errors[variant];
}

void nth_arm(const struct nth_plan *plan, long n)
{
    atomic_store(&calls, 0);
    atomic_store(&nth, n);
    atomic_store(&failed_name, NULL);
    atomic_store(&caused, false);
    nth_choose_place(plan, n);
    atomic_store(&armed, ARMED | plan->kinds | plan->variant << VARIANT_SHIFT |
                             (plan->lasting ? LASTING : 0) |
                             (plan->place != NULL || n < 0 ? PLACES : 0));
}

void nth_relent(void)
{
    atomic_store(&armed, 0);
}

struct nth_seen nth_disarm(void)
{
    struct nth_seen seen = {0};

    nth_relent();
    seen.name = atomic_load(&failed_name);
    seen.failed = seen.name != NULL;
    seen.caused = atomic_load(&caused);
    seen.calls = atomic_load(&calls);
    seen.error = atomic_load(&failed_error);
    seen.caller = atomic_load(&failed_caller);
    return seen;
}

/* ------------------------------------------------------------ what is held */

#define HELD_MAX 65536u

static struct block {
    const void *at;
    size_t caller;
} blocks[HELD_MAX];

static pthread_mutex_t blocks_mu = PTHREAD_MUTEX_INITIALIZER;
static struct nth_held held;

static size_t place_of(const void *at)
{
    return (size_t)(((uintptr_t)at >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 48);
}

/* The block's own place, or the free one where it would be. */
static size_t find_block(const void *at)
{
    size_t i = place_of(at);

    while (blocks[i].at != NULL && blocks[i].at != at) {
        i = (i + 1) % HELD_MAX;
    }
    return i;
}

static void *hold(void *at, const void *caller)
{
    size_t i;

    if (at == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&blocks_mu);
    i = find_block(at);
    blocks[i] = (struct block){.at = at, .caller = offset_of(caller)};
    held.blocks++;
    pthread_mutex_unlock(&blocks_mu);
    return at;
}

/* What others allocated is not known. */
static void let_go(const void *at)
{
    size_t i;

    pthread_mutex_lock(&blocks_mu);
    i = find_block(at);
    if (at != NULL && blocks[i].at == at) {
        held.blocks--;
        blocks[i].at = NULL;
        /* Those behind it may have been put there for want of its place. */
        for (i = (i + 1) % HELD_MAX; blocks[i].at != NULL;
             i = (i + 1) % HELD_MAX) {
            struct block moved = blocks[i];

            blocks[i].at = NULL;
            blocks[find_block(moved.at)] = moved;
        }
    }
    pthread_mutex_unlock(&blocks_mu);
}

void nth_mapped(long change)
{
    pthread_mutex_lock(&blocks_mu);
    held.mappings += change;
    pthread_mutex_unlock(&blocks_mu);
}

void nth_handled(long change)
{
    pthread_mutex_lock(&blocks_mu);
    held.handles += change;
    pthread_mutex_unlock(&blocks_mu);
}

struct nth_held nth_held(void)
{
    struct nth_held now;

    pthread_mutex_lock(&blocks_mu);
    now = held;
    pthread_mutex_unlock(&blocks_mu);
    return now;
}

void nth_show_held(void)
{
    pthread_mutex_lock(&blocks_mu);
    for (size_t i = 0; i < HELD_MAX; i++) {
        if (blocks[i].at != NULL) {
            (void)fprintf(stderr, "held, allocated at %#zx\n",
                          blocks[i].caller);
        }
    }
    pthread_mutex_unlock(&blocks_mu);
}

/* ------------------------------------------------------------------- memory */

static bool no_memory(const char *name, const void *caller)
{
    static const int errors[] = {ENOMEM};

    if (nth_next(NTH_MEMORY, name, errors, 1, caller) == 0) {
        return false;
    }
    errno = ENOMEM;
    return true;
}

PROTOTYPE(void *, malloc, (size_t size))
{
    return no_memory("malloc", CALLER) ? NULL
                                       : hold(__real_malloc(size), CALLER);
}

PROTOTYPE(void *, calloc, (size_t count, size_t size))
{
    return no_memory("calloc", CALLER)
               ? NULL
               : hold(__real_calloc(count, size), CALLER);
}

PROTOTYPE(void *, realloc, (void *old, size_t size))
{
    void *grown;

    if (no_memory("realloc", CALLER)) {
        return NULL;
    }
    let_go(old);
    grown = __real_realloc(old, size);
    return hold(grown, CALLER);
}

PROTOTYPE(void *, aligned_alloc, (size_t alignment, size_t size))
{
    return no_memory("aligned_alloc", CALLER)
               ? NULL
               : hold(__real_aligned_alloc(alignment, size), CALLER);
}

PROTOTYPE(char *, strdup, (const char *text))
{
    return no_memory("strdup", CALLER) ? NULL
                                       : hold(__real_strdup(text), CALLER);
}

PROTOTYPE(void, free, (void *at))
{
    let_go(at);
    __real_free(at);
}
