/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that wait, and light ones that the caller of work() copies itself.
 *
 * Light chunks of one connection share everything that a copy costs beside its
 * bytes: the gate, the look at the target, the system call. They are copied as
 * if they were one chunk. If anything is wrong with that, each is copied once
 * more by itself, so that each gets its own verdict; bytes that are there
 * already are only written again, by the transfer that they belong to.
 *
 * The caller takes one group at a time off the queue: should the memory of one
 * peer not answer, another thread hands the others' to the workers. Like a
 * worker it is counted as living and uses nothing that is the control
 * thread's.
 */
#include "local.h"

#include <string.h>

/* What lies beyond waits for less when the workers share it. */
#define LIGHT_BYTES_QUEUED (UINT64_C(4) * KVTI_LIGHT_BYTES)

void kvti_local_put_locked(struct kvti_local_queue *queue,
                           struct kvti_chunk *chunk)
{
    kvti_list_append(&queue->chunks, &chunk->node);
    queue->count++;
    queue->bytes += chunk->bytes;
}

static void remove_locked(struct kvti_local_queue *queue,
                          struct kvti_chunk *chunk)
{
    kvti_list_remove(&chunk->node);
    queue->count--;
    queue->bytes -= chunk->bytes;
}

struct kvti_chunk *kvti_local_take_locked(struct kvti_local_queue *queue)
{
    struct kvti_chunk *chunk;

    if (queue->count == 0) {
        return NULL;
    }
    chunk = kvti_container(queue->chunks.next, struct kvti_chunk, node);
    remove_locked(queue, chunk);
    return chunk;
}

uint32_t kvti_local_take_all_locked(struct kvti_local_queue *queue,
                                    const struct kvti_local_conn *conn,
                                    struct kvti_list *ret)
{
    uint32_t count = 0;

    kvti_list_each(node, &queue->chunks) {
        struct kvti_chunk *chunk = kvti_container(node, struct kvti_chunk,
                                                  node);

        if (chunk->conn == conn) {
            remove_locked(queue, chunk);
            kvti_list_append(ret, &chunk->node);
            count++;
        }
    }
    return count;
}

bool kvti_local_is_light_locked(const struct kvti_local *engine,
                                const struct kvti_chunk *chunk)
{
    return kvti_is_light(chunk->count, chunk->bytes) &&
           engine->light.bytes <= LIGHT_BYTES_QUEUED;
}

/* Chunks that can be copied as one, and that one. */
struct group {
    struct kvti_chunk *chunks[KVTI_LIGHT_COPIES];
    uint32_t count;
    _Alignas(
        struct kvti_chunk) unsigned char memory[sizeof(struct kvti_chunk) +
                                                KVTI_LIGHT_COPIES *
                                                    sizeof(struct kvti_copy)];
};

static struct kvti_chunk *whole_of(struct group *group)
{
    return (struct kvti_chunk *)(void *)group->memory;
}

static bool fits(const struct kvti_chunk *whole, const struct kvti_chunk *chunk)
{
    return chunk->conn == whole->conn && chunk->op == whole->op &&
           chunk->local_kind == whole->local_kind &&
           chunk->local_device == whole->local_device &&
           chunk->peer_kind == whole->peer_kind &&
           chunk->peer_device == whole->peer_device &&
           chunk->count <= KVTI_LIGHT_COPIES - whole->count;
}

static void add(struct group *group, struct kvti_chunk *chunk)
{
    struct kvti_chunk *whole = whole_of(group);

    memcpy(&whole->copies[whole->count], chunk->copies,
           chunk->count * sizeof(chunk->copies[0]));
    whole->count += chunk->count;
    whole->bytes += chunk->bytes;
    group->chunks[group->count++] = chunk;
}

/* The first chunk of the queue, and those behind it that go with it. */
static bool take_group_locked(struct kvti_local *engine, struct group *group)
{
    struct kvti_chunk *whole = whole_of(group);
    struct kvti_chunk *chunk = engine->stop
                                   ? NULL
                                   : kvti_local_take_locked(&engine->light);

    if (chunk == NULL) {
        return false;
    }
    *whole = (struct kvti_chunk){.conn = chunk->conn,
                                 .op = chunk->op,
                                 .local_kind = chunk->local_kind,
                                 .local_device = chunk->local_device,
                                 .peer_kind = chunk->peer_kind,
                                 .peer_device = chunk->peer_device};
    group->count = 0;
    add(group, chunk);
    while (engine->light.count > 0) {
        chunk = kvti_container(engine->light.chunks.next, struct kvti_chunk,
                               node);
        if (!fits(whole, chunk)) {
            break;
        }
        remove_locked(&engine->light, chunk);
        add(group, chunk);
    }
    return true;
}

static void report(struct kvti_local *engine, struct kvti_chunk *chunk,
                   const struct kvti_outcome *outcome)
{
    if (kvti_local_report_begin(engine)) {
        engine->env->report_chunk(engine->env->ctx, chunk, outcome);
        kvti_local_report_end(engine);
    }
}

/* Reports the group; its connection may be gone afterwards. */
static void copy_group(struct kvti_local *engine, struct group *group)
{
    struct kvti_local_conn *conn = whole_of(group)->conn;
    struct kvti_outcome outcome;

    kvti_local_run(conn, whole_of(group), &outcome);
    for (uint32_t i = 0; i < group->count; i++) {
        struct kvti_chunk *chunk = group->chunks[i];

        if (outcome.state != KVT_DONE && group->count > 1) {
            struct kvti_outcome own;

            kvti_local_run(conn, chunk, &own);
            report(engine, chunk, &own);
        } else {
            report(engine, chunk, &outcome);
        }
    }
    kvti_local_conn_release(conn, group->count);
}

static void copy_here(struct kvti_local *engine)
{
    struct group group;

    pthread_mutex_lock(&engine->mu);
    atomic_store(&engine->quick.busy_since_ns, kvti_now_ns());
    while (take_group_locked(engine, &group)) {
        pthread_mutex_unlock(&engine->mu);
        copy_group(engine, &group);
        pthread_mutex_lock(&engine->mu);
    }
    atomic_store(&engine->quick.busy_since_ns, 0);
    kvti_local_thread_end_locked(engine);
    pthread_mutex_unlock(&engine->mu);
}

/* From here on the engine lives until copy_here() has ended. */
void kvti_local_leave(void *self)
{
    struct kvti_local *engine = self;

    pthread_mutex_lock(&engine->mu);
    engine->living++;
    pthread_mutex_unlock(&engine->mu);
}

static void hand_over(struct kvti_local *engine)
{
    struct kvti_chunk *chunk;

    do {
        pthread_mutex_lock(&engine->mu);
        chunk = kvti_local_take_locked(&engine->light);
        pthread_mutex_unlock(&engine->mu);
        if (chunk != NULL) {
            kvti_local_to_worker(engine, chunk);
        }
    } while (chunk != NULL);
}

void kvti_local_work(void *self, bool here)
{
    struct kvti_local *engine = self;

    if (here) {
        copy_here(engine);
    } else {
        hand_over(engine);
    }
}
