/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the NIXL thread sleeps, and what wakes it.
 *
 * NIXL has no thread of its own here that would move what comes in: each of our
 * calls moves it on, so our thread has to call soon after bytes have come.
 * NIXL has no descriptor to wait on, but UCX's sockets hang on epoll instances
 * that it made with its backend. Whether one of those is readable can be asked
 * with poll(), which takes nothing away from anybody; so those that appeared
 * while the backends were made are hints. They are no more than that:
 * shared memory and RDMA have none, and one may be somebody else's who made it
 * in the same moment. So every sleep ends by itself, and a hint that is
 * ready time after time, though NIXL has nothing to do, is looked at less and
 * less: some hundred times a second in the end.
 *
 * The control thread writes the wake descriptor only while we sleep: `sleeping`
 * is set under mu after a last look at the lists, and what is put in them is
 * put there under mu.
 */
#include "nixl.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* After so many wake-ups for nothing in a row a hint is left out, each time
 * for longer. */
#define STRIKES_FREE 16u
#define MUTE_STEP_NS UINT64_C(20000)
#define MUTE_MOST_NS UINT64_C(5000000)

int kvti_nixl_wake_init(struct kvti_nixl *engine, struct kvt_error *err)
{
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake_fd < 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot open an event descriptor");
    }
    return KVT_OK;
}

void kvti_nixl_wake_fini(struct kvti_nixl *engine)
{
    if (engine->wake_fd >= 0) {
        close(engine->wake_fd);
    }
    engine->wake_fd = -1;
}

void kvti_nixl_wake_locked(struct kvti_nixl *engine)
{
    uint64_t one = 1;

    if (engine->sleeping) {
        engine->sleeping = false;
        while (write(engine->wake_fd, &one, sizeof(one)) < 0 &&
               errno == EINTR) {
        }
    }
}

/* ------------------------------------------------------------------- hints */

/* The epoll instances of this process. False: not all of them. */
static bool list_epolls(int fds[KVTI_NIXL_EPOLLS_MAX], uint32_t *ret_count)
{
    DIR *dir = opendir("/proc/self/fd");
    const struct dirent *entry;
    uint32_t count = 0;

    *ret_count = 0;
    if (dir == NULL) {
        return false;
    }
    /* One stream, this thread's. NOLINTNEXTLINE(concurrency-mt-unsafe) */
    while (count < KVTI_NIXL_EPOLLS_MAX && (entry = readdir(dir)) != NULL) {
        char target[32];
        ssize_t length;

        if (!isdigit((unsigned char)entry->d_name[0])) {
            continue;
        }
        length = readlinkat(dirfd(dir), entry->d_name, target, sizeof(target));
        if (length == sizeof("anon_inode:[eventpoll]") - 1 &&
            memcmp(target, "anon_inode:[eventpoll]", (size_t)length) == 0) {
            fds[count++] = (int)strtol(entry->d_name, NULL, 10);
        }
    }
    closedir(dir);
    *ret_count = count;
    return count < KVTI_NIXL_EPOLLS_MAX;
}

void kvti_nixl_hints_before(struct kvti_nixl_hints *hints)
{
    hints->all_known = list_epolls(hints->before, &hints->before_count);
}

static bool was_there(const struct kvti_nixl_hints *hints, int fd)
{
    for (uint32_t i = 0; i < hints->before_count; i++) {
        if (hints->before[i] == fd) {
            return true;
        }
    }
    return false;
}

void kvti_nixl_hints_after(struct kvti_nixl_hints *hints)
{
    int now[KVTI_NIXL_EPOLLS_MAX];
    uint32_t count;

    if (!hints->all_known) {
        return; /* nothing tells old from new */
    }
    (void)list_epolls(now, &count);
    for (uint32_t i = 0; i < count && hints->count < KVTI_NIXL_HINTS_MAX; i++) {
        if (!was_there(hints, now[i])) {
            hints->of[hints->count++] = (struct kvti_nixl_hint){.fd = now[i]};
        }
    }
}

/* Fills `fds` from 1 on with those that are not left out, and shortens the nap
 * to when the next one is to be looked at again. */
