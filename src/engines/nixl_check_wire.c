/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the probe process is told, on its standard input: this library's
 * version, the request's fields, the metadata. Both sides are the same build,
 * and the version says so; strings are u32 length and bytes with their NUL.
 */
#include "nixl_check.h"

#include <stdlib.h>
#include <string.h>

#define ITEMS_MAX 1024u /* backends, parameters: far above any user's */

static const char version[] = "kvt-probe 1";

static void put_bytes(struct kvti_buf *out, const void *data, size_t length,
                      int *code)
{
    if (*code == KVT_OK) {
        *code = kvti_buf_append(out, data, length);
    }
}

static void put_number(struct kvti_buf *out, uint64_t value, int *code)
{
    put_bytes(out, &value, sizeof(value), code);
}

static void put_text(struct kvti_buf *out, const char *text, int *code)
{
    size_t length = strlen(text) + 1;

    put_number(out, length, code);
    put_bytes(out, text, length, code);
}

int kvti_nixl_request_encode(const struct kvti_nixl_request *request,
                             struct kvti_buf *out)
{
    const struct kvti_nixl_config *config = &request->config;
    int code = KVT_OK;

    put_text(out, version, &code);
    put_text(out, kvt_version(), &code);
    put_text(out, request->library, &code);
    put_text(out, request->agent_name, &code);
    put_number(out, request->limit_s, &code);
    put_number(out, config->workers, &code);
    put_number(out, config->pthr_delay_us, &code);
    put_number(out, config->backend_count, &code);
    for (size_t i = 0; i < config->backend_count; i++) {
        put_text(out, config->backends[i], &code);
    }
    put_number(out, config->param_count, &code);
    for (size_t i = 0; i < config->param_count; i++) {
        put_text(out, config->params[i].backend, &code);
        put_text(out, config->params[i].key, &code);
        put_text(out, config->params[i].value, &code);
    }
    put_number(out, request->blob_length, &code);
    put_bytes(out, request->blob, request->blob_length, &code);
    return code;
}

/* ------------------------------------------------------------------ reading */

struct reader {
    const uint8_t *at;
    size_t left;
    bool failed;
};

static const uint8_t *take(struct reader *reader, uint64_t length)
{
    const uint8_t *at = reader->at;

    if (reader->failed || length > reader->left) {
        reader->failed = true;
        return NULL;
    }
    reader->at += length;
    reader->left -= (size_t)length;
    return at;
}

static uint64_t take_number(struct reader *reader)
{
    const uint8_t *at = take(reader, sizeof(uint64_t));
    uint64_t value = 0;

    if (at != NULL) {
        memcpy(&value, at, sizeof(value));
    }
    return value;
}

static const char *take_text(struct reader *reader)
{
    uint64_t length = take_number(reader);
    const uint8_t *at = take(reader, length);

    if (at == NULL || length == 0 || at[length - 1] != '\0') {
        reader->failed = true;
        return "";
    }
    return (const char *)at;
}

static char *take_copy(struct reader *reader)
{
    char *copy = strdup(take_text(reader));

    reader->failed = reader->failed || copy == NULL;
    return copy;
}

static size_t take_count(struct reader *reader)
{
    uint64_t count = take_number(reader);

    reader->failed = reader->failed || count > ITEMS_MAX;
    return reader->failed ? 0 : (size_t)count;
}

static void take_config(struct reader *reader, struct kvti_nixl_config *config)
{
    size_t count;

    config->workers = (uint32_t)take_number(reader);
    config->pthr_delay_us = take_number(reader);
    count = take_count(reader);
    config->backends = calloc(count + 1, sizeof(char *));
    reader->failed = reader->failed || config->backends == NULL;
    for (size_t i = 0; !reader->failed && i < count; i++) {
        config->backends[config->backend_count++] = take_copy(reader);
    }
    count = take_count(reader);
    config->params = calloc(count + 1, sizeof(config->params[0]));
    reader->failed = reader->failed || config->params == NULL;
    for (size_t i = 0; !reader->failed && i < count; i++) {
        struct kvti_nixl_param *param = &config->params[config->param_count++];

        param->backend = take_copy(reader);
        param->key = take_copy(reader);
        param->value = take_copy(reader);
    }
}

int kvti_nixl_request_decode(const uint8_t *data, size_t length,
                             struct kvti_nixl_request *ret,
                             struct kvt_error *err)
{
    struct reader reader = {.at = data, .left = length};

    *ret = (struct kvti_nixl_request){.config = {.gpu = KVTI_NIXL_NO_GPU}};
    if (strcmp(take_text(&reader), version) != 0 ||
        strcmp(take_text(&reader), kvt_version()) != 0) {
        return kvti_fail(err, KVT_EMISMATCH,
                         "it is of kvt %s, the library is not: install both "
                         "from one build, or name the right one in KVT_PROBE",
                         kvt_version());
    }
    ret->library = take_text(&reader);
    ret->agent_name = take_text(&reader);
    ret->limit_s = (uint32_t)take_number(&reader);
    take_config(&reader, &ret->config);
    ret->blob_length = (size_t)take_number(&reader);
    ret->blob = take(&reader, ret->blob_length);
    if (reader.failed || reader.left != 0) {
        return kvti_fail(err, KVT_EINVAL, "it was told nonsense");
    }
    return KVT_OK;
}
