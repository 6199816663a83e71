/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What our own memory is made of: real mappings of each sort, whose nature we
 * know because we made them: anonymous, file-backed, memfd (sealed or not,
 * with holes or not), unreadable, with an unmapped hole, and fds that back
 * something else. The flags must be right, the refusals must name the region
 * and the address, and the caller's file position must not move.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memcheck.h"

#define PAGES 8

static size_t page;

static int set_up(void **state)
{
    (void)state;
    page = (size_t)sysconf(_SC_PAGESIZE);
    return 0;
}

static uint64_t number(const void *addr)
{
    return (uint64_t)(uintptr_t)addr;
}

static char *map_anonymous(void)
{
    void *addr = mmap(NULL, PAGES * page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(addr, MAP_FAILED);
    return addr;
}

static char *map_file(int fd, int flags, size_t length, uint64_t offset)
{
    void *addr = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, fd,
                      (off_t)offset);

    assert_ptr_not_equal(addr, MAP_FAILED);
    return addr;
}

/* Every page is written, so there are no holes. */
static int make_memfd(int seals)
{
    int fd = memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    char *bytes = calloc(PAGES, page);

    assert_true(fd >= 0);
    assert_non_null(bytes);
    assert_int_equal(write(fd, bytes, PAGES * page), PAGES * page);
    free(bytes);
    if (seals != 0) {
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    }
    return fd;
}

static struct kvti_mem plain_mem(const void *addr, uint64_t length)
{
    return (struct kvti_mem){.addr = number(addr), .length = length, .fd = -1};
}

static struct kvti_mem file_mem(const void *addr, uint64_t length, int fd,
                                uint64_t offset)
{
    return (struct kvti_mem){.addr = number(addr),
                             .length = length,
                             .flags = KVTI_MEM_FD,
                             .fd = fd,
                             .fd_offset = offset};
}

static void expect_taken(struct kvti_mem mem, uint32_t flags)
{
    struct kvt_error err = {0};

    if (kvti_memcheck(&mem, 1, NULL, &err) != KVT_OK) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(mem.flags, flags);
    if ((flags & KVTI_MEM_FD) != 0) {
        struct stat st;

        assert_int_equal(fstat(mem.fd, &st), 0);
        assert_int_equal(mem.fd_dev, st.st_dev);
        assert_int_equal(mem.fd_ino, st.st_ino);
    }
}

/* The second of three entries is the bad one, and the caller counts from 40. */
static void expect_refused(struct kvti_mem mem, const char *part)
{
    const size_t positions[] = {40, 42, 44};
    struct kvti_mem mems[3] = {mem, mem, mem};
    struct kvt_error err = {0};
    char *good = map_anonymous();

    mems[0] = plain_mem(good, page);
    mems[2] = plain_mem(good, page);
    assert_int_equal(kvti_memcheck(mems, 3, positions, &err), KVT_EINVAL);
    assert_int_equal(err.code, KVT_EINVAL);
    assert_non_null(strstr(err.text, "region 42"));
    if (strstr(err.text, part) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, part);
    }
    assert_int_equal(kvti_memcheck(&mem, 1, NULL, &err), KVT_EINVAL);
    assert_non_null(strstr(err.text, "region 0"));
    assert_int_equal(kvti_memcheck(&mem, 1, NULL, NULL), KVT_EINVAL);
    munmap(good, PAGES * page);
}

static void private_anonymous_memory_is_marked(void **state)
{
    char *addr = map_anonymous();
    char local = 'x';
    char *heap = malloc(100);

    (void)state;
    assert_non_null(heap);
    expect_taken(plain_mem(addr, PAGES * page), KVTI_MEM_ANON);
    expect_taken(plain_mem(addr + 5, 1), KVTI_MEM_ANON);
    expect_taken(plain_mem(&local, 1), KVTI_MEM_ANON);
    expect_taken(plain_mem(heap, 100), KVTI_MEM_ANON);
    free(heap);
    munmap(addr, PAGES * page);
}

/* Several mappings of different rights, side by side, are one region. */
static void neighbouring_mappings_are_walked(void **state)
{
    char *addr = map_anonymous();

    (void)state;
    assert_int_equal(mprotect(addr + 2 * page, page, PROT_READ), 0);
    assert_int_equal(mprotect(addr + 4 * page, page, PROT_READ | PROT_EXEC), 0);
    expect_taken(plain_mem(addr, PAGES * page), KVTI_MEM_ANON);
    munmap(addr, PAGES * page);
}

