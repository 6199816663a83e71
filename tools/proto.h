/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames on the socket between the coordinator of a replay and one of its
 * nodes (a holder or a fetcher). Both ends are the same program, and where they
 * are on two hosts the hello of link.h has made sure of that and of the byte
 * order; so numbers are 64-bit in native order. Lengths are checked all the
 * same, since a dying process, or a stranger, may send anything.
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
    PROTO_PEER_DEAD,  /* peer, proven: its process is gone and reaped; proven
                       * 0: it is out of reach and may still be alive */
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

/* Longest payload between processes of one host, and of a node behind a link,
 * where a stranger may have written it: metadata of many regions, Prometheus
 * text, and the block lists of a pool stay far below both. */
#define PROTO_PAYLOAD_MAX ((size_t)1 << 30)
#define PROTO_PAYLOAD_MAX_REMOTE ((size_t)1 << 26)

struct proto {
    int fd;             /* a non-blocking stream socket; -1: gone */
    size_t payload_max; /* a longer frame than this is damage */
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

/* fd -1: others move the bytes of the two buffers. */
void proto_open(struct proto *proto, int fd, size_t payload_max);
void proto_close(struct proto *proto);

/* Appends a frame to what is to be sent. */
void proto_begin(struct proto *proto, uint32_t type);
void proto_put(struct proto *proto, uint64_t value);
void proto_put_bytes(struct proto *proto, const void *bytes, size_t length);
void proto_end(struct proto *proto);

/* Sends what the socket takes now. False: the other end is gone. */
bool proto_flush(struct proto *proto);

/* Tells the other end that nothing more comes; it can still answer. */
void proto_shut(struct proto *proto);

/* Something is left to be sent when the socket is writable again. */
bool proto_unsent(const struct proto *proto);

/* Receives what is there, up to 1 MiB, so that a fast sender cannot keep the
 * reader here. False: the other end is gone; whole frames that came before can
 * still be taken. */
bool proto_fill(struct proto *proto);

/* Moves bytes into a buffer by hand, where there is no socket. */
void proto_append(struct proto_buffer *buffer, const void *bytes,
                  size_t length);

/* Takes the oldest whole frame, valid until the next proto_fill(). 1, or 0
 * when there is none, or -1 when the stream is damaged. */
int proto_next(struct proto *proto, struct proto_message *ret);

uint64_t proto_take(struct proto_message *message);

/* A count of items of `words` numbers each that are really there. */
size_t proto_take_count(struct proto_message *message, size_t words);

/* Bytes with their length; not terminated. */
const void *proto_take_bytes(struct proto_message *message, size_t *ret_length);

/* The same as a string to be shown, cut to the capacity and made plain. */
void proto_take_text(struct proto_message *message, char *text,
                     size_t capacity);

#endif /* KVT_TOOLS_PROTO_H */
