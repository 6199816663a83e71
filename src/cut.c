/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cutting a payload into chunks, on the control thread. Nothing is allocated
 * and nothing can fail: the payload's maker has checked every item.
 */
#include "cursor.h"
#include "diag.h"
#include "layout.h"

#define SHARE_STEP (UINT64_C(64) << 10)

/* One item, resolved. */
struct part {
    uint64_t local;
    uint64_t peer;
    uint64_t length;
    uint32_t local_kind;
    uint32_t local_device;
    uint32_t peer_kind;
    uint32_t peer_device;
};

struct reader {
    const struct kvti_payload *payload;
    struct kvti_cursor local;
    struct kvti_cursor peer;
};

static void start_reader(struct reader *reader,
                         const struct kvti_payload *payload)
{
    *reader = (struct reader){.payload = payload,
                              .local.layout = payload->local,
                              .peer.layout = payload->peer};
}

static inline void read_pair(struct reader *reader, uint64_t item,
                             struct part *ret)
{
    uint64_t ours = kvti_pair_index(reader->payload, item, KVTI_LOCAL);
    uint64_t theirs = kvti_pair_index(reader->payload, item, KVTI_PEER);
    const struct kvt_run *local = kvti_cursor_run(&reader->local, ours);
    const struct kvt_run *peer = kvti_cursor_run(&reader->peer, theirs);

    ret->local = kvti_cursor_addr(&reader->local, ours);
    ret->peer = kvti_cursor_addr(&reader->peer, theirs);
    ret->length = local->block_bytes;
    ret->local_kind = local->kind;
    ret->local_device = local->device;
    ret->peer_kind = peer->kind;
    ret->peer_device = peer->device;
}

static inline void read_item(struct reader *reader, uint64_t item,
                             struct part *ret)
{
    const struct kvt_copy *piece;

    if (reader->payload->local != NULL) {
        read_pair(reader, item, ret);
        return;
    }
    piece = &reader->payload->of.pieces[item];
    ret->local = piece->local_addr;
    ret->peer = piece->peer_addr;
    ret->length = piece->length;
    ret->local_kind = piece->local_kind;
    ret->local_device = piece->local_device;
    ret->peer_kind = piece->peer_kind;
    ret->peer_device = piece->peer_device;
}

static inline bool fits_kinds(struct kvti_chunk *chunk, const struct part *part)
{
    if (chunk->count == 0) {
        chunk->local_kind = part->local_kind;
        chunk->local_device = part->local_device;
        chunk->peer_kind = part->peer_kind;
        chunk->peer_device = part->peer_device;
        return true;
    }
    return chunk->local_kind == part->local_kind &&
           chunk->local_device == part->local_device &&
           chunk->peer_kind == part->peer_kind &&
           chunk->peer_device == part->peer_device;
}

static inline bool continues(const struct kvti_copy *copy,
                             const struct part *part)
{
    return copy->local + copy->length == part->local &&
           copy->peer + copy->length == part->peer;
}

void kvti_payload_cut(const struct kvti_payload *payload, struct kvti_cut *cut,
                      uint32_t copies_max, uint64_t bytes_max,
                      struct kvti_chunk *chunk)
{
    struct kvti_cut at = *cut;
    struct reader reader;
    struct part part;
    uint64_t room = bytes_max;

    kvti_assert(at.item < payload->count && copies_max > 0 && bytes_max > 0);
    start_reader(&reader, payload);
    chunk->count = 0;
    while (at.item < payload->count && room > 0) {
        read_item(&reader, at.item, &part);
        if (!fits_kinds(chunk, &part)) {
            break;
        }
        part.local += at.offset;
        part.peer += at.offset;
        part.length -= at.offset;
        if (part.length > room) {
            at.offset += room;
            part.length = room;
        } else {
            at.offset = 0;
        }
        if (chunk->count > 0 &&
            continues(&chunk->copies[chunk->count - 1], &part)) {
            chunk->copies[chunk->count - 1].length += part.length;
            at.merged++;
        } else if (chunk->count == copies_max) {
            /* Only a chunk's first item can be a rest, and this is not it. */
            at.offset = 0;
            break;
        } else {
            chunk->copies[chunk->count++] = (struct kvti_copy){
                .local = part.local, .peer = part.peer, .length = part.length};
        }
        room -= part.length;
        at.item += at.offset == 0;
    }
    chunk->bytes = bytes_max - room;
    at.bytes += chunk->bytes;
    *cut = at;
}

uint64_t kvti_cut_share(const struct kvti_payload *payload,
                        const struct kvti_cut *cut, uint32_t share,
                        uint64_t bytes_max)
{
    uint64_t bytes;

    if (share < 2) {
        return bytes_max;
    }
    /* In steps, so that pages and the usual blocks are not split. */
    bytes = (payload->bytes - cut->bytes) / share / SHARE_STEP * SHARE_STEP;
    if (bytes < KVTI_SHARE_MIN) {
        bytes = KVTI_SHARE_MIN;
    }
    return bytes < bytes_max ? bytes : bytes_max;
}

bool kvti_payload_uses(const struct kvti_payload *payload, uint64_t addr,
                       uint64_t length, uint32_t kind, uint32_t device)
{
    struct reader reader;
    struct part part;
    uint64_t last;

    if (length == 0 ||
        (payload->local != NULL &&
         !kvti_layout_overlaps(payload->local, addr, length, kind, device))) {
        return false;
    }
    if (__builtin_add_overflow(addr, length - 1, &last)) {
        last = UINT64_MAX;
    }
    if (payload->local == NULL && (payload->hi <= addr || payload->lo > last)) {
        return false;
    }
    start_reader(&reader, payload);
    for (uint64_t i = 0; i < payload->count; i++) {
        read_item(&reader, i, &part);
        if (part.local_kind == kind && part.local_device == device &&
            part.local <= last && part.local + (part.length - 1) >= addr) {
            return true;
        }
    }
    return false;
}
