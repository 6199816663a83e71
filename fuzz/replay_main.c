/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target once over each file of the folders and files named on the
 * command line, without libFuzzer: the corpus as a plain test.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* False, with a line on stderr, when the file cannot be read. */
static int replay_file(const char *path, size_t size)
{
    FILE *file = fopen(path, "rbe");
    /* Never 0 bytes, so that NULL means no memory. The exact size lets a
     * sanitizer see a read past the end. */
    uint8_t *data = malloc(size > 0 ? size : 1);
    int read_all = 0;

    if (file != NULL && data != NULL) {
        read_all = fread(data, 1, size, file) == size;
    }
    if (read_all) {
        (void)LLVMFuzzerTestOneInput(data, size);
    } else {
        (void)fprintf(stderr, "%s: cannot be read\n", path);
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    free(data);
    return read_all;
}

/* A corpus is flat: folders in it are not looked into. */
static int replay_folder(const char *path, size_t *count)
{
    struct dirent **names;
    int good = 1;
    int found = scandir(path, &names, NULL, alphasort);

    if (found < 0) {
        (void)fprintf(stderr, "%s: %m\n", path);
        return 0;
    }
    for (int i = 0; i < found; i++) {
        char inner[4096];
        struct stat st;
        int length = snprintf(inner, sizeof inner, "%s/%s", path,
                              names[i]->d_name);

        if (length > 0 && (size_t)length < sizeof inner &&
            stat(inner, &st) == 0 && S_ISREG(st.st_mode)) {
            (*count)++;
            good = replay_file(inner, (size_t)st.st_size) && good;
        }
        free(names[i]);
    }
    free(names);
    return good;
}

static int replay(const char *path, size_t *count)
{
    struct stat st;

    if (stat(path, &st) != 0) {
        (void)fprintf(stderr, "%s: %m\n", path);
        return 0;
    }
    if (S_ISDIR(st.st_mode)) {
        return replay_folder(path, count);
    }
    (*count)++;
    return replay_file(path, (size_t)st.st_size);
}

int main(int argc, char **argv)
{
    size_t count = 0;
    int good = 1;

    for (int i = 1; i < argc; i++) {
        good = replay(argv[i], &count) && good;
    }
    (void)printf("%zu inputs\n", count);
    /* A corpus that is not there must not look like one that passes. */
    return good && count > 0 ? 0 : 1;
}
