/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one TCP connection between the two sides of a replay across hosts: the
 * listening side runs the holders, the connecting side has the trace, the
 * fetchers and the coordinator.
 *
 *   connect side                             listen side
 *   hello --------------------------------> hello
 *         <-------------------------------- OFFER: what holders there can be
 *   START --------------------------------> starts them
 *   BYTES <-------------------------------> BYTES: each holder's own stream of
 *                                           frames (proto.h), cut anywhere
 *   KILL, END ----------------------------> kills one, ends all in order
 *         <-------------------------------- GONE: one has ended and is reaped
 *
 * The hello has the same length and the same first fields in every version, so
 * that any two can tell each other apart. After it come frames of proto.h, none
 * longer than LINK_PAYLOAD_MAX. Both sides speak at least every few seconds; a
 * side that is silent for LINK_SILENCE_S counts as gone, which also covers a
 * host that lost its power or its cable.
 *
 * Nothing is encrypted and nobody is asked for a password, as with the engines
 * themselves: it is for networks whose users are trusted.
 */
#ifndef KVT_TOOLS_LINK_H
#define KVT_TOOLS_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cli.h"
#include "geometry.h"
#include "proto.h"

#define LINK_ADDRESS_TEXT 96
#define LINK_PAYLOAD_MAX ((size_t)1 << 17)
#define LINK_SILENCE_S 30u

/* Nodes of one run, both sides together. */
#define LINK_NODES_MAX 256u

enum link_type {
    LINK_OFFER = 1, /* the fields of struct link_offer */
    LINK_START,     /* the fields of struct link_start */
    LINK_REFUSE,    /* text: the run does not take place, or not go on */
    LINK_BYTES,     /* holder, bytes of its stream */
    LINK_KILL,      /* holder: SIGKILL */
    LINK_END,       /* close every holder's stream: they end by themselves */
    LINK_GONE,      /* holder, signalled, signal or exit status */
    LINK_PING       /* nothing */
};

#define LINK_ENGINE_TEXT 240

/* What the listening side has. */
struct link_offer {
    uint64_t holders;
    uint64_t memory;          /* bytes for the pool of each */
    uint64_t no_same_host;    /* its transports take no shortcut */
    struct geometry geometry; /* no regions: any will do */
    char engine[LINK_ENGINE_TEXT];
};

/* What the connecting side wants of it. */
struct link_start {
    uint64_t fetchers;
    uint64_t pull;
    uint64_t requests;
    uint64_t timeout_ns;
    uint64_t slots;
    struct geometry geometry;
    uint64_t secrets[LINK_NODES_MAX]; /* of the holders */
};

struct link {
    struct proto proto;            /* fd -1: there is none, or it is gone */
    char other[LINK_ADDRESS_TEXT]; /* "[fd00::1]:4711" */
    int signal_fd;                 /* ends every wait when readable; -1: none */
    uint64_t heard_ns;
    uint64_t spoke_ns;
};

/*
 * Listens on "HOST:PORT", "[IPV6]:PORT" or, on every address, ":PORT"; port 0
 * takes a free one. Returns the socket, with its address in `bound`, or -1 with
 * a sentence in `error`.
 */
int link_listen(const char *address, char bound[LINK_ADDRESS_TEXT],
                char error[CLI_TEXT_MAX]);

/* Takes a connection that waits and exchanges hellos. Once `signal_fd` (-1:
 * none) can be read, neither this nor link_expect() waits any longer: that is
 * an error like others. */
bool link_accept(int listener, int signal_fd, struct link *ret,
                 char error[CLI_TEXT_MAX]);

/* Connects and exchanges hellos. A signal has to end the process by itself. */
bool link_connect(const char *address, struct link *ret,
                  char error[CLI_TEXT_MAX]);

void link_close(struct link *link);

bool link_is_open(const struct link *link);

/* Waits, bounded, for one frame of this type; a refusal is an error too. */
bool link_expect(struct link *link, enum link_type type,
                 struct proto_message *ret, char error[CLI_TEXT_MAX]);

/* Frames with what is in the buffer, which is empty afterwards. */
void link_carry(struct link *link, uint64_t holder, struct proto_buffer *from);

/* Says why, if there is something to say, and closes so that what was sent
 * arrives. Waits for a moment at most. */
void link_leave(struct link *link, const char *why);

/* Sends what can be sent, a ping included when it is time. False: it is gone,
 * or has been silent for too long; `error` says which. */
bool link_turn(struct link *link, char error[CLI_TEXT_MAX]);

/* Receives what is there. False as above; whole frames can still be taken. */
bool link_fill(struct link *link, char error[CLI_TEXT_MAX]);

/* How long poll() may sleep before link_turn() is due; -1: for ever. */
int link_wait_ms(const struct link *link);

void link_offer_put(struct link *link, const struct link_offer *offer);
void link_offer_take(struct proto_message *message, struct link_offer *ret);
void link_start_put(struct link *link, const struct link_start *start,
                    uint64_t holders);
void link_start_take(struct proto_message *message, uint64_t holders,
                     struct link_start *ret);

#endif /* KVT_TOOLS_LINK_H */
