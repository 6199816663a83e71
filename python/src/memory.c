/* SPDX-License-Identifier: Apache-2.0 */
/*
 * register(), deregister() and metadata(), and the holds of a transport.
 *
 * self->holds has one entry for each registration of ours, found again by the
 * region's value: that is how the library counts them too. Two threads may be
 * in the library at once; the list is only touched with the GIL.
 */
#include "kvtpy.h"

#include <stdlib.h>

static PyObject *owner_of(const struct kvtpy_hold *hold)
{
    return hold->viewed ? hold->view.obj : hold->owner;
}

static bool same_region(const struct kvt_region *a, const struct kvt_region *b)
{
    return a->addr == b->addr && a->length == b->length && a->kind == b->kind &&
           a->device == b->device;
}

/* The link to a hold of this region, best one of the same owner, or NULL. */
static struct kvtpy_hold **find(struct kvtpy_transport *self,
                                const struct kvtpy_hold *like)
{
    struct kvtpy_hold **found = NULL;

    for (struct kvtpy_hold **at = &self->holds; *at != NULL;
         at = &(*at)->next) {
        if (!same_region(&(*at)->region, &like->region)) {
            continue;
        }
        if (owner_of(*at) == owner_of(like)) {
            return at;
        }
        found = found == NULL ? at : found;
    }
    return found;
}

/* The regions of holds as an array to give to the library. */
static struct kvt_region *array_of(const struct kvtpy_hold *holds, size_t count)
{
    struct kvt_region *regions = calloc(count + 1, sizeof *regions);
    size_t i = 0;

    if (regions == NULL) {
        (void)kvtpy_raise_text(KVT_ENOMEM, "no memory for %zu regions", count);
        return NULL;
    }
    for (; holds != NULL; holds = holds->next) {
        regions[i++] = holds->region;
    }
    return regions;
}

/* Keeps holds for as long as the library may touch their memory. */
static void keep(struct kvtpy_transport *self, struct kvtpy_hold *holds,
                 bool leaving)
{
    while (holds != NULL) {
        struct kvtpy_hold *hold = holds;

        holds = hold->next;
        if (hold->region.length == 0) {
            /* The library skips it and will not know it again. */
            kvtpy_hold_free(hold);
            continue;
        }
        hold->leaving = leaving;
        hold->next = self->holds;
        self->holds = hold;
    }
    if (self->released) {
        /* Another thread closed the transport before we had the GIL back. */
        holds = self->holds;
        self->holds = NULL;
        kvtpy_holds_free(holds);
    }
}

