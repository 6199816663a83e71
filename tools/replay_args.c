/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "replay.h"

/* Keys of options without a short form. */
enum key {
    KEY_ENGINE = 256,
    KEY_HOLDERS,
    KEY_FETCHERS,
    KEY_MEMORY,
    KEY_POOL,
    KEY_BLOCK_BYTES,
    KEY_MODEL,
    KEY_PAGE_TOKENS,
    KEY_TP,
    KEY_INFLIGHT,
    KEY_WORKERS,
    KEY_SPEED,
    KEY_TIMEOUT,
    KEY_REQUESTS,
    KEY_SEED,
    KEY_PULL,
    KEY_SHM,
    KEY_JSON,
    KEY_METRICS,
    KEY_KILL,
    KEY_CORRUPT,
    KEY_LISTEN,
    KEY_CONNECT,
    KEY_KEEP,
    KEY_NO_SAME_HOST
};

#define OPTION(option, id, value, text)                                        \
    {                                                                          \
        .name = (option), .key = (id), .arg = (value), .doc = (text)           \
    }

static const struct argp_option argp_options[] = {
    OPTION("engine", KEY_ENGINE, "SPEC",
           "The engine, as kvt_open() takes it (local; between hosts auto, "
           "which is nixl where that loads). nixl switches the same-host "
           "shortcut off, auto leaves it on"),
    OPTION("no-same-host", KEY_NO_SAME_HOST, NULL,
           "All bytes go through NIXL, those of one host too"),
    OPTION("listen", KEY_LISTEN, "ADDR:PORT",
           "Run the holders of one run that somebody else connects for; port "
           "0: a free one, which is printed"),
    OPTION("connect", KEY_CONNECT, "ADDR:PORT",
           "The holders run there, the fetchers here"),
    OPTION("keep", KEY_KEEP, NULL, "--listen serves run after run"),
    OPTION("holders", KEY_HOLDERS, "N", "Processes that have the blocks (2)"),
    OPTION("fetchers", KEY_FETCHERS, "N", "Processes that want them (1)"),
    OPTION("pull", KEY_PULL, NULL,
           "Fetchers read; without it holders write, as prefill nodes do"),
    OPTION("memory", KEY_MEMORY, "SIZE",
           "Memory for the pool of one process (1GiB)"),
    OPTION("pool", KEY_POOL, "SIZE",
           "Size that a pool should have (as --memory). If that is more than "
           "--memory, the pool has fewer slots, and the scale is printed"),
    OPTION("shm", KEY_SHM, NULL, "Pools are shared memory of kvt_shm_create()"),
    OPTION("block-bytes", KEY_BLOCK_BYTES, "SIZE",
           "Size of a hash block, if there is no --model (256KiB)"),
    OPTION("model", KEY_MODEL, "NAME",
           "Hash blocks are the KV pages of this model"),
    OPTION("page-tokens", KEY_PAGE_TOKENS, "N",
           "Tokens of a page (the model's default)"),
    OPTION("tp", KEY_TP, "N", "Tensor-parallel ranks that share the heads (1)"),
    OPTION("inflight", KEY_INFLIGHT, "N", "Requests at a time (32)"),
    OPTION("workers", KEY_WORKERS, "N", "Copy threads of a transport (kvt's)"),
    OPTION(
        "speed", KEY_SPEED, "max|FACTOR",
        "max: as fast as possible. 1: as the trace's timestamps say, 10: ten "
        "times as fast (max)"),
    OPTION("timeout", KEY_TIMEOUT, "SECONDS",
           "Deadline of one transfer; 0: none (60)"),
    OPTION("requests", KEY_REQUESTS, "N", "Only the first N requests"),
    OPTION("seed", KEY_SEED, "N",
           "Repeats a run's contents and placement (random)"),
    OPTION("kill-holder", KEY_KILL, "N@REQUEST",
           "Kill holder N (they count from 0) with SIGKILL once REQUEST "
           "requests were started; may be given several times"),
    OPTION("corrupt", KEY_CORRUPT, "WHAT",
           "Spoil one byte of a landed block, a neighbour, or a guard zone, to "
           "see that it is noticed"),
    OPTION("metrics", KEY_METRICS, "FILE",
           "Write the Prometheus text of one node that moves blocks"),
    OPTION("json", KEY_JSON, NULL, "Print one JSON object and no table"),
    {0}};

