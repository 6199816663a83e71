/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames on the socket between the coordinator of a replay and one of its
 * nodes (a holder or a fetcher). Both ends are the same program on the same
 * host, so numbers are 64-bit in native order; lengths are checked all the
 * same, since a dying process may leave anything behind.
 *
 *   frame = length of the payload (u32), type (u32), payload
 *
 * Neither end ever waits in a read or write: both can have much to say at the
 * same time, and two full sockets would stop the run.
 */
#ifndef KVT_TOOLS_PROTO_H
#define KVT_TOOLS_PROTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * "n × (…)" is preceded by n. `part` and `request` are the coordinator's
 * handles and come back as they were sent.
 */
enum proto_type {
    /* Coordinator to node. */
    PROTO_CONFIG = 1, /* the fields of struct node_config, in order */
    PROTO_PEER,       /* peer, pool address, metadata bytes */
    PROTO_PEER_DEAD,  /* peer: its process is gone and reaped */
    PROTO_WANT,       /* request, n × id: fetcher, have these blocks */
    PROTO_PREPARE,    /* part, n × id: holder, have these blocks in slots */
    PROTO_UNPIN,      /* n × slot: holder, the slots may be used again */
    PROTO_MOVE,       /* part, peer, n × (own slot, peer's slot) */
    PROTO_LANDED,     /* part, n × (slot, key): fetcher, check these */
    PROTO_AGAIN,      /* n × slot: lost, ask for their blocks again */
    PROTO_DROP,       /* final, n × slot: their blocks do not come; final 0:
                       * the slots are lost */
    PROTO_FINISH,     /* metrics: report; 1: with Prometheus text */

    /* Node to coordinator. */
    PROTO_READY = 64, /* pool address, metadata bytes */
    PROTO_ADDED,      /* peer, path text */
    PROTO_NEED,       /* request, n × (id, slot, attempts) */
    PROTO_PREPARED,   /* part, n × slot */
    PROTO_DONE,       /* part, the fields of struct move_report, in order */
    PROTO_CHECKED,    /* part, wrong blocks, wrong neighbours */
    PROTO_SETTLED,    /* request, the fields of struct fetch_counts */
    PROTO_REPORT,     /* wrong slots and guards, Prometheus text */
    PROTO_ERROR       /* text: the node cannot go on */
};

struct proto_buffer {
    unsigned char *bytes;
    size_t begin; /* of what was not consumed yet */
    size_t end;
    size_t capacity;
};

struct proto {
    int fd; /* a non-blocking stream socket; -1: gone */
    struct proto_buffer in;
    struct proto_buffer out;
    size_t frame; /* where the frame being written begins in out */
};

/* A received frame; `at` moves on with each take. */
struct proto_message {
    uint32_t type;
    const unsigned char *at;
    const unsigned char *end;
    bool damaged; /* a take went past the end: all takes give 0 */
};

void proto_open(struct proto *proto, int fd);
void proto_close(struct proto *proto);

/* Appends a frame to what is to be sent. */
void proto_begin(struct proto *proto, uint32_t type);
void proto_put(struct proto *proto, uint64_t value);
void proto_put_bytes(struct proto *proto, const void *bytes, size_t length);
void proto_end(struct proto *proto);

/* Sends what the socket takes now. False: the other end is gone. */
bool proto_flush(struct proto *proto);

/* Something is left to be sent when the socket is writable again. */
bool proto_unsent(const struct proto *proto);

/* Receives what is there. False: the other end is gone; whole frames that came
 * before can still be taken. */
bool proto_fill(struct proto *proto);

/* Takes the oldest whole frame, valid until the next proto_fill(). 1, or 0
 * when there is none, or -1 when the stream is damaged. */
int proto_next(struct proto *proto, struct proto_message *ret);

uint64_t proto_take(struct proto_message *message);

/* A count of items of `words` numbers each that are really there. */
size_t proto_take_count(struct proto_message *message, size_t words);

/* Bytes with their length; not terminated. */
const void *proto_take_bytes(struct proto_message *message, size_t *ret_length);

/* The same as a string, cut to the capacity. */
void proto_take_text(struct proto_message *message, char *text,
                     size_t capacity);

#endif /* KVT_TOOLS_PROTO_H */
