/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs one history: starts the three processes, tells them what to do, kills,
 * stops and continues them, and looks at the memory.
 *
 * One thing happens at a time: a command is answered before the next one goes
 * out, but for the burst before a kill or a stop, which is what they are to
 * hit. So while the checker looks, only kvt's own threads move bytes.
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "history.h"

#define ANSWER_MS 120000

struct process {
    pid_t pid;
    int fd;
    uint32_t pending; /* commands without an answer yet */
    bool stopped;
    bool half; /* target: a revoke that has to be asked again */
};

struct checker {
    struct arena arena;
    struct process processes[PROCESSES];
    uint32_t skipped;
    bool broken; /* no use in going on */
};

/* ---------------------------------------------------------------- commands */

static const char *process_name(uint32_t which)
{
    static const char *const names[PROCESSES] = {"target 0", "target 1",
                                                 "the initiator"};

    return names[which];
}

static bool break_off(struct checker *self, uint32_t which, const char *why)
{
    if (!self->broken) {
        self->broken = true;
        arena_finding(&self->arena, "%s %s", process_name(which), why);
    }
    return false;
}

/* Its socket is closed: it is dead, or will be in a moment. */
static bool tell_death(struct checker *self, uint32_t which)
{
    siginfo_t info = {0};
    char why[64];

    (void)waitid(P_PID, (id_t)self->processes[which].pid, &info,
                 WEXITED | WNOWAIT);
    (void)snprintf(why, sizeof why, "%s %d",
                   info.si_code == CLD_EXITED ? "exited with"
                                              : "died of signal",
                   info.si_status);
    return break_off(self, which, why);
}

static bool send_op(struct checker *self, uint32_t which, const struct op *op)
{
    struct process *process = &self->processes[which];

    if (self->broken) {
        return false;
    }
    if (!wire_send(process->fd, op, sizeof *op)) {
        return tell_death(self, which);
    }
    process->pending++;
    return true;
}

/* All answers it owes; the code of the last one. */
static bool take_answers(struct checker *self, uint32_t which, int *ret_code)
{
    struct process *process = &self->processes[which];
    struct answer answer;

    while (process->pending > 0) {
        if (self->broken) {
            return false;
        }
        switch (wire_receive(process->fd, &answer, sizeof answer, ANSWER_MS)) {
        case 1:
            break;
        case 0:
            return break_off(self, which, "does not answer");
        default:
            return tell_death(self, which);
        }
        process->pending--;
        *ret_code = answer.code;
    }
    return true;
}

/* KVT_ESYSTEM when the process is gone. */
static int tell(struct checker *self, uint32_t which, const struct op *op)
{
    int code = KVT_ESYSTEM;

    if (!take_answers(self, which, &code) || !send_op(self, which, op) ||
        !take_answers(self, which, &code)) {
        return KVT_ESYSTEM;
    }
    return code;
}

/* ------------------------------------------------------------ life and death */

static bool start(struct checker *self, uint32_t which, uint32_t pool)
{
    const struct op op = {.verb = VERB_OPEN, .arg = {pool, which}};
    struct process *process = &self->processes[which];
    int code;

    *process = (struct process){.fd = -1};
    process->pid = wire_start(&self->arena,
                              which == INITIATOR ? "initiator" : "target",
                              &process->fd);
    if (process->pid < 0) {
        return break_off(self, which, "cannot be started");
    }
    code = tell(self, which, &op);
    if (code != KVT_OK) {
        arena_finding(&self->arena, "%s cannot start: %s", process_name(which),
                      kvt_errname(code));
        self->broken = true;
    }
    return code == KVT_OK;
}

/* A pool that nobody may touch any more, or 0. */
static uint32_t new_pool(struct checker *self, uint32_t target)
{
    struct head *head = self->arena.head;

    for (uint32_t i = 1; i < POOLS; i++) {
        struct pool *pool = &head->pools[i];

        if (pool->state == POOL_UNUSED ||
            (pool->state == POOL_RETIRED && !ledger_uses(&self->arena, i))) {
            pool->state = POOL_LIVE;
            pool->target = target;
            pool->revision = 0;
            arena_reset_pool(&self->arena, i);
            return i;
        }
    }
    return 0;
}

static bool start_target(struct checker *self, uint32_t which)
{
    uint32_t pool = new_pool(self, which);

    if (pool == 0) {
        return break_off(self, which, "has no pool left");
    }
    self->arena.head->current[which] = pool;
    return start(self, which, pool);
}

static bool is_dead(const struct process *process)
{
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)process->pid, &info,
                  WEXITED | WNOWAIT | WNOHANG) == 0 &&
           info.si_pid == process->pid;
}

