/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block indices: lists, ranges and buffers, as kvt_indices.
 *
 * Only true integers are indices. NIXL's own class converts in silence, and
 * then 1.7 is block 1, "1" is block 1 and a mask of bools is blocks 0 and 1:
 * the wrong block is overwritten and reported done. Text and bytes are refused
 * too, although both are sequences: nobody means them.
 */
#include "kvtpy.h"

#include <string.h>

/* A range may say any length; one that is converted has to fit in memory. */
#define CONVERT_MAX INT32_MAX

void kvtpy_indices_fini(struct kvtpy_indices *indices)
{
    PyMem_Free(indices->memory);
    indices->memory = NULL;
    if (indices->held) {
        indices->held = false;
        PyBuffer_Release(&indices->view);
    }
}

static int refuse(PyObject *object, const char *what)
{
    PyErr_Format(PyExc_TypeError,
                 "%s must be a list, tuple or range of integers, or a buffer "
                 "of them, not %R",
                 what, (PyObject *)Py_TYPE(object));
    return -1;
}

/* What numpy says of items that no buffer has, and memoryview of one that is
 * released, goes along as the cause. */
static int refuse_because(PyObject *object, const char *what)
{
    PyObject *type;
    PyObject *cause;
    PyObject *value;
    PyObject *traceback;

    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    (void)refuse(object, what);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyException_SetCause(value, cause);
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* Room for converted indices. */
static int64_t *reserve(struct kvtpy_indices *ret, const char *what,
                        Py_ssize_t count)
{
    int64_t *room = ret->few;

    if (count > CONVERT_MAX) {
        (void)kvtpy_raise_text(KVT_ERANGE,
                               "%s has %zd indices, at most %d can "
                               "be moved at once",
                               what, count, CONVERT_MAX);
        return NULL;
    }
    if ((size_t)count > COUNT_OF(ret->few)) {
        room = PyMem_Malloc((size_t)count * sizeof *room);
        if (room == NULL) {
            (void)kvtpy_raise_text(KVT_ENOMEM, "no memory for %zd indices",
                                   count);
            return NULL;
        }
        ret->memory = room;
    }
    ret->indices.data = room;
    ret->indices.count = (uint64_t)count;
    ret->indices.type = KVT_INDEX_I64;
    return room;
}

/* -------------------------------------------------------------- sequences */

static int too_large(const char *what, Py_ssize_t i)
{
    PyErr_Clear();
    (void)kvtpy_raise_text(KVT_ERANGE,
                           "%s: index %zd is beyond 64 bits, no layout has so "
                           "many blocks",
                           what, i);
    return -1;
}

/* Whether an item is a bool, Python's or a scalar of numpy's; or -1. Older
 * numpys let theirs pass as an index; what it exports as a buffer tells them
 * apart. */
static int is_bool(PyObject *item)
{
    Py_buffer view;
    int is;

    if (PyBool_Check(item) || !PyObject_CheckBuffer(item)) {
        return PyBool_Check(item);
    }
    if (PyObject_GetBuffer(item, &view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
        if (PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear(); /* numpy's, of items that no buffer has */
            return 0;
        }
        return kvtpy_no_buffer() ? 0 : -1;
    }
    is = view.format != NULL && strcmp(view.format, "?") == 0;
    PyBuffer_Release(&view);
    return is;
}

/* An item that is not exactly an int. */
static int convert_other(PyObject *item, const char *what, Py_ssize_t i,
                         int64_t *ret)
{
    int is = is_bool(item);
    PyObject *number = is == 0 ? PyNumber_Index(item) : NULL;
    int overflow = 0;

    if (is < 0) {
        return -1;
    }
    if (number == NULL) {
        if (PyErr_Occurred() == NULL ||
            PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: index %zd is no integer but %R",
                         what, i, (PyObject *)Py_TYPE(item));
        }
        return -1;
    }
    *ret = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    return overflow == 0 ? 0 : too_large(what, i);
}

/* The value of a small int without a call: a block's index is
 * hardly ever anything else. False: ask in another way. */
static inline bool is_small(PyObject *item, int64_t *ret)
{
#if defined(Py_LIMITED_API)
    (void)item;
    (void)ret;
    return false;
#elif PY_VERSION_HEX >= 0x030c0000
    PyLongObject *number = (PyLongObject *)(void *)item;

    if (!Py_IS_TYPE(item, &PyLong_Type) || !PyUnstable_Long_IsCompact(number)) {
        return false;
    }
    *ret = PyUnstable_Long_CompactValue(number);
    return true;
#else
    if (!Py_IS_TYPE(item, &PyLong_Type) || Py_SIZE(item) != 1) {
        return false;
    }
    *ret = ((PyLongObject *)(void *)item)->ob_digit[0];
    return true;
#endif
}

static inline PyObject *item_at(PyObject *list, bool is_list, Py_ssize_t i)
{
#ifdef Py_LIMITED_API
    return is_list ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
#else
    return is_list ? PyList_GET_ITEM(list, i) : PyTuple_GET_ITEM(list, i);
#endif
}

static int from_list(PyObject *list, const char *what,
                     struct kvtpy_indices *ret)
{
    bool is_list = PyList_Check(list);
    Py_ssize_t count = is_list ? PyList_Size(list) : PyTuple_Size(list);
    int64_t *room = reserve(ret, what, count);

    if (room == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = item_at(list, is_list, i);

        if (is_small(item, &room[i])) {
            continue;
        }
        if (Py_IS_TYPE(item, &PyLong_Type)) {
            int overflow = 0;

            room[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (overflow != 0) {
                return too_large(what, i);
            }
            continue;
        }
        Py_INCREF(item);
        if (convert_other(item, what, i, &room[i]) != 0) {
            Py_DECREF(item);
            return -1;
        }
        Py_DECREF(item);
        /* An __index__ written in Python may have changed the list. */
        if (is_list && PyList_Size(list) != count) {
            (void)kvtpy_raise_text(
                KVT_EINVAL, "%s changed its length during the call", what);
            return -1;
        }
    }
    return 0;
}

static int member(PyObject *range, const char *what, Py_ssize_t i, int64_t *ret)
{
    PyObject *value = PySequence_GetItem(range, i);
    int overflow = 0;

    if (value == NULL) {
        return -1;
    }
    *ret = PyLong_AsLongLongAndOverflow(value, &overflow);
    Py_DECREF(value);
    return overflow == 0 ? 0 : too_large(what, i);
}

static int from_range(PyObject *range, const char *what,
                      struct kvtpy_indices *ret)
{
    Py_ssize_t count = PyObject_Size(range);
    int64_t first = 0;
    int64_t second = 0;
    int64_t last = 0;
    int64_t *room;
    uint64_t step;

    if (count < 0) {
        return PyErr_ExceptionMatches(PyExc_OverflowError) ? too_large(what, 0)
                                                           : -1;
    }
    /* If both ends fit into 64 bits, so does all that lies between. */
    if (count > 0 && (member(range, what, 0, &first) != 0 ||
                      member(range, what, count - 1, &last) != 0 ||
                      member(range, what, count > 1, &second) != 0)) {
        return -1;
    }
    room = reserve(ret, what, count);
    if (room == NULL) {
        return -1;
    }
    step = (uint64_t)second - (uint64_t)first;
    for (Py_ssize_t i = 0; i < count; i++) {
        room[i] = (int64_t)((uint64_t)first + (uint64_t)i * step);
    }
    return 0;
}

/* ---------------------------------------------------------------- buffers */

char kvtpy_integer_format(const Py_buffer *view, bool *ret_swapped)
{
    const char *format = view->format == NULL ? "B" : view->format;
    bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

    *ret_swapped = false;
    if (*format == '<' || *format == '>' || *format == '!') {
        *ret_swapped = (*format == '<') != little;
        format++;
    } else if (*format == '@' || *format == '=') {
        format++;
    }
    if (format[0] == '\0' || format[1] != '\0' ||
        strchr("bBhHiIlLqQnN", format[0]) == NULL) {
        return '\0';
    }
    return format[0];
}

static uint64_t load(const char *at, Py_ssize_t size, bool is_signed,
                     bool swapped)
{
    uint64_t value = 0;

    switch (size) {
    case 1: {
        uint8_t raw;

        memcpy(&raw, at, sizeof raw);
        value = is_signed ? (uint64_t)(int64_t)(int8_t)raw : raw;
        break;
    }
    case 2: {
        uint16_t raw;

        memcpy(&raw, at, sizeof raw);
        raw = swapped ? __builtin_bswap16(raw) : raw;
        value = is_signed ? (uint64_t)(int64_t)(int16_t)raw : raw;
        break;
    }
    case 4: {
        uint32_t raw;

        memcpy(&raw, at, sizeof raw);
        raw = swapped ? __builtin_bswap32(raw) : raw;
        value = is_signed ? (uint64_t)(int64_t)(int32_t)raw : raw;
        break;
    }
    default:
        memcpy(&value, at, sizeof value);
        value = swapped ? __builtin_bswap64(value) : value;
        break;
    }
    return value;
}

/* A buffer whose items the library does not know, or that has gaps. */
static int widen(const Py_buffer *view, const char *what, bool is_signed,
                 bool swapped, struct kvtpy_indices *ret)
{
    Py_ssize_t count = view->shape[0];
    Py_ssize_t stride = kvtpy_stride(view, 0);
    const char *at = view->buf;
    int64_t *room = reserve(ret, what, count);

    if (room == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t value = load(at, view->itemsize, is_signed, swapped);

        memcpy(&room[i], &value, sizeof value);
        at += stride;
    }
    ret->indices.type = is_signed ? KVT_INDEX_I64 : KVT_INDEX_U64;
    return 0;
}

static int from_view(const char *what, struct kvtpy_indices *ret)
{
    const Py_buffer *view = &ret->view;
    Py_ssize_t size = view->itemsize;
    bool swapped;
    char letter = kvtpy_integer_format(view, &swapped);
    bool is_signed = letter != '\0' && strchr("bhilqn", letter) != NULL;

    if (letter == '\0' || (size != 1 && size != 2 && size != 4 && size != 8)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be integers, not items of format '%s'", what,
                     view->format == NULL ? "B" : view->format);
        return -1;
    }
    if (view->ndim != 1) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "%s has %d dimensions, indices have one", what,
                               view->ndim);
        return -1;
    }
    if (size < 4 || swapped || kvtpy_stride(view, 0) != size ||
        (uintptr_t)view->buf % (uintptr_t)size != 0) {
        return widen(view, what, is_signed, swapped, ret);
    }
    ret->indices.data = view->buf;
    ret->indices.count = (uint64_t)view->shape[0];
    if (size == 4) {
        ret->indices.type = is_signed ? KVT_INDEX_I32 : KVT_INDEX_U32;
    } else {
        ret->indices.type = is_signed ? KVT_INDEX_I64 : KVT_INDEX_U64;
    }
    return 0;
}

