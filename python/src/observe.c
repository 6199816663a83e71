/* SPDX-License-Identifier: Apache-2.0 */
/* Engines, peers, counters and metrics as objects; fault rules. */
#include "kvtpy.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

/* Each is a struct of the library with a head; fields are read in place. */
struct engine_info {
    PyObject_HEAD struct kvt_engine_info info;
};

struct peer_info {
    PyObject_HEAD struct kvt_peer_info info;
};

struct histogram {
    PyObject_HEAD struct kvt_histogram histogram;
};

struct stats {
    PyObject_HEAD struct kvt_stats stats;
};

static PyTypeObject *engine_info_type;
static PyTypeObject *peer_info_type;
static PyTypeObject *histogram_type;
static PyTypeObject *stats_type;

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_Free(self);
    Py_DECREF(type);
}

/* A char array of a struct; the closure is its offset. */
static PyObject *get_text(PyObject *self, void *offset)
{
    return kvtpy_text((const char *)self + (uintptr_t)offset);
}
#define TEXT(type, field) ((void *)offsetof(struct type, info.field))

/* ----------------------------------------------------------------- engines */

static struct engine_info *engine_of(PyObject *self)
{
    return (struct engine_info *)(void *)self;
}

static PyObject *get_kinds(PyObject *self, void *unused)
{
    uint32_t kinds = engine_of(self)->info.kinds;
    PyObject *list = PyList_New(0);
    PyObject *tuple;

    (void)unused;
    for (uint32_t i = 0; i < 32 && list != NULL; i++) {
        if ((kinds >> i & 1) != 0) {
            PyObject *kind = kvtpy_enum_member(KVTPY_KIND, i);

            if (kind == NULL || PyList_Append(list, kind) != 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(kind);
        }
    }
    if (list == NULL) {
        return NULL;
    }
    tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

static PyObject *get_available(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(engine_of(self)->info.code == KVT_OK);
}

static PyObject *engine_repr(PyObject *self)
{
    const struct kvt_engine_info *info = &engine_of(self)->info;

    return PyUnicode_FromFormat("<kvt.EngineInfo %s %s %s: %s>", info->name,
                                info->version, kvt_errname(info->code),
                                info->text);
}

static PyMemberDef engine_members[] = {
    {"code", T_INT, (Py_ssize_t)offsetof(struct engine_info, info.code),
     READONLY, "0, or why the engine cannot start."},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef engine_properties[] = {
    {"name", get_text, NULL, NULL, TEXT(engine_info, name)},
    {"version", get_text, NULL, "Of the library behind it, \"\" if none.",
     TEXT(engine_info, version)},
    {"text", get_text, NULL, "What it is, or why it cannot start.",
     TEXT(engine_info, text)},
    {"kinds", get_kinds, NULL, "The kvt.Kinds that it moves.", NULL},
    {"available", get_available, NULL, "Whether code is 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

PyObject *kvtpy_engines(PyObject *module, PyObject *unused)
{
    PyObject *list = PyList_New(0);

    (void)module;
    (void)unused;
    for (uint32_t i = 0; list != NULL; i++) {
        struct kvt_engine_info info;
        struct engine_info *item;
        int code;

        /* The first call may load an engine's library. */
        WITHOUT_GIL(code = kvt_engine_info(i, &info));
        if (code != KVT_OK) {
            break;
        }
        item = PyObject_New(struct engine_info, engine_info_type);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        item->info = info;
        if (PyList_Append(list, (PyObject *)item) != 0) {
            Py_CLEAR(list);
        }
        Py_DECREF(item);
    }
    return list;
}

/* ------------------------------------------------------------------- peers */

PyObject *kvtpy_peer_info_new(const struct kvt_peer_info *info)
{
    struct peer_info *self = PyObject_New(struct peer_info, peer_info_type);

    if (self == NULL) {
        return NULL;
    }
    self->info = *info;
    return (PyObject *)self;
}

static PyObject *get_peer_state(PyObject *self, void *unused)
{
    (void)unused;
    return kvtpy_enum_member(KVTPY_PEER_STATE,
                             ((struct peer_info *)(void *)self)->info.state);
}

static PyObject *peer_repr(PyObject *self)
{
    const struct kvt_peer_info *info =
        &((struct peer_info *)(void *)self)->info;
    PyObject *name = kvtpy_text(info->name);
    PyObject *words = NULL;

    if (name != NULL) {
        words = PyUnicode_FromFormat("<kvt.PeerInfo %R path=%s %s>", name,
                                     info->path, kvt_errname(info->code));
        Py_DECREF(name);
    }
    return words;
}

static PyMemberDef peer_members[] = {
#define AT(field) (Py_ssize_t) offsetof(struct peer_info, info.field)
    {"generation", T_ULONGLONG, AT(generation), READONLY,
     "Grows with every add, reload, unload, remove."},
    {"region_count", T_ULONGLONG, AT(region_count), READONLY,
     "Of the metadata."},
    {"layout_count", T_ULONGLONG, AT(layout_count), READONLY,
     "Over this peer."},
    {"inflight", T_ULONGLONG, AT(inflight), READONLY, "Transfers not final."},
    {"code", T_INT, AT(code), READONLY, "Why it is not loaded, or 0."},
#undef AT
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef peer_properties[] = {
    {"name", get_text, NULL, NULL, TEXT(peer_info, name)},
    {"agent_name", get_text, NULL, NULL, TEXT(peer_info, agent_name)},
    {"path", get_text, NULL,
     "\"local\" or \"nixl\": which way its host memory goes.",
     TEXT(peer_info, path)},
    {"text", get_text, NULL, "Why this path, or why it is not loaded.",
     TEXT(peer_info, text)},
    {"state", get_peer_state, NULL, "A kvt.PeerState.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

/* ------------------------------------------------------------------- stats */

static PyObject *histogram_new(const struct kvt_histogram *histogram)
{
    struct histogram *self = PyObject_New(struct histogram, histogram_type);

    if (self == NULL) {
        return NULL;
    }
    self->histogram = *histogram;
    return (PyObject *)self;
}

static PyObject *get_buckets(PyObject *self, void *unused)
{
    const struct kvt_histogram *histogram =
        &((struct histogram *)(void *)self)->histogram;
    PyObject *tuple = PyTuple_New(KVT_HISTOGRAM_BUCKETS);

    (void)unused;
    for (Py_ssize_t i = 0; i < KVT_HISTOGRAM_BUCKETS && tuple != NULL; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(histogram->buckets[i]);

        if (value == NULL || PyTuple_SetItem(tuple, i, value) != 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* The closure is the histogram's offset. */
static PyObject *get_histogram(PyObject *self, void *offset)
{
    const char *at = (const char *)self + (uintptr_t)offset;

    return histogram_new((const struct kvt_histogram *)(const void *)at);
}

static PyMemberDef histogram_members[] = {
    {"count", T_ULONGLONG,
     (Py_ssize_t)offsetof(struct histogram, histogram.count), READONLY, NULL},
    {"sum_ns", T_ULONGLONG,
     (Py_ssize_t)offsetof(struct histogram, histogram.sum_ns), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef histogram_properties[] = {
    {"buckets", get_buckets, NULL,
     "Bucket i counts values below 2**i ns that no lower bucket counts.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

#define COUNTER(field)                                                         \
    {                                                                          \
#field, T_ULONGLONG, (Py_ssize_t)offsetof(struct stats, stats.field),  \
            READONLY, NULL                                                     \
    }
static PyMemberDef stats_members[] = {COUNTER(accepted),
                                      COUNTER(refused),
                                      COUNTER(done),
                                      COUNTER(rejected),
                                      COUNTER(failed),
                                      COUNTER(disconnected),
                                      COUNTER(cancelled),
                                      COUNTER(timed_out),
                                      COUNTER(lost),
                                      COUNTER(quarantined),
                                      COUNTER(inflight),
                                      COUNTER(undrained),
                                      COUNTER(queued_commands),
                                      COUNTER(bytes_written),
                                      COUNTER(bytes_read),
                                      COUNTER(bytes_local),
                                      COUNTER(bytes_nixl),
                                      COUNTER(blocks),
                                      COUNTER(copies),
                                      COUNTER(merged),
                                      COUNTER(chunks),
                                      COUNTER(notes_sent),
                                      COUNTER(notes_failed),
                                      COUNTER(notes_received),
                                      COUNTER(peers),
                                      COUNTER(peers_loaded),
                                      COUNTER(peer_adds),
                                      COUNTER(peer_reloads),
                                      COUNTER(peer_disconnects),
                                      COUNTER(mismatches),
                                      COUNTER(regions),
                                      COUNTER(layouts),
                                      COUNTER(runs),
                                      COUNTER(stalls),
                                      {NULL, 0, 0, 0, NULL}};

static PyGetSetDef stats_properties[] = {
    {"post_ns", get_histogram, NULL, "Accepted to first post.",
     (void *)offsetof(struct stats, stats.post_ns)},
    {"complete_ns", get_histogram, NULL, "Accepted to completed.",
     (void *)offsetof(struct stats, stats.complete_ns)},
    {NULL, NULL, NULL, NULL, NULL}};

PyObject *kvtpy_stats_new(const struct kvt_stats *stats)
{
    struct stats *self = PyObject_New(struct stats, stats_type);

    if (self == NULL) {
        return NULL;
    }
    self->stats = *stats;
    return (PyObject *)self;
}

/* ----------------------------------------------------------------- methods */

static PyObject *get_stats(PyObject *self, PyObject *unused)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_stats stats;
    int code;

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    code = kvt_stats(t, &stats, sizeof stats);
    return code == KVT_OK ? kvtpy_stats_new(&stats) : kvtpy_raise(code, NULL);
}

static PyObject *get_metrics(PyObject *self, PyObject *unused)
{
    kvt_transport *t = kvtpy_get(self);
    size_t capacity = 1 << 16;
    size_t used = 0;
    PyObject *text = NULL;
    char *buffer = NULL;
    int code;

    (void)unused;
    if (t == NULL) {
        return NULL;
    }
    do {
        free(buffer);
        buffer = malloc(capacity);
        if (buffer == NULL) {
            return kvtpy_raise(KVT_ENOMEM, NULL);
        }
        WITHOUT_GIL(code = kvt_metrics(t, buffer, capacity, &used));
        /* Room for what is added before the next try. */
        capacity = used + used / 4 + 4096;
    } while (code == KVT_ERANGE);
    if (code == KVT_OK) {
        text = PyUnicode_DecodeUTF8(buffer, (Py_ssize_t)used, "replace");
    } else {
        (void)kvtpy_raise(code, NULL);
    }
    free(buffer);
    return text;
}

static PyObject *set_fault(PyObject *self, PyObject *rules)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    PyObject *name;
    int code;

    if (t == NULL || kvtpy_name(rules, "rules", &name) != 0) {
        return NULL;
    }
    WITHOUT_GIL(code = kvt_fault(t, PyBytes_AsString(name), &err));
    Py_DECREF(name);
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

PyMethodDef kvtpy_observe_methods[] = {
    {"stats", get_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nThe counters, as a kvt.Stats."},
    {"metrics", get_metrics, METH_NOARGS,
     "metrics($self, /)\n--\n\nEverything as Prometheus text."},
    {"set_fault", set_fault, METH_O,
     "set_fault($self, rules, /)\n--\n\n"
     "Replaces the rules of a \"fault:\" transport; \"\" takes all away."},
    {NULL, NULL, 0, NULL}};

/* ------------------------------------------------------------------- types */

/* A type of values that only we make. */
static int add(PyObject *module, const char *name, const char *doc, size_t size,
               PyMemberDef *members, PyGetSetDef *properties, reprfunc repr,
               PyTypeObject **ret)
{
    PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                           {Py_tp_dealloc, dealloc},
                           {Py_tp_members, members},
                           {Py_tp_getset, properties},
                           {repr == NULL ? 0 : Py_tp_repr, repr},
                           {0, NULL}};
    PyType_Spec spec = {.name = name,
                        .basicsize = (int)size,
                        .flags = Py_TPFLAGS_DEFAULT |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION |
                                 Py_TPFLAGS_IMMUTABLETYPE,
                        .slots = slots};

    return kvtpy_add_type(module, &spec, ret);
}

int kvtpy_observe_init(PyObject *module)
{
    if (add(module, "kvt._kvt.EngineInfo", "One engine of this build.",
            sizeof(struct engine_info), engine_members, engine_properties,
            engine_repr, &engine_info_type) != 0 ||
        add(module, "kvt._kvt.PeerInfo", "What is known of a peer.",
            sizeof(struct peer_info), peer_members, peer_properties, peer_repr,
            &peer_info_type) != 0) {
        return -1;
    }
    if (add(module, "kvt._kvt.Histogram", "A histogram of times.",
            sizeof(struct histogram), histogram_members, histogram_properties,
            NULL, &histogram_type) != 0) {
        return -1;
    }
    return add(module, "kvt._kvt.Stats",
               "The counters of kvt_stats(), under the same names.",
               sizeof(struct stats), stats_members, stats_properties, NULL,
               &stats_type);
}
