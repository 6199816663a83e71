/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results and notifications, between those who poll and those who wait.
 *
 * kvt_poll() gives each result once, to whoever asks first. wait() and
 * wait_async() (kvt/_transport.py) want the result of one transfer and must
 * not take those of others away. So a wait claims its id (claims.c): whoever
 * drains the library delivers a claimed result there. What a waiting
 * thread drains besides goes to `kept` and `notes`, from where poll() and
 * notifications() give it out before they ask the library again; kept_fd keeps
 * fileno() readable meanwhile. All under the GIL, and the library's calls here
 * are made without releasing it, so that taking and filing is one step.
 *
 * The lists are bounded: beyond that a wait leaves the rest in the library,
 * where its own limits hold, and looks again after a short sleep.
 */
#include "kvtpy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEPT_MAX 16384
#define BATCH 32

void kvtpy_kept_signal(struct kvtpy_transport *self)
{
    bool any = PyList_Size(self->kept) > 0 || PyList_Size(self->notes) > 0;
    uint64_t count = 1;

    if (self->kept_fd < 0 || any == self->kept_signalled) {
        return;
    }
    self->kept_signalled = any;
    if (any) {
        while (write(self->kept_fd, &count, sizeof count) < 0 &&
               errno == EINTR) {
        }
    } else {
        while (read(self->kept_fd, &count, sizeof count) < 0 &&
               errno == EINTR) {
        }
    }
}

/* ------------------------------------------------------------------ claims */

/* Keeps the first of several exceptions; the others are written out. */
static int wake(PyObject *waiting, int failed)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    if (failed == 0) {
        return kvtpy_claim_wake(waiting);
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (kvtpy_claim_wake(waiting) != 0) {
        PyErr_WriteUnraisable(NULL);
    }
    PyErr_Restore(type, value, traceback);
    return failed;
}

int kvtpy_is_silent(struct kvtpy_transport *self, kvt_xfer id)
{
    PyObject *key;
    int is;

    if (PySet_Size(self->silent) == 0) {
        return 0;
    }
    key = PyLong_FromUnsignedLongLong(id);
    is = key == NULL ? -1 : PySet_Contains(self->silent, key);
    Py_XDECREF(key);
    return is;
}

void kvtpy_unsilence(struct kvtpy_transport *self, kvt_xfer id)
{
    PyObject *key;

    if (PySet_Size(self->silent) == 0) {
        return;
    }
    key = PyLong_FromUnsignedLongLong(id);
    if (key == NULL || PySet_Discard(self->silent, key) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(key);
}

int kvtpy_claims_end(struct kvtpy_transport *self, const kvt_xfer *ids,
                     size_t count, bool hidden)
{
    int failed = 0;

    for (size_t i = 0; i < count; i++) {
        struct kvt_result result;
        PyObject *waiting;

        if (!hidden && kvt_status(self->t, ids[i], &result) == KVT_OK) {
            continue;
        }
        if (kvtpy_claim_deliver(self, ids[i], NULL, &waiting) &&
            waiting != NULL) {
            failed = wake(waiting, failed);
        }
    }
    return failed;
}

/*
 * Files what was drained, at most BATCH: claimed results are delivered, the
 * rest goes to `take`. Only the latter can be lost, for want of memory. Event
 * loops are woken last: that runs Python code, in which another thread may get
 * the GIL, and it must find each result somewhere.
 */
static int file_results(struct kvtpy_transport *self,
                        const struct kvt_result *results, int count,
                        kvtpy_take *take, void *ctx)
{
    PyObject *waiting[BATCH];
    int wakes = 0;
    int failed = 0;

    for (int i = 0; i < count; i++) {
        if (kvtpy_claim_deliver(self, results[i].id, &results[i],
                                &waiting[wakes])) {
            wakes += waiting[wakes] != NULL;
        } else if (take(ctx, &results[i]) != 0) {
            failed = -1;
        }
    }
    for (int i = 0; i < wakes; i++) {
        failed = wake(waiting[i], failed);
    }
    return failed;
}

/* -------------------------------------------------------------------- kept */

static bool is_among(kvt_xfer id, const kvt_xfer *ids, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (ids[i] == id) {
            return true;
        }
    }
    return false;
}

