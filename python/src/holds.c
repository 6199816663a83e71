/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory as Python names it, as regions and what keeps them alive.
 *
 * A hold is taken before the library sees the region and let go only after it
 * has given the region back: kvt may write there for as long as it is
 * registered, from threads that Python does not know.
 */
#include "kvtpy.h"

#include <stdlib.h>

#define REGION_FIELDS 6

void kvtpy_hold_free(struct kvtpy_hold *hold)
{
    if (hold == NULL) {
        return;
    }
    if (hold->viewed) {
        PyBuffer_Release(&hold->view);
    }
    Py_XDECREF(hold->owner);
    free(hold);
}

void kvtpy_holds_free(struct kvtpy_hold *holds)
{
    while (holds != NULL) {
        struct kvtpy_hold *hold = holds;

        holds = hold->next;
        kvtpy_hold_free(hold);
    }
}

/* -------------------------------------------------------------- addresses */

/* The field of a region tuple, NULL when it is None or not there. */
static PyObject *field(PyObject *tuple, Py_ssize_t i)
{
    PyObject *value = i < PyTuple_Size(tuple) ? PyTuple_GetItem(tuple, i)
                                              : NULL;

    return value == Py_None ? NULL : value;
}

static int set_fd(PyObject *fd, PyObject *fd_offset, struct kvt_region *ret)
{
    if (fd == NULL) {
        return 0;
    }
    ret->flags |= KVT_REGION_FD;
    return kvtpy_i32(fd, "fd", &ret->fd) != 0 ||
                   kvtpy_u64(fd_offset, "fd_offset", &ret->fd_offset) != 0
               ? -1
               : 0;
}

int kvtpy_region_tuple(PyObject *tuple, Py_ssize_t at, struct kvt_region *ret)
{
    Py_ssize_t count = PyTuple_Size(tuple);

    if (count < 2 || count > REGION_FIELDS) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "region %zd has %zd fields, it must have 2 to "
                               "%d: addr, length, kind, device, fd, fd_offset",
                               at, count, REGION_FIELDS);
        return -1;
    }
    return kvtpy_u64(field(tuple, 0), "addr", &ret->addr) != 0 ||
                   kvtpy_u64(field(tuple, 1), "length", &ret->length) != 0 ||
                   kvtpy_u32(field(tuple, 2), "kind", &ret->kind) != 0 ||
                   kvtpy_u32(field(tuple, 3), "device", &ret->device) != 0
               ? -1
               : set_fd(field(tuple, 4), field(tuple, 5), ret);
}

/* ---------------------------------------------------------------- tensors */

static int call_u64(PyObject *object, const char *method, const char *what,
                    uint64_t *ret)
{
    PyObject *value = PyObject_CallMethod(object, method, NULL);
    int failed;

    if (value == NULL) {
        return -1;
    }
    failed = kvtpy_u64(value, what, ret);
    Py_DECREF(value);
    return failed;
}

static int check_contiguous(PyObject *tensor)
{
    PyObject *method;
    PyObject *answer;
    int is = kvtpy_attribute(tensor, "is_contiguous", &method);

    if (is != 1) {
        return is;
    }
    answer = PyObject_CallFunctionObjArgs(method, NULL);
    Py_DECREF(method);
    if (answer == NULL) {
        return -1;
    }
    is = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (is == 0) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "the tensor is not contiguous: register the one "
                               "that owns the memory, and name blocks by runs");
    }
    return is == 1 ? 0 : -1;
}

static int kind_by_name(PyObject *name)
{
    PyObject *words;

    if (PyUnicode_CompareWithASCIIString(name, "cpu") == 0) {
        return KVT_DRAM;
    }
    if (PyUnicode_CompareWithASCIIString(name, "cuda") == 0) {
        return KVT_VRAM;
    }
    words = PyUnicode_AsUTF8String(name);
    if (words != NULL) {
        (void)kvtpy_raise_text(KVT_EINVAL,
                               "the tensor is on a device of type %.40s, kvt "
                               "knows cpu and cuda: give (addr, length, kind) "
                               "if peers can reach the memory all the same",
                               PyBytes_AsString(words));
        Py_DECREF(words);
    }
    return -1;
}

