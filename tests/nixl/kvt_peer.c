/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt's side of the tests with plain NIXL: one transport, driven over standard
 * input and output, so that the tests themselves can be Python, kill this
 * process, and start it on another NIXL. One line a command, words between
 * spaces, bytes as hex ("-" for none); the answer is one line, "ok …" or
 * "err CODE text". Sees the public header only.
 *
 *   open NAME [probe] [grace=MS] [workers=N] [sigchld=ignore|reap]
 *                              a transport of the engine in argv[1], in a host
 *                              that ignores SIGCHLD or reaps every child
 *   map BYTES                  -> address of fresh zeroed memory
 *   poke ADDR HEX, peek ADDR BYTES
 *   register ADDR BYTES …, deregister ADDR BYTES …
 *   metadata                   -> hex
 *   add PEER HEX, reload PEER HEX, remove PEER
 *   start PEER HEX             adds it and does not wait
 *   dead PEER                  confirms that its process is gone
 *   peer PEER                  -> state, path, regions, code, text
 *   write|read PEER NOTE LOCAL REMOTE BYTES …   waits -> state, flags, code,
 *                              bytes done, text
 *   prepare PEER|- LAYOUT (ADDR BLOCK STRIDE COUNT) …
 *   push|pull PEER NOTE LAYOUT LAYOUT (INDEX INDEX) …   by blocks, as write
 *   notify PEER HEX
 *   note SECONDS               waits -> sender, hex
 *   stats                      -> bytes by nixl, bytes by local, lost and
 *                              not proven
 *   ping                       -> nothing: we are alive
 */
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvt/kvt.h>

#define WAIT_MS 60000
#define NOTE_MAX 65536

struct words {
    char *at[8192];
    size_t count;
};

static const char *engine = "nixl";
static kvt_transport *transport;
static FILE *answers; /* not stdout: UCX writes its errors there */

static void __attribute__((format(printf, 1, 2)))
answer(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vfprintf(answers, format, args);
    va_end(args);
    (void)fputc('\n', answers);
    (void)fflush(answers);
}

static void answer_code(int code, const struct kvt_error *err)
{
    if (code >= KVT_OK) {
        answer("ok");
    } else {
        answer("err %s %s", kvt_errname(code),
               err->code == code ? err->text : kvt_strerror(code));
    }
}

static void answer_hex(const char *before, const unsigned char *bytes,
                       size_t length)
{
    (void)fprintf(answers, "ok%s ", before);
    for (size_t i = 0; i < length; i++) {
        (void)fprintf(answers, "%02x", bytes[i]);
    }
    if (length == 0) {
        (void)fputc('-', answers);
    }
    answer("%s", "");
}

/* The numbers that the test gave back to us are trusted: a wrong one is the
 * test's bug and ends the process. */
static uint64_t number(const struct words *words, size_t i)
{
    if (i >= words->count) {
        (void)fprintf(stderr, "kvt_peer: too few words\n");
        exit(EXIT_FAILURE);
    }
    return strtoull(words->at[i], NULL, 0);
}

static const char *word(const struct words *words, size_t i)
{
    (void)(i < words->count ? 0 : number(words, i));
    return words->at[i];
}

static unsigned char *pointer(uint64_t addr)
{
    return (unsigned char *)(uintptr_t)addr; /* NOLINT */
}

