/* SPDX-License-Identifier: Apache-2.0 */
/* kvt.Result: one kvt_result, whose fields become objects when asked for. */
#include "kvtpy.h"

#include <stddef.h>
#include <structmember.h>

struct result {
    PyObject_HEAD struct kvt_result result;
};

static PyTypeObject *result_type;
static PyObject *enum_members[KVTPY_ENUM_COUNT]; /* tuples by value */

const struct kvt_result *kvtpy_result_get(PyObject *self)
{
    return &((struct result *)(void *)self)->result;
}

PyObject *kvtpy_result_new(const struct kvt_result *result)
{
    struct result *self = PyObject_New(struct result, result_type);

    if (self == NULL) {
        return NULL;
    }
    self->result = *result;
    return (PyObject *)self;
}

void kvtpy_result_set(PyObject *self, const struct kvt_result *result)
{
    ((struct result *)(void *)self)->result = *result;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_Free(self);
    Py_DECREF(type);
}

PyObject *kvtpy_enum_member(enum kvtpy_enum which, uint32_t value)
{
    PyObject *members = enum_members[which];

    if ((Py_ssize_t)value < PyTuple_Size(members)) {
        PyObject *member = PyTuple_GetItem(members, (Py_ssize_t)value);

        Py_INCREF(member);
        return member;
    }
    return PyLong_FromUnsignedLong(value);
}

/* The values of these enumerations are 0, 1, 2, and so on. */
static int enums_init(void)
{
    static const char *const names[KVTPY_ENUM_COUNT] = {
        [KVTPY_KIND] = "Kind",
        [KVTPY_STATE] = "State",
        [KVTPY_OP] = "Op",
        [KVTPY_SCOPE] = "Scope",
        [KVTPY_PEER_STATE] = "PeerState"};
    PyObject *module = PyImport_ImportModule("kvt._types");
    int failed = module == NULL ? -1 : 0;

    for (int i = 0; i < KVTPY_ENUM_COUNT && failed == 0; i++) {
        PyObject *type = PyObject_GetAttrString(module, names[i]);

        if (type != NULL && enum_members[i] == NULL) {
            enum_members[i] = PySequence_Tuple(type);
        }
        failed = type == NULL || enum_members[i] == NULL ? -1 : 0;
        Py_XDECREF(type);
    }
    Py_XDECREF(module);
    return failed;
}

/* -------------------------------------------------------------- properties */

static PyObject *get_op(PyObject *self, void *unused)
{
    (void)unused;
    return kvtpy_enum_member(KVTPY_OP, kvtpy_result_get(self)->op);
}

static PyObject *get_state(PyObject *self, void *unused)
{
    (void)unused;
    return kvtpy_enum_member(KVTPY_STATE, kvtpy_result_get(self)->state);
}

static PyObject *get_scope(PyObject *self, void *unused)
{
    (void)unused;
    return kvtpy_enum_member(KVTPY_SCOPE, kvtpy_result_get(self)->scope);
}

static PyObject *get_text(PyObject *self, void *unused)
{
    (void)unused;
    return kvtpy_text(kvtpy_result_get(self)->text);
}

static PyObject *get_ok(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(kvtpy_result_get(self)->state == KVT_DONE);
}

/* The closure is the flag. */
static PyObject *get_flag(PyObject *self, void *flag)
{
    uint32_t mask = (uint32_t)(uintptr_t)flag;

    return PyBool_FromLong((kvtpy_result_get(self)->flags & mask) == mask);
}

static PyObject *error_of(PyObject *self, int code, const char *text)
{
    const struct kvt_result *result = kvtpy_result_get(self);
    PyObject *scope = kvtpy_enum_member(KVTPY_SCOPE, result->scope);
    PyObject *error = scope == NULL ? NULL : kvtpy_error_new(code, text);

    if (error != NULL &&
        (PyObject_SetAttrString(error, "result", self) != 0 ||
         PyObject_SetAttrString(error, "scope", scope) != 0 ||
         kvtpy_error_set(error, "engine_code", result->engine_code) != 0)) {
        Py_CLEAR(error);
    }
    Py_XDECREF(scope);
    return error;
}

static PyObject *get_error(PyObject *self, void *unused)
{
    const struct kvt_result *result = kvtpy_result_get(self);

    (void)unused;
    if (result->code == KVT_OK) {
        Py_RETURN_NONE;
    }
    return error_of(self, result->code,
                    result->text[0] == '\0' ? kvt_strerror(result->code)
                                            : result->text);
}

