/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes and messages. A node is this program again, started with a hidden
 * word and its end of a socket pair; the coordinator has opened no transport,
 * so nothing of kvt is ever forked.
 *
 * A node that is gone is seen by the end of its stream. It is then killed, to
 * be sure, and reaped: only after that can nothing of it write any more.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "replay.h"

struct replay_node *nodes_holder(struct replay *replay, uint64_t index)
{
    return &replay->nodes[index];
}

struct replay_node *nodes_fetcher(struct replay *replay, uint64_t index)
{
    return &replay->nodes[replay->options.holders + index];
}

uint64_t nodes_holders_alive(const struct replay *replay)
{
    uint64_t alive = 0;

    for (uint64_t i = 0; i < replay->options.holders; i++) {
        alive += replay->nodes[i].alive;
    }
    return alive;
}

static const char *role_name(const struct replay_node *node)
{
    return node->role == NODE_HOLDER ? "holder" : "fetcher";
}

static bool moves_blocks(const struct replay *replay,
                         const struct replay_node *node)
{
    return (node->role == NODE_FETCHER) == replay->options.pull;
}

/* -------------------------------------------------------------------- start */

/* Starts the process with its end of the pair as descriptor NODE_FD. */
static int spawn_process(int fd, pid_t *ret)
{
    static char program[] = "kvt";
    static char word[] = NODE_WORD;
    char *argv[] = {program, word, NULL};
    posix_spawn_file_actions_t actions;
    int rc = posix_spawn_file_actions_init(&actions);

    if (rc != 0) {
        return rc;
    }
    /* Also where fd is NODE_FD already: then it takes close-on-exec away. */
    rc = posix_spawn_file_actions_adddup2(&actions, fd, NODE_FD);
    if (rc == 0) {
        rc = posix_spawn(ret, "/proc/self/exe", &actions, NULL, argv, environ);
    }
    (void)posix_spawn_file_actions_destroy(&actions);
    return rc;
}

static bool start_node(struct replay *replay, struct replay_node *node)
{
    int pair[2];
    int rc;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                   pair) != 0) {
        replay_fail(replay, "no socket for a process: %s", strerror(errno));
        return false;
    }
    rc = spawn_process(pair[1], &node->pid);
    (void)close(pair[1]);
    proto_open(&node->control, pair[0]);
    if (rc != 0) {
        replay_fail(replay, "a process cannot be started: %s", strerror(rc));
        return false;
    }
    node->alive = true;
    return true;
}

static void configure_node(struct replay *replay, struct replay_node *node)
{
    const struct replay_options *options = &replay->options;
    bool holder = node->role == NODE_HOLDER;
    struct node_config config = {
        .role = node->role,
        .index = node->index,
        .pull = options->pull,
        .shm = options->shm,
        .workers = options->workers,
        .timeout_ns = (uint64_t)(options->timeout_s * 1e9),
        .requests = options->inflight,
        .peers = holder ? options->fetchers : options->holders,
        .slots = replay->slots,
        .corrupt = holder ? (uint64_t)CORRUPT_NOTHING : options->corrupt,
        .secret = node->secret,
        .geometry = replay->geometry,
    };

    (void)snprintf(config.engine, sizeof(config.engine), "%s", options->engine);
    node->local = cli_alloc(config.peers, sizeof(*node->local));
    proto_begin(&node->control, PROTO_CONFIG);
    node_config_put(&node->control, &config);
    proto_end(&node->control);
}

static void introduce(struct replay_node *node, const struct replay_node *peer)
{
    proto_begin(&node->control, PROTO_PEER);
    proto_put(&node->control, peer->index);
    proto_put(&node->control, peer->pool);
    proto_put_bytes(&node->control, peer->metadata, peer->metadata_length);
    proto_end(&node->control);
}

static bool all_ready(const struct replay *replay)
{
    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (!replay->nodes[i].ready) {
            return false;
        }
    }
    return true;
}

static bool all_added(const struct replay *replay)
{
    const struct replay_options *options = &replay->options;

    for (uint64_t i = 0; i < replay->node_count; i++) {
        const struct replay_node *node = &replay->nodes[i];
        uint64_t peers = options->pull ? options->holders : options->fetchers;

        if (moves_blocks(replay, node) && node->added < peers) {
            return false;
        }
    }
    return true;
}

