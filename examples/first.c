/* Two agents in one process: block 7 of one lands in block 3 of the other. */
#include <kvt/kvt.h>

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

static char source[16][4096], target[16][4096];

#define TRY(call) (call) < 0 ? (puts(err.text), exit(1)) : (void)0

int main(void)
{
    struct kvt_error err;
    kvt_transport *prefill, *decode;
    TRY(kvt_open(NULL, &prefill, &err));
    TRY(kvt_open(NULL, &decode, &err));
    struct kvt_region from = {.addr = (uintptr_t)source,
                              .length = sizeof source};
    struct kvt_region to = {.addr = (uintptr_t)target, .length = sizeof target};
    TRY(kvt_register(prefill, &from, 1, 0, &err));
    TRY(kvt_register(decode, &to, 1, 0, &err));

    char metadata[4096]; /* travels to the other side by your own means */
    size_t length;
    TRY(kvt_metadata(decode, metadata, sizeof metadata, &length, &err));
    struct kvt_peer_params params = {.size = sizeof params,
                                     .name = "decode",
                                     .metadata = metadata,
                                     .metadata_length = length};
    kvt_peer peer;
    TRY(kvt_peer_add(prefill, &params, &peer, &err));

    kvt_layout ours, theirs; /* 16 blocks of 4 KiB on either side */
    struct kvt_run run = {.addr = from.addr,
                          .block_bytes = 4096,
                          .stride_bytes = 4096,
                          .count = 16};
    TRY(kvt_prepare(prefill, KVT_SELF, "kv", &run, 1, &ours, &err));
    run.addr = to.addr;
    TRY(kvt_prepare(prefill, peer, "kv", &run, 1, &theirs, &err));

    source[7][0] = 'x';
    uint32_t seven = 7, three = 3;
    struct kvt_indices src = {.data = &seven, .count = 1},
                       dst = {.data = &three, .count = 1};
    struct pollfd ready = {.fd = kvt_fd(prefill), .events = POLLIN};
    struct kvt_result result;
    kvt_xfer id;
    TRY(kvt_write_blocks(prefill, peer, ours, &src, theirs, &dst, NULL, &id,
                         &err));
    poll(&ready, 1, -1);
    TRY(kvt_poll(prefill, peer, &result, 1));
    printf("%s: block 3 begins with '%c'\n",
           result.state == KVT_DONE ? "done" : result.text, target[3][0]);
    kvt_free(prefill);
    kvt_free(decode);
    return result.state == KVT_DONE ? 0 : 1;
}
