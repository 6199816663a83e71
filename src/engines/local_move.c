/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving the bytes of one chunk, in one of three ways a piece:
 *
 *  memcpy       the peer's region is a sealed memfd that we have mapped, and
 *               our own memory cannot fault either: the fastest, and the only
 *               one that a fault would turn into a signal;
 *  our mapping  any other file of the peer's that we have mapped, by
 *               process_vm_writev into ourselves: a file cut short is EFAULT;
 *  the peer     everything else, by process_vm_writev into the peer.
 *
 * The kernel counts bytes, not elements: after a short count the next call
 * starts in the middle of an element, and so meets the fault at its very first
 * byte, which tells where it is.
 */
#include "local.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* More elements a call cost the kernel an allocation and gain nothing. */
#define BATCH 64u
/* Below the kernel's 2 GiB a call. */
#define BATCH_BYTES (UINT64_C(1) << 30)
/* Pieces between one that is copied and one that is fetched, and how much of
 * that one. */
#define AHEAD 2u
#define AHEAD_BYTES 512u
/* Less stays in the caches, where whoever reads it next finds it sooner. */
#define STREAM_BYTES (UINT64_C(64) << 10)

enum way { WAY_PEER, WAY_MAP, WAY_MEMCPY };

struct place {
    enum way way;
    uint64_t addr; /* in the peer, or in our mapping */
};

/* A region of one side: most pieces of a chunk lie in the same one, and to
 * look it up takes a lock. What is kept of it does not change while a chunk
 * uses the region. */
struct found {
    uint64_t addr;
    uint64_t length;            /* 0: none yet */
    struct kvti_local_map *map; /* the peer's: NULL if it is not mapped */
    bool safe;                  /* ours: memcpy can touch it */
};

struct mover {
    struct kvti_local_conn *conn;
    const struct kvti_chunk *chunk;
    struct found own;
    struct found peer;
    struct kvti_writable writable; /* of ours; empty: none known yet */
    bool stream;                   /* memcpy goes past the caches */
    uint32_t index;                /* of the piece that comes next */
    uint64_t offset;               /* bytes of it that are done */
};

static bool contains(const struct found *found, uint64_t addr, uint64_t length)
{
    return length <= found->length && addr >= found->addr &&
           addr - found->addr <= found->length - length;
}

static void keep(struct found *ret, const struct kvti_mem *mem)
{
    ret->addr = mem == NULL ? 0 : mem->addr;
    ret->length = mem == NULL ? 0 : mem->length;
}

/* Whether memcpy can touch our side. Registered memory stays mapped, but only
 * these two kinds cannot lose pages behind our back. */
static bool is_own_safe(struct mover *mover, uint64_t addr, uint64_t length)
{
    struct kvti_local *engine = mover->conn->engine;
    struct found *own = &mover->own;
    const struct kvti_mem *mem;

    if (!contains(own, addr, length)) {
        pthread_rwlock_rdlock(&engine->mem_lock);
        mem = kvti_regions_at(&engine->mems, addr, KVT_DRAM, 0);
        keep(own, mem);
        own->safe = mem != NULL &&
                    (mem->flags & (KVTI_MEM_ANON | KVTI_MEM_SEALED)) != 0;
        pthread_rwlock_unlock(&engine->mem_lock);
    }
    return own->safe && contains(own, addr, length);
}

/*
 * Registered memory is readable; whether it may be written is asked here, once
 * for each mapping that a chunk meets. Kernels that cannot tell are asked for
 * each piece, by a call that walks its pages.
 */
static bool is_writable(struct mover *mover, uint64_t addr, uint64_t length)
{
    struct kvti_writable *known = &mover->writable;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t first = addr / page * page;

    if (addr < known->lo || addr + length > known->hi) {
        struct kvti_writable found;

        if (kvti_local_find_writable(mover->conn->engine->maps_fd, addr,
                                     &found)) {
            *known = found;
        }
    }
    return (addr >= known->lo && addr + length <= known->hi) ||
           madvise((void *)(uintptr_t)first, (size_t)(addr - first + length),
                   MADV_POPULATE_WRITE) == 0;
}

