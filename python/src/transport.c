/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt._kvt.Transport: its life.
 *
 * Open ones are in the list `live`, for the atexit handler, which closes them
 * while the interpreter is whole: afterwards none of kvt's threads runs, and
 * whatever order objects are then destroyed in does no harm. A transport that
 * is collected unclosed is closed by its finalizer, before the collector clears
 * anything. kvt_free() is called only by the deallocator: a thread in a call
 * has a reference, so none is left.
 *
 * Memory is let go of when kvt_close() says that it is touched no more; when
 * it says otherwise the holds are leaked on purpose, for the life of the
 * process. In a forked child everything but close answers kvt.Forked.
 */
#include "kvtpy.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* How long one that nobody closed may take: half of it is for work in flight
 * to finish by itself. */
#define LAST_CALL_NS ((uint64_t)2 * 1000 * 1000 * 1000)

PyTypeObject *kvtpy_transport_type;
static struct kvtpy_transport *live; /* under the GIL, as all here */
static bool exiting;

kvt_transport *kvtpy_get(PyObject *self)
{
    kvt_transport *t = kvtpy_self(self)->t;

    if (t == NULL) {
        (void)kvtpy_raise_text(KVT_ECLOSED,
                               "the transport was never opened: call "
                               "Transport.__init__() first");
    }
    return t;
}

static void link_live(struct kvtpy_transport *self)
{
    self->live_prev = NULL;
    self->live_next = live;
    if (live != NULL) {
        live->live_prev = self;
    }
    live = self;
}

static void unlink_live(struct kvtpy_transport *self)
{
    if (self->live_prev != NULL) {
        self->live_prev->live_next = self->live_next;
    } else if (live == self) {
        live = self->live_next;
    }
    if (self->live_next != NULL) {
        self->live_next->live_prev = self->live_prev;
    }
    self->live_prev = NULL;
    self->live_next = NULL;
}

/* -------------------------------------------------------------------- close */

/* Closes, and lets go of memory or gives it up. Returns kvt_close()'s code. */
static int end(struct kvtpy_transport *self, uint64_t timeout_ns,
               struct kvt_error *err)
{
    struct kvtpy_hold *holds;
    int code;

    WITHOUT_GIL(code = kvt_close(self->t, timeout_ns, err));
    if (code == KVT_ENOMEM) {
        return code; /* the one failure that leaves it open */
    }
    unlink_live(self);
    self->closed = true;
    holds = self->holds;
    self->holds = NULL;
    if (code == KVT_OK) {
        self->released = true;
        kvtpy_holds_free(holds);
    }
    kvtpy_log_drain();
    return code;
}

static PyObject *close_transport(PyObject *self, PyObject *const *args,
                                 Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "close", 1, 0, 1, {"timeout"}};
    struct kvt_error err = {.text = ""};
    uint64_t timeout_ns = 0;
    PyObject *out[1];
    int code;

    if (kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_time(out[0], "timeout", &timeout_ns) != 0) {
        return NULL;
    }
    if (kvtpy_self(self)->t == NULL) {
        Py_RETURN_NONE;
    }
    code = end(kvtpy_self(self), timeout_ns, &err);
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

/* For a transport that nobody closed. */
static void end_quietly(struct kvtpy_transport *self)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    (void)end(self, LAST_CALL_NS, NULL);
    PyErr_Restore(type, value, traceback);
}

static void finalize(PyObject *self)
{
    struct kvtpy_transport *transport = kvtpy_self(self);
    PyObject *type;
    PyObject *value;
    PyObject *traceback;

    if (transport->t == NULL || transport->closed) {
        return;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_ResourceWarning(self, 1, "unclosed %R", self) != 0) {
        PyErr_WriteUnraisable(self);
    }
    PyErr_Restore(type, value, traceback);
    end_quietly(transport);
}

PyObject *kvtpy_shutdown(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    exiting = true;
    while (live != NULL) {
        struct kvtpy_transport *self = live;

        /* Taken out first: another thread may be closing it. */
        Py_INCREF((PyObject *)self);
        unlink_live(self);
        end_quietly(self);
        Py_DECREF((PyObject *)self);
    }
    kvtpy_log_stop();
    Py_RETURN_NONE;
}

/* -------------------------------------------------------------------- object */

static int init(PyObject *self, PyObject *args, PyObject *keywords)
{
    struct kvtpy_transport *transport = kvtpy_self(self);
    kvt_transport *t = NULL;
    int failed;

    if (transport->t != NULL || transport->opening) {
        (void)kvtpy_raise_text(KVT_EBUSY, "this transport is open already");
        return -1;
    }
    if (exiting) {
        (void)kvtpy_raise_text(KVT_ECLOSED, "the interpreter is exiting");
        return -1;
    }
    transport->opening = true;
    failed = kvtpy_open(args, keywords, &t);
    transport->opening = false;
    if (failed != 0) {
        return -1;
    }
    transport->t = t;
    link_live(transport);
    return 0;
}

static PyObject *new_transport(PyTypeObject *type, PyObject *args,
                               PyObject *keywords)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = alloc(type, 0);
    struct kvtpy_transport *transport;

    (void)args;
    (void)keywords;
    if (self == NULL) {
        return NULL;
    }
    transport = kvtpy_self(self);
    transport->ready_fd = -1;
    transport->kept_fd = -1;
    transport->silent = PySet_New(NULL);
    transport->kept = PyList_New(0);
    transport->notes = PyList_New(0);
    if (transport->silent == NULL || transport->kept == NULL ||
        transport->notes == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    struct kvtpy_transport *transport = kvtpy_self(self);

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(transport->silent);
    Py_VISIT(transport->kept);
    Py_VISIT(transport->notes);
    for (const struct kvtpy_hold *hold = transport->holds; hold != NULL;
         hold = hold->next) {
        Py_VISIT(hold->owner);
        if (hold->viewed) {
            Py_VISIT(hold->view.obj);
        }
    }
    return 0;
}

