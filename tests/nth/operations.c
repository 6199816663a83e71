/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each operation of the library, as walk.h wants it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "walk.h"

/* ------------------------------------------------------- without a transport */

/* A call without an error to write has its code to say it all. */
static int with_code(int code, struct kvt_error *err)
{
    if (code < 0) {
        err->code = code;
        memcpy(err->text, "no text is asked for",
               sizeof "no text is asked for");
    }
    return code;
}

static int act_open(struct world *world, struct kvt_error *err)
{
    const struct kvt_options options = world_options(world, "c");

    return kvt_open(&options, &world->opened, err);
}

static void refused_open(struct world *world)
{
    assert_null(world->opened);
}

/* Of the engine alone: what is wrong with another one is of no interest. */
static int act_probe(struct world *world, struct kvt_error *err)
{
    struct kvt_engine_info info;
    int code = KVT_OK;

    for (uint32_t i = 0; code == KVT_OK; i++) {
        code = kvt_engine_info(i, &info);
        if (code == KVT_OK && strcmp(info.name, world->ground->engine) == 0) {
            err->code = info.code;
            memcpy(err->text, info.text, sizeof err->text);
            return info.code;
        }
    }
    return with_code(code, err);
}

static int act_shm(struct world *world, struct kvt_error *err)
{
    return kvt_shm_create(65536, &world->shm, err);
}

static void check_shm(struct world *world)
{
    assert_non_null(world->shm.addr);
    memset(world->shm.addr, 1, 65536);
}

static void refused_shm(struct world *world)
{
    assert_null(world->shm.addr);
}

/* ------------------------------------------------------------------ memory */

static int act_register(struct world *world, struct kvt_error *err)
{
    struct kvt_region region = pool_region(&world->extra);

    return kvt_register(world->pair.a.t, &region, 1, 0, err);
}

static void check_register(struct world *world)
{
    struct kvt_region region = pool_region(&world->extra);

    assert_int_equal(stats_of(world->pair.a.t).regions, 2);
    assert_kvt_ok(kvt_deregister(world->pair.a.t, &region, 1, 0, ERR));
}

static void prepare_deregister(struct world *world)
{
    struct kvt_region region = pool_region(&world->extra);

    assert_kvt_ok(kvt_register(world->pair.a.t, &region, 1, 0, ERR));
}

static int act_deregister(struct world *world, struct kvt_error *err)
{
    struct kvt_region region = pool_region(&world->extra);

    return kvt_deregister(world->pair.a.t, &region, 1, 0, err);
}

static void check_deregister(struct world *world)
{
    struct kvt_region region = pool_region(&world->extra);

    assert_int_equal(stats_of(world->pair.a.t).regions, 1);
    assert_kvt_fails(kvt_deregister(world->pair.a.t, &region, 1, 0, ERR),
                     KVT_ENOENT);
}

static int act_metadata(struct world *world, struct kvt_error *err)
{
    unsigned char bytes[8192];
    size_t length = 0;
    int code = kvt_metadata(world->pair.b.t, bytes, sizeof bytes, &length, err);

    if (code != KVT_OK) {
        assert_int_equal(length, 0);
    }
    return code;
}

/* ------------------------------------------------------------------- peers */

static struct kvt_peer_params params_of(const struct world *world)
{
    return (struct kvt_peer_params){.size = sizeof(struct kvt_peer_params),
                                    .name = "b",
                                    .metadata = world->blob,
                                    .metadata_length = world->blob_length};
}

static int act_add(struct world *world, struct kvt_error *err)
{
    struct kvt_peer_params params = params_of(world);

    return kvt_peer_add(world->pair.a.t, &params, &world->pair.peer, err);
}

/* False: the link broke under it. */
static bool write_one(const struct world *world)
{
    const struct pair *pair = &world->pair;
    const uint32_t index[2] = {1, 2};
    struct kvt_indices ours = indices_u32(&index[0], 1);
    struct kvt_indices theirs = indices_u32(&index[1], 1);
    struct kvt_result result;
    kvt_xfer id;
    int code = kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &ours,
                                pair->remote, &theirs, NULL, &id, ERR);

    if (code == KVT_EDISCONNECTED) {
        return false;
    }
    assert_kvt_ok(code);
    result = wait_xfer(pair->a.t, id);
    assert_true(result.state == KVT_DONE || result.state == KVT_DISCONNECTED);
    return result.state == KVT_DONE;
}

