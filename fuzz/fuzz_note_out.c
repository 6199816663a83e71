/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications that the local engine sends to a hostile or broken process: one
 * that is not there, is another than it says, does not accept, does not read,
 * answers with junk and descriptors, or hangs up in the middle. The input orders
 * what each side does. Each job must be reported exactly once, in order, with a
 * code that fits; the other side must see a greeting and then the messages that
 * were reported as sent, and nothing else; no descriptor may be left.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engines/local.h"
#include "input.h"
#include "watches.h"

#define JOBS_MAX 48
#define STEPS_MAX 64
#define PACKET_MAX (KVTI_NOTE_MAX + 64)
/* All that has a deadline is late then, and all that waits tries again. */
#define LATE_NS (UINT64_MAX - 1)

struct note {
    struct kvti_job job;
    bool reported;
    bool sent; /* reported as sent, and a message */
};

struct world {
    struct watches watches;
    struct kvti_env env;
    struct kvti_local engine;
    struct kvti_local_proc proc;
    struct kvti_local_target target;
    struct kvti_local_conn conn;
    uint8_t incarnation[KVTI_INCARNATION_BYTES];
    struct note notes[JOBS_MAX];
    size_t note_count;
    size_t reports; /* jobs before this one were reported */
    unsigned downs; /* reports that the link is down */
    int listener;   /* the other side's; -1: none */
    int accepted;
    bool greeted; /* the other side has read the greeting */
    size_t next;  /* the note whose message it reads next */
    bool deaf;    /* it has thrown away what it had not read */
};

static struct world world;
static unsigned char packet[PACKET_MAX];

/* ----------------------------------------------------------------------- core */

static int watch(void *ctx, struct kvti_watch *watched)
{
    (void)ctx;
    return watches_add(&world.watches, watched);
}

static void unwatch(void *ctx, struct kvti_watch *watched)
{
    (void)ctx;
    watches_remove(&world.watches, watched);
}

static bool is_too_long(const struct kvti_job *job)
{
    return job->buf.length > KVTI_NOTE_MAX ||
           job->buf.length + sizeof(struct kvti_note_head) >
               world.conn.out.limit;
}

static void report_job(void *ctx, struct kvti_job *job, int code,
                       const struct kvt_error *err)
{
    struct note *note = kvti_container(job, struct note, job);

    (void)ctx;
    kvti_assert(!note->reported && kvti_list_empty(&job->node));
    note->reported = true;
    kvti_assert(code == KVT_OK || (err->code == code && err->text[0] != '\0'));
    switch (code) {
    case KVT_OK:
        note->sent = job->kind == KVTI_JOB_NOTIFY;
        kvti_assert(!note->sent || !is_too_long(job));
        break;
    case KVT_ERANGE:
        kvti_assert(job->kind == KVTI_JOB_NOTIFY && is_too_long(job));
        break;
    case KVT_ETIMEDOUT:
        kvti_assert(job->deadline_ns <= LATE_NS);
        break;
    default:
        kvti_assert(code == KVT_EDISCONNECTED && world.conn.out.broken);
        break;
    }
    /* In their order, but for those that come when it is broken already. */
    kvti_assert(world.conn.out.broken || note == &world.notes[world.reports]);
    world.reports++;
}

static void report_conn(void *ctx, void *link, enum kvti_conn_event event,
                        const struct kvt_error *why)
{
    (void)ctx;
    kvti_assert(link == &world && event == KVTI_CONN_DOWN);
    kvti_assert(why->text[0] != '\0' && world.conn.out.broken);
    world.downs++;
}

static void open_listener(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(world.conn.socket_name);

    if (world.listener >= 0) {
        return;
    }
    memcpy(name.sun_path + 1, world.conn.socket_name, length);
    world.listener = socket(AF_UNIX,
                            SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    kvti_assert(world.listener >= 0);
    kvti_assert(bind(world.listener, (const struct sockaddr *)&name,
                     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                                 length)) == 0);
    kvti_assert(listen(world.listener, 0) == 0);
}

static void open_world(uint8_t way)
{
    memset(&world, 0, sizeof world);
    memset(world.incarnation, 0x5a, sizeof world.incarnation);
    world.env = (struct kvti_env){.watch = watch,
                                  .unwatch = unwatch,
                                  .report_job = report_job,
                                  .report_conn = report_conn,
                                  .agent_name = "us",
                                  .incarnation = world.incarnation};
    world.engine.env = &world.env;
    kvti_list_init(&world.engine.out_waiting);
    world.proc.pid = (way & 7) == 7 ? 1 : getpid();
    world.target.proc = &world.proc;
    memset(world.target.incarnation, 0xa5, sizeof world.target.incarnation);
    world.conn.engine = &world.engine;
    world.conn.target = &world.target;
    world.conn.link = &world;
    world.conn.reachable = true;
    (void)snprintf(world.conn.socket_name, sizeof world.conn.socket_name,
                   "kvt-fuzz-%d", getpid());
    kvti_local_out_init(&world.conn.out);
    world.listener = -1;
    world.accepted = -1;
    if ((way & 0x38) != 0x38) {
        open_listener();
    }
}

/* ------------------------------------------------------------------- our side */

static void step_job(struct input *input)
{
    struct note *note = &world.notes[world.note_count];
    uint8_t way = next_byte(input);
    size_t length = way < 160   ? way
                    : way < 200 ? KVTI_NOTE_MAX - (way - 160u)
                    : way < 210 ? KVTI_NOTE_MAX + 1
                                : 0;

    if (world.note_count == JOBS_MAX) {
        return;
    }
    kvti_list_init(&note->job.node);
    note->job.kind = way < 232 ? KVTI_JOB_NOTIFY : KVTI_JOB_CONNECT;
    note->job.deadline_ns = (way & 3) == 3 ? 1 : UINT64_MAX;
    memset(packet, (int)world.note_count, length);
    kvti_assert(kvti_buf_append(&note->job.buf, packet, length) == KVT_OK);
    world.note_count++;
    kvti_local_out_add(&world.conn, &note->job);
}

