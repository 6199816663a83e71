/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one suite that every engine passes, written against the public header.
 * A case that an engine cannot do is skipped by capability, with the reason on
 * the output. Cases that need things to go wrong run where the engine is
 * "fault:ENGINE", which makes them go wrong on order.
 */
#ifndef KVT_CONFORMANCE_SUITE_H
#define KVT_CONFORMANCE_SUITE_H

#include "node.h"
#include "two_process.h"

#define MS UINT64_C(1000000)
#define SECONDS UINT64_C(1000000000)

struct suite {
    const char *engine; /* as given on the command line */
    char base[32];      /* without "fault:" */
    bool fault;
    bool notify;
    bool vram;
    bool local; /* DRAM on this host goes by the local engine */
    bool nixl;  /* it goes by NIXL */
    bool tcp;   /* by NIXL over TCP, also on this host */
    bool agent; /* there is an agent of NIXL's: a quarter of a second and dozens
                 * of descriptors for each transport, and it connects when it
                 * likes */
    bool slow;  /* a sanitizer is on: fewer rounds */
    bool tsan;  /* the thread sanitizer */
};

extern struct suite suite;

/* Fills `suite`. 0, or the exit status with a message: 77 when this build or
 * machine does not have the engine, 1 when it has and it does not work. */
int suite_begin(const char *engine);
/* Says which way the bytes went; the exit status becomes 1 when one went
 * another way than the engine says. */
int suite_end(int status, bool all);

/* End the case as skipped unless the engine can; fault's are run where the
 * engine is fault's. */
void need_fault(void);
void need_notify(void);
/* Skipped where DRAM goes by NIXL, which cannot do this, and why. */
void need_local(const char *why);
/* Likewise over TCP. */
void need_no_tcp(const char *why);

uint64_t suite_seed(void);
/* A plan with the suite's engine and a seed of its own. */
struct node_plan suite_plan(const struct pool_shape *shape);
/* "fault:ENGINE?RULES", valid until the next call. */
const char *suite_engine(const char *rules);
void suite_pair(struct pair *pair, const struct pool_shape *shape);
/* Soon lost is what NIXL cannot prove. */
void suite_pair_with_grace(struct pair *pair, const struct pool_shape *shape,
                           uint64_t grace_ns);
/* The side that moves goes wrong by these rules; grace 0: the default. */
void suite_fault_pair(struct pair *pair, const struct pool_shape *shape,
                      const char *rules, uint64_t grace_ns);
/* Both agents stay open and their memory mapped: after a close that said so. */
void suite_leak_pair(struct pair *pair);

void set_rules(const struct pair *pair, const char *rules);
/* Held requests go on. */
void release_all(const struct pair *pair);

/* A child with the suite's engine; a knows it as "child". */
struct across {
    struct node a;
    struct child child;
    kvt_peer peer;
    kvt_layout remote;
};

void across_open(struct across *across, const struct pool_shape *shape);
/* The child's (new) agent becomes a peer of a's under this name. */
void across_add(struct across *across, const char *name);
void across_close(struct across *across);
kvt_xfer across_write(const struct across *across, uint32_t count,
                      const struct kvt_xfer_options *options);
void across_expect(struct across *across, uint32_t count);

extern const struct test_group open_group;
extern const struct test_group close_group;
extern const struct test_group memory_group;
extern const struct test_group revoke_group;
extern const struct test_group metadata_group;
extern const struct test_group peers_group;
extern const struct test_group death_group;
extern const struct test_group stopped_group;
extern const struct test_group access_group;
extern const struct test_group layouts_group;
extern const struct test_group writes_group;
extern const struct test_group indices_group;
extern const struct test_group cancel_group;
extern const struct test_group states_group;
extern const struct test_group lost_group;
extern const struct test_group reload_group;
extern const struct test_group polls_group;
extern const struct test_group notes_group;
extern const struct test_group threads_group;
extern const struct test_group stats_group;
extern const struct test_group reported_group;
extern const struct test_group badinput_group;

#endif /* KVT_CONFORMANCE_SUITE_H */
