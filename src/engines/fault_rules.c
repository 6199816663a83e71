/* SPDX-License-Identifier: Apache-2.0 */
#include "fault_rules.h"

#include <string.h>

/* The longest value is a layout's name. */
#define TOKEN_MAX (KVT_NAME_MAX + 33)
#define MS_MAX 3600000u

/* What may stand after a rule's list. */
enum extra { EXTRA_NONE, EXTRA_TURNS, EXTRA_MS };

static const char *const post_keys[KVTI_FAULT_POST_RULES] = {
#define POST_KEY(name, key) [KVTI_FAULT_##name] = (key),
    KVTI_FAULT_POST_MAP(POST_KEY)
#undef POST_KEY
};

static const char *const job_keys[KVTI_FAULT_JOB_KINDS] = {
    [KVTI_JOB_MEM_ADD] = "mem",     [KVTI_JOB_MEM_DROP] = "drop",
    [KVTI_JOB_EXPORT] = "export",   [KVTI_JOB_LOAD] = "load",
    [KVTI_JOB_CONNECT] = "connect", [KVTI_JOB_UNLOAD] = "unload",
    [KVTI_JOB_NOTIFY] = "notify",
};

#define OTHER_KEYS                                                             \
    "delay layout_fail close_hang no_{notify,strided} chunk_{copies,bytes} "   \
    "window"

/* One KEY[=VALUE], cut apart. */
struct token {
    char text[TOKEN_MAX + 1]; /* the key, then the value */
    const char *key;
    const char *value; /* NULL when there is no "=" */
};

const char *kvti_fault_key(enum kvti_fault_post_rule rule)
{
    return post_keys[rule];
}

bool kvti_fault_hit(const struct kvti_fault_which *which, uint64_t number)
{
    for (uint32_t i = 0; i < which->count; i++) {
        if (number >= which->ranges[i].first &&
            number <= which->ranges[i].last) {
            return true;
        }
    }
    return false;
}

static int fail_unknown(const char *key, struct kvt_error *err)
{
    char known[KVT_TEXT_MAX];
    size_t used = 0;

    for (size_t i = 0; i < KVTI_FAULT_POST_RULES; i++) {
        kvti_format(known + used, sizeof(known) - used, "%s ", post_keys[i]);
        used += strlen(known + used);
    }
    return kvti_fail(err, KVT_EINVAL,
                     "\"%.14s\" is none of: %s%s JOB_{fail,hang,delay}.", key,
                     known, OTHER_KEYS);
}

static int fail_twice(const struct token *token, struct kvt_error *err)
{
    return kvti_fail(err, KVT_EINVAL,
                     "The fault rule \"%s\" is given twice; join lists with "
                     "a semicolon, as in %s=1;4.",
                     token->key, token->key);
}

/* A decimal number without sign or space; advances *text. */
static bool read_number(const char **text, uint64_t *ret)
{
    const char *at = *text;
    uint64_t value = 0;

    if (*at < '0' || *at > '9') {
        return false;
    }
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value)) {
            return false;
        }
    }
    *text = at;
    *ret = value;
    return true;
}

/* N, N-M, N+ or *. */
static bool read_range(const char **text, uint64_t *ret_first,
                       uint64_t *ret_last)
{
    *ret_first = 1;
    *ret_last = UINT64_MAX;
    if (**text == '*') {
        (*text)++;
        return true;
    }
    if (!read_number(text, ret_first) || *ret_first == 0) {
        return false;
    }
    if (**text == '+') {
        (*text)++;
        return true;
    }
    *ret_last = *ret_first;
    if (**text == '-') {
        (*text)++;
        return read_number(text, ret_last) && *ret_last >= *ret_first;
    }
    return true;
}

static bool read_ranges(const char **text, struct kvti_fault_which *ret)
{
    while (ret->count < KVTI_FAULT_RANGES) {
        if (!read_range(text, &ret->ranges[ret->count].first,
                        &ret->ranges[ret->count].last)) {
            return false;
        }
        ret->count++;
        if (**text != ';') {
            return true;
        }
        (*text)++;
    }
    return false;
}

