/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metadata: what was encoded is decoded, whatever prefix the engine's library
 * put before it; a blob cut short at any byte, with any bit flipped, with
 * bytes added, or made of noise is refused. Blobs whose checksum is right (we
 * sign them again after changing them) are refused when their content is not
 * sane, and never crash, hang or ask for more memory than they are worth:
 * thousands of seeded mutations, and each insane value by itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "metadata.h"
#include "unit.h"

#define FOOTER_BYTES 24
#define REGIONS_MAX 1000

enum tag {
    TAG_AGENT_NAME = 1,
    TAG_ENGINE = 2,
    TAG_INCARNATION = 3,
    TAG_LOCAL = 4,
    TAG_REGIONS = 5
};

static void fill_local(struct kvti_local_id *id)
{
    *id = (struct kvti_local_id){.boot_id = "b36ff5ea-27c5-4d0c-9f24-"
                                            "1f50a0c6d1b7",
                                 .pid_ns = UINT64_C(4026531836),
                                 .net_ns = UINT64_C(4026531840),
                                 .start_time = 123456789,
                                 .nonce_addr = UINT64_C(0x7f0000001000),
                                 .pid = 4711,
                                 .uid = 1000,
                                 .gate_fd = 5,
                                 .gate_bytes = 4096,
                                 .socket_name = "kvt-socket"};
    for (size_t i = 0; i < sizeof id->nonce; i++) {
        id->nonce[i] = (uint8_t)(i * 7);
    }
}

static void add_mem(struct kvti_regions *set, const struct kvti_mem *mem)
{
    assert_int_equal(kvti_regions_reserve(set, 1), KVT_OK);
    kvti_regions_add(set, mem);
}

static void fill_md(struct kvti_md *md, bool with_local)
{
    const struct kvti_mem mems[] = {{.addr = 0x10000,
                                     .length = 0x1000,
                                     .flags = KVTI_MEM_ANON,
                                     .fd = -1,
                                     .gate_slot = 3,
                                     .gate_gen = 9},
                                    {.addr = 0x11000,
                                     .length = 0x3000,
                                     .flags = KVTI_MEM_FD | KVTI_MEM_SEALED,
                                     .fd = 17,
                                     .fd_offset = 0x2000,
                                     .fd_dev = 1,
                                     .fd_ino = 1027,
                                     .gate_slot = 4,
                                     .gate_gen = UINT32_MAX},
                                    {.addr = 0x90000, .length = 1, .fd = -1},
                                    {.addr = UINT64_C(0x7f1234560000),
                                     .length = UINT64_C(1) << 40,
                                     .kind = KVT_VRAM,
                                     .device = 7,
                                     .fd = -1}};

    *md = (struct kvti_md){.agent_name = "prefill \xc3\xa9 0",
                           .engine = "local"};
    for (size_t i = 0; i < sizeof md->incarnation; i++) {
        md->incarnation[i] = (uint8_t)(200 + i);
    }
    if (with_local) {
        md->has_local = true;
        fill_local(&md->local);
    }
    for (size_t i = 0; i < sizeof mems / sizeof *mems; i++) {
        add_mem(&md->regions, &mems[i]);
    }
}

/* A blob with `prefix_length` bytes of an engine before it. */
static void make_blob(struct kvti_buf *buf, bool with_local,
                      size_t prefix_length)
{
    struct kvti_md md;

    *buf = (struct kvti_buf){0};
    for (size_t i = 0; i < prefix_length; i++) {
        uint8_t byte = (uint8_t)(i * 13 + 1);

        assert_int_equal(kvti_buf_append(buf, &byte, 1), KVT_OK);
    }
    fill_md(&md, with_local);
    assert_int_equal(kvti_md_encode(&md, buf), KVT_OK);
    kvti_md_fini(&md);
}

