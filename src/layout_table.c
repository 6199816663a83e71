/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts by name and id. An entry is what a name means now; the layout behind
 * it is immutable and lives on in the transfers that use it.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

bool kvti_kind_ok(const struct kvt_transport *t, uint32_t kind)
{
    return kind <= KVT_VRAM && (t->traits.caps & (1u << kind)) != 0;
}

void kvti_entry_drop_locked(struct kvt_transport *t, struct kvti_entry *entry)
{
    kvti_idmap_remove(&t->layouts, entry->id);
    kvti_names_remove(&t->layout_names, &entry->name);
    kvti_list_remove(&entry->node);
    if (entry->peer != NULL) {
        entry->peer->layout_count--;
    }
    t->run_count -= entry->layout->run_count;
    kvti_layout_unref(entry->layout);
    kvti_name_fini(&entry->name);
    free(entry);
}

void kvti_layouts_drop_locked(struct kvt_transport *t)
{
    kvti_list_each(node, &t->own_layouts) {
        kvti_entry_drop_locked(t,
                               kvti_container(node, struct kvti_entry, node));
    }
}

void kvti_layouts_sweep_locked(struct kvt_transport *t)
{
    kvti_list_each(node, &t->own_layouts) {
        struct kvti_entry *entry = kvti_container(node, struct kvti_entry,
                                                  node);

        if (kvti_layout_check(entry->layout, &t->regions, NULL) != KVT_OK) {
            kvti_entry_drop_locked(t, entry);
        }
    }
}

static int check_limits_locked(const struct kvt_transport *t,
                               const struct kvti_entry *old, size_t runs,
                               struct kvt_error *err)
{
    uint64_t held = old == NULL ? 0 : old->layout->run_count;

    if (old == NULL && t->layouts.count >= t->options.layouts_max) {
        return kvti_fail(err, KVT_EAGAIN,
                         "this transport has its %u layouts: drop one, or "
                         "open it with a higher layouts_max",
                         t->options.layouts_max);
    }
    if (runs > t->options.runs_max - (t->run_count - held)) {
        return kvti_fail(err, KVT_EAGAIN,
                         "%zu more runs would pass this transport's limit of "
                         "%llu: drop a layout, or open it with a higher "
                         "runs_max",
                         runs, (unsigned long long)t->options.runs_max);
    }
    return KVT_OK;
}

static int check_supported(const struct kvt_transport *t,
                           const struct kvt_run *runs, size_t count,
                           struct kvt_error *err)
{
    for (size_t i = 0; i < count; i++) {
        if (runs[i].kind > KVT_VRAM) {
            return kvti_fail(err, KVT_EINVAL, "run %zu: kind %u is unknown", i,
                             runs[i].kind);
        }
        if (!kvti_kind_ok(t, runs[i].kind)) {
            return kvti_fail(err, KVT_EUNSUPPORTED,
                             "run %zu: engine \"%s\" does not move %s memory",
                             i, t->engine_name,
                             runs[i].kind == KVT_VRAM ? "VRAM" : "DRAM");
        }
        if (t->traits.no_strided && runs[i].count > 1) {
            return kvti_fail(err, KVT_EUNSUPPORTED,
                             "run %zu: engine \"%s\" only takes runs of one "
                             "block: make a run of each",
                             i, t->engine_name);
        }
    }
    return KVT_OK;
}

/* Puts a finished entry in the place of the old one, if any. */
static int insert_locked(struct kvt_transport *t, struct kvti_entry *entry,
                         struct kvti_entry *old, struct kvt_error *err)
{
    if (kvti_names_reserve(&t->layout_names) != KVT_OK ||
        (entry->id = kvti_idmap_add(&t->layouts, entry)) == 0) {
        return kvti_fail(err, KVT_ENOMEM, "no memory for a layout");
    }
    if (old != NULL) {
        kvti_entry_drop_locked(t, old);
    }
    kvti_names_add(&t->layout_names, &entry->name);
    if (entry->peer != NULL) {
        entry->peer->layout_count++;
        kvti_list_append(&entry->peer->layouts, &entry->node);
    } else {
        kvti_list_append(&t->own_layouts, &entry->node);
    }
    t->run_count += entry->layout->run_count;
    return KVT_OK;
}

