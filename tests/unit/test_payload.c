/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Payloads and their cutting against an oracle that lists every pair of bytes
 * (ours, theirs) that a list of items moves. Random layouts, random indices
 * with duplicates and runs of neighbours, random limits: the chunks together
 * must move exactly the oracle's pairs, in the caller's order within each pair
 * of kinds; no chunk may pass a limit, be empty, mix kinds or write past its
 * room. Every refusal names what was wrong and leaves nothing behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"
#include "unit.h"

#define RUNS_MAX 5
#define ITEMS_MAX 60
#define BLOCK_MAX 8
#define BYTES_MAX ((size_t)ITEMS_MAX * BLOCK_MAX)
#define COPIES_MAX 12

/* One byte's way. `group` orders the pairs of kinds as payloads do. */
struct byte_move {
    uint64_t group;
    uint64_t local;
    uint64_t peer;
};

struct moves {
    struct byte_move items[BYTES_MAX];
    size_t count;
};

static uint64_t group_of(uint32_t local_kind, uint32_t local_device,
                         uint32_t peer_kind, uint32_t peer_device)
{
    return (uint64_t)local_kind << 48 | (uint64_t)local_device << 32 |
           (uint64_t)peer_kind << 16 | peer_device;
}

static void add_moves(struct moves *moves, uint64_t group, uint64_t local,
                      uint64_t peer, uint64_t length)
{
    for (uint64_t i = 0; i < length; i++) {
        assert_true(moves->count < BYTES_MAX);
        moves->items[moves->count++] = (struct byte_move){
            .group = group, .local = local + i, .peer = peer + i};
    }
}

/* Insertion sort by group: stable, and nobody can get it wrong. */
static void group_moves(struct moves *moves)
{
    for (size_t i = 1; i < moves->count; i++) {
        struct byte_move move = moves->items[i];
        size_t at = i;

        while (at > 0 && moves->items[at - 1].group > move.group) {
            moves->items[at] = moves->items[at - 1];
            at--;
        }
        moves->items[at] = move;
    }
}

/* ------------------------------------------------------------------- layouts */

static struct kvti_regions everything;

