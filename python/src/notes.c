/* SPDX-License-Identifier: Apache-2.0 */
/* Notifications: sent, and received by way of the lists of drain.c. */
#include "kvtpy.h"

#include <stdlib.h>

/* Most fit; a longer one is asked for again. */
#define NOTE_SHORT 4096

static PyObject *notify(PyObject *self, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "notify", 2, 2, 2, {"peer", "data"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    PyObject *out[2];
    Py_buffer view;
    kvt_peer peer = 0;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "peer", &peer) != 0 ||
        PyObject_GetBuffer(out[1], &view, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    code = kvt_notify(t, peer, view.buf, (size_t)view.len, &err);
    PyBuffer_Release(&view);
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

/* The next notification; NULL without an error when there is none. */
static PyObject *next_note(kvt_transport *t)
{
    struct kvt_notification note;
    char few[NOTE_SHORT];
    char *buffer = few;
    size_t capacity = sizeof few;
    PyObject *object = NULL;
    int code;

    while ((code = kvt_notification(t, &note, buffer, capacity)) ==
           KVT_ERANGE) {
        if (buffer != few) {
            free(buffer);
        }
        capacity = note.length;
        buffer = malloc(capacity);
        if (buffer == NULL) {
            code = KVT_ENOMEM;
            break;
        }
    }
    if (code < 0) {
        (void)kvtpy_raise(code, NULL);
    } else if (code == 1) {
        object = kvtpy_notification_new(&note, buffer);
    }
    if (buffer != few) {
        free(buffer);
    }
    return object;
}

int kvtpy_notes_drain(kvt_transport *t, uint64_t limit, PyObject *list)
{
    while ((uint64_t)PyList_Size(list) < limit) {
        PyObject *note = next_note(t);
        int failed;

        if (note == NULL) {
            return PyErr_Occurred() == NULL ? 0 : -1;
        }
        failed = PyList_Append(list, note);
        Py_DECREF(note);
        if (failed != 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *notifications(PyObject *self, PyObject *const *args,
                               Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "notifications", 1, 0, 1, {"limit"}};
    struct kvtpy_transport *transport = kvtpy_self(self);
    kvt_transport *t = kvtpy_get(self);
    uint64_t limit = UINT64_MAX;
    Py_ssize_t taken;
    PyObject *out[1];
    PyObject *list;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "limit", &limit) != 0) {
        return NULL;
    }
    kvtpy_log_drain();
    taken = PyList_Size(transport->notes);
    if ((uint64_t)taken > limit) {
        taken = (Py_ssize_t)limit;
    }
    list = PyList_GetSlice(transport->notes, 0, taken);
    if (list == NULL ||
        PyList_SetSlice(transport->notes, 0, taken, NULL) != 0 ||
        kvtpy_notes_drain(t, limit, list) != 0) {
        Py_CLEAR(list);
    }
    kvtpy_kept_signal(transport);
    return list;
}

#define METHOD(function) (PyCFunction)(void (*)(void))(function)

PyMethodDef kvtpy_note_methods[] = {
    {"notify", METHOD(notify), METH_FASTCALL | METH_KEYWORDS,
     "notify($self, peer, data)\n--\n\nQueues a short message to a peer."},
    {"notifications", METHOD(notifications), METH_FASTCALL | METH_KEYWORDS,
     "notifications($self, limit=None)\n--\n\n"
     "Takes the received notifications, oldest first. Never waits."},
    {NULL, NULL, 0, NULL}};
