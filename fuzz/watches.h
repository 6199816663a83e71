/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control thread's descriptors for targets that drive a part of the local
 * engine by themselves: nothing is called but when they say so.
 */
#ifndef KVT_FUZZ_WATCHES_H
#define KVT_FUZZ_WATCHES_H

#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>

#include "diag.h"
#include "engine.h"

#define WATCHES_MAX 32
#define DESCRIPTORS_MAX 128

struct watches {
    struct kvti_watch *of[WATCHES_MAX];
    size_t count;
    unsigned fail; /* so many of the next calls of watch() */
    bool failed;   /* one did */
};

static inline int watches_add(struct watches *watches, struct kvti_watch *watch)
{
    if (watches->fail > 0) {
        watches->fail--;
        watches->failed = true;
        return KVT_ESYSTEM;
    }
    for (size_t i = 0; i < watches->count; i++) {
        kvti_assert(watches->of[i] != watch && watches->of[i]->fd != watch->fd);
    }
    kvti_assert(watch->fd >= 0 && watches->count < WATCHES_MAX);
    watches->of[watches->count++] = watch;
    return KVT_OK;
}

static inline void watches_remove(struct watches *watches,
                                  struct kvti_watch *watch)
{
    size_t at = 0;

    while (at < watches->count && watches->of[at] != watch) {
        at++;
    }
    /* What is not watched may not be taken back. */
    kvti_assert(at < watches->count);
    watches->of[at] = watches->of[--watches->count];
}

static inline bool watches_has(const struct watches *watches,
                               const struct kvti_watch *watch)
{
    for (size_t i = 0; i < watches->count; i++) {
        if (watches->of[i] == watch) {
            return true;
        }
    }
    return false;
}

/* Tells those that have something, as they were when it began, as epoll would:
 * one that another closes is still told. Returns how many. poll()'s bits are
 * epoll's. */
static inline size_t watches_turn(struct watches *watches)
{
    struct kvti_watch *of[WATCHES_MAX];
    struct pollfd fds[WATCHES_MAX];
    size_t count = watches->count;
    size_t told = 0;

    for (size_t i = 0; i < count; i++) {
        of[i] = watches->of[i];
        fds[i] = (struct pollfd){.fd = of[i]->fd,
                                 .events = (short)of[i]->events};
    }
    kvti_assert(poll(fds, count, 0) >= 0);
    for (size_t i = 0; i < count; i++) {
        if (fds[i].revents != 0) {
            of[i]->ready(of[i], (uint32_t)fds[i].revents);
            told++;
        }
    }
    return told;
}

/* Open ones of the process: whoever has received one must have closed it. */
static inline int count_descriptors(void)
{
    int count = 0;

    for (int fd = 0; fd < DESCRIPTORS_MAX; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

#endif /* KVT_FUZZ_WATCHES_H */
