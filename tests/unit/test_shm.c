/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt_shm_create(): the memory is zeroed, writable, shared, sealed in its
 * size, made of pages that exist before they are touched, closed on exec, and
 * passes the check that lets peers write it by memcpy. A refusal, by us or by
 * the system, leaves neither a descriptor nor an output behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "memcheck.h"

#define BYTES ((uint64_t)3 * 1024 * 1024 + 123)

static struct kvt_shm make(uint64_t size)
{
    struct kvt_shm shm;
    struct kvt_error err;

    if (kvt_shm_create(size, &shm, &err) != KVT_OK) {
        fail_msg("%s", err.text);
    }
    return shm;
}

/* The lowest free descriptor: the same again when nothing was leaked. */
static int next_fd(void)
{
    int fd = dup(STDERR_FILENO);

    assert_true(fd >= 0);
    close(fd);
    return fd;
}

static void memory_is_zeroed_and_writable(void **state)
{
    struct kvt_shm shm = make(BYTES);
    unsigned char *bytes = shm.addr;

    (void)state;
    assert_int_equal(shm.length, BYTES);
    for (uint64_t i = 0; i < BYTES; i++) {
        assert_int_equal(bytes[i], 0);
    }
    memset(bytes, 0x5a, BYTES);
    kvt_shm_destroy(&shm);
}

static void the_fd_shows_the_same_bytes(void **state)
{
    struct kvt_shm shm = make(BYTES);
    char *again = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, shm.fd, 0);

    (void)state;
    assert_ptr_not_equal(again, MAP_FAILED);
    memcpy((char *)shm.addr + BYTES - 4, "tail", 4);
    assert_memory_equal(again + BYTES - 4, "tail", 4);
    munmap(again, BYTES);
    kvt_shm_destroy(&shm);
}

