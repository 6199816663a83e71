/* SPDX-License-Identifier: Apache-2.0 */
#include "common.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

/* ------------------------------------------------------------------ memory */

static const char *const kinds[] = {"anon", "memfd", "shm"};

const char *bench_kind_name(enum bench_kind kind)
{
    return kinds[kind];
}

bool bench_kind_parse(const char *text, enum bench_kind *ret)
{
    for (unsigned i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(text, kinds[i]) == 0) {
            *ret = (enum bench_kind)i;
            return true;
        }
    }
    return false;
}

static int open_file(enum bench_kind kind, uint64_t bytes)
{
    char path[] = "/dev/shm/kvt-bench-XXXXXX";
    int fd;

    if (kind == BENCH_MEMFD) {
        fd = memfd_create("kvt-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    } else {
        fd = mkostemp(path, O_CLOEXEC);
        if (fd >= 0) {
            (void)unlink(path);
        }
    }
    if (fd >= 0 &&
        (ftruncate(fd, (off_t)bytes) != 0 ||
         (kind == BENCH_MEMFD &&
          fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0))) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

bool bench_area_open(enum bench_kind kind, uint64_t bytes,
                     struct bench_area *ret)
{
    struct bench_area area = {.bytes = bytes, .fd = -1, .kind = kind};
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *at;

    if (kind != BENCH_ANON) {
        flags = MAP_SHARED;
        area.fd = open_file(kind, bytes);
        if (area.fd < 0) {
            cli_error("bench: no %s of %llu bytes can be made", kinds[kind],
                      (unsigned long long)bytes);
            return false;
        }
    }
    at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, area.fd, 0);
    if (at == MAP_FAILED) {
        cli_error("bench: %llu bytes cannot be mapped",
                  (unsigned long long)bytes);
        if (area.fd >= 0) {
            (void)close(area.fd);
        }
        return false;
    }
    memset(at, 0, bytes);
    area.at = at;
    *ret = area;
    return true;
}

void bench_area_close(struct bench_area *area)
{
    if (area->at != NULL) {
        (void)munmap(area->at, area->bytes);
        if (area->fd >= 0) {
            (void)close(area->fd);
        }
    }
    area->at = NULL;
}

/* ------------------------------------------------------------------ shapes */

static const char *const orders[] = {"scattered", "half", "contiguous"};

const char *bench_order_name(enum bench_order order)
{
    return orders[order];
}

struct bench_shape bench_shape_default(void)
{
    return (struct bench_shape){
        .block_bytes = UINT64_C(64) << 10, .blocks = 1024, .seed = 1};
}

bool bench_shape_option(int key, const char *arg, struct bench_shape *shape)
{
    switch (key) {
    case 'b':
        return cli_parse_size(arg, &shape->block_bytes);
    case 'n':
        return cli_parse_u64(arg, 1, UINT32_MAX, &shape->blocks);
    case 'p':
        return cli_parse_u64(arg, 1, UINT32_MAX, &shape->pool);
    case 's':
        return cli_parse_u64(arg, 0, UINT64_MAX, &shape->seed);
    case 'o':
        for (unsigned i = 0; i < BENCH_ORDERS; i++) {
            if (strcmp(arg, orders[i]) == 0) {
                shape->order = (enum bench_order)i;
                return true;
            }
        }
        return false;
    default:
        return false;
    }
}

bool bench_shape_check(struct bench_shape *shape)
{
    if (shape->pool < shape->blocks) {
        shape->pool = shape->blocks;
    }
    if (shape->order == BENCH_HALF) {
        shape->blocks += shape->blocks % 2;
        shape->pool += shape->pool % 2;
    }
    if (shape->block_bytes == 0 || shape->block_bytes % 64 != 0) {
        cli_error("bench: a block must be a multiple of 64 bytes");
        return false;
    }
    if (shape->pool > (UINT64_C(1) << 40) / shape->block_bytes) {
        cli_error("bench: a pool of over 1 TiB: take fewer or smaller blocks");
        return false;
    }
    return true;
}

uint64_t bench_shape_bytes(const struct bench_shape *shape)
{
    return shape->block_bytes * shape->blocks;
}

static void shuffle(uint32_t *list, uint64_t count, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++) {
        list[i] = (uint32_t)i;
    }
    for (uint64_t i = count - 1; i > 0; i--) {
        uint64_t other = cli_mix(seed, i) % (i + 1);
        uint32_t kept = list[i];

        list[i] = list[other];
        list[other] = kept;
    }
}

/* The first `blocks` of a permutation of the pool, or of its pairs. */
static void one_side(const struct bench_shape *shape, uint64_t seed,
                     uint32_t *ret)
{
    uint64_t unit = shape->order == BENCH_HALF ? 2 : 1;
    uint64_t count = shape->pool / unit;
    uint32_t *list;

    if (shape->order == BENCH_CONTIGUOUS) {
        for (uint64_t i = 0; i < shape->blocks; i++) {
            ret[i] = (uint32_t)i;
        }
        return;
    }
    list = cli_alloc(count, sizeof(*list));
    shuffle(list, count, seed);
    for (uint64_t i = 0; i < shape->blocks; i++) {
        ret[i] = (uint32_t)(list[i / unit] * unit + i % unit);
    }
    free(list);
}

