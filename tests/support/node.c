/* SPDX-License-Identifier: Apache-2.0 */
#include "node.h"

#include <dirent.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sanitizer.h"

/* -------------------------------------------------------------------- pools */

uint64_t test_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t pool_stride(const struct pool *pool)
{
    return pool->shape.block_bytes + pool->shape.gap_bytes;
}

static void *map_private(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(memory, MAP_FAILED);
    return memory;
}

void pool_open(struct pool *pool, const struct pool_shape *shape, uint64_t seed)
{
    *pool = (struct pool){.shape = *shape};
    if (pool->shape.block_bytes == 0) {
        pool->shape.block_bytes = 256;
    }
    if (pool->shape.count == 0) {
        pool->shape.count = 64;
    }
    pool->bytes = (size_t)(pool_stride(pool) * pool->shape.count) +
                  2 * (size_t)POOL_GUARD_BYTES;
    pool->image = map_private(pool->bytes);
    if (shape->shm) {
        assert_kvt_ok(kvt_shm_create(pool->bytes, &pool->shm, ERR));
        pool->memory = pool->shm.addr;
    } else {
        pool->memory = map_private(pool->bytes);
    }
    pool_fill(pool, seed);
}

void pool_close(struct pool *pool)
{
    if (pool->shape.shm) {
        kvt_shm_destroy(&pool->shm);
    } else if (pool->memory != NULL) {
        (void)munmap(pool->memory, pool->bytes);
    }
    if (pool->image != NULL) {
        (void)munmap(pool->image, pool->bytes);
    }
    *pool = (struct pool){0};
}

void pool_fill(struct pool *pool, uint64_t seed)
{
    for (size_t i = 0; i < pool->bytes; i += sizeof(uint64_t)) {
        uint64_t word = test_random(&seed);
        size_t left = pool->bytes - i;

        memcpy(pool->memory + i, &word,
               left < sizeof word ? left : sizeof word);
    }
    pool_take(pool);
}

void pool_take(struct pool *pool)
{
    memcpy(pool->image, pool->memory, pool->bytes);
}

unsigned char *pool_block(const struct pool *pool, uint64_t index)
{
    assert_true(index < pool->shape.count);
    return pool->memory + POOL_GUARD_BYTES + index * pool_stride(pool);
}

struct kvt_region pool_region(const struct pool *pool)
{
    struct kvt_region region = {
        .addr = (uintptr_t)pool->memory + POOL_GUARD_BYTES,
        .length = pool->bytes - 2 * (size_t)POOL_GUARD_BYTES,
    };

    if (pool->shape.shm) {
        region.flags = KVT_REGION_FD;
        region.fd = pool->shm.fd;
        region.fd_offset = POOL_GUARD_BYTES;
    }
    return region;
}

struct kvt_run pool_run(const struct pool *pool)
{
    return (struct kvt_run){
        .addr = (uintptr_t)pool->memory + POOL_GUARD_BYTES,
        .block_bytes = pool->shape.block_bytes,
        .stride_bytes = pool_stride(pool),
        .count = pool->shape.count,
    };
}

static size_t offset_of(const struct pool *pool, uint64_t addr, size_t length)
{
    uint64_t offset = addr - (uintptr_t)pool->memory;

    assert_true(offset <= pool->bytes && length <= pool->bytes - offset);
    return (size_t)offset;
}

void pool_expect_bytes(struct pool *dst, uint64_t dst_addr,
                       const struct pool *src, uint64_t src_addr, size_t length)
{
    memcpy(dst->image + offset_of(dst, dst_addr, length),
           src->memory + offset_of(src, src_addr, length), length);
}

void pool_expect(struct pool *dst, uint64_t dst_index, const struct pool *src,
                 uint64_t src_index)
{
    assert_int_equal(dst->shape.block_bytes, src->shape.block_bytes);
    pool_expect_bytes(dst, (uintptr_t)pool_block(dst, dst_index), src,
                      (uintptr_t)pool_block(src, src_index),
                      (size_t)dst->shape.block_bytes);
}

void pool_accept(struct pool *pool, uint64_t index)
{
    size_t offset = (size_t)(pool_block(pool, index) - pool->memory);

    memcpy(pool->image + offset, pool->memory + offset,
           (size_t)pool->shape.block_bytes);
}

