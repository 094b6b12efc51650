# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts that run on a machine with a GPU: finds cuBLAS, which is the machine's.
if ! ldconfig -p 2>/dev/null | grep -q libcublas.so.13 && [ ! -e /usr/local/cuda/lib64/libcublas.so.13 ]; then
  for lib in /usr/local/cuda*/targets/*/lib /opt/*/lib/python*/site-packages/nvidia/cu13/lib \
             /opt/*/.venv/lib/python*/site-packages/nvidia/cu13/lib \
             /opt/*/.venv/lib/python*/site-packages/nvidia/cublas/lib; do
    [ -e "$lib/libcublas.so.13" ] && export LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" && break
  done
fi
