/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Holders on another host. For the rest of the coordinator they are nodes like
 * others: what is written to their streams is carried over the link, and what
 * comes is put where it would have been received. A holder that the other side
 * has reaped is as dead as one of ours. When the link itself is lost nothing is
 * proven of its holders: they count as dead, their orders as unproven, and no
 * more requests are started.
 */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "replay.h"

/* --------------------------------------------------------------------- open */

static void describe(const struct geometry *geometry, char *text,
                     size_t capacity)
{
    char size[CLI_SIZE_TEXT];

    (void)snprintf(text, capacity, "%llu runs of %llu pages of %s",
                   (unsigned long long)geometry->regions,
                   (unsigned long long)geometry->pages,
                   cli_format_size(geometry->page_bytes, size));
}

/* What the two sides were told must fit. */
static int check_offer(struct replay *replay)
{
    struct replay_options *options = &replay->options;
    const struct link_offer *offer = &replay->offer;
    const struct geometry *theirs = &offer->geometry;
    const struct geometry *ours = &replay->geometry;
    char here[80];
    char there[80];

    if (offer->holders < 1 || options->fetchers > REPLAY_NODES_MAX ||
        offer->holders > REPLAY_NODES_MAX - options->fetchers) {
        cli_error("replay: %llu holders at %s and %llu fetchers here are more "
                  "than %u processes",
                  (unsigned long long)offer->holders, replay->link.other,
                  (unsigned long long)options->fetchers, REPLAY_NODES_MAX);
        return CLI_USAGE;
    }
    if (theirs->regions > 0 &&
        (theirs->regions != ours->regions || theirs->pages != ours->pages ||
         theirs->page_bytes != ours->page_bytes)) {
        describe(ours, here, sizeof(here));
        describe(theirs, there, sizeof(there));
        cli_error("replay: a hash block has %s here and %s at %s: give both "
                  "sides the same --model or --block-bytes, or none to the "
                  "listening side",
                  here, there, replay->link.other);
        return CLI_USAGE;
    }
    return CLI_OK;
}

/* Pools have the same shape on both sides: the smaller memory decides. */
static int fit_slots(struct replay *replay)
{
    uint64_t slots = kvpool_slots_in(&replay->geometry, replay->offer.memory);
    char size[CLI_SIZE_TEXT];
    char memory[CLI_SIZE_TEXT];

    if (slots == 0) {
        cli_error("replay: one hash block has %s and does not fit the pools of "
                  "%s at %s: give more --memory there",
                  cli_format_size(geometry_slot_bytes(&replay->geometry), size),
                  cli_format_size(replay->offer.memory, memory),
                  replay->link.other);
        return CLI_USAGE;
    }
    if (slots < replay->slots) {
        replay->slots = slots;
    }
    if (replay->options.pool == 0) {
        replay->slots_wanted = replay->slots;
    }
    return CLI_OK;
}

int remote_open(struct replay *replay)
{
    char error[CLI_TEXT_MAX];
    struct proto_message message;
    int rc;

    if (!link_connect(replay->options.connect, &replay->link, error) ||
        !link_expect(&replay->link, LINK_OFFER, &message, error)) {
        cli_error("replay: %s", error);
        return CLI_FAILED;
    }
    link_offer_take(&message, &replay->offer);
    if (message.damaged) {
        cli_error("replay: the offer of %s is damaged", replay->link.other);
        return CLI_FAILED;
    }
    rc = check_offer(replay);
    if (rc == CLI_OK) {
        rc = fit_slots(replay);
    }
    if (rc == CLI_OK) {
        replay->options.holders = replay->offer.holders;
    } else {
        link_leave(&replay->link, "the two sides do not fit each other");
    }
    return rc;
}

/* --------------------------------------------------------------------- loss */

static void lose_link(struct replay *replay, const char *why)
{
    uint64_t holders = replay->options.holders;
    bool started = nodes_started(replay);
    bool counted[REPLAY_NODES_MAX] = {false};
    uint64_t lost = 0;

    link_close(&replay->link);
    /* All of them first: nothing must be asked of the next one to fall. */
    for (uint64_t i = 0; i < holders; i++) {
        struct replay_node *holder = nodes_holder(replay, i);

        counted[i] = holder->alive;
        lost += holder->alive;
        holder->alive = false;
        proto_close(&holder->control);
    }
    if (lost == 0) {
        return;
    }
    if (!started || replay->remote_ending) {
        replay_fail(replay, "%s", why);
        return;
    }
    (void)snprintf(replay->cut, sizeof(replay->cut), "%s", why);
    cli_error("%s: its %llu holders count as lost and no more requests are "
              "started",
              why, (unsigned long long)lost);
    for (uint64_t i = 0; i < holders; i++) {
        if (counted[i] && !nodes_holder(replay, i)->reported) {
            nodes_bury(replay, nodes_holder(replay, i), 0, false);
        }
    }
}

/* ----------------------------------------------------------------- messages */

