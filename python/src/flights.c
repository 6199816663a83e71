/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt._kvt._Flights and _Peer: the table of flights, and the call that starts
 * one (flights.h).
 */
#include "flights.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

#define SLOTS_MIN 64

PyTypeObject *kvtpy_flights_type;
PyTypeObject *kvtpy_peer_type;

/* --------------------------------------------------------------- the table */

struct flight *kvtpy_flight_find(const struct flights *flights, uint64_t number)
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

void kvtpy_flight_end(struct flights *flights, struct flight *flight)
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
    Py_DECREF((PyObject *)peer);
}

void kvtpy_flight_forget(struct flights *flights, struct flight *flight)
{
    flights->count--;
    flight->peer->count--;
    kvtpy_flight_end(flights, flight);
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
            flight = kvtpy_flight_find(flights, value);
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
    kvtpy_flight_forget(flights_of(self), flight);
    Py_RETURN_TRUE;
}

static PyObject *fail_flight(PyObject *self, PyObject *object)
{
    struct flights *flights = flights_of(self);
    struct flight *flight = find_object(flights, object);
    uint64_t number;

    if (flight == NULL) {
        Py_RETURN_FALSE;
    }
    number = flight->number;
    if (kvtpy_append(flight->peer->failed,
                     PyLong_FromUnsignedLongLong(number)) != 0) {
        return NULL;
    }
    flight->peer->owed++;
    kvtpy_flight_end(flights, flight);
    Py_RETURN_TRUE;
}

/* A peer's flights, numbers and ids, to `ret`; in one step, as nothing here
 * allocates. */
static size_t gather(struct peer *peer, bool forget, uint64_t *ret)
{
    struct flights *flights = peer->flights;
    size_t count = 0;
    size_t i = 0;

    while (i < flights->capacity) {
        struct flight *flight = &flights->slots[i];

        if (flight->peer != peer) {
            i++;
            continue;
        }
        ret[count++] = flight->number;
        ret[count++] = flight->xfer;
        if (forget) {
            kvtpy_flight_forget(flights, flight); /* another one moves up */
        } else {
            i++;
        }
    }
    return count / 2;
}

static PyObject *list_flights(struct peer *peer, bool forget)
{
    PyObject *list = PyList_New(0);
    uint64_t *found;
    size_t count;

    if (list == NULL) {
        return NULL;
    }
    found = calloc((size_t)peer->count + 1, 2 * sizeof *found);
    if (found == NULL) {
        Py_DECREF(list);
        return PyErr_NoMemory();
    }
    count = gather(peer, forget, found);
    for (size_t i = 0; i < count && list != NULL; i++) {
        if (kvtpy_append(list, Py_BuildValue("(KK)", found[2 * i],
                                             found[2 * i + 1])) != 0) {
            Py_CLEAR(list);
        }
    }
    free(found);
    return list;
}

static PyObject *flying(PyObject *self, PyObject *unused)
{
    (void)unused;
    return list_flights(peer_of(self), false);
}

static PyObject *clear(PyObject *self, PyObject *unused)
{
    (void)unused;
    return kvtpy_peer_drop_owed(peer_of(self)) != 0
               ? NULL
               : list_flights(peer_of(self), true);
}

/* --------------------------------------------------------------- the types */

static PyObject *new_flights(PyTypeObject *type, PyObject *args,
                             PyObject *keywords)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    unsigned long long layout;
    PyObject *nothing;
    PyObject *peers;
    PyObject *more; /* for the __init__() of the class in Python */
    PyObject *owner;
    PyObject *self;

    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!KO!O|O:_Flights", kvtpy_transport_type,
                          &owner, &layout, &PyDict_Type, &peers, &nothing,
                          &more)) {
        return NULL;
    }
    self = alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    Py_INCREF(owner);
    flights_of(self)->owner = owner;
    flights_of(self)->layout = layout;
    Py_INCREF(peers);
    flights_of(self)->peers = peers;
    Py_INCREF(nothing);
    flights_of(self)->nothing = nothing;
    flights_of(self)->replaced = PyDict_New();
    if (flights_of(self)->replaced == NULL) {
        Py_CLEAR(self);
    }
    return self;
}

