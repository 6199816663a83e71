/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every public call with bad input: each row of docs/bad_input.md, made and
 * compared. Here are the reading of the document and the rows about the
 * transport itself: null, closed, forked. A wrong row does not end the case;
 * all of them are printed.
 */
#include "badinput.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ------------------------------------------------------------ the document */

/* The next cell of "| a | b |", without its blanks. */
static bool take_cell(const char **at, char *ret, size_t size)
{
    const char *begin = *at + strspn(*at, " ");
    const char *end = strchr(begin, '|');
    size_t length;

    if (end == NULL) {
        return false;
    }
    *at = end + 1;
    for (length = (size_t)(end - begin);
         length > 0 && begin[length - 1] == ' ';) {
        length--;
    }
    (void)snprintf(ret, size, "%.*s", (int)length, begin);
    return length < size;
}

static void read_row(struct bad *b, const char *line)
{
    struct row *row = &b->rows[b->row_count++];
    const char *at = line + 1;

    assert_true(b->row_count < ROWS_MAX);
    assert_true(take_cell(&at, row->call, sizeof row->call));
    assert_true(take_cell(&at, row->class, sizeof row->class));
    assert_true(take_cell(&at, row->input, sizeof row->input));
    assert_true(take_cell(&at, row->answer, sizeof row->answer));
}

static void read_document(struct bad *b)
{
    const char *folder = getenv("KVT_TEST_SOURCE_DIR");
    char path[4096];
    char line[512];
    FILE *file;

    if (folder == NULL) {
        skip_case("KVT_TEST_SOURCE_DIR does not say where docs/ is");
    }
    (void)snprintf(path, sizeof path, "%s/docs/bad_input.md", folder);
    file = fopen(path, "re");
    if (file == NULL) {
        fail_msg("cannot read %s", path);
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "| kvt_", 6) == 0) {
            read_row(b, line);
        }
    }
    (void)fclose(file);
    assert_true(b->row_count > 0);
}

/* ---------------------------------------------------------------- comparing */

static bool answers(const struct row *row, int got)
{
    if (strncmp(row->answer, "KVT_", 4) == 0) {
        return strcmp(row->answer, kvt_errname(got)) == 0;
    }
    if (strcmp(row->answer, ">=0") == 0) {
        return got >= 0;
    }
    if (strcmp(row->answer, "-") == 0) {
        return got == KVT_OK;
    }
    return strtol(row->answer, NULL, 10) == got;
}

