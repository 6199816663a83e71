/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt._kvt._Flights and _Peer: the transfers that kvt.vllm has started and not
 * reported yet, and the two calls of it that an engine makes all the time.
 *
 * A flight is in the table from the call that starts it until it is reported or
 * forgotten: our number for it, which is the transfer's user_data, kvt's id,
 * and its peer. What goes as it should ends here; a peer whose transfers or
 * link do not is left to kvt/vllm/_flights.py.
 *
 * All under the GIL, and no call here releases it: so a transfer and its entry
 * come and go in one step, and no lock is needed. A write of a million indices
 * keeps other threads waiting for some milliseconds, which is what the
 * interpreter gives a thread at a time anyway.
 */
#include "kvtpy.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>
#include <time.h>

#define SLOTS_MIN 64

struct peer;

struct flight {
    uint64_t number;
    kvt_xfer xfer;
    struct peer *peer; /* a reference; NULL: a free slot */
};

/* Numbers follow each other, so that their lowest bits are a hash without
 * collisions until old ones remain; then the next free slot is taken. */
struct flights {
    PyObject_HEAD PyObject *owner; /* the transport */
    kvt_layout layout;             /* our blocks */
    uint64_t next;                 /* the next number */
    struct flight *slots;
    size_t capacity; /* a power of 2, or 0 */
    Py_ssize_t count;
};

struct peer {
    PyObject_HEAD struct flights *flights; /* a reference */
    kvt_peer id;
    kvt_layout layout;     /* its blocks */
    Py_ssize_t count;      /* of its flights */
    struct timespec asked; /* when poll() last asked about the link */
    char closed;           /* takes no more writes */
    char watched;          /* each poll is to be looked at */
};

static PyTypeObject *flights_type;
static PyTypeObject *peer_type;

static struct flights *flights_of(PyObject *object)
{
    return (struct flights *)(void *)object;
}

static struct peer *peer_of(PyObject *object)
{
    return (struct peer *)(void *)object;
}

/* --------------------------------------------------------------- the table */

static struct flight *find(const struct flights *flights, uint64_t number)
{
    size_t mask = flights->capacity - 1;

    if (flights->count == 0) {
        return NULL;
    }
    for (size_t i = number & mask; flights->slots[i].peer != NULL;
         i = (i + 1) & mask) {
        if (flights->slots[i].number == number) {
            return &flights->slots[i];
        }
    }
    return NULL;
}

/* There is room. */
static void enter(struct flights *flights, const struct flight *flight)
{
    size_t mask = flights->capacity - 1;
    size_t i = flight->number & mask;

    while (flights->slots[i].peer != NULL) {
        i = (i + 1) & mask;
    }
    flights->slots[i] = *flight;
}

/* Room for one more, and a quarter of the slots free. */
static int reserve(struct flights *flights)
{
    struct flight *old = flights->slots;
    size_t old_capacity = flights->capacity;
    size_t capacity = old_capacity == 0 ? SLOTS_MIN : old_capacity * 2;

    if ((size_t)flights->count + 1 <= old_capacity - old_capacity / 4) {
        return 0;
    }
    flights->slots = calloc(capacity, sizeof *old);
    if (flights->slots == NULL) {
        flights->slots = old;
        PyErr_NoMemory();
        return -1;
    }
    flights->capacity = capacity;
    for (size_t i = 0; i < old_capacity; i++) {
        if (old[i].peer != NULL) {
            enter(flights, &old[i]);
        }
    }
    free(old);
    return 0;
}

/* The peer's reference may be the last. */
static void forget(struct flights *flights, struct flight *flight)
{
    struct flight *slots = flights->slots;
    size_t mask = flights->capacity - 1;
    size_t hole = (size_t)(flight - slots);
    struct peer *peer = flight->peer;

    /* find() stops at a free slot, so those behind it that began their search
     * before it move up. */
    for (size_t i = (hole + 1) & mask; slots[i].peer != NULL;
         i = (i + 1) & mask) {
        if (((i - slots[i].number) & mask) >= ((i - hole) & mask)) {
            slots[hole] = slots[i];
            hole = i;
        }
    }
    slots[hole].peer = NULL;
    flights->count--;
    peer->count--;
    Py_DECREF((PyObject *)peer);
}