/* The peer is of use; the other side of a link may be late to notice a failure,
 * and then the link breaks now. */
static void check_peer(struct world *world)
{
    struct pair *pair = &world->pair;
    struct kvt_run run = pool_run(&pair->b.pool);

    world_bring_back(world);
    assert_kvt_ok(kvt_prepare(pair->a.t, pair->peer, "pool", &run, 1,
                              &pair->remote, ERR));
    if (!write_one(world)) {
        world_bring_back(world);
        assert_true(write_one(world));
    }
    pool_expect(&pair->b.pool, 2, &pair->a.pool, 1);
    pair_check(pair);
}

static void refused_add(struct world *world)
{
    kvt_peer peer;

    assert_int_equal(kvt_peer_find(world->pair.a.t, "b", &peer), KVT_ENOENT);
}

static int act_add_async(struct world *world, struct kvt_error *err)
{
    struct kvt_peer_params params = params_of(world);
    int code = kvt_peer_add_async(world->pair.a.t, &params, &world->pair.peer,
                                  &world->id, err);

    return code == KVT_OK ? world_wait(world, world->pair.a.t, err) : code;
}

static int act_reload(struct world *world, struct kvt_error *err)
{
    return kvt_peer_reload(world->pair.a.t, world->pair.peer, NULL, 0, 0, err);
}

static int act_reload_new(struct world *world, struct kvt_error *err)
{
    return kvt_peer_reload(world->pair.a.t, world->pair.peer, world->blob,
                           world->blob_length, 0, err);
}

static int act_unload(struct world *world, struct kvt_error *err)
{
    return kvt_peer_unload(world->pair.a.t, world->pair.peer, 0, err);
}

static void check_unload(struct world *world)
{
    assert_int_equal(kvt_peer_loaded(world->pair.a.t, world->pair.peer), 0);
    assert_kvt_ok(
        kvt_peer_reload(world->pair.a.t, world->pair.peer, NULL, 0, 0, ERR));
    check_peer(world);
}

static int act_remove(struct world *world, struct kvt_error *err)
{
    int code = kvt_peer_remove(world->pair.a.t, world->pair.peer);

    if (code == KVT_OK) {
        /* Calls are taken in their order. */
        while (stats_of(world->pair.a.t).queued_commands > 0) {
            test_yield();
        }
    }
    return with_code(code, err);
}

static void check_remove(struct world *world)
{
    assert_int_equal(stats_of(world->pair.a.t).peers, 0);
    assert_kvt_ok(act_add(world, ERR));
    check_peer(world);
}

static int act_confirm_dead(struct world *world, struct kvt_error *err)
{
    return with_code(kvt_peer_confirm_dead(world->pair.a.t, world->pair.peer),
                     err);
}

/* ----------------------------------------------------------------- layouts */

static int act_prepare(struct world *world, struct kvt_error *err)
{
    struct pool *pool = &world->pair.b.pool;
    struct kvt_run run[2] = {pool_run(pool), pool_run(pool)};

    return kvt_prepare(world->pair.a.t, world->pair.peer, "second", run, 2,
                       &world->layout, err);
}

static void check_prepare(struct world *world)
{
    kvt_layout found = 0;

    assert_kvt_ok(
        kvt_layout_find(world->pair.a.t, world->pair.peer, "second", &found));
    assert_int_equal(found, world->layout);
}

static void refused_prepare(struct world *world)
{
    kvt_layout found;

    assert_int_equal(
        kvt_layout_find(world->pair.a.t, world->pair.peer, "second", &found),
        KVT_ENOENT);
}

/* --------------------------------------------------------------- transfers */

#define BLOCKS 6

static const uint32_t from[BLOCKS] = {0, 1, 5, 6, 9, 12};
static const uint32_t to[BLOCKS] = {3, 4, 8, 2, 11, 7};

static int move_blocks(struct world *world, bool write,
                       const struct kvt_xfer_options *options,
                       struct kvt_error *err)
{
    struct kvt_indices ours = indices_u32(from, BLOCKS);
    struct kvt_indices theirs = indices_u32(to, BLOCKS);
    struct pair *pair = &world->pair;
    int code = (write ? kvt_write_blocks : kvt_read_blocks)(
        pair->a.t, pair->peer, pair->a.layout, &ours, pair->remote, &theirs,
        options, &world->id, err);

    return code == KVT_OK ? world_wait(world, pair->a.t, err) : code;
}

