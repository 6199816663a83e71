/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the nixl engine was told, copied. Beside kvt_options it reads what
 * follows "nixl:" in the engine's specification, KEY=VALUE joined by commas:
 *
 *   pthr_delay_us=N  how long NIXL's progress thread sleeps, 1 to 1000000;
 *                    20000. NIXL's own default of 0 keeps a core busy.
 *   confirm=0        takes NIXL's word that a request is done. Over shared
 *                    memory that word was found to be false at times.
 */
#include "nixl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PTHR_DELAY_US 20000u
#define PTHR_DELAY_US_MAX 1000000u

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

static int read_setting(struct kvti_nixl_config *config, const char *text,
                        size_t length)
{
    size_t key = strcspn(text, "=");
    const char *value = text + key + 1;
    uint64_t number;
    int code;

    if (key + 1 >= length) {
        return KVT_EINVAL;
    }
    if (key == strlen("confirm") && memcmp(text, "confirm", key) == 0) {
        code = set_number(value, length - key - 1, 0, 1, &number);
        config->confirm = code != KVT_OK || number != 0;
        return code;
    }
    if (key == strlen("pthr_delay_us") &&
        memcmp(text, "pthr_delay_us", key) == 0) {
        return set_number(value, length - key - 1, 1, PTHR_DELAY_US_MAX,
                          &config->pthr_delay_us);
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
                             "it takes pthr_delay_us=1..%u and confirm=0 or 1",
                             (int)(length < 64 ? length : 64), rest,
                             PTHR_DELAY_US_MAX);
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
        .pthr_delay_us = PTHR_DELAY_US,
        .telemetry = (options->flags & KVT_OPEN_NO_TELEMETRY) == 0,
        .confirm = true,
    };
    code = read_rest(config, rest, err);
    if (code == KVT_OK) {
        code = copy_options(config, options, err);
        if (code == KVT_ENOMEM) {
            kvti_fail(err, code, "no memory for the options of nixl");
        }
    }
    if (code == KVT_OK) {
        code = check_names(config, err);
    }
    if (code != KVT_OK) {
        kvti_nixl_config_fini(config);
    }
    return code;
}

void kvti_nixl_config_fini(struct kvti_nixl_config *config)
{
    for (size_t i = 0; i < config->backend_count; i++) {
        free(config->backends[i]);
    }
    for (size_t i = 0; i < config->param_count; i++) {
        free(config->params[i].backend);
        free(config->params[i].key);
        free(config->params[i].value);
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
