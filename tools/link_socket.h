/* SPDX-License-Identifier: Apache-2.0 */
/* TCP sockets by name: IPv4, IPv6, host names. All are non-blocking. */
#ifndef KVT_TOOLS_LINK_SOCKET_H
#define KVT_TOOLS_LINK_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli.h"

#define SOCKET_HOST_MAX 256
#define SOCKET_PORT_MAX 32

/*
 * Splits "HOST:PORT", "[IPV6]:PORT" and ":PORT" (an empty host). A bare IPv6
 * address is refused, since its last group would be taken for the port.
 */
bool socket_split(const char *address, char host[SOCKET_HOST_MAX],
                  char port[SOCKET_PORT_MAX], char error[CLI_TEXT_MAX]);

/* -1 with a sentence in `error`; so for all that follow. */
int socket_listen(const char *address, char error[CLI_TEXT_MAX]);
int socket_connect(const char *address, char error[CLI_TEXT_MAX]);

/* A connection that waits; the listener is readable. */
int socket_accept(int listener, char error[CLI_TEXT_MAX]);

/* "10.0.0.1:4711" or "[fd00::1]:4711": our end, or the other. */
void socket_name(int fd, bool other, char *text, size_t capacity);

/* Waits until `events` of poll() or the time. False with ETIMEDOUT when that
 * is over, with EINTR when `signal_fd` (-1: none) has something to be read,
 * which stays there, or with another errno. */
bool socket_wait(int fd, short events, uint64_t deadline_ns, int signal_fd);

#endif /* KVT_TOOLS_LINK_SOCKET_H */
