/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Probing metadata, the parent's side.
 *
 * A LOAD of metadata without kvt's trailer is handed to a thread of its own, so
 * that NIXL's goes on with everybody's transfers. That thread keeps up to
 * CHILDREN probe processes (nixl_check_child.c), waits for their pidfds and for
 * a descriptor that wakes it, and kills those that are late. What has passed is
 * remembered by its incarnation, which is made from the bytes: a reload of the
 * same bytes is not probed again. The job then goes back to the NIXL thread.
 *
 *   LOAD [nixl] -> waiting [mu] -> running [check] -> engine->jobs, or reported
 *
 * A job's deadline counts while it waits, too: four that hang must not hold up
 * the caller of a fifth beyond his own time.
 *
 * checks->mu is a leaf; nothing is called with it held. A job's metadata is the
 * core's until it is reported, and is only read when its process is started.
 */
#include "nixl_check.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CHILDREN 4u /* each takes half a second of one core */
#define PASSED_MAX 1024u
#define SECOND_NS UINT64_C(1000000000)
/* How long a killed process may take to be gone, at the end of all. */
#define KILLED_MS 1000

struct probe {
    struct kvti_job *job; /* NULL: reported, or not in use */
    struct kvti_nixl_child child;
    uint64_t deadline_ns;
    bool used;
};

struct kvti_nixl_checks {
    struct kvti_nixl *engine; /* [const] */
    char program[PATH_MAX];   /* [const] */
    char **environment;       /* [const] */
    int wake_fd;              /* [const] */

    pthread_mutex_t mu;
    struct kvti_list waiting; /* [mu] */
    bool started;             /* [mu] there is a thread */
    bool stop;                /* [mu] */
    size_t passed_count;      /* [mu] */
    uint8_t passed[PASSED_MAX][KVTI_INCARNATION_BYTES]; /* [mu] a ring */

    pthread_t thread;              /* [mu] with started */
    struct probe probes[CHILDREN]; /* [check] */
};

/* -------------------------------------------------------------- environment */

static void free_environment(char **environment)
{
    for (size_t i = 0; environment != NULL && environment[i] != NULL; i++) {
        free(environment[i]);
    }
    free(environment);
}

/* A copy, since the host may change its own while a process is started. */
static char **copy_environment(void)
{
    /* Memory that is used before it is written, or after it is freed, is then
     * never zero by luck: what crashes the host one day crashes the probe. */
    static const char perturb[] = "MALLOC_PERTURB_=165";
    size_t count = 0;
    char **copy;

    while (environ != NULL && environ[count] != NULL) {
        count++;
    }
    copy = calloc(count + 2, sizeof(char *));
    for (size_t i = 0; copy != NULL && i <= count; i++) {
        copy[i] = strdup(i < count ? environ[i] : perturb);
        if (copy[i] == NULL) {
            free_environment(copy);
            return NULL;
        }
    }
    return copy;
}

/* ------------------------------------------------------------------- passed */

static bool has_passed(struct kvti_nixl_checks *checks, const uint8_t *mark)
{
    size_t count;
    bool found = false;

    pthread_mutex_lock(&checks->mu);
    count = checks->passed_count < PASSED_MAX ? checks->passed_count
                                              : PASSED_MAX;
    for (size_t i = 0; i < count && !found; i++) {
        found = memcmp(checks->passed[i], mark, KVTI_INCARNATION_BYTES) == 0;
    }
    pthread_mutex_unlock(&checks->mu);
    return found;
}

static void pass(struct kvti_nixl_checks *checks, struct kvti_job *job)
{
    struct kvti_nixl *engine = checks->engine;

    pthread_mutex_lock(&checks->mu);
    memcpy(checks->passed[checks->passed_count++ % PASSED_MAX],
           job->md->incarnation, KVTI_INCARNATION_BYTES);
    pthread_mutex_unlock(&checks->mu);
    pthread_mutex_lock(&engine->mu);
    kvti_list_append(&engine->jobs, &job->node);
    kvti_nixl_wake_locked(engine);
    pthread_mutex_unlock(&engine->mu);
}

