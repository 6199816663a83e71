/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making a payload runs on the caller's thread and costs one pass over the
 * indices: they are copied as pairs with the largest one remembered, and only
 * that one is compared with the layout. Addresses are worked out by the
 * control thread, chunk by chunk, when the payload is cut (cut.c).
 *
 * Invariant: every index of a payload is below its layout's block_count, both
 * blocks of a pair have the same length, and no address wraps.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cursor.h"
#include "diag.h"
#include "layout.h"

/* Pairs written for one side before the other side's turn: 16 KiB of wide
 * pairs, so that the second side finds them in the first-level cache. */
#define TILE_PAIRS 1024

#define INDEX_TYPES 4

static const char *const side_names[] = {"local", "peer"};

/* ------------------------------------------------------------------ indices */

/* NOLINTBEGIN(bugprone-macro-parentheses): a type cannot have any. */
/*
 * Copies `count` indices into every second slot and returns the largest.
 * Negative ones become huge, and so are found by the same comparison; that is
 * also why the maximum is kept in 64 bits whatever the slot.
 */
#define DEFINE_CONVERT(name, type, slot)                                       \
    static uint64_t name(const type *from, size_t count, slot *to)             \
    {                                                                          \
        uint64_t largest = 0;                                                  \
                                                                               \
        for (size_t i = 0; i < count; i++) {                                   \
            uint64_t index = (uint64_t)from[i];                                \
                                                                               \
            largest = index > largest ? index : largest;                       \
            to[2 * i] = (slot)index;                                           \
        }                                                                      \
        return largest;                                                        \
    }

DEFINE_CONVERT(convert_u32_to_32, uint32_t, uint32_t)
DEFINE_CONVERT(convert_i32_to_32, int32_t, uint32_t)
DEFINE_CONVERT(convert_u64_to_32, uint64_t, uint32_t)
DEFINE_CONVERT(convert_i64_to_32, int64_t, uint32_t)
DEFINE_CONVERT(convert_u32_to_64, uint32_t, uint64_t)
DEFINE_CONVERT(convert_i32_to_64, int32_t, uint64_t)
DEFINE_CONVERT(convert_u64_to_64, uint64_t, uint64_t)
DEFINE_CONVERT(convert_i64_to_64, int64_t, uint64_t)
/* NOLINTEND(bugprone-macro-parentheses) */

static uint64_t convert32(const struct kvt_indices *indices, size_t first,
                          size_t count, uint32_t *to)
{
    const void *data = indices->data;

    switch (indices->type) {
    case KVT_INDEX_U32:
        return convert_u32_to_32((const uint32_t *)data + first, count, to);
    case KVT_INDEX_I32:
        return convert_i32_to_32((const int32_t *)data + first, count, to);
    case KVT_INDEX_U64:
        return convert_u64_to_32((const uint64_t *)data + first, count, to);
    default:
        return convert_i64_to_32((const int64_t *)data + first, count, to);
    }
}

static uint64_t convert64(const struct kvt_indices *indices, size_t first,
                          size_t count, uint64_t *to)
{
    const void *data = indices->data;

    switch (indices->type) {
    case KVT_INDEX_U32:
        return convert_u32_to_64((const uint32_t *)data + first, count, to);
    case KVT_INDEX_I32:
        return convert_i32_to_64((const int32_t *)data + first, count, to);
    case KVT_INDEX_U64:
        return convert_u64_to_64((const uint64_t *)data + first, count, to);
    default:
        return convert_i64_to_64((const int64_t *)data + first, count, to);
    }
}

static void convert_pairs(const struct kvt_indices *const indices[2],
                          size_t count, bool wide, void *memory,
                          uint64_t ret_largest[2])
{
    uint64_t largest[2] = {0, 0};

    for (size_t first = 0; first < count; first += TILE_PAIRS) {
        size_t left = count - first;
        size_t tile = left < TILE_PAIRS ? left : TILE_PAIRS;

        for (size_t side = KVTI_LOCAL; side <= KVTI_PEER; side++) {
            size_t slot = 2 * first + side;
            uint64_t seen = wide ? convert64(indices[side], first, tile,
                                             (uint64_t *)memory + slot)
                                 : convert32(indices[side], first, tile,
                                             (uint32_t *)memory + slot);

            largest[side] = seen > largest[side] ? seen : largest[side];
        }
    }
    memcpy(ret_largest, largest, sizeof largest);
}