static const char doc[] =
    "Replays a request trace over real processes and checks every byte.\v"
    "TRACE has one JSON object a line: timestamp (ms), input_length, "
    "output_length, hash_ids (one for each block of 512 tokens). For each "
    "request the blocks that its fetcher does not have yet are moved from "
    "their holders, into slots of a paged pool, by index.\n\n"
    "Across two hosts: 'kvt replay --listen ADDR:PORT' on one, 'kvt replay "
    "--connect ADDR:PORT TRACE' on the other, both of the same version. ADDR "
    "is a name, an IPv4 address, or an IPv6 address in brackets. The number "
    "of holders, their engine, and what memory they may use is said at the "
    "listening side, all else at the connecting one. One TCP connection "
    "carries the orders; the blocks go by the engine. There is no password: "
    "use it in networks that you trust.\n\n"
    "Exit status: 0 if all is well, 1 if a block was wrong or missing, 2 for "
    "wrong arguments or a malformed trace, 130 after an interrupt.\n\n"
    "Models: ";

/* What the parser carries along. */
struct parse {
    struct replay_options *options;
    const char *of_listener;  /* given, and --connect does not take it */
    const char *of_connector; /* given, and --listen does not take it */
};

/* Options that only one of two hosts can have a say in. */
static const int listener_keys[] = {KEY_HOLDERS, KEY_KEEP};
static const int connector_keys[] = {
    KEY_FETCHERS, KEY_PULL, KEY_POOL, KEY_INFLIGHT, KEY_SPEED,   KEY_TIMEOUT,
    KEY_REQUESTS, KEY_SEED, KEY_KILL, KEY_CORRUPT,  KEY_METRICS, KEY_JSON};

static const char *name_of(int key, const int *keys, size_t count)
{
    const struct argp_option *option = argp_options;

    for (size_t i = 0; i < count; i++) {
        if (keys[i] == key) {
            while (option->key != key) {
                option++;
            }
            return option->name;
        }
    }
    return NULL;
}

static void note_side(struct parse *parse, int key)
{
    const char *listener = name_of(key, listener_keys,
                                   sizeof(listener_keys) / sizeof(int));
    const char *connector = name_of(key, connector_keys,
                                    sizeof(connector_keys) / sizeof(int));

    parse->of_listener = listener != NULL ? listener : parse->of_listener;
    parse->of_connector = connector != NULL ? connector : parse->of_connector;
}

static error_t refuse(const char *option, const char *wanted, const char *got)
{
    return args_refuse("replay: --%s wants %s, not \"%s\"", option, wanted,
                       got);
}

static error_t take_number(const char *option, const char *text, uint64_t min,
                           uint64_t max, uint64_t *ret)
{
    char wanted[80];

    if (cli_parse_u64(text, min, max, ret)) {
        return 0;
    }
    (void)snprintf(wanted, sizeof(wanted), "a number from %llu to %llu",
                   (unsigned long long)min, (unsigned long long)max);
    return refuse(option, wanted, text);
}

static error_t take_size(const char *option, const char *text, uint64_t *ret)
{
    if (cli_parse_size(text, ret) && *ret > 0) {
        return 0;
    }
    return refuse(option, "a size such as 512MiB", text);
}

static error_t take_speed(struct parse *parse, const char *text)
{
    if (strcmp(text, "max") == 0) {
        parse->options->speed = 0;
        return 0;
    }
    if (cli_parse_real(text, 1e-6, 1e9, &parse->options->speed)) {
        return 0;
    }
    return refuse("speed", "\"max\" or a factor above 0", text);
}

