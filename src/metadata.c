/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes, all numbers little endian:
 *
 *   prefix   the engine library's own, may be empty
 *   section  fields: u16 tag, u32 length, bytes. Unknown tags are skipped, so
 *            that a newer writer can add some; known ones come once. From 256
 *            on they are the callers': kvt.nixl marks what is a part with 256
 *   footer   u32 section length, u32 format version, u64 XXH3 of everything
 *            before it, 8 bytes of magic
 *
 * The checksum finds damage, not malice: whatever it covers may still have
 * been made by an enemy, so nothing of a field is believed either. Memory is
 * only asked for what the field's bytes can hold.
 */
#include "metadata.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "diag.h"
#include "engines/nixl_blob.h"

#define FORMAT_VERSION 1u

static const uint8_t magic[8] = {'k', 'v', 't', 0xa5, 'm', 'd', '\r', '\n'};

enum footer {
    FOOTER_HEAD_BYTES = 8, /* section length and version: checksummed */
    FOOTER_BYTES = FOOTER_HEAD_BYTES + 8 + sizeof magic
};

enum tag {
    TAG_AGENT_NAME = 1,
    TAG_ENGINE = 2,
    TAG_INCARNATION = 3,
    TAG_LOCAL = 4, /* optional */
    TAG_REGIONS = 5,
    TAG_END
};

#define TAGS_REQUIRED                                                          \
    (1u << TAG_AGENT_NAME | 1u << TAG_ENGINE | 1u << TAG_INCARNATION |         \
     1u << TAG_REGIONS)

#define TAG_HEAD_BYTES 6

/* addr, length, kind (u8), flags (u8), 2 bytes of zero, device, gate slot and
 * generation; with KVTI_MEM_FD also fd, offset, dev, ino. */
#define REGION_BYTES 32
#define REGION_FD_BYTES 28

#define MEM_FLAGS_KNOWN                                                        \
    ((uint32_t)KVTI_MEM_FD | KVTI_MEM_SEALED | KVTI_MEM_ANON)

/* The numbers of TAG_LOCAL; boot id and socket name follow, each with a u8
 * for its length. */
#define LOCAL_FIXED_BYTES (4 * 8 + KVTI_NONCE_BYTES + 4 * 4)

/* The nonce is read through this much address space at most. */
#define NONCE_PAGE_BYTES 4096

/* ------------------------------------------------------------------- buffer */

void kvti_buf_fini(struct kvti_buf *buf)
{
    if (buf == NULL) {
        return;
    }
    free(buf->data);
    *buf = (struct kvti_buf){0};
}

int kvti_buf_append(struct kvti_buf *buf, const void *data, size_t length)
{
    if (length > SIZE_MAX / 4 - buf->length) {
        return KVT_ENOMEM;
    }
    if (buf->length + length > buf->capacity) {
        size_t capacity = 2 * (buf->length + length);
        uint8_t *bigger = realloc(buf->data, capacity);

        if (bigger == NULL) {
            return KVT_ENOMEM;
        }
        buf->data = bigger;
        buf->capacity = capacity;
    }
    if (length > 0) {
        memcpy(buf->data + buf->length, data, length);
        buf->length += length;
    }
    return KVT_OK;
}

/* ------------------------------------------------------------------ writing */

static bool local_is_sane(const struct kvti_local_id *id)
{
    return id->pid > 0 && id->gate_fd >= 0 && id->gate_bytes > 0 &&
           id->nonce_addr > 0 &&
           id->nonce_addr <= UINT64_MAX - NONCE_PAGE_BYTES &&
           id->boot_id[0] != '\0';
}

static uint8_t *put(uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
    return at + bytes;
}

static uint8_t *put_bytes(uint8_t *at, const void *data, size_t length)
{
    memcpy(at, data, length);
    return at + length;
}

static int append_head(struct kvti_buf *out, enum tag tag, size_t length)
{
    uint8_t head[TAG_HEAD_BYTES];

    if (length > UINT32_MAX) {
        return KVT_ERANGE;
    }
    put(put(head, tag, 2), length, 4);
    return kvti_buf_append(out, head, sizeof head);
}

