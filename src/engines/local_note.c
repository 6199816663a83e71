/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications that we send: one packet each over an abstract socket of the
 * peer's, made when the first one is due. All of it on the control thread, and
 * none of it blocks.
 *
 * Jobs wait in order while the socket is full; a CONNECT job in the list is a
 * message of no bytes, so it is reported when all before it are out. A
 * connection that broke stays broken until the peer is loaded again: what the
 * kernel had taken may be lost, and a new socket would hide the gap.
 */
#include "local.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* A full backlog, or no memory for the packet: the socket cannot tell when
 * that is over. */
#define RETRY_NS 5000000u

/* What the kernel keeps of SO_SNDBUF for itself (unix_dgram_sendmsg). */
#define SOCKET_OVERHEAD 32

static void out_ready(struct kvti_watch *watch, uint32_t events);

void kvti_local_out_init(struct kvti_local_out *out)
{
    out->fd = -1;
    out->retry_ns = KVTI_NEVER_NS;
    out->watch.ready = out_ready;
    kvti_list_init(&out->jobs);
    kvti_list_init(&out->node);
}

static void unwatch(struct kvti_local_conn *conn)
{
    const struct kvti_env *env = conn->engine->env;

    if (conn->out.watched) {
        env->unwatch(env->ctx, &conn->out.watch);
        conn->out.watched = false;
    }
}

/* With no events the kernel still tells of a hang-up. */
static bool watch_for(struct kvti_local_conn *conn, uint32_t events)
{
    const struct kvti_env *env = conn->engine->env;
    struct kvti_local_out *out = &conn->out;

    if (out->watched && out->watch.events == events) {
        return true;
    }
    unwatch(conn);
    out->watch.fd = out->fd;
    out->watch.events = events;
    out->watched = env->watch(env->ctx, &out->watch) == KVT_OK;
    return out->watched;
}

void kvti_local_out_drop(struct kvti_local_conn *conn, const char *why)
{
    const struct kvti_env *env = conn->engine->env;
    struct kvti_local_out *out = &conn->out;
    struct kvti_list *node;

    unwatch(conn);
    if (out->fd >= 0) {
        (void)shutdown(out->fd, SHUT_RDWR); /* a forked child may hold it */
        close(out->fd);
        out->fd = -1;
    }
    out->broken = true;
    out->retry_ns = KVTI_NEVER_NS;
    kvti_list_remove(&out->node);
    while ((node = kvti_list_take(&out->jobs)) != NULL) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, node);
        struct kvt_error err;

        if (conn->engine->closed) {
            continue;
        }
        kvti_fail(&err, KVT_EDISCONNECTED,
                  "the peer gets no notification any more: %s", why);
        env->report_job(env->ctx, job, KVT_EDISCONNECTED, &err);
    }
}

/* The peer hung up or refused: its transport is closed, or it has no room for
 * one more sender. Either way nothing reaches it any more. */
static void fail_link(struct kvti_local_conn *conn, int os_errno)
{
    const struct kvti_env *env = conn->engine->env;
    struct kvt_error why;

    kvti_fail_errno(&why, KVT_EDISCONNECTED, os_errno,
                    "process %d closed its notification socket",
                    conn->target->proc->pid);
    kvti_local_out_drop(conn, why.text);
    env->report_conn(env->ctx, conn->link, KVTI_CONN_DOWN, &why);
}

/* -------------------------------------------------------------- connecting */

/* The name is only a name: whoever listens under it must be the process that
 * the pidfd stands for. */
static bool is_the_process(const struct kvti_local_conn *conn, int fd)
{
    struct ucred cred;
    socklen_t length = sizeof(cred);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length) == 0 &&
           cred.pid == conn->target->proc->pid;
}

static int send_hello(struct kvti_local_conn *conn, int fd)
{
    const struct kvti_env *env = conn->engine->env;
    struct kvti_note_hello hello;

    memset(&hello, 0, sizeof(hello));
    hello.magic = KVTI_NOTE_MAGIC;
    hello.version = KVTI_NOTE_VERSION;
    memcpy(hello.sender, env->incarnation, sizeof(hello.sender));
    memcpy(hello.target, conn->target->incarnation, sizeof(hello.target));
    kvti_format(hello.agent_name, sizeof(hello.agent_name), "%s",
                env->agent_name);
    return send(fd, &hello, sizeof(hello), MSG_NOSIGNAL | MSG_DONTWAIT) ==
                   (ssize_t)sizeof(hello)
               ? 0
               : errno;
}

