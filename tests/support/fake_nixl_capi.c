/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libnixl_capi.so, built as a shared object. Agents of one
 * process reach each other by memcpy; their metadata has NIXL's form. Memory of
 * kind VRAM is never touched, so its addresses may be anything. It writes down
 * what it is asked (fake_nixl.h), goes wrong on order, and aborts when a handle
 * is used that is gone.
 *
 * FAKE_NIXL_STUB in the environment makes it call itself a stub;
 * FAKE_NIXL_SHORT, when it is compiled, leaves a function out.
 */
#include "fake_nixl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "engines/nixl_capi.h"

#define EXPORT __attribute__((visibility("default")))

#define DECLARE(name, arguments) EXPORT int nixl_capi_##name arguments;
KVTI_NIXL_FUNCTIONS(DECLARE)
#undef DECLARE
EXPORT bool nixl_capi_is_stub(void);
EXPORT fake_nixl_script_fn fake_nixl_script;
EXPORT fake_nixl_block_fn fake_nixl_block;
EXPORT fake_nixl_waiting_fn fake_nixl_waiting;
EXPORT fake_nixl_count_fn fake_nixl_count;
EXPORT fake_nixl_line_fn fake_nixl_line;
EXPORT fake_nixl_reset_fn fake_nixl_reset;
EXPORT fake_nixl_process_fn fake_nixl_process;

struct desc {
    uint64_t addr;
    uint64_t length;
    uint64_t device;
};

struct descs {
    int mem;
    size_t count;
    struct desc *at;
};

struct note {
    struct note *next;
    char from[256];
    size_t length;
    unsigned char bytes[];
};

struct remote {
    struct remote *next;
    char name[256];
};

struct nixl_agent {
    struct nixl_agent *next;
    char name[256];
    struct descs regs[2];
    struct remote *remotes;
    struct note *notes;
    bool ucx_only;
};

struct nixl_params {
    char text[512];
};

struct nixl_backend {
    int unused;
};

struct nixl_string_list {
    int unused;
};

struct nixl_opt_args {
    bool skip_merge;
};

struct nixl_reg_dlist {
    struct descs list;
};

struct nixl_xfer_dlist {
    struct descs list;
};

struct nixl_xfer_req {
    struct nixl_xfer_req *next;
    struct nixl_agent *agent; /* NULL: released */
    int id;
    int op;
    int status;
    int pid; /* of the peer's process, or 0 */
    bool posted;
    bool refused; /* by its post, before anything began */
    bool failed;  /* a post or a status said so */
    bool stale;   /* its remote was invalidated since */
    char remote[256];
    struct descs local;
    struct descs peer;
};

struct nixl_notif_map {
    struct note *notes;
};

#define SCRIPTS 32
#define LINES 4096

struct script {
    char what[16];
    int value;
    int times;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t let_go = PTHREAD_COND_INITIALIZER;
static struct nixl_agent *agents;
static struct nixl_xfer_req *requests;
static struct script scripts[SCRIPTS];
static struct script blocks[SCRIPTS];
static char *lines[LINES];
static int line_count;
static int next_id;
static char process_agent[256];
static int process_pid;

/* ---------------------------------------------------------- log and scripts */

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    char text[16384];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (line_count < LINES) {
        lines[line_count++] = strdup(text);
    }
}

static const char *describe(const struct descs *list)
{
    static char text[8192];
    size_t used = 0;

    text[0] = '\0';
    for (size_t i = 0; i < list->count && used + 80 < sizeof text; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used,
                                 " %llx+%llx@%llu",
                                 (unsigned long long)list->at[i].addr,
                                 (unsigned long long)list->at[i].length,
                                 (unsigned long long)list->at[i].device);
    }
    return text;
}

/* Waits while this is blocked; with mu held. */
static void hold(const char *what)
{
    for (int i = 0; i < SCRIPTS; i++) {
        struct script *block = &blocks[i];

        if (strcmp(block->what, what) == 0) {
            block->times++;
            while (block->value != 0) {
                pthread_cond_wait(&let_go, &mu);
            }
            block->times--;
        }
    }
}

