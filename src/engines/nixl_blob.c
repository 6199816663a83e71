/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes that nixlAgent makes of itself, the same in 1.3 and 1.5:
 *
 *   "nixlSerDes|", then fields: tag (no length, no end), u64 length, bytes, "|"
 *
 *   Agent        the name
 *   Conns        u64 count; for each backend: t its name, c its address
 *   (empty tag)  "MemSection"
 *   nixlSecElms  u64 count; for each list of registrations:
 *     bknd       the backend's name
 *     nixlDList  "nixlSDList"
 *     t          u32 kind of memory: host, GPU, block, object, file. NIXL
 *                indexes an array with it and crashes on others
 *     n          u64 count; for each, with an empty tag: u64 address, u64
 *                length, u64 device, then the backend's own bytes (11 with UCX
 *                over shared memory and TCP, which makes 44 a region)
 *
 * Numbers are little endian. Nothing of it is believed.
 */
#include "nixl_blob.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

static const char intro[] = "nixlSerDes|";

#define INTRO_BYTES (sizeof(intro) - 1)
#define DESC_BYTES 24u /* address, length, device */
#define DESC_FIELD_BYTES (8 + DESC_BYTES + 1)
/* A key of UCX: u64 which of its devices, u8 kind of memory, and more. UCX
 * indexes an array with the kind and crashes, or not, as its heap lies, so that
 * a probe process need not die of what kills the host. The last kind that any
 * UCX has. */
#define UCX_KEY_KIND_AT 8u
#define UCX_KEY_KIND_LAST 9u
#define KIND_LAST 4u
#define BACKENDS_MAX 64u /* and lists of registrations: far above any NIXL */

struct reader {
    const uint8_t *at;
    size_t left;
};

struct field {
    const uint8_t *at;
    size_t length;
};

static uint64_t number(const uint8_t *at, size_t bytes)
{
    uint64_t value = 0;

    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    return value;
}

static bool take_field(struct reader *reader, const char *tag,
                       struct field *ret)
{
    size_t head = strlen(tag) + 8;
    uint64_t length;

    if (reader->left < head + 1 || memcmp(reader->at, tag, strlen(tag)) != 0) {
        return false;
    }
    length = number(reader->at + strlen(tag), 8);
    if (length > reader->left - head - 1 || reader->at[head + length] != '|') {
        return false;
    }
    *ret = (struct field){.at = reader->at + head, .length = (size_t)length};
    reader->at += head + length + 1;
    reader->left -= head + length + 1;
    return true;
}

static bool take_number(struct reader *reader, const char *tag, size_t bytes,
                        uint64_t *ret)
{
    struct field field;

    if (!take_field(reader, tag, &field) || field.length != bytes) {
        return false;
    }
    *ret = number(field.at, bytes);
    return true;
}

static bool take_word(struct reader *reader, const char *tag, const char *word)
{
    struct field field;

    return take_field(reader, tag, &field) && field.length == strlen(word) &&
           memcmp(field.at, word, field.length) == 0;
}

/* The name of a backend: any short one. */
static bool take_backend(struct reader *reader, const char *tag,
                         struct field *ret)
{
    return take_field(reader, tag, ret) && ret->length > 0 &&
           ret->length <= KVT_NAME_MAX;
}

static bool is_ucx(const struct field *backend)
{
    static const char *const names[] = {"UCX", "UCX_MO"};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (backend->length == strlen(names[i]) &&
            memcmp(backend->at, names[i], backend->length) == 0) {
            return true;
        }
    }
    return false;
}

static bool take_agent(struct reader *reader, char *ret_name)
{
    struct field field;

    if (!take_field(reader, "Agent", &field) || field.length == 0 ||
        field.length > KVT_NAME_MAX ||
        memchr(field.at, 0, field.length) != NULL) {
        return false;
    }
    memcpy(ret_name, field.at, field.length);
    ret_name[field.length] = '\0';
    return true;
}

static bool take_conns(struct reader *reader)
{
    uint64_t count;

    if (!take_number(reader, "Conns", 8, &count) || count > BACKENDS_MAX) {
        return false;
    }
    for (uint64_t i = 0; i < count; i++) {
        struct field backend;
        struct field address;

        if (!take_backend(reader, "t", &backend) ||
            !take_field(reader, "c", &address)) {
            return false;
        }
    }
    return true;
}

/* ------------------------------------------------------------ registrations */

/* NIXL registers anything; what could not be written anyway is left out, what
 * wraps is damage. */
static bool take_desc(struct reader *reader, bool ucx, uint64_t kind,
                      struct kvti_regions *list)
{
    struct field field;
    struct kvti_mem mem = {.fd = -1, .kind = (uint32_t)kind};
    uint64_t device;

    if (!take_field(reader, "", &field) || field.length < DESC_BYTES) {
        return false;
    }
    if (ucx && field.length > DESC_BYTES + UCX_KEY_KIND_AT &&
        field.at[DESC_BYTES + UCX_KEY_KIND_AT] > UCX_KEY_KIND_LAST) {
        return false;
    }
    mem.addr = number(field.at, 8);
    mem.length = number(field.at + 8, 8);
    device = number(field.at + 16, 8);
    if (mem.addr > UINT64_MAX - mem.length || device > UINT32_MAX) {
        return kind > KVT_VRAM;
    }
    mem.device = (uint32_t)device;
    mem.key_hash = XXH3_64bits(field.at + DESC_BYTES,
                               field.length - DESC_BYTES);
    if (kind <= KVT_VRAM && mem.addr != 0 && mem.length != 0) {
        list->mems[list->count++] = mem;
    }
    return true;
}

