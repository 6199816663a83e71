/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real processes over the real NIXL alone: one is killed before, during and
 * after a transfer, stopped and continued or killed, cut off the network,
 * started anew under its name, or unmaps what it had registered.
 *
 * Proved, each on whatever transports UCX_TLS leaves: the state, the code,
 * whether the memory is quiescent, that there is one completion and a sentence
 * with it, that nothing is called done that is not there, and that the peer can
 * be used again. What was seen is printed with the time from the fault to the
 * knowledge of it; docs/nixl.md has it as a table.
 */
#include <stdlib.h>
#include <string.h>

#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "two_process.h"

#define MS UINT64_C(1000000)
#define GRACE_NS (400 * MS)
#define FEW 64u
#define ALL 2048u

/* Gaps, so that blocks stay descriptors of their own. */
static const struct pool_shape usual = {
    .block_bytes = 16384, .gap_bytes = 64, .count = ALL};
/* Small enough for NIXL to copy them itself, when it comes to send them. */
static const struct pool_shape small = {
    .block_bytes = 512, .gap_bytes = 64, .count = ALL};
/* Whole pages, to be unmapped. */
static const struct pool_shape pages = {
    .block_bytes = 4096, .gap_bytes = 4096, .count = FEW};

/* The UCX of NIXL 1.3 crashes a process at times that TCP connects to anew. */
static bool fragile;

struct link {
    struct node a;
    struct child child;
    kvt_peer peer;
    kvt_layout remote;
};

static uint64_t next_seed(void)
{
    static uint64_t seed = 20261129;

    return seed++;
}

static struct node_plan make_plan(const char *name,
                                  const struct pool_shape *shape)
{
    struct node_plan plan = {
        .engine = "nixl", .name = name, .shape = *shape, .seed = next_seed()};

    plan.options.flags = KVT_OPEN_NO_SAME_HOST;
    plan.options.grace_ns = GRACE_NS;
    return plan;
}

static void prepare(struct link *link)
{
    struct kvt_run run = child_run(&link->child);

    assert_kvt_ok(kvt_prepare(link->a.t, link->peer, "pool", &run, 1,
                              &link->remote, ERR));
}

static void add(struct link *link)
{
    size_t length;
    void *metadata = child_metadata(&link->child, &length);

    link->peer = node_add(&link->a, "child", metadata, length);
    free(metadata);
    prepare(link);
}

static void begin_child(struct link *link, const struct pool_shape *shape)
{
    struct node_plan plan = make_plan("child", shape);

    child_begin(&link->child, &plan);
}

static void open_with(struct link *link, const struct pool_shape *shape)
{
    struct node_plan plan = make_plan("a", shape);

    *link = (struct link){0};
    node_open(&link->a, &plan);
    begin_child(link, shape);
    add(link);
}

static void open_link(struct link *link)
{
    open_with(link, &usual);
}

/* The same blocks on both sides. */
static int try_move(const struct link *link, uint32_t op, uint32_t count,
                    const struct kvt_xfer_options *options, kvt_xfer *ret)
{
    uint32_t *data = calloc(count, sizeof *data);
    struct kvt_indices indices = indices_u32(data, count);
    int code;

    assert_non_null(data);
    for (uint32_t i = 0; i < count; i++) {
        data[i] = i;
    }
    code = op == KVT_OP_WRITE
               ? kvt_write_blocks(link->a.t, link->peer, link->a.layout,
                                  &indices, link->remote, &indices, options,
                                  ret, NULL)
               : kvt_read_blocks(link->a.t, link->peer, link->a.layout,
                                 &indices, link->remote, &indices, options, ret,
                                 NULL);
    free(data);
    return code;
}

static kvt_xfer start_write(const struct link *link, uint32_t count,
                            const struct kvt_xfer_options *options)
{
    kvt_xfer id = 0;

    assert_int_equal(try_move(link, KVT_OP_WRITE, count, options, &id), KVT_OK);
    return id;
}

static void write_well(struct link *link, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        pool_expect(&link->child.pool, i, &link->a.pool, i);
    }
    (void)wait_done(link->a.t, start_write(link, count, NULL));
    child_check(&link->child, "child");
}

static void close_live(struct link *link)
{
    struct kvt_stats stats = stats_of(link->a.t);

    assert_int_equal(stats.bytes_local, 0);
    node_close(&link->a);
    child_end(&link->child);
}

static void close_dead(struct link *link)
{
    child_forget(&link->child);
    node_close(&link->a);
}

/* Something is lost for good: the memory stays mapped. */
static void close_lost(struct link *link)
{
    assert_kvt_fails(kvt_close(link->a.t, 0, ERR), KVT_EBUSY);
    kvt_free(link->a.t);
}