int kvtpy_kept_forget(struct kvtpy_transport *self, const kvt_xfer *ids,
                      size_t count)
{
    for (Py_ssize_t i = PyList_Size(self->kept) - 1; i >= 0; i--) {
        PyObject *result = PyList_GetItem(self->kept, i);

        if (is_among(kvtpy_result_get(result)->id, ids, count) &&
            PyList_SetSlice(self->kept, i, i + 1, NULL) != 0) {
            return -1;
        }
    }
    kvtpy_kept_signal(self);
    return 0;
}

PyObject *kvtpy_kept_find(struct kvtpy_transport *self, kvt_xfer id)
{
    for (Py_ssize_t i = 0; i < PyList_Size(self->kept); i++) {
        PyObject *result = PyList_GetItem(self->kept, i);

        if (kvtpy_result_get(result)->id == id) {
            Py_INCREF(result);
            return result;
        }
    }
    return NULL;
}

/* Moves kept results of a peer to a list, up to a limit. */
static int take_kept(struct kvtpy_transport *self, kvt_peer peer,
                     uint64_t limit, PyObject *list)
{
    Py_ssize_t i = 0;

    while (i < PyList_Size(self->kept) && (uint64_t)PyList_Size(list) < limit) {
        PyObject *result = PyList_GetItem(self->kept, i);

        if (peer != KVT_ANY && kvtpy_result_get(result)->peer != peer) {
            i++;
            continue;
        }
        if (PyList_Append(list, result) != 0 ||
            PyList_SetSlice(self->kept, i, i + 1, NULL) != 0) {
            return -1;
        }
    }
    kvtpy_kept_signal(self);
    return 0;
}

/* ------------------------------------------------------------------- polls */

static int append_result(void *list, const struct kvt_result *result)
{
    PyObject *object = kvtpy_result_new(result);
    int failed = object == NULL ? -1 : PyList_Append(list, object);

    Py_XDECREF(object);
    return failed;
}

static int drain_results(struct kvtpy_transport *self, kvt_peer peer,
                         uint64_t limit, PyObject *list)
{
    struct kvt_result results[BATCH];
    int count = BATCH;

    while (count == BATCH && (uint64_t)PyList_Size(list) < limit) {
        uint64_t room = limit - (uint64_t)PyList_Size(list);

        count = kvt_poll(self->t, peer, results,
                         room < BATCH ? (size_t)room : BATCH);
        if (count < 0) {
            (void)kvtpy_raise(count, NULL);
            return -1;
        }
        if (file_results(self, results, count, append_result, list) != 0) {
            return -1;
        }
    }
    return 0;
}

/* A wait may have drained results of this peer for us. */
static int drain_kept(struct kvtpy_transport *self, kvt_peer peer,
                      kvtpy_take *take, void *ctx)
{
    Py_ssize_t i = 0;
    int failed = 0;

    while (failed == 0 && i < PyList_Size(self->kept)) {
        const struct kvt_result *result = kvtpy_result_get(
            PyList_GetItem(self->kept, i));

        if (result->peer != peer) {
            i++;
        } else {
            failed = take(ctx, result);
            if (PyList_SetSlice(self->kept, i, i + 1, NULL) != 0) {
                failed = -1;
            }
        }
    }
    kvtpy_kept_signal(self);
    return failed;
}

int kvtpy_drain(struct kvtpy_transport *self, kvt_peer peer, kvtpy_take *take,
                void *ctx)
{
    struct kvt_result results[BATCH];
    int failed = 0;
    int count = BATCH;

    if (kvtpy_list_size(self->kept) > 0) {
        failed = drain_kept(self, peer, take, ctx);
    }
    while (count == BATCH && failed == 0) {
        count = kvt_poll(self->t, peer, results, BATCH);
        if (count < 0) {
            (void)kvtpy_raise(count, NULL);
            return -1;
        }
        if (count == 0) {
            break; /* the common case */
        }
        failed = file_results(self, results, count, take, ctx);
    }
    return failed;
}

/* Results that a poll() which fails has taken already. */
static void put_back(struct kvtpy_transport *self, PyObject *list)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    if (PyList_SetSlice(self->kept, 0, 0, list) != 0) {
        PyErr_WriteUnraisable(NULL);
    }
    kvtpy_kept_signal(self);
    PyErr_Restore(type, value, traceback);
}

