/* SPDX-License-Identifier: Apache-2.0 */
/* Counters out: as a struct, and as Prometheus text. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core.h"

/* By path, and where the peer's host memory goes now: an engine may have had
 * to leave the local way, to which it does not come back. */
static void count_path_locked(struct kvt_transport *t,
                              const struct kvti_xfer *xfer,
                              const struct kvti_chunk *chunk)
{
    struct kvti_peer *peer = xfer->peer;

    if (chunk->path == KVTI_PATH_LOCAL) {
        t->stats.bytes_local += chunk->bytes;
        return;
    }
    t->stats.bytes_nixl += chunk->bytes;
    if (strcmp(peer->path, "local") == 0 && chunk->local_kind == KVT_DRAM &&
        chunk->peer_kind == KVT_DRAM && peer->state == KVT_PEER_LOADED &&
        peer->generation == xfer->generation) {
        kvti_format(peer->path, sizeof peer->path, "nixl");
        kvti_format(peer->text, sizeof peer->text,
                    "NIXL took over in mid-life: the log says why");
    }
}

void kvti_stats_moved_locked(struct kvt_transport *t,
                             const struct kvti_xfer *xfer,
                             const struct kvti_chunk *chunk)
{
    struct kvti_peer *peer = xfer->peer;

    if (chunk->op == KVT_OP_WRITE) {
        t->stats.bytes_written += chunk->bytes;
        peer->bytes_written += chunk->bytes;
    } else {
        t->stats.bytes_read += chunk->bytes;
        peer->bytes_read += chunk->bytes;
    }
    count_path_locked(t, xfer, chunk);
}

void kvti_histogram_add(struct kvt_histogram *histogram, uint64_t ns)
{
    unsigned bucket = ns == 0 ? 0 : 64u - (unsigned)__builtin_clzll(ns);

    if (bucket >= KVT_HISTOGRAM_BUCKETS) {
        bucket = KVT_HISTOGRAM_BUCKETS - 1;
    }
    histogram->buckets[bucket]++;
    histogram->count++;
    histogram->sum_ns += ns;
}

static void snapshot_locked(struct kvt_transport *t, struct kvt_stats *ret)
{
    *ret = t->stats;
    ret->peers = t->peer_count;
    ret->regions = t->regions.count;
    ret->layouts = t->layouts.count;
    ret->runs = t->run_count;
}

int kvt_stats(kvt_transport *t, struct kvt_stats *ret, size_t size)
{
    struct kvt_stats stats;
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret == NULL || size == 0 || size > sizeof stats) {
        return KVT_EINVAL;
    }
    kvti_lock(t);
    snapshot_locked(t, &stats);
    kvti_unlock(t);
    memcpy(ret, &stats, size);
    return KVT_OK;
}

/* -------------------------------------------------------------- Prometheus */

/* Text of which only what fits is kept, while its full length is counted. */
struct text {
    char *buffer;
    size_t capacity;
    size_t length;
};

KVTI_PRINTF(2, 3)
static void add(struct text *text, const char *format, ...)
{
    size_t left = text->length < text->capacity ? text->capacity - text->length
                                                : 0;
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(left == 0 ? NULL : text->buffer + text->length, left, format,
                  args);
    va_end(args);
    text->length += n < 0 ? 0 : (size_t)n;
}

/* A label's value: quotes, backslashes and newlines are escaped. */
static void add_label(struct text *text, const char *value)
{
    for (; *value != '\0'; value++) {
        if (*value == '\n') {
            add(text, "\\n");
        } else if (*value == '"' || *value == '\\') {
            add(text, "\\%c", *value);
        } else {
            add(text, "%c", *value);
        }
    }
}

struct series {
    const char *name;
    const char *labels; /* after the agent's, with a leading comma */
    const char *type;
    const char *help; /* NULL: the one before it has the same name */
    size_t offset;    /* of a uint64_t in struct kvt_stats */
};

#define FIELD(member) offsetof(struct kvt_stats, member)
#define COUNTER "counter"
#define GAUGE "gauge"

