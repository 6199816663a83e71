/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows about what others do to us: nothing at all, not answering, too much.
 *
 * CPU is read from each thread's schedstat, in ns, so that NIXL's and UCX's
 * threads count and a thread that ran in no tick counts too.
 */
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "small.h"

#define THREADS_MAX 128u

struct thread_time {
    uint64_t id;
    uint64_t ns;
    char name[32];
};

struct cpu {
    struct thread_time threads[THREADS_MAX];
    size_t count;
};

static bool read_line(const char *id, const char *name, char *text, int size)
{
    char path[64];
    FILE *file;
    bool good;

    (void)snprintf(path, sizeof(path), "/proc/self/task/%.20s/%.20s", id, name);
    file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    good = fgets(text, size, file) != NULL;
    (void)fclose(file);
    text[good ? strcspn(text, "\n") : 0] = '\0';
    return good;
}

static void read_cpu(struct cpu *ret)
{
    DIR *dir = opendir("/proc/self/task");
    struct dirent *entry;

    ret->count = 0;
    while (dir != NULL && ret->count < THREADS_MAX &&
           (entry = readdir(dir)) != NULL) {
        struct thread_time *thread = &ret->threads[ret->count];
        char text[64];

        if (entry->d_name[0] == '.' ||
            !read_line(entry->d_name, "schedstat", text, sizeof(text))) {
            continue;
        }
        thread->id = strtoull(entry->d_name, NULL, 10);
        thread->ns = strtoull(text, NULL, 10);
        (void)read_line(entry->d_name, "comm", thread->name,
                        sizeof(thread->name));
        ret->count++;
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
}

static uint64_t spent(const struct cpu *before,
                      const struct thread_time *thread)
{
    for (size_t i = 0; i < before->count; i++) {
        if (before->threads[i].id == thread->id) {
            return thread->ns - before->threads[i].ns;
        }
    }
    return thread->ns;
}

/* One line: per cent of a core in the whole process and by thread. */
static void measure_cpu(const struct small *small, uint64_t inflight)
{
    static struct cpu before;
    static struct cpu after;
    struct timespec pause = {.tv_sec = (time_t)small->seconds};
    uint64_t begin = cli_now_ns();
    uint64_t total = 0;
    double wall;

    read_cpu(&before);
    (void)nanosleep(&pause, NULL);
    read_cpu(&after);
    wall = (double)(cli_now_ns() - begin);
    for (size_t i = 0; i < after.count; i++) {
        total += spent(&before, &after.threads[i]);
    }
    printf("{\"name\": \"%s\", \"peers\": %llu, \"inflight\": %llu, "
           "\"seconds\": %.3f, \"cpu_percent\": %.4f, \"threads\": [",
           small->row, (unsigned long long)small->peers,
           (unsigned long long)inflight, wall / 1e9,
           (double)total * 100 / wall);
    for (size_t i = 0; i < after.count; i++) {
        printf("%s[\"%s\", %.4f]", i > 0 ? ", " : "", after.threads[i].name,
               (double)spent(&before, &after.threads[i]) * 100 / wall);
    }
    printf("]}\n");
}

/* Each peer has been written to once, so that its connection stands. */
static bool touch_peers(struct small *small)
{
    for (uint64_t i = 0; i < small->peers; i++) {
        struct kvt_copy copy = {
            .local_addr = (uint64_t)(uintptr_t)small->node.area.at,
            .peer_addr = small->at[i].addr,
            .length = 64,
        };
        struct pollfd wait = {.fd = kvt_fd(small->node.transport),
                              .events = POLLIN};
        struct kvt_result result;
        struct kvt_error err;
        kvt_xfer xfer;

        if (kvt_write(small->node.transport, small->at[i].id, &copy, 1, NULL,
                      &xfer, &err) != KVT_OK) {
            cli_error("small: %s", err.text);
            return false;
        }
        while (kvt_poll(small->node.transport, KVT_ANY, &result, 1) == 0) {
            (void)poll(&wait, 1, -1);
        }
        if (result.state != KVT_DONE) {
            cli_error("small: a peer cannot be written to: %s", result.text);
            return false;
        }
    }
    return true;
}

bool row_idle(struct small *small)
{
    small_default_shape(small, UINT64_C(64) << 10, 64);
    if (!small_set_up(small, small->peers != 0 ? small->peers : 4) ||
        !touch_peers(small)) {
        return false;
    }
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        measure_cpu(small, 0);
    }
    return true;
}

