/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers of explicit pieces. The input is read as a list of pieces of two
 * kinds and two devices, some empty, some huge, some impossible. An oracle says
 * whether the list must be refused, and otherwise which bytes go where, in
 * which order; the chunks, however small, must move exactly that and be no
 * smaller than they have to be.
 */
#include <stdlib.h>
#include <string.h>

#include "diag.h"
#include "input.h"
#include "layout.h"

#define PIECES_MAX 24
#define COPIES_MAX 12
/* Chunks of one input at most: a piece may have 2^64 bytes. */
#define CHUNKS_MAX 300

__extension__ typedef unsigned __int128 u128;

/* What is moved, with neighbours joined: the same for every way of cutting. */
struct route {
    struct kvt_copy items[PIECES_MAX * CHUNKS_MAX];
    size_t count;
};

static bool same_group(const struct kvt_copy *a, const struct kvt_copy *b)
{
    return a->local_kind == b->local_kind &&
           a->local_device == b->local_device && a->peer_kind == b->peer_kind &&
           a->peer_device == b->peer_device;
}

static void add_move(struct route *route, const struct kvt_copy *move)
{
    struct kvt_copy *last = route->count > 0 ? &route->items[route->count - 1]
                                             : NULL;

    if (last != NULL && same_group(last, move) &&
        last->local_addr + last->length == move->local_addr &&
        last->peer_addr + last->length == move->peer_addr) {
        last->length += move->length;
        return;
    }
    kvti_assert(route->count < sizeof route->items / sizeof *route->items);
    route->items[route->count++] = *move;
}

/* ------------------------------------------------------------------- reading */

static void read_piece(struct input *input, struct kvt_copy *piece,
                       const struct kvt_copy *last)
{
    uint8_t way = next_byte(input);
    uint8_t kinds = next_byte(input);

    *piece = (struct kvt_copy){.local_addr = next_byte(input),
                               .peer_addr = next_byte(input),
                               .length = next_below(input, 12),
                               .local_kind = kinds & 1,
                               .local_device = kinds >> 1 & 1,
                               .peer_kind = kinds >> 2 & 1,
                               .peer_device = kinds >> 3 & 1};
    if (way < 128 && last != NULL) {
        /* Behind the last one, or nearly. */
        piece->local_addr = last->local_addr + last->length;
        piece->peer_addr = last->peer_addr + last->length + (way & 1);
        piece->local_kind = last->local_kind;
        piece->local_device = last->local_device;
        piece->peer_kind = last->peer_kind;
        piece->peer_device = last->peer_device;
    } else if (way >= 232) {
        piece->local_addr = next_number(input);
        piece->peer_addr = next_number(input);
        piece->length = next_number(input);
    } else if (way >= 228) {
        piece->local_kind = next_byte(input);
        piece->peer_kind = next_byte(input);
    }
}

/* -------------------------------------------------------------------- oracle */

static int order(const struct kvt_copy *a, const struct kvt_copy *b)
{
    u128 left = (u128)a->local_kind << 96 | (u128)a->local_device << 64 |
                (uint64_t)a->peer_kind << 32 | a->peer_device;
    u128 right = (u128)b->local_kind << 96 | (u128)b->local_device << 64 |
                 (uint64_t)b->peer_kind << 32 | b->peer_device;

    return (left > right) - (left < right);
}

/* The code that is to come; with KVT_OK the pieces that count, in the order in
 * which they go: an insertion sort, stable. */
static int foretell(const struct kvt_copy *pieces, size_t count,
                    struct kvt_copy *ret, size_t *ret_count, u128 *ret_bytes)
{
    *ret_count = 0;
    *ret_bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const struct kvt_copy *piece = &pieces[i];
        size_t at = *ret_count;

        if (piece->length == 0) {
            continue;
        }
        if (piece->local_kind > 1 || piece->peer_kind > 1 ||
            (u128)piece->local_addr + piece->length > UINT64_MAX ||
            (u128)piece->peer_addr + piece->length > UINT64_MAX) {
            return KVT_EINVAL;
        }
        *ret_bytes += piece->length;
        if (*ret_bytes > UINT64_MAX) {
            return KVT_ERANGE;
        }
        for (; at > 0 && order(&ret[at - 1], piece) > 0; at--) {
            ret[at] = ret[at - 1];
        }
        ret[at] = *piece;
        (*ret_count)++;
    }
    return *ret_count > 0 ? KVT_OK : KVT_EINVAL;
}

/* ------------------------------------------------------------------ checking */

static void check_share(struct input *input, const struct kvti_payload *payload,
                        const struct kvti_cut *cut)
{
    uint32_t share = next_byte(input);
    uint64_t most = next_number(input);
    uint64_t left = payload->bytes - cut->bytes;
    uint64_t got = kvti_cut_share(payload, cut, share, most);

    kvti_assert(got <= most);
    if (share < 2 || got == most) {
        return;
    }
    /* `share` of them are to be had, and no fewer of one step more. */
    kvti_assert(got >= KVTI_SHARE_MIN);
    kvti_assert(got == KVTI_SHARE_MIN || (u128)got * share <= left);
    kvti_assert((u128)(got + (UINT64_C(64) << 10)) * share > left);
}