/* ------------------------------------------------------------------ telling */

static const char *state_name(uint32_t state)
{
    static const char *const names[] = {
        "queued",       "in progress", "done",      "rejected",  "failed",
        "disconnected", "unreadable",  "cancelled", "timed out", "lost"};

    return state < sizeof names / sizeof names[0] ? names[state] : "?";
}

static void tell(const char *what, const struct kvt_result *result,
                 uint64_t since_ns)
{
    print_message("  | %s | %s | %s | %s, %d | %s | %.1f ms |\n", what,
                  state_name(result->state),
                  (result->flags & KVT_QUIESCENT) != 0 ? "yes" : "no",
                  kvt_errname(result->code), result->engine_code, result->text,
                  (double)(test_now_ns() - since_ns) / 1e6);
}

static struct kvt_result wait_end(const struct link *link, kvt_xfer id,
                                  const char *what, uint64_t since_ns)
{
    struct kvt_result result = wait_xfer(link->a.t, id);

    tell(what, &result, since_ns);
    return result;
}

static bool is_over(const struct kvt_result *result)
{
    return (result->flags & KVT_QUIESCENT) != 0;
}

static void assert_broken(const struct kvt_result *result)
{
    if (result->state != KVT_REJECTED) {
        assert_int_equal(result->state, KVT_DISCONNECTED);
        assert_int_equal(result->code, KVT_EDISCONNECTED);
        assert_int_equal(result->scope, KVT_SCOPE_PEER);
    } else {
        assert_int_equal(result->code, KVT_EREJECTED);
    }
    assert_string_not_equal(result->text, "");
}

static void assert_refused(const struct link *link)
{
    kvt_xfer id;

    assert_int_equal(try_move(link, KVT_OP_WRITE, 1, NULL, &id),
                     KVT_EDISCONNECTED);
}

/* Returns when some of the transfer has landed. */
static void wait_half(const struct link *link, kvt_xfer id)
{
    assert_soon(status_of(link->a.t, id).bytes_done > 0);
}

static void lift_proof(const struct link *link, kvt_xfer id, const char *what,
                       uint64_t since_ns)
{
    struct kvt_result result;

    assert_soon(is_quiescent(link->a.t, id));
    result = status_of(link->a.t, id);
    tell(what, &result, since_ns);
    assert_int_equal(result.state, KVT_LOST);
    assert_int_equal(stats_of(link->a.t).quarantined, 0);
    assert_int_equal(kvt_poll(link->a.t, KVT_ANY, &result, 1), 0);
}

/* ------------------------------------------------------------------- killed */

static void a_kill_before_the_first_transfer_is_noticed(void **state)
{
    struct kvt_peer_info info;
    struct link link;
    uint64_t since;

    (void)state;
    open_link(&link);
    since = test_now_ns();
    child_kill(&link.child);
    assert_soon(!kvt_peer_loaded(link.a.t, link.peer));
    print_message("  | killed before, idle | refused | - | KVT_EDISCONNECTED | "
                  "- | %.1f ms |\n",
                  (double)(test_now_ns() - since) / 1e6);
    assert_refused(&link);
    assert_kvt_ok(kvt_peer_info(link.a.t, link.peer, &info));
    assert_int_equal(info.state, KVT_PEER_DISCONNECTED);
    assert_string_equal(info.path, "nixl");
    close_dead(&link);
}

static void a_write_right_after_a_kill_ends_quiescent(void **state)
{
    struct kvt_result result;
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    child_kill(&link.child);
    since = test_now_ns();
    if (try_move(&link, KVT_OP_WRITE, FEW, NULL, &id) == KVT_OK) {
        result = wait_end(&link, id, "killed before, written at once", since);
        assert_broken(&result);
        assert_true(is_over(&result));
    }
    assert_soon(!kvt_peer_loaded(link.a.t, link.peer));
    assert_refused(&link);
    close_dead(&link);
}

static void a_kill_during_a_write_ends_it_quiescent(void **state)
{
    struct kvt_result result;
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    id = start_write(&link, ALL, NULL);
    wait_half(&link, id);
    since = test_now_ns();
    child_kill(&link.child);
    result = wait_end(&link, id, "killed during a write", since);
    assert_broken(&result);
    assert_true(is_over(&result));
    assert_true(result.bytes_done < result.bytes);
    assert_soon(!kvt_peer_loaded(link.a.t, link.peer));
    assert_refused(&link);
    close_dead(&link);
}

