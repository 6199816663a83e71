/* SPDX-License-Identifier: Apache-2.0 */
#include "node.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli.h"

/* The numbers of a config in the order of the wire. */
#define CONFIG_NUMBERS(X)                                                      \
    X(role)                                                                    \
    X(index)                                                                   \
    X(pull)                                                                    \
    X(shm)                                                                     \
    X(workers)                                                                 \
    X(timeout_ns)                                                              \
    X(requests)                                                                \
    X(peers)                                                                   \
    X(slots)                                                                   \
    X(corrupt)                                                                 \
    X(secret)                                                                  \
    X(no_same_host)                                                            \
    X(remote)                                                                  \
    X(geometry.regions)                                                        \
    X(geometry.pages)                                                          \
    X(geometry.page_bytes)                                                     \
    X(geometry.page_tokens)

#define REPORT_NUMBERS(X)                                                      \
    X(state)                                                                   \
    X(own_final)                                                               \
    X(peer_final)                                                              \
    X(bytes)                                                                   \
    X(pages)                                                                   \
    X(copies)                                                                  \
    X(start_ns)                                                                \
    X(submit_ns)                                                               \
    X(preempted)                                                               \
    X(latency_ns)                                                              \
    X(bytes_local)                                                             \
    X(bytes_nixl)

void node_config_put(struct proto *proto, const struct node_config *config)
{
#define PUT(field) proto_put(proto, config->field);
    CONFIG_NUMBERS(PUT)
#undef PUT
    proto_put_bytes(proto, config->engine, strlen(config->engine));
}

void node_config_take(struct proto_message *message, struct node_config *ret)
{
    const void *engine;
    size_t length;

#define TAKE(field) ret->field = proto_take(message);
    CONFIG_NUMBERS(TAKE)
#undef TAKE
    /* Byte for byte: it may name a file. */
    engine = proto_take_bytes(message, &length);
    if (length >= sizeof(ret->engine)) {
        message->damaged = true;
        length = 0;
    }
    if (length > 0) {
        memcpy(ret->engine, engine, length);
    }
    ret->engine[length] = '\0';
}

void move_report_put(struct proto *proto, const struct move_report *report)
{
#define PUT(field) proto_put(proto, report->field);
    REPORT_NUMBERS(PUT)
#undef PUT
    proto_put_bytes(proto, report->text, strlen(report->text));
}

void move_report_take(struct proto_message *message, struct move_report *ret)
{
#define TAKE(field) ret->field = proto_take(message);
    REPORT_NUMBERS(TAKE)
#undef TAKE
    proto_take_text(message, ret->text, sizeof(ret->text));
}

uint64_t node_block_key(uint64_t secret, uint64_t id)
{
    return cli_mix(secret, id + 1);
}

void node_fail(struct node *node, const char *format, ...)
{
    struct pollfd out = {.fd = node->control.fd, .events = POLLOUT};
    char text[CLI_TEXT_MAX];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    proto_begin(&node->control, PROTO_ERROR);
    proto_put_bytes(&node->control, text, strlen(text));
    proto_end(&node->control);
    while (proto_flush(&node->control) && proto_unsent(&node->control)) {
        (void)poll(&out, 1, -1);
    }
    /* At once: a transport that failed may not close in finite time. */
    _exit(CLI_FAILED);
}

