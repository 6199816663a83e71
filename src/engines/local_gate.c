/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: how a target takes memory back from writers in other processes.
 *
 * It is sleepable RCU across processes. A writer counts itself into its slot
 * under the parity of the epoch it saw, looks at the epoch again, and only
 * then reads the generations of the regions it writes. The target shuts the
 * entries, moves the epoch on, and waits until the old parity's counts are 0.
 * All of it is sequentially consistent: either the writer sees the new epoch
 * (and the entry shut), or the target sees the count.
 *
 * Parities are reused, so a drain must have ended before the next flip; a
 * drain that ran out of time stays pending.
 *
 * A slot's owner is one word, claimed and taken from the dead by compare and
 * swap. Whoever takes a dead owner's slot clears its counts before using it;
 * until then the target just sees a busy writer.
 *
 * A writer that execs in the middle of a chunk leaves its count behind while
 * its pid lives on: the target then reports that pid until it ends.
 */
#include "local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GATE_MAGIC 0x6b767467u /* "kvtg" */
#define GATE_VERSION 1u
#define GATE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2,
               "a lock inside an atomic would not be shared");
_Static_assert(offsetof(struct kvti_gate_page, life) == 128,
               "and so is the place of this word");
_Static_assert(sizeof(struct kvti_gate_page) ==
                   4096 + KVTI_GATE_SLOTS * 64 + KVTI_GATE_ENTRIES * 4,
               "the gate's size is part of the protocol");

uint64_t kvti_gate_owner(int32_t pid, uint64_t start_time)
{
    uint64_t mask = (UINT64_C(1) << KVTI_OWNER_START_BITS) - 1;

    return (uint64_t)(uint32_t)pid << KVTI_OWNER_START_BITS |
           (start_time & mask);
}

static int32_t owner_pid(uint64_t owner)
{
    return (int32_t)(owner >> KVTI_OWNER_START_BITS);
}

int kvti_gate_init(struct kvti_gate *gate, uint64_t owner,
                   struct kvt_error *err)
{
    void *mapped;

