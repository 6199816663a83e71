/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The module itself. Types and exception classes are kept in static variables,
 * since the log hook and the atexit handler have no module at hand; so only one
 * interpreter of a process may import it.
 */
#include "kvtpy.h"

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <errno.h>
#include <unistd.h>
#include <xxhash.h>

static PyObject *notification_class;

int kvtpy_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **ret)
{
    /* A second import finds the types of the first. */
    if (*ret == NULL) {
        *ret = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    }
    return *ret == NULL ? -1 : PyModule_AddType(module, *ret);
}

PyObject *kvtpy_notification_new(const struct kvt_notification *notification,
                                 const char *data)
{
    PyObject *name = kvtpy_text(notification->agent_name);
    PyObject *object = NULL;

    if (name != NULL) {
        object = PyObject_CallFunction(
            notification_class, "KOy#", (unsigned long long)notification->peer,
            name, data, (Py_ssize_t)notification->length);
        Py_DECREF(name);
    }
    return object;
}

static int import_notification(void)
{
    PyObject *module;

    if (notification_class != NULL) {
        return 0;
    }
    module = PyImport_ImportModule("kvt._types");
    if (module == NULL) {
        return -1;
    }
    notification_class = PyObject_GetAttrString(module, "Notification");
    Py_DECREF(module);
    return notification_class == NULL ? -1 : 0;
}

static PyObject *version(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return kvtpy_text(kvt_version());
}

static PyObject *checksum(PyObject *module, PyObject *object)
{
    unsigned long long sum;
    Py_buffer view;

    (void)module;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    sum = XXH3_64bits(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *ring(PyObject *module, PyObject *object)
{
    const uint64_t one = 1;
    int fd = PyObject_AsFileDescriptor(object);

    (void)module;
    if (fd < 0) {
        return NULL;
    }
    while (write(fd, &one, sizeof one) < 0) {
        if (errno != EINTR) {
            return PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"version", version, METH_NOARGS,
     "version()\n--\n\nThe library's version, for instance \"0.1.0\"."},
    {"engines", kvtpy_engines, METH_NOARGS,
     "engines()\n--\n\n"
     "The engines of this build, whether or not they can start here."},
    {"region_of", (PyCFunction)(void (*)(void))kvtpy_region_of,
     METH_FASTCALL | METH_KEYWORDS,
     "region_of(memory, *, kind=None, device=None)\n--\n\n"
     "The kvt.Region that register() would make of this memory. It holds\n"
     "nothing: keep the memory yourself."},
    {"_desc_rows", (PyCFunction)(void (*)(void))kvtpy_desc_rows, METH_FASTCALL,
     NULL},
    {"_desc_runs", (PyCFunction)(void (*)(void))kvtpy_desc_runs, METH_FASTCALL,
     NULL},
    {"_desc_facts", kvtpy_desc_facts, METH_O, NULL},
    {"_checksum", checksum, METH_O, NULL},
    {"_ring", ring, METH_O, NULL},
    {NULL, NULL, 0, NULL}};

static PyMethodDef shutdown_function = {"_shutdown", kvtpy_shutdown,
                                        METH_NOARGS, NULL};

/* The handler runs while the interpreter is whole and threads that are not
 * daemons have ended. */
static int register_shutdown(void)
{
    static bool registered;
    PyObject *atexit;
    PyObject *function;
    PyObject *answer = NULL;

    if (registered) {
        return 0;
    }
    atexit = PyImport_ImportModule("atexit");
    function = PyCFunction_NewEx(&shutdown_function, NULL, NULL);
    if (atexit != NULL && function != NULL) {
        answer = PyObject_CallMethod(atexit, "register", "O", function);
    }
    registered = answer != NULL;
    Py_XDECREF(answer);
    Py_XDECREF(function);
    Py_XDECREF(atexit);
    return registered ? 0 : -1;
}

static int check_interpreter(void)
{
    static int64_t first = -1;
    int64_t this = PyInterpreterState_GetID(PyInterpreterState_Get());

    if (first != -1 && first != this) {
        PyErr_SetString(PyExc_ImportError,
                        "kvt can be imported by one interpreter of a process, "
                        "and another one has done so");
        return -1;
    }
    first = this;
    return 0;
}

static int execute(PyObject *module)
{
    return check_interpreter() != 0 || kvtpy_errors_init() != 0 ||
                   import_notification() != 0 || kvtpy_log_init() != 0 ||
                   kvtpy_results_init(module) != 0 ||
                   kvtpy_claims_init(module) != 0 ||
                   kvtpy_observe_init(module) != 0 ||
                   kvtpy_shm_init(module) != 0 ||
                   kvtpy_transport_init(module) != 0 ||
                   kvtpy_flights_init(module) != 0 ||
                   kvtpy_polled_init(module) != 0 || register_shutdown() != 0
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kvt",
    .m_doc = "The C library's calls, Pythonic and typed; see kvt.",
    .m_methods = functions, .m_slots = module_slots};

/* Python.h has no prototype for it. */
PyMODINIT_FUNC PyInit__kvt(void);

PyMODINIT_FUNC PyInit__kvt(void)
{
    return PyModuleDef_Init(&definition);
}
