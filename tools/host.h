/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel of this host allows, as far as it matters to kvt. */
#ifndef KVT_TOOLS_HOST_H
#define KVT_TOOLS_HOST_H

#include <stdbool.h>
#include <stdint.h>

#define HOST_TEXT_MAX 160
#define HOST_UNLIMITED UINT64_MAX

struct host_limit {
    uint64_t soft; /* HOST_UNLIMITED */
    uint64_t hard;
};

/* A thing that was tried, with the reason where it did not work. */
struct host_probe {
    bool works;
    char why[HOST_TEXT_MAX];
};

struct host_facts {
    char kernel[HOST_TEXT_MAX];
    struct host_limit memlock_bytes;
    struct host_limit open_files;
    int64_t ptrace_scope;   /* -1: this kernel has no Yama */
    uint64_t max_map_count; /* 0: unknown */
    bool shm_exists;
    uint64_t shm_bytes; /* of /dev/shm */
    uint64_t shm_free_bytes;
    bool initial_user_namespace;
    bool initial_pid_namespace;
    char user_namespace[32]; /* "user:[4026531837]" */
    char pid_namespace[32];
    struct host_probe vm_write; /* process_vm_writev to a child */
    struct host_probe pidfd;    /* a child's death seen through it */
};

/* Starts and ends one child. Needs that no transport is open. */
void host_look(struct host_facts *ret);

#endif /* KVT_TOOLS_HOST_H */
