/* SPDX-License-Identifier: Apache-2.0 */
/* kvt, the command: which word does what. */
#include <kvt/kvt.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"
#include "cli.h"
#include "info.h"
#include "node.h"
#include "replay.h"

static const char usage[] =
    "usage: kvt WORD [ARGUMENTS]\n"
    "\n"
    "  replay [OPTIONS] TRACE  move the blocks of a request trace between "
    "real\n"
    "                          processes and check every byte\n"
    "  info [--json]           engines of this build, and limits of this host\n"
    "  bench submit [--json]   what it costs the caller to start a transfer\n"
    "  help [WORD]             this text, or all about a word\n"
    "  --version               the version of the library\n"
    "\n"
    "Try: kvt replay tests/data/conversation_500.jsonl\n";

static int run_node(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    return node_main();
}

/* A word without a summary above is not for people. */
static const struct word {
    const char *name;
    int (*run)(int argc, char **argv);
} words[] = {
    {"bench", bench_main},
    {"info", info_main},
    {"replay", replay_main},
    {NODE_WORD, run_node},
};

static const struct word *find_word(const char *name)
{
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (strcmp(words[i].name, name) == 0) {
            return &words[i];
        }
    }
    return NULL;
}

/* argv[0] is the word; argp shows it as the program's name. */
static int run_word(int argc, char **argv)
{
    static char program[64];
    const struct word *word = find_word(argv[0]);

    if (word == NULL) {
        cli_error("there is no word \"%s\"; 'kvt help' lists them", argv[0]);
        return CLI_USAGE;
    }
    (void)snprintf(program, sizeof(program), "kvt %s", word->name);
    argv[0] = program;
    return word->run(argc, argv);
}

static int show_help(int argc, char **argv)
{
    static char option[] = "--help";
    char *arguments[] = {NULL, option, NULL};

    if (argc == 2) {
        fputs(usage, stdout);
        return CLI_OK;
    }
    arguments[0] = argv[2];
    return run_word(2, arguments);
}

static bool is_one_of(const char *text, const char *a, const char *b,
                      const char *c)
{
    return strcmp(text, a) == 0 || strcmp(text, b) == 0 || strcmp(text, c) == 0;
}

int main(int argc, char **argv)
{
    int rc;

    if (argc < 2) {
        cli_error("which word? 'kvt help' lists them");
        return CLI_USAGE;
    }
    if (is_one_of(argv[1], "help", "--help", "-h")) {
        rc = show_help(argc, argv);
    } else if (is_one_of(argv[1], "--version", "-V", "version")) {
        printf("kvt %s\n", kvt_version());
        rc = CLI_OK;
    } else {
        rc = run_word(argc - 1, argv + 1);
    }
    if (fflush(stdout) != 0 && rc == CLI_OK) {
        cli_error("the output cannot be written");
        rc = CLI_FAILED;
    }
    return rc;
}
