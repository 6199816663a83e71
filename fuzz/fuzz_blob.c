/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL's own metadata, alone and with kvt's trailer behind it. The input is
 * read as orders to write such a blob, whole or partial, well formed or with
 * something in it that must be refused, so that it is known what it says. Then
 * bytes of it are overwritten, it is cut short and made longer; each is in a
 * block of its very length for the sanitizer. Two blobs of one agent are joined
 * as a peer's regions are.
 */
#include <stdlib.h>
#include <string.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "diag.h"
#include "engines/nixl_blob.h"
#include "input.h"

#define REGIONS_MAX 16
#define MEMS_MAX 64
#define LISTS_MAX 4
#define KINDS 5 /* of NIXL: host, GPU, block, object, file */

struct model {
    char name[KVT_NAME_MAX + 16];
    size_t name_length;
    struct kvti_mem mems[MEMS_MAX]; /* different ones, in no order */
    size_t count;
    uint64_t kept; /* entries that count against the limit so far */
    bool refused;
};

/* ------------------------------------------------------------------- writing */

static void append(struct kvti_buf *buf, const void *data, size_t length)
{
    kvti_assert(kvti_buf_append(buf, data, length) == KVT_OK);
}

static void append_number(struct kvti_buf *buf, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        const uint8_t byte = (uint8_t)(value >> (8 * i));

        append(buf, &byte, 1);
    }
}

static void append_field(struct kvti_buf *buf, const char *tag,
                         const void *data, size_t length)
{
    append(buf, tag, strlen(tag));
    append_number(buf, length, 8);
    append(buf, data, length);
    append(buf, "|", 1);
}

static void append_count(struct kvti_buf *buf, const char *tag, uint64_t value,
                         size_t bytes)
{
    append(buf, tag, strlen(tag));
    append_number(buf, bytes, 8);
    append_number(buf, value, bytes);
    append(buf, "|", 1);
}

static void put_name(struct input *input, struct kvti_buf *buf,
                     struct model *model)
{
    uint8_t way = next_byte(input);

    model->name_length = way < 224   ? 1 + way % 16
                         : way < 232 ? KVT_NAME_MAX
                         : way < 236 ? KVT_NAME_MAX + 1
                         : way < 240 ? 0
                                     : 3;
    memset(model->name, 'n', sizeof model->name);
    model->name[0] = way >= 252 ? '\0' : (char)(way | 1);
    model->refused = model->refused || way >= 252 || model->name_length == 0 ||
                     model->name_length > KVT_NAME_MAX;
    append_field(buf, "Agent", model->name, model->name_length);
}

/* A backend's name: any, but neither empty nor long. Whether it is "UCX". */
static bool put_backend(struct input *input, struct kvti_buf *buf,
                        struct model *model, const char *tag)
{
    static const char name[KVT_NAME_MAX + 16] = "UCX";
    uint8_t way = next_byte(input);
    size_t length = way < 240 ? 1u + way % 6u : (way - 240u) * 18u;

    model->refused = model->refused || length == 0 || length > KVT_NAME_MAX;
    append_field(buf, tag, name, length);
    return length == strlen(name);
}

static void put_conns(struct input *input, struct kvti_buf *buf,
                      struct model *model)
{
    uint8_t way = next_byte(input);
    uint64_t count = way < 240 ? way % 4 : way - 200;
    uint8_t address[32];

    model->refused = model->refused || count > 64;
    append_count(buf, "Conns", count, 8);
    for (uint64_t i = 0; i < count; i++) {
        size_t length = next_below(input, sizeof address);

        for (size_t j = 0; j < length; j++) {
            address[j] = next_byte(input);
        }
        (void)put_backend(input, buf, model, "t");
        append_field(buf, "c", address, length);
    }
}

static void add_mem(struct model *model, const struct kvti_mem *mem)
{
    for (size_t i = 0; i < model->count; i++) {
        if (kvti_mem_order(&model->mems[i], mem) == 0) {
            model->mems[i].key_hash += mem->key_hash;
            return;
        }
    }
    kvti_assert(model->count < MEMS_MAX);
    model->mems[model->count++] = *mem;
}

static void put_desc(struct input *input, struct kvti_buf *buf,
                     struct model *model, bool ucx, uint64_t kind)
{
    uint8_t way = next_byte(input);
    struct kvti_mem mem = {.addr = 16 * next_below(input, 8),
                           .length = 16 * next_below(input, 4),
                           .device = way & 1,
                           .kind = (uint32_t)kind};
    uint64_t device = way & 1;
    size_t key = next_below(input, 12);
    uint8_t bytes[24 + 12] = {0};

