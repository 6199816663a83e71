/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The listening side of a replay across hosts. It starts the holders, and for
 * the rest it is a relay: each holder's stream of frames goes to and fro over
 * the link, as it is, for the coordinator on the other side. What it knows for
 * itself is processes: it kills on order, and says when one is gone, after it
 * has been reaped and so can write no more.
 *
 * A connection that does not get as far as START was no run: whoever it was is
 * named, and the next one is waited for. When the link is lost in mid-run the
 * holders are killed, since nobody can tell them to end in order.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "link.h"
#include "replay.h"

struct serve_node {
    pid_t pid;
    struct proto control; /* fd -1: gone */
    bool alive;
};

struct serve {
    const struct replay_options *options;
    struct geometry geometry; /* no regions: any will do */
    int listener;
    int signal_fd;
    struct link link;
    struct serve_node nodes[LINK_NODES_MAX];
    uint64_t count; /* of the run's holders */
    bool ending;    /* the other side has said END */
    bool interrupted;
    bool failed; /* a holder did not end well */
    char error[CLI_TEXT_MAX];
};

/* -------------------------------------------------------------- one holder */

static void configure(struct serve *serve, const struct link_start *start,
                      uint64_t index)
{
    struct proto *control = &serve->nodes[index].control;
    const struct replay_options *options = serve->options;
    struct node_config config = {
        .role = NODE_HOLDER,
        .index = index,
        .pull = start->pull,
        .shm = options->shm,
        .workers = options->workers,
        .timeout_ns = start->timeout_ns,
        .requests = start->requests,
        .peers = start->fetchers,
        .slots = start->slots,
        .secret = start->secrets[index],
        .no_same_host = options->no_same_host,
        .remote = 1,
        .geometry = start->geometry,
    };

    (void)snprintf(config.engine, sizeof(config.engine), "%s", options->engine);
    proto_begin(control, PROTO_CONFIG);
    node_config_put(control, &config);
    proto_end(control);
}

/* One has ended: tells how. */
static void bury(struct serve *serve, uint64_t index, int status)
{
    struct serve_node *node = &serve->nodes[index];
    struct proto *link = &serve->link.proto;

    node->alive = false;
    proto_close(&node->control);
    serve->failed = serve->failed || (serve->ending && status != 0);
    proto_begin(link, LINK_GONE);
    proto_put(link, index);
    proto_put(link, WIFSIGNALED(status));
    proto_put(link, (uint64_t)(WIFSIGNALED(status) ? WTERMSIG(status)
                                                   : WEXITSTATUS(status)));
    proto_end(link);
}

/* What it has said goes on, and its end if that has come. */
static void receive(struct serve *serve, uint64_t index)
{
    struct serve_node *node = &serve->nodes[index];
    bool connected = proto_fill(&node->control);

    link_carry(&serve->link, index, &node->control.in);
    if (!connected) {
        /* One that was told to end is about to: its status shall be its own. */
        bury(serve, index,
             serve->ending ? process_wait(node->pid) : process_kill(node->pid));
    }
}

static bool start_holders(struct serve *serve, const struct link_start *start)
{
    for (uint64_t i = 0; i < serve->options->holders; i++) {
        struct serve_node *node = &serve->nodes[i];
        int rc = process_start(&node->control, &node->pid);

        if (rc != 0) {
            (void)snprintf(serve->error, sizeof(serve->error),
                           "a holder cannot be started: %s", strerror(rc));
            return false;
        }
        node->alive = true;
        serve->count = i + 1;
        configure(serve, start, i);
    }
    return true;
}

static bool any_alive(const struct serve *serve)
{
    for (uint64_t i = 0; i < serve->count; i++) {
        if (serve->nodes[i].alive) {
            return true;
        }
    }
    return false;
}

static void kill_all(struct serve *serve)
{
    for (uint64_t i = 0; i < serve->count; i++) {
        struct serve_node *node = &serve->nodes[i];

        if (node->alive) {
            (void)process_kill(node->pid);
            node->alive = false;
        }
        proto_close(&node->control);
    }
    serve->count = 0;
}

/* ----------------------------------------------------------------- messages */

static void end_holders(struct serve *serve)
{
    serve->ending = true;
    for (uint64_t i = 0; i < serve->count; i++) {
        struct serve_node *node = &serve->nodes[i];

        /* It sees the end of its stream; we see the end of ours when it has
         * closed its transport. */
        if (node->alive) {
            (void)proto_flush(&node->control);
            proto_shut(&node->control);
        }
    }
}

/* False when the message is damaged. */
static bool handle(struct serve *serve, struct proto_message *message)
{
    struct serve_node *node;
    const void *bytes;
    size_t length;
    uint64_t index;

    if (message->type == LINK_PING || message->type == LINK_REFUSE) {
        return true;
    }
    if (message->type == LINK_END) {
        end_holders(serve);
        return true;
    }
    index = proto_take(message);
    if (message->damaged || index >= serve->count) {
        return false;
    }
    node = &serve->nodes[index];
    if (message->type == LINK_KILL) {
        /* Its number is not another's: it was not reaped yet. */
        if (node->alive) {
            (void)kill(node->pid, SIGKILL);
        }
        return true;
    }
    bytes = proto_take_bytes(message, &length);
    if (message->type != LINK_BYTES || message->damaged || serve->ending) {
        return false;
    }
    if (node->alive) {
        proto_append(&node->control.out, bytes, length);
    }
    return true;
}

