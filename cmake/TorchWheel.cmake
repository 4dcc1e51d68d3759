# Imported targets for the libraries inside a torch wheel (or an unpacked libtorch).
#
#   TorchWheel::torch         headers and libtorch, libtorch_cpu, libc10
#   TorchWheel::torch_python  headers and libtorch_python, for extension modules
#
# find_package(Torch) is not used on purpose: it imports torch to be found, pulls in kineto, CUDA
# and MKL lookups, and sets global flags. The wheel has everything at fixed places.
#
# Where torch is looked for, in this order:
#   1. TORCH_ROOT (cache variable or environment): the folder with include/ and lib/;
#   2. the interpreter Python_EXECUTABLE, asked through importlib without importing torch;
#   3. TORCH_WHEEL_HINTS: folders given by a package config (an installed wheel lies beside torch).
#
# Results: TORCH_WHEEL_ROOT, TORCH_WHEEL_VERSION (x.y.z), TORCH_WHEEL_LIB.

include_guard(GLOBAL)

set(INFINITYBATCH_TORCH_OLDEST "2.11")
set(INFINITYBATCH_TORCH_NEWEST "2.13")
set(TORCH_ROOT "" CACHE PATH "Folder of a torch wheel or libtorch (the one with include/ and lib/)")
option(INFINITYBATCH_ALLOW_UNTESTED_TORCH
       "Build against a torch version outside ${INFINITYBATCH_TORCH_OLDEST} to ${INFINITYBATCH_TORCH_NEWEST}" OFF)

