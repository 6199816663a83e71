/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sets of registered memory: ours (counted) and a peer's (from its metadata).
 * Pure data; the owner locks.
 */
#ifndef KVTI_REGION_H
#define KVTI_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvt/kvt.h>

enum kvti_mem_flag {
    KVTI_MEM_FD = 1u << 0,     /* fd, fd_offset, dev, ino are valid */
    KVTI_MEM_SEALED = 1u << 1, /* a memfd that can never shrink, no holes and
                                * no huge pages: memcpy cannot fault */
    KVTI_MEM_ANON = 1u << 2    /* private anonymous: memcpy from it is safe */
};

/* One region: the core's record, the engine's cookie, the metadata's entry. */
struct kvti_mem {
    uint64_t addr;
    uint64_t length;
    uint32_t kind;
    uint32_t device;
    uint32_t flags; /* enum kvti_mem_flag */
    int32_t fd;     /* number in the owner's process */
    uint64_t fd_offset;
    uint64_t fd_dev;
    uint64_t fd_ino;
    uint32_t gate_slot; /* local engine: the region's entry in the gate */
    uint32_t gate_gen;  /* local engine: never 0 while open */
    uint64_t key_hash;  /* a peer's as NIXL has it: of the backends' keys */
    void *cookie;       /* the engine's, ours only */
    uint32_t refs;      /* registrations of this exact region, ours only */
    uint32_t busy;      /* ours only: a call on it is not finished */
    uint32_t gone;      /* for kvti_regions_sweep() */
    uint64_t reach;     /* kvti_regions_update(): the highest end of this and
                         * all earlier entries of its kind and device */
};

/* The bytes that some region covers: sorted, disjoint, touching ones joined. */
struct kvti_span {
    uint64_t lo;
    uint64_t hi; /* one past the last byte; never wraps */
    uint32_t kind;
    uint32_t device;
};

struct kvti_regions {
    struct kvti_mem *mems; /* sorted by (kind, device, addr, length) */
    size_t count;
    size_t capacity;
    struct kvti_span *spans;
    size_t span_count;
    size_t span_capacity;
};

/* The order of `mems`: below, equal to or above 0, as strcmp(). */
int kvti_mem_order(const struct kvti_mem *a, const struct kvti_mem *b);

void kvti_regions_fini(struct kvti_regions *set);

/* Room for `extra` more, so that the adds that follow cannot fail. */
int kvti_regions_reserve(struct kvti_regions *set, size_t extra);

/* The entry with exactly this address, length, kind and device, or NULL. */
struct kvti_mem *kvti_regions_find(const struct kvti_regions *set,
                                   uint64_t addr, uint64_t length,
                                   uint32_t kind, uint32_t device);

/* Adds without looking for an equal one; needs reserved room. The entry has a
 * length and does not wrap. Pointers into `mems` move. Call
 * kvti_regions_update() after a batch: cover and at know nothing before. */
struct kvti_mem *kvti_regions_add(struct kvti_regions *set,
                                  const struct kvti_mem *mem);
void kvti_regions_remove(struct kvti_regions *set, struct kvti_mem *mem);
/* Adds what only `more` has, in one pass; needs room reserved for all of it.
 * Neither set has two equal entries. Update afterwards, as after adds. */
void kvti_regions_join(struct kvti_regions *set,
                       const struct kvti_regions *more);
/* Takes out every entry whose `gone` is set, in one pass. */
void kvti_regions_sweep(struct kvti_regions *set);

/* Rebuilds the spans from the entries that `open` accepts (NULL: all).
 * Cannot fail. */
void kvti_regions_update(struct kvti_regions *set,
                         bool (*open)(const struct kvti_mem *mem, void *ctx),
                         void *ctx);

/* Whether all bytes are covered. A zero length or a wrapping end is not. */
bool kvti_regions_cover(const struct kvti_regions *set, uint64_t addr,
                        uint64_t length, uint32_t kind, uint32_t device);

/* The span that covers all bytes, or NULL. */
const struct kvti_span *kvti_regions_span(const struct kvti_regions *set,
                                          uint64_t addr, uint64_t length,
                                          uint32_t kind, uint32_t device);

/* The first entry that contains `addr`, open or not, or NULL. */
const struct kvti_mem *kvti_regions_at(const struct kvti_regions *set,
                                       uint64_t addr, uint32_t kind,
                                       uint32_t device);

#endif /* KVTI_REGION_H */
