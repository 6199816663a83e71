/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of docs/bad_input.md: transfers, results, messages, counters, rules. */
#include "badinput.h"

#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------- transfers */

/* One way to ask for a transfer, with everything good. */
struct ask {
    kvt_peer peer;
    const struct kvt_copy *pieces;
    size_t piece_count;
    kvt_layout local;
    kvt_layout remote;
    struct kvt_indices indices; /* to be made bad */
    const struct kvt_indices *ours;
    const struct kvt_indices *theirs;
    const struct kvt_xfer_options *options;
    kvt_xfer *ret;
};

static struct ask good(struct bad *b)
{
    return (struct ask){.peer = b->peer,
                        .pieces = &b->piece,
                        .piece_count = 1,
                        .local = b->local,
                        .remote = b->remote,
                        .indices = b->indices,
                        .ours = &b->indices,
                        .theirs = &b->indices,
                        .ret = &b->out_xfer};
}

static void check_pieces(struct bad *b, const char *input,
                         const struct ask *ask)
{
    CHECK(kvt_write, input, b->t, ask->peer, ask->pieces, ask->piece_count,
          ask->options, ask->ret, ERR);
    CHECK(kvt_read, input, b->t, ask->peer, ask->pieces, ask->piece_count,
          ask->options, ask->ret, ERR);
}

static void check_blocks(struct bad *b, const char *input,
                         const struct ask *ask)
{
    CHECK(kvt_write_blocks, input, b->t, ask->peer, ask->local, ask->ours,
          ask->remote, ask->theirs, ask->options, ask->ret, ERR);
    CHECK(kvt_read_blocks, input, b->t, ask->peer, ask->local, ask->ours,
          ask->remote, ask->theirs, ask->options, ask->ret, ERR);
}

/* What all five calls that start a transfer have in common. */
static void check_common(struct bad *b, const char *input,
                         const struct ask *ask)
{
    check_pieces(b, input, ask);
    check_blocks(b, input, ask);
    CHECK(kvt_warm_up, input, b->t, ask->peer, ask->options, ask->ret, ERR);
}

#define CHECK_COMMON(input, ...)                                               \
    do {                                                                       \
        struct kvt_xfer_options options_ = {.size = sizeof options_};          \
        struct ask ask_ = good(b);                                             \
                                                                               \
        ask_.options = &options_;                                              \
        __VA_ARGS__;                                                           \
        check_common(b, (input), &ask_);                                       \
    } while (0)

static void check_common_rows(struct bad *b)
{
    CHECK_COMMON("ret_xfer NULL", ask_.ret = NULL);
    CHECK_COMMON("options.note NULL, note_length 1", options_.note_length = 1);
    CHECK_COMMON("options.size 0 or any but sizeof", options_.size = 0);
    CHECK_COMMON("options.size 0 or any but sizeof", options_.size++);
    CHECK_COMMON("options.flags with an unknown bit",
                 options_.flags = 1u << 31);
    CHECK_COMMON("options.tag 16", options_.tag = 16);
    if (suite.notify) {
        CHECK_COMMON("options.note_length above notify_bytes_max",
                     options_.note = b->bytes, options_.note_length = 65537);
    }
    CHECK_COMMON("peer KVT_SELF", ask_.peer = KVT_SELF);
    CHECK_COMMON("peer of no such id", ask_.peer = 999);
    CHECK_COMMON("peer of no such id", ask_.peer = KVT_ANY);
    CHECK_COMMON("peer removed before", ask_.peer = b->removed);
    CHECK_COMMON("peer unloaded before", ask_.peer = b->unloaded);
}

#define CHECK_PIECE(input, ...)                                                \
    do {                                                                       \
        struct kvt_copy piece_ = b->piece;                                     \
        struct ask ask_ = good(b);                                             \
                                                                               \
        ask_.pieces = &piece_;                                                 \
        __VA_ARGS__;                                                           \
        check_pieces(b, (input), &ask_);                                       \
    } while (0)

