/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments: names to places, objects to numbers and bytes. */
#include "kvtpy.h"

#include <math.h>
#include <string.h>

#define TIME_MAX_S (30.0 * 365 * 86400)

static int place(const struct kvtpy_signature *signature, PyObject *name,
                 PyObject *value, PyObject **out)
{
    for (int i = 0; i < signature->count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, signature->names[i]) == 0) {
            if (out[i] != NULL) {
                PyErr_Format(PyExc_TypeError,
                             "%s() got multiple values for argument '%U'",
                             signature->function, name);
                return -1;
            }
            out[i] = value;
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError,
                 "%s() got an unexpected keyword argument '%U'",
                 signature->function, name);
    return -1;
}

static int take_positional(const struct kvtpy_signature *signature,
                           Py_ssize_t count, PyObject **out)
{
    if (count > signature->positional) {
        PyErr_Format(PyExc_TypeError,
                     "%s() takes at most %d positional arguments (%zd given)",
                     signature->function, signature->positional, count);
        return -1;
    }
    memset(out, 0, (size_t)signature->count * sizeof(PyObject *));
    return 0;
}

/* After all are placed: what must be there, and None as nothing. */
static int settle(const struct kvtpy_signature *signature, PyObject **out)
{
    for (int i = 0; i < signature->count; i++) {
        if (out[i] == NULL && i < signature->required) {
            PyErr_Format(PyExc_TypeError,
                         "%s() is missing the argument '%s' (position %d)",
                         signature->function, signature->names[i], i + 1);
            return -1;
        }
        if (out[i] == Py_None && i >= signature->required) {
            out[i] = NULL;
        }
    }
    return 0;
}

int kvtpy_args(const struct kvtpy_signature *signature, PyObject *const *args,
               Py_ssize_t count, PyObject *names, PyObject **out)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);

    if (take_positional(signature, count, out) != 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        if (place(signature, PyTuple_GetItem(names, i), args[count + i], out) !=
            0) {
            return -1;
        }
    }
    return settle(signature, out);
}

int kvtpy_args_tuple(const struct kvtpy_signature *signature, PyObject *args,
                     PyObject *keywords, PyObject **out)
{
    PyObject *name;
    PyObject *value;
    Py_ssize_t at = 0;

    if (take_positional(signature, PyTuple_Size(args), out) != 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++) {
        out[i] = PyTuple_GetItem(args, i);
    }
    while (keywords != NULL && PyDict_Next(keywords, &at, &name, &value)) {
        if (place(signature, name, value, out) != 0) {
            return -1;
        }
    }
    return settle(signature, out);
}

int kvtpy_attribute(PyObject *object, const char *name, PyObject **ret)
{
    *ret = PyObject_GetAttrString(object, name);
    if (*ret != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

bool kvtpy_no_buffer(void)
{
    if (!PyErr_ExceptionMatches(PyExc_BufferError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return false;
    }
    PyErr_Clear();
    return true;
}

/* A new reference to the int that an object stands for. */
static PyObject *integer(PyObject *object, const char *what)
{
    PyObject *number = NULL;

    if (!PyBool_Check(object)) {
        number = PyNumber_Index(object);
    }
    if (number == NULL &&
        (PyErr_Occurred() == NULL || PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %R", what,
                     (PyObject *)Py_TYPE(object));
    }
    return number;
}

static int range_error(const char *what, PyObject *number, const char *bounds)
{
    PyObject *words = PyObject_Str(number);
    const char *text = words == NULL ? NULL
                                     : PyUnicode_AsUTF8AndSize(words, NULL);

    /* An int of more than 4,300 digits has no words. */
    PyErr_Clear();
    (void)kvtpy_raise_text(KVT_ERANGE, "%s is %.40s, it must be %s", what,
                           text == NULL ? "too large" : text, bounds);
    Py_XDECREF(words);
    return -1;
}

int kvtpy_u64(PyObject *object, const char *what, uint64_t *ret)
{
    PyObject *number;
    unsigned long long value;
    int failed = 0;

    if (object == NULL) {
        return 0;
    }
    if (PyLong_CheckExact(object)) {
        number = object;
        Py_INCREF(number);
    } else {
        number = integer(object, what);
    }
    if (number == NULL) {
        return -1;
    }
    value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred() != NULL) {
        PyErr_Clear();
        failed = range_error(what, number, "from 0 to 2**64 - 1");
    } else {
        *ret = value;
    }
    Py_DECREF(number);
    return failed;
}

int kvtpy_u32(PyObject *object, const char *what, uint32_t *ret)
{
    uint64_t value = *ret;

    if (kvtpy_u64(object, what, &value) != 0) {
        return -1;
    }
    if (value > UINT32_MAX) {
        return range_error(what, object, "from 0 to 2**32 - 1");
    }
    *ret = (uint32_t)value;
    return 0;
}

int kvtpy_i32(PyObject *object, const char *what, int32_t *ret)
{
    uint64_t value = (uint64_t)*ret;

    if (object == NULL) {
        return 0;
    }
    if (kvtpy_u64(object, what, &value) != 0) {
        return -1;
    }
    if (value > INT32_MAX) {
        return range_error(what, object, "from 0 to 2**31 - 1");
    }
    *ret = (int32_t)value;
    return 0;
}

int kvtpy_time(PyObject *object, const char *what, uint64_t *ret_ns)
{
    double seconds;

    if (object == NULL) {
        return 0;
    }
    seconds = PyFloat_AsDouble(object);
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    if (isnan(seconds) || seconds < 0) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "%s is %g, it must be seconds from 0 up, or "
                               "None for the default",
                               what, seconds);
        return -1;
    }
    if (seconds > TIME_MAX_S) {
        seconds = TIME_MAX_S;
    }
    *ret_ns = (uint64_t)(seconds * 1e9);
    /* 0 would mean the default. */
    if (*ret_ns == 0) {
        *ret_ns = 1;
    }
    return 0;
}