static uint32_t collect(const struct kvti_nixl_hints *hints, uint64_t now_ns,
                        struct pollfd *fds, uint32_t *which, uint64_t *nap_ns)
{
    uint32_t count = 1;

    for (uint32_t i = 0; i < hints->count; i++) {
        uint64_t until_ns = hints->of[i].mute_until_ns;

        if (until_ns <= now_ns) {
            which[count] = i;
            fds[count++] = (struct pollfd){.fd = hints->of[i].fd,
                                           .events = POLLIN};
        } else if (until_ns != UINT64_MAX && until_ns - now_ns < *nap_ns) {
            *nap_ns = until_ns - now_ns;
        }
    }
    return count;
}

void kvti_nixl_hints_worked(struct kvti_nixl_hints *hints)
{
    for (uint32_t i = 0; i < hints->count; i++) {
        struct kvti_nixl_hint *hint = &hints->of[i];

        hint->strikes = 0;
        if (hint->mute_until_ns != UINT64_MAX) {
            hint->mute_until_ns = 0;
        }
    }
}

/* A hint was ready. Whether it is worth more than one look. */
static bool strike(struct kvti_nixl_hint *hint, short events, uint64_t now_ns)
{
    uint64_t mute_ns;

    if ((events & POLLNVAL) != 0) {
        hint->mute_until_ns = UINT64_MAX; /* it was closed: not UCX's */
        return false;
    }
    if (++hint->strikes <= STRIKES_FREE) {
        return true;
    }
    mute_ns = (hint->strikes - STRIKES_FREE) * MUTE_STEP_NS;
    mute_ns = mute_ns < MUTE_MOST_NS ? mute_ns : MUTE_MOST_NS;
    hint->mute_until_ns = now_ns + mute_ns;
    return false;
}

/* ------------------------------------------------------------------- sleep */

static bool has_input_locked(const struct kvti_nixl *engine)
{
    return engine->stop || engine->settle || engine->notes_wanted ||
           !kvti_list_empty(&engine->jobs) || !kvti_list_empty(&engine->chunks);
}

static bool begin(struct kvti_nixl *engine)
{
    bool sleeping;

    pthread_mutex_lock(&engine->mu);
    sleeping = !has_input_locked(engine);
    engine->sleeping = sleeping;
    if (!engine->holding) {
        engine->notes_wanted = false;
    }
    pthread_mutex_unlock(&engine->mu);
    return sleeping;
}

static void end(struct kvti_nixl *engine, bool woken)
{
    uint64_t count;

    pthread_mutex_lock(&engine->mu);
    engine->sleeping = false;
    pthread_mutex_unlock(&engine->mu);
    while (woken && read(engine->wake_fd, &count, sizeof(count)) < 0 &&
           errno == EINTR) {
    }
}

bool kvti_nixl_sleep(struct kvti_nixl *engine, uint64_t now_ns, uint64_t nap_ns)
{
    struct kvti_nixl_hints *hints = &engine->hints;
    struct pollfd fds[1 + KVTI_NIXL_HINTS_MAX];
    uint32_t which[1 + KVTI_NIXL_HINTS_MAX];
    struct timespec nap;
    bool hinted = false;
    uint32_t count;

    fds[0] = (struct pollfd){.fd = engine->wake_fd, .events = POLLIN};
    count = collect(hints, now_ns, fds, which, &nap_ns);
    nap = (struct timespec){.tv_sec = (time_t)(nap_ns / 1000000000u),
                            .tv_nsec = (long)(nap_ns % 1000000000u)};
    if (!begin(engine)) {
        return true;
    }
    if (ppoll(fds, count, nap_ns == UINT64_MAX ? NULL : &nap, NULL) <= 0) {
        end(engine, false);
        return false;
    }
    end(engine, fds[0].revents != 0);
    for (uint32_t i = 1; i < count; i++) {
        if (fds[i].revents != 0) {
            hinted |= strike(&hints->of[which[i]], fds[i].revents, now_ns);
        }
    }
    return hinted || fds[0].revents != 0;
}
