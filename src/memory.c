/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory: register, deregister, metadata. Callers' threads check
 * and wait; the engine's part is a job; the table changes when the job is
 * reported, on the control thread under mu, all or nothing.
 *
 * One register or deregister is under way at a time (`memory_turn`). One that
 * timed out keeps the turn until the engine has answered; a registration that
 * nobody waits for any more is then undone.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "memcheck.h"

/* ------------------------------------------------------------------- turns */

static int take_turn_locked(struct kvt_transport *t, uint64_t deadline_ns,
                            struct kvt_error *err)
{
    while (t->memory_turn) {
        if (!kvti_wait_locked(t, deadline_ns)) {
            return kvti_fail(err, KVT_EBUSY,
                             "an earlier register or deregister has not been "
                             "answered by the engine: ask again later");
        }
        if (t->phase != KVTI_OPEN) {
            return kvti_fail(err, KVT_ECLOSED, "the transport is closed");
        }
    }
    t->memory_turn = true;
    return KVT_OK;
}

static void give_turn_locked(struct kvt_transport *t)
{
    t->memory_turn = false;
    pthread_cond_broadcast(&t->cond);
}

static void find_open_again(struct kvt_transport *t)
{
    kvti_regions_update(&t->regions, kvti_mem_is_open, NULL);
    t->stats.regions = t->regions.count;
}

bool kvti_mem_is_open(const struct kvti_mem *mem, void *ctx)
{
    (void)ctx;
    return mem->busy == 0;
}

/* Gives a call its job over the first `count` of its memory records. */
static int set_job(struct kvti_call *call, uint32_t kind, size_t count,
                   uint64_t deadline_ns)
{
    call->job.kind = kind;
    call->job.mem_count = count;
    call->job.reported = kvti_ctl_call_reported;
    call->job.deadline_ns = deadline_ns;
    free(call->job.mems);
    call->job.mems = calloc(count + 1, sizeof(struct kvti_mem *));
    if (call->job.mems == NULL) {
        return KVT_ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        call->job.mems[i] = &call->mems[i];
    }
    return KVT_OK;
}

/* ---------------------------------------------------------------- register */

static struct kvti_mem *find_mem(const struct kvt_transport *t,
                                 const struct kvti_mem *mem)
{
    return kvti_regions_find(&t->regions, mem->addr, mem->length, mem->kind,
                             mem->device);
}

/* Nobody waits for what was registered: take it back from the engine. */
static void undo_locked(struct kvt_transport *t, struct kvti_call *call);

static void register_done(struct kvt_transport *t, struct kvti_call *call)
{
    if (call->job.code == KVT_OK && call->abandoned) {
        undo_locked(t, call);
        return;
    }
    if (call->job.code == KVT_OK) {
        for (size_t i = 0; i < call->job.mem_count; i++) {
            kvti_regions_add(&t->regions, &call->mems[i]);
        }
        for (size_t i = 0; i < call->again_count; i++) {
            find_mem(t, &call->mems[call->job.mem_count + i])->refs +=
                call->mems[call->job.mem_count + i].refs;
        }
        find_open_again(t);
    }
    give_turn_locked(t);
    kvti_call_done_locked(t, call, call->job.code, &call->job.err);
    kvti_call_unref_locked(t, call);
}

/* What the engine could not let go of counts as registered and being taken
 * back: kvt_deregister() may be asked again. */
static void undo_done(struct kvt_transport *t, struct kvti_call *call)
{
    for (size_t i = 0; call->job.code == KVT_EBUSY && i < call->job.mem_count;
         i++) {
        call->mems[i].busy = 1;
        kvti_regions_add(&t->regions, &call->mems[i]);
    }
    give_turn_locked(t);
    kvti_call_done_locked(t, call, KVT_ETIMEDOUT, NULL);
    kvti_call_unref_locked(t, call);
}

static void undo_locked(struct kvt_transport *t, struct kvti_call *call)
{
    call->job.kind = KVTI_JOB_MEM_DROP;
    call->job.deadline_ns = kvti_now_ns();
    call->job.code = KVT_OK;
    call->finish = undo_done;
    kvti_list_append(&t->outbox, &call->job.node);
}

