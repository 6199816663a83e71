/* SPDX-License-Identifier: Apache-2.0 */
#include "two_process.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "child_wire.h"

#define CHILD_FD 3

static void answer_of(struct child *child, struct child_message *message,
                      void **ret_bytes)
{
    struct pollfd ready = {.fd = child->fd, .events = POLLIN};

    if (poll(&ready, 1, test_wait_ms()) != 1) {
        fail_msg("%s", "the second process does not answer");
    }
    if (!child_receive(child->fd, message, ret_bytes)) {
        fail_msg("%s", "the second process is gone");
    }
}

/* Asks and waits; the bytes of the answer are dropped when not wanted. */
static struct child_message ask(struct child *child,
                                const struct child_message *question,
                                const void *bytes, void **ret_bytes)
{
    struct child_message answer = {0};
    void *received;

    if (!child_send(child->fd, question, bytes)) {
        fail_msg("%s", "the second process is gone");
    }
    answer_of(child, &answer, &received);
    assert_int_equal(answer.verb, question->verb);
    if (ret_bytes != NULL) {
        *ret_bytes = received;
    } else {
        free(received);
    }
    return answer;
}

static void copy_name(char name[CHILD_NAME_BYTES], const char *from)
{
    assert_true(strlen(from) < CHILD_NAME_BYTES);
    memcpy(name, from, strlen(from) + 1);
}

/* ------------------------------------------------------------------- life */

static void become_child(int fd)
{
    char number[16];
    char name[] = "child";
    char argument[] = CHILD_ARGUMENT;
    char *argv[] = {name, argument, number, NULL};

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
        _exit(1);
    }
    /* Nothing else of ours: a library's sockets would look open to its peers
     * for as long as a child has them. */
    if (dup2(fd, CHILD_FD) != CHILD_FD ||
        close_range(CHILD_FD + 1, UINT_MAX, 0) != 0) {
        _exit(1);
    }
    (void)snprintf(number, sizeof number, "%d", CHILD_FD);
    (void)execv("/proc/self/exe", argv);
    _exit(1);
}

void child_start(struct child *child)
{
    int fds[2];

    *child = (struct child){.fd = -1};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    child->pid = fork();
    assert_true(child->pid >= 0);
    if (child->pid == 0) {
        (void)close(fds[0]);
        become_child(fds[1]);
    }
    (void)close(fds[1]);
    child->fd = fds[0];
}

void child_open(struct child *child, const struct node_plan *plan)
{
    struct child_message message = {.verb = CHILD_OPEN,
                                    .length = sizeof(struct child_plan)};
    struct child_plan wire = {.shape = plan->shape,
                              .seed = plan->seed,
                              .grace_ns = plan->options.grace_ns,
                              .notify_max = plan->options.notify_max,
                              .flags = plan->options.flags};

    copy_name(wire.engine, plan->engine);
    if (plan->name != NULL) {
        copy_name(message.name, plan->name);
    }
    pool_close(&child->pool);
    pool_open(&child->pool, &plan->shape, plan->seed);
    child->pool_addr = ask(child, &message, &wire, NULL).id;
}

void child_begin(struct child *child, const struct node_plan *plan)
{
    child_start(child);
    child_open(child, plan);
}

void child_forget(struct child *child)
{
    (void)close(child->fd);
    child->fd = -1;
    pool_close(&child->pool);
}

void child_end(struct child *child)
{
    const struct child_message message = {.verb = CHILD_EXIT};
    int status = -1;

    assert_kvt_ok(child_close(child, 0));
    (void)ask(child, &message, NULL, NULL);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    child_forget(child);
}

static int kill_and_reap(const struct child *child)
{
    int status = 0;

    assert_int_equal(kill(child->pid, SIGKILL), 0);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    assert_true(WIFSIGNALED(status));
    return WTERMSIG(status);
}

void child_kill(struct child *child)
{
    assert_int_equal(kill_and_reap(child), SIGKILL);
}

void child_bury(struct child *child)
{
    (void)kill_and_reap(child);
}

