/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the KV cache of a model lies in memory. A pool has `regions` regions
 * (K and V of each layer, or one for each layer with MLA), a region is an
 * array of pages, and a slot is the place of one hash block of 512 tokens:
 * `pages` adjacent pages in each region. One page is one block of kvt.
 *
 *   region 0   | slot 0: page page page page | slot 1: page page page page | …
 *   region 1   | slot 0: page page page page | slot 1: page page page page | …
 */
#ifndef KVT_TOOLS_GEOMETRY_H
#define KVT_TOOLS_GEOMETRY_H

#include <stdbool.h>
#include <stdint.h>

#define GEOMETRY_TEXT_MAX 240

struct geometry {
    uint64_t regions;
    uint64_t pages; /* of one slot in one region */
    uint64_t page_bytes;
    uint64_t page_tokens; /* 0: plain blocks, no model */
};

/* Bytes of a slot in one region: adjacent in memory. */
uint64_t geometry_piece_bytes(const struct geometry *geometry);

/* Bytes of a hash block. */
uint64_t geometry_slot_bytes(const struct geometry *geometry);

/* kvt blocks of a hash block. */
uint64_t geometry_slot_pages(const struct geometry *geometry);

/* One region of plain blocks, each a hash block. */
void geometry_plain(uint64_t block_bytes, struct geometry *ret);

/*
 * The geometry of a model's KV cache on one of `tp` ranks (tensor parallel).
 * page_tokens 0: the model's own. False with a sentence in `error`.
 */
bool geometry_model(const char *name, uint64_t page_tokens, uint64_t tp,
                    struct geometry *ret, char error[GEOMETRY_TEXT_MAX]);

/* The name of model `index`, NULL past the last one. */
const char *geometry_model_name(unsigned int index);

#endif /* KVT_TOOLS_GEOMETRY_H */
