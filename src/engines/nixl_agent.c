/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making and ending NIXL's agent, on the NIXL thread.
 *
 * teardown destroys the agent first, whatever is in flight, and then the
 * handles that are ours: releasing an unfinished request while the agent lives
 * aborts inside UCX at times (6 of 20 with four threads), after it is gone it
 * crashes. So requests that never finished are never released at all.
 */
#include "nixl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCRATCH_BYTES 4096u

const char *kvti_nixl_status_text(int status)
{
    switch (status) {
    case NIXL_OK:
        return "success";
    case NIXL_IN_PROG:
        return "in progress";
    case NIXL_INVALID_PARAM:
        return "invalid parameter";
    case NIXL_BACKEND:
        return "backend error or disconnect";
    case NIXL_INVALID_STATE:
        return "invalid state";
    case NIXL_EXCEPTION:
        return "exception";
    case NIXL_NOT_FOUND:
        return "not found";
    default:
        return "unknown status";
    }
}

static void say(struct kvti_nixl *engine, const char *step, const char *detail)
{
    atomic_store(&engine->detail, detail);
    atomic_store(&engine->step, step);
}

/* How each backend calls its threads. */
static const char *worker_key(const char *backend)
{
    static const char *const keys[][2] = {
        {"UCX", "num_threads"},       {"OBJ", "num_threads"},
        {"LIBFABRIC", "num_threads"}, {"GDS_MT", "thread_count"},
        {"UCCL", "num_cpus"},
    };

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (strcmp(backend, keys[i][0]) == 0) {
            return keys[i][1];
        }
    }
    return NULL;
}

static int add_params(struct kvti_nixl *engine, const char *backend,
                      struct nixl_params *params)
{
    const struct kvti_nixl_config *config = &engine->config;
    const struct nixl_api *api = &engine->lib->api;
    const char *key = worker_key(backend);
    int status = NIXL_OK;
    char workers[16];

    for (size_t i = 0; i < config->param_count && status == NIXL_OK; i++) {
        const struct kvti_nixl_param *param = &config->params[i];

        if (strcmp(param->backend, backend) != 0) {
            continue;
        }
        if (key != NULL && strcmp(param->key, key) == 0) {
            key = NULL; /* the user's own number */
        }
        status = api->params_add(params, param->key, param->value);
    }
    if (key != NULL && status == NIXL_OK) {
        kvti_format(workers, sizeof(workers), "%u", config->workers);
        status = api->params_add(params, key, workers);
    }
    return status;
}

static int make_backend(struct kvti_nixl *engine, size_t i,
                        struct kvt_error *err)
{
    const struct nixl_api *api = &engine->lib->api;
    const char *name = engine->config.backends[i];
    struct nixl_params *params = NULL;
    int status = api->create_params(&params);

    say(engine, "creating backend ", name);
    if (status == NIXL_OK) {
        status = add_params(engine, name, params);
    }
    if (status == NIXL_OK) {
        status = api->create_backend(engine->agent, name, params,
                                     &engine->backends[i]);
    }
    if (params != NULL) {
        api->destroy_params(params);
    }
    if (status == NIXL_OK) {
        return KVT_OK;
    }
    return kvti_fail(err, KVT_EUNSUPPORTED,
                     "NIXL cannot create its backend %.60s (status %d): its "
                     "libraries or its parameters do not fit this machine; "
                     "NIXL's own words are on the standard error",
                     name, status);
}

static int make_agent(struct kvti_nixl *engine, struct kvt_error *err)
{
    const struct nixl_api *api = &engine->lib->api;
    const struct nixl_agent_config config = {
        .enable_prog_thread = true,
        .thread_sync = NIXL_SYNC_STRICT,
        .num_workers = 1,
        .pthr_delay_us = engine->config.pthr_delay_us,
        .lthr_delay_us = 100000,
        .capture_telemetry = engine->config.telemetry,
    };
    int status;

    say(engine, "creating the agent", "");
    status = api->create_configured_agent(engine->env->agent_name, &config,
                                          &engine->agent);
    if (status != NIXL_OK) {
        engine->agent = NULL;
        return kvti_fail(err, KVT_EENGINE,
                         "NIXL cannot create the agent \"%.80s\" (status %d)",
                         engine->env->agent_name, status);
    }
    return KVT_OK;
}

/* The page that probes read into. Only its registration is NIXL's. */
static int make_scratch(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    int status;

    say(engine, "registering memory", "");
    engine->scratch = aligned_alloc(SCRATCH_BYTES, SCRATCH_BYTES);
    if (engine->scratch == NULL) {
        return NIXL_EXCEPTION;
    }
    memset(engine->scratch, 0, SCRATCH_BYTES);
    status = api->create_reg_dlist(NIXL_MEM_DRAM, &engine->scratch_list);
    if (status == NIXL_OK) {
        status = api->reg_dlist_add_desc(engine->scratch_list,
                                         (uintptr_t)engine->scratch,
                                         SCRATCH_BYTES, 0, NULL, 0);
    }
    if (status == NIXL_OK) {
        status = api->register_mem(engine->agent, engine->scratch_list, NULL);
    }
    return status;
}

static int make_rest(struct kvti_nixl *engine, struct kvt_error *err)
{
    const struct nixl_api *api = &engine->lib->api;
    int status = api->create_opt_args(&engine->no_merge);

    if (status == NIXL_OK) {
        /* The core has merged what is adjacent. */
        status = api->opt_args_set_skip_desc_merge(engine->no_merge, true);
    }
    if (status == NIXL_OK) {
        status = api->create_notif_map(&engine->notes);
    }
    if (status == NIXL_OK) {
        status = make_scratch(engine);
    }
    return status == NIXL_OK
               ? KVT_OK
               : kvti_fail(err, KVT_EENGINE,
                           "NIXL cannot prepare its agent (%s, status %d): it "
                           "needs a backend for host memory",
                           kvti_nixl_status_text(status), status);
}

int kvti_nixl_setup(struct kvti_nixl *engine, struct kvt_error *err)
{
    int code;

    engine->backends = calloc(engine->config.backend_count,
                              sizeof(struct nixl_backend *));
    if (engine->backends == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for NIXL's backends");
    }
    kvti_nixl_enter(engine);
    code = make_agent(engine, err);
    for (size_t i = 0; code == KVT_OK && i < engine->config.backend_count;
         i++) {
        code = make_backend(engine, i, err);
    }
    if (code == KVT_OK) {
        code = make_rest(engine, err);
    }
    kvti_nixl_leave(engine);
    if (code != KVT_OK) {
        kvti_nixl_teardown(engine);
    }
    return code;
}

void kvti_nixl_teardown(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;

    kvti_nixl_enter(engine);
    if (engine->agent != NULL) {
        (void)api->destroy_agent(engine->agent);
        engine->agent = NULL;
    }
    for (size_t i = 0;
         engine->backends != NULL && i < engine->config.backend_count; i++) {
        if (engine->backends[i] != NULL) {
            (void)api->destroy_backend(engine->backends[i]);
        }
    }
    free(engine->backends);
    engine->backends = NULL;
    if (engine->no_merge != NULL) {
        (void)api->destroy_opt_args(engine->no_merge);
        engine->no_merge = NULL;
    }
    if (engine->notes != NULL) {
        (void)api->destroy_notif_map(engine->notes);
        engine->notes = NULL;
    }
    if (engine->scratch_list != NULL) {
        (void)api->destroy_reg_dlist(engine->scratch_list);
        engine->scratch_list = NULL;
    }
    free(engine->scratch);
    engine->scratch = NULL;
    kvti_nixl_leave(engine);
}