void child_stop(struct child *child)
{
    int status = 0;

    assert_int_equal(kill(child->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(child->pid, &status, WUNTRACED), child->pid);
    assert_true(WIFSTOPPED(status));
}

void child_continue(struct child *child)
{
    assert_int_equal(kill(child->pid, SIGCONT), 0);
}

void child_fix_addresses(struct child *child)
{
    const struct child_message message = {.verb = CHILD_FIX_ADDRESSES};

    (void)ask(child, &message, NULL, NULL);
}

void child_exec(struct child *child)
{
    const struct child_message message = {.verb = CHILD_EXEC};

    (void)ask(child, &message, NULL, NULL);
}

void child_fork(struct child *child)
{
    const struct child_message message = {.verb = CHILD_FORK};

    (void)ask(child, &message, NULL, NULL);
}

bool child_drop_user(struct child *child, uint32_t id)
{
    const struct child_message message = {.verb = CHILD_DROP_USER, .id = id};

    return ask(child, &message, NULL, NULL).code == KVT_OK;
}

/* ------------------------------------------------------------------- pool */

struct kvt_run child_run(const struct child *child)
{
    struct kvt_run run = pool_run(&child->pool);

    run.addr = child->pool_addr;
    return run;
}

void child_fetch(struct child *child)
{
    const struct child_message message = {.verb = CHILD_FETCH};
    void *bytes;
    struct child_message answer = ask(child, &message, NULL, &bytes);

    assert_int_equal(answer.length, child->pool.bytes);
    memcpy(child->pool.memory, bytes, answer.length);
    free(bytes);
}

void child_check(struct child *child, const char *what)
{
    child_fetch(child);
    pool_check(&child->pool, what);
}

void child_fill(struct child *child, uint64_t seed)
{
    const struct child_message message = {.verb = CHILD_FILL, .id = seed};

    (void)ask(child, &message, NULL, NULL);
    pool_fill(&child->pool, seed);
}

void child_unmap(struct child *child, uint64_t block, uint64_t bytes)
{
    const struct child_message message = {
        .verb = CHILD_UNMAP, .id = block, .other = bytes};

    (void)ask(child, &message, NULL, NULL);
}

/* ------------------------------------------------------------------- calls */

void *child_metadata(struct child *child, size_t *ret_length)
{
    const struct child_message message = {.verb = CHILD_METADATA};
    void *bytes;

    *ret_length = ask(child, &message, NULL, &bytes).length;
    return bytes;
}

int child_deregister(struct child *child, uint64_t timeout_ns)
{
    const struct child_message message = {.verb = CHILD_DEREGISTER,
                                          .id = timeout_ns};

    return ask(child, &message, NULL, NULL).code;
}

int child_register(struct child *child)
{
    const struct child_message message = {.verb = CHILD_REGISTER};

    return ask(child, &message, NULL, NULL).code;
}

int child_close(struct child *child, uint64_t timeout_ns)
{
    const struct child_message message = {.verb = CHILD_CLOSE,
                                          .id = timeout_ns};
    struct child_message answer = ask(child, &message, NULL, NULL);

    moved_bytes.local += answer.id;
    moved_bytes.nixl += answer.other;
    return answer.code;
}

int child_notify(struct child *child, kvt_peer peer, const void *bytes,
                 size_t length)
{
    const struct child_message message = {
        .verb = CHILD_NOTIFY, .id = peer, .length = (uint32_t)length};

    return ask(child, &message, bytes, NULL).code;
}

size_t child_note(struct child *child, void *buffer, size_t capacity)
{
    const struct child_message message = {.verb = CHILD_NOTE,
                                          .count = (uint32_t)capacity};
    void *bytes;
    size_t length = ask(child, &message, NULL, &bytes).length;

    assert_true(length <= capacity);
    if (length > 0) {
        memcpy(buffer, bytes, length);
    }
    free(bytes);
    return length;
}

int child_add(struct child *child, const char *name, const void *metadata,
              size_t length, kvt_peer *ret_peer)
{
    struct child_message message = {.verb = CHILD_ADD,
                                    .length = (uint32_t)length};

    copy_name(message.name, name);
    message = ask(child, &message, metadata, NULL);
    *ret_peer = message.id;
    return message.code;
}

kvt_layout child_prepare(struct child *child, kvt_peer peer,
                         const struct kvt_run *run)
{
    const struct child_message message = {
        .verb = CHILD_PREPARE, .id = peer, .length = sizeof *run};

    return ask(child, &message, run, NULL).id;
}

void child_write_on(struct child *child, kvt_peer peer, kvt_layout layout,
                    uint32_t count)
{
    const struct child_message message = {
        .verb = CHILD_WRITE_ON, .id = peer, .other = layout, .count = count};

    assert_int_equal(ask(child, &message, NULL, NULL).code, KVT_OK);
}

int child_written(struct child *child, uint64_t *ret_rounds,
                  bool *ret_quiescent)
{
    struct child_message answer;
    void *bytes;

    answer_of(child, &answer, &bytes);
    free(bytes);
    assert_int_equal(answer.verb, CHILD_WRITE_ON);
    *ret_rounds = answer.id;
    *ret_quiescent = answer.other != 0;
    return answer.code;
}