static int append_field(struct kvti_buf *out, enum tag tag, const void *data,
                        size_t length)
{
    int code = append_head(out, tag, length);

    return code != KVT_OK ? code : kvti_buf_append(out, data, length);
}

static int append_local(const struct kvti_local_id *id, struct kvti_buf *out)
{
    uint8_t bytes[LOCAL_FIXED_BYTES + 2 + sizeof id->boot_id +
                  sizeof id->socket_name];
    size_t boot_length = strnlen(id->boot_id, sizeof id->boot_id - 1);
    size_t name_length = strnlen(id->socket_name, sizeof id->socket_name - 1);
    uint8_t *at = bytes;

    at = put(at, id->pid_ns, 8);
    at = put(at, id->net_ns, 8);
    at = put(at, id->start_time, 8);
    at = put(at, id->nonce_addr, 8);
    at = put_bytes(at, id->nonce, sizeof id->nonce);
    at = put(at, (uint32_t)id->pid, 4);
    at = put(at, id->uid, 4);
    at = put(at, (uint32_t)id->gate_fd, 4);
    at = put(at, id->gate_bytes, 4);
    at = put(at, boot_length, 1);
    at = put_bytes(at, id->boot_id, boot_length);
    at = put(at, name_length, 1);
    at = put_bytes(at, id->socket_name, name_length);
    return append_field(out, TAG_LOCAL, bytes, (size_t)(at - bytes));
}

/* Only host memory has a file that a peer could map. */
static uint32_t wire_flags(const struct kvti_mem *mem)
{
    return mem->kind == KVT_DRAM ? mem->flags & MEM_FLAGS_KNOWN : 0;
}

static size_t region_bytes(uint32_t flags)
{
    return REGION_BYTES + ((flags & KVTI_MEM_FD) != 0 ? REGION_FD_BYTES : 0);
}

static int append_region(const struct kvti_mem *mem, struct kvti_buf *out)
{
    uint8_t bytes[REGION_BYTES + REGION_FD_BYTES];
    uint32_t flags = wire_flags(mem);
    uint8_t *at = bytes;

    at = put(at, mem->addr, 8);
    at = put(at, mem->length, 8);
    at = put(at, mem->kind, 1);
    at = put(at, flags, 1);
    at = put(at, 0, 2);
    at = put(at, mem->device, 4);
    at = put(at, mem->gate_slot, 4);
    at = put(at, mem->gate_gen, 4);
    if ((flags & KVTI_MEM_FD) != 0) {
        at = put(at, (uint32_t)mem->fd, 4);
        at = put(at, mem->fd_offset, 8);
        at = put(at, mem->fd_dev, 8);
        at = put(at, mem->fd_ino, 8);
    }
    return kvti_buf_append(out, bytes, (size_t)(at - bytes));
}

static int append_regions(const struct kvti_regions *regions,
                          struct kvti_buf *out)
{
    size_t length = 4;
    uint8_t count[4];
    int code;

    for (size_t i = 0; i < regions->count; i++) {
        length += region_bytes(wire_flags(&regions->mems[i]));
    }
    code = append_head(out, TAG_REGIONS, length);
    if (code == KVT_OK) {
        put(count, regions->count, sizeof count);
        code = kvti_buf_append(out, count, sizeof count);
    }
    for (size_t i = 0; code == KVT_OK && i < regions->count; i++) {
        code = append_region(&regions->mems[i], out);
    }
    return code;
}

static int append_section(const struct kvti_md *md, struct kvti_buf *out)
{
    size_t name_length = strnlen(md->agent_name, KVT_NAME_MAX);
    size_t engine_length = strnlen(md->engine, sizeof md->engine - 1);
    int code = append_field(out, TAG_AGENT_NAME, md->agent_name, name_length);

    if (code == KVT_OK) {
        code = append_field(out, TAG_ENGINE, md->engine, engine_length);
    }
    if (code == KVT_OK) {
        code = append_field(out, TAG_INCARNATION, md->incarnation,
                            sizeof md->incarnation);
    }
    if (code == KVT_OK && md->has_local) {
        code = append_local(&md->local, out);
    }
    if (code == KVT_OK) {
        code = append_regions(&md->regions, out);
    }
    return code;
}

