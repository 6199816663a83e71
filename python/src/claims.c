/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt._kvt._Claim: that a wait() or wait_async() wants a transfer's result.
 *
 * Whoever drains the library hands a claimed result over to the claim. That
 * allocates nothing and runs no Python code: the Result is made with the claim,
 * the table has no keys, and a thread that sleeps is woken by an eventfd. So a
 * handler of a signal, another thread or a lack of memory can not come between
 * a result and its place; it was lost there once, and the wait never returned.
 * Only an event loop is woken by a callable, after all is in its place.
 *
 * A result is in the claim until `outcome` hands it out. Everything else that
 * can become of a claim, leave() or its end, puts the result among those that
 * poll() gives out. `outcome` is an attribute, since the interpreter looks at
 * signals after a call and would then throw away what the call returned.
 *
 * All under the GIL. Claims that wait are in their transport's table, which
 * does not own them.
 */
#include "kvtpy.h"

#include <errno.h>
#include <stddef.h>
#include <structmember.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* An exception out of a call that wakes a loop is mostly a signal's, and has
 * nothing to do with it: the second try works. */
#define WAKE_TRIES 2

enum state {
    WAITING,   /* in the table */
    DELIVERED, /* `result` is filled */
    ENDED,     /* there will be none: cancelled or released */
    OVER       /* handed out, or left */
};

struct kvtpy_claim {
    PyObject_HEAD struct kvtpy_claim *next; /* in its bucket */
    PyObject *owner;                        /* the transport */
    PyObject *wake;                         /* a callable, or NULL */
    PyObject *result;
    kvt_xfer id;
    enum state state;
    int fd; /* readable once it waits no more, or -1 */
    char has_event;
};

static PyTypeObject *claim_type;

static struct kvtpy_claim *claim_of(PyObject *object)
{
    return (struct kvtpy_claim *)(void *)object;
}

/* Where the pointer to the claim of an id is, or would be. */
static struct kvtpy_claim **slot_of(struct kvtpy_transport *owner, kvt_xfer id)
{
    struct kvtpy_claim **slot = &owner->claims[id % KVTPY_CLAIM_BUCKETS];

    while (*slot != NULL && (*slot)->id != id) {
        slot = &(*slot)->next;
    }
    return slot;
}

static void signal_fd(const struct kvtpy_claim *claim)
{
    uint64_t one = 1;

    while (claim->fd >= 0 && write(claim->fd, &one, sizeof one) < 0 &&
           errno == EINTR) {
    }
}

static void settle(struct kvtpy_claim *claim, enum state state)
{
    struct kvtpy_transport *owner = kvtpy_self(claim->owner);

    if (claim->state == WAITING) {
        *slot_of(owner, claim->id) = claim->next;
        claim->next = NULL;
        owner->settled++;
    }
    claim->state = state;
    signal_fd(claim);
}

/* Ends a claim; a result that nobody took is there for poll(). */
static int leave_claim(struct kvtpy_claim *claim)
{
    bool delivered = claim->state == DELIVERED;
    int failed = 0;

    settle(claim, OVER);
    if (delivered) {
        struct kvtpy_transport *owner = kvtpy_self(claim->owner);

        failed = PyList_Append(owner->kept, claim->result);
        kvtpy_kept_signal(owner);
    }
    Py_CLEAR(claim->wake);
    return failed;
}

/* --------------------------------------------------------- those who drain */

bool kvtpy_claim_deliver(struct kvtpy_transport *owner, kvt_xfer id,
                         const struct kvt_result *result, PyObject **ret_wake)
{
    struct kvtpy_claim *claim = *slot_of(owner, id);

    *ret_wake = NULL;
    if (claim == NULL) {
        return false;
    }
    if (result != NULL) {
        kvtpy_result_set(claim->result, result);
    }
    settle(claim, result != NULL ? DELIVERED : ENDED);
    if (claim->wake != NULL) {
        Py_INCREF((PyObject *)claim);
        *ret_wake = (PyObject *)claim;
    }
    return true;
}

