/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine in memory for tests of what is built around an engine: it copies
 * by memcpy inside one process, on one thread of its own, and does exactly what
 * engine.h asks. A test can stop that thread between two pieces of work, see
 * what it has been given, and make it break its connections.
 */
#ifndef KVT_TEST_FAKE_ENGINE_H
#define KVT_TEST_FAKE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine.h"

/* `rest` may be "partial": each chunk is first reported with FIN_LOCAL; or
 * "refuse": it does not open. It refuses layouts named "inner". */
extern const struct kvti_engine_ops fake_engine_ops;

/* The newest one that is open. */
struct fake_engine *fake_engine_get(void);

/* While paused it takes work and does none. */
void fake_engine_pause(struct fake_engine *engine, bool paused);

/* Returns when all work given so far is done and reported; not while paused. */
void fake_engine_drain(struct fake_engine *engine);

/* Chunks given to it; jobs of a kind. */
uint64_t fake_engine_posts(struct fake_engine *engine);
uint64_t fake_engine_jobs(struct fake_engine *engine, uint32_t kind);

/* How the chunks that follow end: KVT_DONE at first. */
void fake_engine_set_state(struct fake_engine *engine, uint32_t state);

/* Reports an event about its newest connection. */
void fake_engine_report_conn(struct fake_engine *engine,
                             enum kvti_conn_event event);

/* A message arrives; whether the core took it. */
bool fake_engine_receive(struct fake_engine *engine, const char *text);

/* How often the core said that it has room for messages again. */
uint64_t fake_engine_wants(struct fake_engine *engine);

/* The next close answers this once, and leaves the engine as it is. */
void fake_engine_stick(struct fake_engine *engine);

/* The messages sent so far, one character each: the first byte. */
void fake_engine_messages(struct fake_engine *engine, char *text, size_t size);

#endif /* KVT_TEST_FAKE_ENGINE_H */