/* Enters a function: waits while it is blocked; then its scripted result, or
 * `usual`. With mu held from here on. */
static int enter(const char *what, int usual)
{
    pthread_mutex_lock(&mu);
    hold(what);
    for (int i = 0; i < SCRIPTS; i++) {
        if (scripts[i].times > 0 && strcmp(scripts[i].what, what) == 0) {
            scripts[i].times--;
            return scripts[i].value;
        }
    }
    return usual;
}

static int leave(int status)
{
    pthread_mutex_unlock(&mu);
    return status;
}

static struct nixl_agent *check(struct nixl_agent *agent)
{
    for (struct nixl_agent *at = agents; at != NULL; at = at->next) {
        if (at == agent) {
            return agent;
        }
    }
    abort();
}

void fake_nixl_script(const char *what, int value, int times)
{
    pthread_mutex_lock(&mu);
    for (int i = 0; i < SCRIPTS; i++) {
        if (scripts[i].times == 0) {
            (void)snprintf(scripts[i].what, sizeof scripts[i].what, "%s", what);
            scripts[i].value = value;
            scripts[i].times = times;
            break;
        }
    }
    pthread_mutex_unlock(&mu);
}

static struct script *find_block(const char *what)
{
    for (int i = 0; i < SCRIPTS; i++) {
        if (blocks[i].what[0] == '\0') {
            (void)snprintf(blocks[i].what, sizeof blocks[i].what, "%s", what);
        }
        if (strcmp(blocks[i].what, what) == 0) {
            return &blocks[i];
        }
    }
    abort();
}

void fake_nixl_block(const char *what, bool on)
{
    pthread_mutex_lock(&mu);
    find_block(what)->value = on;
    pthread_cond_broadcast(&let_go);
    pthread_mutex_unlock(&mu);
}

int fake_nixl_waiting(const char *what)
{
    int count;

    pthread_mutex_lock(&mu);
    count = find_block(what)->times;
    pthread_mutex_unlock(&mu);
    return count;
}

int fake_nixl_count(const char *prefix)
{
    int count = 0;

    pthread_mutex_lock(&mu);
    for (int i = 0; i < line_count; i++) {
        count += strncmp(lines[i], prefix, strlen(prefix)) == 0;
    }
    pthread_mutex_unlock(&mu);
    return count;
}

bool fake_nixl_line(const char *prefix, int n, char *text, size_t size)
{
    bool found = false;

    pthread_mutex_lock(&mu);
    for (int i = 0; i < line_count && !found; i++) {
        if (strncmp(lines[i], prefix, strlen(prefix)) == 0 && n-- == 0) {
            (void)snprintf(text, size, "%s", lines[i]);
            found = true;
        }
    }
    pthread_mutex_unlock(&mu);
    return found;
}

void fake_nixl_reset(void)
{
    pthread_mutex_lock(&mu);
    for (int i = 0; i < line_count; i++) {
        free(lines[i]);
    }
    line_count = 0;
    memset(scripts, 0, sizeof scripts);
    process_pid = 0;
    for (int i = 0; i < SCRIPTS; i++) {
        blocks[i].value = 0;
    }
    pthread_cond_broadcast(&let_go);
    pthread_mutex_unlock(&mu);
}

void fake_nixl_process(const char *agent, int pid)
{
    pthread_mutex_lock(&mu);
    (void)snprintf(process_agent, sizeof process_agent, "%s", agent);
    process_pid = pid;
    pthread_mutex_unlock(&mu);
}

/* -------------------------------------------------------------- descriptors */

static int add(struct descs *list, uint64_t addr, uint64_t length,
               uint64_t device)
{
    list->at = realloc(list->at, (list->count + 1) * sizeof *list->at);
    list->at[list->count++] = (struct desc){addr, length, device};
    return 0;
}

static struct descs copy(const struct descs *from)
{
    struct descs list = {.mem = from->mem};

    for (size_t i = 0; i < from->count; i++) {
        (void)add(&list, from->at[i].addr, from->at[i].length,
                  from->at[i].device);
    }
    return list;
}