/* Sees to the whole frames that have come. False: the run cannot go on, and
 * `error` says why. */
static bool hear_link(struct serve *serve)
{
    struct proto_message message;
    int rc;

    while ((rc = proto_next(&serve->link.proto, &message)) > 0) {
        if (message.type == LINK_REFUSE) {
            char why[CLI_TEXT_MAX];

            proto_take_text(&message, why, sizeof(why));
            (void)snprintf(serve->error, sizeof(serve->error),
                           "%s ended the run: %.380s", serve->link.other, why);
            return false;
        }
        if (!handle(serve, &message)) {
            rc = -1;
            break;
        }
    }
    if (rc < 0) {
        (void)snprintf(serve->error, sizeof(serve->error),
                       "%s sent a damaged message", serve->link.other);
    }
    return rc >= 0;
}

static bool receive_link(struct serve *serve)
{
    bool good = link_fill(&serve->link, serve->error);

    /* What was said before the end counts, and says more than the end. */
    return hear_link(serve) && good;
}

/* ----------------------------------------------------------------------- run */

/* Waits for something to come, and sees to it. False: the run is over. */
static bool turn(struct serve *serve)
{
    struct pollfd fds[LINK_NODES_MAX + 2];
    uint64_t count = serve->count;

    if (!link_turn(&serve->link, serve->error)) {
        return false;
    }
    for (uint64_t i = 0; i < count; i++) {
        struct serve_node *node = &serve->nodes[i];

        if (node->alive) {
            (void)proto_flush(&node->control);
        }
        fds[i] = (struct pollfd){
            .fd = node->alive ? node->control.fd : -1,
            .events = proto_unsent(&node->control) ? POLLIN | POLLOUT : POLLIN,
        };
    }
    fds[count] = (struct pollfd){.fd = serve->signal_fd, .events = POLLIN};
    fds[count + 1] = (struct pollfd){
        .fd = serve->link.proto.fd,
        .events = proto_unsent(&serve->link.proto) ? POLLIN | POLLOUT : POLLIN,
    };
    if (poll(fds, count + 2, link_wait_ms(&serve->link)) <= 0) {
        return true;
    }
    if (fds[count].revents != 0) {
        serve->interrupted = true;
        (void)snprintf(serve->error, sizeof(serve->error), "interrupted");
        return false;
    }
    for (uint64_t i = 0; i < count; i++) {
        if ((fds[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
            receive(serve, i);
        }
    }
    return (fds[count + 1].revents & (POLLIN | POLLHUP | POLLERR)) == 0 ||
           receive_link(serve);
}

/* From START to the end: CLI_OK when all holders have ended in order. */
static int run(struct serve *serve, const struct link_start *start)
{
    char other[LINK_ADDRESS_TEXT];
    bool good;

    memcpy(other, serve->link.other, sizeof(other));
    serve->ending = false;
    serve->failed = false;
    /* What came together with START has been received and wakes no poll(). */
    good = start_holders(serve, start) && hear_link(serve);
    while (good && (any_alive(serve) || !serve->ending)) {
        good = turn(serve);
    }
    kill_all(serve);
    link_leave(&serve->link, good ? NULL : serve->error);
    if (!good) {
        cli_error("replay: the run of %s is over: %s", other, serve->error);
        return serve->interrupted ? CLI_INTERRUPTED : CLI_FAILED;
    }
    if (serve->failed) {
        cli_error("replay: a holder did not end well after the run of %s",
                  other);
        return CLI_FAILED;
    }
    fprintf(stderr, "the run of %s has ended in order\n", other);
    return CLI_OK;
}

/* ------------------------------------------------------------------- START */

static bool same_geometry(const struct geometry *a, const struct geometry *b)
{
    return a->regions == b->regions && a->pages == b->pages &&
           a->page_bytes == b->page_bytes;
}

/* What somebody who connected asks for must fit what we were told to give:
 * these numbers become memory and tables. */
static const char *find_fault(const struct serve *serve,
                              const struct link_start *start)
{
    const struct geometry *geometry = &start->geometry;
    uint64_t bytes;
    uint64_t pages;

    if (start->fetchers < 1 || serve->options->holders > LINK_NODES_MAX ||
        start->fetchers > LINK_NODES_MAX - serve->options->holders ||
        start->requests < 1 || start->requests > REPLAY_INFLIGHT_MAX) {
        return "the number of fetchers or requests is out of range";
    }
    if (geometry->regions < 1 || geometry->pages < 1 ||
        geometry->page_bytes < 1 ||
        __builtin_mul_overflow(geometry->regions, geometry->pages, &pages) ||
        __builtin_mul_overflow(pages, geometry->page_bytes, &bytes) ||
        bytes > serve->options->memory) {
        return "the shape of its blocks makes no sense here";
    }
    if (serve->geometry.regions > 0 &&
        !same_geometry(&serve->geometry, geometry)) {
        return "the shape of its blocks is not the one given here";
    }
    if (start->slots < 1 || start->slots > REPLAY_SLOTS_MAX ||
        start->slots > kvpool_slots_in(geometry, serve->options->memory)) {
        return "the pools do not fit the --memory given here";
    }
    return NULL;
}

static bool negotiate(struct serve *serve, struct link_start *ret)
{
    struct link_offer offer = {
        .holders = serve->options->holders,
        .memory = serve->options->memory,
        .no_same_host = serve->options->no_same_host,
        .geometry = serve->geometry,
    };
    struct proto_message message;
    const char *fault;

    (void)snprintf(offer.engine, sizeof(offer.engine), "%s",
                   serve->options->engine);
    link_offer_put(&serve->link, &offer);
    if (!link_expect(&serve->link, LINK_START, &message, serve->error)) {
        return false;
    }
    link_start_take(&message, offer.holders, ret);
    fault = message.damaged ? "its START is damaged" : find_fault(serve, ret);
    if (fault != NULL) {
        (void)snprintf(serve->error, sizeof(serve->error), "%s", fault);
        link_leave(&serve->link, fault);
        return false;
    }
    return true;
}

/* -------------------------------------------------------------- connections */

/* False: interrupted. */
static bool wait_for_connection(struct serve *serve)
{
    struct pollfd fds[2] = {
        {.fd = serve->listener, .events = POLLIN},
        {.fd = serve->signal_fd, .events = POLLIN},
    };

    while (fds[0].revents == 0) {
        if (poll(fds, 2, -1) < 0 && errno != EINTR) {
            return false;
        }
        if (fds[1].revents != 0) {
            serve->interrupted = true;
            return false;
        }
    }
    return true;
}

/* Connections until one was a run, or with --keep for ever. */
static int serve_all(struct serve *serve)
{
    static struct link_start start;
    int rc = CLI_INTERRUPTED;

    while (wait_for_connection(serve)) {
        if (!link_accept(serve->listener, serve->signal_fd, &serve->link,
                         serve->error) ||
            !negotiate(serve, &start)) {
            cli_error("replay: no run: %s", serve->error);
            link_close(&serve->link);
            continue;
        }
        if (!serve->options->keep) {
            /* A second one shall be refused, not wait for nothing. */
            (void)close(serve->listener);
            serve->listener = -1;
        }
        fprintf(stderr, "run of %s: %llu holder%s, %llu slots each\n",
                serve->link.other, (unsigned long long)serve->options->holders,
                serve->options->holders > 1 ? "s" : "",
                (unsigned long long)start.slots);
        rc = run(serve, &start);
        if (!serve->options->keep || serve->interrupted) {
            return rc;
        }
    }
    return serve->interrupted ? CLI_INTERRUPTED : CLI_FAILED;
}

/* The nodes open it when the other side connects. Here nobody would see by then
 * why they cannot. Only NIXL may be missing, and to ask loads it. */
static int check_engine(const char *spec)
{
    struct kvt_engine_info info;

    if (!replay_is_nixl(spec)) {
        return CLI_OK;
    }
    for (uint32_t i = 0; kvt_engine_info(i, &info) == KVT_OK; i++) {
        if (strcmp(info.name, "nixl") == 0 && info.code != KVT_OK) {
            cli_error("replay: the engine \"%s\" does not start: %s", spec,
                      info.text);
            return CLI_FAILED;
        }
    }
    return CLI_OK;
}

int serve_main(const struct replay_options *options)
{
    /* Its table of nodes is too large for a stack. */
    static struct serve serve = {
        .listener = -1,
        .signal_fd = -1,
        .link = {.proto = {.fd = -1}},
    };
    char bound[LINK_ADDRESS_TEXT];
    int rc = CLI_OK;

    serve.options = options;
    if (options->model != NULL || options->block_bytes_given) {
        rc = replay_geometry(options, &serve.geometry);
    }
    if (rc == CLI_OK) {
        rc = check_engine(options->engine);
    }
    if (rc == CLI_OK) {
        rc = replay_signals(&serve.signal_fd);
    }
    if (rc == CLI_OK) {
        serve.listener = link_listen(options->listen, bound, serve.error);
        if (serve.listener < 0) {
            cli_error("replay: %s", serve.error);
            rc = CLI_FAILED;
        }
    }
    if (rc == CLI_OK) {
        /* Scripts read the port from it. */
        printf("listening on %s\n", bound);
        (void)fflush(stdout);
        rc = serve_all(&serve);
    }
    link_close(&serve.link);
    if (serve.listener >= 0) {
        (void)close(serve.listener);
    }
    if (serve.signal_fd >= 0) {
        (void)close(serve.signal_fd);
    }
    return rc;
}