static int prepare_locked(struct kvt_transport *t, kvt_peer side,
                          struct kvti_entry *entry, const struct kvt_run *runs,
                          size_t count, struct kvt_error *err)
{
    const struct kvti_regions *regions = &t->regions;
    struct kvti_entry *old = NULL;
    struct kvti_name *found;
    int code;

    if (side != KVT_SELF) {
        entry->peer = kvti_peer_get_locked(t, side);
        if (entry->peer == NULL) {
            return kvti_fail(err, KVT_ENOENT, "no peer has this id");
        }
        if (entry->peer->state != KVT_PEER_LOADED) {
            return kvti_fail(err, KVT_EDISCONNECTED,
                             "peer \"%.100s\" is not loaded: wait for its add "
                             "or reload it",
                             entry->peer->name.text);
        }
        regions = &entry->peer->md.regions;
    }
    found = kvti_names_find(&t->layout_names, side, entry->name.text);
    if (found != NULL) {
        old = kvti_container(found, struct kvti_entry, name);
    }
    code = check_limits_locked(t, old, count, err);
    if (code == KVT_OK) {
        code = kvti_layout_new(runs, count, regions, &entry->layout, err);
    }
    if (code == KVT_OK) { /* again, of the copy: the caller's may change */
        code = check_supported(t, entry->layout->runs, count, err);
    }
    if (code == KVT_OK) {
        code = insert_locked(t, entry, old, err);
    }
    return code;
}

int kvt_prepare(kvt_transport *t, kvt_peer side, const char *name,
                const struct kvt_run *runs, size_t count,
                kvt_layout *ret_layout, struct kvt_error *err)
{
    struct kvti_entry *entry;
    int code = kvti_guard(t, err);

    if (code != KVT_OK) {
        return code;
    }
    if (name == NULL || name[0] == '\0' ||
        strnlen(name, KVT_NAME_MAX + 1) > KVT_NAME_MAX) {
        return kvti_fail(err, KVT_EINVAL,
                         "the layout's name must be a string of 1 to %d bytes",
                         KVT_NAME_MAX);
    }
    if (runs == NULL || count == 0 || ret_layout == NULL) {
        return kvti_fail(err, KVT_EINVAL,
                         "a layout needs at least one run and a place for its "
                         "id");
    }
    code = check_supported(t, runs, count, err);
    if (code != KVT_OK) {
        return code;
    }
    entry = calloc(1, sizeof *entry);
    if (entry == NULL || kvti_name_init(&entry->name, side, name) != KVT_OK) {
        free(entry);
        return kvti_fail(err, KVT_ENOMEM, "no memory for a layout");
    }
    kvti_list_init(&entry->node);
    code = kvti_lock_open(t, err);
    if (code == KVT_OK) {
        code = prepare_locked(t, side, entry, runs, count, err);
        if (code == KVT_OK) {
            *ret_layout = entry->id;
        }
        kvti_unlock(t);
    }
    if (code != KVT_OK) {
        kvti_layout_unref(entry->layout);
        kvti_name_fini(&entry->name);
        free(entry);
    }
    return code;
}

int kvt_layout_find(kvt_transport *t, kvt_peer side, const char *name,
                    kvt_layout *ret_layout)
{
    struct kvti_name *found;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (name == NULL || ret_layout == NULL) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    found = kvti_names_find(&t->layout_names, side, name);
    if (found == NULL) {
        code = KVT_ENOENT;
    } else {
        *ret_layout = kvti_container(found, struct kvti_entry, name)->id;
    }
    kvti_unlock(t);
    return code;
}

int kvt_layout_drop(kvt_transport *t, kvt_layout layout)
{
    struct kvti_entry *entry;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    kvti_lock(t);
    entry = kvti_idmap_get(&t->layouts, layout);
    if (entry == NULL) {
        code = KVT_ENOENT;
    } else {
        kvti_entry_drop_locked(t, entry);
    }
    kvti_unlock(t);
    return code;
}
