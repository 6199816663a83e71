/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments of kvt.Transport() as kvt_options. */
#include "kvtpy.h"

#include <stdlib.h>

enum open_arg {
    ARG_ENGINE,
    ARG_AGENT_NAME,
    ARG_WORKERS,
    ARG_DEVICE,
    ARG_BACKENDS,
    ARG_PARAMS,
    ARG_NIXL_LIBRARY,
    ARG_SAME_HOST,
    ARG_PROBE_METADATA,
    ARG_ALLOW_PTRACE,
    ARG_TELEMETRY,
    ARG_INFLIGHT_MAX,
    ARG_PEERS_MAX,
    ARG_REGIONS_MAX,
    ARG_LAYOUTS_MAX,
    ARG_NOTIFY_MAX,
    ARG_NOTIFY_BYTES_MAX,
    ARG_RUNS_MAX,
    ARG_GRACE,
    ARG_CALL_TIMEOUT,
    ARG_LOG,
    ARG_COUNT
};

static const struct kvtpy_signature open_signature = {
    "Transport",
    1,
    0,
    ARG_COUNT,
    {"engine",       "agent_name",       "workers",
     "device",       "backends",         "params",
     "nixl_library", "same_host",        "probe_metadata",
     "allow_ptrace", "telemetry",        "inflight_max",
     "peers_max",    "regions_max",      "layouts_max",
     "notify_max",   "notify_bytes_max", "runs_max",
     "grace",        "call_timeout",     "log"}};

/* What kvt_options points into. */
struct opening {
    struct kvt_options options;
    PyObject *strings; /* list of the bytes objects pointed at */
    const char **backends;
    struct kvt_param *params;
};

static void opening_fini(struct opening *opening)
{
    free(opening->backends);
    free(opening->params);
    Py_XDECREF(opening->strings);
}

/* A C string that lives as long as `opening`; NULL for no object. */
static int take_string(struct opening *opening, PyObject *object,
                       const char *what, const char **ret)
{
    PyObject *bytes;
    int failed;

    if (object == NULL) {
        return 0;
    }
    if (kvtpy_name(object, what, &bytes) != 0) {
        return -1;
    }
    *ret = PyBytes_AsString(bytes);
    failed = PyList_Append(opening->strings, bytes);
    Py_DECREF(bytes);
    return failed;
}

static int take_flag(struct opening *opening, PyObject *object, bool inverted,
                     enum kvt_open_flag flag)
{
    int truth = object == NULL ? (int)inverted : PyObject_IsTrue(object);

    if (truth < 0) {
        return -1;
    }
    if ((truth == 1) != inverted) {
        opening->options.flags |= flag;
    }
    return 0;
}

static int take_backends(struct opening *opening, PyObject *object)
{
    PyObject *tuple;
    Py_ssize_t count;
    int failed = 0;

    if (object == NULL) {
        return 0;
    }
    if (PyUnicode_Check(object)) {
        PyErr_SetString(PyExc_TypeError,
                        "backends must be a list of names, not one name");
        return -1;
    }
    tuple = PySequence_Tuple(object);
    if (tuple == NULL) {
        return -1;
    }
    count = PyTuple_Size(tuple);
    opening->backends = calloc((size_t)count + 1, sizeof(char *));
    if (opening->backends == NULL) {
        (void)kvtpy_raise(KVT_ENOMEM, NULL);
        failed = -1;
    }
    for (Py_ssize_t i = 0; i < count && failed == 0; i++) {
        failed = take_string(opening, PyTuple_GetItem(tuple, i), "a backend",
                             &opening->backends[i]);
    }
    Py_DECREF(tuple);
    opening->options.backends = opening->backends;
    opening->options.backend_count = (uint32_t)count;
    return failed;
}

/* One parameter; `pair` is (key, value), the value any object with a str(). */
static int append_param(struct opening *opening, const char *backend,
                        PyObject *pair)
{
    uint32_t count = opening->options.param_count;
    struct kvt_param *params = realloc(opening->params,
                                       (count + 1) * sizeof *params);
    PyObject *value;
    int failed;

    if (params == NULL) {
        (void)kvtpy_raise(KVT_ENOMEM, NULL);
        return -1;
    }
    opening->params = params;
    params[count] = (struct kvt_param){.backend = backend};
    value = PyObject_Str(PyTuple_GetItem(pair, 1));
    if (value == NULL) {
        return -1;
    }
    failed = take_string(opening, PyTuple_GetItem(pair, 0), "a parameter's key",
                         &params[count].key);
    if (failed == 0) {
        failed = take_string(opening, value, "a parameter's value",
                             &params[count].value);
    }
    Py_DECREF(value);
    opening->options.param_count = count + 1;
    return failed;
}

