# SPDX-License-Identifier: Apache-2.0
# Target dist: a folder that runs on another Linux machine with a GPU: programs, recipes, test data, and the
# shared libraries that such a machine may lack (all but the C library's own, the driver's and cuBLAS). And the
# same packed, dist.tar.gz.
add_executable(bench_cuda_kernels bench/cuda_kernels.c $<TARGET_OBJECTS:bs_objects>)
target_link_libraries(bench_cuda_kernels PRIVATE bs_flags ${BS_LINK})
set_target_properties(bench_cuda_kernels PROPERTIES LINKER_LANGUAGE C)

set(dist_programs bench_cuda_kernels)
foreach(name bslua test_cuda_kernels test_dev_contract test_dev_check)
  if(TARGET ${name})
    list(APPEND dist_programs ${name})
  endif()
endforeach()
foreach(name IN LISTS dist_programs)
  # DT_RPATH and not DT_RUNPATH: it also serves the libraries that our libraries need.
  target_link_options(${name} PRIVATE -Wl,--disable-new-dtags)
  set_target_properties(${name} PROPERTIES BUILD_RPATH "$ORIGIN/lib")
  list(APPEND dist_files $<TARGET_FILE:${name}>)
endforeach()
add_custom_target(dist
  COMMAND ${CMAKE_COMMAND} "-DFILES=${dist_files}" -DROOT=${CMAKE_SOURCE_DIR} -DOUT=${CMAKE_BINARY_DIR}/dist
          -P ${CMAKE_SOURCE_DIR}/cmake/make_dist.cmake
  DEPENDS ${dist_programs} VERBATIM)
