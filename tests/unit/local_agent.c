/* SPDX-License-Identifier: Apache-2.0 */
#include "local_agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/local.h"
#include "memcheck.h"

#define CLOSE_NS UINT64_C(10000000000)
#define BASE_BYTES (AGENT_BYTES + 2 * AGENT_PAGE)
#define BLOB_MAX 4096

static _Noreturn void stop(const char *what)
{
    fprintf(stderr, "local_agent: %s: %s\n", what, strerror(errno));
    abort();
}

static void check(bool good, const char *what)
{
    if (!good) {
        stop(what);
    }
}

/* ------------------------------------------------------------------- agents */

unsigned char agent_byte(uint64_t seed, size_t index)
{
    uint64_t mixed = (seed + index / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15);

    mixed ^= mixed >> 29;
    return (unsigned char)(mixed >> index % 8 * 8);
}

void agent_fill(struct agent *agent, uint64_t seed)
{
    for (size_t i = 0; i < BASE_BYTES; i++) {
        agent->base[i] = agent_byte(seed, i);
    }
}

static void map_memory(struct agent *agent, enum agent_memory memory)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;

    agent->fd = -1;
    if (memory != AGENT_ANON) {
        agent->fd = memfd_create("kvt-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        check(agent->fd >= 0 && ftruncate(agent->fd, BASE_BYTES) == 0, "memfd");
        flags = MAP_SHARED;
    }
    if (memory == AGENT_SEALED) {
        check(fcntl(agent->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0,
              "seals");
    }
    agent->base = mmap(NULL, BASE_BYTES, PROT_READ | PROT_WRITE, flags,
                       agent->fd, 0);
    check(agent->base != MAP_FAILED, "mmap");
    agent->data = agent->base + AGENT_PAGE;
}

static void register_memory(struct agent *agent)
{
    struct kvti_mem *mems[1] = {&agent->mem};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);
    struct kvt_error err = {.text = ""};

    agent->mem = (struct kvti_mem){
        .addr = (uint64_t)(uintptr_t)agent->data,
        .length = AGENT_BYTES,
        .fd = agent->fd,
        .fd_offset = AGENT_PAGE,
        .flags = agent->fd >= 0 ? (uint32_t)KVTI_MEM_FD : 0,
    };
    if (kvti_memcheck(&agent->mem, 1, NULL, &err) != KVT_OK) {
        stop(err.text);
    }
    job.mems = mems;
    job.mem_count = 1;
    if (fake_env_job(&agent->env, &job) != KVT_OK) {
        stop(job.err.text);
    }
}

static void make_metadata(struct agent *agent)
{
    struct kvti_job job = fake_job(KVTI_JOB_EXPORT);
    struct kvti_md *md = &agent->md;

    check(fake_env_job(&agent->env, &job) == KVT_OK && job.has_local &&
              job.buf.length == 0,
          "EXPORT");
    memset(md, 0, sizeof(*md));
    kvti_format(md->agent_name, sizeof(md->agent_name), "%s",
                agent->env.agent_name);
    kvti_format(md->engine, sizeof(md->engine), "local");
    memcpy(md->incarnation, agent->env.incarnation, sizeof(md->incarnation));
    md->has_local = true;
    md->local = job.local;
    check(kvti_regions_reserve(&md->regions, 1) == KVT_OK, "memory");
    kvti_regions_add(&md->regions, &agent->mem);
    kvti_regions_update(&md->regions, NULL, NULL);
}

void agent_open(struct agent *agent, const char *name, enum agent_memory memory,
                uint64_t seed)
{
    fake_env_open(&agent->env, &kvti_engine_local, name, NULL);
    map_memory(agent, memory);
    agent_fill(agent, seed);
    register_memory(agent);
    make_metadata(agent);
}

int agent_close(struct agent *agent)
{
    int code = fake_env_close(&agent->env, CLOSE_NS);

    kvti_regions_fini(&agent->md.regions);
    munmap(agent->base, BASE_BYTES);
    if (agent->fd >= 0) {
        close(agent->fd);
    }
    return code;
}

