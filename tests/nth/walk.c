/* SPDX-License-Identifier: Apache-2.0 */
#include "walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sanitizer.h"

/* For the message, should the case end here. */
struct place {
    const struct ground *ground;
    const char *operation;
    const struct nth_plan *plan;
    long n;
    struct nth_seen seen;
};

static struct place place;

#define must(condition, ...)                                                   \
    do {                                                                       \
        if (!(condition)) {                                                    \
            show_place();                                                      \
            fail_msg(__VA_ARGS__);                                             \
        }                                                                      \
    } while (0)

static void show_place(void)
{
    (void)fprintf(stderr,
                  "%s over %s: kinds %#x, variant %u%s, call %ld%s: %s (%d) at "
                  "%#zx\n",
                  place.operation, place.ground->name, place.plan->kinds,
                  place.plan->variant, place.plan->lasting ? ", lasting" : "",
                  place.n, place.plan->place != NULL ? " of the place" : "",
                  place.seen.failed ? place.seen.name : "none",
                  place.seen.error, place.seen.caller);
}

/* ------------------------------------------------------------------- worlds */

struct kvt_options world_options(const struct world *world, const char *name)
{
    struct kvt_options options = world->ground->options;

    options.size = sizeof options;
    options.engine = world->ground->engine;
    options.agent_name = name;
    options.workers = 2;
    options.inflight_max = 64;
    return options;
}

static struct node_plan plan_of(const struct world *world, const char *name)
{
    return (struct node_plan){.engine = world->ground->engine,
                              .name = name,
                              .shape = {.count = 16, .block_bytes = 4096},
                              .seed = 7,
                              .options = world_options(world, name)};
}

static void world_open(struct world *world, const struct ground *ground,
                       enum world_kind kind)
{
    struct node_plan a;
    struct node_plan b;

    *world = (struct world){.ground = ground};
    if (ground->begin != NULL) {
        ground->begin();
    }
    a = plan_of(world, "a");
    b = plan_of(world, "b");
    pool_open(&world->extra, &(struct pool_shape){.count = 4}, 11);
    if (kind == WORLD_PAIR) {
        pair_open(&world->pair, &a, &b);
    } else if (kind == WORLD_NODES) {
        node_open(&world->pair.a, &a);
        node_open(&world->pair.b, &b);
    }
    if (kind != WORLD_EMPTY) {
        world->blob = node_metadata(&world->pair.b, &world->blob_length);
    }
}

/* For people who look at the output. */
#define LONG_NS UINT64_C(5000000000)

/* True when it is all gone. */
static bool close_one(kvt_transport *t, bool may_be_busy)
{
    uint64_t begun = test_now_ns();
    struct kvt_error err = {0};
    struct kvt_stats stats;
    int code;

    if (t == NULL) {
        return true;
    }
    code = kvt_close(t, 0, &err);
    must(kvt_stats(t, &stats, sizeof stats) == KVT_OK, "no counters");
    must(code == KVT_OK ||
             (code == KVT_EBUSY && (stats.quarantined > 0 || may_be_busy)),
         "close: %s: %s", kvt_errname(code), err.text);
    if (test_now_ns() - begun > LONG_NS) {
        show_place();
        (void)fprintf(stderr, "  the close took long: %s\n", err.text);
    }
    kvt_free(t);
    return code == KVT_OK;
}

static bool world_close(struct world *world, bool closed)
{
    bool gone = close_one(world->pair.a.t, closed);

    gone = close_one(world->pair.b.t, false) && gone;
    gone = close_one(world->opened, false) && gone;
    if (world->ground->end != NULL) {
        world->ground->end();
    }
    if (world->shm.addr != NULL) {
        kvt_shm_destroy(&world->shm);
    }
    free(world->blob);
    pool_close(&world->pair.a.pool);
    pool_close(&world->pair.b.pool);
    pool_close(&world->extra);
    return gone;
}

int world_wait(struct world *world, kvt_transport *t, struct kvt_error *err)
{
    uint64_t until = test_now_ns() + test_wait_ns();
    int got;

    for (int looks = 0; (got = kvt_poll(t, KVT_ANY, &world->result, 1)) == 0;
         looks++) {
        must(test_now_ns() < until, "the transfer does not end");
        if (looks == LOOKS) {
            nth_relent();
        }
        test_yield();
    }
    must(got == 1 && world->result.id == world->id, "another's result");
    world->transfer = true;
    err->code = world->result.code;
    (void)snprintf(err->text, sizeof err->text, "%s", world->result.text);
    return world->result.code;
}

