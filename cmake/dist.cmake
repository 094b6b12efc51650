# SPDX-License-Identifier: Apache-2.0
# Target dist: a folder that runs on another Linux machine with a GPU: bslua, the Lua tree to read (the program
# has it inside), recipes, bench, and the shared libraries that such a machine may lack (all but the C library's
# own, the driver's, cuBLAS, and OpenBLAS, which the program uses where it is installed). And the same packed,
# dist.tar.gz. Target dist_tests: the same in dist_tests, with the tests that need a GPU and their data.
add_executable(bench_cuda_kernels bench/cuda_kernels.c $<TARGET_OBJECTS:bs_objects>)
target_link_libraries(bench_cuda_kernels PRIVATE bs_flags ${BS_LINK})
set_target_properties(bench_cuda_kernels PROPERTIES LINKER_LANGUAGE C)

# dist_folder(name parts PART.. programs PROGRAM..): parts are files and folders of the source tree.
function(dist_folder name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "parts;programs")
  set(files)
  foreach(program IN LISTS arg_programs)
    # DT_RPATH and not DT_RUNPATH: it also serves the libraries that our libraries need.
    target_link_options(${program} PRIVATE -Wl,--disable-new-dtags)
    set_target_properties(${program} PROPERTIES BUILD_RPATH "$ORIGIN/lib")
    list(APPEND files $<TARGET_FILE:${program}>)
  endforeach()
  add_custom_target(${name}
    COMMAND ${CMAKE_COMMAND} "-DFILES=${files}" "-DPARTS=${arg_parts}" -DROOT=${CMAKE_SOURCE_DIR}
            -DOUT=${CMAKE_BINARY_DIR}/${name} -P ${CMAKE_SOURCE_DIR}/cmake/make_dist.cmake
    DEPENDS ${arg_programs} VERBATIM)
endfunction()

dist_folder(dist parts LICENSE README.md ARCHITECTURE.md lua recipes bench programs bslua)
if(TARGET test_cuda_kernels)
  file(GLOB gpu_tests CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} tests/gpu_*.sh tests/support/*.lua
    tests/lua/invariants_spec.lua tests/lua/jitter_spec.lua tests/lua/device_faults_spec.lua
    tests/lua/bad_run_spec.lua)
  dist_folder(dist_tests parts LICENSE lua recipes bench tests/data tests/run_gpu.sh ${gpu_tests}
    programs bslua bench_cuda_kernels test_cuda_kernels test_dev_contract test_dev_check)
endif()
