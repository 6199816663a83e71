/* SPDX-License-Identifier: Apache-2.0 */
#include "link_socket.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_NS UINT64_C(10000000000)

/* Runs come one after the other; more than a few that wait are strangers. */
#define BACKLOG 4

static bool refuse(char error[CLI_TEXT_MAX], const char *address,
                   const char *why)
{
    (void)snprintf(error, CLI_TEXT_MAX,
                   "\"%.200s\" is no address: %s; write HOST:PORT, "
                   "[IPV6]:PORT or, to listen everywhere, :PORT",
                   address, why);
    return false;
}

bool socket_split(const char *address, char host[SOCKET_HOST_MAX],
                  char port[SOCKET_PORT_MAX], char error[CLI_TEXT_MAX])
{
    const char *begin = address;
    const char *end;
    const char *colon;
    uint64_t number;

    if (address[0] == '[') {
        begin++;
        end = strchr(begin, ']');
        if (end == NULL || end[1] != ':') {
            return refuse(error, address, "\"]:\" is missing");
        }
        colon = end + 1;
    } else {
        end = strchr(address, ':');
        colon = end;
        if (end == NULL) {
            return refuse(error, address, "the port is missing");
        }
        if (strchr(end + 1, ':') != NULL) {
            return refuse(error, address, "an IPv6 address stands in brackets");
        }
    }
    if ((size_t)(end - begin) >= SOCKET_HOST_MAX) {
        return refuse(error, address, "the host's name is too long");
    }
    if (!cli_parse_u64(colon + 1, 0, 65535, &number)) {
        return refuse(error, address, "the port is no number up to 65535");
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    (void)snprintf(port, SOCKET_PORT_MAX, "%u", (unsigned int)number);
    return true;
}

static bool resolve(const char *address, const char *host, const char *port,
                    struct addrinfo **ret, char error[CLI_TEXT_MAX])
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = AI_NUMERICSERV,
    };
    int rc = getaddrinfo(host, port, &hints, ret);

    if (rc != 0) {
        (void)snprintf(error, CLI_TEXT_MAX, "\"%.200s\" has no address: %s",
                       address,
                       rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
        return false;
    }
    return true;
}

/* ------------------------------------------------------------------- listen */

/* -1 with errno. */
static int listen_on(const struct sockaddr *address, socklen_t length)
{
    int fd = socket(address->sa_family,
                    SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1;
    int off = 0;
    int saved;

    if (fd < 0) {
        return -1;
    }
    /* The port of a run that has just ended may be taken at once. */
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address->sa_family == AF_INET6) {
        /* "::" takes IPv4 as well, whatever the host's default is. */
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    if (bind(fd, address, length) == 0 && listen(fd, BACKLOG) == 0) {
        return fd;
    }
    saved = errno;
    (void)close(fd);
    errno = saved;
    return -1;
}

static int listen_everywhere(const char *port)
{
    uint64_t number = 0;
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct sockaddr_in four = {.sin_family = AF_INET};
    int fd;

    (void)cli_parse_u64(port, 0, 65535, &number);
    six.sin6_port = htons((uint16_t)number);
    four.sin_port = htons((uint16_t)number);
    fd = listen_on((const struct sockaddr *)&six, sizeof(six));
    if (fd < 0 && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL)) {
        fd = listen_on((const struct sockaddr *)&four, sizeof(four));
    }
    return fd;
}

int socket_listen(const char *address, char error[CLI_TEXT_MAX])
{
    char host[SOCKET_HOST_MAX];
    char port[SOCKET_PORT_MAX];
    struct addrinfo *found = NULL;
    int fd = -1;

    if (!socket_split(address, host, port, error)) {
        return -1;
    }
    if (host[0] == '\0') {
        fd = listen_everywhere(port);
    } else if (!resolve(address, host, port, &found, error)) {
        return -1;
    }
    for (struct addrinfo *at = found; at != NULL && fd < 0; at = at->ai_next) {
        fd = listen_on(at->ai_addr, at->ai_addrlen);
    }
    if (fd < 0) {
        (void)snprintf(error, CLI_TEXT_MAX, "cannot listen on %.200s: %s",
                       address, strerror(errno));
    }
    if (found != NULL) {
        freeaddrinfo(found);
    }
    return fd;
}

