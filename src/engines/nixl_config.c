/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the nixl engine was told, copied. Beside kvt_options it reads what
 * follows "nixl:" in the engine's specification, KEY=VALUE joined by commas:
 *
 *   pthr_delay_us=N  gives NIXL a progress thread, which sleeps so long between
 *                    its turns: 1 to 1000000, in fact 1000 at the least. Without
 *                    it, the default, what comes in waits while our thread
 *                    registers memory or loads a peer; with it a writer over TCP
 *                    is half as fast, for the two are in each other's way.
 *   gpu=N            the GPU of the NIXL thread, as CUDA counts them. The
 *                    option `device` does the same but for 0, which cannot be
 *                    told from nothing, and where there is no CUDA.
 *   confirm=0        takes NIXL's word that a request is done. Over shared
 *                    memory that word was found to be false at times.
 *   probe_s=N        seconds that one probe process may take, 1 to 3600; 30.
 */
#include "nixl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A request stays below what NIXL spreads over threads: its own default is
 * 1024. */
#define DESCS_MAX 512u
#define SPLIT_KEY "split_batch_size"

#define PTHR_DELAY_US_MAX 1000000u
#define GPU_MAX 1023u
#define PROBE_S 30u
#define PROBE_S_MAX 3600u

static int set_number(const char *text, size_t length, uint64_t low,
                      uint64_t high, uint64_t *ret)
{
    char digits[24];
    char *end;

    if (length == 0 || length >= sizeof(digits) ||
        strspn(text, "0123456789") < length) {
        return KVT_EINVAL;
    }
    memcpy(digits, text, length);
    digits[length] = '\0';
    errno = 0;
    *ret = strtoull(digits, &end, 10);
    return errno != 0 || *ret < low || *ret > high ? KVT_EINVAL : KVT_OK;
}

/* The key stands before the first "=" of text. */
static int read_setting(struct kvti_nixl_config *config, const char *text,
                        size_t length)
{
    uint64_t confirm = config->confirm;
    const struct {
        const char *key;
        uint64_t low;
        uint64_t high;
        uint64_t *ret;
    } settings[] = {
        {"confirm", 0, 1, &confirm},
        {"gpu", 0, GPU_MAX, &config->gpu},
        {"pthr_delay_us", 1, PTHR_DELAY_US_MAX, &config->pthr_delay_us},
        {"probe_s", 1, PROBE_S_MAX, &config->probe_s},
    };
    size_t key = strcspn(text, "=");

    if (key + 1 >= length) {
        return KVT_EINVAL;
    }
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        if (strlen(settings[i].key) == key &&
            memcmp(settings[i].key, text, key) == 0) {
            int code = set_number(text + key + 1, length - key - 1,
                                  settings[i].low, settings[i].high,
                                  settings[i].ret);

            config->confirm = confirm != 0;
            config->needs_cuda |= settings[i].ret == &config->gpu;
            return code;
        }
    }
    return KVT_EINVAL;
}

static int read_rest(struct kvti_nixl_config *config, const char *rest,
                     struct kvt_error *err)
{
    while (*rest != '\0') {
        size_t length = strcspn(rest, ",");

        if (read_setting(config, rest, length) != KVT_OK) {
            return kvti_fail(err, KVT_EINVAL,
                             "the engine nixl does not understand \"%.*s\": "
                             "it takes pthr_delay_us=1..%u, gpu=0..%u, "
                             "probe_s=1..%u and confirm=0 or 1",
                             (int)(length < 64 ? length : 64), rest,
                             PTHR_DELAY_US_MAX, GPU_MAX, PROBE_S_MAX);
        }
        rest += length + (rest[length] == ',');
    }
    return KVT_OK;
}

static int check_param(const struct kvt_param *param, uint32_t i,
                       struct kvt_error *err)
{
    if (param->backend == NULL || param->key == NULL || param->value == NULL) {
        return kvti_fail(err, KVT_EINVAL,
                         "params[%u] needs a backend, a key and a value", i);
    }
    return KVT_OK;
}

static int copy_options(struct kvti_nixl_config *config,
                        const struct kvt_options *options,
                        struct kvt_error *err)
{
    static const char *const usual[] = {"UCX"};
    const char *const *backends = options->backends;
    size_t count = options->backend_count;

