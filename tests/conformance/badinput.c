/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every public call with bad input: the rows of docs/bad_input.md. The first
 * table is each call with good arguments, for the four transports that are no
 * transport to work with: null, closed, forked, and one that has never seen
 * what is named. The second is one bad argument at a time. A row that fails
 * does not end the table; all wrong rows are printed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

/* Arguments that are good where the transport is. */
struct args {
    kvt_transport *t;
    struct kvt_peer_params params;
    struct kvt_region region;
    struct kvt_run run;      /* ours */
    struct kvt_run peer_run; /* the peer's */
    struct kvt_copy piece;
    struct kvt_indices indices;
    uint32_t block;
    kvt_peer peer;
    kvt_layout local;
    kvt_layout remote;
    kvt_xfer xfer;
    /* Outputs: none may be written by a call that fails. */
    kvt_peer out_peer;
    kvt_layout out_layout;
    kvt_xfer out_xfer;
    kvt_xfer ids[1];
    size_t out_length;
    struct kvt_result result;
    struct kvt_peer_info info;
    struct kvt_notification note;
    struct kvt_stats stats;
    char bytes[65536];
    unsigned wrong;
};

struct fixture {
    struct pair pair;
    void *metadata;
    struct args args;
};

static void check_row(struct args *a, const char *call, const char *input,
                      int got, int want)
{
    bool text_wrong = ERR->code != KVT_OK &&
                      (ERR->code != got || ERR->text[0] == '\0');

    if (got == want && !text_wrong && a->out_peer == 7 && a->out_layout == 7 &&
        a->out_xfer == 7) {
        return;
    }
    print_error("%s, %s: %s, wanted %s; text: %s\n", call, input,
                kvt_errname(got), kvt_errname(want), ERR->text);
    a->out_peer = a->out_layout = a->out_xfer = 7;
    a->wrong++;
}

