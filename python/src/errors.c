/* SPDX-License-Identifier: Apache-2.0 */
/* Error codes as exceptions. The classes are written in kvt/_errors.py. */
#include "kvtpy.h"

#include <stdarg.h>
#include <stdio.h>

#define CLASSES_MAX 64

static PyObject *base_class;
static PyObject *classes[CLASSES_MAX]; /* of code -1 at 0, and so on */

int kvtpy_errors_init(void)
{
    PyObject *module;
    PyObject *list = NULL;
    int failed = -1;

    if (base_class != NULL) {
        return 0;
    }
    module = PyImport_ImportModule("kvt._errors");
    if (module == NULL) {
        return -1;
    }
    list = PyObject_GetAttrString(module, "CLASSES");
    if (list == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(list) && i < CLASSES_MAX; i++) {
        classes[i] = PyTuple_GetItem(list, i);
        Py_XINCREF(classes[i]);
    }
    base_class = PyObject_GetAttrString(module, "Error");
    failed = base_class == NULL ? -1 : 0;
done:
    Py_XDECREF(list);
    Py_DECREF(module);
    return failed;
}

static PyObject *class_of(int code)
{
    if (code < 0 && code >= -CLASSES_MAX && classes[-1 - code] != NULL) {
        return classes[-1 - code];
    }
    return base_class;
}

int kvtpy_error_set(PyObject *error, const char *name, long long value)
{
    PyObject *number = PyLong_FromLongLong(value);
    int failed;

    if (number == NULL) {
        return -1;
    }
    failed = PyObject_SetAttrString(error, name, number);
    Py_DECREF(number);
    return failed;
}

PyObject *kvtpy_error_new(int code, const char *text)
{
    PyObject *cls = class_of(code);
    PyObject *words = kvtpy_text(text);
    PyObject *error;

    if (words == NULL) {
        return NULL;
    }
    error = PyObject_CallFunctionObjArgs(cls, words, NULL);
    if (error != NULL &&
        (PyObject_SetAttrString(error, "text", words) != 0 ||
         (cls == base_class && kvtpy_error_set(error, "code", code) != 0))) {
        Py_CLEAR(error);
    }
    Py_DECREF(words);
    return error;
}

static void raise_new(int code, const char *text, int os_errno)
{
    PyObject *error = kvtpy_error_new(code, text);

    if (error == NULL) {
        return;
    }
    if (os_errno == 0 || kvtpy_error_set(error, "os_errno", os_errno) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    }
    Py_DECREF(error);
}

PyObject *kvtpy_raise(int code, const struct kvt_error *err)
{
    if (err != NULL && err->text[0] != '\0') {
        raise_new(code, err->text, err->os_errno);
    } else {
        raise_new(code, kvt_strerror(code), 0);
    }
    return NULL;
}

PyObject *kvtpy_raise_text(int code, const char *format, ...)
{
    char text[KVT_TEXT_MAX];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    raise_new(code, text, 0);
    return NULL;
}