/* Reads may still land in our memory until NIXL's agent is destroyed. */
static void a_kill_during_a_read_leaves_its_memory_in_doubt(void **state)
{
    struct kvt_result result;
    struct link link;
    uint64_t since;
    kvt_xfer id = 0;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    assert_int_equal(try_move(&link, KVT_OP_READ, ALL, NULL, &id), KVT_OK);
    wait_half(&link, id);
    since = test_now_ns();
    child_kill(&link.child);
    result = wait_end(&link, id, "killed during a read", since);
    child_forget(&link.child);
    if (is_over(&result)) { /* nothing was posted at that moment */
        assert_broken(&result);
        node_close(&link.a);
        return;
    }
    assert_int_equal(result.state, KVT_LOST);
    close_lost(&link);
}

static void a_kill_after_a_write_changes_nothing_of_it(void **state)
{
    struct kvt_xfer_options options = {.size = sizeof options};
    struct kvt_result result;
    struct link link;
    kvt_xfer id;

    (void)state;
    open_link(&link);
    id = start_write(&link, FEW, &options);
    assert_soon(is_quiescent(link.a.t, id));
    child_kill(&link.child);
    assert_soon(!kvt_peer_loaded(link.a.t, link.peer));
    result = wait_done(link.a.t, id);
    assert_int_equal(result.bytes_done, (uint64_t)FEW * 16384);
    assert_refused(&link);
    close_dead(&link);
}

/* B01 */
static void a_restart_under_the_same_name_works(void **state)
{
    struct link link;

    (void)state;
    open_link(&link);
    for (int round = 0; round < 3; round++) {
        uint64_t since;

        write_well(&link, FEW);
        child_kill(&link.child);
        child_forget(&link.child);
        begin_child(&link, &usual);
        since = test_now_ns();
        add(&link);
        write_well(&link, FEW);
        print_message("  | restarted, same name: added and written | done | "
                      "yes | KVT_OK | - | %.1f ms |\n",
                      (double)(test_now_ns() - since) / 1e6);
    }
    assert_int_equal(stats_of(link.a.t).peers, 1);
    close_live(&link);
}

/* What is quiescent is the caller's again, whatever NIXL still holds of it. */
static void unmap_after_a_kill(const struct pool_shape *shape, const char *what)
{
    struct kvt_region region;
    struct kvt_result result;
    struct link link;
    uint64_t since;
    kvt_xfer id;

    open_with(&link, shape);
    write_well(&link, FEW);
    child_stop(&link.child);
    id = start_write(&link, ALL, NULL);
    assert_soon(status_of(link.a.t, id).state != KVT_QUEUED);
    since = test_now_ns();
    child_kill(&link.child);
    result = wait_end(&link, id, what, since);
    assert_true(is_over(&result));
    region = pool_region(&link.a.pool);
    pool_close(&link.a.pool);
    assert_kvt_ok(kvt_deregister(link.a.t, &region, 1, 0, ERR));
    child_forget(&link.child);
    node_close(&link.a);
}

static void memory_may_be_unmapped_once_quiescent(void **state)
{
    (void)state;
    unmap_after_a_kill(&small, "killed while stopped, small blocks");
    unmap_after_a_kill(&usual, "killed while stopped, large blocks");
}

/* ------------------------------------------------------------------ stopped */

/* Whether what is asked of a stopped peer ends all the same: the kernel copies,
 * and nothing of the peer has to run. */
static bool ends_while_stopped(const struct link *link, const char *what)
{
    struct kvt_xfer_options options = {.size = sizeof options,
                                       .timeout_ns = 200 * MS};
    uint64_t since = test_now_ns();
    kvt_xfer id = start_write(link, FEW, &options);
    struct kvt_result result;

    assert_soon(status_of(link->a.t, id).state >= KVT_DONE);
    result = status_of(link->a.t, id);
    if (result.state == KVT_DONE) {
        (void)wait_end(link, id, what, since);
        return true;
    }
    tell(what, &result, since);
    assert_int_equal(result.state, KVT_TIMED_OUT);
    assert_false(is_over(&result));
    return false;
}

