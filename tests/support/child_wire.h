/* SPDX-License-Identifier: Apache-2.0 */
/* What the two sides of two_process.h say to each other. */
#ifndef KVT_TEST_CHILD_WIRE_H
#define KVT_TEST_CHILD_WIRE_H

#include <stdbool.h>

#include "node.h"

#define CHILD_ARGUMENT "--child-on-descriptor"
#define CHILD_NAME_BYTES 64
#define CHILD_BYTES_MAX (UINT32_C(1) << 26)

enum child_verb {
    CHILD_OPEN,
    CHILD_METADATA,
    CHILD_ADD,
    CHILD_PREPARE,
    CHILD_WRITE_ON,
    CHILD_FETCH,
    CHILD_FILL,
    CHILD_UNMAP,
    CHILD_REGISTER,
    CHILD_DEREGISTER,
    CHILD_CLOSE,
    CHILD_NOTIFY,
    CHILD_NOTE,
    CHILD_FIX_ADDRESSES,
    CHILD_EXEC,
    CHILD_FORK,
    CHILD_DROP_USER,
    CHILD_EXIT
};

/* Followed by `length` bytes, both ways. */
struct child_message {
    uint32_t verb;
    int32_t code;
    uint32_t length;
    uint32_t count;
    uint64_t id;
    uint64_t other;
    char name[CHILD_NAME_BYTES];
};

/* The bytes of CHILD_OPEN. */
struct child_plan {
    char engine[CHILD_NAME_BYTES];
    struct pool_shape shape;
    uint64_t seed;
    uint64_t grace_ns;
    uint32_t notify_max;
    uint32_t flags;
};

/* False: the other side is gone. `bytes` is malloc()ed, NULL when empty. */
bool child_send(int fd, const struct child_message *message, const void *bytes);
bool child_receive(int fd, struct child_message *message, void **ret_bytes);

#endif /* KVT_TEST_CHILD_WIRE_H */
