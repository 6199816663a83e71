/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The extension module kvt._kvt: what its files share.
 *
 * Rules of the module.
 *
 * GIL.      Everything here runs with the GIL held, but for the calls between
 *           Py_BEGIN_ALLOW_THREADS and Py_END_ALLOW_THREADS and for the log
 *           hook (log.c), which runs on kvt's threads and touches no object.
 *           Calls of the library that wait, or whose cost grows with what they
 *           are given, are made without the GIL, but for those of flights.c.
 * Limited.  The code keeps to the limited API of CPython 3.11, and uses macros
 *           beyond it only where Py_LIMITED_API is not defined.
 * Failures. A function that returns a PyObject * or int says "failed" by NULL
 *           or -1 with an exception set. Failures of the library are raised by
 *           kvtpy_raise(), our own ones by kvtpy_raise_text(); TypeError is the
 *           only other exception that is raised on purpose.
 */
#ifndef KVTPY_H
#define KVTPY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include <kvt/kvt.h>

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Makes one call of the library without the GIL. */
#define WITHOUT_GIL(statement)                                                 \
    do {                                                                       \
        Py_BEGIN_ALLOW_THREADS statement;                                      \
        Py_END_ALLOW_THREADS                                                   \
    } while (0)

/* Of what is known to be a list. */
static inline Py_ssize_t kvtpy_list_size(PyObject *list)
{
#ifdef Py_LIMITED_API
    return PyList_Size(list);
#else
    return PyList_GET_SIZE(list);
#endif
}

/* ------------------------------------------------------------------ errors */

/* Imports the exception classes. */
int kvtpy_errors_init(void);

/* Raises the class of a code; err may be NULL. Always returns NULL. */
PyObject *kvtpy_raise(int code, const struct kvt_error *err);

/* The same with a text of ours. Always returns NULL. */
__attribute__((format(printf, 2, 3))) PyObject *kvtpy_raise_text(
    int code, const char *format, ...);

/* A new exception for a code, with its text. */
PyObject *kvtpy_error_new(int code, const char *text);

/* Sets an integer attribute of an exception. */
int kvtpy_error_set(PyObject *error, const char *name, long long value);

/* --------------------------------------------------------------- arguments */

#define KVTPY_ARGS_MAX 24

/* The signature of one callable. */
struct kvtpy_signature {
    const char *function;
    int positional; /* how many may be given by position */
    int required;   /* how many must be given; the first ones */
    int count;
    const char *names[KVTPY_ARGS_MAX];
};

/* Puts borrowed references into `out`, NULL where nothing is given. A None is
 * as good as nothing. The first is for METH_FASTCALL, the second for others. */
int kvtpy_args(const struct kvtpy_signature *signature, PyObject *const *args,
               Py_ssize_t count, PyObject *names, PyObject **out);
int kvtpy_args_tuple(const struct kvtpy_signature *signature, PyObject *args,
                     PyObject *keywords, PyObject **out);

/* 1 and a new reference; 0 where there is no such attribute; -1 when asking for
 * it fails otherwise, which must never pass for "there is none". */
int kvtpy_attribute(PyObject *object, const char *name, PyObject **ret);

/* After PyObject_GetBuffer(): whether the object has no such buffer, and the
 * exception, which says no more, is cleared. Any other one has to be raised. */
bool kvtpy_no_buffer(void);

/* Converters. `what` names the argument in errors. NULL gives the default,
 * which is what *ret holds already. A bool is no integer. */
int kvtpy_u64(PyObject *object, const char *what, uint64_t *ret);
int kvtpy_u32(PyObject *object, const char *what, uint32_t *ret);
int kvtpy_i32(PyObject *object, const char *what, int32_t *ret);
/* Seconds; at least 1 ns, at most 30 years. */
int kvtpy_time(PyObject *object, const char *what, uint64_t *ret_ns);
/* A str as UTF-8 (lone surrogates stand for bytes, as in file names) or bytes;
 * gives a new reference to bytes without a NUL inside. */
int kvtpy_name(PyObject *object, const char *what, PyObject **ret);
PyObject *kvtpy_text(const char *text);
/* Integers of a tuple or list, `least` to `most` of them; *ret_count of them
 * were there. */
int kvtpy_fields(PyObject *item, const char *what, Py_ssize_t at,
                 Py_ssize_t least, Py_ssize_t most, uint64_t *ret,
                 Py_ssize_t *ret_count);

/* The format letter of a buffer of integers, 0 if it is none; *ret_swapped says
 * that its byte order is not ours. */
char kvtpy_integer_format(const Py_buffer *view, bool *ret_swapped);

/* Indices as the library takes them; fini may follow init at once. */
struct kvtpy_indices {
    struct kvt_indices indices;
    void *memory; /* a converted copy, or NULL */
    bool held;
    Py_buffer view; /* what indices.data points into, when held */
    int64_t few[64];
};

static inline void kvtpy_indices_init(struct kvtpy_indices *indices)
{
    /* Not the rest: half a kilobyte that is written before it is read. */
    indices->memory = NULL;
    indices->held = false;
}
int kvtpy_indices(PyObject *object, const char *what,
                  struct kvtpy_indices *ret);
