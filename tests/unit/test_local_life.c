/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sign of life of an agent of the engine `local` (local_life.c), with real
 * children that are killed, exec'd and closed.
 *
 * Proved: an agent that has given its metadata away shows that it lives, and a
 * copy need not ask the kernel for it afterwards; the end of its process, an exec and a
 * close take the sign back before anybody could take it for true; a word that
 * says nothing, or that somebody scribbled on, makes each copy ask again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <linux/futex.h>
#include <signal.h>
#include <unistd.h>

#include "engines/local.h"
#include "kvt_assert.h"
#include "local_agent.h"
#include "vm_calls.h"

/* ------------------------------------------------- the kernel, written down */

static bool has_written;
static unsigned reads_after_a_write;

ssize_t __wrap_process_vm_readv(VM_ARGUMENTS)
{
    reads_after_a_write += has_written;
    return __real_process_vm_readv(VM_SAME);
}

ssize_t __wrap_process_vm_writev(VM_ARGUMENTS)
{
    has_written = true;
    return __real_process_vm_writev(VM_SAME);
}

/* ------------------------------------------------------------------- scenes */

struct scene {
    struct child child;
    struct agent agent;
    void *conn;
};

static struct kvti_gate_page *gate_of(const struct scene *scene)
{
    const struct kvti_local_conn *conn = scene->conn;

    return conn->target->gate;
}

static void open_scene(struct scene *scene)
{
    local_child_start(&scene->child, &(struct child_plan){.seed = 22});
    agent_open(&scene->agent, "parent", AGENT_ANON, 11);
    scene->conn = agent_must_load(&scene->agent, &scene->child.md,
                                  &scene->agent);
    /* The thread that shows it starts with the metadata. */
    assert_soon(kvti_life_shown(gate_of(scene)));
}

static void close_scene(struct scene *scene)
{
    agent_unload(&scene->agent, scene->conn);
    assert_int_equal(agent_close(&scene->agent), KVT_OK);
}

static struct kvti_outcome write_page(struct scene *scene)
{
    has_written = false;
    reads_after_a_write = 0;
    return agent_move(&scene->agent, scene->conn, KVT_OP_WRITE,
                      scene->agent.data, scene->child.data, AGENT_PAGE);
}

static void assert_disconnected(struct scene *scene)
{
    struct kvti_outcome outcome = write_page(scene);

    assert_int_equal(outcome.state, KVT_DISCONNECTED);
    assert_int_equal(outcome.code, KVT_EDISCONNECTED);
}

static void a_living_target_is_not_asked_after_a_copy(void **state)
{
    struct scene scene;

    (void)state;
    open_scene(&scene);
    /* Once a millisecond it is, and a slow machine may need that for a copy. */
    reads_after_a_write = 1;
    for (int i = 0; i < 10000 && reads_after_a_write > 0; i++) {
        assert_int_equal(write_page(&scene).state, KVT_DONE);
        assert_true(has_written);
    }
    assert_int_equal(reads_after_a_write, 0);
    close_scene(&scene);
    local_child_quit(&scene.child);
}

static void without_the_sign_each_copy_asks(void **state)
{
    const uint32_t words[] = {0, FUTEX_OWNER_DIED, FUTEX_WAITERS,
                              FUTEX_OWNER_DIED | 77};
    struct scene scene;

    (void)state;
    open_scene(&scene);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        atomic_store(&gate_of(&scene)->life, words[i]);
        assert_false(kvti_life_shown(gate_of(&scene)));
        assert_int_equal(write_page(&scene).state, KVT_DONE);
        assert_int_equal(reads_after_a_write, 1);
    }
    close_scene(&scene);
    local_child_quit(&scene.child);
}

static void a_kill_takes_the_sign_back(void **state)
{
    struct scene scene;

    (void)state;
    open_scene(&scene);
    local_child_kill(&scene.child); /* and buries it */
    assert_false(kvti_life_shown(gate_of(&scene)));
    assert_disconnected(&scene);
    close_scene(&scene);
}

static void an_exec_takes_the_sign_back(void **state)
{
    struct scene scene;

    (void)state;
    open_scene(&scene);
    assert_int_equal(write_page(&scene).state, KVT_DONE);
    local_child_ask(&scene.child, CHILD_EXEC, 0);
    assert_false(kvti_life_shown(gate_of(&scene)));
    assert_disconnected(&scene);
    close_scene(&scene);
    local_child_kill(&scene.child);
}

static void a_close_takes_the_sign_back(void **state)
{
    struct scene scene;

    (void)state;
    open_scene(&scene);
    assert_int_equal(local_child_ask(&scene.child, CHILD_CLOSE, 0), KVT_OK);
    assert_int_equal(atomic_load(&gate_of(&scene)->life), 0);
    assert_disconnected(&scene);
    close_scene(&scene);
    local_child_kill(&scene.child);
}

/* The child's fork holds the gate's page as well, and shows nothing. */
static void a_forked_child_shows_no_life(void **state)
{
    struct scene scene;
    int64_t pid;

    (void)state;
    open_scene(&scene);
    pid = local_child_ask(&scene.child, CHILD_FORK, 0);
    assert_true(pid > 0);
    assert_true(kvti_life_shown(gate_of(&scene)));
    local_child_kill(&scene.child);
    assert_false(kvti_life_shown(gate_of(&scene)));
    assert_int_equal(kill((pid_t)pid, SIGKILL), 0);
    close_scene(&scene);
}

static const struct CMUnitTest cases[] = {
    cmocka_unit_test(a_living_target_is_not_asked_after_a_copy),
    cmocka_unit_test(without_the_sign_each_copy_asks),
    cmocka_unit_test(a_kill_takes_the_sign_back),
    cmocka_unit_test(an_exec_takes_the_sign_back),
    cmocka_unit_test(a_close_takes_the_sign_back),
    cmocka_unit_test(a_forked_child_shows_no_life),
};

int main(int argc, char **argv)
{
    const struct test_group groups[] = {TEST_GROUP("local_life", cases)};

    local_child_main(argc, argv);
    return kvt_test_main(groups, 1, argc > 1 ? argv[1] : NULL);
}
