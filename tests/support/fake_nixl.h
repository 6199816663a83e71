/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stand-in for libnixl_capi.so (fake_nixl_capi.c) offers beside NIXL's
 * own functions, for the test that loaded it. Found with dlsym(): the library
 * is opened RTLD_LOCAL.
 */
#ifndef KVT_TEST_FAKE_NIXL_H
#define KVT_TEST_FAKE_NIXL_H

#include <stdbool.h>
#include <stddef.h>

/*
 * The next `times` calls of a function return `value`: "post", "status",
 * "create", "register", "load", "notif", "sender" (the size of its messages),
 * "backend", "agent". What was asked for earlier is used up first. A post that is
 * scripted to 1 copies when its status becomes 0.
 */
typedef void fake_nixl_script_fn(const char *what, int value, int times);

/* Calls of a function do not come back until they are let go; waiting tells
 * how many are inside. */
typedef void fake_nixl_block_fn(const char *what, bool on);
typedef int fake_nixl_waiting_fn(const char *what);

/* The log: a line a call, in order. Counts lines that begin like this. */
typedef int fake_nixl_count_fn(const char *prefix);
/* Copies the n-th line (from 0) that begins like this; false: there is none. */
typedef bool fake_nixl_line_fn(const char *prefix, int n, char *text,
                               size_t size);

/* Requests to this agent that are made from now on are to that process, a child
 * of this one. A write that failed may be released once it is dead, by an agent
 * that has UCX alone; a release of any other request that is not over is logged as
 * "UNFINISHED". */
typedef void fake_nixl_process_fn(const char *agent, int pid);

/* Forgets log, scripts, blocks and the process. */
typedef void fake_nixl_reset_fn(void);

#endif /* KVT_TEST_FAKE_NIXL_H */