/* The kind of memory that a tensor is in, or -1: by its device.type. What has
 * no such thing says is_cuda, or is in the host's memory. The tensor of another
 * accelerator is not is_cuda either, and its address is not the host's. */
static int kind_of(PyObject *tensor)
{
    PyObject *device;
    PyObject *value = NULL;
    int found = kvtpy_attribute(tensor, "device", &device);
    int kind = -1;

    if (found == 1) {
        found = kvtpy_attribute(device, "type", &value);
        Py_DECREF(device);
    }
    if (found == 1 && PyUnicode_Check(value)) {
        kind = kind_by_name(value);
    } else if (found >= 0) {
        Py_CLEAR(value);
        found = kvtpy_attribute(tensor, "is_cuda", &value);
        if (found == 1) {
            found = PyObject_IsTrue(value);
        }
        kind = found < 0 ? -1 : found == 1 ? KVT_VRAM : KVT_DRAM;
    }
    Py_XDECREF(value);
    return kind;
}

static int take_device(PyObject *tensor, struct kvtpy_hold *hold)
{
    uint64_t device = 0;

    if (call_u64(tensor, "get_device", "get_device()", &device) != 0) {
        return -1;
    }
    if (device > UINT32_MAX) {
        (void)kvtpy_raise_text(KVT_ERANGE,
                               "get_device() is %llu, it must be from 0 to "
                               "2**32 - 1",
                               (unsigned long long)device);
        return -1;
    }
    hold->region.kind = KVT_VRAM;
    hold->region.device = (uint32_t)device;
    return 0;
}

/* By data_ptr() and nbytes, as torch has them. */
static int take_tensor(PyObject *tensor, struct kvtpy_hold *hold)
{
    PyObject *size;
    int failed;
    int kind;

    if (check_contiguous(tensor) != 0 ||
        call_u64(tensor, "data_ptr", "data_ptr()", &hold->region.addr) != 0) {
        return -1;
    }
    size = PyObject_GetAttrString(tensor, "nbytes");
    if (size == NULL) {
        return -1;
    }
    failed = kvtpy_u64(size, "nbytes", &hold->region.length);
    Py_DECREF(size);
    kind = failed == 0 ? kind_of(tensor) : -1;
    if (kind < 0 || (kind == KVT_VRAM && take_device(tensor, hold) != 0)) {
        return -1;
    }
    Py_INCREF(tensor);
    hold->owner = tensor;
    return 0;
}

/* ---------------------------------------------------------------- buffers */

static int take_shm(PyObject *shm, struct kvtpy_hold *hold)
{
    PyObject *fd = PyObject_CallMethod(shm, "fileno", NULL);
    int failed;

    if (fd == NULL) {
        return -1;
    }
    failed = set_fd(fd, NULL, &hold->region);
    Py_DECREF(fd);
    return failed;
}

static int take_buffer(PyObject *object, struct kvtpy_hold *hold)
{
    /* Whoever imports our metadata may write there. */
    int flags = PyBUF_WRITABLE | PyBUF_ANY_CONTIGUOUS;

    if (PyObject_GetBuffer(object, &hold->view, flags) != 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) ||
            PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear();
            (void)kvtpy_raise_text(KVT_EINVAL,
                                   "the buffer is read-only, closed or not "
                                   "contiguous: peers may write to registered "
                                   "memory, and it must be one piece");
        }
        return -1;
    }
    hold->viewed = true;
    hold->region.addr = (uintptr_t)hold->view.buf;
    hold->region.length = (uint64_t)hold->view.len;
    if (Py_IS_TYPE(object, kvtpy_shm_type)) {
        return take_shm(object, hold);
    }
    return 0;
}

static int take(PyObject *object, Py_ssize_t at,
                const struct kvtpy_region_defaults *defaults,
                struct kvtpy_hold *hold)
{
    PyObject *data_ptr;
    int found;

    if (kvtpy_u32(defaults->kind, "kind", &hold->region.kind) != 0 ||
        kvtpy_u32(defaults->device, "device", &hold->region.device) != 0 ||
        set_fd(defaults->fd, defaults->fd_offset, &hold->region) != 0) {
        return -1;
    }
    if (PyTuple_Check(object)) {
        return kvtpy_region_tuple(object, at, &hold->region);
    }
    if (PyObject_CheckBuffer(object)) {
        return take_buffer(object, hold);
    }
    found = kvtpy_attribute(object, "data_ptr", &data_ptr);
    Py_XDECREF(data_ptr);
    if (found != 0) {
        return found < 0 ? -1 : take_tensor(object, hold);
    }
    PyErr_Format(PyExc_TypeError,
                 "region %zd must be a buffer, a tensor, or a tuple (addr, "
                 "length, ...), not %R",
                 at, (PyObject *)Py_TYPE(object));
    return -1;
}