    gate->page = NULL;
    gate->fd = memfd_create("kvt-gate", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (gate->fd < 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot create the gate's memfd");
    }
    if (ftruncate(gate->fd, (off_t)sizeof(*gate->page)) != 0 ||
        fcntl(gate->fd, F_ADD_SEALS, GATE_SEALS) != 0) {
        kvti_fail_errno(err, KVT_ESYSTEM, errno, "cannot size the gate");
        goto fail;
    }
    mapped = mmap(NULL, sizeof(*gate->page), PROT_READ | PROT_WRITE, MAP_SHARED,
                  gate->fd, 0);
    if (mapped == MAP_FAILED) {
        kvti_fail_errno(err, KVT_ESYSTEM, errno, "cannot map the gate");
        goto fail;
    }
    gate->page = mapped;
    gate->page->magic = GATE_MAGIC;
    gate->page->version = GATE_VERSION;
    gate->owner = owner;
    /* 0 is what a connection starts with: its first chunk looks. */
    gate->epoch = 1;
    atomic_store(&gate->page->epoch, gate->epoch);
    gate->next_generation = 1;
    gate->hint = 0;
    gate->draining = false;
    memset(gate->taken, 0, sizeof(gate->taken));
    return KVT_OK;

fail:
    close(gate->fd);
    gate->fd = -1;
    return KVT_ESYSTEM;
}

void kvti_gate_unmap(struct kvti_gate_page *page)
{
    if (page != NULL) {
        munmap(page, sizeof(*page));
    }
}

void kvti_gate_fini(struct kvti_gate *gate)
{
    if (gate->page != NULL) {
        close(gate->fd);
        gate->fd = -1;
    }
    kvti_gate_unmap(gate->page);
    gate->page = NULL;
}

int kvti_gate_entry_open(struct kvti_gate *gate, uint32_t *ret_slot,
                         uint32_t *ret_generation)
{
    const uint32_t words = KVTI_GATE_ENTRIES / 64;

    for (uint32_t i = 0; i < words; i++) {
        uint32_t word = (gate->hint + i) % words;
        uint64_t free_bits = ~gate->taken[word];

        if (free_bits != 0) {
            uint32_t bit = (uint32_t)__builtin_ctzll(free_bits);
            uint32_t slot = word * 64 + bit;

            gate->taken[word] |= UINT64_C(1) << bit;
            gate->hint = word;
            *ret_generation = gate->next_generation;
            gate->next_generation++;
            if (gate->next_generation == 0) {
                gate->next_generation = 1;
            }
            atomic_store(&gate->page->entries[slot], *ret_generation);
            *ret_slot = slot;
            return KVT_OK;
        }
    }
    return KVT_EAGAIN;
}

void kvti_gate_entry_shut(struct kvti_gate *gate, uint32_t slot)
{
    kvti_assert(slot < KVTI_GATE_ENTRIES);
    atomic_store(&gate->page->entries[slot], 0);
}

void kvti_gate_entry_free(struct kvti_gate *gate, uint32_t slot)
{
    kvti_gate_entry_shut(gate, slot);
    gate->taken[slot / 64] &= ~(UINT64_C(1) << slot % 64);
}

void kvti_gate_flip(struct kvti_gate *gate)
{
    kvti_assert(!gate->draining);
    gate->draining = true;
    gate->epoch++;
    atomic_store(&gate->page->epoch, gate->epoch);
}

/* Takes the slot from a dead owner. False: somebody else was faster. */
static bool take_slot(struct kvti_gate_slot *slot, uint64_t dead,
                      uint64_t owner)
{
    if (!atomic_compare_exchange_strong(&slot->owner, &dead, owner)) {
        return false;
    }
    atomic_store(&slot->busy[0], 0);
    atomic_store(&slot->busy[1], 0);
    return true;
}

/* Whether nobody is counted under the parities of `mask`. */
static bool is_empty(struct kvti_gate *gate, uint32_t mask, int32_t *ret_pid)
{
    for (uint32_t i = 0; i < KVTI_GATE_SLOTS; i++) {
        struct kvti_gate_slot *slot = &gate->page->slots[i];
        uint64_t owner;

        if (((mask & 1) == 0 || atomic_load(&slot->busy[0]) == 0) &&
            ((mask & 2) == 0 || atomic_load(&slot->busy[1]) == 0)) {
            continue;
        }
        owner = atomic_load(&slot->owner);
        if (kvti_ident_owner_dead(owner)) {
            if (take_slot(slot, owner, gate->owner)) {
                atomic_store(&slot->owner, 0);
            }
            continue;
        }
        *ret_pid = owner_pid(owner);
        return false;
    }
    return true;
}

bool kvti_gate_drained(struct kvti_gate *gate, int32_t *ret_pid)
{
    uint32_t old = (uint32_t)(gate->epoch - 1) & 1;

    if (gate->draining && !is_empty(gate, 1u << old, ret_pid)) {
        return false;
    }
    gate->draining = false;
    return true;
}

void kvti_gate_close(struct kvti_gate *gate)
{
    atomic_store(&gate->page->closed, 1);
    gate->epoch++;
    atomic_store(&gate->page->epoch, gate->epoch);
}

bool kvti_gate_empty(struct kvti_gate *gate, int32_t *ret_pid)
{
    return is_empty(gate, 3, ret_pid);
}

/* ------------------------------------------------------------ the writer's */

static int claim_slot(struct kvti_gate_page *page, uint64_t owner,
                      uint32_t *ret_slot)
{
    for (uint32_t i = 0; i < KVTI_GATE_SLOTS; i++) {
        uint64_t none = 0;

        if (atomic_load(&page->slots[i].owner) == 0 &&
            atomic_compare_exchange_strong(&page->slots[i].owner, &none,
                                           owner)) {
            *ret_slot = i;
            return KVT_OK;
        }
    }
    for (uint32_t i = 0; i < KVTI_GATE_SLOTS; i++) {
        uint64_t other = atomic_load(&page->slots[i].owner);

        if (kvti_ident_owner_dead(other) &&
            take_slot(&page->slots[i], other, owner)) {
            *ret_slot = i;
            return KVT_OK;
        }
    }
    return KVT_EAGAIN;
}

static int not_a_gate(int32_t pid, int32_t fd, struct kvt_error *err)
{
    return kvti_fail(err, KVT_EDISCONNECTED,
                     "descriptor %d of process %d is not its gate: import its "
                     "current metadata",
                     (int)fd, (int)pid);
}

/* Opens the target's memfd. Shrinking it under our mapping would be a SIGBUS,
 * so size and seals come first. */
static int open_gate(int32_t pid, int32_t fd, uint32_t uid,
                     struct kvt_error *err)
{
    char path[64];
    struct stat st;
    int gate;
    int seals;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, (int)fd);
    /* stat first: opening something else could have side effects. */
    gate = -1;
    if (stat(path, &st) == 0) {
        if (!S_ISREG(st.st_mode)) {
            return not_a_gate(pid, fd, err);
        }
        gate = open(path, O_RDWR | O_CLOEXEC);
    }
    if (gate < 0) {
        if (errno == EACCES || errno == EPERM) {
            return kvti_ident_denied(pid, uid, err);
        }
        if (errno == ENOENT) {
            return kvti_fail(err, KVT_EDISCONNECTED,
                             "process %d has no gate any more: its transport "
                             "is closed",
                             (int)pid);
        }
        return kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "cannot open the gate of process %d", (int)pid);
    }
    seals = fcntl(gate, F_GET_SEALS);
    if (fstat(gate, &st) != 0 || seals < 0 ||
        (seals & GATE_SEALS) != GATE_SEALS ||
        st.st_size != (off_t)sizeof(struct kvti_gate_page)) {
        close(gate);
        return not_a_gate(pid, fd, err);
    }
    return gate;
}

