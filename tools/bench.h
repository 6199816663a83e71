/* SPDX-License-Identifier: Apache-2.0 */
/* kvt bench: figures of this host. */
#ifndef KVT_TOOLS_BENCH_H
#define KVT_TOOLS_BENCH_H

int bench_main(int argc, char **argv);

#endif /* KVT_TOOLS_BENCH_H */
