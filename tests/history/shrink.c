/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes parts out of a history that fails for as long as what is left fails
 * too: first halves, then smaller parts, at the end single operations. What
 * fails is a race at times, so a part is kept only when its absence made
 * several runs go well.
 */
#include <stdlib.h>
#include <string.h>

#include "history.h"

#define TRIES 4u

static bool fails(const struct history *history, uint32_t *runs)
{
    struct outcome outcome;

    for (uint32_t i = 0; i<TRIES && * runs> 0; i++) {
        (*runs)--;
        if (checker_run(history, &outcome) && outcome.failed) {
            return true;
        }
    }
    return false;
}

static void cut(struct history *history, uint32_t first, uint32_t count)
{
    memmove(history->ops + first, history->ops + first + count,
            (history->count - first - count) * sizeof *history->ops);
    history->count -= count;
}

/* One pass with parts of this size; true when something went. */
static bool pass(struct history *history, uint32_t size, uint32_t *runs)
{
    bool shrunk = false;
    uint32_t at = history->count;

    while (at > 0 && *runs > 0) {
        uint32_t first = at > size ? at - size : 0;
        struct history less;

        if (!history_copy(&less, history)) {
            return false;
        }
        cut(&less, first, at - first);
        if (less.count > 0 && fails(&less, runs)) {
            history_free(history);
            *history = less;
            shrunk = true;
        } else {
            history_free(&less);
        }
        at = first;
    }
    return shrunk;
}

void shrink(struct history *history, uint32_t runs)
{
    uint32_t size = history->count / 2;

    while (size > 0 && runs > 0) {
        if (!pass(history, size, &runs) || size > history->count) {
            size /= 2;
        }
    }
}
