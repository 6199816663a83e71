/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Jobs through the fault engine, and the connections that LOAD and UNLOAD make
 * and end. A job is in jobs_waiting until it starts, in jobs_inner while the
 * inner engine has it, in jobs_late when only its report is still held back.
 * Messages of one connection start in their order; nothing of a connection is
 * reported after its UNLOAD.
 */
#include "fault.h"

#include <stdlib.h>

#define NS_PER_MS 1000000u

static bool is_call(const struct kvti_fault_job *record)
{
    return record->kind == KVTI_JOB_CONNECT || record->kind == KVTI_JOB_NOTIFY;
}

void kvti_fault_tell_conn(struct kvti_fault *fault,
                          struct kvti_fault_conn *conn,
                          enum kvti_conn_event event,
                          const struct kvt_error *why)
{
    if (conn->loaded) {
        fault->env->report_conn(fault->env->ctx, conn->link, event, why);
        return;
    }
    conn->early[event] = true;
    if (why != NULL) {
        conn->why[event] = *why;
    }
}

void kvti_fault_conn_event(void *ctx, void *link, enum kvti_conn_event event,
                           const struct kvt_error *why)
{
    struct kvti_fault *fault = ctx;
    struct kvti_fault_conn *conn = link;

    kvti_fault_lock(fault);
    if (event == KVTI_CONN_DEAD) {
        conn->dead = true;
        if (why != NULL) {
            conn->why[event] = *why;
        }
    }
    if (event == KVTI_CONN_DEAD && conn->active > 0) {
        /* Our traits make a death a proof, and a copy thread may still be
         * reading our side: the proof waits for it. */
        conn->doomed = true;
        event = KVTI_CONN_DOWN;
    }
    kvti_fault_tell_conn(fault, conn, event, why);
    kvti_fault_unlock(fault);
    /* What hangs on a dead connection goes on. */
    fault->env->wake(fault->env->ctx);
}

static void report(struct kvti_fault *fault,
                   const struct kvti_fault_job *record)
{
    fault->env->report_job(fault->env->ctx, record->job, record->code,
                           record->code == KVT_OK ? NULL : &record->err);
}

static void report_load(struct kvti_fault *fault,
                        const struct kvti_fault_job *record)
{
    struct kvti_fault_conn *conn = record->conn;

    if (record->code != KVT_OK) {
        record->job->conn = NULL;
        report(fault, record);
        kvti_fault_conn_free(conn);
        return;
    }
    record->job->conn = conn;
    kvti_list_append(&fault->conns, &conn->node);
    report(fault, record);
    conn->loaded = true;
    for (int event = KVTI_CONN_DOWN; event <= KVTI_CONN_DEAD; event++) {
        if (conn->early[event]) {
            kvti_fault_tell_conn(fault, conn, (enum kvti_conn_event)event,
                                 &conn->why[event]);
        }
    }
}

/* Reports any job but an UNLOAD, and frees the record. */
static void finish_one(struct kvti_fault *fault, struct kvti_fault_job *record)
{
    if (record->kind == KVTI_JOB_LOAD) {
        report_load(fault, record);
    } else {
        report(fault, record);
    }
    kvti_fault_job_free(record);
}

/* The one way to report a job. Under the lock. */
static void finish(struct kvti_fault *fault, struct kvti_fault_job *record)
{
    struct kvti_fault_conn *conn = record->conn;

    if (record->kind != KVTI_JOB_UNLOAD) {
        finish_one(fault, record);
        return;
    }
    kvti_list_each(node, &fault->jobs_late) {
        struct kvti_fault_job *late = kvti_container(
            node, struct kvti_fault_job, node);

        if (late->conn == conn && late != record) {
            finish_one(fault, late);
        }
    }
    report(fault, record);
    kvti_fault_orphan_posts(fault, conn);
    kvti_fault_conn_free(conn);
}

/* The job is over; reports it now or when its delay is. Under the lock. */
static void come_back(struct kvti_fault *fault, struct kvti_fault_job *record,
                      int code, const struct kvt_error *err)
{
    record->code = code;
    if (err != NULL) {
        record->err = *err;
    }
    if (record->delay_ns == 0 || kvti_fault_released(fault, record->epoch)) {
        finish(fault, record);
        return;
    }
    record->due_ns = kvti_now_ns() + record->delay_ns;
    kvti_list_remove(&record->node);
    kvti_list_append(&fault->jobs_late, &record->node);
}