static void mark_stopped(struct checker *self, uint32_t which, bool stopped)
{
    struct head *head = self->arena.head;

    self->processes[which].stopped = stopped;
    if (stopped) {
        head->stopped |= 1u << which;
        ledger_flag(&self->arena, which, ENTRY_STOPPED);
    } else {
        head->stopped &= ~(1u << which);
    }
}

/* When this returns no thread of it is left. */
static void kill_process(struct checker *self, uint32_t which)
{
    struct process *process = &self->processes[which];

    if (process->pid > 0) {
        (void)kill(process->pid, SIGKILL);
        while (waitpid(process->pid, NULL, 0) < 0 && errno == EINTR) {
        }
        (void)close(process->fd);
    }
    mark_stopped(self, which, false);
    *process = (struct process){.fd = -1};
}

/* A burst that nobody waits for, until some of it is in flight: that is what
 * the signal is to hit. Whoever answers it is alive. */
static void send_burst(struct checker *self, const struct op *op)
{
    const struct op burst = {
        .verb = VERB_BURST,
        .arg = {op->arg[3], op->arg[1], op->arg[2], ACT_NONE}};
    uint64_t before = self->arena.head->totals.writes +
                      self->arena.head->totals.reads +
                      self->arena.head->totals.refused;
    struct process *process = &self->processes[INITIATOR];
    volatile const struct totals *now = &self->arena.head->totals;
    uint64_t wanted = before + op->arg[2] % (op->arg[1] + 1);
    int code;

    if (process->stopped || !take_answers(self, INITIATOR, &code) ||
        !send_op(self, INITIATOR, &burst)) {
        return;
    }
    while (now->writes + now->reads + now->refused < wanted) {
        struct answer answer;
        int got = wire_receive(process->fd, &answer, sizeof answer, 0);

        if (got != 0) {
            process->pending -= got > 0;
            return;
        }
        (void)sched_yield();
    }
}

/* UCX was seen to abort a target whose initiator was stopped or killed
 * ("Endpoint timeout"). That is counted, and is as if it had been killed. */
static void revive(struct checker *self, uint32_t which)
{
    struct head *head = self->arena.head;

    if (self->broken || !is_dead(&self->processes[which])) {
        return;
    }
    if (which == INITIATOR || head->certain != 0) {
        (void)tell_death(self, which);
        return;
    }
    head->totals.died++;
    kill_process(self, which);
    ledger_flag(&self->arena, which, ENTRY_KILLED);
    head->pools[head->current[which]].state = POOL_RETIRED;
    (void)start_target(self, which);
}

static void do_kill(struct checker *self, const struct op *op)
{
    struct head *head = self->arena.head;
    uint32_t which = (uint32_t)op->arg[0];

    revive(self, which);
    send_burst(self, op);
    head->totals.kills[which]++;
    head->totals.kills_flying += ledger_flying(&self->arena, which);
    kill_process(self, which);
    if (which == INITIATOR) {
        ledger_bury(&self->arena);
        (void)start(self, which, OWN_POOL);
    } else {
        ledger_flag(&self->arena, which, ENTRY_KILLED);
        head->pools[head->current[which]].state = POOL_RETIRED;
        (void)start_target(self, which);
    }
}

static void do_stop(struct checker *self, const struct op *op)
{
    uint32_t which = (uint32_t)op->arg[0];
    struct process *process = &self->processes[which];
    siginfo_t info = {0};

    if (process->stopped) {
        self->skipped++;
        return;
    }
    send_burst(self, op);
    self->arena.head->totals.stops[which]++;
    self->arena.head->totals.stops_flying += ledger_flying(&self->arena, which);
    mark_stopped(self, which, true);
    (void)kill(process->pid, SIGSTOP);
    if (waitid(P_PID, (id_t)process->pid, &info,
               WSTOPPED | WEXITED | WNOWAIT) != 0 ||
        info.si_code != CLD_STOPPED) {
        mark_stopped(self, which, false);
        revive(self, which);
    }
}

/* After KVT_EBUSY the process has to end, for some of its memory may not be
 * used again. */
static void do_close(struct checker *self, const struct op *op)
{
    int code;

    revive(self, 0);
    revive(self, 1);
    code = tell(self, INITIATOR, op);
    if (code == KVT_EBUSY) {
        kill_process(self, INITIATOR);
        ledger_bury(&self->arena);
        (void)start(self, INITIATOR, OWN_POOL);
    } else if (code != KVT_OK) {
        arena_finding(&self->arena, "a close ends with %s", kvt_errname(code));
    }
}

/* ------------------------------------------------------------------- revoke */