static int set_up(void **state)
{
    (void)state;
    for (uint32_t space = 0; space < 4; space++) {
        add_region(&everything, 0, UINT64_C(1) << 62, space & 1, space >> 1);
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvti_regions_fini(&everything);
    return 0;
}

static struct kvti_layout *make_layout(const struct kvt_run *runs, size_t count)
{
    struct kvti_layout *layout;
    struct kvt_error err;

    if (kvti_layout_new(runs, count, &everything, &layout, &err) != KVT_OK) {
        fail_msg("%s", err.text);
    }
    return layout;
}

/* One run of packed blocks at 4096. */
static struct kvti_layout *plain_layout(uint64_t block_bytes, uint64_t count)
{
    const struct kvt_run run = {.addr = 4096,
                                .block_bytes = block_bytes,
                                .stride_bytes = block_bytes,
                                .count = count};

    return make_layout(&run, 1);
}

struct shape {
    uint64_t block_bytes; /* 0: each run its own */
    bool one_kind;
    bool one_count;
    bool huge; /* a last run of more than 2^32 blocks */
};

static struct kvti_layout *random_layout(struct rng *rng,
                                         const struct shape *shape)
{
    struct kvt_run runs[RUNS_MAX];
    size_t count = 1 + rng_below(rng, RUNS_MAX);
    uint64_t addr = 4096;

    for (size_t i = 0; i < count; i++) {
        struct kvt_run *run = &runs[i];

        *run = (struct kvt_run){.addr = addr};
        run->block_bytes = shape->block_bytes != 0 ? shape->block_bytes
                                                   : 1 + rng_below(rng, 2);
        run->stride_bytes = run->block_bytes +
                            rng_below(rng, 2) * rng_below(rng, 3);
        run->count = shape->one_count ? 7 : 1 + rng_below(rng, 9);
        if (shape->huge && i == count - 1) {
            run->count = (UINT64_C(1) << 32) + 5;
        }
        if (!shape->one_kind) {
            run->kind = (uint32_t)rng_below(rng, 2);
            run->device = (uint32_t)rng_below(rng, 2);
        }
        /* Often the next run goes on where this one ends. */
        addr += run->count * run->stride_bytes + 5 * rng_below(rng, 2);
    }
    return make_layout(runs, count);
}

/* ------------------------------------------------------------------- indices */

struct index_list {
    uint64_t values[ITEMS_MAX];
    size_t count;
    uint64_t storage[ITEMS_MAX]; /* in the caller's type */
    struct kvt_indices indices;
};

static void store_indices(struct index_list *list, uint32_t type)
{
    uint32_t *narrow = (uint32_t *)(void *)list->storage;

    for (size_t i = 0; i < list->count; i++) {
        if (type == KVT_INDEX_U32 || type == KVT_INDEX_I32) {
            narrow[i] = (uint32_t)list->values[i];
        } else {
            list->storage[i] = list->values[i];
        }
    }
    list->indices = (struct kvt_indices){
        .data = list->storage, .count = list->count, .type = type};
}

static uint64_t random_index(struct rng *rng, const struct kvti_layout *layout)
{
    uint64_t index = rng_below(rng, layout->block_count);

    /* Around 2^32 and at the end of a huge layout, too. */
    if (layout->block_count > UINT32_MAX && rng_below(rng, 2) == 0) {
        index = rng_below(rng, 2) == 0 ? index % 20
                                       : layout->block_count - 1 - index % 9;
    }
    return index;
}

/* Half of the pairs follow their predecessor on both sides, as far as the
 * layouts go; so do some on one side only. */
static void random_indices(struct rng *rng, const struct kvti_layout *local,
                           const struct kvti_layout *peer,
                           struct index_list *ours, struct index_list *theirs)
{
    size_t count = 1 + rng_below(rng, ITEMS_MAX);

    for (size_t i = 0; i < count; i++) {
        bool follow = i > 0 && rng_below(rng, 2) == 0;

        ours->values[i] = random_index(rng, local);
        theirs->values[i] = random_index(rng, peer);
        if (follow && ours->values[i - 1] + 1 < local->block_count) {
            ours->values[i] = ours->values[i - 1] + 1;
        }
        if (follow && rng_below(rng, 4) != 0 &&
            theirs->values[i - 1] + 1 < peer->block_count) {
            theirs->values[i] = theirs->values[i - 1] + 1;
        }
    }
    ours->count = count;
    theirs->count = count;
}

/* Without this hardly a pair of mixed layouts would fit. */
static void fit_lengths(struct rng *rng, const struct kvti_layout *local,
                        const struct kvti_layout *peer,
                        const struct index_list *ours,
                        struct index_list *theirs)
{
    for (size_t i = 0; i < ours->count; i++) {
        uint64_t addr;
        const struct kvt_run *run = kvti_layout_block(local, ours->values[i],
                                                      &addr);

        for (size_t tries = 0;
             tries < 100 &&
             run->block_bytes !=
                 kvti_layout_block(peer, theirs->values[i], &addr)->block_bytes;
             tries++) {
            theirs->values[i] = random_index(rng, peer);
        }
    }
}

static uint32_t random_type(struct rng *rng, const struct kvti_layout *layout)
{
    return (uint32_t)(layout->block_count > UINT32_MAX
                          ? KVT_INDEX_U64 + rng_below(rng, 2)
                          : rng_below(rng, 4));
}

/* ------------------------------------------------------------------- cutting */

/* One copy more than any limit: a guard. */
#define CHUNK_BYTES                                                            \
    (sizeof(struct kvti_chunk) + (COPIES_MAX + 1) * sizeof(struct kvti_copy))

static struct kvti_chunk *new_chunk(void)
{
    struct kvti_chunk *chunk = malloc(CHUNK_BYTES);

    assert_non_null(chunk);
    return chunk;
}

static bool adjacent(const struct kvti_copy *a, const struct kvti_copy *b)
{
    return a->local + a->length == b->local && a->peer + a->length == b->peer;
}

/* One chunk keeps to the limits, is one pair of kinds, and has no two copies
 * in a row that could have been one. */
static void check_chunk(const struct kvti_chunk *chunk, uint32_t copies_max,
                        uint64_t bytes_max, struct moves *moves)
{
    uint64_t group = group_of(chunk->local_kind, chunk->local_device,
                              chunk->peer_kind, chunk->peer_device);
    uint64_t bytes = 0;

    assert_in_range(chunk->count, 1, copies_max);
    for (uint32_t i = 0; i < chunk->count; i++) {
        const struct kvti_copy *copy = &chunk->copies[i];

        assert_in_range(copy->length, 1, bytes_max);
        assert_false(i > 0 && adjacent(copy - 1, copy));
        add_moves(moves, group, copy->local, copy->peer, copy->length);
        bytes += copy->length;
    }
    assert_int_equal(bytes, chunk->bytes);
    assert_in_range(chunk->bytes, 1, bytes_max);
    for (size_t i = 0; i < sizeof(struct kvti_copy); i++) {
        assert_int_equal(((const unsigned char *)&chunk->copies[copies_max])[i],
                         0xa5);
    }
}

struct totals {
    uint64_t copies;
    uint64_t merged;
    uint64_t splits; /* chunks that ended inside an item */
};

/* Cuts all of the payload. A chunk may end early only where it is full or the
 * oracle's next byte has other kinds. */
static struct totals cut_all(struct rng *rng,
                             const struct kvti_payload *payload,
                             uint32_t copies_max, uint64_t bytes_max,
                             const struct moves *want, struct moves *got)
{
    struct kvti_chunk *chunk = new_chunk();
    struct kvti_cut cut = {0};
    struct totals totals = {0};

    got->count = 0;
    while (!kvti_cut_at_end(&cut, payload)) {
        memset(chunk, (int)rng_below(rng, 256), CHUNK_BYTES);
        memset(&chunk->copies[copies_max], 0xa5, sizeof(struct kvti_copy));
        kvti_payload_cut(payload, &cut, copies_max, bytes_max, chunk);
        check_chunk(chunk, copies_max, bytes_max, got);
        totals.copies += chunk->count;
        totals.splits += cut.offset > 0;
        if (chunk->count < copies_max && chunk->bytes < bytes_max &&
            got->count < want->count) {
            assert_int_not_equal(want->items[got->count].group,
                                 got->items[got->count - 1].group);
        }
    }
    /* Each item starts a copy, joins one, or is the rest of a split one. */
    assert_int_equal(totals.copies + cut.merged,
                     payload->count + totals.splits);
    assert_int_equal(cut.offset, 0);
    totals.merged = cut.merged;
    free(chunk);
    return totals;
}

static void compare_moves(const struct moves *got, const struct moves *want,
                          uint64_t seed)
{
    if (got->count != want->count ||
        memcmp(got->items, want->items, want->count * sizeof *want->items) !=
            0) {
        fail_msg("other bytes than the oracle's, seed %" PRIu64, seed);
    }
}

static void cut_in_every_way(struct rng *rng,
                             const struct kvti_payload *payload,
                             const struct moves *want, uint64_t seed)
{
    for (size_t round = 0; round < 4; round++) {
        static struct moves got;
        uint32_t copies_max = 1 + (uint32_t)rng_below(rng, COPIES_MAX);
        uint64_t bytes_max = 1 + rng_below(rng, 40);

        cut_all(rng, payload, copies_max, bytes_max, want, &got);
        compare_moves(&got, want, seed);
    }
}

static void block_round(struct rng *rng, uint64_t seed)
{
    static struct moves want;
    struct shape shape = {
        .block_bytes = rng_below(rng, 3) == 0 ? 0 : 1 + rng_below(rng, 8),
        .one_kind = rng_below(rng, 2) == 0,
        .one_count = rng_below(rng, 2) == 0,
        .huge = rng_below(rng, 4) == 0};
    struct kvti_layout *local = random_layout(rng, &shape);
    struct kvti_layout *peer;
    struct index_list ours;
    struct index_list theirs;
    struct kvti_payload payload;
    struct kvt_error err;
    bool mismatch = false;
    int code;

    /* Mostly of the same shape, but only one side may be huge. */
    shape.huge = rng_below(rng, 4) == 0;
    peer = random_layout(rng, &shape);
    want.count = 0;
    random_indices(rng, local, peer, &ours, &theirs);
    if (rng_below(rng, 8) != 0) {
        fit_lengths(rng, local, peer, &ours, &theirs);
    }
    store_indices(&ours, random_type(rng, local));
    store_indices(&theirs, random_type(rng, peer));
    for (size_t i = 0; i < ours.count; i++) {
        uint64_t local_addr;
        uint64_t peer_addr;
        const struct kvt_run *a = kvti_layout_block(local, ours.values[i],
                                                    &local_addr);
        const struct kvt_run *b = kvti_layout_block(peer, theirs.values[i],
                                                    &peer_addr);

        mismatch = mismatch || a->block_bytes != b->block_bytes;
        add_moves(&want, group_of(a->kind, a->device, b->kind, b->device),
                  local_addr, peer_addr, a->block_bytes);
    }
    code = kvti_payload_blocks(local, &ours.indices, peer, &theirs.indices,
                               &payload, &err);
    if (mismatch) {
        assert_int_equal(code, KVT_EMISMATCH);
    } else {
        assert_int_equal(code, KVT_OK);
        assert_int_equal(payload.count, ours.count);
        assert_int_equal(payload.bytes, want.count);
        assert_int_equal(payload.wide, local->block_count > UINT32_MAX ||
                                           peer->block_count > UINT32_MAX);
        group_moves(&want);
        cut_in_every_way(rng, &payload, &want, seed);
        kvti_payload_fini(&payload);
    }
    kvti_layout_unref(local);
    kvti_layout_unref(peer);
}

static void cut_blocks_move_the_oracles_bytes(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        struct rng rng = {seed};

        block_round(&rng, seed);
    }
}