static bool call_wake(struct kvtpy_claim *claim)
{
    PyObject *wake = claim->wake;
    PyObject *answer;

    if (wake == NULL) {
        return true; /* it was left meanwhile */
    }
    Py_INCREF(wake);
    answer = PyObject_CallFunctionObjArgs(wake, NULL);
    Py_DECREF(wake);
    Py_XDECREF(answer);
    return answer != NULL;
}

int kvtpy_claim_wake(PyObject *object)
{
    struct kvtpy_claim *claim = claim_of(object);
    PyObject *type[WAKE_TRIES] = {NULL, NULL};
    PyObject *value[WAKE_TRIES] = {NULL, NULL};
    PyObject *traceback[WAKE_TRIES] = {NULL, NULL};
    bool closed = true; /* an event loop that is closed says RuntimeError */
    int tries = 0;

    while (tries < WAKE_TRIES && !call_wake(claim)) {
        closed = closed && PyErr_ExceptionMatches(PyExc_RuntimeError);
        PyErr_Fetch(&type[tries], &value[tries], &traceback[tries]);
        tries++;
    }
    if (tries == WAKE_TRIES && closed) {
        tries = 0;
        for (int i = 0; i < WAKE_TRIES; i++) {
            Py_CLEAR(type[i]);
            Py_CLEAR(value[i]);
            Py_CLEAR(traceback[i]);
        }
        tries = leave_claim(claim) == 0 ? 0 : -1;
    } else if (tries > 0) {
        PyErr_Restore(type[0], value[0], traceback[0]);
        Py_XDECREF(type[1]);
        Py_XDECREF(value[1]);
        Py_XDECREF(traceback[1]);
    }
    Py_DECREF(object);
    return tries == 0 ? 0 : -1;
}

/* ---------------------------------------------------------- those who wait */

PyObject *kvtpy_claim_new(PyObject *self, PyObject *const *args,
                          Py_ssize_t count)
{
    struct kvt_result nothing = {0};
    struct kvtpy_transport *owner = kvtpy_self(self);
    struct kvtpy_claim *claim;
    PyObject *result;
    kvt_xfer id = 0;
    int silent;

    if (kvtpy_get(self) == NULL) {
        return NULL;
    }
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "_claim() takes xfer and wake");
        return NULL;
    }
    if (kvtpy_u64(args[0], "xfer", &id) != 0) {
        return NULL;
    }
    silent = kvtpy_is_silent(owner, id);
    result = silent < 0 ? NULL : kvtpy_result_new(&nothing);
    claim = result == NULL ? NULL
                           : PyObject_GC_New(struct kvtpy_claim, claim_type);
    if (claim == NULL) {
        Py_XDECREF(result);
        return NULL;
    }
    /* Nothing may run between here and the end: a collection does, above. */
    claim->next = NULL;
    claim->owner = self;
    Py_INCREF(self);
    claim->wake = count == 2 ? args[1] : NULL;
    Py_XINCREF(claim->wake);
    claim->result = result;
    claim->id = id;
    claim->state = OVER;
    claim->fd = -1;
    claim->has_event = silent == 0;
    if (*slot_of(owner, id) != NULL) {
        Py_DECREF((PyObject *)claim);
        return kvtpy_raise_text(KVT_EBUSY,
                                "transfer %llu is being waited for already",
                                (unsigned long long)id);
    }
    claim->state = WAITING;
    *slot_of(owner, id) = claim;
    PyObject_GC_Track((PyObject *)claim);
    return (PyObject *)claim;
}

static PyObject *look(PyObject *object, PyObject *unused)
{
    struct kvtpy_claim *claim = claim_of(object);
    struct kvtpy_transport *owner = kvtpy_self(claim->owner);
    struct kvt_result result;
    PyObject *kept;
    int code;

    (void)unused;
    if (claim->state != WAITING) {
        Py_RETURN_TRUE;
    }
    if (kvtpy_get(claim->owner) == NULL) {
        return NULL;
    }
    kept = kvtpy_kept_find(owner, claim->id);
    if (kept != NULL) {
        kvtpy_result_set(claim->result, kvtpy_result_get(kept));
        Py_DECREF(kept);
        if (kvtpy_kept_forget(owner, &claim->id, 1) != 0) {
            return NULL;
        }
        settle(claim, DELIVERED);
        Py_RETURN_TRUE;
    }
    code = kvt_status(owner->t, claim->id, &result);
    if (code == KVT_OK && (result.flags & KVT_FINISHED) == 0) {
        Py_RETURN_FALSE;
    }
    if (code == KVT_OK) {
        /* Nobody else can have drained it meanwhile: we hold the GIL. */
        (void)kvt_release(owner->t, claim->id);
        kvtpy_result_set(claim->result, &result);
        settle(claim, DELIVERED);
    }
    kvtpy_unsilence(owner, claim->id);
    if (code != KVT_OK) {
        return kvtpy_raise_xfer(code, claim->id);
    }
    Py_RETURN_TRUE;
}