static void dealloc(PyObject *self)
{
    struct kvtpy_transport *transport = kvtpy_self(self);
    PyTypeObject *type = Py_TYPE(self);

    PyObject_GC_UnTrack(self);
    if (transport->t != NULL && !transport->closed) {
        /* Not of a subclass: those call the finalizer by themselves. */
        unlink_live(transport);
        end_quietly(transport);
    }
    if (transport->ready_fd >= 0) {
        close(transport->ready_fd);
    }
    if (transport->kept_fd >= 0) {
        close(transport->kept_fd);
    }
    kvt_free(transport->t);
    Py_CLEAR(transport->silent);
    Py_CLEAR(transport->kept);
    Py_CLEAR(transport->notes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int watch(int set, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.fd = fd}};

    return epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
}

/* An epoll over the library's descriptor and kept_fd. Such a set is itself
 * readable, by level, while one of its members is. */
static PyObject *file_number(PyObject *self, PyObject *unused)
{
    struct kvtpy_transport *transport = kvtpy_self(self);
    kvt_transport *t = kvtpy_get(self);
    int fd;

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    fd = kvt_fd(t);
    if (fd < 0) {
        return kvtpy_raise(fd, NULL);
    }
    if (transport->ready_fd < 0) {
        int kept = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        int set = epoll_create1(EPOLL_CLOEXEC);

        if (kept < 0 || set < 0 || watch(set, fd) != 0 ||
            watch(set, kept) != 0) {
            struct kvt_error err = {.code = KVT_ESYSTEM,
                                    .os_errno = errno,
                                    .text = "no descriptor to wait on: the "
                                            "process has too many open"};

            (void)kvtpy_raise(KVT_ESYSTEM, &err);
            if (kept >= 0) {
                close(kept);
            }
            if (set >= 0) {
                close(set);
            }
            return NULL;
        }
        transport->kept_fd = kept;
        transport->ready_fd = set;
        kvtpy_kept_signal(transport);
    }
    return PyLong_FromLong(transport->ready_fd);
}

static PyObject *get_agent_name(PyObject *self, void *unused)
{
    kvt_transport *t = kvtpy_get(self);
    const char *name;

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    name = kvt_agent_name(t);
    return name == NULL ? kvtpy_raise(KVT_EFORKED, NULL) : kvtpy_text(name);
}

static PyObject *get_closed(PyObject *self, void *unused)
{
    const struct kvtpy_transport *transport = kvtpy_self(self);

    (void)unused;
    return PyBool_FromLong(transport->t == NULL || transport->closed);
}

static PyMethodDef life_methods[] = {
    {"close", (PyCFunction)(void (*)(void))close_transport,
     METH_FASTCALL | METH_KEYWORDS,
     "close($self, timeout=None)\n--\n\n"
     "Ends the transport; idempotent. poll(), status(), stats() and\n"
     "notifications() still answer. Busy when some transfers are not\n"
     "quiescent: it is closed all the same, and their memory is kept for the\n"
     "life of the process."},
    {"fileno", file_number, METH_NOARGS,
     "fileno($self, /)\n--\n\n"
     "A descriptor that is readable while poll() or notifications() has\n"
     "something. For select, selectors and asyncio; never read it."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef properties[] = {
    {"agent_name", get_agent_name, NULL, "The agent's name.", NULL},
    {"closed", get_closed, NULL, "Whether it is closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static const char doc[] =
    "Transport(engine=None, *, agent_name=None, workers=0, device=0,\n"
    "          backends=None, params=None, nixl_library=None,\n"
    "          same_host=True, probe_metadata=False, allow_ptrace=False,\n"
    "          telemetry=True, inflight_max=0, peers_max=0, regions_max=0,\n"
    "          layouts_max=0, notify_max=0, notify_bytes_max=0, runs_max=0,\n"
    "          grace=None, call_timeout=None, log=True)\n--\n\n"
    "The calls of the C library. kvt.Transport adds the waits.\n\n"
    "None and 0 take the library's defaults; times are seconds. `params` maps\n"
    "a backend's name to its parameters. With `log`, lines go to the logger\n"
    "\"kvt\".";

/* The methods of all files as one table, made once. */
static PyMethodDef *all_methods(void)
{
    static PyMethodDef all[64];
    PyMethodDef *const parts[] = {life_methods,         kvtpy_memory_methods,
                                  kvtpy_peer_methods,   kvtpy_move_methods,
                                  kvtpy_drain_methods,  kvtpy_note_methods,
                                  kvtpy_observe_methods};
    size_t count = 0;

    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        for (PyMethodDef *at = parts[i]; at->ml_name != NULL; at++) {
            if (count + 1 < COUNT_OF(all)) {
                all[count++] = *at;
            }
        }
    }
    return all;
}

int kvtpy_transport_init(PyObject *module)
{
    PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                           {Py_tp_new, new_transport},
                           {Py_tp_init, init},
                           {Py_tp_dealloc, dealloc},
                           {Py_tp_finalize, finalize},
                           {Py_tp_traverse, traverse},
                           {Py_tp_methods, all_methods()},
                           {Py_tp_getset, properties},
                           {0, NULL}};
    PyType_Spec spec = {.name = "kvt._kvt.Transport",
                        .basicsize = sizeof(struct kvtpy_transport),
                        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE |
                                 Py_TPFLAGS_HAVE_GC,
                        .slots = slots};

    return kvtpy_add_type(module, &spec, &kvtpy_transport_type);
}
