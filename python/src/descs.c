/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptor lists of kvt.nixl: tuples as rows, and rows as the runs that they
 * are. A list of a KV cache is millions of rows and a handful of runs.
 *
 * Both are written into room of the caller's: numpy's arrays lie in large
 * pages, and the first touch of a new one costs more than what is written.
 */
#include "kvtpy.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

#define DESC_FIELDS 3
#define RUN_FIELDS 5

/* Equal distances in a row that make a run of blocks with gaps between them.
 * One is nothing: any two blocks have a distance, and if it leaves a region the
 * run cannot be prepared. */
#define GAPS_MIN 2

/* Blocks that are further apart have nothing to do with each other. */
#define DISTANCE_MAX (UINT64_C(1) << 62)

/* (address, length, device): NIXL's order. */
struct desc {
    uint64_t addr;
    uint64_t length;
    uint64_t device;
};

/* The numbers of kvt_run. For host memory it is one, since a device of 0 is
 * kind and device. */
struct desc_run {
    uint64_t addr;
    uint64_t length;
    uint64_t stride;
    uint64_t count;
    uint64_t device;
};

static_assert(sizeof(struct desc_run) == sizeof(struct kvt_run) &&
                  sizeof(struct desc_run) == RUN_FIELDS * sizeof(uint64_t) &&
                  offsetof(struct desc_run, stride) ==
                      offsetof(struct kvt_run, stride_bytes) &&
                  offsetof(struct desc_run, count) ==
                      offsetof(struct kvt_run, count),
              "prepare() takes runs as they lie");

static int check_count(const char *function, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "%s() takes 2 arguments, not %zd",
                     function, count);
        return -1;
    }
    return 0;
}

/* Room for rows of so many words each; *ret_count of them. */
static int get_room(PyObject *object, size_t words, Py_buffer *ret,
                    Py_ssize_t *ret_count)
{
    if (PyObject_GetBuffer(object, ret, PyBUF_CONTIG) != 0) {
        return -1;
    }
    *ret_count = ret->len / (Py_ssize_t)(words * sizeof(uint64_t));
    return 0;
}

/* ------------------------------------------------------------ facts of runs */

struct facts {
    uint64_t blocks;
    uint64_t devices; /* or of all */
    bool uniform;
};

static struct facts collect(const struct kvtpy_rows *runs)
{
    struct facts facts = {.uniform = runs->count > 0};

    for (Py_ssize_t i = 0; i < runs->count; i++) {
        facts.blocks += kvtpy_rows_word(runs, i, 3);
        facts.devices |= kvtpy_rows_word(runs, i, 4);
        facts.uniform &= kvtpy_rows_word(runs, i, 1) ==
                         kvtpy_rows_word(runs, 0, 1);
    }
    return facts;
}

PyObject *kvtpy_desc_facts(PyObject *module, PyObject *object)
{
    PyObject *made = NULL;
    struct kvtpy_rows runs;
    struct facts facts;
    Py_buffer view;

    (void)module;
    if (kvtpy_view(object, "runs", &view) != 0) {
        return NULL;
    }
    if (kvtpy_rows(&view, "runs", RUN_FIELDS, RUN_FIELDS, &runs) == 0) {
        facts = collect(&runs);
        made = facts.uniform
                   ? Py_BuildValue(
                         "KKN", (unsigned long long)facts.blocks,
                         (unsigned long long)kvtpy_rows_word(&runs, 0, 1),
                         PyBool_FromLong(facts.devices != 0))
                   : Py_BuildValue("KON", (unsigned long long)facts.blocks,
                                   Py_None,
                                   PyBool_FromLong(facts.devices != 0));
    }
    PyBuffer_Release(&view);
    return made;
}

/* ------------------------------------------------------------ rows to runs */

static inline struct desc desc_at(const struct kvtpy_rows *rows, Py_ssize_t i)
{
    return (struct desc){kvtpy_rows_word(rows, i, 0),
                         kvtpy_rows_word(rows, i, 1),
                         kvtpy_rows_word(rows, i, 2)};
}

/* Whether `b` follows `a` at a distance; wrapping is none. */
static inline bool follows(const struct desc *a, const struct desc *b,
                           uint64_t distance)
{
    return b->addr > a->addr && b->addr - a->addr == distance &&
           b->length == a->length && b->device == a->device;
}

/* The run that begins at a row; returns the row after it. */
static Py_ssize_t next_run(const struct kvtpy_rows *rows, Py_ssize_t i,
                           struct desc_run *ret)
{
    struct desc last = desc_at(rows, i++);
    uint64_t distance = 0;
    Py_ssize_t count = 1;

