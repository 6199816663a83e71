/* SPDX-License-Identifier: Apache-2.0 */
#include "info.h"

#include <jansson.h>
#include <kvt/kvt.h>
#include <stdio.h>

#include "args.h"
#include "cli.h"
#include "host.h"

/* ------------------------------------------------------------------- people */

static void print_limit(const char *name, const struct host_limit *limit,
                        bool bytes, const char *why)
{
    char size[CLI_SIZE_TEXT];

    if (limit->soft == HOST_UNLIMITED) {
        printf("  %-18s %-14s %s\n", name, "unlimited", why);
    } else if (bytes) {
        printf("  %-18s %-14s %s\n", name, cli_format_size(limit->soft, size),
               why);
    } else {
        printf("  %-18s %-14llu %s\n", name, (unsigned long long)limit->soft,
               why);
    }
}

static const char *explain_scope(int64_t scope)
{
    switch (scope) {
    case -1:
        return "no Yama: processes of one user may write each other";
    case 0:
        return "processes of one user may write each other";
    case 1:
        return "siblings may not write each other without "
               "KVT_OPEN_ALLOW_PTRACE at the target";
    default:
        return "only with CAP_SYS_PTRACE: engine local cannot reach others; "
               "kernel.yama.ptrace_scope is the setting";
    }
}

static void print_scope(int64_t scope)
{
    if (scope < 0) {
        printf("  %-18s %-14s %s\n", "ptrace scope", "absent",
               explain_scope(scope));
    } else {
        printf("  %-18s %-14lld %s\n", "ptrace scope", (long long)scope,
               explain_scope(scope));
    }
}

static void print_namespace(const char *name, bool initial, const char *text)
{
    printf("  %-18s %-14s %s\n", name, initial ? "the host's" : "its own",
           text);
}

static void print_probe(const char *name, const struct host_probe *probe,
                        const char *use)
{
    printf("  %-18s %-14s %s\n", name, probe->works ? "works" : "fails",
           probe->works ? use : probe->why);
}

static void print_engines(void)
{
    struct kvt_engine_info engine;

    printf("engines\n");
    for (uint32_t i = 0; kvt_engine_info(i, &engine) == KVT_OK; i++) {
        printf("  %-18s %-14s %s%s%s%s\n", engine.name,
               engine.code == KVT_OK ? "available" : "missing",
               engine.version[0] != '\0' ? "version " : "", engine.version,
               engine.version[0] != '\0' ? ", " : "", engine.text);
    }
}

static void print_host(const struct host_facts *facts)
{
    char size[CLI_SIZE_TEXT];
    char left[CLI_SIZE_TEXT];

    printf("host\n");
    printf("  %-18s %s\n", "kernel", facts->kernel);
    print_limit("memlock", &facts->memlock_bytes, true,
                "memory that may be pinned for RDMA");
    print_limit("open files", &facts->open_files, false,
                "two or three for each peer");
    printf("  %-18s %-14llu mappings of one process\n", "max map count",
           (unsigned long long)facts->max_map_count);
    if (facts->shm_exists) {
        printf("  %-18s %-14s %s free\n", "/dev/shm",
               cli_format_size(facts->shm_bytes, size),
               cli_format_size(facts->shm_free_bytes, left));
    } else {
        printf("  %-18s %-14s\n", "/dev/shm", "absent");
    }
    print_scope(facts->ptrace_scope);
    print_namespace("user namespace", facts->initial_user_namespace,
                    facts->user_namespace);
    print_namespace("pid namespace", facts->initial_pid_namespace,
                    facts->pid_namespace);
    print_probe("process_vm_writev", &facts->vm_write,
                "a child's memory was written");
    print_probe("pidfd", &facts->pidfd, "a child's death was seen");
}

/* --------------------------------------------------------------------- JSON */

static void set(json_t *object, const char *key, json_t *value)
{
    (void)json_object_set_new(object, key, value);
}

static json_t *limit_value(uint64_t value)
{
    return value == HOST_UNLIMITED ? json_null()
                                   : json_integer((json_int_t)value);
}