int agent_load(struct agent *agent, const struct kvti_md *md, void *link,
               void **ret_conn, struct kvt_error *err)
{
    struct kvti_job job = fake_job(KVTI_JOB_LOAD);
    int code;

    job.md = md;
    job.link = link;
    code = fake_env_job(&agent->env, &job);
    if (code == KVT_OK) {
        *ret_conn = job.conn;
    } else {
        *err = job.err;
    }
    return code;
}

void *agent_must_load(struct agent *agent, const struct kvti_md *md, void *link)
{
    struct kvt_error err;
    void *conn = NULL;

    if (agent_load(agent, md, link, &conn, &err) != KVT_OK) {
        stop(err.text);
    }
    return conn;
}

void agent_unload(struct agent *agent, void *conn)
{
    struct kvti_job job = fake_job(KVTI_JOB_UNLOAD);

    job.conn = conn;
    check(fake_env_job(&agent->env, &job) == KVT_OK, "UNLOAD");
}

int agent_drop(struct agent *agent, uint64_t timeout_ns, struct kvt_error *err)
{
    struct kvti_mem *mems[1] = {&agent->mem};
    struct kvti_job job = fake_job(KVTI_JOB_MEM_DROP);
    int code;

    job.mems = mems;
    job.mem_count = 1;
    job.deadline_ns = kvti_now_ns() + timeout_ns;
    code = fake_env_job(&agent->env, &job);
    if (code != KVT_OK) {
        *err = job.err;
    }
    return code;
}

int agent_connect(struct agent *agent, void *conn)
{
    struct kvti_job job = fake_job(KVTI_JOB_CONNECT);

    job.conn = conn;
    return fake_env_job(&agent->env, &job);
}

struct kvti_outcome agent_move(struct agent *agent, void *conn, uint32_t op,
                               const void *local, uint64_t peer, size_t length)
{
    struct kvti_chunk *chunk = fake_chunk(conn, op, 1);
    struct kvti_outcome outcome;

    chunk->bytes = length;
    chunk->copies[0] = (struct kvti_copy){
        .local = (uint64_t)(uintptr_t)local, .peer = peer, .length = length};
    fake_env_post(&agent->env, chunk);
    fake_env_wait_chunk(&agent->env, chunk);
    outcome = chunk->outcome;
    free(chunk);
    return outcome;
}

/* ------------------------------------------------------- the parent's side */

struct order {
    uint32_t order;
    uint32_t blob_length;
    uint64_t a;
    uint8_t blob[BLOB_MAX];
};

struct answer {
    int64_t value;
    char text[KVT_TEXT_MAX];
};

struct greeting {
    uint64_t data;
    uint32_t blob_length;
    uint8_t blob[BLOB_MAX];
};

