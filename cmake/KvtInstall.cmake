include(CMakePackageConfigHelpers)

# Before 1.0 a minor release may break users, and the soname says so; the
# version check of find_package() follows the same rule.
if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(KVT_SOVERSION "0.${PROJECT_VERSION_MINOR}")
    set(KVT_COMPATIBILITY SameMinorVersion)
else()
    set(KVT_SOVERSION "${PROJECT_VERSION_MAJOR}")
    set(KVT_COMPATIBILITY SameMajorVersion)
endif()

# kvt.pc and the command find the library relative to their own place, so an
# installed tree can be moved, and DESTDIR and --prefix need no second build.
file(RELATIVE_PATH KVT_PC_TO_PREFIX
    "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" KVT_PC_TO_PREFIX "${KVT_PC_TO_PREFIX}")
file(RELATIVE_PATH KVT_BIN_TO_LIB
    "${CMAKE_INSTALL_FULL_BINDIR}" "${CMAKE_INSTALL_FULL_LIBDIR}")

# And the library finds the program that it starts.
file(RELATIVE_PATH KVT_LIB_TO_LIBEXEC
    "${CMAKE_INSTALL_FULL_LIBDIR}" "${CMAKE_INSTALL_FULL_LIBEXECDIR}")

function(kvt_install_package)
    set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvt")
    configure_package_config_file(
        cmake/kvtConfig.cmake.in "${PROJECT_BINARY_DIR}/kvtConfig.cmake"
        INSTALL_DESTINATION "${package_dir}")
    write_basic_package_version_file(
        "${PROJECT_BINARY_DIR}/kvtConfigVersion.cmake"
        COMPATIBILITY ${KVT_COMPATIBILITY})
    install(FILES
        "${PROJECT_BINARY_DIR}/kvtConfig.cmake"
        "${PROJECT_BINARY_DIR}/kvtConfigVersion.cmake"
        DESTINATION "${package_dir}")
    install(EXPORT kvt NAMESPACE kvt:: FILE kvtTargets.cmake
        DESTINATION "${package_dir}")

    configure_file(cmake/kvt.pc.in "${PROJECT_BINARY_DIR}/kvt.pc" @ONLY)
    install(FILES "${PROJECT_BINARY_DIR}/kvt.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endfunction()

function(kvt_install)
    install(TARGETS kvt EXPORT kvt
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(TARGETS kvt_probe
        DESTINATION "${CMAKE_INSTALL_LIBEXECDIR}/kvt")
    install(FILES include/kvt/kvt.h
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/kvt")
    if(KVT_TOOLS)
        install(TARGETS kvt_command DESTINATION "${CMAKE_INSTALL_BINDIR}")
    endif()
    kvt_install_package()

    file(GLOB pages CONFIGURE_DEPENDS man/*.[1-9])
    foreach(page IN LISTS pages)
        string(REGEX MATCH "[1-9]$" section "${page}")
        install(FILES "${page}"
            DESTINATION "${CMAKE_INSTALL_MANDIR}/man${section}")
    endforeach()
endfunction()
