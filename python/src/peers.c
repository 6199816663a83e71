/* SPDX-License-Identifier: Apache-2.0 */
/* Peers and layouts. */
#include "kvtpy.h"

#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- adding */

/* What kvt_peer_params points into. */
struct add {
    struct kvt_peer_params params;
    PyObject *name;
    PyObject *agent_name;
    struct kvt_region *regions;
    bool viewed;
    Py_buffer metadata;
};

static void add_fini(struct add *add)
{
    Py_XDECREF(add->name);
    Py_XDECREF(add->agent_name);
    free(add->regions);
    if (add->viewed) {
        PyBuffer_Release(&add->metadata);
    }
}

static int take_regions(PyObject *object, struct add *add)
{
    PyObject *tuple = PySequence_Tuple(object);
    Py_ssize_t count = tuple == NULL ? 0 : PyTuple_Size(tuple);
    int failed = tuple == NULL ? -1 : 0;

    if (failed == 0) {
        add->regions = calloc((size_t)count + 1, sizeof *add->regions);
        if (add->regions == NULL || count > INT32_MAX) {
            (void)kvtpy_raise(KVT_ENOMEM, NULL);
            failed = -1;
        }
    }
    for (Py_ssize_t i = 0; i < count && failed == 0; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);

        if (PyTuple_Check(item)) {
            failed = kvtpy_region_tuple(item, i, &add->regions[i]);
        } else {
            PyErr_Format(
                PyExc_TypeError,
                "region %zd must be a tuple (addr, length, ...), not %R", i,
                (PyObject *)Py_TYPE(item));
            failed = -1;
        }
    }
    add->params.regions = add->regions;
    add->params.region_count = (uint32_t)count;
    Py_XDECREF(tuple);
    return failed;
}

/* `out` is name, metadata, agent_name, regions. */
static int add_init(struct add *add, PyObject *const *out)
{
    *add = (struct add){.params = {.size = sizeof add->params}};
    if (kvtpy_name(out[0], "name", &add->name) != 0) {
        return -1;
    }
    add->params.name = PyBytes_AsString(add->name);
    if (PyObject_GetBuffer(out[1], &add->metadata, PyBUF_SIMPLE) != 0) {
        return -1;
    }
    add->viewed = true;
    add->params.metadata = add->metadata.buf;
    add->params.metadata_length = (size_t)add->metadata.len;
    if (out[2] != NULL) {
        if (kvtpy_name(out[2], "agent_name", &add->agent_name) != 0) {
            return -1;
        }
        add->params.agent_name = PyBytes_AsString(add->agent_name);
    }
    return out[3] == NULL ? 0 : take_regions(out[3], add);
}

static PyObject *add_peer(PyObject *self, PyObject *const *args,
                          Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "add_peer",
        2,
        2,
        5,
        {"name", "metadata", "agent_name", "regions", "timeout"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    PyObject *result = NULL;
    PyObject *out[5];
    struct add add;
    kvt_peer peer;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0) {
        return NULL;
    }
    if (add_init(&add, out) == 0 &&
        kvtpy_time(out[4], "timeout", &add.params.timeout_ns) == 0) {
        WITHOUT_GIL(code = kvt_peer_add(t, &add.params, &peer, &err));
        result = code == KVT_OK ? PyLong_FromUnsignedLongLong(peer)
                                : kvtpy_raise(code, &err);
    }
    add_fini(&add);
    kvtpy_log_drain();
    return result;
}

static PyObject *start_add_peer(PyObject *self, PyObject *const *args,
                                Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "start_add_peer",
        2,
        2,
        5,
        {"name", "metadata", "agent_name", "regions", "user_data"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    PyObject *result = NULL;
    PyObject *out[5];
    struct add add;
    kvt_peer peer;
    kvt_xfer xfer;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0) {
        return NULL;
    }
    if (add_init(&add, out) == 0 &&
        kvtpy_u64(out[4], "user_data", &add.params.user_data) == 0) {
        /* Checks and copies the metadata before it returns. */
        WITHOUT_GIL(
            code = kvt_peer_add_async(t, &add.params, &peer, &xfer, &err));
        result = code == KVT_OK
                     ? Py_BuildValue("(KK)", (unsigned long long)peer,
                                     (unsigned long long)xfer)
                     : kvtpy_raise(code, &err);
    }
    add_fini(&add);
    kvtpy_log_drain();
    return result;
}

