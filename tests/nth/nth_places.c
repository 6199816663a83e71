/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The places in the code that call out, as they are met. A few hundred of them:
 * a list is enough. A late thread may be in here while the next plan is made.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nth_call.h"

#define PLACES_MAX 2048u

/* A call that is to fail; without a name: none. */
struct choice {
    struct nth_failure failure;
    long calls; /* so far */
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct nth_place places[PLACES_MAX];
static struct nth_failure causes[PLACES_MAX];
static size_t place_count;
static struct choice chosen;
static struct choice cause;

static bool is_same(const struct nth_place *one, const struct nth_place *other)
{
    return one->caller == other->caller && one->kind == other->kind &&
           strcmp(one->name, other->name) == 0;
}

static void note(const struct nth_place *place)
{
    for (size_t i = 0; i < place_count; i++) {
        if (is_same(&places[i], place)) {
            return;
        }
    }
    if (place_count == PLACES_MAX) {
        (void)fprintf(stderr, "more than %u places\n", PLACES_MAX);
        abort();
    }
    places[place_count] = *place;
    causes[place_count] = chosen.failure;
    place_count++;
}

static bool is_hit(struct choice *choice, const struct nth_place *here)
{
    return choice->failure.place.name != NULL &&
           is_same(&choice->failure.place, here) &&
           choice->calls++ == choice->failure.n;
}

enum nth_hit nth_at_place(const struct nth_place *here, unsigned *ret_variant)
{
    enum nth_hit hit = NTH_MISS;

    pthread_mutex_lock(&mu);
    note(here);
    if (is_hit(&chosen, here)) {
        hit = NTH_HIT;
        *ret_variant = chosen.failure.variant;
    } else if (is_hit(&cause, here)) {
        hit = NTH_CAUSE;
        *ret_variant = cause.failure.variant;
    }
    pthread_mutex_unlock(&mu);
    return hit;
}

void nth_choose_place(const struct nth_plan *plan, long n)
{
    pthread_mutex_lock(&mu);
    chosen = (struct choice){.failure = {.variant = plan->variant, .n = n}};
    if (plan->place != NULL) {
        chosen.failure.place = *plan->place;
    }
    cause = (struct choice){.calls = 0};
    if (plan->cause != NULL) {
        cause.failure = *plan->cause;
    }
    pthread_mutex_unlock(&mu);
}

size_t nth_places(void)
{
    size_t count;

    pthread_mutex_lock(&mu);
    count = place_count;
    pthread_mutex_unlock(&mu);
    return count;
}

struct nth_place nth_place(size_t i)
{
    struct nth_place place;

    pthread_mutex_lock(&mu);
    place = places[i];
    pthread_mutex_unlock(&mu);
    return place;
}

bool nth_cause(size_t i, struct nth_failure *ret)
{
    pthread_mutex_lock(&mu);
    *ret = causes[i];
    pthread_mutex_unlock(&mu);
    return ret->place.name != NULL;
}

void nth_forget_places(void)
{
    pthread_mutex_lock(&mu);
    place_count = 0;
    pthread_mutex_unlock(&mu);
}