    if (count == 0) {
        backends = usual;
        count = 1;
    }
    config->backends = calloc(count, sizeof(config->backends[0]));
    config->params = calloc((size_t)options->param_count + 1,
                            sizeof(config->params[0]));
    if (config->backends == NULL || config->params == NULL) {
        return KVT_ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        if (backends == NULL || backends[i] == NULL || backends[i][0] == '\0') {
            return kvti_fail(err, KVT_EINVAL, "backends[%zu] has no name", i);
        }
        config->backends[i] = strdup(backends[i]);
        config->backend_count++;
        if (config->backends[i] == NULL) {
            return KVT_ENOMEM;
        }
    }
    for (uint32_t i = 0; i < options->param_count; i++) {
        struct kvti_nixl_param *param = &config->params[i];
        int code = check_param(&options->params[i], i, err);

        if (code != KVT_OK) {
            return code;
        }
        config->param_count++;
        param->backend = strdup(options->params[i].backend);
        param->key = strdup(options->params[i].key);
        param->value = strdup(options->params[i].value);
        if (param->backend == NULL || param->key == NULL ||
            param->value == NULL) {
            return KVT_ENOMEM;
        }
    }
    return KVT_OK;
}

/* ----------------------------------------------------------------- the NICs */

static bool exists(const char *folder, const char *name)
{
    char path[128];

    kvti_format(path, sizeof(path), "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* Appends one device as NIXL wants it: NIXL adds ":1" to each. */
static int add_nic(char *list, size_t size, const char *text, size_t length,
                   struct kvt_error *err)
{
    char name[64];
    size_t used = strlen(list);

    if (length > 2 && memcmp(text + length - 2, ":1", 2) == 0) {
        length -= 2;
    }
    if (length == 0 || length >= sizeof(name) || strcspn(text, ":/") < length) {
        return kvti_fail(err, KVT_EINVAL,
                         "device_list cannot name \"%.*s\": it takes RDMA "
                         "devices without a port, as in \"mlx5_0,mlx5_1\"; "
                         "for others set UCX_NET_DEVICES",
                         (int)(length < 60 ? length : 60), text);
    }
    kvti_format(name, sizeof(name), "%.*s", (int)length, text);
    if (!exists("/sys/class/infiniband", name) &&
        exists("/sys/class/net", name)) {
        return kvti_fail(err, KVT_EINVAL,
                         "device_list takes RDMA devices and %s is a network "
                         "interface: set UCX_NET_DEVICES=%s instead",
                         name, name);
    }
    kvti_format(list + used, size - used, "%s%s", used > 0 ? ", " : "", name);
    return KVT_OK;
}

/* NIXL cuts the list at a comma and a blank, and puts it above the user's
 * UCX_NET_DEVICES; people write it with and without the blank, and expect the
 * environment to win. */
static int rewrite_nics(struct kvti_nixl_param *param, struct kvt_error *err)
{
    size_t size = 2 * strlen(param->value) + 1;
    char *list = calloc(1, size);
    const char *at = param->value;
    int code = list == NULL ? KVT_ENOMEM : KVT_OK;

    while (code == KVT_OK && at[strspn(at, ", ")] != '\0') {
        size_t length;

        at += strspn(at, ", ");
        length = strcspn(at, ", ");
        code = add_nic(list, size, at, length, err);
        at += length;
    }
    if (code == KVT_OK && list[0] == '\0') {
        code = kvti_fail(err, KVT_EINVAL, "device_list names no device");
    }
    if (code != KVT_OK) {
        free(list);
        return code;
    }
    free(param->value);
    param->value = list;
    return KVT_OK;
}

static void free_param(struct kvti_nixl_param *param)
{
    free(param->backend);
    free(param->key);
    free(param->value);
}

static int choose_nics(struct kvti_nixl_config *config, struct kvt_error *err)
{
    /* As any reader (nixl_env.c). NOLINTNEXTLINE(concurrency-mt-unsafe) */
    const char *set = getenv("UCX_NET_DEVICES");
    size_t kept = 0;
    int code = KVT_OK;

    for (size_t i = 0; i < config->param_count; i++) {
        struct kvti_nixl_param param = config->params[i];
        bool ours = strcmp(param.backend, "UCX") == 0 &&
                    strcmp(param.key, "device_list") == 0;

        if (ours && set != NULL && set[0] != '\0') {
            free_param(&param);
            config->nic_dropped = true;
            continue;
        }
        if (ours && code == KVT_OK) {
            code = rewrite_nics(&param, err);
        }
        config->params[kept++] = param;
    }
    config->param_count = kept;
    return code;
}

/* ------------------------------------------------------------- what it means */

static void bound_descs(struct kvti_nixl_config *config)
{
    config->descs_max = DESCS_MAX;
    for (size_t i = 0; i < config->param_count; i++) {
        const struct kvti_nixl_param *param = &config->params[i];
        uint64_t split;

        if (strcmp(param->key, SPLIT_KEY) == 0 &&
            set_number(param->value, strlen(param->value), 1, DESCS_MAX,
                       &split) == KVT_OK) {
            config->descs_max = split > 1 ? (uint32_t)split - 1 : 1;
        }
    }
}

/* What NIXL does to a request that failed when it is released was read in its
 * backend UCX alone: LIBFABRIC deletes what is still under way. So does UCX,
 * when it is told to use scatter-gather lists (1.5). */
static bool may_release_failed(const struct kvti_nixl_config *config)
{
    /* As any reader (nixl_env.c). NOLINTNEXTLINE(concurrency-mt-unsafe) */
    bool may = getenv("NIXL_UCX_SGL_ENABLE") == NULL;

    for (size_t i = 0; i < config->param_count; i++) {
        /* Else NIXL shares each request out among its threads. */
        may = may &&
              (strcmp(config->params[i].key, SPLIT_KEY) != 0 ||
               strtoul(config->params[i].value, NULL, 10) > config->descs_max);
    }
    for (size_t i = 0; i < config->backend_count; i++) {
        kvti_assert(config->backends[i] != NULL);
        may = may && strcmp(config->backends[i], "UCX") == 0;
    }
    return may;
}

/* A parameter of a backend that is not there is a mistake in its name. */
static int check_names(const struct kvti_nixl_config *config,
                       struct kvt_error *err)
{
    for (size_t i = 0; i < config->param_count; i++) {
        const char *name = config->params[i].backend;
        bool found = false;

        kvti_assert(name != NULL);
        for (size_t k = 0; k < config->backend_count; k++) {
            kvti_assert(config->backends[k] != NULL);
            found = found || strcmp(config->backends[k], name) == 0;
        }
        if (!found) {
            return kvti_fail(err, KVT_EINVAL,
                             "params[%zu] is for backend \"%.60s\", which is "
                             "not among the backends",
                             i, name);
        }
    }
    return KVT_OK;
}

int kvti_nixl_config_init(struct kvti_nixl_config *config,
                          const struct kvt_options *options, const char *rest,
                          struct kvt_error *err)
{
    int code;

    *config = (struct kvti_nixl_config){
        .workers = options->workers,
        .probe_s = PROBE_S,
        .gpu = options->device > 0 ? options->device : KVTI_NIXL_NO_GPU,
        .telemetry = (options->flags & KVT_OPEN_NO_TELEMETRY) == 0,
        .confirm = true,
    };
    code = read_rest(config, rest, err);
    if (code == KVT_OK) {
        code = copy_options(config, options, err);
    }
    if (code == KVT_OK) {
        code = check_names(config, err);
    }
    if (code == KVT_OK) {
        code = choose_nics(config, err);
    }
    if (code == KVT_ENOMEM) {
        kvti_fail(err, code, "no memory for the options of nixl");
    }
    if (code != KVT_OK) {
        kvti_nixl_config_fini(config);
        return code;
    }
    bound_descs(config);
    config->release_failed = may_release_failed(config);
    return KVT_OK;
}

void kvti_nixl_config_fini(struct kvti_nixl_config *config)
{
    for (size_t i = 0; i < config->backend_count; i++) {
        free(config->backends[i]);
    }
    for (size_t i = 0; i < config->param_count; i++) {
        free_param(&config->params[i]);
    }
    free(config->backends);
    free(config->params);
    *config = (struct kvti_nixl_config){0};
}

bool kvti_nixl_config_wants_efa(const struct kvti_nixl_config *config)
{
    for (size_t i = 0; i < config->param_count; i++) {
        if (strstr(config->params[i].value, "efa") != NULL ||
            strstr(config->params[i].value, "srd") != NULL) {
            return true;
        }
    }
    for (size_t i = 0; i < config->backend_count; i++) {
        if (strcmp(config->backends[i], "LIBFABRIC") == 0) {
            return true;
        }
    }
    return false;
}