static void pieces_round(struct rng *rng, uint64_t seed)
{
    static struct moves want;
    struct kvt_copy copies[ITEMS_MAX];
    size_t count = 1 + rng_below(rng, ITEMS_MAX);
    bool mixed = rng_below(rng, 2) == 0;
    struct kvti_payload payload;
    int code;

    want.count = 0;
    for (size_t i = 0; i < count; i++) {
        struct kvt_copy *copy = &copies[i];

        *copy = (struct kvt_copy){.local_addr = rng_below(rng, 1000),
                                  .peer_addr = rng_below(rng, 1000),
                                  .length = rng_below(rng, BLOCK_MAX + 1)};
        if (i > 0 && rng_below(rng, 2) == 0) {
            copy->local_addr = copy[-1].local_addr + copy[-1].length;
            copy->peer_addr = copy[-1].peer_addr + copy[-1].length;
        }
        if (mixed) {
            copy->local_kind = (uint32_t)rng_below(rng, 2);
            copy->local_device = (uint32_t)rng_below(rng, 2);
            copy->peer_kind = (uint32_t)rng_below(rng, 2);
            copy->peer_device = (uint32_t)rng_below(rng, 2);
        }
        add_moves(&want,
                  group_of(copy->local_kind, copy->local_device,
                           copy->peer_kind, copy->peer_device),
                  copy->local_addr, copy->peer_addr, copy->length);
    }
    code = kvti_payload_pieces(copies, count, &payload, NULL);
    if (want.count == 0) {
        assert_int_equal(code, KVT_EINVAL);
        return;
    }
    assert_int_equal(code, KVT_OK);
    assert_int_equal(payload.bytes, want.count);
    group_moves(&want);
    cut_in_every_way(rng, &payload, &want, seed);
    kvti_payload_fini(&payload);
}