static int parse_which(const struct token *token, enum extra extra,
                       struct kvti_fault_which *ret, struct kvt_error *err)
{
    static const char *const forms[] = {
        [EXTRA_NONE] = "",
        [EXTRA_TURNS] = ", with /TURNS behind it if wanted",
        [EXTRA_MS] = ", with /MS (1 to 3600000) behind it",
    };
    const char *at = token->value != NULL ? token->value : "*";
    uint64_t number = 0;

    if (ret->count > 0) {
        return fail_twice(token, err);
    }
    if (!read_ranges(&at, ret)) {
        goto malformed;
    }
    if (*at == '/' && extra != EXTRA_NONE) {
        at++;
        if (!read_number(&at, &number) || number == 0 || number > MS_MAX) {
            goto malformed;
        }
    }
    if (*at != '\0' || (extra == EXTRA_MS && number == 0)) {
        goto malformed;
    }
    ret->extra = (uint32_t)number;
    return KVT_OK;

malformed:
    return kvti_fail(err, KVT_EINVAL,
                     "The value in \"%s=%.40s\" must be up to %d of N, N-M, "
                     "N+ or *, counted from 1 and joined by semicolons%s.",
                     token->key, token->value != NULL ? token->value : "",
                     KVTI_FAULT_RANGES, forms[extra]);
}

static int parse_number(const struct token *token, uint64_t max, bool given,
                        uint64_t *ret, struct kvt_error *err)
{
    const char *at = token->value != NULL ? token->value : "";
    uint64_t number = 0;

    if (given) {
        return fail_twice(token, err);
    }
    if (!read_number(&at, &number) || *at != '\0' || number == 0 ||
        number > max) {
        return kvti_fail(err, KVT_EINVAL,
                         "The value in \"%s=%.40s\" must be a number from 1 "
                         "to %llu.",
                         token->key, token->value != NULL ? token->value : "",
                         (unsigned long long)max);
    }
    *ret = number;
    return KVT_OK;
}

static int parse_number32(const struct token *token, uint32_t max,
                          uint32_t *ret, struct kvt_error *err)
{
    uint64_t number = 0;
    int rc = parse_number(token, max, *ret != 0, &number, err);

    if (rc == KVT_OK) {
        *ret = (uint32_t)number;
    }
    return rc;
}

static int parse_flag(const struct token *token, bool *ret,
                      struct kvt_error *err)
{
    if (*ret) {
        return fail_twice(token, err);
    }
    if (token->value != NULL) {
        return kvti_fail(err, KVT_EINVAL,
                         "The fault rule \"%s\" takes no value; drop "
                         "\"=%.40s\".",
                         token->key, token->value);
    }
    *ret = true;
    return KVT_OK;
}

static int parse_layout(const struct token *token,
                        struct kvti_fault_rules *rules, struct kvt_error *err)
{
    const char *name = token->value != NULL ? token->value : "*";

    if (rules->layout_fail) {
        return fail_twice(token, err);
    }
    if (name[0] == '\0' || strlen(name) > KVT_NAME_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "The value of \"layout_fail\" must be a layout's "
                         "name of 1 to %d bytes, or * for all.",
                         KVT_NAME_MAX);
    }
    if (strcmp(name, "*") != 0) {
        memcpy(rules->layout_name, name, strlen(name) + 1);
    }
    rules->layout_fail = true;
    return KVT_OK;
}

/* Rules that describe the engine rather than one misdeed of it. Returns
 * KVT_ENOENT when the key is none of them. */
static int parse_trait(const struct token *token, bool opening,
                       struct kvti_fault_rules *rules, struct kvt_error *err)
{
    const char *key = token->key;
    bool copies = strcmp(key, "chunk_copies") == 0;
    bool bytes = strcmp(key, "chunk_bytes") == 0;
    bool window = strcmp(key, "window") == 0;
    bool strided = strcmp(key, "no_strided") == 0;