static void shared_memory_without_an_fd_is_unmarked(void **state)
{
    void *addr = mmap(NULL, page, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = make_memfd(0);
    char *mapped = map_file(fd, MAP_SHARED, page, 0);
    char *copied = map_file(fd, MAP_PRIVATE, page, 0);

    (void)state;
    assert_ptr_not_equal(addr, MAP_FAILED);
    expect_taken(plain_mem(addr, page), 0);
    expect_taken(plain_mem(mapped, page), 0);
    expect_taken(plain_mem(copied, page), 0);
    munmap(addr, page);
    munmap(mapped, page);
    munmap(copied, page);
    close(fd);
}

static void part_file_part_anonymous_is_unmarked(void **state)
{
    char *addr = map_anonymous();
    int fd = make_memfd(0);

    (void)state;
    assert_ptr_equal(mmap(addr + page, page, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, fd, 0),
                     addr + page);
    expect_taken(plain_mem(addr, page), KVTI_MEM_ANON);
    expect_taken(plain_mem(addr, 3 * page), 0);
    munmap(addr, PAGES * page);
    close(fd);
}

static void stale_flags_are_taken_away(void **state)
{
    int fd = make_memfd(0);
    char *addr = map_file(fd, MAP_SHARED, page, 0);
    struct kvti_mem mem = plain_mem(addr, page);

    (void)state;
    mem.flags = KVTI_MEM_ANON | KVTI_MEM_SEALED;
    expect_taken(mem, 0);
    munmap(addr, page);
    close(fd);
}

static void device_memory_is_left_alone(void **state)
{
    struct kvti_mem mem = {.addr = 8,
                           .length = UINT64_MAX,
                           .kind = KVT_VRAM,
                           .flags = KVTI_MEM_SEALED,
                           .fd = 77};

    (void)state;
    expect_taken(mem, KVTI_MEM_SEALED);
}

static void no_entries_are_fine(void **state)
{
    (void)state;
    assert_int_equal(kvti_memcheck(NULL, 0, NULL, NULL), KVT_OK);
}

static void null_empty_and_wrapping_entries_are_refused(void **state)
{
    char *addr = map_anonymous();

    (void)state;
    expect_refused(plain_mem(NULL, page), "null, empty or wraps");
    expect_refused(plain_mem(addr, 0), "null, empty or wraps");
    expect_refused(plain_mem(addr, UINT64_MAX), "null, empty or wraps");
    munmap(addr, PAGES * page);
}

static void expect_refused_at(struct kvti_mem mem, const char *why,
                              const void *at)
{
    char part[100];

    (void)snprintf(part, sizeof part, "%s 0x%" PRIx64, why, number(at));
    expect_refused(mem, part);
}

static void holes_are_refused_by_address(void **state)
{
    char *addr = map_anonymous();

    (void)state;
    munmap(addr + 3 * page, page);
    expect_taken(plain_mem(addr, 3 * page), KVTI_MEM_ANON);
    expect_taken(plain_mem(addr + 4 * page, 4 * page), KVTI_MEM_ANON);
    expect_refused_at(plain_mem(addr, 3 * page + 1), "is not mapped at",
                      addr + 3 * page);
    expect_refused_at(plain_mem(addr, PAGES * page), "is not mapped at",
                      addr + 3 * page);
    expect_refused_at(plain_mem(addr + 3 * page + 9, 2 * page),
                      "is not mapped at", addr + 3 * page + 9);
    munmap(addr, PAGES * page);
}

static void memory_past_every_mapping_is_refused(void **state)
{
    const uint64_t top = UINT64_MAX - 4096;
    struct kvti_mem mem = {.addr = top, .length = 4096, .fd = -1};

    (void)state;
    expect_refused(mem, "is not mapped at");
}

static void unreadable_memory_is_refused(void **state)
{
    char *addr = map_anonymous();

    (void)state;
    assert_int_equal(mprotect(addr + 5 * page, page, PROT_NONE), 0);
    expect_refused_at(plain_mem(addr, PAGES * page),
                      "is mapped without read access at", addr + 5 * page);
    munmap(addr, PAGES * page);
}

static void a_sealed_whole_memfd_is_marked(void **state)
{
    int fd = make_memfd(F_SEAL_SHRINK);
    char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);
    char *later = map_file(fd, MAP_SHARED, 2 * page, 3 * page);

    (void)state;
    expect_taken(file_mem(addr, PAGES * page, fd, 0),
                 KVTI_MEM_FD | KVTI_MEM_SEALED);
    expect_taken(file_mem(addr + 100, 5, fd, 100),
                 KVTI_MEM_FD | KVTI_MEM_SEALED);
    expect_taken(file_mem(later, 2 * page, fd, 3 * page),
                 KVTI_MEM_FD | KVTI_MEM_SEALED);
    munmap(addr, PAGES * page);
    munmap(later, 2 * page);
    close(fd);
}