static size_t index_size(uint32_t type)
{
    return type == KVT_INDEX_U32 || type == KVT_INDEX_I32 ? sizeof(uint32_t)
                                                          : sizeof(uint64_t);
}

static int check_indices(const struct kvt_indices *indices, enum kvti_side side,
                         struct kvt_error *err)
{
    size_t align;

    if (indices == NULL || indices->data == NULL) {
        return kvti_fail(err, KVT_EINVAL, "the %s indices are NULL",
                         side_names[side]);
    }
    if (indices->type >= INDEX_TYPES) {
        return kvti_fail(err, KVT_EINVAL,
                         "the %s indices have type %" PRIu32
                         "; use one of enum kvt_index_type",
                         side_names[side], indices->type);
    }
    align = index_size(indices->type);
    if ((uintptr_t)indices->data % align != 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "the %s indices are not aligned to %zu bytes",
                         side_names[side], align);
    }
    return KVT_OK;
}

bool kvti_few_indices(const struct kvt_indices *from, struct kvti_few *ret)
{
    if (check_indices(from, KVTI_LOCAL, NULL) != KVT_OK ||
        from->count > KVTI_FEW_INDICES) {
        return false;
    }
    ret->indices = *from;
    ret->indices.data = ret->data;
    memcpy(ret->data, from->data, (size_t)from->count * index_size(from->type));
    return true;
}

static uint64_t index_at(const struct kvt_indices *indices, size_t at)
{
    const void *data = indices->data;

    switch (indices->type) {
    case KVT_INDEX_U32:
        return ((const uint32_t *)data)[at];
    case KVT_INDEX_I32:
        return (uint64_t)((const int32_t *)data)[at];
    case KVT_INDEX_U64:
        return ((const uint64_t *)data)[at];
    default:
        return (uint64_t)((const int64_t *)data)[at];
    }
}

/* Finds the first index that is out of range, for the error's text. */
static int fail_index(const struct kvt_indices *indices, enum kvti_side side,
                      uint64_t largest, uint64_t block_count,
                      struct kvt_error *err)
{
    bool is_signed = indices->type == KVT_INDEX_I32 ||
                     indices->type == KVT_INDEX_I64;
    uint64_t value = largest;
    size_t at = 0;

    while (at < indices->count && index_at(indices, at) < block_count) {
        at++;
    }
    /* Not found when another thread of the caller has changed the array in
     * between; what counts is the copy, and the copy is refused. */
    if (at < indices->count) {
        value = index_at(indices, at);
    }
    if (is_signed && (int64_t)value < 0) {
        return kvti_fail(err, KVT_ERANGE,
                         "%s index %zu is %" PRId64
                         "; the layout has the blocks 0 to %" PRIu64,
                         side_names[side], at, (int64_t)value, block_count - 1);
    }
    return kvti_fail(err, KVT_ERANGE,
                     "%s index %zu is %" PRIu64
                     "; the layout has the blocks 0 to %" PRIu64,
                     side_names[side], at, value, block_count - 1);
}

/* ------------------------------------------------------------ block payload */

/* Compares the lengths of each pair and adds them up. */
static int add_mixed_lengths(struct kvti_payload *payload,
                             struct kvt_error *err)
{
    struct kvti_cursor local = {.layout = payload->local};
    struct kvti_cursor peer = {.layout = payload->peer};
    uint64_t bytes = 0;

