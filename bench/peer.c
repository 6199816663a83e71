/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A child talks with its parent over a socket pair. It says hello with its
 * address and its metadata, and then obeys one letter after the other, each
 * answered by one byte:
 *
 *   m  our metadata follows: it adds us as a peer
 *   f  it writes to us, four transfers at a time, until
 *   s  comes; what is under way then ends first
 *
 * Between them it sleeps in poll(), on the socket alone where it does not
 * write.
 */
#include "peer.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define METADATA_MAX (UINT64_C(1) << 20)
#define FLOOD_INFLIGHT 4u

struct hello {
    uint64_t addr;
    uint64_t bytes;
    uint64_t metadata_length;
};

static bool fail(const char *what, const struct kvt_error *err)
{
    cli_error("bench: %s: %s", what, err->text);
    return false;
}

/* -------------------------------------------------------------------- nodes */

bool node_open(const char *engine, const char *name, enum bench_kind kind,
               uint64_t bytes, struct node *ret)
{
    struct kvt_options options = {
        .size = sizeof(options), .engine = engine, .agent_name = name};
    struct kvt_region region = {.length = bytes, .kind = KVT_DRAM};
    struct kvt_error err = {0};

    if (kvt_open(&options, &ret->transport, &err) != KVT_OK) {
        return fail("the engine does not start", &err);
    }
    if (!bench_area_open(kind, bytes, &ret->area)) {
        return false;
    }
    region.addr = (uint64_t)(uintptr_t)ret->area.at;
    if (kind != BENCH_ANON) {
        region.flags = KVT_REGION_FD;
        region.fd = ret->area.fd;
    }
    return kvt_register(ret->transport, &region, 1, 0, &err) == KVT_OK ||
           fail("memory cannot be registered", &err);
}

void node_close(struct node *node)
{
    if (node->transport != NULL) {
        (void)kvt_close(node->transport, UINT64_C(5000000000), NULL);
        kvt_free(node->transport);
    }
    node->transport = NULL;
}

static void *copy_metadata(const struct node *node, uint64_t *ret_length)
{
    void *metadata = cli_alloc(1, METADATA_MAX);
    struct kvt_error err = {0};
    size_t length;

    if (kvt_metadata(node->transport, metadata, METADATA_MAX, &length, &err) !=
        KVT_OK) {
        (void)fail("there is no metadata", &err);
        free(metadata);
        return NULL;
    }
    *ret_length = length;
    return metadata;
}

static bool add(struct node *node, const char *name, const void *metadata,
                uint64_t length, kvt_peer *ret)
{
    struct kvt_peer_params params = {.size = sizeof(params),
                                     .name = name,
                                     .metadata = metadata,
                                     .metadata_length = length};
    struct kvt_error err = {0};

    return kvt_peer_add(node->transport, &params, ret, &err) == KVT_OK ||
           fail("a peer cannot be added", &err);
}

/* ---------------------------------------------------------------- the child */

struct child {
    struct node node;
    int socket;
    kvt_peer parent;
    struct hello target; /* the parent's memory */
    unsigned inflight;
    bool flooding;
};

static bool greet(struct child *child)
{
    struct hello hello = {
        .addr = (uint64_t)(uintptr_t)child->node.area.at,
        .bytes = child->node.area.bytes,
    };
    void *metadata = copy_metadata(&child->node, &hello.metadata_length);
    bool good = metadata != NULL &&
                bench_send(child->socket, &hello, sizeof(hello)) &&
                bench_send(child->socket, metadata, hello.metadata_length);

    free(metadata);
    return good;
}

static bool learn(struct child *child)
{
    void *metadata;
    bool good;

    if (!bench_receive(child->socket, &child->target, sizeof(child->target))) {
        return false;
    }
    metadata = cli_alloc(1, child->target.metadata_length);
    good = bench_receive(child->socket, metadata,
                         child->target.metadata_length) &&
           add(&child->node, "parent", metadata, child->target.metadata_length,
               &child->parent);
    free(metadata);
    return good;
}

static bool flood(struct child *child)
{
    struct kvt_result results[FLOOD_INFLIGHT];
    struct kvt_copy copy = {
        .local_addr = (uint64_t)(uintptr_t)child->node.area.at,
        .peer_addr = child->target.addr,
        .length = child->node.area.bytes < child->target.bytes
                      ? child->node.area.bytes
                      : child->target.bytes,
    };
    struct kvt_error err = {0};

    for (int got =
             kvt_poll(child->node.transport, KVT_ANY, results, FLOOD_INFLIGHT);
         got > 0; got--) {
        child->inflight--;
        if (results[got - 1].state != KVT_DONE) {
            cli_error("bench: a flood ended: %s", results[got - 1].text);
            return false;
        }
    }
    while (child->flooding && child->inflight < FLOOD_INFLIGHT) {
        kvt_xfer xfer;

        if (kvt_write(child->node.transport, child->parent, &copy, 1, NULL,
                      &xfer, &err) != KVT_OK) {
            return fail("a flood is refused", &err);
        }
        child->inflight++;
    }
    return true;
}

/* False when it is over. */
static bool obey(struct child *child)
{
    unsigned char order;
    bool good = read(child->socket, &order, 1) == 1;

    if (!good) {
        return false;
    }
    if (order == 'm') {
        good = learn(child);
    } else {
        child->flooding = order == 'f';
        while (!child->flooding && child->inflight > 0) {
            struct pollfd wait = {.fd = kvt_fd(child->node.transport),
                                  .events = POLLIN};

            (void)poll(&wait, 1, -1);
            good = good && flood(child);
        }
    }
    order = good;
    return bench_send(child->socket, &order, 1) && good;
}

