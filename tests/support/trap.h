/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A page that does not answer: whoever touches it, by a system call too, waits
 * until the trap is closed. Then it reads as zeroes.
 */
#ifndef KVT_TEST_TRAP_H
#define KVT_TEST_TRAP_H

#include <stddef.h>

/* Anonymous private memory, whole pages. A descriptor to be closed, or -1 where
 * userfaultfd is not allowed, and under valgrind, which runs one thread at a time
 * and would wait with the one that touched it. */
int trap_pages(void *addr, size_t length);

#endif /* KVT_TEST_TRAP_H */