/* Our mapping of the peer's region that holds the piece, or NULL. */
static struct kvti_local_map *find_map(struct mover *mover,
                                       const struct kvti_copy *copy)
{
    struct kvti_local_conn *conn = mover->conn;
    struct found *peer = &mover->peer;
    const struct kvti_mem *mem;

    if (!contains(peer, copy->peer, copy->length)) {
        /* The entries stay, but another worker may be at their reaches. */
        pthread_rwlock_rdlock(&conn->lock);
        mem = kvti_regions_at(&conn->regions, copy->peer, KVT_DRAM, 0);
        pthread_rwlock_unlock(&conn->lock);
        keep(peer, mem);
        peer->map = mem == NULL ? NULL : &conn->maps[mem - conn->regions.mems];
        if (peer->map != NULL && peer->map->base == NULL) {
            peer->map = NULL;
        }
    }
    return contains(peer, copy->peer, copy->length) ? peer->map : NULL;
}

static void find_place(struct mover *mover, const struct kvti_copy *copy,
                       struct place *ret)
{
    struct kvti_local_map *map = NULL;
    uint64_t skip;

    if (mover->conn->maps != NULL) {
        map = find_map(mover, copy);
    }
    if (map == NULL) {
        ret->way = WAY_PEER;
        ret->addr = copy->peer;
        return;
    }
    skip = map->skip + (copy->peer - mover->peer.addr);
    kvti_local_map_touch(map, skip, copy->length);
    ret->way = WAY_MAP;
    ret->addr = (uint64_t)(uintptr_t)map->base + skip;
    if (map->sealed && is_own_safe(mover, copy->local, copy->length) &&
        (mover->chunk->op == KVT_OP_WRITE ||
         is_writable(mover, copy->local, copy->length))) {
        ret->way = WAY_MEMCPY;
    }
}

static void advance(struct mover *mover, uint64_t bytes)
{
    const struct kvti_chunk *chunk = mover->chunk;

    while (mover->index < chunk->count) {
        uint64_t left = chunk->copies[mover->index].length - mover->offset;

        if (bytes < left) {
            mover->offset += bytes;
            return;
        }
        bytes -= left;
        mover->index++;
        mover->offset = 0;
    }
}

/*
 * Scattered small pieces wait for memory, one after the other; a look ahead
 * lets them wait together. A prefetch never faults, so it need not be known
 * whether that piece lies in the same region.
 */
static void look_ahead(const struct mover *mover, const struct place *place)
{
    const struct kvti_chunk *chunk = mover->chunk;
    const struct kvti_copy *copy = &chunk->copies[mover->index];
    const struct kvti_copy *next = copy + AHEAD;
    uint64_t length;

    if (chunk->count - mover->index <= AHEAD) {
        return;
    }
    length = next->length < AHEAD_BYTES ? next->length : AHEAD_BYTES;
    for (uint64_t at = 0; at < length; at += 64) {
        uint64_t peer = place->addr + (next->peer - copy->peer) + at;

        __builtin_prefetch((const void *)(uintptr_t)(next->local + at));
        __builtin_prefetch((const void *)(uintptr_t)peer, 1);
    }
}

static void move_by_memcpy(struct mover *mover, const struct place *place)
{
    const struct kvti_copy *copy = &mover->chunk->copies[mover->index];
    void *local = (void *)(uintptr_t)(copy->local + mover->offset);
    void *peer = (void *)(uintptr_t)(place->addr + mover->offset);
    size_t length = (size_t)(copy->length - mover->offset);
    bool out = mover->chunk->op == KVT_OP_WRITE;

    look_ahead(mover, place);
    if (mover->stream) {
        kvti_local_stream(out ? peer : local, out ? local : peer, length);
    } else {
        memcpy(out ? peer : local, out ? local : peer, length);
    }
    advance(mover, length);
}

/* Pieces from the mover's position on that go the way of the first. */
static unsigned fill_batch(struct mover *mover, const struct place *first,
                           struct iovec *local, struct iovec *peer)
{
    const struct kvti_chunk *chunk = mover->chunk;
    struct place place = *first;
    uint64_t offset = mover->offset;
    uint64_t bytes = 0;
    unsigned count = 0;

    for (uint32_t i = mover->index; i < chunk->count && count < BATCH; i++) {
        const struct kvti_copy *copy = &chunk->copies[i];
        uint64_t length = copy->length - offset;

        if (i != mover->index) {
            find_place(mover, copy, &place);
        }
        if (place.way != first->way) {
            break;
        }
        if (length > BATCH_BYTES - bytes) {
            length = BATCH_BYTES - bytes;
        }
        local[count].iov_base = (void *)(uintptr_t)(copy->local + offset);
        local[count].iov_len = (size_t)length;
        peer[count].iov_base = (void *)(uintptr_t)(place.addr + offset);
        peer[count].iov_len = (size_t)length;
        count++;
        bytes += length;
        if (bytes == BATCH_BYTES) {
            break;
        }
        offset = 0;
    }
    return count;
}

