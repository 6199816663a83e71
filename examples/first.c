/* SPDX-License-Identifier: Apache-2.0 */
/* Two agents in one process: block 7 of one lands in block 3 of the other. */
#include <kvt/kvt.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

static struct kvt_error err;
static char source[16][4096], target[16][4096]; /* 16 blocks of 4 KiB each */

static void check(int code)
{
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", kvt_errname(code), err.text);
        exit(1);
    }
}

static kvt_transport *agent(char *memory)
{
    struct kvt_options options = {.size = sizeof options, .engine = "local"};
    struct kvt_region region = {.addr = (uintptr_t)memory,
                                .length = sizeof source};
    kvt_transport *t;
    check(kvt_open(&options, &t, &err));
    check(kvt_register(t, &region, 1, 0, &err));
    return t;
}

static kvt_layout layout(kvt_transport *t, kvt_peer side, char *memory)
{
    struct kvt_run run = {(uintptr_t)memory, 4096, 4096, 16, KVT_DRAM, 0};
    kvt_layout id;
    check(kvt_prepare(t, side, "kv", &run, 1, &id, &err));
    return id;
}

int main(void)
{
    kvt_transport *prefill = agent(source[0]), *decode = agent(target[0]);
    char metadata[4096]; /* travels to the other side by your own means */
    struct kvt_peer_params params = {.size = sizeof params, .name = "decode"};
    uint32_t seven = 7, three = 3;
    struct kvt_indices from = {.data = &seven, .count = 1};
    struct kvt_indices to = {.data = &three, .count = 1};
    struct pollfd ready = {.fd = kvt_fd(prefill), .events = POLLIN};
    struct kvt_result result;
    kvt_peer peer;
    kvt_xfer id;
    int count;

    check(kvt_metadata(decode, metadata, sizeof metadata,
                       &params.metadata_length, &err));
    params.metadata = metadata;
    check(kvt_peer_add(prefill, &params, &peer, &err));
    source[7][0] = 'x';
    check(kvt_write_blocks(prefill, peer, layout(prefill, KVT_SELF, source[0]),
                           &from, layout(prefill, peer, target[0]), &to, NULL,
                           &id, &err));
    while ((count = kvt_poll(prefill, peer, &result, 1)) == 0) {
        poll(&ready, 1, -1); /* or your own event loop */
    }
    check(count);
    printf("%s: block 3 begins with '%c'\n",
           result.state == KVT_DONE ? "done" : result.text, target[3][0]);
    check(kvt_close(prefill, 0, &err)); /* after this, memory may go */
    check(kvt_close(decode, 0, &err));
    kvt_free(prefill);
    kvt_free(decode);
    return result.state == KVT_DONE ? 0 : 1;
}
