/* SPDX-License-Identifier: Apache-2.0 */
/*
 * /proc/self/maps is read once for all entries: about a millisecond for
 * thousands of mappings, where a system call for each page could not tell what
 * backs it. The kernel promises that memory which is mapped throughout the
 * reading is listed, in ascending order, whatever other threads map meanwhile.
 */
#include "memcheck.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "diag.h"

/* The unit of st_blocks, whatever the file system. */
#define BLOCK_BYTES 512

#define READ_BYTES ((size_t)64 * 1024)

struct mapping {
    uint64_t start;
    uint64_t end;
    uint64_t offset; /* of `start` in the file */
    uint64_t dev;    /* as the kernel lists it, which is not always what
                      * fstat() says */
    uint64_t ino;
    bool readable;
    bool shared;
    bool anonymous; /* private and of no file */
};

struct mappings {
    struct mapping *items; /* ascending, disjoint */
    size_t count;
    size_t capacity;
};

/* The file behind a region's fd, with the names its mappings go by. */
struct backing {
    int fd; /* -1: none yet */
    uint64_t dev;
    uint64_t ino;
    uint64_t size;
    uint64_t map_dev;
    uint64_t map_ino;
    bool cannot_shrink;
    bool full; /* no holes anywhere */
};

/* --------------------------------------------------------------- parsing */

static void skip_spaces(const char **at)
{
    while (**at == ' ') {
        (*at)++;
    }
}

/* A number and the one character that must follow it. */
static bool parse_number(const char **at, int base, char follow, uint64_t *ret)
{
    char *end;

    *ret = strtoull(*at, &end, base);
    if (end == *at || *end != follow) {
        return false;
    }
    *at = end + 1;
    return true;
}

/*
 * "start-end perms offset major:minor inode   path". The vdso's pages have no
 * inode either, and some of them cannot be read through a pointer.
 */
static bool parse_line(const char *at, struct mapping *ret)
{
    uint64_t major_number;
    uint64_t minor_number;

    if (!parse_number(&at, 16, '-', &ret->start) ||
        !parse_number(&at, 16, ' ', &ret->end) || strnlen(at, 5) < 5) {
        return false;
    }
    ret->readable = at[0] == 'r';
    ret->shared = at[3] == 's';
    at += 5;
    if (!parse_number(&at, 16, ' ', &ret->offset) ||
        !parse_number(&at, 16, ':', &major_number) ||
        !parse_number(&at, 16, ' ', &minor_number)) {
        return false;
    }
    ret->dev = makedev((unsigned)major_number, (unsigned)minor_number);
    ret->ino = strtoull(at, NULL, 10);
    at += strspn(at, "0123456789");
    skip_spaces(&at);
    ret->anonymous = !ret->shared && ret->ino == 0 && ret->dev == 0 &&
                     strncmp(at, "[v", 2) != 0;
    return true;
}

static int add_mapping(struct mappings *maps, const struct mapping *mapping)
{
    if (maps->count == maps->capacity) {
        size_t capacity = maps->capacity > 0 ? 2 * maps->capacity : 256;
        struct mapping *items = realloc(maps->items, capacity * sizeof *items);

        if (items == NULL) {
            return KVT_ENOMEM;
        }
        maps->items = items;
        maps->capacity = capacity;
    }
    maps->items[maps->count++] = *mapping;
    return KVT_OK;
}

static int parse_maps(char *text, struct mappings *maps)
{
    char *line = text;

    while (*line != '\0') {
        char *end = strchrnul(line, '\n');
        struct mapping mapping;
        bool last = *end == '\0';

        *end = '\0';
        if (parse_line(line, &mapping) &&
            add_mapping(maps, &mapping) != KVT_OK) {
            return KVT_ENOMEM;
        }
        line = last ? end : end + 1;
    }
    return KVT_OK;
}

/* The whole file as a string, or NULL with errno. */
static char *read_all(int fd)
{
    size_t capacity = READ_BYTES;
    size_t length = 0;
    char *text = malloc(capacity);

    while (text != NULL) {
        ssize_t got = read(fd, text + length, capacity - length - 1);

        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            int saved = errno;

            free(text);
            errno = saved;
            return NULL;
        }
        if (got == 0) {
            text[length] = '\0';
            return text;
        }
        length += (size_t)got;
        if (capacity - length <= READ_BYTES / 2) {
            char *bigger = realloc(text, 2 * capacity);

            if (bigger == NULL) {
                free(text);
            }
            text = bigger;
            capacity *= 2;
        }
    }
    return NULL;
}

