/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvt's structure check says to many blobs, without any NIXL: on standard
 * input u32 length and bytes, again and again; on standard output one byte
 * each, '1' taken, '0' refused. A refusal has to be KVT_EMETADATA with a
 * sentence, or this ends with an error.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "metadata.h"

#define REGIONS_MAX 65536

int main(void)
{
    uint32_t length;

    while (fread(&length, sizeof(length), 1, stdin) == 1) {
        /* As long as it is, for the address sanitizer. */
        unsigned char *blob = malloc(length == 0 ? 1 : length);
        struct kvti_md md = {0};
        struct kvt_error err = {.code = KVT_OK};
        int code;

        if (blob == NULL || fread(blob, 1, length, stdin) != length) {
            return EXIT_FAILURE;
        }
        code = kvti_md_decode(blob, length, REGIONS_MAX, &md, &err);
        if (code != KVT_OK &&
            (code != KVT_EMETADATA || err.code != code || err.text[0] == 0)) {
            (void)fprintf(stderr, "blob_filter: code %d: %s\n", code, err.text);
            return EXIT_FAILURE;
        }
        (void)putchar(code == KVT_OK ? '1' : '0');
        kvti_md_fini(&md);
        free(blob);
    }
    return EXIT_SUCCESS;
}
