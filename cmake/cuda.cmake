# SPDX-License-Identifier: Apache-2.0
# The CUDA device: sets BS_HAVE_CUDA, BS_CUDA_TEXT (the compiled architectures), BS_CUDA_SOURCES and the
# library bs_cuda of the kernels. The runtime is linked statically, cuBLAS is loaded by the program.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(BS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BS_CUDA=ON: no CUDA compiler; install the CUDA toolkit or set CMAKE_CUDA_COMPILER")
  endif()
  return()
endif()

# Machine code for every architecture, and PTX of the last for those to come.
set(CMAKE_CUDA_ARCHITECTURES ${BS_CUDA_ARCHS})
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real")
list(GET BS_CUDA_ARCHS -1 last)
list(APPEND CMAKE_CUDA_ARCHITECTURES "${last}-virtual")
enable_language(CUDA)
find_package(CUDAToolkit 12.3 REQUIRED)
set(BS_HAVE_CUDA 1)
list(TRANSFORM BS_CUDA_ARCHS PREPEND "sm_" OUTPUT_VARIABLE names)
list(JOIN names " " BS_CUDA_TEXT)

file(GLOB BS_CUDA_SOURCES CONFIGURE_DEPENDS src/backend/cuda/*.c kernels/cuda/*.c)
file(GLOB cuda_kernels CONFIGURE_DEPENDS kernels/cuda/*.cu)
set(cuda_sm90 ${cuda_kernels})
list(FILTER cuda_sm90 INCLUDE REGEX "_sm90_")
list(FILTER cuda_kernels EXCLUDE REGEX "_sm90_")
set(cuda_targets bs_cuda)
add_library(bs_cuda STATIC ${cuda_kernels})
# What *_sm90_*.cu use is in no architecture but this one, not even in later ones.
if("90" IN_LIST BS_CUDA_ARCHS)
  add_library(bs_cuda_sm90 OBJECT ${cuda_sm90})
  set_target_properties(bs_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_sources(bs_cuda PRIVATE $<TARGET_OBJECTS:bs_cuda_sm90>)
  set_source_files_properties(kernels/cuda/table.c PROPERTIES COMPILE_DEFINITIONS BSK_CUDA_SM90)
  list(APPEND cuda_targets bs_cuda_sm90)
endif()
foreach(target IN LISTS cuda_targets)
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 17 CUDA_VISIBILITY_PRESET hidden
    CUDA_RUNTIME_LIBRARY Static)
  target_include_directories(${target} PRIVATE src kernels)
  target_compile_options(${target} PRIVATE
    -O3 "-Xcompiler=-Wall,-Wextra,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-fstack-protector-strong")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8) # a quarter of the size, for drivers of 12.4 and newer
    target_compile_options(${target} PRIVATE --compress-mode=size)
  endif()
endforeach()
target_include_directories(bs_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(bs_cuda INTERFACE CUDA::cudart_static ${CMAKE_DL_LIBS})
target_link_options(bs_cuda INTERFACE -Wl,--as-needed) # without the C++ library, which nothing here uses