/* B13 */
static void a_stopped_peer_s_deadline_ends_when_it_goes_on(void **state)
{
    struct kvt_result result;
    struct link link;
    uint64_t since;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    pool_fill(&link.a.pool, next_seed());
    child_stop(&link.child);
    for (uint32_t i = 0; i < FEW; i++) {
        pool_expect(&link.child.pool, i, &link.a.pool, i);
    }
    if (!ends_while_stopped(&link, "stopped, deadline of 200 ms")) {
        since = test_now_ns();
        child_continue(&link.child);
        wait_results(link.a.t, KVT_ANY, &result, 1);
        tell("stopped, then continued", &result, since);
        assert_int_equal(result.state, KVT_TIMED_OUT);
        assert_int_equal(result.code, KVT_ETIMEDOUT);
        assert_true(is_over(&result));
        assert_int_equal(result.bytes_done, result.bytes);
    } else {
        child_continue(&link.child);
    }
    child_check(&link.child, "child");
    assert_int_equal(kvt_peer_loaded(link.a.t, link.peer), 1);
    write_well(&link, ALL);
    close_live(&link);
}

static void a_stopped_peer_s_lost_write_is_found_when_it_goes_on(void **state)
{
    struct kvt_xfer_options options = {
        .size = sizeof options, .flags = KVT_XFER_NO_EVENT, .timeout_ns = MS};
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    child_stop(&link.child);
    since = test_now_ns();
    id = start_write(&link, FEW, &options);
    assert_soon(status_of(link.a.t, id).flags & KVT_FINISHED);
    if (in_state(link.a.t, id, KVT_LOST)) {
        struct kvt_result result = status_of(link.a.t, id);

        tell("stopped, deadline and grace over", &result, since);
        assert_false(is_over(&result));
        assert_int_equal(stats_of(link.a.t).quarantined, 1);
        since = test_now_ns();
        child_continue(&link.child);
        lift_proof(&link, id, "lost, then continued", since);
    } else {
        child_continue(&link.child);
    }
    assert_kvt_ok(kvt_release(link.a.t, id));
    write_well(&link, FEW);
    close_live(&link);
}

static void a_stopped_peer_s_lost_write_is_proven_by_its_death(void **state)
{
    struct kvt_xfer_options options = {
        .size = sizeof options, .flags = KVT_XFER_NO_EVENT, .timeout_ns = MS};
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    open_link(&link);
    write_well(&link, FEW);
    child_stop(&link.child);
    id = start_write(&link, FEW, &options);
    assert_soon(status_of(link.a.t, id).flags & KVT_FINISHED);
    since = test_now_ns();
    child_kill(&link.child);
    if (in_state(link.a.t, id, KVT_LOST)) {
        lift_proof(&link, id, "lost, then killed", since);
    }
    assert_soon(!kvt_peer_loaded(link.a.t, link.peer));
    assert_refused(&link);
    assert_kvt_ok(kvt_release(link.a.t, id));
    close_dead(&link);
}

/* ---------------------------------------------------------------------- cut */

static bool is_tcp(int fd)
{
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    int type = 0;
    socklen_t size = sizeof type;

    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
           type == SOCK_STREAM &&
           getpeername(fd, (struct sockaddr *)&peer, &length) == 0 &&
           peer.sin_family == AF_INET;
}

/* Every TCP connection of this process, as a network that breaks does it. */
static int cut_connections(void)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    int count = 0;

    assert_non_null(folder);
    while ((entry = readdir(folder)) != NULL) {
        int fd = (int)strtol(entry->d_name, NULL, 10);

        if (entry->d_name[0] != '.' && is_tcp(fd)) {
            count += shutdown(fd, SHUT_RDWR) == 0;
        }
    }
    (void)closedir(folder);
    return count;
}

/* A cut ends the transfer, is proven by nothing, and a reload mends it. */
static void reload_after_a_cut(struct link *link, kvt_xfer id, const char *what,
                               uint64_t since)
{
    struct kvt_result result;
    size_t length;
    void *metadata;

    assert_soon(status_of(link->a.t, id).state >= KVT_DONE);
    result = status_of(link->a.t, id);
    tell(what, &result, since);
    result = wait_end(link, id, "… and its end", since);
    if (result.state != KVT_DONE) {
        assert_int_equal(result.state, KVT_LOST);
        assert_false(is_over(&result));
        assert_refused(link);
    }
    since = test_now_ns();
    metadata = child_metadata(&link->child, &length);
    assert_kvt_ok(
        kvt_peer_reload(link->a.t, link->peer, metadata, length, 0, ERR));
    free(metadata);
    child_fill(&link->child, next_seed());
    write_well(link, ALL);
    print_message("  | … reloaded and written | done | yes | KVT_OK | - | %.1f "
                  "ms |\n",
                  (double)(test_now_ns() - since) / 1e6);
    child_kill(&link->child);
    child_forget(&link->child);
    assert_soon(stats_of(link->a.t).quarantined == 0);
    node_close(&link->a);
}

static void need_reconnect(void)
{
    if (fragile) {
        skip_case("the UCX of this NIXL crashes the other side at times");
    }
}

