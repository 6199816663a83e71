/* SPDX-License-Identifier: Apache-2.0 */
/*
 * argp reports an error in several lines and names no option's value, so it is
 * told to be silent. Then it is silent about --help as well, which is why that
 * is looked for here.
 */
#include "args.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"

static bool refused;

error_t args_refuse(const char *format, ...)
{
    char text[CLI_TEXT_MAX];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    cli_error("%s", text);
    refused = true;
    return EINVAL;
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

int args_parse(const struct argp *argp, int argc, char **argv, void *input)
{
    int at = 0;

    if (wants_help(argc, argv)) {
        argp_help(argp, stdout,
                  ARGP_HELP_USAGE | ARGP_HELP_LONG | ARGP_HELP_DOC, argv[0]);
        return ARGS_HELPED;
    }
    refused = false;
    if (argp_parse(argp, argc, argv, ARGP_NO_ERRS | ARGP_NO_HELP, &at, input) ==
        0) {
        return CLI_OK;
    }
    if (!refused) {
        cli_error("\"%s\" is no option of '%s', or lacks its value; --help "
                  "lists them",
                  argv[at > 0 && at < argc ? at : argc - 1], argv[0]);
    }
    return CLI_USAGE;
}
