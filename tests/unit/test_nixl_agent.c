/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the engine `nixl` begins and ends, against a core that only records
 * (fake_env) and a stand-in for NIXL (fake_nixl_capi.c) that writes down what
 * it is asked and hangs on order.
 *
 * Proved: what the agent and its backends are told, as options and settings
 * say; that a thread that hangs in NIXL delays neither open nor close past its
 * deadline, and does no harm when it comes back; that unfinished requests are
 * never released.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nixl_pair.h"

/* ------------------------------------------------------------------- options */

/* B51 */
static void the_agent_is_made_as_the_options_say(void **state)
{
    static const char *const backends[] = {"UCX", "POSIX"};
    static const struct kvt_param params[] = {
        {"UCX", "ucx_error_handling_mode", "peer"}, {"POSIX", "use_aio", "1"}};
    struct kvt_options options = options_of();
    struct side side;

    (void)state;
    fake.reset();
    open_side(&side, "alpha");
    /* The stand-in has no version: it may be an old one. */
    assert_line("agent", 0,
                "agent alpha prog=1 listen=0 sync=1 delay=1000 telemetry=1");
    assert_int_equal(fake.count_lines("backend UCX"), 1);
    assert_int_equal(fake.count_lines("backend UCX "), 0);
    assert_int_equal(side.env.traits.window, 4);
    assert_int_equal(close_side(&side), KVT_OK);
    assert_int_equal(fake.count_lines("destroy_agent alpha"), 1);

    fake.reset();
    options.engine = "nixl:pthr_delay_us=70";
    options.backends = backends;
    options.backend_count = 2;
    options.params = params;
    options.param_count = 2;
    options.flags = KVT_OPEN_NO_TELEMETRY;
    open_with(&side, "alpha", &options);
    assert_line("agent", 0, "prog=1 listen=0 sync=1 delay=70 telemetry=0");
    assert_line("backend", 0, "backend UCX ucx_error_handling_mode=peer");
    assert_line("backend", 1, "backend POSIX use_aio=1");
    assert_int_equal(fake.count_lines("backend"), 2);
    assert_int_equal(close_side(&side), KVT_OK);
}

static void an_old_nixl_gets_a_progress_thread(void **state)
{
    static const char *const old[] = {"0.9.2",  "1.0",     "1.3.0",
                                      "1.4.12", "unknown", ""};
    static const char *const fit[] = {"1.5.0", "1.5.1", "1.10.0", "2.0.0"};

    (void)state;
    for (size_t i = 0; i < sizeof old / sizeof old[0]; i++) {
        assert_true(kvti_nixl_needs_thread(old[i]));
    }
    for (size_t i = 0; i < sizeof fit / sizeof fit[0]; i++) {
        assert_false(kvti_nixl_needs_thread(fit[i]));
    }
}

static void each_backend_has_its_own_word_for_threads(void **state)
{
    static const struct {
        const char *backend;
        const char *key;
    } rows[] = {{"OBJ", "num_threads"},        {"LIBFABRIC", "num_threads"},
                {"AZURE_BLOB", "num_threads"}, {"GDS_MT", "thread_count"},
                {"UCCL", "num_cpus"},          {"POSIX", NULL}};

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct kvt_options options = options_of();
        const struct kvt_param own = {rows[i].backend, rows[i].key, "7"};
        char line[64];
        char text[256];
        struct side side;

        fake.reset();
        options.backends = &rows[i].backend;
        options.backend_count = 1;
        open_with(&side, "alpha", &options);
        assert_true(fake.get_line("backend", 0, text, sizeof text));
        kvti_format(line, sizeof line, "backend %s%s%s%s", rows[i].backend,
                    rows[i].key != NULL ? " " : "",
                    rows[i].key != NULL ? rows[i].key : "",
                    rows[i].key != NULL ? "=3" : "");
        assert_string_equal(text, line);
        assert_int_equal(close_side(&side), KVT_OK);
        if (rows[i].key == NULL) {
            continue;
        }
        options.params = &own;
        options.param_count = 1;
        open_with(&side, "alpha", &options);
        assert_true(fake.get_line("backend", 1, text, sizeof text));
        kvti_format(line, sizeof line, "backend %s %s=7", rows[i].backend,
                    rows[i].key);
        assert_string_equal(text, line);
        assert_int_equal(close_side(&side), KVT_OK);
    }
}