static void check_piece_rows(struct bad *b)
{
    CHECK_PIECE("copies NULL, count 1", ask_.pieces = NULL);
    CHECK_PIECE("count 0", ask_.piece_count = 0);
    CHECK_PIECE("all pieces of length 0", piece_.length = 0);
    CHECK_PIECE("piece whose local end wraps", piece_.local_addr = UINT64_MAX);
    CHECK_PIECE("piece whose peer end wraps", piece_.peer_addr = UINT64_MAX);
    CHECK_PIECE("piece outside our registered memory", piece_.local_addr--);
    CHECK_PIECE("piece outside the peer's regions", piece_.peer_addr--);
    CHECK_PIECE("piece outside the peer's regions", piece_.length = 16000,
                piece_.peer_addr += 16000);
    if (!suite.vram) {
        CHECK_PIECE("piece of VRAM, engine local",
                    piece_.local_kind = KVT_VRAM);
        CHECK_PIECE("piece of VRAM, engine local", piece_.peer_kind = KVT_VRAM);
    }
    CHECK_PIECE("piece.local_addr and peer_addr exchanged",
                piece_.local_addr = b->piece.peer_addr,
                piece_.peer_addr = b->piece.local_addr);
}

#define CHECK_BLOCKS(input, ...)                                               \
    do {                                                                       \
        struct ask ask_ = good(b);                                             \
                                                                               \
        __VA_ARGS__;                                                           \
        check_blocks(b, (input), &ask_);                                       \
    } while (0)

/* On either side. */
#define CHECK_INDICES(input, ...)                                              \
    CHECK_BLOCKS(input, __VA_ARGS__, ask_.ours = &ask_.indices);               \
    CHECK_BLOCKS(input, __VA_ARGS__, ask_.theirs = &ask_.indices)

static void check_block_rows(struct bad *b)
{
    static const uint64_t huge = UINT64_MAX;
    static const int32_t negative = -1;
    static const uint32_t past = 64;
    static const uint32_t two[] = {0, 1};
    struct kvt_run run = b->run;
    kvt_layout halves;

    CHECK_BLOCKS("local indices NULL", ask_.ours = NULL);
    CHECK_BLOCKS("remote indices NULL", ask_.theirs = NULL);
    CHECK_INDICES("indices.data NULL, count 1", ask_.indices.data = NULL);
    CHECK_BLOCKS("indices.count 0 on both sides", ask_.indices.count = 0,
                 ask_.ours = &ask_.indices, ask_.theirs = &ask_.indices);
    CHECK_BLOCKS("local_layout 0", ask_.local = 0);
    CHECK_INDICES("index UINT64_MAX as KVT_INDEX_U64",
                  ask_.indices.data = &huge, ask_.indices.type = KVT_INDEX_U64);
    CHECK_INDICES("indices.type 4", ask_.indices.type = 4);
    CHECK_INDICES("index equal to the number of blocks",
                  ask_.indices.data = &past);
    CHECK_INDICES("index -1 as KVT_INDEX_I32", ask_.indices.data = &negative,
                  ask_.indices.type = KVT_INDEX_I32);
    CHECK_INDICES("counts of the two sides differ", ask_.indices.data = two,
                  ask_.indices.count = 2);
    run.block_bytes /= 2;
    assert_kvt_ok(kvt_prepare(b->t, KVT_SELF, "halves", &run, 1, &halves, ERR));
    CHECK_BLOCKS("block lengths of the two sides differ", ask_.local = halves);
    CHECK_BLOCKS("local_layout is the peer's", ask_.local = b->remote);
    CHECK_BLOCKS("peer_layout is ours", ask_.remote = b->local);
    CHECK_BLOCKS("local_layout of no such id", ask_.local = 999);
    CHECK_BLOCKS("peer_layout of no such id", ask_.remote = 999);
}

void check_move_rows(struct bad *b)
{
    check_common_rows(b);
    check_piece_rows(b);
    check_block_rows(b);
}

/* ----------------------------------------------------------------- results */