    if (!copies && !bytes && !window && !strided &&
        strcmp(key, "no_notify") != 0) {
        return KVT_ENOENT;
    }
    if (!opening) {
        return kvti_fail(err, KVT_EINVAL,
                         "The fault rule \"%s\" can be given only when the "
                         "transport is opened.",
                         key);
    }
    if (bytes) {
        return parse_number(token, UINT64_MAX, rules->chunk_bytes != 0,
                            &rules->chunk_bytes, err);
    }
    if (copies) {
        return parse_number32(token, UINT32_MAX, &rules->chunk_copies, err);
    }
    if (window) {
        return parse_number32(token, UINT32_MAX, &rules->window, err);
    }
    return parse_flag(token, strided ? &rules->no_strided : &rules->no_notify,
                      err);
}

/* JOB_fail, JOB_hang, JOB_delay; KVT_ENOENT as above. */
static int parse_job(const struct token *token, struct kvti_fault_rules *rules,
                     struct kvt_error *err)
{
    for (size_t i = 0; i < KVTI_FAULT_JOB_KINDS; i++) {
        size_t length = strlen(job_keys[i]);
        const char *what = token->key + length;

        if (strncmp(token->key, job_keys[i], length) != 0) {
            continue;
        }
        if (strcmp(what, "_fail") == 0) {
            return parse_which(token, EXTRA_NONE, &rules->job_fail[i], err);
        }
        if (strcmp(what, "_hang") == 0) {
            return parse_which(token, EXTRA_NONE, &rules->job_hang[i], err);
        }
        if (strcmp(what, "_delay") == 0) {
            return parse_number32(token, MS_MAX, &rules->job_delay_ms[i], err);
        }
    }
    return KVT_ENOENT;
}

static int parse_token(const struct token *token, bool opening,
                       struct kvti_fault_rules *rules, struct kvt_error *err)
{
    int rc;

    for (size_t i = 0; i < KVTI_FAULT_POST_RULES; i++) {
        if (strcmp(token->key, post_keys[i]) == 0) {
            enum extra extra = i == KVTI_FAULT_FAIL   ? EXTRA_TURNS
                               : i == KVTI_FAULT_LATE ? EXTRA_MS
                                                      : EXTRA_NONE;

            return parse_which(token, extra, &rules->posts[i], err);
        }
    }
    if (strcmp(token->key, "delay") == 0) {
        return parse_number32(token, MS_MAX, &rules->delay_ms, err);
    }
    if (strcmp(token->key, "layout_fail") == 0) {
        return parse_layout(token, rules, err);
    }
    if (strcmp(token->key, "close_hang") == 0) {
        return parse_flag(token, &rules->close_hang, err);
    }
    rc = parse_trait(token, opening, rules, err);
    if (rc == KVT_ENOENT) {
        rc = parse_job(token, rules, err);
    }
    return rc == KVT_ENOENT ? fail_unknown(token->key, err) : rc;
}

/* Cuts the next token off *text, which is not at its end. */
static int cut_token(const char **text, struct token *ret,
                     struct kvt_error *err)
{
    size_t length = strcspn(*text, ",");
    char *equals;

    if (length == 0 || length > TOKEN_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "A fault rule is empty or longer than %d bytes at "
                         "\"%.40s\"; write KEY or KEY=VALUE, joined by "
                         "single commas.",
                         TOKEN_MAX, *text);
    }
    memcpy(ret->text, *text, length);
    ret->text[length] = '\0';
    ret->key = ret->text;
    ret->value = NULL;
    equals = strchr(ret->text, '=');
    if (equals != NULL) {
        *equals = '\0';
        ret->value = equals + 1;
    }
    *text += length;
    return KVT_OK;
}

int kvti_fault_parse(const char *text, bool opening,
                     struct kvti_fault_rules *ret, struct kvt_error *err)
{
    struct kvti_fault_rules rules = {0};
    struct token token = {.key = ""};
    bool more = *text != '\0';

    while (more) {
        int rc = cut_token(&text, &token, err);

        if (rc == KVT_OK) {
            rc = parse_token(&token, opening, &rules, err);
        }
        if (rc != KVT_OK) {
            return rc;
        }
        more = *text == ',';
        text += more ? 1 : 0;
    }
    *ret = rules;
    return KVT_OK;
}