static int act_write(struct world *world, struct kvt_error *err)
{
    return move_blocks(world, true, NULL, err);
}

static void check_write(struct world *world)
{
    pair_expect(&world->pair, from, to, BLOCKS);
    pair_check(&world->pair);
}

/* Any of its blocks may hold what was to be written: no other. */
static void refused_write(struct world *world)
{
    for (size_t i = 0; i < BLOCKS; i++) {
        pool_accept(&world->pair.b.pool, to[i]);
    }
    pair_check(&world->pair);
}

static int act_read(struct world *world, struct kvt_error *err)
{
    return move_blocks(world, false, NULL, err);
}

static void check_read(struct world *world)
{
    for (size_t i = 0; i < BLOCKS; i++) {
        pool_expect(&world->pair.a.pool, from[i], &world->pair.b.pool, to[i]);
    }
    pair_check(&world->pair);
}

static void refused_read(struct world *world)
{
    for (size_t i = 0; i < BLOCKS; i++) {
        pool_accept(&world->pair.a.pool, from[i]);
    }
    pair_check(&world->pair);
}

static int act_pieces(struct world *world, struct kvt_error *err)
{
    struct pair *pair = &world->pair;
    struct kvt_copy copies[BLOCKS];
    int code;

    for (size_t i = 0; i < BLOCKS; i++) {
        copies[i] = (struct kvt_copy){
            .local_addr = (uintptr_t)pool_block(&pair->a.pool, from[i]),
            .peer_addr = (uintptr_t)pool_block(&pair->b.pool, to[i]),
            .length = pair->a.pool.shape.block_bytes};
    }
    code = kvt_write(pair->a.t, pair->peer, copies, BLOCKS, NULL, &world->id,
                     err);
    return code == KVT_OK ? world_wait(world, pair->a.t, err) : code;
}

static int act_warm_up(struct world *world, struct kvt_error *err)
{
    int code = kvt_warm_up(world->pair.a.t, world->pair.peer, NULL, &world->id,
                           err);

    return code == KVT_OK ? world_wait(world, world->pair.a.t, err) : code;
}

static int act_cancel(struct world *world, struct kvt_error *err)
{
    struct kvt_indices ours = indices_u32(from, BLOCKS);
    struct kvt_indices theirs = indices_u32(to, BLOCKS);
    struct pair *pair = &world->pair;
    int code = kvt_write_blocks(pair->a.t, pair->peer, pair->a.layout, &ours,
                                pair->remote, &theirs, NULL, &world->id, err);

    if (code == KVT_OK &&
        kvt_cancel(pair->a.t, &world->id, 1, KVT_CANCEL_WAIT, NULL) > 0) {
        (void)world_wait(world, pair->a.t, err);
    }
    if (code != KVT_OK) {
        return code;
    }
    /* However it ended, that is what was asked for. */
    assert_soon(stats_of(pair->a.t).inflight == 0);
    return KVT_OK;
}

/* ----------------------------------------------------------- notifications */

#define NOTE_BYTES 8u

struct note {
    uint32_t number;
    char text[NOTE_BYTES]; /* it: no two are the same */
};

static struct note next_note(struct world *world)
{
    struct note note = {.number = ++world->notes_sent};

    (void)snprintf(note.text, sizeof note.text, "note %02u", note.number);
    return note;
}

/* One whose sending failed may arrive all the same, but none comes twice. */
static bool has_arrived(struct world *world, const struct note *awaited)
{
    struct kvt_notification note;
    char bytes[32] = "";
    int got = kvt_notification(world->pair.b.t, &note, bytes, sizeof bytes - 1);
    unsigned long number;

    assert_true(got >= 0);
    if (got == 0) {
        return false;
    }
    assert_int_equal(note.length, strlen(awaited->text));
    assert_memory_equal(bytes, "note ", strlen("note "));
    assert_string_equal(note.agent_name, "a");
    number = strtoul(bytes + strlen("note "), NULL, 10);
    assert_in_range(number, 1, world->notes_sent);
    if ((world->notes_seen >> number & 1) != 0) {
        fail_msg("note %lu of %u arrives again", number, world->notes_sent);
    }
    world->notes_seen |= UINT64_C(1) << number;
    return number == awaited->number;
}

/* It arrives, or its sender hears that it will not. The receiver has memory
 * for it again some day. */
