/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks an operation of the library through every point where it can fail:
 * in a new world each time the 0th call fails, the 1st, and so on, until the
 * operation comes to its end without meeting the failure.
 *
 * After each failure: an error that says what was wrong, or a transfer that
 * ended with a text; the counters of the transport say that nothing changed;
 * the same operation works when it is asked again; the transports close, and
 * nothing of them is left: no descriptor, thread, mapping or block of memory.
 */
#ifndef KVT_TEST_WALK_H
#define KVT_TEST_WALK_H

#include "node.h"
#include "nth.h"

/* What an operation begins with. */
enum world_kind {
    WORLD_EMPTY, /* pools */
    WORLD_NODES, /* and two transports, b's metadata */
    WORLD_PAIR   /* and b is a peer of a */
};

struct world {
    const char *engine;
    struct pair pair;
    kvt_transport *opened; /* by the operation */
    struct pool extra;
    void *blob; /* b's metadata */
    size_t blob_length;
    kvt_xfer id;
    struct kvt_result result; /* of the operation's transfer */
    bool transfer;            /* the failure is the transfer's */
    struct kvt_shm shm;
    kvt_layout layout;
    kvt_peer peer;
};

struct operation {
    const char *name;
    enum world_kind kind;
    /* A failure may cost the link to the peer: it is reloaded then. */
    bool may_disconnect;
    /* It ends what it is done to, whatever it answers. */
    bool ends;
    void (*prepare)(struct world *world); /* or NULL */
    /* What fails. An error, or how its transfer ended. */
    int (*act)(struct world *world, struct kvt_error *err);
    /* What is true when it went well; NULL: nothing more. */
    void (*check)(struct world *world);
    /* What is true when it did not; NULL: nothing more. */
    void (*refused)(struct world *world);
};

extern const struct operation operations[];
extern const size_t operation_count;

/* What waits for memory comes to its end when there is some again: who waits
 * for it looks so often while calls fail. */
#define LOOKS 100

/* Waits for the transfer without a call that could fail for us. */
int world_wait(struct world *world, kvt_transport *t, struct kvt_error *err);

/* A peer whose link broke is there again; one that nothing happened to is left
 * alone. The other side of a link may notice a failure later than we ask. */
void world_bring_back(struct world *world);

/* Everything works, once: what a process makes for its whole life is there. */
void walk_once(const char *engine);

/* How many calls failed. */
long walk(const char *engine, const struct operation *operation,
          const struct nth_plan *plan);

/* All of them, by name; each once with every plan. */
void walk_all(const char *engine, const char *name,
              const struct nth_plan *plans, size_t count);

/* A case of each operation. */
#define CASES(X)                                                               \
    X(open)                                                                    \
    X(shm)                                                                     \
    X(register)                                                                \
    X(deregister)                                                              \
    X(metadata)                                                                \
    X(add)                                                                     \
    X(add_async)                                                               \
    X(prepare)                                                                 \
    X(write)                                                                   \
    X(read)                                                                    \
    X(pieces)                                                                  \
    X(write_note)                                                              \
    X(notify)                                                                  \
    X(warm_up)                                                                 \
    X(cancel)                                                                  \
    X(reload)                                                                  \
    X(reload_new)                                                              \
    X(unload)                                                                  \
    X(remove)                                                                  \
    X(confirm_dead)                                                            \
    X(close)

#endif /* KVT_TEST_WALK_H */
