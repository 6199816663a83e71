/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <kvt/kvt.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link_socket.h"

/* To be raised with every change of a frame, here or in proto.h. */
#define PROTOCOL 1u

#define HELLO_S 10u
#define PING_S 2u
#define SECOND_NS UINT64_C(1000000000)

/* Bytes of a holder's stream in one frame. */
#define CARRY_BYTES ((size_t)1 << 16)

static const char magic[16] = "kvt replay link\n";
#define ORDER UINT32_C(0x01020304)

/* 64 bytes, for ever: whoever reads this may be of any version. */
struct hello {
    char magic[16];
    uint32_t order; /* ORDER as the sender's processor writes it */
    uint32_t protocol;
    char version[32]; /* of kvt */
    char reserved[8];
};

_Static_assert(sizeof(struct hello) == 64, "a hello has the same length in "
                                           "every version");

bool link_is_open(const struct link *link)
{
    return link->proto.fd >= 0;
}

void link_close(struct link *link)
{
    proto_close(&link->proto);
}

/* -------------------------------------------------------------------- hello */

static bool send_all(int fd, const void *bytes, size_t length,
                     uint64_t deadline_ns, int signal_fd)
{
    const unsigned char *from = bytes;

    while (length > 0) {
        ssize_t sent = send(fd, from, length, MSG_NOSIGNAL);

        if (sent > 0) {
            from += sent;
            length -= (size_t)sent;
        } else if ((errno != EAGAIN && errno != EINTR) ||
                   !socket_wait(fd, POLLOUT, deadline_ns, signal_fd)) {
            return false;
        }
    }
    return true;
}

/* 0 when all bytes came, else why not; ECONNRESET: the other end is gone. */
static int receive_all(int fd, void *bytes, size_t length, uint64_t deadline_ns,
                       int signal_fd, size_t *ret_got)
{
    unsigned char *to = bytes;
    size_t got = 0;
    int problem = 0;

    while (got < length && problem == 0) {
        ssize_t more = recv(fd, to + got, length - got, 0);

        if (more > 0) {
            got += (size_t)more;
        } else if (more == 0 || (errno != EAGAIN && errno != EINTR)) {
            problem = ECONNRESET;
        } else if (!socket_wait(fd, POLLIN, deadline_ns, signal_fd)) {
            problem = errno;
        }
    }
    *ret_got = got;
    return problem;
}

static bool check_hello(const struct hello *hello, const char *other,
                        char error[CLI_TEXT_MAX])
{
    char version[sizeof(hello->version) + 1] = "";

    if (memcmp(hello->magic, magic, sizeof(magic)) != 0) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       "what speaks at %s is no 'kvt replay'", other);
        return false;
    }
    /* A byte order of another kind would make nonsense of all that follows. */
    if (hello->order != ORDER) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       "the host at %s has another byte order: a replay "
                       "needs two hosts of one kind",
                       other);
        return false;
    }
    memcpy(version, hello->version, sizeof(hello->version));
    cli_make_plain(version, strlen(version), false);
    if (hello->protocol != PROTOCOL || strcmp(version, kvt_version()) != 0) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       "%s runs kvt %s (replay protocol %u), this is kvt %s "
                       "(%u): run the same version on both hosts",
                       other, version, hello->protocol, kvt_version(),
                       PROTOCOL);
        return false;
    }
    return true;
}

static bool exchange(struct link *link, char error[CLI_TEXT_MAX])
{
    uint64_t deadline = cli_now_ns() + HELLO_S * SECOND_NS;
    struct hello hello = {.order = ORDER, .protocol = PROTOCOL};
    struct hello other = {0};
    size_t got;
    int problem;

    memcpy(hello.magic, magic, sizeof(magic));
    (void)snprintf(hello.version, sizeof(hello.version), "%s", kvt_version());
    (void)send_all(link->proto.fd, &hello, sizeof(hello), deadline,
                   link->signal_fd);
    problem = receive_all(link->proto.fd, &other, sizeof(other), deadline,
                          link->signal_fd, &got);
    if (problem == EINTR) {
        (void)snprintf(error, CLI_TEXT_MAX, "interrupted");
        return false;
    }
    if (problem != 0 && (got < sizeof(magic) ||
                         memcmp(other.magic, magic, sizeof(magic)) == 0)) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       problem == ECONNRESET
                           ? "%s closed the connection before it said what "
                             "it is"
                           : "%s did not say what it is in 10 s: it is no "
                             "'kvt replay', or busy with another run",
                       link->other);
        return false;
    }
    return check_hello(&other, link->other, error);
}