static void step_turn(struct input *input)
{
    uint8_t way = next_byte(input);

    if (way >= 248) {
        world.watches.fail = way - 247u;
        return;
    }
    (void)watches_turn(&world.watches);
    (void)kvti_local_out_turn(&world.engine, way < 128 ? 0 : LATE_NS);
}

/* --------------------------------------------------------------- the other side */

static void check_hello(ssize_t length)
{
    struct kvti_note_hello hello;

    kvti_assert(length == (ssize_t)sizeof hello);
    memcpy(&hello, packet, sizeof hello);
    kvti_assert(hello.magic == KVTI_NOTE_MAGIC &&
                hello.version == KVTI_NOTE_VERSION);
    kvti_assert(
        memcmp(hello.sender, world.incarnation, sizeof hello.sender) == 0 &&
        memcmp(hello.target, world.target.incarnation, sizeof hello.target) ==
            0);
    kvti_assert(strcmp(hello.agent_name, "us") == 0);
}

static void check_message(ssize_t length)
{
    struct kvti_note_head head;
    const struct note *note;

    while (world.next < world.note_count && !world.notes[world.next].sent) {
        world.next++;
    }
    kvti_assert(world.next < world.note_count);
    note = &world.notes[world.next];
    memcpy(&head, packet, sizeof head);
    kvti_assert(length == (ssize_t)(sizeof head + note->job.buf.length));
    kvti_assert(head.magic == KVTI_NOTE_MAGIC &&
                head.length == note->job.buf.length);
    kvti_assert(note->job.buf.length == 0 ||
                memcmp(packet + sizeof head, note->job.buf.data,
                       note->job.buf.length) == 0);
    world.next++;
}

/* False: nothing is there now. */
static bool read_one(void)
{
    ssize_t length;

    if (world.accepted < 0) {
        world.accepted = world.listener < 0
                             ? -1
                             : accept4(world.listener, NULL, NULL,
                                       SOCK_CLOEXEC | SOCK_NONBLOCK);
    }
    if (world.accepted < 0) {
        return false;
    }
    length = recv(world.accepted, packet, sizeof packet, MSG_DONTWAIT);
    if (length <= 0) {
        return false;
    }
    /* Whoever is not the process of the metadata is told nothing. */
    kvti_assert(world.proc.pid == getpid());
    if (!world.greeted) {
        check_hello(length);
        world.greeted = true;
    } else {
        check_message(length);
    }
    return true;
}

/* Packets that nobody has asked for, one with a descriptor. */
static void step_junk(struct input *input)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)),
                          .cmsg_level = SOL_SOCKET,
                          .cmsg_type = SCM_RIGHTS}};
    const int right = STDERR_FILENO;
    struct iovec part = {.iov_base = packet, .iov_len = next_byte(input)};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.room,
                             .msg_controllen = sizeof control.room};

    memcpy(CMSG_DATA(&control.head), &right, sizeof right);
    if (world.accepted >= 0) {
        (void)sendmsg(world.accepted, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

static void step_other(struct input *input)
{
    uint8_t way = next_byte(input);

    switch (way & 7) {
    case 0:
    case 1:
        for (unsigned i = 0; i <= way >> 3; i++) {
            (void)read_one();
        }
        break;
    case 2:
        if (world.accepted >= 0) {
            (void)shutdown(world.accepted, SHUT_RD);
            world.deaf = true;
        }
        break;
    case 3:
        if (world.accepted >= 0) {
            close(world.accepted);
            world.accepted = -1;
            world.deaf = true;
        }
        break;
    case 4:
        if (world.listener >= 0) {
            close(world.listener);
            world.listener = -1;
            world.deaf = world.deaf || world.accepted < 0;
        }
        break;
    case 5:
        open_listener();
        break;
    default:
        step_junk(input);
        break;
    }
}

/* ------------------------------------------------------------------------ end */

/* What was reported as sent is there, if it was not thrown away. */
static void check_arrived(void)
{
    while (read_one()) {
    }
    for (size_t i = world.next; i < world.note_count && !world.deaf; i++) {
        kvti_assert(!world.notes[i].sent);
    }
}

static void close_world(void)
{
    kvti_local_out_drop(&world.conn, "the peer is unloaded");
    kvti_assert(world.reports == world.note_count);
    for (size_t i = 0; i < world.note_count; i++) {
        kvti_assert(world.notes[i].reported);
        kvti_buf_fini(&world.notes[i].job.buf);
    }
    kvti_assert(world.downs <= 1 && world.watches.count == 0);
    kvti_assert(kvti_list_empty(&world.engine.out_waiting));
    if (world.accepted >= 0) {
        close(world.accepted);
    }
    if (world.listener >= 0) {
        close(world.listener);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {.at = data, .left = size};
    int descriptors = count_descriptors();

    open_world(next_byte(&input));
    for (size_t i = 0; i < STEPS_MAX && input.left > 0; i++) {
        switch (next_below(&input, 4)) {
        case 0:
        case 1:
            step_job(&input);
            break;
        case 2:
            step_turn(&input);
            break;
        default:
            step_other(&input);
            break;
        }
    }
    check_arrived();
    close_world();
    kvti_assert(count_descriptors() == descriptors);
    return 0;
}
