/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second process: one node, and a loop that does what it is told. An
 * assertion that fails here ends the process, which the other side sees.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "child_wire.h"
#include "two_process.h"

static bool write_all(int fd, const void *data, size_t length)
{
    const char *at = data;

    while (length > 0) {
        ssize_t sent = send(fd, at, length, MSG_NOSIGNAL);

        if (sent <= 0) {
            return false;
        }
        at += sent;
        length -= (size_t)sent;
    }
    return true;
}

static bool read_all(int fd, void *data, size_t length)
{
    char *at = data;

    while (length > 0) {
        ssize_t got = recv(fd, at, length, 0);

        if (got <= 0) {
            return false;
        }
        at += got;
        length -= (size_t)got;
    }
    return true;
}

bool child_send(int fd, const struct child_message *message, const void *bytes)
{
    return write_all(fd, message, sizeof *message) &&
           (message->length == 0 || write_all(fd, bytes, message->length));
}

bool child_receive(int fd, struct child_message *message, void **ret_bytes)
{
    char *bytes = NULL;

    *ret_bytes = NULL;
    if (!read_all(fd, message, sizeof *message) ||
        message->length > CHILD_BYTES_MAX) {
        return false;
    }
    if (message->length > 0) {
        bytes = malloc(message->length);
        if (bytes == NULL || !read_all(fd, bytes, message->length)) {
            free(bytes);
            return false;
        }
    }
    *ret_bytes = bytes;
    return true;
}

/* ------------------------------------------------------------------- verbs */

static void open_node(struct node *node, struct child_message *message,
                      const struct child_plan *wire)
{
    struct node_plan plan = {.engine = wire->engine,
                             .name = message->name[0] == '\0' ? NULL
                                                              : message->name,
                             .shape = wire->shape,
                             .seed = wire->seed};

    plan.options.flags = wire->flags;
    plan.options.grace_ns = wire->grace_ns;
    plan.options.notify_max = wire->notify_max;
    node_open(node, &plan);
    message->id = (uintptr_t)pool_block(&node->pool, 0);
}

static void add(const struct node *node, struct child_message *message,
                const void *bytes)
{
    const struct kvt_peer_params params = {.size = sizeof params,
                                           .name = message->name,
                                           .metadata = bytes,
                                           .metadata_length = message->length};
    struct kvt_error err = {0};

    message->code = kvt_peer_add(node->t, &params, &message->id, &err);
    if (message->code != KVT_OK) {
        (void)fprintf(stderr, "    child: %s\n", err.text);
    }
}

static void prepare(const struct node *node, struct child_message *message,
                    const void *bytes)
{
    struct kvt_run run;
    kvt_layout layout;

    memcpy(&run, bytes, sizeof run);
    assert_kvt_ok(
        kvt_prepare(node->t, message->id, "remote", &run, 1, &layout, ERR));
    message->id = layout;
}

/* One round; false when it was the last. */
static bool write_round(const struct node *node,
                        const struct child_message *asked,
                        const struct kvt_indices *indices,
                        struct child_message *answer)
{
    struct kvt_result result;
    kvt_xfer id;

    answer->code = kvt_write_blocks(node->t, asked->id, node->layout, indices,
                                    asked->other, indices, NULL, &id, NULL);
    if (answer->code != KVT_OK) {
        return false;
    }
    wait_results(node->t, asked->id, &result, 1);
    answer->code = result.code;
    answer->other = (result.flags & KVT_QUIESCENT) != 0;
    return result.state == KVT_DONE;
}

static void write_on(int fd, const struct node *node,
                     struct child_message *message)
{
    const struct child_message asked = *message;
    uint32_t *data = calloc(asked.count, sizeof *data);
    struct kvt_indices indices = indices_u32(data, asked.count);

    assert_non_null(data);
    for (uint32_t i = 0; i < asked.count; i++) {
        data[i] = i;
    }
    message->id = 0;
    message->other = 1;
    while (write_round(node, &asked, &indices, message)) {
        if (message->id++ == 0 && !child_send(fd, message, NULL)) {
            _exit(1);
        }
    }
    free(data);
}