    if (way >= 224) {
        mem.addr = next_number(input);
        mem.length = next_number(input);
    } else if (way >= 216) {
        device = next_number(input);
        mem.device = (uint32_t)device;
    }
    for (size_t i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(mem.addr >> (8 * i));
        bytes[8 + i] = (uint8_t)(mem.length >> (8 * i));
        bytes[16 + i] = (uint8_t)(device >> (8 * i));
    }
    for (size_t i = 0; i < key; i++) {
        bytes[24 + i] = next_byte(input);
    }
    append_field(buf, "", bytes, 24 + key);
    /* The kind of memory in UCX's key. */
    model->refused = model->refused || (ucx && key > 8 && bytes[24 + 8] > 9);
    if (kind > KVT_VRAM) {
        return;
    }
    if (mem.addr > UINT64_MAX - mem.length || device > UINT32_MAX) {
        model->refused = true;
    } else if (mem.addr != 0 && mem.length != 0 && !model->refused) {
        mem.key_hash = XXH3_64bits(bytes + 24, key);
        model->kept++;
        add_mem(model, &mem);
    }
}

static void put_list(struct input *input, struct kvti_buf *buf,
                     struct model *model)
{
    uint8_t way = next_byte(input);
    uint64_t kind = way < 248 ? way % KINDS : next_number(input);
    uint64_t count = next_below(input, 12);
    bool ucx;

    if (kind > UINT32_MAX) {
        kind = UINT32_MAX;
    }
    ucx = put_backend(input, buf, model, "bknd");
    append_field(buf, "nixlDList", "nixlSDList", 10);
    append_count(buf, "t", kind, 4);
    append_count(buf, "n", count, 8);
    model->refused = model->refused || kind >= KINDS ||
                     model->kept + count > REGIONS_MAX;
    for (uint64_t i = 0; i < count; i++) {
        put_desc(input, buf, model, ucx, kind);
    }
}

static void put_blob(struct input *input, struct kvti_buf *buf,
                     struct model *model)
{
    uint64_t lists;

    *model = (struct model){.count = 0};
    append(buf, "nixlSerDes|", 11);
    put_name(input, buf, model);
    put_conns(input, buf, model);
    lists = next_below(input, LISTS_MAX + 1);
    append_field(buf, "", "MemSection", 10);
    append_count(buf, "nixlSecElms", lists, 8);
    for (uint64_t i = 0; i < lists; i++) {
        put_list(input, buf, model);
    }
}

/* ------------------------------------------------------------------ checking */

static int decode(const void *data, size_t length, struct kvti_md *ret)
{
    struct kvt_error err;
    int code = kvti_md_decode(data, length, REGIONS_MAX, ret, &err);

    kvti_assert(code == KVT_OK || code == KVT_EMETADATA);
    kvti_assert(code == KVT_OK || (err.code == code && strlen(err.text) > 0 &&
                                   strlen(err.text) < sizeof err.text));
    return code;
}

static void check_sane(const struct kvti_md *md)
{
    const struct kvti_regions *regions = &md->regions;

    kvti_assert(strlen(md->agent_name) > 0 && regions->count <= REGIONS_MAX);
    for (size_t i = 0; i < regions->count; i++) {
        const struct kvti_mem *mem = &regions->mems[i];

        kvti_assert(i == 0 || kvti_mem_order(mem - 1, mem) < 0);
        kvti_assert(kvti_regions_cover(regions, mem->addr, mem->length,
                                       mem->kind, mem->device));
    }
}

static void check_says(const struct kvti_regions *regions,
                       const struct model *model)
{
    kvti_assert(regions->count == model->count);
    for (size_t i = 0; i < model->count; i++) {
        const struct kvti_mem *want = &model->mems[i];
        const struct kvti_mem *got = kvti_regions_find(
            regions, want->addr, want->length, want->kind, want->device);

        kvti_assert(got != NULL && got->key_hash == want->key_hash);
    }
}

/* A block of its very length, which may not be read beyond. */
static int decode_part(const struct kvti_buf *buf, size_t length)
{
    uint8_t *part = malloc(length > 0 ? length : 1);
    struct kvti_md md;
    int code;

    kvti_assert(part != NULL && length <= buf->length);
    memcpy(part, buf->data, length);
    code = decode(part, length, &md);
    if (code == KVT_OK) {
        check_sane(&md);
        kvti_md_fini(&md);
    }
    free(part);
    return code;
}