static error_t take_kill(struct parse *parse, const char *text)
{
    static const char wanted[] = "HOLDER@REQUEST, such as 0@100";
    struct replay_options *options = parse->options;
    struct replay_kill *kill = &options->kills[options->kill_count];
    const char *at = strchr(text, '@');
    char number[24];

    if (options->kill_count == REPLAY_KILLS_MAX) {
        return args_refuse("replay: --kill-holder is taken %u times at most",
                           REPLAY_KILLS_MAX);
    }
    if (at == NULL || (size_t)(at - text) >= sizeof(number)) {
        return refuse("kill-holder", wanted, text);
    }
    memcpy(number, text, (size_t)(at - text));
    number[at - text] = '\0';
    if (!cli_parse_u64(number, 0, REPLAY_NODES_MAX, &kill->holder) ||
        !cli_parse_u64(at + 1, 1, TRACE_NUMBER_MAX, &kill->request)) {
        return refuse("kill-holder", wanted, text);
    }
    options->kill_count++;
    return 0;
}

static error_t take_corrupt(struct parse *parse, const char *text)
{
    static const char *const names[] = {"", "block", "neighbour", "guard"};

    for (uint64_t i = CORRUPT_BLOCK; i <= CORRUPT_GUARD; i++) {
        if (strcmp(text, names[i]) == 0) {
            parse->options->corrupt = i;
            return 0;
        }
    }
    return refuse("corrupt", "block, neighbour or guard", text);
}

