/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our memory in NIXL, on the NIXL thread.
 *
 * Regions of one job that touch or overlap are registered as one extent: each
 * registration costs every peer 44 bytes of metadata and every transfer a
 * search. A region's cookie is its extent; the extent goes when its last
 * region does. Two jobs may make the same extent, which NIXL would take
 * twice and give back once: it is registered once and counted.
 */
#include "nixl.h"

#include <stdlib.h>
#include <string.h>

#define KINDS (KVT_VRAM + 1)

static int compare(const void *a, const void *b)
{
    return kvti_mem_order(*(struct kvti_mem *const *)a,
                          *(struct kvti_mem *const *)b);
}

/* A list of descriptors for each kind, made when first needed. */
struct lists {
    struct nixl_reg_dlist *of[KINDS];
};

static int add_desc(struct kvti_nixl *engine, struct lists *lists,
                    const struct kvti_nixl_extent *extent)
{
    const struct nixl_api *api = &engine->lib->api;
    struct nixl_reg_dlist **list = &lists->of[extent->kind];
    int status = NIXL_OK;

    if (*list == NULL) {
        status = api->create_reg_dlist((int)extent->kind, list);
    }
    return status != NIXL_OK
               ? status
               : api->reg_dlist_add_desc(*list, extent->addr, extent->length,
                                         extent->device, NULL, 0);
}

static void free_lists(struct kvti_nixl *engine, struct lists *lists)
{
    for (size_t i = 0; i < KINDS; i++) {
        if (lists->of[i] != NULL) {
            (void)engine->lib->api.destroy_reg_dlist(lists->of[i]);
        }
    }
}

static struct kvti_nixl_extent *find_extent(const struct kvti_nixl *engine,
                                            const struct kvti_nixl_extent *like)
{
    const struct kvti_mem *mem = kvti_regions_find(
        &engine->mems, like->addr, like->length, like->kind, like->device);

    return mem != NULL ? mem->cookie : NULL;
}

static int keep_extent(struct kvti_nixl *engine,
                       const struct kvti_nixl_extent *made, struct lists *lists,
                       struct kvti_nixl_extent **ret, int *ret_status)
{
    struct kvti_nixl_extent *extent = malloc(sizeof(*extent));
    struct kvti_mem mem = {.addr = made->addr,
                           .length = made->length,
                           .kind = made->kind,
                           .device = made->device,
                           .fd = -1,
                           .cookie = extent};

    if (extent == NULL || kvti_regions_reserve(&engine->mems, 1) != KVT_OK) {
        free(extent);
        return KVT_ENOMEM;
    }
    *ret_status = add_desc(engine, lists, made);
    if (*ret_status != NIXL_OK) {
        free(extent);
        return KVT_EENGINE;
    }
    *extent = *made;
    extent->refs = 0;
    kvti_regions_add(&engine->mems, &mem);
    *ret = extent;
    return KVT_OK;
}

/* The extent of mems[from] and of as many after it as touch; their cookies
 * are set. Returns where the next one begins. */
static size_t join(struct kvti_mem *const *mems, size_t count, size_t from,
                   struct kvti_nixl_extent *ret)
{
    uint64_t end = mems[from]->addr + mems[from]->length;
    size_t next = from + 1;

    while (next < count && mems[next]->kind == mems[from]->kind &&
           mems[next]->device == mems[from]->device &&
           mems[next]->addr <= end) {
        uint64_t other = mems[next]->addr + mems[next]->length;

        end = other > end ? other : end;
        next++;
    }
    *ret = (struct kvti_nixl_extent){.addr = mems[from]->addr,
                                     .length = end - mems[from]->addr,
                                     .kind = mems[from]->kind,
                                     .device = mems[from]->device};
    return next;
}

static void forget_extent(struct kvti_nixl *engine,
                          struct kvti_nixl_extent *extent)
{
    struct kvti_mem *mem = kvti_regions_find(&engine->mems, extent->addr,
                                             extent->length, extent->kind,
                                             extent->device);

    kvti_assert(mem != NULL && mem->cookie == extent);
    kvti_regions_remove(&engine->mems, mem);
    free(extent);
}

static void unref(struct kvti_nixl *engine, struct kvti_mem *mem,
                  struct lists *lists)
{
    struct kvti_nixl_extent *extent = mem->cookie;

    mem->cookie = NULL;
    extent->refs--;
    if (extent->refs > 0) {
        return;
    }
    if (lists != NULL && add_desc(engine, lists, extent) != NIXL_OK) {
        kvti_log(&engine->env->logger, KVT_LOG_WARNING,
                 "nixl: %llu bytes at 0x%llx stay registered",
                 (unsigned long long)extent->length,
                 (unsigned long long)extent->addr);
    }
    forget_extent(engine, extent);
}

