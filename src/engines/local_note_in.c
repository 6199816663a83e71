/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications that we receive: a listener under an abstract name, and a
 * socket for each sender. All of it on the control thread.
 *
 * A sender is read only as long as the core has room. The one message that it
 * had none for stays in the packet buffer, its socket and every other that has
 * something are not watched, and the kernel holds the senders back: no message
 * is ever dropped.
 *
 * The core may have an event in hand for a socket that another event closes,
 * so a closed one is freed by the next turn.
 */
#include "local.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define IN_MAX 4096u
/* Packets of one sender before others have their turn. */
#define READ_BURST 256u
#define ACCEPT_BURST 64u
/* Out of descriptors: the listener stays readable, so it is left alone. */
#define LISTEN_RETRY_NS 100000000u
#define PACKET_BYTES (KVTI_NOTE_MAX + sizeof(struct kvti_note_head))

_Static_assert(sizeof(struct kvti_note_hello) <= PACKET_BYTES,
               "the packet buffer holds a greeting as well");

/* The caller closes what could not be watched. */
static void in_watch(struct kvti_local_in *in)
{
    const struct kvti_env *env = in->engine->env;

    in->watched = env->watch(env->ctx, &in->watch) == KVT_OK;
    if (!in->watched) {
        kvti_log(&env->logger, KVT_LOG_ERROR,
                 "local: cannot watch the notifications of \"%s\"",
                 in->agent_name);
    }
}

static void in_unwatch(struct kvti_local_in *in)
{
    const struct kvti_env *env = in->engine->env;

    if (in->watched) {
        env->unwatch(env->ctx, &in->watch);
        in->watched = false;
    }
}

static void in_close(struct kvti_local_in *in)
{
    struct kvti_local *engine = in->engine;

    in_unwatch(in);
    (void)shutdown(in->watch.fd, SHUT_RDWR); /* a forked child may hold it */
    close(in->watch.fd);
    in->watch.fd = -1;
    kvti_list_remove(&in->node);
    kvti_list_append(&engine->ins_dead, &in->node);
    engine->in_count--;
}

void kvti_local_ins_sweep(struct kvti_local *engine)
{
    struct kvti_list *node;

    while ((node = kvti_list_take(&engine->ins_dead)) != NULL) {
        free(kvti_container(node, struct kvti_local_in, node));
    }
}

/* ------------------------------------------------------------------ reading */

/* Who it is and whether it means us: an incarnation before ours may have had
 * our socket's name in its metadata. */
static bool greet(struct kvti_local_in *in, size_t length)
{
    struct kvti_local *engine = in->engine;
    struct kvti_note_hello hello;

    if (length != sizeof(hello)) {
        return false;
    }
    memcpy(&hello, engine->packet, sizeof(hello));
    if (hello.magic != KVTI_NOTE_MAGIC || hello.version != KVTI_NOTE_VERSION ||
        memcmp(hello.target, engine->env->incarnation, sizeof(hello.target)) !=
            0 ||
        memchr(hello.agent_name, '\0', sizeof(hello.agent_name)) == NULL ||
        hello.agent_name[0] == '\0') {
        return false;
    }
    memcpy(in->agent_name, hello.agent_name, sizeof(in->agent_name));
    in->greeted = true;
    return true;
}

static bool deliver(struct kvti_local *engine, const char *agent_name,
                    size_t length)
{
    return engine->env->report_note(engine->env->ctx, agent_name,
                                    engine->packet +
                                        sizeof(struct kvti_note_head),
                                    length - sizeof(struct kvti_note_head));
}

/* False: the connection is at fault and to be closed. */
static bool take_packet(struct kvti_local_in *in, size_t length)
{
    struct kvti_local *engine = in->engine;
    struct kvti_note_head head;

    if (!in->greeted) {
        return greet(in, length);
    }
    if (length < sizeof(head)) {
        return false;
    }
    memcpy(&head, engine->packet, sizeof(head));
    if (head.magic != KVTI_NOTE_MAGIC || head.length != length - sizeof(head)) {
        return false;
    }
    if (!deliver(engine, in->agent_name, length)) {
        engine->held = true;
        engine->held_length = length;
        memcpy(engine->held_name, in->agent_name, sizeof(engine->held_name));
    }
    return true;
}

static void in_ready(struct kvti_watch *watch, uint32_t events)
{
    struct kvti_local_in *in = kvti_container(watch, struct kvti_local_in,
                                              watch);
    struct kvti_local *engine = in->engine;

    (void)events;
    for (unsigned i = 0; i < READ_BURST && in->watched; i++) {
        struct iovec part = {.iov_base = engine->packet,
                             .iov_len = PACKET_BYTES};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        ssize_t length;

        if (engine->held) {
            in_unwatch(in);
            return;
        }
        length = recvmsg(watch->fd, &message, MSG_DONTWAIT);
        if (length < 0 && errno == EINTR) {
            continue;
        }
        if (length < 0 && errno == EAGAIN) {
            return;
        }
        /* No packet of ours is empty: 0 is the end. */
        if (length <= 0 || (message.msg_flags & MSG_TRUNC) != 0 ||
            !take_packet(in, (size_t)length)) {
            in_close(in);
            return;
        }
    }
}

