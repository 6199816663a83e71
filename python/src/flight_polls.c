/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt._kvt._Polled: poll() of kvt.vllm's transport, and how flights end.
 *
 * Most polls find nothing, and an engine makes one in each of its steps. So
 * poll() is one call, and whether anything is in flight makes no difference to
 * it: the peer is found by its name, and then a few words are read.
 *
 * A poll can fail half-way: Python code runs in it, and with it the handlers of
 * signals, and memory can be short. So what kvt_poll() has given is first put
 * where it stays: the number of a flight into one of its peer's lists, or the
 * bare facts into its entry of the table, which takes no memory. It leaves the
 * lists when the answer is made that has it, and goes back into them if that
 * fails.
 */
#include "flights.h"

#include <stddef.h>

/* Polls that do not look at the clock, after one for which it has not ticked. */
#define POLLS_UNASKED 4

enum look { LOOK_FAILED = -1, LOOK_NOTHING, LOOK_ENDED, LOOK_CLOSER };

/* --------------------------------------------------------------- what ended */

int kvtpy_append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);

    Py_XDECREF(item);
    return failed;
}

/* Puts a result where a poll finds it. */
static int enlist(struct flights *flights, struct flight *flight,
                  const struct kvt_result *result)
{
    struct peer *peer = flight->peer;

    if (result->state != KVT_DONE) {
        if (kvtpy_append(peer->odd, kvtpy_result_new(result)) == 0) {
            flight->flags = 0;
            return 0;
        }
    } else if (kvtpy_append(peer->done, PyLong_FromUnsignedLongLong(
                                            result->user_data)) == 0) {
        peer->owed++;
        kvtpy_flight_end(flights, flight);
        return 0;
    }
    flight->state = result->state;
    flight->flags = result->flags;
    peer->unlisted = true;
    return -1;
}

static int take(void *ctx, const struct kvt_result *result)
{
    struct flights *flights = ctx;
    struct flight *flight = kvtpy_flight_find(flights, result->user_data);

    if (flight == NULL || flight->xfer != result->id) {
        return 0; /* forgotten, or not one of ours */
    }
    return enlist(flights, flight, result);
}

/* Those that there was no memory for. */
static int enlist_rest(struct peer *peer)
{
    struct flights *flights = peer->flights;
    size_t i = 0;

    peer->unlisted = false;
    while (i < flights->capacity) {
        struct flight *flight = &flights->slots[i];
        struct kvt_result result = {
            .id = flight->xfer,
            .peer = peer->id,
            .user_data = flight->number,
            .op = KVT_OP_WRITE,
            .state = flight->state,
            .flags = flight->flags,
            .code = KVT_ENOMEM,
            .text = "there was no memory to keep the reason",
        };

        if (flight->peer != peer || flight->flags == 0) {
            i++;
        } else if (enlist(flights, flight, &result) != 0) {
            return -1;
        }
    }
    return 0;
}

/* Whether the peer is to be looked at, since it takes no writes. The library
 * takes its lock to answer, which a caller that does nothing but poll would
 * keep from the control thread: so once a tick of the clock, some ms. A caller
 * that has just polled twice within one is let off the clock for a few polls,
 * however late they come. */
