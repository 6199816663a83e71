/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads.
 *
 * A chunk is moved inside the target's gate, between two looks at who the
 * target is; by system call where it does not show that it lives. When it is reported, the system calls have returned and the
 * stores are made, whatever came of them: every report is final for both
 * sides.
 *
 * What the peer took back is found out here as well: the gate's epoch is
 * cached with the connection's spans, and when it has moved they are made anew
 * from the entries' generations. A worker that holds the gate at epoch e sees
 * everything that was shut before e.
 */
#include "local.h"

#include "../cpu.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* No longer than the scheduler may keep a thread off between two of its own
 * system calls. */
#define FRESH_NS UINT64_C(20000)
/* The same of a target that shows that it lives: where the kernel could not mark
 * a death (local_life.c), its pid is not another's so soon. */
#define LIVING_NS UINT64_C(1000000)

void kvti_local_verdict(struct kvti_outcome *ret, uint32_t state, int code,
                        int os_errno, const char *format, ...)
{
    va_list args;

    ret->state = state;
    ret->fin = KVTI_FIN_BOTH;
    ret->code = code;
    ret->engine_code = os_errno;
    va_start(args, format);
    (void)vsnprintf(ret->text, sizeof(ret->text), format, args);
    va_end(args);
}

/* --------------------------------------------------------- what may be moved */

static bool is_open(const struct kvti_mem *mem, void *ctx)
{
    struct kvti_gate_page *gate = ctx;

    return mem->kind == KVT_DRAM && mem->gate_gen != 0 &&
           mem->gate_slot < KVTI_GATE_ENTRIES &&
           atomic_load(&gate->entries[mem->gate_slot]) == mem->gate_gen;
}

/* Spans never go back to an older epoch: another worker may hold a newer one,
 * and then ours is about to be drained. */
static void refresh_spans(struct kvti_local_conn *conn, uint64_t epoch)
{
    pthread_rwlock_wrlock(&conn->lock);
    if (conn->epoch < epoch) {
        kvti_regions_update(&conn->regions, is_open, conn->target->gate);
        conn->epoch = epoch;
    }
    pthread_rwlock_unlock(&conn->lock);
}

/* Whether the peer shut something of what the piece covers. */
static bool is_stale(const struct kvti_local_conn *conn,
                     const struct kvti_copy *copy)
{
    for (size_t i = 0; i < conn->regions.count; i++) {
        const struct kvti_mem *mem = &conn->regions.mems[i];
        bool touches = mem->addr <= copy->peer
                           ? copy->peer - mem->addr < mem->length
                           : mem->addr - copy->peer < copy->length;

        if (touches && mem->kind == KVT_DRAM &&
            !is_open(mem, conn->target->gate)) {
            return true;
        }
    }
    return false;
}

/* One look-up for all pieces in a row that lie in one span. */
static bool check_spans(struct kvti_local_conn *conn,
                        const struct kvti_chunk *chunk,
                        const struct kvti_copy **ret_bad, bool *ret_stale)
{
    const struct kvti_span none = {.lo = UINT64_MAX, .hi = UINT64_MAX};
    const struct kvti_span *span = &none;

    for (uint32_t i = 0; i < chunk->count; i++) {
        const struct kvti_copy *copy = &chunk->copies[i];

        if (copy->length == 0 ||
            (copy->peer >= span->lo && copy->peer < span->hi &&
             copy->length <= span->hi - copy->peer)) {
            continue;
        }
        span = kvti_regions_span(&conn->regions, copy->peer, copy->length,
                                 KVT_DRAM, 0);
        if (span == NULL) {
            *ret_bad = copy;
            *ret_stale = is_stale(conn, copy);
            return false;
        }
    }
    return true;
}

static bool check_chunk(struct kvti_local_conn *conn,
                        const struct kvti_chunk *chunk, uint64_t epoch,
                        struct kvti_outcome *ret)
{
    const struct kvti_copy *bad = NULL;
    bool stale = false;
    bool current;

    if (chunk->local_kind != KVT_DRAM || chunk->peer_kind != KVT_DRAM) {
        kvti_local_verdict(ret, KVT_REJECTED, KVT_EUNSUPPORTED, 0,
                           "the local engine cannot move VRAM: use nixl");
        return false;
    }
    pthread_rwlock_rdlock(&conn->lock);
    current = conn->epoch >= epoch;
    if (!current) {
        pthread_rwlock_unlock(&conn->lock);
        refresh_spans(conn, epoch);
        pthread_rwlock_rdlock(&conn->lock);
    }
    current = check_spans(conn, chunk, &bad, &stale);
    pthread_rwlock_unlock(&conn->lock);
    if (!current && stale) {
        kvti_local_verdict(ret, KVT_REJECTED, KVT_ESTALE, 0,
                           "the peer took back the memory at 0x%llx: import "
                           "its metadata again",
                           (unsigned long long)bad->peer);
    } else if (!current) {
        kvti_local_verdict(ret, KVT_REJECTED, KVT_ERANGE, 0,
                           "%llu bytes at 0x%llx are not in the peer's "
                           "registered memory",
                           (unsigned long long)bad->length,
                           (unsigned long long)bad->peer);
    }
    return current;
}

/* ------------------------------------------------------------------- chunks */

