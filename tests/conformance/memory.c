/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory: what is skipped, counted, joined and refused, that a
 * refusal leaves nothing behind, and shared memory. Whether memory is
 * registered is asked by preparing a layout over it.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "suite.h"

#define MIB (UINT64_C(1) << 20)

static struct kvt_region region_at(const void *addr, uint64_t length)
{
    return (struct kvt_region){.addr = (uintptr_t)addr, .length = length};
}

static void *map(uint64_t bytes)
{
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(memory, MAP_FAILED);
    return memory;
}

static kvt_transport *open_plain(void)
{
    struct kvt_options options = {.size = sizeof options,
                                  .engine = suite.engine};
    kvt_transport *t = NULL;

    assert_kvt_ok(kvt_open(&options, &t, ERR));
    return t;
}

static void close_plain(kvt_transport *t)
{
    assert_kvt_ok(kvt_close(t, 0, ERR));
    kvt_free(t);
}

static int cover(kvt_transport *t, const void *addr, uint64_t length)
{
    const struct kvt_run run = {.addr = (uintptr_t)addr,
                                .block_bytes = length,
                                .stride_bytes = length,
                                .count = 1};
    kvt_layout layout;
    int code = kvt_prepare(t, KVT_SELF, "cover", &run, 1, &layout, NULL);

    if (code == KVT_OK) {
        assert_kvt_ok(kvt_layout_drop(t, layout));
    }
    return code;
}

#define assert_registered(t, addr, length)                                     \
    assert_int_equal(cover((t), (addr), (length)), KVT_OK)
#define assert_not_registered(t, addr, length)                                 \
    assert_int_equal(cover((t), (addr), (length)), KVT_ERANGE)

static void register_fails(kvt_transport *t, const struct kvt_region *regions,
                           size_t count, int code, const char *words)
{
    assert_kvt_fails_with(kvt_register(t, regions, count, 0, ERR), code, words);
}

/* ----------------------------------------------------------------- register */

/* B23 */
static void empty_regions_are_skipped_before_any_check(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(131072);
    struct kvt_region regions[] = {
        region_at(memory, 65536),
        region_at(memory + 1, 0),
        region_at(memory + 65536, 65536),
        region_at(NULL, 0),
        {.addr = 1, .length = 0, .kind = 99, .flags = UINT32_MAX, .fd = -1},
    };

    (void)state;
    assert_kvt_ok(kvt_register(t, regions, 5, 0, ERR));
    assert_registered(t, memory, 65536);
    assert_registered(t, memory + 65536, 65536);
    assert_int_equal(stats_of(t).regions, 2);
    assert_kvt_ok(kvt_register(t, &regions[3], 1, 0, ERR));
    assert_kvt_ok(kvt_register(t, NULL, 0, 0, ERR));
    assert_kvt_ok(kvt_deregister(t, regions, 5, 0, ERR));
    assert_int_equal(stats_of(t).regions, 0);
    close_plain(t);
    (void)munmap(memory, 131072);
}

/* B23 */
static void a_bad_region_is_named_and_none_stays(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(131072);
    struct kvt_region regions[] = {region_at(memory, 65536),
                                   region_at(memory + 65536, 65536)};

    (void)state;
    assert_int_equal(munmap(memory + 65536, 65536), 0);
    register_fails(t, regions, 2, KVT_EINVAL, "region 1");
    assert_not_registered(t, memory, 65536);
    assert_int_equal(stats_of(t).regions, 0);
    assert_kvt_fails(kvt_deregister(t, regions, 1, 0, ERR), KVT_ENOENT);
    close_plain(t);
    (void)munmap(memory, 65536);
}

/* B25 */
static void the_same_region_is_counted(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(65536);
    struct kvt_region region = region_at(memory, 65536);
    struct kvt_region twice[] = {region, region};

    (void)state;
    assert_kvt_ok(kvt_register(t, &region, 1, 0, ERR));
    assert_kvt_ok(kvt_register(t, twice, 2, 0, ERR));
    assert_int_equal(stats_of(t).regions, 1);
    assert_kvt_ok(kvt_deregister(t, &region, 1, 0, ERR));
    assert_registered(t, memory, 65536);
    assert_kvt_ok(kvt_deregister(t, &region, 1, 0, ERR));
    assert_registered(t, memory, 65536);
    assert_kvt_fails(kvt_deregister(t, twice, 2, 0, ERR), KVT_ENOENT);
    assert_registered(t, memory, 65536);
    assert_kvt_ok(kvt_deregister(t, &region, 1, 0, ERR));
    assert_not_registered(t, memory, 65536);
    assert_kvt_fails(kvt_deregister(t, &region, 1, 0, ERR), KVT_ENOENT);
    close_plain(t);
    (void)munmap(memory, 65536);
}

