# Libraries that the command line and the Python package read data with. Each is optional: without it the program says which
# package is missing when such data are given. Both are linked statically or are headers, so that a
# wheel needs none of them where it is installed (zlib aside, which every Linux has).
#   minizip  .npz files; Debian: libminizip-dev
#   stb      folders of images; Debian: libstb-dev

option(INFINITYBATCH_WITH_MINIZIP "Read .npz files, where minizip is installed" ON)
option(INFINITYBATCH_WITH_STB "Read images, where stb is installed" ON)

# infinitybatch_data_format(<source> <definition> <what> <package> <found>)
function(infinitybatch_data_format source definition what package found)
  # A file with a definition of its own cannot share the precompiled header.
  set(path "${PROJECT_SOURCE_DIR}/apps/infinitybatch/data/${source}")
  set_source_files_properties("${path}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON
                                                   SKIP_UNITY_BUILD_INCLUSION ON)
  if(found)
    set_source_files_properties("${path}" PROPERTIES COMPILE_DEFINITIONS "${definition}")
  else()
    message(STATUS "infinitybatch: the command line will not read ${what} (no ${package})")
  endif()
endfunction()

find_path(INFINITYBATCH_MINIZIP_INCLUDE minizip/unzip.h)
find_library(INFINITYBATCH_MINIZIP_LIBRARY NAMES libminizip.a minizip)
find_package(ZLIB QUIET)
set(found OFF)
if(INFINITYBATCH_WITH_MINIZIP AND INFINITYBATCH_MINIZIP_INCLUDE AND INFINITYBATCH_MINIZIP_LIBRARY
   AND ZLIB_FOUND)
  set(found ON)
  target_include_directories(infinitybatch_data SYSTEM PRIVATE "${INFINITYBATCH_MINIZIP_INCLUDE}")
  target_link_libraries(infinitybatch_data PRIVATE "${INFINITYBATCH_MINIZIP_LIBRARY}" ZLIB::ZLIB)
endif()
infinitybatch_data_format(zip.cpp INFINITYBATCH_HAS_MINIZIP ".npz files" libminizip-dev "${found}")

find_path(INFINITYBATCH_STB_INCLUDE stb/stb_image.h)
set(found OFF)
if(INFINITYBATCH_WITH_STB AND INFINITYBATCH_STB_INCLUDE)
  set(found ON)
  target_include_directories(infinitybatch_data SYSTEM PRIVATE "${INFINITYBATCH_STB_INCLUDE}")
endif()
infinitybatch_data_format(pixels.cpp INFINITYBATCH_HAS_STB "folders of images" libstb-dev "${found}")