/* The bytes moved, which may be fewer, or -errno. */
static int64_t move_batch(struct mover *mover, const struct place *first)
{
    struct iovec local[BATCH];
    struct iovec peer[BATCH];
    unsigned count = fill_batch(mover, first, local, peer);
    pid_t pid = first->way == WAY_PEER ? mover->conn->target->proc->pid
                                       : mover->conn->engine->self.pid;
    ssize_t moved;

    do {
        moved = mover->chunk->op == KVT_OP_WRITE
                    ? process_vm_writev(pid, local, count, peer, count, 0)
                    : process_vm_readv(pid, local, count, peer, count, 0);
    } while (moved < 0 && errno == EINTR);
    if (moved == 0) {
        return -EFAULT;
    }
    return moved < 0 ? -errno : moved;
}

static bool is_readable(pid_t pid, uint64_t addr)
{
    unsigned char byte;
    struct iovec here = {.iov_base = &byte, .iov_len = 1};
    struct iovec there = {.iov_base = (void *)(uintptr_t)addr, .iov_len = 1};

    return process_vm_readv(pid, &here, 1, &there, 1, 0) == 1;
}

static void explain_fault(const struct mover *mover, const struct place *place,
                          struct kvti_outcome *ret)
{
    const struct kvti_copy *copy = &mover->chunk->copies[mover->index];
    unsigned long long local = copy->local + mover->offset;
    unsigned long long peer = copy->peer + mover->offset;
    pid_t self = mover->conn->engine->self.pid;
    const char *text;

    if (!is_readable(self, local)) {
        text = "our memory is not mapped";
    } else if (place->way == WAY_MAP) {
        text = "the file behind the peer's memory was cut short";
    } else if (!is_readable(mover->conn->target->proc->pid, peer)) {
        text = "the peer's memory is not mapped";
    } else if (mover->chunk->op == KVT_OP_WRITE) {
        text = "the peer's memory is read-only";
    } else {
        text = "our memory is read-only";
    }
    kvti_local_verdict(ret, KVT_FAILED, KVT_EENGINE, EFAULT,
                       "%s: our side 0x%llx, the peer's 0x%llx", text, local,
                       peer);
}

static void explain(const struct mover *mover, const struct place *place,
                    int os_errno, struct kvti_outcome *ret)
{
    int pid = mover->conn->target->proc->pid;

    switch (os_errno) {
    case EFAULT:
        explain_fault(mover, place, ret);
        break;
    case ESRCH:
        kvti_local_verdict(ret, KVT_DISCONNECTED, KVT_EDISCONNECTED, ESRCH,
                           "process %d is gone", pid);
        break;
    case EPERM:
        kvti_local_verdict(ret, KVT_FAILED, KVT_EPERM, EPERM,
                           "the kernel keeps this process out of process %d "
                           "now: it changed its user or its settings",
                           pid);
        break;
    case ENOSYS:
        kvti_local_verdict(ret, KVT_FAILED, KVT_EUNSUPPORTED, ENOSYS,
                           "a seccomp filter forbids process_vm_readv and "
                           "process_vm_writev now");
        break;
    case ENOMEM:
        kvti_local_verdict(ret, KVT_FAILED, KVT_ENOMEM, ENOMEM,
                           "the kernel has no memory to copy to or from "
                           "process %d",
                           pid);
        break;
    default:
        kvti_local_verdict(ret, KVT_FAILED, KVT_ESYSTEM, os_errno,
                           "copying to or from process %d failed with errno "
                           "%d",
                           pid, os_errno);
        break;
    }
}

static void move_all(struct mover *mover, struct kvti_outcome *ret)
{
    const struct kvti_chunk *chunk = mover->chunk;

    while (mover->index < chunk->count) {
        const struct kvti_copy *copy = &chunk->copies[mover->index];
        struct place place;
        int64_t moved;

        if (copy->length == 0) {
            advance(mover, 0);
            continue;
        }
        find_place(mover, copy, &place);
        if (place.way == WAY_MEMCPY) {
            move_by_memcpy(mover, &place);
            continue;
        }
        moved = move_batch(mover, &place);
        if (moved < 0) {
            explain(mover, &place, (int)-moved, ret);
            return;
        }
        advance(mover, (uint64_t)moved);
    }
}

void kvti_local_move(struct kvti_local_conn *conn,
                     const struct kvti_chunk *chunk, struct kvti_outcome *ret)
{
    struct mover mover = {
        .conn = conn, .chunk = chunk, .stream = chunk->bytes >= STREAM_BYTES};

    move_all(&mover, ret);
    if (mover.stream) {
        kvti_local_stream_end();
    }
}