/* ------------------------------------------------------------------ writes */

/* Starts a transfer and enters it: its number. */
static PyObject *start(struct peer *peer, const struct kvt_indices *local,
                       const struct kvt_indices *remote)
{
    struct flights *flights = peer->flights;
    kvt_transport *t = kvtpy_get(flights->owner);
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .user_data = flights->next};
    struct flight flight = {.number = flights->next, .peer = peer};
    struct kvt_error err = {.text = ""};
    PyObject *number;
    int code;

    if (t == NULL || reserve(flights) != 0) {
        return NULL;
    }
    if (peer->closed) {
        return kvtpy_raise_text(KVT_ENOENT,
                                "the peer was removed or registered again");
    }
    number = PyLong_FromUnsignedLongLong(flights->next);
    if (number == NULL) {
        return NULL;
    }
    code = kvt_write_blocks(t, peer->id, flights->layout, local, peer->layout,
                            remote, &options, &flight.xfer, &err);
    if (code != KVT_OK) {
        Py_DECREF(number);
        return kvtpy_raise(code, &err);
    }
    Py_INCREF((PyObject *)peer);
    enter(flights, &flight);
    flights->next++;
    flights->count++;
    peer->count++;
    return number;
}

static PyObject *write_blocks(PyObject *self, PyObject *const *args,
                              Py_ssize_t count)
{
    struct kvtpy_indices local;
    struct kvtpy_indices remote;
    PyObject *number = NULL;

    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "write() takes local and remote");
        return NULL;
    }
    kvtpy_indices_init(&local);
    kvtpy_indices_init(&remote);
    /* An index written in Python may do anything, so these come first. */
    if (kvtpy_indices(args[0], "local", &local) == 0 &&
        kvtpy_indices(args[1], "remote", &remote) == 0) {
        number = start(peer_of(self), &local.indices, &remote.indices);
    }
    kvtpy_indices_fini(&local);
    kvtpy_indices_fini(&remote);
    return number;
}

/* ------------------------------------------------------------------- polls */

struct ended {
    struct flights *flights;
    PyObject *done; /* list of numbers, or NULL while empty, as is... */
    PyObject *odd;  /* ...list of Result */
};

static int append(PyObject **list, PyObject *item)
{
    int failed = -1;

    if (item == NULL) {
        return -1;
    }
    if (*list == NULL) {
        *list = PyList_New(0);
    }
    if (*list != NULL) {
        failed = PyList_Append(*list, item);
    }
    Py_DECREF(item);
    return failed;
}

static int take(void *ctx, const struct kvt_result *result)
{
    struct ended *ended = ctx;
    struct flight *flight = find(ended->flights, result->user_data);

    if (flight == NULL || flight->xfer != result->id) {
        return 0; /* forgotten, or not one of ours */
    }
    if (result->state != KVT_DONE) {
        return append(&ended->odd, kvtpy_result_new(result));
    }
    forget(ended->flights, flight);
    return append(&ended->done, PyLong_FromUnsignedLongLong(result->user_data));
}

/* The two lists; takes them over. */
static PyObject *pair(struct ended *ended)
{
    PyObject *done = ended->done == NULL ? PyList_New(0) : ended->done;
    PyObject *odd = ended->odd == NULL ? PyList_New(0) : ended->odd;
    PyObject *both = NULL;

    if (done != NULL && odd != NULL) {
        both = PyTuple_Pack(2, done, odd);
    }
    Py_XDECREF(done);
    Py_XDECREF(odd);
    return both;
}

/* Whether the peer is to be looked at, since it takes no writes. The library
 * takes its lock to answer, which a caller that does nothing but poll would
 * keep from the control thread: so once a tick of the clock, some ms. */
static bool is_down(struct peer *peer, kvt_transport *t)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    if (now.tv_nsec == peer->asked.tv_nsec &&
        now.tv_sec == peer->asked.tv_sec) {
        return false;
    }
    peer->asked = now;
    return kvt_peer_loaded(t, peer->id) != 1;
}