    *ret = (struct desc_run){last.addr, last.length, last.length, 1,
                             last.device};
    if (i < rows->count) {
        distance = kvtpy_rows_word(rows, i, 0) - last.addr;
    }
    if (last.length == 0 || distance < last.length ||
        distance >= DISTANCE_MAX) {
        return i;
    }
    for (; i < rows->count; i++, count++) {
        struct desc next = desc_at(rows, i);

        if (!follows(&last, &next, distance)) {
            break;
        }
        last = next;
    }
    if (distance != ret->length && count <= GAPS_MIN) {
        return i - (count - 1);
    }
    ret->count = (uint64_t)count;
    ret->stride = distance;
    return i;
}

/* Writes at most `most` runs; returns how many there are. */
static Py_ssize_t find_runs(const struct kvtpy_rows *rows, char *room,
                            Py_ssize_t most)
{
    Py_ssize_t found = 0;

    for (Py_ssize_t i = 0; i < rows->count; found++) {
        struct desc_run run;

        i = next_run(rows, i, &run);
        if (found < most) {
            memcpy(room + found * (Py_ssize_t)sizeof run, &run, sizeof run);
        }
    }
    return found;
}

static PyObject *runs_of_view(const Py_buffer *view, PyObject *room)
{
    struct kvtpy_rows rows;
    Py_ssize_t most = 0;
    Py_ssize_t found;
    Py_buffer into = {.buf = NULL};

    if (kvtpy_rows(view, "descriptors", DESC_FIELDS, DESC_FIELDS, &rows) != 0 ||
        (room != Py_None && get_room(room, RUN_FIELDS, &into, &most) != 0)) {
        return NULL;
    }
    WITHOUT_GIL(found = find_runs(&rows, into.buf, most));
    if (room != Py_None) {
        PyBuffer_Release(&into);
    }
    return PyLong_FromSsize_t(found);
}

PyObject *kvtpy_desc_runs(PyObject *module, PyObject *const *args,
                          Py_ssize_t count)
{
    PyObject *found;
    Py_buffer view;

    (void)module;
    if (check_count("_desc_runs", count) != 0 ||
        kvtpy_view(args[0], "descriptors", &view) != 0) {
        return NULL;
    }
    found = runs_of_view(&view, args[1]);
    PyBuffer_Release(&view);
    return found;
}

/* ---------------------------------------------------------- tuples to rows */

/* The wrong number of a descriptor as ValueError, which is NIXL's. */
static int refuse_number(Py_ssize_t at)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
        !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_Format(PyExc_ValueError,
                 "descriptor %zd is not three integers from 0 to 2^64 - 1: %S",
                 at, value == NULL ? type : value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

static int take_number(PyObject *item, Py_ssize_t at, uint64_t *ret)
{
    PyObject *number = item;

    if (PyLong_CheckExact(item)) {
        Py_INCREF(number);
    } else {
        number = PyNumber_Index(item);
        if (number == NULL) {
            return refuse_number(at);
        }
    }
    *ret = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *ret == UINT64_MAX && PyErr_Occurred() != NULL ? refuse_number(at)
                                                          : 0;
}

static int take_desc(PyObject *item, Py_ssize_t at, uint64_t *ret)
{
    PyObject *tuple = item;
    int failed = 0;

    if (PyTuple_CheckExact(item)) {
        Py_INCREF(tuple);
    } else {
        tuple = PySequence_Tuple(item);
        if (tuple == NULL) {
            return -1;
        }
    }
    if (PyTuple_Size(tuple) != DESC_FIELDS) {
        PyErr_Format(PyExc_ValueError,
                     "descriptor %zd has %zd elements: each tuple must have "
                     "exactly 3 elements",
                     at, PyTuple_Size(tuple));
        failed = -1;
    }
    for (Py_ssize_t i = 0; i < DESC_FIELDS && failed == 0; i++) {
        failed = take_number(PyTuple_GetItem(tuple, i), at, &ret[i]);
    }
    Py_DECREF(tuple);
    return failed;
}

static int rows_of_list(PyObject *list, const Py_buffer *into, Py_ssize_t count)
{
    char *room = into->buf;

    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t fields[DESC_FIELDS];
        /* NULL: an __index__ written in Python has shortened the list. */
        PyObject *item = PyList_GetItem(list, i);
        int failed;

        if (item == NULL) {
            return -1;
        }
        Py_INCREF(item);
        failed = take_desc(item, i, fields);
        Py_DECREF(item);
        if (failed != 0) {
            return -1;
        }
        memcpy(room + i * (Py_ssize_t)sizeof fields, fields, sizeof fields);
    }
    return 0;
}

PyObject *kvtpy_desc_rows(PyObject *module, PyObject *const *args,
                          Py_ssize_t count)
{
    Py_ssize_t most;
    Py_buffer into;
    int failed;

    (void)module;
    if (check_count("_desc_rows", count) != 0) {
        return NULL;
    }
    if (!PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of tuples is needed");
        return NULL;
    }
    if (get_room(args[1], DESC_FIELDS, &into, &most) != 0) {
        return NULL;
    }
    failed = rows_of_list(args[0], &into, most);
    PyBuffer_Release(&into);
    if (failed != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
