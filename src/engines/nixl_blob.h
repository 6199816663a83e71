/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NIXL's own agent metadata, looked at from outside. NIXL crashes on some
 * damaged bytes, so their structure is checked before it sees them; what lies
 * inside a backend's connection information cannot be seen.
 */
#ifndef KVTI_NIXL_BLOB_H
#define KVTI_NIXL_BLOB_H

#include "../diag.h"
#include "../metadata.h"

/* Whether the bytes begin like NIXL's. */
bool kvti_nixl_blob_is(const void *data, size_t length);

/*
 * Checks that `data` is one whole blob and nothing after it, and fills what
 * it says: the agent's name and its registrations of DRAM and VRAM, as NIXL
 * knows them. KVT_EMETADATA with a sentence otherwise. *ret_regions is the
 * caller's to free; ret_name has room for KVT_NAME_MAX + 1 bytes.
 */
int kvti_nixl_blob_parse(const void *data, size_t length, uint32_t regions_max,
                         char *ret_name, struct kvti_regions *ret_regions,
                         struct kvt_error *err);

/* Metadata of an agent that is not kvt's: no trailer, and an incarnation made
 * from the bytes. */
int kvti_nixl_blob_decode(const void *data, size_t length, uint32_t regions_max,
                          struct kvti_md *ret, struct kvt_error *err);

#endif /* KVTI_NIXL_BLOB_H */