/* The items of a mapping as a list of pairs. */
static PyObject *items_of(PyObject *mapping, const char *what)
{
    PyObject *items;

    if (!PyMapping_Check(mapping) || PyUnicode_Check(mapping) ||
        PyList_Check(mapping) || PyTuple_Check(mapping)) {
        PyErr_Format(PyExc_TypeError, "%s must be a mapping, not %R", what,
                     (PyObject *)Py_TYPE(mapping));
        return NULL;
    }
    items = PyMapping_Items(mapping);
    return items;
}

static int take_params(struct opening *opening, PyObject *object)
{
    PyObject *backends;
    int failed = 0;

    if (object == NULL) {
        return 0;
    }
    backends = items_of(object, "params");
    if (backends == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(backends) && failed == 0; i++) {
        PyObject *pair = PyList_GetItem(backends, i);
        const char *backend = NULL;
        PyObject *items = NULL;

        failed = take_string(opening, PyTuple_GetItem(pair, 0), "a backend",
                             &backend);
        if (failed == 0) {
            items = items_of(PyTuple_GetItem(pair, 1),
                             "a backend's parameters");
            failed = items == NULL ? -1 : 0;
        }
        for (Py_ssize_t j = 0; failed == 0 && j < PyList_Size(items); j++) {
            failed = append_param(opening, backend, PyList_GetItem(items, j));
        }
        Py_XDECREF(items);
    }
    Py_DECREF(backends);
    opening->options.params = opening->params;
    return failed;
}

static int take_numbers(struct kvt_options *options, PyObject *const *out)
{
    const struct {
        enum open_arg arg;
        uint32_t *place;
    } numbers[] = {{ARG_WORKERS, &options->workers},
                   {ARG_DEVICE, &options->device},
                   {ARG_INFLIGHT_MAX, &options->inflight_max},
                   {ARG_PEERS_MAX, &options->peers_max},
                   {ARG_REGIONS_MAX, &options->regions_max},
                   {ARG_LAYOUTS_MAX, &options->layouts_max},
                   {ARG_NOTIFY_MAX, &options->notify_max},
                   {ARG_NOTIFY_BYTES_MAX, &options->notify_bytes_max}};

    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        if (kvtpy_u32(out[numbers[i].arg], open_signature.names[numbers[i].arg],
                      numbers[i].place) != 0) {
            return -1;
        }
    }
    return kvtpy_u64(out[ARG_RUNS_MAX], "runs_max", &options->runs_max) != 0 ||
                   kvtpy_time(out[ARG_GRACE], "grace", &options->grace_ns) !=
                       0 ||
                   kvtpy_time(out[ARG_CALL_TIMEOUT], "call_timeout",
                              &options->call_timeout_ns) != 0
               ? -1
               : 0;
}

static int opening_init(struct opening *opening, PyObject *const *out)
{
    struct kvt_options *options = &opening->options;
    int logs = out[ARG_LOG] == NULL ? 1 : PyObject_IsTrue(out[ARG_LOG]);

    *opening = (struct opening){.options = {.size = sizeof *options}};
    opening->strings = PyList_New(0);
    if (opening->strings == NULL || logs < 0) {
        return -1;
    }
    options->log = logs == 1 ? kvtpy_log_hook : NULL;
    return take_string(opening, out[ARG_ENGINE], "engine", &options->engine) !=
                       0 ||
                   take_string(opening, out[ARG_AGENT_NAME], "agent_name",
                               &options->agent_name) != 0 ||
                   take_string(opening, out[ARG_NIXL_LIBRARY], "nixl_library",
                               &options->nixl_library) != 0 ||
                   take_flag(opening, out[ARG_SAME_HOST], true,
                             KVT_OPEN_NO_SAME_HOST) != 0 ||
                   take_flag(opening, out[ARG_PROBE_METADATA], false,
                             KVT_OPEN_PROBE_METADATA) != 0 ||
                   take_flag(opening, out[ARG_ALLOW_PTRACE], false,
                             KVT_OPEN_ALLOW_PTRACE) != 0 ||
                   take_flag(opening, out[ARG_TELEMETRY], true,
                             KVT_OPEN_NO_TELEMETRY) != 0 ||
                   take_backends(opening, out[ARG_BACKENDS]) != 0 ||
                   take_params(opening, out[ARG_PARAMS]) != 0 ||
                   take_numbers(options, out) != 0
               ? -1
               : 0;
}

int kvtpy_open(PyObject *args, PyObject *keywords, kvt_transport **ret)
{
    struct kvt_error err = {.text = ""};
    PyObject *out[ARG_COUNT];
    struct opening opening;
    kvt_transport *t = NULL;
    int code;

    if (kvtpy_args_tuple(&open_signature, args, keywords, out) != 0) {
        return -1;
    }
    if (opening_init(&opening, out) != 0) {
        opening_fini(&opening);
        return -1;
    }
    WITHOUT_GIL(code = kvt_open(&opening.options, &t, &err));
    opening_fini(&opening);
    kvtpy_log_drain();
    if (code != KVT_OK) {
        (void)kvtpy_raise(code, &err);
        return -1;
    }
    *ret = t;
    return 0;
}