static bool contains(const struct descs *regs, const struct desc *desc)
{
    for (size_t i = 0; i < regs->count; i++) {
        if (desc->addr >= regs->at[i].addr && desc->length > 0 &&
            desc->addr - regs->at[i].addr <=
                regs->at[i].length - desc->length &&
            desc->length <= regs->at[i].length &&
            desc->device == regs->at[i].device) {
            return true;
        }
    }
    return false;
}

static bool contains_all(const struct nixl_agent *agent,
                         const struct descs *list)
{
    for (size_t i = 0; i < list->count; i++) {
        if (!contains(&agent->regs[list->mem], &list->at[i])) {
            return false;
        }
    }
    return true;
}

int nixl_capi_create_reg_dlist(int mem, struct nixl_reg_dlist **ret)
{
    *ret = calloc(1, sizeof **ret);
    (*ret)->list.mem = mem;
    return 0;
}

int nixl_capi_destroy_reg_dlist(struct nixl_reg_dlist *list)
{
    free(list->list.at);
    free(list);
    return 0;
}

int nixl_capi_reg_dlist_add_desc(struct nixl_reg_dlist *list, uintptr_t addr,
                                 size_t length, uint64_t device,
                                 const void *metadata, size_t metadata_length)
{
    (void)metadata;
    return metadata_length != 0 ? -1 : add(&list->list, addr, length, device);
}

int nixl_capi_create_xfer_dlist(int mem, struct nixl_xfer_dlist **ret)
{
    *ret = calloc(1, sizeof **ret);
    (*ret)->list.mem = mem;
    return 0;
}

int nixl_capi_destroy_xfer_dlist(struct nixl_xfer_dlist *list)
{
    free(list->list.at);
    free(list);
    return 0;
}

int nixl_capi_xfer_dlist_add_desc(struct nixl_xfer_dlist *list, uintptr_t addr,
                                  size_t length, uint64_t device)
{
    return add(&list->list, addr, length, device);
}

/* ------------------------------------------------------------------- agents */

bool nixl_capi_is_stub(void)
{
    return getenv("FAKE_NIXL_STUB") != NULL;
}

/* Which GPU's context is current in this thread, where CUDA is loaded. */
static void say_gpu(const char *when, const char *what)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    int (*get_device)(int *ret);
    void *symbol = cuda != NULL ? dlsym(cuda, "cuCtxGetDevice") : NULL;
    int device = -1;

    if (symbol != NULL) {
        memcpy(&get_device, &symbol, sizeof symbol);
        if (get_device(&device) == 0) {
            say("gpu %s %s %d", when, what, device);
        } else {
            say("gpu %s %s none", when, what);
        }
    }
    if (cuda != NULL) {
        (void)dlclose(cuda);
    }
}

int nixl_capi_create_configured_agent(const char *name,
                                      const struct nixl_agent_config *config,
                                      struct nixl_agent **ret)
{
    struct nixl_agent *agent = calloc(1, sizeof *agent);
    int status = enter("agent", 0);

    if (status != 0) {
        free(agent);
        return leave(status);
    }
    (void)snprintf(agent->name, sizeof agent->name, "%s", name);
    say("agent %s prog=%d listen=%d sync=%d delay=%llu telemetry=%d", name,
        config->enable_prog_thread, config->enable_listen_thread,
        config->thread_sync, (unsigned long long)config->pthr_delay_us,
        config->capture_telemetry);
    agent->regs[1].mem = 1;
    agent->ucx_only = true;
    agent->next = agents;
    agents = agent;
    *ret = agent;
    return leave(0);
}

static void free_request(struct nixl_xfer_req *req)
{
    struct nixl_xfer_req **at = &requests;

    while (*at != req) {
        at = &(*at)->next;
    }
    *at = req->next;
    free(req->local.at);
    free(req->peer.at);
    free(req);
}

/* What was never released goes with its agent. */
static void free_requests(const struct nixl_agent *agent)
{
    struct nixl_xfer_req *req = requests;

    while (req != NULL) {
        struct nixl_xfer_req *next = req->next;

        if (req->agent == agent && req->posted && req->status == 0) {
            say("UNRELEASED %d", req->id);
        }
        if (req->agent == agent) {
            free_request(req);
        }
        req = next;
    }
}