static bool open_link(int fd, int signal_fd, struct link *ret,
                      char error[CLI_TEXT_MAX])
{
    struct link link = {.proto = {.fd = -1}, .signal_fd = signal_fd};

    if (fd < 0) {
        *ret = link;
        return false;
    }
    proto_open(&link.proto, fd, LINK_PAYLOAD_MAX);
    socket_name(fd, true, link.other, sizeof(link.other));
    if (!exchange(&link, error)) {
        link_close(&link);
        *ret = link;
        return false;
    }
    link.heard_ns = cli_now_ns();
    link.spoke_ns = link.heard_ns;
    *ret = link;
    return true;
}

int link_listen(const char *address, char bound[LINK_ADDRESS_TEXT],
                char error[CLI_TEXT_MAX])
{
    int fd = socket_listen(address, error);

    if (fd >= 0) {
        socket_name(fd, false, bound, LINK_ADDRESS_TEXT);
    }
    return fd;
}

bool link_accept(int listener, int signal_fd, struct link *ret,
                 char error[CLI_TEXT_MAX])
{
    return open_link(socket_accept(listener, error), signal_fd, ret, error);
}

bool link_connect(const char *address, struct link *ret,
                  char error[CLI_TEXT_MAX])
{
    return open_link(socket_connect(address, error), -1, ret, error);
}

/* ------------------------------------------------------------------- frames */

bool link_turn(struct link *link, char error[CLI_TEXT_MAX])
{
    uint64_t now = cli_now_ns();

    if (now - link->spoke_ns >= PING_S * SECOND_NS) {
        link->spoke_ns = now;
        proto_begin(&link->proto, LINK_PING);
        proto_end(&link->proto);
    }
    if (!proto_flush(&link->proto)) {
        (void)snprintf(error, CLI_TEXT_MAX, "%s closed the connection",
                       link->other);
        return false;
    }
    if (now - link->heard_ns >= LINK_SILENCE_S * SECOND_NS) {
        (void)snprintf(error, CLI_TEXT_MAX, "%s has been silent for %u s",
                       link->other, LINK_SILENCE_S);
        return false;
    }
    return true;
}

bool link_fill(struct link *link, char error[CLI_TEXT_MAX])
{
    size_t before = link->proto.in.end - link->proto.in.begin;
    bool good = proto_fill(&link->proto);

    if (link->proto.in.end - link->proto.in.begin > before) {
        link->heard_ns = cli_now_ns();
    }
    if (!good) {
        (void)snprintf(error, CLI_TEXT_MAX, "%s closed the connection",
                       link->other);
    }
    return good;
}

int link_wait_ms(const struct link *link)
{
    return link_is_open(link) ? (int)(PING_S * 1000u) : -1;
}

void link_carry(struct link *link, uint64_t holder, struct proto_buffer *from)
{
    while (from->begin < from->end) {
        size_t length = from->end - from->begin;

        if (length > CARRY_BYTES) {
            length = CARRY_BYTES;
        }
        proto_begin(&link->proto, LINK_BYTES);
        proto_put(&link->proto, holder);
        proto_put_bytes(&link->proto, from->bytes + from->begin, length);
        proto_end(&link->proto);
        from->begin += length;
    }
    from->begin = 0;
    from->end = 0;
}

void link_leave(struct link *link, const char *why)
{
    uint64_t deadline = cli_now_ns() + SECOND_NS;

    if (!link_is_open(link)) {
        return;
    }
    if (why != NULL) {
        proto_begin(&link->proto, LINK_REFUSE);
        proto_put_bytes(&link->proto, why, strlen(why));
        proto_end(&link->proto);
    }
    while (proto_flush(&link->proto) && proto_unsent(&link->proto) &&
           socket_wait(link->proto.fd, POLLOUT, deadline, -1)) {
    }
    /* A close with unread bytes would make the other end throw away what it
     * has not read yet. */
    (void)shutdown(link->proto.fd, SHUT_WR);
    while (proto_fill(&link->proto) &&
           socket_wait(link->proto.fd, POLLIN, deadline, -1)) {
        link->proto.in.end = link->proto.in.begin;
    }
    link_close(link);
}