static void cut_pieces_move_the_oracles_bytes(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        struct rng rng = {seed};

        pieces_round(&rng, seed);
    }
}

static void neighbours_on_both_sides_become_one_copy(void **state)
{
    static struct moves got;
    static struct moves want;
    struct kvti_layout *layout = plain_layout(4, 100);
    struct index_list ours = {.values = {3, 4, 5, 9, 10, 11, 20, 20, 21, 0},
                              .count = 10};
    struct index_list theirs = {.values = {7, 8, 9, 10, 11, 30, 40, 41, 42, 1},
                                .count = 10};
    struct rng rng = {1};
    struct kvti_payload payload;
    struct totals totals;

    (void)state;
    want.count = 0;
    store_indices(&ours, KVT_INDEX_I64);
    store_indices(&theirs, KVT_INDEX_U32);
    assert_int_equal(kvti_payload_blocks(layout, &ours.indices, layout,
                                         &theirs.indices, &payload, NULL),
                     KVT_OK);
    for (size_t i = 0; i < ours.count; i++) {
        add_moves(&want, 0, 4096 + 4 * ours.values[i],
                  4096 + 4 * theirs.values[i], 4);
    }
    totals = cut_all(&rng, &payload, COPIES_MAX, 1000, &want, &got);
    compare_moves(&got, &want, 0);
    assert_int_equal(totals.splits, 0);
    /* 3-5, 9-10, 20-21 on both sides: 2 + 1 + 1 items ride along. */
    assert_int_equal(totals.merged, 4);
    assert_int_equal(totals.copies, 6);
    kvti_payload_fini(&payload);
    kvti_layout_unref(layout);
}

static void a_gap_between_blocks_is_not_joined(void **state)
{
    const struct kvt_run run = {
        .addr = 4096, .block_bytes = 4, .stride_bytes = 5, .count = 10};
    struct kvti_layout *gaps = make_layout(&run, 1);
    struct kvti_layout *packed = plain_layout(4, 10);
    struct index_list list = {.values = {0, 1, 2}, .count = 3};
    struct kvti_chunk *chunk = new_chunk();
    struct kvti_payload payload;
    struct kvti_cut cut = {0};

    (void)state;
    store_indices(&list, KVT_INDEX_U32);
    assert_int_equal(kvti_payload_blocks(packed, &list.indices, gaps,
                                         &list.indices, &payload, NULL),
                     KVT_OK);
    kvti_payload_cut(&payload, &cut, COPIES_MAX, 1000, chunk);
    assert_int_equal(chunk->count, 3);
    assert_int_equal(cut.merged, 0);
    free(chunk);
    kvti_payload_fini(&payload);
    kvti_layout_unref(gaps);
    kvti_layout_unref(packed);
}

