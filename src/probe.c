/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvt-probe: loads one agent's metadata into NIXL and takes it back, to see
 * whether NIXL survives that. The engine nixl starts it for metadata that is
 * not kvt's, if asked to (KVT_OPEN_PROBE_METADATA); nobody else has a use for
 * it. The request is on standard input, the answer goes to standard output
 * (engines/nixl_check.h). It connects to nobody and moves no byte.
 *
 * It sets up NIXL with the engine's own code, so that NIXL is in the same state
 * as in the host. What it may cost is bounded by itself, should the host be
 * gone: time, memory, no core file. It is a fence against accidents, not
 * against somebody who can make NIXL run code of his.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engines/nixl_check.h"

/* Loading takes a few hundred bytes for each region; a length that was damaged
 * asks for anything up to 2^64. */
#define LOAD_BYTES (UINT64_C(1) << 30)
#define LOAD_BYTES_EACH 64u /* more for each byte of the metadata */

static int answers = STDOUT_FILENO;

static void say(const void *bytes, size_t length)
{
    (void)!write(answers, bytes, length);
}

static void __attribute__((noreturn)) fail(const char *text)
{
    char answer[200];

    kvti_format(answer, sizeof(answer), "%c%s", KVTI_NIXL_SAYS_FAILED, text);
    say(answer, strlen(answer));
    _exit(EXIT_FAILURE);
}

/* No core file, no line in the kernel's log: somebody expects this. */
static void die(int number)
{
    _exit(KVTI_NIXL_SIGNAL_STATUS + number);
}

static void fence_in(void)
{
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    static unsigned char stack[65536]; /* a stack may have run over */
    const stack_t alternate = {.ss_sp = stack, .ss_size = sizeof(stack)};
    /* 1: neither a file nor, by the kernel's rule, a crash handler's pipe. */
    const struct rlimit core = {.rlim_cur = 1, .rlim_max = 1};
    struct sigaction action = {.sa_handler = die, .sa_flags = SA_ONSTACK};

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    /* What the host left open without close-on-exec. */
    (void)syscall(SYS_close_range, 3u, ~0u, 0u);
    /* UCX writes its errors to standard output. */
    answers = dup(STDOUT_FILENO);
    (void)dup2(STDERR_FILENO, STDOUT_FILENO);
    (void)setrlimit(RLIMIT_CORE, &core);
    (void)sigaltstack(&alternate, NULL);
    (void)sigfillset(&action.sa_mask);
    for (size_t i = 0; i < sizeof(fatal) / sizeof(fatal[0]); i++) {
        (void)sigaction(fatal[i], &action, NULL);
    }
}

/* From here on, so much more. Data is what counts: a driver reserves
 * addresses by the terabyte. */
static void bound_memory(size_t blob_length)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    struct rlimit limit;
    uint64_t most;

    if (file == NULL || getrlimit(RLIMIT_DATA, &limit) != 0) {
        fail("it cannot see its own memory");
    }
    /* size resident shared text lib data dt */
    /* NOLINTNEXTLINE(cert-err34-c): the kernel's own numbers */
    if (fscanf(file, "%*u %*u %*u %*u %*u %llu", &pages) != 1) {
        fail("it cannot see its own memory");
    }
    (void)fclose(file);
    most = pages * (uint64_t)sysconf(_SC_PAGESIZE) + LOAD_BYTES +
           LOAD_BYTES_EACH * (uint64_t)blob_length;
    if (most < limit.rlim_cur) {
        limit.rlim_cur = most;
        (void)setrlimit(RLIMIT_DATA, &limit);
    }
}

/* Milliseconds in which NIXL goes on with what it began: some metadata kills it
 * only then, by its own thread. */
#define AFTERMATH_LOOKS 30

static int try_metadata(struct kvti_nixl *engine,
                        const struct kvti_nixl_request *request)
{
    const struct nixl_api *api = &engine->lib->api;
    /* Of its very length, as the host has it. */
    void *blob = malloc(request->blob_length);
    const struct timespec look = {.tv_nsec = 1000000};
    char *name = NULL;
    int status;

    if (blob == NULL) {
        fail("no memory for the metadata");
    }
    memcpy(blob, request->blob, request->blob_length);
    bound_memory(request->blob_length);
    status = api->load_remote_md(engine->agent, blob, request->blob_length,
                                 &name);
    for (int i = 0; i < AFTERMATH_LOOKS; i++) {
        (void)api->get_notifs(engine->agent, engine->notes, NULL);
        (void)nanosleep(&look, NULL);
    }
    if (status == NIXL_OK && name != NULL) {
        (void)api->invalidate_remote_md(engine->agent, name);
    }
    return status;
}

int main(void)
{
    static struct kvti_nixl engine;
    struct kvti_nixl_request request;
    struct kvt_error err;
    struct stat file;
    char answer[1 + sizeof(int)] = {KVTI_NIXL_SAYS_VERDICT};
    void *bytes;
    int status;

    fence_in();
    if (fstat(STDIN_FILENO, &file) != 0 || file.st_size <= 0) {
        fail("it is not meant to be started by hand");
    }
    bytes = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_PRIVATE,
                 STDIN_FILENO, 0);
    if (bytes == MAP_FAILED ||
        kvti_nixl_request_decode(bytes, (size_t)file.st_size, &request, &err) !=
            KVT_OK) {
        fail(bytes == MAP_FAILED ? "it was told nothing" : err.text);
    }
    (void)alarm(request.limit_s);
    engine.config = request.config;
    kvti_format(engine.agent_name, sizeof(engine.agent_name), "%s",
                request.agent_name);
    /* The host has set what UCX needs; EFA is as the host has it. */
    if (kvti_nixl_load(request.library, true, &engine.lib, &err) != KVT_OK ||
        kvti_nixl_setup(&engine, &err) != KVT_OK) {
        fail(err.text);
    }
    answer[0] = KVTI_NIXL_SAYS_READY;
    say(answer, 1);
    status = try_metadata(&engine, &request);
    kvti_nixl_teardown(&engine);
    answer[0] = KVTI_NIXL_SAYS_VERDICT;
    memcpy(answer + 1, &status, sizeof(status));
    say(answer, sizeof(answer));
    _exit(EXIT_SUCCESS);
}
