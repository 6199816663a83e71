/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes and messages. A node of this host that is gone is seen by the end of
 * its stream. It is then killed, to be sure, and reaped: only after that can
 * nothing of it write any more. Of one on another host replay_remote.c tells.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
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

static bool start_node(struct replay *replay, struct replay_node *node)
{
    int rc = process_start(&node->control, &node->pid);

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
        .no_same_host = options->no_same_host,
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

bool nodes_started(const struct replay *replay)
{
    return all_ready(replay) && all_added(replay);
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
        if (node->role == NODE_HOLDER && replay->options.connect != NULL) {
            continue;
        }
        if (!start_node(replay, node)) {
            return false;
        }
        configure_node(replay, node);
    }
    if (replay->options.connect != NULL) {
        remote_start(replay);
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

static int reap(struct replay_node *node)
{
    int status = process_kill(node->pid);

    node->alive = false;
    proto_close(&node->control);
    return status;
}

static void tell_dead(struct replay *replay, const struct replay_node *holder,
                      bool proven)
{
    for (uint64_t i = 0; replay->options.pull && i < replay->options.fetchers;
         i++) {
        struct replay_node *fetcher = nodes_fetcher(replay, i);

        proto_begin(&fetcher->control, PROTO_PEER_DEAD);
        proto_put(&fetcher->control, holder->index);
        proto_put(&fetcher->control, proven);
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

void nodes_bury(struct replay *replay, struct replay_node *node, int status,
                bool proven)
{
    if (node->reported) {
        if (replay->remote_ending && node->remote && status != 0) {
            fail_of(replay, node, status);
        }
        return;
    }
    if (node->role == NODE_FETCHER || !nodes_started(replay)) {
        fail_of(replay, node, status);
        return;
    }
    if (!node->killed && proven) {
        cli_error("holder %llu is gone, the others go on",
                  (unsigned long long)node->index);
    }
    tell_dead(replay, node, proven);
    flow_holder_dead(replay, node, proven);
}

void nodes_kill(struct replay *replay, struct replay_node *holder)
{
    if (!holder->alive) {
        return;
    }
    holder->killed = true;
    if (holder->remote) {
        remote_kill(replay, holder);
    } else {
        /* Its number is not another's: it was not reaped yet. */
        (void)kill(holder->pid, SIGKILL);
    }
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
        if (node->remote) {
            cli_make_plain(replay->metrics_text, length, true);
        }
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

bool nodes_hear(struct replay *replay, struct replay_node *node)
{
    struct proto_message message;
    int rc;

    while ((rc = proto_next(&node->control, &message)) > 0) {
        handle(replay, node, &message);
    }
    return rc == 0;
}

static void receive(struct replay *replay, struct replay_node *node)
{
    bool connected = proto_fill(&node->control);

    if (!nodes_hear(replay, node) || !connected) {
        nodes_bury(replay, node, reap(node), true);
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
    struct pollfd fds[REPLAY_NODES_MAX + 2];
    uint64_t count = replay->node_count;

    if (!remote_send(replay)) {
        return; /* what follows from that must not wait for a message */
    }
    for (uint64_t i = 0; i < count; i++) {
        struct replay_node *node = &replay->nodes[i];

        /* What can't be sent now, or ever: the poll below sees which. */
        if (node->alive && !node->remote) {
            (void)proto_flush(&node->control);
        }
        fds[i] = (struct pollfd){
            .fd = node->alive ? node->control.fd : -1, /* -1 if remote */
            .events = POLLIN,
        };
        if (proto_unsent(&node->control)) {
            fds[i].events |= POLLOUT;
        }
    }
    fds[count] = (struct pollfd){.fd = replay->signal_fd, .events = POLLIN};
    fds[count + 1] = (struct pollfd){
        .fd = replay->link.proto.fd,
        .events = proto_unsent(&replay->link.proto) ? POLLIN | POLLOUT : POLLIN,
    };
    if (poll(fds, count + 2,
             cli_earlier_ms(timeout_ms, link_wait_ms(&replay->link))) <= 0) {
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
    if ((fds[count + 1].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        remote_receive(replay);
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

static void end_remote(struct replay *replay)
{
    remote_end(replay);
    while (nodes_holders_alive(replay) > 0 && replay->failure[0] == '\0') {
        nodes_turn(replay, -1);
    }
}

/* Closes the sockets of one role, which ends the nodes, and waits for them. */
static void end_role(struct replay *replay, enum node_role role)
{
    if (role == NODE_HOLDER && replay->options.connect != NULL) {
        end_remote(replay);
        return;
    }
    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (replay->nodes[i].role == role && replay->nodes[i].alive) {
            proto_close(&replay->nodes[i].control);
        }
    }
    for (uint64_t i = 0; i < replay->node_count; i++) {
        struct replay_node *node = &replay->nodes[i];
        int status;

        if (node->role != role || !node->alive) {
            continue;
        }
        status = process_wait(node->pid);
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
    if (link_is_open(&replay->link)) {
        remote_abort(replay, replay->failure[0] != '\0' ? replay->failure
                                                        : "interrupted");
    }
    for (uint64_t i = 0; i < replay->node_count; i++) {
        if (replay->nodes[i].alive) {
            (void)reap(&replay->nodes[i]);
        }
    }
}
