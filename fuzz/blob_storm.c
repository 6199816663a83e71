/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What becomes of damaged metadata in the real NIXL: half of it with kvt's
 * trailer, half of it NIXL's own alone. Needs NIXL; the figures of
 * docs/fuzzing.md are its output.
 *
 *   blob_storm [--count N] [--first I] [--seed S] [--probes N] [--save FILE]
 *
 * Of the N blobs from number I on every other one has the trailer: all of these
 * must be refused by their checksum. The others go through the structure check;
 * what it lets through is given to a host that does not probe, which shows what
 * would kill one, and then to a host that does: all that killed the first, and
 * up to N others (--probes), spread over them. Processes do the loading
 * (storm_host.c), so that a death is a figure. What kills a host goes to FILE,
 * its number and hex, one a line.
 *
 * Fails when a blob with the trailer is taken or kills, and when one without is
 * refused by the structure check with a wrong error. The death of a host that
 * probes is a figure: what NIXL reads beyond its arrays is not the same in two
 * processes, so that the probe cannot promise it.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "diag.h"
#include "metadata.h"
#include "storm.h"

#define REGIONS 4
#define REGION_BYTES 4096
#define REGIONS_MAX 65536

struct arguments {
    uint64_t count;
    uint64_t first;
    uint64_t seed;
    uint64_t probes;
    const char *save;
};

struct figures {
    uint64_t made[DAMAGE_KINDS];
    uint64_t passed[DAMAGE_KINDS]; /* the structure check */
    uint64_t killed[DAMAGE_KINDS]; /* a host that does not probe */
    uint64_t killed_after[DAMAGE_KINDS];
    uint64_t refused[DAMAGE_KINDS]; /* by NIXL */
    uint64_t signed_made;
    uint64_t signed_taken;
    uint64_t signed_dead;
    uint64_t probed_killers;
    uint64_t caught;      /* of these, by the probe process */
    uint64_t probed_rest; /* what killed nobody */
    uint64_t caught_rest; /* of these */
    uint64_t late;
    uint64_t escaped; /* a host that probes died */
    uint64_t escaped_after;
};

struct candidate {
    struct blob blob;
    uint64_t number;
    unsigned kind;
    bool kills;
};

static struct figures figures;

/* ---------------------------------------------------------------------- blobs */

static kvt_transport *open_donor(struct blob *ret, size_t *ret_prefix)
{
    const struct kvt_options options = {.size = sizeof options,
                                        .engine = "nixl",
                                        .agent_name = "victim",
                                        .flags = KVT_OPEN_NO_SAME_HOST};
    struct kvt_region regions[REGIONS];
    struct kvt_error err = {.code = KVT_OK};
    struct kvti_md md;
    kvt_transport *t = NULL;
    /* Apart, or they would be one registration. */
    uint8_t *memory = mmap(NULL, REGIONS * 2 * REGION_BYTES,
                           PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                           -1, 0);

    kvti_assert(memory != MAP_FAILED);
    for (size_t i = 0; i < REGIONS; i++) {
        regions[i] = (struct kvt_region){.addr = (uintptr_t)memory +
                                                 2 * i * REGION_BYTES,
                                         .length = REGION_BYTES};
    }
    if (kvt_open(&options, &t, &err) != KVT_OK ||
        kvt_register(t, regions, REGIONS, 0, &err) != KVT_OK ||
        kvt_metadata(t, ret->bytes, sizeof ret->bytes, &ret->length, &err) !=
            KVT_OK ||
        kvti_md_decode(ret->bytes, ret->length, REGIONS_MAX, &md, &err) !=
            KVT_OK) {
        (void)fprintf(stderr, "blob_storm: %s\n", err.text);
        exit(EXIT_FAILURE);
    }
    *ret_prefix = md.prefix_length;
    kvti_md_fini(&md);
    return t;
}

