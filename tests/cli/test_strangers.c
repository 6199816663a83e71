/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 'kvt replay' in two parts, and one of them is not what it should be. Proved
 * are that a listener names strangers and outlives them, that it refuses orders
 * beyond what its user gave it, before a run and in it, that its holders take
 * no message that would break them, that nobody's silence keeps it from an
 * interrupt, that no frame is left lying, and that what the other side says
 * cannot command a terminal. The test itself speaks the protocol, as a client
 * or as a listener, and waits for answers, never for a time.
 */
#include "command_run.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../tools/link.h"
#include "../../tools/link_socket.h"
#include "../../tools/node.h"
#include "../../tools/proto.h"

/* ---------------------------------------------------------------- the hello */

/* What a client that sends these bytes makes the listener say. */
static void say(const char *option, const void *bytes, size_t length)
{
    char error[CLI_TEXT_MAX];
    int fd = socket_connect(strchr(option, '=') + 1, error);

    assert_true(fd >= 0);
    assert_int_equal(send(fd, bytes, length, MSG_NOSIGNAL), length);
    (void)shutdown(fd, SHUT_WR);
    /* Until it has answered and closed: then it has judged. */
    while (socket_wait(fd, POLLIN, UINT64_MAX, -1) &&
           recv(fd, error, sizeof(error), 0) > 0) {
    }
    (void)close(fd);
}

/* As a hello of this very build begins, up to the protocol's number. */
struct greeting {
    char magic[16];
    uint32_t order;
    uint32_t protocol;
    char version[32];
    char reserved[8];
};

static void strangers_are_named_and_the_next_run_is_served(void **state)
{
    struct greeting greeting = {
        .order = UINT32_C(0x01020304), .protocol = 1, .version = "9.9.9\n"};
    char option[OPTION_MAX];
    struct run holders;
    struct run fetchers;

    (void)state;
    memcpy(greeting.magic, "kvt replay link\n", sizeof(greeting.magic));
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB",
                   "--keep");
    say(option, "", 0);
    read_until(&holders, 1, "closed the connection before it said");
    say(option, "GET / HTTP/1.1\r\nHost: there\r\n\r\n", 31);
    read_until(&holders, 1, "is no 'kvt replay'");
    say(option, &greeting, sizeof(greeting));
    read_until(&holders, 1, "runs kvt 9.9.9? (replay protocol 1), this is");
    greeting.order = UINT32_C(0x04030201);
    say(option, &greeting, sizeof(greeting));
    read_until(&holders, 1, "has another byte order");
    RUN(&fetchers, 0, CONNECT, SHAPE, option);
    end(&fetchers);
    RUN(&fetchers, 0, CONNECT, SHAPE, option, "--pull");
    end(&fetchers);
    assert_int_equal(kill(holders.pid, SIGINT), 0);
    finish_with(&holders, 130);
    end(&holders);
}

/* Orders that would be memory or tables out of all proportion. */
static void orders_beyond_measure_are_refused(void **state)
{
    static const struct link_start starts[] = {
        {.fetchers = 0, .requests = 1, .slots = 1, .geometry = {1, 1, 1, 0}},
        {.fetchers = UINT64_MAX,
         .requests = 1,
         .slots = 1,
         .geometry = {1, 1, 1, 0}},
        {.fetchers = 1000, .requests = 1, .slots = 1, .geometry = {1, 1, 1, 0}},
        {.fetchers = 1,
         .requests = 1U << 20,
         .slots = 1,
         .geometry = {1, 1, 1, 0}},
        {.fetchers = 1,
         .requests = 1,
         .slots = 1U << 20,
         .geometry = {1, 1, 4096, 0}},
        {.fetchers = 1,
         .requests = 1,
         .slots = 1,
         .geometry = {UINT64_C(1) << 33, UINT64_C(1) << 33, 1, 0}},
        {.fetchers = 1, .requests = 1, .slots = 1, .geometry = {0, 1, 1, 0}},
        {.fetchers = 1, .requests = 1, .slots = 0, .geometry = {1, 1, 1, 0}},
    };
    char option[OPTION_MAX];
    struct run holders;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=4MiB");
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
        struct proto_message message;
        char error[CLI_TEXT_MAX];
        struct link link;

        assert_true(link_connect(strchr(option, '=') + 1, &link, error));
        assert_true(link_expect(&link, LINK_OFFER, &message, error));
        link_start_put(&link, &starts[i], 2);
        assert_false(link_expect(&link, LINK_OFFER, &message, error));
        if (strstr(error, "refuses: ") == NULL) {
            fail_msg("start %zu was not refused: %s", i, error);
        }
        link_close(&link);
    }
    assert_int_equal(kill(holders.pid, SIGINT), 0);
    finish_with(&holders, 130);
    end(&holders);
}