static void take_chunk(const struct kvti_chunk *chunk, struct route *got)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < chunk->count; i++) {
        const struct kvti_copy *copy = &chunk->copies[i];
        const struct kvt_copy move = {.local_addr = copy->local,
                                      .peer_addr = copy->peer,
                                      .length = copy->length,
                                      .local_kind = chunk->local_kind,
                                      .local_device = chunk->local_device,
                                      .peer_kind = chunk->peer_kind,
                                      .peer_device = chunk->peer_device};

        kvti_assert(copy->length > 0);
        /* No two in a row that could have been one. */
        kvti_assert(i == 0 || copy[-1].local + copy[-1].length != copy->local ||
                    copy[-1].peer + copy[-1].length != copy->peer);
        bytes += copy->length;
        add_move(got, &move);
    }
    kvti_assert(bytes == chunk->bytes);
}

static bool next_fits_kinds(const struct kvti_payload *payload,
                            const struct kvti_cut *cut,
                            const struct kvti_chunk *chunk)
{
    const struct kvt_copy like = {.local_kind = chunk->local_kind,
                                  .local_device = chunk->local_device,
                                  .peer_kind = chunk->peer_kind,
                                  .peer_device = chunk->peer_device};

    return same_group(&payload->of.pieces[cut->item], &like);
}

static void check_cut(struct input *input, const struct kvti_payload *payload,
                      struct route *got)
{
    struct kvti_chunk *chunk = malloc(sizeof *chunk +
                                      COPIES_MAX * sizeof *chunk->copies);
    struct kvti_cut cut = {0};
    uint64_t bytes = 0;

    kvti_assert(chunk != NULL);
    got->count = 0;
    while (!kvti_cut_at_end(&cut, payload)) {
        uint32_t copies_max = 1 + (uint32_t)next_below(input, COPIES_MAX);
        uint64_t bytes_max = 1 + next_byte(input) % 40;

        if (payload->bytes / 256 >= bytes_max) {
            bytes_max = payload->bytes / 256 + 1;
        }
        check_share(input, payload, &cut);
        kvti_payload_cut(payload, &cut, copies_max, bytes_max, chunk);
        kvti_assert(chunk->count > 0 && chunk->count <= copies_max);
        kvti_assert(chunk->bytes <= bytes_max);
        take_chunk(chunk, got);
        bytes += chunk->bytes;
        kvti_assert(cut.bytes == bytes);
        /* It ends for a reason. */
        kvti_assert(kvti_cut_at_end(&cut, payload) ||
                    chunk->bytes == bytes_max || chunk->count == copies_max ||
                    !next_fits_kinds(payload, &cut, chunk));
    }
    kvti_assert(bytes == payload->bytes && cut.merged < payload->count);
    free(chunk);
}

static void check_uses(struct input *input, const struct kvti_payload *payload,
                       const struct kvt_copy *pieces, size_t count)
{
    for (size_t i = 0; i < 8; i++) {
        uint8_t way = next_byte(input);
        uint64_t addr = way < 240 ? next_byte(input) : next_number(input);
        uint64_t length = way < 240 ? next_below(input, 9) : next_number(input);
        uint32_t kind = way & 1;
        uint32_t device = way >> 1 & 1;
        bool want = false;

        for (size_t j = 0; j < count; j++) {
            const struct kvt_copy *piece = &pieces[j];

            want = want || (piece->local_kind == kind &&
                            piece->local_device == device &&
                            piece->local_addr < (u128)addr + length &&
                            addr < (u128)piece->local_addr + piece->length);
        }
        kvti_assert(kvti_payload_uses(payload, addr, length, kind, device) ==
                    (want && length > 0));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct route want_route;
    static struct route got_route;
    struct input input = {.at = data, .left = size};
    struct kvt_copy pieces[PIECES_MAX];
    struct kvt_copy want[PIECES_MAX];
    struct kvti_payload payload;
    struct kvt_error err;
    size_t count = next_below(&input, PIECES_MAX + 1);
    size_t left;
    u128 bytes;
    int code;

    for (size_t i = 0; i < count; i++) {
        read_piece(&input, &pieces[i], i > 0 ? &pieces[i - 1] : NULL);
    }
    code = foretell(pieces, count, want, &left, &bytes);
    kvti_assert(kvti_payload_pieces(pieces, count, &payload, &err) == code);
    if (code != KVT_OK) {
        kvti_assert(err.code == code && err.text[0] != '\0');
        return 0;
    }
    kvti_assert(payload.count == left && payload.bytes == bytes);
    want_route.count = 0;
    for (size_t i = 0; i < left; i++) {
        add_move(&want_route, &want[i]);
    }
    check_cut(&input, &payload, &got_route);
    kvti_assert(got_route.count == want_route.count &&
                memcmp(got_route.items, want_route.items,
                       got_route.count * sizeof *got_route.items) == 0);
    check_uses(&input, &payload, want, left);
    kvti_payload_fini(&payload);
    return 0;
}