static error_t take_shape(int key, char *arg, struct parse *parse)
{
    struct replay_options *options = parse->options;

    switch (key) {
    case KEY_HOLDERS:
        return take_number("holders", arg, 1, REPLAY_NODES_MAX,
                           &options->holders);
    case KEY_FETCHERS:
        return take_number("fetchers", arg, 1, REPLAY_NODES_MAX,
                           &options->fetchers);
    case KEY_MEMORY:
        return take_size("memory", arg, &options->memory);
    case KEY_POOL:
        return take_size("pool", arg, &options->pool);
    case KEY_BLOCK_BYTES:
        options->block_bytes_given = true;
        return take_size("block-bytes", arg, &options->block_bytes);
    case KEY_PAGE_TOKENS:
        return take_number("page-tokens", arg, 1, TRACE_BLOCK_TOKENS,
                           &options->page_tokens);
    case KEY_TP:
        return take_number("tp", arg, 1, 1024, &options->tp);
    case KEY_INFLIGHT:
        return take_number("inflight", arg, 1, REPLAY_INFLIGHT_MAX,
                           &options->inflight);
    case KEY_WORKERS:
        return take_number("workers", arg, 1, 1024, &options->workers);
    case KEY_REQUESTS:
        return take_number("requests", arg, 1, TRACE_NUMBER_MAX,
                           &options->requests);
    case KEY_SEED:
        options->seed_given = true;
        return take_number("seed", arg, 0, TRACE_NUMBER_MAX, &options->seed);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t take_flag(int key, struct replay_options *options)
{
    switch (key) {
    case KEY_PULL:
        options->pull = true;
        return 0;
    case KEY_SHM:
        options->shm = true;
        return 0;
    case KEY_JSON:
        options->json = true;
        return 0;
    case KEY_KEEP:
        options->keep = true;
        return 0;
    case KEY_NO_SAME_HOST:
        options->no_same_host = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t take_option(int key, char *arg, struct argp_state *state)
{
    struct parse *parse = state->input;
    struct replay_options *options = parse->options;

    note_side(parse, key);
    switch (key) {
    case KEY_ENGINE:
        options->engine = arg;
        return strlen(arg) < NODE_ENGINE_MAX
                   ? 0
                   : refuse("engine", "a shorter text", arg);
    case KEY_MODEL:
        options->model = arg;
        return 0;
    case KEY_METRICS:
        options->metrics = arg;
        return 0;
    case KEY_SPEED:
        return take_speed(parse, arg);
    case KEY_TIMEOUT:
        return cli_parse_real(arg, 0, 1e6, &options->timeout_s)
                   ? 0
                   : refuse("timeout", "a number of seconds", arg);
    case KEY_KILL:
        return take_kill(parse, arg);
    case KEY_CORRUPT:
        return take_corrupt(parse, arg);
    case KEY_LISTEN:
        options->listen = arg;
        return 0;
    case KEY_CONNECT:
        options->connect = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (options->trace != NULL) {
            return args_refuse("replay: \"%s\" is one trace too many", arg);
        }
        options->trace = arg;
        return 0;
    default:
        return arg != NULL ? take_shape(key, arg, parse)
                           : take_flag(key, options);
    }
}

/* Which of two hosts says what. */
static error_t check_sides(const struct parse *parse)
{
    const struct replay_options *options = parse->options;

    if (options->listen != NULL && options->connect != NULL) {
        return args_refuse("replay: a host listens or connects, not both");
    }
    if (options->listen != NULL && options->trace != NULL) {
        return args_refuse("replay: --listen takes no TRACE, the side with "
                           "--connect has it");
    }
    if (options->listen != NULL && parse->of_connector != NULL) {
        return args_refuse("replay: --%s is said at the side with --connect",
                           parse->of_connector);
    }
    if (options->connect != NULL && parse->of_listener != NULL) {
        return args_refuse("replay: --%s is said at the side with --listen",
                           parse->of_listener);
    }
    if (options->keep && options->listen == NULL) {
        return args_refuse("replay: --keep needs --listen");
    }
    return 0;
}

bool replay_is_nixl(const char *engine)
{
    static const char fault[] = "fault:";
    size_t length;

    if (strncmp(engine, fault, sizeof(fault) - 1) == 0) {
        engine += sizeof(fault) - 1;
    }
    length = strcspn(engine, ":?");
    return length == strlen("nixl") && memcmp(engine, "nixl", length) == 0;
}

static void choose_engine(struct replay_options *options)
{
    bool two_hosts = options->listen != NULL || options->connect != NULL;
    const char *same_host = getenv("KVT_SAME_HOST");

    if (options->engine == NULL) {
        options->engine = two_hosts ? "auto" : "local";
    }
    /* kvt reads the variable too; here it is for what the table says. */
    options->no_same_host = options->no_same_host ||
                            replay_is_nixl(options->engine) ||
                            (same_host != NULL && strcmp(same_host, "0") == 0);
}

/* Rules between options; a sentence or NULL. */
static const char *find_conflict(const struct parse *parse)
{
    const struct replay_options *options = parse->options;

    if (options->trace == NULL && options->listen == NULL) {
        return "replay: which TRACE? 'kvt help replay' says more";
    }
    if (options->model != NULL && options->block_bytes_given) {
        return "replay: --model has its own block size, leave --block-bytes "
               "out";
    }
    if (options->model == NULL &&
        (options->page_tokens != 0 || options->tp != 1)) {
        return "replay: --page-tokens and --tp need a --model";
    }
    if (options->holders + options->fetchers > REPLAY_NODES_MAX) {
        return "replay: that is more than 256 processes";
    }
    return NULL;
}

/* --help with the models that there are. */
static char *add_models(int key, const char *text, void *input)
{
    char *whole;
    size_t length;
    FILE *out;

    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC || text == NULL) {
        return (char *)(uintptr_t)text;
    }
    out = open_memstream(&whole, &length);
    if (out == NULL) {
        return NULL;
    }
    fprintf(out, "%s", text);
    for (unsigned int i = 0; geometry_model_name(i) != NULL; i++) {
        fprintf(out, "%s%s", i > 0 ? ", " : "", geometry_model_name(i));
    }
    return fclose(out) == 0 ? whole : NULL;
}

int replay_parse(int argc, char **argv, struct replay_options *ret)
{
    static const struct argp argp = {
        .options = argp_options,
        .parser = take_option,
        .args_doc = "TRACE",
        .doc = doc,
        .help_filter = add_models,
    };
    struct replay_options options = {
        .holders = 2,
        .fetchers = 1,
        .memory = UINT64_C(1) << 30,
        .block_bytes = UINT64_C(256) << 10,
        .tp = 1,
        .inflight = 32,
        .timeout_s = 60,
    };
    struct parse parse = {.options = &options};
    const char *conflict;
    int rc = args_parse(&argp, argc, argv, &parse);

    if (rc != CLI_OK) {
        return rc;
    }
    if (check_sides(&parse) != 0) {
        return CLI_USAGE;
    }
    conflict = find_conflict(&parse);
    if (conflict != NULL) {
        cli_error("%s", conflict);
        return CLI_USAGE;
    }
    choose_engine(&options);
    *ret = options;
    return CLI_OK;
}
