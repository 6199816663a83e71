/* SPDX-License-Identifier: Apache-2.0 */
/* Keeping threads that work at the same time on different processors. */
#ifndef KVTI_CPU_H
#define KVTI_CPU_H

#include <sched.h>
#include <stdbool.h>
#include <sys/types.h>

/* Between two looks at what another processor will change. */
static inline void kvti_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The processor of the calling thread; -1: unknown. Some nanoseconds. */
int kvti_cpu_now(void);

/*
 * Moves the calling thread to a processor that it may use and that is not in
 * `busy`; false if there is none. It costs some ten microseconds. The thread is
 * as free to be moved as before, but that in a container with a cpuset smaller
 * than the host it will not follow a growing one.
 */
bool kvti_cpu_leave(const cpu_set_t *busy);

/*
 * Has a thread that sleeps wake up on another processor than `cpu`; false if it
 * may use no other. `allowed` is what it may use; kvti_cpu_roam() gives that
 * back to it, with the same exception as above, unless somebody else has changed
 * it since.
 */
bool kvti_cpu_allowed(pid_t thread, cpu_set_t *ret_allowed);
bool kvti_cpu_keep_off(pid_t thread, int cpu, const cpu_set_t *allowed);
void kvti_cpu_roam(pid_t thread, int cpu, const cpu_set_t *allowed);

/*
 * Asks the scheduler to run the calling thread soon after it is woken, for a
 * short time: also before a thread on the same processor that goes on and on.
 * Older kernels do about that for whoever has slept.
 */
void kvti_cpu_prompt(void);

#endif /* KVTI_CPU_H */
