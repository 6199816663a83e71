/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the NIXL thread sleeps (nixl_wake.c), with an engine of which only that
 * part is set up, and epoll instances that stand for UCX's.
 *
 * Proved: a sleep without end is ended by what is put in under mu, before or
 * during the sleep, and by a hint, which is an epoll instance that was made
 * between the two looks; one that was there before is none; a hint that is
 * ready for nothing time after time, or that was closed, is left alone, and
 * work takes its past back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engines/nixl.h"

/* More than it takes until a hint is left alone. */
#define ROUNDS 200

struct event {
    int epoll;
    int source; /* what makes it ready */
};

static struct event new_event(void)
{
    struct event event = {.epoll = epoll_create1(EPOLL_CLOEXEC),
                          .source = eventfd(0, EFD_CLOEXEC)};
    struct epoll_event in = {.events = EPOLLIN};

    assert_true(event.epoll >= 0 && event.source >= 0);
    assert_int_equal(epoll_ctl(event.epoll, EPOLL_CTL_ADD, event.source, &in),
                     0);
    return event;
}

static void fire(const struct event *event)
{
    assert_int_equal(eventfd_write(event->source, 1), 0);
}

static void end_event(const struct event *event)
{
    close(event->epoll);
    close(event->source);
}

static int open_engine(void **state)
{
    struct kvti_nixl *engine = calloc(1, sizeof(*engine));
    struct kvt_error err;

    assert_non_null(engine);
    kvti_list_init(&engine->jobs);
    kvti_list_init(&engine->chunks);
    pthread_mutex_init(&engine->mu, NULL);
    assert_int_equal(kvti_nixl_wake_init(engine, &err), KVT_OK);
    *state = engine;
    return 0;
}

static int close_engine(void **state)
{
    struct kvti_nixl *engine = *state;

    kvti_nixl_wake_fini(engine);
    pthread_mutex_destroy(&engine->mu);
    free(engine);
    return 0;
}

/* Sleeps until something happens: without it the test hangs. */
static void sleep_until_woken(struct kvti_nixl *engine)
{
    assert_true(kvti_nixl_sleep(engine, kvti_now_ns(), UINT64_MAX));
}

static void *put_in(void *arg)
{
    struct kvti_nixl *engine = arg;
    bool asleep = false;

    while (!asleep) {
        pthread_mutex_lock(&engine->mu);
        asleep = engine->sleeping;
        if (asleep) {
            engine->settle = true;
            kvti_nixl_wake_locked(engine);
        }
        pthread_mutex_unlock(&engine->mu);
    }
    return NULL;
}

static void what_is_put_in_ends_the_sleep(void **state)
{
    struct kvti_nixl *engine = *state;
    pthread_t thread;

    for (int i = 0; i < 100; i++) {
        engine->settle = false;
        assert_int_equal(pthread_create(&thread, NULL, put_in, engine), 0);
        sleep_until_woken(engine);
        pthread_join(thread, NULL);
        assert_true(engine->settle);
        sleep_until_woken(engine); /* it is still there: no sleep at all */
    }
}

static void an_old_wake_does_not_end_the_next_sleep(void **state)
{
    struct kvti_nixl *engine = *state;
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, put_in, engine), 0);
    sleep_until_woken(engine);
    pthread_join(thread, NULL);
    engine->settle = false;
    assert_false(kvti_nixl_sleep(engine, kvti_now_ns(), 1));
}

static void a_hint_ends_the_sleep(void **state)
{
    struct kvti_nixl *engine = *state;
    struct event before = new_event();
    struct event hint;

    kvti_nixl_hints_before(&engine->hints);
    hint = new_event();
    kvti_nixl_hints_after(&engine->hints);
    assert_int_equal(engine->hints.count, 1);
    assert_int_equal(engine->hints.of[0].fd, hint.epoll);
    fire(&before);
    assert_false(kvti_nixl_sleep(engine, kvti_now_ns(), 1));
    fire(&hint);
    sleep_until_woken(engine);
    end_event(&before);
    end_event(&hint);
}

static int count_wakes(struct kvti_nixl *engine, uint64_t now_ns, bool work)
{
    int wakes = 0;

    for (int i = 0; i < ROUNDS; i++) {
        wakes += kvti_nixl_sleep(engine, now_ns, 1);
        if (work) {
            kvti_nixl_hints_worked(&engine->hints);
        }
    }
    return wakes;
}

static void a_hint_for_nothing_is_looked_at_less_and_less(void **state)
{
    struct kvti_nixl *engine = *state;
    uint64_t now_ns = kvti_now_ns();
    struct event hint;
    int wakes;

    kvti_nixl_hints_before(&engine->hints);
    hint = new_event();
    kvti_nixl_hints_after(&engine->hints);
    fire(&hint);
    assert_int_equal(count_wakes(engine, now_ns, true), ROUNDS);
    wakes = count_wakes(engine, now_ns, false);
    assert_true(wakes > 0 && wakes < ROUNDS);
    assert_int_equal(count_wakes(engine, now_ns, false), 0);
    /* Believed again when there was work. */
    now_ns += UINT64_C(3600000000000);
    assert_int_equal(count_wakes(engine, now_ns, false), 0);
    now_ns += UINT64_C(3600000000000);
    assert_int_equal(count_wakes(engine, now_ns, true), ROUNDS - 1);
    end_event(&hint);
}

static void a_hint_that_was_closed_is_left_alone(void **state)
{
    struct kvti_nixl *engine = *state;
    uint64_t now_ns = kvti_now_ns();
    struct event hint;

    kvti_nixl_hints_before(&engine->hints);
    hint = new_event();
    kvti_nixl_hints_after(&engine->hints);
    end_event(&hint);
    assert_int_equal(count_wakes(engine, now_ns, false), 0);
    assert_int_equal(engine->hints.of[0].mute_until_ns, UINT64_MAX);
}

int main(void)
{
#define TEST(name)                                                             \
    cmocka_unit_test_setup_teardown(name, open_engine, close_engine)
    static const struct CMUnitTest tests[] = {
        TEST(what_is_put_in_ends_the_sleep),
        TEST(an_old_wake_does_not_end_the_next_sleep),
        TEST(a_hint_ends_the_sleep),
        TEST(a_hint_for_nothing_is_looked_at_less_and_less),
        TEST(a_hint_that_was_closed_is_left_alone),
    };
#undef TEST

    return cmocka_run_group_tests(tests, NULL, NULL);
}