/* ------------------------------------------------------------ a job's probe */

static int request_bytes(const struct kvti_nixl *engine,
                         const struct kvti_job *job, struct kvti_buf *out)
{
    const struct kvti_nixl_request request = {
        .library = engine->lib->path,
        .agent_name = engine->agent_name,
        .config = engine->config, /* lent */
        .limit_s = (uint32_t)engine->config.probe_s + 1,
        .blob = job->md->prefix,
        .blob_length = job->md->prefix_length,
    };

    return kvti_nixl_request_encode(&request, out);
}

/* False: it could not be started, and the job is reported. */
static bool start_probe(struct kvti_nixl_checks *checks, struct probe *probe,
                        struct kvti_job *job)
{
    uint64_t limit_ns = kvti_now_ns() +
                        checks->engine->config.probe_s * SECOND_NS;
    struct kvti_buf request = {0};
    struct kvt_error err;
    int code = request_bytes(checks->engine, job, &request);

    if (code == KVT_OK) {
        code = kvti_nixl_child_start(&probe->child, checks->program,
                                     checks->environment, &request, &err);
    } else {
        kvti_fail(&err, code, "no memory to probe the metadata");
    }
    kvti_buf_fini(&request);
    if (code != KVT_OK) {
        kvti_nixl_report_job(checks->engine, job, code, &err);
        return false;
    }
    probe->job = job;
    probe->used = true;
    probe->deadline_ns = job->deadline_ns < limit_ns ? job->deadline_ns
                                                     : limit_ns;
    return true;
}

static void report(struct kvti_nixl_checks *checks, struct probe *probe,
                   const struct kvti_nixl_verdict *verdict)
{
    struct kvti_job *job = probe->job;
    struct kvt_error err;
    int code;

    if (verdict->spoke && verdict->status == NIXL_OK) {
        pass(checks, job);
        return;
    }
    if (verdict->spoke) {
        code = kvti_nixl_fail_load(job->md, verdict->status, &err);
    } else if (verdict->ready) {
        code = kvti_fail(&err, KVT_EMETADATA,
                         "NIXL crashes on the metadata of \"%.80s\" (%.40s in "
                         "the probe process): it is damaged; get it from the "
                         "peer again",
                         job->md->agent_name, verdict->text);
    } else {
        code = kvti_fail(&err, KVT_EENGINE,
                         "the probe process could not start NIXL: %s",
                         verdict->text);
    }
    kvti_nixl_report_job(checks->engine, job, code, &err);
}

/* Its time is over; the process itself is reaped when it is gone. */
static void expire(struct kvti_nixl_checks *checks, struct probe *probe)
{
    struct kvti_job *job = probe->job;
    struct kvt_error err;

    kvti_nixl_child_kill(&probe->child);
    kvti_fail(&err, KVT_ETIMEDOUT,
              "NIXL did not come back from the metadata of \"%.80s\" in the "
              "probe process in %u s: it may be damaged, or this host "
              "overloaded (probe_s)",
              job->md->agent_name,
              (unsigned int)checks->engine->config.probe_s);
    probe->job = NULL;
    kvti_nixl_report_job(checks->engine, job, KVT_ETIMEDOUT, &err);
}

/* The first deadline of those that wait for a process; UINT64_MAX: none. */
static uint64_t next_waiting(struct kvti_nixl_checks *checks)
{
    uint64_t until_ns = UINT64_MAX;

    pthread_mutex_lock(&checks->mu);
    kvti_list_each(node, &checks->waiting) {
        const struct kvti_job *job = kvti_container(node, struct kvti_job,
                                                    node);

        until_ns = job->deadline_ns < until_ns ? job->deadline_ns : until_ns;
    }
    pthread_mutex_unlock(&checks->mu);
    return until_ns;
}

