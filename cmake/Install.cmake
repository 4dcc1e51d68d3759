# Install rules. Both layouts are the same inside: lib, bin, include, share/cmake/infinitybatch.
#   prefix  cmake --install build/release --prefix DIR --component infinitybatch
#   wheel   the same below site-packages/infinitybatch, and the Python package around it; torch is
#           found beside that folder, so no path of the build machine ships.

include(CMakePackageConfigHelpers)

if(INFINITYBATCH_WHEEL_LAYOUT)
  set(torch_from_lib "$ORIGIN/../../torch/lib") # from infinitybatch/lib and infinitybatch/bin alike
  set(torch_from_package "$ORIGIN/../torch/lib")
  set(TORCH_WHEEL_BUILT_AGAINST "")
  set(component wheel)
else()
  set(torch_from_lib "${TORCH_WHEEL_LIB}")
  set(torch_from_package "${TORCH_WHEEL_LIB}")
  set(TORCH_WHEEL_BUILT_AGAINST "\"${TORCH_WHEEL_ROOT}\"")
  set(component infinitybatch)
endif()

set_target_properties(infinitybatch PROPERTIES INSTALL_RPATH "${torch_from_lib}")
install(
  TARGETS infinitybatch
  EXPORT infinitybatch-targets
  LIBRARY DESTINATION lib COMPONENT ${component} NAMELINK_COMPONENT ${component})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION include COMPONENT ${component})

if(TARGET infinitybatch_cli)
  set_target_properties(infinitybatch_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../lib;${torch_from_lib}")
  install(TARGETS infinitybatch_cli RUNTIME DESTINATION bin COMPONENT ${component})
  # What `--data digits` means, so that the first command of the README needs nothing else.
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/data/digits" DESTINATION data COMPONENT ${component})
endif()

configure_file("${PROJECT_SOURCE_DIR}/cmake/infinitybatch-config.cmake.in"
               "${PROJECT_BINARY_DIR}/infinitybatch-config.cmake" @ONLY)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/infinitybatch-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(EXPORT infinitybatch-targets NAMESPACE infinitybatch::
        DESTINATION share/cmake/infinitybatch COMPONENT ${component})
install(
  FILES "${PROJECT_BINARY_DIR}/infinitybatch-config.cmake"
        "${PROJECT_BINARY_DIR}/infinitybatch-config-version.cmake"
        "${PROJECT_SOURCE_DIR}/cmake/TorchWheel.cmake"
  DESTINATION share/cmake/infinitybatch
  COMPONENT ${component})

if(INFINITYBATCH_WHEEL_LAYOUT AND INFINITYBATCH_BUILD_PYTHON)
  if(TARGET _C)
    set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib;${torch_from_package}")
    install(TARGETS _C LIBRARY DESTINATION . COMPONENT wheel)
  endif()
  install(
    DIRECTORY "${PROJECT_SOURCE_DIR}/python/infinitybatch/"
    DESTINATION . COMPONENT wheel
    FILES_MATCHING
    PATTERN "*.py"
    PATTERN "*.pyi"
    PATTERN "py.typed"
    PATTERN "__pycache__" EXCLUDE)
  install(FILES "${INFINITYBATCH_PYTHON_DIR}/_build.py" DESTINATION . COMPONENT wheel)
  install(FILES "${PROJECT_SOURCE_DIR}/python/infinitybatch_cli.py"
                "${PROJECT_SOURCE_DIR}/python/infinitybatch_lightning.py"
          DESTINATION .. COMPONENT wheel)
endif()
