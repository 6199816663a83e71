/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine can do with a list of blocks, whoever drives it:
 *
 *   memcpy  into our own mapping of the destination
 *   nt      the same with non-temporal stores
 *   pvw     process_vm_writev into the process that owns the destination
 *   self    process_vm_writev into our own mapping of the destination
 *
 * each by every number of threads asked for, and by the system calls with every
 * batch asked for. Neighbours of the list are merged, pieces of a merged run
 * are at most --piece bytes, and the threads take batches from one counter, so
 * that none is idle while another has work: a limit, not a program.
 *
 * The destination of pvw is a child's: of its own where it is private memory,
 * else the same pages as ours. The child sleeps. Each way is proved once before
 * the rounds: the destination is cleared, written, and every word compared by
 * the process that owns it.
 *
 * The helping threads sleep between rounds, and a round's time begins before
 * they are woken. The calling thread works too, so that one thread is a plain
 * loop.
 */
#include "limits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ------------------------------------------------------------- one thread */

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_nt(unsigned char *to,
                                                    const unsigned char *from,
                                                    uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 64) {
        __m256i a = _mm256_loadu_si256((const void *)(from + i));
        __m256i b = _mm256_loadu_si256((const void *)(from + i + 32));

        _mm256_stream_si256((void *)(to + i), a);
        _mm256_stream_si256((void *)(to + i + 32), b);
    }
    _mm_sfence();
}

bool limits_has_nt(void)
{
    return __builtin_cpu_supports("avx2") != 0;
}
#else
static void copy_nt(unsigned char *to, const unsigned char *from,
                    uint64_t bytes)
{
    memcpy(to, from, bytes);
}

bool limits_has_nt(void)
{
    return false;
}
#endif

static bool move_vectors(const struct limits_work *work, size_t first,
                         size_t count)
{
    struct iovec local[LIMITS_IOV_MAX];
    struct iovec remote[LIMITS_IOV_MAX];
    uint64_t bytes = 0;
    ssize_t moved;

    for (size_t i = 0; i < count; i++) {
        const struct bench_copy *copy = &work->list.copies[first + i];

        local[i].iov_base = (void *)(uintptr_t)(work->from + copy->from);
        local[i].iov_len = copy->length;
        remote[i].iov_base = work->to + copy->to;
        remote[i].iov_len = copy->length;
        bytes += copy->length;
    }
    moved = process_vm_writev(work->pid, local, count, remote, count, 0);
    return moved >= 0 && (uint64_t)moved == bytes;
}

static bool move_some(const struct limits_work *work, size_t first,
                      size_t count)
{
    if (work->config.way == WAY_PVW || work->config.way == WAY_SELF) {
        return move_vectors(work, first, count);
    }
    for (size_t i = first; i < first + count; i++) {
        const struct bench_copy *copy = &work->list.copies[i];

        if (work->config.way == WAY_NT) {
            copy_nt(work->to + copy->to, work->from + copy->from, copy->length);
        } else {
            memcpy(work->to + copy->to, work->from + copy->from, copy->length);
        }
    }
    return true;
}

static void take_part(struct limits_work *work)
{
    size_t batch = work->config.batch;

    for (;;) {
        size_t first = atomic_fetch_add(&work->next, batch);
        size_t count;

        if (first >= work->list.count) {
            return;
        }
        count = work->list.count - first < batch ? work->list.count - first
                                                 : batch;
        if (!move_some(work, first, count)) {
            atomic_store(&work->failed, true);
            return;
        }
    }
}

/* ---------------------------------------------------------------- the team */

struct helper {
    struct limits_team *team;
    unsigned index;
};

static void *help(void *arg)
{
    struct helper *helper = arg;
    struct limits_team *team = helper->team;
    unsigned seen = 0;

    if (team->pin) {
        bench_pin(helper->index);
    }
    for (;;) {
        pthread_mutex_lock(&team->mu);
        while (team->round == seen || helper->index >= team->wanted) {
            seen = team->round;
            pthread_cond_wait(&team->begin, &team->mu);
        }
        seen = team->round;
        pthread_mutex_unlock(&team->mu);
        take_part(&team->work);
        pthread_mutex_lock(&team->mu);
        if (--team->busy == 0) {
            pthread_cond_signal(&team->end);
        }
        pthread_mutex_unlock(&team->mu);
    }
    return NULL;
}

