# The extension module _C and, beside it, the package's Python files as symbolic links, so that
# PYTHONPATH=<build>/python imports what is in the working tree.

set(INFINITYBATCH_PYTHON_DIR "${PROJECT_BINARY_DIR}/python/infinitybatch")

file(GLOB_RECURSE package_files CONFIGURE_DEPENDS
     RELATIVE "${PROJECT_SOURCE_DIR}/python"
     "${PROJECT_SOURCE_DIR}/python/infinitybatch/*.py" "${PROJECT_SOURCE_DIR}/python/infinitybatch/*.pyi"
     "${PROJECT_SOURCE_DIR}/python/infinitybatch/py.typed")
# Links that are right stay as they are: somebody may be importing. Links to files that are gone
# would still be importable as names.
file(GLOB_RECURSE links LIST_DIRECTORIES false
     RELATIVE "${PROJECT_BINARY_DIR}/python"
     "${INFINITYBATCH_PYTHON_DIR}/*.py" "${INFINITYBATCH_PYTHON_DIR}/*.pyi")
foreach(link IN LISTS links)
  if(NOT link IN_LIST package_files AND NOT link STREQUAL "infinitybatch/_build.py")
    file(REMOVE "${PROJECT_BINARY_DIR}/python/${link}")
  endif()
endforeach()
foreach(file IN LISTS package_files)
  set(link "${PROJECT_BINARY_DIR}/python/${file}")
  set(leads_to "")
  if(IS_SYMLINK "${link}")
    file(READ_SYMLINK "${link}" leads_to)
  endif()
  if(NOT leads_to STREQUAL "${PROJECT_SOURCE_DIR}/python/${file}")
    get_filename_component(folder "${link}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    file(CREATE_LINK "${PROJECT_SOURCE_DIR}/python/${file}" "${link}" SYMBOLIC)
  endif()
endforeach()

# What infinitybatch._torch_check compares the installed torch with.
file(GENERATE OUTPUT "${INFINITYBATCH_PYTHON_DIR}/_build.py" CONTENT
"# Written by CMake.
VERSION = \"${PROJECT_VERSION}\"
TORCH_VERSION = \"${TORCH_WHEEL_VERSION}\"
")

file(GLOB bind_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/src/*.cpp")
if(bind_sources)
  if(NOT TARGET TorchWheel::torch_python)
    message(FATAL_ERROR "infinitybatch: ${TORCH_WHEEL_LIB} has no libtorch_python.so. Use a torch "
                        "wheel, or switch the bindings off with -DINFINITYBATCH_BUILD_PYTHON=OFF.")
  endif()
  # The module is called _C in every build and ABI tag aside: torch ties it to one Python anyway.
  Python_add_library(_C MODULE WITH_SOABI ${bind_sources})
  infinitybatch_target(_C)
  target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
  target_link_libraries(_C PRIVATE infinitybatch_data infinitybatch TorchWheel::torch_python)
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${INFINITYBATCH_PYTHON_DIR}"
                                      BUILD_RPATH "${TORCH_WHEEL_LIB}")
endif()