/* What becomes of a device_list: the value, or the words of the error. */
static void assert_nics(const char *given, const char *value, const char *words)
{
    const struct kvt_param param = {"UCX", "device_list", given};
    struct kvt_options options = options_of();
    struct kvti_nixl_config config;
    struct kvt_error err = {.code = KVT_OK};
    int code;

    options.params = &param;
    options.param_count = 1;
    code = kvti_nixl_config_init(&config, &options, "", &err);
    if (code != (value != NULL ? KVT_OK : KVT_EINVAL) ||
        (words != NULL && strstr(err.text, words) == NULL)) {
        fail_msg("\"%s\": %s: %s", given, kvt_errname(code), err.text);
    }
    if (code == KVT_OK) {
        assert_int_equal(config.param_count, 1);
        assert_string_equal(config.params[0].value, value);
        kvti_nixl_config_fini(&config);
    }
}

static void nics_are_named_as_nixl_wants_them(void **state)
{
    (void)state;
    unsetenv("UCX_NET_DEVICES");
    assert_nics("mlx5_0", "mlx5_0", NULL);
    assert_nics("mlx5_0,mlx5_1", "mlx5_0, mlx5_1", NULL);
    assert_nics(" mlx5_0:1, , mlx5_10 ", "mlx5_0, mlx5_10", NULL);
    assert_nics("mlx5_0:2", NULL, "without a port");
    assert_nics("../x", NULL, "RDMA devices");
    assert_nics(" , ", NULL, "no device");
    assert_nics("", NULL, "no device");
    /* NIXL would look for a device "lo:1". */
    assert_nics("mlx5_0, lo", NULL, "set UCX_NET_DEVICES=lo instead");
}

static void the_environment_s_nics_win(void **state)
{
    static const char *const backends[] = {"GUSLI", "UCX"};
    static const struct kvt_param params[] = {
        {"UCX", "device_list", "mlx5_0,"},
        {"UCX", "num_threads", "1"},
        {"GUSLI", "device_list", "11:F:./store0.bin"}};
    struct kvt_options options = options_of();
    struct lines lines = {.text = ""};
    struct side side;

    (void)state;
    fake.reset();
    setenv("UCX_NET_DEVICES", "eth7", 1);
    options.backends = backends;
    options.backend_count = 2;
    options.params = params;
    options.param_count = 3;
    options.log = keep_line;
    options.log_ctx = &lines;
    open_with(&side, "alpha", &options);
    assert_line("backend", 0, "backend GUSLI device_list=11:F:./store0.bin");
    assert_line("backend", 1, "backend UCX num_threads=1");
    assert_int_equal(fake.count_lines("backend UCX device_list"), 0);
    assert_non_null(strstr(lines.text, "UCX_NET_DEVICES is set in the "
                                       "environment and wins"));
    assert_int_equal(close_side(&side), KVT_OK);

    setenv("UCX_NET_DEVICES", "", 1); /* says nothing */
    lines.text[0] = '\0';
    open_with(&side, "alpha", &options);
    assert_line("backend UCX", 1, "backend UCX device_list=mlx5_0");
    assert_null(strstr(lines.text, "UCX_NET_DEVICES"));
    assert_int_equal(close_side(&side), KVT_OK);
    unsetenv("UCX_NET_DEVICES");
}