static bool is_down(struct peer *peer, kvt_transport *t)
{
    struct timespec now;

    if (peer->unasked > 0) {
        peer->unasked--;
        return false;
    }
    (void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    if (now.tv_nsec == peer->asked.tv_nsec &&
        now.tv_sec == peer->asked.tv_sec) {
        peer->unasked = POLLS_UNASKED;
        return false;
    }
    peer->asked = now;
    return kvt_peer_loaded(t, peer->id) != 1;
}

static enum look look(struct peer *peer)
{
    struct flights *flights = peer->flights;
    kvt_transport *t = kvtpy_get(flights->owner);

    if (t == NULL) {
        return LOOK_FAILED;
    }
    if (peer->count == 0 && !peer->watched) {
        return LOOK_NOTHING;
    }
    kvtpy_log_drain();
    if (kvtpy_drain(kvtpy_self(flights->owner), peer->id, take, flights) != 0 ||
        (peer->unlisted && enlist_rest(peer) != 0)) {
        return LOOK_FAILED;
    }
    if (peer->watched || kvtpy_list_size(peer->odd) > 0) {
        return LOOK_CLOSER;
    }
    if (peer->owed > 0) {
        return LOOK_ENDED;
    }
    if (is_down(peer, t)) {
        peer->watched = true; /* until it has been looked at */
        return LOOK_CLOSER;
    }
    return LOOK_NOTHING;
}

PyObject *kvtpy_peer_look_at(PyObject *self, PyObject *unused)
{
    enum look found = look(peer_of(self));

    (void)unused;
    return found == LOOK_FAILED ? NULL : PyBool_FromLong(found == LOOK_CLOSER);
}

/* ------------------------------------------------------------ the answer */

/* What a peer owed when the answer was begun. */
struct owed {
    struct peer *peer;
    PyObject *done;
    PyObject *failed;
    Py_ssize_t count;
};

static void count_off(struct peer *peer, Py_ssize_t count)
{
    peer->count -= count;
    peer->flights->count -= count;
}

int kvtpy_peer_drop_owed(struct peer *peer)
{
    count_off(peer, peer->owed);
    peer->owed = 0;
    peer->unlisted = false;
    return PyList_SetSlice(peer->done, 0, PyList_Size(peer->done), NULL) != 0 ||
                   PyList_SetSlice(peer->failed, 0, PyList_Size(peer->failed),
                                   NULL) != 0 ||
                   PyList_SetSlice(peer->odd, 0, PyList_Size(peer->odd),
                                   NULL) != 0
               ? -1
               : 0;
}

/* From now on nobody else reports it. */
static int detach(struct peer *peer, struct owed *ret)
{
    PyObject *done = PyList_New(0);
    PyObject *failed = PyList_New(0);

    if (done == NULL || failed == NULL) {
        Py_XDECREF(done);
        Py_XDECREF(failed);
        return -1;
    }
    Py_INCREF((PyObject *)peer);
    *ret = (struct owed){peer, peer->done, peer->failed, peer->owed};
    peer->done = done;
    peer->failed = failed;
    peer->owed = 0;
    return 0;
}

/* Others may have ended meanwhile. */
static void put_back(PyObject **list, PyObject *former)
{
    PyObject *later = *list;

    Py_INCREF(former);
    *list = former;
    if (PyList_SetSlice(former, PyList_Size(former), PyList_Size(former),
                        later) != 0) {
        PyErr_WriteUnraisable(NULL);
    }
    Py_DECREF(later);
}

static void give_back(const struct owed *owed)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    put_back(&owed->peer->done, owed->done);
    put_back(&owed->peer->failed, owed->failed);
    owed->peer->owed += owed->count;
    PyErr_Restore(type, value, traceback);
}

/* One list of all, or () where there is none; takes the first one over. */
static PyObject *join(PyObject *so_far, PyObject *list)
{
    if (PyList_Size(list) == 0) {
        return so_far;
    }
    if (PyTuple_Check(so_far)) {
        Py_DECREF(so_far);
        return PyList_GetSlice(list, 0, PyList_Size(list));
    }
    if (PyList_SetSlice(so_far, PyList_Size(so_far), PyList_Size(so_far),
                        list) != 0) {
        Py_CLEAR(so_far);
    }
    return so_far;
}

