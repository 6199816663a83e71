/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making and ending NIXL's agent, on the NIXL thread.
 *
 * teardown destroys the agent first, whatever is in flight, and then the
 * handles that are ours: releasing an unfinished request while the agent lives
 * aborts inside UCX at times (6 of 20 with four threads), after it is gone it
 * crashes. So what is left by then is never released at all; what is released
 * before, nixl_xfer.c says.
 */
#include "nixl.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Between the turns of the thread that an old NIXL gets. */
#define OLD_PTHR_DELAY_US 1000u

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

/* How each backend calls its threads. UCX gets none that nobody asked for: our
 * requests stay below what it spreads over them (descs_max), and each would
 * bring a worker whose connections nobody ends when a peer dies. */
static const char *worker_key(const char *backend)
{
    static const char *const keys[][2] = {
        {"OBJ", "num_threads"},        {"LIBFABRIC", "num_threads"},
        {"AZURE_BLOB", "num_threads"}, {"GDS_MT", "thread_count"},
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

static int order(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void join(struct nixl_string_list *list, size_t count,
                 const struct nixl_api *api, char *text, size_t size)
{
    const char **names = calloc(count + 1, sizeof(*names));
    size_t known = 0;

    for (size_t i = 0; names != NULL && i < count; i++) {
        if (api->string_list_get(list, i, &names[known]) == NIXL_OK) {
            known++;
        }
    }
    if (known > 0) {
        qsort(names, known, sizeof(*names), order);
    }
    for (size_t i = 0; i < known; i++) {
        size_t used = strlen(text);

        kvti_format(text + used, size - used, "%s%s", i > 0 ? ", " : "",
                    names[i]);
    }
    free(names);
}

static void list_plugins(const struct nixl_api *api, struct nixl_agent *agent,
                         char *text, size_t size)
{
    struct nixl_string_list *list = NULL;
    size_t count = 0;

    text[0] = '\0';
    if (api->get_available_plugins(agent, &list) == NIXL_OK) {
        if (api->string_list_size(list, &count) == NIXL_OK) {
            join(list, count, api, text, size);
        }
        (void)api->destroy_string_list(list);
    }
}

/*
 * Of a plugin that does not load NIXL says no more than that the backend is not
 * supported, though it lists it. So the file is loaded once more, for the
 * loader's words. Returns false when that is not what is wrong, or cannot be
 * known.
 */
static bool explain_plugin(const struct kvti_nixl_lib *lib, const char *name,
                           struct kvt_error *err)
{
    /* As any reader (nixl_env.c). NOLINTNEXTLINE(concurrency-mt-unsafe) */
    const char *named = getenv("NIXL_PLUGIN_DIR");
    const char *slash = strrchr(lib->path, '/');
    const char *why;
    char file[PATH_MAX];
    void *handle;

    if (strchr(name, '/') != NULL) {
        return false;
    }
    if (named != NULL && named[0] != '\0') {
        kvti_format(file, sizeof(file), "%s/libplugin_%s.so", named, name);
    } else if (slash != NULL) {
        kvti_format(file, sizeof(file), "%.*s/plugins/libplugin_%s.so",
                    (int)(slash - lib->path), lib->path, name);
    } else {
        return false;
    }
    if (access(file, F_OK) != 0) {
        if (named == NULL || named[0] == '\0') {
            return false;
        }
        kvti_fail(
            err, KVT_EUNSUPPORTED,
            "NIXL has no backend %.40s in the folder that NIXL_PLUGIN_DIR "
            "names: there is no %.150s",
            name, file);
        return true;
    }
    handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle != NULL) {
        dlclose(handle);
        return false;
    }
    /* glibc keeps the text for each thread. */
    why = dlerror(); /* NOLINT(concurrency-mt-unsafe) */
    if (why == NULL) {
        why = "the loader does not say why";
    } else if (strncmp(why, file, strlen(file)) == 0) {
        why += strlen(file);
        why += strspn(why, ": ");
    }
    kvti_fail(err, KVT_EUNSUPPORTED,
              "NIXL cannot load its backend %.40s: %.90s (its file: %.90s)",
              name, why, file);
    return true;
}

/* A name that NIXL does not know, a file that does not load, or something that
 * only NIXL's own words tell. */
static int fail_backend(struct kvti_nixl *engine, const char *name, int status,
                        struct kvt_error *err)
{
    char plugins[160];
    const char *at;
    size_t length = strlen(name);

    list_plugins(&engine->lib->api, engine->agent, plugins, sizeof(plugins));
    for (at = plugins; *at != '\0';) {
        size_t word = strcspn(at, ",");

        if (word == length && memcmp(at, name, length) == 0) {
            break;
        }
        at += word + strspn(at + word, ", ");
    }
    if (*at == '\0' && plugins[0] != '\0') {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "this NIXL has no backend \"%.40s\"; it has: %s", name,
                         plugins);
    }
    if (explain_plugin(engine->lib, name, err)) {
        return KVT_EUNSUPPORTED;
    }
    return kvti_fail(err, KVT_EUNSUPPORTED,
                     "NIXL cannot create its backend %.60s (status %d): its "
                     "libraries or its parameters do not fit this machine; "
                     "NIXL's own words are on the standard error",
                     name, status);
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
    return fail_backend(engine, name, status, err);
}

/* NIXL throws when it cannot look at its configuration, which every process of
 * another user than HOME's owner runs into. */
static bool is_config_shut(char *path, size_t size)
{
    /* As any reader (nixl_env.c). NOLINTBEGIN(concurrency-mt-unsafe) */
    const char *named = getenv("NIXL_CONFIG_FILE");
    const char *home = getenv("HOME");
    /* NOLINTEND(concurrency-mt-unsafe) */

    if (named == NULL && home == NULL) {
        return false;
    }
    if (named != NULL) {
        kvti_format(path, size, "%s", named);
    } else {
        kvti_format(path, size, "%s/.nixl.cfg", home);
    }
    return access(path, R_OK) != 0 && (named != NULL || errno != ENOENT);
}

static int fail_agent(const char *name, int status, struct kvt_error *err)
{
    char path[PATH_MAX];

    if (is_config_shut(path, sizeof(path))) {
        return kvti_fail_errno(err, KVT_EENGINE, errno,
                               "NIXL cannot create the agent \"%.40s\" (status "
                               "%d), for it cannot read its configuration "
                               "%.90s: set NIXL_CONFIG_FILE or HOME",
                               name, status, path);
    }
    return kvti_fail(err, KVT_EENGINE,
                     "NIXL cannot create the agent \"%.80s\" (status %d); "
                     "NIXL's own words are on the standard error",
                     name, status);
}

/* An agent that has no thread and no backend costs microseconds. */
int kvti_nixl_plugins(const struct kvti_nixl_lib *lib, char *text, size_t size,
                      struct kvt_error *err)
{
    static const char name[] = "kvt-info";
    const struct nixl_agent_config config = {.num_workers = 1};
    struct nixl_agent *agent = NULL;
    int status = lib->api.create_configured_agent(name, &config, &agent);

    if (status != NIXL_OK) {
        return fail_agent(name, status, err);
    }
    list_plugins(&lib->api, agent, text, size);
    (void)lib->api.destroy_agent(agent);
    return KVT_OK;
}

/* Without its own thread NIXL 1.3 at times has not finished a connection when it
 * calls the first write over it done; one more then waits for the peer, over
 * shared memory too, though that be stopped (4 of 6). 1.5 never did. */
bool kvti_nixl_needs_thread(const char *version)
{
    char *end;
    unsigned long major = strtoul(version, &end, 10);

    if (end == version || *end != '.') {
        return true; /* it does not say, and so may be an old one */
    }
    return major == 0 || (major == 1 && strtoul(end + 1, NULL, 10) < 5);
}

static uint64_t thread_delay_us(const struct kvti_nixl *engine)
{
    if (engine->config.pthr_delay_us == 0 &&
        kvti_nixl_needs_thread(engine->lib->version)) {
        return OLD_PTHR_DELAY_US;
    }
    return engine->config.pthr_delay_us;
}

static int make_agent(struct kvti_nixl *engine, struct kvt_error *err)
{
    const uint64_t delay_us = thread_delay_us(engine);
    const struct nixl_api *api = &engine->lib->api;
    const struct nixl_agent_config config = {
        .enable_prog_thread = delay_us > 0,
        .thread_sync = NIXL_SYNC_STRICT,
        .num_workers = 1,
        .pthr_delay_us = delay_us,
        .lthr_delay_us = 100000,
        .capture_telemetry = engine->config.telemetry,
    };
    int status;

    say(engine, "creating the agent", "");
    status = api->create_configured_agent(engine->agent_name, &config,
                                          &engine->agent);
    if (status != NIXL_OK) {
        engine->agent = NULL;
        return fail_agent(engine->agent_name, status, err);
    }
    return KVT_OK;
}

/* The page that probes read into, ours and those of peers, which find it in
 * our metadata. Only its registration is NIXL's. */
static int make_scratch(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;
    int status;

    say(engine, "registering memory", "");
    engine->scratch = aligned_alloc(KVTI_NIXL_PAGE_BYTES, KVTI_NIXL_PAGE_BYTES);
    if (engine->scratch == NULL) {
        return NIXL_EXCEPTION;
    }
    memset(engine->scratch, 0, KVTI_NIXL_PAGE_BYTES);
    status = api->create_reg_dlist(NIXL_MEM_DRAM, &engine->scratch_list);
    if (status == NIXL_OK) {
        status = api->reg_dlist_add_desc(engine->scratch_list,
                                         (uintptr_t)engine->scratch,
                                         KVTI_NIXL_PAGE_BYTES, 0, NULL, 0);
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
        status = api->create_notif_map(&engine->later);
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
    say(engine, "selecting the GPU", "");
    code = kvti_nixl_gpu_enter(&engine->gpu, engine->config.gpu,
                               engine->config.needs_cuda, err);
    if (code == KVT_OK) {
        code = make_agent(engine, err);
    }
    kvti_nixl_hints_before(&engine->hints);
    for (size_t i = 0; code == KVT_OK && i < engine->config.backend_count;
         i++) {
        code = make_backend(engine, i, err);
    }
    kvti_nixl_hints_after(&engine->hints);
    if (code == KVT_OK) {
        code = make_rest(engine, err);
    }
    kvti_nixl_leave(engine);
    if (code != KVT_OK) {
        kvti_nixl_teardown(engine);
    }
    return code;
}

static void free_map(const struct nixl_api *api, struct nixl_notif_map **map)
{
    if (*map != NULL) {
        (void)api->destroy_notif_map(*map);
        *map = NULL;
    }
}

void kvti_nixl_teardown(struct kvti_nixl *engine)
{
    const struct nixl_api *api = &engine->lib->api;

    say(engine, "destroying the agent", "");
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
    free_map(api, &engine->notes);
    free_map(api, &engine->later);
    if (engine->scratch_list != NULL) {
        (void)api->destroy_reg_dlist(engine->scratch_list);
        engine->scratch_list = NULL;
    }
    free(engine->scratch);
    engine->scratch = NULL;
    kvti_nixl_leave(engine);
}
