/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control thread and its deputy, on the local engine with a page in the
 * target that does not answer (a userfaultfd that nobody serves).
 *
 * Proved: a small copy that hangs holds up no other transfer, no deadline and
 * no call, and is completed when its page answers; the thread that comes back
 * is the next deputy; a close in between says KVT_EBUSY in its time, and the
 * thread ends when it can; and many small transfers of one peer share what a
 * copy costs, each with its own verdict.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "node.h"
#include "trap.h"
#include "unit.h"

#define PAGE 4096u
#define TRAPPED 5u
#define MS UINT64_C(1000000)

/* Opens a pair of pools of pages, one of b's being trapped. */
static int open_trapped(struct pair *pair)
{
    const struct node_plan a = {.engine = "local",
                                .name = "lead-a",
                                .shape = {.block_bytes = PAGE},
                                .seed = 1};
    const struct node_plan b = {.engine = "local",
                                .name = "lead-b",
                                .shape = {.block_bytes = PAGE},
                                .seed = 2};
    int trap;

    pair_open(pair, &a, &b);
    trap = trap_pages(pool_block(&pair->b.pool, TRAPPED), PAGE);
    if (trap < 0) {
        pair_close(pair);
        skip_case("userfaultfd is not allowed here");
    }
    return trap;
}

static kvt_xfer hang(const struct pair *pair, uint64_t timeout_ns)
{
    const struct kvt_xfer_options options = {.size = sizeof options,
                                             .timeout_ns = timeout_ns};
    kvt_xfer id = pair_write_one(pair, 1, TRAPPED, &options);

    assert_soon(!in_state(pair->a.t, id, KVT_QUEUED));
    return id;
}

static void write_others(struct pair *pair)
{
    for (uint32_t i = 8; i < 24; i++) {
        pair_expect(pair, &(uint32_t){i + 8}, &i, 1);
        wait_done(pair->a.t, pair_write_one(pair, i + 8, i, NULL));
    }
}

static void a_copy_that_hangs_holds_up_nobody(void **state)
{
    struct pair pair;
    kvt_xfer first;
    int trap;

    (void)state;
    trap = open_trapped(&pair);
    for (int round = 0; round < 3; round++) {
        first = hang(&pair, 0);
        write_others(&pair);
        assert_true(in_state(pair.a.t, first, KVT_IN_PROGRESS));
        close(trap);
        wait_done(pair.a.t, first);
        /* Whoever was stuck is the deputy now. */
        trap = trap_pages(pool_block(&pair.b.pool, TRAPPED), PAGE);
        assert_true(trap >= 0);
    }
    close(trap);
    pair_expect(&pair, &(uint32_t){2}, &(uint32_t){TRAPPED}, 1);
    wait_done(pair.a.t, pair_write_one(&pair, 2, TRAPPED, NULL));
    pair_check(&pair);
    pair_close(&pair);
}

static void deadlines_hold_while_a_copy_hangs(void **state)
{
    struct kvt_result result;
    struct pair pair;
    kvt_xfer id;
    int trap;

    (void)state;
    trap = open_trapped(&pair);
    id = hang(&pair, 1 * MS);
    /* It is moving still; what is left of its time is for proofs. */
    assert_soon(
        strcmp(status_of(pair.a.t, id).text, "the deadline has passed") == 0);
    assert_false(is_quiescent(pair.a.t, id));
    close(trap);
    wait_results(pair.a.t, KVT_ANY, &result, 1);
    assert_int_equal(result.id, id);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_true((result.flags & KVT_QUIESCENT) != 0);
    pool_accept(&pair.b.pool, TRAPPED);
    pair_close(&pair);
}

static void a_close_while_a_copy_hangs_says_so_in_its_time(void **state)
{
    struct usage before = usage_now();
    struct pair pair;
    int trap;

    (void)state;
    trap = open_trapped(&pair);
    hang(&pair, 0);
    assert_kvt_fails(kvt_close(pair.a.t, 50 * MS, ERR), KVT_EBUSY);
    count_bytes(pair.a.t);
    kvt_free(pair.a.t);
    close(trap);
    pool_accept(&pair.b.pool, TRAPPED);
    node_close(&pair.b);
    assert_soon(usage_now().threads == before.threads);
    pool_close(&pair.a.pool);
}

/* One of them meets a page that is not there. */
static void each_of_many_small_transfers_has_its_own_verdict(void **state)
{
    const struct node_plan a = {.engine = "local",
                                .name = "lead-a",
                                .shape = {.block_bytes = PAGE},
                                .seed = 1};
    const struct node_plan b = {.engine = "local",
                                .name = "lead-b",
                                .shape = {.block_bytes = PAGE},
                                .seed = 2};
    struct kvt_result results[32];
    struct pair pair;
    kvt_xfer bad = 0;
    void *hole;

    (void)state;
    pair_open(&pair, &a, &b);
    hole = pool_block(&pair.b.pool, 40);
    assert_int_equal(mprotect(hole, PAGE, PROT_READ), 0);
    for (uint32_t i = 0; i < 32; i++) {
        uint32_t k = 32 + i;
        kvt_xfer id = pair_write_one(&pair, i, k, NULL);

        if (k == 40) {
            bad = id;
        } else {
            pair_expect(&pair, &i, &k, 1);
        }
    }
    wait_results(pair.a.t, KVT_ANY, results, 32);
    for (int i = 0; i < 32; i++) {
        assert_int_equal(results[i].state,
                         results[i].id == bad ? KVT_FAILED : KVT_DONE);
    }
    assert_int_equal(mprotect(hole, PAGE, PROT_READ | PROT_WRITE), 0);
    pair_check(&pair);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_copy_that_hangs_holds_up_nobody),
    cmocka_unit_test(deadlines_hold_while_a_copy_hangs),
    cmocka_unit_test(a_close_while_a_copy_hangs_says_so_in_its_time),
    cmocka_unit_test(each_of_many_small_transfers_has_its_own_verdict),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("lead", cases)};

    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
