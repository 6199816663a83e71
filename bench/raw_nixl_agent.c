/* SPDX-License-Identifier: Apache-2.0 */
/* The agent of either side, and the target's process. */
#include "raw_nixl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define METADATA_MAX (UINT64_C(1) << 24)

bool raw_fail(const char *what, int status)
{
    cli_error("raw_nixl: %s failed: status %d", what, status);
    return false;
}

static bool find_extra(struct raw *raw, const char *path)
{
    static const char *const names[] = {"nixl_capi_prep_xfer_dlist",
                                        "nixl_capi_release_xfer_dlist_handle",
                                        "nixl_capi_make_xfer_req"};
    void *at[3];
    void *handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);

    for (size_t i = 0; i < 3; i++) {
        at[i] = handle != NULL ? dlsym(handle, names[i]) : NULL;
        if (at[i] == NULL) {
            cli_error("raw_nixl: NIXL has no %s", names[i]);
            return false;
        }
    }
    memcpy(&raw->extra.prep_xfer_dlist, &at[0], sizeof(at[0]));
    memcpy(&raw->extra.release_xfer_dlist_handle, &at[1], sizeof(at[1]));
    memcpy(&raw->extra.make_xfer_req, &at[2], sizeof(at[2]));
    return true;
}

static bool add_backend(struct raw *raw)
{
    struct nixl_params *params = NULL;
    int status = raw->api->create_params(&params);

    for (size_t i = 0; i < raw->param_count && status == NIXL_OK; i++) {
        char key[64];
        const char *value = strchr(raw->params[i], '=');

        if (value == NULL || (size_t)(value - raw->params[i]) >= sizeof(key)) {
            cli_error("raw_nixl: --param takes KEY=VALUE");
            return false;
        }
        (void)snprintf(key, sizeof(key), "%.*s", (int)(value - raw->params[i]),
                       raw->params[i]);
        status = raw->api->params_add(params, key, value + 1);
    }
    if (status == NIXL_OK) {
        status = raw->api->create_backend(raw->agent, "UCX", params,
                                          &raw->backend);
    }
    if (params != NULL) {
        (void)raw->api->destroy_params(params);
    }
    return status == NIXL_OK || raw_fail("create_backend", status);
}

static bool register_area(struct raw *raw)
{
    struct nixl_reg_dlist *list = NULL;
    int status = raw->api->create_reg_dlist(NIXL_MEM_DRAM, &list);

    if (status == NIXL_OK) {
        status = raw->api->reg_dlist_add_desc(list, (uintptr_t)raw->area.at,
                                              raw->area.bytes, 0, NULL, 0);
    }
    if (status == NIXL_OK) {
        status = raw->api->register_mem(raw->agent, list, NULL);
    }
    if (list != NULL) {
        (void)raw->api->destroy_reg_dlist(list);
    }
    return status == NIXL_OK || raw_fail("register_mem", status);
}

bool raw_open_agent(struct raw *raw, const char *name, enum bench_kind kind,
                    const struct raw_agent_options *options)
{
    struct nixl_agent_config config = {
        .enable_prog_thread = options->progress,
        .thread_sync = NIXL_SYNC_STRICT,
        .pthr_delay_us = options->pthr_delay_us,
    };
    const struct kvti_nixl_lib *lib;
    struct kvt_error err;
    char full_name[64];
    int status;

    if (kvti_nixl_load(NULL, false, &lib, &err) != KVT_OK) {
        cli_error("raw_nixl: %s", err.text);
        return false;
    }
    raw->api = &lib->api;
    if (!find_extra(raw, lib->path)) {
        return false;
    }
    (void)snprintf(full_name, sizeof(full_name), "%s-%d", name, (int)getpid());
    status = raw->api->create_configured_agent(full_name, &config, &raw->agent);
    if (status != NIXL_OK) {
        return raw_fail("create_configured_agent", status);
    }
    status = raw->api->create_opt_args(&raw->args);
    if (status == NIXL_OK && raw->skip_merge) {
        status = raw->api->opt_args_set_skip_desc_merge(raw->args, true);
    }
    if (status != NIXL_OK) {
        return raw_fail("create_opt_args", status);
    }
    return add_backend(raw) &&
           bench_area_open(kind, raw->shape.pool * raw->shape.block_bytes,
                           &raw->area) &&
           register_area(raw);
}
/* --------------------------------------------------------------- the target */

