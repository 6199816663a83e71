/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way of a transfer on the caller's thread: check, copy, append to a list.
 *
 * Layouts are looked up and referenced under mu, indices are checked and
 * copied without it, unless they are few, and the transfer is appended under mu
 * again, after a second look at the peer and the layouts: what was dropped,
 * unloaded or replaced meanwhile refuses the call. So a transfer that is
 * accepted was right at the moment of its acceptance, and one that is refused
 * left nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "cpu.h"

static int check_options(const struct kvt_transport *t,
                         const struct kvt_xfer_options *options,
                         struct kvt_error *err)
{
    if (options == NULL) {
        return KVT_OK;
    }
    if (options->size != sizeof *options) {
        return kvti_fail(err, KVT_EINVAL,
                         "the options' size must be sizeof(struct "
                         "kvt_xfer_options)");
    }
    if ((options->flags & ~(uint32_t)KVT_XFER_NO_EVENT) != 0) {
        return kvti_fail(err, KVT_EINVAL, "the options have unknown flags %#x",
                         options->flags);
    }
    if (options->tag > KVT_TAG_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "the tag is %u, at most %d is "
                         "possible",
                         options->tag, KVT_TAG_MAX);
    }
    if (options->note == NULL && options->note_length > 0) {
        return kvti_fail(err, KVT_EINVAL,
                         "the notification is NULL, its length is %zu",
                         options->note_length);
    }
    if (options->note != NULL && (t->traits.caps & KVTI_CAP_NOTIFY) == 0) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "engine \"%s\" has no notifications", t->engine_name);
    }
    if (options->note_length > t->options.notify_bytes_max) {
        return kvti_fail(err, KVT_ERANGE,
                         "the notification has %zu bytes, this transport's "
                         "limit is %u",
                         options->note_length, t->options.notify_bytes_max);
    }
    return KVT_OK;
}

static int copy_note(const struct kvt_xfer_options *options, void **ret_note,
                     struct kvt_error *err)
{
    *ret_note = NULL;
    if (options == NULL || options->note == NULL) {
        return KVT_OK;
    }
    /* One byte more: a notification of length 0 is still one. */
    *ret_note = malloc(options->note_length + 1);
    if (*ret_note == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for the notification");
    }
    memcpy(*ret_note, options->note, options->note_length);
    return KVT_OK;
}

static struct kvti_peer *find_peer_locked(struct kvt_transport *t, kvt_peer id,
                                          int *ret_code, struct kvt_error *err)
{
    struct kvti_peer *peer = kvti_peer_get_locked(t, id);

    if (peer == NULL) {
        *ret_code = kvti_fail(err, KVT_ENOENT,
                              "no peer has this id: it was removed or added "
                              "again");
    } else if (peer->state != KVT_PEER_LOADED) {
        *ret_code = kvti_peer_refuse(peer, "transfers", err);
    } else {
        *ret_code = KVT_OK;
        return peer;
    }
    return NULL;
}

/* What a submission has gathered before it is appended. */
struct draft {
    kvt_peer peer;
    uint32_t op;
    const struct kvt_xfer_options *options;
    const struct kvt_copy *pieces; /* as given, or NULL: blocks */
    size_t piece_count;
    kvt_layout local_id; /* 0 with pieces */
    kvt_layout peer_id;
    struct kvti_payload payload;
    void *note;
};

static int check_piece_locked(const struct kvt_transport *t,
                              const struct kvti_peer *peer, size_t i,
                              const struct kvt_copy *piece,
                              struct kvt_error *err)
{
    if (piece->length == 0) {
        return KVT_OK;
    }
    if (!kvti_kind_ok(t, piece->local_kind) ||
        !kvti_kind_ok(t, piece->peer_kind)) {
        return kvti_fail(err, KVT_EUNSUPPORTED,
                         "piece %zu: engine \"%s\" does not move %s memory", i,
                         t->engine_name,
                         piece->local_kind == KVT_VRAM ||
                                 piece->peer_kind == KVT_VRAM
                             ? "VRAM"
                             : "this kind of");
    }
    if (!kvti_regions_cover(&t->regions, piece->local_addr, piece->length,
                            piece->local_kind, piece->local_device)) {
        return kvti_fail(err, KVT_ERANGE,
                         "piece %zu: our range is not registered memory", i);
    }
    if (!kvti_regions_cover(&peer->md.regions, piece->peer_addr, piece->length,
                            piece->peer_kind, piece->peer_device)) {
        return kvti_fail(err, KVT_ERANGE,
                         "piece %zu: the peer's range lies outside the memory "
                         "that its metadata registers",
                         i);
    }
    return KVT_OK;
}

