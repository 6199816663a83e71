/* SPDX-License-Identifier: Apache-2.0 */
/* How far a run is, on stderr: a bar that moves on a terminal, else four lines
 * in the whole run. */
#ifndef KVT_TOOLS_PROGRESS_H
#define KVT_TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    bool terminal;
    uint64_t total;
    uint64_t begin_ns;
    uint64_t drawn_ns;
    uint64_t quarters; /* printed, where there is no terminal */
};

void progress_open(struct progress *progress, uint64_t total);

/* Draws if it is time to. */
void progress_update(struct progress *progress, uint64_t done, uint64_t bytes);

/* Milliseconds until there is something to draw; -1: never. */
int progress_wait_ms(const struct progress *progress);

/* Takes the bar away. */
void progress_close(struct progress *progress);

#endif /* KVT_TOOLS_PROGRESS_H */
