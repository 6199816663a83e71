/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <kvt/kvt.h>

#include "diag.h"

/*
 * What one fallocate() asks for. On older kernels a signal undoes the whole
 * call, so under a profiler's timer a large one would never get through; 2 MiB
 * take less than a millisecond.
 */
#define ALLOCATE_BYTES ((uint64_t)2 * 1024 * 1024)

static const struct kvt_shm nothing = {.addr = NULL, .fd = -1};

/*
 * Bytes that the host can still give, or UINT64_MAX when that is not known.
 * A memfd has no limit of its own: asked for more than there is, the kernel
 * does not fail the call but kills a process, this one as a rule.
 */
static uint64_t available_bytes(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kib = 0;
    bool known = false;
    char line[128];

    if (file == NULL) {
        return UINT64_MAX;
    }
    while (fgets(line, (int)sizeof line, file) != NULL) {
        if (strncmp(line, "MemAvailable:", 13) == 0) {
            kib += strtoull(line + 13, NULL, 10);
            known = true;
        } else if (strncmp(line, "SwapFree:", 9) == 0) {
            kib += strtoull(line + 9, NULL, 10);
        }
    }
    (void)fclose(file);
    return known ? kib * 1024 : UINT64_MAX;
}

/* Makes all pages, so that no later touch can fail. Returns an errno. */
static int allocate(int fd, uint64_t size)
{
    uint64_t done = 0;

    while (done < size) {
        uint64_t left = size - done;
        uint64_t part = left < ALLOCATE_BYTES ? left : ALLOCATE_BYTES;

        if (fallocate(fd, 0, (off_t)done, (off_t)part) == 0) {
            done += part;
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static int fill(uint64_t size, struct kvt_shm *shm, struct kvt_error *err)
{
    void *addr;
    int failed;

    shm->fd = memfd_create("kvt", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    if (shm->fd < 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno, "memfd_create");
    }
    failed = allocate(shm->fd, size);
    if (failed != 0) {
        return kvti_fail_errno(
            err, KVT_ESYSTEM, failed,
            "fallocate of %" PRIu64 " bytes of shared memory", size);
    }
    if (fcntl(shm->fd, F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "fcntl(F_ADD_SEALS) on shared memory");
    }
    addr = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, shm->fd, 0);
    if (addr == MAP_FAILED) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "mmap of %" PRIu64 " bytes of shared memory",
                               size);
    }
    shm->addr = addr;
    shm->length = size;
    return KVT_OK;
}

int kvt_shm_create(uint64_t size, struct kvt_shm *ret, struct kvt_error *err)
{
    struct kvt_shm shm = nothing;
    int code;

    if (ret == NULL || size == 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "shared memory needs a size above 0 and a place for "
                         "the result");
    }
    if (size > (uint64_t)INT64_MAX || size > available_bytes()) {
        return kvti_fail_errno(err, KVT_ESYSTEM, ENOMEM,
                               "the host has not %" PRIu64
                               " bytes of memory left; ask for less",
                               size);
    }
    code = fill(size, &shm, err);
    if (code != KVT_OK) {
        if (shm.fd >= 0) {
            close(shm.fd);
        }
        return code;
    }
    *ret = shm;
    return KVT_OK;
}

void kvt_shm_destroy(struct kvt_shm *shm)
{
    if (shm == NULL) {
        return;
    }
    /* A zeroed struct owns nothing, and its fd 0 is somebody else's. */
    if (shm->addr != NULL) {
        munmap(shm->addr, shm->length);
        close(shm->fd);
    }
    *shm = nothing;
}