static void open_transport(struct node *node)
{
    const struct node_config *config = &node->config;
    struct kvt_error err = {0};
    char name[64];
    char title[16]; /* what the kernel keeps */
    struct kvt_options options = {
        .size = sizeof(options),
        /* A holder and a fetcher are siblings, and Yama's scope 1 lets only
         * parents write their children. */
        .flags = KVT_OPEN_ALLOW_PTRACE |
                 (config->no_same_host != 0 ? (uint32_t)KVT_OPEN_NO_SAME_HOST
                                            : 0u),
        .engine = config->engine,
        .agent_name = name,
        .workers = (uint32_t)config->workers,
    };

    /* Not a name that another run on this host has too. */
    (void)snprintf(name, sizeof(name), "%s-%llu-%ld",
                   config->role == NODE_HOLDER ? "holder" : "fetcher",
                   (unsigned long long)config->index, (long)getpid());
    /* In ps and top: the kernel would say "exe". */
    (void)snprintf(title, sizeof(title), "kvt-%.5s-%u",
                   config->role == NODE_HOLDER ? "hold" : "fetch",
                   (unsigned int)(config->index % 1000));
    (void)prctl(PR_SET_NAME, title, 0, 0, 0);
    if (kvt_open(&options, &node->transport, &err) != KVT_OK) {
        node_fail(node, "the engine \"%s\" does not start: %s", config->engine,
                  err.text);
    }
}

static void open_pool(struct node *node)
{
    struct kvt_error err = {0};
    struct kvt_region *regions;

    if (kvpool_open(&node->pool, &node->config.geometry, node->config.slots,
                    node->config.shm != 0, &err) != KVT_OK) {
        node_fail(node, "%s", err.text);
    }
    slots_open(&node->slots, (uint32_t)node->config.slots);
    regions = kvpool_regions(&node->pool);
    if (kvt_register(node->transport, regions, node->config.geometry.regions, 0,
                     &err) != KVT_OK) {
        node_fail(node, "the pool cannot be registered: %s", err.text);
    }
    free(regions);
}

/* Sends what the other nodes need to know of this one. */
static void announce(struct node *node)
{
    struct kvt_error err = {0};
    unsigned char *metadata = NULL;
    size_t capacity = 4096;
    size_t length = 0;
    int rc;

    do {
        free(metadata);
        metadata = cli_alloc(capacity, 1);
        rc = kvt_metadata(node->transport, metadata, capacity, &length, &err);
        capacity = length;
    } while (rc == KVT_ERANGE);
    if (rc != KVT_OK) {
        node_fail(node, "there is no metadata: %s", err.text);
    }
    proto_begin(&node->control, PROTO_READY);
    proto_put(&node->control, (uint64_t)(uintptr_t)node->pool.base);
    proto_put_bytes(&node->control, metadata, length);
    proto_end(&node->control);
    free(metadata);
}

static void start(struct node *node, struct proto_message *message)
{
    node_config_take(message, &node->config);
    if (message->damaged) {
        return;
    }
    if (node->config.remote != 0) {
        node->control.payload_max = PROTO_PAYLOAD_MAX_REMOTE;
    }
    open_transport(node);
    open_pool(node);
    mover_open(node);
    if (node->config.role == NODE_HOLDER) {
        holder_open(node);
    } else {
        fetcher_open(node);
    }
    announce(node);
}

/* The last check: nothing that is at rest has changed, nor any guard. */
static void finish(struct node *node, struct proto_message *message)
{
    bool metrics = proto_take(message) != 0;
    uint64_t wrong = node->config.role == NODE_HOLDER ? holder_sweep(node)
                                                      : fetcher_sweep(node);
    char *text = NULL;
    size_t length = 0;

    if (!kvpool_guards_intact(&node->pool)) {
        wrong++;
    }
    if (metrics &&
        kvt_metrics(node->transport, NULL, 0, &length) == KVT_ERANGE) {
        /* Numbers may get longer between two calls. */
        size_t capacity = length + 4096;

        text = cli_alloc(capacity, 1);
        if (kvt_metrics(node->transport, text, capacity, &length) != KVT_OK) {
            length = 0;
        }
    }
    proto_begin(&node->control, PROTO_REPORT);
    proto_put(&node->control, wrong);
    proto_put_bytes(&node->control, text, length);
    proto_end(&node->control);
    free(text);
}

/* The first message is the configuration, and no other one is: it comes from
 * the process that started this one, within the limits of its user, but what
 * follows may come through a link from anybody. */
static void check_order(struct node *node, const struct proto_message *message)
{
    if (message->type != PROTO_CONFIG && node->transport == NULL) {
        node_fail(node, "message %u came before the configuration",
                  message->type);
    }
    if (message->type == PROTO_CONFIG && node->transport != NULL) {
        node_fail(node, "a second configuration came");
    }
}

