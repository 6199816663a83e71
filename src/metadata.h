/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes that let a peer import an agent: whatever the engine's library
 * made of its own (a prefix, may be empty), then kvt's section, then a footer
 * found from the end. NIXL ignores bytes after its own, so its unmodified
 * peers load this too. Parsing trusts nothing.
 */
#ifndef KVTI_METADATA_H
#define KVTI_METADATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#define KVTI_NONCE_BYTES 32
#define KVTI_INCARNATION_BYTES 16
#define KVTI_SOCKET_NAME_MAX 64

/* How to reach the agent's process on its own host. */
struct kvti_local_id {
    char boot_id[40];    /* text of /proc/sys/kernel/random/boot_id */
    uint64_t pid_ns;     /* inode of /proc/self/ns/pid */
    uint64_t net_ns;     /* inode of /proc/self/ns/net: abstract sockets */
    uint64_t start_time; /* field 22 of /proc/PID/stat, clock ticks */
    uint64_t nonce_addr; /* where the nonce page lies in its memory */
    uint8_t nonce[KVTI_NONCE_BYTES];
    int32_t pid;
    uint32_t uid;
    int32_t gate_fd; /* number of the gate's memfd in its process */
    uint32_t gate_bytes;
    char socket_name[KVTI_SOCKET_NAME_MAX]; /* abstract, without the NUL */
};

struct kvti_md {
    const uint8_t *prefix; /* into the parsed bytes */
    size_t prefix_length;
    char agent_name[KVT_NAME_MAX + 1];
    char engine[32];  /* that wrote it: "local", "nixl" */
    bool has_trailer; /* false: plain NIXL's, checked by structure only */
    uint8_t incarnation[KVTI_INCARNATION_BYTES];
    bool has_local;
    struct kvti_local_id local;
    struct kvti_regions regions; /* cookie, refs and busy are 0 */
};

struct kvti_buf {
    uint8_t *data;
    size_t length;
    size_t capacity;
};

void kvti_buf_fini(struct kvti_buf *buf);
int kvti_buf_append(struct kvti_buf *buf, const void *data, size_t length);

/* Appends section and footer to `out`, which holds the prefix already. */
int kvti_md_encode(const struct kvti_md *md, struct kvti_buf *out);

/*
 * Fills *ret, which points into `data` and owns its regions. KVT_EMETADATA
 * with a sentence for anything that is not exactly what encode makes, also a
 * section whose checksum is right and whose content is not sane (regions that
 * wrap, names without end, counts that do not fit). `regions_max` bounds
 * memory. The one exception: bytes of NIXL's alone are read as far as their
 * structure goes, with an incarnation made from them and has_trailer false.
 */
int kvti_md_decode(const void *data, size_t length, uint32_t regions_max,
                   struct kvti_md *ret, struct kvt_error *err);
void kvti_md_fini(struct kvti_md *md);

#endif /* KVTI_METADATA_H */
