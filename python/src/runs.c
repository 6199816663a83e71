/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs of a layout: tuples, rows of a buffer, or kvt_run itself in a buffer.
 *
 * A list without regularity has a run for each block, up to millions of them.
 * So buffers are read once, and without the GIL if they are large: whoever
 * writes into one meanwhile gets runs of old and new numbers, which the library
 * checks like any others. It copies them before it looks, so kvt_run is taken
 * as it lies.
 */
#include "kvtpy.h"

#include <string.h>

#define FIELDS_MIN 3
#define FIELDS_MAX 6

/* Fewer rows take less time than giving the GIL away and getting it back. */
#define MANY_ROWS 2048

int kvtpy_view(PyObject *object, const char *what, Py_buffer *ret)
{
    if (PyObject_GetBuffer(object, ret, PyBUF_FORMAT | PyBUF_STRIDES) == 0) {
        return 0;
    }
    if (kvtpy_no_buffer()) {
        PyErr_Format(PyExc_TypeError, "%s cannot be read from %R", what,
                     (PyObject *)Py_TYPE(object));
    }
    return -1;
}

int kvtpy_rows(const Py_buffer *view, const char *what, Py_ssize_t least,
               Py_ssize_t most, struct kvtpy_rows *ret)
{
    bool swapped;
    char letter = kvtpy_integer_format(view, &swapped);

    if (letter == '\0' || view->itemsize != sizeof(uint64_t) || swapped) {
        PyErr_Format(PyExc_TypeError,
                     "%s in a buffer must be 64-bit integers in native order, "
                     "not items of format '%s'",
                     what, view->format == NULL ? "B" : view->format);
        return -1;
    }
    if (view->ndim != 2 || view->shape[1] < least || view->shape[1] > most) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "%s in a buffer must be rows of %zd to %zd "
                               "columns",
                               what, least, most);
        return -1;
    }
    ret->at = view->buf;
    ret->count = view->shape[0];
    ret->columns = view->shape[1];
    ret->row_stride = kvtpy_stride(view, 0);
    ret->column_stride = kvtpy_stride(view, 1);
    ret->is_signed = strchr("bhilqn", letter) != NULL;
    return 0;
}

/* ------------------------------------------------------------------ of rows */

/* What is wrong with a row, to be said when the GIL is held again. */
struct fault {
    const char *text; /* NULL: nothing */
    Py_ssize_t row;
    Py_ssize_t column;
};

static void fill(const uint64_t *fields, struct kvt_run *ret)
{
    ret->addr = fields[0];
    ret->block_bytes = fields[1];
    ret->count = fields[2];
    /* Blocks lie end to end unless said otherwise. */
    ret->stride_bytes = fields[3] == 0 ? fields[1] : fields[3];
    ret->kind = (uint32_t)fields[4];
    ret->device = (uint32_t)fields[5];
}

static void convert(const struct kvtpy_rows *rows, struct kvt_run *runs,
                    struct fault *ret)
{
    for (Py_ssize_t i = 0; i < rows->count; i++) {
        uint64_t fields[FIELDS_MAX] = {0};

        for (Py_ssize_t j = 0; j < rows->columns; j++) {
            fields[j] = kvtpy_rows_word(rows, i, j);
            if (rows->is_signed && fields[j] > INT64_MAX) {
                *ret = (struct fault){"must not be negative", i, j};
                return;
            }
            if (j >= 4 && fields[j] > UINT32_MAX) {
                *ret = (struct fault){"must be below 2**32", i, j};
                return;
            }
        }
        fill(fields, &runs[i]);
    }
}

static int raise_fault(const struct fault *fault)
{
    static const char *const names[FIELDS_MAX] = {
        "addr", "block_bytes", "count", "stride_bytes", "kind", "device"};

    (void)kvtpy_raise_text(KVT_ERANGE, "run %zd: %s %s", fault->row,
                           names[fault->column], fault->text);
    return -1;
}

static struct kvt_run *reserve(struct kvtpy_runs *ret, Py_ssize_t count)
{
    struct kvt_run *room = NULL;

    if ((size_t)count < SIZE_MAX / sizeof *room) {
        room = PyMem_Malloc(((size_t)count + 1) * sizeof *room);
    }
    if (room == NULL) {
        (void)kvtpy_raise_text(KVT_ENOMEM, "no memory for %zd runs", count);
    }
    ret->memory = room;
    ret->data = room;
    ret->count = (size_t)count;
    return room;
}

static int from_rows(struct kvtpy_runs *ret)
{
    struct fault fault = {.text = NULL};
    struct kvtpy_rows rows;
    struct kvt_run *room;

    if (kvtpy_rows(&ret->view, "runs", FIELDS_MIN, FIELDS_MAX, &rows) != 0) {
        return -1;
    }
    room = reserve(ret, rows.count);
    if (room == NULL) {
        return -1;
    }
    if (rows.count < MANY_ROWS) {
        convert(&rows, room, &fault);
    } else {
        WITHOUT_GIL(convert(&rows, room, &fault));
    }
    return fault.text == NULL ? 0 : raise_fault(&fault);
}