/* -------------------------------------------------------------- one failure */

/* What must be the same after a call that failed. */
struct picture {
    struct kvt_stats a;
    struct kvt_stats b;
};

static struct kvt_stats counters(kvt_transport *t)
{
    return t == NULL ? (struct kvt_stats){0} : stats_of(t);
}

static struct picture picture_of(const struct world *world)
{
    return (struct picture){counters(world->pair.a.t),
                            counters(world->pair.b.t)};
}

static void check_same(const struct kvt_stats *before,
                       const struct kvt_stats *after, bool may_disconnect)
{
#define SAME(field)                                                            \
    must(before->field == after->field, "%s: %llu before, %llu after", #field, \
         (unsigned long long)before->field, (unsigned long long)after->field)
    SAME(regions);
    SAME(layouts);
    SAME(runs);
    SAME(peers);
    SAME(inflight);
    SAME(undrained);
#undef SAME
    must(before->peers_loaded == after->peers_loaded || may_disconnect,
         "a peer was lost");
}

/* `err` is written by calls that fail, and says something. */
static void check_error(const struct world *world,
                        const struct operation *operation, int code,
                        const struct kvt_error *err)
{
    must(code < 0, "a failure is %d", code);
    must(code != KVT_ETIMEDOUT, "a failure became a wait: %s", err->text);
    must(err->code == code, "%s, but the error says %s", kvt_errname(code),
         kvt_errname(err->code));
    must(strlen(err->text) > 10, "%s says only \"%s\"", kvt_errname(code),
         err->text);
    if (world->transfer) {
        must(world->result.state > KVT_DONE || code == KVT_ENOTIFY, "state %u",
             world->result.state);
        must((world->result.flags & KVT_FINISHED) != 0, "unfinished");
        must((world->result.flags & KVT_QUIESCENT) == 0 ||
                 operation->needs_no_memory ||
                 world->ground->leaves_doubt == NULL ||
                 !world->ground->leaves_doubt(&place.seen),
             "quiescent, which nobody can know");
    }
}

void world_bring_back(struct world *world)
{
    struct kvt_error err = {0};
    int code;

    if (kvt_peer_loaded(world->pair.a.t, world->pair.peer) == 1) {
        return;
    }
    code = kvt_peer_reload(world->pair.a.t, world->pair.peer, NULL, 0, 0, &err);
    must(code == KVT_OK, "the peer does not come back: %s: %s",
         kvt_errname(code), err.text);
}

/* The other side of a link may be late to notice that it closed it: then the
 * link breaks once more. */
#define ROUNDS 3

static int ask_again(struct world *world, const struct operation *operation,
                     struct kvt_error *err)
{
    bool may_break = operation->kind == WORLD_PAIR && operation->may_disconnect;
    int code = KVT_EDISCONNECTED;

    for (int i = 0; code != KVT_OK && i < (may_break ? ROUNDS : 1); i++) {
        if (may_break) {
            world_bring_back(world);
        }
        world->transfer = false;
        code = operation->act(world, err);
        must(code == KVT_OK || code == KVT_EDISCONNECTED ||
                 code == KVT_ENOTIFY || !may_break,
             "asked again: %s: %s", kvt_errname(code), err->text);
    }
    return code;
}

static void check_failure(struct world *world,
                          const struct operation *operation, int code,
                          const struct kvt_error *err,
                          const struct picture *before)
{
    struct picture after = picture_of(world);
    struct kvt_error again = {0};

    check_error(world, operation, code, err);
    if (operation->ends) {
        must(code == KVT_EBUSY, "%s: %s", kvt_errname(code), err->text);
        return;
    }
    check_same(&before->a, &after.a, operation->may_disconnect);
    check_same(&before->b, &after.b, false);
    if (operation->refused != NULL) {
        operation->refused(world);
    }
    code = ask_again(world, operation, &again);
    must(code == KVT_OK, "asked again: %s: %s", kvt_errname(code), again.text);
    if (operation->check != NULL) {
        operation->check(world);
    }
}

/* ------------------------------------------------------------------- leaks */

struct rest {
    struct usage usage;
    struct nth_held held;
};

static struct rest rest_now(void)
{
    return (struct rest){usage_now(), nth_held()};
}

/* Blocks that stay for the life of the process once NIXL is loaded: its table
 * and the environment that UCX is to find. */
#define LOADED 2

