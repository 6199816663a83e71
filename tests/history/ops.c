/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Histories: how one is made of a seed, and its text. An operation says all
 * that it needs itself (its choices come from a seed of its own), and does
 * nothing where there is nothing for it to do: so any part of a history is a
 * history, which is what lets it shrink.
 */
#include <stdlib.h>
#include <string.h>

#include "history.h"

static const char *const verbs[VERB_COUNT] = {
    [VERB_OPEN] = "open",       [VERB_WRITE] = "write",
    [VERB_READ] = "read",       [VERB_BURST] = "burst",
    [VERB_CANCEL] = "cancel",   [VERB_POLL] = "poll",
    [VERB_STATUS] = "status",   [VERB_SETTLE] = "settle",
    [VERB_RULES] = "rules",     [VERB_ADD] = "add",
    [VERB_RELOAD] = "reload",   [VERB_UNLOAD] = "unload",
    [VERB_REMOVE] = "remove",   [VERB_REVOKE] = "revoke",
    [VERB_KILL] = "kill",       [VERB_STOP] = "stop",
    [VERB_CONT] = "cont",       [VERB_LOOK] = "look",
    [VERB_CONFIRM] = "confirm", [VERB_CLOSE] = "close"};

struct maker {
    struct history *history;
    uint64_t seed;
    uint64_t late_seed; /* of the scenes that came later: the others stay as
                         * they were for each seed */
    uint32_t capacity;
};

static void emit(struct maker *maker, uint32_t verb, uint64_t a, uint64_t b,
                 uint64_t c, uint64_t d)
{
    struct history *history = maker->history;

    if (history->count < maker->capacity) {
        history->ops[history->count++] = (struct op){.verb = verb,
                                                     .arg = {a, b, c, d}};
    }
}

static uint32_t pick(struct maker *maker, uint32_t limit)
{
    return random_below(&maker->seed, limit);
}

static uint64_t seed_of(struct maker *maker)
{
    return next_random(&maker->seed) >> 32;
}

/* -------------------------------------------------------------------- scenes */

static void emit_transfer(struct maker *maker)
{
    uint32_t verb = pick(maker, 4) == 0 ? VERB_READ : VERB_WRITE;
    uint32_t target = pick(maker, TARGETS);
    uint32_t count = 1 + pick(maker, pick(maker, 3) == 0 ? COUNT_MAX : 8);
    uint64_t timeout_us = pick(maker, 4) == 0 ? 1 + pick(maker, 2000) : 0;

    emit(maker, verb, target, count, seed_of(maker), timeout_us);
}

static void emit_burst(struct maker *maker)
{
    uint32_t act = pick(maker, 2) == 0 ? ACT_CANCEL_WAIT
                                       : pick(maker, ACT_COUNT);
    uint32_t target = pick(maker, TARGETS);

    emit(maker, VERB_BURST, target, 2 + pick(maker, 11), seed_of(maker), act);
}

static void emit_cancel(struct maker *maker)
{
    uint32_t mode = pick(maker, 2) == 0 ? KVT_CANCEL_WAIT
                                        : KVT_CANCEL_IMMEDIATE;

    emit(maker, VERB_CANCEL, mode, seed_of(maker),
         pick(maker, 2) == 0 ? 100 : 30, 0);
}

static void emit_change(struct maker *maker)
{
    static const uint32_t changes[] = {VERB_ADD, VERB_RELOAD, VERB_UNLOAD,
                                       VERB_REMOVE};
    uint32_t verb = changes[pick(maker, 4)];

    emit(maker, verb, pick(maker, TARGETS), 0, 0, 0);
}

static void emit_look(struct maker *maker)
{
    emit(maker, VERB_LOOK, 0, 0, 0, 0);
}

static void emit_small(struct maker *maker)
{
    switch (pick(maker, 18)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
        emit_burst(maker);
        break;
    case 5:
    case 6:
        emit_cancel(maker);
        break;
    case 7:
        emit_change(maker);
        break;
    case 8:
        emit(maker, VERB_POLL, 0, 0, 0, 0);
        break;
    case 9:
    case 10:
        emit(maker, VERB_STATUS, 0, 0, 0, 0);
        break;
    case 11:
    case 12:
        emit(maker, VERB_RULES, seed_of(maker), 0, 0, 0);
        break;
    default:
        emit_transfer(maker);
        break;
    }
}

