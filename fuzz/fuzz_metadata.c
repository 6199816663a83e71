/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding of untrusted metadata. Each input is tried as it is, as a blob
 * whose checksum and magic are put right, and as a section behind which a
 * right footer is put; the fuzzer could not find checksums by itself. What
 * decode takes must be sane, and must be the same again when it is encoded and
 * decoded once more.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include "diag.h"
#include "metadata.h"

#define FOOTER_BYTES 24
#define REGIONS_MAX 64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint8_t magic[8] = {'k', 'v', 't', 0xa5, 'm', 'd', '\r', '\n'};

static void put_number(uint8_t *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static void sign(uint8_t *data, size_t length)
{
    memcpy(data + length - sizeof magic, magic, sizeof magic);
    put_number(data + length - 16, XXH3_64bits(data, length - 16), 8);
}

static void check_same_mems(const struct kvti_regions *a,
                            const struct kvti_regions *b)
{
    kvti_assert(a->count == b->count);
    for (size_t i = 0; i < a->count; i++) {
        const struct kvti_mem *left = &a->mems[i];
        const struct kvti_mem *right = &b->mems[i];

        kvti_assert(kvti_mem_order(left, right) == 0);
        kvti_assert(left->flags == right->flags && left->fd == right->fd &&
                    left->fd_offset == right->fd_offset &&
                    left->fd_dev == right->fd_dev &&
                    left->fd_ino == right->fd_ino &&
                    left->gate_slot == right->gate_slot &&
                    left->gate_gen == right->gate_gen);
        kvti_assert(left->length > 0 &&
                    kvti_regions_cover(b, left->addr, left->length, left->kind,
                                       left->device));
    }
}

static void check_same_local(const struct kvti_local_id *a,
                             const struct kvti_local_id *b)
{
    kvti_assert(strcmp(a->boot_id, b->boot_id) == 0 &&
                strcmp(a->socket_name, b->socket_name) == 0 &&
                memcmp(a->nonce, b->nonce, sizeof a->nonce) == 0);
    kvti_assert(a->pid_ns == b->pid_ns && a->net_ns == b->net_ns &&
                a->start_time == b->start_time &&
                a->nonce_addr == b->nonce_addr && a->uid == b->uid);
    kvti_assert(a->pid > 0 && a->pid == b->pid && a->gate_fd >= 0 &&
                a->gate_fd == b->gate_fd && a->gate_bytes > 0 &&
                a->gate_bytes == b->gate_bytes);
}

static void check_round_trip(const struct kvti_md *md)
{
    struct kvti_buf buf = {0};
    struct kvti_md again;

    kvti_assert(kvti_buf_append(&buf, md->prefix, md->prefix_length) == KVT_OK);
    kvti_assert(kvti_md_encode(md, &buf) == KVT_OK);
    kvti_assert(kvti_md_decode(buf.data, buf.length, REGIONS_MAX, &again,
                               NULL) == KVT_OK);
    kvti_assert(again.prefix_length == md->prefix_length);
    kvti_assert(strlen(md->agent_name) > 0 && strlen(md->engine) > 0);
    kvti_assert(strcmp(again.agent_name, md->agent_name) == 0 &&
                strcmp(again.engine, md->engine) == 0);
    kvti_assert(memcmp(again.incarnation, md->incarnation,
                       sizeof md->incarnation) == 0);
    kvti_assert(again.has_local == md->has_local);
    if (md->has_local) {
        check_same_local(&again.local, &md->local);
    }
    check_same_mems(&again.regions, &md->regions);
    kvti_md_fini(&again);
    kvti_buf_fini(&buf);
}

static void decode(const uint8_t *data, size_t length)
{
    struct kvti_md md;
    struct kvt_error err;
    int code = kvti_md_decode(data, length, REGIONS_MAX, &md, &err);

    if (code == KVT_OK && !md.has_trailer) {
        /* NIXL's alone; fuzz_blob knows more of it. */
        kvti_assert(md.prefix_length == length && !md.has_local);
        kvti_md_fini(&md);
        return;
    }
    if (code == KVT_OK) {
        kvti_assert(md.prefix_length <= length - FOOTER_BYTES);
        check_round_trip(&md);
        kvti_md_fini(&md);
        return;
    }
    kvti_assert(code == KVT_EMETADATA && err.code == code);
    kvti_assert(err.text[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + FOOTER_BYTES);

    kvti_assert(copy != NULL);
    decode(data, size);
    if (size > 0) {
        memcpy(copy, data, size);
    }
    if (size >= FOOTER_BYTES) {
        sign(copy, size);
        decode(copy, size);
        memcpy(copy, data, size);
    }
    put_number(copy + size, size, 4);
    put_number(copy + size + 4, 1, 4);
    sign(copy, size + FOOTER_BYTES);
    decode(copy, size + FOOTER_BYTES);
    free(copy);
    return 0;
}