static int await_note(struct world *world, const struct note *note,
                      uint64_t failed, struct kvt_error *err)
{
    const struct pair *pair = &world->pair;
    uint64_t until = test_now_ns() + test_wait_ns();

    for (int looks = 0; !has_arrived(world, note); looks++) {
        if (stats_of(pair->a.t).notes_failed > failed ||
            kvt_peer_loaded(pair->a.t, pair->peer) == 0) {
            return with_code(KVT_ENOTIFY, err);
        }
        if (test_now_ns() > until) {
            return with_code(KVT_ETIMEDOUT, err);
        }
        if (looks == LOOKS) {
            nth_relent();
        }
        test_yield();
    }
    return KVT_OK;
}

static int act_notify(struct world *world, struct kvt_error *err)
{
    struct pair *pair = &world->pair;
    struct note note = next_note(world);
    uint64_t failed = stats_of(pair->a.t).notes_failed;
    int code = kvt_notify(pair->a.t, pair->peer, note.text, strlen(note.text),
                          err);

    return code == KVT_OK ? await_note(world, &note, failed, err) : code;
}

/* What was delivered and stayed where it was comes up with one of these. */
static void check_notify(struct world *world)
{
    check_peer(world);
    for (int i = 0; i < 3; i++) {
        assert_kvt_ok(act_notify(world, ERR));
    }
}

static int act_write_note(struct world *world, struct kvt_error *err)
{
    struct note note = next_note(world);
    const struct kvt_xfer_options options = {.size = sizeof options,
                                             .note = note.text,
                                             .note_length = strlen(note.text)};
    uint64_t failed = stats_of(world->pair.a.t).notes_failed;
    int code = move_blocks(world, true, &options, err);

    return code == KVT_OK ? await_note(world, &note, failed, err) : code;
}

/* ------------------------------------------------------------------- close */

static int act_close(struct world *world, struct kvt_error *err)
{
    return kvt_close(world->pair.a.t, 0, err);
}

const struct operation operations[] = {
    {.name = "open",
     .kind = WORLD_EMPTY,
     .act = act_open,
     .refused = refused_open},
    {.name = "probe", .kind = WORLD_EMPTY, .act = act_probe},
    {.name = "shm",
     .kind = WORLD_EMPTY,
     .act = act_shm,
     .check = check_shm,
     .refused = refused_shm},
    {.name = "register",
     .kind = WORLD_NODES,
     .act = act_register,
     .check = check_register},
    {.name = "deregister",
     .kind = WORLD_PAIR,
     .prepare = prepare_deregister,
     .act = act_deregister,
     .check = check_deregister},
    {.name = "metadata", .kind = WORLD_NODES, .act = act_metadata},
    {.name = "add",
     .kind = WORLD_NODES,
     .act = act_add,
     .check = check_peer,
     .refused = refused_add},
    {.name = "add_async",
     .kind = WORLD_NODES,
     .needs_no_memory = true,
     .act = act_add_async,
     .check = check_peer,
     .refused = refused_add},
    {.name = "prepare",
     .kind = WORLD_PAIR,
     .act = act_prepare,
     .check = check_prepare,
     .refused = refused_prepare},
    {.name = "write",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_write,
     .check = check_write,
     .refused = refused_write},
    {.name = "read",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_read,
     .check = check_read,
     .refused = refused_read},
    {.name = "pieces",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_pieces,
     .check = check_write,
     .refused = refused_write},
    {.name = "write_note",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_write_note,
     .check = check_write,
     .refused = refused_write},
    {.name = "notify",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_notify,
     .check = check_notify},
    {.name = "warm_up",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .needs_no_memory = true,
     .act = act_warm_up,
     .check = check_peer},
    {.name = "cancel",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_cancel},
    {.name = "reload",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_reload,
     .check = check_peer},
    {.name = "reload_new",
     .kind = WORLD_PAIR,
     .may_disconnect = true,
     .act = act_reload_new,
     .check = check_peer},
    {.name = "unload",
     .kind = WORLD_PAIR,
     .act = act_unload,
     .check = check_unload},
    {.name = "remove",
     .kind = WORLD_PAIR,
     .act = act_remove,
     .check = check_remove},
    {.name = "confirm_dead", .kind = WORLD_PAIR, .act = act_confirm_dead},
    {.name = "close", .kind = WORLD_PAIR, .ends = true, .act = act_close},
};

const size_t operation_count = sizeof operations / sizeof operations[0];