    for (uint64_t i = 0; i < payload->count; i++) {
        uint64_t ours = kvti_cursor_run(&local,
                                        kvti_pair_index(payload, i, KVTI_LOCAL))
                            ->block_bytes;
        uint64_t theirs = kvti_cursor_run(
                              &peer, kvti_pair_index(payload, i, KVTI_PEER))
                              ->block_bytes;

        if (ours != theirs) {
            return kvti_fail(err, KVT_EMISMATCH,
                             "pair %" PRIu64 ": local block %" PRIu64
                             " has %" PRIu64 " bytes, peer block %" PRIu64
                             " has %" PRIu64 "; they must be equal",
                             i, kvti_pair_index(payload, i, KVTI_LOCAL), ours,
                             kvti_pair_index(payload, i, KVTI_PEER), theirs);
        }
        if (__builtin_add_overflow(bytes, ours, &bytes)) {
            return kvti_fail(err, KVT_ERANGE,
                             "the blocks have 2^64 bytes or more; ask for "
                             "less than the %" PRIu64 " pairs at once",
                             payload->count);
        }
    }
    payload->bytes = bytes;
    return KVT_OK;
}

static int set_bytes(struct kvti_payload *payload, struct kvt_error *err)
{
    uint64_t ours = payload->local->block_bytes;
    uint64_t theirs = payload->peer->block_bytes;

    if (ours == 0 || theirs == 0) {
        return add_mixed_lengths(payload, err);
    }
    if (ours != theirs) {
        return kvti_fail(err, KVT_EMISMATCH,
                         "local blocks have %" PRIu64
                         " bytes, the peer's have %" PRIu64
                         "; they must be equal",
                         ours, theirs);
    }
    if (__builtin_mul_overflow(payload->count, ours, &payload->bytes)) {
        return kvti_fail(err, KVT_ERANGE,
                         "the blocks have 2^64 bytes or more; ask for less "
                         "than the %" PRIu64 " pairs at once",
                         payload->count);
    }
    return KVT_OK;
}

static size_t pair_bytes(const struct kvti_payload *payload)
{
    return payload->wide ? 2 * sizeof(uint64_t) : 2 * sizeof(uint32_t);
}

static uint32_t pair_class(const struct kvti_payload *payload, uint64_t item,
                           enum kvti_side side, struct kvti_cursor *cursor)
{
    const struct kvti_layout *layout = cursor->layout;
    const struct kvt_run *run = kvti_cursor_run(
        cursor, kvti_pair_index(payload, item, side));

    return layout->class[run - layout->runs];
}

/*
 * One stable pass of a counting sort, by the class of one side. `*spare` has
 * room for the pairs and changes places with them.
 */
static int group_side(struct kvti_payload *payload, enum kvti_side side,
                      void **spare)
{
    struct kvti_layout *layout = side == KVTI_LOCAL ? payload->local
                                                    : payload->peer;
    struct kvti_cursor cursor = {.layout = layout};
    size_t size = pair_bytes(payload);
    const unsigned char *from = payload->of.memory;
    unsigned char *to = *spare;
    uint64_t *starts;

    if (layout->class_count == 1) {
        return KVT_OK;
    }
    starts = calloc((size_t)layout->class_count + 1, sizeof *starts);
    if (starts == NULL) {
        return KVT_ENOMEM;
    }
    for (uint64_t i = 0; i < payload->count; i++) {
        starts[pair_class(payload, i, side, &cursor) + 1]++;
    }
    for (uint32_t i = 1; i < layout->class_count; i++) {
        starts[i] += starts[i - 1];
    }
    for (uint64_t i = 0; i < payload->count; i++) {
        uint64_t at = starts[pair_class(payload, i, side, &cursor)]++;

        memcpy(to + at * size, from + i * size, size);
    }
    *spare = payload->of.memory;
    payload->of.memory = to;
    free(starts);
    return KVT_OK;
}

/* Sorts by the less important side first: the second pass keeps its order. */
static int group_pairs(struct kvti_payload *payload)
{
    void *spare;
    int code;

    if (payload->local->one_kind && payload->peer->one_kind) {
        return KVT_OK;
    }
    spare = malloc(payload->count * pair_bytes(payload));
    if (spare == NULL) {
        return KVT_ENOMEM;
    }
    code = group_side(payload, KVTI_PEER, &spare);
    if (code == KVT_OK) {
        code = group_side(payload, KVTI_LOCAL, &spare);
    }
    free(spare);
    return code;
}

