/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of docs/bad_input.md: opening, memory, metadata, peers, layouts. */
#include "badinput.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const char *name_of_256_bytes(void)
{
    static char name[KVT_NAME_MAX + 2];

    memset(name, 'n', KVT_NAME_MAX + 1);
    return name;
}

/* -------------------------------------------------------------------- open */

#define CHECK_OPTIONS(input, ...)                                              \
    do {                                                                       \
        struct kvt_options options_ = {.size = sizeof options_,                \
                                       .engine = suite.engine};                \
                                                                               \
        __VA_ARGS__;                                                           \
        CHECK(kvt_open, (input), &options_, &b->out_t, ERR);                   \
    } while (0)

void check_open_rows(struct bad *b)
{
    struct kvt_engine_info info;

    answer_text(b, "kvt_strerror", "a code of no list", kvt_strerror(-1000));
    answer_text(b, "kvt_errname", "a code of no list", kvt_errname(-1000));
    CHECK(kvt_open, "ret NULL", NULL, NULL, ERR);
    CHECK_OPTIONS("options.size 0 or any but sizeof", options_.size = 0);
    CHECK_OPTIONS("options.size 0 or any but sizeof", options_.size++);
    CHECK_OPTIONS("options.agent_name \"\"", options_.agent_name = "");
    CHECK_OPTIONS("options.engine \"fault:\"", options_.engine = "fault:");
    CHECK_OPTIONS("options.flags with an unknown bit",
                  options_.flags = 1u << 31);
    CHECK_OPTIONS("options.agent_name of 256 bytes",
                  options_.agent_name = name_of_256_bytes());
    CHECK_OPTIONS("options.engine \"fault:fault:local\"",
                  options_.engine = "fault:fault:local");
    CHECK_OPTIONS("options.engine \"fault:local?window=4294967295\"",
                  options_.engine = "fault:local?window=4294967295");
    CHECK_OPTIONS("options.inflight_max 1048577",
                  options_.inflight_max = 1048577);
    CHECK_OPTIONS("options.notify_bytes_max 131073",
                  options_.notify_bytes_max = 131073);
    CHECK_OPTIONS("options.engine \"teleport\"", options_.engine = "teleport");
    CHECK_OPTIONS("options.engine \"fault:teleport\"",
                  options_.engine = "fault:teleport");
    CHECK_OPTIONS("options.engine \"fault:local?nonsense\"",
                  options_.engine = "fault:local?nonsense");
    CHECK(kvt_engine_info, "ret NULL", 0, NULL);
    CHECK(kvt_engine_info, "index past the last engine", 1000, &info);
}

/* ------------------------------------------------------------------ memory */

static void check_region(struct bad *b, const char *input,
                         const struct kvt_region *region)
{
    CHECK(kvt_register, input, b->t, region, 1, 0, ERR);
    CHECK(kvt_deregister, input, b->t, region, 1, 0, ERR);
}

static void check_unmapped(struct bad *b)
{
    struct kvt_region region = {.length = 4096};
    struct kvt_shm shm = {0};
    void *memory = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);

    assert_ptr_not_equal(memory, MAP_FAILED);
    assert_int_equal(munmap(memory, 4096), 0);
    region.addr = (uintptr_t)memory;
    CHECK(kvt_register, "region that is not mapped", b->t, &region, 1, 0, ERR);
    assert_kvt_ok(kvt_shm_create(4096, &shm, ERR));
    region = b->region;
    region.flags = KVT_REGION_FD;
    region.fd = shm.fd;
    CHECK(kvt_register, "region.fd that does not back the memory", b->t,
          &region, 1, 0, ERR);
    kvt_shm_destroy(&shm);
}

static void check_shm_rows(struct bad *b)
{
    CHECK(kvt_shm_create, "ret NULL", 4096, NULL, ERR);
    CHECK(kvt_shm_create, "size 0", 0, &b->shm, ERR);
    CHECK(kvt_shm_create, "size UINT64_MAX", UINT64_MAX, &b->shm, ERR);
    CHECK_VOID(kvt_shm_destroy, "shm NULL", NULL);
    CHECK_VOID(kvt_shm_destroy, "shm zeroed", &b->shm);
}

