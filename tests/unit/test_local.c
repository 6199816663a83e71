/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine `local` against a core that only records (fake_env), with agents
 * in this process and in real children that are killed, exec'd and made to
 * take their memory away.
 *
 * Proved: bytes go where they should and nowhere else, in every way they can
 * be moved; a peer that is another process, another incarnation, dead or
 * closed is found out around each chunk; memory that is taken back,
 * unmapped, cut short or read-only gives an error that names the place, and
 * never a signal; the gate waits for a writer and for nobody else;
 * notifications keep their order and none is lost, however late the reader;
 * nothing is left behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engines/local.h"
#include "kvt_assert.h"
#include "local_agent.h"
#include "sanitizer.h"
#include "trap.h"
#include "unit.h"

#define BASE_BYTES (AGENT_BYTES + 2 * AGENT_PAGE)
#define SEED_OURS 11u
#define SEED_PEER 22u
#define SECOND_NS UINT64_C(1000000000)

static uint64_t number(const void *addr)
{
    return (uint64_t)(uintptr_t)addr;
}

static void fill_image(unsigned char *image, uint64_t seed)
{
    for (size_t i = 0; i < BASE_BYTES; i++) {
        image[i] = agent_byte(seed, i);
    }
}

static void assert_done(const struct kvti_outcome *outcome)
{
    if (outcome->state != KVT_DONE) {
        fail_msg("state %u: %s", outcome->state, outcome->text);
    }
    assert_int_equal(outcome->code, KVT_OK);
    assert_int_equal(outcome->fin, KVTI_FIN_BOTH);
}

static void assert_outcome(const struct kvti_outcome *outcome, uint32_t state,
                           int code, const char *words)
{
    if (outcome->state != state || outcome->code != code ||
        strstr(outcome->text, words) == NULL) {
        fail_msg("state %u, %s, \"%s\" where state %u, %s, \"%s\" is right",
                 outcome->state, kvt_errname(outcome->code), outcome->text,
                 state, kvt_errname(code), words);
    }
    assert_int_equal(outcome->fin, KVTI_FIN_BOTH);
}

static void assert_text(const struct kvt_error *err, const char *words)
{
    if (strstr(err->text, words) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err->text, words);
    }
}

/* ----------------------------------------------------------------- the bytes */

/* Random pieces, disjoint on both sides because the i-th lies in the i-th
 * slice; the image gets what the destination must hold. */
static struct kvti_chunk *random_chunk(void *conn, uint32_t op, uint32_t count,
                                       const struct agent *agent,
                                       uint64_t peer_data, struct rng *rng)
{
    struct kvti_chunk *chunk = fake_chunk(conn, op, count);
    size_t slice = AGENT_BYTES / count;

    for (uint32_t i = 0; i < count; i++) {
        size_t length = 1 + rng_below(rng, slice / 2);
        size_t local = i * slice + rng_below(rng, slice / 2);
        size_t peer = (count - 1 - i) * slice + rng_below(rng, slice / 2);

        chunk->copies[i] = (struct kvti_copy){.local = number(agent->data) +
                                                       local,
                                              .peer = peer_data + peer,
                                              .length = length};
        chunk->bytes += length;
    }
    return chunk;
}

static void apply(const struct kvti_chunk *chunk, const struct agent *agent,
                  uint64_t peer_data, unsigned char *ours,
                  unsigned char *theirs)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        const struct kvti_copy *copy = &chunk->copies[i];
        size_t local = copy->local - number(agent->base);
        size_t peer = copy->peer - (peer_data - AGENT_PAGE);

        if (chunk->op == KVT_OP_WRITE) {
            memcpy(theirs + peer, ours + local, copy->length);
        } else {
            memcpy(ours + local, theirs + peer, copy->length);
        }
    }
}

static void move_randomly(struct agent *agent, void *conn, uint64_t peer_data,
                          unsigned char *ours, unsigned char *theirs)
{
    static const uint32_t counts[] = {1, 2, 63, 64, 65, 256};
    struct rng rng = {.state = 7};

    for (uint32_t i = 0; i < 2 * sizeof(counts) / sizeof(counts[0]); i++) {
        uint32_t op = i % 2 == 0 ? KVT_OP_WRITE : KVT_OP_READ;
        struct kvti_chunk *chunk = random_chunk(conn, op, counts[i / 2], agent,
                                                peer_data, &rng);

        fake_env_post(&agent->env, chunk);
        fake_env_wait_chunk(&agent->env, chunk);
        assert_done(&chunk->outcome);
        apply(chunk, agent, peer_data, ours, theirs);
        free(chunk);
    }
}

static unsigned char ours_image[BASE_BYTES];
static unsigned char theirs_image[BASE_BYTES];
static unsigned char theirs_now[BASE_BYTES];