static void the_engine_s_own_settings_are_read(void **state)
{
    static const char *const bad[] = {"pthr_delay_us",
                                      "pthr_delay_us=",
                                      "pthr_delay_us=0",
                                      "confirm=2",
                                      "pthr_delay_us=-1",
                                      "pthr_delay_us=1000001",
                                      "something=1",
                                      "confirm=1,confirm=",
                                      "=",
                                      "pthr_delay_us=9x",
                                      "gpu=",
                                      "gpu=-1",
                                      "gpu=1024",
                                      "gp=1",
                                      "gpus=1"};
    struct kvt_options options = options_of();
    struct kvti_nixl_config config;
    struct kvt_error err;

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(kvti_nixl_config_init(&config, &options, bad[i], &err),
                         KVT_EINVAL);
    }
    assert_int_equal(kvti_nixl_config_init(&config, &options,
                                           "confirm=0,pthr_delay_us=50,gpu=3",
                                           &err),
                     KVT_OK);
    assert_false(config.confirm);
    assert_int_equal(config.pthr_delay_us, 50);
    assert_int_equal(config.gpu, 3);
    kvti_nixl_config_fini(&config);
}

/* ---------------------------------------------------- what fails, what hangs */

static void an_agent_that_fails_says_what_can_be_known(void **state)
{
    struct kvt_options options = options_of();

    (void)state;
    fake.reset();
    unsetenv("NIXL_CONFIG_FILE");
    setenv("HOME", "/nowhere", 1);
    fake.script("agent", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EENGINE,
                   "NIXL cannot create the agent \"alpha\" (status -2); ");
    setenv("NIXL_CONFIG_FILE", "/nowhere/nixl.cfg", 1);
    fake.script("agent", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EENGINE,
                   "it cannot read its configuration /nowhere/nixl.cfg: set "
                   "NIXL_CONFIG_FILE or HOME: No such file");
    unsetenv("NIXL_CONFIG_FILE");
    assert_int_equal(fake.count_lines("backend"), 0);
}

/* B41 */
static void a_backend_that_fails_is_named(void **state)
{
    static const char *const backends[] = {"UCX", "GDS"};
    struct kvt_options options = options_of();

    (void)state;
    fake.reset();
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "NIXL cannot create its backend UCX (status -2)");
    assert_int_equal(fake.count_lines("destroy_agent alpha"), 1);
    /* One that NIXL does not have. */
    options.backends = backends;
    options.backend_count = 2;
    fake.script("backend", NIXL_OK, 1);
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "this NIXL has no backend \"GDS\"; it has: GDS_MT, OBJ, "
                   "POSIX, UCX");
    assert_int_equal(fake.count_lines("destroy_agent alpha"), 2);
}

/* NIXL lists such a plugin and then calls its backend not supported. The words
 * are the loader's: of the file itself, and of a library that it needs. (B41) */
static void a_plugin_that_does_not_load_says_why(void **state)
{
    const char *orphan = getenv("KVT_TEST_FAKE_NIXL_ORPHAN");
    struct kvt_options options = options_of();
    char folder[] = "/tmp/kvt-plugins-XXXXXX";
    char file[64];
    int fd;

    (void)state;
    assert_non_null(orphan);
    assert_non_null(mkdtemp(folder));
    (void)snprintf(file, sizeof file, "%s/libplugin_UCX.so", folder);
    assert_int_equal(setenv("NIXL_PLUGIN_DIR", folder, 1), 0);
    fake.reset();
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED, "there is no /tmp/kvt-plugins-");
    fd = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && close(fd) == 0);
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "cannot load its backend UCX: file too short (its file: "
                   "/tmp/kvt-plugins-");
    assert_int_equal(unlink(file), 0);
    assert_int_equal(symlink(orphan, file), 0);
    fake.script("backend", NIXL_BACKEND, 1);
    assert_refused(&options, KVT_EUNSUPPORTED,
                   "cannot load its backend UCX: libfake_gone.so: cannot open "
                   "shared object file");
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(unsetenv("NIXL_PLUGIN_DIR"), 0);
}

static int count_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

/* With ever more time until the thread has come to what hangs: how long that
 * takes is not ours to know. Open gives up each time. */
