/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reports that wake nobody (see control.c): a long transfer over the local
 * engine, with a page in the target that does not answer (a userfaultfd that
 * nobody serves), so that its first part is reported long after its last.
 *
 * Proved: all other parts of it are posted and counted meanwhile; and when the
 * page answers, the report of that part ends the transfer, whether somebody
 * waits for its end, cancelled it, or had to be told that it is lost. The
 * control thread's timers, which would find all of that a second later, are
 * kept from it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "node.h"
#include "trap.h"
#include "unit.h"

#define BLOCK_BYTES 65536u
#define BLOCKS 256u /* more than a window of parts */
#define PART_BYTES 1048576u

static const struct pool_shape shape = {.block_bytes = BLOCK_BYTES,
                                        .count = BLOCKS};

/* Set: the control thread sleeps until somebody wakes it. */
static atomic_bool sound_sleep;

int __real_epoll_wait(int fd, struct epoll_event *events, int max, int timeout);
int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout);

int __wrap_epoll_wait(int fd, struct epoll_event *events, int max, int timeout)
{
    return __real_epoll_wait(
        fd, events, max,
        atomic_load(&sound_sleep) && timeout > 0 ? -1 : timeout);
}

/* Of the trap; a page of the first block does not answer. */
static int open_trapped(struct pair *pair, uint64_t grace_ns)
{
    const struct node_plan a = {.engine = "local",
                                .name = "await-a",
                                .shape = shape,
                                .seed = 1,
                                .options = {.grace_ns = grace_ns}};
    const struct node_plan b = {
        .engine = "local", .name = "await-b", .shape = shape, .seed = 2};
    int trap;

    atomic_store(&sound_sleep, false);
    pair_open(pair, &a, &b);
    trap = trap_pages(pool_block(&pair->b.pool, 0), 4096);
    if (trap < 0) {
        pair_close(pair);
        skip_case("userfaultfd is not allowed here");
    }
    return trap;
}

/* Returns when all but the part with the trap is done and counted. */
static kvt_xfer write_all(struct pair *pair)
{
    uint32_t all[BLOCKS];
    kvt_xfer id;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        all[i] = i;
    }
    pair_expect(pair, all, all, BLOCKS);
    id = pair_write(pair, all, all, BLOCKS, NULL);
    assert_soon(status_of(pair->a.t, id).bytes_done >=
                (uint64_t)BLOCKS * BLOCK_BYTES - PART_BYTES);
    return id;
}

static void the_part_that_ends_last_ends_the_transfer(void **state)
{
    struct pair pair;
    kvt_xfer id;
    int trap;

    (void)state;
    trap = open_trapped(&pair, 0);
    atomic_store(&sound_sleep, true);
    id = write_all(&pair);
    assert_true(in_state(pair.a.t, id, KVT_IN_PROGRESS));
    close(trap);
    wait_done(pair.a.t, id);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_transfer_of_one_part_ends_with_it(void **state)
{
    struct pair pair;
    int trap;

    (void)state;
    trap = open_trapped(&pair, 0);
    atomic_store(&sound_sleep, true);
    for (uint32_t i = 1; i < 9; i++) {
        pair_expect(&pair, &i, &i, 1);
        wait_done(pair.a.t, pair_write_one(&pair, i, i, NULL));
    }
    close(trap);
    pool_accept(&pair.b.pool, 0);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_cancelled_transfer_ends_with_its_last_part(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;
    int trap;

    (void)state;
    trap = open_trapped(&pair, 0);
    atomic_store(&sound_sleep, true);
    id = write_all(&pair);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &id), 1);
    close(trap);
    result = wait_xfer(pair.a.t, id);
    assert_int_equal(result.state, KVT_CANCELLED);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    pair_check(&pair);
    pair_close(&pair);
}

static void a_lost_transfer_is_proven_by_its_last_part(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;
    int trap;

    (void)state;
    trap = open_trapped(&pair, 1);
    id = write_all(&pair);
    assert_int_equal(kvt_cancel(pair.a.t, &id, 1, KVT_CANCEL_WAIT, &id), 1);
    assert_soon(in_state(pair.a.t, id, KVT_LOST));
    assert_false(is_quiescent(pair.a.t, id));
    atomic_store(&sound_sleep, true);
    node_settle(&pair.a); /* it sleeps anew */
    close(trap);
    assert_soon(is_quiescent(pair.a.t, id));
    wait_results(pair.a.t, KVT_ANY, &result, 1);
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(the_part_that_ends_last_ends_the_transfer),
    cmocka_unit_test(a_transfer_of_one_part_ends_with_it),
    cmocka_unit_test(a_cancelled_transfer_ends_with_its_last_part),
    cmocka_unit_test(a_lost_transfer_is_proven_by_its_last_part),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("await", cases)};

    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
