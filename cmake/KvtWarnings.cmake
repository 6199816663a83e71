# Warnings for every C file of the project, tests included. The presets turn
# them into errors; a packager's build with another compiler must not fail
# because that compiler knows a new warning.
add_compile_options(
    -Wall
    -Wextra
    -Walloca
    -Wcast-align
    -Wcast-qual
    -Wconversion
    -Wdate-time
    -Wdouble-promotion
    -Wfloat-equal
    -Wformat=2
    -Wimplicit-fallthrough
    -Wmissing-declarations
    -Wmissing-prototypes
    -Wnested-externs
    -Wold-style-definition
    -Wpointer-arith
    -Wredundant-decls
    -Wshadow
    -Wsign-conversion
    -Wstrict-prototypes
    -Wundef
    -Wvla
    -Wwrite-strings)

if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    add_compile_options(
        -Wduplicated-branches
        -Wduplicated-cond
        -Wjump-misses-init
        -Wlogical-op
        -Wtrampolines)
elseif(CMAKE_C_COMPILER_ID MATCHES "Clang")
    add_compile_options(
        -Wassign-enum
        -Wcomma
        -Wconditional-uninitialized
        -Wextra-semi
        -Wmissing-variable-declarations
        -Wunreachable-code)
endif()