static void expire_waiting(struct kvti_nixl_checks *checks)
{
    uint64_t now_ns = kvti_now_ns();
    struct kvti_list late;
    struct kvti_list *late_node;
    struct kvt_error err;

    kvti_list_init(&late);
    pthread_mutex_lock(&checks->mu);
    kvti_list_each(node, &checks->waiting) {
        if (kvti_container(node, struct kvti_job, node)->deadline_ns <=
            now_ns) {
            kvti_list_remove(node);
            kvti_list_append(&late, node);
        }
    }
    pthread_mutex_unlock(&checks->mu);
    while ((late_node = kvti_list_take(&late)) != NULL) {
        struct kvti_job *job = kvti_container(late_node, struct kvti_job, node);

        kvti_fail(&err, KVT_ETIMEDOUT,
                  "the metadata of \"%.80s\" was not probed in time: %u probe "
                  "processes were busy with that of other peers",
                  job->md->agent_name, CHILDREN);
        kvti_nixl_report_job(checks->engine, job, KVT_ETIMEDOUT, &err);
    }
}

static void end_probe(struct kvti_nixl_checks *checks, struct probe *probe)
{
    struct kvti_nixl_verdict verdict;

    kvti_nixl_child_end(&probe->child, &verdict);
    if (probe->job != NULL) {
        report(checks, probe, &verdict);
    }
    *probe = (struct probe){.used = false};
}

/* --------------------------------------------------------------- the thread */

/* False: the end. */
static bool take_in(struct kvti_nixl_checks *checks)
{
    for (size_t i = 0; i < CHILDREN; i++) {
        struct probe *probe = &checks->probes[i];
        struct kvti_list *node = NULL;
        bool stop;

        do {
            pthread_mutex_lock(&checks->mu);
            stop = checks->stop;
            if (!probe->used && !stop) {
                node = kvti_list_take(&checks->waiting);
            }
            pthread_mutex_unlock(&checks->mu);
            if (stop) {
                return false;
            }
        } while (node != NULL && !probe->used &&
                 !start_probe(checks, probe,
                              kvti_container(node, struct kvti_job, node)));
    }
    return true;
}

static int timeout_ms(uint64_t until_ns)
{
    uint64_t now_ns = kvti_now_ns();

    if (until_ns == UINT64_MAX) {
        return -1;
    }
    return until_ns <= now_ns ? 0 : (int)((until_ns - now_ns) / 1000000) + 1;
}

static void wait_for_any(struct kvti_nixl_checks *checks)
{
    struct pollfd fds[CHILDREN + 1] = {
        {.fd = checks->wake_fd, .events = POLLIN}};
    uint64_t until_ns = next_waiting(checks);
    uint64_t count;

    for (size_t i = 0; i < CHILDREN; i++) {
        const struct probe *probe = &checks->probes[i];

        fds[i + 1] = (struct pollfd){
            .fd = probe->used ? probe->child.pidfd : -1, .events = POLLIN};
        if (probe->used && probe->child.pidfd < 0) {
            until_ns = 0; /* it was gone before it could be watched */
        } else if (probe->job != NULL && probe->deadline_ns < until_ns) {
            until_ns = probe->deadline_ns;
        }
    }
    if (poll(fds, CHILDREN + 1, timeout_ms(until_ns)) < 0) {
        return; /* interrupted: another round */
    }
    if (fds[0].revents != 0) {
        (void)!read(checks->wake_fd, &count, sizeof(count));
    }
    for (size_t i = 0; i < CHILDREN; i++) {
        struct probe *probe = &checks->probes[i];

        if (probe->used &&
            (fds[i + 1].revents != 0 || probe->child.pidfd < 0)) {
            end_probe(checks, probe);
        } else if (probe->job != NULL && probe->deadline_ns <= kvti_now_ns()) {
            expire(checks, probe);
        }
    }
    expire_waiting(checks);
}