/* A thread that was joined may still be seen for a moment. */
static void check_rest(const struct rest *before, long more)
{
    uint64_t until = test_now_ns() + test_wait_ns();
    struct rest now = rest_now();

    while (now.usage.threads != before->usage.threads &&
           test_now_ns() < until) {
        test_yield();
        now = rest_now();
    }
    must(now.usage.threads == before->usage.threads, "%ld threads, not %ld",
         now.usage.threads, before->usage.threads);
    must(now.usage.fds == before->usage.fds, "%ld descriptors, not %ld",
         now.usage.fds, before->usage.fds);
    must(now.held.mappings == before->held.mappings, "%ld mappings, not %ld",
         now.held.mappings, before->held.mappings);
    must(now.held.handles == before->held.handles,
         "%ld handles of NIXL's, not %ld", now.held.handles,
         before->held.handles);
    if (now.held.blocks > before->held.blocks + more) {
        nth_show_held();
    }
    must(now.held.blocks >= before->held.blocks &&
             now.held.blocks <= before->held.blocks + more,
         "%ld blocks, not %ld", now.held.blocks, before->held.blocks);
}

/* -------------------------------------------------------------------- walks */

/* What has failed, and in which of its ways. */
static struct {
    const char *name;
    unsigned ways; /* a bit for each */
} failed_names[256];

/* Of those that failed; 0: not yet. */
static unsigned failed_ways(const char *name)
{
    for (size_t i = 0; failed_names[i].name != NULL; i++) {
        if (strcmp(failed_names[i].name, name) == 0) {
            return failed_names[i].ways;
        }
    }
    return 0;
}

static void keep_name(const struct nth_seen *seen, unsigned way)
{
    size_t i = 0;

    while (failed_names[i].name != NULL &&
           strcmp(failed_names[i].name, seen->name) != 0) {
        i++;
    }
    failed_names[i].name = seen->name;
    failed_names[i].ways |= 1u << way;
}

bool walk_has_failed(const char *name)
{
    return failed_ways(name) != 0;
}

/* False when the operation did not meet the failure. */
static bool step(const struct operation *operation, const struct ground *ground,
                 const struct nth_plan *plan, long n, struct rest *before)
{
    struct kvt_error err = {0};
    struct picture picture;
    struct world world;
    int code;

    place = (struct place){ground, operation->name, plan, n, {0}};
    world_open(&world, ground, operation->kind);
    if (operation->prepare != NULL) {
        operation->prepare(&world);
    }
    picture = picture_of(&world);
    nth_arm(plan, n);
    if (plan->place != NULL || n < 0) {
        test_yield(); /* who has nothing to do goes to sleep */
    }
    code = operation->act(&world, &err);
    place.seen = nth_disarm();
    if (place.seen.failed) {
        keep_name(&place.seen, plan->variant);
    }
    if (getenv("NTH_TRACE") != NULL) {
        show_place();
        (void)fprintf(stderr, "  -> %s %s\n", kvt_errname(code), err.text);
    }
    must(code == KVT_OK || place.seen.failed || place.seen.caused,
         "%s, though nothing failed: %s", kvt_errname(code), err.text);
    if (code != KVT_OK) {
        check_failure(&world, operation, code, &err, &picture);
    } else if (operation->check != NULL) {
        operation->check(&world);
    }
    if (!world_close(&world, operation->ends)) {
        /* The memory of what cannot be proven is kept on purpose. */
        before->held.blocks = nth_held().blocks;
    }
    check_rest(before, (plan->kinds & NTH_LOADER) != 0 ? LOADED : 0);
    return place.seen.failed;
}

void walk_once(const struct ground *ground)
{
    struct world world;

    nth_relent(); /* where a case ended in the middle */
    world_open(&world, ground, WORLD_PAIR);
    assert_true(world_close(&world, false));
}

long walk(const struct ground *ground, const struct operation *operation,
          const struct nth_plan *plan)
{
    struct rest before = rest_now();
    long n = 0;

    while (step(operation, ground, plan, n, &before)) {
        n++;
    }
    return n;
}

static const struct operation *find_operation(const char *name)
{
    for (size_t i = 0; i < operation_count; i++) {
        if (strcmp(operations[i].name, name) == 0) {
            return &operations[i];
        }
    }
    fail_msg("no operation %s", name);
    return NULL;
}