static PyObject *poll_flights(PyObject *self, PyObject *unused)
{
    struct peer *peer = peer_of(self);
    struct ended ended = {.flights = peer->flights};
    kvt_transport *t = kvtpy_get(ended.flights->owner);

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    if (peer->count == 0 && !peer->watched) {
        Py_RETURN_NONE;
    }
    kvtpy_log_drain();
    if (kvtpy_drain(kvtpy_self(ended.flights->owner), peer->id, take, &ended) !=
        0) {
        Py_XDECREF(ended.done);
        Py_XDECREF(ended.odd);
        return NULL;
    }
    if (ended.odd != NULL || peer->watched ||
        (ended.done == NULL && is_down(peer, t))) {
        return pair(&ended);
    }
    if (ended.done != NULL) {
        return ended.done;
    }
    Py_RETURN_NONE;
}

/* ------------------------------------------------------- looking closer */

/* The flight of a number, which may be any object, or NULL without an error. */
static struct flight *find_object(const struct flights *flights,
                                  PyObject *object)
{
    PyObject *number = PyNumber_Index(object);
    unsigned long long value;
    struct flight *flight = NULL;

    if (number != NULL) {
        value = PyLong_AsUnsignedLongLong(number);
        if (PyErr_Occurred() == NULL) {
            flight = find(flights, value);
        }
        Py_DECREF(number);
    }
    PyErr_Clear();
    return flight;
}

static PyObject *find_flight(PyObject *self, PyObject *object)
{
    const struct flight *flight = find_object(flights_of(self), object);

    if (flight == NULL) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(OK)", (PyObject *)flight->peer,
                         (unsigned long long)flight->xfer);
}

static PyObject *forget_flight(PyObject *self, PyObject *object)
{
    struct flight *flight = find_object(flights_of(self), object);

    if (flight == NULL) {
        Py_RETURN_FALSE;
    }
    forget(flights_of(self), flight);
    Py_RETURN_TRUE;
}

/* Forgets a peer's flights: numbers and ids to `ret`. */
static size_t clear_peer(struct peer *peer, uint64_t *ret)
{
    struct flights *flights = peer->flights;
    size_t count = 0;
    size_t i = 0;

    while (i < flights->capacity && peer->count > 0) {
        struct flight *flight = &flights->slots[i];

        if (flight->peer != peer) {
            i++;
            continue;
        }
        ret[count++] = flight->number;
        ret[count++] = flight->xfer;
        forget(flights, flight); /* another one may have moved up to here */
    }
    return count / 2;
}

static PyObject *clear(PyObject *self, PyObject *unused)
{
    struct peer *peer = peer_of(self);
    PyObject *list = PyList_New(0);
    uint64_t *found;
    size_t count;

    (void)unused;
    if (list == NULL) {
        return NULL;
    }
    found = calloc((size_t)peer->count + 1, 2 * sizeof *found);
    if (found == NULL) {
        Py_DECREF(list);
        return PyErr_NoMemory();
    }
    count = clear_peer(peer, found);
    for (size_t i = 0; i < count && list != NULL; i++) {
        if (append(&list, Py_BuildValue("(KK)", found[2 * i],
                                        found[2 * i + 1])) != 0) {
            Py_CLEAR(list);
        }
    }
    free(found);
    return list;
}

/* --------------------------------------------------------------- the types */

static PyObject *new_flights(PyTypeObject *type, PyObject *args,
                             PyObject *keywords)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    unsigned long long layout;
    PyObject *more; /* for the __init__() of the class in Python */
    PyObject *owner;
    PyObject *self;

    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!K|O:_Flights", kvtpy_transport_type, &owner,
                          &layout, &more)) {
        return NULL;
    }
    self = alloc(type, 0);
    if (self != NULL) {
        Py_INCREF(owner);
        flights_of(self)->owner = owner;
        flights_of(self)->layout = layout;
    }
    return self;
}

static int traverse_flights(PyObject *self, visitproc visit, void *arg)
{
    struct flights *flights = flights_of(self);

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(flights->owner);
    for (size_t i = 0; i < flights->capacity; i++) {
        Py_VISIT((PyObject *)flights->slots[i].peer);
    }
    return 0;
}

static int clear_flights(PyObject *self)
{
    struct flights *flights = flights_of(self);

    for (size_t i = 0; i < flights->capacity; i++) {
        while (flights->slots[i].peer != NULL) {
            forget(flights, &flights->slots[i]);
        }
    }
    return 0;
}