/* --------------------------------------------------------------- in the run */

/* Connects and has the offer. */
static void greet(struct link *link, const char *option)
{
    struct proto_message message;
    char error[CLI_TEXT_MAX];

    assert_true(link_connect(strchr(option, '=') + 1, link, error));
    assert_true(link_expect(link, LINK_OFFER, &message, error));
}

/* An order that the listener takes, for its two holders. */
static void put_start(struct link *link)
{
    static const struct link_start start = {
        .fetchers = 1,
        .requests = 8,
        .slots = 16,
        .geometry = {2, 1, 4096, 16},
    };

    link_start_put(link, &start, 2);
}

static void send_frames(struct link *link)
{
    assert_true(proto_flush(&link->proto));
    assert_false(proto_unsent(&link->proto));
}

/* The next frame; false at the end. Unlike link_expect() it sends no pings,
 * which would wake whoever has left a frame lying. */
static bool next_frame(struct link *link, struct proto_message *ret)
{
    bool open = true;

    for (;;) {
        int rc = proto_next(&link->proto, ret);

        assert_true(rc >= 0);
        if (rc > 0) {
            return true;
        }
        if (!open) {
            return false;
        }
        assert_true(socket_wait(link->proto.fd, POLLIN, UINT64_MAX, -1));
        open = proto_fill(&link->proto);
    }
}

/* Reads until a holder is gone, and what it said before as an error. */
static void read_until_gone(struct link *link, uint64_t holder,
                            char error[CLI_TEXT_MAX])
{
    struct proto stream;
    struct proto_message frame;
    struct proto_message message;

    proto_open(&stream, -1, PROTO_PAYLOAD_MAX_REMOTE);
    error[0] = '\0';
    do {
        const void *bytes;
        size_t length;

        if (!next_frame(link, &frame)) {
            fail_msg("the link ended before the holder was gone");
        }
        if (frame.type != LINK_BYTES || proto_take(&frame) != holder) {
            continue;
        }
        bytes = proto_take_bytes(&frame, &length);
        proto_append(&stream.in, bytes, length);
        while (proto_next(&stream, &message) > 0) {
            if (message.type == PROTO_ERROR) {
                proto_take_text(&message, error, CLI_TEXT_MAX);
            }
        }
    } while (frame.type != LINK_GONE);
    assert_int_equal(proto_take(&frame), holder);
    /* It ends by itself, unless the listener is faster: but it breaks not. */
    if (proto_take(&frame) != 0) {
        assert_int_equal(proto_take(&frame), SIGKILL);
    }
    proto_close(&stream);
}

/* The first holder of a new run gets this message; what it answers. */
static void ask_holder(struct proto *stream, const char *want)
{
    char option[OPTION_MAX];
    char error[CLI_TEXT_MAX];
    struct run holders;
    struct link link;

    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=1MiB");
    greet(&link, option);
    put_start(&link);
    link_carry(&link, 0, &stream->out);
    send_frames(&link);
    read_until_gone(&link, 0, error);
    if (strstr(error, want) == NULL) {
        fail_msg("\"%s\" is not in \"%s\"", want, error);
    }
    link_close(&link);
    finish_with(&holders, 1);
    end(&holders);
    proto_close(stream);
}