bool row_stuck(struct small *small)
{
    uint64_t inflight = small->inflight != 0 ? small->inflight : 100;

    small_default_shape(small, UINT64_C(64) << 10, 64);
    if (!small_set_up(small, 1) || !touch_peers(small)) {
        return false;
    }
    small_ready(small, 1);
    while (bench_next(&small->rounds)) {
        kvt_xfer xfer;

        if (kill(small->at[0].pid, SIGSTOP) != 0) {
            return false;
        }
        for (uint64_t i = 0; i < inflight; i++) {
            if (!small_submit(small, 0, small->shape.blocks, &xfer)) {
                return false;
            }
        }
        measure_cpu(small, inflight);
        if (kill(small->at[0].pid, SIGCONT) != 0 ||
            !small_drain(small, inflight)) {
            return false;
        }
    }
    return true;
}

/* -------------------------------------------------------------------- flood */

struct calls {
    struct histogram write;
    struct histogram poll;
    struct histogram done;
    struct histogram write_quiet; /* not preempted */
    struct histogram poll_quiet;
};

static void add_call(struct histogram *all, struct histogram *quiet,
                     uint64_t begin, uint64_t preemptions)
{
    uint64_t ns = cli_now_ns() - begin;

    histogram_add(all, ns);
    if (cli_preemptions() == preemptions) {
        histogram_add(quiet, ns);
    }
}

static bool make_calls(struct small *small, struct calls *calls)
{
    uint64_t preemptions = cli_preemptions();
    uint64_t submitted = cli_now_ns();
    uint64_t begin;
    struct kvt_result result;
    kvt_xfer xfer;
    int got;

    if (!small_submit(small, 0, 1, &xfer)) {
        return false;
    }
    add_call(&calls->write, &calls->write_quiet, submitted, preemptions);
    preemptions = cli_preemptions();
    begin = cli_now_ns();
    got = kvt_poll(small->node.transport, small->at[0].id, &result, 1);
    add_call(&calls->poll, &calls->poll_quiet, begin, preemptions);
    if (got == 0 && !small_drain(small, 1)) {
        return false;
    }
    histogram_add(&calls->done, cli_now_ns() - submitted);
    return true;
}

static bool run_flood(struct small *small, bool on, uint64_t count)
{
    static struct calls calls;

    /* The first tenth is not counted: the flood has to arrive. */
    for (uint64_t i = 0; i < count + count / 10; i++) {
        if (i == count / 10) {
            memset(&calls, 0, sizeof(calls));
        }
        if (!make_calls(small, &calls)) {
            return false;
        }
    }
    printf("{\"name\": \"flood\", \"on\": %s, ", on ? "true" : "false");
    small_times("write_blocks", &calls.write);
    printf(", ");
    small_times("write_blocks_not_preempted", &calls.write_quiet);
    printf(", ");
    small_times("poll", &calls.poll);
    printf(", ");
    small_times("poll_not_preempted", &calls.poll_quiet);
    printf(", ");
    small_times("done", &calls.done);
    printf("}\n");
    return true;
}

bool row_flood(struct small *small)
{
    uint64_t count = small->count != 0 ? small->count : 2000;

    small_default_shape(small, UINT64_C(64) << 10, 256);
    if (!small_set_up(small, 2) || !touch_peers(small) ||
        !peer_learn(&small->at[1], &small->node)) {
        return false;
    }
    small_ready(small, 2);
    while (bench_next(&small->rounds)) {
        if (!run_flood(small, false, count) ||
            !peer_flood(&small->at[1], true) ||
            !run_flood(small, true, count) ||
            !peer_flood(&small->at[1], false)) {
            return false;
        }
    }
    return true;
}