static int check_region(const struct kvt_transport *t, size_t i,
                        const struct kvt_region *region, struct kvt_error *err)
{
    if (region->kind > KVT_VRAM) {
        return kvti_fail(err, KVT_EINVAL, "region %zu: kind %u is unknown", i,
                         region->kind);
    }
    if (!kvti_kind_ok(t, region->kind)) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "region %zu: engine \"%s\" does not move %s memory", i,
                         t->engine_name,
                         region->kind == KVT_VRAM ? "VRAM" : "DRAM");
    }
    if (region->addr == 0) {
        return kvti_fail(err, KVT_EINVAL, "region %zu: the address is null", i);
    }
    if (region->addr > UINT64_MAX - region->length) {
        return kvti_fail(err, KVT_EINVAL,
                         "region %zu: address plus length wraps around", i);
    }
    if ((region->flags & ~(uint32_t)KVT_REGION_FD) != 0) {
        return kvti_fail(err, KVT_EINVAL, "region %zu: unknown flags %#x", i,
                         region->flags);
    }
    return KVT_OK;
}

static int compare_mems(const void *a, const void *b)
{
    return kvti_mem_order(a, b);
}

/* Sorted, equal ones folded into one with a count. Returns the new count. */
static size_t fold(struct kvti_mem *mems, size_t count)
{
    size_t kept = 0;

    qsort(mems, count, sizeof *mems, compare_mems);
    for (size_t i = 0; i < count; i++) {
        if (kept > 0 && kvti_mem_order(&mems[kept - 1], &mems[i]) == 0) {
            mems[kept - 1].refs++;
        } else {
            mems[kept++] = mems[i];
        }
    }
    return kept;
}

/*
 * Checked, sorted copies without the empty ones; equal ones are folded.
 * *ret_count may be 0.
 */
static int copy_regions(const struct kvt_transport *t,
                        const struct kvt_region *regions, size_t count,
                        bool probe, struct kvti_mem **ret, size_t *ret_count,
                        struct kvt_error *err)
{
    struct kvti_mem *mems = calloc(count + 1, sizeof *mems);
    size_t *positions = calloc(count + 1, sizeof *positions);
    size_t kept = 0;
    int code = KVT_OK;

    if (mems == NULL || positions == NULL) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %zu regions", count);
    }
    for (size_t i = 0; i < count && code == KVT_OK; i++) {
        const struct kvt_region *region = &regions[i];

        if (region->length == 0) {
            continue;
        }
        code = check_region(t, i, region, err);
        positions[kept] = i;
        mems[kept++] = (struct kvti_mem){
            .addr = region->addr,
            .length = region->length,
            .kind = region->kind,
            .device = region->device,
            .refs = 1,
            .fd = region->fd,
            .fd_offset = region->fd_offset,
            .flags = (region->flags & KVT_REGION_FD) != 0 ? KVTI_MEM_FD : 0};
    }
    if (code == KVT_OK && probe) {
        code = kvti_memcheck(mems, kept, positions, err);
    }
    free(positions);
    if (code != KVT_OK) {
        free(mems);
        return code;
    }
    *ret = mems;
    *ret_count = fold(mems, kept);
    return KVT_OK;
}

/* New ones to the front, known ones behind them. */
static int split_locked(struct kvt_transport *t, struct kvti_call *call,
                        size_t count, size_t *ret_new, struct kvt_error *err)
{
    size_t fresh = 0;

    for (size_t i = 0; i < count; i++) {
        const struct kvti_mem *known = find_mem(t, &call->mems[i]);

        if (known != NULL && known->busy != 0) {
            return kvti_fail(err, KVT_EBUSY,
                             "a region of %llu bytes is being deregistered: "
                             "ask kvt_deregister() again first",
                             (unsigned long long)known->length);
        }
        if (known == NULL) {
            struct kvti_mem mem = call->mems[i];

            call->mems[i] = call->mems[fresh];
            call->mems[fresh++] = mem;
        }
    }
    if (fresh > t->options.regions_max - t->regions.count) {
        return kvti_fail(err, KVT_EAGAIN,
                         "%zu more regions would pass this transport's limit "
                         "of %u: open it with a higher regions_max",
                         fresh, t->options.regions_max);
    }
    if (kvti_regions_reserve(&t->regions, fresh) != KVT_OK) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu regions", fresh);
    }
    *ret_new = fresh;
    return KVT_OK;
}

/* With the turn taken; gives it back unless the job was sent. */
static int register_locked(struct kvt_transport *t, struct kvti_call *call,
                           size_t count, uint64_t deadline_ns,
                           struct kvt_error *err)
{
    size_t fresh = 0;
    int code = split_locked(t, call, count, &fresh, err);

    if (code == KVT_OK &&
        set_job(call, KVTI_JOB_MEM_ADD, fresh, deadline_ns) != KVT_OK) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %zu regions", fresh);
    }
    if (code != KVT_OK) {
        give_turn_locked(t);
        kvti_call_unref_locked(t, call);
        kvti_call_unref_locked(t, call);
        return code;
    }
    call->again_count = count - fresh;
    call->finish = register_done;
    kvti_call_push_locked(t, call);
    return kvti_call_wait_locked(t, call, deadline_ns, err);
}