/* Where the caller has given the piece, for the error's text. */
static size_t place_of(const struct draft *draft, const struct kvt_copy *piece)
{
    size_t at = 0;

    while (at < draft->piece_count &&
           (draft->pieces[at].local_addr != piece->local_addr ||
            draft->pieces[at].peer_addr != piece->peer_addr ||
            draft->pieces[at].length != piece->length)) {
        at++;
    }
    return at;
}

/* The copies that will move: another thread may change the caller's. */
static int check_pieces_locked(const struct kvt_transport *t,
                               const struct kvti_peer *peer,
                               const struct draft *draft, struct kvt_error *err)
{
    for (uint64_t i = 0; i < draft->payload.count; i++) {
        const struct kvt_copy *piece = &draft->payload.of.pieces[i];
        int code = check_piece_locked(t, peer, 0, piece, NULL);

        if (code != KVT_OK) {
            return check_piece_locked(t, peer, place_of(draft, piece), piece,
                                      err);
        }
    }
    return KVT_OK;
}

/* Whether what was checked without the lock still holds. */
static int check_again_locked(struct kvt_transport *t,
                              const struct kvti_peer *peer,
                              const struct draft *draft, struct kvt_error *err)
{
    int code = KVT_OK;

    if (draft->pieces != NULL) {
        code = check_pieces_locked(t, peer, draft, err);
    }
    if (code == KVT_OK && draft->local_id != 0 &&
        (kvti_idmap_get(&t->layouts, draft->local_id) == NULL ||
         kvti_idmap_get(&t->layouts, draft->peer_id) == NULL)) {
        code = kvti_fail(err, KVT_ENOENT,
                         "a layout was dropped or replaced during the call");
    }
    return code == KVT_OK ? kvti_xfer_room_locked(t, err) : code;
}

static int submit_locked(struct kvt_transport *t, struct draft *draft,
                         kvt_xfer *ret_xfer, struct kvt_error *err)
{
    struct kvti_xfer *xfer;
    struct kvti_peer *peer;
    int code;

    peer = find_peer_locked(t, draft->peer, &code, err);
    if (peer == NULL) {
        return code;
    }
    code = check_again_locked(t, peer, draft, err);
    if (code != KVT_OK) {
        return code;
    }
    xfer = kvti_xfer_new_locked(t, peer, draft->op, draft->options);
    xfer->payload = draft->payload;
    xfer->result.bytes = draft->payload.bytes;
    xfer->result.blocks = draft->payload.count;
    xfer->note = draft->note;
    xfer->note_length = draft->options == NULL ? 0
                                               : draft->options->note_length;
    draft->payload = (struct kvti_payload){0};
    draft->note = NULL;
    t->stats.blocks += xfer->result.blocks;
    kvti_list_append(&t->submitted, &xfer->intake);
    *ret_xfer = xfer->result.id;
    return KVT_OK;
}

static void count_refused(struct kvt_transport *t, int code)
{
    kvti_lock(t);
    t->stats.refused++;
    t->stats.mismatches += code == KVT_EMISMATCH;
    kvti_unlock(t);
}

static void fini_draft(struct draft *draft)
{
    kvti_payload_fini(&draft->payload);
    free(draft->note);
}

/* Without mu: what wakes wants it at once. */
static void wake_for(struct kvt_transport *t)
{
    int cpu = kvti_cpu_now();

    if (cpu != atomic_load_explicit(&t->caller_cpu, memory_order_relaxed)) {
        atomic_store_explicit(&t->caller_cpu, cpu, memory_order_relaxed);
    }
    kvti_wake(t);
}