static PyObject *check(PyObject *self, PyObject *unused)
{
    const struct kvt_result *result = kvtpy_result_get(self);
    PyObject *error;

    (void)unused;
    if (result->code != KVT_OK) {
        error = get_error(self, NULL);
    } else if (result->state != KVT_DONE) {
        error = error_of(self, KVT_EBUSY, "the transfer is not finished");
    } else {
        Py_INCREF(self);
        return self;
    }
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *kvtpy_result_outcome(PyObject *self)
{
    return check(self, NULL);
}

static PyObject *repr(PyObject *self)
{
    const struct kvt_result *result = kvtpy_result_get(self);
    PyObject *state = get_state(self, NULL);
    PyObject *name = state == NULL ? NULL
                                   : PyObject_GetAttrString(state, "name");
    PyObject *text = get_text(self, NULL);
    PyObject *words = NULL;

    if (name != NULL && text != NULL) {
        words = PyUnicode_FromFormat(
            "<kvt.Result id=%llu peer=%llu %U code=%s text=%R>",
            (unsigned long long)result->id, (unsigned long long)result->peer,
            name, kvt_errname(result->code), text);
    }
    Py_XDECREF(state);
    Py_XDECREF(name);
    Py_XDECREF(text);
    return words;
}

static PyMemberDef members[] = {
#define AT(field) (Py_ssize_t) offsetof(struct result, result.field)
    {"id", T_ULONGLONG, AT(id), READONLY, "The transfer."},
    {"peer", T_ULONGLONG, AT(peer), READONLY, NULL},
    {"user_data", T_ULONGLONG, AT(user_data), READONLY, NULL},
    {"bytes", T_ULONGLONG, AT(bytes), READONLY, "Of the whole transfer."},
    {"bytes_done", T_ULONGLONG, AT(bytes_done), READONLY,
     "Proven to have landed."},
    {"blocks", T_ULONGLONG, AT(blocks), READONLY,
     "Blocks or pieces asked for."},
    {"copies", T_ULONGLONG, AT(copies), READONLY,
     "Engine descriptors they were merged into so far."},
    {"latency_ns", T_ULONGLONG, AT(latency_ns), READONLY,
     "From accepted to completed; 0 before."},
    {"flags", T_UINT, AT(flags), READONLY, NULL},
    {"tag", T_UINT, AT(tag), READONLY, NULL},
    {"code", T_INT, AT(code), READONLY, "0, or the first error."},
    {"engine_code", T_INT, AT(engine_code), READONLY,
     "The engine's own number for the error, or 0."},
#undef AT
    {NULL, 0, 0, 0, NULL}};

#define FLAG(value) ((void *)(uintptr_t)(value))
static PyGetSetDef properties[] = {
    {"op", get_op, NULL, "A kvt.Op.", NULL},
    {"state", get_state, NULL, "A kvt.State.", NULL},
    {"scope", get_scope, NULL,
     "A kvt.Scope: how much is damaged by the failure.", NULL},
    {"text", get_text, NULL, "The engine's words, \"\" if all is well.", NULL},
    {"ok", get_ok, NULL, "Whether the state is DONE.", NULL},
    {"local_final", get_flag, NULL, "Our memory is touched no more.",
     FLAG(KVT_LOCAL_FINAL)},
    {"peer_final", get_flag, NULL, "The peer's memory is touched no more.",
     FLAG(KVT_PEER_FINAL)},
    {"quiescent", get_flag, NULL, "Both: the blocks may be reused.",
     FLAG(KVT_QUIESCENT)},
    {"finished", get_flag, NULL, "Completed: the state changes no more.",
     FLAG(KVT_FINISHED)},
    {"error", get_error, NULL,
     "A new exception of the class of `code`, or None while that is 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMethodDef methods[] = {
    {"check", check, METH_NOARGS,
     "check($self, /)\n--\n\n"
     "Returns itself if all went well, raises `error` otherwise; Busy when\n"
     "the transfer is not finished."},
    {NULL, NULL, 0, NULL}};

static const char doc[] =
    "One transfer, as status() sees it now or as poll() reports it.";

int kvtpy_results_init(PyObject *module)
{
    static PyType_Slot slots[] = {{Py_tp_doc, (void *)(uintptr_t)doc},
                                  {Py_tp_dealloc, dealloc},
                                  {Py_tp_repr, repr},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, properties},
                                  {Py_tp_methods, methods},
                                  {0, NULL}};
    static PyType_Spec spec = {.name = "kvt._kvt.Result",
                               .basicsize = sizeof(struct result),
                               .flags = Py_TPFLAGS_DEFAULT |
                                        Py_TPFLAGS_DISALLOW_INSTANTIATION |
                                        Py_TPFLAGS_IMMUTABLETYPE,
                               .slots = slots};

    if (enums_init() != 0) {
        return -1;
    }
    return kvtpy_add_type(module, &spec, &result_type);
}
