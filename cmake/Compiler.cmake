# How our own targets are compiled: warnings, sanitizers, compiler cache, the precompiled header.

# A build tree that was configured before this option was there stays file by file.
set(_unity ON)
if(DEFINED CACHE{INFINITYBATCH_SANITIZE} AND NOT DEFINED CACHE{INFINITYBATCH_UNITY}
   AND EXISTS "${CMAKE_BINARY_DIR}/build.ninja")
  set(_unity OFF)
endif()
option(INFINITYBATCH_UNITY
       "Compile each folder's sources as one: a quick full build; OFF for quick small changes" ${_unity})
option(INFINITYBATCH_SANITIZE "Compile with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(INFINITYBATCH_SANITIZE_THREADS "Compile with ThreadSanitizer" OFF)
option(INFINITYBATCH_WERROR "Treat warnings in our own code as errors" OFF)
option(INFINITYBATCH_CCACHE "Use ccache where it is installed" ON)

if(INFINITYBATCH_CCACHE AND PROJECT_IS_TOP_LEVEL)
  find_program(INFINITYBATCH_CCACHE_PROGRAM ccache)
  if(INFINITYBATCH_CCACHE_PROGRAM)
    # What ccache needs to see through a precompiled header (its manual, "Precompiled headers").
    set(CMAKE_CXX_COMPILER_LAUNCHER
        ${CMAKE_COMMAND} -E env
        CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
        ${INFINITYBATCH_CCACHE_PROGRAM})
  endif()
endif()

# One set of flags for every target: a precompiled header is shared only where they agree. -fPIC
# everywhere instead of CMake's -fPIC here and -fPIE there, for the same reason.
add_library(infinitybatch_compile INTERFACE)
target_compile_features(infinitybatch_compile INTERFACE cxx_std_20)
# Headers that no user includes lie beside their sources: #include "execute/executor.hpp".
target_include_directories(infinitybatch_compile INTERFACE "${PROJECT_SOURCE_DIR}/src")
target_compile_options(infinitybatch_compile INTERFACE -fPIC -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The two switched off give false alarms on std::string and std::vector with g++ 12 at -O2.
  target_compile_options(infinitybatch_compile INTERFACE -Wno-restrict -Wno-stringop-overflow
                                                         -Werror=invalid-pch -fpch-preprocess)
endif()
if(INFINITYBATCH_WERROR)
  target_compile_options(infinitybatch_compile INTERFACE -Werror)
endif()
if(INFINITYBATCH_SANITIZE)
  # No vptr check: it needs type information that torch's libraries do not export.
  set(_sanitizers -fsanitize=address,undefined -fno-sanitize=vptr)
  target_compile_options(infinitybatch_compile INTERFACE ${_sanitizers} -fno-omit-frame-pointer -g1
                                                         -fno-sanitize-recover=undefined)
  target_link_options(infinitybatch_compile INTERFACE ${_sanitizers})
endif()
if(INFINITYBATCH_SANITIZE_THREADS)
  target_compile_options(infinitybatch_compile INTERFACE -fsanitize=thread -fno-omit-frame-pointer
                                                         -g1 -O1)
  target_link_options(infinitybatch_compile INTERFACE -fsanitize=thread)
endif()

# infinitybatch_unity(<target>): with INFINITYBATCH_UNITY each folder of the target's sources is one
# compilation. Torch's headers and the templates they instantiate are most of what a file costs, so
# that a folder costs little more than one file. Folders, not CMake's batches: what must be told
# apart by name is then the same whichever files are added.
function(infinitybatch_unity target)
  if(NOT INFINITYBATCH_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    if(source MATCHES "\\.cpp$")
      get_filename_component(folder "${source}" DIRECTORY)
      get_filename_component(folder "${folder}" NAME)
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${folder}")
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

# infinitybatch_target(<target>): our flags, and the library's precompiled header unless the target
# is the library itself, which makes it.
function(infinitybatch_target target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:infinitybatch_compile>)
  set_target_properties(
    ${target}
    PROPERTIES POSITION_INDEPENDENT_CODE OFF # -fPIC comes with the flags above
               CXX_EXTENSIONS OFF
               DEFINE_SYMBOL "")
  infinitybatch_unity(${target})
  if(target STREQUAL "infinitybatch")
    # Narrow on purpose: 27 s once, then 1.5 s a file. torch/torch.h would cost more than it saves.
    target_precompile_headers(
      ${target}
      PRIVATE
      <ATen/core/TensorBody.h>
      <ATen/ATen.h>
      <torch/csrc/autograd/engine.h>
      <torch/csrc/autograd/function.h>
      <torch/csrc/autograd/variable.h>)
  else()
    target_precompile_headers(${target} REUSE_FROM infinitybatch)
  endif()
endfunction()
