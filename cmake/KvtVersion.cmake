# The public header is the single source of the version: the library, its
# soname, pkg-config and the CMake package all take it from there.
function(kvt_read_version header ret_version)
    file(STRINGS "${header}" lines
        REGEX "^#define[ \t]+KVT_VERSION_(MAJOR|MINOR|PATCH)[ \t]+[0-9]+")
    foreach(part MAJOR MINOR PATCH)
        if(NOT lines MATCHES "KVT_VERSION_${part}[ \t]+([0-9]+)")
            message(FATAL_ERROR "${header} does not define KVT_VERSION_${part}")
        endif()
        list(APPEND numbers "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN numbers "." version)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
    set(${ret_version} "${version}" PARENT_SCOPE)
endfunction()
