/* SPDX-License-Identifier: Apache-2.0 */
/* kvt info: the engines of this build, and what this host allows. */
#ifndef KVT_TOOLS_INFO_H
#define KVT_TOOLS_INFO_H

int info_main(int argc, char **argv);

#endif /* KVT_TOOLS_INFO_H */