/* Takes the draft's payload, in success and failure. */
static int submit(struct kvt_transport *t, struct draft *draft,
                  kvt_xfer *ret_xfer, struct kvt_error *err)
{
    int code = copy_note(draft->options, &draft->note, err);

    if (code == KVT_OK) {
        code = kvti_lock_open(t, err);
    }
    if (code == KVT_OK) {
        code = submit_locked(t, draft, ret_xfer, err);
        kvti_unlock(t);
    }
    if (code == KVT_OK) {
        wake_for(t);
    }
    fini_draft(draft);
    return code;
}

static int check_call(struct kvt_transport *t,
                      const struct kvt_xfer_options *options,
                      const kvt_xfer *ret_xfer, struct kvt_error *err)
{
    int code = kvti_guard(t, err);

    if (code == KVT_OK) {
        code = check_options(t, options, err);
    }
    if (code == KVT_OK && ret_xfer == NULL) {
        code = kvti_fail(err, KVT_EINVAL, "ret_xfer is NULL");
    }
    return code;
}

/* ----------------------------------------------------------------- pieces */

static int move_pieces(struct kvt_transport *t, uint32_t op, kvt_peer peer,
                       const struct kvt_copy *copies, size_t count,
                       const struct kvt_xfer_options *options,
                       kvt_xfer *ret_xfer, struct kvt_error *err)
{
    struct draft draft = {.peer = peer,
                          .op = op,
                          .options = options,
                          .pieces = copies,
                          .piece_count = count};
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    code = check_call(t, options, ret_xfer, err);
    if (code == KVT_OK) {
        code = kvti_payload_pieces(copies, count, &draft.payload, err);
    }
    if (code == KVT_OK) {
        code = submit(t, &draft, ret_xfer, err);
    }
    if (code != KVT_OK) {
        count_refused(t, code);
    }
    return code;
}

int kvt_write(kvt_transport *t, kvt_peer peer, const struct kvt_copy *copies,
              size_t count, const struct kvt_xfer_options *options,
              kvt_xfer *ret_xfer, struct kvt_error *err)
{
    return move_pieces(t, KVT_OP_WRITE, peer, copies, count, options, ret_xfer,
                       err);
}

int kvt_read(kvt_transport *t, kvt_peer peer, const struct kvt_copy *copies,
             size_t count, const struct kvt_xfer_options *options,
             kvt_xfer *ret_xfer, struct kvt_error *err)
{
    return move_pieces(t, KVT_OP_READ, peer, copies, count, options, ret_xfer,
                       err);
}

/* ----------------------------------------------------------------- blocks */

static int find_layout_locked(struct kvt_transport *t, kvt_layout id,
                              const struct kvti_peer *side, const char *what,
                              struct kvti_layout **ret, struct kvt_error *err)
{
    struct kvti_entry *entry = kvti_idmap_get(&t->layouts, id);

    if (entry == NULL) {
        return kvti_fail(err, KVT_ENOENT,
                         "the %s layout is unknown: it was dropped, replaced, "
                         "or its memory was deregistered",
                         what);
    }
    if (entry->peer != side) {
        return kvti_fail(err, KVT_EINVAL,
                         "layout \"%.100s\" is not of the %s side",
                         entry->name.text, what);
    }
    kvti_layout_ref(entry->layout);
    *ret = entry->layout;
    return KVT_OK;
}

static int find_layouts_locked(struct kvt_transport *t,
                               const struct draft *draft,
                               struct kvti_layout **ret_local,
                               struct kvti_layout **ret_peer,
                               struct kvt_error *err)
{
    struct kvti_peer *peer;
    int code;

    peer = find_peer_locked(t, draft->peer, &code, err);
    if (peer != NULL) {
        code = find_layout_locked(t, draft->local_id, NULL, "local", ret_local,
                                  err);
    }
    if (code == KVT_OK) {
        code = find_layout_locked(t, draft->peer_id, peer, "peer's", ret_peer,
                                  err);
    }
    return code;
}