/* The longest packet: asks for room, takes what an unprivileged process gets
 * (net.core.wmem_max, doubled by the kernel for its bookkeeping). */
static int widen(int fd, uint32_t *ret)
{
    int want = 1 << 20;
    int got = 0;
    socklen_t length = sizeof(got);

    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &want, sizeof(want));
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &got, &length) != 0) {
        return errno;
    }
    *ret = got <= SOCKET_OVERHEAD ? 0 : (uint32_t)(got - SOCKET_OVERHEAD);
    return 0;
}

/* 0, EAGAIN (the backlog is full), or why it cannot be. */
static int connect_out(struct kvti_local_conn *conn)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(conn->socket_name);
    int fd;
    int code = 0;

    /* An abstract name starts with a NUL and ends with its length. */
    kvti_assert(length < sizeof(name.sun_path) - 1);
    memcpy(name.sun_path + 1, conn->socket_name, length);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno;
    }
    if (connect(fd, (const struct sockaddr *)&name,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                            length)) != 0) {
        code = errno;
    } else if (!is_the_process(conn, fd)) {
        code = ECONNREFUSED;
    } else {
        code = widen(fd, &conn->out.limit);
    }
    if (code == 0) {
        code = send_hello(conn, fd);
    }
    if (code != 0) {
        close(fd);
        return code;
    }
    conn->out.fd = fd;
    return 0;
}

/* ----------------------------------------------------------------- sending */

static int send_packet(int fd, const struct kvti_buf *buf)
{
    struct kvti_note_head head = {.magic = KVTI_NOTE_MAGIC,
                                  .length = (uint32_t)buf->length};
    struct iovec parts[2] = {
        {.iov_base = &head, .iov_len = sizeof(head)},
        {.iov_base = buf->data, .iov_len = buf->length},
    };
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t sent;

    do {
        sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent < 0 ? errno : 0;
}

static bool is_too_long(struct kvti_local_conn *conn, struct kvti_job *job)
{
    const struct kvti_env *env = conn->engine->env;
    uint32_t room = conn->out.limit > sizeof(struct kvti_note_head)
                        ? conn->out.limit -
                              (uint32_t)sizeof(struct kvti_note_head)
                        : 0;
    uint32_t most = room < KVTI_NOTE_MAX ? room : KVTI_NOTE_MAX;
    struct kvt_error err;

    if (job->buf.length <= most) {
        return false;
    }
    kvti_fail(&err, KVT_ERANGE,
              "a notification of %zu bytes is longer than the %u that a "
              "local socket takes here: shorten it or raise "
              "net.core.wmem_max",
              job->buf.length, most);
    kvti_list_remove(&job->node);
    env->report_job(env->ctx, job, KVT_ERANGE, &err);
    return true;
}

/* Sends from the front of the list: 0 when it is empty. */
static int send_jobs(struct kvti_local_conn *conn)
{
    const struct kvti_env *env = conn->engine->env;
    struct kvti_local_out *out = &conn->out;

    kvti_list_each(node, &out->jobs) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, node);
        int code = 0;

        if (job->kind == KVTI_JOB_NOTIFY) {
            if (is_too_long(conn, job)) {
                continue;
            }
            code = send_packet(out->fd, &job->buf);
        }
        if (code != 0) {
            return code;
        }
        kvti_list_remove(&job->node);
        env->report_job(env->ctx, job, KVT_OK, NULL);
    }
    return 0;
}

