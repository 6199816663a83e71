/* SPDX-License-Identifier: Apache-2.0 */
#include "proto.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli.h"

#define HEADER_BYTES 8u

#define READ_BYTES 65536u
#define READS_MAX 16

void proto_open(struct proto *proto, int fd, size_t payload_max)
{
    *proto = (struct proto){.fd = fd, .payload_max = payload_max};
}

void proto_close(struct proto *proto)
{
    if (proto->fd >= 0) {
        (void)close(proto->fd);
    }
    free(proto->in.bytes);
    free(proto->out.bytes);
    *proto = (struct proto){.fd = -1};
}

/* Room for `length` bytes more at the end. */
static unsigned char *reserve(struct proto_buffer *buffer, size_t length)
{
    if (buffer->begin > 0 && buffer->end + length > buffer->capacity) {
        memmove(buffer->bytes, buffer->bytes + buffer->begin,
                buffer->end - buffer->begin);
        buffer->end -= buffer->begin;
        buffer->begin = 0;
    }
    buffer->bytes = cli_grow(buffer->bytes, &buffer->capacity,
                             buffer->end + length, 1);
    return buffer->bytes + buffer->end;
}

void proto_append(struct proto_buffer *buffer, const void *bytes, size_t length)
{
    if (length > 0) {
        memcpy(reserve(buffer, length), bytes, length);
        buffer->end += length;
    }
}

void proto_begin(struct proto *proto, uint32_t type)
{
    uint32_t header[2] = {0, type};

    proto_append(&proto->out, header, sizeof(header));
    /* From the beginning of what is unsent: reserve() may move it. */
    proto->frame = proto->out.end - sizeof(header) - proto->out.begin;
}

void proto_put(struct proto *proto, uint64_t value)
{
    proto_append(&proto->out, &value, sizeof(value));
}

void proto_put_bytes(struct proto *proto, const void *bytes, size_t length)
{
    proto_put(proto, length);
    proto_append(&proto->out, bytes, length);
}

void proto_end(struct proto *proto)
{
    size_t at = proto->out.begin + proto->frame;
    uint32_t length = (uint32_t)(proto->out.end - at - HEADER_BYTES);

    memcpy(proto->out.bytes + at, &length, sizeof(length));
}

bool proto_unsent(const struct proto *proto)
{
    return proto->out.begin < proto->out.end;
}

void proto_shut(struct proto *proto)
{
    (void)shutdown(proto->fd, SHUT_WR);
}

bool proto_flush(struct proto *proto)
{
    struct proto_buffer *out = &proto->out;

    while (out->begin < out->end) {
        ssize_t sent = send(proto->fd, out->bytes + out->begin,
                            out->end - out->begin, MSG_NOSIGNAL);

        if (sent < 0 && errno == EINTR) {
            continue;
        }
        if (sent < 0) {
            return errno == EAGAIN;
        }
        out->begin += (size_t)sent;
    }
    out->begin = 0;
    out->end = 0;
    return true;
}

bool proto_fill(struct proto *proto)
{
    for (int reads = 0; reads < READS_MAX; reads++) {
        unsigned char *to = reserve(&proto->in, READ_BYTES);
        ssize_t got = recv(proto->fd, to, READ_BYTES, 0);

        if (got > 0) {
            proto->in.end += (size_t)got;
            if ((size_t)got == READ_BYTES) {
                continue;
            }
            return true;
        }
        if (got == 0) {
            return false;
        }
        if (errno != EINTR) {
            return errno == EAGAIN;
        }
    }
    return true;
}

int proto_next(struct proto *proto, struct proto_message *ret)
{
    struct proto_buffer *in = &proto->in;
    uint32_t header[2];

    if (in->end - in->begin < HEADER_BYTES) {
        return 0;
    }
    memcpy(header, in->bytes + in->begin, sizeof(header));
    if (header[0] > proto->payload_max) {
        return -1;
    }
    if (in->end - in->begin - HEADER_BYTES < header[0]) {
        return 0;
    }
    ret->type = header[1];
    ret->at = in->bytes + in->begin + HEADER_BYTES;
    ret->end = ret->at + header[0];
    ret->damaged = false;
    in->begin += HEADER_BYTES + header[0];
    return 1;
}

uint64_t proto_take(struct proto_message *message)
{
    uint64_t value;

    if (message->damaged ||
        (size_t)(message->end - message->at) < sizeof(value)) {
        message->damaged = true;
        return 0;
    }
    memcpy(&value, message->at, sizeof(value));
    message->at += sizeof(value);
    return value;
}

size_t proto_take_count(struct proto_message *message, size_t words)
{
    uint64_t count = proto_take(message);
    size_t left = (size_t)(message->end - message->at);

    if (count > left / (words * sizeof(uint64_t))) {
        message->damaged = true;
        return 0;
    }
    return (size_t)count;
}

const void *proto_take_bytes(struct proto_message *message, size_t *ret_length)
{
    uint64_t length = proto_take(message);
    const void *bytes = message->at;

    if (message->damaged || length > (size_t)(message->end - message->at)) {
        message->damaged = true;
        length = 0;
    }
    message->at += length;
    *ret_length = (size_t)length;
    return bytes;
}

void proto_take_text(struct proto_message *message, char *text, size_t capacity)
{
    size_t length;
    const void *bytes = proto_take_bytes(message, &length);

    if (length > capacity - 1) {
        length = capacity - 1;
    }
    if (length > 0) {
        memcpy(text, bytes, length);
        cli_make_plain(text, length, false);
    }
    text[length] = '\0';
}