static bool is_expected(const struct link *link, enum link_type type,
                        struct proto_message *message, char error[CLI_TEXT_MAX])
{
    char text[CLI_TEXT_MAX];

    if (message->type == LINK_REFUSE) {
        proto_take_text(message, text, sizeof(text));
        (void)snprintf(error, CLI_TEXT_MAX, "%s refuses: %.380s", link->other,
                       text);
        return false;
    }
    if (message->type != (uint32_t)type) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       "%s sent message %u where %u was due", link->other,
                       message->type, (unsigned int)type);
        return false;
    }
    return true;
}

static void explain_wait(const struct link *link, int problem,
                         char error[CLI_TEXT_MAX])
{
    if (problem == EINTR) {
        (void)snprintf(error, CLI_TEXT_MAX, "interrupted");
    } else {
        (void)snprintf(error, CLI_TEXT_MAX, "%s has not answered in %u s",
                       link->other, HELLO_S);
    }
}

bool link_expect(struct link *link, enum link_type type,
                 struct proto_message *ret, char error[CLI_TEXT_MAX])
{
    uint64_t deadline = cli_now_ns() + HELLO_S * SECOND_NS;
    bool good = true;

    for (;;) {
        int rc = proto_next(&link->proto, ret);

        if (rc > 0) {
            if (ret->type == LINK_PING) {
                continue;
            }
            return is_expected(link, type, ret, error);
        }
        if (rc < 0) {
            (void)snprintf(error, CLI_TEXT_MAX,
                           "%s sent a message that is too long", link->other);
            return false;
        }
        if (!good || !link_turn(link, error)) {
            return false;
        }
        if (!socket_wait(link->proto.fd, POLLIN, deadline, link->signal_fd)) {
            explain_wait(link, errno, error);
            return false;
        }
        good = link_fill(link, error);
    }
}

/* ------------------------------------------------------------------ content */

#define GEOMETRY_NUMBERS(X)                                                    \
    X(geometry.regions)                                                        \
    X(geometry.pages)                                                          \
    X(geometry.page_bytes)                                                     \
    X(geometry.page_tokens)

#define OFFER_NUMBERS(X)                                                       \
    X(holders)                                                                 \
    X(memory)                                                                  \
    X(no_same_host)                                                            \
    GEOMETRY_NUMBERS(X)

#define START_NUMBERS(X)                                                       \
    X(fetchers)                                                                \
    X(pull)                                                                    \
    X(requests)                                                                \
    X(timeout_ns)                                                              \
    X(slots)                                                                   \
    GEOMETRY_NUMBERS(X)

void link_offer_put(struct link *link, const struct link_offer *offer)
{
    proto_begin(&link->proto, LINK_OFFER);
#define PUT(field) proto_put(&link->proto, offer->field);
    OFFER_NUMBERS(PUT)
#undef PUT
    proto_put_bytes(&link->proto, offer->engine, strlen(offer->engine));
    proto_end(&link->proto);
}

void link_offer_take(struct proto_message *message, struct link_offer *ret)
{
    *ret = (struct link_offer){0};
#define TAKE(field) ret->field = proto_take(message);
    OFFER_NUMBERS(TAKE)
#undef TAKE
    proto_take_text(message, ret->engine, sizeof(ret->engine));
}

void link_start_put(struct link *link, const struct link_start *start,
                    uint64_t holders)
{
    proto_begin(&link->proto, LINK_START);
#define PUT(field) proto_put(&link->proto, start->field);
    START_NUMBERS(PUT)
#undef PUT
    for (uint64_t i = 0; i < holders; i++) {
        proto_put(&link->proto, start->secrets[i]);
    }
    proto_end(&link->proto);
}

void link_start_take(struct proto_message *message, uint64_t holders,
                     struct link_start *ret)
{
    *ret = (struct link_start){0};
#define TAKE(field) ret->field = proto_take(message);
    START_NUMBERS(TAKE)
#undef TAKE
    for (uint64_t i = 0; i < holders && i < LINK_NODES_MAX; i++) {
        ret->secrets[i] = proto_take(message);
    }
}