/* Any other length is refused, since it says its own. */
static void check_lengths(struct input *input, struct kvti_buf *buf)
{
    size_t whole = buf->length;

    kvti_assert(decode_part(buf, next_bytes(input, 2) % whole) ==
                KVT_EMETADATA);
    append_number(buf, next_bytes(input, 8), 1 + next_below(input, 8));
    kvti_assert(decode_part(buf, buf->length) == KVT_EMETADATA);
    buf->length = whole;
}

/* With the trailer every bit counts, and every byte has to be there; but what
 * is left of it when all of the trailer is cut off is NIXL's again. */
static void check_trailer(struct input *input, struct kvti_buf *buf,
                          const struct model *model)
{
    size_t prefix = buf->length;
    struct kvti_md md = {.engine = "nixl"};
    struct kvti_md again;
    size_t at;

    memcpy(md.agent_name, model->name, model->name_length);
    kvti_assert(kvti_md_encode(&md, buf) == KVT_OK);
    kvti_assert(decode(buf->data, buf->length, &again) == KVT_OK);
    kvti_assert(again.has_trailer && again.prefix_length == prefix &&
                strcmp(again.agent_name, md.agent_name) == 0);
    kvti_md_fini(&again);
    for (size_t i = 0; i < 4; i++) {
        const uint8_t flip = (uint8_t)(1u << next_below(input, 8));

        at = next_bytes(input, 2) % buf->length;
        buf->data[at] ^= flip;
        kvti_assert(decode_part(buf, buf->length) == KVT_EMETADATA);
        buf->data[at] ^= flip;
        at = next_bytes(input, 2) % buf->length;
        kvti_assert(at == prefix || decode_part(buf, at) == KVT_EMETADATA);
    }
    buf->length = prefix;
}

static void check_join(struct input *input, const struct model *model,
                       struct kvti_md *md)
{
    struct kvti_buf buf = {0};
    struct model other;
    struct kvti_md more;

    put_blob(input, &buf, &other);
    if (!other.refused) {
        kvti_assert(decode(buf.data, buf.length, &more) == KVT_OK);
        kvti_assert(kvti_regions_reserve(&md->regions, more.regions.count) ==
                    KVT_OK);
        kvti_regions_join(&md->regions, &more.regions);
        kvti_regions_update(&md->regions, NULL, NULL);
        for (size_t i = 0; i < more.regions.count; i++) {
            const struct kvti_mem *mem = &more.regions.mems[i];

            kvti_assert(kvti_regions_find(&md->regions, mem->addr, mem->length,
                                          mem->kind, mem->device) != NULL);
        }
        for (size_t i = 0; i < model->count; i++) {
            const struct kvti_mem *mem = &model->mems[i];
            const struct kvti_mem *kept = kvti_regions_find(
                &md->regions, mem->addr, mem->length, mem->kind, mem->device);

            kvti_assert(kept != NULL && kept->key_hash == mem->key_hash);
        }
        kvti_assert(md->regions.count <= model->count + more.regions.count);
        kvti_md_fini(&more);
    }
    kvti_buf_fini(&buf);
}

static void check_taken(struct input *input, struct kvti_buf *buf,
                        const struct model *model)
{
    struct kvti_md md;

    kvti_assert(decode(buf->data, buf->length, &md) == KVT_OK);
    kvti_assert(!md.has_trailer && !md.has_local &&
                md.prefix_length == buf->length && md.prefix == buf->data);
    kvti_assert(strlen(md.agent_name) == model->name_length &&
                memcmp(md.agent_name, model->name, model->name_length) == 0);
    check_sane(&md);
    check_says(&md.regions, model);
    check_lengths(input, buf);
    check_trailer(input, buf, model);
    check_join(input, model, &md);
    kvti_md_fini(&md);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct model model;
    struct input input = {.at = data, .left = size};
    struct kvti_buf buf = {0};

    put_blob(&input, &buf, &model);
    if (model.refused) {
        kvti_assert(decode_part(&buf, buf.length) == KVT_EMETADATA);
    } else {
        check_taken(&input, &buf, &model);
    }
    for (size_t i = 0; i < 3; i++) {
        buf.data[next_bytes(&input, 2) % buf.length] = next_byte(&input);
        (void)decode_part(&buf, buf.length);
    }
    kvti_buf_fini(&buf);
    return 0;
}