/* B25 */
static void overlapping_regions_live_side_by_side(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(2 * MIB);
    struct kvt_region first = region_at(memory, MIB);
    struct kvt_region second = region_at(memory + MIB / 2, MIB + MIB / 2);

    (void)state;
    assert_kvt_ok(kvt_register(t, &first, 1, 0, ERR));
    assert_kvt_ok(kvt_register(t, &first, 1, 0, ERR));
    assert_kvt_ok(kvt_register(t, &second, 1, 0, ERR));
    assert_registered(t, memory, 2 * MIB);
    assert_kvt_ok(kvt_deregister(t, &second, 1, 0, ERR));
    assert_registered(t, memory, MIB);
    assert_not_registered(t, memory, MIB + 1);
    assert_kvt_ok(kvt_register(t, &second, 1, 0, ERR));
    assert_kvt_ok(kvt_deregister(t, &first, 1, 0, ERR));
    assert_kvt_ok(kvt_deregister(t, &first, 1, 0, ERR));
    assert_registered(t, memory + MIB / 2, MIB + MIB / 2);
    assert_not_registered(t, memory, MIB);
    close_plain(t);
    (void)munmap(memory, 2 * MIB);
}

/* B17 */
static void ten_thousand_views_of_a_buffer_are_one_memory(void **state)
{
    enum { COUNT = 10000, VIEW = 4096 };
    kvt_transport *t = open_plain();
    struct kvt_region *views = calloc(COUNT, sizeof *views);
    char *memory = map((uint64_t)COUNT * VIEW);

    (void)state;
    assert_non_null(views);
    for (size_t i = 0; i < COUNT; i++) {
        views[i] = region_at(memory + (i * 7919 % COUNT) * VIEW, VIEW);
    }
    assert_kvt_ok(kvt_register(t, views, COUNT, 0, ERR));
    assert_registered(t, memory, (uint64_t)COUNT * VIEW);
    assert_kvt_ok(kvt_deregister(t, &views[77], 1, 0, ERR));
    assert_not_registered(t, memory, (uint64_t)COUNT * VIEW);
    assert_kvt_ok(kvt_deregister(t, views, 77, 0, ERR));
    close_plain(t);
    (void)munmap(memory, (size_t)COUNT * VIEW);
    free(views);
}

static void malformed_regions_are_refused(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(131072);
    struct kvt_region region = region_at(NULL, 4096);

    (void)state;
    register_fails(t, &region, 1, KVT_EINVAL, "null");
    region = (struct kvt_region){.addr = UINT64_MAX - 10, .length = 4096};
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region = region_at(memory, UINT64_MAX);
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region = region_at(memory, 65536);
    region.kind = 7;
    register_fails(t, &region, 1, KVT_EINVAL, "kind");
    region.kind = KVT_DRAM;
    region.flags = 1u << 9;
    register_fails(t, &region, 1, KVT_EINVAL, "flags");
    region = region_at((void *)(uintptr_t)16, 4096);
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    /* A hole of one page in the middle. */
    assert_int_equal(munmap(memory + 65536, 4096), 0);
    region = region_at(memory, 131072);
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    assert_int_equal(stats_of(t).regions, 0);
    close_plain(t);
    (void)munmap(memory, 131072);
}

/* B26 */
static void vram_is_refused_by_name_and_dram_still_works(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(131072);
    struct kvt_region regions[] = {region_at(memory, 65536),
                                   region_at(memory + 65536, 65536)};

    (void)state;
    if (suite.vram && access("/dev/nvidiactl", F_OK) == 0) {
        close_plain(t);
        skip_case("there is a GPU, whose driver decides what is its memory");
    }
    regions[1].kind = KVT_VRAM;
    register_fails(t, regions, 2, suite.vram ? KVT_EENGINE : KVT_EUNSUPPORTED,
                   "VRAM");
    assert_not_registered(t, memory, 65536);
    assert_kvt_ok(kvt_register(t, regions, 1, 0, ERR));
    close_plain(t);
    (void)munmap(memory, 131072);
}

struct registrar {
    kvt_transport *t;
    struct kvt_region region;
    unsigned failures;
};

static void *register_on(void *arg)
{
    struct registrar *registrar = arg;

    for (int i = 0; i < (suite.slow ? 100 : 1000); i++) {
        registrar->failures += kvt_register(registrar->t, &registrar->region, 1,
                                            0, NULL) != KVT_OK;
        registrar->failures += kvt_deregister(registrar->t, &registrar->region,
                                              1, 0, NULL) != KVT_OK;
    }
    return NULL;
}