static void emit_revoke(struct maker *maker)
{
    uint32_t target = pick(maker, TARGETS);

    emit_burst(maker);
    emit(maker, VERB_REVOKE, target, 0, 0, 0);
    if (pick(maker, 2) == 0) {
        emit_small(maker);
        emit(maker, VERB_RELOAD, target, 0, 0, 0);
    }
    emit_look(maker);
}

static uint32_t pick_late(struct maker *maker, uint32_t limit)
{
    return random_below(&maker->late_seed, limit);
}

/* Of the targets kvt may be told that they are dead. */
static void emit_kill(struct maker *maker, uint32_t process)
{
    emit(maker, VERB_KILL, process, 1 + pick(maker, 12), seed_of(maker),
         pick(maker, TARGETS));
    if (process != INITIATOR && pick_late(maker, 2) == 0) {
        emit(maker, VERB_CONFIRM, process, 0, 0, 0);
    }
    emit_look(maker);
}

/* The initiator stops, perhaps in the middle of a copy; its targets take their
 * memory back, or die, meanwhile. */
static void emit_stopped_initiator(struct maker *maker)
{
    emit(maker, VERB_STOP, INITIATOR, 1 + pick(maker, 12), seed_of(maker),
         pick(maker, TARGETS));
    switch (pick(maker, 4)) {
    case 0:
        emit_kill(maker, pick(maker, TARGETS));
        break;
    case 1:
        emit_look(maker);
        break;
    default:
        emit(maker, VERB_REVOKE, pick(maker, TARGETS), 0, 0, 0);
        emit_look(maker);
        break;
    }
    if (pick(maker, 4) == 0) {
        emit_kill(maker, INITIATOR);
    } else {
        emit(maker, VERB_CONT, INITIATOR, 0, 0, 0);
    }
    emit_look(maker);
}

/* A target stops; the initiator goes on, gives up, or dies, and the target may
 * go on only then. */
static void emit_stopped_target(struct maker *maker)
{
    uint32_t target = pick(maker, TARGETS);

    emit(maker, VERB_STOP, target, 1 + pick(maker, 8), seed_of(maker), target);
    for (uint32_t i = 1 + pick(maker, 5); i > 0; i--) {
        emit_small(maker);
    }
    switch (pick(maker, 6)) {
    case 0:
        emit_kill(maker, INITIATOR);
        break;
    case 1:
        emit(maker, VERB_REMOVE, target, 0, 0, 0);
        break;
    case 2:
    case 3:
        emit(maker, VERB_SETTLE, 0, 0, 0, 0);
        break;
    default:
        break;
    }
    if (pick(maker, 4) == 0) {
        emit_kill(maker, target);
    } else {
        emit(maker, VERB_CONT, target, 0, 0, 0);
    }
    emit_look(maker);
}

static uint64_t late_seed_of(struct maker *maker)
{
    return next_random(&maker->late_seed) >> 32;
}

/* From a time that is too short for anything to one in which all can end; with
 * a rule in force, or while a target is stopped. */
static void emit_close(struct maker *maker)
{
    static const uint32_t timeouts_us[] = {1, 1000, 20000, 300000, 2000000};
    uint32_t which = pick_late(maker,
                               sizeof timeouts_us / sizeof timeouts_us[0]);
    uint32_t target = pick_late(maker, TARGETS);
    uint32_t how = pick_late(maker, 4);

    if (how == 0) {
        emit(maker, VERB_STOP, target, 1 + pick_late(maker, 8),
             late_seed_of(maker), target);
    } else if (how < 3) {
        emit(maker, VERB_RULES, late_seed_of(maker), 0, 0, 0);
    }
    emit(maker, VERB_CLOSE, target, pick_late(maker, 13), late_seed_of(maker),
         timeouts_us[which]);
    emit_look(maker);
    if (how == 0) {
        emit(maker, VERB_CONT, target, 0, 0, 0);
        emit_look(maker);
    }
}

/* Transfers are lost, their peer goes, and then its process: nothing but the
 * caller's word proves them then. */