static void *check_thread(void *arg)
{
    struct kvti_nixl_checks *checks = arg;

    while (take_in(checks)) {
        wait_for_any(checks);
    }
    for (size_t i = 0; i < CHILDREN; i++) {
        struct probe *probe = &checks->probes[i];
        struct pollfd ended = {.fd = probe->child.pidfd, .events = POLLIN};

        if (probe->used) {
            probe->job = NULL;
            kvti_nixl_child_kill(&probe->child);
            (void)poll(&ended, 1, KILLED_MS);
            end_probe(checks, probe);
        }
    }
    return NULL;
}

/* -------------------------------------------------------------- NIXL thread */

static void wake(const struct kvti_nixl_checks *checks)
{
    uint64_t one = 1;

    (void)!write(checks->wake_fd, &one, sizeof(one));
}

bool kvti_nixl_check(struct kvti_nixl *engine, struct kvti_job *job)
{
    struct kvti_nixl_checks *checks = engine->checks;
    struct kvt_error err;
    int rc = 0;

    if (checks == NULL || job->md->has_trailer ||
        has_passed(checks, job->md->incarnation)) {
        return false;
    }
    pthread_mutex_lock(&checks->mu);
    if (!checks->started && !checks->stop) {
        /* The NIXL thread blocks every signal, and so does this one. */
        rc = pthread_create(&checks->thread, NULL, check_thread, checks);
        checks->started = rc == 0;
    }
    if (rc == 0) {
        kvti_list_append(&checks->waiting, &job->node);
    }
    pthread_mutex_unlock(&checks->mu);
    if (rc == 0) {
        wake(checks);
        return true;
    }
    kvti_fail_errno(&err, KVT_ESYSTEM, rc,
                    "cannot start the thread that probes metadata");
    kvti_nixl_report_job(engine, job, KVT_ESYSTEM, &err);
    return true;
}

/* -------------------------------------------------------------- open, close */

int kvti_nixl_checks_new(struct kvti_nixl *engine, struct kvt_error *err)
{
    struct kvti_nixl_checks *checks = calloc(1, sizeof(*checks));
    int code;

    if (checks == NULL) {
        return kvti_fail(err, KVT_ENOMEM, "no memory to probe metadata");
    }
    checks->engine = engine;
    pthread_mutex_init(&checks->mu, NULL);
    kvti_list_init(&checks->waiting);
    checks->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    checks->environment = copy_environment();
    code = kvti_nixl_child_find(checks->program, sizeof(checks->program), err);
    if (code == KVT_OK && checks->wake_fd < 0) {
        code = kvti_fail_errno(err, KVT_ESYSTEM, errno,
                               "no descriptor to probe metadata");
    }
    if (code == KVT_OK && checks->environment == NULL) {
        code = kvti_fail(err, KVT_ENOMEM, "no memory to probe metadata");
    }
    if (code != KVT_OK) {
        kvti_nixl_checks_free(checks);
        return code;
    }
    engine->checks = checks;
    return KVT_OK;
}

void kvti_nixl_checks_stop(struct kvti_nixl_checks *checks)
{
    bool started;

    if (checks == NULL) {
        return;
    }
    pthread_mutex_lock(&checks->mu);
    checks->stop = true;
    started = checks->started;
    checks->started = false;
    pthread_mutex_unlock(&checks->mu);
    if (started) {
        wake(checks);
        pthread_join(checks->thread, NULL);
    }
}

void kvti_nixl_checks_free(struct kvti_nixl_checks *checks)
{
    if (checks == NULL) {
        return;
    }
    kvti_nixl_checks_stop(checks);
    if (checks->wake_fd >= 0) {
        (void)close(checks->wake_fd);
    }
    pthread_mutex_destroy(&checks->mu);
    free_environment(checks->environment);
    free(checks);
}

void kvti_nixl_checks_after_fork(struct kvti_nixl_checks *checks)
{
    if (checks != NULL) {
        free_environment(checks->environment);
        free(checks);
    }
}
