/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Over the engine `local` every operation is walked through every allocation
 * and every system call that it makes, in whichever thread. How: walk.h. The
 * system calls are walked once for each way in which one of them can fail.
 */
#include <string.h>

#include "walk.h"

static const struct nth_plan plans[] = {
    {.kinds = NTH_MEMORY},
    {.kinds = NTH_MEMORY, .lasting = true},
    {.kinds = NTH_SYSTEM},
    {.kinds = NTH_SYSTEM, .variant = 1},
    {.kinds = NTH_SYSTEM, .variant = 2},
    {.kinds = NTH_SYSTEM, .variant = 3},
};

static const struct ground local = {
    .name = "local", .engine = "local", .options = {.grace_ns = 200000000}};

#define CASE(name)                                                             \
    static void name##_survives_each_failure(void **state)                     \
    {                                                                          \
        (void)state;                                                           \
        walk_once(&local);                                                     \
        walk_all(&local, #name, plans, sizeof plans / sizeof plans[0]);        \
    }

CASES(CASE)

#define ROW(name) cmocka_unit_test(name##_survives_each_failure),

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {CASES(ROW)};
    const struct test_group groups[] = {TEST_GROUP("local", cases)};

    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