/* It would be another pool than the one that its user allowed. */
static void a_second_configuration_is_refused(void **state)
{
    const struct node_config configs[] = {
        /* 3 x this wraps to 1: a pool of one page for three slots. */
        {.slots = 3,
         .geometry = {1, UINT64_C(0xaaaaaaaaaaaaaaab), 4096, 16},
         .peers = 1,
         .requests = 8,
         .engine = "local"},
        /* 1 GiB instead of 1 MiB. */
        {.slots = UINT64_C(1) << 18,
         .geometry = {1, 1, 4096, 16},
         .peers = 1,
         .requests = 8,
         .engine = "local"},
        {.slots = 16, .geometry = {2, 1, 4096, 16}, .engine = "none"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(configs) / sizeof(configs[0]); i++) {
        struct proto stream;

        proto_open(&stream, -1, PROTO_PAYLOAD_MAX_REMOTE);
        proto_begin(&stream, PROTO_CONFIG);
        node_config_put(&stream, &configs[i]);
        proto_end(&stream);
        ask_holder(&stream, "a second configuration came");
    }
}

static void messages_that_would_break_a_holder_are_refused(void **state)
{
    static const struct {
        const char *want;
        uint32_t type;
        size_t count;
        uint64_t numbers[5];
    } cases[] = {
        {"is not for this role", PROTO_AGAIN, 1, {0}},
        {"is not for this role", PROTO_DROP, 2, {1, 0}},
        {"is not for this role", PROTO_WANT, 3, {0, 1, 1}},
        {"is damaged", PROTO_MOVE, 5, {0, 0, 1, 16, 0}},
        {"is damaged", PROTO_MOVE, 5, {0, 0, 1, 0, UINT64_MAX}},
        {"is damaged", PROTO_MOVE, 5, {0, 1, 1, 0, 0}},
        {"is damaged", PROTO_UNPIN, 2, {1, 0}},
        {"is damaged", PROTO_PEER_DEAD, 2, {UINT64_C(1) << 40, 1}},
        {"is damaged", 99, 0, {0}},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct proto stream;

        proto_open(&stream, -1, PROTO_PAYLOAD_MAX_REMOTE);
        proto_begin(&stream, cases[i].type);
        for (size_t j = 0; j < cases[i].count; j++) {
            proto_put(&stream, cases[i].numbers[j]);
        }
        proto_end(&stream);
        ask_holder(&stream, cases[i].want);
    }
}

/* Between the bound of a link and that within one host. */
static void a_holder_takes_no_longer_frame_than_a_link_allows(void **state)
{
    static const uint32_t header[2] = {PROTO_PAYLOAD_MAX_REMOTE + 1,
                                       PROTO_PREPARE};
    struct proto stream;

    (void)state;
    proto_open(&stream, -1, PROTO_PAYLOAD_MAX_REMOTE);
    proto_append(&stream.out, header, sizeof(header));
    ask_holder(&stream, "the stream of messages is damaged");
}

/* Nothing follows that would wake the listener: it must have looked already. */
static void frames_that_come_with_the_start_are_seen(void **state)
{
    char option[OPTION_MAX];
    char error[CLI_TEXT_MAX];
    struct run holders;
    struct link link;

    (void)state;
    START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--memory=1MiB");
    greet(&link, option);
    put_start(&link);
    proto_begin(&link.proto, LINK_KILL);
    proto_put(&link.proto, 1);
    proto_end(&link.proto);
    send_frames(&link);
    read_until_gone(&link, 1, error);
    proto_begin(&link.proto, LINK_END);
    proto_end(&link.proto);
    send_frames(&link);
    read_until_gone(&link, 0, error);
    finish_with(&holders, 0);
    link_close(&link);
    end(&holders);
}

/* Before its hello, and after it. */
static void nobodys_silence_keeps_a_listener_from_an_interrupt(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        char option[OPTION_MAX];
        char error[CLI_TEXT_MAX];
        struct link link = {.proto = {.fd = -1}};
        struct run holders;

        START_LISTENER(&holders, option, "--listen=127.0.0.1:0");
        if (i == 0) {
            int fd = socket_connect(strchr(option, '=') + 1, error);

            assert_true(fd >= 0);
            proto_open(&link.proto, fd, LINK_PAYLOAD_MAX);
            /* It has said hello: it waits for ours. */
            assert_true(socket_wait(fd, POLLIN, UINT64_MAX, -1));
        } else {
            greet(&link, option);
        }
        assert_int_equal(kill(holders.pid, SIGINT), 0);
        finish_with(&holders, 130);
        assert_says(&holders.out[1], "no run: interrupted");
        link_close(&link);
        end(&holders);
    }
}

/* -------------------------------------------------------------------- texts */

#define EVIL                                                                   \
    "\033[2J\033]0;title\a\x9b"                                                \
    "1m\r\nbad"
#define PLAIN "?[2J?]0;title??1m??bad"

static void assert_plain(const struct output *output)
{
    for (size_t i = 0; i < output->length; i++) {
        char byte = output->text[i];

        if (byte != '\n' && (byte < ' ' || byte > '~')) {
            fail_msg("byte %d in: %s", byte, output->text);
        }
    }
}

