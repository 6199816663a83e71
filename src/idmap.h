/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ids that are never reused, and names, for objects that come and go. An id is
 * a serial number above a table index, so a stale id never finds the index's
 * next owner. The owner locks.
 */
#ifndef KVTI_IDMAP_H
#define KVTI_IDMAP_H

#include <stddef.h>
#include <stdint.h>

/* 2^20 objects at once; 2^44 in a life. */
#define KVTI_ID_INDEX_BITS 20

struct kvti_idmap_entry {
    uint64_t id; /* 0: free */
    void *object;
    uint32_t next_free; /* index + 1, or 0 */
};

struct kvti_idmap {
    struct kvti_idmap_entry *entries;
    uint32_t capacity;
    uint32_t used; /* entries ever taken */
    uint32_t free; /* index + 1 of the first free one below `used`, or 0 */
    uint32_t count;
    uint64_t serial;
};

void kvti_idmap_fini(struct kvti_idmap *map);

/* A new id, or 0 when out of memory or indices. */
uint64_t kvti_idmap_add(struct kvti_idmap *map, void *object);
void *kvti_idmap_get(const struct kvti_idmap *map, uint64_t id);
void kvti_idmap_remove(struct kvti_idmap *map, uint64_t id);

/* A name on a side, embedded in the object it names. */
struct kvti_name {
    struct kvti_name *next;
    uint64_t hash;
    uint64_t side;
    char *text;
};

struct kvti_names {
    struct kvti_name **buckets;
    size_t bucket_count; /* a power of two, or 0 */
    size_t count;
};

void kvti_names_fini(struct kvti_names *names); /* not the names themselves */

/* Room for one more; so that an add cannot fail. */
int kvti_names_reserve(struct kvti_names *names);
/* Copies `text`; KVT_ENOMEM leaves *name unset. Does not add. */
int kvti_name_init(struct kvti_name *name, uint64_t side, const char *text);
void kvti_name_fini(struct kvti_name *name);
/* Takes `text` as it is, whose owner keeps it while the name is in a table:
 * without kvti_name_fini(). */
void kvti_name_borrow(struct kvti_name *name, uint64_t side, char *text);
void kvti_names_add(struct kvti_names *names, struct kvti_name *name);
/* Of equal ones the last that was added. */
struct kvti_name *kvti_names_find(const struct kvti_names *names, uint64_t side,
                                  const char *text);
/* Harmless when the name is not in the table. */
void kvti_names_remove(struct kvti_names *names, struct kvti_name *name);

#endif /* KVTI_IDMAP_H */
