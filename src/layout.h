/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts of strided runs, and cutting a transfer into chunks of merged
 * copies. Pure arithmetic in 64 bits: no clock, no log, no lock.
 */
#ifndef KVTI_LAYOUT_H
#define KVTI_LAYOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine.h"
#include "region.h"

struct kvti_layout {
    _Atomic uint32_t refs;
    uint32_t run_count;
    uint64_t block_count;
    uint64_t block_bytes;  /* of every run, or 0 when they differ */
    uint64_t run_blocks;   /* blocks of every run, or 0 when they differ */
    bool one_kind;         /* all runs have the first one's kind and device */
    uint32_t class_count;  /* pairs of kind and device among the runs */
    const uint64_t *first; /* first[i]: index of run i's first block; one more
                            * entry, which is block_count */
    const uint32_t *class; /* class[i]: rank of run i's kind and device */
    struct kvt_run runs[]; /* then the arrays */
};

/*
 * Checks shapes (count, lengths, stride, wrapping) and that each run lies in
 * `regions`, then copies. One reference. Errors name the run's position.
 */
int kvti_layout_new(const struct kvt_run *runs, size_t count,
                    const struct kvti_regions *regions,
                    struct kvti_layout **ret, struct kvt_error *err);
void kvti_layout_ref(struct kvti_layout *layout);
void kvti_layout_unref(struct kvti_layout *layout); /* NULL is fine */

/* Whether every run lies in `regions`; used again after a reload. */
int kvti_layout_check(const struct kvti_layout *layout,
                      const struct kvti_regions *regions,
                      struct kvt_error *err);

/* Whether any block of the layout shares a byte with the region; exact, gaps
 * between blocks do not count. */
bool kvti_layout_overlaps(const struct kvti_layout *layout, uint64_t addr,
                          uint64_t length, uint32_t kind, uint32_t device);

/* The position of the run that holds a block below block_count. */
uint32_t kvti_layout_run(const struct kvti_layout *layout, uint64_t index);

/* The run of a block; `index` must be below block_count. */
const struct kvt_run *kvti_layout_block(const struct kvti_layout *layout,
                                        uint64_t index, uint64_t *ret_addr);

/*
 * What a transfer moves: block pairs of two layouts, or explicit pieces.
 * Immutable once made; owned by the transfer; pieces and pairs of mixed kinds
 * are grouped by (local kind, device, peer kind, device) so that each group is
 * contiguous, otherwise in the caller's order.
 */
struct kvti_payload {
    struct kvti_layout *local; /* both NULL: pieces */
    struct kvti_layout *peer;
    union {
        const uint32_t *pairs32; /* local, peer, local, peer, … */
        const uint64_t *pairs64;
        const struct kvt_copy *pieces;
        void *memory; /* for free() */
    } of;
    uint64_t count;
    uint64_t bytes;
    uint64_t lo; /* pieces: our side lies in [lo, hi) */
    uint64_t hi;
    bool wide; /* pairs64 */
};

/*
 * Checks indices against the layouts and makes the payload, which refs both.
 * Errors: EMISMATCH (counts, block lengths), ERANGE (text: which side, which
 * position, which value, how many blocks), EINVAL (none, type, NULL), ENOMEM.
 * No error leaves anything behind. Costs one pass over the indices.
 */
int kvti_payload_blocks(struct kvti_layout *local,
                        const struct kvt_indices *local_indices,
                        struct kvti_layout *peer,
                        const struct kvt_indices *peer_indices,
                        struct kvti_payload *ret, struct kvt_error *err);

/* Copies of a few indices, for who must not touch the caller's memory later. */
#define KVTI_FEW_INDICES 16

struct kvti_few {
    struct kvt_indices indices; /* in data */
    uint64_t data[KVTI_FEW_INDICES];
};

/* False where they are not few, or not right: kvti_payload_blocks() says why. */
bool kvti_few_indices(const struct kvt_indices *from, struct kvti_few *ret);

/* The same for pieces; addresses are checked for wrapping here, for being
 * registered by the caller (kvti_regions_cover). Zero lengths are dropped. */
int kvti_payload_pieces(const struct kvt_copy *copies, size_t count,
                        struct kvti_payload *ret, struct kvt_error *err);

void kvti_payload_fini(struct kvti_payload *payload);

/* Whether a byte of our side lies in the region. Exact; costs a pass over the
 * items where the layout as a whole touches the region. */
bool kvti_payload_uses(const struct kvti_payload *payload, uint64_t addr,
                       uint64_t length, uint32_t kind, uint32_t device);

/* Where cutting stands. Zeroed: at the start. */
struct kvti_cut {
    uint64_t item;   /* pairs or pieces used up */
    uint64_t offset; /* bytes of the current item already used */
    uint64_t merged; /* items that joined their predecessor's copy so far */
    uint64_t bytes;  /* cut off so far */
};

static inline bool kvti_cut_at_end(const struct kvti_cut *cut,
                                   const struct kvti_payload *payload)
{
    return cut->item == payload->count;
}

/*
 * Fills count, bytes, kinds and copies of `chunk` with the next part: at most
 * `copies_max` copies (which `chunk` must have room for) and `bytes_max`
 * bytes, one pair of kinds, items adjacent on both sides merged. An item longer
 * than what is left is split. Advances the cut. The payload must not be at its
 * end; the chunk is never empty.
 */
void kvti_payload_cut(const struct kvti_payload *payload, struct kvti_cut *cut,
                      uint32_t copies_max, uint64_t bytes_max,
                      struct kvti_chunk *chunk);

/* A chunk below this costs more to hand over than its copy takes. */
#define KVTI_SHARE_MIN (UINT64_C(128) << 10)

/*
 * The `bytes_max` for the next chunk where `share` of them are to be had from
 * what is left: large ones first, then smaller and smaller ones, so that
 * several threads are busy with a small transfer and come to the end of a large
 * one together. A share of 0 or 1 leaves bytes_max as it is.
 */
uint64_t kvti_cut_share(const struct kvti_payload *payload,
                        const struct kvti_cut *cut, uint32_t share,
                        uint64_t bytes_max);

#endif /* KVTI_LAYOUT_H */
