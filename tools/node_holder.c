/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A holder has every block, but not all at a time: its pool is as bounded as
 * the fetcher's. A block that is asked for and not in a slot is made there
 * from its id and the holder's secret, in place of the least recently used
 * one. A slot is pinned from then until the coordinator says that the transfer
 * is over.
 *
 * Parts are prepared in the order in which they come, and only the first one
 * of the queue may hold some of its slots while it waits for more; all others
 * in the pool are complete and will be released. So none waits for ever.
 */
#include "node.h"

#include <stdlib.h>

#include "cli.h"

struct prepare {
    struct prepare *next;
    uint64_t part;
    size_t count;
    size_t done;
    uint32_t *slots;
    uint64_t ids[];
};

struct node_holder {
    struct prepare *head;
    struct prepare **tail;
};

void holder_open(struct node *node)
{
    node->holder = cli_alloc(1, sizeof(*node->holder));
    node->holder->tail = &node->holder->head;
}

void holder_close(struct node *node)
{
    struct prepare *prepare;

    if (node->holder == NULL) {
        return;
    }
    while ((prepare = node->holder->head) != NULL) {
        node->holder->head = prepare->next;
        free(prepare->slots);
        free(prepare);
    }
    free(node->holder);
    node->holder = NULL;
}

/* The slot of a block, with a pin more; SLOT_NONE when all are pinned. */
static uint32_t hold_block(struct node *node, uint64_t id)
{
    uint32_t slot = slots_find(&node->slots, id);

    if (slot != SLOT_NONE) {
        slots_pin(&node->slots, slot);
        return slot;
    }
    slot = slots_take(&node->slots, id);
    if (slot != SLOT_NONE) {
        kvpool_fill(&node->pool, slot, node_block_key(node->config.secret, id));
        slots_settle(&node->slots, slot, 0);
    }
    return slot;
}

static bool prepare_blocks(struct node *node, struct prepare *prepare)
{
    while (prepare->done < prepare->count) {
        uint32_t slot = hold_block(node, prepare->ids[prepare->done]);

        if (slot == SLOT_NONE) {
            return false;
        }
        prepare->slots[prepare->done++] = slot;
    }
    return true;
}

static void prepare_parts(struct node *node)
{
    struct node_holder *holder = node->holder;
    struct prepare *prepare;

    while ((prepare = holder->head) != NULL && prepare_blocks(node, prepare)) {
        holder->head = prepare->next;
        if (holder->head == NULL) {
            holder->tail = &holder->head;
        }
        proto_begin(&node->control, PROTO_PREPARED);
        proto_put(&node->control, prepare->part);
        proto_put(&node->control, prepare->count);
        for (size_t i = 0; i < prepare->count; i++) {
            proto_put(&node->control, prepare->slots[i]);
        }
        proto_end(&node->control);
        free(prepare->slots);
        free(prepare);
    }
}

void holder_prepare(struct node *node, struct proto_message *message)
{
    struct node_holder *holder = node->holder;
    uint64_t part = proto_take(message);
    size_t count = proto_take_count(message, 1);
    struct prepare *prepare;

    if (holder == NULL || message->damaged || count > node->slots.count) {
        message->damaged = true;
        return;
    }
    prepare = cli_alloc(1, sizeof(*prepare) + count * sizeof(prepare->ids[0]));
    prepare->part = part;
    prepare->count = count;
    prepare->slots = cli_alloc(count, sizeof(*prepare->slots));
    for (size_t i = 0; i < count; i++) {
        prepare->ids[i] = proto_take(message);
    }
    *holder->tail = prepare;
    holder->tail = &prepare->next;
    prepare_parts(node);
}

void holder_unpin(struct node *node, struct proto_message *message)
{
    size_t count = proto_take_count(message, 1);

    for (size_t i = 0; i < count; i++) {
        uint64_t slot = proto_take(message);

        if (node->holder == NULL || slot >= node->slots.count ||
            node->slots.at[slot].pins == 0) {
            message->damaged = true;
            return;
        }
        slots_unpin(&node->slots, (uint32_t)slot);
    }
    prepare_parts(node);
}

/* Blocks that are not what they were made as. */
uint64_t holder_sweep(const struct node *node)
{
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < node->slots.count; i++) {
        const struct slot *slot = &node->slots.at[i];

        if (slot->state == SLOT_RESIDENT &&
            kvpool_checksum(&node->pool, i) !=
                kvpool_expected(
                    &node->pool.geometry,
                    node_block_key(node->config.secret, slot->id))) {
            wrong++;
        }
    }
    return wrong;
}
