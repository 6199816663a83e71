/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls that start transfers.
 *
 * They do not wait, and a small one is over sooner than another thread could
 * make use of the GIL; taking it back may then cost a whole switch interval.
 * So it is released only where the library copies many indices.
 */
#include "kvtpy.h"

#define MANY 4096

/* The options' part of a signature, from this position on. */
#define OPTION_NAMES "timeout", "tag", "note", "user_data", "event"
#define OPTION_COUNT 5

struct moving {
    struct kvt_xfer_options options;
    bool noted;
    bool silent;
    Py_buffer note;
};

static void moving_fini(struct moving *moving)
{
    if (moving->noted) {
        PyBuffer_Release(&moving->note);
    }
}

static int moving_init(struct moving *moving, PyObject *const *out)
{
    int event = out[4] == NULL ? 1 : PyObject_IsTrue(out[4]);

    moving->noted = false;
    moving->options = (struct kvt_xfer_options){.size = sizeof moving->options};
    if (event < 0 ||
        kvtpy_time(out[0], "timeout", &moving->options.timeout_ns) != 0 ||
        kvtpy_u32(out[1], "tag", &moving->options.tag) != 0 ||
        kvtpy_u64(out[3], "user_data", &moving->options.user_data) != 0) {
        return -1;
    }
    moving->silent = event == 0;
    if (moving->silent) {
        moving->options.flags |= KVT_XFER_NO_EVENT;
    }
    if (out[2] != NULL) {
        if (PyObject_GetBuffer(out[2], &moving->note, PyBUF_SIMPLE) != 0) {
            return -1;
        }
        moving->noted = true;
        /* The library tells no note from an empty one by the pointer. */
        moving->options.note = moving->note.buf == NULL ? "" : moving->note.buf;
        moving->options.note_length = (size_t)moving->note.len;
    }
    return 0;
}

/* The id of a transfer that was accepted, or the error of one that was not. */
static PyObject *finish(PyObject *self, const struct moving *moving, int code,
                        kvt_xfer xfer, const struct kvt_error *err)
{
    PyObject *id;

    if (code != KVT_OK) {
        return kvtpy_raise(code, err);
    }
    id = PyLong_FromUnsignedLongLong(xfer);
    if (id != NULL && moving->silent &&
        PySet_Add(kvtpy_self(self)->silent, id) != 0) {
        Py_CLEAR(id);
    }
    return id;
}

/* ------------------------------------------------------------------ pieces */

typedef int move_pieces(kvt_transport *t, kvt_peer peer,
                        const struct kvt_copy *copies, size_t count,
                        const struct kvt_xfer_options *options,
                        kvt_xfer *ret_xfer, struct kvt_error *err);

#define PIECE_ARGS (6 + OPTION_COUNT)

static PyObject *pieces(PyObject *self, PyObject *const *out, move_pieces *move)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    struct kvt_copy model = {.length = 0};
    struct kvt_copy *copies = NULL;
    PyObject *result = NULL;
    struct moving moving;
    kvt_peer peer = 0;
    kvt_xfer xfer = 0;
    size_t count;
    int code;

    if (t == NULL || kvtpy_u64(out[0], "peer", &peer) != 0 ||
        kvtpy_u32(out[2], "local_kind", &model.local_kind) != 0 ||
        kvtpy_u32(out[3], "local_device", &model.local_device) != 0 ||
        kvtpy_u32(out[4], "peer_kind", &model.peer_kind) != 0 ||
        kvtpy_u32(out[5], "peer_device", &model.peer_device) != 0) {
        return NULL;
    }
    if (moving_init(&moving, out + 6) == 0 &&
        kvtpy_copies(out[1], &model, &copies, &count) == 0) {
        if (count > MANY) {
            WITHOUT_GIL(code = move(t, peer, copies, count, &moving.options,
                                    &xfer, &err));
        } else {
            code = move(t, peer, copies, count, &moving.options, &xfer, &err);
        }
        result = finish(self, &moving, code, xfer, &err);
    }
    PyMem_Free(copies);
    moving_fini(&moving);
    return result;
}

static PyObject *write_pieces(PyObject *self, PyObject *const *args,
                              Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "write",
        2,
        2,
        PIECE_ARGS,
        {"peer", "copies", "local_kind", "local_device", "peer_kind",
         "peer_device", OPTION_NAMES}};
    PyObject *out[PIECE_ARGS];

    return kvtpy_args(&signature, args, count, names, out) != 0
               ? NULL
               : pieces(self, out, kvt_write);
}

static PyObject *read_pieces(PyObject *self, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "read",
        2,
        2,
        PIECE_ARGS,
        {"peer", "copies", "local_kind", "local_device", "peer_kind",
         "peer_device", OPTION_NAMES}};
    PyObject *out[PIECE_ARGS];

    return kvtpy_args(&signature, args, count, names, out) != 0
               ? NULL
               : pieces(self, out, kvt_read);
}

/* ------------------------------------------------------------------ blocks */

typedef int move_blocks(kvt_transport *t, kvt_peer peer,
                        kvt_layout local_layout,
                        const struct kvt_indices *local, kvt_layout peer_layout,
                        const struct kvt_indices *remote,
                        const struct kvt_xfer_options *options,
                        kvt_xfer *ret_xfer, struct kvt_error *err);

#define BLOCK_ARGS (5 + OPTION_COUNT)