void check_memory_rows(struct bad *b)
{
    struct kvt_region region;

    CHECK(kvt_register, "regions NULL, count 1", b->t, NULL, 1, 0, ERR);
    CHECK(kvt_deregister, "regions NULL, count 1", b->t, NULL, 1, 0, ERR);
    CHECK(kvt_register, "count 0", b->t, &b->region, 0, 0, ERR);
    CHECK(kvt_deregister, "count 0", b->t, &b->region, 0, 0, ERR);
    region = (struct kvt_region){.addr = 0, .length = 1};
    check_region(b, "region.addr 0, length 1", &region);
    region = (struct kvt_region){.kind = 9, .flags = UINT32_MAX, .fd = -1};
    check_region(b, "region of length 0, whatever else it says", &region);
    region = b->region;
    region.length = UINT64_MAX;
    check_region(b, "region whose end wraps", &region);
    region = b->region;
    region.kind = 2;
    check_region(b, "region.kind 2", &region);
    region = b->region;
    region.flags = 1u << 31;
    check_region(b, "region.flags with an unknown bit", &region);
    if (!suite.vram) {
        region = b->region;
        region.kind = KVT_VRAM;
        check_region(b, "region of VRAM, engine local", &region);
    }
    check_unmapped(b);
    region = b->region;
    region.length--;
    CHECK(kvt_deregister, "registered region, other length", b->t, &region, 1,
          0, ERR);
    region = (struct kvt_region){.addr = 4096, .length = 4096};
    CHECK(kvt_deregister, "region that is not registered", b->t, &region, 1, 0,
          ERR);
    check_shm_rows(b);
}

void check_metadata_rows(struct bad *b)
{
    CHECK(kvt_metadata, "ret_length NULL", b->t, b->bytes, sizeof b->bytes,
          NULL, ERR);
    CHECK(kvt_metadata, "buffer NULL, capacity 1", b->t, NULL, 1,
          &b->out_length, ERR);
    CHECK(kvt_metadata, "buffer NULL, capacity 0 (ret_length is set)", b->t,
          NULL, 0, &b->out_length, ERR);
}

/* ------------------------------------------------------------------- peers */

static void check_both_adds(struct bad *b, const char *input,
                            const struct kvt_peer_params *params)
{
    CHECK(kvt_peer_add, input, b->t, params, &b->out_peer, ERR);
    CHECK(kvt_peer_add_async, input, b->t, params, &b->out_peer, &b->out_xfer,
          ERR);
}

#define CHECK_PARAMS(input, ...)                                               \
    do {                                                                       \
        struct kvt_peer_params params_ = b->params;                            \
                                                                               \
        __VA_ARGS__;                                                           \
        check_both_adds(b, (input), &params_);                                 \
    } while (0)

static void check_add_rows(struct bad *b)
{
    struct kvt_region outside = {.addr = 4096, .length = 4096};
    unsigned char *damaged = malloc(b->params.metadata_length);

    assert_non_null(damaged);
    memcpy(damaged, b->metadata, b->params.metadata_length);
    damaged[b->params.metadata_length / 2] ^= 1;
    check_both_adds(b, "params NULL", NULL);
    CHECK(kvt_peer_add, "ret_peer NULL", b->t, &b->params, NULL, ERR);
    CHECK(kvt_peer_add_async, "ret_peer NULL", b->t, &b->params, NULL,
          &b->out_xfer, ERR);
    CHECK(kvt_peer_add_async, "ret_xfer NULL", b->t, &b->params, &b->out_peer,
          NULL, ERR);
    CHECK_PARAMS("params.name NULL", params_.name = NULL);
    CHECK_PARAMS("params.metadata NULL", params_.metadata = NULL);
    CHECK_PARAMS("params.regions NULL, region_count 1",
                 params_.region_count = 1);
    CHECK_PARAMS("params.size 0 or any but sizeof", params_.size = 0);
    CHECK_PARAMS("params.size 0 or any but sizeof", params_.size--);
    CHECK_PARAMS("params.name \"\"", params_.name = "");
    CHECK_PARAMS("params.metadata_length 0", params_.metadata_length = 0);
    CHECK_PARAMS("params.name of 256 bytes",
                 params_.name = name_of_256_bytes());
    CHECK_PARAMS("metadata with a flipped bit or cut short",
                 params_.metadata = damaged);
    CHECK_PARAMS("metadata with a flipped bit or cut short",
                 params_.metadata_length--);
    CHECK_PARAMS("params.regions outside the metadata",
                 params_.region_count = 1, params_.regions = &outside);
    CHECK_PARAMS("metadata of this transport",
                 params_.metadata = b->own_metadata);
    CHECK_PARAMS("params.agent_name is another agent's",
                 params_.agent_name = "somebody else");
    CHECK(kvt_peer_reload, "metadata with a flipped bit or cut short", b->t,
          b->peer, damaged, b->params.metadata_length, 0, ERR);
    free(damaged);
}

static void check_peer_id(struct bad *b, const char *input,
                          const char *of_confirm_dead, kvt_peer id)
{
    CHECK(kvt_peer_reload, input, b->t, id, NULL, 0, 0, ERR);
    CHECK(kvt_peer_unload, input, b->t, id, 0, ERR);
    CHECK(kvt_peer_remove, input, b->t, id);
    CHECK(kvt_peer_confirm_dead, of_confirm_dead, b->t, id);
    CHECK(kvt_peer_info, input, b->t, id, &b->info);
}