static void exchange_with_child(enum agent_memory ours,
                                enum agent_memory theirs, bool mapped,
                                bool sealed)
{
    struct child child;
    struct agent agent;
    struct kvti_local_conn *conn;

    local_child_start(
        &child, &(struct child_plan){.memory = theirs, .seed = SEED_PEER});
    agent_open(&agent, "parent", ours, SEED_OURS);
    fill_image(ours_image, SEED_OURS);
    fill_image(theirs_image, SEED_PEER);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(conn->maps != NULL && conn->maps[0].base != NULL, mapped);
    assert_int_equal(mapped && conn->maps[0].sealed, sealed);
    move_randomly(&agent, conn, child.data, ours_image, theirs_image);
    local_child_read(&child, theirs_now);
    assert_memory_equal(agent.base, ours_image, BASE_BYTES);
    assert_memory_equal(theirs_now, theirs_image, BASE_BYTES);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void private_memory_of_a_child_is_written_and_read(void **state)
{
    (void)state;
    exchange_with_child(AGENT_ANON, AGENT_ANON, false, false);
}

static void sealed_memory_of_a_child_is_written_and_read(void **state)
{
    (void)state;
    exchange_with_child(AGENT_ANON, AGENT_SEALED, true, true);
    exchange_with_child(AGENT_SEALED, AGENT_SEALED, true, true);
    exchange_with_child(AGENT_FILE, AGENT_SEALED, true, true);
}

static void shared_file_of_a_child_is_written_and_read(void **state)
{
    (void)state;
    exchange_with_child(AGENT_ANON, AGENT_FILE, true, false);
}

static void an_agent_of_this_process_is_written_and_read(void **state)
{
    struct agent a;
    struct agent b;
    void *conn;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    fill_image(ours_image, SEED_OURS);
    fill_image(theirs_image, SEED_PEER);
    conn = agent_must_load(&a, &b.md, &a);
    move_randomly(&a, conn, number(b.data), ours_image, theirs_image);
    assert_memory_equal(a.base, ours_image, BASE_BYTES);
    assert_memory_equal(b.base, theirs_image, BASE_BYTES);
    agent_unload(&a, conn);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static void many_chunks_at_once_are_each_reported_once(void **state)
{
    enum { CHUNKS = 400 };
    static struct kvti_chunk *chunks[CHUNKS];
    struct agent a;
    struct agent b;
    void *conn;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_SEALED, SEED_PEER);
    conn = agent_must_load(&a, &b.md, &a);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        chunks[i] = fake_chunk(conn, KVT_OP_WRITE, 1);
        chunks[i]->copies[0] = (struct kvti_copy){
            .local = number(a.data) + i * 4096,
            .peer = number(b.data) + i * 4096,
            .length = 4096};
        fake_env_post(&a.env, chunks[i]);
    }
    for (uint32_t i = 0; i < CHUNKS; i++) {
        fake_env_wait_chunk(&a.env, chunks[i]);
        assert_done(&chunks[i]->outcome);
        free(chunks[i]);
    }
    assert_memory_equal(a.data, b.data, CHUNKS * 4096);
    agent_unload(&a, conn);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

/* -------------------------------------------------------------------- faults */

static void a_hole_at_the_peer_is_named_and_what_precedes_it_lands(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    char words[64];
    unsigned char *now = theirs_now;
    struct iovec here = {.iov_base = now, .iov_len = 8 * AGENT_PAGE};
    struct iovec there;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(local_child_ask(&child, CHILD_UNMAP, 8), 0);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data + 100,
                         child.data, 16 * AGENT_PAGE);
    kvti_format(words, sizeof(words),
                "peer's memory is not mapped: our side "
                "0x%llx, the peer's 0x%llx",
                (unsigned long long)number(agent.data + 100 + 8 * AGENT_PAGE),
                (unsigned long long)(child.data + 8 * AGENT_PAGE));
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE, words);
    assert_int_equal(outcome.engine_code, EFAULT);
    there.iov_base = (void *)(uintptr_t)child.data;
    there.iov_len = here.iov_len;
    assert_int_equal(process_vm_readv(child.pid, &here, 1, &there, 1, 0),
                     8 * AGENT_PAGE);
    assert_memory_equal(now, agent.data + 100, 8 * AGENT_PAGE);
    there.iov_base = (void *)(uintptr_t)(child.data + 9 * AGENT_PAGE);
    assert_int_equal(process_vm_readv(child.pid, &here, 1, &there, 1, 0),
                     8 * AGENT_PAGE);
    for (size_t i = 0; i < 8 * AGENT_PAGE; i++) {
        assert_int_equal(now[i], agent_byte(SEED_PEER, 10 * AGENT_PAGE + i));
    }
    outcome = agent_move(&agent, conn, KVT_OP_READ, agent.data, child.data,
                         16 * AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE,
                   "peer's memory is not mapped");
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void a_hole_on_our_side_is_named(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(munmap(agent.data + 3 * AGENT_PAGE, AGENT_PAGE), 0);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         16 * AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE,
                   "our memory is not mapped");
    assert_int_equal(
        mprotect(agent.data + 8 * AGENT_PAGE, AGENT_PAGE, PROT_READ), 0);
    outcome = agent_move(&agent, conn, KVT_OP_READ, agent.data + 8 * AGENT_PAGE,
                         child.data, AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE,
                   "our memory is read-only");
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void reading_into_read_only_memory_is_no_signal(void **state)
{
    struct agent a;
    struct agent b;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_SEALED, SEED_PEER);
    conn = agent_must_load(&a, &b.md, &a);
    assert_int_equal(mprotect(a.data, AGENT_PAGE, PROT_READ), 0);
    outcome = agent_move(&a, conn, KVT_OP_READ, a.data, number(b.data),
                         AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE, "our side");
    agent_unload(&a, conn);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static void read_only_memory_of_the_peer_is_named(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(local_child_ask(&child, CHILD_READONLY, 1), 0);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         2 * AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE,
                   "peer's memory is read-only");
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void a_truncated_file_is_an_error_and_no_signal(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    local_child_start(
        &child, &(struct child_plan){.memory = AGENT_FILE, .seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(local_child_ask(&child, CHILD_TRUNCATE, 4), 0);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         16 * AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE, "cut short");
    outcome = agent_move(&agent, conn, KVT_OP_READ, agent.data, child.data,
                         16 * AGENT_PAGE);
    assert_outcome(&outcome, KVT_FAILED, KVT_EENGINE, "cut short");
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         4 * AGENT_PAGE);
    assert_done(&outcome);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void bytes_outside_the_peers_regions_are_refused(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data - 1,
                         2);
    assert_outcome(&outcome, KVT_REJECTED, KVT_ERANGE, "not in the peer's");
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data,
                         child.data + AGENT_BYTES - 1, 2);
    assert_outcome(&outcome, KVT_REJECTED, KVT_ERANGE, "not in the peer's");
    local_child_read(&child, theirs_now);
    fill_image(theirs_image, SEED_PEER);
    assert_memory_equal(theirs_now, theirs_image, BASE_BYTES);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

/* ------------------------------------------------------------------ identity */

static int load_changed(struct agent *agent, const struct kvti_md *md,
                        struct kvt_error *err)
{
    void *conn = NULL;
    int code = agent_load(agent, md, agent, &conn, err);

    if (code == KVT_OK) {
        agent_unload(agent, conn);
    }
    return code;
}

