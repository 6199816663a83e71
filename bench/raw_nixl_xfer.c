/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: made, posted, and asked about until they have status 0. */
#include "raw_nixl.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

static bool make_list(const struct raw *raw, const struct bench_copy *copies,
                      size_t count, bool remote, struct nixl_xfer_dlist **ret)
{
    uint64_t base = remote ? raw->remote : (uint64_t)(uintptr_t)raw->area.at;
    int status = raw->api->create_xfer_dlist(NIXL_MEM_DRAM, ret);

    for (size_t i = 0; i < count && status == NIXL_OK; i++) {
        status = raw->api->xfer_dlist_add_desc(
            *ret, base + (remote ? copies[i].to : copies[i].from),
            copies[i].length, 0);
    }
    return status == NIXL_OK || raw_fail("xfer_dlist_add_desc", status);
}

static struct nixl_xfer_req *create(const struct raw *raw, size_t first,
                                    size_t count)
{
    struct nixl_xfer_dlist *local = NULL;
    struct nixl_xfer_dlist *remote = NULL;
    struct nixl_xfer_req *req = NULL;
    int status;

    if (make_list(raw, raw->copies + first, count, false, &local) &&
        make_list(raw, raw->copies + first, count, true, &remote)) {
        status = raw->api->create_xfer_req(raw->agent, NIXL_WRITE, local,
                                           remote, raw->remote_name, &req,
                                           raw->args);
        if (status != NIXL_OK) {
            (void)raw_fail("create_xfer_req", status);
            req = NULL;
        }
    }
    if (local != NULL) {
        (void)raw->api->destroy_xfer_dlist(local);
    }
    if (remote != NULL) {
        (void)raw->api->destroy_xfer_dlist(remote);
    }
    return req;
}

static struct nixl_xfer_req *make(const struct raw *raw, size_t first,
                                  size_t count)
{
    struct nixl_xfer_req *req = NULL;
    int status;

    status = raw->extra.make_xfer_req(
        raw->agent, NIXL_WRITE, raw->local_lists,
        (const int *)(const void *)(raw->from + first), count,
        raw->remote_lists, (const int *)(const void *)(raw->to + first), count,
        &req, raw->args);
    if (status != NIXL_OK) {
        (void)raw_fail("make_xfer_req", status);
        return NULL;
    }
    return req;
}

bool raw_prepare(struct raw *raw, bool remote, struct nixl_lists **ret)
{
    uint64_t block_bytes = raw->shape.block_bytes;
    uint64_t pool = raw->shape.pool;
    struct bench_copy *blocks = cli_alloc(pool, sizeof(*blocks));
    struct nixl_xfer_dlist *list = NULL;
    int status;

    for (uint64_t i = 0; i < pool; i++) {
        blocks[i] = (struct bench_copy){.from = i * block_bytes,
                                        .to = i * block_bytes,
                                        .length = block_bytes};
    }
    if (!make_list(raw, blocks, pool, remote, &list)) {
        free(blocks);
        return false;
    }
    free(blocks);
    status = raw->extra.prep_xfer_dlist(
        raw->agent, remote ? raw->remote_name : "", list, ret, NULL);
    (void)raw->api->destroy_xfer_dlist(list);
    return status == NIXL_OK || raw_fail("prep_xfer_dlist", status);
}

static size_t parts_of(const struct raw *raw, const struct raw_config *config)
{
    size_t count = config->making == MAKE_PREPARED ? raw->shape.blocks
                                                   : raw->copy_count;

    return (count + config->split - 1) / config->split;
}

static struct nixl_xfer_req *part(const struct raw *raw,
                                  const struct raw_config *config, size_t index)
{
    size_t all = config->making == MAKE_PREPARED ? raw->shape.blocks
                                                 : raw->copy_count;
    size_t first = index * config->split;
    size_t count = all - first < config->split ? all - first : config->split;

    if (config->making == MAKE_KEPT && config->kept != NULL) {
        return config->kept[index];
    }
    return config->making == MAKE_PREPARED ? make(raw, first, count)
                                           : create(raw, first, count);
}

static void wait_a_little(const struct raw *raw)
{
    const struct timespec nap = {.tv_nsec = 50000};

    if (raw->waiting == WAIT_YIELD) {
        (void)sched_yield();
    } else if (raw->waiting == WAIT_SLEEP) {
        (void)nanosleep(&nap, NULL);
    }
}

static bool end_part(const struct raw *raw, const struct raw_config *config,
                     struct nixl_xfer_req *req)
{
    int status;

    if (config->making == MAKE_KEPT) {
        return true;
    }
    status = raw->api->release_xfer_req(raw->agent, req);
    if (status == NIXL_OK) {
        status = raw->api->destroy_xfer_req(req);
    }
    return status == NIXL_OK || raw_fail("release_xfer_req", status);
}

/* Ends what has status 0; `flying` has `*count` requests. */
static bool reap(struct raw *raw, const struct raw_config *config,
                 size_t *count)
{
    size_t kept = 0;

    for (size_t i = 0; i < *count; i++) {
        struct nixl_xfer_req *req = raw->flying[i];
        int status = raw->api->get_xfer_status(raw->agent, req);

        if (status < 0) {
            return raw_fail("a transfer", status);
        }
        if (status == NIXL_IN_PROG) {
            raw->flying[kept++] = req;
        } else if (!end_part(raw, config, req)) {
            return false;
        }
    }
    if (kept == *count) {
        wait_a_little(raw);
    }
    *count = kept;
    return true;
}

bool raw_run(struct raw *raw, const struct raw_config *config, uint64_t *ret_ns)
{
    size_t parts = parts_of(raw, config);
    uint64_t begin = cli_now_ns();
    size_t flying = 0;

    for (size_t next = 0; next < parts || flying > 0;) {
        struct nixl_xfer_req *req;
        int status;

        if (next == parts || flying == config->inflight) {
            if (!reap(raw, config, &flying)) {
                return false;
            }
            continue;
        }
        req = part(raw, config, next++);
        if (req == NULL) {
            return false;
        }
        status = raw->api->post_xfer_req(raw->agent, req, NULL);
        if (status < 0) {
            return raw_fail("post_xfer_req", status);
        }
        if (status == NIXL_IN_PROG) {
            raw->flying[flying++] = req;
        } else if (!end_part(raw, config, req)) {
            return false;
        }
    }
    *ret_ns = cli_now_ns() - begin;
    return true;
}

bool raw_keep(struct raw *raw, struct raw_config *config)
{
    size_t parts = parts_of(raw, config);
    struct nixl_xfer_req **kept = cli_alloc(parts,
                                            sizeof(struct nixl_xfer_req *));

    for (size_t i = 0; i < parts; i++) {
        kept[i] = part(raw, config, i);
        if (kept[i] == NULL) {
            return false;
        }
    }
    config->kept = kept;
    return true;
}