static void dealloc_flights(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    (void)clear_flights(self);
    free(flights_of(self)->slots);
    Py_CLEAR(flights_of(self)->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *new_peer(PyTypeObject *type, PyObject *args,
                          PyObject *keywords)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    unsigned long long id;
    unsigned long long layout;
    PyObject *flights;
    PyObject *more; /* as above */
    PyObject *self;

    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!KK|O:_Peer", flights_type, &flights, &id,
                          &layout, &more)) {
        return NULL;
    }
    self = alloc(type, 0);
    if (self != NULL) {
        Py_INCREF(flights);
        peer_of(self)->flights = flights_of(flights);
        peer_of(self)->id = id;
        peer_of(self)->layout = layout;
    }
    return self;
}

/* Without a tp_clear: that of the flights breaks each cycle. */
static int traverse_peer(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)peer_of(self)->flights);
    return 0;
}

static void dealloc_peer(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    Py_DECREF((PyObject *)peer_of(self)->flights);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef flights_members[] = {
    {"count", T_PYSSIZET, (Py_ssize_t)offsetof(struct flights, count), READONLY,
     "Of all peers' flights."},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef flights_methods[] = {
    {"find", find_flight, METH_O,
     "find($self, number, /)\n--\n\n(peer, transfer), or None."},
    {"forget", forget_flight, METH_O,
     "forget($self, number, /)\n--\n\nWhether it was there."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef peer_members[] = {
#define AT(field) (Py_ssize_t) offsetof(struct peer, field)
    {"id", T_ULONGLONG, AT(id), READONLY, "kvt's."},
    {"count", T_PYSSIZET, AT(count), READONLY, "Of its flights."},
    {"closed", T_BOOL, AT(closed), 0, "Whether it takes no more writes."},
    {"watched", T_BOOL, AT(watched), 0,
     "Whether poll() gives both lists each time."},
#undef AT
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef peer_methods[] = {
    {"write", (PyCFunction)(void (*)(void))write_blocks, METH_FASTCALL,
     "write($self, local, remote, /)\n--\n\n"
     "Starts to write blocks: the flight's number."},
    {"poll", poll_flights, METH_NOARGS,
     "poll($self, /)\n--\n\n"
     "What ended since the last poll. None if nothing did; a list of numbers\n"
     "if all of it is done; else, or if the peer takes no writes, a pair: the\n"
     "list, and one of the Results of flights that are not done. Those are\n"
     "not forgotten."},
    {"clear", clear, METH_NOARGS,
     "clear($self, /)\n--\n\n"
     "Forgets the peer's flights: a list of (number, transfer)."},
    {NULL, NULL, 0, NULL}};

static const char flights_doc[] =
    "_Flights(transport, layout): transfers that are not reported yet.";
static const char peer_doc[] =
    "_Peer(flights, id, layout): one registration that can be written to.";

int kvtpy_flights_init(PyObject *module)
{
    static PyType_Slot flights_slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)flights_doc},
        {Py_tp_new, new_flights},
        {Py_tp_dealloc, dealloc_flights},
        {Py_tp_traverse, traverse_flights},
        {Py_tp_clear, clear_flights},
        {Py_tp_members, flights_members},
        {Py_tp_methods, flights_methods},
        {0, NULL}};
    static PyType_Slot peer_slots[] = {{Py_tp_doc, (void *)(uintptr_t)peer_doc},
                                       {Py_tp_new, new_peer},
                                       {Py_tp_dealloc, dealloc_peer},
                                       {Py_tp_traverse, traverse_peer},
                                       {Py_tp_members, peer_members},
                                       {Py_tp_methods, peer_methods},
                                       {0, NULL}};
    static PyType_Spec flights_spec = {
        .name = "kvt._kvt._Flights",
        .basicsize = sizeof(struct flights),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = flights_slots};
    static PyType_Spec peer_spec = {
        .name = "kvt._kvt._Peer",
        .basicsize = sizeof(struct peer),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = peer_slots};

    return kvtpy_add_type(module, &flights_spec, &flights_type) != 0
               ? -1
               : kvtpy_add_type(module, &peer_spec, &peer_type);
}