static void free_notes(struct note *note)
{
    while (note != NULL) {
        struct note *next = note->next;

        free(note);
        note = next;
    }
}

int nixl_capi_destroy_agent(struct nixl_agent *agent)
{
    struct nixl_agent **at = &agents;

    (void)enter("destroy", 0);
    say("destroy_agent %s", check(agent)->name);
    say_gpu("end", agent->name);
    while (*at != agent) {
        at = &(*at)->next;
    }
    *at = agent->next;
    while (agent->remotes != NULL) {
        struct remote *next = agent->remotes->next;

        free(agent->remotes);
        agent->remotes = next;
    }
    free_requests(agent);
    free_notes(agent->notes);
    free(agent->regs[0].at);
    free(agent->regs[1].at);
    free(agent);
    return leave(0);
}

/* In no order, as the real one reads a folder. */
static const char *const plugins[] = {"UCX", "GDS_MT", "POSIX", "OBJ"};

int nixl_capi_get_available_plugins(struct nixl_agent *agent,
                                    struct nixl_string_list **ret)
{
    static struct nixl_string_list list;

    (void)enter("plugins", 0);
    (void)check(agent);
    *ret = &list;
    return leave(0);
}

int nixl_capi_string_list_size(struct nixl_string_list *list, size_t *ret)
{
    (void)list;
    *ret = sizeof plugins / sizeof plugins[0];
    return 0;
}

int nixl_capi_string_list_get(struct nixl_string_list *list, size_t index,
                              const char **ret)
{
    (void)list;
    *ret = plugins[index];
    return 0;
}

int nixl_capi_destroy_string_list(struct nixl_string_list *list)
{
    (void)list;
    return 0;
}

int nixl_capi_create_params(struct nixl_params **ret)
{
    *ret = calloc(1, sizeof **ret);
    return 0;
}

int nixl_capi_params_add(struct nixl_params *params, const char *key,
                         const char *value)
{
    size_t used = strlen(params->text);

    (void)snprintf(params->text + used, sizeof params->text - used, " %s=%s",
                   key, value);
    return 0;
}

int nixl_capi_destroy_params(struct nixl_params *params)
{
    free(params);
    return 0;
}

int nixl_capi_create_backend(struct nixl_agent *agent, const char *plugin,
                             struct nixl_params *params,
                             struct nixl_backend **ret)
{
    int status = enter("backend", 0);

    hold(plugin);
    check(agent)->ucx_only &= strcmp(plugin, "UCX") == 0;
    say("backend %s%s", plugin, params->text);
    say_gpu("backend", plugin);
    if (status == 0) {
        *ret = calloc(1, sizeof **ret);
    }
    return leave(status);
}

int nixl_capi_destroy_backend(struct nixl_backend *backend)
{
    free(backend);
    return 0;
}

int nixl_capi_create_opt_args(struct nixl_opt_args **ret)
{
    *ret = calloc(1, sizeof **ret);
    return 0;
}

int nixl_capi_destroy_opt_args(struct nixl_opt_args *args)
{
    free(args);
    return 0;
}

int nixl_capi_opt_args_set_skip_desc_merge(struct nixl_opt_args *args,
                                           bool skip)
{
    args->skip_merge = skip;
    return 0;
}

/* ------------------------------------------------------------------- memory */

int nixl_capi_register_mem(struct nixl_agent *agent,
                           struct nixl_reg_dlist *list,
                           struct nixl_opt_args *args)
{
    int status = enter("register", 0);

    (void)args;
    (void)check(agent);
    say("register %d%s", list->list.mem, describe(&list->list));
    for (size_t i = 0; status == 0 && i < list->list.count; i++) {
        (void)add(&agent->regs[list->list.mem], list->list.at[i].addr,
                  list->list.at[i].length, list->list.at[i].device);
    }
    return leave(status);
}

int nixl_capi_deregister_mem(struct nixl_agent *agent,
                             struct nixl_reg_dlist *list,
                             struct nixl_opt_args *args)
{
    struct descs *regs;
    int status = enter("deregister", 0);

