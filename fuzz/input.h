/* SPDX-License-Identifier: Apache-2.0 */
/* How a target reads its choices from the fuzzer's bytes. */
#ifndef KVT_FUZZ_INPUT_H
#define KVT_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *at;
    size_t left;
};

/* Past the end an input is all zeros. */
static inline uint8_t next_byte(struct input *input)
{
    if (input->left == 0) {
        return 0;
    }
    input->left--;
    return *input->at++;
}

/* One byte's worth: `limit` is at most 256. */
static inline uint64_t next_below(struct input *input, uint64_t limit)
{
    return next_byte(input) % limit;
}

static inline uint64_t next_bytes(struct input *input, unsigned count)
{
    uint64_t value = 0;

    for (unsigned i = 0; i < count; i++) {
        value |= (uint64_t)next_byte(input) << (8 * i);
    }
    return value;
}

/* Small in most cases; else close to where arithmetic goes wrong, or any. */
static inline uint64_t next_number(struct input *input)
{
    static const uint64_t edges[] = {0,
                                     UINT64_C(1) << 31,
                                     UINT64_C(1) << 32,
                                     UINT64_C(1) << 62,
                                     UINT64_C(1) << 63,
                                     UINT64_MAX};
    uint8_t way = next_byte(input);

    if (way < 200) {
        return way;
    }
    if (way < 248) {
        return edges[way % 6] + next_byte(input) - 128;
    }
    return next_bytes(input, 8);
}

#endif /* KVT_FUZZ_INPUT_H */