static int append_footer(struct kvti_buf *out, size_t section_length)
{
    uint8_t bytes[FOOTER_BYTES];
    uint8_t *at = bytes;
    int code;

    if (section_length > UINT32_MAX) {
        return KVT_ERANGE;
    }
    at = put(at, section_length, 4);
    put(at, FORMAT_VERSION, 4);
    code = kvti_buf_append(out, bytes, FOOTER_HEAD_BYTES);
    if (code != KVT_OK) {
        return code;
    }
    at = put(bytes, XXH3_64bits(out->data, out->length), 8);
    put_bytes(at, magic, sizeof magic);
    return kvti_buf_append(out, bytes, FOOTER_BYTES - FOOTER_HEAD_BYTES);
}

int kvti_md_encode(const struct kvti_md *md, struct kvti_buf *out)
{
    size_t prefix_length = out->length;
    int code;

    /* What we write must be what decode takes. */
    kvti_assert(md->agent_name[0] != '\0' && md->engine[0] != '\0');
    kvti_assert(!md->has_local || local_is_sane(&md->local));
    code = append_section(md, out);
    if (code == KVT_OK) {
        code = append_footer(out, out->length - prefix_length);
    }
    if (code != KVT_OK) {
        out->length = prefix_length;
    }
    return code;
}

/* ------------------------------------------------------------------ reading */

/* What is left of some bytes. A read past the end gives zeros and is
 * remembered, so that a fixed layout needs one check at its end. */
struct reader {
    const uint8_t *at;
    size_t left;
    bool failed;
};

static const uint8_t *take_bytes(struct reader *reader, size_t length)
{
    const uint8_t *at = reader->at;

    if (length > reader->left) {
        reader->failed = true;
        reader->left = 0;
        return NULL;
    }
    reader->at += length;
    reader->left -= length;
    return at;
}

