/* SPDX-License-Identifier: Apache-2.0 */
#include "trap.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sanitizer.h"

int trap_pages(void *addr, size_t length)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.mode = UFFDIO_REGISTER_MODE_MISSING};
    int fd;

    if (BUILT_FOR_VALGRIND) {
        return -1;
    }
    fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    range.range.start = (uint64_t)(uintptr_t)addr;
    range.range.len = length;
    if (fd < 0 || madvise(addr, length, MADV_DONTNEED) != 0 ||
        ioctl(fd, UFFDIO_API, &api) != 0 ||
        ioctl(fd, UFFDIO_REGISTER, &range) != 0) {
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    return fd;
}