static bool passes_check(const struct blob *blob)
{
    uint8_t *part = malloc(blob->length > 0 ? blob->length : 1);
    struct kvt_error err;
    struct kvti_md md;
    int code;

    kvti_assert(part != NULL);
    memcpy(part, blob->bytes, blob->length);
    code = kvti_md_decode(part, blob->length, REGIONS_MAX, &md, &err);
    kvti_assert(code == KVT_OK ||
                (code == KVT_EMETADATA && err.text[0] != '\0'));
    if (code == KVT_OK) {
        kvti_assert(!md.has_trailer);
        kvti_md_fini(&md);
    }
    free(part);
    return code == KVT_OK;
}

/* ------------------------------------------------------------------- half one */

static void try_signed(struct host *host, const struct blob *blob)
{
    enum verdict verdict = host_load(host, blob);

    figures.signed_made++;
    figures.signed_dead += verdict == VERDICT_DEAD;
    figures.signed_taken += verdict != VERDICT_STRUCTURE &&
                            verdict != VERDICT_DEAD;
}

/* ------------------------------------------------------------------- half two */

static void tell(const char *what, const struct host *host,
                 const struct candidate *candidate, enum verdict verdict,
                 bool after)
{
    (void)printf("blob %" PRIu64 " (%s): %s: %c%s, signal %d\n",
                 candidate->number, damage_names[candidate->kind], what,
                 (char)verdict, after ? " after others" : "",
                 WIFSIGNALED(host->status) ? WTERMSIG(host->status) : 0);
}

static void try_bare(struct host *host, struct candidate *candidate)
{
    bool after;
    enum verdict verdict = host_load_surely(host, &candidate->blob, &after);

    candidate->kills = verdict == VERDICT_DEAD || after;
    if (candidate->kills) {
        tell("a host that does not probe", host, candidate, verdict, after);
    }
    figures.killed[candidate->kind] += verdict == VERDICT_DEAD;
    figures.killed_after[candidate->kind] += after;
    figures.refused[candidate->kind] += !candidate->kills &&
                                        verdict != VERDICT_LOADED;
}

static void try_probed(struct host *host, const struct candidate *candidate)
{
    bool after;
    enum verdict verdict = host_load_surely(host, &candidate->blob, &after);

    if (candidate->kills || verdict == VERDICT_DEAD || after) {
        tell("one that does", host, candidate, verdict, after);
    }
    if (candidate->kills) {
        figures.probed_killers++;
        figures.caught += verdict == VERDICT_CAUGHT;
    } else {
        figures.probed_rest++;
        figures.caught_rest += verdict == VERDICT_CAUGHT;
    }
    figures.late += verdict == VERDICT_LATE;
    figures.escaped += verdict == VERDICT_DEAD;
    figures.escaped_after += after;
}

static void save(const struct arguments *arguments,
                 const struct candidate *candidates, size_t count)
{
    FILE *file = arguments->save != NULL ? fopen(arguments->save, "ae") : NULL;

    for (size_t i = 0; file != NULL && i < count; i++) {
        if (!candidates[i].kills) {
            continue;
        }
        (void)fprintf(file, "%" PRIu64 " ", candidates[i].number);
        for (size_t j = 0; j < candidates[i].blob.length; j++) {
            (void)fprintf(file, "%02x", candidates[i].blob.bytes[j]);
        }
        (void)fputc('\n', file);
    }
    if (file != NULL) {
        (void)fclose(file);
    }
}

static void try_candidates(const struct arguments *arguments,
                           struct candidate *candidates, size_t count)
{
    struct host bare = {.probes = false};
    struct host probing = {.probes = true};
    size_t rest = 0;
    uint64_t taken = 0;

    for (size_t i = 0; i < count; i++) {
        try_bare(&bare, &candidates[i]);
        rest += !candidates[i].kills;
    }
    host_end(&bare);
    save(arguments, candidates, count);
    for (size_t i = 0, seen = 0; i < count; i++) {
        bool chosen = candidates[i].kills;

        if (!chosen) {
            seen++;
            chosen = taken < arguments->probes * seen / rest;
            taken += chosen;
        }
        if (chosen) {
            try_probed(&probing, &candidates[i]);
        }
    }
    host_end(&probing);
}

/* --------------------------------------------------------------------- report */