void check_peer_rows(struct bad *b)
{
    check_add_rows(b);
    CHECK(kvt_peer_find, "name NULL", b->t, NULL, &b->out_peer);
    CHECK(kvt_peer_find, "ret_peer NULL", b->t, "b", NULL);
    CHECK(kvt_peer_find, "name of no peer", b->t, "nobody", &b->out_peer);
    CHECK(kvt_peer_loaded, "peer KVT_SELF", b->t, KVT_SELF);
    CHECK(kvt_peer_loaded, "peer of no such id", b->t, 999);
    CHECK(kvt_peer_loaded, "peer of no such id", b->t, KVT_ANY);
    CHECK(kvt_peer_reload, "metadata NULL, metadata_length 1", b->t, b->peer,
          NULL, 1, 0, ERR);
    /* As long as the peer's: the lengths of both agents' names are equal. */
    CHECK(kvt_peer_reload, "metadata of this transport", b->t, b->peer,
          b->own_metadata, b->params.metadata_length, 0, ERR);
    CHECK(kvt_peer_info, "ret NULL", b->t, b->peer, NULL);
    check_peer_id(b, "peer KVT_SELF", "peer KVT_SELF", KVT_SELF);
    check_peer_id(b, "peer of no such id", "peer of no such id", 999);
    check_peer_id(b, "peer of no such id", "peer of no such id", KVT_ANY);
    check_peer_id(b, "peer removed before",
                  "peer removed before, nothing of it unproven", b->removed);
}

/* ----------------------------------------------------------------- layouts */

#define CHECK_RUN(input, ...)                                                  \
    do {                                                                       \
        struct kvt_run run_ = b->run;                                          \
                                                                               \
        __VA_ARGS__;                                                           \
        CHECK(kvt_prepare, (input), b->t, KVT_SELF, "x", &run_, 1,             \
              &b->out_layout, ERR);                                            \
    } while (0)

static void check_run_rows(struct bad *b)
{
    CHECK_RUN("run.count 0", run_.count = 0);
    CHECK_RUN("run.block_bytes 0", run_.block_bytes = 0);
    CHECK_RUN("run whose end wraps", run_.addr = UINT64_MAX - 100);
    CHECK_RUN("run.count UINT64_MAX", run_.count = UINT64_MAX);
    CHECK_RUN("run.stride_bytes below block_bytes", run_.stride_bytes--);
    CHECK_RUN("run.kind 2", run_.kind = 2);
    if (!suite.vram) {
        CHECK_RUN("run of VRAM, engine local", run_.kind = KVT_VRAM);
    }
    CHECK_RUN("run outside the registered memory of its side", run_.count++);
    CHECK_RUN("run outside the registered memory of its side", run_.addr--);
    CHECK_RUN("run of the peer's memory, side KVT_SELF", run_ = b->peer_run);
}

void check_layout_rows(struct bad *b)
{
    check_run_rows(b);
    CHECK(kvt_prepare, "name NULL", b->t, KVT_SELF, NULL, &b->run, 1,
          &b->out_layout, ERR);
    CHECK(kvt_prepare, "runs NULL, count 1", b->t, KVT_SELF, "x", NULL, 1,
          &b->out_layout, ERR);
    CHECK(kvt_prepare, "ret_layout NULL", b->t, KVT_SELF, "x", &b->run, 1, NULL,
          ERR);
    CHECK(kvt_prepare, "name \"\"", b->t, KVT_SELF, "", &b->run, 1,
          &b->out_layout, ERR);
    CHECK(kvt_prepare, "count 0", b->t, KVT_SELF, "x", &b->run, 0,
          &b->out_layout, ERR);
    CHECK(kvt_prepare, "name of 256 bytes", b->t, KVT_SELF, name_of_256_bytes(),
          &b->run, 1, &b->out_layout, ERR);
    CHECK(kvt_prepare, "peer unloaded before", b->t, b->unloaded, "x",
          &b->peer_run, 1, &b->out_layout, ERR);
    CHECK(kvt_prepare, "side of no such id", b->t, 999, "x", &b->peer_run, 1,
          &b->out_layout, ERR);
    CHECK(kvt_prepare, "side of no such id", b->t, KVT_ANY, "x", &b->peer_run,
          1, &b->out_layout, ERR);
    CHECK(kvt_layout_find, "name NULL", b->t, KVT_SELF, NULL, &b->out_layout);
    CHECK(kvt_layout_find, "ret_layout NULL", b->t, KVT_SELF, "pool", NULL);
    assert_kvt_ok(
        kvt_prepare(b->t, KVT_SELF, "ours", &b->run, 1, &b->out_layout, ERR));
    reset_outputs(b);
    CHECK(kvt_layout_find, "name of ours, side a peer", b->t, b->peer, "ours",
          &b->out_layout);
    CHECK(kvt_layout_find, "name of no layout", b->t, KVT_SELF, "none",
          &b->out_layout);
    CHECK(kvt_layout_drop, "layout 0", b->t, 0);
    CHECK(kvt_layout_drop, "layout of no such id", b->t, 999);
}