/* The checks that register and deregister share. */
static int begin(struct kvt_transport *t, const struct kvt_region *regions,
                 size_t count, bool probe, struct kvti_call **ret_call,
                 size_t *ret_count, struct kvt_error *err)
{
    struct kvti_mem *mems;
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (regions == NULL && count > 0) {
        return kvti_fail(err, KVT_EINVAL, "regions is NULL, count is %zu",
                         count);
    }
    code = copy_regions(t, regions, count, probe, &mems, ret_count, err);
    if (code != KVT_OK) {
        return code;
    }
    *ret_call = kvti_call_new(KVTI_CALL_JOB, NULL);
    if (*ret_call == NULL) {
        free(mems);
        return kvti_fail(err, KVT_ENOMEM, "no memory for a call");
    }
    (*ret_call)->mems = mems;
    return KVT_OK;
}

static int with_turn(struct kvt_transport *t, struct kvti_call *call,
                     size_t count, uint64_t timeout_ns, struct kvt_error *err,
                     int (*work)(struct kvt_transport *t,
                                 struct kvti_call *call, size_t count,
                                 uint64_t deadline_ns, struct kvt_error *err))
{
    uint64_t deadline = kvti_deadline(t, timeout_ns);
    int code;

    kvti_lock(t);
    code = t->phase == KVTI_OPEN
               ? KVT_OK
               : kvti_fail(err, KVT_ECLOSED,
                           "the transport is closed: open a new one");
    if (code == KVT_OK && count > 0) {
        code = take_turn_locked(t, deadline, err);
    }
    if (code == KVT_OK && count > 0) {
        code = work(t, call, count, deadline, err);
    } else {
        kvti_call_unref_locked(t, call);
        kvti_call_unref_locked(t, call);
    }
    kvti_unlock(t);
    return code;
}

int kvt_register(kvt_transport *t, const struct kvt_region *regions,
                 size_t count, uint64_t timeout_ns, struct kvt_error *err)
{
    struct kvti_call *call;
    size_t kept;
    int code = begin(t, regions, count, true, &call, &kept, err);

    return code != KVT_OK
               ? code
               : with_turn(t, call, kept, timeout_ns, err, register_locked);
}

/* -------------------------------------------------------------- deregister */

/* Whether an accepted transfer may still touch the region's bytes. */
static bool in_use_locked(const struct kvt_transport *t,
                          const struct kvti_mem *mem)
{
    for (uint32_t i = 0; i < t->slots_used; i++) {
        const struct kvti_xfer *xfer = &t->slots[i];

        if (xfer->result.id != 0 &&
            (xfer->result.flags & KVT_LOCAL_FINAL) == 0 &&
            (xfer->claimed || !xfer->stop) &&
            kvti_payload_uses(&xfer->payload, mem->addr, mem->length, mem->kind,
                              mem->device)) {
            return true;
        }
    }
    return false;
}

static int check_leaving_locked(const struct kvt_transport *t,
                                const struct kvti_mem *asked,
                                struct kvt_error *err)
{
    const struct kvti_mem *known = find_mem(t, asked);

    if (known == NULL || known->refs < asked->refs) {
        return kvti_fail(err, KVT_ENOENT,
                         "a region of %llu bytes is not registered (%u "
                         "registrations, %u to take back)",
                         (unsigned long long)asked->length,
                         known == NULL ? 0 : known->refs, asked->refs);
    }
    if (known->refs == asked->refs && in_use_locked(t, known)) {
        return kvti_fail(err, KVT_EBUSY,
                         "a transfer that is not final uses a region of %llu "
                         "bytes: wait for it, or cancel it and wait",
                         (unsigned long long)known->length);
    }
    return KVT_OK;
}

static void deregister_done(struct kvt_transport *t, struct kvti_call *call)
{
    if (call->job.code == KVT_OK) {
        for (size_t i = 0; i < call->job.mem_count; i++) {
            find_mem(t, &call->mems[i])->gone = 1;
        }
        kvti_regions_sweep(&t->regions);
        find_open_again(t);
    }
    give_turn_locked(t);
    kvti_call_done_locked(t, call, call->job.code, &call->job.err);
    kvti_call_unref_locked(t, call);
}

/* Counts down; what reaches nothing is shut and goes to the front of mems,
 * with the engine's cookie. Cannot fail. */