void check_result_rows(struct bad *b)
{
    const kvt_xfer unknown = 999;

    CHECK(kvt_status, "ret NULL", b->t, b->drained, NULL);
    CHECK(kvt_status, "xfer 0", b->t, 0, &b->result);
    CHECK(kvt_status, "xfer of no such id", b->t, unknown, &b->result);
    CHECK(kvt_status, "xfer of no such id", b->t, UINT64_MAX, &b->result);
    CHECK(kvt_status, "xfer drained before", b->t, b->drained, &b->result);
    CHECK(kvt_poll, "ret NULL, capacity 1", b->t, KVT_ANY, NULL, 1);
    CHECK(kvt_poll, "ret NULL, capacity 0", b->t, KVT_ANY, NULL, 0);
    CHECK(kvt_poll, "peer of no such id", b->t, 999, &b->result, 1);
    CHECK(kvt_cancel, "ids NULL, count 1", b->t, NULL, 1, KVT_CANCEL_WAIT,
          NULL);
    CHECK(kvt_cancel, "ids NULL, count 0", b->t, NULL, 0, KVT_CANCEL_WAIT,
          NULL);
    CHECK(kvt_cancel, "mode 2", b->t, &unknown, 1, 2, NULL);
    CHECK(kvt_cancel, "xfer of no such id", b->t, &unknown, 1, KVT_CANCEL_WAIT,
          NULL);
    CHECK(kvt_release, "xfer 0", b->t, 0);
    CHECK(kvt_release, "xfer of no such id", b->t, unknown);
    CHECK(kvt_release, "xfer drained before", b->t, b->drained);
    CHECK(kvt_stats, "ret NULL", b->t, NULL, sizeof b->stats);
    CHECK(kvt_stats, "size 0", b->t, &b->stats, 0);
    CHECK(kvt_stats, "size above sizeof", b->t, &b->stats, sizeof b->stats + 1);
    CHECK(kvt_metrics, "ret_length NULL", b->t, b->bytes, sizeof b->bytes,
          NULL);
    CHECK(kvt_metrics, "buffer NULL, capacity 1", b->t, NULL, 1,
          &b->out_length);
    CHECK(kvt_metrics, "buffer NULL, capacity 0 (ret_length is set)", b->t,
          NULL, 0, &b->out_length);
}

/* ---------------------------------------------------------------- messages */

void check_note_rows(struct bad *b)
{
    kvt_transport *receiver = b->pair.b.t;

    if (!suite.notify) {
        return;
    }
    CHECK(kvt_notify, "bytes NULL, length 1", b->t, b->peer, NULL, 1, ERR);
    CHECK(kvt_notify, "bytes NULL, length 0", b->t, b->peer, NULL, 0, ERR);
    assert_int_equal(wait_note(receiver, b->bytes, 1).length, 0);
    CHECK(kvt_notify, "length above notify_bytes_max", b->t, b->peer, b->bytes,
          65537, ERR);
    CHECK(kvt_notify, "peer KVT_SELF", b->t, KVT_SELF, "x", 1, ERR);
    CHECK(kvt_notify, "peer of no such id", b->t, 999, "x", 1, ERR);
    CHECK(kvt_notify, "peer removed before", b->t, b->removed, "x", 1, ERR);
    CHECK(kvt_notify, "peer unloaded before", b->t, b->unloaded, "x", 1, ERR);
    CHECK(kvt_notification, "ret NULL", receiver, NULL, b->bytes, 1);
    CHECK(kvt_notification, "buffer NULL, capacity 1", receiver, &b->note, NULL,
          1);
    assert_kvt_ok(kvt_notify(b->t, b->peer, "x", 1, ERR));
    assert_true(wait_fd(receiver, test_wait_ms()));
    CHECK(kvt_notification, "capacity 0, a message of 1 byte waits (it stays)",
          receiver, &b->note, NULL, 0);
    assert_int_equal(wait_note(receiver, b->bytes, 1).length, 1);
}

/* ------------------------------------------------------------------- rules */

static kvt_transport *open_as(const char *engine)
{
    struct kvt_options options = {.size = sizeof options, .engine = engine};
    kvt_transport *t = NULL;

    assert_kvt_ok(kvt_open(&options, &t, ERR));
    return t;
}

void check_fault_rows(struct bad *b)
{
    kvt_transport *faulty = open_as(suite_engine(""));
    kvt_transport *plain = open_as(suite.base);

    CHECK(kvt_fault, "rules NULL", faulty, NULL, ERR);
    CHECK(kvt_fault, "rules \"fail=0\"", faulty, "fail=0", ERR);
    CHECK(kvt_fault, "rules \"window=1\"", faulty, "window=1", ERR);
    CHECK(kvt_fault, "rules \"nonsense\"", faulty, "nonsense", ERR);
    CHECK(kvt_fault, "not a fault transport", plain, "", ERR);
    kvt_free(faulty);
    kvt_free(plain);
}