/* ------------------------------------------------------------------ connect */

/* Small frames go one by one and are waited for. */
static void set_up(int fd)
{
    int on = 1;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool socket_wait(int fd, short events, uint64_t deadline_ns, int signal_fd)
{
    struct pollfd fds[2] = {
        {.fd = fd, .events = events},
        {.fd = signal_fd, .events = POLLIN},
    };
    uint64_t now;

    while ((now = cli_now_ns()) < deadline_ns) {
        uint64_t ms = (deadline_ns - now) / 1000000 + 1;
        int rc = poll(fds, 2, ms < 60000 ? (int)ms : 60000);

        /* First: a client that never stops sending must not hide it. */
        if (rc > 0 && fds[1].revents != 0) {
            errno = EINTR;
            return false;
        }
        if (rc > 0) {
            return true;
        }
        if (rc < 0 && errno != EINTR) {
            return false;
        }
    }
    errno = ETIMEDOUT;
    return false;
}

/* -1 with errno. */
static int connect_to(const struct addrinfo *to)
{
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                    0);
    int problem = 0;
    socklen_t length = sizeof(problem);

    if (fd < 0) {
        return -1;
    }
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0) {
        problem = errno;
    }
    if (problem == EINPROGRESS) {
        problem = ETIMEDOUT;
        if (socket_wait(fd, POLLOUT, cli_now_ns() + CONNECT_NS, -1)) {
            (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &length);
        }
    }
    if (problem == 0) {
        set_up(fd);
        return fd;
    }
    (void)close(fd);
    errno = problem;
    return -1;
}

int socket_connect(const char *address, char error[CLI_TEXT_MAX])
{
    char host[SOCKET_HOST_MAX];
    char port[SOCKET_PORT_MAX];
    struct addrinfo *found = NULL;
    int fd = -1;

    if (!socket_split(address, host, port, error)) {
        return -1;
    }
    if (host[0] == '\0' || strcmp(port, "0") == 0) {
        (void)refuse(error, address, "to connect takes a host and its port");
        return -1;
    }
    if (!resolve(address, host, port, &found, error)) {
        return -1;
    }
    for (struct addrinfo *at = found; at != NULL && fd < 0; at = at->ai_next) {
        fd = connect_to(at);
    }
    if (fd < 0) {
        (void)snprintf(error, CLI_TEXT_MAX,
                       "cannot connect to %.200s: %s; is 'kvt replay "
                       "--listen' running there?",
                       address, strerror(errno));
    }
    freeaddrinfo(found);
    return fd;
}

int socket_accept(int listener, char error[CLI_TEXT_MAX])
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0) {
        (void)snprintf(error, CLI_TEXT_MAX, "a connection was not taken: %s",
                       strerror(errno));
        return -1;
    }
    set_up(fd);
    return fd;
}

/* An IPv4 connection to a socket for both kinds has an address of IPv6. */
static void unmap(struct sockaddr_storage *address, socklen_t *length)
{
    struct sockaddr_in6 six;
    struct sockaddr_in four = {.sin_family = AF_INET};

    memcpy(&six, address, sizeof(six));
    if (six.sin6_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) {
        return;
    }
    four.sin_port = six.sin6_port;
    memcpy(&four.sin_addr, &six.sin6_addr.s6_addr[12], sizeof(four.sin_addr));
    memcpy(address, &four, sizeof(four));
    *length = sizeof(four);
}

void socket_name(int fd, bool other, char *text, size_t capacity)
{
    struct sockaddr_storage address = {0};
    socklen_t length = sizeof(address);
    char host[80]; /* an IPv6 address with its zone */
    char port[SOCKET_PORT_MAX];
    int rc = other ? getpeername(fd, (struct sockaddr *)&address, &length)
                   : getsockname(fd, (struct sockaddr *)&address, &length);

    if (rc == 0) {
        unmap(&address, &length);
    }
    if (rc != 0 ||
        getnameinfo((struct sockaddr *)&address, length, host, sizeof(host),
                    port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        (void)snprintf(text, capacity, "?");
        return;
    }
    (void)snprintf(text, capacity,
                   address.ss_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host,
                   port);
}
