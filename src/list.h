/* SPDX-License-Identifier: Apache-2.0 */
/* A circular intrusive list. A node that is in no list points to itself. */
#ifndef KVTI_LIST_H
#define KVTI_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct kvti_list {
    struct kvti_list *next;
    struct kvti_list *prev;
};

#define kvti_container(ptr, type, member)                                      \
    ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

static inline void kvti_list_init(struct kvti_list *list)
{
    list->next = list;
    list->prev = list;
}

static inline bool kvti_list_empty(const struct kvti_list *list)
{
    return list->next == list;
}

static inline void kvti_list_append(struct kvti_list *list,
                                    struct kvti_list *node)
{
    node->prev = list->prev;
    node->next = list;
    list->prev->next = node;
    list->prev = node;
}

/* Leaves the node in no list; harmless on one that is in none. */
static inline void kvti_list_remove(struct kvti_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    kvti_list_init(node);
}

/* The first node, taken out, or NULL. */
static inline struct kvti_list *kvti_list_take(struct kvti_list *list)
{
    struct kvti_list *node = list->next;

    if (node == list) {
        return NULL;
    }
    /* Loops that take and free: the analyzer loses track of the links. */
    kvti_list_remove(node); /* NOLINT(clang-analyzer-unix.Malloc) */
    return node;
}

/* Moves all of `from` to the end of `list`. */
static inline void kvti_list_splice(struct kvti_list *list,
                                    struct kvti_list *from)
{
    if (kvti_list_empty(from)) {
        return;
    }
    from->next->prev = list->prev;
    list->prev->next = from->next;
    from->prev->next = list;
    list->prev = from->prev;
    kvti_list_init(from);
}

/* `node` may be removed from the list in the body. */
/* NOLINTBEGIN(bugprone-macro-parentheses): it declares a name. */
#define kvti_list_each(node, list)                                             \
    for (struct kvti_list *node = (list)->next, *node##_next = node->next;     \
         node != (list); node = node##_next, node##_next = node->next)
/* NOLINTEND(bugprone-macro-parentheses) */

#endif /* KVTI_LIST_H */
