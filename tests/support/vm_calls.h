/* SPDX-License-Identifier: Apache-2.0 */
/* For tests that put themselves before the calls by which the engine `local`
 * copies (WRAP in tests/CMakeLists.txt). */
#ifndef KVT_TEST_VM_CALLS_H
#define KVT_TEST_VM_CALLS_H

#include <sys/uio.h>

#define VM_ARGUMENTS                                                           \
    pid_t pid, const struct iovec *local, unsigned long local_count,           \
        const struct iovec *remote, unsigned long remote_count,                \
        unsigned long flags
#define VM_SAME pid, local, local_count, remote, remote_count, flags

ssize_t __real_process_vm_readv(VM_ARGUMENTS);
ssize_t __wrap_process_vm_readv(VM_ARGUMENTS);
ssize_t __real_process_vm_writev(VM_ARGUMENTS);
ssize_t __wrap_process_vm_writev(VM_ARGUMENTS);

#endif /* KVT_TEST_VM_CALLS_H */