/* Cuts one piece of so many bytes by shares; the sizes' number is returned. */
static size_t cut_by_shares(uint64_t bytes, uint32_t share, uint64_t bytes_max,
                            uint64_t *sizes, size_t capacity)
{
    const struct kvt_copy piece = {
        .local_addr = 4096, .peer_addr = 8192, .length = bytes};
    struct kvti_chunk *chunk = new_chunk();
    struct kvti_cut cut = {0};
    struct kvti_payload payload;
    size_t count = 0;

    assert_int_equal(kvti_payload_pieces(&piece, 1, &payload, NULL), KVT_OK);
    while (!kvti_cut_at_end(&cut, &payload)) {
        assert_true(count < capacity);
        kvti_payload_cut(&payload, &cut, COPIES_MAX,
                         kvti_cut_share(&payload, &cut, share, bytes_max),
                         chunk);
        sizes[count++] = chunk->bytes;
        bytes -= chunk->bytes;
        assert_int_equal(cut.bytes, piece.length - bytes);
    }
    assert_int_equal(bytes, 0);
    kvti_payload_fini(&payload);
    free(chunk);
    return count;
}

static void shares_get_smaller_towards_the_end(void **state)
{
    const uint64_t mib = UINT64_C(1) << 20;
    uint64_t sizes[256];
    size_t count;

    (void)state;
    for (uint32_t share = 2; share <= 8; share *= 2) {
        count = cut_by_shares(64 * mib + 1, share, mib, sizes, 256);
        assert_int_equal(sizes[0], mib);
        for (size_t i = 1; i < count; i++) {
            assert_true(sizes[i] <= sizes[i - 1]);
            assert_true(sizes[i] >= KVTI_SHARE_MIN || i == count - 1);
        }
        assert_true(sizes[count - 1] <= KVTI_SHARE_MIN);
    }
    /* One chunk's worth of bytes is work for all. */
    assert_true(cut_by_shares(mib, 4, mib, sizes, 256) >= 4);
}

static void too_little_to_share_is_one_chunk(void **state)
{
    uint64_t sizes[8];

    (void)state;
    assert_int_equal(cut_by_shares(KVTI_SHARE_MIN, 8, 1 << 20, sizes, 8), 1);
    assert_int_equal(cut_by_shares(1, 8, 1 << 20, sizes, 8), 1);
    /* An engine's own limit is never exceeded. */
    assert_int_equal(cut_by_shares(4096, 8, 1024, sizes, 8), 4);
}

static void one_thread_shares_with_nobody(void **state)
{
    uint64_t sizes[8];

    (void)state;
    for (uint32_t share = 0; share <= 1; share++) {
        assert_int_equal(
            cut_by_shares(UINT64_C(3) << 20, share, 1 << 20, sizes, 8), 3);
    }
}

/* ----------------------------------------------------------------- refusals */

struct refusal {
    struct kvti_layout *local;
    struct kvti_layout *peer;
    struct index_list ours;
    struct index_list theirs;
};

static void expect_text(const struct kvt_error *err, const char *part)
{
    if (strstr(err->text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err->text, part);
    }
}

/* Refused with the code and a text, no reference kept, no output set. */
static void expect_refused(const struct refusal *at, int code, const char *part)
{
    struct kvti_payload payload;
    struct kvti_payload before;
    struct kvt_error err = {0};

    memset(&payload, 0xa5, sizeof payload);
    memcpy(&before, &payload, sizeof payload);
    assert_int_equal(kvti_payload_blocks(at->local, &at->ours.indices, at->peer,
                                         &at->theirs.indices, &payload, &err),
                     code);
    assert_memory_equal(&payload, &before, sizeof payload);
    assert_int_equal(err.code, code);
    expect_text(&err, part);
    assert_int_equal(at->local->refs, 1);
    assert_int_equal(at->peer->refs, 1);
}

static void start_refusal(struct refusal *at, struct kvti_layout *local,
                          struct kvti_layout *peer)
{
    memset(at, 0, sizeof *at);
    at->local = local;
    at->peer = peer;
    at->ours.count = 5;
    at->theirs.count = 5;
    for (uint64_t i = 0; i < 5; i++) {
        at->ours.values[i] = i;
        at->theirs.values[i] = i;
    }
    store_indices(&at->ours, KVT_INDEX_U32);
    store_indices(&at->theirs, KVT_INDEX_U32);
}

static void end_refusal(struct refusal *at)
{
    kvti_layout_unref(at->local);
    kvti_layout_unref(at->peer);
}