static PyObject *poll_results(PyObject *self, PyObject *const *args,
                              Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "poll", 2, 0, 2, {"peer", "limit"}};
    kvt_transport *t = kvtpy_get(self);
    kvt_peer peer = KVT_ANY;
    uint64_t limit = UINT64_MAX;
    PyObject *out[2];
    PyObject *list;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "peer", &peer) != 0 ||
        kvtpy_u64(out[1], "limit", &limit) != 0) {
        return NULL;
    }
    kvtpy_log_drain();
    list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    if ((PyList_Size(kvtpy_self(self)->kept) > 0 &&
         take_kept(kvtpy_self(self), peer, limit, list) != 0) ||
        drain_results(kvtpy_self(self), peer, limit, list) != 0) {
        put_back(kvtpy_self(self), list);
        Py_CLEAR(list);
    }
    return list;
}

PyObject *kvtpy_raise_xfer(int code, kvt_xfer id)
{
    if (code != KVT_ENOENT) {
        return kvtpy_raise(code, NULL);
    }
    return kvtpy_raise_text(code,
                            "transfer %llu is unknown: drained, cancelled or "
                            "released, or never accepted here",
                            (unsigned long long)id);
}

static PyObject *status(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_result result;
    kvt_xfer id = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "xfer", &id) != 0) {
        return NULL;
    }
    code = kvt_status(t, id, &result);
    if (code == KVT_OK) {
        return kvtpy_result_new(&result);
    }
    if (code == KVT_ENOENT) {
        PyObject *kept = kvtpy_kept_find(kvtpy_self(self), id);

        if (kept != NULL) {
            return kept;
        }
    }
    return kvtpy_raise_xfer(code, id);
}

/* ----------------------------------------------------------- cancel, release */

/* Ids for the library: malloc'd, from one int or any iterable of them. */
static kvt_xfer *take_ids(PyObject *object, size_t *ret_count)
{
    PyObject *tuple = PyIndex_Check(object) ? PyTuple_Pack(1, object)
                                            : PySequence_Tuple(object);
    kvt_xfer *ids;
    Py_ssize_t count;

    if (tuple == NULL) {
        return NULL;
    }
    count = PyTuple_Size(tuple);
    ids = calloc((size_t)count + 1, sizeof *ids);
    if (ids == NULL) {
        (void)kvtpy_raise(KVT_ENOMEM, NULL);
    }
    for (Py_ssize_t i = 0; i < count && ids != NULL; i++) {
        if (kvtpy_u64(PyTuple_GetItem(tuple, i), "xfer", &ids[i]) != 0) {
            free(ids);
            ids = NULL;
        }
    }
    Py_DECREF(tuple);
    *ret_count = (size_t)count;
    return ids;
}

static int take_mode(PyObject *object, int *ret)
{
    *ret = KVT_CANCEL_IMMEDIATE;
    if (object == NULL) {
        return 0;
    }
    if (PyUnicode_Check(object)) {
        if (PyUnicode_CompareWithASCIIString(object, "immediate") == 0) {
            return 0;
        }
        if (PyUnicode_CompareWithASCIIString(object, "wait") == 0) {
            *ret = KVT_CANCEL_WAIT;
            return 0;
        }
    }
    (void)kvtpy_raise_text(KVT_EINVAL,
                           "the mode must be \"immediate\" or \"wait\"");
    return -1;
}

static PyObject *list_of_ids(const kvt_xfer *ids, int count)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; i < count && list != NULL; i++) {
        PyObject *id = PyLong_FromUnsignedLongLong(ids[i]);

        if (id == NULL || PyList_Append(list, id) != 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(id);
    }
    return list;
}