static void emit_confirm(struct maker *maker)
{
    uint32_t target = pick_late(maker, TARGETS);

    emit(maker, VERB_RULES, late_seed_of(maker), 0, 0, 0);
    emit(maker, VERB_BURST, target, 1 + pick_late(maker, 12),
         late_seed_of(maker), ACT_UNLOAD);
    emit(maker, VERB_KILL, target, 0, 0, target);
    emit(maker, VERB_CONFIRM, target, 0, 0, 0);
    emit_look(maker);
}

/* Between the others. */
static void emit_late(struct maker *maker)
{
    uint32_t which = pick_late(maker, 80);

    if (which < 2) {
        emit_close(maker);
    } else if (which < 4) {
        emit_confirm(maker);
    }
}

static void emit_scene(struct maker *maker)
{
    emit_late(maker);

    switch (pick(maker, 48)) {
    case 0:
    case 1:
        emit_kill(maker, pick(maker, PROCESSES));
        break;
    case 2:
    case 3:
        emit_stopped_initiator(maker);
        break;
    case 4:
    case 5:
        emit_stopped_target(maker);
        break;
    case 6:
    case 7:
        emit_revoke(maker);
        break;
    case 8:
        emit(maker, VERB_SETTLE, 0, 0, 0, 0);
        emit_look(maker);
        break;
    default:
        emit_small(maker);
        break;
    }
}

bool history_make(struct history *history, const char *engine, uint64_t seed,
                  uint32_t count)
{
    struct maker maker = {.history = history,
                          .seed = seed,
                          .late_seed = ~seed,
                          .capacity = count};

    *history = (struct history){0};
    history->ops = calloc(count, sizeof *history->ops);
    if (history->ops == NULL || strlen(engine) >= ENGINE_MAX) {
        return false;
    }
    (void)snprintf(history->engine, ENGINE_MAX, "%s", engine);
    history->by_fd = pick(&maker, 1u << PROCESSES);
    while (history->count < count) {
        emit_scene(&maker);
    }
    return true;
}

bool history_copy(struct history *to, const struct history *from)
{
    *to = *from;
    to->ops = calloc(from->count, sizeof *to->ops);
    if (to->ops == NULL) {
        return false;
    }
    memcpy(to->ops, from->ops, from->count * sizeof *to->ops);
    return true;
}

void history_free(struct history *history)
{
    free(history->ops);
    history->ops = NULL;
}

/* --------------------------------------------------------------------- text */

void history_print(const struct history *history, FILE *file)
{
    (void)fprintf(file, "history 1 %u %s\n", history->by_fd, history->engine);
    for (uint32_t i = 0; i < history->count; i++) {
        const struct op *op = &history->ops[i];

        (void)fprintf(
            file, "%s %llu %llu %llu %llu\n", verbs[op->verb],
            (unsigned long long)op->arg[0], (unsigned long long)op->arg[1],
            (unsigned long long)op->arg[2], (unsigned long long)op->arg[3]);
    }
}

static bool parse_op(const char *line, struct op *ret)
{
    char name[16];
    unsigned long long a;
    unsigned long long b;
    unsigned long long c;
    unsigned long long d;

    if (sscanf(line, "%15s %llu %llu %llu %llu", name, &a, &b, &c, &d) != 5) {
        return false;
    }
    for (uint32_t verb = VERB_WRITE; verb < VERB_COUNT; verb++) {
        if (strcmp(name, verbs[verb]) == 0) {
            *ret = (struct op){.verb = verb, .arg = {a, b, c, d}};
            return true;
        }
    }
    return false;
}

bool history_read(struct history *history, FILE *file)
{
    char line[ENGINE_MAX + 64];
    uint32_t capacity = 0;

    *history = (struct history){0};
    if (fgets(line, sizeof line, file) == NULL ||
        sscanf(line, "history 1 %u %127s", &history->by_fd, history->engine) !=
            2) {
        return false;
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (history->count == capacity) {
            struct op *more;

            capacity = capacity * 2 + 64;
            more = realloc(history->ops, capacity * sizeof *more);
            if (more == NULL) {
                return false;
            }
            history->ops = more;
        }
        if (!parse_op(line, &history->ops[history->count])) {
            return false;
        }
        history->count++;
    }
    return history->count > 0;
}