static size_t shut_locked(struct kvt_transport *t, struct kvti_call *call,
                          size_t count)
{
    size_t leaving = 0;

    for (size_t i = 0; i < count; i++) {
        struct kvti_mem asked = call->mems[i];
        struct kvti_mem *known = find_mem(t, &asked);

        if (known->refs > asked.refs) {
            known->refs -= asked.refs;
            continue;
        }
        known->busy = 1;
        call->mems[i] = call->mems[leaving];
        call->mems[leaving++] = *known;
    }
    find_open_again(t);
    kvti_layouts_sweep_locked(t);
    return leaving;
}

static int deregister_locked(struct kvt_transport *t, struct kvti_call *call,
                             size_t count, uint64_t deadline_ns,
                             struct kvt_error *err)
{
    int code = KVT_OK;

    for (size_t i = 0; i < count && code == KVT_OK; i++) {
        code = check_leaving_locked(t, &call->mems[i], err);
    }
    if (code == KVT_OK &&
        set_job(call, KVTI_JOB_MEM_DROP, count, deadline_ns) != KVT_OK) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %zu regions", count);
    }
    if (code != KVT_OK) {
        give_turn_locked(t);
        kvti_call_unref_locked(t, call);
        kvti_call_unref_locked(t, call);
        return code;
    }
    call->job.mem_count = shut_locked(t, call, count);
    call->finish = deregister_done;
    kvti_call_push_locked(t, call);
    /* The engine reports by the deadline; it gets a little longer so that its
     * own words reach the caller. */
    return kvti_call_wait_locked(t, call, kvti_after(deadline_ns, 200000000),
                                 err);
}

int kvt_deregister(kvt_transport *t, const struct kvt_region *regions,
                   size_t count, uint64_t timeout_ns, struct kvt_error *err)
{
    struct kvti_call *call;
    size_t kept;
    int code = begin(t, regions, count, false, &call, &kept, err);

    return code != KVT_OK
               ? code
               : with_turn(t, call, kept, timeout_ns, err, deregister_locked);
}

/* ---------------------------------------------------------------- metadata */

static void export_done(struct kvt_transport *t, struct kvti_call *call)
{
    struct kvti_md md = {0};
    int code = call->job.code;

    if (code == KVT_OK && !call->abandoned) {
        kvti_format(md.agent_name, sizeof md.agent_name, "%s", t->agent_name);
        kvti_format(md.engine, sizeof md.engine, "%s", t->engine_name);
        memcpy(md.incarnation, t->incarnation, sizeof md.incarnation);
        md.has_local = call->job.has_local;
        md.local = call->job.local;
        for (size_t i = 0; i < t->regions.count && code == KVT_OK; i++) {
            if (kvti_mem_is_open(&t->regions.mems[i], NULL)) {
                code = kvti_regions_reserve(&md.regions, 1);
                if (code == KVT_OK) {
                    kvti_regions_add(&md.regions, &t->regions.mems[i]);
                }
            }
        }
        if (code == KVT_OK) {
            code = kvti_md_encode(&md, &call->job.buf);
        }
        kvti_regions_fini(&md.regions);
        if (code != KVT_OK) {
            kvti_fail(&call->job.err, code, "no memory for the metadata");
        }
    }
    kvti_call_done_locked(t, call, code, &call->job.err);
    kvti_call_unref_locked(t, call);
}

int kvt_metadata(kvt_transport *t, void *buffer, size_t capacity,
                 size_t *ret_length, struct kvt_error *err)
{
    struct kvti_call *call;
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (ret_length == NULL || (buffer == NULL && capacity > 0)) {
        return kvti_fail(err, KVT_EINVAL,
                         "ret_length is NULL, or the buffer is NULL and its "
                         "capacity is not 0");
    }
    call = kvti_call_new(KVTI_CALL_JOB, NULL);
    if (call == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a call");
    }
    code = kvti_lock_open(t, err);
    if (code != KVT_OK) {
        free(call);
        return code;
    }
    call->job.kind = KVTI_JOB_EXPORT;
    call->job.reported = kvti_ctl_call_reported;
    call->finish = export_done;
    call->refs++; /* the bytes are read after the wait */
    kvti_call_push_locked(t, call);
    code = kvti_call_wait_locked(t, call, kvti_deadline(t, 0), err);
    if (code == KVT_OK) {
        *ret_length = call->job.buf.length;
        if (buffer != NULL && call->job.buf.length <= capacity) {
            memcpy(buffer, call->job.buf.data, call->job.buf.length);
        } else {
            code = kvti_fail(err, KVT_ERANGE,
                             "the metadata has %zu bytes, the buffer %zu: ask "
                             "again with a larger one",
                             call->job.buf.length, capacity);
        }
    }
    kvti_call_unref_locked(t, call);
    kvti_unlock(t);
    return code;
}