/* B42 */
static void another_host_or_namespace_is_unsupported(void **state)
{
    struct agent a;
    struct agent b;
    struct kvti_md md;
    struct kvt_error err;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    md = b.md;
    md.local.boot_id[0] ^= 1;
    assert_int_equal(load_changed(&a, &md, &err), KVT_EUNSUPPORTED);
    assert_text(&err, "another host");
    md = b.md;
    md.local.pid_ns++;
    assert_int_equal(load_changed(&a, &md, &err), KVT_EUNSUPPORTED);
    assert_text(&err, "pid namespace");
    md = b.md;
    md.has_local = false;
    assert_int_equal(load_changed(&a, &md, &err), KVT_EUNSUPPORTED);
    assert_text(&err, "names no process");
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static void senseless_numbers_are_damaged_metadata(void **state)
{
    struct agent a;
    struct agent b;
    struct kvti_md md;
    struct kvt_error err;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    for (int i = 0; i < 7; i++) {
        struct kvti_mem mem = b.md.regions.mems[0];

        md = b.md;
        md.regions.mems = &mem;
        md.local.pid = i == 0 ? 0 : i == 1 ? -1 : md.local.pid;
        md.local.gate_fd = i == 2 ? -1 : md.local.gate_fd;
        md.local.gate_bytes += i == 3;
        md.local.nonce_addr = i == 4   ? 0
                              : i == 5 ? UINT64_MAX - 8
                                       : md.local.nonce_addr;
        mem.gate_slot = i == 6 ? KVTI_GATE_ENTRIES : mem.gate_slot;
        assert_int_equal(load_changed(&a, &md, &err), KVT_EMETADATA);
    }
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static void another_process_or_incarnation_is_disconnected(void **state)
{
    struct child child;
    struct agent a;
    struct kvti_md md;
    struct kvt_error err;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    for (int i = 0; i < 6; i++) {
        md = child.md;
        md.local.start_time += i == 0;
        md.local.nonce[31] ^= i == 1;
        md.incarnation[0] ^= i == 2;
        md.local.nonce_addr = i == 3 ? 4096 : md.local.nonce_addr;
        md.local.gate_fd = i == 4 ? 0 : i == 5 ? 1000000 : md.local.gate_fd;
        assert_int_equal(load_changed(&a, &md, &err), KVT_EDISCONNECTED);
    }
    assert_int_equal(load_changed(&a, &child.md, &err), KVT_OK);
    assert_int_equal(agent_close(&a), KVT_OK);
    local_child_quit(&child);
}

static void a_forked_child_is_not_its_parent(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_md md;
    struct kvt_error err;
    int64_t pid;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    pid = local_child_ask(&child, CHILD_FORK, 0);
    assert_true(pid > 0);
    md = child.md;
    md.local.pid = (int32_t)pid;
    assert_int_equal(kvti_ident_start_time(md.local.pid, &md.local.start_time),
                     0);
    assert_int_equal(load_changed(&agent, &md, &err), KVT_EDISCONNECTED);
    assert_text(&err, "runs another program");
    assert_int_equal(kill((pid_t)pid, SIGKILL), 0);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void an_exec_of_the_peer_is_disconnected(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    struct kvt_error err;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    local_child_ask(&child, CHILD_EXEC, 0);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         AGENT_PAGE);
    assert_outcome(&outcome, KVT_DISCONNECTED, KVT_EDISCONNECTED,
                   "another program");
    assert_int_equal(agent_connect(&agent, conn), KVT_EDISCONNECTED);
    assert_int_equal(load_changed(&agent, &child.md, &err), KVT_EDISCONNECTED);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_kill(&child);
}

static void the_death_of_an_idle_peer_is_reported_for_each_connection(
    void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    struct kvt_error err;
    int links[2];
    void *conns[2];

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conns[0] = agent_must_load(&agent, &child.md, &links[0]);
    conns[1] = agent_must_load(&agent, &child.md, &links[1]);
    assert_int_equal(kill(child.pid, SIGKILL), 0);
    fake_env_wait_event(&agent.env, &links[0], KVTI_CONN_DEAD);
    fake_env_wait_event(&agent.env, &links[1], KVTI_CONN_DEAD);
    outcome = agent_move(&agent, conns[0], KVT_OP_WRITE, agent.data, child.data,
                         AGENT_PAGE);
    assert_outcome(&outcome, KVT_DISCONNECTED, KVT_EDISCONNECTED, "is gone");
    assert_int_equal(load_changed(&agent, &child.md, &err), KVT_EDISCONNECTED);
    agent_unload(&agent, conns[0]);
    agent_unload(&agent, conns[1]);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_kill(&child);
}

static void a_kill_amid_chunks_ends_every_chunk(void **state)
{
    enum { CHUNKS = 64 };
    struct kvti_chunk *chunks[CHUNKS];
    struct child child;
    struct agent agent;
    uint32_t broken = 0;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        chunks[i] = fake_chunk(conn, KVT_OP_WRITE, 1);
        chunks[i]->copies[0] = (struct kvti_copy){.local = number(agent.data),
                                                  .peer = child.data,
                                                  .length = AGENT_BYTES / 2};
        fake_env_post(&agent.env, chunks[i]);
        if (i == CHUNKS / 2) {
            assert_int_equal(kill(child.pid, SIGKILL), 0);
        }
    }
    for (uint32_t i = 0; i < CHUNKS; i++) {
        fake_env_wait_chunk(&agent.env, chunks[i]);
        assert_int_equal(chunks[i]->outcome.fin, KVTI_FIN_BOTH);
        if (chunks[i]->outcome.state != KVT_DONE) {
            assert_int_equal(chunks[i]->outcome.state, KVT_DISCONNECTED);
            broken++;
        }
        free(chunks[i]);
    }
    fake_env_wait_event(&agent.env, &agent, KVTI_CONN_DEAD);
    print_message("%u of %u chunks found the peer dead\n", broken, CHUNKS);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_kill(&child);
}

static void a_closed_peer_is_disconnected(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    struct kvt_error err;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    assert_int_equal(agent_connect(&agent, conn), KVT_OK);
    assert_int_equal(local_child_ask(&child, CHILD_CLOSE, 0), KVT_OK);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         AGENT_PAGE);
    assert_outcome(&outcome, KVT_DISCONNECTED, KVT_EDISCONNECTED, "is closed");
    fake_env_wait_event(&agent.env, &agent, KVTI_CONN_DOWN);
    assert_int_equal(load_changed(&agent, &child.md, &err), KVT_EDISCONNECTED);
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_kill(&child);
}