static void malformed_index_lists_are_refused(void **state)
{
    struct refusal at;

    (void)state;
    start_refusal(&at, plain_layout(4, 10), plain_layout(4, 20));
    at.theirs.indices.count = 4;
    expect_refused(&at, KVT_EMISMATCH, "5 local indices and 4 peer");
    at.theirs.indices.count = 0;
    at.ours.indices.count = 0;
    expect_refused(&at, KVT_EINVAL, "no indices");
    at.theirs.indices.count = 5;
    at.ours.indices.count = 5;
    at.theirs.indices.type = 4;
    expect_refused(&at, KVT_EINVAL, "peer indices have type 4");
    at.theirs.indices.type = KVT_INDEX_U32;
    at.ours.indices.data = NULL;
    expect_refused(&at, KVT_EINVAL, "local indices are NULL");
    at.ours.indices.data = (const char *)at.ours.storage + 2;
    expect_refused(&at, KVT_EINVAL, "local indices are not aligned to 4");
    at.ours.indices.data = (const char *)at.ours.storage + 4;
    at.ours.indices.type = KVT_INDEX_I64;
    expect_refused(&at, KVT_EINVAL, "local indices are not aligned to 8");
    at.ours.indices.data = at.ours.storage;
    at.ours.indices.count = UINT64_MAX / 2;
    at.theirs.indices.count = UINT64_MAX / 2;
    expect_refused(&at, KVT_ENOMEM, "no memory");
    end_refusal(&at);
}

static void indices_out_of_range_are_refused_by_position(void **state)
{
    struct refusal at;

    (void)state;
    start_refusal(&at, plain_layout(4, 10), plain_layout(4, 20));
    for (uint32_t type = KVT_INDEX_U32; type <= KVT_INDEX_I64; type++) {
        at.ours.values[3] = 10;
        store_indices(&at.ours, type);
        expect_refused(&at, KVT_ERANGE,
                       "local index 3 is 10; the layout has the blocks 0 to "
                       "9");
        at.ours.values[3] = 9;
        store_indices(&at.ours, type);
        at.theirs.values[0] = 20;
        at.theirs.values[4] = 999;
        store_indices(&at.theirs, type);
        expect_refused(&at, KVT_ERANGE, "peer index 0 is 20; ");
        at.theirs.values[0] = 19;
        at.theirs.values[4] = 19;
        store_indices(&at.theirs, type);
    }
    end_refusal(&at);
}

static void negative_indices_are_refused_as_such(void **state)
{
    const uint64_t blocks[] = {10, UINT64_C(1) << 32, (UINT64_C(1) << 32) + 1};
    struct refusal at;

    (void)state;
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        start_refusal(&at, plain_layout(4, blocks[i]), plain_layout(4, 20));
        at.ours.values[2] = (uint64_t)INT64_C(-3);
        store_indices(&at.ours, KVT_INDEX_I32);
        expect_refused(&at, KVT_ERANGE, "local index 2 is -3; ");
        store_indices(&at.ours, KVT_INDEX_I64);
        expect_refused(&at, KVT_ERANGE, "local index 2 is -3; ");
        at.ours.values[2] = (uint64_t)INT64_MIN;
        store_indices(&at.ours, KVT_INDEX_I64);
        expect_refused(&at, KVT_ERANGE, "is -9223372036854775808; ");
        store_indices(&at.ours, KVT_INDEX_U64);
        expect_refused(&at, KVT_ERANGE, "is 9223372036854775808; ");
        end_refusal(&at);
    }
}

/* Their low halves are in range; 32 bits must not be all that is looked at. */
static void indices_of_more_than_32_bits_are_not_cut_off(void **state)
{
    struct refusal at;

    (void)state;
    start_refusal(&at, plain_layout(4, 10), plain_layout(4, 20));
    at.ours.values[1] = (UINT64_C(1) << 32) + 1;
    store_indices(&at.ours, KVT_INDEX_U64);
    expect_refused(&at, KVT_ERANGE, "local index 1 is 4294967297; ");
    store_indices(&at.ours, KVT_INDEX_I64);
    expect_refused(&at, KVT_ERANGE, "local index 1 is 4294967297; ");
    end_refusal(&at);
}

