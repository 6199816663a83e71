/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts, index checks and cutting. The input is read as two lists of runs
 * (sane ones, odd ones, a huge one now and then), two lists of indices of any
 * type, and limits. An oracle that knows nothing but the definition of a
 * layout says whether the transfer must be refused, and otherwise which byte
 * goes where; the chunks must move exactly that.
 */
#include <stdlib.h>
#include <string.h>

#include "diag.h"
#include "input.h"
#include "layout.h"

#define RUNS_MAX 6
#define ITEMS_MAX 64
#define BLOCK_MAX 8
#define MOVES_MAX ((size_t)ITEMS_MAX * BLOCK_MAX)
#define COPIES_MAX 16

struct side {
    struct kvt_run runs[RUNS_MAX];
    size_t run_count;
    struct kvti_layout *layout;
    uint64_t values[ITEMS_MAX];  /* sign-extended */
    uint64_t storage[ITEMS_MAX]; /* in the type of `indices` */
    struct kvt_indices indices;
};

struct move {
    uint64_t group;
    uint64_t local;
    uint64_t peer;
};

struct moves {
    struct move items[MOVES_MAX];
    size_t count;
};

/* ------------------------------------------------------------------- reading */

static void read_runs(struct input *input, struct side *side)
{
    uint64_t addr = 64;
    uint8_t habits = next_byte(input);

    side->run_count = 1 + next_below(input, RUNS_MAX);
    for (size_t i = 0; i < side->run_count; i++) {
        struct kvt_run *run = &side->runs[i];
        uint8_t kind = next_byte(input);

        *run = (struct kvt_run){.addr = addr, .block_bytes = 4};
        if ((habits & 1) != 0) {
            run->block_bytes = 1 + next_below(input, BLOCK_MAX);
        }
        run->stride_bytes = run->block_bytes + next_below(input, 3);
        run->count = (habits & 2) != 0 ? 1 + next_below(input, 12) : 5;
        if ((habits & 4) != 0) {
            run->kind = kind & 1;
            run->device = kind >> 1 & 1;
        }
        if ((habits & 24) == 24 && i + 1 == side->run_count) {
            run->count += UINT64_C(1) << 32;
        }
        addr += run->count * run->stride_bytes + next_below(input, 2);
    }
}

/* A shape that must be refused; one input in some takes this way. */
static void spoil_run(struct input *input, struct kvt_run *run)
{
    switch (next_below(input, 5)) {
    case 0:
        run->count = 0;
        break;
    case 1:
        run->stride_bytes = run->block_bytes - 1;
        break;
    case 2:
        run->addr = UINT64_MAX - next_byte(input);
        run->count = 256;
        break;
    case 3:
        run->stride_bytes = UINT64_MAX;
        run->count = 2 + next_byte(input);
        break;
    default:
        run->kind = 2 + next_byte(input);
        break;
    }
}

static void store_index(struct side *side, size_t at, uint64_t value)
{
    uint32_t *narrow = (uint32_t *)(void *)side->storage;

    switch (side->indices.type) {
    case KVT_INDEX_U32:
        side->values[at] = (uint32_t)value;
        narrow[at] = (uint32_t)value;
        break;
    case KVT_INDEX_I32:
        side->values[at] = (uint64_t)(int32_t)(uint32_t)value;
        narrow[at] = (uint32_t)value;
        break;
    default:
        side->values[at] = value;
        side->storage[at] = value;
        break;
    }
}

static void read_indices(struct input *input, struct side *side, size_t count)
{
    uint64_t value = 0;

    side->indices = (struct kvt_indices){
        .data = side->storage, .count = count, .type = next_byte(input) & 3};
    for (size_t i = 0; i < count; i++) {
        uint8_t way = next_byte(input);

        if (way < 128) {
            value++;
        } else if (way < 240) {
            value = next_below(input, side->layout->block_count);
        } else if (way < 252) {
            value = side->layout->block_count - 1 - next_below(input, 4);
        } else {
            value = way == 252   ? side->layout->block_count
                    : way == 253 ? (uint64_t)INT64_C(-1)
                    : way == 254 ? (uint64_t)INT64_MIN
                                 : UINT64_C(1) << 32;
        }
        store_index(side, i, value);
    }
}

/* -------------------------------------------------------------------- oracle */

/* The definition: blocks are counted run by run. NULL: out of range. */
static const struct kvt_run *locate(const struct side *side, uint64_t index,
                                    uint64_t *ret_addr)
{
    for (size_t i = 0; i < side->run_count; i++) {
        const struct kvt_run *run = &side->runs[i];

        if (index < run->count) {
            *ret_addr = run->addr + index * run->stride_bytes;
            return run;
        }
        index -= run->count;
    }
    return NULL;
}

static void add_moves(struct moves *moves, uint64_t group, uint64_t local,
                      uint64_t peer, uint64_t length)
{
    for (uint64_t i = 0; i < length; i++) {
        kvti_assert(moves->count < MOVES_MAX);
        moves->items[moves->count++] = (struct move){
            .group = group, .local = local + i, .peer = peer + i};
    }
}

static uint64_t group_of(uint32_t local_kind, uint32_t local_device,
                         uint32_t peer_kind, uint32_t peer_device)
{
    return (uint64_t)local_kind << 48 | (uint64_t)local_device << 32 |
           (uint64_t)peer_kind << 16 | peer_device;
}

