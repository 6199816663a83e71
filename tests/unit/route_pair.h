/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests of the same-host shortcut share: agents of the engine that
 * callers know as `nixl` over the stand-in for NIXL, with a pool of host memory
 * and a region of VRAM that nobody ever touches; the metadata of one as another
 * host, network namespace or program would have made it; and a kernel that
 * keeps the local engine out on order.
 */
#ifndef KVT_TEST_ROUTE_PAIR_H
#define KVT_TEST_ROUTE_PAIR_H

#include "engine.h"
#include "fake_nixl.h"
#include "node.h"

#define VRAM_A UINT64_C(0xa00000000000)
#define VRAM_B UINT64_C(0xb00000000000)
#define VRAM_BYTES 65536u
#define FOR_EVER 1000000000

/* The functions of fake_nixl.h, in the library that the engine loads. */
struct stand_in {
    fake_nixl_script_fn *script;
    fake_nixl_block_fn *block;
    fake_nixl_waiting_fn *waiting;
    fake_nixl_count_fn *count_lines;
    fake_nixl_line_fn *get_line;
    fake_nixl_reset_fn *reset;
};

extern struct stand_in fake;

/* Once, in main(), after child_main(): nonzero, and a line for people, when
 * there is none. Every agent of this process and its children finds it. */
int find_stand_in(void);

/* The n-th line of the stand-in's log that begins so holds these words. */
void assert_line(const char *prefix, int n, const char *words);
#define assert_lines(prefix, count)                                            \
    assert_int_equal(fake.count_lines(prefix), (count))

/* --------------------------------------------------------- agents and peers */

/* b, as an agent that a gets to know knows it. */
typedef void edit_fn(struct kvti_md *md);

/* Two agents, alpha and beta, that do not know each other. Forgets what the
 * stand-in knows. NULL options take every default; log is the test's. */
void open_nodes(struct pair *pair, const struct kvt_options *a,
                const struct kvt_options *b);
/* a imports b, whose metadata was changed by `edit` (NULL: as it is). */
void add_b(struct pair *pair, edit_fn *edit);
int try_add_b(struct pair *pair, edit_fn *edit, struct kvt_error *err);
/* All of it. */
void open_near(struct pair *pair);
void *edited_metadata(const struct node *node, edit_fn *edit,
                      size_t *ret_length);

edit_fn on_another_host;
edit_fn in_another_net;
edit_fn of_another_agent; /* in the same process */

/* b's path as a tells it, and words of the reason. */
void assert_path(const struct pair *pair, const char *path, const char *words);
void assert_bytes(const struct pair *pair, uint64_t local, uint64_t nixl);

/* Writes block i to block k, waits, and checks every byte of both pools. */
void write_and_check(struct pair *pair, uint32_t i, uint32_t k);
/* `length` bytes from a's VRAM to b's, at `offset` of both. */
kvt_xfer write_vram(const struct pair *pair, uint64_t offset, uint64_t length,
                    const struct kvt_xfer_options *options);

/* What was logged since the nodes were opened holds these words. */
bool is_logged(const char *words);

/* ---------------------------------------------------------------- the kernel */

/* From the n-th call on, 0 the next, process_vm_readv and process_vm_writev
 * answer with this errno; 0: no more. */
void forbid_after(int calls, int os_errno);

#endif /* KVT_TEST_ROUTE_PAIR_H */