static const struct series all_series[] = {
    {"kvt_transfers_accepted_total", "", COUNTER, "Transfers accepted.",
     FIELD(accepted)},
    {"kvt_transfers_refused_total", "", COUNTER,
     "Submissions that returned an error.", FIELD(refused)},
    {"kvt_transfers_completed_total", ",state=\"done\"", COUNTER,
     "Transfers completed, by their state.", FIELD(done)},
    {"kvt_transfers_completed_total", ",state=\"rejected\"", COUNTER, NULL,
     FIELD(rejected)},
    {"kvt_transfers_completed_total", ",state=\"failed\"", COUNTER, NULL,
     FIELD(failed)},
    {"kvt_transfers_completed_total", ",state=\"disconnected\"", COUNTER, NULL,
     FIELD(disconnected)},
    {"kvt_transfers_completed_total", ",state=\"cancelled\"", COUNTER, NULL,
     FIELD(cancelled)},
    {"kvt_transfers_completed_total", ",state=\"timed_out\"", COUNTER, NULL,
     FIELD(timed_out)},
    {"kvt_transfers_completed_total", ",state=\"lost\"", COUNTER, NULL,
     FIELD(lost)},
    {"kvt_transfers_quarantined", "", GAUGE, "Lost and not proven since.",
     FIELD(quarantined)},
    {"kvt_transfers_inflight", "", GAUGE, "Transfers not completed.",
     FIELD(inflight)},
    {"kvt_transfers_undrained", "", GAUGE,
     "Completed transfers that nobody polled or released.", FIELD(undrained)},
    {"kvt_queued_commands", "", GAUGE,
     "Commands the control thread has not seen.", FIELD(queued_commands)},
    {"kvt_bytes_total", ",op=\"write\"", COUNTER,
     "Bytes of requests that ended well.", FIELD(bytes_written)},
    {"kvt_bytes_total", ",op=\"read\"", COUNTER, NULL, FIELD(bytes_read)},
    {"kvt_path_bytes_total", ",path=\"local\"", COUNTER,
     "The same bytes by the way they went.", FIELD(bytes_local)},
    {"kvt_path_bytes_total", ",path=\"nixl\"", COUNTER, NULL,
     FIELD(bytes_nixl)},
    {"kvt_blocks_total", "", COUNTER, "Blocks and pieces asked for.",
     FIELD(blocks)},
    {"kvt_copies_total", "", COUNTER, "Engine descriptors posted.",
     FIELD(copies)},
    {"kvt_merged_total", "", COUNTER,
     "Blocks that rode in their predecessor's copy.", FIELD(merged)},
    {"kvt_chunks_total", "", COUNTER, "Engine requests posted.", FIELD(chunks)},
    {"kvt_notifications_total", ",result=\"sent\"", COUNTER, "Notifications.",
     FIELD(notes_sent)},
    {"kvt_notifications_total", ",result=\"failed\"", COUNTER, NULL,
     FIELD(notes_failed)},
    {"kvt_notifications_total", ",result=\"received\"", COUNTER, NULL,
     FIELD(notes_received)},
    {"kvt_peers", "", GAUGE, "Peers known.", FIELD(peers)},
    {"kvt_peers_loaded", "", GAUGE, "Peers that take transfers.",
     FIELD(peers_loaded)},
    {"kvt_peer_adds_total", "", COUNTER, "Peers added.", FIELD(peer_adds)},
    {"kvt_peer_reloads_total", "", COUNTER, "Peers reloaded.",
     FIELD(peer_reloads)},
    {"kvt_peer_disconnects_total", "", COUNTER, "Links that broke.",
     FIELD(peer_disconnects)},
    {"kvt_mismatches_total", "", COUNTER,
     "Submissions whose two sides did not fit.", FIELD(mismatches)},
    {"kvt_regions", "", GAUGE, "Registered regions.", FIELD(regions)},
    {"kvt_layouts", "", GAUGE, "Layouts prepared.", FIELD(layouts)},
    {"kvt_layout_runs", "", GAUGE, "Runs in all layouts.", FIELD(runs)},
    {"kvt_engine_stalls_total", "", COUNTER,
     "Engine calls that did not come back in 5 s.", FIELD(stalls)},
};