static void a_cut_during_a_write_is_mended_by_a_reload(void **state)
{
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    need_reconnect();
    open_link(&link);
    write_well(&link, FEW);
    id = start_write(&link, ALL, NULL);
    wait_half(&link, id);
    since = test_now_ns();
    assert_true(cut_connections() > 0);
    reload_after_a_cut(&link, id, "cut during a write", since);
}

/* B03 */
static void a_cut_between_writes_is_mended_by_a_reload(void **state)
{
    struct link link;
    uint64_t since;
    kvt_xfer id;

    (void)state;
    need_reconnect();
    open_link(&link);
    write_well(&link, FEW);
    assert_true(cut_connections() > 0);
    since = test_now_ns();
    id = start_write(&link, ALL, NULL);
    reload_after_a_cut(&link, id, "cut, then written", since);
}

static void a_reload_of_a_live_peer_works(void **state)
{
    struct link link;

    (void)state;
    open_link(&link);
    for (int round = 0; round < 4; round++) {
        write_well(&link, FEW);
        assert_kvt_ok(kvt_peer_reload(link.a.t, link.peer, NULL, 0, 0, ERR));
    }
    write_well(&link, ALL);
    close_live(&link);
}

/* ----------------------------------------------------------------- unmapped */

/* Status 0 is not the truth then, at times: nothing may read as done. */
static void a_hole_at_the_target_is_never_done(void **state)
{
    struct link link;

    (void)state;
    for (uint32_t hole = 1; hole < FEW; hole += 21) {
        struct kvt_result result;
        uint64_t since;
        kvt_xfer id;

        open_with(&link, &pages);
        write_well(&link, FEW);
        child_unmap(&link.child, hole, 4096);
        since = test_now_ns();
        id = start_write(&link, FEW, NULL);
        result = wait_end(&link, id, "unmapped at the target", since);
        assert_int_not_equal(result.state, KVT_DONE);
        assert_string_not_equal(result.text, "");
        /* Over TCP the target's own thread writes there, and dies of it. */
        (void)kill(link.child.pid, SIGKILL);
        assert_int_equal(waitpid(link.child.pid, NULL, 0), link.child.pid);
        child_forget(&link.child);
        assert_soon(stats_of(link.a.t).quarantined == 0);
        node_close(&link.a);
    }
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_kill_before_the_first_transfer_is_noticed),
    cmocka_unit_test(a_write_right_after_a_kill_ends_quiescent),
    cmocka_unit_test(a_kill_during_a_write_ends_it_quiescent),
    cmocka_unit_test(a_kill_during_a_read_leaves_its_memory_in_doubt),
    cmocka_unit_test(a_kill_after_a_write_changes_nothing_of_it),
    cmocka_unit_test(a_restart_under_the_same_name_works),
    cmocka_unit_test(memory_may_be_unmapped_once_quiescent),
    cmocka_unit_test(a_stopped_peer_s_deadline_ends_when_it_goes_on),
    cmocka_unit_test(a_stopped_peer_s_lost_write_is_found_when_it_goes_on),
    cmocka_unit_test(a_stopped_peer_s_lost_write_is_proven_by_its_death),
    cmocka_unit_test(a_cut_during_a_write_is_mended_by_a_reload),
    cmocka_unit_test(a_cut_between_writes_is_mended_by_a_reload),
    cmocka_unit_test(a_reload_of_a_live_peer_works),
    cmocka_unit_test(a_hole_at_the_target_is_never_done),
};

/* 77 when this machine does not have NIXL. */
static int find_nixl(void)
{
    struct kvt_engine_info info = {.code = KVT_ENOENT};
    const char *tls;
    uint32_t index = 0;

    while (kvt_engine_info(index++, &info) == KVT_OK &&
           strcmp(info.name, "nixl") != 0) {
    }
    if (info.code != KVT_OK) {
        print_message("skipped: %s\n", info.text);
        return 77;
    }
    tls = getenv("UCX_TLS");
    fragile = strncmp(info.version, "1.3", 3) == 0 && tls != NULL;
    print_message("NIXL %s, UCX_TLS %s\n", info.version,
                  tls != NULL ? tls : "unset");
    return 0;
}

int main(int argc, char **argv)
{
    const struct test_group group = TEST_GROUP("faults", cases);
    int status;

    /* NIXL alone, in the children too. */
    if (setenv("KVT_SAME_HOST", "0", 1) != 0) {
        return 1;
    }
    child_main(argc, argv);
    status = find_nixl();
    return status != 0 ? status
                       : kvt_test_main(&group, 1, argc > 1 ? argv[1] : NULL);
}
