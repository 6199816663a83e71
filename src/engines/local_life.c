/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a process shows its peers that it lives, so that they need not ask the
 * kernel.
 *
 * A word in the gate holds the id of a thread of the target, and the kernel has
 * it on the list of that thread's robust futexes. When the thread ends, however
 * it does, the kernel marks the word before it takes the thread's address space
 * away; an exec ends all threads but the one that called it, and this one never
 * does. A word that is not marked after a copy says that the process still had
 * its address space when the copy was made.
 *
 * The list is our own and lies in memory that is not shared: peers can write the
 * word, but no pointer that anybody follows. The C library's list takes its
 * place again at the end; in between robust mutexes that this thread takes are
 * not given up for it.
 *
 * A death can go unmarked where the kernel cannot read the list or write the word
 * any more, as when it took the memory of a process that it kills for want of
 * memory. So a writer asks as well, but not for each chunk (local_copy.c).
 */
#include "local.h"

#include <sys/syscall.h>
#include <unistd.h>

static bool get_list(struct robust_list_head **ret, size_t *ret_length)
{
    return syscall(SYS_get_robust_list, 0, ret, ret_length) == 0;
}

static bool set_list(const struct robust_list_head *head, size_t length)
{
    return syscall(SYS_set_robust_list, head, length) == 0;
}

/* A filter may only say that it was done. */
static bool is_list(const struct robust_list_head *head)
{
    struct robust_list_head *now = NULL;
    size_t length = 0;

    return get_list(&now, &length) && now == head;
}

void kvti_life_begin(struct kvti_life *life, struct kvti_gate_page *page)
{
    struct robust_list_head *before = NULL;
    size_t length = 0;

    life->before = NULL;
    if (!get_list(&before, &length) || before == NULL) {
        return;
    }
    life->node.next = &life->head.list;
    life->head = (struct robust_list_head){
        .list.next = &life->node,
        .futex_offset = (long)((intptr_t)&page->life - (intptr_t)&life->node)};
    if (!set_list(&life->head, sizeof(life->head))) {
        return;
    }
    life->before = before;
    life->before_length = length;
    if (is_list(&life->head)) {
        atomic_store(&page->life, (uint32_t)gettid());
    }
}

void kvti_life_end(struct kvti_life *life, struct kvti_gate_page *page)
{
    if (life->before != NULL) {
        atomic_store(&page->life, 0);
        (void)set_list(life->before, life->before_length);
    }
}

bool kvti_life_shown(const struct kvti_gate_page *page)
{
    uint32_t word = atomic_load(&page->life);

    return (word & FUTEX_TID_MASK) != 0 && (word & FUTEX_OWNER_DIED) == 0;
}