/* B25 */
static void two_threads_register_the_same_range(void **state)
{
    kvt_transport *t = open_plain();
    char *memory = map(65536);
    struct registrar one = {.t = t, .region = region_at(memory, 65536)};
    struct registrar two = one;
    pthread_t thread;

    (void)state;
    assert_int_equal(pthread_create(&thread, NULL, register_on, &one), 0);
    (void)register_on(&two);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(one.failures + two.failures, 0);
    assert_not_registered(t, memory, 65536);
    assert_int_equal(stats_of(t).regions, 0);
    close_plain(t);
    (void)munmap(memory, 65536);
}

/* --------------------------------------------------------------- deregister */

static void memory_in_use_is_not_given_back(void **state)
{
    struct kvt_region region;
    struct pair pair;
    kvt_xfer id;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    region = pool_region(&pair.a.pool);
    set_rules(&pair, "hold=1");
    id = pair_write_one(&pair, 1, 1, NULL);
    pair_expect(&pair, (uint32_t[]){1}, (uint32_t[]){1}, 1);
    assert_kvt_fails(kvt_deregister(pair.a.t, &region, 1, 0, ERR), KVT_EBUSY);
    release_all(&pair);
    (void)wait_done(pair.a.t, id);
    assert_kvt_ok(kvt_deregister(pair.a.t, &region, 1, 0, ERR));
    pair_check(&pair);
    pair_close(&pair);
}

static void layouts_over_leaving_memory_are_dropped(void **state)
{
    struct node_plan plan = suite_plan(NULL);
    struct kvt_region region;
    struct node node;
    kvt_layout layout = 0;

    (void)state;
    node_open(&node, &plan);
    region = pool_region(&node.pool);
    assert_kvt_ok(kvt_register(node.t, &region, 1, 0, ERR));
    assert_kvt_ok(kvt_deregister(node.t, &region, 1, 0, ERR));
    assert_kvt_ok(kvt_layout_find(node.t, KVT_SELF, "pool", &layout));
    assert_int_equal(layout, node.layout);
    assert_kvt_ok(kvt_deregister(node.t, &region, 1, 0, ERR));
    assert_kvt_fails(kvt_layout_find(node.t, KVT_SELF, "pool", &layout),
                     KVT_ENOENT);
    assert_kvt_fails(kvt_layout_drop(node.t, node.layout), KVT_ENOENT);
    node_close(&node);
}

static void a_failed_drop_can_be_asked_again(void **state)
{
    struct kvt_region region;
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    region = pool_region(&pair.a.pool);
    set_rules(&pair, "drop_fail=1");
    assert_kvt_fails(kvt_deregister(pair.a.t, &region, 1, 0, ERR), KVT_EBUSY);
    /* Shut already: no new work, and no new registration before the end. */
    assert_not_registered(pair.a.t, (void *)(uintptr_t)region.addr, 1);
    assert_kvt_fails(kvt_register(pair.a.t, &region, 1, 0, ERR), KVT_EBUSY);
    assert_kvt_ok(kvt_deregister(pair.a.t, &region, 1, 0, ERR));
    assert_kvt_fails(kvt_deregister(pair.a.t, &region, 1, 0, ERR), KVT_ENOENT);
    pair_close(&pair);
}

static void a_timed_out_register_is_undone(void **state)
{
    char *memory = map(65536);
    struct kvt_region region = region_at(memory, 65536);
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "mem_hang=1");
    assert_kvt_fails(kvt_register(pair.a.t, &region, 1, 50 * MS, ERR),
                     KVT_ETIMEDOUT);
    assert_kvt_fails(kvt_register(pair.a.t, &region, 1, 50 * MS, ERR),
                     KVT_EBUSY);
    release_all(&pair);
    assert_soon(kvt_register(pair.a.t, &region, 1, 0, NULL) == KVT_OK);
    assert_int_equal(stats_of(pair.a.t).regions, 2);
    pair_close(&pair);
    (void)munmap(memory, 65536);
}

/* B23 */
static void an_engine_that_refuses_memory_leaves_none(void **state)
{
    char *memory = map(65536);
    struct kvt_region region = region_at(memory, 65536);
    struct pair pair;

    (void)state;
    suite_fault_pair(&pair, NULL, "", 0);
    set_rules(&pair, "mem_fail=1");
    assert_kvt_fails(kvt_register(pair.a.t, &region, 1, 0, ERR), KVT_EENGINE);
    assert_not_registered(pair.a.t, memory, 65536);
    assert_kvt_ok(kvt_register(pair.a.t, &region, 1, 0, ERR));
    pair_close(&pair);
    (void)munmap(memory, 65536);
}