bool remote_send(struct replay *replay)
{
    char error[CLI_TEXT_MAX];

    if (!link_is_open(&replay->link)) {
        return true;
    }
    for (uint64_t i = 0; i < replay->options.holders; i++) {
        struct replay_node *holder = nodes_holder(replay, i);

        if (holder->remote) {
            link_carry(&replay->link, i, &holder->control.out);
        }
    }
    if (!link_turn(&replay->link, error)) {
        /* What it said before it went is still to be heard. */
        remote_receive(replay);
        if (link_is_open(&replay->link)) {
            lose_link(replay, error);
        }
        return false;
    }
    return true;
}

static void take_gone(struct replay *replay, struct replay_node *holder,
                      struct proto_message *message)
{
    bool signalled = proto_take(message) != 0;
    uint64_t number = proto_take(message);
    int status = (int)(number & 0x7f);

    if (message->damaged || !holder->alive) {
        return;
    }
    holder->alive = false;
    proto_close(&holder->control);
    /* In waitpid()'s own form. */
    nodes_bury(replay, holder, signalled ? status : W_EXITCODE(status, 0),
               true);
}

/* False when the message is damaged. */
static bool handle(struct replay *replay, struct proto_message *message)
{
    struct replay_node *holder;
    const void *bytes;
    size_t length;
    uint64_t index;

    if (message->type == LINK_PING) {
        return true;
    }
    index = proto_take(message);
    if (message->damaged || index >= replay->options.holders) {
        return false;
    }
    holder = nodes_holder(replay, index);
    if (message->type == LINK_GONE) {
        take_gone(replay, holder, message);
        return !message->damaged;
    }
    bytes = proto_take_bytes(message, &length);
    if (message->type != LINK_BYTES || message->damaged) {
        return false;
    }
    if (holder->alive) {
        proto_append(&holder->control.in, bytes, length);
        return nodes_hear(replay, holder);
    }
    return true;
}

/* Handles the whole frames that have come. `good`: more can come, else `error`
 * says why not. */
static void hear(struct replay *replay, bool good, char error[CLI_TEXT_MAX])
{
    struct proto_message message;
    int rc = 0;

    while (link_is_open(&replay->link) &&
           (rc = proto_next(&replay->link.proto, &message)) > 0) {
        if (message.type == LINK_REFUSE) {
            char why[CLI_TEXT_MAX];

            proto_take_text(&message, why, sizeof(why));
            (void)snprintf(error, CLI_TEXT_MAX, "%s ended the run: %.380s",
                           replay->link.other, why);
            good = false;
            break;
        }
        if (!handle(replay, &message)) {
            rc = -1;
            break;
        }
    }
    if (rc < 0) {
        (void)snprintf(error, CLI_TEXT_MAX, "%s sent a damaged message",
                       replay->link.other);
    }
    if (rc < 0 || !good) {
        lose_link(replay, error);
    }
}

void remote_receive(struct replay *replay)
{
    char error[CLI_TEXT_MAX];
    bool good = link_fill(&replay->link, error);

    hear(replay, good, error);
}

/* -------------------------------------------------------------------- orders */

void remote_start(struct replay *replay)
{
    const struct replay_options *options = &replay->options;
    char error[CLI_TEXT_MAX];
    struct link_start start = {
        .fetchers = options->fetchers,
        .pull = options->pull,
        .requests = options->inflight,
        .timeout_ns = (uint64_t)(options->timeout_s * 1e9),
        .slots = replay->slots,
        .geometry = replay->geometry,
    };

    for (uint64_t i = 0; i < options->holders; i++) {
        struct replay_node *holder = nodes_holder(replay, i);

        start.secrets[i] = holder->secret;
        holder->remote = true;
        holder->alive = true;
        proto_open(&holder->control, -1, PROTO_PAYLOAD_MAX_REMOTE);
        holder->local = cli_alloc(options->fetchers, sizeof(*holder->local));
    }
    link_start_put(&replay->link, &start, options->holders);
    /* What came together with the offer has been received and wakes no
     * poll(). */
    hear(replay, true, error);
}

void remote_kill(struct replay *replay, const struct replay_node *holder)
{
    if (!link_is_open(&replay->link)) {
        return;
    }
    proto_begin(&replay->link.proto, LINK_KILL);
    proto_put(&replay->link.proto, holder->index);
    proto_end(&replay->link.proto);
}

void remote_end(struct replay *replay)
{
    if (!link_is_open(&replay->link)) {
        return;
    }
    replay->remote_ending = true;
    /* After all that was said to the holders. */
    if (!remote_send(replay)) {
        return;
    }
    proto_begin(&replay->link.proto, LINK_END);
    proto_end(&replay->link.proto);
}

void remote_abort(struct replay *replay, const char *why)
{
    for (uint64_t i = 0; i < replay->options.holders; i++) {
        struct replay_node *holder = nodes_holder(replay, i);

        if (holder->remote) {
            holder->alive = false;
        }
    }
    link_leave(&replay->link, why);
}