static json_t *limit_object(const struct host_limit *limit)
{
    json_t *object = json_object();

    set(object, "soft", limit_value(limit->soft));
    set(object, "hard", limit_value(limit->hard));
    return object;
}

static json_t *probe_object(const struct host_probe *probe)
{
    json_t *object = json_object();

    set(object, "works", json_boolean(probe->works));
    if (!probe->works) {
        set(object, "why", json_string(probe->why));
    }
    return object;
}

static json_t *namespace_object(bool initial, const char *text)
{
    json_t *object = json_object();

    set(object, "initial", json_boolean(initial));
    set(object, "id", json_string(text));
    return object;
}

static json_t *engine_list(void)
{
    struct kvt_engine_info engine;
    json_t *list = json_array();

    for (uint32_t i = 0; kvt_engine_info(i, &engine) == KVT_OK; i++) {
        json_t *object = json_object();
        json_t *kinds = json_array();

        if ((engine.kinds & 1u << KVT_DRAM) != 0) {
            (void)json_array_append_new(kinds, json_string("DRAM"));
        }
        if ((engine.kinds & 1u << KVT_VRAM) != 0) {
            (void)json_array_append_new(kinds, json_string("VRAM"));
        }
        set(object, "name", json_string(engine.name));
        set(object, "available", json_boolean(engine.code == KVT_OK));
        set(object, "code", json_string(kvt_errname(engine.code)));
        set(object, "version", json_string(engine.version));
        set(object, "kinds", kinds);
        set(object, "text", json_string(engine.text));
        (void)json_array_append_new(list, object);
    }
    return list;
}

static json_t *host_object(const struct host_facts *facts)
{
    json_t *object = json_object();

    set(object, "kernel", json_string(facts->kernel));
    set(object, "memlock_bytes", limit_object(&facts->memlock_bytes));
    set(object, "open_files", limit_object(&facts->open_files));
    set(object, "max_map_count",
        json_integer((json_int_t)facts->max_map_count));
    set(object, "shm_bytes",
        facts->shm_exists ? json_integer((json_int_t)facts->shm_bytes)
                          : json_null());
    set(object, "shm_free_bytes",
        facts->shm_exists ? json_integer((json_int_t)facts->shm_free_bytes)
                          : json_null());
    set(object, "ptrace_scope",
        facts->ptrace_scope < 0 ? json_null()
                                : json_integer(facts->ptrace_scope));
    set(object, "user_namespace",
        namespace_object(facts->initial_user_namespace, facts->user_namespace));
    set(object, "pid_namespace",
        namespace_object(facts->initial_pid_namespace, facts->pid_namespace));
    set(object, "process_vm_writev", probe_object(&facts->vm_write));
    set(object, "pidfd", probe_object(&facts->pidfd));
    return object;
}

static void print_json(const struct host_facts *facts)
{
    json_t *object = json_object();

    set(object, "version", json_string(kvt_version()));
    set(object, "engines", engine_list());
    set(object, "host", host_object(facts));
    (void)json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    printf("\n");
    json_decref(object);
}

/* ---------------------------------------------------------------- arguments */

static error_t take_option(int key, char *arg, struct argp_state *state)
{
    bool *json = state->input;

    if (key == 'j') {
        *json = true;
        return 0;
    }
    if (key == ARGP_KEY_ARG) {
        return args_refuse("info: \"%s\" is one argument too many", arg);
    }
    return ARGP_ERR_UNKNOWN;
}

int info_main(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {.name = "json", .key = 'j', .doc = "Print one JSON object"}, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = take_option,
        .doc = "Shows the engines of this build, and why one is missing, and "
               "the limits of this host that matter to kvt.",
    };
    struct host_facts facts;
    bool json = false;
    int rc = args_parse(&argp, argc, argv, &json);

    if (rc != CLI_OK) {
        return rc == ARGS_HELPED ? CLI_OK : rc;
    }
    host_look(&facts);
    if (json) {
        print_json(&facts);
    } else {
        printf("kvt %s\n", kvt_version());
        print_engines();
        print_host(&facts);
    }
    return CLI_OK;
}