static void order_failure(const struct kvti_fault_job *record, int *ret_code,
                          struct kvt_error *err)
{
    static const char *const what[KVTI_FAULT_JOB_KINDS] = {
        [KVTI_JOB_MEM_ADD] = "registering memory",
        [KVTI_JOB_MEM_DROP] = "shutting peers out of memory",
        [KVTI_JOB_EXPORT] = "making metadata",
        [KVTI_JOB_LOAD] = "loading a peer",
        [KVTI_JOB_CONNECT] = "connecting to a peer",
        [KVTI_JOB_UNLOAD] = "unloading a peer",
        [KVTI_JOB_NOTIFY] = "sending a notification",
    };
    /* The only way a drop may fail is that it is not certain. */
    int code = record->kind == KVTI_JOB_MEM_DROP ? KVT_EBUSY : KVT_EENGINE;

    *ret_code = kvti_fail(err, code, "The fault engine was told to fail %s.",
                          what[record->kind]);
}

/* An UNLOAD is about to go: what is still open on its connection ends. */
static void settle(struct kvti_fault *fault, struct kvti_fault_conn *conn)
{
    struct kvt_error err;

    (void)kvti_fail(&err, KVT_EDISCONNECTED, "The peer is being unloaded.");
    kvti_fault_shut(fault, conn, KVTI_FAULT_HANG);
    kvti_list_each(node, &fault->jobs_waiting) {
        struct kvti_fault_job *record = kvti_container(
            node, struct kvti_fault_job, node);

        if (record->conn == conn && is_call(record)) {
            record->delay_ns = 0;
            come_back(fault, record, KVT_EDISCONNECTED, &err);
        }
    }
}

/*
 * Leaves jobs_waiting. True: the caller gives the job to the inner engine, when
 * it has let go of the lock. Else the record may be freed. Under the lock.
 */
static bool start(struct kvti_fault *fault, struct kvti_fault_job *record)
{
    struct kvti_job *job = record->job;
    struct kvti_fault_conn *conn = record->conn;
    struct kvt_error err;
    int code;

    if (record->kind == KVTI_JOB_UNLOAD) {
        settle(fault, conn);
    } else if (record->fail) {
        order_failure(record, &code, &err);
        come_back(fault, record, code, &err);
        return false;
    } else if (is_call(record) && conn->shut) {
        code = kvti_fail(&err, KVT_EDISCONNECTED,
                         "The fault engine was told that this peer is dead.");
        come_back(fault, record, code, &err);
        return false;
    }
    kvti_list_remove(&record->node);
    kvti_list_append(&fault->jobs_inner, &record->node);
    job->wrapper = record;
    if (record->kind == KVTI_JOB_LOAD) {
        job->link = conn;
    } else if (conn != NULL) {
        job->conn = conn->inner;
    }
    return true;
}

/* The inner engine has done the job: the core's own pointers come back. */
void kvti_fault_job_back(void *ctx, struct kvti_job *job, int code,
                         const struct kvt_error *err)
{
    struct kvti_fault *fault = ctx;
    struct kvti_fault_job *record;
    struct kvt_error own;
    bool late;

    kvti_fault_lock(fault);
    record = job->wrapper;
    job->wrapper = NULL;
    if (record->kind == KVTI_JOB_LOAD) {
        record->conn->inner = job->conn;
        job->link = record->conn->link;
    } else if (record->conn != NULL) {
        job->conn = record->conn;
    }
    if (record->kind == KVTI_JOB_UNLOAD && record->fail) {
        order_failure(record, &code, &own);
        err = &own;
    }
    late = record->delay_ns > 0;
    come_back(fault, record, code, err);
    kvti_fault_unlock(fault);
    if (late) {
        fault->env->wake(fault->env->ctx);
    }
}

static bool message_before(const struct kvti_fault *fault,
                           const struct kvti_fault_job *record)
{
    kvti_list_each(node, &fault->jobs_waiting) {
        const struct kvti_fault_job *other = kvti_container(
            node, struct kvti_fault_job, node);

        if (other == record) {
            return false;
        }
        if (other->kind == KVTI_JOB_NOTIFY && other->conn == record->conn) {
            return true;
        }
    }
    return false;
}

