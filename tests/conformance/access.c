/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is not there, not whole, or not ours to touch: an error that
 * says which of these it is, never a signal, and nothing else is damaged.
 *
 * By NIXL such an error breaks the link, and nothing but the death of the
 * peer's process proves that no more bytes land: the write is lost, a reload
 * repairs the link, and kvt_peer_confirm_dead() lifts the quarantine. Over TCP
 * the target's own instructions write, so a hole there ends its process.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "suite.h"

#define NOBODY 65534
#define TCP_DIES "over TCP a hole at the target ends its process by a signal"
#define GRACE (50 * MS)
#define PAGE ((size_t)4096)

/* b gets more memory: one region at `addr`, and a layout over it. */
static kvt_layout give_more(struct pair *pair, const struct kvt_region *region,
                            uint64_t blocks)
{
    const struct kvt_run run = {.addr = region->addr,
                                .block_bytes = region->length / blocks,
                                .stride_bytes = region->length / blocks,
                                .count = blocks};
    size_t length;
    void *metadata;
    kvt_layout layout;

    assert_kvt_ok(kvt_register(pair->b.t, region, 1, 0, ERR));
    metadata = node_metadata(&pair->b, &length);
    assert_kvt_ok(
        kvt_peer_reload(pair->a.t, pair->peer, metadata, length, 0, ERR));
    free(metadata);
    assert_kvt_ok(
        kvt_prepare(pair->a.t, pair->peer, "more", &run, 1, &layout, ERR));
    return layout;
}

static struct kvt_result write_to(struct pair *pair, kvt_layout layout,
                                  uint32_t block)
{
    struct kvt_indices indices = indices_u32(&block, 1);
    kvt_xfer id;

    assert_kvt_ok(kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout,
                                   &indices, layout, &indices, NULL, &id, ERR));
    return wait_xfer(pair->a.t, id);
}

static void assert_failed(const struct kvt_result *result)
{
    assert_string_not_equal(result->text, "");
    if (suite.nixl) {
        assert_int_equal(result->state, KVT_LOST);
        assert_int_equal(result->code, KVT_ELOST);
        assert_int_equal(result->flags & KVT_QUIESCENT, 0);
        return;
    }
    assert_int_equal(result->state, KVT_FAILED);
    assert_int_equal(result->code, KVT_EENGINE);
    assert_int_equal(result->scope, KVT_SCOPE_REQUEST);
    assert_true((result->flags & KVT_QUIESCENT) != 0);
}

/* For what comes after a failure. */
static void repair(const struct pair *pair)
{
    if (suite.nixl) {
        assert_int_equal(kvt_peer_loaded(pair->a.t, pair->peer), 0);
        assert_kvt_ok(kvt_peer_reload(pair->a.t, pair->peer, NULL, 0, 0, ERR));
    }
}

static void end(struct pair *pair)
{
    if (!suite.nixl) {
        pair_close(pair);
        return;
    }
    assert_int_equal(stats_of(pair->a.t).quarantined, 1);
    assert_kvt_ok(kvt_peer_confirm_dead(pair->a.t, pair->peer));
    assert_soon(stats_of(pair->a.t).quarantined == 0);
    suite_leak_pair(pair);
}

static void assert_still_works(struct pair *pair)
{
    assert_int_equal(kvt_peer_loaded(pair->a.t, pair->peer), 1);
    pair_expect(pair, (uint32_t[]){3}, (uint32_t[]){3}, 1);
    (void)wait_done(pair->a.t, pair_write_one(pair, 3, 3, NULL));
    pair_check(pair);
}

static const struct pool_shape pages = {.block_bytes = 4096, .count = 16};