/* Extents for all of the job's regions; the new ones are in `lists`. */
static int make_extents(struct kvti_nixl *engine, struct kvti_mem **mems,
                        size_t count, struct lists *lists, int *ret_status)
{
    size_t from = 0;

    while (from < count) {
        struct kvti_nixl_extent made;
        struct kvti_nixl_extent *extent;
        size_t next = join(mems, count, from, &made);
        int code;

        extent = find_extent(engine, &made);
        code = extent != NULL
                   ? KVT_OK
                   : keep_extent(engine, &made, lists, &extent, ret_status);
        if (code != KVT_OK) {
            return code;
        }
        for (; from < next; from++) {
            mems[from]->cookie = extent;
            extent->refs++;
        }
    }
    return KVT_OK;
}

static int register_lists(struct kvti_nixl *engine, struct lists *lists,
                          int *ret_status, uint32_t *ret_kind)
{
    const struct nixl_api *api = &engine->lib->api;

    for (uint32_t kind = 0; kind < KINDS; kind++) {
        if (lists->of[kind] == NULL) {
            continue;
        }
        *ret_status = api->register_mem(engine->agent, lists->of[kind], NULL);
        if (*ret_status == NIXL_OK) {
            continue;
        }
        *ret_kind = kind;
        for (uint32_t done = 0; done < kind; done++) {
            if (lists->of[done] != NULL) {
                (void)api->deregister_mem(engine->agent, lists->of[done], NULL);
            }
        }
        return KVT_EENGINE;
    }
    return KVT_OK;
}

int kvti_nixl_mem_add(struct kvti_nixl *engine, struct kvti_job *job,
                      struct kvt_error *err)
{
    struct kvti_mem **mems = calloc(job->mem_count + 1,
                                    sizeof(struct kvti_mem *));
    struct lists lists = {0};
    uint32_t kind = 0;
    int status = 0;
    int code;

    if (mems == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu regions",
                         job->mem_count);
    }
    if (job->mem_count > 0) {
        memcpy(mems, job->mems, job->mem_count * sizeof(struct kvti_mem *));
        qsort(mems, job->mem_count, sizeof(struct kvti_mem *), compare);
    }
    for (size_t i = 0; i < job->mem_count; i++) {
        mems[i]->cookie = NULL;
    }
    kvti_nixl_enter(engine);
    code = make_extents(engine, mems, job->mem_count, &lists, &status);
    if (code == KVT_OK) {
        code = register_lists(engine, &lists, &status, &kind);
    }
    for (size_t i = 0; code != KVT_OK && i < job->mem_count; i++) {
        if (mems[i]->cookie != NULL) {
            unref(engine, mems[i], NULL);
        }
    }
    free_lists(engine, &lists);
    kvti_nixl_leave(engine);
    kvti_regions_update(&engine->mems, NULL, NULL);
    free(mems);
    if (code == KVT_ENOMEM) {
        return kvti_fail(err, code, "no memory for %zu regions",
                         job->mem_count);
    }
    if (code != KVT_OK) {
        return kvti_fail(err, code,
                         "NIXL refused to register %s (%s, status %d): is "
                         "there a backend that moves it?",
                         kind == KVT_VRAM ? "VRAM" : "host memory",
                         kvti_nixl_status_text(status), status);
    }
    return KVT_OK;
}

void kvti_nixl_mem_drop(struct kvti_nixl *engine, struct kvti_job *job)
{
    const struct nixl_api *api = &engine->lib->api;
    struct lists lists = {0};

    kvti_nixl_enter(engine);
    for (size_t i = 0; i < job->mem_count; i++) {
        unref(engine, job->mems[i], &lists);
    }
    for (size_t kind = 0; kind < KINDS; kind++) {
        int status = NIXL_OK;

        if (lists.of[kind] != NULL) {
            status = api->deregister_mem(engine->agent, lists.of[kind], NULL);
        }
        if (status != NIXL_OK) {
            kvti_log(&engine->env->logger, KVT_LOG_WARNING,
                     "nixl: deregistering failed (status %d)", status);
        }
    }
    free_lists(engine, &lists);
    kvti_nixl_leave(engine);
    kvti_regions_update(&engine->mems, NULL, NULL);
}

int kvti_nixl_export(struct kvti_nixl *engine, struct kvti_job *job,
                     struct kvt_error *err)
{
    void *data = NULL;
    size_t length = 0;
    int status;
    int code;

    kvti_nixl_enter(engine);
    status = engine->lib->api.get_local_md(engine->agent, &data, &length);
    kvti_nixl_leave(engine);
    if (status != NIXL_OK) {
        return kvti_fail(err, KVT_EENGINE,
                         "NIXL gives no metadata (%s, status %d)",
                         kvti_nixl_status_text(status), status);
    }
    code = kvti_buf_append(&job->buf, data, length);
    free(data);
    if (code != KVT_OK) {
        return kvti_fail(err, code, "no memory for %zu bytes of metadata",
                         length);
    }
    engine->listening = true;
    job->local = engine->self;
    job->has_local = engine->has_self;
    return KVT_OK;
}

void kvti_nixl_mem_fini(struct kvti_nixl *engine)
{
    for (size_t i = 0; i < engine->mems.count; i++) {
        free(engine->mems.mems[i].cookie);
    }
    kvti_regions_fini(&engine->mems);
}