void walk_all(const struct ground *ground, const char *name,
              const struct nth_plan *plans, size_t count)
{
    const struct operation *operation = find_operation(name);

    for (size_t k = 0; k < count; k++) {
        long points = walk(ground, operation, &plans[k]);

        print_message("%s over %s, kinds %#x variant %u%s: %ld points\n", name,
                      ground->name, plans[k].kinds, plans[k].variant,
                      plans[k].lasting ? " lasting" : "", points);
    }
}

/* --------------------------------------------------------------- by places */

/* Of a place that is met at times only, such as where a thread that found
 * nothing to do goes to sleep. */
#define TRIES 3
/* A second call comes from where something was done already. */
#define CALLS 2

/* How many calls from there failed, this way. */
static size_t fail_at(const struct operation *operation,
                      const struct ground *ground, const struct nth_plan *plan,
                      struct rest *before)
{
    bool met = false;
    long n = 1;

    for (int i = 0; i < TRIES && !met; i++) {
        met = step(operation, ground, plan, 0, before);
    }
    while (met && n < CALLS && step(operation, ground, plan, n, before)) {
        n++;
    }
    return met ? (size_t)n : 0;
}

static uint64_t one_of = 1;
static uint64_t chance;

void walk_sample(uint64_t one_of_, uint64_t seed)
{
    one_of = one_of_;
    chance = seed;
}

/* The last way of a function of NIXL's is the opposite of the others, where it
 * has one (nth_nixl.c). */
static bool is_due(const struct nth_place *at, unsigned way)
{
    return at->kind == NTH_NIXL && (way == 0 || way + 1 == at->ways) &&
           (failed_ways(at->name) >> way & 1) == 0;
}

static bool is_chosen(const struct nth_place *at, unsigned way)
{
    return one_of == 1 || is_due(at, way) || test_random(&chance) % one_of == 0;
}

/* At a place, alone or after the failure that led there. */
static void fail_each_way(const struct operation *operation,
                          const struct ground *ground, struct nth_plan *plan,
                          const struct nth_failure *cause, struct rest *before,
                          struct tally *tally)
{
    size_t failed = 0;
    size_t chosen = 0;

    for (plan->variant = 0; plan->variant < plan->place->ways;
         plan->variant++) {
        size_t alone;

        if (!is_chosen(plan->place, plan->variant)) {
            continue;
        }
        chosen++;
        plan->cause = NULL;
        alone = fail_at(operation, ground, plan, before);
        failed += alone;
        if (alone == 0 && cause != NULL) {
            size_t pairs;

            plan->cause = cause;
            pairs = fail_at(operation, ground, plan, before);
            failed += pairs;
            tally->pairs += pairs;
        }
    }
    tally->failures += failed;
    tally->missed += chosen > 0 && failed == 0;
}

/* From there on there is no memory at all. */
static size_t fail_for_good(const struct operation *operation,
                            const struct ground *ground,
                            const struct nth_place *at, struct rest *before)
{
    const struct nth_plan plan = {
        .kinds = NTH_MEMORY, .place = at, .lasting = true};

    return at->kind == NTH_MEMORY && is_chosen(at, 0) &&
           step(operation, ground, &plan, 0, before);
}

void walk_places(const struct ground *ground, const char *name, unsigned kinds,
                 struct tally *tally)
{
    const struct operation *operation = find_operation(name);
    const struct nth_plan none = {.kinds = kinds};
    struct rest before = rest_now();
    struct tally ours = {0};

    nth_forget_places();
    (void)step(operation, ground, &none, -1, &before);
    for (; ours.places < nth_places(); ours.places++) {
        const struct nth_place at = nth_place(ours.places);
        struct nth_plan plan = {.kinds = kinds, .place = &at};
        struct nth_failure cause;
        bool caused = nth_cause(ours.places, &cause);

        fail_each_way(operation, ground, &plan, caused ? &cause : NULL, &before,
                      &ours);
        ours.failures += fail_for_good(operation, ground, &at, &before);
    }
    print_message("%s over %s: %zu places, %zu failures (%zu in pairs), %zu "
                  "places missed\n",
                  name, ground->name, ours.places, ours.failures, ours.pairs,
                  ours.missed);
    tally->places += ours.places;
    tally->failures += ours.failures;
    tally->pairs += ours.pairs;
    tally->missed += ours.missed;
}

bool walk_loader(const struct ground *ground, long n)
{
    const struct nth_plan plan = {.kinds = NTH_LOADER};
    struct rest before = rest_now();

    return step(find_operation("open"), ground, &plan, n, &before);
}