/* KVT_EPERM is a failure of the request; the peer may well be there. */
static void refuse(struct kvti_outcome *ret, const struct kvt_error *err)
{
    uint32_t state = err->code == KVT_EDISCONNECTED ? KVT_DISCONNECTED
                                                    : KVT_FAILED;

    kvti_local_verdict(ret, state, err->code, err->os_errno, "%s", err->text);
}

static int look(struct kvti_local_target *target, struct kvt_error *err)
{
    uint64_t begin_ns = kvti_now_ns();
    int code = kvti_ident_check(target, err);

    atomic_store(&target->seen_ns, code == KVT_OK ? begin_ns : 0);
    return code;
}

/* Two good looks at who the target is prove all that lies between them, since
 * an address space that is gone does not come back. The one before a copy only
 * keeps us out of a process that has just taken over the pid: one that was good
 * a moment ago is as good as a new one that the copy follows a moment later. */
static int look_before(struct kvti_local_target *target, struct kvt_error *err)
{
    uint64_t age_ns = kvti_now_ns() - atomic_load(&target->seen_ns);

    if (age_ns < FRESH_NS ||
        (age_ns < LIVING_NS && kvti_life_shown(target->gate))) {
        return KVT_OK;
    }
    return look(target, err);
}

/* The kernel marks the end of the target's thread before the address space goes,
 * so what still lives had its own when we wrote. */
static int look_after(struct kvti_local_target *target, struct kvt_error *err)
{
    uint64_t age_ns = kvti_now_ns() - atomic_load(&target->seen_ns);

    return age_ns < LIVING_NS && kvti_life_shown(target->gate)
               ? KVT_OK
               : look(target, err);
}

void kvti_local_run(struct kvti_local_conn *conn,
                    const struct kvti_chunk *chunk, struct kvti_outcome *ret)
{
    struct kvti_local_target *target = conn->target;
    struct kvt_error err = {.code = KVT_OK};
    uint64_t epoch = 0;

    if (!kvti_gate_enter(target->gate, target->gate_slot, &epoch)) {
        kvti_local_verdict(ret, KVT_DISCONNECTED, KVT_EDISCONNECTED, 0,
                           "the transport in process %d is closed",
                           target->proc->pid);
        return;
    }
    if (look_before(target, &err) != KVT_OK) {
        refuse(ret, &err);
    } else if (check_chunk(conn, chunk, epoch, ret)) {
        kvti_local_verdict(ret, KVT_DONE, KVT_OK, 0, "%s", "");
        kvti_local_move(conn, chunk, ret);
        /* Whose memory was it? A peer that went away in between explains a
         * fault better than the address does. */
        if ((ret->state == KVT_DONE ? look_after : look)(target, &err) !=
            KVT_OK) {
            refuse(ret, &err);
        }
    }
    kvti_gate_leave(target->gate, target->gate_slot, epoch);
}

/* Two workers that were woken at once may find themselves on one processor, and
 * would stay there for milliseconds: the later one leaves. */
static void keep_apart(struct kvti_local_worker *worker)
{
    const struct kvti_local *engine = worker->engine;
    int cpu = kvti_cpu_now();
    bool shared = false;
    cpu_set_t busy;

    atomic_store(&worker->cpu, cpu);
    CPU_ZERO(&busy);
    for (const struct kvti_local_worker *other = engine->workers;
         other != worker; other++) {
        int taken = atomic_load(&other->cpu);

        if (taken >= 0) {
            CPU_SET((size_t)taken, &busy);
            shared = shared || taken == cpu;
        }
    }
    if (shared && kvti_cpu_leave(&busy)) {
        atomic_store(&worker->cpu, kvti_cpu_now());
    }
}

void *kvti_local_worker(void *arg)
{
    struct kvti_local_worker *worker = arg;
    struct kvti_local *engine = worker->engine;
    const struct kvti_env *env = engine->env;
    const struct sched_param none = {0};

    /* A batch thread never takes the core from one that was just woken: the
     * scheduler's thread and ours go first. Who runs the host program at a
     * policy of its own knows why. */
    if (sched_getscheduler(0) == SCHED_OTHER) {
        (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
    }
    pthread_mutex_lock(&engine->mu);
    while (!engine->stop) {
        struct kvti_chunk *chunk = kvti_local_take_locked(&engine->heavy);
        struct kvti_local_conn *conn;
        struct kvti_outcome outcome;

        if (chunk == NULL) {
            atomic_store(&worker->cpu, -1);
            engine->idle++;
            pthread_cond_wait(&engine->work, &engine->mu);
            engine->idle--;
            continue;
        }
        pthread_mutex_unlock(&engine->mu);
        if (atomic_load(&worker->cpu) < 0) {
            keep_apart(worker);
        }
        conn = chunk->conn;
        atomic_store(&worker->heartbeat.busy_since_ns, kvti_now_ns());
        kvti_local_run(conn, chunk, &outcome);
        atomic_store(&worker->heartbeat.busy_since_ns, 0);
        if (kvti_local_report_begin(engine)) {
            env->report_chunk(env->ctx, chunk, &outcome);
            kvti_local_report_end(engine);
        }
        kvti_local_conn_release(conn, 1);
        pthread_mutex_lock(&engine->mu);
    }
    kvti_local_thread_end_locked(engine);
    pthread_mutex_unlock(&engine->mu);
    return NULL;
}