static PyObject *make_answer(const struct flights *flights,
                             const struct owed *owed, size_t count)
{
    PyObject *done = PyTuple_New(0);
    PyObject *failed = PyTuple_New(0);
    PyObject *answer = NULL;

    for (size_t i = 0; i < count && done != NULL && failed != NULL; i++) {
        done = join(done, owed[i].done);
        failed = join(failed, owed[i].failed);
    }
    if (done != NULL && failed != NULL) {
        answer = PyObject_CallFunctionObjArgs(
            (PyObject *)Py_TYPE(flights->nothing), done, failed, NULL);
    }
    /* A handler that is due would throw the answer away when we return. */
    if (answer != NULL && PyErr_CheckSignals() != 0) {
        Py_CLEAR(answer);
    }
    Py_XDECREF(done);
    Py_XDECREF(failed);
    return answer;
}

static PyObject *nothing(const struct flights *flights)
{
    Py_INCREF(flights->nothing);
    return flights->nothing;
}

/* The answer of a poll, of what these owe. There is room for `count`. */
static PyObject *report(const struct flights *flights,
                        struct peer *const *peers, size_t count,
                        struct owed *owed)
{
    PyObject *answer = NULL;
    size_t found = 0;
    bool failed = false;

    for (size_t i = 0; i < count && !failed; i++) {
        if (peers[i]->owed > 0) {
            failed = detach(peers[i], &owed[found]) != 0;
            found += failed ? 0 : 1;
        }
    }
    if (!failed) {
        answer = found == 0 ? nothing(flights)
                            : make_answer(flights, owed, found);
    }
    for (size_t i = 0; i < found; i++) {
        if (answer == NULL) {
            give_back(&owed[i]);
        } else {
            count_off(owed[i].peer, owed[i].count);
        }
        Py_DECREF(owed[i].done);
        Py_DECREF(owed[i].failed);
        Py_DECREF((PyObject *)owed[i].peer);
    }
    return answer;
}

static PyObject *report_one(struct peer *peer)
{
    struct owed owed;

    return report(peer->flights, &peer, 1, &owed);
}

/* `peers` is a list of them. */
static PyObject *report_all(const struct flights *flights, PyObject *list)
{
    size_t count = (size_t)PyList_Size(list);
    struct peer **peers = PyMem_Calloc(count + 1, sizeof *peers);
    struct owed *owed = PyMem_Calloc(count + 1, sizeof *owed);
    PyObject *answer = NULL;
    size_t found = 0;

    while (peers != NULL && owed != NULL && found < count) {
        PyObject *peer = PyList_GetItem(list, (Py_ssize_t)found);

        if (!PyObject_TypeCheck(peer, kvtpy_peer_type)) {
            break;
        }
        peers[found++] = peer_of(peer);
    }
    if (peers == NULL || owed == NULL) {
        PyErr_NoMemory();
    } else if (found < count) {
        PyErr_SetString(PyExc_TypeError, "_look_closer() gave another thing");
    } else {
        answer = report(flights, peers, count, owed);
    }
    PyMem_Free(peers);
    PyMem_Free(owed);
    return answer;
}

/* ---------------------------------------------------------------- the type */

struct polled {
    PyObject_HEAD struct flights *flights; /* a reference, or NULL */
};

static struct polled *polled_of(PyObject *object)
{
    return (struct polled *)(void *)object;
}

/* The way of all that is not plain: under the lock of the transport. */
static PyObject *poll_closer(PyObject *self, PyObject *name)
{
    struct flights *flights = polled_of(self)->flights;
    PyObject *answer = NULL;
    PyObject *peers;

    Py_INCREF((PyObject *)flights);
    peers = PyObject_CallMethod(self, "_look_closer", "(O)",
                                name == NULL ? Py_None : name);
    if (peers != NULL && PyList_Check(peers)) {
        answer = report_all(flights, peers);
    } else if (peers != NULL) {
        PyErr_SetString(PyExc_TypeError, "_look_closer() gave no list");
    }
    Py_XDECREF(peers);
    Py_DECREF((PyObject *)flights);
    return answer;
}

