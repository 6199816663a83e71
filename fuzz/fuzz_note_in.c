/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a hostile or broken process may send to the local engine's notification
 * socket. Up to four senders connect to a real listener and send as the input
 * orders: greetings and messages that are right or wrong in one byte, packets
 * that are empty, too long, or carry descriptors; they flood, hang up, and are
 * not read when the core has no room. A model says what each has a right to see
 * delivered, in its order, and whether the engine must have hung up on it. No
 * descriptor may be left at the end.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engines/local.h"
#include "input.h"
#include "watches.h"

#define SENDERS_MAX 4
#define NOTES_MAX 600 /* of one sender: more than a burst of reads */
#define STEPS_MAX 64
#define PACKET_MAX (KVTI_NOTE_MAX + 64)
#define RIGHTS_MAX 3

struct sender {
    int fd; /* -1: not there, or hung up */
    bool connected;
    bool greeted;
    bool guilty;               /* it has sent what must not be */
    bool over;                 /* it has hung up */
    uint32_t notes[NOTES_MAX]; /* lengths; the bytes follow from them */
    size_t note_count;
    size_t delivered;
};

struct world {
    struct watches watches;
    struct kvti_env env;
    struct kvti_local engine;
    struct sender senders[SENDERS_MAX];
    uint8_t incarnation[KVTI_INCARNATION_BYTES];
    uint64_t room;   /* of the core's queue */
    unsigned rights; /* descriptors that go with the next packet */
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

/* The n-th byte of a message of this length by this sender. */
static uint8_t pattern(size_t sender, uint32_t length, uint32_t at)
{
    return (uint8_t)(31 * sender + length + 7 * at);
}

static bool report_note(void *ctx, const char *agent_name, const void *bytes,
                        size_t length)
{
    size_t which = (size_t)(agent_name[0] - 'a');
    const uint8_t *got = bytes;
    struct sender *sender;

    (void)ctx;
    if (world.room == 0) {
        return false;
    }
    world.room--;
    kvti_assert(which < SENDERS_MAX && strcmp(agent_name + 1, " agent") == 0);
    sender = &world.senders[which];
    kvti_assert(sender->delivered < sender->note_count);
    kvti_assert(length == sender->notes[sender->delivered]);
    for (uint32_t i = 0; i < length; i++) {
        kvti_assert(got[i] == pattern(which, (uint32_t)length, i));
    }
    sender->delivered++;
    return true;
}

static void open_world(void)
{
    struct kvt_error err;

    memset(&world, 0, sizeof world);
    memset(world.incarnation, 0x5a, sizeof world.incarnation);
    world.env = (struct kvti_env){.watch = watch,
                                  .unwatch = unwatch,
                                  .report_note = report_note,
                                  .agent_name = "us",
                                  .incarnation = world.incarnation};
    world.engine.env = &world.env;
    world.engine.self.uid = getuid();
    kvti_list_init(&world.engine.ins);
    kvti_list_init(&world.engine.ins_dead);
    for (size_t i = 0; i < SENDERS_MAX; i++) {
        world.senders[i].fd = -1;
    }
    kvti_assert(kvti_local_listen(&world.engine, &err) == KVT_OK);
}

/* -------------------------------------------------------------------- senders */

static void step_connect(struct sender *sender)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(world.engine.self.socket_name);

    if (sender->connected) {
        return;
    }
    memcpy(name.sun_path + 1, world.engine.self.socket_name, length);
    sender->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK,
                        0);
    kvti_assert(sender->fd >= 0);
    kvti_assert(connect(sender->fd, (const struct sockaddr *)&name,
                        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                                    length)) == 0);
    sender->connected = true;
}