static void put_text(struct proto *proto, uint32_t type, const char *text)
{
    proto_begin(proto, type);
    proto_put_bytes(proto, text, strlen(text));
    proto_end(proto);
}

static void a_client_cannot_command_the_listeners_terminal(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        char option[OPTION_MAX];
        struct run holders;
        struct link link;

        START_LISTENER(&holders, option, "--listen=127.0.0.1:0", "--keep");
        greet(&link, option);
        if (i == 1) {
            put_start(&link);
        }
        put_text(&link.proto, LINK_REFUSE, EVIL);
        send_frames(&link);
        read_until(&holders, 1, PLAIN);
        link_close(&link);
        assert_int_equal(kill(holders.pid, SIGINT), 0);
        finish_with(&holders, 130);
        assert_plain(&holders.out[1]);
        end(&holders);
    }
}

/* Starts the connecting side and is its listener, up to the offer. */
static int offer(struct run *run, struct link *link,
                 const struct link_offer *what)
{
    char option[OPTION_MAX];
    char error[CLI_TEXT_MAX];
    char name[LINK_ADDRESS_TEXT];
    int listener = socket_listen("127.0.0.1:0", error);

    assert_true(listener >= 0);
    socket_name(listener, false, name, sizeof(name));
    (void)snprintf(option, sizeof(option), "--connect=%s", name);
    START(run, CONNECT, SHAPE, option);
    assert_true(socket_wait(listener, POLLIN, UINT64_MAX, -1));
    assert_true(link_accept(listener, -1, link, error));
    link_offer_put(link, what);
    return listener;
}

static void a_listener_cannot_command_the_other_terminal(void **state)
{
    static const struct link_offer what = {
        .holders = 1, .memory = 1 << 20, .engine = EVIL};

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct proto_message message;
        char error[CLI_TEXT_MAX];
        struct proto stream;
        struct run run;
        struct link link;
        int listener = offer(&run, &link, &what);

        assert_true(link_expect(&link, LINK_START, &message, error));
        proto_open(&stream, -1, PROTO_PAYLOAD_MAX_REMOTE);
        put_text(&stream, PROTO_ERROR, EVIL);
        if (i == 0) {
            link_carry(&link, 0, &stream.out);
        } else {
            put_text(&link.proto, LINK_REFUSE, EVIL);
        }
        send_frames(&link);
        finish_with(&run, 1);
        assert_says(&run.out[1], PLAIN);
        assert_plain(&run.out[1]);
        proto_close(&stream);
        link_close(&link);
        (void)close(listener);
        end(&run);
    }
}

static void frames_that_come_with_the_offer_are_seen(void **state)
{
    static const struct link_offer what = {
        .holders = 1, .memory = 1 << 20, .engine = "local"};
    struct run run;
    struct link link;
    int listener = offer(&run, &link, &what);

    (void)state;
    put_text(&link.proto, LINK_REFUSE, "because");
    send_frames(&link);
    finish_with(&run, 1);
    assert_says(&run.out[1], "ended the run: because");
    link_close(&link);
    (void)close(listener);
    end(&run);
}

static void an_offer_of_too_many_holders_is_refused(void **state)
{
    static const uint64_t counts[] = {0, LINK_NODES_MAX, UINT64_MAX};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        const struct link_offer what = {
            .holders = counts[i], .memory = 1 << 20, .engine = "local"};
        struct run run;
        struct link link;
        int listener = offer(&run, &link, &what);

        send_frames(&link);
        finish(&run);
        assert_refused(&run, "are more than 256 processes");
        link_close(&link);
        (void)close(listener);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_are_named_and_the_next_run_is_served),
        cmocka_unit_test(orders_beyond_measure_are_refused),
        cmocka_unit_test(a_second_configuration_is_refused),
        cmocka_unit_test(messages_that_would_break_a_holder_are_refused),
        cmocka_unit_test(a_holder_takes_no_longer_frame_than_a_link_allows),
        cmocka_unit_test(frames_that_come_with_the_start_are_seen),
        cmocka_unit_test(nobodys_silence_keeps_a_listener_from_an_interrupt),
        cmocka_unit_test(a_client_cannot_command_the_listeners_terminal),
        cmocka_unit_test(a_listener_cannot_command_the_other_terminal),
        cmocka_unit_test(frames_that_come_with_the_offer_are_seen),
        cmocka_unit_test(an_offer_of_too_many_holders_is_refused),
    };

    if (!command_is_known()) {
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