static int read_maps(struct mappings *ret, struct kvt_error *err)
{
    struct mappings maps = {0};
    char *text = NULL;
    int code;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);

    if (fd >= 0) {
        text = read_all(fd);
    }
    if (text == NULL) {
        code = kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot read /proc/self/maps, which tells "
                               "whether the memory is mapped");
        goto out;
    }
    code = parse_maps(text, &maps);
    if (code != KVT_OK) {
        code = kvti_fail(err, code, "no memory for the list of mappings");
        goto out;
    }
    *ret = maps;
    maps.items = NULL;
out:
    free(maps.items);
    free(text);
    if (fd >= 0) {
        close(fd);
    }
    return code;
}

/* The mapping that holds `addr`, or the first one above it, or NULL. */
static const struct mapping *find_mapping(const struct mappings *maps,
                                          uint64_t addr)
{
    size_t low = 0;
    size_t high = maps->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (maps->items[middle].end <= addr) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < maps->count ? &maps->items[low] : NULL;
}

/* ---------------------------------------------------------------- backing */

/*
 * On overlayfs and btrfs a mapping is listed under a device that fstat() does
 * not know. So when the plain comparison would fail, one page is mapped and
 * looked up: whatever it is listed under is the file's name there.
 */
static int learn_names(struct backing *backing, struct kvt_error *err)
{
    struct mappings maps = {0};
    const struct mapping *mapping;
    size_t length = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, length, PROT_NONE, MAP_SHARED, backing->fd, 0);
    int code;

    if (page == MAP_FAILED) {
        return kvti_fail_errno(err, KVT_EINVAL, errno,
                               "fd %d cannot be mapped, so it backs no memory",
                               backing->fd);
    }
    code = read_maps(&maps, err);
    if (code == KVT_OK) {
        mapping = find_mapping(&maps, (uint64_t)(uintptr_t)page);
        kvti_assert(mapping != NULL);
        backing->map_dev = mapping->dev;
        backing->map_ino = mapping->ino;
    }
    free(maps.items);
    munmap(page, length);
    return code;
}

static bool is_sealed_memfd(int fd)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct statfs fs;

    /* hugetlbfs knows seals too, but a fault there can fail. */
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
           fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC;
}

static int open_backing(int fd, struct backing *ret, struct kvt_error *err)
{
    struct stat st;
    uint64_t blocks_bytes;

    if (fstat(fd, &st) != 0) {
        return kvti_fail_errno(err, KVT_EINVAL, errno, "fd %d is not usable",
                               fd);
    }
    if (!S_ISREG(st.st_mode)) {
        return kvti_fail(err, KVT_EINVAL,
                         "fd %d is not a file that memory can be shared "
                         "through; leave KVT_REGION_FD out",
                         fd);
    }
    blocks_bytes = (uint64_t)st.st_blocks * BLOCK_BYTES;
    *ret = (struct backing){.fd = fd,
                            .dev = st.st_dev,
                            .ino = st.st_ino,
                            .size = (uint64_t)st.st_size,
                            .map_dev = st.st_dev,
                            .map_ino = st.st_ino,
                            .cannot_shrink = is_sealed_memfd(fd),
                            .full = blocks_bytes >= (uint64_t)st.st_size};
    return KVT_OK;
}

/*
 * Whether the file has a page for each byte of the range. Asked through a
 * description of our own: lseek() would move the position of the caller's.
 * Pages that fallocate() made and nobody has touched count as a hole there,
 * but as blocks in fstat(), which is asked first.
 */
static bool has_no_holes(const struct backing *backing, uint64_t offset,
                         uint64_t length)
{
    char path[40];
    bool whole = false;
    off_t hole;
    int own;

    if (backing->full) {
        return true;
    }
    kvti_format(path, sizeof path, "/proc/self/fd/%d", backing->fd);
    own = open(path, O_RDONLY | O_CLOEXEC);
    if (own >= 0) {
        hole = lseek(own, (off_t)offset, SEEK_HOLE);
        whole = hole >= 0 && (uint64_t)hole >= offset + length;
        close(own);
    }
    return whole;
}

/* ----------------------------------------------------------------- checking */

struct check {
    struct mappings maps;
    struct backing backing; /* of the entry looked at last */
    struct kvti_mem *mem;
    size_t position;
    struct kvt_error *err;
};

static int refuse(const struct check *check, const char *why, uint64_t at)
{
    return kvti_fail(
        check->err, KVT_EINVAL,
        "region %zu (%" PRIu64 " bytes at 0x%" PRIx64 ") %s 0x%" PRIx64,
        check->position, check->mem->length, check->mem->addr, why, at);
}

