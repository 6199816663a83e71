/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading the real NIXL and making its agent, through the public header only.
 * Each case is a process of its own, this program started again, since what is
 * looked at is what NIXL does to a process that is new to it.
 *
 * Proved: the process keeps its signal handlers; it exits with its own status
 * by exit(), closed or not, and in a forked child too (where Debian's
 * ibverbs-providers is installed it would crash, were UCX's EFA module loaded);
 * kvt info's facts; the choice of NICs and of a GPU as NIXL sees them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <kvt/kvt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* A child says what went wrong on the standard error and exits with this. */
#define WRONG 1

static _Noreturn void give_up(const char *what)
{
    (void)fprintf(stderr, "%s\n", what);
    _exit(WRONG);
}

static struct kvt_options options_of(void)
{
    return (struct kvt_options){.size = sizeof(struct kvt_options),
                                .flags = KVT_OPEN_NO_SAME_HOST,
                                .engine = "nixl"};
}

static kvt_transport *open_with(const struct kvt_options *options)
{
    struct kvt_error err;
    kvt_transport *t;

    if (kvt_open(options, &t, &err) != KVT_OK) {
        give_up(err.text);
    }
    return t;
}

static void must_refuse(const struct kvt_options *options, const char *words)
{
    struct kvt_error err;
    kvt_transport *t;

    if (kvt_open(options, &t, &err) != KVT_EUNSUPPORTED) {
        give_up("it was opened");
    }
    if (strstr(err.text, words) == NULL) {
        give_up(err.text);
    }
}

static void close_it(kvt_transport *t)
{
    if (kvt_close(t, 0, NULL) != KVT_OK) {
        give_up("not closed");
    }
    kvt_free(t);
}

static void use(kvt_transport *t)
{
    static unsigned char memory[65536];
    const struct kvt_region region = {.addr = (uint64_t)(uintptr_t)memory,
                                      .length = sizeof memory};
    struct kvt_error err;

    if (kvt_register(t, &region, 1, 0, &err) != KVT_OK) {
        give_up(err.text);
    }
}

static bool is_mapped(const char *name)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    bool found = false;

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        found = found || strstr(line, name) != NULL;
    }
    if (maps != NULL) {
        (void)fclose(maps);
    }
    return found;
}

/* ----------------------------------------------------------------- children */

static int keep_signals(void)
{
    struct sigaction before[NSIG];
    struct sigaction now;
    const struct kvt_options options = options_of();
    kvt_transport *t;

    for (int i = 1; i < NSIG; i++) {
        (void)sigaction(i, NULL, &before[i]);
    }
    t = open_with(&options);
    use(t);
    for (int round = 0; round < 2; round++) {
        for (int i = 1; i < NSIG; i++) {
            if (sigaction(i, NULL, &now) == 0 &&
                now.sa_handler != before[i].sa_handler) {
                give_up(strsignal(i));
            }
        }
        if (round == 0) {
            close_it(t);
        }
    }
    return 0;
}

static int exit_closed(void)
{
    const struct kvt_options options = options_of();
    kvt_transport *t = open_with(&options);

    use(t);
    close_it(t);
    exit(7);
}

static int exit_open(void)
{
    const struct kvt_options options = options_of();

    use(open_with(&options));
    exit(7);
}

static int exit_in_child(void)
{
    const struct kvt_options options = options_of();
    kvt_transport *t = open_with(&options);
    int status;
    pid_t pid;

    use(t);
    pid = fork();
    if (pid == 0) {
        exit(7);
    }
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) ||
        WEXITSTATUS(status) != 7) {
        give_up("the child did not exit as it wanted to");
    }
    close_it(t);
    exit(7);
}

static int leave_efa_out(void)
{
    const struct kvt_options options = options_of();
    kvt_transport *t = open_with(&options);

    if (!is_mapped("libucp") || is_mapped("libuct_ib_efa")) {
        give_up("UCX is not there, or its EFA module is");
    }
    close_it(t);
    return 0;
}

static int tell_facts(void)
{
    const char *version = getenv("KVT_TEST_NIXL_VERSION");
    struct kvt_engine_info info = {.code = KVT_EINVAL};

    for (uint32_t i = 0; kvt_engine_info(i, &info) == KVT_OK; i++) {
        if (strcmp(info.name, "nixl") == 0) {
            break;
        }
    }
    if (info.code != KVT_OK || version == NULL ||
        strncmp(info.version, version, strlen(version)) != 0 ||
        strstr(info.text, "/libnixl_capi.so; backends: ") == NULL ||
        strstr(info.text, "POSIX") == NULL ||
        strstr(info.text, ", UCX") == NULL) {
        (void)fprintf(stderr, "version %s: ", info.version);
        give_up(info.text);
    }
    return 0;
}

/* Looking at the engines does not start NIXL: a child may still do that. */
static int open_after_fork(void)
{
    const struct kvt_options options = options_of();
    struct kvt_engine_info info;
    kvt_transport *t;
    int status;
    pid_t pid;

    for (uint32_t i = 0; kvt_engine_info(i, &info) == KVT_OK; i++) {
    }
    pid = fork();
    if (pid == 0) {
        t = open_with(&options);
        use(t);
        close_it(t);
        exit(0);
    }
    return waitpid(pid, &status, 0) == pid && status == 0 ? 0 : WRONG;
}