static void the_size_is_sealed(void **state)
{
    struct kvt_shm shm = make(BYTES);

    (void)state;
    assert_int_equal(fcntl(shm.fd, F_GET_SEALS),
                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    assert_int_equal(ftruncate(shm.fd, 4096), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(shm.fd, (off_t)(2 * BYTES)), -1);
    assert_int_equal(errno, EPERM);
    kvt_shm_destroy(&shm);
}

static void all_pages_exist_untouched(void **state)
{
    struct kvt_shm shm = make(BYTES);
    struct stat st;

    (void)state;
    assert_int_equal(fstat(shm.fd, &st), 0);
    assert_int_equal(st.st_size, BYTES);
    assert_true((uint64_t)st.st_blocks * 512 >= BYTES);
    kvt_shm_destroy(&shm);
}

static void it_is_memory_that_memcpy_may_write(void **state)
{
    struct kvt_shm shm = make(BYTES);
    struct kvti_mem mem = {.addr = (uint64_t)(uintptr_t)shm.addr,
                           .length = BYTES,
                           .flags = KVTI_MEM_FD,
                           .fd = shm.fd};

    (void)state;
    assert_int_equal(kvti_memcheck(&mem, 1, NULL, NULL), KVT_OK);
    assert_int_equal(mem.flags, KVTI_MEM_FD | KVTI_MEM_SEALED);
    kvt_shm_destroy(&shm);
}

static void it_is_closed_on_exec(void **state)
{
    struct kvt_shm shm = make(1);

    (void)state;
    assert_int_equal(fcntl(shm.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    kvt_shm_destroy(&shm);
}

static void destroy_gives_all_back_once(void **state)
{
    int before = next_fd();
    struct kvt_shm shm = make(4096);
    void *addr = shm.addr;

    (void)state;
    kvt_shm_destroy(&shm);
    assert_null(shm.addr);
    assert_int_equal(shm.length, 0);
    assert_int_equal(shm.fd, -1);
    assert_int_equal(next_fd(), before);
    assert_int_equal(msync(addr, 4096, MS_ASYNC), -1);
    assert_int_equal(errno, ENOMEM);
    kvt_shm_destroy(&shm);
    kvt_shm_destroy(NULL);
}

/* Its fd says 0, which is the standard input and not ours. */
static void destroy_of_a_zeroed_struct_closes_nothing(void **state)
{
    struct kvt_shm shm = {0};
    int input = fcntl(STDIN_FILENO, F_GETFD);

    (void)state;
    kvt_shm_destroy(&shm);
    assert_int_equal(shm.fd, -1);
    assert_int_equal(fcntl(STDIN_FILENO, F_GETFD), input);
}

static void expect_refused(uint64_t size, int code, int os_errno)
{
    struct kvt_shm shm;
    struct kvt_shm before;
    struct kvt_error err = {0};
    int fd = next_fd();

    memset(&shm, 0xa5, sizeof shm);
    memcpy(&before, &shm, sizeof shm);
    assert_int_equal(kvt_shm_create(size, &shm, &err), code);
    assert_memory_equal(&shm, &before, sizeof shm);
    assert_int_equal(err.code, code);
    assert_int_equal(err.os_errno, os_errno);
    assert_true(err.text[0] != '\0');
    assert_int_equal(next_fd(), fd);
}

static void a_size_of_0_and_no_place_are_refused(void **state)
{
    (void)state;
    expect_refused(0, KVT_EINVAL, 0);
    assert_int_equal(kvt_shm_create(1, NULL, NULL), KVT_EINVAL);
}

/* The kernel would not refuse: it would kill this process half way. */
static void more_than_the_host_has_is_refused(void **state)
{
    (void)state;
    expect_refused(UINT64_C(1) << 50, KVT_ESYSTEM, ENOMEM);
    expect_refused(UINT64_MAX, KVT_ESYSTEM, ENOMEM);
}

/* Without a descriptor /proc/meminfo cannot be read either: the size is then
 * taken as it is, and memfd_create() is the call that fails. */
static void a_failing_memfd_create_is_named(void **state)
{
    struct rlimit old;
    struct rlimit none;
    struct kvt_shm shm;
    struct kvt_error err = {0};
    int code;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    none = old;
    none.rlim_cur = (rlim_t)next_fd();
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    code = kvt_shm_create(4096, &shm, &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(code, KVT_ESYSTEM);
    assert_int_equal(err.os_errno, EMFILE);
    assert_non_null(strstr(err.text, "memfd_create"));
}

/* The file is half made when it fails. */
static void a_failing_fallocate_leaves_nothing(void **state)
{
    struct rlimit old;
    struct rlimit small;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    small.rlim_cur = BYTES - 1;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    expect_refused(BYTES, KVT_ESYSTEM, EFBIG);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    (void)signal(SIGXFSZ, handler);
}

static void ignore_tick(int number)
{
    (void)number;
}

/* On older kernels a signal undoes the allocation it interrupts; a profiler
 * sends many. */
static void signals_do_not_keep_it_from_being_made(void **state)
{
    const struct itimerval often = {.it_interval.tv_usec = 500,
                                    .it_value.tv_usec = 500};
    const struct itimerval never = {.it_value.tv_usec = 0};
    const struct sigaction tick = {.sa_handler = ignore_tick};
    struct sigaction old;
    struct kvt_shm shm;

    (void)state;
    assert_int_equal(sigaction(SIGALRM, &tick, &old), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    shm = make(UINT64_C(64) * 1024 * 1024);
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(sigaction(SIGALRM, &old, NULL), 0);
    kvt_shm_destroy(&shm);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_and_writable),
        cmocka_unit_test(the_fd_shows_the_same_bytes),
        cmocka_unit_test(the_size_is_sealed),
        cmocka_unit_test(all_pages_exist_untouched),
        cmocka_unit_test(it_is_memory_that_memcpy_may_write),
        cmocka_unit_test(it_is_closed_on_exec),
        cmocka_unit_test(destroy_gives_all_back_once),
        cmocka_unit_test(destroy_of_a_zeroed_struct_closes_nothing),
        cmocka_unit_test(a_size_of_0_and_no_place_are_refused),
        cmocka_unit_test(more_than_the_host_has_is_refused),
        cmocka_unit_test(a_failing_memfd_create_is_named),
        cmocka_unit_test(a_failing_fallocate_leaves_nothing),
        cmocka_unit_test(signals_do_not_keep_it_from_being_made),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