/* They live as long as the process. */
static bool start_team(struct limits_team *team, unsigned threads)
{
    static struct helper helpers[LIMITS_THREADS_MAX];

    (void)pthread_mutex_init(&team->mu, NULL);
    (void)pthread_cond_init(&team->begin, NULL);
    (void)pthread_cond_init(&team->end, NULL);
    for (unsigned i = 1; i < threads; i++) {
        pthread_t thread;

        helpers[i] = (struct helper){.team = team, .index = i};
        if (pthread_create(&thread, NULL, help, &helpers[i]) != 0) {
            cli_error("limits: no %u threads can be started", threads);
            return false;
        }
        (void)pthread_detach(thread);
    }
    if (team->pin) {
        bench_pin(0);
    }
    return true;
}

/* The work stands in team->work; false when a call failed or fell short. */
static bool run_team(struct limits_team *team, uint64_t *ret_ns)
{
    unsigned threads = team->work.config.threads;
    uint64_t begin = cli_now_ns();

    atomic_store(&team->work.next, 0);
    atomic_store(&team->work.failed, false);
    if (threads > 1) {
        pthread_mutex_lock(&team->mu);
        team->wanted = threads;
        team->busy = threads - 1;
        team->round++;
        pthread_cond_broadcast(&team->begin);
        pthread_mutex_unlock(&team->mu);
    }
    take_part(&team->work);
    if (threads > 1) {
        pthread_mutex_lock(&team->mu);
        while (team->busy > 0) {
            pthread_cond_wait(&team->end, &team->mu);
        }
        pthread_mutex_unlock(&team->mu);
    }
    *ret_ns = cli_now_ns() - begin;
    return !atomic_load(&team->work.failed);
}

/* --------------------------------------------------------------- the owner */

/* 'c' clears, 'k' compares; each is answered by one byte, 1 for good. */
static void serve_owner(const struct limits *limits, int socket)
{
    struct bench_area area = limits->to;
    unsigned char order;

    bench_follow_parent();
    if (limits->to_kind == BENCH_ANON &&
        !bench_area_open(BENCH_ANON, limits->to.bytes, &area)) {
        _exit(CLI_FAILED);
    }
    if (write(socket, &area.at, sizeof(area.at)) != sizeof(area.at)) {
        _exit(CLI_FAILED);
    }
    while (read(socket, &order, 1) == 1) {
        unsigned char answer = 1;

        if (order == 'c') {
            memset(area.at, 0, area.bytes);
        } else {
            answer = bench_check(&limits->shape, area.at);
        }
        if (write(socket, &answer, 1) != 1) {
            break;
        }
    }
    _exit(CLI_OK);
}

static bool start_owner(struct limits *limits)
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        return false;
    }
    limits->owner.pid = fork();
    if (limits->owner.pid == 0) {
        (void)close(pair[0]);
        serve_owner(limits, pair[1]);
    }
    (void)close(pair[1]);
    limits->owner.socket = pair[0];
    return limits->owner.pid > 0 &&
           read(pair[0], &limits->owner.at, sizeof(limits->owner.at)) ==
               sizeof(limits->owner.at);
}

static bool ask_owner(const struct limits *limits, unsigned char order)
{
    unsigned char answer = 0;

    return write(limits->owner.socket, &order, 1) == 1 &&
           read(limits->owner.socket, &answer, 1) == 1 && answer == 1;
}

/* ------------------------------------------------------------------ rounds */

static bool run_config(struct limits *limits,
                       const struct limits_config *config,
                       const struct limits_list *list, uint64_t *ret_ns)
{
    struct limits_work *work = &limits->team.work;
    bool foreign = config->way == WAY_PVW;

    work->config = *config;
    work->list = *list;
    work->from = limits->from.at;
    work->to = foreign ? limits->owner.at : limits->to.at;
    work->pid = foreign ? limits->owner.pid : getpid();
    if (!run_team(&limits->team, ret_ns)) {
        cli_error("limits: %s moved not all: errno %d",
                  limits_ways[config->way], errno);
        return false;
    }
    return true;
}

static bool prove(struct limits *limits, const struct limits_config *config)
{
    bool foreign = config->way == WAY_PVW;
    uint64_t ns;
    bool good;

    if (!foreign) {
        memset(limits->to.at, 0, limits->to.bytes);
    } else if (!ask_owner(limits, 'c')) {
        return false;
    }
    if (!run_config(limits, config, &limits->lists[0], &ns)) {
        return false;
    }
    good = foreign ? ask_owner(limits, 'k')
                   : bench_check(&limits->shape, limits->to.at);
    if (!good) {
        cli_error("limits: %s wrote something wrong", limits_ways[config->way]);
    }
    return good;
}

