/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the core is to an engine, for tests of one engine: a control thread
 * that runs jobs, posts, watches and turn(), and a record of every report.
 * Everything that waits gives up after FAKE_ENV_PATIENCE_NS and fails the
 * program, so that a lost report is a failed test and not a hang.
 */
#ifndef KVT_TEST_FAKE_ENV_H
#define KVT_TEST_FAKE_ENV_H

#include <pthread.h>
#include <stdbool.h>

#include "engine.h"

#define FAKE_ENV_PATIENCE_NS UINT64_C(60000000000)

struct fake_note {
    struct kvti_list node;
    char agent_name[KVT_NAME_MAX + 1];
    size_t length;
    unsigned char bytes[];
};

struct fake_conn_event {
    void *link;
    enum kvti_conn_event event;
    char text[KVT_TEXT_MAX];
};

#define FAKE_ENV_EVENTS 64

struct fake_call;

struct fake_env {
    const struct kvti_engine_ops *ops;
    void *engine;
    struct kvti_engine_traits traits;
    struct kvti_env env;
    struct kvt_options options;
    char agent_name[KVT_NAME_MAX + 1];
    uint8_t incarnation[KVTI_INCARNATION_BYTES];

    pthread_t thread;
    int epoll_fd;
    int wake_fd;
    struct kvti_watch wake_watch;

    pthread_mutex_t mu;
    pthread_cond_t cond;
    /* Under mu. */
    struct kvti_list calls;
    struct kvti_list jobs;   /* reported, by event_node */
    struct kvti_list chunks; /* reported final, by event_node */
    struct fake_conn_event events[FAKE_ENV_EVENTS];
    size_t event_count;
    struct kvti_list notes;
    size_t note_count;    /* in the list */
    size_t note_capacity; /* more are refused */
    size_t watch_count;
    bool quit;
    bool light; /* control thread: the engine keeps light chunks */
};

/* Zeroed options take 2 workers; what follows a colon in `engine` is the
 * engine's `rest`. Fails the program on an error. */
void fake_env_open(struct fake_env *env, const struct kvti_engine_ops *ops,
                   const char *agent_name, const struct kvt_options *options);
/* The same, but returns the engine's error; nothing is left behind then. */
int fake_env_try(struct fake_env *env, const struct kvti_engine_ops *ops,
                 const char *agent_name, const struct kvt_options *options,
                 struct kvt_error *err);
/* Closes the engine and ends the thread: the engine's answer. */
int fake_env_close(struct fake_env *env, uint64_t timeout_ns);

void fake_env_submit(struct fake_env *env, struct kvti_job *job);
/* Waits for its report and takes it: the code. */
int fake_env_wait_job(struct fake_env *env, struct kvti_job *job);
/* Whether it is reported; does not take it. */
bool fake_env_is_reported(struct fake_env *env, struct kvti_job *job);
int fake_env_job(struct fake_env *env, struct kvti_job *job);

/* A job of this kind with no deadline. */
struct kvti_job fake_job(uint32_t kind);

void fake_env_post(struct fake_env *env, struct kvti_chunk *chunk);
/* Waits for the final report and takes it. */
void fake_env_wait_chunk(struct fake_env *env, struct kvti_chunk *chunk);

/* Room for `count` pieces; free() it. */
struct kvti_chunk *fake_chunk(void *conn, uint32_t op, uint32_t count);

void fake_env_wait_event(struct fake_env *env, void *link,
                         enum kvti_conn_event event);

/* Waits until `count` notifications are there. */
void fake_env_wait_notes(struct fake_env *env, size_t count);
/* The oldest one, or NULL; free() it. */
struct fake_note *fake_env_take_note(struct fake_env *env);
/* Sets how many it holds and tells the engine that it wants some. */
void fake_env_want_notes(struct fake_env *env, size_t capacity);

/* Runs fn on the control thread and waits for it. */
void fake_env_call(struct fake_env *env,
                   void (*fn)(struct fake_env *env, void *arg), void *arg);

#endif /* KVT_TEST_FAKE_ENV_H */