void local_child_start(struct child *child, const struct child_plan *plan)
{
    char arguments[4][24];
    struct greeting greeting;
    struct kvt_error err;
    int pair[2];

    check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0,
          "socketpair");
    kvti_format(arguments[0], sizeof(arguments[0]), "%d", pair[1]);
    kvti_format(arguments[1], sizeof(arguments[1]), "%d", (int)plan->memory);
    kvti_format(arguments[2], sizeof(arguments[2]), "%llu",
                (unsigned long long)plan->seed);
    kvti_format(arguments[3], sizeof(arguments[3]), "%u", (unsigned)plan->uid);
    child->pid = fork();
    check(child->pid >= 0, "fork");
    if (child->pid == 0) {
        (void)fcntl(pair[1], F_SETFD, 0);
        execl("/proc/self/exe", "child", "child", arguments[0], arguments[1],
              arguments[2], arguments[3], (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    child->fd = pair[0];
    check(recv(child->fd, &greeting, sizeof(greeting), 0) ==
              (ssize_t)sizeof(greeting),
          "a child does not greet");
    child->data = greeting.data;
    child->blob = malloc(greeting.blob_length);
    check(child->blob != NULL, "memory");
    memcpy(child->blob, greeting.blob, greeting.blob_length);
    if (kvti_md_decode(child->blob, greeting.blob_length, 16, &child->md,
                       &err) != KVT_OK) {
        stop(err.text);
    }
}

static int64_t ask(struct child *child, const struct order *order,
                   struct kvt_error *err)
{
    struct answer answer;

    check(send(child->fd, order, sizeof(*order), MSG_NOSIGNAL) ==
              (ssize_t)sizeof(*order),
          "an order");
    if (order->order == CHILD_EXEC) {
        /* The socket ends when the exec has happened. */
        check(recv(child->fd, &answer, sizeof(answer), 0) == 0, "an exec");
        return 0;
    }
    check(recv(child->fd, &answer, sizeof(answer), 0) ==
              (ssize_t)sizeof(answer),
          "an answer");
    if (err != NULL) {
        kvti_format(err->text, sizeof(err->text), "%s", answer.text);
    }
    return answer.value;
}

int64_t local_child_ask(struct child *child, enum child_order order, uint64_t a)
{
    struct order message;

    memset(&message, 0, sizeof(message));
    message.order = order;
    message.a = a;
    return ask(child, &message, NULL);
}

int64_t local_child_ask_about(struct child *child, enum child_order order,
                              const struct agent *agent, struct kvt_error *err)
{
    struct order message;
    struct kvti_buf buf = {0};

    memset(&message, 0, sizeof(message));
    message.order = order;
    check(kvti_md_encode(&agent->md, &buf) == KVT_OK &&
              buf.length <= sizeof(message.blob),
          "metadata");
    memcpy(message.blob, buf.data, buf.length);
    message.blob_length = (uint32_t)buf.length;
    kvti_buf_fini(&buf);
    return ask(child, &message, err);
}

void local_child_read(const struct child *child, unsigned char *ret)
{
    struct iovec here = {.iov_base = ret, .iov_len = BASE_BYTES};
    struct iovec there = {
        .iov_base = (void *)(uintptr_t)(child->data - AGENT_PAGE),
        .iov_len = BASE_BYTES};

    check(process_vm_readv(child->pid, &here, 1, &there, 1, 0) ==
              (ssize_t)BASE_BYTES,
          "reading a child");
}

static void reap(struct child *child, bool good)
{
    int status = 0;

    while (waitpid(child->pid, &status, 0) < 0) {
        check(errno == EINTR, "waitpid");
    }
    check(!good || (WIFEXITED(status) && WEXITSTATUS(status) == 0),
          "a child did not end well");
    close(child->fd);
    kvti_md_fini(&child->md);
    free(child->blob);
}

void local_child_quit(struct child *child)
{
    check(local_child_ask(child, CHILD_QUIT, 0) == KVT_OK, "a child's close");
    reap(child, true);
}

void local_child_kill(struct child *child)
{
    check(kill(child->pid, SIGKILL) == 0, "kill");
    reap(child, false);
}

/* -------------------------------------------------------- the child's side */

struct held {
    struct kvti_gate_page *gate;
    uint32_t slot;
    uint64_t epoch;
};

static int64_t hold_gate(const struct kvti_md *md, struct held *held)
{
    struct kvt_error err;
    uint64_t start_time = 0;
    int code;

    check(kvti_ident_start_time(getpid(), &start_time) == 0, "start time");
    code = kvti_gate_join(md->local.pid, md->local.gate_fd, md->local.uid,
                          kvti_gate_owner(getpid(), start_time), &held->gate,
                          &held->slot, &err);
    if (code == KVT_OK &&
        !kvti_gate_enter(held->gate, held->slot, &held->epoch)) {
        code = KVT_EDISCONNECTED;
    }
    return code;
}

static int64_t fork_sleeper(void)
{
    pid_t pid = fork();

    if (pid == 0) {
        pause();
        _exit(0);
    }
    return pid;
}

static int64_t change_page(struct agent *agent, const struct order *order)
{
    unsigned char *page = agent->data + order->a * AGENT_PAGE;

    if (order->order == CHILD_UNMAP) {
        return munmap(page, AGENT_PAGE);
    }
    if (order->order == CHILD_READONLY) {
        return mprotect(page, AGENT_PAGE, PROT_READ);
    }
    return ftruncate(agent->fd, (off_t)((order->a + 1) * AGENT_PAGE));
}

static int64_t about_parent(struct agent *agent, const struct order *order,
                            struct held *held, struct answer *answer)
{
    struct kvti_md md;
    struct kvt_error err = {.text = ""};
    void *conn = NULL;
    int64_t value;

    value = kvti_md_decode(order->blob, order->blob_length, 16, &md, &err);
    if (value == KVT_OK && order->order == CHILD_HOLD) {
        value = hold_gate(&md, held);
    } else if (value == KVT_OK) {
        value = agent_load(agent, &md, agent, &conn, &err);
    }
    kvti_format(answer->text, sizeof(answer->text), "%s", err.text);
    kvti_md_fini(&md);
    return value;
}

static int64_t obey(struct agent *agent, const struct order *order,
                    struct held *held, struct answer *answer)
{
    struct kvt_error err;

    switch (order->order) {
    case CHILD_QUIT:
        return agent->env.engine == NULL ? KVT_OK : agent_close(agent);
    case CHILD_CLOSE:
        return fake_env_close(&agent->env, CLOSE_NS);
    case CHILD_DROP:
        return agent_drop(agent, order->a, &err);
    case CHILD_EXEC:
        execl("/bin/sleep", "sleep", "1000", (char *)NULL);
        return -1;
    case CHILD_FORK:
        return fork_sleeper();
    case CHILD_LEAVE:
        kvti_gate_leave(held->gate, held->slot, held->epoch);
        kvti_gate_part(held->gate, held->slot);
        return 0;
    case CHILD_HOLD:
    case CHILD_LOAD:
        return about_parent(agent, order, held, answer);
    default:
        return change_page(agent, order);
    }
}

static void greet(struct agent *agent, int fd)
{
    struct greeting greeting;
    struct kvti_buf buf = {0};

    memset(&greeting, 0, sizeof(greeting));
    greeting.data = (uint64_t)(uintptr_t)agent->data;
    check(kvti_md_encode(&agent->md, &buf) == KVT_OK &&
              buf.length <= sizeof(greeting.blob),
          "metadata");
    memcpy(greeting.blob, buf.data, buf.length);
    greeting.blob_length = (uint32_t)buf.length;
    kvti_buf_fini(&buf);
    check(send(fd, &greeting, sizeof(greeting), MSG_NOSIGNAL) ==
              (ssize_t)sizeof(greeting),
          "greeting");
}

static void serve(struct agent *agent, int fd)
{
    struct held held = {0};
    bool quit = false;

    while (!quit) {
        struct order order;
        struct answer answer;

        /* The parent is gone: so are its questions. */
        if (recv(fd, &order, sizeof(order), 0) != (ssize_t)sizeof(order)) {
            _exit(1);
        }
        memset(&answer, 0, sizeof(answer));
        answer.value = obey(agent, &order, &held, &answer);
        quit = order.order == CHILD_QUIT;
        (void)send(fd, &answer, sizeof(answer), MSG_NOSIGNAL);
    }
}

void local_child_main(int argc, char **argv)
{
    static struct agent agent;
    uid_t uid;
    int fd;

    if (argc != 6 || strcmp(argv[1], "child") != 0) {
        return;
    }
    fd = atoi(argv[2]);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    uid = (uid_t)strtoul(argv[5], NULL, 10);
    check(uid == 0 || setresuid(uid, uid, uid) == 0, "setresuid");
    agent_open(&agent, "child", (enum agent_memory)atoi(argv[3]),
               strtoull(argv[4], NULL, 10));
    greet(&agent, fd);
    serve(&agent, fd);
    exit(0);
}