void bench_indices(const struct bench_shape *shape, uint32_t *from,
                   uint32_t *to)
{
    one_side(shape, cli_mix(shape->seed, 1), from);
    one_side(shape, cli_mix(shape->seed, 2), to);
}

size_t bench_copies(const struct bench_shape *shape, uint64_t piece,
                    struct bench_copy **ret)
{
    uint32_t *from = cli_alloc(shape->blocks, sizeof(*from));
    uint32_t *to = cli_alloc(shape->blocks, sizeof(*to));
    struct bench_copy *copies = cli_alloc(shape->blocks, sizeof(*copies));
    size_t count = 0;

    bench_indices(shape, from, to);
    for (uint64_t i = 0; i < shape->blocks; i++) {
        struct bench_copy copy = {.from = from[i] * shape->block_bytes,
                                  .to = to[i] * shape->block_bytes,
                                  .length = shape->block_bytes};
        struct bench_copy *last = &copies[count > 0 ? count - 1 : 0];

        if (count > 0 && last->from + last->length == copy.from &&
            last->to + last->length == copy.to &&
            last->length + copy.length <= piece) {
            last->length += copy.length;
        } else {
            copies[count++] = copy;
        }
    }
    free(from);
    free(to);
    *ret = copies;
    return count;
}

static uint64_t word_of(uint64_t block, uint64_t word)
{
    return (block << 20) + word + 1;
}

void bench_fill(const struct bench_shape *shape, unsigned char *at)
{
    uint64_t words = shape->block_bytes / sizeof(uint64_t);

    for (uint64_t i = 0; i < shape->pool; i++) {
        for (uint64_t j = 0; j < words; j++) {
            uint64_t word = word_of(i, j);

            memcpy(at, &word, sizeof(word));
            at += sizeof(word);
        }
    }
}

bool bench_check(const struct bench_shape *shape, const unsigned char *at)
{
    uint64_t words = shape->block_bytes / sizeof(uint64_t);
    uint32_t *from = cli_alloc(shape->blocks, sizeof(*from));
    uint32_t *to = cli_alloc(shape->blocks, sizeof(*to));
    bool good = true;

    bench_indices(shape, from, to);
    for (uint64_t i = 0; i < shape->blocks && good; i++) {
        const unsigned char *block = at + to[i] * shape->block_bytes;

        for (uint64_t j = 0; j < words && good; j++) {
            uint64_t word;

            memcpy(&word, block + j * sizeof(word), sizeof(word));
            good = word == word_of(from[i], j);
        }
    }
    free(from);
    free(to);
    return good;
}

/* ------------------------------------------------------------------ rounds */

bool bench_round_option(int key, const char *arg, struct bench_rounds *rounds)
{
    if (key == 'S') {
        rounds->serve = true;
        return true;
    }
    return key == 'r' && cli_parse_u64(arg, 1, 1000000, &rounds->left);
}

bool bench_send(int fd, const void *bytes, size_t length)
{
    const char *at = bytes;

    while (length > 0) {
        ssize_t sent = write(fd, at, length);

        if (sent <= 0) {
            return false;
        }
        at += sent;
        length -= (size_t)sent;
    }
    return true;
}

bool bench_receive(int fd, void *bytes, size_t length)
{
    char *at = bytes;

    while (length > 0) {
        ssize_t got = read(fd, at, length);

        if (got <= 0) {
            return false;
        }
        at += got;
        length -= (size_t)got;
    }
    return true;
}

void bench_follow_parent(void)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
}

bool bench_next(struct bench_rounds *rounds)
{
    char line[64];

    (void)fflush(stdout);
    if (rounds->serve) {
        return fgets(line, sizeof(line), stdin) != NULL &&
               strcmp(line, "round\n") == 0;
    }
    if (rounds->left == 0) {
        return false;
    }
    rounds->left--;
    return true;
}

size_t bench_split(char *text, const char **words, size_t max)
{
    size_t count = 0;
    char *at = text;

    while (count < max && at != NULL) {
        words[count++] = strsep(&at, ",");
    }
    return count;
}

/* As it was before the first thread was pinned: threads inherit the mask. */
static cpu_set_t usable;
static pthread_once_t usable_once = PTHREAD_ONCE_INIT;

static void find_usable(void)
{
    if (sched_getaffinity(0, sizeof(usable), &usable) != 0) {
        CPU_ZERO(&usable);
        CPU_SET(0, &usable);
    }
}

void bench_pin(unsigned index)
{
    cpu_set_t one;
    unsigned skip;

    (void)pthread_once(&usable_once, find_usable);
    skip = index % (unsigned)CPU_COUNT(&usable);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &usable) && skip-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            (void)pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
            return;
        }
    }
}