static void add_head(struct text *text, const char *name, const char *type,
                     const char *help)
{
    if (help != NULL) {
        add(text, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
    }
}

static void add_histogram(struct text *text, const char *name,
                          const char *labels,
                          const struct kvt_histogram *histogram)
{
    uint64_t count = 0;

    for (unsigned i = 0; i + 1 < KVT_HISTOGRAM_BUCKETS; i++) {
        if (histogram->buckets[i] == 0) {
            continue; /* a cumulative series may leave bounds out */
        }
        count += histogram->buckets[i];
        add(text, "%s_bucket{%s,le=\"%.9g\"} %" PRIu64 "\n", name, labels,
            (double)(UINT64_C(1) << i) * 1e-9, count);
    }
    add(text, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", name, labels,
        histogram->count);
    add(text, "%s_sum{%s} %.9g\n", name, labels,
        (double)histogram->sum_ns * 1e-9);
    add(text, "%s_count{%s} %" PRIu64 "\n", name, labels, histogram->count);
}

static void add_peer_value(struct text *text, const char *agent,
                           const struct kvti_peer *peer, const char *name,
                           const char *labels, uint64_t value)
{
    add(text, "%s{%s,peer=\"", name, agent);
    add_label(text, peer->name.text);
    add(text, "\"%s} %" PRIu64 "\n", labels, value);
}

static void add_peers_locked(struct text *text, const char *agent,
                             struct kvt_transport *t)
{
    static const struct {
        const char *name;
        const char *labels;
        const char *type;
        const char *help;
        size_t offset;
    } values[] = {
        {"kvt_peer_inflight", "", GAUGE, "Transfers not completed, by peer.",
         offsetof(struct kvti_peer, inflight)},
        {"kvt_peer_transfers_total", ",result=\"done\"", COUNTER,
         "Transfers completed, by peer.", offsetof(struct kvti_peer, done)},
        {"kvt_peer_transfers_total", ",result=\"not_done\"", COUNTER, NULL,
         offsetof(struct kvti_peer, not_done)},
        {"kvt_peer_bytes_total", ",op=\"write\"", COUNTER,
         "Bytes of requests that ended well, by peer.",
         offsetof(struct kvti_peer, bytes_written)},
        {"kvt_peer_bytes_total", ",op=\"read\"", COUNTER, NULL,
         offsetof(struct kvti_peer, bytes_read)},
        {"kvt_peer_latency_nanoseconds_total", "", COUNTER,
         "Sum of transfers' times from accepted to completed, by peer.",
         offsetof(struct kvti_peer, complete_ns.sum_ns)},
    };

    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        add_head(text, values[i].name, values[i].type, values[i].help);
        kvti_list_each(node, &t->peer_list) {
            const struct kvti_peer *peer = kvti_container(
                node, struct kvti_peer, node);

            if (!peer->removed) {
                add_peer_value(
                    text, agent, peer, values[i].name, values[i].labels,
                    *(const uint64_t *)(const void *)((const char *)peer +
                                                      values[i].offset));
            }
        }
    }
}

static void add_tags_locked(struct text *text, const char *agent,
                            const char *name, const char *help,
                            const uint64_t *values)
{
    add_head(text, name, COUNTER, help);
    for (unsigned tag = 0; tag <= KVT_TAG_MAX; tag++) {
        if (values[tag] != 0) {
            add(text, "%s{%s,tag=\"%u\"} %" PRIu64 "\n", name, agent, tag,
                values[tag]);
        }
    }
}

static void write_all_locked(struct text *text, const char *agent,
                             struct kvt_transport *t)
{
    struct kvt_stats stats;

    snapshot_locked(t, &stats);
    for (size_t i = 0; i < sizeof all_series / sizeof all_series[0]; i++) {
        const struct series *series = &all_series[i];

        add_head(text, series->name, series->type, series->help);
        add(text, "%s{%s%s} %" PRIu64 "\n", series->name, agent, series->labels,
            *(const uint64_t *)(const void *)((const char *)&stats +
                                              series->offset));
    }
    add_head(text, "kvt_post_seconds", "histogram",
             "From accepted to the first post.");
    add_histogram(text, "kvt_post_seconds", agent, &stats.post_ns);
    add_head(text, "kvt_transfer_seconds", "histogram",
             "From accepted to completed.");
    add_histogram(text, "kvt_transfer_seconds", agent, &stats.complete_ns);
    add_peers_locked(text, agent, t);
    add_tags_locked(text, agent, "kvt_tag_transfers_total",
                    "Transfers done, by the caller's tag.", t->tag_done);
    add_tags_locked(text, agent, "kvt_tag_bytes_total",
                    "Bytes of transfers done, by the caller's tag.",
                    t->tag_bytes);
}

int kvt_metrics(kvt_transport *t, char *buffer, size_t capacity,
                size_t *ret_length)
{
    char agent[2 * KVT_NAME_MAX + 64];
    struct text label = {agent, sizeof agent, 0};
    struct text text = {buffer, capacity, 0};
    int code = kvti_guard(t, NULL);

    if (code != KVT_OK) {
        return code;
    }
    if (ret_length == NULL || (buffer == NULL && capacity > 0)) {
        return KVT_EINVAL;
    }
    add(&label, "agent=\"");
    add_label(&label, t->agent_name);
    add(&label, "\",engine=\"");
    add_label(&label, t->engine_name);
    add(&label, "\"");
    kvti_lock(t);
    write_all_locked(&text, agent, t);
    kvti_unlock(t);
    *ret_length = text.length;
    return text.length < capacity ? KVT_OK : KVT_ERANGE;
}