static int check_fd(struct check *check)
{
    struct kvti_mem *mem = check->mem;
    uint64_t end;
    struct kvt_error why = {0};
    int code = KVT_OK;

    if (mem->fd < 0 || check->backing.fd != mem->fd) {
        code = open_backing(mem->fd, &check->backing, &why);
    }
    if (code != KVT_OK) {
        check->backing.fd = -1;
        return kvti_fail(check->err, code, "region %zu: %.200s",
                         check->position, why.text);
    }
    if (__builtin_add_overflow(mem->fd_offset, mem->length, &end) ||
        end > check->backing.size) {
        return kvti_fail(
            check->err, KVT_EINVAL,
            "region %zu lies past the end of fd %d, which has %" PRIu64
            " bytes: %" PRIu64 " bytes from offset %" PRIu64,
            check->position, mem->fd, check->backing.size, mem->length,
            mem->fd_offset);
    }
    mem->fd_dev = check->backing.dev;
    mem->fd_ino = check->backing.ino;
    return KVT_OK;
}

static bool same_file(const struct backing *backing,
                      const struct mapping *mapping)
{
    return mapping->dev == backing->map_dev && mapping->ino == backing->map_ino;
}

static int check_fd_mapping(struct check *check, const struct mapping *mapping,
                            uint64_t at)
{
    const struct kvti_mem *mem = check->mem;

    if (!mapping->shared) {
        return refuse(check, "is no shared mapping of its fd at", at);
    }
    if (!same_file(&check->backing, mapping)) {
        struct kvt_error why = {0};

        if (learn_names(&check->backing, &why) != KVT_OK) {
            return kvti_fail(check->err, why.code, "region %zu: %.200s",
                             check->position, why.text);
        }
        if (!same_file(&check->backing, mapping)) {
            return refuse(check, "is not backed by its fd at", at);
        }
    }
    if (mapping->offset + (at - mapping->start) !=
        mem->fd_offset + (at - mem->addr)) {
        return refuse(check, "is backed by another offset of its fd at", at);
    }
    return KVT_OK;
}

/* Walks the mappings from the first byte to the last. */
static int check_mappings(struct check *check, bool *ret_anonymous)
{
    const struct kvti_mem *mem = check->mem;
    const struct mapping *mapping = find_mapping(&check->maps, mem->addr);
    const struct mapping *past = check->maps.items + check->maps.count;
    uint64_t end = mem->addr + mem->length;
    bool anonymous = true;

    for (uint64_t at = mem->addr; at < end; at = mapping++->end) {
        if (mapping == NULL || mapping == past || mapping->start > at) {
            return refuse(check, "is not mapped at", at);
        }
        if (!mapping->readable) {
            return refuse(check, "is mapped without read access at", at);
        }
        anonymous = anonymous && mapping->anonymous;
        if ((mem->flags & KVTI_MEM_FD) != 0) {
            int code = check_fd_mapping(check, mapping, at);

            if (code != KVT_OK) {
                return code;
            }
        }
    }
    *ret_anonymous = anonymous;
    return KVT_OK;
}

static int check_mem(struct check *check)
{
    struct kvti_mem *mem = check->mem;
    bool has_fd = (mem->flags & KVTI_MEM_FD) != 0;
    bool anonymous = false;
    int code = KVT_OK;

    if (mem->addr == 0 || mem->length == 0 ||
        mem->addr > UINT64_MAX - mem->length) {
        return kvti_fail(check->err, KVT_EINVAL,
                         "region %zu is null, empty or wraps: %" PRIu64
                         " bytes at 0x%" PRIx64,
                         check->position, mem->length, mem->addr);
    }
    if (has_fd) {
        code = check_fd(check);
    }
    if (code == KVT_OK) {
        code = check_mappings(check, &anonymous);
    }
    if (code != KVT_OK) {
        return code;
    }
    mem->flags &= ~((uint32_t)KVTI_MEM_ANON | KVTI_MEM_SEALED);
    if (!has_fd && anonymous) {
        mem->flags |= KVTI_MEM_ANON;
    }
    if (has_fd && check->backing.cannot_shrink &&
        has_no_holes(&check->backing, mem->fd_offset, mem->length)) {
        mem->flags |= KVTI_MEM_SEALED;
    }
    return KVT_OK;
}

int kvti_memcheck(struct kvti_mem *mems, size_t count, const size_t *positions,
                  struct kvt_error *err)
{
    struct check check = {.backing.fd = -1, .err = err};
    int code = read_maps(&check.maps, err);

    for (size_t i = 0; code == KVT_OK && i < count; i++) {
        if (mems[i].kind != KVT_DRAM) {
            continue;
        }
        check.mem = &mems[i];
        check.position = positions != NULL ? positions[i] : i;
        code = check_mem(&check);
    }
    free(check.maps.items);
    return code;
}
