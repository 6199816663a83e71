/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fails the Nth thing: every call of the library into the world outside it, by
 * name. The program is linked with --wrap for each symbol (kvt_test's WRAP,
 * the list NTH_WRAP in tests/CMakeLists.txt), so that the calls of the library
 * and of this program come here first; those of libc itself and of loaded
 * libraries do not. NIXL's functions come here too: dlsym() hands out our own
 * in their place.
 *
 * Between nth_arm() and nth_disarm() the calls are counted, whichever thread
 * makes them, and one of them fails. The thread that runs the test calls
 * nothing that is wrapped in between but through the library.
 *
 * All the time it is also counted what the library holds: blocks of memory and
 * mappings.
 */
#ifndef KVT_TEST_NTH_H
#define KVT_TEST_NTH_H

#include <stdbool.h>
#include <stddef.h>

enum nth_kind {
    NTH_MEMORY = 1u << 0, /* malloc() and the like */
    NTH_SYSTEM = 1u << 1, /* system calls, threads */
    NTH_LOADER = 1u << 2, /* dlopen(), dlsym() */
    NTH_NIXL = 1u << 3    /* NIXL's own functions */
};

struct nth_plan {
    unsigned kinds;
    /* Which of a symbol's ways to fail; one that has fewer is not counted. */
    unsigned variant;
    bool lasting; /* and all that follow */
};

#define NTH_VARIANTS 4

struct nth_seen {
    bool failed;      /* the call that was to fail was made */
    long calls;       /* counted */
    const char *name; /* of the symbol that failed */
    int error;        /* what it failed with */
    size_t caller;    /* where it was called, as an offset for addr2line */
};

void nth_arm(const struct nth_plan *plan, long n);
/* From now on all goes well; still to be disarmed. */
void nth_relent(void);
struct nth_seen nth_disarm(void);

/* What the library holds now. */
struct nth_held {
    long blocks;
    long mappings;
};

struct nth_held nth_held(void);
/* Says on stderr where what it holds comes from. */
void nth_show_held(void);

#endif /* KVT_TEST_NTH_H */
