/* SPDX-License-Identifier: Apache-2.0 */
/*
 * docs/bad_input.md as a table: what each call must answer to each bad input.
 * The document is the truth; the code says how to make the call. A row that
 * no code makes and a call that no row foresees are both wrong.
 */
#ifndef KVT_CONFORMANCE_BADINPUT_H
#define KVT_CONFORMANCE_BADINPUT_H

#include "suite.h"

struct row {
    char call[32];
    char class[16];
    char input[112];
    char answer[32];
    bool seen;
};

#define ROWS_MAX 512
#define UNTOUCHED 7

/* Arguments that are good where the transport is. */
struct bad {
    struct row rows[ROWS_MAX];
    size_t row_count;
    unsigned wrong;

    struct pair pair;
    void *metadata;
    void *own_metadata;
    kvt_peer removed;
    kvt_peer unloaded;
    kvt_xfer drained;

    kvt_transport *t;
    struct kvt_peer_params params;
    struct kvt_region region;
    struct kvt_run run;      /* ours */
    struct kvt_run peer_run; /* the peer's */
    struct kvt_copy piece;
    struct kvt_indices indices;
    struct kvt_xfer_options options;
    uint32_t block;
    kvt_peer peer;
    kvt_layout local;
    kvt_layout remote;

    /* Outputs: UNTOUCHED after a call that failed. */
    kvt_peer out_peer;
    kvt_layout out_layout;
    kvt_xfer out_xfer;
    kvt_transport *out_t;
    size_t out_length;
    struct kvt_result result;
    struct kvt_peer_info info;
    struct kvt_notification note;
    struct kvt_stats stats;
    struct kvt_shm shm;
    char bytes[65536];
};

/* The answer of the row of this call with this input. */
void answer(struct bad *b, const char *call, const char *input, int got);
/* Of the one row of this call and class. */
void answer_class(struct bad *b, const char *call, const char *class, int got);
void answer_text(struct bad *b, const char *call, const char *input,
                 const char *got);

/* Makes a call and looks its answer up. */
#define CHECK(name, input, ...)                                                \
    do {                                                                       \
        kvt_test_clear();                                                      \
        answer(b, #name, (input), name(__VA_ARGS__));                          \
    } while (0)

/* "-": it does no harm. */
#define CHECK_VOID(name, input, ...)                                           \
    do {                                                                       \
        kvt_test_clear();                                                      \
        name(__VA_ARGS__);                                                     \
        answer(b, #name, (input), KVT_OK);                                     \
    } while (0)

void reset_outputs(struct bad *b);

/* badinput_rows.c and badinput_moves.c: every row but those about the
 * transport itself. */
void check_open_rows(struct bad *b);
void check_memory_rows(struct bad *b);
void check_metadata_rows(struct bad *b);
void check_peer_rows(struct bad *b);
void check_layout_rows(struct bad *b);
void check_move_rows(struct bad *b);
void check_result_rows(struct bad *b);
void check_note_rows(struct bad *b);
void check_fault_rows(struct bad *b);

#endif /* KVT_CONFORMANCE_BADINPUT_H */