static PyObject *leave(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (leave_claim(claim_of(object)) != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *file_number(PyObject *object, PyObject *unused)
{
    struct kvtpy_claim *claim = claim_of(object);

    (void)unused;
    if (claim->fd < 0) {
        claim->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (claim->fd < 0) {
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        if (claim->state != WAITING) {
            signal_fd(claim);
        }
    }
    return PyLong_FromLong(claim->fd);
}

static PyObject *get_outcome(PyObject *object, void *unused)
{
    struct kvtpy_claim *claim = claim_of(object);
    enum state state = claim->state;

    (void)unused;
    if (state == WAITING || state == OVER) {
        return kvtpy_raise_text(KVT_EBUSY, "the wait has no outcome");
    }
    claim->state = OVER;
    if (state == ENDED) {
        return kvtpy_raise_text(
            KVT_ECANCELED, "transfer %llu was cancelled or released meanwhile",
            (unsigned long long)claim->id);
    }
    return kvtpy_result_outcome(claim->result);
}

static PyObject *get_done(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(claim_of(object)->state != WAITING);
}

/* ---------------------------------------------------------------- the type */

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(claim_of(object)->owner);
    Py_VISIT(claim_of(object)->wake);
    return 0;
}

static int clear(PyObject *object)
{
    Py_CLEAR(claim_of(object)->wake);
    return 0;
}

static void dealloc(PyObject *object)
{
    struct kvtpy_claim *claim = claim_of(object);
    PyTypeObject *type_of = Py_TYPE(object);
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    if (PyObject_GC_IsTracked(object)) {
        PyObject_GC_UnTrack(object);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (leave_claim(claim) != 0) {
        PyErr_WriteUnraisable(NULL);
    }
    PyErr_Restore(type, value, traceback);
    if (claim->fd >= 0) {
        (void)close(claim->fd);
    }
    Py_DECREF(claim->result);
    Py_DECREF(claim->owner);
    PyObject_GC_Del(object);
    Py_DECREF(type_of);
}

static PyMemberDef members[] = {
    {"has_event", T_BOOL, (Py_ssize_t)offsetof(struct kvtpy_claim, has_event),
     READONLY, "Whether poll() would report the transfer."},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef properties[] = {
    {"done", get_done, NULL, "Whether it waits no more.", NULL},
    {"outcome", get_outcome, NULL,
     "The checked result, once; raises what went wrong.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef methods[] = {
    {"look", look, METH_NOARGS,
     "look($self, /)\n--\n\nTakes the result if it is there: whether it is."},
    {"leave", leave, METH_NOARGS,
     "leave($self, /)\n--\n\nWants no result any more."},
    {"fileno", file_number, METH_NOARGS,
     "fileno($self, /)\n--\n\nA descriptor, readable once it is done."},
    {NULL, NULL, 0, NULL}};

static const char doc[] = "That a wait wants the result of a transfer.";

int kvtpy_claims_init(PyObject *module)
{
    static PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                                  {Py_tp_dealloc, dealloc},
                                  {Py_tp_traverse, traverse},
                                  {Py_tp_clear, clear},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, properties},
                                  {Py_tp_methods, methods},
                                  {0, NULL}};
    static PyType_Spec spec = {
        .name = "kvt._kvt._Claim",
        .basicsize = sizeof(struct kvtpy_claim),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                 Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots};

    return kvtpy_add_type(module, &spec, &claim_type);
}
