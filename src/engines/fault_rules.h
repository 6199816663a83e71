/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault engine's rules: text to a table of what goes wrong when.
 * docs/fault.md is the manual. Pure: no clock, no lock, no engine.
 */
#ifndef KVTI_FAULT_RULES_H
#define KVTI_FAULT_RULES_H

#include <stdbool.h>
#include <stdint.h>

#include "engine.h"

/* Rules on posts. Of several that match one post the first one here that has
 * a state of its own decides the state; what they do otherwise adds up. */
#define KVTI_FAULT_POST_MAP(X)                                                 \
    X(DEAD, "dead")                                                            \
    X(REJECT, "reject")                                                        \
    X(FAIL_UNPOSTED, "fail_unposted")                                          \
    X(REJECT_DIRTY, "reject_dirty")                                            \
    X(DISCONNECT, "disconnect")                                                \
    X(UNREADABLE, "unreadable")                                                \
    X(NEVER, "never")                                                          \
    X(FAIL, "fail")                                                            \
    X(HANG, "hang")                                                            \
    X(HOLD, "hold")                                                            \
    X(HALF, "half")                                                            \
    X(LATE, "late")                                                            \
    X(PEER_DOWN, "peer_down")                                                  \
    X(INLINE, "inline")

enum kvti_fault_post_rule {
#define KVTI_FAULT_POST_ENUM(name, key) KVTI_FAULT_##name,
    KVTI_FAULT_POST_MAP(KVTI_FAULT_POST_ENUM)
#undef KVTI_FAULT_POST_ENUM
        KVTI_FAULT_POST_RULES
};

#define KVTI_FAULT_JOB_KINDS ((unsigned)KVTI_JOB_NOTIFY + 1)
#define KVTI_FAULT_RANGES 16

/* Which of a sequence counted from 1. Zeroed: none. */
struct kvti_fault_which {
    uint32_t count;
    uint32_t extra; /* the number after the slash, 0 if there is none */
    struct {
        uint64_t first;
        uint64_t last;
    } ranges[KVTI_FAULT_RANGES];
};

struct kvti_fault_rules {
    struct kvti_fault_which posts[KVTI_FAULT_POST_RULES];
    struct kvti_fault_which job_fail[KVTI_FAULT_JOB_KINDS];
    struct kvti_fault_which job_hang[KVTI_FAULT_JOB_KINDS];
    uint32_t job_delay_ms[KVTI_FAULT_JOB_KINDS];
    uint32_t delay_ms;
    bool layout_fail;
    char layout_name[KVT_NAME_MAX + 1]; /* "": every layout */
    bool close_hang;

    /* Of the whole life of the engine; refused after open. 0: the inner's. */
    bool no_notify;
    bool no_strided;
    uint32_t chunk_copies;
    uint64_t chunk_bytes;
    uint32_t window;
};

/*
 * Fills *ret; "" gives no rules. KVT_EINVAL names the part of the text that is
 * wrong and what would be right. `opening` admits the rules that are of the
 * engine's whole life.
 */
int kvti_fault_parse(const char *text, bool opening,
                     struct kvti_fault_rules *ret, struct kvt_error *err);

bool kvti_fault_hit(const struct kvti_fault_which *which, uint64_t number);

/* The rule's key. */
const char *kvti_fault_key(enum kvti_fault_post_rule rule);

#endif /* KVTI_FAULT_RULES_H */