/* Whether this message is for a node of the other role. */
static bool is_for_other(const struct node *node, uint32_t type)
{
    switch (type) {
    case PROTO_PREPARE:
    case PROTO_UNPIN:
        return node->holder == NULL;
    case PROTO_WANT:
    case PROTO_LANDED:
    case PROTO_AGAIN:
    case PROTO_DROP:
        return node->fetcher == NULL;
    default:
        return false;
    }
}

static void handle(struct node *node, struct proto_message *message)
{
    check_order(node, message);
    if (is_for_other(node, message->type)) {
        node_fail(node, "message %u is not for this role", message->type);
    }
    switch (message->type) {
    case PROTO_CONFIG:
        start(node, message);
        break;
    case PROTO_PEER:
        mover_add_peer(node, message);
        break;
    case PROTO_PEER_DEAD:
        mover_peer_dead(node, message);
        break;
    case PROTO_MOVE:
        mover_move(node, message);
        break;
    case PROTO_PREPARE:
        holder_prepare(node, message);
        break;
    case PROTO_UNPIN:
        holder_unpin(node, message);
        break;
    case PROTO_WANT:
        fetcher_want(node, message);
        break;
    case PROTO_LANDED:
        fetcher_landed(node, message);
        break;
    case PROTO_AGAIN:
        fetcher_again(node, message);
        break;
    case PROTO_DROP:
        fetcher_drop(node, message);
        break;
    case PROTO_FINISH:
        finish(node, message);
        break;
    default:
        message->damaged = true;
        break;
    }
    if (message->damaged) {
        node_fail(node, "message %u is damaged", message->type);
    }
}

/* Sleeps until something can be done. */
static void wait_for_work(struct node *node)
{
    struct pollfd fds[2] = {
        {.fd = node->control.fd, .events = POLLIN},
        {.fd = -1, .events = POLLIN},
    };

    if (proto_unsent(&node->control)) {
        fds[0].events |= POLLOUT;
    }
    if (node->transport != NULL) {
        fds[1].fd = kvt_fd(node->transport);
    }
    (void)poll(fds, 2, -1);
}

static void run(struct node *node)
{
    struct proto_message message;
    bool connected = true;

    while (connected && proto_flush(&node->control)) {
        int rc = 0;

        wait_for_work(node);
        connected = proto_fill(&node->control);
        while (connected && (rc = proto_next(&node->control, &message)) > 0) {
            handle(node, &message);
            /* A message may mean long work; finished transfers free slots. */
            mover_drain(node);
        }
        if (rc < 0) {
            node_fail(node, "the stream of messages is damaged");
        }
        mover_drain(node);
    }
}

int node_main(void)
{
    struct node node = {0};
    struct kvt_error err = {0};
    int type = 0;
    socklen_t length = sizeof(type);
    int rc = KVT_OK;

    if (getsockopt(NODE_FD, SOL_SOCKET, SO_TYPE, &type, &length) != 0) {
        cli_error("\"" NODE_WORD "\" is started by 'kvt replay' only");
        return CLI_USAGE;
    }
    proto_open(&node.control, NODE_FD, PROTO_PAYLOAD_MAX);
    run(&node);
    if (node.transport != NULL) {
        rc = kvt_close(node.transport, 0, &err);
    }
    if (rc != KVT_OK) {
        /* Somebody may still write to the pool, so it must stay mapped. The
         * blocks in question were reported as lost: that is no news. The text
         * may have names that a peer gave itself. */
        cli_make_plain(err.text, strlen(err.text), false);
        cli_error("%s", err.text);
        _exit(CLI_OK);
    }
    kvt_free(node.transport);
    mover_close(&node);
    holder_close(&node);
    fetcher_close(&node);
    slots_close(&node.slots);
    kvpool_close(&node.pool);
    proto_close(&node.control);
    return CLI_OK;
}
