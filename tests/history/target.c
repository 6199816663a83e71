/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A target: registers its pool, and takes it back when it is told. It writes
 * nothing itself but the seals after a deregister that kvt called complete.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "history.h"

/* Every incarnation has its pool at the same addresses, as far as the kernel
 * can: a write of an older one would be a valid one. */
#define POOL_HINT UINT64_C(0x7e9000000000)
/* While the initiator is stopped, in the middle of a write or not. */
#define REVOKE_NS UINT64_C(100000000)

struct target {
    struct arena *arena;
    kvt_transport *t;
    uint32_t number; /* of its pool */
    bool out;        /* deregistered */
    struct kvt_region region;
};

static int register_pool(struct target *self)
{
    struct pool *pool = &self->arena->head->pools[self->number];
    size_t length = 0;
    int code = kvt_register(self->t, &self->region, 1, 0, NULL);

    if (code == KVT_OK) {
        self->out = false;
        code = kvt_metadata(self->t, pool->metadata, METADATA_MAX, &length,
                            NULL);
    }
    pool->metadata_length = (uint32_t)length;
    return code;
}

static int open_target(struct target *self, const struct op *op)
{
    struct head *head = self->arena->head;
    uint32_t process = (uint32_t)op->arg[1];
    struct kvt_options options = {.size = sizeof options,
                                  .engine = head->engine,
                                  .grace_ns = head->grace_ns};
    char name[16];
    void *hint = (void *)(uintptr_t)(POOL_HINT + process * 4 * POOL_BYTES);
    void *at;
    int code;

    self->number = (uint32_t)op->arg[0];
    at = mmap(hint, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
              self->arena->fd, arena_offset(self->number));
    if (at == MAP_FAILED) {
        return KVT_ESYSTEM;
    }
    (void)snprintf(name, sizeof name, "target-%u", process);
    options.agent_name = name;
    code = kvt_open(&options, &self->t, NULL);
    if (code != KVT_OK) {
        return code;
    }
    self->region = (struct kvt_region){.addr = (uint64_t)(uintptr_t)at,
                                       .length = POOL_BYTES};
    if ((head->by_fd >> process & 1) != 0) {
        self->region.flags = KVT_REGION_FD;
        self->region.fd = self->arena->fd;
        self->region.fd_offset = (uint64_t)arena_offset(self->number);
    }
    head->pools[self->number].addr = self->region.addr;
    return register_pool(self);
}

/* KVT_EBUSY: a peer is stopped in the middle of a write; to be asked again. */
static int take_back(struct target *self)
{
    struct pool *pool = &self->arena->head->pools[self->number];
    uint32_t stopped = self->arena->head->stopped;
    int code = KVT_OK;

    if (!self->out) {
        code = kvt_deregister(self->t, &self->region, 1,
                              (stopped >> INITIATOR & 1) != 0 ? REVOKE_NS : 0,
                              NULL);
    }
    if (code == KVT_ETIMEDOUT) {
        return KVT_EBUSY;
    }
    if (code != KVT_OK && code != KVT_ENOENT) {
        return code;
    }
    self->out = true;
    pool->revision++;
    for (uint32_t i = 0; i < POOL_BLOCKS; i++) {
        stamp_seal(self->arena, self->number, i);
    }
    return register_pool(self);
}

_Noreturn void target_main(struct arena *arena, int fd)
{
    struct target self = {.arena = arena};
    struct op op;

    while (wire_receive(fd, &op, sizeof op, -1) > 0) {
        struct answer answer = {.verb = op.verb, .code = KVT_EINVAL};

        if (op.verb == VERB_OPEN) {
            answer.code = open_target(&self, &op);
        } else if (op.verb == VERB_REVOKE) {
            answer.code = take_back(&self);
        }
        if (!wire_send(fd, &answer, sizeof answer)) {
            break;
        }
    }
    _exit(0);
}