/* B42 */
static void another_user_is_told_which_setting_forbids_it(void **state)
{
    struct child child;
    struct agent agent;
    struct kvt_error err = {.text = ""};

    (void)state;
    if (geteuid() != 0) {
        skip_case("only root can start a child as another user");
    }
    local_child_start(&child,
                      &(struct child_plan){.seed = SEED_PEER, .uid = 65534});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    assert_int_equal(local_child_ask_about(&child, CHILD_LOAD, &agent, &err),
                     KVT_EPERM);
    assert_text(&err, "user 0");
    assert_text(&err, "user 65534");
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;

    assert_non_null(dir);
    while (readdir(dir) != NULL) {
        count++;
    }
    closedir(dir);
    return count;
}

static void thousands_of_peers_of_one_process_share_a_descriptor(void **state)
{
    enum { PEERS = 3000 };
    static void *conns[PEERS];
    struct child child;
    struct agent agent;
    int before;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    before = count_entries("/proc/self/fd");
    for (int i = 0; i < PEERS; i++) {
        conns[i] = agent_must_load(&agent, &child.md, &conns[i]);
    }
    assert_int_equal(count_entries("/proc/self/fd"), before + 1);
    for (int i = 0; i < PEERS; i++) {
        agent_unload(&agent, conns[i]);
    }
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

/* ------------------------------------------------------------------ the gate */

static void memory_taken_back_is_stale_for_its_writers(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    conn = agent_must_load(&agent, &child.md, &agent);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         AGENT_PAGE);
    assert_done(&outcome);
    assert_int_equal(local_child_ask(&child, CHILD_DROP, SECOND_NS), KVT_OK);
    outcome = agent_move(&agent, conn, KVT_OP_WRITE, agent.data, child.data,
                         AGENT_PAGE);
    assert_outcome(&outcome, KVT_REJECTED, KVT_ESTALE, "took back");
    agent_unload(&agent, conn);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void a_drop_waits_for_a_writer_and_names_it(void **state)
{
    struct child child;
    struct agent agent;
    struct kvt_error err;
    char words[32];

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    assert_int_equal(local_child_ask_about(&child, CHILD_HOLD, &agent, NULL),
                     0);
    kvti_format(words, sizeof(words), "process %d ", child.pid);
    assert_int_equal(agent_drop(&agent, 20000000, &err), KVT_EBUSY);
    assert_text(&err, words);
    /* The second one finds the first one's drain still pending. */
    assert_int_equal(agent_drop(&agent, 20000000, &err), KVT_EBUSY);
    assert_text(&err, words);
    assert_int_equal(local_child_ask(&child, CHILD_LEAVE, 0), 0);
    assert_int_equal(agent_drop(&agent, 10 * SECOND_NS, &err), KVT_OK);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&child);
}