/* The same process: a plain copy would be a SIGSEGV here. */
static void unmapped_memory_in_this_process_is_an_error(void **state)
{
    struct kvt_region region = {.length = 16 * PAGE};
    struct kvt_result result;
    struct pair pair;
    void *memory;
    kvt_layout layout;

    (void)state;
    need_no_tcp(TCP_DIES);
    suite_pair_with_grace(&pair, &pages, GRACE);
    memory = mmap(NULL, region.length, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    region.addr = (uintptr_t)memory;
    layout = give_more(&pair, &region, 16);
    assert_int_equal(munmap((char *)memory + 8 * PAGE, 4096), 0);
    result = write_to(&pair, layout, 8);
    assert_failed(&result);
    repair(&pair);
    assert_int_equal(write_to(&pair, layout, 7).state, KVT_DONE);
    assert_int_equal(write_to(&pair, layout, 9).state, KVT_DONE);
    assert_still_works(&pair);
    end(&pair);
    (void)munmap(memory, region.length);
}

static void our_own_unmapped_memory_is_an_error(void **state)
{
    struct kvt_region region = {.length = 4096};
    struct kvt_copy piece = {.length = 4096};
    struct kvt_result result;
    struct pair pair;
    void *memory;
    kvt_xfer id;

    (void)state;
    if (suite.slow && !suite.tsan) {
        skip_case("the address sanitizer looks at what the kernel is to read");
    }
    suite_pair_with_grace(&pair, &pages, GRACE);
    memory = mmap(NULL, region.length, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    region.addr = (uintptr_t)memory;
    assert_kvt_ok(kvt_register(pair.a.t, &region, 1, 0, ERR));
    assert_int_equal(munmap(memory, 4096), 0);
    piece.local_addr = region.addr;
    piece.peer_addr = pool_region(&pair.b.pool).addr;
    assert_kvt_ok(kvt_write(pair.a.t, pair.peer, &piece, 1, NULL, &id, ERR));
    result = wait_xfer(pair.a.t, id);
    assert_failed(&result);
    repair(&pair);
    assert_still_works(&pair);
    end(&pair);
}

/* A file that is not sealed may be cut short at any time: SIGBUS for who
 * copies into a mapping of it. */
static void a_file_cut_short_is_an_error_never_a_signal(void **state)
{
    struct kvt_region region = {.length = 16 * PAGE, .flags = KVT_REGION_FD};
    struct kvt_result result;
    struct pair pair;
    void *memory;
    kvt_layout layout;

    (void)state;
    need_no_tcp(TCP_DIES);
    suite_pair_with_grace(&pair, &pages, GRACE);
    region.fd = memfd_create("pool", MFD_CLOEXEC);
    assert_true(region.fd >= 0);
    assert_int_equal(ftruncate(region.fd, (off_t)region.length), 0);
    memory = mmap(NULL, region.length, PROT_READ | PROT_WRITE, MAP_SHARED,
                  region.fd, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    region.addr = (uintptr_t)memory;
    layout = give_more(&pair, &region, 16);
    assert_int_equal(write_to(&pair, layout, 8).state, KVT_DONE);
    assert_memory_equal((char *)memory + 8 * PAGE, pool_block(&pair.a.pool, 8),
                        4096);
    assert_int_equal(ftruncate(region.fd, 8 * PAGE), 0);
    result = write_to(&pair, layout, 8);
    assert_failed(&result);
    repair(&pair);
    assert_int_equal(write_to(&pair, layout, 7).state, KVT_DONE);
    /* It was not grown again by the attempt. */
    assert_int_equal(lseek(region.fd, 0, SEEK_END), 8 * PAGE);
    assert_still_works(&pair);
    end(&pair);
    (void)munmap(memory, region.length);
    (void)close(region.fd);
}

static void read_only_memory_is_not_written(void **state)
{
    struct kvt_region region = {.length = 16 * PAGE};
    struct kvt_result result;
    struct pair pair;
    void *memory;
    kvt_layout layout;

    (void)state;
    need_no_tcp(TCP_DIES);
    suite_pair_with_grace(&pair, &pages, GRACE);
    memory = mmap(NULL, region.length, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    memset(memory, 0x77, region.length);
    region.addr = (uintptr_t)memory;
    layout = give_more(&pair, &region, 16);
    assert_int_equal(mprotect(memory, region.length, PROT_READ), 0);
    result = write_to(&pair, layout, 8);
    assert_failed(&result);
    repair(&pair);
    for (size_t i = 0; i < region.length; i++) {
        assert_int_equal(((unsigned char *)memory)[i], 0x77);
    }
    assert_still_works(&pair);
    end(&pair);
    (void)munmap(memory, region.length);
}

static void part_of_a_block_beyond_the_end_is_an_error(void **state)
{
    const struct pool_shape large = {.block_bytes = 65536, .count = 1};
    struct kvt_region region = {.length = 65536};
    struct kvt_result result;
    struct pair pair;
    void *memory;
    kvt_layout layout;

    (void)state;
    need_no_tcp(TCP_DIES);
    need_local(
        "UCX takes the kernel's short count for success: such a write is "
        "reported as done");
    suite_pair(&pair, &large);
    memory = mmap(NULL, region.length, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    region.addr = (uintptr_t)memory;
    layout = give_more(&pair, &region, 1);
    /* The kernel moves the first half and says so: that is no success. */
    assert_int_equal(munmap((char *)memory + 32768, 32768), 0);
    result = write_to(&pair, layout, 0);
    assert_failed(&result);
    assert_int_equal(result.bytes_done, 0);
    pair_close(&pair);
    (void)munmap(memory, 32768);
}

/* The child writes its block 0 to that of the target. */
static void expect_written(struct node *target, struct child *child,
                           kvt_peer peer)
{
    struct kvt_run run = pool_run(&target->pool);
    kvt_layout layout = child_prepare(child, peer, &run);

    pool_expect(&target->pool, 0, &child->pool, 0);
    child_write_on(child, peer, layout, 1);
}

/* From where the kernel lets nobody in, the answer names what is wrong; NIXL
 * has another way there. (B42) */
static void another_user_s_process_is_refused_or_reached(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct node target;
    struct child child;
    kvt_peer peer = 0;
    size_t length;
    int code;
    void *metadata;

    (void)state;
    if (geteuid() != 0) {
        skip_case("only root can become another user");
    }
    node_open(&target, &plan);
    child_start(&child);
    if (!child_drop_user(&child, NOBODY)) {
        child_kill(&child);
        child_forget(&child);
        node_close(&target);
        skip_case("this root may not become another user");
    }
    plan.seed = suite_seed();
    child_open(&child, &plan);
    metadata = node_metadata(&target, &length);
    code = child_add(&child, "root's", metadata, length, &peer);
    free(metadata);
    if (suite.agent) {
        assert_int_equal(code, KVT_OK);
        expect_written(&target, &child, peer);
        child_kill(&child);
        child_forget(&child);
    } else {
        assert_int_equal(code, KVT_EPERM);
        child_end(&child);
    }
    pool_check(&target.pool, "target");
    node_close(&target);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(unmapped_memory_in_this_process_is_an_error),
    cmocka_unit_test(our_own_unmapped_memory_is_an_error),
    cmocka_unit_test(a_file_cut_short_is_an_error_never_a_signal),
    cmocka_unit_test(read_only_memory_is_not_written),
    cmocka_unit_test(part_of_a_block_beyond_the_end_is_an_error),
    cmocka_unit_test(another_user_s_process_is_refused_or_reached),
};

const struct test_group access_group = TEST_GROUP("access", cases);