static void put_number(uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t get_number(const uint8_t *at, size_t bytes)
{
    uint64_t value = 0;

    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    return value;
}

/* Makes the checksum right again. */
static void sign(uint8_t *data, size_t length)
{
    put_number(data + length - 16, XXH3_64bits(data, length - 16), 8);
}

/* Decodes an exact copy, so that the sanitizer sees a read past its end. */
static int decode_copy(const uint8_t *data, size_t length, struct kvti_md *md,
                       struct kvt_error *err)
{
    uint8_t *copy = malloc(length > 0 ? length : 1);
    int code;

    assert_non_null(copy);
    memcpy(copy, data, length);
    code = kvti_md_decode(copy, length, REGIONS_MAX, md, err);
    if (code == KVT_OK) {
        /* The prefix lies in the copy. */
        md->prefix = NULL;
    }
    free(copy);
    return code;
}

static void expect_refused(const uint8_t *data, size_t length, const char *part)
{
    struct kvti_md md;
    struct kvti_md before;
    struct kvt_error err = {0};

    memset(&md, 0xa5, sizeof md);
    memcpy(&before, &md, sizeof md);
    assert_int_equal(decode_copy(data, length, &md, &err), KVT_EMETADATA);
    assert_memory_equal(&md, &before, sizeof md);
    assert_int_equal(err.code, KVT_EMETADATA);
    if (strstr(err.text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, part);
    }
}

/* ---------------------------------------------------------------- round trip */

static void compare_local(const struct kvti_local_id *got,
                          const struct kvti_local_id *want)
{
    assert_string_equal(got->boot_id, want->boot_id);
    assert_string_equal(got->socket_name, want->socket_name);
    assert_memory_equal(got->nonce, want->nonce, sizeof got->nonce);
    assert_int_equal(got->pid_ns, want->pid_ns);
    assert_int_equal(got->net_ns, want->net_ns);
    assert_int_equal(got->start_time, want->start_time);
    assert_int_equal(got->nonce_addr, want->nonce_addr);
    assert_int_equal(got->pid, want->pid);
    assert_int_equal(got->uid, want->uid);
    assert_int_equal(got->gate_fd, want->gate_fd);
    assert_int_equal(got->gate_bytes, want->gate_bytes);
}

static void compare_mems(const struct kvti_mem *got,
                         const struct kvti_mem *want)
{
    assert_int_equal(kvti_mem_order(got, want), 0);
    assert_int_equal(got->flags, want->flags);
    assert_int_equal(got->fd, want->fd);
    assert_int_equal(got->fd_offset, want->fd_offset);
    assert_int_equal(got->fd_dev, want->fd_dev);
    assert_int_equal(got->fd_ino, want->fd_ino);
    assert_int_equal(got->gate_slot, want->gate_slot);
    assert_int_equal(got->gate_gen, want->gate_gen);
    assert_null(got->cookie);
    assert_int_equal(got->refs, 0);
    assert_int_equal(got->busy, 0);
}

static void compare_md(const struct kvti_md *got, const struct kvti_md *want)
{
    assert_string_equal(got->agent_name, want->agent_name);
    assert_string_equal(got->engine, want->engine);
    assert_memory_equal(got->incarnation, want->incarnation,
                        sizeof got->incarnation);
    assert_int_equal(got->has_local, want->has_local);
    if (want->has_local) {
        compare_local(&got->local, &want->local);
    }
    assert_int_equal(got->regions.count, want->regions.count);
    for (size_t i = 0; i < want->regions.count; i++) {
        compare_mems(&got->regions.mems[i], &want->regions.mems[i]);
    }
}

static void what_was_encoded_is_decoded(void **state)
{
    const size_t prefixes[] = {0, 1, 7, 1000};

    (void)state;
    for (size_t i = 0; i < 2 * sizeof prefixes / sizeof *prefixes; i++) {
        size_t prefix_length = prefixes[i / 2];
        struct kvti_buf buf;
        struct kvti_md want;
        struct kvti_md md;

        fill_md(&want, i % 2 == 1);
        make_blob(&buf, i % 2 == 1, prefix_length);
        assert_int_equal(
            kvti_md_decode(buf.data, buf.length, REGIONS_MAX, &md, NULL),
            KVT_OK);
        compare_md(&md, &want);
        assert_ptr_equal(md.prefix, buf.data);
        assert_int_equal(md.prefix_length, prefix_length);
        for (size_t at = 0; at < prefix_length; at++) {
            assert_int_equal(md.prefix[at], (uint8_t)(at * 13 + 1));
        }
        assert_true(
            kvti_regions_cover(&md.regions, 0x10800, 0x3000, KVT_DRAM, 0));
        kvti_md_fini(&md);
        kvti_md_fini(&want);
        kvti_buf_fini(&buf);
    }
}

static void the_longest_names_and_no_regions_fit(void **state)
{
    struct kvti_md want = {.has_local = true};
    struct kvti_md md;
    struct kvti_buf buf = {0};

    (void)state;
    fill_local(&want.local);
    memset(want.agent_name, 'n', sizeof want.agent_name - 1);
    memset(want.engine, 'e', sizeof want.engine - 1);
    memset(want.local.boot_id, 'b', sizeof want.local.boot_id - 1);
    memset(want.local.socket_name, 's', sizeof want.local.socket_name - 1);
    assert_int_equal(kvti_md_encode(&want, &buf), KVT_OK);
    assert_int_equal(kvti_md_decode(buf.data, buf.length, 0, &md, NULL),
                     KVT_OK);
    compare_md(&md, &want);
    kvti_md_fini(&md);
    kvti_buf_fini(&buf);
}

/* The flag means nothing there; a caller may have set it all the same. */
static void device_memory_is_sent_without_its_file(void **state)
{
    const struct kvti_mem mem = {.addr = 0x1000,
                                 .length = 8,
                                 .kind = KVT_VRAM,
                                 .flags = KVTI_MEM_FD,
                                 .fd = 3};
    struct kvti_md want = {.agent_name = "a", .engine = "nixl"};
    struct kvti_md md;
    struct kvti_buf buf = {0};

    (void)state;
    add_mem(&want.regions, &mem);
    assert_int_equal(kvti_md_encode(&want, &buf), KVT_OK);
    assert_int_equal(kvti_md_decode(buf.data, buf.length, 1, &md, NULL),
                     KVT_OK);
    assert_int_equal(md.regions.mems[0].flags, 0);
    assert_int_equal(md.regions.mems[0].fd, -1);
    kvti_md_fini(&md);
    kvti_md_fini(&want);
    kvti_buf_fini(&buf);
}

static void ten_thousand_regions_take_32_bytes_each(void **state)
{
    const size_t count = 10000;
    struct kvti_md want = {.agent_name = "a", .engine = "local"};
    struct kvti_md md;
    struct kvti_buf buf = {0};

    (void)state;
    assert_int_equal(kvti_regions_reserve(&want.regions, count), KVT_OK);
    for (size_t i = 0; i < count; i++) {
        const struct kvti_mem mem = {.addr = (i + 1) << 21, .length = 1 << 20};

        kvti_regions_add(&want.regions, &mem);
    }
    assert_int_equal(kvti_md_encode(&want, &buf), KVT_OK);
    assert_true(buf.length < count * 32 + 128);
    assert_int_equal(
        kvti_md_decode(buf.data, buf.length, (uint32_t)count, &md, NULL),
        KVT_OK);
    assert_int_equal(md.regions.count, count);
    assert_int_equal(md.regions.span_count, count);
    assert_int_equal(
        kvti_md_decode(buf.data, buf.length, (uint32_t)count - 1, &md, NULL),
        KVT_EMETADATA);
    kvti_md_fini(&md);
    kvti_md_fini(&want);
    kvti_buf_fini(&buf);
}

/* -------------------------------------------------------------------- damage */

static void a_blob_cut_at_any_byte_is_refused(void **state)
{
    struct kvti_buf buf;

    (void)state;
    make_blob(&buf, true, 40);
    for (size_t length = 0; length < buf.length; length++) {
        expect_refused(buf.data, length, "not end in kvt's footer");
        /* From the front as well: the prefix or the section shrinks. */
        expect_refused(buf.data + (buf.length - length), length, "metadata");
    }
    kvti_buf_fini(&buf);
}

static void any_flipped_bit_is_found(void **state)
{
    struct kvti_buf buf;

    (void)state;
    make_blob(&buf, true, 40);
    for (size_t bit = 0; bit < 8 * buf.length; bit++) {
        buf.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        expect_refused(buf.data, buf.length, "metadata");
        buf.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    kvti_buf_fini(&buf);
}

static void a_byte_too_many_is_found(void **state)
{
    struct kvti_buf buf;
    const uint8_t more = 0;

    (void)state;
    make_blob(&buf, true, 40);
    assert_int_equal(kvti_buf_append(&buf, &more, 1), KVT_OK);
    expect_refused(buf.data, buf.length, "footer");
    kvti_buf_fini(&buf);
}

static void nothing_and_noise_are_refused(void **state)
{
    struct rng rng = {1};
    uint8_t noise[300];
    struct kvti_md md;

    (void)state;
    assert_int_equal(kvti_md_decode(NULL, 0, REGIONS_MAX, &md, NULL),
                     KVT_EMETADATA);
    for (size_t round = 0; round < 2000; round++) {
        size_t length = rng_below(&rng, sizeof noise + 1);

        for (size_t i = 0; i < length; i++) {
            noise[i] = (uint8_t)rng_next(&rng);
        }
        expect_refused(noise, length, "footer");
    }
}

/* ------------------------------------------------ right checksum, wrong content */

/* Where the content of a field begins, in a blob of fill_md(). */
static uint8_t *find_field(const struct kvti_buf *buf, enum tag tag)
{
    uint64_t section = get_number(buf->data + buf->length - FOOTER_BYTES, 4);
    uint8_t *at = buf->data + buf->length - FOOTER_BYTES - section;

    while (get_number(at, 2) != (uint64_t)tag) {
        at += 6 + get_number(at + 2, 4);
        assert_true(at < buf->data + buf->length - FOOTER_BYTES);
    }
    return at + 6;
}

/* Writes a number over part of a field, signs, and wants a refusal. */
static void expect_insane(enum tag tag, size_t offset, uint64_t value,
                          size_t bytes, const char *part)
{
    struct kvti_buf buf;
    uint8_t *at;

    make_blob(&buf, true, 3);
    at = find_field(&buf, tag) + offset;
    put_number(at, value, bytes);
    sign(buf.data, buf.length);
    expect_refused(buf.data, buf.length, part);
    kvti_buf_fini(&buf);
}

static void insane_names_are_refused(void **state)
{
    (void)state;
    expect_insane(TAG_AGENT_NAME, 0, 0, 1, "agent's name");
    expect_insane(TAG_AGENT_NAME, 5, 0, 1, "agent's name");
    expect_insane(TAG_ENGINE, 4, 0, 1, "engine's name");
}

static void insane_identities_are_refused(void **state)
{
    const size_t numbers = 32 + KVTI_NONCE_BYTES;
    const size_t boot = numbers + 16;

    (void)state;
    expect_insane(TAG_LOCAL, 24, 0, 8, "identity");
    expect_insane(TAG_LOCAL, 24, UINT64_MAX - 100, 8, "identity");
    expect_insane(TAG_LOCAL, numbers, 0, 4, "identity");
    expect_insane(TAG_LOCAL, numbers, UINT32_MAX, 4, "identity");
    expect_insane(TAG_LOCAL, numbers + 8, UINT32_MAX, 4, "identity");
    expect_insane(TAG_LOCAL, numbers + 12, 0, 4, "identity");
    /* The texts: lengths of 0, too long for their place, past the field, too
     * short for it, and a NUL inside. */
    expect_insane(TAG_LOCAL, boot, 0, 1, "identity");
    expect_insane(TAG_LOCAL, boot, 40, 1, "identity");
    expect_insane(TAG_LOCAL, boot, 255, 1, "identity");
    expect_insane(TAG_LOCAL, boot + 1, 0, 1, "identity");
    expect_insane(TAG_LOCAL, boot + 1 + 36, 255, 1, "identity");
    expect_insane(TAG_LOCAL, boot + 1 + 36, 9, 1, "identity");
    expect_insane(TAG_LOCAL, boot + 1 + 36, 11, 1, "identity");
    expect_insane(TAG_LOCAL, boot + 1 + 36 + 3, 0, 1, "identity");
}

static void insane_regions_are_refused(void **state)
{
    const size_t first = 4;
    const size_t second = first + 32;

    (void)state;
    expect_insane(TAG_REGIONS, 0, 3, 4, "more regions");
    expect_insane(TAG_REGIONS, 0, 0, 4, "more regions");
    expect_insane(TAG_REGIONS, 0, 5, 4, "fewer regions");
    expect_insane(TAG_REGIONS, 0, UINT32_MAX, 4, "fewer regions");
    expect_insane(TAG_REGIONS, first, 0, 8, "region 0");
    expect_insane(TAG_REGIONS, first, 0x20000, 8, "region 1");
    expect_insane(TAG_REGIONS, first + 8, 0, 8, "region 0");
    expect_insane(TAG_REGIONS, first + 8, UINT64_MAX - 0xffff, 8, "region 0");
    expect_insane(TAG_REGIONS, first + 16, 2, 1, "region 0");
    expect_insane(TAG_REGIONS, first + 17, 8, 1, "region 0");
    expect_insane(TAG_REGIONS, first + 17, KVTI_MEM_SEALED, 1, "region 0");
    expect_insane(TAG_REGIONS, first + 18, 1, 2, "region 0");
    expect_insane(TAG_REGIONS, second + 17, KVTI_MEM_FD | KVTI_MEM_ANON, 1,
                  "region 1");
    expect_insane(TAG_REGIONS, second + 16, KVT_VRAM, 1, "region 1");
    expect_insane(TAG_REGIONS, first + 16, KVT_VRAM, 1, "region 0");
    expect_insane(TAG_REGIONS, second + 32, UINT32_MAX, 4, "region 1");
    expect_insane(TAG_REGIONS, second + 36, (uint64_t)INT64_MAX - 0x1000, 8,
                  "region 1");
    expect_insane(TAG_REGIONS, second + 36, UINT64_MAX, 8, "region 1");
}

/* A section put together by hand behind a small prefix. */
struct hand {
    uint8_t data[2048];
    size_t length;
};

#define HAND_PREFIX 5

static void hand_start(struct hand *hand)
{
    memset(hand, 'p', sizeof *hand);
    hand->length = HAND_PREFIX;
}

static void hand_field(struct hand *hand, uint32_t tag, const void *data,
                       size_t length)
{
    put_number(hand->data + hand->length, tag, 2);
    put_number(hand->data + hand->length + 2, length, 4);
    memcpy(hand->data + hand->length + 6, data, length);
    hand->length += 6 + length;
}

static void hand_end(struct hand *hand, uint32_t version)
{
    static const uint8_t magic[8] = {'k', 'v', 't', 0xa5, 'm', 'd', '\r', '\n'};

    put_number(hand->data + hand->length, hand->length - HAND_PREFIX, 4);
    put_number(hand->data + hand->length + 4, version, 4);
    memcpy(hand->data + hand->length + 16, magic, sizeof magic);
    hand->length += FOOTER_BYTES;
    sign(hand->data, hand->length);
}

enum { NO_NAME = 1, NO_ENGINE = 2, NO_INCARNATION = 4, NO_REGIONS = 8 };

static void hand_fields(struct hand *hand, unsigned without)
{
    const uint8_t zeros[KVTI_INCARNATION_BYTES] = {0};

    if ((without & NO_NAME) == 0) {
        hand_field(hand, TAG_AGENT_NAME, "name", 4);
    }
    if ((without & NO_ENGINE) == 0) {
        hand_field(hand, TAG_ENGINE, "local", 5);
    }
    if ((without & NO_INCARNATION) == 0) {
        hand_field(hand, TAG_INCARNATION, zeros, sizeof zeros);
    }
    if ((without & NO_REGIONS) == 0) {
        hand_field(hand, TAG_REGIONS, zeros, 4);
    }
}

static void unknown_fields_are_skipped(void **state)
{
    struct hand hand;
    struct kvti_md md;

    (void)state;
    hand_start(&hand);
    hand_field(&hand, 0, "", 0);
    hand_field(&hand, 999, "whatever", 8);
    hand_fields(&hand, 0);
    hand_field(&hand, 6, "new", 3);
    hand_field(&hand, 6, "and again", 9);
    hand_field(&hand, UINT16_MAX, "", 0);
    hand_end(&hand, 1);
    assert_int_equal(
        kvti_md_decode(hand.data, hand.length, REGIONS_MAX, &md, NULL), KVT_OK);
    assert_string_equal(md.agent_name, "name");
    assert_int_equal(md.prefix_length, HAND_PREFIX);
    assert_false(md.has_local);
    kvti_md_fini(&md);
}

static void every_field_but_the_identity_is_required(void **state)
{
    (void)state;
    for (unsigned without = NO_NAME; without <= NO_REGIONS; without *= 2) {
        struct hand hand;

        hand_start(&hand);
        hand_fields(&hand, without);
        hand_end(&hand, 1);
        expect_refused(hand.data, hand.length, "a field is missing");
    }
}

static void a_field_given_twice_is_refused(void **state)
{
    (void)state;
    for (unsigned twice = NO_NAME; twice <= NO_REGIONS; twice *= 2) {
        struct hand hand;

        hand_start(&hand);
        hand_fields(&hand, 0);
        hand_fields(&hand, 15 & ~twice);
        hand_end(&hand, 1);
        expect_refused(hand.data, hand.length, "a field comes twice");
    }
}

static void fields_of_the_wrong_length_are_refused(void **state)
{
    const char zeros[300] = {0};
    const struct {
        unsigned without;
        uint32_t tag;
        size_t length;
        const char *part;
    } rows[] = {
        {NO_NAME, TAG_AGENT_NAME, 0, "agent's name"},
        {NO_NAME, TAG_AGENT_NAME, 256, "agent's name"},
        {NO_ENGINE, TAG_ENGINE, 0, "engine's name"},
        {NO_ENGINE, TAG_ENGINE, 32, "engine's name"},
        {NO_INCARNATION, TAG_INCARNATION, 15, "incarnation"},
        {NO_INCARNATION, TAG_INCARNATION, 17, "incarnation"},
        {NO_REGIONS, TAG_REGIONS, 3, "fewer regions"},
        {NO_REGIONS, TAG_REGIONS, 5, "more regions"},
        {0, TAG_LOCAL, 0, "identity"},
        {0, TAG_LOCAL, 82, "identity"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct hand hand;

        hand_start(&hand);
        hand_field(&hand, rows[i].tag, zeros, rows[i].length);
        hand_fields(&hand, rows[i].without);
        hand_end(&hand, 1);
        expect_refused(hand.data, hand.length, rows[i].part);
    }
}

static void a_name_of_256_letters_is_too_long(void **state)
{
    char letters[256];
    struct hand hand;

    (void)state;
    memset(letters, 'x', sizeof letters);
    hand_start(&hand);
    hand_field(&hand, TAG_AGENT_NAME, letters, sizeof letters);
    hand_fields(&hand, NO_NAME);
    hand_end(&hand, 1);
    expect_refused(hand.data, hand.length, "agent's name");
}

static void lengths_that_overrun_are_refused(void **state)
{
    const uint32_t lengths[] = {7, 0x7fffffff, UINT32_MAX};

    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct hand hand;

        hand_start(&hand);
        hand_fields(&hand, 0);
        hand_field(&hand, 999, "abcdef", 6);
        put_number(hand.data + hand.length - 10, lengths[i], 4);
        hand_end(&hand, 1);
        expect_refused(hand.data, hand.length, "after its section");
        /* The section itself may not reach before the blob's begin. */
        hand_start(&hand);
        hand_fields(&hand, 0);
        hand_end(&hand, 1);
        put_number(hand.data + hand.length - FOOTER_BYTES,
                   hand.length - FOOTER_BYTES + lengths[i] % 1000 + 1, 4);
        sign(hand.data, hand.length);
        expect_refused(hand.data, hand.length, "longer than all of it");
    }
}

static void half_a_field_head_is_refused(void **state)
{
    struct hand hand;

    (void)state;
    hand_start(&hand);
    hand_fields(&hand, 0);
    hand.length += 5;
    hand_end(&hand, 1);
    expect_refused(hand.data, hand.length, "after its section");
}

static void other_versions_are_told_apart_from_damage(void **state)
{
    struct hand hand;

    (void)state;
    hand_start(&hand);
    hand_fields(&hand, 0);
    hand_end(&hand, 2);
    expect_refused(hand.data, hand.length, "has format 2");
}

/* ------------------------------------------------------------------ mutations */

static void mutate(struct rng *rng, uint8_t *data, size_t *length)
{
    const uint8_t telling[] = {0, 1, 2, 0x7f, 0x80, 0xff};
    size_t at = rng_below(rng, *length);
    size_t count;

    switch (rng_below(rng, 4)) {
    case 0:
        data[at] ^= (uint8_t)(1u << rng_below(rng, 8));
        break;
    case 1:
        data[at] = telling[rng_below(rng, sizeof telling)];
        break;
    case 2: /* some bytes leave */
        count = 1 + rng_below(rng, 8);
        if (at + count + FOOTER_BYTES < *length) {
            memmove(data + at, data + at + count, *length - at - count);
            *length -= count;
        }
        break;
    default: /* some bytes are set alike */
        count = 1 + rng_below(rng, 8);
        count = count < *length - at ? count : *length - at;
        memset(data + at, (int)telling[rng_below(rng, sizeof telling)], count);
        break;
    }
}

/* What decode took must be sane, whoever has made it. */
static void expect_sane(const struct kvti_md *md, size_t length)
{
    assert_in_range(strlen(md->agent_name), 1, KVT_NAME_MAX);
    assert_in_range(strlen(md->engine), 1, sizeof md->engine - 1);
    assert_true(md->prefix_length <= length);
    if (md->has_local) {
        assert_true(md->local.pid > 0);
        assert_true(md->local.gate_fd >= 0);
        assert_true(md->local.gate_bytes > 0);
        assert_true(memchr(md->local.socket_name, 0,
                           sizeof md->local.socket_name) != NULL);
        assert_true(memchr(md->local.boot_id, 0, sizeof md->local.boot_id) !=
                    NULL);
    }
    assert_true(md->regions.count <= length / 32);
    for (size_t i = 0; i < md->regions.count; i++) {
        const struct kvti_mem *mem = &md->regions.mems[i];

        assert_true(mem->kind <= KVT_VRAM);
        assert_true(mem->length > 0 && mem->addr <= UINT64_MAX - mem->length);
        assert_true(kvti_regions_cover(&md->regions, mem->addr, mem->length,
                                       mem->kind, mem->device));
    }
}

static void signed_mutations_are_refused_or_sane(void **state)
{
    struct rng rng = {20};
    size_t taken = 0;
    struct kvti_buf buf;
    uint8_t *data;

    (void)state;
    make_blob(&buf, true, 3);
    data = malloc(buf.length);
    assert_non_null(data);
    for (size_t round = 0; round < 20000; round++) {
        size_t length = buf.length;
        size_t changes = 1 + rng_below(&rng, 4);
        struct kvti_md md;
        struct kvt_error err;
        int code;

        memcpy(data, buf.data, length);
        for (size_t i = 0; i < changes; i++) {
            mutate(&rng, data, &length);
        }
        /* Not the magic: nothing behind it would be looked at. */
        memcpy(data + length - 8, buf.data + buf.length - 8, 8);
        sign(data, length);
        code = decode_copy(data, length, &md, &err);
        if (code == KVT_OK) {
            taken++;
            expect_sane(&md, length);
            kvti_md_fini(&md);
        } else {
            assert_int_equal(code, KVT_EMETADATA);
            assert_true(strlen(err.text) > 0);
        }
    }
    /* Both ways must have been taken for this to mean anything. */
    assert_in_range(taken, 1000, 19000);
    free(data);
    kvti_buf_fini(&buf);
}

/* --------------------------------------------------------------------- buffers */

static void a_buffer_grows_and_keeps_its_bytes(void **state)
{
    struct kvti_buf buf = {0};
    uint8_t bytes[7];

    (void)state;
    assert_int_equal(kvti_buf_append(&buf, NULL, 0), KVT_OK);
    assert_int_equal(buf.length, 0);
    for (size_t i = 0; i < 1000; i++) {
        memset(bytes, (int)(i & 0xff), sizeof bytes);
        assert_int_equal(kvti_buf_append(&buf, bytes, i % 8), KVT_OK);
    }
    for (size_t i = 0, at = 0; i < 1000; at += i % 8, i++) {
        for (size_t k = 0; k < i % 8; k++) {
            assert_int_equal(buf.data[at + k], i & 0xff);
        }
    }
    assert_int_equal(kvti_buf_append(&buf, bytes, SIZE_MAX), KVT_ENOMEM);
    assert_int_equal(buf.length, 125 * 28);
    kvti_buf_fini(&buf);
    kvti_buf_fini(&buf);
    kvti_buf_fini(NULL);
    kvti_md_fini(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_encoded_is_decoded),
        cmocka_unit_test(the_longest_names_and_no_regions_fit),
        cmocka_unit_test(device_memory_is_sent_without_its_file),
        cmocka_unit_test(ten_thousand_regions_take_32_bytes_each),
        cmocka_unit_test(a_blob_cut_at_any_byte_is_refused),
        cmocka_unit_test(any_flipped_bit_is_found),
        cmocka_unit_test(a_byte_too_many_is_found),
        cmocka_unit_test(nothing_and_noise_are_refused),
        cmocka_unit_test(insane_names_are_refused),
        cmocka_unit_test(insane_identities_are_refused),
        cmocka_unit_test(insane_regions_are_refused),
        cmocka_unit_test(unknown_fields_are_skipped),
        cmocka_unit_test(every_field_but_the_identity_is_required),
        cmocka_unit_test(a_field_given_twice_is_refused),
        cmocka_unit_test(fields_of_the_wrong_length_are_refused),
        cmocka_unit_test(a_name_of_256_letters_is_too_long),
        cmocka_unit_test(lengths_that_overrun_are_refused),
        cmocka_unit_test(half_a_field_head_is_refused),
        cmocka_unit_test(other_versions_are_told_apart_from_damage),
        cmocka_unit_test(signed_mutations_are_refused_or_sane),
        cmocka_unit_test(a_buffer_grows_and_keeps_its_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