static void a_drop_does_not_wait_for_a_later_writer(void **state)
{
    struct child first;
    struct child second;
    struct agent agent;
    struct kvt_error err;

    (void)state;
    local_child_start(&first, &(struct child_plan){.seed = SEED_PEER});
    local_child_start(&second, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    assert_int_equal(local_child_ask_about(&first, CHILD_HOLD, &agent, NULL),
                     0);
    assert_int_equal(agent_drop(&agent, 20000000, &err), KVT_EBUSY);
    /* It comes under the new epoch, so it cannot see the region open. */
    assert_int_equal(local_child_ask_about(&second, CHILD_HOLD, &agent, NULL),
                     0);
    assert_int_equal(local_child_ask(&first, CHILD_LEAVE, 0), 0);
    assert_int_equal(local_child_ask(&second, CHILD_LEAVE, 0), 0);
    assert_int_equal(agent_drop(&agent, 10 * SECOND_NS, &err), KVT_OK);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_quit(&first);
    local_child_quit(&second);
}

static void a_drop_does_not_wait_for_the_dead(void **state)
{
    struct child child;
    struct agent agent;
    struct kvti_local *engine;
    struct kvt_error err;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    assert_int_equal(local_child_ask_about(&child, CHILD_HOLD, &agent, NULL),
                     0);
    assert_int_equal(kill(child.pid, SIGSTOP), 0);
    assert_int_equal(agent_drop(&agent, 20000000, &err), KVT_EBUSY);
    assert_int_equal(kill(child.pid, SIGKILL), 0);
    assert_int_equal(agent_drop(&agent, 10 * SECOND_NS, &err), KVT_OK);
    engine = agent.env.engine;
    assert_int_equal(atomic_load(&engine->gate.page->slots[0].owner), 0);
    assert_int_equal(agent_close(&agent), KVT_OK);
    local_child_kill(&child);
}

static void a_close_names_a_writer_that_does_not_leave(void **state)
{
    struct child child;
    struct agent agent;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    assert_int_equal(local_child_ask_about(&child, CHILD_HOLD, &agent, NULL),
                     0);
    assert_int_equal(fake_env_close(&agent.env, 20000000), KVT_EBUSY);
    kvti_regions_fini(&agent.md.regions);
    munmap(agent.base, BASE_BYTES);
    local_child_kill(&child);
}

/* B09 */
static void a_full_gate_refuses_until_an_owner_is_dead(void **state)
{
    struct child child;
    struct agent a;
    struct agent b;
    struct kvti_local *engine;
    struct kvt_error err;
    uint64_t dead;

    (void)state;
    local_child_start(&child, &(struct child_plan){.seed = SEED_PEER});
    dead = kvti_gate_owner(child.md.local.pid, child.md.local.start_time);
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    engine = b.env.engine;
    for (uint32_t i = 0; i < KVTI_GATE_SLOTS; i++) {
        atomic_store(&engine->gate.page->slots[i].owner,
                     i == 77 ? dead : engine->owner);
    }
    atomic_store(&engine->gate.page->slots[77].busy[1], 3);
    assert_int_equal(load_changed(&a, &b.md, &err), KVT_EAGAIN);
    local_child_kill(&child);
    assert_int_equal(load_changed(&a, &b.md, &err), KVT_OK);
    assert_int_equal(atomic_load(&engine->gate.page->slots[77].busy[1]), 0);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static void regions_beyond_the_gate_are_refused_all_or_none(void **state)
{
    enum { EXTRA = KVTI_GATE_ENTRIES };
    struct kvti_mem *table = calloc(EXTRA, sizeof(*table));
    struct kvti_mem **mems = calloc(EXTRA, sizeof(*mems));
    struct agent agent;
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);

    (void)state;
    assert_true(table != NULL && mems != NULL);
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    for (size_t i = 0; i < EXTRA; i++) {
        table[i].addr = 4096 + i * 16;
        table[i].length = 16;
        mems[i] = &table[i];
    }
    job.mems = mems;
    job.mem_count = EXTRA;
    assert_int_equal(fake_env_job(&agent.env, &job), KVT_EAGAIN);
    assert_text(&job.err, "65536");
    job = fake_job(KVTI_JOB_MEM_ADD);
    job.mems = mems;
    job.mem_count = EXTRA - 1;
    assert_int_equal(fake_env_job(&agent.env, &job), KVT_OK);
    job = fake_job(KVTI_JOB_MEM_DROP);
    job.mems = mems;
    job.mem_count = EXTRA - 1;
    assert_int_equal(fake_env_job(&agent.env, &job), KVT_OK);
    assert_int_equal(agent_close(&agent), KVT_OK);
    free(table);
    free(mems);
}

static void device_memory_is_refused_by_name(void **state)
{
    struct kvti_mem mem = {.addr = 4096, .length = 16, .kind = KVT_VRAM};
    struct kvti_mem *mems[1] = {&mem};
    struct agent agent;
    struct kvti_job job = fake_job(KVTI_JOB_MEM_ADD);

    (void)state;
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    job.mems = mems;
    job.mem_count = 1;
    assert_int_equal(fake_env_job(&agent.env, &job), KVT_EUNSUPPORTED);
    assert_text(&job.err, "VRAM");
    assert_text(&job.err, "local");
    assert_int_equal(agent_close(&agent), KVT_OK);
}

struct churn {
    struct agent *agent;
    void *conn;
    uint64_t peer;
    _Atomic bool stop;
    _Atomic uint64_t done;
    _Atomic uint64_t stale;
};

static void *write_on(void *arg)
{
    struct churn *churn = arg;

    while (!atomic_load(&churn->stop)) {
        struct kvti_outcome outcome = agent_move(
            churn->agent, churn->conn, KVT_OP_WRITE, churn->agent->data,
            churn->peer, AGENT_BYTES / 2);

        churn->done += outcome.state == KVT_DONE;
        churn->stale += outcome.code == KVT_ESTALE;
        if (outcome.state != KVT_DONE && outcome.code != KVT_ESTALE) {
            break;
        }
    }
    return NULL;
}

static void no_byte_lands_after_a_drop_under_traffic(void **state)
{
    struct agent a;
    struct agent b;
    struct churn churn = {.agent = &a};
    struct kvt_error err;
    pthread_t thread;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    churn.conn = agent_must_load(&a, &b.md, &a);
    churn.peer = number(b.data);
    assert_int_equal(pthread_create(&thread, NULL, write_on, &churn), 0);
    assert_soon(atomic_load(&churn.done) >= 20);
    assert_int_equal(agent_drop(&b, 10 * SECOND_NS, &err), KVT_OK);
    agent_fill(&b, SEED_PEER);
    fill_image(theirs_image, SEED_PEER);
    assert_soon(atomic_load(&churn.stale) >= 20);
    assert_memory_equal(b.base, theirs_image, BASE_BYTES);
    atomic_store(&churn.stop, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
    agent_unload(&a, churn.conn);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

/* ------------------------------------------------------------- notifications */

static struct kvti_job *note_job(void *conn, const void *bytes, size_t length)
{
    struct kvti_job *job = malloc(sizeof(*job));

    assert_non_null(job);
    *job = fake_job(KVTI_JOB_NOTIFY);
    job->conn = conn;
    assert_int_equal(kvti_buf_append(&job->buf, bytes, length), KVT_OK);
    return job;
}

static int finish_note(struct agent *agent, struct kvti_job *job)
{
    int code = fake_env_wait_job(&agent->env, job);

    kvti_buf_fini(&job->buf);
    free(job);
    return code;
}

static int notify(struct agent *agent, void *conn, const void *bytes,
                  size_t length)
{
    struct kvti_job *job = note_job(conn, bytes, length);

    fake_env_submit(&agent->env, job);
    return finish_note(agent, job);
}

struct pair_of_agents {
    struct agent a;
    struct agent b;
    void *conn; /* b, as a knows it */
};

static void open_two(struct pair_of_agents *two)
{
    agent_open(&two->a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&two->b, "b", AGENT_ANON, SEED_PEER);
    two->conn = agent_must_load(&two->a, &two->b.md, two);
}

static void close_two(struct pair_of_agents *two)
{
    agent_unload(&two->a, two->conn);
    assert_int_equal(agent_close(&two->a), KVT_OK);
    assert_int_equal(agent_close(&two->b), KVT_OK);
}

static void notifications_of_every_size_arrive_in_order(void **state)
{
    static const size_t sizes[] = {0, 1, 7, 4096, 65536, 131072};
    const size_t count = sizeof(sizes) / sizeof(sizes[0]);
    struct pair_of_agents two;

    (void)state;
    open_two(&two);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(notify(&two.a, two.conn, two.a.data + i, sizes[i]),
                         KVT_OK);
    }
    fake_env_wait_notes(&two.b.env, count);
    for (size_t i = 0; i < count; i++) {
        struct fake_note *note = fake_env_take_note(&two.b.env);

        assert_string_equal(note->agent_name, "a");
        assert_int_equal(note->length, sizes[i]);
        assert_memory_equal(note->bytes, two.a.data + i, sizes[i]);
        free(note);
    }
    close_two(&two);
}

static void a_notification_that_cannot_fit_is_refused(void **state)
{
    struct pair_of_agents two;
    struct kvti_job *job;

    (void)state;
    open_two(&two);
    job = note_job(two.conn, two.a.data, KVTI_NOTE_MAX + 1);
    fake_env_submit(&two.a.env, job);
    while (!fake_env_is_reported(&two.a.env, job)) {
        test_yield();
    }
    assert_text(&job->err, "131073");
    assert_int_equal(finish_note(&two.a, job), KVT_ERANGE);
    assert_int_equal(notify(&two.a, two.conn, "x", 1), KVT_OK);
    fake_env_wait_notes(&two.b.env, 1);
    close_two(&two);
}

static void a_late_reader_loses_nothing(void **state)
{
    enum { NOTES = 16384 };
    static struct kvti_job *jobs[NOTES];
    struct pair_of_agents two;
    uint32_t waiting = 0;

    (void)state;
    open_two(&two);
    fake_env_want_notes(&two.b.env, 0);
    for (uint32_t i = 0; i < NOTES; i++) {
        jobs[i] = note_job(two.conn, &i, sizeof(i));
        fake_env_submit(&two.a.env, jobs[i]);
    }
    for (uint32_t i = 0; i < NOTES; i++) {
        waiting += !fake_env_is_reported(&two.a.env, jobs[i]);
    }
    assert_true(waiting > 0);
    print_message("%u of %u waited\n", waiting, NOTES);
    /* Room for a few at first, so that it fills up again and again. */
    for (uint32_t i = 0; i < NOTES; i++) {
        struct fake_note *note;
        uint32_t got;

        if (i % 1000 == 0) {
            fake_env_want_notes(&two.b.env, 1000);
        }
        fake_env_wait_notes(&two.b.env, 1);
        note = fake_env_take_note(&two.b.env);
        assert_int_equal(note->length, sizeof(got));
        memcpy(&got, note->bytes, sizeof(got));
        assert_int_equal(got, i);
        free(note);
    }
    for (uint32_t i = 0; i < NOTES; i++) {
        assert_int_equal(finish_note(&two.a, jobs[i]), KVT_OK);
    }
    close_two(&two);
}

static void waiting_notifications_fail_before_the_unload(void **state)
{
    enum { NOTES = 64 }; /* 8 MiB: more than a socket holds */
    struct kvti_job *jobs[NOTES];
    struct pair_of_agents two;
    uint32_t failed = 0;

    (void)state;
    open_two(&two);
    fake_env_want_notes(&two.b.env, 0);
    for (uint32_t i = 0; i < NOTES; i++) {
        jobs[i] = note_job(two.conn, two.a.data, KVTI_NOTE_MAX);
        fake_env_submit(&two.a.env, jobs[i]);
    }
    agent_unload(&two.a, two.conn);
    for (uint32_t i = 0; i < NOTES; i++) {
        int code;

        assert_true(fake_env_is_reported(&two.a.env, jobs[i]));
        code = finish_note(&two.a, jobs[i]);
        assert_true(code == KVT_OK || code == KVT_EDISCONNECTED);
        failed += code == KVT_EDISCONNECTED;
    }
    assert_true(failed > 0);
    assert_int_equal(agent_close(&two.a), KVT_OK);
    assert_int_equal(agent_close(&two.b), KVT_OK);
}

static void a_notification_past_its_deadline_is_reported(void **state)
{
    enum { NOTES = 64 }; /* 8 MiB: more than a socket holds */
    struct kvti_job *jobs[NOTES];
    struct pair_of_agents two;
    int code = KVT_OK;

    (void)state;
    open_two(&two);
    fake_env_want_notes(&two.b.env, 0);
    for (uint32_t i = 0; i < NOTES; i++) {
        jobs[i] = note_job(two.conn, two.a.data, KVTI_NOTE_MAX);
        jobs[i]->deadline_ns = kvti_now_ns() + 20000000;
        fake_env_submit(&two.a.env, jobs[i]);
    }
    for (uint32_t i = 0; i < NOTES; i++) {
        code = finish_note(&two.a, jobs[i]);
    }
    assert_int_equal(code, KVT_ETIMEDOUT);
    close_two(&two);
}

static void a_closed_reader_fails_what_waits(void **state)
{
    enum { NOTES = 64 }; /* 8 MiB: more than a socket holds */
    struct kvti_job *jobs[NOTES];
    struct pair_of_agents two;
    int code = KVT_OK;

    (void)state;
    open_two(&two);
    fake_env_want_notes(&two.b.env, 0);
    for (uint32_t i = 0; i < NOTES; i++) {
        jobs[i] = note_job(two.conn, two.a.data, KVTI_NOTE_MAX);
        fake_env_submit(&two.a.env, jobs[i]);
    }
    assert_int_equal(agent_close(&two.b), KVT_OK);
    for (uint32_t i = 0; i < NOTES; i++) {
        code = finish_note(&two.a, jobs[i]);
    }
    assert_int_equal(code, KVT_EDISCONNECTED);
    fake_env_wait_event(&two.a.env, &two, KVTI_CONN_DOWN);
    assert_int_equal(notify(&two.a, two.conn, "x", 1), KVT_EDISCONNECTED);
    agent_unload(&two.a, two.conn);
    assert_int_equal(agent_close(&two.a), KVT_OK);
}

static void another_network_namespace_is_reached_but_not_notified(void **state)
{
    struct agent a;
    struct agent b;
    struct kvti_md md;
    struct kvti_outcome outcome;
    void *conn;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    md = b.md;
    md.local.net_ns++;
    conn = agent_must_load(&a, &md, &a);
    assert_int_equal(agent_connect(&a, conn), KVT_OK);
    assert_int_equal(notify(&a, conn, "x", 1), KVT_EUNSUPPORTED);
    outcome = agent_move(&a, conn, KVT_OP_WRITE, a.data, number(b.data), 100);
    assert_done(&outcome);
    agent_unload(&a, conn);
    assert_int_equal(agent_close(&a), KVT_OK);
    assert_int_equal(agent_close(&b), KVT_OK);
}

static int dial(const struct agent *agent)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    size_t length = strlen(agent->md.local.socket_name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    memcpy(name.sun_path + 1, agent->md.local.socket_name, length);
    assert_int_equal(
        connect(
            fd, (const struct sockaddr *)&name,
            (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)),
        0);
    return fd;
}

static void a_greeting_for_another_incarnation_is_hung_up_on(void **state)
{
    struct agent agent;
    char byte;

    (void)state;
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    for (int i = 0; i < 5; i++) {
        struct kvti_note_hello hello = {.magic = KVTI_NOTE_MAGIC,
                                        .version = KVTI_NOTE_VERSION,
                                        .agent_name = "stranger"};
        int fd = dial(&agent);

        memcpy(hello.target, agent.md.incarnation, sizeof(hello.target));
        hello.target[0] ^= i == 0;
        hello.magic ^= i == 1;
        hello.version += i == 2;
        if (i == 3) {
            memset(hello.agent_name, 'x', sizeof(hello.agent_name));
        }
        assert_true(send(fd, &hello, sizeof(hello) - (i == 4), 0) > 0);
        /* Packets that it never read turn the end into a reset. */
        assert_true(recv(fd, &byte, 1, 0) <= 0);
        close(fd);
    }
    assert_int_equal(agent_close(&agent), KVT_OK);
}

static void a_malformed_message_is_hung_up_on(void **state)
{
    struct agent agent;
    struct kvti_note_hello hello = {.magic = KVTI_NOTE_MAGIC,
                                    .version = KVTI_NOTE_VERSION,
                                    .agent_name = "stranger"};
    char byte;

    (void)state;
    agent_open(&agent, "parent", AGENT_ANON, SEED_OURS);
    memcpy(hello.target, agent.md.incarnation, sizeof(hello.target));
    for (int i = 0; i < 3; i++) {
        struct kvti_note_head head = {.magic = KVTI_NOTE_MAGIC, .length = 0};
        int fd = dial(&agent);

        head.magic ^= i == 0;
        head.length += i == 1;
        assert_true(send(fd, &hello, sizeof(hello), 0) > 0);
        assert_true(send(fd, &head, sizeof(head) - (i == 2), 0) > 0);
        assert_true(recv(fd, &byte, 1, 0) <= 0);
        close(fd);
    }
    assert_int_equal(agent.env.note_count, 0);
    assert_int_equal(agent_close(&agent), KVT_OK);
}

/* -------------------------------------------------------------------- leaks */

/* What malloc may map meanwhile; a leak of one mapping for each turn would be
 * twice as many. ASan keeps what was freed, mappings too. */
#define MALLOC_MAPS (BUILT_WITH_ASAN ? 100000 : 100)

static int count_maps(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    int count = 0;
    int byte;

    assert_non_null(file);
    while ((byte = getc(file)) != EOF) {
        count += byte == '\n';
    }
    fclose(file);
    return count;
}

static void a_thousand_transports_leave_nothing(void **state)
{
    int fds = 0;
    int tasks = 0;
    int maps = 0;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        struct fake_env env;

        /* After the first few, whatever allocates once has done so. */
        if (i == 100) {
            fds = count_entries("/proc/self/fd");
            tasks = count_entries("/proc/self/task");
            maps = count_maps();
        }
        fake_env_open(&env, &kvti_engine_local, "one of many", NULL);
        assert_int_equal(fake_env_close(&env, SECOND_NS), KVT_OK);
    }
    assert_int_equal(count_entries("/proc/self/fd"), fds);
    /* A joined thread may still be on its way out of the kernel. */
    assert_soon(count_entries("/proc/self/task") <= tasks);
    assert_true(count_maps() < maps + MALLOC_MAPS);
}

static void used_transports_leave_nothing(void **state)
{
    int fds = 0;
    int tasks = 0;
    int maps = 0;

    (void)state;
    for (int i = 0; i < 220; i++) {
        struct pair_of_agents two;
        struct kvti_outcome outcome;

        if (i == 20) {
            fds = count_entries("/proc/self/fd");
            tasks = count_entries("/proc/self/task");
            maps = count_maps();
        }
        open_two(&two);
        outcome = agent_move(&two.a, two.conn, KVT_OP_WRITE, two.a.data,
                             number(two.b.data), AGENT_PAGE);
        assert_done(&outcome);
        assert_int_equal(notify(&two.a, two.conn, "x", 1), KVT_OK);
        fake_env_wait_notes(&two.b.env, 1);
        if (i % 2 == 0) {
            close_two(&two);
        } else {
            /* Closed with the connection still loaded. */
            assert_int_equal(agent_close(&two.a), KVT_OK);
            assert_int_equal(agent_close(&two.b), KVT_OK);
        }
    }
    assert_int_equal(count_entries("/proc/self/fd"), fds);
    /* A joined thread may still be on its way out of the kernel. */
    assert_soon(count_entries("/proc/self/task") <= tasks);
    assert_true(count_maps() < maps + MALLOC_MAPS);
}

static bool has_ended(struct kvti_local *engine)
{
    bool ended;

    pthread_mutex_lock(&engine->mu);
    ended = engine->living == 0;
    pthread_mutex_unlock(&engine->mu);
    return ended;
}

/* What is left on purpose stays reachable for the leak checker. */
static struct kvti_local *left_behind;

static void a_copy_that_does_not_come_back_is_left_behind(void **state)
{
    static struct agent a; /* its memory outlives the case, too */
    struct agent b;
    struct kvti_chunk *chunk;
    struct kvti_job unload = fake_job(KVTI_JOB_UNLOAD);
    int trap;

    (void)state;
    agent_open(&a, "a", AGENT_ANON, SEED_OURS);
    agent_open(&b, "b", AGENT_ANON, SEED_PEER);
    unload.conn = agent_must_load(&a, &b.md, &a);
    trap = trap_pages(a.data, AGENT_PAGE);
    if (trap < 0) {
        assert_int_equal(agent_close(&a), KVT_OK);
        assert_int_equal(agent_close(&b), KVT_OK);
        skip_case("userfaultfd is not allowed here");
    }
    chunk = fake_chunk(unload.conn, KVT_OP_WRITE, 1);
    chunk->copies[0] = (struct kvti_copy){
        .local = number(a.data), .peer = number(b.data), .length = AGENT_PAGE};
    fake_env_post(&a.env, chunk);
    left_behind = a.env.engine;
    assert_soon(atomic_load(&left_behind->workers[0].heartbeat.busy_since_ns) !=
                0);
    /* Counted as lost by the core, the chunk does not hold the peer. */
    unload.deadline_ns = kvti_now_ns() + 20000000;
    assert_int_equal(fake_env_job(&a.env, &unload), KVT_EBUSY);
    assert_int_equal(fake_env_close(&a.env, 20000000), KVT_EBUSY);
    /* The memory is given back only now, and nobody is told. */
    close(trap);
    assert_soon(has_ended(left_behind));
    assert_true(kvti_list_empty(&chunk->event_node));
    free(chunk);
    kvti_regions_fini(&a.md.regions);
    munmap(a.base, BASE_BYTES);
    assert_int_equal(agent_close(&b), KVT_OK);
}

/* fork() may cut any list of the engine in half: it leaves all of them alone
 * in a child, and the child's end is nothing to the parent. */
static void a_forked_child_is_left_alone(void **state)
{
    struct pair_of_agents two;
    struct kvti_outcome outcome;
    int status = 0;
    pid_t pid;

    (void)state;
    open_two(&two);
    assert_null(kvti_engine_local.after_fork);
    pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    outcome = agent_move(&two.a, two.conn, KVT_OP_WRITE, two.a.data,
                         number(two.b.data), AGENT_PAGE);
    assert_done(&outcome);
    close_two(&two);
}

static void it_can_start_here_and_says_what_it_is(void **state)
{
    struct kvt_engine_info info;

    (void)state;
    memset(&info, 0, sizeof(info));
    assert_int_equal(kvti_engine_local.probe(&info), KVT_OK);
    assert_string_equal(info.name, "local");
    assert_int_equal(info.kinds, 1u << KVT_DRAM);
    assert_true(info.text[0] != '\0');
}

static const struct CMUnitTest byte_cases[] = {
    cmocka_unit_test(private_memory_of_a_child_is_written_and_read),
    cmocka_unit_test(sealed_memory_of_a_child_is_written_and_read),
    cmocka_unit_test(shared_file_of_a_child_is_written_and_read),
    cmocka_unit_test(an_agent_of_this_process_is_written_and_read),
    cmocka_unit_test(many_chunks_at_once_are_each_reported_once),
};

static const struct CMUnitTest fault_cases[] = {
    cmocka_unit_test(a_hole_at_the_peer_is_named_and_what_precedes_it_lands),
    cmocka_unit_test(a_hole_on_our_side_is_named),
    cmocka_unit_test(reading_into_read_only_memory_is_no_signal),
    cmocka_unit_test(read_only_memory_of_the_peer_is_named),
    cmocka_unit_test(a_truncated_file_is_an_error_and_no_signal),
    cmocka_unit_test(bytes_outside_the_peers_regions_are_refused),
};

static const struct CMUnitTest identity_cases[] = {
    cmocka_unit_test(it_can_start_here_and_says_what_it_is),
    cmocka_unit_test(another_host_or_namespace_is_unsupported),
    cmocka_unit_test(senseless_numbers_are_damaged_metadata),
    cmocka_unit_test(another_process_or_incarnation_is_disconnected),
    cmocka_unit_test(a_forked_child_is_not_its_parent),
    cmocka_unit_test(an_exec_of_the_peer_is_disconnected),
    cmocka_unit_test(the_death_of_an_idle_peer_is_reported_for_each_connection),
    cmocka_unit_test(a_kill_amid_chunks_ends_every_chunk),
    cmocka_unit_test(a_closed_peer_is_disconnected),
    cmocka_unit_test(another_user_is_told_which_setting_forbids_it),
    cmocka_unit_test(thousands_of_peers_of_one_process_share_a_descriptor),
};

static const struct CMUnitTest gate_cases[] = {
    cmocka_unit_test(memory_taken_back_is_stale_for_its_writers),
    cmocka_unit_test(a_drop_waits_for_a_writer_and_names_it),
    cmocka_unit_test(a_drop_does_not_wait_for_a_later_writer),
    cmocka_unit_test(a_drop_does_not_wait_for_the_dead),
    cmocka_unit_test(a_close_names_a_writer_that_does_not_leave),
    cmocka_unit_test(a_full_gate_refuses_until_an_owner_is_dead),
    cmocka_unit_test(regions_beyond_the_gate_are_refused_all_or_none),
    cmocka_unit_test(device_memory_is_refused_by_name),
    cmocka_unit_test(no_byte_lands_after_a_drop_under_traffic),
};

static const struct CMUnitTest note_cases[] = {
    cmocka_unit_test(notifications_of_every_size_arrive_in_order),
    cmocka_unit_test(a_notification_that_cannot_fit_is_refused),
    cmocka_unit_test(a_late_reader_loses_nothing),
    cmocka_unit_test(waiting_notifications_fail_before_the_unload),
    cmocka_unit_test(a_notification_past_its_deadline_is_reported),
    cmocka_unit_test(a_closed_reader_fails_what_waits),
    cmocka_unit_test(another_network_namespace_is_reached_but_not_notified),
    cmocka_unit_test(a_greeting_for_another_incarnation_is_hung_up_on),
    cmocka_unit_test(a_malformed_message_is_hung_up_on),
};

static const struct CMUnitTest life_cases[] = {
    cmocka_unit_test(a_thousand_transports_leave_nothing),
    cmocka_unit_test(used_transports_leave_nothing),
    cmocka_unit_test(a_copy_that_does_not_come_back_is_left_behind),
    cmocka_unit_test(a_forked_child_is_left_alone),
};

int main(int argc, char **argv)
{
    static const struct test_group groups[] = {
        TEST_GROUP("bytes", byte_cases),
        TEST_GROUP("faults", fault_cases),
        TEST_GROUP("identity", identity_cases),
        TEST_GROUP("gate", gate_cases),
        TEST_GROUP("notifications", note_cases),
        TEST_GROUP("life", life_cases),
    };

    local_child_main(argc, argv);
    return kvt_test_main(groups, sizeof(groups) / sizeof(groups[0]),
                         argc > 1 ? argv[1] : NULL);
}