/* It could be cut short under the writer. */
static void an_unsealed_memfd_is_not_marked(void **state)
{
    const int seals[] = {0, F_SEAL_GROW};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        int fd = make_memfd(seals[i]);
        char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);

        expect_taken(file_mem(addr, PAGES * page, fd, 0), KVTI_MEM_FD);
        munmap(addr, PAGES * page);
        close(fd);
    }
}

/* A hole is filled by the fault that finds it, and that can fail. */
static void a_memfd_with_a_hole_is_marked_only_beside_it(void **state)
{
    int fd = memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    char *addr;

    (void)state;
    assert_int_equal(ftruncate(fd, (off_t)(PAGES * page)), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    addr = map_file(fd, MAP_SHARED, PAGES * page, 0);
    memset(addr, 1, 3 * page);
    assert_int_equal(lseek(fd, 7, SEEK_SET), 7);
    expect_taken(file_mem(addr, PAGES * page, fd, 0), KVTI_MEM_FD);
    expect_taken(file_mem(addr + page, 3 * page, fd, page), KVTI_MEM_FD);
    expect_taken(file_mem(addr, 3 * page, fd, 0),
                 KVTI_MEM_FD | KVTI_MEM_SEALED);
    assert_int_equal(lseek(fd, 0, SEEK_CUR), 7);
    munmap(addr, PAGES * page);
    close(fd);
}

/* Pages that fallocate() has made exist, though lseek() calls them a hole. */
static void an_allocated_memfd_is_marked_before_it_is_touched(void **state)
{
    int fd = memfd_create("test", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    char *addr;

    (void)state;
    assert_int_equal(fallocate(fd, 0, 0, (off_t)(PAGES * page)), 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    addr = map_file(fd, MAP_SHARED, PAGES * page, 0);
    expect_taken(file_mem(addr, PAGES * page, fd, 0),
                 KVTI_MEM_FD | KVTI_MEM_SEALED);
    munmap(addr, PAGES * page);
    close(fd);
}

/* On whatever file system the temporary folder is, overlayfs included. */
static void a_file_is_taken_and_not_marked(void **state)
{
    FILE *file = tmpfile();
    int fd;
    char *addr;

    (void)state;
    if (file == NULL) {
        print_message("no temporary file can be made here\n");
        skip();
    }
    fd = fileno(file);
    assert_int_equal(ftruncate(fd, (off_t)(2 * page)), 0);
    addr = map_file(fd, MAP_SHARED, 2 * page, 0);
    memset(addr, 1, 2 * page);
    expect_taken(file_mem(addr, 2 * page, fd, 0), KVTI_MEM_FD);
    expect_taken(file_mem(addr + 9, page, fd, 9), KVTI_MEM_FD);
    munmap(addr, 2 * page);
    assert_int_equal(fclose(file), 0);
}

static void a_copied_file_does_not_back_memory(void **state)
{
    int fd = make_memfd(F_SEAL_SHRINK);
    char *addr = map_file(fd, MAP_PRIVATE, PAGES * page, 0);

    (void)state;
    expect_refused_at(file_mem(addr, page, fd, 0),
                      "is no shared mapping of its fd at", addr);
    munmap(addr, PAGES * page);
    close(fd);
}

static void wrong_fds_are_refused(void **state)
{
    int fd = make_memfd(0);
    int other = make_memfd(0);
    int closed = dup(fd);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);
    char *anonymous = map_anonymous();

    (void)state;
    close(closed);
    expect_refused_at(file_mem(addr, page, other, 0),
                      "is not backed by its fd at", addr);
    expect_refused_at(file_mem(anonymous, page, fd, 0),
                      "is no shared mapping of its fd at", anonymous);
    expect_refused(file_mem(addr, page, closed, 0), "is not usable");
    expect_refused(file_mem(addr, page, -1, 0), "fd -1 is not usable");
    expect_refused(file_mem(addr, page, null, 0), "is not a file");
    munmap(addr, PAGES * page);
    munmap(anonymous, PAGES * page);
    close(null);
    close(other);
    close(fd);
}

static void wrong_offsets_are_refused(void **state)
{
    int fd = make_memfd(0);
    char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);

    (void)state;
    expect_refused_at(file_mem(addr, page, fd, page),
                      "is backed by another offset of its fd at", addr);
    expect_refused_at(file_mem(addr + page, page, fd, page + 1),
                      "is backed by another offset of its fd at", addr + page);
    expect_refused(file_mem(addr, PAGES * page, fd, 1), "past the end of fd");
    expect_refused(file_mem(addr, page, fd, UINT64_MAX - 1),
                   "past the end of fd");
    munmap(addr, PAGES * page);
    close(fd);
}

/* The right file and offset at first, another part of it further on. */
static void a_twisted_mapping_is_refused_where_it_turns(void **state)
{
    int fd = make_memfd(0);
    int other = make_memfd(0);
    char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);

    (void)state;
    assert_ptr_equal(mmap(addr + 2 * page, page, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, fd, (off_t)(3 * page)),
                     addr + 2 * page);
    assert_ptr_equal(mmap(addr + 5 * page, page, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, other, (off_t)(5 * page)),
                     addr + 5 * page);
    expect_taken(file_mem(addr, 2 * page, fd, 0), KVTI_MEM_FD);
    expect_taken(file_mem(addr + 5 * page, page, other, 5 * page), KVTI_MEM_FD);
    expect_refused_at(file_mem(addr, PAGES * page, fd, 0),
                      "is backed by another offset of its fd at",
                      addr + 2 * page);
    expect_refused_at(file_mem(addr + 4 * page, 2 * page, fd, 4 * page),
                      "is not backed by its fd at", addr + 5 * page);
    munmap(addr, PAGES * page);
    close(other);
    close(fd);
}