static void send_note(const struct node *node, struct child_message *message,
                      const void *bytes)
{
    message->code = kvt_notify(node->t, message->id, bytes, message->length,
                               NULL);
}

static void unmap(const struct node *node, const struct child_message *message)
{
    assert_int_equal(
        munmap(pool_block(&node->pool, message->id), (size_t)message->other),
        0);
}

static void start_over(int fd)
{
    char number[16];
    char name[] = "child";
    char argument[] = CHILD_ARGUMENT;
    char *argv[] = {name, argument, number, NULL};

    (void)snprintf(number, sizeof number, "%d", fd);
    (void)execv("/proc/self/exe", argv);
    _exit(1);
}

static void fork_idle(void)
{
    pid_t pid = fork();

    if (pid == 0) {
        _exit(0);
    }
    assert_true(pid > 0 && waitpid(pid, NULL, 0) == pid);
}

/* That user's home is not ours; libraries look into it. */
static int become_user(uint32_t id)
{
    return setenv("HOME", "/", 1) == 0 && setgid(id) == 0 && setuid(id) == 0
               ? KVT_OK
               : KVT_EPERM;
}

/* Sets the answer; *ret_bytes is malloc()ed or NULL. */
static void obey(int fd, struct node *node, struct child_message *message,
                 const void *bytes, void **ret_bytes)
{
    struct kvt_region region;
    size_t length = 0;

    message->code = KVT_OK;
    switch (message->verb) {
    case CHILD_OPEN:
        open_node(node, message, bytes);
        break;
    case CHILD_METADATA:
        *ret_bytes = node_metadata(node, &length);
        break;
    case CHILD_ADD:
        add(node, message, bytes);
        break;
    case CHILD_PREPARE:
        prepare(node, message, bytes);
        break;
    case CHILD_WRITE_ON:
        write_on(fd, node, message);
        break;
    case CHILD_FETCH:
        length = node->pool.bytes;
        *ret_bytes = malloc(length);
        assert_non_null(*ret_bytes);
        memcpy(*ret_bytes, node->pool.memory, length);
        break;
    case CHILD_FILL:
        pool_fill(&node->pool, message->id);
        break;
    case CHILD_UNMAP:
        unmap(node, message);
        break;
    case CHILD_REGISTER:
        region = pool_region(&node->pool);
        message->code = kvt_register(node->t, &region, 1, 0, NULL);
        break;
    case CHILD_DEREGISTER:
        region = pool_region(&node->pool);
        message->code = kvt_deregister(node->t, &region, 1, message->id, NULL);
        break;
    case CHILD_CLOSE:
        message->code = kvt_close(node->t, message->id, NULL);
        message->id = stats_of(node->t).bytes_local;
        message->other = stats_of(node->t).bytes_nixl;
        break;
    case CHILD_NOTIFY:
        send_note(node, message, bytes);
        break;
    case CHILD_NOTE:
        *ret_bytes = malloc((size_t)message->count + 1);
        length = wait_note(node->t, *ret_bytes, message->count).length;
        break;
    case CHILD_FIX_ADDRESSES:
        assert_true(personality(ADDR_NO_RANDOMIZE) != -1);
        break;
    case CHILD_FORK:
        fork_idle();
        break;
    case CHILD_DROP_USER:
        message->code = become_user((uint32_t)message->id);
        break;
    default:
        break;
    }
    message->length = (uint32_t)length;
}

static void serve(int fd)
{
    struct node node = {0};
    struct child_message message;
    void *bytes;

    while (child_receive(fd, &message, &bytes)) {
        void *answer = NULL;

        obey(fd, &node, &message, bytes, &answer);
        free(bytes);
        if (!child_send(fd, &message, answer)) {
            break;
        }
        free(answer);
        if (message.verb == CHILD_EXEC) {
            start_over(fd);
        }
        if (message.verb == CHILD_EXIT) {
            kvt_free(node.t);
            pool_close(&node.pool);
            return;
        }
    }
    _exit(1);
}

void child_main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], CHILD_ARGUMENT) == 0) {
        serve((int)strtol(argv[2], NULL, 10));
        exit(0); /* NOLINT(concurrency-mt-unsafe) */
    }
}
