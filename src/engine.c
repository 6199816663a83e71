/* SPDX-License-Identifier: Apache-2.0 */
/* The engines of this build. Nothing else in the core knows one by name. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* In the order of kvt_engine_info(). */
static const struct kvti_engine_ops *const engines[] = {
    &kvti_engine_local,
    &kvti_engine_route,
    &kvti_engine_fault,
};

#define ENGINE_COUNT (sizeof(engines) / sizeof(engines[0]))

const struct kvti_engine_ops *kvti_engine_at(size_t index)
{
    return index < ENGINE_COUNT ? engines[index] : NULL;
}

static void list_names(char *text, size_t size)
{
    size_t used = 0;

    text[0] = '\0';
    for (size_t i = 0; i < ENGINE_COUNT && used < size; i++) {
        kvti_format(text + used, size - used, "%s%s", i > 0 ? ", " : "",
                    engines[i]->name);
        used += strlen(text + used);
    }
}

/* Callers may have read the variable themselves. */
static bool is_variable(const char *spec)
{
    /* NOLINTNEXTLINE(concurrency-mt-unsafe) */
    const char *value = getenv("KVT_ENGINE");

    return value != NULL && strcmp(value, spec) == 0;
}

const struct kvti_engine_ops *kvti_engine_find(const char *spec,
                                               const char **ret_rest,
                                               struct kvt_error *err)
{
    size_t length = strcspn(spec, ":");
    char known[128];

    for (size_t i = 0; i < ENGINE_COUNT; i++) {
        const char *name = engines[i]->name;

        if (strlen(name) == length && memcmp(name, spec, length) == 0) {
            *ret_rest = spec + length + (spec[length] == ':' ? 1 : 0);
            return engines[i];
        }
    }
    list_names(known, sizeof(known));
    (void)kvti_fail(err, KVT_EUNSUPPORTED,
                    "there is no engine \"%.*s\" in this build, which has %s; "
                    "%s\"auto\" takes the first of them that starts",
                    (int)(length < 64 ? length : 64), spec, known,
                    is_variable(spec) ? "correct or unset KVT_ENGINE: " : "");
    return NULL;
}

uint64_t kvti_now_ns(void)
{
    struct timespec now;
    int rc = clock_gettime(CLOCK_MONOTONIC, &now);

    kvti_assert(rc == 0);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void kvti_short_mutex_init(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(mutex, &attr);
    pthread_mutexattr_destroy(&attr);
}
