/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conformance ENGINE [PATTERN]: runs the cases whose name or subject matches
 * the shell pattern. ENGINE is an engine's specification as in kvt_options,
 * by default that of KVT_ENGINE in the environment, or "local".
 */
#include <stdlib.h>

#include "suite.h"

int main(int argc, char **argv)
{
    const char *engine;
    struct test_group groups[22];
    size_t count = 0;
    int status;

    child_main(argc, argv);
    engine = argc > 1 ? argv[1] : getenv("KVT_ENGINE");
    status = suite_begin(engine != NULL ? engine : "local");
    if (status != 0) {
        return status;
    }
    groups[count++] = open_group;
    groups[count++] = close_group;
    groups[count++] = memory_group;
    groups[count++] = revoke_group;
    groups[count++] = metadata_group;
    groups[count++] = peers_group;
    groups[count++] = death_group;
    groups[count++] = stopped_group;
    groups[count++] = access_group;
    groups[count++] = layouts_group;
    groups[count++] = writes_group;
    groups[count++] = indices_group;
    groups[count++] = cancel_group;
    groups[count++] = states_group;
    groups[count++] = lost_group;
    groups[count++] = reload_group;
    groups[count++] = polls_group;
    groups[count++] = notes_group;
    groups[count++] = threads_group;
    groups[count++] = stats_group;
    groups[count++] = reported_group;
    groups[count++] = badinput_group;
    status = kvt_test_main(groups, count, argc > 2 ? argv[2] : NULL);
    return suite_end(status, argc <= 2);
}
