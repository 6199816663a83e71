/* SPDX-License-Identifier: Apache-2.0 */
/* Walking the items of a payload: shared by making and cutting it. */
#ifndef KVTI_CURSOR_H
#define KVTI_CURSOR_H

#include "layout.h"

enum kvti_side { KVTI_LOCAL = 0, KVTI_PEER = 1 };

/* The run of the block looked at last: neighbours cost no search. */
struct kvti_cursor {
    const struct kvti_layout *layout;
    const struct kvt_run *run;
    uint64_t first;  /* index of the run's first block */
    uint64_t blocks; /* of the run; 0: none looked at yet */
};

static inline const struct kvt_run *kvti_cursor_run(struct kvti_cursor *cursor,
                                                    uint64_t index)
{
    /* An index below `first` wraps to one above `blocks`. */
    if (index - cursor->first >= cursor->blocks) {
        uint32_t at = kvti_layout_run(cursor->layout, index);

        cursor->run = &cursor->layout->runs[at];
        cursor->first = cursor->layout->first[at];
        cursor->blocks = cursor->run->count;
    }
    return cursor->run;
}

/* The address of a block of the run found last. */
static inline uint64_t kvti_cursor_addr(const struct kvti_cursor *cursor,
                                        uint64_t index)
{
    return cursor->run->addr +
           (index - cursor->first) * cursor->run->stride_bytes;
}

static inline uint64_t kvti_pair_index(const struct kvti_payload *payload,
                                       uint64_t item, enum kvti_side side)
{
    size_t slot = 2 * (size_t)item + (size_t)side;

    return payload->wide ? payload->of.pairs64[slot]
                         : payload->of.pairs32[slot];
}

#endif /* KVTI_CURSOR_H */