static int check_pairs(const struct kvt_indices *const indices[2],
                       struct kvt_error *err)
{
    for (unsigned side = KVTI_LOCAL; side <= KVTI_PEER; side++) {
        int code = check_indices(indices[side], (enum kvti_side)side, err);

        if (code != KVT_OK) {
            return code;
        }
    }
    if (indices[KVTI_LOCAL]->count != indices[KVTI_PEER]->count) {
        return kvti_fail(err, KVT_EMISMATCH,
                         "there are %" PRIu64 " local indices and %" PRIu64
                         " peer indices; give as many of each",
                         indices[KVTI_LOCAL]->count, indices[KVTI_PEER]->count);
    }
    if (indices[KVTI_LOCAL]->count == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "there are no indices; give at least one pair");
    }
    return KVT_OK;
}

/* Sets count, wide and the pairs; what it has allocated is freed by fini. */
static int take_pairs(struct kvti_payload *payload,
                      const struct kvt_indices *const indices[2],
                      struct kvt_error *err)
{
    const struct kvti_layout *layouts[2] = {payload->local, payload->peer};
    const uint64_t narrow_max = UINT64_C(1) << 32;
    uint64_t largest[2];

    payload->count = indices[KVTI_LOCAL]->count;
    payload->wide = payload->local->block_count > narrow_max ||
                    payload->peer->block_count > narrow_max;
    if (payload->count <= SIZE_MAX / 2 / pair_bytes(payload)) {
        payload->of.memory = malloc(payload->count * pair_bytes(payload));
    }
    if (payload->of.memory == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %" PRIu64 " pairs",
                         payload->count);
    }
    convert_pairs(indices, (size_t)payload->count, payload->wide,
                  payload->of.memory, largest);
    for (unsigned side = KVTI_LOCAL; side <= KVTI_PEER; side++) {
        if (largest[side] >= layouts[side]->block_count) {
            return fail_index(indices[side], (enum kvti_side)side,
                              largest[side], layouts[side]->block_count, err);
        }
    }
    return KVT_OK;
}

int kvti_payload_blocks(struct kvti_layout *local,
                        const struct kvt_indices *local_indices,
                        struct kvti_layout *peer,
                        const struct kvt_indices *peer_indices,
                        struct kvti_payload *ret, struct kvt_error *err)
{
    const struct kvt_indices *const indices[2] = {local_indices, peer_indices};
    struct kvti_payload payload = {.local = local, .peer = peer};
    int code = check_pairs(indices, err);

    if (code != KVT_OK) {
        return code;
    }
    kvti_layout_ref(local);
    kvti_layout_ref(peer);
    code = take_pairs(&payload, indices, err);
    if (code == KVT_OK) {
        code = set_bytes(&payload, err);
    }
    if (code == KVT_OK && group_pairs(&payload) != KVT_OK) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %" PRIu64 " pairs",
                         payload.count);
    }
    if (code != KVT_OK) {
        kvti_payload_fini(&payload);
        return code;
    }
    *ret = payload;
    return KVT_OK;
}

/* ------------------------------------------------------------------- pieces */

static int check_piece(const struct kvt_copy *piece, size_t at,
                       struct kvt_error *err)
{
    if (piece->local_kind > KVT_VRAM || piece->peer_kind > KVT_VRAM) {
        return kvti_fail(err, KVT_EINVAL,
                         "piece %zu has kinds %" PRIu32 " and %" PRIu32
                         "; use KVT_DRAM or KVT_VRAM",
                         at, piece->local_kind, piece->peer_kind);
    }
    if (piece->local_addr > UINT64_MAX - piece->length ||
        piece->peer_addr > UINT64_MAX - piece->length) {
        return kvti_fail(
            err, KVT_EINVAL,
            "piece %zu ends past the top of the address space: "
            "%" PRIu64 " bytes from local 0x%" PRIx64 ", peer 0x%" PRIx64,
            at, piece->length, piece->local_addr, piece->peer_addr);
    }
    return KVT_OK;
}

static int order_pieces(const struct kvt_copy *a, const struct kvt_copy *b)
{
    const uint32_t left[] = {a->local_kind, a->local_device, a->peer_kind,
                             a->peer_device};
    const uint32_t right[] = {b->local_kind, b->local_device, b->peer_kind,
                              b->peer_device};

    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        if (left[i] != right[i]) {
            return left[i] < right[i] ? -1 : 1;
        }
    }
    return 0;
}

