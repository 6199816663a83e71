/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of a transfer: tuples, or rows of a buffer, as kvt_copy. */
#include "kvtpy.h"

#include <string.h>

#define SHORT_FIELDS 3
#define LONG_FIELDS 7

static int narrow(uint64_t value, const char *what, uint32_t *ret)
{
    if (value > UINT32_MAX) {
        (void)kvtpy_raise_text(KVT_ERANGE,
                               "a piece's %s is %llu, it must be "
                               "below 2**32",
                               what, (unsigned long long)value);
        return -1;
    }
    *ret = (uint32_t)value;
    return 0;
}

/* Fields that are not there come from the model, which *ret is a copy of. */
static int fill(const uint64_t *fields, Py_ssize_t count, struct kvt_copy *ret)
{
    static const char *const names[] = {"local_kind", "local_device",
                                        "peer_kind", "peer_device"};
    uint32_t *const places[] = {&ret->local_kind, &ret->local_device,
                                &ret->peer_kind, &ret->peer_device};

    ret->local_addr = fields[0];
    ret->peer_addr = fields[1];
    ret->length = fields[2];
    for (Py_ssize_t i = SHORT_FIELDS; i < count; i++) {
        Py_ssize_t at = i - SHORT_FIELDS;

        if (narrow(fields[i], names[at], places[at]) != 0) {
            return -1;
        }
    }
    return 0;
}

static struct kvt_copy *reserve(size_t count)
{
    struct kvt_copy *copies = NULL;

    if (count < SIZE_MAX / sizeof *copies) {
        copies = PyMem_Malloc((count + 1) * sizeof *copies);
    }
    if (copies == NULL) {
        (void)kvtpy_raise_text(KVT_ENOMEM, "no memory for %zu pieces", count);
    }
    return copies;
}

static int from_rows(const Py_buffer *view, const struct kvt_copy *model,
                     struct kvt_copy *copies)
{
    size_t columns = (size_t)view->shape[1];
    const char *at = view->buf;

    for (Py_ssize_t i = 0; i < view->shape[0]; i++) {
        uint64_t fields[LONG_FIELDS];

        memcpy(fields, at, columns * sizeof *fields);
        at += columns * sizeof *fields;
        copies[i] = *model;
        if (fill(fields, (Py_ssize_t)columns, &copies[i]) != 0) {
            return -1;
        }
    }
    return 0;
}

static int check_view(const Py_buffer *view)
{
    bool swapped;
    char letter = kvtpy_integer_format(view, &swapped);

    if (letter == '\0' || view->itemsize != sizeof(uint64_t) || swapped) {
        PyErr_Format(PyExc_TypeError,
                     "pieces in a buffer must be 64-bit integers in native "
                     "order, not items of format '%s'",
                     view->format == NULL ? "B" : view->format);
        return -1;
    }
    if (view->ndim != 2 ||
        (view->shape[1] != SHORT_FIELDS && view->shape[1] != LONG_FIELDS)) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "pieces in a buffer must be rows of %d or %d "
                               "columns",
                               SHORT_FIELDS, LONG_FIELDS);
        return -1;
    }
    return 0;
}

static int from_buffer(PyObject *object, const struct kvt_copy *model,
                       struct kvt_copy **ret, size_t *ret_count)
{
    struct kvt_copy *copies;
    Py_buffer view;
    int failed = -1;

    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) !=
        0) {
        return -1;
    }
    if (check_view(&view) == 0) {
        copies = reserve((size_t)view.shape[0]);
        if (copies != NULL) {
            failed = from_rows(&view, model, copies);
            if (failed == 0) {
                *ret = copies;
                *ret_count = (size_t)view.shape[0];
            } else {
                PyMem_Free(copies);
            }
        }
    }
    PyBuffer_Release(&view);
    return failed;
}

static int from_tuples(PyObject *list, const struct kvt_copy *model,
                       struct kvt_copy *copies)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(list); i++) {
        uint64_t fields[LONG_FIELDS];
        Py_ssize_t count;

        copies[i] = *model;
        if (kvtpy_fields(PyTuple_GetItem(list, i), "piece", i, SHORT_FIELDS,
                         LONG_FIELDS, fields, &count) != 0 ||
            fill(fields, count, &copies[i]) != 0) {
            return -1;
        }
    }
    return 0;
}

int kvtpy_copies(PyObject *object, const struct kvt_copy *model,
                 struct kvt_copy **ret, size_t *ret_count)
{
    struct kvt_copy *copies;
    PyObject *tuple;
    Py_ssize_t count;

    if (PyObject_CheckBuffer(object)) {
        return from_buffer(object, model, ret, ret_count);
    }
    tuple = PySequence_Tuple(object);
    if (tuple == NULL) {
        return -1;
    }
    count = PyTuple_Size(tuple);
    copies = reserve((size_t)count);
    if (copies == NULL || from_tuples(tuple, model, copies) != 0) {
        PyMem_Free(copies);
        Py_DECREF(tuple);
        return -1;
    }
    Py_DECREF(tuple);
    *ret = copies;
    *ret_count = (size_t)count;
    return 0;
}