static uint64_t take(struct reader *reader, size_t bytes)
{
    const uint8_t *at = take_bytes(reader, bytes);
    uint64_t value = 0;

    for (size_t i = 0; at != NULL && i < bytes; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    return value;
}

/* Copies `length` bytes as a string; false if they do not fit or hold a NUL. */
static bool take_text(struct reader *reader, size_t length, char *to,
                      size_t size)
{
    const uint8_t *from = take_bytes(reader, length);

    if (from == NULL || length >= size || memchr(from, 0, length) != NULL) {
        return false;
    }
    memcpy(to, from, length);
    to[length] = '\0';
    return true;
}

static int fail_damaged(struct kvt_error *err, const char *what)
{
    return kvti_fail(err, KVT_EMETADATA,
                     "the metadata is damaged: %s; get it from the peer again",
                     what);
}

static int read_name(struct reader *field, char *to, size_t size,
                     const char *what, struct kvt_error *err)
{
    if (field->left == 0 || !take_text(field, field->left, to, size)) {
        return fail_damaged(err, what);
    }
    return KVT_OK;
}

static int read_incarnation(struct reader *field, struct kvti_md *md,
                            struct kvt_error *err)
{
    const uint8_t *from = take_bytes(field, sizeof md->incarnation);

    if (from == NULL || field->left != 0) {
        return fail_damaged(err, "the incarnation has the wrong length");
    }
    memcpy(md->incarnation, from, sizeof md->incarnation);
    return KVT_OK;
}

static int read_local(struct reader *field, struct kvti_md *md,
                      struct kvt_error *err)
{
    struct kvti_local_id *id = &md->local;
    const uint8_t *nonce;

    id->pid_ns = take(field, 8);
    id->net_ns = take(field, 8);
    id->start_time = take(field, 8);
    id->nonce_addr = take(field, 8);
    nonce = take_bytes(field, sizeof id->nonce);
    if (nonce != NULL) {
        memcpy(id->nonce, nonce, sizeof id->nonce);
    }
    id->pid = (int32_t)(uint32_t)take(field, 4);
    id->uid = (uint32_t)take(field, 4);
    id->gate_fd = (int32_t)(uint32_t)take(field, 4);
    id->gate_bytes = (uint32_t)take(field, 4);
    if (!take_text(field, (size_t)take(field, 1), id->boot_id,
                   sizeof id->boot_id) ||
        !take_text(field, (size_t)take(field, 1), id->socket_name,
                   sizeof id->socket_name) ||
        field->failed || field->left != 0) {
        return fail_damaged(err, "the process's identity has no sane shape");
    }
    if (!local_is_sane(id)) {
        return fail_damaged(err, "the process's identity is impossible");
    }
    md->has_local = true;
    return KVT_OK;
}

static bool mem_is_sane(const struct kvti_mem *mem)
{
    if (mem->addr == 0 || mem->length == 0 ||
        mem->addr > UINT64_MAX - mem->length || mem->kind > KVT_VRAM ||
        mem->flags != wire_flags(mem)) {
        return false;
    }
    if ((mem->flags & KVTI_MEM_FD) == 0) {
        return (mem->flags & KVTI_MEM_SEALED) == 0;
    }
    return (mem->flags & KVTI_MEM_ANON) == 0 && mem->fd >= 0 &&
           mem->fd_offset <= (uint64_t)INT64_MAX &&
           mem->length <= (uint64_t)INT64_MAX - mem->fd_offset;
}

static bool read_region(struct reader *field, struct kvti_mem *ret)
{
    uint64_t zero;

    *ret = (struct kvti_mem){.fd = -1};
    ret->addr = take(field, 8);
    ret->length = take(field, 8);
    ret->kind = (uint32_t)take(field, 1);
    ret->flags = (uint32_t)take(field, 1);
    zero = take(field, 2);
    ret->device = (uint32_t)take(field, 4);
    ret->gate_slot = (uint32_t)take(field, 4);
    ret->gate_gen = (uint32_t)take(field, 4);
    if ((ret->flags & KVTI_MEM_FD) != 0) {
        ret->fd = (int32_t)(uint32_t)take(field, 4);
        ret->fd_offset = take(field, 8);
        ret->fd_dev = take(field, 8);
        ret->fd_ino = take(field, 8);
    }
    return !field->failed && zero == 0 && mem_is_sane(ret);
}

static int read_regions(struct reader *field, uint32_t regions_max,
                        struct kvti_md *md, struct kvt_error *err)
{
    uint64_t count = take(field, 4);

    if (field->failed || count > field->left / REGION_BYTES) {
        return fail_damaged(err, "it holds fewer regions than it says");
    }
    if (count > regions_max) {
        return kvti_fail(err, KVT_EMETADATA,
                         "the metadata has %" PRIu64
                         " regions, this transport takes %" PRIu32
                         "; raise regions_max",
                         count, regions_max);
    }
    if (kvti_regions_reserve(&md->regions, (size_t)count) != KVT_OK) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for %" PRIu64 " regions",
                         count);
    }
    for (uint64_t i = 0; i < count; i++) {
        const struct kvti_mem *last = &md->regions.mems[md->regions.count];
        struct kvti_mem mem;

        /* Out of order each add would cost a search and a move. */
        if (!read_region(field, &mem) ||
            (i > 0 && kvti_mem_order(last - 1, &mem) > 0)) {
            return kvti_fail(err, KVT_EMETADATA,
                             "the metadata is damaged: region %" PRIu64
                             " is impossible; get it from the peer again",
                             i);
        }
        kvti_regions_add(&md->regions, &mem);
    }
    if (field->left != 0) {
        return fail_damaged(err, "it holds more regions than it says");
    }
    kvti_regions_update(&md->regions, NULL, NULL);
    return KVT_OK;
}

