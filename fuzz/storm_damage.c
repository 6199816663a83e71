/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds are those of tests/nixl/interop/mutations.py. */
#include <string.h>

#include "diag.h"
#include "storm.h"

const char *const damage_names[DAMAGE_KINDS] = {
    "cut short",
    "one bit",
    "eight bits",
    "one byte",
    "a piece moved",
    "random bytes",
    "random bytes behind NIXL's first word"};

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t limit)
{
    return (size_t)(next(state) % limit);
}

static void move_piece(uint64_t *state, struct blob *blob)
{
    static uint8_t piece[BLOB_MAX];
    size_t a = below(state, blob->length);
    size_t b = below(state, blob->length);
    size_t low = a < b ? a : b;
    size_t length = (a < b ? b : a) - low;
    size_t rest = blob->length - length;
    size_t at = below(state, rest + 1);

    memcpy(piece, blob->bytes + low, length);
    memmove(blob->bytes + low, blob->bytes + low + length, rest - low);
    memmove(blob->bytes + at + length, blob->bytes + at, rest - at);
    memcpy(blob->bytes + at, piece, length);
}

static void make_noise(uint64_t *state, struct blob *blob, size_t from)
{
    size_t length = 1 + below(state, 2 * blob->length);

    for (size_t i = 0; i < length; i++) {
        blob->bytes[from + i] = (uint8_t)next(state);
    }
    blob->length = from + length;
}

static void damage_once(uint64_t *state, unsigned kind, struct blob *blob)
{
    size_t at = below(state, blob->length);

    switch (kind) {
    case 0:
        blob->length = at;
        break;
    case 1:
        blob->bytes[at] ^= (uint8_t)(1u << below(state, 8));
        break;
    case 2:
        for (unsigned i = 0; i < 8; i++) {
            blob->bytes[below(state, blob->length)] ^= (uint8_t)(1u << below(
                                                                     state, 8));
        }
        break;
    case 3:
        blob->bytes[at] = (uint8_t)next(state);
        break;
    case 4:
        move_piece(state, blob);
        break;
    case 5:
        make_noise(state, blob, 0);
        break;
    default:
        make_noise(state, blob, strlen("nixlSerDes|"));
        break;
    }
}

void damage(const struct blob *from, size_t prefix, unsigned kind,
            uint64_t seed, struct blob *ret)
{
    uint64_t state = seed;

    kvti_assert(from->length < BLOB_MAX / 3);
    do {
        *ret = *from;
        damage_once(&state, kind, ret);
    } while ((ret->length == from->length || ret->length == prefix) &&
             memcmp(ret->bytes, from->bytes, ret->length) == 0);
}