/* Goes on as far as possible, and sees to it that it is called again. */
static void pump(struct kvti_local_conn *conn)
{
    struct kvti_local_out *out = &conn->out;
    uint32_t events = 0;
    int code = 0;

    out->retry_ns = KVTI_NEVER_NS;
    if (out->fd < 0) {
        code = connect_out(conn);
        if (code == EAGAIN || code == EMFILE || code == ENFILE ||
            code == ENOMEM || code == ENOBUFS) {
            out->retry_ns = kvti_now_ns() + RETRY_NS;
            return;
        }
    }
    if (code == 0) {
        code = send_jobs(conn);
    }
    switch (code) {
    case 0:
        kvti_list_remove(&out->node);
        break;
    case EAGAIN:
        events = EPOLLOUT;
        break;
    case ENOMEM:
    case ENOBUFS:
        out->retry_ns = kvti_now_ns() + RETRY_NS;
        break;
    default:
        fail_link(conn, code);
        return;
    }
    if (!watch_for(conn, events) && out->retry_ns == KVTI_NEVER_NS) {
        out->retry_ns = kvti_now_ns() + RETRY_NS;
    }
}

static void out_ready(struct kvti_watch *watch, uint32_t events)
{
    struct kvti_local_conn *conn = kvti_container(watch, struct kvti_local_conn,
                                                  out.watch);

    if (conn->out.fd < 0 || !conn->out.watched) {
        return;
    }
    if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
        fail_link(conn, ECONNRESET);
    } else {
        pump(conn);
    }
}

void kvti_local_out_add(struct kvti_local_conn *conn, struct kvti_job *job)
{
    struct kvti_local *engine = conn->engine;
    const struct kvti_env *env = engine->env;
    struct kvt_error err;
    bool was_empty = kvti_list_empty(&conn->out.jobs);

    if (!conn->reachable) {
        if (job->kind == KVTI_JOB_CONNECT) {
            env->report_job(env->ctx, job, KVT_OK, NULL);
            return;
        }
        kvti_fail(&err, KVT_EUNSUPPORTED,
                  "process %d is in another network namespace, where the "
                  "local engine's notifications do not reach it: share it",
                  conn->target->proc->pid);
        env->report_job(env->ctx, job, KVT_EUNSUPPORTED, &err);
        return;
    }
    if (conn->out.broken) {
        kvti_fail(&err, KVT_EDISCONNECTED,
                  "the notification socket to process %d broke: reload the "
                  "peer",
                  conn->target->proc->pid);
        env->report_job(env->ctx, job, KVT_EDISCONNECTED, &err);
        return;
    }
    kvti_list_append(&conn->out.jobs, &job->node);
    if (was_empty) {
        kvti_list_append(&engine->out_waiting, &conn->out.node);
        pump(conn);
    }
}

/* Reports jobs at the front whose time is over. The first that still has time
 * hides those behind it, which wait for it anyway. */
static uint64_t expire(struct kvti_local_conn *conn, uint64_t now_ns)
{
    const struct kvti_env *env = conn->engine->env;

    kvti_list_each(node, &conn->out.jobs) {
        struct kvti_job *job = kvti_container(node, struct kvti_job, node);
        struct kvt_error err;

        if (job->deadline_ns > now_ns) {
            return job->deadline_ns;
        }
        kvti_fail(&err, KVT_ETIMEDOUT,
                  "process %d did not take the notification in time: it does "
                  "not read",
                  conn->target->proc->pid);
        kvti_list_remove(&job->node);
        env->report_job(env->ctx, job, KVT_ETIMEDOUT, &err);
    }
    kvti_list_remove(&conn->out.node);
    conn->out.retry_ns = KVTI_NEVER_NS;
    return KVTI_NEVER_NS;
}

uint64_t kvti_local_out_turn(struct kvti_local *engine, uint64_t now_ns)
{
    uint64_t next_ns = KVTI_NEVER_NS;

    kvti_list_each(node, &engine->out_waiting) {
        struct kvti_local_conn *conn = kvti_container(
            node, struct kvti_local_conn, out.node);
        uint64_t at_ns;

        if (conn->out.retry_ns <= now_ns) {
            pump(conn);
        }
        at_ns = expire(conn, now_ns);
        at_ns = at_ns < conn->out.retry_ns ? at_ns : conn->out.retry_ns;
        next_ns = at_ns < next_ns ? at_ns : next_ns;
    }
    return next_ns;
}