/* Waits for a stage of the start; false when it will not come. */
static bool wait_until(struct replay *replay,
                       bool (*reached)(const struct replay *))
{
    while (!reached(replay)) {
        if (replay->failure[0] != '\0' || replay->interrupted) {
            return false;
        }
        nodes_turn(replay, -1);
    }
    return true;
}

bool nodes_start(struct replay *replay)
{
    uint64_t holders = replay->options.holders;

    for (uint64_t i = 0; i < replay->node_count; i++) {
        struct replay_node *node = &replay->nodes[i];

        node->role = i < holders ? NODE_HOLDER : NODE_FETCHER;
        node->index = i < holders ? i : i - holders;
        node->secret = cli_mix(replay->options.seed, i + 1);
        if (!start_node(replay, node)) {
            return false;
        }
        configure_node(replay, node);
    }
    if (!wait_until(replay, all_ready)) {
        return false;
    }
    for (uint64_t i = 0; i < replay->node_count; i++) {
        for (uint64_t j = 0; j < replay->node_count; j++) {
            struct replay_node *node = &replay->nodes[i];

            /* Only who starts transfers has to know the other side. */
            if (moves_blocks(replay, node) &&
                node->role != replay->nodes[j].role) {
                introduce(node, &replay->nodes[j]);
            }
        }
    }
    return wait_until(replay, all_added);
}

/* --------------------------------------------------------------- one's death */

static void reap(struct replay_node *node, int *ret_status)
{
    (void)kill(node->pid, SIGKILL);
    while (waitpid(node->pid, ret_status, 0) < 0 && errno == EINTR) {
    }
    node->alive = false;
    proto_close(&node->control);
}

static void tell_dead(struct replay *replay, const struct replay_node *holder)
{
    for (uint64_t i = 0; replay->options.pull && i < replay->options.fetchers;
         i++) {
        struct replay_node *fetcher = nodes_fetcher(replay, i);

        proto_begin(&fetcher->control, PROTO_PEER_DEAD);
        proto_put(&fetcher->control, holder->index);
        proto_end(&fetcher->control);
    }
}