struct hello {
    uint64_t addr;
    uint64_t metadata_length;
};

/* Sends its metadata; then 'c' clears and 'k' compares, as in limits.c. NIXL's
 * progress thread does the rest while this one sleeps. */
static bool serve_target(struct raw *raw, int socket)
{
    struct hello hello = {0};
    void *metadata = NULL;
    size_t length = 0;
    unsigned char order;
    int status = raw->api->get_local_md(raw->agent, &metadata, &length);

    if (status != NIXL_OK) {
        return raw_fail("get_local_md", status);
    }
    hello.addr = (uint64_t)(uintptr_t)raw->area.at;
    hello.metadata_length = length;
    if (!bench_send(socket, &hello, sizeof(hello)) ||
        !bench_send(socket, metadata, length)) {
        return false;
    }
    free(metadata);
    while (read(socket, &order, 1) == 1) {
        unsigned char answer = 1;

        if (order == 'c') {
            memset(raw->area.at, 0, raw->area.bytes);
        } else {
            answer = bench_check(&raw->shape, raw->area.at);
        }
        if (!bench_send(socket, &answer, 1)) {
            break;
        }
    }
    return true;
}

static int open_socket(const char *path, struct sockaddr_un *ret)
{
    if (strlen(path) >= sizeof(ret->sun_path)) {
        cli_error("raw_nixl: the socket's path is too long");
        return -1;
    }
    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    (void)snprintf(ret->sun_path, sizeof(ret->sun_path), "%s", path);
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

int raw_run_target(struct raw *raw)
{
    struct sockaddr_un where;
    int listener = open_socket(raw->socket, &where);
    int peer;

    if (!raw_open_agent(raw, "raw-target", raw->to_kind, &raw->target)) {
        return CLI_FAILED;
    }
    (void)unlink(raw->socket);
    if (listener < 0 ||
        bind(listener, (struct sockaddr *)&where, sizeof(where)) != 0 ||
        listen(listener, 1) != 0) {
        cli_error("raw_nixl: cannot listen at %s", raw->socket);
        return CLI_FAILED;
    }
    printf("{\"name\": \"raw_nixl_target\", \"ready\": true, \"lines\": 0}\n");
    (void)fflush(stdout);
    peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    return peer >= 0 && serve_target(raw, peer) ? CLI_OK : CLI_FAILED;
}

/* The child has its own agent, so the fork comes before any NIXL. */
bool raw_fork_target(struct raw *raw)
{
    int pair[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        return false;
    }
    pid = fork();
    if (pid == 0) {
        bench_follow_parent();
        (void)close(pair[0]);
        /* NIXL does not bear a plain exit everywhere. */
        _exit(raw_open_agent(raw, "raw-target", raw->to_kind, &raw->target) &&
                      serve_target(raw, pair[1])
                  ? CLI_OK
                  : CLI_FAILED);
    }
    (void)close(pair[1]);
    raw->peer = pair[0];
    return pid > 0;
}

bool raw_ask_target(const struct raw *raw, unsigned char order)
{
    unsigned char answer = 0;

    return bench_send(raw->peer, &order, 1) &&
           bench_receive(raw->peer, &answer, 1) && answer == 1;
}
bool raw_meet_target(struct raw *raw)
{
    struct hello hello;
    void *metadata;
    int status;

    if (raw->socket != NULL) {
        struct sockaddr_un where;

        raw->peer = open_socket(raw->socket, &where);
        if (raw->peer < 0 ||
            connect(raw->peer, (struct sockaddr *)&where, sizeof(where)) != 0) {
            cli_error("raw_nixl: nobody listens at %s", raw->socket);
            return false;
        }
    }
    if (!bench_receive(raw->peer, &hello, sizeof(hello)) ||
        hello.metadata_length > METADATA_MAX) {
        cli_error("raw_nixl: the target did not start");
        return false;
    }
    metadata = cli_alloc(1, hello.metadata_length);
    if (!bench_receive(raw->peer, metadata, hello.metadata_length)) {
        return false;
    }
    raw->remote = hello.addr;
    status = raw->api->load_remote_md(raw->agent, metadata,
                                      hello.metadata_length, &raw->remote_name);
    free(metadata);
    return status == NIXL_OK || raw_fail("load_remote_md", status);
}
