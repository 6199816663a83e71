/* SPDX-License-Identifier: Apache-2.0 */
#include "idmap.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "diag.h"

#define INDEX_MASK ((UINT64_C(1) << KVTI_ID_INDEX_BITS) - 1)

void kvti_idmap_fini(struct kvti_idmap *map)
{
    free(map->entries);
    *map = (struct kvti_idmap){0};
}

static int grow(struct kvti_idmap *map)
{
    uint32_t capacity = map->capacity == 0 ? 16 : map->capacity * 2;
    struct kvti_idmap_entry *entries;

    if (map->capacity > INDEX_MASK) {
        return KVT_EAGAIN;
    }
    entries = realloc(map->entries, capacity * sizeof *entries);
    if (entries == NULL) {
        return KVT_ENOMEM;
    }
    map->entries = entries;
    map->capacity = capacity;
    return KVT_OK;
}

uint64_t kvti_idmap_add(struct kvti_idmap *map, void *object)
{
    struct kvti_idmap_entry *entry;
    uint32_t index;

    if (map->free != 0) {
        index = map->free - 1;
        map->free = map->entries[index].next_free;
    } else {
        if (map->used == map->capacity && grow(map) != KVT_OK) {
            return 0;
        }
        index = map->used++;
    }
    entry = &map->entries[index];
    entry->id = ++map->serial << KVTI_ID_INDEX_BITS | index;
    entry->object = object;
    entry->next_free = 0;
    map->count++;
    return entry->id;
}

void *kvti_idmap_get(const struct kvti_idmap *map, uint64_t id)
{
    uint64_t index = id & INDEX_MASK;

    if (id == 0 || index >= map->used || map->entries[index].id != id) {
        return NULL;
    }
    return map->entries[index].object;
}

void kvti_idmap_remove(struct kvti_idmap *map, uint64_t id)
{
    uint32_t index = (uint32_t)(id & INDEX_MASK);

    kvti_assert(kvti_idmap_get(map, id) != NULL);
    map->entries[index].id = 0;
    map->entries[index].object = NULL;
    map->entries[index].next_free = map->free;
    map->free = index + 1;
    map->count--;
}

void kvti_names_fini(struct kvti_names *names)
{
    free(names->buckets);
    *names = (struct kvti_names){0};
}

static struct kvti_name **bucket(const struct kvti_names *names, uint64_t hash)
{
    return &names->buckets[hash & (names->bucket_count - 1)];
}

/* From the last to the first: of equal names the newest stays in front. */
static void move_chain(struct kvti_names *names, struct kvti_name *name)
{
    struct kvti_name *last = NULL;

    while (name != NULL) {
        struct kvti_name *next = name->next;

        name->next = last;
        last = name;
        name = next;
    }
    while (last != NULL) {
        struct kvti_name *next = last->next;

        kvti_names_add(names, last);
        last = next;
    }
}

int kvti_names_reserve(struct kvti_names *names)
{
    struct kvti_names bigger = {0};

    if (names->count < names->bucket_count) {
        return KVT_OK;
    }
    bigger.bucket_count = names->bucket_count == 0 ? 16
                                                   : names->bucket_count * 2;
    bigger.buckets = calloc(bigger.bucket_count,
                            sizeof(struct kvti_name *)); /* NOLINT */
    if (bigger.buckets == NULL) {
        return KVT_ENOMEM;
    }
    for (size_t i = 0; i < names->bucket_count; i++) {
        move_chain(&bigger, names->buckets[i]);
    }
    free(names->buckets);
    *names = bigger;
    return KVT_OK;
}

static uint64_t hash_name(uint64_t side, const char *text)
{
    return XXH3_64bits_withSeed(text, strlen(text), side);
}

int kvti_name_init(struct kvti_name *name, uint64_t side, const char *text)
{
    char *copy = strdup(text);

    if (copy == NULL) {
        return KVT_ENOMEM;
    }
    *name = (struct kvti_name){
        .side = side, .text = copy, .hash = hash_name(side, text)};
    return KVT_OK;
}

void kvti_name_borrow(struct kvti_name *name, uint64_t side, char *text)
{
    *name = (struct kvti_name){
        .side = side, .text = text, .hash = hash_name(side, text)};
}

void kvti_name_fini(struct kvti_name *name)
{
    free(name->text);
    *name = (struct kvti_name){0};
}

void kvti_names_add(struct kvti_names *names, struct kvti_name *name)
{
    struct kvti_name **head = bucket(names, name->hash);

    name->next = *head;
    *head = name;
    names->count++;
}

struct kvti_name *kvti_names_find(const struct kvti_names *names, uint64_t side,
                                  const char *text)
{
    uint64_t hash = hash_name(side, text);

    if (names->bucket_count == 0) {
        return NULL;
    }
    for (struct kvti_name *name = *bucket(names, hash); name != NULL;
         name = name->next) {
        if (name->hash == hash && name->side == side &&
            strcmp(name->text, text) == 0) {
            return name;
        }
    }
    return NULL;
}

void kvti_names_remove(struct kvti_names *names, struct kvti_name *name)
{
    if (names->bucket_count == 0) {
        return;
    }
    for (struct kvti_name **at = bucket(names, name->hash); *at != NULL;
         at = &(*at)->next) {
        if (*at == name) {
            *at = name->next;
            name->next = NULL;
            names->count--;
            return;
        }
    }
}