int kvtpy_name(PyObject *object, const char *what, PyObject **ret)
{
    PyObject *bytes;
    char *text;
    Py_ssize_t length;

    if (PyUnicode_Check(object)) {
        bytes = PyUnicode_AsEncodedString(object, "utf-8", "surrogateescape");
        if (bytes == NULL && PyErr_ExceptionMatches(PyExc_UnicodeError)) {
            PyErr_Clear();
            (void)kvtpy_raise_text(
                KVT_EINVAL, "%s has characters that no UTF-8 text has", what);
        }
    } else if (PyBytes_Check(object)) {
        Py_INCREF(object);
        bytes = object;
    } else {
        bytes = NULL;
        PyErr_Format(PyExc_TypeError, "%s must be str or bytes, not %R", what,
                     (PyObject *)Py_TYPE(object));
    }
    if (bytes == NULL || PyBytes_AsStringAndSize(bytes, &text, &length) != 0) {
        Py_XDECREF(bytes);
        return -1;
    }
    if (strlen(text) != (size_t)length) {
        (void)kvtpy_raise_text(KVT_EINVAL, "%s has a NUL byte inside", what);
        Py_DECREF(bytes);
        return -1;
    }
    *ret = bytes;
    return 0;
}

PyObject *kvtpy_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text),
                                "surrogateescape");
}

static PyObject *field(PyObject *item, Py_ssize_t i)
{
    return PyTuple_Check(item) ? PyTuple_GetItem(item, i)
                               : PyList_GetItem(item, i);
}

int kvtpy_fields(PyObject *item, const char *what, Py_ssize_t at,
                 Py_ssize_t least, Py_ssize_t most, uint64_t *ret,
                 Py_ssize_t *ret_count)
{
    Py_ssize_t count = -1;

    if (PyTuple_Check(item)) {
        count = PyTuple_Size(item);
    } else if (PyList_Check(item)) {
        count = PyList_Size(item);
    }
    if (count < least || count > most) {
        if (count < 0) {
            PyErr_Format(PyExc_TypeError,
                         "%s %zd must be a tuple of integers, not %R", what, at,
                         (PyObject *)Py_TYPE(item));
        } else {
            (void)kvtpy_raise_text(
                KVT_EINVAL, "%s %zd has %zd fields, it must have %zd to %zd",
                what, at, count, least, most);
        }
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *number = field(item, i);
        int failed;

        /* An __index__ written in Python may change the list. */
        if (number == NULL) {
            return -1;
        }
        Py_INCREF(number);
        failed = kvtpy_u64(number, what, &ret[i]);
        Py_DECREF(number);
        if (failed != 0) {
            return -1;
        }
    }
    *ret_count = count;
    return 0;
}