static void fail_of(struct replay *replay, const struct replay_node *node,
                    int status)
{
    replay_fail(replay, "%s %llu ended by itself (%s %d)", role_name(node),
                (unsigned long long)node->index,
                WIFSIGNALED(status) ? "signal" : "exit status",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static void lose_node(struct replay *replay, struct replay_node *node)
{
    int status = 0;

    reap(node, &status);
    if (node->reported) {
        return;
    }
    if (node->role == NODE_FETCHER || !all_ready(replay) ||
        !all_added(replay)) {
        fail_of(replay, node, status);
        return;
    }
    if (!node->killed) {
        cli_error("holder %llu is gone, the others go on",
                  (unsigned long long)node->index);
    }
    tell_dead(replay, node);
    flow_holder_dead(replay, node);
}

/* ----------------------------------------------------------------- messages */

static void take_ready(struct replay_node *node, struct proto_message *message)
{
    const void *bytes;
    size_t length;

    node->pool = proto_take(message);
    bytes = proto_take_bytes(message, &length);
    free(node->metadata);
    node->metadata = cli_alloc(length, 1);
    memcpy(node->metadata, bytes, length);
    node->metadata_length = length;
    node->ready = true;
}

static void take_added(const struct replay *replay, struct replay_node *node,
                       struct proto_message *message)
{
    uint64_t peer = proto_take(message);
    uint64_t peers = node->role == NODE_HOLDER ? replay->options.fetchers
                                               : replay->options.holders;
    char path[16];

    proto_take_text(message, path, sizeof(path));
    if (peer >= peers) {
        message->damaged = true;
        return;
    }
    node->local[peer] = strcmp(path, "local") == 0;
    node->added++;
}

static void take_report(struct replay *replay, struct replay_node *node,
                        struct proto_message *message)
{
    const void *text;
    size_t length;

    replay->totals.wrong_at_end += proto_take(message);
    text = proto_take_bytes(message, &length);
    if (length > 0) {
        free(replay->metrics_text);
        replay->metrics_text = cli_alloc(length, 1);
        memcpy(replay->metrics_text, text, length);
        replay->metrics_length = length;
    }
    node->reported = true;
}

static void handle(struct replay *replay, struct replay_node *node,
                   struct proto_message *message)
{
    char text[CLI_TEXT_MAX];

    switch (message->type) {
    case PROTO_READY:
        take_ready(node, message);
        break;
    case PROTO_ADDED:
        take_added(replay, node, message);
        break;
    case PROTO_REPORT:
        take_report(replay, node, message);
        break;
    case PROTO_ERROR:
        proto_take_text(message, text, sizeof(text));
        replay_fail(replay, "%s %llu: %s", role_name(node),
                    (unsigned long long)node->index, text);
        break;
    default:
        message->damaged = !flow_message(replay, node, message);
        break;
    }
    if (message->damaged) {
        replay_fail(replay, "message %u of %s %llu is damaged", message->type,
                    role_name(node), (unsigned long long)node->index);
    }
}

static void receive(struct replay *replay, struct replay_node *node)
{
    struct proto_message message;
    bool connected = proto_fill(&node->control);
    int rc;

    while ((rc = proto_next(&node->control, &message)) > 0) {
        handle(replay, node, &message);
    }
    if (rc < 0 || !connected) {
        lose_node(replay, node);
    }
}

/* The first signal ends the run in order, the second at once. */
static void take_signal(struct replay *replay)
{
    struct signalfd_siginfo info;

    if (read(replay->signal_fd, &info, sizeof(info)) != sizeof(info)) {
        return;
    }
    if (replay->interrupted) {
        nodes_kill_all(replay);
        cli_error("interrupted twice, nothing is reported");
        exit(CLI_INTERRUPTED);
    }
    replay->interrupted = true;
}

void nodes_turn(struct replay *replay, int timeout_ms)
{
    struct pollfd fds[REPLAY_NODES_MAX + 1];
    uint64_t count = replay->node_count;

    for (uint64_t i = 0; i < count; i++) {
        struct replay_node *node = &replay->nodes[i];

        /* What can't be sent now, or ever: the poll below sees which. */
        if (node->alive) {
            (void)proto_flush(&node->control);
        }
        fds[i] = (struct pollfd){
            .fd = node->alive ? node->control.fd : -1,
            .events = POLLIN,
        };
        if (proto_unsent(&node->control)) {
            fds[i].events |= POLLOUT;
        }
    }
    fds[count] = (struct pollfd){.fd = replay->signal_fd, .events = POLLIN};
    if (poll(fds, count + 1, timeout_ms) <= 0) {
        return;
    }
    if (fds[count].revents != 0) {
        take_signal(replay);
    }
    for (uint64_t i = 0; i < count; i++) {
        if ((fds[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0 &&
            replay->nodes[i].alive) {
            receive(replay, &replay->nodes[i]);
        }
    }
}

/* ---------------------------------------------------------------------- end */

static bool all_reported(const struct replay *replay)
{
    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (replay->nodes[i].alive && !replay->nodes[i].reported) {
            return false;
        }
    }
    return true;
}

/* Closes the sockets of one role, which ends the nodes, and waits for them. */
static void end_role(struct replay *replay, enum node_role role)
{
    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (replay->nodes[i].role == role && replay->nodes[i].alive) {
            proto_close(&replay->nodes[i].control);
        }
    }
    for (uint64_t i = 0; i < replay->node_count; i++) {
        struct replay_node *node = &replay->nodes[i];

        int status = 0;

        if (node->role != role || !node->alive) {
            continue;
        }
        while (waitpid(node->pid, &status, 0) < 0 && errno == EINTR) {
        }
        node->alive = false;
        if (status != 0) {
            fail_of(replay, node, status);
        }
    }
}

void nodes_end(struct replay *replay)
{
    bool wants_metrics = replay->metrics_file != NULL;

    for (uint64_t i = 0; i < replay->node_count; i++) {
        struct replay_node *node = &replay->nodes[i];
        bool metrics = wants_metrics && moves_blocks(replay, node);

        if (!node->alive) {
            continue;
        }
        wants_metrics = wants_metrics && !metrics;
        proto_begin(&node->control, PROTO_FINISH);
        proto_put(&node->control, metrics);
        proto_end(&node->control);
    }
    while (!all_reported(replay) && replay->failure[0] == '\0') {
        nodes_turn(replay, -1);
    }
    if (replay->failure[0] != '\0') {
        nodes_kill_all(replay);
        return;
    }
    /* Who writes goes before whom it writes to. */
    end_role(replay, replay->options.pull ? NODE_FETCHER : NODE_HOLDER);
    end_role(replay, replay->options.pull ? NODE_HOLDER : NODE_FETCHER);
}

void nodes_kill_all(struct replay *replay)
{
    int status;

    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (replay->nodes[i].alive) {
            reap(&replay->nodes[i], &status);
        }
    }
}