void pool_check(const struct pool *pool, const char *what)
{
    size_t at = 0;
    size_t wrong = 0;

    if (memcmp(pool->memory, pool->image, pool->bytes) == 0) {
        return;
    }
    for (size_t i = pool->bytes; i-- > 0;) {
        if (pool->memory[i] != pool->image[i]) {
            at = i;
            wrong++;
        }
    }
    if (at < POOL_GUARD_BYTES || at >= pool->bytes - POOL_GUARD_BYTES) {
        fail_msg("%s: %zu wrong bytes, the first in the guard at %zu of %zu",
                 what, wrong, at, pool->bytes);
    }
    fail_msg("%s: %zu wrong bytes, the first in block %llu at %llu (blocks "
             "have %llu) is 0x%02x, not 0x%02x",
             what, wrong,
             (unsigned long long)((at - POOL_GUARD_BYTES) / pool_stride(pool)),
             (unsigned long long)((at - POOL_GUARD_BYTES) % pool_stride(pool)),
             (unsigned long long)pool->shape.block_bytes, pool->memory[at],
             pool->image[at]);
}

/* ------------------------------------------------------------------ agents */

void node_open(struct node *node, const struct node_plan *plan)
{
    struct kvt_options options = plan->options;
    struct kvt_region region;
    struct kvt_run run;

    *node = (struct node){0};
    options.size = sizeof options;
    options.engine = plan->engine;
    options.agent_name = plan->name;
    pool_open(&node->pool, &plan->shape, plan->seed);
    assert_kvt_ok(kvt_open(&options, &node->t, ERR));
    region = pool_region(&node->pool);
    assert_kvt_ok(kvt_register(node->t, &region, 1, 0, ERR));
    run = pool_run(&node->pool);
    assert_kvt_ok(
        kvt_prepare(node->t, KVT_SELF, "pool", &run, 1, &node->layout, ERR));
}

struct path_bytes moved_bytes;

void count_bytes(kvt_transport *t)
{
    struct kvt_stats stats = stats_of(t);

    moved_bytes.local += stats.bytes_local;
    moved_bytes.nixl += stats.bytes_nixl;
}

void node_close(struct node *node)
{
    assert_kvt_ok(kvt_close(node->t, 0, ERR));
    count_bytes(node->t);
    kvt_free(node->t);
    node->t = NULL;
    pool_close(&node->pool);
}

void *node_metadata(const struct node *node, size_t *ret_length)
{
    size_t capacity = 0;
    void *bytes;

    assert_kvt_fails(kvt_metadata(node->t, NULL, 0, &capacity, ERR),
                     KVT_ERANGE);
    bytes = malloc(capacity);
    assert_non_null(bytes);
    assert_kvt_ok(kvt_metadata(node->t, bytes, capacity, ret_length, ERR));
    return bytes;
}

kvt_peer node_add(const struct node *node, const char *name,
                  const void *metadata, size_t length)
{
    struct kvt_peer_params params = {.size = sizeof params,
                                     .name = name,
                                     .metadata = metadata,
                                     .metadata_length = length};
    kvt_peer peer = 0;

    assert_kvt_ok(kvt_peer_add(node->t, &params, &peer, ERR));
    assert_int_not_equal(peer, 0);
    return peer;
}

void node_settle(const struct node *node)
{
    size_t length;

    /* Calls are taken in their order, and this one waits to be answered. */
    free(node_metadata(node, &length));
}

void pair_open(struct pair *pair, const struct node_plan *a,
               const struct node_plan *b)
{
    struct kvt_run run;
    size_t length;
    void *metadata;

    *pair = (struct pair){0};
    node_open(&pair->a, a);
    node_open(&pair->b, b);
    metadata = node_metadata(&pair->b, &length);
    pair->peer = node_add(&pair->a, "b", metadata, length);
    free(metadata);
    run = pool_run(&pair->b.pool);
    assert_kvt_ok(kvt_prepare(pair->a.t, pair->peer, "pool", &run, 1,
                              &pair->remote, ERR));
}

void pair_close(struct pair *pair)
{
    node_close(&pair->a);
    node_close(&pair->b);
}

/* --------------------------------------------------------------- transfers */

struct kvt_indices indices_u32(const uint32_t *data, uint64_t count)
{
    return (struct kvt_indices){
        .data = data, .count = count, .type = KVT_INDEX_U32};
}

kvt_xfer pair_write(const struct pair *pair, const uint32_t *local,
                    const uint32_t *remote, uint64_t count,
                    const struct kvt_xfer_options *options)
{
    struct kvt_indices ours = indices_u32(local, count);
    struct kvt_indices theirs = indices_u32(remote, count);
    kvt_xfer id = 0;

    assert_kvt_ok(kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &ours,
                                   pair->remote, &theirs, options, &id, ERR));
    assert_int_not_equal(id, 0);
    return id;
}

kvt_xfer pair_read(const struct pair *pair, const uint32_t *local,
                   const uint32_t *remote, uint64_t count,
                   const struct kvt_xfer_options *options)
{
    struct kvt_indices ours = indices_u32(local, count);
    struct kvt_indices theirs = indices_u32(remote, count);
    kvt_xfer id = 0;

    assert_kvt_ok(kvt_read_blocks(pair->a.t, pair->peer, pair->a.layout, &ours,
                                  pair->remote, &theirs, options, &id, ERR));
    assert_int_not_equal(id, 0);
    return id;
}