static struct kvti_fault_job *next_ready(const struct kvti_fault *fault)
{
    kvti_list_each(node, &fault->jobs_waiting) {
        struct kvti_fault_job *record = kvti_container(
            node, struct kvti_fault_job, node);

        if (record->hang && !kvti_fault_released(fault, record->epoch)) {
            continue;
        }
        if (record->kind == KVTI_JOB_NOTIFY && message_before(fault, record)) {
            continue;
        }
        return record;
    }
    return NULL;
}

/* Control thread, without the lock. */
static void run_jobs(struct kvti_fault *fault)
{
    struct kvti_fault_job *record;

    kvti_fault_lock(fault);
    while ((record = next_ready(fault)) != NULL) {
        struct kvti_job *job = record->job;

        if (start(fault, record)) {
            kvti_fault_unlock(fault);
            fault->inner->job(fault->inner_self, job);
            kvti_fault_lock(fault);
        }
    }
    kvti_fault_unlock(fault);
}

/* NULL: out of memory, which an UNLOAD never is. */
static struct kvti_fault_job *new_record(struct kvti_job *job)
{
    struct kvti_fault_conn *conn = job->conn;
    struct kvti_fault_job *record;

    if (job->kind == KVTI_JOB_UNLOAD) {
        record = &conn->unload;
        record->conn = conn;
    } else {
        record = calloc(1, sizeof(*record));
    }
    if (record == NULL) {
        return NULL;
    }
    if (job->kind == KVTI_JOB_CONNECT || job->kind == KVTI_JOB_NOTIFY) {
        record->conn = conn;
    } else if (job->kind == KVTI_JOB_LOAD) {
        record->conn = calloc(1, sizeof(*record->conn));
        if (record->conn == NULL) {
            free(record);
            return NULL;
        }
        record->conn->link = job->link;
        kvti_list_init(&record->conn->node);
        kvti_list_init(&record->conn->unload.node);
    }
    record->job = job;
    record->kind = job->kind;
    return record;
}

void kvti_fault_job(void *self, struct kvti_job *job)
{
    struct kvti_fault *fault = self;
    struct kvti_fault_job *record = new_record(job);
    const struct kvti_fault_rules *rules = &fault->rules;
    uint32_t kind = job->kind;
    uint64_t number;
    bool late;

    if (record == NULL) {
        struct kvt_error err;
        int code = kvti_fail(&err, KVT_ENOMEM,
                             "The fault engine is out of memory.");

        fault->env->report_job(fault->env->ctx, job, code, &err);
        return;
    }
    kvti_fault_lock(fault);
    number = ++fault->job_count[kind];
    record->epoch = fault->epoch;
    record->hang = kvti_fault_hit(&rules->job_hang[kind], number);
    record->fail = kvti_fault_hit(&rules->job_fail[kind], number);
    record->delay_ns = (uint64_t)rules->job_delay_ms[kind] * NS_PER_MS;
    late = record->delay_ns > 0;
    kvti_list_append(&fault->jobs_waiting, &record->node);
    kvti_fault_unlock(fault);
    run_jobs(fault);
    if (late) {
        fault->env->wake(fault->env->ctx);
    }
}

/* The first late one that is due; else *next_ns is lowered. */
static struct kvti_fault_job *next_due(const struct kvti_fault *fault,
                                       uint64_t now_ns, uint64_t *next_ns)
{
    kvti_list_each(node, &fault->jobs_late) {
        struct kvti_fault_job *record = kvti_container(
            node, struct kvti_fault_job, node);

        if (kvti_fault_released(fault, record->epoch) ||
            record->due_ns <= now_ns) {
            return record;
        }
        *next_ns = record->due_ns < *next_ns ? record->due_ns : *next_ns;
    }
    return NULL;
}

uint64_t kvti_fault_turn_jobs(struct kvti_fault *fault, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    struct kvti_fault_job *record;

    run_jobs(fault);
    kvti_fault_lock(fault);
    /* From the start each time: an UNLOAD takes others with it. */
    while ((record = next_due(fault, now_ns, &next_ns)) != NULL) {
        finish(fault, record);
    }
    kvti_fault_unlock(fault);
    return next_ns;
}
