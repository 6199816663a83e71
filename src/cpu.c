/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which processor a thread of ours runs on.
 *
 * Two threads that wake each other in turn can stay on one processor for ever
 * while another one is idle: the kernel looks for an idle one only among those
 * that share a cache, as far as it knows, and in many virtual machines it knows
 * of none. Then each waits until the other sleeps, or for the scheduler's tick.
 */
#include "cpu.h"

#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The shortest that the kernel takes (Linux 6.12, sched_setattr(2)). */
#define SLICE_NS 100000u

/* As the kernel has it; glibc declares it from 2.41 on. */
struct attributes {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime;
    uint64_t deadline;
    uint64_t period;
};

int kvti_cpu_now(void)
{
    return sched_getcpu();
}

/* What to allow again. Where nobody has restricted us it is every processor
 * that there will ever be, or we would not follow a cpuset that grows: the
 * kernel cuts it to what the cpuset has. */
static void widen(cpu_set_t *set)
{
    if (CPU_COUNT(set) == (int)sysconf(_SC_NPROCESSORS_ONLN)) {
        memset(set, 0xff, sizeof *set);
    }
}

bool kvti_cpu_leave(const cpu_set_t *busy)
{
    cpu_set_t all;
    cpu_set_t rest;

    if (sched_getaffinity(0, sizeof all, &all) != 0) {
        return false;
    }
    CPU_AND(&rest, &all, busy);
    CPU_XOR(&rest, &all, &rest);
    if (CPU_COUNT(&rest) == 0 ||
        sched_setaffinity(0, sizeof rest, &rest) != 0) {
        return false;
    }
    widen(&all);
    (void)sched_setaffinity(0, sizeof all, &all);
    return true;
}

bool kvti_cpu_allowed(pid_t thread, cpu_set_t *ret_allowed)
{
    return sched_getaffinity(thread, sizeof *ret_allowed, ret_allowed) == 0;
}

bool kvti_cpu_keep_off(pid_t thread, int cpu, const cpu_set_t *allowed)
{
    cpu_set_t rest = *allowed;

    if (cpu < 0) {
        return false;
    }
    CPU_CLR((size_t)cpu, &rest);
    return CPU_COUNT(&rest) > 0 &&
           sched_setaffinity(thread, sizeof rest, &rest) == 0;
}

void kvti_cpu_roam(pid_t thread, int cpu, const cpu_set_t *allowed)
{
    cpu_set_t all = *allowed;
    cpu_set_t rest = *allowed;
    cpu_set_t now;

    CPU_CLR((size_t)cpu, &rest);
    if (kvti_cpu_allowed(thread, &now) && CPU_EQUAL(&now, &rest)) {
        widen(&all);
        (void)sched_setaffinity(thread, sizeof all, &all);
    }
}

void kvti_cpu_prompt(void)
{
    struct attributes now = {.size = sizeof now};

    if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) == 0) {
        now.runtime = SLICE_NS;
        (void)syscall(SYS_sched_setattr, 0, &now, 0);
    }
}