static int submit_blocks(struct kvt_transport *t, struct draft *draft,
                         const struct kvt_indices *local,
                         const struct kvt_indices *remote, kvt_xfer *ret_xfer,
                         struct kvt_error *err)
{
    struct kvti_layout *local_layout = NULL;
    struct kvti_layout *peer_layout = NULL;
    struct kvti_few ours;
    struct kvti_few theirs;
    /* To give mu up and take it again would cost more, also those who wait for
     * it. Nobody's memory but ours is touched meanwhile. */
    bool few = kvti_few_indices(local, &ours) &&
               kvti_few_indices(remote, &theirs);
    int code = kvti_lock_open(t, err);
    bool held = code == KVT_OK;

    if (code == KVT_OK) {
        code = find_layouts_locked(t, draft, &local_layout, &peer_layout, err);
    }
    if (held && !few) {
        kvti_unlock(t);
        held = false;
    }
    if (code == KVT_OK) {
        code = kvti_payload_blocks(local_layout, few ? &ours.indices : local,
                                   peer_layout, few ? &theirs.indices : remote,
                                   &draft->payload, err);
    }
    if (code == KVT_OK && !held) {
        code = kvti_lock_open(t, err);
        held = code == KVT_OK;
    }
    if (code == KVT_OK) {
        code = submit_locked(t, draft, ret_xfer, err);
    }
    if (held) {
        kvti_unlock(t);
    }
    kvti_layout_unref(local_layout);
    kvti_layout_unref(peer_layout);
    return code;
}

static int move_blocks(struct kvt_transport *t, struct draft *draft,
                       const struct kvt_indices *local,
                       const struct kvt_indices *remote, kvt_xfer *ret_xfer,
                       struct kvt_error *err)
{
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    code = check_call(t, draft->options, ret_xfer, err);
    if (code == KVT_OK) {
        code = copy_note(draft->options, &draft->note, err);
    }
    if (code == KVT_OK) {
        code = submit_blocks(t, draft, local, remote, ret_xfer, err);
    }
    if (code == KVT_OK) {
        wake_for(t);
    } else {
        count_refused(t, code);
    }
    fini_draft(draft);
    return code;
}

int kvt_write_blocks(kvt_transport *t, kvt_peer peer, kvt_layout local_layout,
                     const struct kvt_indices *local, kvt_layout peer_layout,
                     const struct kvt_indices *remote,
                     const struct kvt_xfer_options *options, kvt_xfer *ret_xfer,
                     struct kvt_error *err)
{
    struct draft draft = {.peer = peer,
                          .op = KVT_OP_WRITE,
                          .options = options,
                          .local_id = local_layout,
                          .peer_id = peer_layout};

    return move_blocks(t, &draft, local, remote, ret_xfer, err);
}

int kvt_read_blocks(kvt_transport *t, kvt_peer peer, kvt_layout local_layout,
                    const struct kvt_indices *local, kvt_layout peer_layout,
                    const struct kvt_indices *remote,
                    const struct kvt_xfer_options *options, kvt_xfer *ret_xfer,
                    struct kvt_error *err)
{
    struct draft draft = {.peer = peer,
                          .op = KVT_OP_READ,
                          .options = options,
                          .local_id = local_layout,
                          .peer_id = peer_layout};

    return move_blocks(t, &draft, local, remote, ret_xfer, err);
}

/* ---------------------------------------------------------------- warm-up */

int kvt_warm_up(kvt_transport *t, kvt_peer peer,
                const struct kvt_xfer_options *options, kvt_xfer *ret_xfer,
                struct kvt_error *err)
{
    struct draft draft = {
        .peer = peer, .op = KVT_OP_WARM_UP, .options = options};
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    code = check_call(t, options, ret_xfer, err);
    if (code == KVT_OK) {
        code = submit(t, &draft, ret_xfer, err);
    }
    if (code != KVT_OK) {
        count_refused(t, code);
    }
    return code;
}
