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

/* What the worlds stand on. */
struct ground {
    const char *name;
    const char *engine;         /* specification */
    struct kvt_options options; /* engine, name and limits are the walk's */
    /* Before the transports are opened, and when they are closed; or NULL. */
    void (*begin)(void);
    void (*end)(void);
    /* After this failure nobody can know whether the transfer is still moving:
     * it may not be called quiescent. NULL: there is none such. */
    bool (*leaves_doubt)(const struct nth_seen *seen);
};

struct world {
    const struct ground *ground;
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
    uint32_t notes_sent; /* they are numbered from 1 on */
    uint64_t notes_seen; /* a bit for each number */
};

struct operation {
    const char *name;
    enum world_kind kind;
    /* A failure may cost the link to the peer: it is reloaded then. */
    bool may_disconnect;
    /* Its transfer touches no memory of the caller's. */
    bool needs_no_memory;
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

/* Of a transport in it. */
struct kvt_options world_options(const struct world *world, const char *name);

/* Waits for the transfer without a call that could fail for us. */
int world_wait(struct world *world, kvt_transport *t, struct kvt_error *err);

/* A peer whose link broke is there again; one that nothing happened to is left
 * alone. The other side of a link may notice a failure later than we ask. */
void world_bring_back(struct world *world);

/* Everything works, once: what a process makes for its whole life is there. */
void walk_once(const struct ground *ground);

/* How many calls failed. */
long walk(const struct ground *ground, const struct operation *operation,
          const struct nth_plan *plan);

/* An operation, by its name, once with every plan. */
void walk_all(const struct ground *ground, const char *name,
              const struct nth_plan *plans, size_t count);

/* What walks by places came to. */
struct tally {
    size_t places;   /* operation by operation */
    size_t failures; /* with each way to fail, and the second call too */
    size_t pairs;    /* of these, with the failure that leads there */
    size_t missed;   /* places that were met once and then not again */
};

/* Of the failures of the walks by places that follow only one in so many is made,
 * by chance; and the first of each function of NIXL's, in its first way and in
 * its last, in any case. 1: all. */
void walk_sample(uint64_t one_of, uint64_t seed);

/* An operation, through each place in the code that calls out while it runs:
 * the first call from there fails, then the second, in each way that there is;
 * and where memory is asked for, all that ask later.
 * Places that only a failure leads to are found on the way. */
void walk_places(const struct ground *ground, const char *name, unsigned kinds,
                 struct tally *tally);

/* Whether a walk has made a call of this function fail. */
bool walk_has_failed(const char *name);

/* The operation meets its n-th call of the loader, which fails; false: there
 * is none. Only in a process that has not loaded NIXL. */
bool walk_loader(const struct ground *ground, long n);

/* A case of each operation. */
#define CASES(X)                                                               \
    X(open)                                                                    \
    X(probe)                                                                   \
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