static int fail_damaged(struct kvt_error *err, const char *what)
{
    return kvti_fail(err, KVT_EMETADATA,
                     "NIXL's part of the metadata is damaged: %s; get it from "
                     "the peer again",
                     what);
}

static int take_list(struct reader *reader, uint32_t regions_max,
                     struct kvti_regions *list, struct kvt_error *err)
{
    struct field backend;
    uint64_t kind;
    uint64_t count;

    if (!take_backend(reader, "bknd", &backend) ||
        !take_word(reader, "nixlDList", "nixlSDList") ||
        !take_number(reader, "t", 4, &kind) ||
        !take_number(reader, "n", 8, &count) ||
        count > reader->left / DESC_FIELD_BYTES) {
        return fail_damaged(err, "a list of registrations is cut short");
    }
    if (kind > KIND_LAST) {
        return fail_damaged(err, "there is no such kind of memory");
    }
    if (count > regions_max || list->count > regions_max - count) {
        return kvti_fail(err, KVT_EMETADATA,
                         "the metadata has more than %" PRIu32
                         " regions, which this transport takes; raise "
                         "regions_max",
                         regions_max);
    }
    if (kvti_regions_reserve(list, (size_t)count) != KVT_OK) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %" PRIu64 " regions",
                         count);
    }
    for (uint64_t i = 0; i < count; i++) {
        if (!take_desc(reader, is_ucx(&backend), kind, list)) {
            return fail_damaged(err, "a registration is impossible");
        }
    }
    return KVT_OK;
}

static int compare_mems(const void *a, const void *b)
{
    return kvti_mem_order(a, b);
}

/* Two backends may have registered the same memory: their keys count both. */
static void sort_regions(struct kvti_regions *list)
{
    size_t kept = 0;

    if (list->count > 0) {
        qsort(list->mems, list->count, sizeof(list->mems[0]), compare_mems);
    }
    for (size_t i = 0; i < list->count; i++) {
        if (kept == 0 ||
            kvti_mem_order(&list->mems[kept - 1], &list->mems[i]) != 0) {
            list->mems[kept++] = list->mems[i];
        } else {
            list->mems[kept - 1].key_hash += list->mems[i].key_hash;
        }
    }
    list->count = kept;
    kvti_regions_update(list, NULL, NULL);
}

static int take_section(struct reader *reader, uint32_t regions_max,
                        struct kvti_regions *list, struct kvt_error *err)
{
    uint64_t count;

    if (!take_word(reader, "", "MemSection") ||
        !take_number(reader, "nixlSecElms", 8, &count) ||
        count > BACKENDS_MAX) {
        return fail_damaged(err, "its list of memory is missing");
    }
    for (uint64_t i = 0; i < count; i++) {
        int code = take_list(reader, regions_max, list, err);

        if (code != KVT_OK) {
            return code;
        }
    }
    return reader->left == 0
               ? KVT_OK
               : fail_damaged(err, "there are bytes after its end");
}

/* ------------------------------------------------------------------ outside */

bool kvti_nixl_blob_is(const void *data, size_t length)
{
    return data != NULL && length >= INTRO_BYTES &&
           memcmp(data, intro, INTRO_BYTES) == 0;
}

int kvti_nixl_blob_parse(const void *data, size_t length, uint32_t regions_max,
                         char *ret_name, struct kvti_regions *ret_regions,
                         struct kvt_error *err)
{
    struct kvti_regions list = {0};
    struct reader reader;
    char name[KVT_NAME_MAX + 1] = "";
    int code;

    if (!kvti_nixl_blob_is(data, length)) {
        return fail_damaged(err, "it does not begin like NIXL's");
    }
    reader = (struct reader){.at = (const uint8_t *)data + INTRO_BYTES,
                             .left = length - INTRO_BYTES};
    if (!take_agent(&reader, name)) {
        return fail_damaged(err, "the agent's name is missing or impossible");
    }
    if (!take_conns(&reader)) {
        return fail_damaged(err, "the backends' addresses are cut short");
    }
    code = take_section(&reader, regions_max, &list, err);
    if (code != KVT_OK) {
        kvti_regions_fini(&list);
        return code;
    }
    sort_regions(&list);
    memcpy(ret_name, name, sizeof(name));
    *ret_regions = list;
    return KVT_OK;
}

int kvti_nixl_blob_decode(const void *data, size_t length, uint32_t regions_max,
                          struct kvti_md *ret, struct kvt_error *err)
{
    struct kvti_md md = {.prefix = data, .prefix_length = length};
    XXH128_canonical_t hash;
    int code = kvti_nixl_blob_parse(data, length, regions_max, md.agent_name,
                                    &md.regions, err);

    if (code != KVT_OK) {
        return code;
    }
    kvti_format(md.engine, sizeof(md.engine), "nixl");
    XXH128_canonicalFromHash(&hash, XXH3_128bits(data, length));
    memcpy(md.incarnation, hash.digest, sizeof(md.incarnation));
    *ret = md;
    return KVT_OK;
}