void kvti_local_notes_wanted(void *self)
{
    struct kvti_local *engine = self;

    if (!engine->held ||
        !deliver(engine, engine->held_name, engine->held_length)) {
        return;
    }
    engine->held = false;
    kvti_list_each(node, &engine->ins) {
        struct kvti_local_in *in = kvti_container(node, struct kvti_local_in,
                                                  node);

        if (!in->watched) {
            in_watch(in);
        }
        /* Its sender must hear of it, or it would wait for ever. */
        if (!in->watched) {
            in_close(in);
        }
    }
}

/* ---------------------------------------------------------------- listening */

static bool is_welcome(const struct kvti_local *engine, int fd)
{
    struct ucred cred;
    socklen_t length = sizeof(cred);

    return engine->in_count < IN_MAX &&
           getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length) == 0 &&
           (cred.uid == engine->self.uid || cred.uid == 0);
}

static void accept_one(struct kvti_local *engine, int fd)
{
    struct kvti_local_in *in = NULL;

    if (is_welcome(engine, fd)) {
        in = calloc(1, sizeof(*in));
    }
    if (in == NULL) {
        close(fd);
        return;
    }
    in->engine = engine;
    in->watch.fd = fd;
    in->watch.events = EPOLLIN;
    in->watch.ready = in_ready;
    kvti_list_append(&engine->ins, &in->node);
    engine->in_count++;
    in_watch(in);
    if (!in->watched) {
        in_close(in);
    }
}

static void listener_ready(struct kvti_watch *watch, uint32_t events)
{
    struct kvti_local *engine = kvti_container(watch, struct kvti_local,
                                               listener);
    const struct kvti_env *env = engine->env;

    (void)events;
    for (unsigned i = 0; i < ACCEPT_BURST; i++) {
        int fd = accept4(watch->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (fd >= 0) {
            accept_one(engine, fd);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM ||
                   errno == ENOBUFS) {
            env->unwatch(env->ctx, watch);
            engine->listening = false;
            engine->listen_ns = kvti_now_ns() + LISTEN_RETRY_NS;
            return;
        }
    }
}

uint64_t kvti_local_listen_turn(struct kvti_local *engine, uint64_t now_ns)
{
    const struct kvti_env *env = engine->env;

    if (engine->listening) {
        return KVTI_NEVER_NS;
    }
    if (now_ns >= engine->listen_ns) {
        engine->listening = env->watch(env->ctx, &engine->listener) == KVT_OK;
        engine->listen_ns = now_ns + LISTEN_RETRY_NS;
    }
    return engine->listening ? KVTI_NEVER_NS : engine->listen_ns;
}

static int bind_name(int fd, char *socket_name)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    uint8_t random[16];
    size_t length;

    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        return -1;
    }
    kvti_format(socket_name, KVTI_SOCKET_NAME_MAX, "kvt-");
    for (size_t i = 0; i < sizeof(random); i++) {
        kvti_format(socket_name + 4 + 2 * i, 3, "%02x", random[i]);
    }
    length = strlen(socket_name);
    memcpy(name.sun_path + 1, socket_name, length);
    return bind(
        fd, (const struct sockaddr *)&name,
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length));
}

int kvti_local_listen(struct kvti_local *engine, struct kvt_error *err)
{
    const struct kvti_env *env = engine->env;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot make the notification socket");
    }
    engine->packet = malloc(PACKET_BYTES);
    if (engine->packet == NULL) {
        close(fd);
        return kvti_fail(err, KVT_ENOMEM, "no memory for notifications");
    }
    engine->listener.fd = fd;
    engine->listener.events = EPOLLIN;
    engine->listener.ready = listener_ready;
    if (bind_name(fd, engine->self.socket_name) != 0 ||
        listen(fd, SOMAXCONN) != 0) {
        kvti_fail_errno(err, KVT_ESYSTEM, errno,
                        "cannot listen for notifications");
    } else if (env->watch(env->ctx, &engine->listener) != KVT_OK) {
        kvti_fail(err, KVT_ESYSTEM, "cannot watch the notification socket");
    } else {
        engine->listening = true;
        return KVT_OK;
    }
    close(fd);
    engine->listener.fd = -1;
    free(engine->packet);
    engine->packet = NULL;
    return KVT_ESYSTEM;
}

void kvti_local_unlisten(struct kvti_local *engine)
{
    const struct kvti_env *env = engine->env;

    if (engine->packet == NULL) {
        return;
    }
    if (engine->listening) {
        env->unwatch(env->ctx, &engine->listener);
        engine->listening = false;
    }
    (void)shutdown(engine->listener.fd, SHUT_RDWR);
    close(engine->listener.fd);
    engine->listener.fd = -1;
    kvti_list_each(node, &engine->ins) {
        in_close(kvti_container(node, struct kvti_local_in, node));
    }
    kvti_local_ins_sweep(engine);
    free(engine->packet);
    engine->packet = NULL;
}