/* ------------------------------------------------------------------- lists */

/* A tuple is one region when it begins with a number, as kvt.Region does. */
static bool is_many(PyObject *object)
{
    return PyList_Check(object) ||
           (PyTuple_Check(object) &&
            (PyTuple_Size(object) == 0 ||
             !PyIndex_Check(PyTuple_GetItem(object, 0))));
}

static int append(PyObject *object, Py_ssize_t at,
                  const struct kvtpy_region_defaults *defaults,
                  struct kvtpy_hold ***tail)
{
    struct kvtpy_hold *hold = calloc(1, sizeof *hold);

    if (hold == NULL) {
        (void)kvtpy_raise_text(KVT_ENOMEM, "no memory for a region");
        return -1;
    }
    **tail = hold;
    *tail = &hold->next;
    return take(object, at, defaults, hold);
}

static int append_all(PyObject *objects,
                      const struct kvtpy_region_defaults *defaults,
                      struct kvtpy_hold ***tail)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(objects); i++) {
        if (append(PyTuple_GetItem(objects, i), i, defaults, tail) != 0) {
            return -1;
        }
    }
    return 0;
}

int kvtpy_holds(PyObject *object, const struct kvtpy_region_defaults *defaults,
                struct kvtpy_hold **ret, size_t *ret_count)
{
    struct kvtpy_hold *holds = NULL;
    struct kvtpy_hold **tail = &holds;
    PyObject *objects;
    size_t count = 1;
    int failed;

    if (is_many(object)) {
        /* A copy: what we call meanwhile may change a list. */
        objects = PySequence_Tuple(object);
        if (objects == NULL) {
            return -1;
        }
        count = (size_t)PyTuple_Size(objects);
        failed = append_all(objects, defaults, &tail);
        Py_DECREF(objects);
    } else {
        failed = append(object, 0, defaults, &tail);
    }
    if (failed != 0) {
        kvtpy_holds_free(holds);
        return -1;
    }
    *ret = holds;
    *ret_count = count;
    return 0;
}

static PyObject *region_object(const struct kvt_region *region)
{
    PyObject *module = PyImport_ImportModule("kvt._types");
    PyObject *kind = kvtpy_enum_member(KVTPY_KIND, region->kind);
    PyObject *object = NULL;

    if (module != NULL && kind != NULL) {
        bool with_fd = (region->flags & KVT_REGION_FD) != 0;
        PyObject *fd = with_fd ? PyLong_FromLong(region->fd) : Py_None;

        Py_XINCREF(with_fd ? NULL : fd);
        object = fd == NULL ? NULL
                            : PyObject_CallMethod(
                                  module, "Region", "KKOkOK",
                                  (unsigned long long)region->addr,
                                  (unsigned long long)region->length, kind,
                                  (unsigned long)region->device, fd,
                                  (unsigned long long)region->fd_offset);
        Py_XDECREF(fd);
    }
    Py_XDECREF(module);
    Py_XDECREF(kind);
    return object;
}

PyObject *kvtpy_region_of(PyObject *module, PyObject *const *args,
                          Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "region_of", 1, 1, 3, {"memory", "kind", "device"}};
    PyObject *out[3];
    struct kvtpy_region_defaults defaults = {NULL, NULL, NULL, NULL};
    struct kvtpy_hold *hold;
    PyObject *region = NULL;

    (void)module;
    if (kvtpy_args(&signature, args, count, names, out) != 0) {
        return NULL;
    }
    defaults.kind = out[1];
    defaults.device = out[2];
    hold = calloc(1, sizeof *hold);
    if (hold == NULL) {
        return kvtpy_raise_text(KVT_ENOMEM, "no memory for a region");
    }
    if (take(out[0], 0, &defaults, hold) == 0) {
        region = region_object(&hold->region);
    }
    kvtpy_hold_free(hold);
    return region;
}