static void print_kinds(void)
{
    (void)printf("| damage | made | pass the check | NIXL refuses | kill NIXL "
                 "| only after others |\n| --- | --- | --- | --- | --- | --- "
                 "|\n");
    for (size_t i = 0; i < DAMAGE_KINDS; i++) {
        (void)printf("| %s | %" PRIu64 " | %" PRIu64 " | %" PRIu64 " | %" PRIu64
                     " | %" PRIu64 " |\n",
                     damage_names[i], figures.made[i], figures.passed[i],
                     figures.refused[i], figures.killed[i],
                     figures.killed_after[i]);
    }
}

static bool print_all(void)
{
    (void)printf("with the trailer: %" PRIu64 " made, %" PRIu64
                 " taken, %" PRIu64 " deaths\n",
                 figures.signed_made, figures.signed_taken,
                 figures.signed_dead);
    print_kinds();
    (void)printf("probed: %" PRIu64 " that kill, %" PRIu64
                 " of them caught; %" PRIu64 " others, %" PRIu64
                 " caught; %" PRIu64 " late; %" PRIu64
                 " killed the host, %" PRIu64 " after others\n",
                 figures.probed_killers, figures.caught, figures.probed_rest,
                 figures.caught_rest, figures.late, figures.escaped,
                 figures.escaped_after);
    return figures.signed_taken == 0 && figures.signed_dead == 0;
}

/* ----------------------------------------------------------------------- main */

static void run(const struct arguments *arguments)
{
    static struct blob whole;
    struct blob plain;
    struct blob made;
    struct host host = {.probes = true};
    struct candidate *candidates = calloc(arguments->count / 2 + 1,
                                          sizeof *candidates);
    size_t count = 0;
    size_t prefix;
    kvt_transport *donor = open_donor(&whole, &prefix);

    kvti_assert(candidates != NULL);
    plain = whole;
    plain.length = prefix;
    for (uint64_t i = arguments->first; i < arguments->first + arguments->count;
         i++) {
        const unsigned kind = (unsigned)(i / 2 % DAMAGE_KINDS);
        const bool is_signed = i % 2 == 0;

        damage(is_signed ? &whole : &plain, prefix, kind,
               arguments->seed << 32 ^ i, &made);
        if (is_signed) {
            try_signed(&host, &made);
            continue;
        }
        figures.made[kind]++;
        if (passes_check(&made)) {
            figures.passed[kind]++;
            candidates[count++] = (struct candidate){
                .blob = made, .number = i, .kind = kind};
        }
    }
    host_end(&host);
    (void)printf("%zu bytes with the trailer, %zu without; %zu pass the "
                 "check\n",
                 whole.length, prefix, count);
    try_candidates(arguments, candidates, count);
    free(candidates);
    kvt_free(donor);
}

static bool read_arguments(int argc, char **argv, struct arguments *ret)
{
    const struct {
        const char *name;
        uint64_t *value;
    } numbers[] = {{"--count", &ret->count},
                   {"--first", &ret->first},
                   {"--seed", &ret->seed},
                   {"--probes", &ret->probes}};

    for (int i = 1; i < argc; i += 2) {
        bool known = false;

        if (i + 1 == argc) {
            return false;
        }
        for (size_t j = 0; j < sizeof numbers / sizeof *numbers; j++) {
            if (strcmp(argv[i], numbers[j].name) == 0) {
                *numbers[j].value = strtoull(argv[i + 1], NULL, 10);
                known = true;
            }
        }
        if (strcmp(argv[i], "--save") == 0) {
            ret->save = argv[i + 1];
            known = true;
        }
        if (!known) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.count = 300, .seed = 1, .probes = 8};

    if (argc == 3 && strcmp(argv[1], "--host") == 0) {
        return host_main(strcmp(argv[2], "probe") == 0);
    }
    if (!read_arguments(argc, argv, &arguments)) {
        (void)fprintf(stderr, "usage: blob_storm [--count N] [--first I] "
                              "[--seed S] [--probes N] [--save FILE]\n");
        return 2;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    run(&arguments);
    return print_all() ? EXIT_SUCCESS : EXIT_FAILURE;
}