static PyObject *register_memory(PyObject *self, PyObject *const *args,
                                 Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "register",
        1,
        1,
        6,
        {"regions", "kind", "device", "fd", "fd_offset", "timeout"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    struct kvtpy_region_defaults defaults;
    struct kvt_region *regions;
    struct kvtpy_hold *holds;
    uint64_t timeout_ns = 0;
    PyObject *out[6];
    size_t found;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_time(out[5], "timeout", &timeout_ns) != 0) {
        return NULL;
    }
    defaults = (struct kvtpy_region_defaults){out[1], out[2], out[3], out[4]};
    if (kvtpy_holds(out[0], &defaults, &holds, &found) != 0) {
        return NULL;
    }
    regions = array_of(holds, found);
    if (regions == NULL) {
        kvtpy_holds_free(holds);
        return NULL;
    }
    WITHOUT_GIL(code = kvt_register(t, regions, found, timeout_ns, &err));
    free(regions);
    if (code == KVT_OK || code == KVT_ETIMEDOUT) {
        /* One that timed out is undone in the background: nobody tells us
         * when, so it is kept until the transport is closed. */
        keep(kvtpy_self(self), holds, code != KVT_OK);
    } else {
        kvtpy_holds_free(holds);
    }
    kvtpy_log_drain();
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

/* An earlier call for these timed out, and went on to the end meanwhile. */
static bool all_leaving(struct kvtpy_transport *self,
                        const struct kvtpy_hold *wanted)
{
    bool any = false;

    for (; wanted != NULL; wanted = wanted->next) {
        struct kvtpy_hold **at = find(self, wanted);

        if (wanted->region.length == 0) {
            continue;
        }
        if (at == NULL || !(*at)->leaving) {
            return false;
        }
        any = true;
    }
    return any;
}

static void let_go(struct kvtpy_transport *self,
                   const struct kvtpy_hold *wanted)
{
    struct kvtpy_hold *gone = NULL;

    for (; wanted != NULL; wanted = wanted->next) {
        struct kvtpy_hold **at = find(self, wanted);

        if (at != NULL) {
            struct kvtpy_hold *hold = *at;

            *at = hold->next;
            hold->next = gone;
            gone = hold;
        }
    }
    /* Last, since letting go of a buffer may run any code. */
    kvtpy_holds_free(gone);
}

static void mark_leaving(struct kvtpy_transport *self,
                         const struct kvtpy_hold *wanted)
{
    for (; wanted != NULL; wanted = wanted->next) {
        struct kvtpy_hold **at = find(self, wanted);

        if (at != NULL) {
            (*at)->leaving = true;
        }
    }
}

static PyObject *deregister_memory(PyObject *self, PyObject *const *args,
                                   Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "deregister", 1, 1, 4, {"regions", "kind", "device", "timeout"}};
    kvt_transport *t = kvtpy_get(self);
    struct kvtpy_region_defaults defaults = {NULL, NULL, NULL, NULL};
    struct kvt_error err = {.text = ""};
    struct kvt_region *regions;
    struct kvtpy_hold *wanted;
    uint64_t timeout_ns = 0;
    PyObject *out[4];
    size_t found;
    int code;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_time(out[3], "timeout", &timeout_ns) != 0) {
        return NULL;
    }
    defaults.kind = out[1];
    defaults.device = out[2];
    if (kvtpy_holds(out[0], &defaults, &wanted, &found) != 0) {
        return NULL;
    }
    regions = array_of(wanted, found);
    if (regions == NULL) {
        kvtpy_holds_free(wanted);
        return NULL;
    }
    WITHOUT_GIL(code = kvt_deregister(t, regions, found, timeout_ns, &err));
    free(regions);
    if (code == KVT_ENOENT && all_leaving(kvtpy_self(self), wanted)) {
        code = KVT_OK;
    }
    if (code == KVT_OK) {
        let_go(kvtpy_self(self), wanted);
    } else if (code == KVT_ETIMEDOUT) {
        mark_leaving(kvtpy_self(self), wanted);
    }
    kvtpy_holds_free(wanted);
    kvtpy_log_drain();
    if (code != KVT_OK) {
        return kvtpy_raise(code, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *metadata(PyObject *self, PyObject *unused)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    size_t capacity = 1 << 14;
    size_t used = 0;
    PyObject *bytes = NULL;
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
        WITHOUT_GIL(code = kvt_metadata(t, buffer, capacity, &used, &err));
        /* Another thread may register more before the next try. */
        capacity = used + used / 4 + 4096;
    } while (code == KVT_ERANGE);
    if (code == KVT_OK) {
        bytes = PyBytes_FromStringAndSize(buffer, (Py_ssize_t)used);
    } else {
        (void)kvtpy_raise(code, &err);
    }
    free(buffer);
    kvtpy_log_drain();
    return bytes;
}

#define METHOD(function) (PyCFunction)(void (*)(void))(function)

PyMethodDef kvtpy_memory_methods[] = {
    {"register", METHOD(register_memory), METH_FASTCALL | METH_KEYWORDS,
     "register($self, regions, *, kind=None, device=None, fd=None,\n"
     "         fd_offset=0, timeout=None)\n--\n\n"
     "Registers one region or a list of them, all or none, and holds the\n"
     "buffers. A region is a writable buffer, a contiguous tensor, or a tuple\n"
     "like kvt.Region; `kind`, `device`, `fd` and `fd_offset` are for those\n"
     "that do not say it themselves."},
    {"deregister", METHOD(deregister_memory), METH_FASTCALL | METH_KEYWORDS,
     "deregister($self, regions, *, kind=None, device=None, timeout=None)\n"
     "--\n\n"
     "Takes registrations back, all or none, and lets go of the buffers.\n"
     "Busy while a transfer that is not final uses one."},
    {"metadata", metadata, METH_NOARGS,
     "metadata($self, /)\n--\n\n"
     "The bytes that let a peer import this agent and the memory registered\n"
     "so far."},
    {NULL, NULL, 0, NULL}};