static PyObject *blocks(PyObject *self, PyObject *const *out, move_blocks *move)
{
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    struct kvtpy_indices local;
    struct kvtpy_indices remote;
    kvt_layout layouts[2] = {0, 0};
    PyObject *result = NULL;
    struct moving moving;
    kvt_peer peer = 0;
    kvt_xfer xfer = 0;
    int code;

    if (t == NULL || kvtpy_u64(out[0], "peer", &peer) != 0 ||
        kvtpy_u64(out[1], "local_layout", &layouts[0]) != 0 ||
        kvtpy_u64(out[3], "peer_layout", &layouts[1]) != 0) {
        return NULL;
    }
    kvtpy_indices_init(&local);
    kvtpy_indices_init(&remote);
    if (moving_init(&moving, out + 5) == 0 &&
        kvtpy_indices(out[2], "local", &local) == 0 &&
        kvtpy_indices(out[4], "remote", &remote) == 0) {
        if (local.indices.count > MANY) {
            WITHOUT_GIL(code = move(t, peer, layouts[0], &local.indices,
                                    layouts[1], &remote.indices,
                                    &moving.options, &xfer, &err));
        } else {
            code = move(t, peer, layouts[0], &local.indices, layouts[1],
                        &remote.indices, &moving.options, &xfer, &err);
        }
        result = finish(self, &moving, code, xfer, &err);
    }
    kvtpy_indices_fini(&local);
    kvtpy_indices_fini(&remote);
    moving_fini(&moving);
    return result;
}

static PyObject *write_blocks(PyObject *self, PyObject *const *args,
                              Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {"write_blocks",
                                                     5,
                                                     5,
                                                     BLOCK_ARGS,
                                                     {"peer", "local_layout",
                                                      "local", "peer_layout",
                                                      "remote", OPTION_NAMES}};
    PyObject *out[BLOCK_ARGS];

    return kvtpy_args(&signature, args, count, names, out) != 0
               ? NULL
               : blocks(self, out, kvt_write_blocks);
}

static PyObject *read_blocks(PyObject *self, PyObject *const *args,
                             Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {"read_blocks",
                                                     5,
                                                     5,
                                                     BLOCK_ARGS,
                                                     {"peer", "local_layout",
                                                      "local", "peer_layout",
                                                      "remote", OPTION_NAMES}};
    PyObject *out[BLOCK_ARGS];

    return kvtpy_args(&signature, args, count, names, out) != 0
               ? NULL
               : blocks(self, out, kvt_read_blocks);
}

static PyObject *warm_up(PyObject *self, PyObject *const *args,
                         Py_ssize_t count, PyObject *names)
{
    static const struct kvtpy_signature signature = {
        "warm_up", 1, 1, 1 + OPTION_COUNT, {"peer", OPTION_NAMES}};
    kvt_transport *t = kvtpy_get(self);
    struct kvt_error err = {.text = ""};
    PyObject *out[1 + OPTION_COUNT];
    PyObject *result = NULL;
    struct moving moving;
    kvt_peer peer = 0;
    kvt_xfer xfer = 0;

    if (t == NULL || kvtpy_args(&signature, args, count, names, out) != 0 ||
        kvtpy_u64(out[0], "peer", &peer) != 0) {
        return NULL;
    }
    if (moving_init(&moving, out + 1) == 0) {
        int code = kvt_warm_up(t, peer, &moving.options, &xfer, &err);

        result = finish(self, &moving, code, xfer, &err);
    }
    moving_fini(&moving);
    return result;
}

#define METHOD(function) (PyCFunction)(void (*)(void))(function)
#define OPTIONS_TEXT "timeout=None, tag=0, note=None, user_data=0,\n"

PyMethodDef kvtpy_move_methods[] = {
    {"write", METHOD(write_pieces), METH_FASTCALL | METH_KEYWORDS,
     "write($self, peer, copies, *, local_kind=0, local_device=0,\n"
     "      peer_kind=0, peer_device=0, " OPTIONS_TEXT
     "      event=True)\n--\n\n"
     "Starts one transfer of any list of pieces and returns its id. Pieces\n"
     "are tuples like kvt.Copy, or the rows of a buffer of 64-bit integers\n"
     "with 3 or 7 columns. `timeout` is its deadline, from now. With `event`\n"
     "False poll() does not report it: ask status() and call release()."},
    {"read", METHOD(read_pieces), METH_FASTCALL | METH_KEYWORDS,
     "read($self, peer, copies, *, local_kind=0, local_device=0,\n"
     "     peer_kind=0, peer_device=0, " OPTIONS_TEXT "     event=True)\n--\n\n"
     "The other direction: from the peer's memory into ours."},
    {"write_blocks", METHOD(write_blocks), METH_FASTCALL | METH_KEYWORDS,
     "write_blocks($self, peer, local_layout, local, peer_layout, remote,\n"
     "             *, " OPTIONS_TEXT "             event=True)\n--\n\n"
     "Writes block local[i] of local_layout to block remote[i] of\n"
     "peer_layout, for all i, as one transfer; returns its id."},
    {"read_blocks", METHOD(read_blocks), METH_FASTCALL | METH_KEYWORDS,
     "read_blocks($self, peer, local_layout, local, peer_layout, remote,\n"
     "            *, " OPTIONS_TEXT "            event=True)\n--\n\n"
     "The other direction: block remote[i] of the peer into block local[i]."},
    {"warm_up", METHOD(warm_up), METH_FASTCALL | METH_KEYWORDS,
     "warm_up($self, peer, *, " OPTIONS_TEXT "        event=True)\n--\n\n"
     "Makes the engine's connection before the first real transfer."},
    {NULL, NULL, 0, NULL}};
