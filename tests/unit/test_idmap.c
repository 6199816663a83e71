/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Proves that an id finds its object and nothing else, also after the index it
 * came from has had other owners, and that names are found by side and text
 * through growth and removal. A shadow array is the oracle.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#include <kvt/kvt.h>

#include "idmap.h"

#define OBJECTS 2000

static void a_stale_id_never_finds_the_next_owner(void **state)
{
    struct kvti_idmap map = {0};
    uint64_t stale[OBJECTS];
    int objects[OBJECTS];

    (void)state;
    for (int round = 0; round < 5; round++) {
        uint64_t ids[OBJECTS];

        for (int i = 0; i < OBJECTS; i++) {
            ids[i] = kvti_idmap_add(&map, &objects[i]);
            assert_int_not_equal(ids[i], 0);
        }
        for (int i = 0; i < OBJECTS; i++) {
            assert_ptr_equal(kvti_idmap_get(&map, ids[i]), &objects[i]);
            if (round > 0) {
                assert_null(kvti_idmap_get(&map, stale[i]));
            }
        }
        for (int i = OBJECTS - 1; i >= 0; i -= 1) {
            kvti_idmap_remove(&map, ids[i]);
            assert_null(kvti_idmap_get(&map, ids[i]));
            stale[i] = ids[i];
        }
        assert_int_equal(map.count, 0);
        assert_int_equal(map.used, OBJECTS); /* indices are reused */
    }
    kvti_idmap_fini(&map);
}

static void ids_that_were_never_given_find_nothing(void **state)
{
    struct kvti_idmap map = {0};
    int object;
    uint64_t id = kvti_idmap_add(&map, &object);

    (void)state;
    assert_null(kvti_idmap_get(&map, 0));
    assert_null(kvti_idmap_get(&map, UINT64_MAX));
    assert_null(kvti_idmap_get(&map, id + 1));
    assert_null(kvti_idmap_get(&map, id + (UINT64_C(1) << KVTI_ID_INDEX_BITS)));
    kvti_idmap_fini(&map);
}

static void names_are_found_by_side_and_text(void **state)
{
    struct kvti_names names = {0};
    struct kvti_name *all = calloc(OBJECTS, sizeof *all);

    (void)state;
    for (int i = 0; i < OBJECTS; i++) {
        char text[32];

        snprintf(text, sizeof text, "layout %d", i / 2);
        assert_int_equal(kvti_name_init(&all[i], (uint64_t)i % 2, text),
                         KVT_OK);
        assert_int_equal(kvti_names_reserve(&names), KVT_OK);
        kvti_names_add(&names, &all[i]);
    }
    for (int i = 0; i < OBJECTS; i++) {
        assert_ptr_equal(kvti_names_find(&names, (uint64_t)i % 2, all[i].text),
                         &all[i]);
        assert_null(kvti_names_find(&names, 2, all[i].text));
    }
    for (int i = 0; i < OBJECTS; i += 2) {
        kvti_names_remove(&names, &all[i]);
        kvti_names_remove(&names, &all[i]); /* harmless the second time */
    }
    assert_int_equal(names.count, OBJECTS / 2);
    for (int i = 0; i < OBJECTS; i++) {
        struct kvti_name *found = kvti_names_find(&names, (uint64_t)i % 2,
                                                  all[i].text);

        assert_ptr_equal(found, i % 2 == 0 ? NULL : &all[i]);
    }
    kvti_names_fini(&names);
    for (int i = 0; i < OBJECTS; i++) {
        kvti_name_fini(&all[i]);
    }
    free(all);
}

/* However far the table has grown. */
static void of_equal_names_the_newest_is_found(void **state)
{
    enum { EQUAL = 3, OTHERS = 200 };
    struct kvti_name others[OTHERS];
    struct kvti_name equal[EQUAL];
    struct kvti_names names = {0};
    char text[] = "agent";

    (void)state;
    for (int i = 0; i < EQUAL; i++) {
        assert_int_equal(kvti_names_reserve(&names), KVT_OK);
        kvti_name_borrow(&equal[i], 0, text);
        kvti_names_add(&names, &equal[i]);
    }
    for (int i = 0; i < OTHERS; i++) {
        char other[32];

        (void)snprintf(other, sizeof other, "other %d", i);
        assert_int_equal(kvti_names_reserve(&names), KVT_OK);
        assert_int_equal(kvti_name_init(&others[i], 0, other), KVT_OK);
        kvti_names_add(&names, &others[i]);
        assert_ptr_equal(kvti_names_find(&names, 0, text), &equal[EQUAL - 1]);
    }
    for (int i = EQUAL - 1; i > 0; i--) {
        kvti_names_remove(&names, &equal[i]);
        assert_ptr_equal(kvti_names_find(&names, 0, text), &equal[i - 1]);
    }
    kvti_names_fini(&names);
    for (int i = 0; i < OTHERS; i++) {
        kvti_name_fini(&others[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stale_id_never_finds_the_next_owner),
        cmocka_unit_test(ids_that_were_never_given_find_nothing),
        cmocka_unit_test(names_are_found_by_side_and_text),
        cmocka_unit_test(of_equal_names_the_newest_is_found),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? 0 : 1;
}
