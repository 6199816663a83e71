/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A host of one transport of the engine nixl, in a process of its own: u32
 * length and bytes on its standard input, one byte of enum verdict back. It
 * may die of what it is given, which is what is to be found out.
 */
#include "storm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "diag.h"

/* Each load leaves sockets behind, and an agent without descriptors refuses
 * all. */
#define LOADS_MAX 100u
/* Some metadata kills NIXL only when it goes on with what it began: as long as
 * the probe process looks on (src/probe.c). */
#define AFTERMATH_MS 30
#define PATIENCE_MS 180000

/* ---------------------------------------------------------------- the process */

static bool read_all(int fd, void *to, size_t length)
{
    uint8_t *at = to;

    while (length > 0) {
        ssize_t got = read(fd, at, length);

        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        at += got;
        length -= (size_t)got;
    }
    return true;
}

static enum verdict try_blob(kvt_transport *t, const void *bytes, size_t length)
{
    const struct kvt_peer_params params = {.size = sizeof params,
                                           .name = "mutant",
                                           .metadata = bytes,
                                           .metadata_length = length};
    struct kvt_error err;
    kvt_peer peer;
    int code = kvt_peer_add(t, &params, &peer, &err);

    if (code == KVT_OK) {
        (void)poll(NULL, 0, AFTERMATH_MS);
        (void)kvt_peer_remove(t, peer);
        return VERDICT_LOADED;
    }
    if (code == KVT_EMETADATA || code == KVT_EINVAL) {
        return strstr(err.text, "probe process") != NULL ? VERDICT_CAUGHT
                                                         : VERDICT_STRUCTURE;
    }
    return code == KVT_ETIMEDOUT ? VERDICT_LATE : VERDICT_REFUSED;
}

int host_main(bool probes)
{
    const struct kvt_options options = {
        .size = sizeof options,
        .engine = "nixl",
        .flags = KVT_OPEN_NO_SAME_HOST |
                 (probes ? (uint32_t)KVT_OPEN_PROBE_METADATA : 0)};
    /* UCX writes its errors to standard output. */
    int answers = dup(STDOUT_FILENO);
    struct kvt_error err;
    kvt_transport *t;
    uint32_t length;

    (void)dup2(STDERR_FILENO, STDOUT_FILENO);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kvt_open(&options, &t, &err) != KVT_OK) {
        (void)fprintf(stderr, "blob_storm: %s\n", err.text);
        return EXIT_FAILURE;
    }
    while (read_all(STDIN_FILENO, &length, sizeof length)) {
        uint8_t *bytes = malloc(length > 0 ? length : 1);
        uint8_t verdict;

        if (bytes == NULL || !read_all(STDIN_FILENO, bytes, length)) {
            break;
        }
        verdict = (uint8_t)try_blob(t, bytes, length);
        free(bytes);
        if (write(answers, &verdict, 1) != 1) {
            break;
        }
    }
    /* What damage has left in NIXL is not to be taken down. */
    _exit(EXIT_SUCCESS);
}

/* ------------------------------------------------------------------ its parent */

static void start(struct host *host)
{
    char *const arguments[] = {
        (char[]){"blob_storm"}, (char[]){"--host"},
        host->probes ? (char[]){"probe"} : (char[]){"bare"}, NULL};
    posix_spawn_file_actions_t actions;
    int to[2];
    int from[2];

    kvti_assert(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    kvti_assert(posix_spawn_file_actions_init(&actions) == 0);
    (void)posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    (void)posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    if (getenv("KVT_STORM_TALK") == NULL) {
        /* UCX has a page to say about every signal. */
        (void)posix_spawn_file_actions_addopen(&actions, STDERR_FILENO,
                                               "/dev/null", O_WRONLY, 0);
    }
    kvti_assert(posix_spawn(&host->pid, "/proc/self/exe", &actions, NULL,
                            arguments, environ) == 0);
    (void)posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    host->to = to[1];
    host->from = from[0];
    host->loads = 0;
}

void host_end(struct host *host)
{
    if (host->pid == 0) {
        return;
    }
    close(host->to);
    close(host->from);
    (void)kill(host->pid, SIGKILL); /* does nothing to one that has died */
    while (waitpid(host->pid, &host->status, 0) < 0 && errno == EINTR) {
    }
    host->pid = 0;
}

enum verdict host_load(struct host *host, const struct blob *blob)
{
    uint32_t length = (uint32_t)blob->length;
    struct pollfd answer;
    uint8_t verdict;

    if (host->pid != 0 && host->loads >= LOADS_MAX) {
        host_end(host);
    }
    if (host->pid == 0) {
        start(host);
    }
    answer = (struct pollfd){.fd = host->from, .events = POLLIN};
    if (write(host->to, &length, sizeof length) != (ssize_t)sizeof length ||
        write(host->to, blob->bytes, length) != (ssize_t)length ||
        poll(&answer, 1, PATIENCE_MS) != 1 ||
        read(host->from, &verdict, 1) != 1) {
        host_end(host);
        return VERDICT_DEAD;
    }
    /* What kvt's structure check refuses leaves nothing. */
    host->loads += verdict != VERDICT_STRUCTURE;
    return (enum verdict)verdict;
}

enum verdict host_load_surely(struct host *host, const struct blob *blob,
                              bool *ret_after)
{
    enum verdict verdict = host_load(host, blob);

    *ret_after = false;
    if (verdict == VERDICT_DEAD) {
        verdict = host_load(host, blob);
        *ret_after = verdict != VERDICT_DEAD;
    }
    return verdict;
}