static int traverse_flights(PyObject *self, visitproc visit, void *arg)
{
    struct flights *flights = flights_of(self);

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(flights->owner);
    Py_VISIT(flights->peers);
    Py_VISIT(flights->replaced);
    Py_VISIT(flights->nothing);
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
            kvtpy_flight_forget(flights, &flights->slots[i]);
        }
    }
    if (flights->replaced != NULL) {
        PyDict_Clear(flights->replaced);
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
    Py_CLEAR(flights_of(self)->peers);
    Py_CLEAR(flights_of(self)->replaced);
    Py_CLEAR(flights_of(self)->nothing);
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
    if (!PyArg_ParseTuple(args, "O!KK|O:_Peer", kvtpy_flights_type, &flights,
                          &id, &layout, &more)) {
        return NULL;
    }
    self = alloc(type, 0);
    if (self != NULL) {
        Py_INCREF(flights);
        peer_of(self)->flights = flights_of(flights);
        peer_of(self)->id = id;
        peer_of(self)->layout = layout;
        peer_of(self)->done = PyList_New(0);
        peer_of(self)->failed = PyList_New(0);
        peer_of(self)->odd = PyList_New(0);
        if (peer_of(self)->done == NULL || peer_of(self)->failed == NULL ||
            peer_of(self)->odd == NULL) {
            Py_CLEAR(self);
        }
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
    struct peer *peer = peer_of(self);

    PyObject_GC_UnTrack(self);
    peer->flights->count -= peer->owed; /* nobody can ask for them any more */
    Py_CLEAR(peer->done);
    Py_CLEAR(peer->failed);
    Py_CLEAR(peer->odd);
    Py_DECREF((PyObject *)peer->flights);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef flights_members[] = {
    {"count", T_PYSSIZET, (Py_ssize_t)offsetof(struct flights, count), READONLY,
     "Of all peers' flights."},
    {"replaced", T_OBJECT_EX, (Py_ssize_t)offsetof(struct flights, replaced),
     READONLY, "Names and lists of peers that others took the place of."},
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef flights_methods[] = {
    {"find", find_flight, METH_O,
     "find($self, number, /)\n--\n\n(peer, transfer), or None."},
    {"forget", forget_flight, METH_O,
     "forget($self, number, /)\n--\n\nWhether it was there."},
    {"fail", fail_flight, METH_O,
     "fail($self, number, /)\n--\n\n"
     "Has it reported as failed: whether it was there."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef peer_members[] = {
#define AT(field) (Py_ssize_t) offsetof(struct peer, field)
    {"id", T_ULONGLONG, AT(id), READONLY, "kvt's."},
    {"count", T_PYSSIZET, AT(count), READONLY, "Of its flights."},
    {"closed", T_BOOL, AT(closed), 0, "Whether it takes no more writes."},
    {"watched", T_BOOL, AT(watched), 0,
     "Whether each poll is to be looked at closer."},
    {"odd", T_OBJECT_EX, AT(odd), READONLY,
     "Results of flights that are not done, to be looked at closer."},
#undef AT
    {NULL, 0, 0, 0, NULL}};

static PyMethodDef peer_methods[] = {
    {"write", (PyCFunction)(void (*)(void))write_blocks, METH_FASTCALL,
     "write($self, local, remote, /)\n--\n\n"
     "Starts to write blocks: the flight's number."},
    {"look", kvtpy_peer_look_at, METH_NOARGS,
     "look($self, /)\n--\n\n"
     "Finds what ended: whether something has to be looked at closer."},
    {"flying", flying, METH_NOARGS,
     "flying($self, /)\n--\n\nIts flights: a list of (number, transfer)."},
    {"clear", clear, METH_NOARGS,
     "clear($self, /)\n--\n\n"
     "Forgets the peer's flights, and what is to be reported of others: a "
     "list\n"
     "of (number, transfer)."},
    {NULL, NULL, 0, NULL}};

static const char flights_doc[] =
    "_Flights(transport, layout, peers, nothing): transfers that are not\n"
    "reported yet. Peers are those of now, by name; nothing is what a poll\n"
    "gives that finds nothing, and its class that of other answers.";
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

    return kvtpy_add_type(module, &flights_spec, &kvtpy_flights_type) != 0
               ? -1
               : kvtpy_add_type(module, &peer_spec, &kvtpy_peer_type);
}