/* ------------------------------------------------------------- of kvt_run */

/* Whether items have the fields of kvt_run, whatever they are called. */
static bool is_run_format(const char *format)
{
    static const char fields[] = "QQQQII";
    bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    size_t found = 0;

    if (strncmp(format, "T{", 2) != 0) {
        return false;
    }
    for (format += 2; *format != '}'; format++) {
        char letter = *format == 'L' ? 'Q' : *format;

        if (letter == ':') {
            format = strchr(format + 1, ':');
            if (format == NULL) {
                return false;
            }
        } else if (letter == fields[found] && letter != '\0') {
            found++;
        } else if (letter != '@' && letter != '=' &&
                   letter != (little ? '<' : '>')) {
            return false;
        }
    }
    return fields[found] == '\0' && format[1] == '\0';
}

/* kvt.Run has the count before the stride, and C after it: numbers under the
 * names of the one would be taken for the other's. */
static bool is_in_order_of_tuples(const char *format)
{
    size_t found = 0;

    for (format += 2; *format != '}'; format++) {
        const char *name = format + 1;

        if (*format == ':') {
            format = strchr(name, ':');
            if ((found == 3 && strncmp(name, "count:", 6) == 0) ||
                (found == 4 && strncmp(name, "stride", 6) == 0)) {
                return true;
            }
        } else if (*format == 'Q' || *format == 'L' || *format == 'I') {
            found++;
        }
    }
    return false;
}

static bool holds_runs(const Py_buffer *view)
{
    return view->ndim == 1 && view->format != NULL &&
           view->itemsize == sizeof(struct kvt_run) &&
           is_run_format(view->format);
}

static void copy(const Py_buffer *view, struct kvt_run *room)
{
    const char *at = view->buf;

    for (Py_ssize_t i = 0; i < view->shape[0]; i++) {
        memcpy(&room[i], at, sizeof *room);
        at += kvtpy_stride(view, 0);
    }
}

static int from_structs(struct kvtpy_runs *ret)
{
    const Py_buffer *view = &ret->view;
    struct kvt_run *room;

    if (is_in_order_of_tuples(view->format)) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "the fields of runs in a buffer must be in the "
                               "order of struct kvt_run: stride_bytes, then "
                               "count");
        return -1;
    }
    if (kvtpy_stride(view, 0) == view->itemsize &&
        (uintptr_t)view->buf % _Alignof(struct kvt_run) == 0) {
        ret->data = view->buf;
        ret->count = (size_t)view->shape[0];
        return 0;
    }
    room = reserve(ret, view->shape[0]);
    if (room == NULL) {
        return -1;
    }
    WITHOUT_GIL(copy(view, room));
    return 0;
}

/* ---------------------------------------------------------------- of tuples */

static int take_run(PyObject *item, Py_ssize_t at, struct kvt_run *ret)
{
    uint64_t fields[FIELDS_MAX] = {0};
    Py_ssize_t count;

    if (kvtpy_fields(item, "run", at, FIELDS_MIN, FIELDS_MAX, fields, &count) !=
        0) {
        return -1;
    }
    if (fields[4] > UINT32_MAX || fields[5] > UINT32_MAX) {
        (void)kvtpy_raise_text(
            KVT_ERANGE, "run %zd: kind and device must be below 2**32", at);
        return -1;
    }
    fill(fields, ret);
    return 0;
}

static int from_tuples(PyObject *object, struct kvtpy_runs *ret)
{
    PyObject *tuple = PySequence_Tuple(object);
    struct kvt_run *room;
    int failed = 0;

    if (tuple == NULL) {
        return -1;
    }
    room = reserve(ret, PyTuple_Size(tuple));
    if (room == NULL) {
        failed = -1;
    }
    for (Py_ssize_t i = 0; failed == 0 && i < PyTuple_Size(tuple); i++) {
        failed = take_run(PyTuple_GetItem(tuple, i), i, &room[i]);
    }
    Py_DECREF(tuple);
    return failed;
}

void kvtpy_runs_fini(struct kvtpy_runs *runs)
{
    PyMem_Free(runs->memory);
    runs->memory = NULL;
    if (runs->held) {
        runs->held = false;
        PyBuffer_Release(&runs->view);
    }
}

int kvtpy_runs(PyObject *object, struct kvtpy_runs *ret)
{
    *ret = (struct kvtpy_runs){.data = NULL};
    if (!PyObject_CheckBuffer(object)) {
        return from_tuples(object, ret);
    }
    if (kvtpy_view(object, "runs", &ret->view) != 0) {
        return -1;
    }
    ret->held = true;
    return holds_runs(&ret->view) ? from_structs(ret) : from_rows(ret);
}
