# Instrumented builds. The flags go to everything in the tree, since a process
# must not mix code that is instrumented with code that is not.
if(KVT_SANITIZE)
    add_compile_options(
        "-fsanitize=${KVT_SANITIZE}"
        -fno-sanitize-recover=all
        -fno-omit-frame-pointer)
    add_link_options("-fsanitize=${KVT_SANITIZE}")
endif()

if(KVT_VALGRIND)
    add_compile_definitions(KVT_VALGRIND)
endif()

if(KVT_COVERAGE)
    # Counters of threads that race would come out negative without atomics.
    add_compile_options(--coverage -fprofile-update=atomic)
    add_link_options(--coverage)
endif()

if(KVT_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "KVT_FUZZ needs clang: libFuzzer is part of it")
    endif()
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()
