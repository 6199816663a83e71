/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfers that kvt.vllm has started and not reported yet, and the two
 * calls of it that an engine makes all the time: flights.c starts them,
 * flight_polls.c ends them.
 *
 * A flight is in the table from the call that starts it until it has ended or
 * is forgotten: our number for it, which is the transfer's user_data, kvt's id,
 * and its peer. One that has ended is owed by its peer until a poll reports it.
 * What goes as it should ends here; a peer whose transfers or link do not is
 * left to kvt/vllm/_flights.py.
 *
 * All under the GIL, which a write keeps, and a poll between what it takes from
 * the library and where it puts that: so a transfer and its entry come and go in
 * one step, and no lock is needed. A write of a million indices
 * keeps other threads waiting for some milliseconds, which is what the
 * interpreter gives a thread at a time anyway.
 */
#ifndef KVTPY_FLIGHTS_H
#define KVTPY_FLIGHTS_H

#include "kvtpy.h"

#include <time.h>

struct peer;

struct flight {
    uint64_t number;
    kvt_xfer xfer;
    struct peer *peer; /* a reference; NULL: a free slot */
    /* Of a result that there was no memory to keep, else 0. */
    uint32_t state;
    uint32_t flags;
};

/* Numbers follow each other, so that their lowest bits are a hash without
 * collisions until old ones remain; then the next free slot is taken. */
struct flights {
    PyObject_HEAD PyObject *owner; /* the transport */
    PyObject *peers;               /* dict: name to the peer of now */
    PyObject *replaced;            /* dict: name to a list of peers */
    PyObject *nothing;             /* the answer of a poll that finds nothing */
    kvt_layout layout;             /* our blocks */
    uint64_t next;                 /* the next number */
    struct flight *slots;
    size_t capacity;  /* a power of 2, or 0 */
    Py_ssize_t count; /* in the table or owed */
};

struct peer {
    PyObject_HEAD struct flights *flights; /* a reference */
    kvt_peer id;
    kvt_layout layout;     /* its blocks */
    Py_ssize_t count;      /* of its flights, in the table or owed */
    Py_ssize_t owed;       /* in the two lists that follow */
    PyObject *done;        /* list of numbers */
    PyObject *failed;      /* likewise */
    PyObject *odd;         /* list of Result: their flights are in the table */
    struct timespec asked; /* when poll() last asked about the link */
    unsigned unasked;      /* polls that need not ask */
    char closed;           /* takes no more writes */
    char watched;          /* each poll is to be looked at */
    char unlisted;         /* for want of memory: results in the table */
};

extern PyTypeObject *kvtpy_flights_type;
extern PyTypeObject *kvtpy_peer_type;

static inline struct flights *flights_of(PyObject *object)
{
    return (struct flights *)(void *)object;
}

static inline struct peer *peer_of(PyObject *object)
{
    return (struct peer *)(void *)object;
}

/* Takes the item over, also where it fails; NULL is a failure. */
int kvtpy_append(PyObject *list, PyObject *item);

struct flight *kvtpy_flight_find(const struct flights *flights,
                                 uint64_t number);
/* Out of the table; it may be owed. The peer's reference may be the last. */
void kvtpy_flight_end(struct flights *flights, struct flight *flight);
/* Out of the table, and nothing more of it. */
void kvtpy_flight_forget(struct flights *flights, struct flight *flight);

/* _Peer.look(). */
PyObject *kvtpy_peer_look_at(PyObject *self, PyObject *unused);
/* Reports nothing of what has ended so far. */
int kvtpy_peer_drop_owed(struct peer *peer);

#endif /* KVTPY_FLIGHTS_H */
