/*
 * The public header compiles as C99 and as C++11, alone, twice, and without a
 * warning. Compiled only, by the tests abi.header_c99 and abi.header_cxx.
 */
#include <kvt/kvt.h>

/* Once more: the guard holds. */
#include <kvt/kvt.h>

int main(void)
{
    return kvt_version() == NULL;
}