kvt_xfer pair_write_one(const struct pair *pair, uint32_t i, uint32_t k,
                        const struct kvt_xfer_options *options)
{
    return pair_write(pair, &i, &k, 1, options);
}

void pair_expect(struct pair *pair, const uint32_t *local,
                 const uint32_t *remote, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        pool_expect(&pair->b.pool, remote[i], &pair->a.pool, local[i]);
    }
}

void pair_check(const struct pair *pair)
{
    pool_check(&pair->a.pool, "a");
    pool_check(&pair->b.pool, "b");
}

bool wait_fd(kvt_transport *t, int timeout_ms)
{
    struct pollfd ready = {.fd = kvt_fd(t), .events = POLLIN};
    int count = poll(&ready, 1, timeout_ms);

    assert_true(ready.fd >= 0 && count >= 0);
    return count == 1;
}

void wait_results(kvt_transport *t, kvt_peer peer, struct kvt_result *ret,
                  size_t count)
{
    uint64_t until = test_now_ns() + test_wait_ns();
    size_t have = 0;

    for (;;) {
        int got = kvt_poll(t, peer, ret + have, count - have);

        assert_true(got >= 0);
        have += (size_t)got;
        if (have == count) {
            return;
        }
        if (test_now_ns() > until || !wait_fd(t, test_wait_ms())) {
            fail_msg("%zu of %zu results in time", have, count);
        }
        if (got == 0) {
            test_yield(); /* readable for another peer, perhaps */
        }
    }
}

struct kvt_result wait_xfer(kvt_transport *t, kvt_xfer id)
{
    struct kvt_result result = {0};

    wait_results(t, KVT_ANY, &result, 1);
    assert_int_equal(result.id, id);
    assert_true((result.flags & KVT_FINISHED) != 0);
    return result;
}

struct kvt_result wait_done(kvt_transport *t, kvt_xfer id)
{
    struct kvt_result result = wait_xfer(t, id);

    if (result.state != KVT_DONE) {
        fail_msg("state %u, %s: %s", result.state, kvt_errname(result.code),
                 result.text);
    }
    assert_int_equal(result.code, KVT_OK);
    assert_int_equal(result.flags, KVT_LOCAL_FINAL | KVT_PEER_FINAL |
                                       KVT_QUIESCENT | KVT_FINISHED);
    assert_int_equal(result.bytes_done, result.bytes);
    assert_int_equal(result.scope, KVT_SCOPE_NONE);
    assert_string_equal(result.text, "");
    return result;
}

struct kvt_result status_of(kvt_transport *t, kvt_xfer id)
{
    struct kvt_result result = {0};

    assert_kvt_ok(kvt_status(t, id, &result));
    assert_int_equal(result.id, id);
    return result;
}

bool in_state(kvt_transport *t, kvt_xfer id, enum kvt_state state)
{
    return status_of(t, id).state == (uint32_t)state;
}

bool is_quiescent(kvt_transport *t, kvt_xfer id)
{
    return (status_of(t, id).flags & KVT_QUIESCENT) != 0;
}

struct kvt_stats stats_of(kvt_transport *t)
{
    struct kvt_stats stats = {0};

    assert_kvt_ok(kvt_stats(t, &stats, sizeof stats));
    return stats;
}

struct kvt_notification wait_note(kvt_transport *t, void *buffer,
                                  size_t capacity)
{
    uint64_t until = test_now_ns() + test_wait_ns();
    struct kvt_notification note = {0};
    int got;

    while ((got = kvt_notification(t, &note, buffer, capacity)) == 0) {
        if (test_now_ns() > until || !wait_fd(t, test_wait_ms())) {
            fail_msg("%s", "no notification in time");
        }
    }
    assert_int_equal(got, 1);
    return note;
}

/* ------------------------------------------------------------ this process */

static long count_entries(const char *path)
{
    DIR *folder = opendir(path);
    long count = 0;

    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

static long count_lines(const char *path)
{
    FILE *file = fopen(path, "re");
    long count = 0;
    int c;

    assert_non_null(file);
    while ((c = fgetc(file)) != EOF) {
        count += c == '\n';
    }
    (void)fclose(file);
    return count;
}

struct usage usage_now(void)
{
    struct mallinfo2 info = mallinfo2();
    struct usage usage = {.threads = count_entries("/proc/self/task"),
                          .fds = count_entries("/proc/self/fd"),
                          .maps = count_lines("/proc/self/maps"),
                          .heap_bytes = info.uordblks + info.hblkhd};

    if (BUILT_FOR_VALGRIND) {
        usage.heap_bytes = 0; /* it counts what was freed and that it keeps */
    }
    return usage;
}
