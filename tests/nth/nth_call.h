/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the wrapped calls share.
 */
#ifndef KVT_TEST_NTH_CALL_H
#define KVT_TEST_NTH_CALL_H

#include "nth.h"

/* Not an errno: the call does less than it was asked. */
#define NTH_LESS (-1)

#define CALLER __builtin_return_address(0)

#define PROTOTYPE(type, name, parameters)                                      \
    type __real_##name parameters;                                             \
    type __wrap_##name parameters;                                             \
    type __wrap_##name parameters

/* The ways of a symbol to fail, most likely first. */
#define ERRORS(...)                                                            \
    static const int errors[] = {__VA_ARGS__};                                 \
    const size_t ways = sizeof errors / sizeof errors[0]

/* Counts the call: 0, or what it fails with. */
int nth_next(unsigned kind, const char *name, const int *errors, size_t count,
             const void *caller);

void nth_mapped(long change);
void nth_handled(long change);

enum nth_hit { NTH_MISS, NTH_HIT, NTH_CAUSE };

/* nth_places.c: notes where it is called. What is not missed fails, in
 * *ret_variant. */
enum nth_hit nth_at_place(const struct nth_place *here, unsigned *ret_variant);
void nth_choose_place(const struct nth_plan *plan, long n);

#endif /* KVT_TEST_NTH_CALL_H */