void kvtpy_indices_fini(struct kvtpy_indices *indices);

/* Pieces of a transfer, for PyMem_Free(). Kinds and devices of pieces that do not say
 * theirs come from `model`. */
int kvtpy_copies(PyObject *object, const struct kvt_copy *model,
                 struct kvt_copy **ret, size_t *ret_count);

/* The distance of a view's items in one dimension. ctypes gives no strides,
 * whoever asks for them: its arrays are contiguous. */
static inline Py_ssize_t kvtpy_stride(const Py_buffer *view, int dimension)
{
    Py_ssize_t stride = view->itemsize;

    if (view->strides != NULL) {
        return view->strides[dimension];
    }
    for (int i = view->ndim - 1; i > dimension; i--) {
        stride *= view->shape[i];
    }
    return stride;
}

/* A two-dimensional buffer of 64-bit integers, with gaps or without. */
struct kvtpy_rows {
    const char *at;
    Py_ssize_t count;
    Py_ssize_t columns;
    Py_ssize_t row_stride;
    Py_ssize_t column_stride;
    bool is_signed;
};

/* A view for reading, which need not be contiguous. */
int kvtpy_view(PyObject *object, const char *what, Py_buffer *ret);
/* The rows of a view, with `least` to `most` columns. */
int kvtpy_rows(const Py_buffer *view, const char *what, Py_ssize_t least,
               Py_ssize_t most, struct kvtpy_rows *ret);

static inline uint64_t kvtpy_rows_word(const struct kvtpy_rows *rows,
                                       Py_ssize_t row, Py_ssize_t column)
{
    uint64_t value;

    memcpy(&value,
           rows->at + row * rows->row_stride + column * rows->column_stride,
           sizeof value);
    return value;
}

/* Runs of a layout; fini must follow, also where it fails. */
struct kvtpy_runs {
    const struct kvt_run *data;
    size_t count;
    void *memory; /* a converted copy, or NULL */
    bool held;
    Py_buffer view; /* what data points into, when nothing was converted */
};

int kvtpy_runs(PyObject *object, struct kvtpy_runs *ret);
void kvtpy_runs_fini(struct kvtpy_runs *runs);

/* For kvt.nixl: tuples as rows, and the runs of rows (docs in the stub). */
PyObject *kvtpy_desc_rows(PyObject *module, PyObject *const *args,
                          Py_ssize_t count);
PyObject *kvtpy_desc_runs(PyObject *module, PyObject *const *args,
                          Py_ssize_t count);
PyObject *kvtpy_desc_facts(PyObject *module, PyObject *object);

/* ------------------------------------------------------------------ memory */

/*
 * One piece of memory and what keeps it alive: a buffer export, a reference to
 * its owner, or neither for a bare address.
 */
struct kvtpy_hold {
    struct kvtpy_hold *next;
    struct kvt_region region;
    PyObject *owner;
    bool leaving; /* its deregistration timed out and goes on */
    bool viewed;
    Py_buffer view;
};

void kvtpy_hold_free(struct kvtpy_hold *hold);
void kvtpy_holds_free(struct kvtpy_hold *holds);

/* Defaults of regions that do not say it themselves. */
struct kvtpy_region_defaults {
    PyObject *kind;
    PyObject *device;
    PyObject *fd;
    PyObject *fd_offset;
};

/* One region, or a list of them, as holds in the same order. */
int kvtpy_holds(PyObject *object, const struct kvtpy_region_defaults *defaults,
                struct kvtpy_hold **ret, size_t *ret_count);

/* A tuple with the fields of kvt.Region. */
int kvtpy_region_tuple(PyObject *tuple, Py_ssize_t at, struct kvt_region *ret);

PyObject *kvtpy_region_of(PyObject *module, PyObject *const *args,
                          Py_ssize_t count, PyObject *names);

/* ------------------------------------------------------------------- types */

extern PyTypeObject *kvtpy_shm_type;
extern PyTypeObject *kvtpy_transport_type;

int kvtpy_results_init(PyObject *module);
int kvtpy_claims_init(PyObject *module);
int kvtpy_observe_init(PyObject *module);
int kvtpy_shm_init(PyObject *module);
int kvtpy_transport_init(PyObject *module);
int kvtpy_flights_init(PyObject *module);
int kvtpy_polled_init(PyObject *module);

/* Makes a heap type and adds it to the module; *ret keeps a reference. */
int kvtpy_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **ret);

PyObject *kvtpy_result_new(const struct kvt_result *result);
const struct kvt_result *kvtpy_result_get(PyObject *self);
/* Of a Result that nobody has seen yet. */
void kvtpy_result_set(PyObject *self, const struct kvt_result *result);
/* A new reference to itself, or what check() raises. */
PyObject *kvtpy_result_outcome(PyObject *self);

PyObject *kvtpy_peer_info_new(const struct kvt_peer_info *info);
PyObject *kvtpy_stats_new(const struct kvt_stats *stats);
PyObject *kvtpy_engines(PyObject *module, PyObject *unused);
PyObject *kvtpy_notification_new(const struct kvt_notification *notification,
                                 const char *data);

