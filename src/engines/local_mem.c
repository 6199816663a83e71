/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our registered memory: a place in the gate for each region, and the set that
 * says which of our own bytes memcpy may touch. On the control thread.
 *
 * A drop shuts its entries at once and is done when the writers that may have
 * seen them open are out; turn() looks once a millisecond. An entry is given
 * to another region only then. Drops are handled one after another, because a
 * gate has one drain at a time.
 */
#include "local.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* The kernel's struct procmap_query, of Linux 6.11; what we do not use is left
 * at 0. */
struct map_query {
    uint64_t size;
    uint64_t flags;
    uint64_t addr;
    uint64_t start; /* out, as what follows */
    uint64_t end;
    uint64_t vma_flags;
    uint64_t rest[7];
};

_Static_assert(sizeof(struct map_query) == 104, "as the kernel has it");

#define MAP_QUERY _IOWR('f', 17, struct map_query)
#define MAP_QUERY_WRITABLE 2u /* as a condition, in `flags` */

static int add_mem(struct kvti_local *engine, struct kvti_mem *mem)
{
    int code = kvti_gate_entry_open(&engine->gate, &mem->gate_slot,
                                    &mem->gate_gen);

    if (code == KVT_OK) {
        kvti_regions_add(&engine->mems, mem);
    }
    return code;
}

/* Marked first and swept at once: one by one, a large drop would move the
 * whole set for each of its regions. */
static void forget_mems(struct kvti_local *engine, struct kvti_mem **mems,
                        size_t count)
{
    struct kvti_regions *set = &engine->mems;

    for (size_t i = 0; i < count; i++) {
        const struct kvti_mem *mem = mems[i];
        struct kvti_mem *own = kvti_regions_find(set, mem->addr, mem->length,
                                                 mem->kind, mem->device);

        kvti_gate_entry_free(&engine->gate, mem->gate_slot);
        if (own != NULL) {
            own->gone = 1;
        }
    }
    kvti_regions_sweep(set);
    kvti_regions_update(set, NULL, NULL);
}

static int check_kinds(const struct kvti_job *job, struct kvt_error *err)
{
    for (size_t i = 0; i < job->mem_count; i++) {
        if (job->mems[i]->kind != KVT_DRAM) {
            return kvti_fail(err, KVT_EUNSUPPORTED,
                             "the engine local cannot move VRAM (region at "
                             "0x%llx): open the transport with nixl",
                             (unsigned long long)job->mems[i]->addr);
        }
    }
    return KVT_OK;
}

int kvti_local_mem_add(struct kvti_local *engine, struct kvti_job *job,
                       struct kvt_error *err)
{
    size_t added = 0;
    int code = check_kinds(job, err);

    if (code != KVT_OK) {
        return code;
    }
    pthread_rwlock_wrlock(&engine->mem_lock);
    code = kvti_regions_reserve(&engine->mems, job->mem_count);
    if (code != KVT_OK) {
        kvti_fail(err, code, "no memory for %zu regions", job->mem_count);
    }
    while (code == KVT_OK && added < job->mem_count) {
        code = add_mem(engine, job->mems[added]);
        added += code == KVT_OK;
    }
    if (code == KVT_EAGAIN) {
        kvti_fail(err, code,
                  "the engine local holds %u regions at most: register fewer, "
                  "larger ones",
                  KVTI_GATE_ENTRIES);
    }
    if (code == KVT_OK) {
        kvti_regions_update(&engine->mems, NULL, NULL);
    } else {
        forget_mems(engine, job->mems, added);
    }
    pthread_rwlock_unlock(&engine->mem_lock);
    return code;
}

void kvti_local_mem_drop(struct kvti_local *engine, struct kvti_job *job)
{
    for (size_t i = 0; i < job->mem_count; i++) {
        kvti_gate_entry_shut(&engine->gate, job->mems[i]->gate_slot);
    }
    kvti_local_job_priv(job)->flipped = false;
    kvti_list_append(&engine->drops, &job->node);
}

static void finish_drop(struct kvti_local *engine, struct kvti_job *job)
{
    pthread_rwlock_wrlock(&engine->mem_lock);
    forget_mems(engine, job->mems, job->mem_count);
    pthread_rwlock_unlock(&engine->mem_lock);
    kvti_list_remove(&job->node);
    engine->env->report_job(engine->env->ctx, job, KVT_OK, NULL);
}

/* Goes on with the drops, oldest first; returns when to look again. A drain
 * that outlived its job is finished before the next one begins. */
uint64_t kvti_local_mem_turn(struct kvti_local *engine, uint64_t now_ns)
{
    const struct kvti_env *env = engine->env;

    while (!kvti_list_empty(&engine->drops)) {
        struct kvti_job *job = kvti_container(engine->drops.next,
                                              struct kvti_job, node);
        int32_t pid = 0;

        if (kvti_gate_drained(&engine->gate, &pid)) {
            if (kvti_local_job_priv(job)->flipped) {
                finish_drop(engine, job);
            } else {
                kvti_gate_flip(&engine->gate);
                kvti_local_job_priv(job)->flipped = true;
            }
        } else if (now_ns >= job->deadline_ns) {
            struct kvt_error err;

            kvti_list_remove(&job->node);
            kvti_fail(&err, KVT_EBUSY,
                      "process %d does not move on with a write into this "
                      "memory: new writes are shut out, ask again or end that "
                      "process",
                      (int)pid);
            env->report_job(env->ctx, job, KVT_EBUSY, &err);
        } else {
            return now_ns + KVTI_STEP_NS;
        }
    }
    return KVTI_NEVER_NS;
}

int kvti_local_maps_open(void)
{
    struct kvti_writable here = {0};
    uint64_t addr = (uint64_t)(uintptr_t)&here;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);

    if (fd >= 0 && !kvti_local_find_writable(fd, addr, &here)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

bool kvti_local_find_writable(int fd, uint64_t addr, struct kvti_writable *ret)
{
    struct map_query query = {
        .size = sizeof(query), .flags = MAP_QUERY_WRITABLE, .addr = addr};

    if (fd < 0 || ioctl(fd, MAP_QUERY, &query) != 0) {
        return false;
    }
    ret->lo = query.start;
    ret->hi = query.end;
    return true;
}