static void do_revoke(struct checker *self, uint32_t target)
{
    const struct op op = {.verb = VERB_REVOKE, .arg = {target}};
    struct process *process = &self->processes[target];
    int code;

    /* A claim that the stopped initiator is in the middle of would be between
     * two checks of the same words. */
    if (self->arena.head->can_revoke == 0 || process->stopped ||
        ledger_claiming(&self->arena)) {
        self->skipped++;
        return;
    }
    code = tell(self, target, &op);
    process->half = code == KVT_EBUSY;
    if (code == KVT_OK) {
        self->arena.head->totals.revokes++;
    } else if (code == KVT_EBUSY) {
        self->arena.head->totals.revokes_busy++;
        if (!self->processes[INITIATOR].stopped) {
            arena_finding(&self->arena, "a revoke is busy, and nobody who "
                                        "writes is stopped");
        }
    } else {
        arena_finding(&self->arena, "a revoke ends with %s", kvt_errname(code));
    }
}

static void do_cont(struct checker *self, uint32_t which)
{
    struct process *process = &self->processes[which];
    int code;

    if (!process->stopped) {
        self->skipped++;
        return;
    }
    (void)kill(process->pid, SIGCONT);
    mark_stopped(self, which, false);
    (void)take_answers(self, which, &code);
    for (uint32_t i = 0; i < TARGETS; i++) {
        if (which == INITIATOR && self->processes[i].half) {
            do_revoke(self, i);
        }
    }
}

/* --------------------------------------------------------------------- run */

static void look(struct checker *self, const char *when)
{
    int code;

    /* Or what the initiator does just then would be seen half done. */
    if (!self->processes[INITIATOR].stopped) {
        (void)take_answers(self, INITIATOR, &code);
    }
    arena_look(&self->arena, when);
}

static void do_op(struct checker *self, const struct op *op)
{
    switch (op->verb) {
    case VERB_KILL:
        do_kill(self, op);
        break;
    case VERB_STOP:
        do_stop(self, op);
        break;
    case VERB_CONT:
        do_cont(self, (uint32_t)op->arg[0]);
        break;
    case VERB_REVOKE:
        do_revoke(self, (uint32_t)op->arg[0]);
        break;
    case VERB_LOOK:
        look(self, "in passing");
        break;
    default:
        if (self->processes[INITIATOR].stopped) {
            self->skipped++;
        } else if (op->verb == VERB_CLOSE) {
            do_close(self, op);
        } else if (op->verb == VERB_SETTLE) {
            struct op settle = *op;

            revive(self, 0);
            revive(self, 1);
            settle.arg[0] = self->arena.head->stopped;
            (void)tell(self, INITIATOR, &settle);
        } else {
            (void)tell(self, INITIATOR, op);
        }
        break;
    }
}

/* Everybody goes on, everything ends, and then once more everybody is killed:
 * nothing may move words any more. */
static void finish(struct checker *self)
{
    const struct op settle = {.verb = VERB_SETTLE};

    for (uint32_t i = PROCESSES; i-- > 0;) {
        if (self->processes[i].stopped) {
            do_cont(self, i);
        }
    }
    look(self, "when all go on");
    revive(self, 0);
    revive(self, 1);
    (void)tell(self, INITIATOR, &settle);
    look(self, "when all has ended");
    kill_process(self, INITIATOR);
    ledger_bury(&self->arena);
    look(self, "after the initiator's death");
}

static void set_up(struct checker *self, const struct history *history)
{
    struct head *head = self->arena.head;
    const char *engine = history->engine;

    (void)snprintf(head->engine, ENGINE_MAX, "%s", engine);
    head->by_fd = history->by_fd;
    head->has_rules = strncmp(engine, "fault:", 6) == 0;
    head->certain = strstr(engine, "nixl") == NULL;
    head->can_revoke = head->certain;
    head->grace_ns = head->certain != 0 && head->has_rules == 0
                         ? CERTAIN_GRACE_NS
                         : SHORT_GRACE_NS;
    head->pools[OWN_POOL].state = POOL_LIVE;
    arena_reset_pool(&self->arena, OWN_POOL);
}

bool checker_run(const struct history *history, struct outcome *ret)
{
    struct checker self = {0};
    bool ready = true;

    *ret = (struct outcome){0};
    if (!arena_create(&self.arena)) {
        return false;
    }
    set_up(&self, history);
    for (uint32_t i = 0; i < TARGETS && ready; i++) {
        ready = start_target(&self, i);
    }
    ready = ready && start(&self, INITIATOR, OWN_POOL);
    for (uint32_t i = 0; i < history->count; i++) {
        if (self.broken || self.arena.head->totals.findings > 0) {
            break;
        }
        do_op(&self, &history->ops[i]);
    }
    if (!self.broken && self.arena.head->totals.findings == 0) {
        finish(&self);
    }
    for (uint32_t i = 0; i < PROCESSES; i++) {
        kill_process(&self, i);
    }
    ret->failed = self.arena.head->totals.findings > 0;
    ret->skipped = self.skipped;
    ret->totals = self.arena.head->totals;
    memcpy(ret->finding, self.arena.head->finding, TEXT_MAX);
    arena_destroy(&self.arena);
    return ready || ret->failed;
}