static PyObject *cancel(PyObject *self, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "cancel", 2, 1, 2, {"xfers", "mode"}};
    kvt_transport *t = kvtpy_get(self);
    PyObject *result = NULL;
    kvt_xfer *moving;
    kvt_xfer *ids;
    PyObject *out[2];
    size_t found;
    int mode;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        take_mode(out[1], &mode) != 0) {
        return NULL;
    }
    ids = take_ids(out[0], &found);
    if (ids == NULL) {
        return NULL;
    }
    moving = calloc(found + 1, sizeof *moving);
    if (moving == NULL) {
        free(ids);
        return kvtpy_raise(KVT_ENOMEM, NULL);
    }
    code = kvt_cancel(t, ids, found, mode, moving);
    if (code < 0) {
        (void)kvtpy_raise(code, NULL);
    } else if (kvtpy_kept_forget(kvtpy_self(self), ids, found) == 0 &&
               kvtpy_claims_end(kvtpy_self(self), ids, found,
                                mode == KVT_CANCEL_IMMEDIATE) == 0) {
        result = list_of_ids(moving, code);
    }
    free(moving);
    free(ids);
    return result;
}

static PyObject *release(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    PyObject *kept;
    kvt_xfer id = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "xfer", &id) != 0) {
        return NULL;
    }
    kvtpy_unsilence(kvtpy_self(self), id);
    code = kvt_release(t, id);
    kept = kvtpy_kept_find(kvtpy_self(self), id);
    if (kept != NULL) {
        Py_DECREF(kept);
        if (kvtpy_kept_forget(kvtpy_self(self), &id, 1) != 0) {
            return NULL;
        }
        code = KVT_OK;
    }
    if (code != KVT_OK) {
        return kvtpy_raise_xfer(code, id);
    }
    if (kvtpy_claims_end(kvtpy_self(self), &id, 1, true) != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -------------------------------------------------------------- for a wait */

/* _seconds(timeout): a time as every call takes it, checked. */
static PyObject *seconds(PyObject *self, PyObject *object)
{
    uint64_t ns = 0;

    (void)self;
    if (kvtpy_time(object, "timeout", &ns) != 0) {
        return NULL;
    }
    return PyFloat_FromDouble((double)ns / 1e9);
}

static PyObject *drain(PyObject *self, PyObject *unused)
{
    struct kvtpy_transport *transport = kvtpy_self(self);
    uint64_t settled = transport->settled;
    Py_ssize_t before;

    (void)unused;
    if (kvtpy_get(self) == NULL) {
        return NULL;
    }
    kvtpy_log_drain();
    before = PyList_Size(transport->kept) + PyList_Size(transport->notes);
    if (drain_results(transport, KVT_ANY, KEPT_MAX, transport->kept) != 0 ||
        kvtpy_notes_drain(transport->t, KEPT_MAX, transport->notes) != 0) {
        return NULL;
    }
    kvtpy_kept_signal(transport);
    return PyBool_FromLong(
        transport->settled != settled ||
        PyList_Size(transport->kept) + PyList_Size(transport->notes) != before);
}

static PyObject *raw_file_number(PyObject *self, PyObject *unused)
{
    kvt_transport *t = kvtpy_get(self);
    int fd;

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    fd = kvt_fd(t);
    return fd < 0 ? kvtpy_raise(fd, NULL) : PyLong_FromLong(fd);
}

#define METHOD(function) (PyCFunction)(void (*)(void))(function)

PyMethodDef kvtpy_drain_methods[] = {
    {"poll", METHOD(poll_results), METH_FASTCALL | METH_KEYWORDS,
     "poll($self, peer=18446744073709551615, limit=None)\n--\n\n"
     "Takes finished transfers of one peer, or of all, oldest first. Each is\n"
     "reported once. Never waits, and never takes a transfer that a wait() is\n"
     "waiting for."},
    {"status", status, METH_O,
     "status($self, xfer, /)\n--\n\n"
     "What is known of a transfer now; never consumes a result."},
    {"cancel", METHOD(cancel), METH_FASTCALL | METH_KEYWORDS,
     "cancel($self, xfers, mode='immediate')\n--\n\n"
     "Stops transfers, an id or an iterable of them; unknown ids are skipped.\n"
     "Mode \"wait\" returns the ids that still move: they surface in poll().\n"
     "Mode \"immediate\" returns []: nothing more of them is reported."},
    {"release", release, METH_O,
     "release($self, xfer, /)\n--\n\n"
     "Forgets a result; of an unfinished transfer when it is quiescent."},
    {"_claim", METHOD(kvtpy_claim_new), METH_FASTCALL, NULL},
    {"_seconds", seconds, METH_O, NULL},
    {"_drain", drain, METH_NOARGS, NULL},
    {"_raw_fileno", raw_file_number, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};