int kvti_gate_join(int32_t pid, int32_t fd, uint32_t uid, uint64_t owner,
                   struct kvti_gate_page **ret_page, uint32_t *ret_slot,
                   struct kvt_error *err)
{
    struct kvti_gate_page *page;
    void *mapped;
    int gate = open_gate(pid, fd, uid, err);
    int code;

    if (gate < 0) {
        return gate;
    }
    mapped = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, gate,
                  0);
    code = mapped == MAP_FAILED ? errno : 0;
    close(gate);
    if (code != 0) {
        return kvti_fail_errno(err, KVT_ESYSTEM, code,
                               "cannot map the gate of process %d", (int)pid);
    }
    page = mapped;
    if (page->magic != GATE_MAGIC || page->version != GATE_VERSION) {
        code = not_a_gate(pid, fd, err);
    } else if (atomic_load(&page->closed) != 0) {
        code = kvti_fail(err, KVT_EDISCONNECTED,
                         "the transport in process %d is closed", (int)pid);
    } else if (claim_slot(page, owner, ret_slot) != KVT_OK) {
        code = kvti_fail(err, KVT_EAGAIN,
                         "%u transports write to the one in process %d "
                         "already: close one of them",
                         KVTI_GATE_SLOTS, (int)pid);
    } else {
        *ret_page = page;
        return KVT_OK;
    }
    kvti_gate_unmap(page);
    return code;
}

void kvti_gate_part(struct kvti_gate_page *page, uint32_t slot)
{
    atomic_store(&page->slots[slot].owner, 0);
    kvti_gate_unmap(page);
}

bool kvti_gate_enter(struct kvti_gate_page *page, uint32_t slot,
                     uint64_t *ret_epoch)
{
    struct kvti_gate_slot *mine = &page->slots[slot];

    for (;;) {
        uint64_t epoch = atomic_load(&page->epoch);

        atomic_fetch_add(&mine->busy[epoch & 1], 1);
        if (atomic_load(&page->epoch) == epoch) {
            if (atomic_load(&page->closed) != 0) {
                kvti_gate_leave(page, slot, epoch);
                return false;
            }
            *ret_epoch = epoch;
            return true;
        }
        /* The target may have looked already: what we would write under
         * this count it would not wait for. */
        atomic_fetch_sub(&mine->busy[epoch & 1], 1);
    }
}

void kvti_gate_leave(struct kvti_gate_page *page, uint32_t slot, uint64_t epoch)
{
    atomic_fetch_sub(&page->slots[slot].busy[epoch & 1], 1);
}