    (void)args;
    regs = &check(agent)->regs[list->list.mem];
    say("deregister %d%s", list->list.mem, describe(&list->list));
    for (size_t i = 0; i < list->list.count; i++) {
        size_t at = 0;

        while (at < regs->count && memcmp(&regs->at[at], &list->list.at[i],
                                          sizeof regs->at[at]) != 0) {
            at++;
        }
        if (at == regs->count) {
            status = -6;
            continue;
        }
        regs->at[at] = regs->at[--regs->count];
    }
    return leave(status);
}

static void put(FILE *out, const char *tag, const void *data, size_t length)
{
    uint64_t count = length;

    (void)fputs(tag, out);
    (void)fwrite(&count, sizeof count, 1, out);
    (void)fwrite(data, length, 1, out);
    (void)fputc('|', out);
}

static void put_regs(FILE *out, const struct descs *regs)
{
    uint64_t count = regs->count;
    uint32_t mem = (uint32_t)regs->mem;

    put(out, "bknd", "UCX", 3);
    put(out, "nixlDList", "nixlSDList", 10);
    put(out, "t", &mem, 4);
    put(out, "n", &count, 8);
    for (size_t i = 0; i < regs->count; i++) {
        unsigned char bytes[35] = {0};

        memcpy(bytes, &regs->at[i], sizeof regs->at[i]);
        put(out, "", bytes, sizeof bytes);
    }
}

int nixl_capi_get_local_md(struct nixl_agent *agent, void **ret_data,
                           size_t *ret_length)
{
    uint64_t one = 1;
    uint64_t lists;
    char *data = NULL;
    FILE *out = open_memstream(&data, ret_length);

    (void)enter("export", 0);
    (void)check(agent);
    lists = (agent->regs[0].count > 0 ? 1u : 0u) +
            (agent->regs[1].count > 0 ? 1u : 0u);
    (void)fputs("nixlSerDes|", out);
    put(out, "Agent", agent->name, strlen(agent->name));
    put(out, "Conns", &one, 8);
    put(out, "t", "UCX", 3);
    put(out, "c", "address", 7);
    put(out, "", "MemSection", 10);
    put(out, "nixlSecElms", &lists, 8);
    for (int mem = 0; mem < 2; mem++) {
        if (agent->regs[mem].count > 0) {
            put_regs(out, &agent->regs[mem]);
        }
    }
    (void)fclose(out);
    *ret_data = data;
    return leave(0);
}

/* ------------------------------------------------------------------- remotes */

static struct nixl_agent *find_agent(const char *name)
{
    for (struct nixl_agent *at = agents; at != NULL; at = at->next) {
        if (strcmp(at->name, name) == 0) {
            return at;
        }
    }
    return NULL;
}

static struct remote **find_remote(struct nixl_agent *agent, const char *name)
{
    struct remote **at = &check(agent)->remotes;

    while (*at != NULL && strcmp((*at)->name, name) != 0) {
        at = &(*at)->next;
    }
    return at;
}

int nixl_capi_load_remote_md(struct nixl_agent *agent, const void *data,
                             size_t length, char **ret_name)
{
    int status = enter("load", 0);
    char name[256] = "";
    struct remote **at;
    uint64_t count;

    (void)check(agent);
    if (length < 40 || memcmp(data, "nixlSerDes|Agent", 16) != 0) {
        abort();
    }
    memcpy(&count, (const char *)data + 16, sizeof count);
    memcpy(name, (const char *)data + 24, count);
    say("load %s", name);
    if (status != 0) {
        return leave(status);
    }
    at = find_remote(agent, name);
    if (*at == NULL) {
        *at = calloc(1, sizeof **at);
        memcpy((*at)->name, name, sizeof name);
    }
    *ret_name = strdup(name);
    return leave(0);
}

int nixl_capi_invalidate_remote_md(struct nixl_agent *agent, const char *name)
{
    struct remote **at;
    struct remote *gone;

    (void)enter("invalidate", 0);
    at = find_remote(agent, name);
    gone = *at;
    say("invalidate %s", name);
    if (gone == NULL) {
        return leave(-6);
    }
    *at = gone->next;
    free(gone);
    for (struct nixl_xfer_req *req = requests; req != NULL; req = req->next) {
        req->stale |= req->agent == agent && strcmp(req->remote, name) == 0;
    }
    return leave(0);
}