#define ROW(call, input, want)                                                 \
    do {                                                                       \
        kvt_test_clear();                                                      \
        check_row(a, #call, (input), (call), (want));                          \
    } while (0);

static void set_up(struct fixture *f)
{
    struct args *a = &f->args;

    suite_pair(&f->pair, NULL);
    memset(a, 0, sizeof *a);
    a->t = f->pair.a.t;
    a->params.size = sizeof a->params;
    f->metadata = node_metadata(&f->pair.b, &a->params.metadata_length);
    a->params.metadata = f->metadata;
    a->params.name = "b";
    a->region = pool_region(&f->pair.a.pool);
    a->run = pool_run(&f->pair.a.pool);
    a->peer_run = pool_run(&f->pair.b.pool);
    a->piece = (struct kvt_copy){.local_addr = a->region.addr,
                                 .peer_addr = a->peer_run.addr,
                                 .length = 16};
    a->indices = indices_u32(&a->block, 1);
    a->peer = f->pair.peer;
    a->local = f->pair.a.layout;
    a->remote = f->pair.remote;
    a->out_peer = a->out_layout = a->out_xfer = 7;
}

static void tear_down(struct fixture *f)
{
    free(f->metadata);
    pair_close(&f->pair);
}

/* X(call, name as the row shows it, what a closed transport answers) */
#define EVERY_CALL(X)                                                          \
    X(kvt_register(a->t, &a->region, 1, 0, ERR), KVT_ECLOSED)                  \
    X(kvt_deregister(a->t, &a->region, 1, 0, ERR), KVT_ECLOSED)                \
    X(kvt_metadata(a->t, a->bytes, sizeof a->bytes, &a->out_length, ERR),      \
      KVT_ECLOSED)                                                             \
    X(kvt_peer_add(a->t, &a->params, &a->out_peer, ERR), KVT_ECLOSED)          \
    X(kvt_peer_add_async(a->t, &a->params, &a->out_peer, &a->out_xfer, ERR),   \
      KVT_ECLOSED)                                                             \
    X(kvt_peer_find(a->t, "b", &a->out_peer), KVT_ENOENT)                      \
    X(kvt_peer_reload(a->t, a->peer, NULL, 0, 0, ERR), KVT_ECLOSED)            \
    X(kvt_peer_unload(a->t, a->peer, 0, ERR), KVT_ECLOSED)                     \
    X(kvt_peer_remove(a->t, a->peer), KVT_ECLOSED)                             \
    X(kvt_peer_confirm_dead(a->t, a->peer), KVT_ECLOSED)                       \
    X(kvt_peer_info(a->t, a->peer, &a->info), KVT_ENOENT)                      \
    X(kvt_warm_up(a->t, a->peer, NULL, &a->out_xfer, ERR), KVT_ECLOSED)        \
    X(kvt_prepare(a->t, KVT_SELF, "pool", &a->run, 1, &a->out_layout, ERR),    \
      KVT_ECLOSED)                                                             \
    X(kvt_layout_find(a->t, KVT_SELF, "pool", &a->out_layout), KVT_ENOENT)     \
    X(kvt_layout_drop(a->t, a->local), KVT_ENOENT)                             \
    X(kvt_write(a->t, a->peer, &a->piece, 1, NULL, &a->out_xfer, ERR),         \
      KVT_ECLOSED)                                                             \
    X(kvt_read(a->t, a->peer, &a->piece, 1, NULL, &a->out_xfer, ERR),          \
      KVT_ECLOSED)                                                             \
    X(kvt_write_blocks(a->t, a->peer, a->local, &a->indices, a->remote,        \
                       &a->indices, NULL, &a->out_xfer, ERR),                  \
      KVT_ECLOSED)                                                             \
    X(kvt_read_blocks(a->t, a->peer, a->local, &a->indices, a->remote,         \
                      &a->indices, NULL, &a->out_xfer, ERR),                   \
      KVT_ECLOSED)                                                             \
    X(kvt_status(a->t, a->xfer, &a->result), KVT_ENOENT)                       \
    X(kvt_poll(a->t, KVT_ANY, &a->result, 1), 0)                               \
    X(kvt_cancel(a->t, &a->xfer, 1, KVT_CANCEL_WAIT, NULL), 0)                 \
    X(kvt_release(a->t, a->xfer), KVT_ENOENT)                                  \
    X(kvt_notify(a->t, a->peer, "x", 1, ERR), KVT_ECLOSED)                     \
    X(kvt_notification(a->t, &a->note, a->bytes, sizeof a->bytes), 0)          \
    X(kvt_stats(a->t, &a->stats, sizeof a->stats), KVT_OK)                     \
    X(kvt_metrics(a->t, a->bytes, sizeof a->bytes, &a->out_length), KVT_OK)    \
    X(kvt_peer_loaded(a->t, a->peer), 0)

static void assert_all_right(const struct args *a)
{
    assert_int_equal(a->wrong, 0);
}

static void null_transports_are_refused_by_every_call(void **state)
{
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
    a->t = NULL;
#define NULL_ROW(call, closed) ROW(call, "null transport", KVT_EINVAL)
    EVERY_CALL(NULL_ROW)
#undef NULL_ROW
    ROW(kvt_close(a->t, 0, ERR), "null transport", KVT_EINVAL)
    ROW(kvt_fd(a->t), "null transport", KVT_EINVAL)
    ROW(kvt_fault(a->t, "", ERR), "null transport", KVT_EINVAL)
    assert_null(kvt_agent_name(NULL));
    assert_all_right(a);
    tear_down(&f);
}

static void closed_transports_answer_questions_and_take_no_work(void **state)
{
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
    assert_kvt_ok(kvt_close(a->t, 0, ERR));
#define CLOSED_ROW(call, closed) ROW(call, "closed transport", closed)
    EVERY_CALL(CLOSED_ROW)
#undef CLOSED_ROW
    if (suite.fault) {
        ROW(kvt_fault(a->t, "", ERR), "closed transport", KVT_ECLOSED)
    }
    assert_true(kvt_fd(a->t) >= 0);
    assert_non_null(kvt_agent_name(a->t));
    assert_all_right(a);
    tear_down(&f);
}

/* In the child; no assertion may fail here, so the rows only count. */
static unsigned count_wrong_in_child(struct args *a)
{
#define FORKED_ROW(call, closed) ROW(call, "forked child", KVT_EFORKED)
    EVERY_CALL(FORKED_ROW)
#undef FORKED_ROW
    ROW(kvt_fd(a->t), "forked child", KVT_EFORKED)
    ROW(kvt_fault(a->t, "", ERR), "forked child", KVT_EFORKED)
    ROW(kvt_close(a->t, 0, ERR), "forked child", KVT_OK)
    a->wrong += kvt_agent_name(a->t) != NULL;
    kvt_free(a->t);
    return a->wrong;
}

static void forked_children_are_refused_by_every_call(void **state)
{
    struct fixture f;
    int status = -1;
    pid_t pid;

    (void)state;
    set_up(&f);
    pid = fork();
    if (pid == 0) {
        _exit(count_wrong_in_child(&f.args) == 0 ? 0 : 1);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    (void)wait_done(f.pair.a.t, pair_write_one(&f.pair, 0, 0, NULL));
    tear_down(&f);
}

/* ------------------------------------------------------ one bad argument each */

static void null_pointers_are_refused(void **state)
{
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
#define NULL_ARG(call) ROW(call, "null", KVT_EINVAL)
    NULL_ARG(kvt_open(NULL, NULL, ERR))
    NULL_ARG(kvt_engine_info(0, NULL))
    NULL_ARG(kvt_register(a->t, NULL, 1, 0, ERR))
    NULL_ARG(kvt_deregister(a->t, NULL, 1, 0, ERR))
    NULL_ARG(kvt_shm_create(4096, NULL, ERR))
    NULL_ARG(kvt_metadata(a->t, a->bytes, sizeof a->bytes, NULL, ERR))
    NULL_ARG(kvt_metadata(a->t, NULL, 1, &a->out_length, ERR))
    NULL_ARG(kvt_peer_add(a->t, NULL, &a->out_peer, ERR))
    NULL_ARG(kvt_peer_add(a->t, &a->params, NULL, ERR))
    NULL_ARG(kvt_peer_add_async(a->t, &a->params, NULL, &a->out_xfer, ERR))
    NULL_ARG(kvt_peer_add_async(a->t, &a->params, &a->out_peer, NULL, ERR))
    NULL_ARG(kvt_peer_find(a->t, NULL, &a->out_peer))
    NULL_ARG(kvt_peer_find(a->t, "b", NULL))
    NULL_ARG(kvt_peer_reload(a->t, a->peer, NULL, 1, 0, ERR))
    NULL_ARG(kvt_peer_info(a->t, a->peer, NULL))
    NULL_ARG(kvt_warm_up(a->t, a->peer, NULL, NULL, ERR))
    NULL_ARG(kvt_prepare(a->t, KVT_SELF, NULL, &a->run, 1, &a->out_layout, ERR))
    NULL_ARG(kvt_prepare(a->t, KVT_SELF, "x", NULL, 1, &a->out_layout, ERR))
    NULL_ARG(kvt_prepare(a->t, KVT_SELF, "x", &a->run, 1, NULL, ERR))
    NULL_ARG(kvt_layout_find(a->t, KVT_SELF, NULL, &a->out_layout))
    NULL_ARG(kvt_layout_find(a->t, KVT_SELF, "pool", NULL))
    NULL_ARG(kvt_write(a->t, a->peer, NULL, 1, NULL, &a->out_xfer, ERR))
    NULL_ARG(kvt_write(a->t, a->peer, &a->piece, 1, NULL, NULL, ERR))
    NULL_ARG(kvt_read(a->t, a->peer, NULL, 1, NULL, &a->out_xfer, ERR))
    NULL_ARG(kvt_write_blocks(a->t, a->peer, a->local, NULL, a->remote,
                              &a->indices, NULL, &a->out_xfer, ERR))
    NULL_ARG(kvt_read_blocks(a->t, a->peer, a->local, &a->indices, a->remote,
                             NULL, NULL, &a->out_xfer, ERR))
    NULL_ARG(kvt_write_blocks(a->t, a->peer, a->local, &a->indices, a->remote,
                              &a->indices, NULL, NULL, ERR))
    NULL_ARG(kvt_status(a->t, a->xfer, NULL))
    NULL_ARG(kvt_poll(a->t, KVT_ANY, NULL, 1))
    NULL_ARG(kvt_cancel(a->t, NULL, 1, KVT_CANCEL_WAIT, NULL))
    NULL_ARG(kvt_notify(a->t, a->peer, NULL, 1, ERR))
    NULL_ARG(kvt_notification(a->t, NULL, a->bytes, 1))
    NULL_ARG(kvt_notification(a->t, &a->note, NULL, 1))
    NULL_ARG(kvt_stats(a->t, NULL, sizeof a->stats))
    NULL_ARG(kvt_metrics(a->t, NULL, 1, &a->out_length))
    NULL_ARG(kvt_metrics(a->t, a->bytes, sizeof a->bytes, NULL))
    NULL_ARG(kvt_fault(a->t, NULL, ERR))
#undef NULL_ARG
    assert_all_right(a);
    tear_down(&f);
}

static void errors_may_be_null(void **state)
{
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
    assert_int_equal(kvt_open(NULL, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_register(a->t, NULL, 1, 0, NULL), KVT_EINVAL);
    assert_int_equal(kvt_metadata(a->t, NULL, 1, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_peer_add(a->t, NULL, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_peer_reload(a->t, 99, NULL, 0, 0, NULL), KVT_ENOENT);
    assert_int_equal(
        kvt_prepare(a->t, 99, "x", &a->run, 1, &a->out_layout, NULL),
        KVT_ENOENT);
    assert_int_equal(
        kvt_write(a->t, 99, &a->piece, 1, NULL, &a->out_xfer, NULL),
        KVT_ENOENT);
    assert_int_equal(kvt_notify(a->t, 99, "x", 1, NULL), KVT_ENOENT);
    assert_int_equal(kvt_fault(a->t, NULL, NULL), KVT_EINVAL);
    tear_down(&f);
}

static void unknown_ids_and_names_are_not_found(void **state)
{
    static const uint64_t unknown[] = {1, 999, UINT64_MAX - 1, UINT64_MAX,
                                       UINT64_C(1) << 63};
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
    ROW(kvt_peer_find(a->t, "nobody", &a->out_peer), "unknown", KVT_ENOENT)
    ROW(kvt_peer_find(a->t, "", &a->out_peer), "unknown", KVT_ENOENT)
    ROW(kvt_layout_find(a->t, KVT_SELF, "none", &a->out_layout), "unknown",
        KVT_ENOENT)
    ROW(kvt_layout_find(a->t, 99, "pool", &a->out_layout), "unknown",
        KVT_ENOENT)
    ROW(kvt_deregister(a->t, &(struct kvt_region){.addr = 4096, .length = 1}, 1,
                       0, ERR),
        "unknown", KVT_ENOENT)
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        const uint64_t id = unknown[i];

#define UNKNOWN(call) ROW(call, "unknown id", KVT_ENOENT)
        UNKNOWN(kvt_peer_reload(a->t, id, NULL, 0, 0, ERR))
        UNKNOWN(kvt_peer_unload(a->t, id, 0, ERR))
        UNKNOWN(kvt_peer_remove(a->t, id))
        UNKNOWN(kvt_peer_confirm_dead(a->t, id))
        UNKNOWN(kvt_peer_info(a->t, id, &a->info))
        UNKNOWN(kvt_warm_up(a->t, id, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_prepare(a->t, id, "x", &a->run, 1, &a->out_layout, ERR))
        UNKNOWN(kvt_layout_drop(a->t, id))
        UNKNOWN(kvt_write(a->t, id, &a->piece, 1, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_read(a->t, id, &a->piece, 1, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_write_blocks(a->t, id, a->local, &a->indices, a->remote,
                                 &a->indices, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_write_blocks(a->t, a->peer, id, &a->indices, a->remote,
                                 &a->indices, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_read_blocks(a->t, a->peer, a->local, &a->indices, id,
                                &a->indices, NULL, &a->out_xfer, ERR))
        UNKNOWN(kvt_status(a->t, id, &a->result))
        UNKNOWN(kvt_release(a->t, id))
        UNKNOWN(kvt_notify(a->t, id, "x", 1, ERR))
#undef UNKNOWN
        ROW(kvt_peer_loaded(a->t, id), "unknown id", 0)
        ROW(kvt_cancel(a->t, &id, 1, KVT_CANCEL_WAIT, NULL), "unknown id", 0)
    }
    assert_all_right(a);
    tear_down(&f);
}

static void zeroes_are_refused_where_they_mean_nothing(void **state)
{
    struct fixture f;
    struct args *a = &f.args;
    struct kvt_xfer_options options = {0};

    (void)state;
    set_up(&f);
    a->params.size = 0;
    ROW(kvt_peer_add(a->t, &a->params, &a->out_peer, ERR), "size 0", KVT_EINVAL)
    a->params.size = sizeof a->params;
    a->params.name = "";
    ROW(kvt_peer_add(a->t, &a->params, &a->out_peer, ERR), "empty name",
        KVT_EINVAL)
    a->params.name = NULL;
    ROW(kvt_peer_add_async(a->t, &a->params, &a->out_peer, &a->out_xfer, ERR),
        "no name", KVT_EINVAL)
    a->params.name = "new";
    a->params.metadata_length = 0;
    ROW(kvt_peer_add(a->t, &a->params, &a->out_peer, ERR), "no metadata",
        KVT_EINVAL)
    ROW(kvt_prepare(a->t, KVT_SELF, "x", &a->run, 0, &a->out_layout, ERR),
        "no runs", KVT_EINVAL)
    ROW(kvt_write(a->t, a->peer, &a->piece, 0, NULL, &a->out_xfer, ERR),
        "no pieces", KVT_EINVAL)
    a->indices.count = 0;
    ROW(kvt_write_blocks(a->t, a->peer, a->local, &a->indices, a->remote,
                         &a->indices, NULL, &a->out_xfer, ERR),
        "no indices", KVT_EINVAL)
    ROW(kvt_write(a->t, a->peer, &a->piece, 1, &options, &a->out_xfer, ERR),
        "options of size 0", KVT_EINVAL)
    ROW(kvt_write_blocks(a->t, a->peer, 0, &a->indices, 0, &a->indices, NULL,
                         &a->out_xfer, ERR),
        "layout 0", KVT_ENOENT)
    ROW(kvt_peer_remove(a->t, KVT_SELF), "peer 0", KVT_ENOENT)
    ROW(kvt_peer_info(a->t, KVT_SELF, &a->info), "peer 0", KVT_ENOENT)
    ROW(kvt_status(a->t, 0, &a->result), "transfer 0", KVT_ENOENT)
    ROW(kvt_release(a->t, 0), "transfer 0", KVT_ENOENT)
    ROW(kvt_layout_drop(a->t, 0), "layout 0", KVT_ENOENT)
    ROW(kvt_shm_create(0, &(struct kvt_shm){0}, ERR), "size 0", KVT_EINVAL)
    ROW(kvt_stats(a->t, &a->stats, 0), "size 0", KVT_EINVAL)
    assert_all_right(a);
    tear_down(&f);
}

static void fault_rules_need_a_fault_transport_and_a_rule(void **state)
{
    struct fixture f;
    struct args *a = &f.args;

    (void)state;
    set_up(&f);
    if (suite.fault) {
        ROW(kvt_fault(a->t, "nonsense", ERR), "unknown rule", KVT_EINVAL)
        ROW(kvt_fault(a->t, "fail=0", ERR), "out of range", KVT_EINVAL)
        ROW(kvt_fault(a->t, "fail=1,,", ERR), "malformed", KVT_EINVAL)
        ROW(kvt_fault(a->t, "window=2", ERR), "only at open", KVT_EINVAL)
        ROW(kvt_fault(a->t, "fail=99", ERR), "good", KVT_OK)
    } else {
        ROW(kvt_fault(a->t, "", ERR), "not a fault transport", KVT_EUNSUPPORTED)
    }
    assert_all_right(a);
    tear_down(&f);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(null_transports_are_refused_by_every_call),
    cmocka_unit_test(closed_transports_answer_questions_and_take_no_work),
    cmocka_unit_test(forked_children_are_refused_by_every_call),
    cmocka_unit_test(null_pointers_are_refused),
    cmocka_unit_test(errors_may_be_null),
    cmocka_unit_test(unknown_ids_and_names_are_not_found),
    cmocka_unit_test(zeroes_are_refused_where_they_mean_nothing),
    cmocka_unit_test(fault_rules_need_a_fault_transport_and_a_rule),
};

const struct test_group badinput_group = TEST_GROUP("badinput", cases);
