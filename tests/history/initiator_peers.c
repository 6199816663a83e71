/* SPDX-License-Identifier: Apache-2.0 */
/* The initiator's calls that add, reload, unload and remove its targets. */
#include "initiator.h"

#define CALL_NS UINT64_C(20000000000)

struct kvt_run initiator_run(uint64_t addr)
{
    return (struct kvt_run){.addr = addr,
                            .block_bytes = BLOCK_BYTES,
                            .stride_bytes = BLOCK_BYTES,
                            .count = POOL_BLOCKS};
}

static int prepare_remote(struct initiator *self, struct remote *remote)
{
    const struct pool *pool = &self->arena->head->pools[remote->pool];
    struct kvt_run run = initiator_run(pool->addr);

    return kvt_prepare(self->t, remote->peer, "pool", &run, 1, &remote->layout,
                       NULL);
}

static int finish_change(struct initiator *self, int code)
{
    totals_of(self)->changes++;
    if (code != KVT_OK) {
        totals_of(self)->changes_failed++;
    }
    return code;
}

int initiator_add(struct initiator *self, uint32_t target)
{
    struct remote *remote = &self->remotes[target];
    uint32_t number = self->arena->head->current[target];
    const struct pool *pool = &self->arena->head->pools[number];
    char name[16];
    struct kvt_peer_params params = {
        .size = sizeof params,
        .name = name,
        .metadata = pool->metadata,
        .metadata_length = pool->metadata_length,
        .timeout_ns = CALL_NS,
    };
    int code;

    (void)snprintf(name, sizeof name, "target-%u", target);
    remote->known = false;
    code = kvt_peer_add(self->t, &params, &remote->peer, NULL);
    if (code == KVT_OK) {
        remote->pool = number;
        remote->revision = pool->revision;
        remote->known = true;
        code = prepare_remote(self, remote);
    }
    return finish_change(self, code);
}

/* With the newest metadata of the process that it is; another process is
 * another peer. */
int initiator_reload(struct initiator *self, uint32_t target)
{
    struct remote *remote = &self->remotes[target];
    const struct pool *pool = &self->arena->head->pools[remote->pool];
    int code;

    if (!remote->known || remote->pool != self->arena->head->current[target]) {
        return initiator_add(self, target);
    }
    code = kvt_peer_reload(self->t, remote->peer, pool->metadata,
                           pool->metadata_length, CALL_NS, NULL);
    if (code == KVT_OK) {
        remote->revision = pool->revision;
    }
    return finish_change(self, code);
}

int initiator_unload(struct initiator *self, uint32_t target)
{
    struct remote *remote = &self->remotes[target];

    if (!remote->known) {
        return KVT_OK;
    }
    return finish_change(self,
                         kvt_peer_unload(self->t, remote->peer, CALL_NS, NULL));
}

int initiator_forget(struct initiator *self, uint32_t target)
{
    struct remote *remote = &self->remotes[target];

    if (!remote->known) {
        return KVT_OK;
    }
    remote->known = false;
    return finish_change(self, kvt_peer_remove(self->t, remote->peer));
}