static int run_child(struct child *child)
{
    struct pollfd waits[] = {
        {.fd = child->socket, .events = POLLIN},
        {.fd = kvt_fd(child->node.transport), .events = POLLIN}};

    for (;;) {
        if (child->flooding && !flood(child)) {
            return CLI_FAILED;
        }
        if (poll(waits, child->flooding ? 2 : 1, -1) < 0) {
            return CLI_FAILED;
        }
        if (waits[0].revents != 0 && !obey(child)) {
            return CLI_OK;
        }
    }
}

/* Until the other end is closed. */
static int serve(const char *engine, const char *name, enum bench_kind kind,
                 uint64_t bytes, int socket)
{
    struct child child = {.socket = socket};

    if (!node_open(engine, name, kind, bytes, &child.node) || !greet(&child)) {
        return CLI_FAILED;
    }
    return run_child(&child);
}

bool peer_start(const char *engine, const char *name, enum bench_kind kind,
                uint64_t bytes, struct peer *ret)
{
    int pair[2];

    *ret = (struct peer){0};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
        return false;
    }
    ret->socket = pair[0];
    ret->pid = fork();
    if (ret->pid == 0) {
        bench_follow_parent();
        (void)close(pair[0]);
        _exit(serve(engine, name, kind, bytes, pair[1]));
    }
    (void)close(pair[1]);
    return ret->pid > 0;
}

static int open_socket(const char *path, struct sockaddr_un *ret)
{
    if (strlen(path) >= sizeof(ret->sun_path)) {
        cli_error("bench: the socket's path is too long");
        return -1;
    }
    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    (void)snprintf(ret->sun_path, sizeof(ret->sun_path), "%s", path);
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

int peer_serve(const char *engine, const char *path, enum bench_kind kind,
               uint64_t bytes)
{
    struct sockaddr_un where;
    int listener = open_socket(path, &where);
    int socket;

    (void)unlink(path);
    if (listener < 0 ||
        bind(listener, (struct sockaddr *)&where, sizeof(where)) != 0 ||
        listen(listener, 1) != 0) {
        cli_error("bench: cannot listen at %s", path);
        return CLI_FAILED;
    }
    printf("{\"name\": \"target\", \"ready\": true, \"lines\": 0}\n");
    (void)fflush(stdout);
    socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    return socket >= 0 ? serve(engine, NULL, kind, bytes, socket) : CLI_FAILED;
}

bool peer_connect(const char *path, struct peer *ret)
{
    struct sockaddr_un where;

    *ret = (struct peer){.socket = open_socket(path, &where)};
    if (ret->socket < 0 ||
        connect(ret->socket, (struct sockaddr *)&where, sizeof(where)) != 0) {
        cli_error("bench: nobody listens at %s", path);
        return false;
    }
    return true;
}

/* --------------------------------------------------------------- our side */

bool peer_add(struct node *node, const char *name, struct peer *peer)
{
    struct hello hello;

    if (!bench_receive(peer->socket, &hello, sizeof(hello)) ||
        hello.metadata_length > METADATA_MAX) {
        cli_error("bench: the process of %s did not start", name);
        return false;
    }
    peer->addr = hello.addr;
    peer->metadata_length = hello.metadata_length;
    peer->metadata = cli_alloc(1, hello.metadata_length);
    return bench_receive(peer->socket, peer->metadata, hello.metadata_length) &&
           add(node, name, peer->metadata, peer->metadata_length, &peer->id);
}

static bool ask(const struct peer *peer, const void *order, size_t length)
{
    unsigned char answer = 0;

    return bench_send(peer->socket, order, length) &&
           bench_receive(peer->socket, &answer, 1) && answer == 1;
}

bool peer_learn(struct peer *peer, const struct node *node)
{
    struct hello hello = {.addr = (uint64_t)(uintptr_t)node->area.at,
                          .bytes = node->area.bytes};
    void *metadata = copy_metadata(node, &hello.metadata_length);
    bool good = metadata != NULL && bench_send(peer->socket, "m", 1) &&
                bench_send(peer->socket, &hello, sizeof(hello)) &&
                ask(peer, metadata, hello.metadata_length);

    free(metadata);
    return good;
}

bool peer_flood(struct peer *peer, bool on)
{
    return ask(peer, on ? "f" : "s", 1);
}

bool peer_layouts(struct node *node, const struct peer *peer,
                  uint64_t block_bytes, uint64_t blocks, kvt_layout *ret_own,
                  kvt_layout *ret_peer)
{
    struct kvt_run run = {.addr = (uint64_t)(uintptr_t)node->area.at,
                          .block_bytes = block_bytes,
                          .stride_bytes = block_bytes,
                          .count = blocks,
                          .kind = KVT_DRAM};
    struct kvt_error err = {0};

    if (kvt_prepare(node->transport, KVT_SELF, "kv", &run, 1, ret_own, &err) !=
        KVT_OK) {
        return fail("our layout is refused", &err);
    }
    run.addr = peer->addr;
    return kvt_prepare(node->transport, peer->id, "kv", &run, 1, ret_peer,
                       &err) == KVT_OK ||
           fail("a peer's layout is refused", &err);
}