static void assert_hang_is_named(const char *what, const char *words)
{
    static const char *const backends[] = {"UCX", "POSIX"};
    struct kvt_options options = options_of();
    struct fake_env env;
    struct kvt_error err = {.text = ""};
    int files = count_files();
    int agents = 0;

    fake.reset();
    options.backends = backends;
    options.backend_count = 2;
    options.call_timeout_ns = 1;
    while (strstr(err.text, words) == NULL) {
        fake.block(what, true);
        if (options.call_timeout_ns > 20 * SECOND_NS) {
            fail_msg("\"%s\" does not say \"%s\"", err.text, words);
        }
        assert_int_equal(
            fake_env_try(&env, &kvti_engine_nixl, "alpha", &options, &err),
            KVT_ETIMEDOUT);
        options.call_timeout_ns *= 4;
        /* Whoever opened is gone when the thread comes back, and still it
         * knows the agent's name, and takes everything down. */
        memset(&env, 0x5a, sizeof env);
        fake.block(what, false);
        agents++;
        wait_for_lines("destroy_agent alpha", agents);
        assert_int_equal(fake.count_lines("agent alpha"), agents);
        while (count_files() != files) { /* it frees all it had */
            sched_yield();
        }
    }
    assert_non_null(strstr(err.text, "its thread is left behind"));
}

static void a_hang_is_named_and_comes_to_an_end(void **state)
{
    struct side side;

    (void)state;
    assert_hang_is_named("agent", "from creating the agent after");
    assert_hang_is_named("UCX", "from creating backend UCX after");
    assert_hang_is_named("POSIX", "from creating backend POSIX after");
    assert_hang_is_named("register", "from registering memory after");
    /* The process is none the worse for it. */
    open_side(&side, "alpha");
    assert_int_equal(close_side(&side), KVT_OK);
}

/* B06 */
static void close_destroys_the_agent_and_releases_nothing(void **state)
{
    struct pair pair;
    struct kvti_chunk *chunk;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.script("status", NIXL_IN_PROG, 1000000000);
    fake_env_post(&pair.a.env, chunk);
    wait_for_lines("post", 1);
    close_pair(&pair, KVT_EBUSY);
    assert_int_equal(fake.count_lines("release"), 0);
    assert_int_equal(fake.count_lines("destroy_agent alpha"), 1);
    free(chunk);
}

static void close_returns_while_a_call_hangs(void **state)
{
    static struct kvti_chunk *chunk; /* the hung thread may keep it */
    struct pair pair;

    (void)state;
    open_pair(&pair);
    chunk = pieces(&pair, KVT_OP_WRITE, 3);
    fake.script("post", NIXL_IN_PROG, 1);
    fake.block("status", true);
    fake_env_post(&pair.a.env, chunk);
    while (fake.waiting("status") == 0) {
        sched_yield();
    }
    assert_int_equal(fake_env_close(&pair.a.env, 1), KVT_EBUSY);
    fake.block("status", false);
    /* It comes back, reports nothing, and takes the agent down. */
    wait_for_lines("destroy_agent alpha", 1);
    free(pair.a.base);
    assert_int_equal(close_side(&pair.b), KVT_OK);
    free_peer(&pair.peer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(the_agent_is_made_as_the_options_say),
        cmocka_unit_test(an_old_nixl_gets_a_progress_thread),
        cmocka_unit_test(each_backend_has_its_own_word_for_threads),
        cmocka_unit_test(nics_are_named_as_nixl_wants_them),
        cmocka_unit_test(the_environment_s_nics_win),
        cmocka_unit_test(the_engine_s_own_settings_are_read),
        cmocka_unit_test(an_agent_that_fails_says_what_can_be_known),
        cmocka_unit_test(a_backend_that_fails_is_named),
        cmocka_unit_test(a_plugin_that_does_not_load_says_why),
        cmocka_unit_test(a_hang_is_named_and_comes_to_an_end),
        cmocka_unit_test(close_destroys_the_agent_and_releases_nothing),
        cmocka_unit_test(close_returns_while_a_call_hangs),
    };

    if (find_stand_in() != 0) {
        return 1;
    }
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
