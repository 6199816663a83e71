/* SPDX-License-Identifier: Apache-2.0 */
/* kvt bench: figures of this host. */
#ifndef KVT_TOOLS_BENCH_H
#define KVT_TOOLS_BENCH_H

#include <stdbool.h>

int bench_main(int argc, char **argv);

/* kvt bench scale: an exit status. */
int bench_scale(const char *engine, bool json);

#endif /* KVT_TOOLS_BENCH_H */