/* ------------------------------------------------------------ by their id */

static PyObject *raise_peer(int code, kvt_peer peer)
{
    return kvtpy_raise_text(code, "peer %llu: %s", (unsigned long long)peer,
                            kvt_strerror(code));
}

static PyObject *find_peer(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    PyObject *name;
    kvt_peer peer;
    int code;

    if (t == NULL || kvtpy_name(object, "name", &name) != 0) {
        return NULL;
    }
    code = kvt_peer_find(t, PyBytes_AsString(name), &peer);
    Py_DECREF(name);
    return code == KVT_OK ? PyLong_FromUnsignedLongLong(peer)
                          : kvtpy_raise_text(code, "no peer has this name: %s",
                                             kvt_strerror(code));
}

static PyObject *peer_loaded(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    kvt_peer peer = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "peer", &peer) != 0) {
        return NULL;
    }
    code = kvt_peer_loaded(t, peer);
    return code >= 0 ? PyBool_FromLong(code) : raise_peer(code, peer);
}

static PyObject *peer_info(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_peer_info info;
    kvt_peer peer = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "peer", &peer) != 0) {
        return NULL;
    }
    code = kvt_peer_info(t, peer, &info);
    return code == KVT_OK ? kvtpy_peer_info_new(&info) : raise_peer(code, peer);
}

static PyObject *remove_peer(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    kvt_peer peer = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "peer", &peer) != 0) {
        return NULL;
    }
    code = kvt_peer_remove(t, peer);
    if (code != KVT_OK) {
        return raise_peer(code, peer);
    }
    Py_RETURN_NONE;
}

static PyObject *confirm_peer_dead(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    kvt_peer peer = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "peer", &peer) != 0) {
        return NULL;
    }
    code = kvt_peer_confirm_dead(t, peer);
    if (code != KVT_OK) {
        return raise_peer(code, peer);
    }
    Py_RETURN_NONE;
}

static PyObject *reload_peer(PyObject *self, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "reload_peer", 2, 1, 3, {"peer", "metadata", "timeout"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    Py_buffer view = {.buf = NULL};
    uint64_t timeout_ns = 0;
    kvt_peer peer = 0;
    PyObject *out[3];
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "peer", &peer) != 0 ||
        kvtpy_time(out[2], "timeout", &timeout_ns) != 0) {
        return NULL;
    }
    if (out[1] != NULL &&
        PyObject_GetBuffer(out[1], &view, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    WITHOUT_GIL(code = kvt_peer_reload(t, peer, view.buf, (size_t)view.len,
                                       timeout_ns, &err));
    if (out[1] != NULL) {
        PyBuffer_Release(&view);
    }
    kvtpy_log_drain();
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *unload_peer(PyObject *self, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "unload_peer", 1, 1, 2, {"peer", "timeout"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    uint64_t timeout_ns = 0;
    kvt_peer peer = 0;
    PyObject *out[2];
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "peer", &peer) != 0 ||
        kvtpy_time(out[1], "timeout", &timeout_ns) != 0) {
        return NULL;
    }
    WITHOUT_GIL(code = kvt_peer_unload(t, peer, timeout_ns, &err));
    kvtpy_log_drain();
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

/* ----------------------------------------------------------------- layouts */

static PyObject *prepare(PyObject *self, PyObject *const *args,
                         Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "prepare", 3, 2, 3, {"name", "runs", "peer"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    kvt_peer peer = KVT_SELF;
    kvt_layout layout;
    struct kvtpy_runs runs;
    PyObject *out[3];
    PyObject *name;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[2], "peer", &peer) != 0 ||
        kvtpy_name(out[0], "name", &name) != 0) {
        return NULL;
    }
    if (kvtpy_runs(out[1], &runs) != 0) {
        kvtpy_runs_fini(&runs);
        Py_DECREF(name);
        return NULL;
    }
    WITHOUT_GIL(code = kvt_prepare(t, peer, PyBytes_AsString(name), runs.data,
                                   runs.count, &layout, &err));
    kvtpy_runs_fini(&runs);
    Py_DECREF(name);
    return code == KVT_OK ? PyLong_FromUnsignedLongLong(layout)
                          : kvtpy_raise(code, &err);
}

static PyObject *find_layout(PyObject *self, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "find_layout", 2, 1, 2, {"name", "peer"}};
    kvt_transport *t = kvtpy_get(self);
    kvt_peer peer = KVT_SELF;
    kvt_layout layout;
    PyObject *out[2];
    PyObject *name;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[1], "peer", &peer) != 0 ||
        kvtpy_name(out[0], "name", &name) != 0) {
        return NULL;
    }
    code = kvt_layout_find(t, peer, PyBytes_AsString(name), &layout);
    Py_DECREF(name);
    return code == KVT_OK
               ? PyLong_FromUnsignedLongLong(layout)
               : kvtpy_raise_text(code, "no layout has this name: %s",
                                  kvt_strerror(code));
}

