/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's file-backed region in our own address space.
 *
 * What the metadata says of the file is checked against the file itself, and
 * nothing here fails an import: without the mapping the bytes go through the
 * peer's address space. The one thing that must never happen is a signal, so
 * `sealed` is set only for a memfd that can not shrink, has no hole that the
 * host might have no memory for, and no huge pages, of which the host may run
 * out at a fault.
 */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

/*
 * Pages are made to appear this many bytes at a time, by reading: 0.14 us a
 * page of a shared file, which may be written from then on, against 0.78 us for
 * a fault at each page's first write.
 */
#define EXTENT_BYTES (UINT64_C(256) << 10)

static bool is_the_file(const struct stat *st, const struct kvti_mem *mem)
{
    uint64_t end;

    return S_ISREG(st->st_mode) && st->st_dev == mem->fd_dev &&
           st->st_ino == mem->fd_ino && st->st_size >= 0 &&
           !__builtin_add_overflow(mem->fd_offset, mem->length, &end) &&
           end <= (uint64_t)st->st_size;
}

/* The peer's descriptor, opened again, or -1. */
static int open_file(const struct kvti_local_proc *proc,
                     const struct kvti_mem *mem)
{
    char path[64];
    struct stat st;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)proc->pid,
                   (int)mem->fd);
    /* The link's own mode bits say how the peer opened it. What it may not
     * write we must not write for it. */
    if (lstat(path, &st) != 0 ||
        (st.st_mode & (S_IRUSR | S_IWUSR)) != (S_IRUSR | S_IWUSR)) {
        return -1;
    }
    if (stat(path, &st) != 0 || !is_the_file(&st, mem)) {
        return -1;
    }
    fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd >= 0 && (fstat(fd, &st) != 0 || !is_the_file(&st, mem))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Every page of the file exists, so that none is made by touching it. */
static bool is_full(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_blocks >= (st.st_size + 511) / 512;
}

/* SEEK_HOLE takes a page that was allocated but never written for a hole; the
 * file's blocks count it. */
static bool is_sealed(int fd, const struct kvti_mem *mem)
{
    int seals = fcntl(fd, F_GET_SEALS);
    off_t hole;

    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return false;
    }
    if (is_full(fd)) {
        return true;
    }
    hole = lseek(fd, (off_t)mem->fd_offset, SEEK_HOLE);
    return hole >= 0 && (uint64_t)hole >= mem->fd_offset + mem->length;
}

/* Without memory for the bits the pages come one by one, at their faults. */
static void init_touched(struct kvti_local_map *map, bool full)
{
    size_t extents = map->length / EXTENT_BYTES + 1;

    map->touched = full ? calloc(extents / 64 + 1, sizeof(*map->touched))
                        : NULL;
}

void kvti_local_map_open(const struct kvti_local_proc *proc,
                         const struct kvti_mem *mem, struct kvti_local_map *ret)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct statfs fs;
    uint64_t skip;
    void *base;
    int fd;

    ret->base = NULL;
    if ((mem->flags & KVTI_MEM_FD) == 0 || mem->kind != KVT_DRAM ||
        mem->fd < 0 || mem->fd_offset > INT64_MAX) {
        return;
    }
    fd = open_file(proc, mem);
    if (fd < 0) {
        return;
    }
    skip = mem->fd_offset % page;
    if (fstatfs(fd, &fs) == 0 && fs.f_type != HUGETLBFS_MAGIC &&
        mem->length <= SIZE_MAX - skip) {
        base = mmap(NULL, (size_t)(mem->length + skip), PROT_READ | PROT_WRITE,
                    MAP_SHARED, fd, (off_t)(mem->fd_offset - skip));
        if (base != MAP_FAILED) {
            ret->base = base;
            ret->length = (size_t)(mem->length + skip);
            ret->skip = skip;
            ret->sealed = is_sealed(fd, mem);
            init_touched(ret, ret->sealed || is_full(fd));
        }
    }
    close(fd);
}

void kvti_local_map_close(struct kvti_local_map *map)
{
    if (map->base != NULL) {
        munmap(map->base, map->length);
        map->base = NULL;
        free(map->touched);
    }
}

/* Two threads may do the same work once; what fails is left to the faults. */
static void touch_extent(struct kvti_local_map *map, uint64_t extent)
{
    uint64_t bit = UINT64_C(1) << (extent % 64);
    size_t first = (size_t)(extent * EXTENT_BYTES);
    size_t left = map->length - first;

    if ((atomic_load_explicit(&map->touched[extent / 64],
                              memory_order_relaxed) &
         bit) != 0) {
        return;
    }
    (void)madvise(map->base + first, left < EXTENT_BYTES ? left : EXTENT_BYTES,
                  MADV_POPULATE_READ);
    atomic_fetch_or_explicit(&map->touched[extent / 64], bit,
                             memory_order_relaxed);
}

void kvti_local_map_touch(struct kvti_local_map *map, uint64_t skip,
                          uint64_t length)
{
    uint64_t last;

    if (map->touched == NULL || length == 0) {
        return;
    }
    last = (skip + length - 1) / EXTENT_BYTES;
    for (uint64_t i = skip / EXTENT_BYTES; i <= last; i++) {
        touch_extent(map, i);
    }
}
