/* SPDX-License-Identifier: Apache-2.0 */
#include "route_pair.h"
#include "vm_calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct stand_in fake;

/* ------------------------------------------------------------- the stand-in */

static bool find(void *handle, const char *name, void *function)
{
    void *symbol = dlsym(handle, name);

    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

int find_stand_in(void)
{
    const char *library = getenv("KVT_TEST_FAKE_NIXL");
    void *handle = library != NULL ? dlopen(library, RTLD_NOW | RTLD_LOCAL)
                                   : NULL;

    if (handle == NULL || !find(handle, "fake_nixl_script", &fake.script) ||
        !find(handle, "fake_nixl_block", &fake.block) ||
        !find(handle, "fake_nixl_waiting", &fake.waiting) ||
        !find(handle, "fake_nixl_count", &fake.count_lines) ||
        !find(handle, "fake_nixl_line", &fake.get_line) ||
        !find(handle, "fake_nixl_reset", &fake.reset)) {
        (void)fprintf(stderr, "KVT_TEST_FAKE_NIXL names the stand-in\n");
        return 1;
    }
    (void)unsetenv("KVT_SAME_HOST");
    return setenv("KVT_NIXL_LIBRARY", library, 1);
}

void assert_line(const char *prefix, int n, const char *words)
{
    char text[16384];

    if (!fake.get_line(prefix, n, text, sizeof text)) {
        fail_msg("there is no line %d that begins with \"%s\"", n, prefix);
    }
    if (strstr(text, words) == NULL) {
        fail_msg("\"%s\" does not hold \"%s\"", text, words);
    }
}

/* ------------------------------------------------------------------- logging */

static pthread_mutex_t log_mu = PTHREAD_MUTEX_INITIALIZER;
static char log_text[65536];

static void take_log(void *ctx, int level, const char *text)
{
    size_t used;

    (void)ctx;
    (void)level;
    pthread_mutex_lock(&log_mu);
    used = strlen(log_text);
    (void)snprintf(log_text + used, sizeof log_text - used, "%s\n", text);
    pthread_mutex_unlock(&log_mu);
}

bool is_logged(const char *words)
{
    bool found;

    pthread_mutex_lock(&log_mu);
    found = strstr(log_text, words) != NULL;
    pthread_mutex_unlock(&log_mu);
    return found;
}

/* --------------------------------------------------------- agents and peers */

static void open_node(struct node *node, const char *name, uint64_t vram,
                      const struct kvt_options *options)
{
    const struct kvt_region region = {
        .addr = vram, .length = VRAM_BYTES, .kind = KVT_VRAM, .device = 1};
    struct node_plan plan = {.engine = "nixl",
                             .name = name,
                             .shape = {.block_bytes = 512, .gap_bytes = 64},
                             .seed = (unsigned char)name[0]};

    if (options != NULL) {
        plan.options = *options;
        plan.engine = options->engine != NULL ? options->engine : "nixl";
    }
    plan.options.log = take_log;
    node_open(node, &plan);
    if (strcmp(plan.engine, "local") != 0) {
        assert_kvt_ok(kvt_register(node->t, &region, 1, 0, ERR));
    }
}

void open_nodes(struct pair *pair, const struct kvt_options *a,
                const struct kvt_options *b)
{
    *pair = (struct pair){0};
    fake.reset();
    forbid_after(0, 0);
    pthread_mutex_lock(&log_mu);
    log_text[0] = '\0';
    pthread_mutex_unlock(&log_mu);
    open_node(&pair->a, "alpha", VRAM_A, a);
    open_node(&pair->b, "beta", VRAM_B, b);
}

void *edited_metadata(const struct node *node, edit_fn *edit,
                      size_t *ret_length)
{
    struct kvti_buf out = {0};
    struct kvti_md md;
    void *blob = node_metadata(node, ret_length);

    if (edit == NULL) {
        return blob;
    }
    assert_kvt_ok(kvti_md_decode(blob, *ret_length, 1 << 20, &md, ERR));
    edit(&md);
    assert_int_equal(kvti_buf_append(&out, md.prefix, md.prefix_length),
                     KVT_OK);
    assert_int_equal(kvti_md_encode(&md, &out), KVT_OK);
    kvti_md_fini(&md);
    free(blob);
    *ret_length = out.length;
    return out.data;
}

int try_add_b(struct pair *pair, edit_fn *edit, struct kvt_error *err)
{
    size_t length = 0;
    void *blob = edited_metadata(&pair->b, edit, &length);
    const struct kvt_peer_params params = {.size = sizeof params,
                                           .name = "b",
                                           .metadata = blob,
                                           .metadata_length = length};
    int code = kvt_peer_add(pair->a.t, &params, &pair->peer, err);

    free(blob);
    return code;
}

void add_b(struct pair *pair, edit_fn *edit)
{
    struct kvt_run run = pool_run(&pair->b.pool);

    assert_kvt_ok(try_add_b(pair, edit, ERR));
    assert_kvt_ok(kvt_prepare(pair->a.t, pair->peer, "pool", &run, 1,
                              &pair->remote, ERR));
}

void open_near(struct pair *pair)
{
    open_nodes(pair, NULL, NULL);
    add_b(pair, NULL);
    assert_path(pair, "local", "in this process");
}

void on_another_host(struct kvti_md *md)
{
    md->local.boot_id[0] = md->local.boot_id[0] == 'a' ? 'b' : 'a';
}

void in_another_net(struct kvti_md *md)
{
    md->local.net_ns++;
}

void of_another_agent(struct kvti_md *md)
{
    md->local.nonce[0] ^= 1;
}

void assert_path(const struct pair *pair, const char *path, const char *words)
{
    struct kvt_peer_info info;

    assert_kvt_ok(kvt_peer_info(pair->a.t, pair->peer, &info));
    if (strcmp(info.path, path) != 0 || strstr(info.text, words) == NULL) {
        fail_msg("path \"%s\": %s", info.path, info.text);
    }
}

void assert_bytes(const struct pair *pair, uint64_t local, uint64_t nixl)
{
    const struct kvt_stats stats = stats_of(pair->a.t);

    assert_int_equal(stats.bytes_local, local);
    assert_int_equal(stats.bytes_nixl, nixl);
}

void write_and_check(struct pair *pair, uint32_t i, uint32_t k)
{
    pair_expect(pair, &i, &k, 1);
    wait_done(pair->a.t, pair_write_one(pair, i, k, NULL));
    pair_check(pair);
}

kvt_xfer write_vram(const struct pair *pair, uint64_t offset, uint64_t length,
                    const struct kvt_xfer_options *options)
{
    const struct kvt_copy copy = {.local_addr = VRAM_A + offset,
                                  .peer_addr = VRAM_B + offset,
                                  .length = length,
                                  .local_kind = KVT_VRAM,
                                  .local_device = 1,
                                  .peer_kind = KVT_VRAM,
                                  .peer_device = 1};
    kvt_xfer id = 0;

    assert_kvt_ok(
        kvt_write(pair->a.t, pair->peer, &copy, 1, options, &id, ERR));
    return id;
}

/* ---------------------------------------------------------------- the kernel */

static atomic_int calls_left;
static atomic_int forbidden;

void forbid_after(int calls, int os_errno)
{
    atomic_store(&calls_left, calls);
    atomic_store(&forbidden, os_errno);
}

static bool is_forbidden(void)
{
    int with = atomic_load(&forbidden);

    if (with == 0 || atomic_fetch_sub(&calls_left, 1) > 0) {
        return false;
    }
    errno = with;
    return true;
}

ssize_t __wrap_process_vm_readv(VM_ARGUMENTS)
{
    return is_forbidden() ? -1 : __real_process_vm_readv(VM_SAME);
}

ssize_t __wrap_process_vm_writev(VM_ARGUMENTS)
{
    return is_forbidden() ? -1 : __real_process_vm_writev(VM_SAME);
}
