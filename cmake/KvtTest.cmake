# One-line tests. Names are <tier>.<subject>, the label is the tier, every test
# has a time limit, and exit code 77 with a reason on the output is a skip.

set(KVT_TEST_TIMEOUT 60)
set(KVT_TEST_ENVIRONMENT
    "KVT_TEST_SOURCE_DIR=${PROJECT_SOURCE_DIR}"
    "KVT_TEST_BUILD_DIR=${PROJECT_BINARY_DIR}"
    "KVT_TEST_LIBRARY=$<TARGET_FILE:kvt>"
    "KVT_TEST_CC=${CMAKE_C_COMPILER}")
if(KVT_TOOLS)
    list(APPEND KVT_TEST_ENVIRONMENT
        "KVT_TEST_COMMAND=$<TARGET_FILE:kvt_command>")
endif()

# Appends VARIABLE=options to the environment of every test, with the
# suppression file tests/<supp> where there is one.
file(GLOB KVT_SUPPRESSIONS CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/tests/*.supp")
function(kvt_sanitizer_options variable supp options)
    set(file "${PROJECT_SOURCE_DIR}/tests/${supp}")
    if(file IN_LIST KVT_SUPPRESSIONS)
        list(APPEND options "suppressions=${file}")
    endif()
    list(JOIN options ":" options)
    list(APPEND KVT_TEST_ENVIRONMENT "${variable}=${options}")
    set(KVT_TEST_ENVIRONMENT "${KVT_TEST_ENVIRONMENT}" PARENT_SCOPE)
endfunction()

# cmocka takes fatal signals over and would turn a sanitizer's report into one
# line without a stack; "2" keeps them with the sanitizer.
set(signals handle_segv=2 handle_sigbus=2 handle_sigfpe=2 handle_sigill=2)
if(KVT_SANITIZE MATCHES "address")
    kvt_sanitizer_options(ASAN_OPTIONS asan.supp "detect_leaks=1;\
strict_string_checks=1;detect_stack_use_after_return=1;${signals}")
    kvt_sanitizer_options(LSAN_OPTIONS lsan.supp "print_suppressions=0")
endif()
if(KVT_SANITIZE MATCHES "undefined")
    kvt_sanitizer_options(UBSAN_OPTIONS ubsan.supp "print_stacktrace=1")
endif()
if(KVT_SANITIZE MATCHES "thread")
    # TSan takes the thread's data of a loaded library (NIXL's, UCX's) for one of
    # an old glibc when it lies 16 bytes behind a page's start, reads its size
    # from what stands before it and dies over the terabytes it finds there.
    kvt_sanitizer_options(TSAN_OPTIONS tsan.supp "halt_on_error=1;\
second_deadlock_stack=1;intercept_tls_get_addr=0;${signals}")
endif()
# Instrumented code runs several times slower; valgrind runs one thread at a time.
if(KVT_VALGRIND)
    set(KVT_TEST_TIMEOUT_SCALE 10)
elseif(KVT_SANITIZE)
    set(KVT_TEST_TIMEOUT_SCALE 5)
else()
    set(KVT_TEST_TIMEOUT_SCALE 1)
endif()

# Every process that a test starts is watched, and has a log of its own, which is
# empty where nothing was found. As for the address sanitizer a pointer into a block
# counts, and only what nothing points to is a leak. Without vgdb=no a process that
# becomes another user's complains of files that it cannot remove.
if(KVT_VALGRIND)
    find_program(VALGRIND valgrind REQUIRED)
    list(APPEND KVT_TEST_ENVIRONMENT
        "LD_PRELOAD=$<TARGET_FILE:valgrind_preload>" "KVT_TEST_WAIT_S=300")
    set(KVT_VALGRIND_COMMAND "${VALGRIND}" -q --trace-children=yes
        --vgdb=no --fair-sched=yes --num-callers=30 --error-exitcode=99
        --leak-check=full --show-leak-kinds=definite
        --errors-for-leak-kinds=definite --track-fds=bad
        "--suppressions=${PROJECT_SOURCE_DIR}/tests/valgrind.supp")
endif()

# kvt_register_test(<name> TIER <tier> COMMAND <command...>
#     [TIMEOUT <seconds>] [LABELS <more labels>] [ENV <NAME=value...>] [SERIAL]
#     [NIXL <15|13>])
# SERIAL: nothing else runs at the same time. NIXL: with the real NIXL of that
# version, which tests/support/with_nixl.sh finds when the test runs.
function(kvt_register_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg
        "SERIAL" "TIER;TIMEOUT;NIXL" "COMMAND;LABELS;ENV")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT ${KVT_TEST_TIMEOUT})
    endif()
    math(EXPR timeout "${arg_TIMEOUT} * ${KVT_TEST_TIMEOUT_SCALE}")
    set(environment ${KVT_TEST_ENVIRONMENT} ${arg_ENV})
    set(labels ${arg_TIER} ${arg_LABELS})
    # A wrapper's argument is no target that add_test() would resolve.
    list(POP_FRONT arg_COMMAND program)
    if(TARGET ${program})
        list(PREPEND arg_COMMAND "$<TARGET_FILE:${program}>")
        if(KVT_VALGRIND)
            list(PREPEND arg_COMMAND ${KVT_VALGRIND_COMMAND}
                "--log-file=${PROJECT_BINARY_DIR}/logs/${name}.%p")
        endif()
    else()
        list(PREPEND arg_COMMAND "${program}")
    endif()
    if(arg_NIXL)
        list(PREPEND arg_COMMAND
            bash "${PROJECT_SOURCE_DIR}/tests/support/with_nixl.sh" ${arg_NIXL})
        list(APPEND labels nixl)
        if(KVT_SANITIZE MATCHES "thread")
            # UCX's hook of madvise() is called by a thread at its very end, when
            # the sanitizer has taken leave of it.
            list(APPEND environment "UCX_MEM_MMAP_HOOK_MODE=none")
        endif()
    endif()
    add_test(NAME ${name} COMMAND ${arg_COMMAND})
    set_tests_properties(${name} PROPERTIES
        ENVIRONMENT "${environment}"
        LABELS "${labels}"
        RUN_SERIAL "${arg_SERIAL}"
        SKIP_RETURN_CODE 77
        TIMEOUT ${timeout})
endfunction()

# kvt_test(unit layout) builds tests/unit/test_layout.c and registers it as
# unit.layout. Options, besides those of kvt_register_test:
#   SHARED            link libkvt.so and see the public header only
#   SOURCES <files>   further sources, relative to tests/<tier>/
#   LIBS <targets>    further libraries
#   WRAP <symbols>    calls go to __wrap_<symbol>, cmocka's way to fail them
#   ARGS <arguments>  for the program
function(kvt_test tier name)
    cmake_parse_arguments(PARSE_ARGV 2 arg
        "SHARED;SERIAL" "TIMEOUT;NIXL" "SOURCES;LIBS;WRAP;ARGS;LABELS;ENV")
    set(target test_${tier}_${name})
    list(TRANSFORM arg_SOURCES PREPEND "${tier}/")
    add_executable(${target} ${tier}/test_${name}.c ${arg_SOURCES})
    if(arg_SHARED)
        set(library kvt)
    else()
        set(library kvt_testing)
    endif()
    target_link_libraries(${target}
        PRIVATE kvt_test_support ${arg_LIBS} ${library})
    foreach(symbol IN LISTS arg_WRAP)
        target_link_options(${target} PRIVATE "-Wl,--wrap=${symbol}")
    endforeach()
    set(options TIMEOUT "${arg_TIMEOUT}" LABELS ${arg_LABELS} ENV ${arg_ENV})
    if(arg_SERIAL)
        list(APPEND options SERIAL)
    endif()
    if(arg_NIXL)
        list(APPEND options NIXL ${arg_NIXL})
    endif()
    kvt_register_test(${tier}.${name}
        TIER ${tier} COMMAND ${target} ${arg_ARGS} ${options})
endfunction()

# kvt_script_test(cli info [options of kvt_register_test]) registers
# tests/cli/info.sh as cli.info; it finds what was built in the KVT_TEST_…
# variables of its environment.
function(kvt_script_test tier name)
    kvt_register_test(${tier}.${name} TIER ${tier}
        COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/${tier}/${name}.sh" ${ARGN})
endfunction()

# kvt_conformance(fault "fault:local" [options of kvt_register_test]) runs the
# suite of tests/conformance/*.c, built once against the shared library, as
# conformance.fault with that engine's specification as its argument.
function(kvt_conformance name engine)
    if(NOT TARGET conformance_suite)
        file(GLOB sources CONFIGURE_DEPENDS conformance/*.c)
        add_executable(conformance_suite ${sources})
        target_link_libraries(conformance_suite PRIVATE kvt_test_support kvt)
    endif()
    kvt_register_test(conformance.${name} TIER conformance
        COMMAND conformance_suite "${engine}" ${ARGN})
endfunction()
