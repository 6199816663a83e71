/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of blob_storm: damage, and the processes that load it. */
#ifndef KVT_FUZZ_STORM_H
#define KVT_FUZZ_STORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define BLOB_MAX 8192

struct blob {
    uint8_t bytes[BLOB_MAX];
    size_t length;
};

/* storm_damage.c: seeded, so that a case can be had again by its number. */
#define DAMAGE_KINDS 7
extern const char *const damage_names[DAMAGE_KINDS];
/* Never equal to `from`, nor to its first `prefix` bytes alone. */
void damage(const struct blob *from, size_t prefix, unsigned kind,
            uint64_t seed, struct blob *ret);

/* storm_host.c: a process with a transport that is given metadata. */
enum verdict {
    VERDICT_LOADED = 'L',
    VERDICT_REFUSED = 'R',   /* by NIXL */
    VERDICT_STRUCTURE = 'S', /* by kvt, before NIXL or a probe saw it */
    VERDICT_CAUGHT = 'C',    /* the probe process died of it */
    VERDICT_LATE = 'T',      /* the probe process did not come back */
    VERDICT_DEAD = 'D'       /* the host died of it */
};

struct host {
    bool probes;
    pid_t pid; /* 0: none */
    int to;
    int from;
    unsigned loads;
    int status; /* as of waitpid(), of the last one that died */
};

/* Starts the process if need be, and anew after it has loaded some. A host
 * without probes is one whose user did not ask for them. */
enum verdict host_load(struct host *host, const struct blob *blob);
/* As above; who dies is asked again alone. *ret_after: only after others. */
enum verdict host_load_surely(struct host *host, const struct blob *blob,
                              bool *ret_after);
void host_end(struct host *host);
/* What the process itself does: argv is that of host_load(). */
int host_main(bool probes);

#endif /* KVT_FUZZ_STORM_H */