/* NIXL by itself would let the parameter win, and there is no such NIC. */
static int choose_nics(void)
{
    const struct kvt_param nic = {"UCX", "device_list", "kvt_none_0"};
    struct kvt_options options = options_of();

    options.params = &nic;
    options.param_count = 1;
    (void)unsetenv("UCX_NET_DEVICES");
    must_refuse(&options, "cannot create its backend UCX");
    (void)setenv("UCX_NET_DEVICES", "lo", 1);
    close_it(open_with(&options));
    return 0;
}

static int refuse_backends(void)
{
    const char *const backends[] = {"UCX", "NOTHING"};
    struct kvt_options options = options_of();

    options.backends = backends;
    options.backend_count = 2;
    must_refuse(&options, "this NIXL has no backend \"NOTHING\"; it has: ");
    return 0;
}

/* An empty file in the plugin's place, and none. */
static int break_plugin(void)
{
    const struct kvt_options options = options_of();
    char folder[] = "/tmp/kvt-plugins-XXXXXX";
    char file[64];
    int fd;

    if (mkdtemp(folder) == NULL || setenv("NIXL_PLUGIN_DIR", folder, 1) != 0) {
        give_up("no folder");
    }
    must_refuse(&options, "there is no /tmp/kvt-plugins-");
    (void)snprintf(file, sizeof file, "%s/libplugin_UCX.so", folder);
    fd = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || close(fd) != 0) {
        give_up("no file");
    }
    must_refuse(&options, "cannot load its backend UCX: file too short (its "
                          "file: /tmp/kvt-plugins-");
    (void)unlink(file);
    (void)rmdir(folder);
    return 0;
}

static int ask_for_gpu(void)
{
    struct kvt_options options = options_of();

    if (dlopen("libcuda.so.1", RTLD_NOW) != NULL) {
        return 77;
    }
    options.engine = "nixl:gpu=0";
    must_refuse(&options, "GPU 0 cannot be selected: libcuda.so.1 cannot be "
                          "loaded: there is no NVIDIA driver");
    /* The option is for whatever makes of GPU there is. */
    options.engine = "nixl";
    options.device = 1;
    close_it(open_with(&options));
    return 0;
}

static const struct {
    const char *name;
    int (*run)(void);
} children[] = {
    {"keep_signals", keep_signals},   {"exit_closed", exit_closed},
    {"exit_open", exit_open},         {"exit_in_child", exit_in_child},
    {"leave_efa_out", leave_efa_out}, {"tell_facts", tell_facts},
    {"choose_nics", choose_nics},     {"open_after_fork", open_after_fork},
    {"ask_for_gpu", ask_for_gpu},     {"refuse_backends", refuse_backends},
    {"break_plugin", break_plugin},
};

static int run_child(const char *name)
{
    for (size_t i = 0; i < sizeof children / sizeof children[0]; i++) {
        if (strcmp(name, children[i].name) == 0) {
            return children[i].run();
        }
    }
    give_up("no such child");
}

/* -------------------------------------------------------------------- cases */

static int run(const char *name)
{
    int status = -1;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", "test_nixl_real", name, (char *)NULL);
        _exit(WRONG);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        fail_msg("%s ended by %s", name, strsignal(WTERMSIG(status)));
    }
    return WEXITSTATUS(status);
}

/* B37 */
static void the_process_keeps_its_signal_handlers(void **state)
{
    (void)state;
    assert_int_equal(run("keep_signals"), 0);
}

static void the_process_exits_with_its_own_status(void **state)
{
    (void)state;
    assert_int_equal(run("exit_closed"), 7);
    assert_int_equal(run("exit_open"), 7);
    assert_int_equal(run("exit_in_child"), 7);
}

static void ucx_comes_without_its_efa_module(void **state)
{
    (void)state;
    assert_int_equal(run("leave_efa_out"), 0);
}

static void the_information_tells_version_path_and_backends(void **state)
{
    (void)state;
    assert_int_equal(run("tell_facts"), 0);
}

/* B40 */
static void looking_at_the_engines_does_not_start_nixl(void **state)
{
    (void)state;
    assert_int_equal(run("open_after_fork"), 0);
}

static void the_environment_s_nics_win(void **state)
{
    (void)state;
    assert_int_equal(run("choose_nics"), 0);
}

/* B41 */
static void a_backend_that_nixl_does_not_have_is_named(void **state)
{
    (void)state;
    assert_int_equal(run("refuse_backends"), 0);
}

/* B41 */
static void a_plugin_that_does_not_load_says_why(void **state)
{
    (void)state;
    assert_int_equal(run("break_plugin"), 0);
}

static void a_gpu_where_there_is_none_is_refused(void **state)
{
    int code = run("ask_for_gpu");

    (void)state;
    if (code == 77) {
        skip();
    }
    assert_int_equal(code, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest cases[] = {
        cmocka_unit_test(the_process_keeps_its_signal_handlers),
        cmocka_unit_test(the_process_exits_with_its_own_status),
        cmocka_unit_test(ucx_comes_without_its_efa_module),
        cmocka_unit_test(the_information_tells_version_path_and_backends),
        cmocka_unit_test(looking_at_the_engines_does_not_start_nixl),
        cmocka_unit_test(the_environment_s_nics_win),
        cmocka_unit_test(a_backend_that_nixl_does_not_have_is_named),
        cmocka_unit_test(a_plugin_that_does_not_load_says_why),
        cmocka_unit_test(a_gpu_where_there_is_none_is_refused),
    };

    if (argc > 1) {
        return run_child(argv[1]);
    }
    return cmocka_run_group_tests(cases, NULL, NULL) == 0 ? 0 : 1;
}