/* Of a peer that nobody took the place of. */
static PyObject *poll_peer(PyObject *self, PyObject *name, struct peer *peer)
{
    PyObject *answer = NULL;

    if (peer->count == 0 &&
        (!peer->watched || polled_of(self)->flights->count == 0)) {
        return nothing(peer->flights);
    }
    Py_INCREF((PyObject *)peer);
    switch (look(peer)) {
    case LOOK_FAILED:
        break;
    case LOOK_NOTHING:
        answer = nothing(peer->flights);
        break;
    case LOOK_ENDED:
        answer = report_one(peer);
        break;
    case LOOK_CLOSER:
        answer = poll_closer(self, name);
        break;
    }
    Py_DECREF((PyObject *)peer);
    return answer;
}

static PyObject *poll(PyObject *self, PyObject *const *args, Py_ssize_t count,
                      PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "poll", 1, 0, 1, {"peer_id"}};
    const struct flights *flights = polled_of(self)->flights;
    PyObject *name = NULL;
    PyObject *peer;

    if (kvtpy_args(&signature, args, count, names, &name) != 0) {
        return NULL;
    }
    if (flights == NULL) {
        return PyObject_GetAttrString(self, "_NOTHING");
    }
    if (PyDict_Size(flights->replaced) > 0) {
        return poll_closer(self, name);
    }
    if (name == NULL) {
        return flights->count == 0 ? nothing(flights) : poll_closer(self, name);
    }
    peer = PyDict_GetItemWithError(flights->peers, name);
    if (peer != NULL && PyObject_TypeCheck(peer, kvtpy_peer_type)) {
        return poll_peer(self, name, peer_of(peer));
    }
    return PyErr_Occurred() == NULL ? nothing(flights) : NULL;
}

static PyObject *get_flights(PyObject *self, void *unused)
{
    PyObject *flights = (PyObject *)polled_of(self)->flights;

    (void)unused;
    if (flights == NULL) {
        Py_RETURN_NONE;
    }
    Py_INCREF(flights);
    return flights;
}

static int set_flights(PyObject *self, PyObject *value, void *unused)
{
    PyObject *former = (PyObject *)polled_of(self)->flights;

    (void)unused;
    if (value == Py_None) {
        value = NULL;
    } else if (value == NULL ||
               !PyObject_TypeCheck(value, kvtpy_flights_type)) {
        PyErr_SetString(PyExc_TypeError, "_flights are _Flights, or None");
        return -1;
    }
    Py_XINCREF(value);
    polled_of(self)->flights = value == NULL ? NULL : flights_of(value);
    Py_XDECREF(former);
    return 0;
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)polled_of(self)->flights);
    return 0;
}

static int clear(PyObject *self)
{
    return set_flights(self, Py_None, NULL);
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    (void)clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyGetSetDef properties[] = {
    {"_flights", get_flights, set_flights, "None where nothing is open.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef methods[] = {
    {"poll", (PyCFunction)(void (*)(void))poll, METH_FASTCALL | METH_KEYWORDS,
     "poll($self, /, peer_id=None)\n--\n\n"
     "The transfers, of one peer or of all, that ended since the last poll:\n"
     "done, or failed with nothing of them under way any more."},
    {NULL, NULL, 0, NULL}};

static const char doc[] =
    "poll() for a class that has a method _look_closer(peer_id), which gives\n"
    "the list of peers to report of, and the answer _NOTHING.";

int kvtpy_polled_init(PyObject *module)
{
    static PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                                  {Py_tp_dealloc, dealloc},
                                  {Py_tp_traverse, traverse},
                                  {Py_tp_clear, clear},
                                  {Py_tp_getset, properties},
                                  {Py_tp_methods, methods},
                                  {0, NULL}};
    static PyType_Spec spec = {
        .name = "kvt._kvt._Polled",
        .basicsize = sizeof(struct polled),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = slots};
    static PyTypeObject *type;

    return kvtpy_add_type(module, &spec, &type);
}