static unsigned char nibble(char digit)
{
    return (unsigned char)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

/* malloc()ed; NULL for "-". */
static unsigned char *bytes_of(const char *hex, size_t *ret_length)
{
    size_t length = strcmp(hex, "-") == 0 ? 0 : strlen(hex) / 2;
    unsigned char *bytes = length == 0 ? NULL : malloc(length);

    for (size_t i = 0; bytes != NULL && i < length; i++) {
        bytes[i] = (unsigned char)(nibble(hex[2 * i]) << 4 |
                                   nibble(hex[2 * i + 1]));
    }
    *ret_length = length;
    return bytes;
}

static kvt_peer find(const char *name)
{
    kvt_peer peer = 0;

    return kvt_peer_find(transport, name, &peer) == KVT_OK ? peer : 0;
}

/* -------------------------------------------------------------- this side */

static void reap_all(int number)
{
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
}

static void set_sigchld(const char *how)
{
    if (signal(SIGCHLD, strcmp(how, "reap") == 0 ? reap_all : SIG_IGN) ==
        SIG_ERR) {
        (void)fprintf(stderr, "kvt_peer: signal\n");
    }
}

static void do_open(const struct words *words)
{
    struct kvt_options options = {
        .size = sizeof(options),
        .engine = engine,
        .agent_name = word(words, 1),
    };
    struct kvt_error err;

    for (size_t i = 2; i < words->count; i++) {
        if (strcmp(words->at[i], "probe") == 0) {
            options.flags |= KVT_OPEN_PROBE_METADATA;
        } else if (strncmp(words->at[i], "grace=", 6) == 0) {
            options.grace_ns = strtoull(words->at[i] + 6, NULL, 10) * 1000000;
        } else if (strncmp(words->at[i], "sigchld=", 8) == 0) {
            set_sigchld(words->at[i] + 8);
        } else if (strncmp(words->at[i], "workers=", 8) == 0) {
            options.workers = (uint32_t)strtoul(words->at[i] + 8, NULL, 10);
        }
    }
    answer_code(kvt_open(&options, &transport, &err), &err);
}

static void do_map(const struct words *words)
{
    void *memory = mmap(NULL, number(words, 1), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        answer("err KVT_ENOMEM mmap");
    } else {
        answer("ok %p", memory);
    }
}

static void do_poke(const struct words *words)
{
    size_t length;
    unsigned char *bytes = bytes_of(word(words, 2), &length);

    if (bytes != NULL) {
        memcpy(pointer(number(words, 1)), bytes, length);
    }
    free(bytes);
    answer("ok");
}

static void do_regions(const struct words *words, bool add)
{
    size_t count = (words->count - 1) / 2;
    struct kvt_region *regions = calloc(count + 1, sizeof(*regions));
    struct kvt_error err;

    for (size_t i = 0; regions != NULL && i < count; i++) {
        regions[i].addr = number(words, 1 + 2 * i);
        regions[i].length = number(words, 2 + 2 * i);
    }
    answer_code(add ? kvt_register(transport, regions, count, 0, &err)
                    : kvt_deregister(transport, regions, count, 0, &err),
                &err);
    free(regions);
}

static void do_metadata(void)
{
    static unsigned char buffer[8u << 20];
    struct kvt_error err;
    size_t length;
    int code = kvt_metadata(transport, buffer, sizeof(buffer), &length, &err);

    if (code == KVT_OK) {
        answer_hex("", buffer, length);
    } else {
        answer_code(code, &err);
    }
}

/* ------------------------------------------------------------------- peers */

static void do_add(const struct words *words, bool wait)
{
    struct kvt_error err;
    size_t length;
    unsigned char *bytes = bytes_of(word(words, 2), &length);
    const struct kvt_peer_params params = {
        .size = sizeof(params),
        .name = word(words, 1),
        .metadata = bytes,
        .metadata_length = length,
    };
    kvt_peer peer;
    kvt_xfer xfer;

    answer_code(
        wait ? kvt_peer_add(transport, &params, &peer, &err)
             : kvt_peer_add_async(transport, &params, &peer, &xfer, &err),
        &err);
    free(bytes);
}

static void do_reload(const struct words *words)
{
    struct kvt_error err;
    size_t length;
    unsigned char *bytes = bytes_of(word(words, 2), &length);

    answer_code(kvt_peer_reload(transport, find(word(words, 1)), bytes, length,
                                0, &err),
                &err);
    free(bytes);
}

static void do_peer(const struct words *words)
{
    static const char *const states[] = {"adding", "loaded", "disconnected",
                                         "unloaded", "reloading"};
    struct kvt_peer_info info;
    int code = kvt_peer_info(transport, find(word(words, 1)), &info);

    if (code != KVT_OK) {
        answer("err %s peer", kvt_errname(code));
        return;
    }
    answer("ok %s %s %llu %s %s", states[info.state],
           info.path[0] == '\0' ? "-" : info.path,
           (unsigned long long)info.region_count, kvt_errname(info.code),
           info.text);
}

/* --------------------------------------------------------------- transfers */

static void answer_result(const struct kvt_result *result)
{
    static const char *const states[] = {
        "queued",       "progress",   "done",      "rejected",  "failed",
        "disconnected", "unreadable", "cancelled", "timed_out", "lost"};

    answer("ok %s %u %s %llu %s", states[result->state], result->flags,
           kvt_errname(result->code), (unsigned long long)result->bytes_done,
           result->text);
}

static void wait_result(kvt_peer peer, kvt_xfer xfer)
{
    struct pollfd ready = {.fd = kvt_fd(transport), .events = POLLIN};
    struct kvt_result result;

    while (kvt_poll(transport, peer, &result, 1) != 1) {
        if (poll(&ready, 1, WAIT_MS) != 1) {
            answer("err KVT_ETIMEDOUT no result");
            return;
        }
    }
    if (result.id != xfer) {
        answer("err KVT_E? another transfer's result");
        return;
    }
    answer_result(&result);
}

static void do_copy(const struct words *words, bool write)
{
    size_t count = (words->count - 3) / 3;
    struct kvt_copy *copies = calloc(count + 1, sizeof(*copies));
    struct kvt_xfer_options options = {.size = sizeof(options)};
    unsigned char *note = bytes_of(word(words, 2), &options.note_length);
    kvt_peer peer = find(word(words, 1));
    struct kvt_error err;
    kvt_xfer xfer;
    int code;

    options.note = note;
    options.timeout_ns = UINT64_C(30000000000);
    for (size_t i = 0; copies != NULL && i < count; i++) {
        copies[i].local_addr = number(words, 3 + 3 * i);
        copies[i].peer_addr = number(words, 4 + 3 * i);
        copies[i].length = number(words, 5 + 3 * i);
    }
    code = write ? kvt_write(transport, peer, copies, count, &options, &xfer,
                             &err)
                 : kvt_read(transport, peer, copies, count, &options, &xfer,
                            &err);
    free(copies);
    free(note);
    if (code == KVT_OK) {
        wait_result(peer, xfer);
    } else {
        answer_code(code, &err);
    }
}

static void do_prepare(const struct words *words)
{
    const char *side = word(words, 1);
    size_t count = (words->count - 3) / 4;
    struct kvt_run *runs = calloc(count + 1, sizeof(*runs));
    struct kvt_error err;
    kvt_layout layout;

    for (size_t i = 0; runs != NULL && i < count; i++) {
        runs[i].addr = number(words, 3 + 4 * i);
        runs[i].block_bytes = number(words, 4 + 4 * i);
        runs[i].stride_bytes = number(words, 5 + 4 * i);
        runs[i].count = number(words, 6 + 4 * i);
    }
    answer_code(kvt_prepare(transport,
                            strcmp(side, "-") == 0 ? KVT_SELF : find(side),
                            word(words, 2), runs, count, &layout, &err),
                &err);
    free(runs);
}

static void do_blocks(const struct words *words, bool push)
{
    size_t count = (words->count - 5) / 2;
    uint64_t *ours = calloc(count + 1, sizeof(*ours));
    uint64_t *theirs = calloc(count + 1, sizeof(*theirs));
    struct kvt_xfer_options options = {.size = sizeof(options)};
    unsigned char *note = bytes_of(word(words, 2), &options.note_length);
    kvt_peer peer = find(word(words, 1));
    const struct kvt_indices at[2] = {
        {.data = ours, .count = count, .type = KVT_INDEX_U64},
        {.data = theirs, .count = count, .type = KVT_INDEX_U64}};
    kvt_layout layouts[2] = {0, 0};
    struct kvt_error err;
    kvt_xfer xfer;
    int code;

    options.note = note;
    (void)kvt_layout_find(transport, KVT_SELF, word(words, 3), &layouts[0]);
    (void)kvt_layout_find(transport, peer, word(words, 4), &layouts[1]);
    for (size_t i = 0; ours != NULL && theirs != NULL && i < count; i++) {
        ours[i] = number(words, 5 + 2 * i);
        theirs[i] = number(words, 6 + 2 * i);
    }
    code = (push ? kvt_write_blocks
                 : kvt_read_blocks)(transport, peer, layouts[0], &at[0],
                                    layouts[1], &at[1], &options, &xfer, &err);
    free(ours);
    free(theirs);
    free(note);
    if (code == KVT_OK) {
        wait_result(peer, xfer);
    } else {
        answer_code(code, &err);
    }
}

/* ----------------------------------------------------- notifications, counts */

static void do_notify(const struct words *words)
{
    struct kvt_error err;
    size_t length;
    unsigned char *bytes = bytes_of(word(words, 2), &length);

    answer_code(
        kvt_notify(transport, find(word(words, 1)), bytes, length, &err), &err);
    free(bytes);
}

static void do_note(const struct words *words)
{
    static unsigned char buffer[NOTE_MAX];
    struct pollfd ready = {.fd = kvt_fd(transport), .events = POLLIN};
    struct kvt_notification note;
    char sender[KVT_NAME_MAX + 2];

    while (kvt_notification(transport, &note, buffer, sizeof(buffer)) != 1) {
        if (poll(&ready, 1, (int)number(words, 1) * 1000) != 1) {
            answer("err KVT_ETIMEDOUT no notification");
            return;
        }
    }
    (void)snprintf(sender, sizeof(sender), " %s", note.agent_name);
    answer_hex(sender, buffer, note.length);
}

static void do_stats(void)
{
    struct kvt_stats stats;

    if (kvt_stats(transport, &stats, sizeof(stats)) != KVT_OK) {
        answer("err KVT_EINVAL stats");
        return;
    }
    answer("ok %llu %llu %llu", (unsigned long long)stats.bytes_nixl,
           (unsigned long long)stats.bytes_local,
           (unsigned long long)stats.quarantined);
}

/* -------------------------------------------------------------------- loop */

static void do_this_side(const char *name, const struct words *words)
{
    if (strcmp(name, "open") == 0) {
        do_open(words);
    } else if (strcmp(name, "map") == 0) {
        do_map(words);
    } else if (strcmp(name, "poke") == 0) {
        do_poke(words);
    } else if (strcmp(name, "peek") == 0) {
        answer_hex("", pointer(number(words, 1)), number(words, 2));
    } else if (strcmp(name, "register") == 0) {
        do_regions(words, true);
    } else if (strcmp(name, "deregister") == 0) {
        do_regions(words, false);
    } else if (strcmp(name, "metadata") == 0) {
        do_metadata();
    } else if (strcmp(name, "stats") == 0) {
        do_stats();

    } else if (strcmp(name, "ping") == 0) {
        answer("ok");
    } else {
        answer("err KVT_EINVAL no such command: %s", name);
    }
}

static void do_line(const struct words *words)
{
    const char *name = word(words, 0);

    if (strcmp(name, "add") == 0) {
        do_add(words, true);
    } else if (strcmp(name, "start") == 0) {
        do_add(words, false);
    } else if (strcmp(name, "reload") == 0) {
        do_reload(words);
    } else if (strcmp(name, "remove") == 0) {
        struct kvt_error err = {.code = KVT_OK};

        answer_code(kvt_peer_remove(transport, find(word(words, 1))), &err);
    } else if (strcmp(name, "dead") == 0) {
        struct kvt_error err = {.code = KVT_OK};

        answer_code(kvt_peer_confirm_dead(transport, find(word(words, 1))),
                    &err);
    } else if (strcmp(name, "peer") == 0) {
        do_peer(words);
    } else if (strcmp(name, "write") == 0 || strcmp(name, "read") == 0) {
        do_copy(words, name[0] == 'w');
    } else if (strcmp(name, "prepare") == 0) {
        do_prepare(words);
    } else if (strcmp(name, "push") == 0 || strcmp(name, "pull") == 0) {
        do_blocks(words, strcmp(name, "push") == 0);
    } else if (strcmp(name, "notify") == 0) {
        do_notify(words);
    } else if (strcmp(name, "note") == 0) {
        do_note(words);
    } else {
        do_this_side(name, words);
    }
}

int main(int argc, char **argv)
{
    static struct words words;
    struct kvt_error err;
    char *line = NULL;
    size_t size = 0;
    int code;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    answers = fdopen(dup(STDOUT_FILENO), "w");
    if (answers == NULL || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
        return EXIT_FAILURE;
    }
    if (argc > 1) {
        engine = argv[1];
    }
    while (getline(&line, &size, stdin) > 0) {
        char *rest = line;
        char *next;

        words.count = 0;
        while ((next = strtok_r(rest, " \n", &rest)) != NULL &&
               words.count < sizeof(words.at) / sizeof(words.at[0])) {
            words.at[words.count++] = next;
        }
        if (words.count > 0) {
            do_line(&words);
        }
    }
    free(line);
    (void)fclose(answers);
    code = transport == NULL ? KVT_OK : kvt_close(transport, 0, &err);
    kvt_free(transport);
    if (code != KVT_OK) {
        (void)fprintf(stderr, "kvt_peer: close: %s\n", err.text);
    }
    return code == KVT_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