/* ------------------------------------------------------------ shared memory */

static void shm_is_zeroed_sealed_and_as_long_as_asked(void **state)
{
    struct kvt_shm shm = {0};
    const unsigned char *bytes;

    (void)state;
    assert_kvt_ok(kvt_shm_create(10000, &shm, ERR));
    assert_int_equal(shm.length, 10000);
    bytes = shm.addr;
    for (size_t i = 0; i < 10000; i++) {
        assert_int_equal(bytes[i], 0);
    }
    assert_true((fcntl(shm.fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0);
    assert_int_equal(ftruncate(shm.fd, 0), -1);
    kvt_shm_destroy(&shm);
    assert_null(shm.addr);
    assert_int_equal(shm.length, 0);
    assert_int_equal(shm.fd, -1);
    kvt_shm_destroy(&shm);
    kvt_shm_destroy(NULL);
}

static void impossible_shm_sizes_are_refused(void **state)
{
    struct kvt_shm shm = {.fd = 77};

    (void)state;
    assert_kvt_fails(kvt_shm_create(0, &shm, ERR), KVT_EINVAL);
    assert_kvt_fails(kvt_shm_create(UINT64_MAX, &shm, ERR), KVT_ESYSTEM);
    assert_kvt_fails(kvt_shm_create(UINT64_C(1) << 50, &shm, ERR), KVT_ESYSTEM);
    assert_kvt_fails(kvt_shm_create(4096, NULL, ERR), KVT_EINVAL);
    assert_int_equal(shm.fd, 77);
}

static void blocks_move_between_shared_memories(void **state)
{
    const struct pool_shape shape = {
        .block_bytes = 1000, .gap_bytes = 24, .count = 64, .shm = true};
    const uint32_t from[] = {0, 1, 2, 10, 63};
    const uint32_t to[] = {5, 6, 7, 0, 63};
    struct pair pair;

    (void)state;
    suite_pair(&pair, &shape);
    pair_expect(&pair, from, to, 5);
    (void)wait_done(pair.a.t, pair_write(&pair, from, to, 5, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

static void a_descriptor_must_back_the_memory(void **state)
{
    kvt_transport *t = open_plain();
    struct kvt_region region;
    struct kvt_shm shm;
    struct kvt_shm other;
    void *memory = map(65536);

    (void)state;
    assert_kvt_ok(kvt_shm_create(65536, &shm, ERR));
    assert_kvt_ok(kvt_shm_create(65536, &other, ERR));
    region = region_at(shm.addr, 65536);
    region.flags = KVT_REGION_FD;
    region.fd = other.fd;
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region.fd = -1;
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region.fd = shm.fd;
    region.fd_offset = 4096;
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region.fd_offset = 0;
    region.addr = (uintptr_t)memory;
    register_fails(t, &region, 1, KVT_EINVAL, "region 0");
    region.addr = (uintptr_t)shm.addr;
    assert_kvt_ok(kvt_register(t, &region, 1, 0, ERR));
    close_plain(t);
    kvt_shm_destroy(&shm);
    kvt_shm_destroy(&other);
    (void)munmap(memory, 65536);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(empty_regions_are_skipped_before_any_check),
    cmocka_unit_test(a_bad_region_is_named_and_none_stays),
    cmocka_unit_test(the_same_region_is_counted),
    cmocka_unit_test(overlapping_regions_live_side_by_side),
    cmocka_unit_test(ten_thousand_views_of_a_buffer_are_one_memory),
    cmocka_unit_test(malformed_regions_are_refused),
    cmocka_unit_test(vram_is_refused_by_name_and_dram_still_works),
    cmocka_unit_test(two_threads_register_the_same_range),
    cmocka_unit_test(memory_in_use_is_not_given_back),
    cmocka_unit_test(layouts_over_leaving_memory_are_dropped),
    cmocka_unit_test(a_failed_drop_can_be_asked_again),
    cmocka_unit_test(a_timed_out_register_is_undone),
    cmocka_unit_test(an_engine_that_refuses_memory_leaves_none),
    cmocka_unit_test(shm_is_zeroed_sealed_and_as_long_as_asked),
    cmocka_unit_test(impossible_shm_sizes_are_refused),
    cmocka_unit_test(blocks_move_between_shared_memories),
    cmocka_unit_test(a_descriptor_must_back_the_memory),
};

const struct test_group memory_group = TEST_GROUP("memory", cases);