/* Whether the kernel took it; it takes nothing for who was hung up on. */
static bool give(struct sender *sender, size_t length)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(RIGHTS_MAX * sizeof(int))];
    } control = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    const int rights[RIGHTS_MAX] = {sender->fd, sender->fd, STDERR_FILENO};
    struct iovec part = {.iov_base = packet, .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

    if (sender->fd < 0 || sender->over) {
        return false;
    }
    if (world.rights > 0) {
        control.head.cmsg_len = CMSG_LEN(world.rights * sizeof(int));
        memcpy(CMSG_DATA(&control.head), rights, world.rights * sizeof(int));
        message.msg_control = control.room;
        message.msg_controllen = CMSG_SPACE(world.rights * sizeof(int));
        world.rights = 0;
    }
    if (sendmsg(sender->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        kvti_assert(errno == EAGAIN || errno == EMSGSIZE || sender->guilty ||
                    world.watches.failed);
        return false;
    }
    return true;
}

static void step_greet(struct input *input, size_t which)
{
    struct sender *sender = &world.senders[which];
    struct kvti_note_hello hello = {.magic = KVTI_NOTE_MAGIC,
                                    .version = KVTI_NOTE_VERSION};
    uint8_t way = next_byte(input);
    size_t length = sizeof hello;

    memcpy(hello.target, world.incarnation, sizeof hello.target);
    hello.agent_name[0] = (char)('a' + which);
    memcpy(hello.agent_name + 1, " agent", 6);
    if (way >= 224) {
        memset(hello.agent_name, 'a', sizeof hello.agent_name);
    } else if (way >= 208) {
        hello.agent_name[0] = '\0';
    } else if (way >= 192) {
        length = way & 1 ? length - 1 - way % 16 : length + 1;
    }
    memset(packet, 0, sizeof hello + 1);
    memcpy(packet, &hello, sizeof hello);
    if (way >= 128 && way < 192) {
        /* One byte before the name; that of the sender says nothing. */
        packet[next_below(input, 8)] ^= (uint8_t)(1 + next_below(input, 255));
    } else if (way >= 96 && way < 128) {
        packet[offsetof(struct kvti_note_hello, target) + way % 16] ^= 1;
    } else if (way >= 64 && way < 96) {
        packet[offsetof(struct kvti_note_hello, sender) + way % 16] ^= 1;
    }
    if (give(sender, length) && !sender->guilty) {
        /* A second greeting is no message. */
        sender->guilty = sender->greeted || way >= 96;
        sender->greeted = true;
    }
}

static void put_note(size_t which, uint32_t magic, uint32_t said,
                     uint32_t length)
{
    const struct kvti_note_head head = {.magic = magic, .length = said};

    memcpy(packet, &head, sizeof head);
    for (uint32_t i = 0; i < length; i++) {
        packet[sizeof head + i] = pattern(which, length, i);
    }
}

static void give_note(size_t which, uint32_t length)
{
    struct sender *sender = &world.senders[which];

    if (sender->note_count == NOTES_MAX) {
        return;
    }
    put_note(which, KVTI_NOTE_MAGIC, length, length);
    if (give(sender, sizeof(struct kvti_note_head) + length) &&
        !sender->guilty) {
        /* A message before the greeting is none. */
        sender->guilty = !sender->greeted;
        if (sender->greeted) {
            sender->notes[sender->note_count++] = length;
        }
    }
}

static void step_note(struct input *input, size_t which)
{
    uint8_t way = next_byte(input);

    if (way >= 240) {
        for (size_t i = 0; i < 300; i++) {
            give_note(which, (uint32_t)(i & 3));
        }
    } else {
        give_note(which, way < 200 ? way : KVTI_NOTE_MAX - (way - 200));
    }
}

/* Whatever comes before it, nothing after it counts. */
static void step_wrong(struct input *input, size_t which)
{
    struct sender *sender = &world.senders[which];
    uint32_t length = next_byte(input);
    size_t bytes = sizeof(struct kvti_note_head) + length;

    switch (next_below(input, 8)) {
    case 0:
        put_note(which, KVTI_NOTE_MAGIC, length + 1, length);
        break;
    case 1:
        put_note(which, KVTI_NOTE_MAGIC, length - 1, length);
        break;
    case 2:
        put_note(which, KVTI_NOTE_MAGIC ^ (1 + length), length, length);
        break;
    case 3:
        bytes = length % sizeof(struct kvti_note_head);
        break;
    case 4:
        put_note(which, KVTI_NOTE_MAGIC, (uint32_t)next_number(input) | 256u,
                 length);
        break;
    default:
        /* Too long; it may say that it ends where the engine's buffer does. */
        length = KVTI_NOTE_MAX + 1 + length % 32;
        put_note(which, KVTI_NOTE_MAGIC,
                 (length & 1) != 0 ? length : KVTI_NOTE_MAX, length);
        bytes = sizeof(struct kvti_note_head) + length;
        break;
    }
    if (give(sender, bytes)) {
        sender->guilty = true;
    }
}

static void step_hang_up(struct input *input, struct sender *sender)
{
    if (sender->fd < 0) {
        return;
    }
    sender->over = true;
    if ((next_byte(input) & 1) != 0) {
        (void)shutdown(sender->fd, SHUT_WR);
        return;
    }
    close(sender->fd);
    sender->fd = -1;
}

/* ------------------------------------------------------------------------ run */

static size_t turn(void)
{
    size_t told = watches_turn(&world.watches);

    (void)kvti_local_listen_turn(&world.engine, UINT64_MAX - 1);
    kvti_local_ins_sweep(&world.engine);
    return told;
}

static void step_core(struct input *input)
{
    uint8_t way = next_byte(input);

    if (way < 200) {
        (void)turn();
    } else if (way < 248) {
        world.room += (uint64_t)way - 200;
        kvti_local_notes_wanted(&world.engine);
    } else {
        world.watches.fail = way - 247u;
    }
}

static void take_step(struct input *input)
{
    uint8_t way = next_byte(input);
    size_t which = way & 3;
    struct sender *sender = &world.senders[which];

    switch (way >> 2 & 7) {
    case 0:
        step_connect(sender);
        break;
    case 1:
        step_greet(input, which);
        break;
    case 2:
    case 3:
        step_note(input, which);
        break;
    case 4:
        step_wrong(input, which);
        break;
    case 5:
        step_hang_up(input, sender);
        break;
    case 6:
        step_core(input);
        break;
    default:
        world.rights = 1 + (way >> 5) % RIGHTS_MAX;
        break;
    }
}

/* Gone as the sender sees it. */
static bool is_hung_up_on(const struct sender *sender)
{
    char byte;
    ssize_t got = recv(sender->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);

    kvti_assert(got <= 0); /* the engine never answers */
    return got == 0 || errno != EAGAIN;
}

static void check_sender(const struct sender *sender)
{
    if (!sender->connected) {
        return;
    }
    /* All before the first wrong packet, and nothing after it. */
    kvti_assert(sender->delivered == sender->note_count ||
                world.watches.failed);
    if (sender->fd >= 0 && !world.watches.failed) {
        kvti_assert(is_hung_up_on(sender) == (sender->guilty || sender->over));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {.at = data, .left = size};
    int descriptors = count_descriptors();

    open_world();
    world.room = next_below(&input, 8);
    for (size_t i = 0; i < STEPS_MAX && input.left > 0; i++) {
        take_step(&input);
    }
    /* The core has room: everything comes, however it lay. */
    world.watches.fail = 0;
    world.room = UINT64_MAX;
    do {
        kvti_local_notes_wanted(&world.engine);
    } while (turn() > 0 || world.engine.held);
    for (size_t i = 0; i < SENDERS_MAX; i++) {
        check_sender(&world.senders[i]);
    }
    kvti_local_unlisten(&world.engine);
    kvti_assert(world.watches.count == 0 && world.engine.in_count == 0);
    for (size_t i = 0; i < SENDERS_MAX; i++) {
        if (world.senders[i].fd >= 0) {
            kvti_assert(is_hung_up_on(&world.senders[i]));
            close(world.senders[i].fd);
        }
    }
    kvti_assert(count_descriptors() == descriptors);
    return 0;
}