static int from_buffer(PyObject *object, const char *what,
                       struct kvtpy_indices *ret)
{
    if (PyObject_GetBuffer(object, &ret->view, PyBUF_FORMAT | PyBUF_STRIDES) !=
        0) {
        if (PyErr_ExceptionMatches(PyExc_ValueError)) {
            return refuse_because(object, what);
        }
        return kvtpy_no_buffer() ? refuse(object, what) : -1;
    }
    ret->held = true;
    return from_view(what, ret);
}

/* A tensor's items would be converted one by one, and its bools are integers
 * to __index__; as an array it says what it holds. */
static int from_tensor(PyObject *object, const char *what,
                       struct kvtpy_indices *ret)
{
    PyObject *array = PyObject_CallMethod(object, "numpy", NULL);
    int failed;

    if (array == NULL) {
        return -1;
    }
    failed = PyObject_CheckBuffer(array) ? from_buffer(array, what, ret)
                                         : refuse(object, what);
    Py_DECREF(array); /* the view keeps it */
    return failed;
}

/* What is neither list nor range nor buffer. */
static int from_other(PyObject *object, const char *what,
                      struct kvtpy_indices *ret)
{
    PyObject *list;
    int failed;

    if (!PySequence_Check(object) || PyDict_Check(object)) {
        return refuse(object, what);
    }
    list = PySequence_List(object);
    if (list == NULL) {
        return -1;
    }
    failed = from_list(list, what, ret);
    Py_DECREF(list);
    return failed;
}

int kvtpy_indices(PyObject *object, const char *what, struct kvtpy_indices *ret)
{
    PyObject *data_ptr;
    int found;

    kvtpy_indices_init(ret);
    ret->indices = (struct kvt_indices){0};
    if (PyList_Check(object) || PyTuple_Check(object)) {
        return from_list(object, what, ret);
    }
    if (Py_IS_TYPE(object, &PyRange_Type)) {
        return from_range(object, what, ret);
    }
    if (PyUnicode_Check(object) || PyBytes_Check(object) ||
        PyByteArray_Check(object)) {
        return refuse(object, what);
    }
    if (PyObject_CheckBuffer(object)) {
        return from_buffer(object, what, ret);
    }
    found = kvtpy_attribute(object, "data_ptr", &data_ptr);
    Py_XDECREF(data_ptr);
    if (found < 0) {
        return -1;
    }
    return found == 1 ? from_tensor(object, what, ret)
                      : from_other(object, what, ret);
}