/* ------------------------------------------------------------------ requests */

int nixl_capi_create_xfer_req(struct nixl_agent *agent, int op,
                              struct nixl_xfer_dlist *local,
                              struct nixl_xfer_dlist *remote, const char *name,
                              struct nixl_xfer_req **ret,
                              struct nixl_opt_args *args)
{
    int status = enter("create", 0);
    struct nixl_agent *peer = find_agent(name);
    struct nixl_xfer_req *req;

    if (*find_remote(agent, name) == NULL) {
        status = -6;
    } else if (status == 0 && peer != NULL &&
               (!contains_all(agent, &local->list) ||
                !contains_all(peer, &remote->list) ||
                local->list.count != remote->list.count)) {
        status = -2;
    }
    say("create op=%d %d>%d merge=%d n=%zu%s", op, local->list.mem,
        remote->list.mem, args == NULL || !args->skip_merge, local->list.count,
        describe(&local->list));
    say("remote of %d%s", next_id, describe(&remote->list));
    if (status != 0) {
        return leave(status);
    }
    req = calloc(1, sizeof *req);
    req->id = next_id++;
    req->op = op;
    req->local = copy(&local->list);
    req->peer = copy(&remote->list);
    req->agent = agent;
    (void)snprintf(req->remote, sizeof req->remote, "%s", name);
    req->pid = strcmp(process_agent, name) == 0 ? process_pid : 0;
    req->next = requests;
    requests = req;
    *ret = req;
    return leave(0);
}

static void move(const struct nixl_xfer_req *req)
{
    for (size_t i = 0; i < req->local.count; i++) {
        const void *local = (const void *)(uintptr_t)req->local.at[i].addr;
        const void *peer = (const void *)(uintptr_t)req->peer.at[i].addr;
        size_t length = req->local.at[i].length;

        if (req->local.mem != 0 || req->peer.mem != 0) {
            continue;
        }
        if (req->op == NIXL_WRITE) {
            memcpy((void *)(uintptr_t)req->peer.at[i].addr, local, length);
        } else {
            memcpy((void *)(uintptr_t)req->local.at[i].addr, peer, length);
        }
    }
}

#ifndef FAKE_NIXL_SHORT
int nixl_capi_post_xfer_req(struct nixl_agent *agent, struct nixl_xfer_req *req,
                            struct nixl_opt_args *args)
{
    int status = enter("post", 0);

    (void)args;
    (void)check(agent);
    if (req->agent != agent || req->posted) {
        abort();
    }
    say("post %d -> %d", req->id, status);
    req->posted = true;
    req->refused = status == NIXL_INVALID_PARAM || status == NIXL_NOT_FOUND;
    req->failed = status < 0;
    req->status = status;
    if (status == 0) {
        move(req);
    }
    return leave(status);
}
#endif

int nixl_capi_get_xfer_status(struct nixl_agent *agent,
                              struct nixl_xfer_req *req)
{
    int status = enter("status", 0);

    (void)check(agent);
    if (req->agent != agent || !req->posted) {
        abort();
    }
    if (req->stale && req->status == 1) {
        say("STALE %d", req->id);
        req->failed = true;
        return leave(-6);
    }
    if (req->status == 1) {
        req->status = status;
        req->failed = status < 0;
        if (status == 0) {
            move(req);
        }
        if (status != 1) {
            say("status %d -> %d", req->id, status);
        }
    }
    return leave(req->status);
}

/* A process of ours that has ended, waited for or not. */
static bool is_dead(int pid)
{
    siginfo_t info = {.si_pid = 0};

    return pid != 0 &&
           (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
            info.si_pid == pid);
}

/* Nothing of it can land any more: what nixl_xfer.c says. */
static bool is_over(const struct nixl_xfer_req *req)
{
    return req->status == 0 || req->refused ||
           (req->failed && req->op == NIXL_WRITE && is_dead(req->pid) &&
            req->agent->ucx_only);
}

