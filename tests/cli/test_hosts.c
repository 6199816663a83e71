/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 'kvt replay' in two parts, as across two hosts, here over the loopback with
 * the local engine: the listening side has the holders, the connecting one the
 * table. Proved are the addresses, which side may say what, that another shape
 * of blocks is refused, and that the death of either side ends the other with
 * its books in order. test_strangers.c has those who do not keep to the rules,
 * tests/nixl/netns.sh the bytes on a real network.
 */
#include "command_run.h"

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../tools/link.h"
#include "../../tools/link_socket.h"

/* -------------------------------------------------------------------- cases */

static void run_on(const char *listen, const char *pull)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;
    json_t *object;

    START_LISTENER(&holders, option, listen, "--memory=4MiB", "--holders=3");
    RUN(&fetchers, 0, CONNECT, SHAPE, option, "--fetchers=2", pull);
    object = parse(&fetchers);
    assert_good(object);
    assert_int_equal(json_array_size(json_object_get(object, "holders")), 3);
    assert_int_equal(number(json_object_get(object, "bytes_by_path"), "local"),
                     number(object, "bytes"));
    assert_string_equal(text_of(object, "holders_engine"), "local");
    assert_non_null(strstr(option, text_of(object, "holders_at")));
    json_decref(object);
    finish_with(&holders, 0);
    assert_says(&holders.out[1], "has ended in order");
    end(&holders);
    end(&fetchers);
}

/* B45 */
static void every_kind_of_address_works(void **state)
{
    (void)state;
    run_on("--listen=127.0.0.1:0", "--shm");
    run_on("--listen=localhost:0", "--pull");
}

/* Whether this host has the IPv6 loopback at all. (B45) */
static void ipv6_works_too(void **state)
{
    char error[CLI_TEXT_MAX];
    int fd = socket_listen("[::1]:0", error);

    (void)state;
    if (fd < 0) {
        printf("skipped: this host has no IPv6 loopback: %s\n", error);
        skip();
    }
    (void)close(fd);
    run_on("--listen=[::1]:0", "--pull");
}

static void each_side_says_what_is_its_own(void **state)
{
    (void)state;
    REFUSED("said at the side with --connect", LISTEN, "--listen=:0",
            "--fetchers=2");
    REFUSED("said at the side with --connect", LISTEN, "--listen=:0", "--json");
    REFUSED("said at the side with --listen", CONNECT, "--connect=a:1",
            "--holders=2");
    REFUSED("not both", LISTEN, "--listen=:0", "--connect=a:1");
    REFUSED("takes no TRACE", LISTEN, "--listen=:0", "a-trace");
    REFUSED("--keep needs", "replay", "--keep");
}

/* B45 */
static void addresses_without_sense_are_refused(void **state)
{
    static const char *const listens[] = {"--listen=nowhere",
                                          "--listen=::1:4711", "--listen=[::1]",
                                          "--listen=a:x"};
    struct run run;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        RUN(&run, 1, LISTEN, listens[i]);
        assert_says(&run.out[1], "is no address");
        end(&run);
    }
    RUN(&run, 1, CONNECT, "--connect=:4711");
    assert_says(&run.out[1], "takes a host and its port");
    end(&run);
}

static void an_engine_that_is_missing_is_seen_before_it_listens(void **state)
{
    static const char *const engines[] = {"--engine=nixl",
                                          "--engine=fault:nixl?hang=1"};

    (void)state;
    assert_int_equal(setenv("KVT_NIXL_LIBRARY", "/nowhere/nixl.so", 1), 0);
    for (size_t i = 0; i < sizeof(engines) / sizeof(engines[0]); i++) {
        struct run run;

        RUN(&run, 1, "replay", engines[i], "--listen=127.0.0.1:0");
        assert_int_equal(run.out[0].length, 0);
        assert_says(&run.out[1], "/nowhere/nixl.so (not found)");
        end(&run);
    }
    assert_int_equal(unsetenv("KVT_NIXL_LIBRARY"), 0);
}