/* Merges two sorted neighbours; of equal pieces the left one's come first. */
static void merge_halves(const struct kvt_copy *from, size_t left_count,
                         size_t count, struct kvt_copy *to)
{
    size_t left = 0;
    size_t right = left_count;

    for (size_t i = 0; i < count; i++) {
        bool take_left = left < left_count &&
                         (right == count ||
                          order_pieces(&from[left], &from[right]) <= 0);

        to[i] = take_left ? from[left++] : from[right++];
    }
}

/* A stable merge sort from the bottom up: qsort() promises no stability. */
static int group_pieces(struct kvt_copy **pieces, size_t count)
{
    struct kvt_copy *from = *pieces;
    struct kvt_copy *to = calloc(count, sizeof *to);

    if (to == NULL) {
        return KVT_ENOMEM;
    }
    for (size_t width = 1; width < count; width *= 2) {
        struct kvt_copy *swap = from;

        for (size_t at = 0; at < count; at += 2 * width) {
            size_t left = count - at;
            size_t half = left < width ? left : width;
            size_t whole = left < 2 * width ? left : 2 * width;

            merge_halves(from + at, half, whole, to + at);
        }
        from = to;
        to = swap;
    }
    free(to);
    *pieces = from;
    return KVT_OK;
}

/* Copies what has a length; returns KVT_OK, or why a piece is refused. */
static int take_pieces(const struct kvt_copy *copies, size_t count,
                       struct kvt_copy *pieces, struct kvti_payload *payload,
                       bool *ret_mixed, struct kvt_error *err)
{
    bool mixed = false;

    for (size_t i = 0; i < count; i++) {
        /* What is checked is what is kept, whatever the caller's other
         * threads do to the array meanwhile. */
        const struct kvt_copy piece = copies[i];
        int code;

        if (piece.length == 0) {
            continue;
        }
        code = check_piece(&piece, i, err);
        if (code != KVT_OK) {
            return code;
        }
        if (__builtin_add_overflow(payload->bytes, piece.length,
                                   &payload->bytes)) {
            return kvti_fail(err, KVT_ERANGE,
                             "the pieces up to piece %zu have 2^64 bytes or "
                             "more; ask for less at once",
                             i);
        }
        if (payload->count == 0 || piece.local_addr < payload->lo) {
            payload->lo = piece.local_addr;
        }
        if (piece.local_addr + piece.length > payload->hi) {
            payload->hi = piece.local_addr + piece.length;
        }
        pieces[payload->count] = piece;
        mixed = mixed || order_pieces(&pieces[0], &piece) != 0;
        payload->count++;
    }
    if (payload->count == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "there is nothing to copy: each of the %zu pieces "
                         "has length 0",
                         count);
    }
    *ret_mixed = mixed;
    return KVT_OK;
}

int kvti_payload_pieces(const struct kvt_copy *copies, size_t count,
                        struct kvti_payload *ret, struct kvt_error *err)
{
    struct kvti_payload payload = {0};
    struct kvt_copy *pieces;
    bool mixed = false;
    int code;

    if (copies == NULL || count == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "there are no pieces; give at least one");
    }
    pieces = calloc(count, sizeof *pieces);
    if (pieces == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %zu pieces", count);
    }
    code = take_pieces(copies, count, pieces, &payload, &mixed, err);
    if (code == KVT_OK && mixed &&
        group_pieces(&pieces, (size_t)payload.count) != KVT_OK) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory for %zu pieces", count);
    }
    if (code != KVT_OK) {
        free(pieces);
        return code;
    }
    payload.of.pieces = pieces;
    *ret = payload;
    return KVT_OK;
}

void kvti_payload_fini(struct kvti_payload *payload)
{
    if (payload == NULL) {
        return;
    }
    kvti_layout_unref(payload->local);
    kvti_layout_unref(payload->peer);
    free(payload->of.memory);
    *payload = (struct kvti_payload){0};
}