static void print_ready(const struct limits *limits)
{
    printf("{\"name\": \"limits\", \"ready\": true, \"lines\": %zu, "
           "\"from\": \"%s\", \"to\": \"%s\", \"order\": \"%s\", "
           "\"block_bytes\": %llu, \"blocks\": %llu, \"pool\": %llu, "
           "\"copies\": %zu, \"pinned\": %s}\n",
           limits->config_count, bench_kind_name(limits->from_kind),
           bench_kind_name(limits->to_kind),
           bench_order_name(limits->shape.order),
           (unsigned long long)limits->shape.block_bytes,
           (unsigned long long)limits->shape.blocks,
           (unsigned long long)limits->shape.pool, limits->lists[0].count,
           limits->pin ? "true" : "false");
}

static void print_line(const struct limits *limits,
                       const struct limits_config *config, uint64_t ns)
{
    uint64_t bytes = bench_shape_bytes(&limits->shape);

    printf("{\"name\": \"%s_t%u", limits_ways[config->way], config->threads);
    if (config->way == WAY_PVW || config->way == WAY_SELF) {
        printf("_iov%u", config->batch);
    }
    printf("\", \"method\": \"%s\", \"from\": \"%s\", \"to\": \"%s\", "
           "\"order\": \"%s\", \"block_bytes\": %llu, \"blocks\": %llu, "
           "\"threads\": %u, \"iov\": %u, \"pinned\": %s, \"bytes\": %llu, "
           "\"seconds\": %.9f, \"gb_per_s\": %.3f}\n",
           limits_ways[config->way], bench_kind_name(limits->from_kind),
           bench_kind_name(limits->to_kind),
           bench_order_name(limits->shape.order),
           (unsigned long long)limits->shape.block_bytes,
           (unsigned long long)limits->shape.blocks, config->threads,
           config->batch, limits->pin ? "true" : "false",
           (unsigned long long)bytes, (double)ns / 1e9,
           (double)bytes / (double)ns);
}

static bool run_rounds(struct limits *limits)
{
    for (size_t i = 0; i < limits->config_count; i++) {
        if (!prove(limits, &limits->configs[i])) {
            return false;
        }
    }
    print_ready(limits);
    while (bench_next(&limits->rounds)) {
        for (size_t i = 0; i < limits->config_count; i++) {
            unsigned which = limits->turn++ % LIMITS_LISTS;
            uint64_t ns;

            if (!run_config(limits, &limits->configs[i], &limits->lists[which],
                            &ns)) {
                return false;
            }
            print_line(limits, &limits->configs[i], ns);
        }
    }
    return true;
}

static void make_lists(struct limits *limits)
{
    struct bench_shape shape = limits->shape;

    for (unsigned i = 0; i < LIMITS_LISTS; i++) {
        struct limits_list *list = &limits->lists[i];

        list->count = bench_copies(&shape, limits->piece, &list->copies);
        shape.seed++;
    }
}

/* The child comes first: what is private to us when it is made would be copied
 * at the first write. */
static bool set_up(struct limits *limits)
{
    uint64_t bytes = limits->shape.pool * limits->shape.block_bytes;
    bool own_to = limits->to_kind != BENCH_ANON || limits->used[WAY_MEMCPY] ||
                  limits->used[WAY_NT] || limits->used[WAY_SELF];

    limits->to.bytes = bytes;
    if (limits->to_kind != BENCH_ANON &&
        !bench_area_open(limits->to_kind, bytes, &limits->to)) {
        return false;
    }
    if (limits->used[WAY_PVW] && !start_owner(limits)) {
        cli_error("limits: the process to write to does not start");
        return false;
    }
    if (limits->to.at == NULL && own_to &&
        !bench_area_open(limits->to_kind, bytes, &limits->to)) {
        return false;
    }
    if (!bench_area_open(limits->from_kind, bytes, &limits->from)) {
        return false;
    }
    bench_fill(&limits->shape, limits->from.at);
    make_lists(limits);
    return true;
}

int main(int argc, char **argv)
{
    static struct limits limits = {.piece = UINT64_C(1) << 20,
                                   .rounds = {.left = 5}};
    unsigned threads = 1;
    int rc;

    bench_follow_parent();
    limits.shape = bench_shape_default();
    rc = limits_parse(argc, argv, &limits);
    if (rc != CLI_OK) {
        return rc == CLI_INTERRUPTED ? CLI_OK : rc;
    }
    for (size_t i = 0; i < limits.config_count; i++) {
        if (limits.configs[i].threads > threads) {
            threads = limits.configs[i].threads;
        }
    }
    limits.team.pin = limits.pin;
    if (!set_up(&limits) || !start_team(&limits.team, threads) ||
        !run_rounds(&limits)) {
        return CLI_FAILED;
    }
    for (unsigned i = 0; i < LIMITS_LISTS; i++) {
        free(limits.lists[i].copies);
    }
    bench_area_close(&limits.from);
    bench_area_close(&limits.to);
    return CLI_OK;
}
