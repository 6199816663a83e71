/* SPDX-License-Identifier: Apache-2.0 */
/* What our own memory is made of, read from the kernel before it is
 * registered: engines take unmapped memory and die of it later. */
#ifndef KVTI_MEMCHECK_H
#define KVTI_MEMCHECK_H

#include <stddef.h>

#include "region.h"

/*
 * Checks each DRAM entry (others are left alone): no null, no wrapping end,
 * every page mapped and readable, and with KVTI_MEM_FD set: fd, fd_offset
 * really are what backs all of it, shared. Sets flags ANON and SEALED, fd_dev
 * and fd_ino. Reads the process's map once for all entries. The error names
 * the position in `mems` through positions[i] (NULL: i itself).
 */
int kvti_memcheck(struct kvti_mem *mems, size_t count, const size_t *positions,
                  struct kvt_error *err);

#endif /* KVTI_MEMCHECK_H */