# Sets `result` to the folder of the torch package that `python` would import, or to "".
function(_torch_wheel_ask_python python result)
  execute_process(
    COMMAND "${python}" -c "import importlib.util, os
spec = importlib.util.find_spec('torch')
print(os.path.dirname(spec.origin) if spec and spec.origin else '', end='')"
    OUTPUT_VARIABLE folder
    ERROR_QUIET
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(folder "")
  endif()
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# Sets `result` to "major.minor.patch" as the headers under `root` state it, or to "".
function(_torch_wheel_version root result)
  set(${result} "" PARENT_SCOPE)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT EXISTS "${root}/include/${header}")
      continue()
    endif()
    file(READ "${root}/include/${header}" text)
    set(parts "")
    foreach(part IN ITEMS MAJOR MINOR PATCH)
      if(text MATCHES "#define[ \t]+TORCH_VERSION_${part}[ \t]+([0-9]+)")
        list(APPEND parts "${CMAKE_MATCH_1}")
      endif()
    endforeach()
    list(LENGTH parts count)
    if(count EQUAL 3)
      list(JOIN parts "." version)
      set(${result} "${version}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(_torch_candidates "")
set(_torch_asked "")
if(TORCH_ROOT)
  list(APPEND _torch_candidates "${TORCH_ROOT}")
elseif(DEFINED ENV{TORCH_ROOT} AND NOT "$ENV{TORCH_ROOT}" STREQUAL "")
  list(APPEND _torch_candidates "$ENV{TORCH_ROOT}")
else()
  if(NOT Python_EXECUTABLE AND NOT TORCH_WHEEL_HINTS)
    find_package(Python 3.11 QUIET COMPONENTS Interpreter)
  endif()
  if(Python_EXECUTABLE)
    set(_torch_asked " ${Python_EXECUTABLE} has no torch.")
    _torch_wheel_ask_python("${Python_EXECUTABLE}" _torch_found)
    if(_torch_found)
      list(APPEND _torch_candidates "${_torch_found}")
    endif()
  endif()
  list(APPEND _torch_candidates ${TORCH_WHEEL_HINTS})
endif()

set(TORCH_WHEEL_ROOT "")
foreach(_torch_candidate IN LISTS _torch_candidates)
  if(EXISTS "${_torch_candidate}/include/ATen/core/TensorBody.h")
    file(REAL_PATH "${_torch_candidate}" TORCH_WHEEL_ROOT)
    break()
  endif()
endforeach()

if(NOT TORCH_WHEEL_ROOT)
  message(
    FATAL_ERROR
      "infinitybatch: no torch with C++ headers found.${_torch_asked} Looked in: "
      "[${_torch_candidates}].\nInstall one ('pip install torch==2.13.0', or 'make setup' in a "
      "checkout) and name its interpreter with -DPython_EXECUTABLE=/path/to/python, or name its "
      "folder with -DTORCH_ROOT=/path/to/site-packages/torch.")
endif()

_torch_wheel_version("${TORCH_WHEEL_ROOT}" TORCH_WHEEL_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCH_WHEEL_MINOR "${TORCH_WHEEL_VERSION}")
if(NOT TORCH_WHEEL_VERSION
   OR TORCH_WHEEL_MINOR VERSION_LESS INFINITYBATCH_TORCH_OLDEST
   OR TORCH_WHEEL_MINOR VERSION_GREATER INFINITYBATCH_TORCH_NEWEST)
  set(_torch_message
      "infinitybatch: torch '${TORCH_WHEEL_VERSION}' in ${TORCH_WHEEL_ROOT} is not one of the "
      "versions that this code was checked on (${INFINITYBATCH_TORCH_OLDEST} to "
      "${INFINITYBATCH_TORCH_NEWEST}).")
  string(CONCAT _torch_message ${_torch_message})
  if(INFINITYBATCH_ALLOW_UNTESTED_TORCH)
    message(WARNING "${_torch_message} Going on because INFINITYBATCH_ALLOW_UNTESTED_TORCH is ON.")
  else()
    message(
      FATAL_ERROR
        "${_torch_message}\nInstall one of them ('pip install torch==2.13.0'), or try this one with "
        "-DINFINITYBATCH_ALLOW_UNTESTED_TORCH=ON and run the tests.")
  endif()
endif()

set(TORCH_WHEEL_LIB "${TORCH_WHEEL_ROOT}/lib")
foreach(_torch_library IN ITEMS torch torch_cpu c10)
  if(NOT EXISTS "${TORCH_WHEEL_LIB}/lib${_torch_library}.so")
    message(FATAL_ERROR "infinitybatch: ${TORCH_WHEEL_LIB}/lib${_torch_library}.so is missing. "
                        "Is the torch in ${TORCH_WHEEL_ROOT} complete?")
  endif()
endforeach()
message(STATUS "infinitybatch: torch ${TORCH_WHEEL_VERSION} in ${TORCH_WHEEL_ROOT}")

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(TorchWheel::torch INTERFACE IMPORTED GLOBAL)
set_target_properties(
  TorchWheel::torch
  PROPERTIES
    # "System": torch's own warnings are not ours to show.
    INTERFACE_INCLUDE_DIRECTORIES
    "${TORCH_WHEEL_ROOT}/include;${TORCH_WHEEL_ROOT}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
    "${TORCH_WHEEL_ROOT}/include;${TORCH_WHEEL_ROOT}/include/torch/csrc/api/include"
    # Some of torch's structures have other members without it: it is part of the binary interface.
    INTERFACE_COMPILE_DEFINITIONS "NDEBUG")
# libtorch.so itself defines nothing: it exists to load the device libraries, so the linker must be
# told to keep it. The other libraries of the wheel are found through their own run paths.
target_link_libraries(
  TorchWheel::torch
  INTERFACE "-Wl,--push-state,--no-as-needed,${TORCH_WHEEL_LIB}/libtorch.so,--pop-state"
            "${TORCH_WHEEL_LIB}/libtorch_cpu.so" "${TORCH_WHEEL_LIB}/libc10.so" Threads::Threads)
# An accelerator build of torch refers to driver libraries that need not be on the build machine.
target_link_options(TorchWheel::torch INTERFACE "-Wl,--allow-shlib-undefined")

if(EXISTS "${TORCH_WHEEL_LIB}/libtorch_python.so")
  add_library(TorchWheel::torch_python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(TorchWheel::torch_python INTERFACE "${TORCH_WHEEL_LIB}/libtorch_python.so"
                                                           TorchWheel::torch)
endif()
