/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's log lines, on their way to the logger "kvt".
 *
 * The library calls the hook on its own threads, and on callers' threads in
 * the middle of a call, perhaps with a lock of its own held. Taking the GIL
 * there could deadlock, and hangs or kills the thread once the interpreter is
 * being torn down. So the hook only copies the line into a ring and asks the
 * interpreter, which needs no GIL, to call us soon in the main thread. Calls
 * that wait, and polls, drain the ring as well, in case the main thread is
 * busy in other people's C code.
 *
 * `mu` guards all of this and is held for a copy at most; nobody waits for the
 * GIL with it. kvtpy_log_stop() runs with the GIL from atexit, while the
 * interpreter is whole: after it no pending call is added any more. Around a
 * fork `mu` is held, so that the child finds the ring whole; it starts with an
 * empty one.
 */
#include "kvtpy.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define LINES 256
#define LINE_BYTES 512

struct line {
    int level;
    char text[LINE_BYTES];
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct line lines[LINES]; /* under mu */
static size_t first;             /* under mu */
static size_t count;             /* under mu */
static size_t dropped;           /* under mu: lines that found the ring full */
static bool asked;               /* under mu: a pending call is on its way */
static bool stopped;             /* under mu */
static atomic_bool waiting;      /* whether a drain has anything to do */
static PyObject *logger;         /* under the GIL */

static int pending(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&mu);
    asked = false;
    pthread_mutex_unlock(&mu);
    kvtpy_log_drain();
    return 0;
}

void kvtpy_log_hook(void *ctx, int level, const char *text)
{
    (void)ctx;
    pthread_mutex_lock(&mu);
    if (!stopped) {
        if (count < LINES) {
            struct line *line = &lines[(first + count) % LINES];
            size_t length = strnlen(text, LINE_BYTES - 1);

            line->level = level;
            memcpy(line->text, text, length);
            line->text[length] = '\0';
            count++;
        } else {
            dropped++;
        }
        atomic_store(&waiting, true);
        /* When the interpreter's own list is full the next line asks again. */
        asked = asked || Py_AddPendingCall(pending, NULL) == 0;
    }
    pthread_mutex_unlock(&mu);
}

/* The oldest line, or what was dropped after the last one. */
static bool take(struct line *ret)
{
    bool any = true;

    pthread_mutex_lock(&mu);
    if (count > 0) {
        *ret = lines[first];
        first = (first + 1) % LINES;
        count--;
    } else if (dropped > 0) {
        ret->level = KVT_LOG_WARNING;
        (void)PyOS_snprintf(ret->text, sizeof ret->text,
                            "%zu log lines were dropped: nobody took them in "
                            "time",
                            dropped);
        dropped = 0;
    } else {
        any = false;
        atomic_store(&waiting, false);
    }
    pthread_mutex_unlock(&mu);
    return any;
}

static void emit(const struct line *line)
{
    static const int levels[] = {[KVT_LOG_ERROR] = 40,
                                 [KVT_LOG_WARNING] = 30,
                                 [KVT_LOG_INFO] = 20,
                                 [KVT_LOG_DEBUG] = 10};
    bool known = line->level >= 0 && (size_t)line->level < COUNT_OF(levels);
    PyObject *text = kvtpy_text(line->text);
    PyObject *answer = NULL;

    if (text != NULL) {
        answer = PyObject_CallMethod(
            logger, "log", "isO", known ? levels[line->level] : 30, "%s", text);
    }
    if (answer == NULL) {
        PyErr_WriteUnraisable(logger);
    }
    Py_XDECREF(answer);
    Py_XDECREF(text);
}

void kvtpy_log_drain(void)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    struct line line;

    if (!atomic_load_explicit(&waiting, memory_order_relaxed) ||
        logger == NULL) {
        return;
    }
    /* The caller may be about to raise. */
    PyErr_Fetch(&type, &value, &traceback);
    while (take(&line)) {
        emit(&line);
    }
    PyErr_Restore(type, value, traceback);
}

void kvtpy_log_stop(void)
{
    pthread_mutex_lock(&mu);
    stopped = true;
    pthread_mutex_unlock(&mu);
    kvtpy_log_drain();
}

static void before_fork(void)
{
    pthread_mutex_lock(&mu);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&mu);
}

static void after_fork_in_child(void)
{
    first = 0;
    count = 0;
    dropped = 0;
    asked = false;
    atomic_store(&waiting, false);
    pthread_mutex_unlock(&mu);
}

int kvtpy_log_init(void)
{
    PyObject *module;

    if (logger != NULL) {
        return 0;
    }
    if (pthread_atfork(before_fork, after_fork_in_parent,
                       after_fork_in_child) != 0) {
        (void)kvtpy_raise(KVT_ENOMEM, NULL);
        return -1;
    }
    module = PyImport_ImportModule("logging");
    if (module == NULL) {
        return -1;
    }
    logger = PyObject_CallMethod(module, "getLogger", "s", "kvt");
    Py_DECREF(module);
    return logger == NULL ? -1 : 0;
}