/* More than one tile of the conversion, the culprit in each place of it. */
static void a_late_culprit_is_found(void **state)
{
    const size_t count = 5000;
    struct kvti_layout *layout = plain_layout(4, count);
    uint64_t *values = calloc(count, sizeof *values);
    const struct kvt_indices list = {
        .data = values, .count = count, .type = KVT_INDEX_I64};
    struct kvti_payload payload;
    struct kvt_error err;

    (void)state;
    assert_non_null(values);
    for (size_t i = 0; i < count; i++) {
        values[i] = count - 1 - i;
    }
    assert_int_equal(
        kvti_payload_blocks(layout, &list, layout, &list, &payload, &err),
        KVT_OK);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(payload.of.pairs32[2 * i], values[i]);
        assert_int_equal(payload.of.pairs32[2 * i + 1], values[i]);
    }
    assert_int_equal(layout->refs, 3);
    kvti_payload_fini(&payload);
    for (size_t at = 0; at < count; at += 499) {
        char part[64];

        values[at] += count;
        (void)snprintf(part, sizeof part, "local index %zu is %" PRIu64, at,
                       values[at]);
        assert_int_equal(
            kvti_payload_blocks(layout, &list, layout, &list, &payload, &err),
            KVT_ERANGE);
        expect_text(&err, part);
        values[at] -= count;
    }
    free(values);
    kvti_layout_unref(layout);
}

static void different_block_lengths_are_refused(void **state)
{
    const struct kvt_run runs[2] = {
        {.addr = 4096, .block_bytes = 4, .stride_bytes = 4, .count = 10},
        {.addr = 8192, .block_bytes = 8, .stride_bytes = 8, .count = 10}};
    struct refusal at;

    (void)state;
    start_refusal(&at, plain_layout(4, 10), plain_layout(8, 20));
    expect_refused(&at, KVT_EMISMATCH,
                   "local blocks have 4 bytes, the peer's "
                   "have 8");
    end_refusal(&at);
    start_refusal(&at, plain_layout(4, 10), make_layout(runs, 2));
    at.theirs.values[3] = 12;
    store_indices(&at.theirs, KVT_INDEX_U32);
    expect_refused(&at, KVT_EMISMATCH,
                   "pair 3: local block 3 has 4 bytes, peer block 12 has 8");
    end_refusal(&at);
}

static void too_many_bytes_are_refused(void **state)
{
    const uint64_t half = UINT64_C(1) << 61;
    const struct kvt_run runs[2] = {
        {.addr = 0, .block_bytes = half, .stride_bytes = half, .count = 1},
        {.addr = 0, .block_bytes = 1, .stride_bytes = 1, .count = 1}};
    struct refusal at;
    struct kvti_payload payload;

    (void)state;
    /* Two sides of equal lengths, then two of mixed ones: both sums. */
    for (size_t count = 1; count <= 2; count++) {
        start_refusal(&at, make_layout(runs, count), make_layout(runs, count));
        for (size_t i = 0; i < 8; i++) {
            at.ours.values[i] = 0;
            at.theirs.values[i] = 0;
        }
        at.ours.count = 8;
        at.theirs.count = 8;
        store_indices(&at.ours, KVT_INDEX_U32);
        store_indices(&at.theirs, KVT_INDEX_U32);
        expect_refused(&at, KVT_ERANGE, "2^64 bytes or more");
        at.ours.indices.count = 7;
        at.theirs.indices.count = 7;
        assert_int_equal(kvti_payload_blocks(at.local, &at.ours.indices,
                                             at.peer, &at.theirs.indices,
                                             &payload, NULL),
                         KVT_OK);
        assert_int_equal(payload.bytes, 7 * half);
        kvti_payload_fini(&payload);
        end_refusal(&at);
    }
}

static void bad_pieces_are_refused(void **state)
{
    struct kvt_copy copies[3];
    struct kvti_payload payload;
    struct kvt_error err;

    (void)state;
    memset(copies, 0, sizeof copies);
    assert_int_equal(kvti_payload_pieces(NULL, 3, &payload, &err), KVT_EINVAL);
    assert_int_equal(kvti_payload_pieces(copies, 0, &payload, &err),
                     KVT_EINVAL);
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err),
                     KVT_EINVAL);
    expect_text(&err, "nothing to copy");
    copies[0].length = 8;
    copies[2].length = 8;
    copies[2].local_addr = UINT64_MAX - 7;
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err),
                     KVT_EINVAL);
    expect_text(&err, "piece 2 ");
    copies[2].local_addr = 0;
    copies[2].peer_addr = UINT64_MAX - 7;
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err),
                     KVT_EINVAL);
    expect_text(&err, "piece 2 ");
    copies[2].peer_addr = UINT64_MAX - 8;
    copies[2].peer_kind = 2;
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err),
                     KVT_EINVAL);
    expect_text(&err, "piece 2 has kinds 0 and 2");
    copies[2].peer_kind = 0;
    copies[0].length = UINT64_MAX - 7;
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err),
                     KVT_ERANGE);
    expect_text(&err, "piece 2 ");
    copies[0].length = UINT64_MAX - 8;
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, &err), KVT_OK);
    assert_int_equal(payload.count, 2);
    assert_int_equal(payload.bytes, UINT64_MAX);
    kvti_payload_fini(&payload);
}