/* A stable insertion sort by pair of kinds. */
static void group_moves(struct moves *moves)
{
    for (size_t i = 1; i < moves->count; i++) {
        struct move move = moves->items[i];
        size_t at = i;

        for (; at > 0 && moves->items[at - 1].group > move.group; at--) {
            moves->items[at] = moves->items[at - 1];
        }
        moves->items[at] = move;
    }
}

/* KVT_OK and the moves, or the code that the transfer must be refused with. */
static int foretell(const struct side *local, const struct side *peer,
                    struct moves *moves)
{
    bool mismatch = false;

    moves->count = 0;
    for (size_t i = 0; i < local->indices.count; i++) {
        uint64_t to;
        uint64_t from;
        const struct kvt_run *a = locate(local, local->values[i], &from);
        const struct kvt_run *b = locate(peer, peer->values[i], &to);

        if (a == NULL || b == NULL) {
            return KVT_ERANGE;
        }
        mismatch = mismatch || a->block_bytes != b->block_bytes;
        add_moves(moves, group_of(a->kind, a->device, b->kind, b->device), from,
                  to, a->block_bytes);
    }
    group_moves(moves);
    return mismatch ? KVT_EMISMATCH : KVT_OK;
}

/* ------------------------------------------------------------------- checking */

static void check_cut(struct input *input, const struct kvti_payload *payload,
                      const struct moves *want)
{
    static struct moves got;
    struct kvti_chunk *chunk = malloc(sizeof *chunk +
                                      COPIES_MAX * sizeof *chunk->copies);
    struct kvti_cut cut = {0};

    kvti_assert(chunk != NULL);

    got.count = 0;
    while (!kvti_cut_at_end(&cut, payload)) {
        uint32_t copies_max = 1 + (uint32_t)next_below(input, COPIES_MAX);
        uint64_t bytes_max = 1 + next_byte(input);
        uint64_t bytes = 0;

        kvti_payload_cut(payload, &cut, copies_max, bytes_max, chunk);
        kvti_assert(chunk->count > 0 && chunk->count <= copies_max);
        for (uint32_t i = 0; i < chunk->count; i++) {
            const struct kvti_copy *copy = &chunk->copies[i];

            kvti_assert(copy->length > 0);
            /* No two in a row that could have been one. */
            kvti_assert(i == 0 ||
                        copy[-1].local + copy[-1].length != copy->local ||
                        copy[-1].peer + copy[-1].length != copy->peer);
            add_moves(&got,
                      group_of(chunk->local_kind, chunk->local_device,
                               chunk->peer_kind, chunk->peer_device),
                      copy->local, copy->peer, copy->length);
            bytes += copy->length;
        }
        kvti_assert(bytes == chunk->bytes && bytes <= bytes_max);
    }
    kvti_assert(cut.merged < payload->count);
    kvti_assert(got.count == want->count &&
                memcmp(got.items, want->items, got.count * sizeof *got.items) ==
                    0);
    free(chunk);
}

static void check_uses(struct input *input, const struct kvti_payload *payload,
                       const struct moves *moves)
{
    uint64_t addr = 60 + next_byte(input);
    uint64_t length = next_below(input, 20);
    uint32_t kind = next_byte(input) & 1;
    bool hit = false;

    for (size_t i = 0; i < moves->count; i++) {
        const struct move *move = &moves->items[i];

        hit = hit || (move->local >= addr && move->local - addr < length &&
                      move->group >> 32 == group_of(kind, 0, 0, 0) >> 32);
    }
    kvti_assert(kvti_payload_uses(payload, addr, length, kind, 0) == hit);
}

/* False when a run was spoilt, and refused as it must be. */
static bool make_layout(struct input *input, struct side *side,
                        const struct kvti_regions *regions)
{
    bool spoil;
    int code;

    read_runs(input, side);
    spoil = next_byte(input) >= 250;
    if (spoil) {
        spoil_run(input, &side->runs[next_below(input, side->run_count)]);
    }
    code = kvti_layout_new(side->runs, side->run_count, regions, &side->layout,
                           NULL);
    kvti_assert(code == (spoil ? KVT_EINVAL : KVT_OK));
    return !spoil;
}

static void check_transfer(struct input *input, struct side *local,
                           struct side *peer)
{
    static struct moves moves;
    size_t count = 1 + next_below(input, ITEMS_MAX);
    struct kvti_payload payload;
    int want;
    int code;

    read_indices(input, local, count);
    read_indices(input, peer, count);
    want = foretell(local, peer, &moves);
    code = kvti_payload_blocks(local->layout, &local->indices, peer->layout,
                               &peer->indices, &payload, NULL);
    kvti_assert(code == want);
    if (code == KVT_OK) {
        kvti_assert(payload.bytes == moves.count && payload.count == count);
        check_cut(input, &payload, &moves);
        check_uses(input, &payload, &moves);
        kvti_payload_fini(&payload);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct side local;
    static struct side peer;
    struct input input = {.at = data, .left = size};
    struct kvti_regions regions = {0};

    kvti_assert(kvti_regions_reserve(&regions, 4) == KVT_OK);
    for (uint32_t i = 0; i < 4; i++) {
        const struct kvti_mem mem = {
            .length = UINT64_MAX, .kind = i & 1, .device = i >> 1};

        kvti_regions_add(&regions, &mem);
    }
    kvti_regions_update(&regions, NULL, NULL);
    local.layout = NULL;
    peer.layout = NULL;
    if (make_layout(&input, &local, &regions) &&
        make_layout(&input, &peer, &regions)) {
        check_transfer(&input, &local, &peer);
    }
    kvti_layout_unref(local.layout);
    kvti_layout_unref(peer.layout);
    kvti_regions_fini(&regions);
    return 0;
}