/* A port that is ours, so that nobody listens on it. (B45) */
static void nobody_there_is_an_error(void **state)
{
    const struct sockaddr_in any = {.sin_family = AF_INET,
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char name[LINK_ADDRESS_TEXT];
    char option[OPTION_MAX];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct run run;

    (void)state;
    assert_int_equal(bind(fd, (const struct sockaddr *)&any, sizeof any), 0);
    socket_name(fd, false, name, sizeof(name));
    (void)snprintf(option, sizeof(option), "--connect=%s", name);
    RUN(&run, 1, CONNECT, option);
    assert_says(&run.out[1], "Connection refused; is 'kvt replay --listen'");
    assert_int_equal(run.out[0].length, 0);
    end(&run);
    (void)close(fd);
}

static void shapes_that_differ_are_refused_and_the_next_run_is_served(
    void **state)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;
    json_t *object;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0",
                   "--block-bytes=16KiB", "--memory=1MiB");
    RUN(&fetchers, 2, CONNECT, option, "--block-bytes=32KiB");
    assert_refused(&fetchers, "1 pages of 32 KiB here and 1 runs of 1 pages "
                              "of 16 KiB at 127.0.0.1");
    RUN(&fetchers, 2, CONNECT, option, "--block-bytes=16KiB",
        "--kill-holder=2@1");
    assert_refused(&fetchers, "there are 2");
    RUN(&fetchers, 0, CONNECT, option, SHAPE);
    object = parse(&fetchers);
    assert_good(object);
    /* The smaller memory of the two decides: 1 MiB less the guards. */
    assert_int_equal(number(object, "slots"), 63);
    json_decref(object);
    end(&fetchers);
    finish_with(&holders, 0);
    assert_says(&holders.out[1], "the two sides do not fit each other");
    end(&holders);
}

static void a_block_too_large_for_the_other_side_is_refused(void **state)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=64KiB");
    RUN(&fetchers, 2, CONNECT, option, "--block-bytes=64KiB");
    assert_refused(&fetchers, "give more --memory there");
    assert_int_equal(kill(holders.pid, SIGTERM), 0);
    finish_with(&holders, 130);
    end(&holders);
}

static void a_holder_that_does_not_start_is_told_across(void **state)
{
    const char *const arguments[] = {"replay", "--engine=none",
                                     "--listen=127.0.0.1:0", NULL};
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;

    (void)state;
    start_listener(&holders, option, arguments);
    RUN(&fetchers, 1, CONNECT, option, SHAPE);
    assert_says(&fetchers.out[1], "the engine \"none\" does not start");
    end(&fetchers);
    finish_with(&holders, 1);
    assert_says(&holders.out[1], "ended the run: holder");
    end(&holders);
}

static void a_killed_holder_over_there_is_made_up_for(void **state)
{
    static const char *const direction[] = {"--fetchers=1", "--pull"};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        char option[OPTION_MAX];
        struct run holders;
        struct run fetchers;
        json_t *object;

        START_LISTENER(&holders, option, "--listen=127.0.0.1:0",
                       "--memory=4MiB");
        RUN(&fetchers, 0, CONNECT, SHAPE, option, "--kill-holder=1@12",
            direction[i]);
        object = parse(&fetchers);
        assert_good(object);
        assert_true(flag(json_array_get(json_object_get(object, "holders"), 1),
                         "killed"));
        json_decref(object);
        end(&fetchers);
        finish_with(&holders, 0);
        end(&holders);
    }
}

/* ------------------------------------------------------------------- deaths */

/* At this speed the eleventh request is due in weeks: the run lasts until
 * somebody ends it. The first line of progress shows that it is under way. */
#define FOR_WEEKS "--speed=0.000001", "--requests=20", "--block-bytes=16KiB"

static void kill_listener_of(const char *const arguments[], struct run *holders)
{
    struct run fetchers;
    json_t *object;

    start(&fetchers, arguments);
    read_until(&fetchers, 1, "requests/s");
    assert_int_equal(kill(holders->pid, SIGKILL), 0);
    finish_with(&fetchers, 1);
    finish_with(holders, -1);
    object = parse(&fetchers);
    assert_accounted(object);
    assert_int_equal(number(object, "verification_failures"), 0);
    assert_non_null(strstr(text_of(object, "error"), "closed the connection"));
    assert_says(&fetchers.out[1], "its 2 holders count as lost");
    json_decref(object);
    end(&fetchers);
    end(holders);
}

static void a_killed_listener_is_noticed_at_rest(void **state)
{
    char option[OPTION_MAX];
    struct run holders;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB");
    {
        const char *const arguments[] = {CONNECT, FOR_WEEKS, option, NULL};

        kill_listener_of(arguments, &holders);
    }
}

static void a_killed_listener_is_noticed_in_full_flight(void **state)
{
    static const char *const direction[] = {"--fetchers=1", "--pull"};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        char option[OPTION_MAX];
        struct run holders;

        START_LISTENER(&holders, option, "--listen=127.0.0.1:0",
                       "--memory=4MiB");
        {
            const char *const arguments[] = {CONNECT, "--block-bytes=64KiB",
                                             direction[i], option, NULL};

            kill_listener_of(arguments, &holders);
        }
    }
}