static PyObject *drop_layout(PyObject *self, PyObject *object)
{
    kvt_transport *t = kvtpy_get(self);
    kvt_layout layout = 0;
    int code;

    if (t == NULL || kvtpy_u64(object, "layout", &layout) != 0) {
        return NULL;
    }
    code = kvt_layout_drop(t, layout);
    if (code != KVT_OK) {
        return kvtpy_raise_text(code, "layout %llu: %s",
                                (unsigned long long)layout, kvt_strerror(code));
    }
    Py_RETURN_NONE;
}

#define METHOD(function) (PyCFunction)(void (*)(void))(function)

PyMethodDef kvtpy_peer_methods[] = {
    {"add_peer", METHOD(add_peer), METH_FASTCALL | METH_KEYWORDS,
     "add_peer($self, name, metadata, *, agent_name=None, regions=None,\n"
     "         timeout=None)\n--\n\n"
     "Imports a peer, waits until it can be written to, and returns its id.\n"
     "A known name is torn down first. `agent_name` and `regions` are checked\n"
     "against the metadata."},
    {"start_add_peer", METHOD(start_add_peer), METH_FASTCALL | METH_KEYWORDS,
     "start_add_peer($self, name, metadata, *, agent_name=None,\n"
     "               regions=None, user_data=0)\n--\n\n"
     "The same without waiting: (peer, transfer). The transfer, of op ADD,\n"
     "completes through poll() or wait()."},
    {"find_peer", find_peer, METH_O,
     "find_peer($self, name, /)\n--\n\nThe id behind a name."},
    {"peer_loaded", peer_loaded, METH_O,
     "peer_loaded($self, peer, /)\n--\n\n"
     "Whether writes are taken; False for unknown ids."},
    {"peer_info", peer_info, METH_O,
     "peer_info($self, peer, /)\n--\n\nWhat is known of a peer."},
    {"reload_peer", METHOD(reload_peer), METH_FASTCALL | METH_KEYWORDS,
     "reload_peer($self, peer, metadata=None, *, timeout=None)\n--\n\n"
     "Unloads, then loads again: the kept metadata, or the new one."},
    {"unload_peer", METHOD(unload_peer), METH_FASTCALL | METH_KEYWORDS,
     "unload_peer($self, peer, *, timeout=None)\n--\n\n"
     "Stops new work at once and takes the peer from the engine when its\n"
     "posted requests are final or lost; it can be loaded again."},
    {"remove_peer", remove_peer, METH_O,
     "remove_peer($self, peer, /)\n--\n\n"
     "Forgets a peer. poll() still drains its results."},
    {"confirm_peer_dead", confirm_peer_dead, METH_O,
     "confirm_peer_dead($self, peer, /)\n--\n\n"
     "The caller's proof that the peer's process is gone."},
    {"prepare", METHOD(prepare), METH_FASTCALL | METH_KEYWORDS,
     "prepare($self, name, runs, peer=0)\n--\n\n"
     "Names a list of runs of ours or of a peer, and returns the layout's id.\n"
     "A block's index is its position in the runs, counted in order. The same\n"
     "name again replaces the old layout. Runs are tuples, or a buffer of\n"
     "64-bit integers with a row for each run."},
    {"find_layout", METHOD(find_layout), METH_FASTCALL | METH_KEYWORDS,
     "find_layout($self, name, peer=0)\n--\n\nThe current layout of a name."},
    {"drop_layout", drop_layout, METH_O,
     "drop_layout($self, layout, /)\n--\n\n"
     "Forgets a layout; transfers that use it go on."},
    {NULL, NULL, 0, NULL}};