static int read_field(uint32_t tag, struct reader *field, uint32_t regions_max,
                      struct kvti_md *md, struct kvt_error *err)
{
    switch (tag) {
    case TAG_AGENT_NAME:
        return read_name(field, md->agent_name, sizeof md->agent_name,
                         "the agent's name is empty, too long or holds a NUL",
                         err);
    case TAG_ENGINE:
        return read_name(field, md->engine, sizeof md->engine,
                         "the engine's name is empty, too long or holds a NUL",
                         err);
    case TAG_INCARNATION:
        return read_incarnation(field, md, err);
    case TAG_LOCAL:
        return read_local(field, md, err);
    case TAG_REGIONS:
        return read_regions(field, regions_max, md, err);
    default:
        return KVT_OK;
    }
}

static int read_section(struct reader *section, uint32_t regions_max,
                        struct kvti_md *md, struct kvt_error *err)
{
    uint32_t seen = 0;

    while (section->left > 0) {
        uint32_t tag = (uint32_t)take(section, 2);
        size_t length = (size_t)take(section, 4);
        const uint8_t *at = take_bytes(section, length);
        struct reader field = {.at = at, .left = length};
        uint32_t bit = tag > 0 && tag < TAG_END ? 1u << tag : 0;
        int code;

        if (section->failed) {
            return fail_damaged(err, "a field ends after its section");
        }
        if ((seen & bit) != 0) {
            return fail_damaged(err, "a field comes twice");
        }
        seen |= bit;
        code = read_field(tag, &field, regions_max, md, err);
        if (code != KVT_OK) {
            return code;
        }
    }
    if ((seen & TAGS_REQUIRED) != TAGS_REQUIRED) {
        return fail_damaged(err, "a field is missing");
    }
    return KVT_OK;
}

static bool has_footer(const uint8_t *data, size_t length)
{
    return data != NULL && length >= FOOTER_BYTES &&
           memcmp(data + length - sizeof magic, magic, sizeof magic) == 0;
}

/* Checks the footer and finds the section, which ends where it begins. */
static int read_footer(const uint8_t *data, size_t length,
                       struct reader *ret_section, struct kvt_error *err)
{
    struct reader footer = {.left = FOOTER_BYTES};
    uint64_t section_length;
    uint64_t version;
    uint64_t sum;

    if (!has_footer(data, length)) {
        return kvti_fail(err, KVT_EMETADATA,
                         "the %zu bytes of metadata do not end in kvt's "
                         "footer; they are cut short or not kvt's",
                         length);
    }
    length -= FOOTER_BYTES;
    footer.at = data + length;
    section_length = take(&footer, 4);
    version = take(&footer, 4);
    sum = take(&footer, 8);
    if (sum != XXH3_64bits(data, length + FOOTER_HEAD_BYTES)) {
        return fail_damaged(err, "its checksum is wrong");
    }
    if (version != FORMAT_VERSION) {
        return kvti_fail(err, KVT_EMETADATA,
                         "the metadata has format %" PRIu64
                         ", this library reads format %u; use the same "
                         "version of kvt on both sides",
                         version, FORMAT_VERSION);
    }
    if (section_length > length) {
        return fail_damaged(err, "its section is longer than all of it");
    }
    *ret_section = (struct reader){.at = data + (length - section_length),
                                   .left = (size_t)section_length};
    return KVT_OK;
}

int kvti_md_decode(const void *data, size_t length, uint32_t regions_max,
                   struct kvti_md *ret, struct kvt_error *err)
{
    struct kvti_md md = {.prefix = data, .has_trailer = true};
    struct reader section = {0};
    int code;

    if (!has_footer(data, length) && kvti_nixl_blob_is(data, length)) {
        return kvti_nixl_blob_decode(data, length, regions_max, ret, err);
    }
    code = read_footer(data, length, &section, err);
    if (code != KVT_OK) {
        return code;
    }
    md.prefix_length = (size_t)(section.at - md.prefix);
    code = read_section(&section, regions_max, &md, err);
    if (code != KVT_OK) {
        kvti_md_fini(&md);
        return code;
    }
    *ret = md;
    return KVT_OK;
}

void kvti_md_fini(struct kvti_md *md)
{
    if (md == NULL) {
        return;
    }
    kvti_regions_fini(&md->regions);
    *md = (struct kvti_md){0};
}