static void a_killed_connector_ends_the_holders_and_the_next_is_served(
    void **state)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB",
                   "--keep");
    START(&fetchers, CONNECT, FOR_WEEKS, option);
    read_until(&fetchers, 1, "requests/s");
    assert_int_equal(kill(fetchers.pid, SIGKILL), 0);
    finish_with(&fetchers, -1);
    end(&fetchers);
    read_until(&holders, 1, "closed the connection");
    RUN(&fetchers, 0, CONNECT, SHAPE, option);
    end(&fetchers);
    assert_int_equal(kill(holders.pid, SIGINT), 0);
    finish_with(&holders, 130);
    end(&holders);
}

/* B38 */
static void an_interrupt_ends_both_sides_in_order(void **state)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;
    json_t *object;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB");
    START(&fetchers, CONNECT, FOR_WEEKS, option);
    read_until(&fetchers, 1, "requests/s");
    assert_int_equal(kill(fetchers.pid, SIGINT), 0);
    finish_with(&fetchers, 130);
    object = parse(&fetchers);
    assert_accounted(object);
    assert_true(flag(object, "interrupted"));
    json_decref(object);
    end(&fetchers);
    finish_with(&holders, 0);
    end(&holders);
}

static void an_interrupted_listener_says_so_to_the_other_side(void **state)
{
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB");
    START(&fetchers, CONNECT, FOR_WEEKS, option);
    read_until(&fetchers, 1, "requests/s");
    assert_int_equal(kill(holders.pid, SIGINT), 0);
    finish_with(&holders, 130);
    finish_with(&fetchers, 1);
    assert_says(&fetchers.out[1], "ended the run: interrupted");
    end(&holders);
    end(&fetchers);
}

/*
 * What is stopped is as silent as a host without power. Two runs at a time,
 * since each takes the 30 s after which silence counts: in one the listener is
 * stopped before its holders are ready, in the other the connector at rest.
 */
static void a_silent_side_counts_as_gone(void **state)
{
    char option[2][OPTION_MAX];
    struct run holders[2];
    struct run fetchers[2];

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        START_LISTENER(&holders[i], option[i], "--listen=127.0.0.1:0",
                       "--memory=4MiB");
        START(&fetchers[i], CONNECT, FOR_WEEKS, option[i]);
    }
    read_until(&holders[0], 1, "run of");
    assert_int_equal(kill(holders[0].pid, SIGSTOP), 0);
    read_until(&fetchers[1], 1, "requests/s");
    assert_int_equal(kill(fetchers[1].pid, SIGSTOP), 0);

    finish_with(&fetchers[0], 1);
    assert_says(&fetchers[0].out[1], "has been silent for 30 s");
    finish_with(&holders[1], 1);
    assert_says(&holders[1].out[1], "has been silent for 30 s");

    assert_int_equal(kill(holders[0].pid, SIGCONT), 0);
    finish_with(&holders[0], 1);
    assert_int_equal(kill(fetchers[1].pid, SIGCONT), 0);
    finish_with(&fetchers[1], 1);
    for (size_t i = 0; i < 2; i++) {
        end(&holders[i]);
        end(&fetchers[i]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_address_works),
        cmocka_unit_test(ipv6_works_too),
        cmocka_unit_test(each_side_says_what_is_its_own),
        cmocka_unit_test(addresses_without_sense_are_refused),
        cmocka_unit_test(an_engine_that_is_missing_is_seen_before_it_listens),
        cmocka_unit_test(nobody_there_is_an_error),
        cmocka_unit_test(
            shapes_that_differ_are_refused_and_the_next_run_is_served),
        cmocka_unit_test(a_block_too_large_for_the_other_side_is_refused),
        cmocka_unit_test(a_holder_that_does_not_start_is_told_across),
        cmocka_unit_test(a_killed_holder_over_there_is_made_up_for),
        cmocka_unit_test(a_killed_listener_is_noticed_at_rest),
        cmocka_unit_test(a_killed_listener_is_noticed_in_full_flight),
        cmocka_unit_test(
            a_killed_connector_ends_the_holders_and_the_next_is_served),
        cmocka_unit_test(an_interrupt_ends_both_sides_in_order),
        cmocka_unit_test(an_interrupted_listener_says_so_to_the_other_side),
    };

    const struct CMUnitTest slow_tests[] = {
        cmocka_unit_test(a_silent_side_counts_as_gone),
    };
    int failed;

    if (!command_is_known()) {
        return 77;
    }
    if (argc == 2 && strcmp(argv[1], "slow") == 0) {
        failed = cmocka_run_group_tests(slow_tests, NULL, NULL);
    } else {
        failed = cmocka_run_group_tests(tests, NULL, NULL);
    }
    return failed == 0 ? 0 : 1;
}
