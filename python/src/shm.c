/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt.SharedMemory: kvt_shm_create() as a buffer. The mapping stays while an
 * export of it lives: a memoryview, an array, or a registration.
 */
#include "kvtpy.h"

struct shm {
    PyObject_HEAD struct kvt_shm shm; /* addr is NULL when closed */
    Py_ssize_t exports;
};

PyTypeObject *kvtpy_shm_type;

static struct shm *shm_of(PyObject *self)
{
    return (struct shm *)(void *)self;
}

static int init(PyObject *self, PyObject *args, PyObject *keywords)
{
    static const struct kvtpy_signature signature = {
        "SharedMemory", 1, 1, 1, {"size"}};
    struct kvt_error err = {.text = ""};
    struct kvt_shm shm;
    PyObject *out[1];
    uint64_t size = 0;
    int code;

    if (kvtpy_args_tuple(&signature, args, keywords, out) != 0 ||
        kvtpy_u64(out[0], "size", &size) != 0) {
        return -1;
    }
    if (shm_of(self)->shm.addr != NULL) {
        (void)kvtpy_raise_text(KVT_EBUSY, "this shared memory exists already");
        return -1;
    }
    if (size > (uint64_t)PY_SSIZE_T_MAX) {
        (void)kvtpy_raise_text(KVT_ERANGE, "no memory has so many bytes");
        return -1;
    }
    WITHOUT_GIL(code = kvt_shm_create(size, &shm, &err));
    if (code != KVT_OK) {
        (void)kvtpy_raise(code, &err);
        return -1;
    }
    if (shm_of(self)->shm.addr != NULL) {
        kvt_shm_destroy(&shm);
        (void)kvtpy_raise_text(KVT_EBUSY, "this shared memory exists already");
        return -1;
    }
    shm_of(self)->shm = shm;
    return 0;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    /* No export is left: each holds a reference to us. */
    kvt_shm_destroy(&shm_of(self)->shm);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int check_open(PyObject *self)
{
    if (shm_of(self)->shm.addr == NULL) {
        (void)kvtpy_raise_text(KVT_ECLOSED, "the shared memory is closed");
        return -1;
    }
    return 0;
}

static int get_buffer(PyObject *self, Py_buffer *view, int flags)
{
    struct shm *shm = shm_of(self);

    if (shm->shm.addr == NULL) {
        PyErr_SetString(PyExc_BufferError, "the shared memory is closed");
        view->obj = NULL;
        return -1;
    }
    if (PyBuffer_FillInfo(view, self, shm->shm.addr,
                          (Py_ssize_t)shm->shm.length, 0, flags) != 0) {
        return -1;
    }
    shm->exports++;
    return 0;
}

static void release_buffer(PyObject *self, Py_buffer *view)
{
    (void)view;
    shm_of(self)->exports--;
}

static Py_ssize_t length(PyObject *self)
{
    return (Py_ssize_t)shm_of(self)->shm.length;
}

static PyObject *close_shm(PyObject *self, PyObject *unused)
{
    struct shm *shm = shm_of(self);

    (void)unused;
    if (shm->exports > 0) {
        PyErr_Format(PyExc_BufferError,
                     "the shared memory is in use: %zd buffers or "
                     "registrations of it are left",
                     shm->exports);
        return NULL;
    }
    kvt_shm_destroy(&shm->shm);
    Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) != 0) {
        return NULL;
    }
    Py_INCREF(self);
    return self;
}

static PyObject *leave(PyObject *self, PyObject *args)
{
    return close_shm(self, args);
}

static PyObject *file_number(PyObject *self, PyObject *unused)
{
    (void)unused;
    return check_open(self) != 0 ? NULL : PyLong_FromLong(shm_of(self)->shm.fd);
}

static PyObject *get_addr(PyObject *self, void *unused)
{
    (void)unused;
    return check_open(self) != 0 ? NULL
                                 : PyLong_FromVoidPtr(shm_of(self)->shm.addr);
}

static PyObject *get_size(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(shm_of(self)->shm.length);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(shm_of(self)->shm.addr == NULL);
}

static PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS, NULL},
    {"__exit__", leave, METH_VARARGS, NULL},
    {"close", close_shm, METH_NOARGS,
     "close($self, /)\n--\n\n"
     "Unmaps it. BufferError while a buffer of it is in use, and while it is\n"
     "registered. Idempotent."},
    {"fileno", file_number, METH_NOARGS,
     "fileno($self, /)\n--\n\nThe descriptor of the sealed memfd behind it."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef properties[] = {
    {"addr", get_addr, NULL, "Where it is mapped.", NULL},
    {"size", get_size, NULL, "Bytes; 0 when closed.", NULL},
    {"closed", get_closed, NULL, "Whether close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static const char doc[] =
    "SharedMemory(size)\n--\n\n"
    "Zeroed shared memory that same-host peers write by memcpy: a sealed\n"
    "memfd. It is a buffer, and register() takes it with its descriptor.";

int kvtpy_shm_init(PyObject *module)
{
    static PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                                  {Py_tp_init, init},
                                  {Py_tp_dealloc, dealloc},
                                  {Py_tp_methods, methods},
                                  {Py_tp_getset, properties},
                                  {Py_sq_length, length},
                                  {Py_bf_getbuffer, get_buffer},
                                  {Py_bf_releasebuffer, release_buffer},
                                  {0, NULL}};
    static PyType_Spec spec = {.name = "kvt._kvt.SharedMemory",
                               .basicsize = sizeof(struct shm),
                               .flags = Py_TPFLAGS_DEFAULT,
                               .slots = slots};

    return kvtpy_add_type(module, &spec, &kvtpy_shm_type);
}
