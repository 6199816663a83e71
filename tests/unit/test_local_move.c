/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers whose pieces lie in regions of every kind, through the public
 * calls: each side has one stretch of memory, of which one part is a sealed
 * memfd, one a memfd that may shrink, one private, and one a second sealed
 * memfd, all touching, so that pieces also cross from one into the next. What
 * the bytes must be afterwards is worked out by a plain loop, with guard bytes
 * around them. And the copy past the caches, byte by byte against memcpy, for
 * every alignment of both ends.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engines/local.h"
#include "kvt_assert.h"
#include "unit.h"

#define PARTS 4u
#define PART_BYTES ((size_t)512 * 1024)
#define SIDE_BYTES (PARTS * PART_BYTES)
#define GUARD 64u
#define PIECES_MAX 8192u

struct side {
    kvt_transport *transport;
    unsigned char *data;
    int fds[PARTS]; /* -1: private */
};

static void make_part(struct side *side, size_t part)
{
    unsigned char *at = side->data + part * PART_BYTES;
    int flags = MAP_SHARED | MAP_FIXED;
    int fd = memfd_create("part", MFD_ALLOW_SEALING | MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(posix_fallocate(fd, 0, (off_t)PART_BYTES), 0);
    if (part != 1) {
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    }
    if (part == 2) {
        close(fd);
        fd = -1;
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    }
    assert_ptr_equal(mmap(at, PART_BYTES, PROT_READ | PROT_WRITE, flags, fd, 0),
                     at);
    side->fds[part] = fd;
}

static void open_side(struct side *side, const char *name)
{
    const struct kvt_options options = {
        .size = sizeof options, .engine = "local", .agent_name = name};
    struct kvt_region regions[PARTS];

    memset(regions, 0, sizeof regions);
    side->data = mmap(NULL, SIDE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
    assert_ptr_not_equal(side->data, MAP_FAILED);
    for (size_t i = 0; i < PARTS; i++) {
        make_part(side, i);
        regions[i].addr = (uint64_t)(uintptr_t)side->data + i * PART_BYTES;
        regions[i].length = PART_BYTES;
        regions[i].fd = side->fds[i];
        regions[i].flags = side->fds[i] >= 0 ? KVT_REGION_FD : 0;
    }
    assert_kvt_ok(kvt_open(&options, &side->transport, NULL));
    assert_kvt_ok(kvt_register(side->transport, regions, PARTS, 0, NULL));
}

static void close_side(struct side *side)
{
    assert_kvt_ok(kvt_close(side->transport, 0, NULL));
    kvt_free(side->transport);
    munmap(side->data, SIDE_BYTES);
    for (size_t i = 0; i < PARTS; i++) {
        if (side->fds[i] >= 0) {
            close(side->fds[i]);
        }
    }
}

static kvt_peer add_peer(const struct side *ours, const struct side *theirs)
{
    static unsigned char bytes[65536];
    struct kvt_peer_params params = {
        .size = sizeof params, .name = "peer", .metadata = bytes};
    kvt_peer peer = 0;

    assert_kvt_ok(kvt_metadata(theirs->transport, bytes, sizeof bytes,
                               &params.metadata_length, NULL));
    assert_kvt_ok(kvt_peer_add(ours->transport, &params, &peer, NULL));
    return peer;
}

static void fill(struct rng *rng, unsigned char *data)
{
    for (size_t i = 0; i < SIDE_BYTES; i++) {
        data[i] = (unsigned char)rng_next(rng);
    }
}

/* Covers the destination once, in random lengths up to `longest`, with gaps;
 * sources lie anywhere. */
static size_t make_pieces(struct rng *rng, uint64_t longest, bool write,
                          const struct side *ours, const struct side *theirs,
                          struct kvt_copy *pieces)
{
    uint64_t at = GUARD + rng_below(rng, 200);
    size_t count = 0;

    while (count < PIECES_MAX) {
        uint64_t length = 1 + rng_below(rng, longest);
        uint64_t from;

        if (at + length + GUARD > SIDE_BYTES) {
            break;
        }
        from = rng_below(rng, SIDE_BYTES - length);
        pieces[count++] = (struct kvt_copy){
            .local_addr = (uint64_t)(uintptr_t)ours->data + (write ? from : at),
            .peer_addr = (uint64_t)(uintptr_t)theirs->data +
                         (write ? at : from),
            .length = length};
        at += length + rng_below(rng, 100);
    }
    for (size_t i = count; i > 1; i--) {
        size_t other = (size_t)rng_below(rng, i);
        struct kvt_copy swap = pieces[i - 1];

        pieces[i - 1] = pieces[other];
        pieces[other] = swap;
    }
    return count;
}

static void wait_result(kvt_transport *t, struct kvt_result *ret)
{
    while (kvt_poll(t, KVT_ANY, ret, 1) == 0) {
        struct pollfd fd = {.fd = kvt_fd(t), .events = POLLIN};

        assert_true(poll(&fd, 1, -1) >= 0);
    }
}

static void wait_done(kvt_transport *t)
{
    struct kvt_result result;

    wait_result(t, &result);
    if (result.state != KVT_DONE) {
        fail_msg("state %u: %s", result.state, result.text);
    }
}

static void move_round(struct rng *rng, const struct side *ours,
                       const struct side *theirs, kvt_peer peer, bool write)
{
    static unsigned char want[SIDE_BYTES];
    static struct kvt_copy pieces[PIECES_MAX];
    unsigned char *to = write ? theirs->data : ours->data;
    uint64_t longest = UINT64_C(1) << (6 + rng_below(rng, 13));
    size_t count;
    kvt_xfer xfer;

    fill(rng, ours->data);
    fill(rng, theirs->data);
    memcpy(want, to, SIDE_BYTES);
    count = make_pieces(rng, longest, write, ours, theirs, pieces);
    for (size_t i = 0; i < count; i++) {
        const unsigned char *local =
            (const unsigned char *)(uintptr_t)pieces[i].local_addr;
        const unsigned char *remote =
            (const unsigned char *)(uintptr_t)pieces[i].peer_addr;

        memcpy(want + ((write ? remote : local) - to), write ? local : remote,
               (size_t)pieces[i].length);
    }
    assert_kvt_ok((write ? kvt_write : kvt_read)(ours->transport, peer, pieces,
                                                 count, NULL, &xfer, NULL));
    wait_done(ours->transport);
    assert_memory_equal(to, want, SIDE_BYTES);
}

static void pieces_in_regions_of_every_kind_land_exactly(void **state)
{
    struct rng rng = {20261129};
    struct side ours;
    struct side theirs;
    kvt_peer peer;

    (void)state;
    open_side(&ours, "ours");
    open_side(&theirs, "theirs");
    peer = add_peer(&ours, &theirs);
    for (int round = 0; round < 16; round++) {
        move_round(&rng, &ours, &theirs, peer, round % 2 == 0);
    }
    close_side(&ours);
    close_side(&theirs);
}

/* Part 0 of both sides is sealed, and read by memcpy. */
static void read_only_pages_are_found_behind_writable_ones(void **state)
{
    struct side ours;
    struct side theirs;
    struct kvt_copy pieces[64];
    struct kvt_result result;
    kvt_peer peer;
    kvt_xfer xfer;

    (void)state;
    open_side(&ours, "ours");
    open_side(&theirs, "theirs");
    peer = add_peer(&ours, &theirs);
    memset(theirs.data, 3, SIDE_BYTES);
    memset(ours.data, 1, SIDE_BYTES);
    assert_int_equal(mprotect(ours.data + 40 * 4096, 4096, PROT_READ), 0);
    for (size_t i = 0; i < 64; i++) {
        pieces[i] = (struct kvt_copy){
            .local_addr = (uint64_t)(uintptr_t)ours.data + i * 4096,
            .peer_addr = (uint64_t)(uintptr_t)theirs.data + 4096 * (63 - i),
            .length = 4096};
    }
    assert_kvt_ok(
        kvt_read(ours.transport, peer, pieces, 64, NULL, &xfer, NULL));
    wait_result(ours.transport, &result);
    assert_int_equal(result.state, KVT_FAILED);
    assert_int_equal(result.code, KVT_EENGINE);
    assert_int_equal(ours.data[39 * 4096], 3);
    assert_int_equal(ours.data[40 * 4096], 1);
    close_side(&ours);
    close_side(&theirs);
}

/* ------------------------------------------------------------------ streaming */

static void a_stream_is_a_memcpy_at_any_alignment(void **state)
{
    enum { SPARE = 256, LONGEST = 5 * 16384 + SPARE };
    static unsigned char from[LONGEST + SPARE];
    static unsigned char to[LONGEST + SPARE];
    static unsigned char want[LONGEST + SPARE];
    const size_t lengths[] = {
        0,     1,         KVTI_STREAM_MIN - 1, 4096,  4097,   4096 + 63,
        16384, 16384 + 1, 16384 + 127,         65536, LONGEST};
    struct rng rng = {7};

    (void)state;
    for (size_t i = 0; i < sizeof from; i++) {
        from[i] = (unsigned char)rng_next(&rng);
    }
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (size_t round = 0; round < 64; round++) {
            size_t in = (size_t)rng_below(&rng, 65);
            size_t out = GUARD + round;

            memset(to, 0xa5, sizeof to);
            memset(want, 0xa5, sizeof want);
            memcpy(want + out, from + in, lengths[i]);
            kvti_local_stream(to + out, from + in, lengths[i]);
            kvti_local_stream_end();
            assert_memory_equal(to, want, sizeof to);
        }
    }
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(pieces_in_regions_of_every_kind_land_exactly),
    cmocka_unit_test(read_only_pages_are_found_behind_writable_ones),
    cmocka_unit_test(a_stream_is_a_memcpy_at_any_alignment),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("local_move", cases)};

    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