static void a_file_cut_short_is_refused(void **state)
{
    int fd = make_memfd(0);
    char *addr = map_file(fd, MAP_SHARED, PAGES * page, 0);

    (void)state;
    assert_int_equal(ftruncate(fd, (off_t)(2 * page)), 0);
    expect_taken(file_mem(addr, 2 * page, fd, 0), KVTI_MEM_FD);
    expect_refused(file_mem(addr, 2 * page + 1, fd, 0), "past the end of fd");
    munmap(addr, PAGES * page);
    close(fd);
}

/* More text than one read of the kernel's file gives, and every other page
 * unreadable, so that the kernel cannot join them. */
static void thousands_of_mappings_are_read(void **state)
{
    const size_t count = 4000;
    char *addr = mmap(NULL, count * page, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct kvti_mem *mems = calloc(count / 2, sizeof *mems);

    (void)state;
    assert_ptr_not_equal(addr, MAP_FAILED);
    assert_non_null(mems);
    for (size_t i = 0; i < count / 2; i++) {
        assert_int_equal(
            mprotect(addr + 2 * i * page, page, PROT_READ | PROT_WRITE), 0);
        mems[i] = plain_mem(addr + 2 * i * page, page);
    }
    assert_int_equal(kvti_memcheck(mems, count / 2, NULL, NULL), KVT_OK);
    for (size_t i = 0; i < count / 2; i++) {
        assert_int_equal(mems[i].flags, KVTI_MEM_ANON);
    }
    expect_refused_at(plain_mem(addr + 1000 * page, 2 * page),
                      "is mapped without read access at", addr + 1001 * page);
    munmap(addr, count * page);
    free(mems);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(private_anonymous_memory_is_marked),
        cmocka_unit_test(neighbouring_mappings_are_walked),
        cmocka_unit_test(shared_memory_without_an_fd_is_unmarked),
        cmocka_unit_test(part_file_part_anonymous_is_unmarked),
        cmocka_unit_test(stale_flags_are_taken_away),
        cmocka_unit_test(device_memory_is_left_alone),
        cmocka_unit_test(no_entries_are_fine),
        cmocka_unit_test(null_empty_and_wrapping_entries_are_refused),
        cmocka_unit_test(holes_are_refused_by_address),
        cmocka_unit_test(memory_past_every_mapping_is_refused),
        cmocka_unit_test(unreadable_memory_is_refused),
        cmocka_unit_test(a_sealed_whole_memfd_is_marked),
        cmocka_unit_test(an_unsealed_memfd_is_not_marked),
        cmocka_unit_test(a_memfd_with_a_hole_is_marked_only_beside_it),
        cmocka_unit_test(an_allocated_memfd_is_marked_before_it_is_touched),
        cmocka_unit_test(a_file_is_taken_and_not_marked),
        cmocka_unit_test(a_copied_file_does_not_back_memory),
        cmocka_unit_test(wrong_fds_are_refused),
        cmocka_unit_test(wrong_offsets_are_refused),
        cmocka_unit_test(a_twisted_mapping_is_refused_where_it_turns),
        cmocka_unit_test(a_file_cut_short_is_refused),
        cmocka_unit_test(thousands_of_mappings_are_read),
    };

    return cmocka_run_group_tests(tests, set_up, NULL) == 0 ? 0 : 1;
}
