/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments by argp, with errors of one line. */
#ifndef KVT_TOOLS_ARGS_H
#define KVT_TOOLS_ARGS_H

#include <argp.h>

/* Help was printed: the command is done, and all is well. */
#define ARGS_HELPED (-1)

/*
 * Parses the arguments of a word; argv[0] is what its help calls it. 0, or
 * ARGS_HELPED, or CLI_USAGE after one line on stderr. A parser that refuses
 * an argument writes that line itself and returns EINVAL.
 */
int args_parse(const struct argp *argp, int argc, char **argv, void *input);

/* Says why an argument is refused, and remembers that it was said. */
error_t args_refuse(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

#endif /* KVT_TOOLS_ARGS_H */