/* The member of an IntEnum of kvt._types, or a plain int for a value that it
 * does not know. */
enum kvtpy_enum {
    KVTPY_KIND,
    KVTPY_STATE,
    KVTPY_OP,
    KVTPY_SCOPE,
    KVTPY_PEER_STATE,
    KVTPY_ENUM_COUNT
};
PyObject *kvtpy_enum_member(enum kvtpy_enum which, uint32_t value);

/* --------------------------------------------------------------- transport */

#define KVTPY_CLAIM_BUCKETS 256

struct kvtpy_claim;

struct kvtpy_transport {
    PyObject_HEAD kvt_transport *t;    /* NULL until __init__ is done */
    struct kvtpy_transport *live_prev; /* in the list of open ones, or NULL */
    struct kvtpy_transport *live_next;
    struct kvtpy_hold *holds;
    bool opening;  /* __init__ is in kvt_open() */
    bool closed;   /* kvt_close() has returned */
    bool released; /* ... and said that our memory is touched no more */
    struct kvtpy_claim *claims[KVTPY_CLAIM_BUCKETS]; /* that wait, by id */
    uint64_t settled; /* claims that waited once, and wait no more */
    PyObject *silent; /* set: ids that poll() does not report */
    PyObject *kept;   /* list of Result that a wait drained for others */
    PyObject *notes;  /* list of Notification, likewise */
    int ready_fd;     /* epoll over the library's and kept_fd, or -1 */
    int kept_fd;      /* eventfd, readable while kept or notes has any */
    bool kept_signalled;
};

/* The transport of a method's self; NULL and an error before __init__. */
kvt_transport *kvtpy_get(PyObject *self);

static inline struct kvtpy_transport *kvtpy_self(PyObject *self)
{
    return (struct kvtpy_transport *)(void *)self;
}

/* The methods of the type, by file. */
extern PyMethodDef kvtpy_memory_methods[];
extern PyMethodDef kvtpy_peer_methods[];
extern PyMethodDef kvtpy_move_methods[];
extern PyMethodDef kvtpy_drain_methods[];
extern PyMethodDef kvtpy_note_methods[];
extern PyMethodDef kvtpy_observe_methods[];

/* Opens what the arguments of Transport() say. */
int kvtpy_open(PyObject *args, PyObject *keywords, kvt_transport **ret);

/* Wakes whoever waits for ids that end without a result, because they were
 * cancelled or released; `hidden`: all of these do. */
int kvtpy_claims_end(struct kvtpy_transport *self, const kvt_xfer *ids,
                     size_t count, bool hidden);
/* Hands a result, or NULL for "there will be none", to the claim of an id:
 * whether there was one. Then *ret_wake, if it is not NULL, is for
 * kvtpy_claim_wake(), which runs Python code, and takes the reference. */
bool kvtpy_claim_deliver(struct kvtpy_transport *owner, kvt_xfer id,
                         const struct kvt_result *result, PyObject **ret_wake);
int kvtpy_claim_wake(PyObject *object);
/* Transport._claim(xfer, wake=None). */
PyObject *kvtpy_claim_new(PyObject *self, PyObject *const *args,
                          Py_ssize_t count);
/* 1 for a transfer that poll() does not report, 0 for others, or -1. */
int kvtpy_is_silent(struct kvtpy_transport *self, kvt_xfer id);
void kvtpy_unsilence(struct kvtpy_transport *self, kvt_xfer id);
/* Raises what the library said of a transfer. Always returns NULL. */
PyObject *kvtpy_raise_xfer(int code, kvt_xfer id);
/* Gives what poll() would report of a peer to `take`, which says 0 or -1 with
 * an exception: the first is raised when all are given. */
typedef int kvtpy_take(void *ctx, const struct kvt_result *result);
int kvtpy_drain(struct kvtpy_transport *self, kvt_peer peer, kvtpy_take *take,
                void *ctx);
/* The kept result of an id: a new reference, or NULL without an error. */
PyObject *kvtpy_kept_find(struct kvtpy_transport *self, kvt_xfer id);
/* Forgets kept results of these ids. */
int kvtpy_kept_forget(struct kvtpy_transport *self, const kvt_xfer *ids,
                      size_t count);
/* Moves received notifications to a list, up to a limit. */
int kvtpy_notes_drain(kvt_transport *t, uint64_t limit, PyObject *list);
/* Puts the kept eventfd in step with the lists. */
void kvtpy_kept_signal(struct kvtpy_transport *self);

/* ------------------------------------------------------- logging and the end */

/* The hook for kvt_options.log. */
void kvtpy_log_hook(void *ctx, int level, const char *text);
int kvtpy_log_init(void);
/* From now on no line is taken any more. */
void kvtpy_log_stop(void);
/* Gives waiting lines to the logger "kvt"; a glance when there are none. */
void kvtpy_log_drain(void);

/* Closes every open transport; registered with atexit. */
PyObject *kvtpy_shutdown(PyObject *module, PyObject *unused);

#endif /* KVTPY_H */