static bool has_err(const char *call)
{
    static const char *const with[] = {
        "kvt_open",        "kvt_close",          "kvt_register",
        "kvt_deregister",  "kvt_shm_create",     "kvt_metadata",
        "kvt_peer_add",    "kvt_peer_add_async", "kvt_peer_reload",
        "kvt_peer_unload", "kvt_warm_up",        "kvt_prepare",
        "kvt_write",       "kvt_read",           "kvt_write_blocks",
        "kvt_read_blocks", "kvt_notify",         "kvt_fault"};

    for (size_t i = 0; i < sizeof with / sizeof with[0]; i++) {
        if (strcmp(call, with[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* A failure says why, a success says nothing. */
static bool text_fits(const char *call, int got)
{
    bool fails = got < 0 && has_err(call);

    return fails ? ERR->code == got && ERR->text[0] != '\0'
                 : ERR->code == KVT_OK;
}

static bool outputs_fit(const struct bad *b, const struct row *row, int got)
{
    bool untouched = b->out_peer == UNTOUCHED && b->out_layout == UNTOUCHED &&
                     b->out_xfer == UNTOUCHED && b->out_t == NULL;
    bool set = strstr(row->input, "is set") != NULL;

    return got >= 0 || (untouched && (b->out_length == UNTOUCHED) != set);
}

static void compare(struct bad *b, struct row *row, int got)
{
    row->seen = true;
    if (!answers(row, got) || !text_fits(row->call, got) ||
        !outputs_fit(b, row, got)) {
        print_error("%s | %s | %s: %s (%d), text: %s\n", row->call, row->input,
                    row->answer, kvt_errname(got), got, ERR->text);
        b->wrong++;
    }
    reset_outputs(b);
}

static void no_such_row(struct bad *b, const char *call, const char *input)
{
    print_error("%s | %s: no row in the document\n", call, input);
    b->wrong++;
    reset_outputs(b);
}

void answer(struct bad *b, const char *call, const char *input, int got)
{
    for (size_t i = 0; i < b->row_count; i++) {
        struct row *row = &b->rows[i];

        if (strcmp(row->call, call) == 0 && strcmp(row->input, input) == 0) {
            compare(b, row, got);
            return;
        }
    }
    no_such_row(b, call, input);
}

void answer_class(struct bad *b, const char *call, const char *class, int got)
{
    for (size_t i = 0; i < b->row_count; i++) {
        struct row *row = &b->rows[i];

        if (strcmp(row->call, call) == 0 && strcmp(row->class, class) == 0) {
            compare(b, row, got);
            return;
        }
    }
    no_such_row(b, call, class);
}

void answer_text(struct bad *b, const char *call, const char *input,
                 const char *got)
{
    for (size_t i = 0; i < b->row_count; i++) {
        struct row *row = &b->rows[i];
        char quoted[64];

        if (strcmp(row->call, call) != 0 || strcmp(row->input, input) != 0) {
            continue;
        }
        (void)snprintf(quoted, sizeof quoted, got == NULL ? "NULL" : "\"%s\"",
                       got);
        if (strcmp(row->answer, "its name") == 0) {
            row->seen = got != NULL && got[0] != '\0';
        } else {
            row->seen = strcmp(row->answer, quoted) == 0;
        }
        return;
    }
    no_such_row(b, call, input);
}

void reset_outputs(struct bad *b)
{
    b->out_peer = b->out_layout = b->out_xfer = UNTOUCHED;
    b->out_t = NULL;
    b->out_length = UNTOUCHED;
}

/* ----------------------------------------------------------------- set-up */

static kvt_peer add_as(struct bad *b, const char *name)
{
    return node_add(&b->pair.a, name, b->metadata, b->params.metadata_length);
}

static void set_up(struct bad *b)
{
    size_t own_length;

    memset(b, 0, sizeof *b);
    reset_outputs(b);
    read_document(b);
    suite_pair(&b->pair, NULL);
    b->t = b->pair.a.t;
    b->params.size = sizeof b->params;
    b->params.name = "new";
    b->metadata = node_metadata(&b->pair.b, &b->params.metadata_length);
    b->params.metadata = b->metadata;
    b->own_metadata = node_metadata(&b->pair.a, &own_length);
    b->region = pool_region(&b->pair.a.pool);
    b->run = pool_run(&b->pair.a.pool);
    b->peer_run = pool_run(&b->pair.b.pool);
    b->piece = (struct kvt_copy){.local_addr = b->region.addr,
                                 .peer_addr = b->peer_run.addr,
                                 .length = 16};
    b->indices = indices_u32(&b->block, 1);
    b->options.size = sizeof b->options;
    b->peer = b->pair.peer;
    b->local = b->pair.a.layout;
    b->remote = b->pair.remote;
    b->removed = add_as(b, "removed");
    assert_kvt_ok(kvt_peer_remove(b->t, b->removed));
    /* Out of the engine as well. */
    assert_soon(kvt_peer_confirm_dead(b->t, b->removed) == KVT_ENOENT);
    b->unloaded = add_as(b, "unloaded");
    assert_kvt_ok(kvt_peer_unload(b->t, b->unloaded, 0, ERR));
    b->drained = pair_write_one(&b->pair, 0, 0, NULL);
    (void)wait_done(b->t, b->drained);
    pool_expect(&b->pair.b.pool, 0, &b->pair.a.pool, 0);
}

static void tear_down(struct bad *b)
{
    free(b->metadata);
    free(b->own_metadata);
    pair_close(&b->pair);
}

/* Where a row must have been seen: all of these classes and inputs. */
static unsigned count_unseen(const struct bad *b, const char *class,
                             const char *input)
{
    unsigned unseen = 0;

    for (size_t i = 0; i < b->row_count; i++) {
        const struct row *row = &b->rows[i];

        if ((class == NULL || strcmp(row->class, class) == 0) &&
            (input == NULL || strcmp(row->input, input) == 0) && !row->seen) {
            print_error("%s | %s | %s: not made, or answered wrongly\n",
                        row->call, row->class, row->input);
            unseen++;
        }
    }
    return unseen;
}

/* ------------------------------------------- the transport is the bad input */

#define EVERY_CALL(X)                                                          \
    X(kvt_register, b->t, &b->region, 1, 0, ERR)                               \
    X(kvt_deregister, b->t, &b->region, 1, 0, ERR)                             \
    X(kvt_metadata, b->t, b->bytes, sizeof b->bytes, &b->out_length, ERR)      \
    X(kvt_peer_add, b->t, &b->params, &b->out_peer, ERR)                       \
    X(kvt_peer_add_async, b->t, &b->params, &b->out_peer, &b->out_xfer, ERR)   \
    X(kvt_peer_find, b->t, "b", &b->out_peer)                                  \
    X(kvt_peer_loaded, b->t, b->peer)                                          \
    X(kvt_peer_reload, b->t, b->peer, NULL, 0, 0, ERR)                         \
    X(kvt_peer_unload, b->t, b->peer, 0, ERR)                                  \
    X(kvt_peer_remove, b->t, b->peer)                                          \
    X(kvt_peer_confirm_dead, b->t, b->peer)                                    \
    X(kvt_peer_info, b->t, b->peer, &b->info)                                  \
    X(kvt_warm_up, b->t, b->peer, NULL, &b->out_xfer, ERR)                     \
    X(kvt_prepare, b->t, KVT_SELF, "pool", &b->run, 1, &b->out_layout, ERR)    \
    X(kvt_layout_find, b->t, KVT_SELF, "pool", &b->out_layout)                 \
    X(kvt_layout_drop, b->t, b->local)                                         \
    X(kvt_write, b->t, b->peer, &b->piece, 1, NULL, &b->out_xfer, ERR)         \
    X(kvt_read, b->t, b->peer, &b->piece, 1, NULL, &b->out_xfer, ERR)          \
    X(kvt_write_blocks, b->t, b->peer, b->local, &b->indices, b->remote,       \
      &b->indices, NULL, &b->out_xfer, ERR)                                    \
    X(kvt_read_blocks, b->t, b->peer, b->local, &b->indices, b->remote,        \
      &b->indices, NULL, &b->out_xfer, ERR)                                    \
    X(kvt_status, b->t, b->drained, &b->result)                                \
    X(kvt_poll, b->t, KVT_ANY, &b->result, 1)                                  \
    X(kvt_cancel, b->t, &b->drained, 1, KVT_CANCEL_WAIT, NULL)                 \
    X(kvt_release, b->t, b->drained)                                           \
    X(kvt_notify, b->t, b->peer, "x", 1, ERR)                                  \
    X(kvt_notification, b->t, &b->note, b->bytes, sizeof b->bytes)             \
    X(kvt_fd, b->t)                                                            \
    X(kvt_stats, b->t, &b->stats, sizeof b->stats)                             \
    X(kvt_metrics, b->t, b->bytes, sizeof b->bytes, &b->out_length)

#define MAKE(class, name, ...)                                                 \
    do {                                                                       \
        kvt_test_clear();                                                      \
        answer_class(b, #name, class, name(__VA_ARGS__));                      \
    } while (0);

static void null_transports_are_refused_by_every_call(void **state)
{
    static struct bad bad;
    struct bad *b = &bad;

    (void)state;
    set_up(b);
    b->t = NULL;
#define NULL_ROW(name, ...) CHECK(name, "transport NULL", __VA_ARGS__);
    EVERY_CALL(NULL_ROW)
#undef NULL_ROW
    CHECK(kvt_close, "transport NULL", b->t, 0, ERR);
    CHECK(kvt_fault, "transport NULL", b->t, "", ERR);
    CHECK_VOID(kvt_free, "transport NULL", b->t);
    answer_text(b, "kvt_agent_name", "transport NULL", kvt_agent_name(b->t));
    assert_int_equal(b->wrong + count_unseen(b, NULL, "transport NULL"), 0);
    tear_down(b);
}

static kvt_transport *open_faulty(void)
{
    struct kvt_options options = {.size = sizeof options,
                                  .engine = suite_engine("")};
    kvt_transport *t = NULL;

    assert_kvt_ok(kvt_open(&options, &t, ERR));
    return t;
}

static void closed_transports_answer_questions_and_take_no_work(void **state)
{
    static struct bad bad;
    struct bad *b = &bad;
    kvt_transport *faulty;

    (void)state;
    set_up(b);
    faulty = open_faulty();
    assert_kvt_ok(kvt_close(b->t, 0, ERR));
    assert_kvt_ok(kvt_close(faulty, 0, ERR));
#define CLOSED_ROW(name, ...) MAKE("closed", name, __VA_ARGS__)
    EVERY_CALL(CLOSED_ROW)
#undef CLOSED_ROW
    MAKE("closed", kvt_close, b->t, 0, ERR)
    MAKE("closed", kvt_fault, faulty, "", ERR)
    answer_text(b, "kvt_agent_name", "transport closed", kvt_agent_name(b->t));
    kvt_free(faulty);
    kvt_test_clear();
    answer_class(b, "kvt_free", "closed", KVT_OK);
    assert_int_equal(b->wrong + count_unseen(b, "closed", NULL), 0);
    tear_down(b);
}

/* In the child; no assertion may fail here, so the rows only count. */
static unsigned count_wrong_in_child(struct bad *b, kvt_transport *faulty)
{
#define FORKED_ROW(name, ...) MAKE("forked", name, __VA_ARGS__)
    EVERY_CALL(FORKED_ROW)
#undef FORKED_ROW
    MAKE("forked", kvt_fault, faulty, "", ERR)
    MAKE("forked", kvt_close, b->t, 0, ERR)
    answer_text(b, "kvt_agent_name", "transport of the parent, in a child",
                kvt_agent_name(b->t));
    kvt_free(b->t);
    kvt_test_clear();
    answer_class(b, "kvt_free", "forked", KVT_OK);
    return b->wrong + count_unseen(b, "forked", NULL);
}

/* B36 */
static void forked_children_are_refused_by_every_call(void **state)
{
    static struct bad bad;
    struct bad *b = &bad;
    kvt_transport *faulty;
    int status = -1;
    pid_t pid;

    (void)state;
    set_up(b);
    faulty = open_faulty();
    pid = fork();
    if (pid == 0) {
        _exit(count_wrong_in_child(b, faulty) == 0 ? 0 : 1);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    (void)wait_done(b->t, pair_write_one(&b->pair, 0, 0, NULL));
    kvt_free(faulty);
    tear_down(b);
}

/* ---------------------------------------------------------- everything else */

static bool is_about_the_transport(const struct row *row)
{
    return strcmp(row->class, "closed") == 0 ||
           strcmp(row->class, "forked") == 0 ||
           strcmp(row->input, "transport NULL") == 0;
}

static void every_other_row_of_the_document_holds(void **state)
{
    static struct bad bad;
    struct bad *b = &bad;

    (void)state;
    set_up(b);
    for (size_t i = 0; i < b->row_count; i++) {
        struct row *row = &b->rows[i];

        row->seen = is_about_the_transport(row) ||
                    (suite.vram && strstr(row->input, "VRAM") != NULL) ||
                    (!suite.notify && (strstr(row->input, "note") != NULL ||
                                       strncmp(row->call, "kvt_not", 7) == 0));
    }
    check_open_rows(b);
    check_memory_rows(b);
    check_metadata_rows(b);
    check_peer_rows(b);
    check_layout_rows(b);
    check_move_rows(b);
    check_result_rows(b);
    check_note_rows(b);
    check_fault_rows(b);
    assert_int_equal(b->wrong + count_unseen(b, NULL, NULL), 0);
    /* And it has left no trace. */
    assert_int_equal(stats_of(b->t).accepted, 1);
    pair_check(&b->pair);
    (void)wait_done(b->t, pair_write_one(&b->pair, 1, 1, NULL));
    tear_down(b);
}

static void errors_may_be_null(void **state)
{
    struct kvt_region region = {.addr = 0, .length = 1};
    struct kvt_copy piece = {.length = 1};
    struct pair pair;
    kvt_xfer id = 0;

    (void)state;
    suite_pair(&pair, NULL);
    assert_int_equal(kvt_open(NULL, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_register(pair.a.t, &region, 1, 0, NULL), KVT_EINVAL);
    assert_int_equal(kvt_metadata(pair.a.t, NULL, 1, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_peer_add(pair.a.t, NULL, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_peer_reload(pair.a.t, 99, NULL, 0, 0, NULL),
                     KVT_ENOENT);
    assert_int_equal(kvt_prepare(pair.a.t, 99, "x", NULL, 1, NULL, NULL),
                     KVT_EINVAL);
    assert_int_equal(kvt_write(pair.a.t, 99, &piece, 1, NULL, &id, NULL),
                     KVT_ENOENT);
    assert_int_equal(kvt_notify(pair.a.t, 99, "x", 1, NULL), KVT_ENOENT);
    assert_int_equal(kvt_fault(pair.a.t, NULL, NULL), KVT_EINVAL);
    assert_int_equal(kvt_close(NULL, 0, NULL), KVT_EINVAL);
    pair_close(&pair);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(null_transports_are_refused_by_every_call),
    cmocka_unit_test(closed_transports_answer_questions_and_take_no_work),
    cmocka_unit_test(forked_children_are_refused_by_every_call),
    cmocka_unit_test(every_other_row_of_the_document_holds),
    cmocka_unit_test(errors_may_be_null),
};

const struct test_group badinput_group = TEST_GROUP("badinput", cases);
