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
 * They are counted all together, or those of one place in the code: a thread
 * that polls makes any number of calls in between, but from few places.
 *
 * All the time it is also counted what the library holds: blocks of memory,
 * mappings and handles of NIXL's.
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

/* Where the code calls out. */
struct nth_place {
    unsigned kind;
    unsigned ways;    /* to fail */
    const char *name; /* of the symbol; dlsym()'s: of what is looked for */
    size_t caller;    /* as an offset for addr2line */
};

/* The n-th call from there, in one of its ways. */
struct nth_failure {
    struct nth_place place;
    unsigned variant;
    long n;
};

struct nth_plan {
    unsigned kinds;
    const struct nth_place *place; /* that alone is counted; NULL: all are */
    /* Fails as well, for that leads to the place; or NULL. */
    const struct nth_failure *cause;
    /* Which of a symbol's ways to fail; one that has fewer is not counted. */
    unsigned variant;
    bool lasting; /* and all that follow */
};

/* Added to the status with which a function of NIXL's fails that has done its
 * work all the same. */
#define NTH_DONE (-100)

struct nth_seen {
    bool failed;      /* the call that was to fail was made */
    bool caused;      /* the plan's cause failed */
    long calls;       /* counted */
    const char *name; /* of the symbol that failed */
    int error;        /* what it failed with */
    size_t caller;    /* where it was called, as an offset for addr2line */
};

/* n below 0: none fails. */
void nth_arm(const struct nth_plan *plan, long n);
/* From now on all goes well; still to be disarmed. */
void nth_relent(void);
struct nth_seen nth_disarm(void);

/* nth_places.c: those that were met while a plan had a place or no call to
 * fail, in the order in which they were. */
size_t nth_places(void);
struct nth_place nth_place(size_t i);
/* The failure in the run in which the place was met first; false: none. */
bool nth_cause(size_t i, struct nth_failure *ret);
void nth_forget_places(void);

/* What the library holds now. */
struct nth_held {
    long blocks;
    long mappings;
    long handles; /* of NIXL's, but for requests: one that failed is kept */
};

struct nth_held nth_held(void);
/* Says on stderr where what it holds comes from. */
void nth_show_held(void);

#endif /* KVT_TEST_NTH_H */