/* ---------------------------------------------------------------------- uses */

static bool oracle_uses(const struct moves *moves, uint64_t addr,
                        uint64_t length, uint32_t kind, uint32_t device)
{
    for (size_t i = 0; i < moves->count; i++) {
        const struct byte_move *move = &moves->items[i];

        if (move->local >= addr && move->local - addr < length &&
            move->group >> 32 == group_of(kind, device, 0, 0) >> 32) {
            return true;
        }
    }
    return false;
}

static void compare_uses(const struct kvti_payload *payload,
                         const struct moves *moves)
{
    for (uint64_t addr = 4090; addr < 4250; addr += 3) {
        for (uint64_t length = 0; length < 40; length += 3) {
            for (uint32_t space = 0; space < 4; space++) {
                assert_int_equal(
                    kvti_payload_uses(payload, addr, length, space & 1,
                                      space >> 1),
                    oracle_uses(moves, addr, length, space & 1, space >> 1));
            }
        }
    }
}

static void uses_sees_the_blocks_that_are_moved(void **state)
{
    static struct moves moves;
    const struct shape shape = {.block_bytes = 3};

    (void)state;
    for (uint64_t seed = 0; seed < 50; seed++) {
        struct rng rng = {seed};
        struct kvti_layout *layout = random_layout(&rng, &shape);
        struct index_list list = {.count = 1 + rng_below(&rng, 5)};
        struct kvti_payload payload;

        moves.count = 0;
        for (size_t i = 0; i < list.count; i++) {
            uint64_t addr;
            const struct kvt_run *run;

            list.values[i] = rng_below(&rng, layout->block_count);
            run = kvti_layout_block(layout, list.values[i], &addr);
            add_moves(&moves, group_of(run->kind, run->device, 0, 0), addr, 0,
                      3);
        }
        store_indices(&list, KVT_INDEX_U32);
        assert_int_equal(kvti_payload_blocks(layout, &list.indices, layout,
                                             &list.indices, &payload, NULL),
                         KVT_OK);
        compare_uses(&payload, &moves);
        kvti_payload_fini(&payload);
        kvti_layout_unref(layout);
    }
}

static void uses_sees_pieces(void **state)
{
    static struct moves moves;
    const struct kvt_copy copies[] = {
        {.local_addr = 4100, .peer_addr = 4150, .length = 5},
        {.local_addr = 4180, .length = 7, .local_kind = 1, .local_device = 1},
        {.local_addr = UINT64_MAX - 20, .length = 20}};
    struct kvti_payload payload;

    (void)state;
    moves.count = 0;
    add_moves(&moves, 0, 4100, 0, 5);
    add_moves(&moves, group_of(1, 1, 0, 0), 4180, 0, 7);
    assert_int_equal(kvti_payload_pieces(copies, 3, &payload, NULL), KVT_OK);
    compare_uses(&payload, &moves);
    assert_true(kvti_payload_uses(&payload, UINT64_MAX - 1, 100, KVT_DRAM, 0));
    assert_false(kvti_payload_uses(&payload, UINT64_MAX, 100, KVT_DRAM, 0));
    kvti_payload_fini(&payload);
}

static void fini_takes_empty_payloads(void **state)
{
    struct kvti_payload payload = {0};

    (void)state;
    kvti_payload_fini(NULL);
    kvti_payload_fini(&payload);
    kvti_payload_fini(&payload);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cut_blocks_move_the_oracles_bytes),
        cmocka_unit_test(cut_pieces_move_the_oracles_bytes),
        cmocka_unit_test(neighbours_on_both_sides_become_one_copy),
        cmocka_unit_test(a_gap_between_blocks_is_not_joined),
        cmocka_unit_test(shares_get_smaller_towards_the_end),
        cmocka_unit_test(too_little_to_share_is_one_chunk),
        cmocka_unit_test(one_thread_shares_with_nobody),
        cmocka_unit_test(malformed_index_lists_are_refused),
        cmocka_unit_test(indices_out_of_range_are_refused_by_position),
        cmocka_unit_test(negative_indices_are_refused_as_such),
        cmocka_unit_test(indices_of_more_than_32_bits_are_not_cut_off),
        cmocka_unit_test(a_late_culprit_is_found),
        cmocka_unit_test(different_block_lengths_are_refused),
        cmocka_unit_test(too_many_bytes_are_refused),
        cmocka_unit_test(bad_pieces_are_refused),
        cmocka_unit_test(uses_sees_the_blocks_that_are_moved),
        cmocka_unit_test(uses_sees_pieces),
        cmocka_unit_test(fini_takes_empty_payloads),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down) == 0 ? 0 : 1;
}