int nixl_capi_release_xfer_req(struct nixl_agent *agent,
                               struct nixl_xfer_req *req)
{
    (void)enter("release", 0);
    (void)check(agent);
    say(is_over(req) ? "release %d" : "UNFINISHED %d", req->id);
    req->agent = NULL;
    return leave(0);
}

int nixl_capi_destroy_xfer_req(struct nixl_xfer_req *req)
{
    pthread_mutex_lock(&mu);
    if (req->agent != NULL) {
        return leave(-3);
    }
    free_request(req);
    return leave(0);
}

/* ------------------------------------------------------------- notifications */

int nixl_capi_gen_notif(struct nixl_agent *agent, const char *name,
                        const void *data, size_t length,
                        struct nixl_opt_args *args)
{
    int status = enter("notif", 0);
    struct nixl_agent *peer = find_agent(name);
    struct note *note = calloc(1, sizeof *note + length);
    struct note **at;

    (void)args;
    (void)check(agent);
    say("notif %s %zu", name, length);
    if (status != 0 || peer == NULL) {
        free(note);
        return leave(status != 0 ? status : -2);
    }
    (void)snprintf(note->from, sizeof note->from, "%s", agent->name);
    note->length = length;
    memcpy(note->bytes, data, length);
    for (at = &peer->notes; *at != NULL; at = &(*at)->next) {
    }
    *at = note;
    return leave(0);
}

int nixl_capi_create_notif_map(struct nixl_notif_map **ret)
{
    *ret = calloc(1, sizeof **ret);
    return 0;
}

int nixl_capi_destroy_notif_map(struct nixl_notif_map *map)
{
    free_notes(map->notes);
    free(map);
    return 0;
}

int nixl_capi_get_notifs(struct nixl_agent *agent, struct nixl_notif_map *map,
                         struct nixl_opt_args *args)
{
    struct note **at = &map->notes;

    (void)args;
    (void)enter("notifs", 0);
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = check(agent)->notes;
    agent->notes = NULL;
    return leave(0);
}

/* The n-th sender in the map, by its first message; or its count of messages
 * and the n-th of them. */
static const struct note *find_note(const struct nixl_notif_map *map,
                                    const char *name, size_t n, size_t *count)
{
    const struct note *found = NULL;

    *count = 0;
    for (const struct note *at = map->notes; at != NULL; at = at->next) {
        bool counts = true;

        if (name != NULL) {
            counts = strcmp(at->from, name) == 0;
        } else {
            for (const struct note *by = map->notes; by != at; by = by->next) {
                counts = counts && strcmp(by->from, at->from) != 0;
            }
        }
        if (counts && (*count)++ == n) {
            found = at;
        }
    }
    return found;
}

int nixl_capi_notif_map_size(struct nixl_notif_map *map, size_t *ret)
{
    (void)find_note(map, NULL, 0, ret);
    return 0;
}

int nixl_capi_notif_map_get_agent_at(struct nixl_notif_map *map, size_t index,
                                     const char **ret_name)
{
    size_t count;
    const struct note *note = find_note(map, NULL, index, &count);

    if (note == NULL) {
        return -1;
    }
    *ret_name = note->from;
    return 0;
}

int nixl_capi_notif_map_get_notifs_size(struct nixl_notif_map *map,
                                        const char *name, size_t *ret)
{
    int status = enter("sender", 0);

    say("sender %s", name);
    (void)find_note(map, name, 0, ret);
    if (status == 0 && *ret == 0) {
        status = -1;
    }
    return leave(status);
}

int nixl_capi_notif_map_get_notif(struct nixl_notif_map *map, const char *name,
                                  size_t index, const void **ret_data,
                                  size_t *ret_length)
{
    size_t count;
    const struct note *note = find_note(map, name, index, &count);

    if (note == NULL) {
        return -1;
    }
    *ret_data = note->bytes;
    *ret_length = note->length;
    return 0;
}

int nixl_capi_notif_map_clear(struct nixl_notif_map *map)
{
    free_notes(map->notes);
    map->notes = NULL;
    return 0;
}
