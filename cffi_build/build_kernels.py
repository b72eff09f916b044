"""The builder of ``p2pdpt._native``: the headers say what Python may call, the C files do it."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = [
    *(f"cffi_build/kernels/{name}.c" for name in ("kernels", "plain", "avx2")),
    *(f"cffi_build/executor/{name}.c" for name in ("executor", "mapping")),
]
HEADERS = [
    *(f"cffi_build/kernels/{name}.h" for name in ("kernels", "path", "loops")),
    *(f"cffi_build/executor/{name}.h" for name in ("executor", "mapping")),
]

ffibuilder = FFI()
# cffi takes comments and numeric constants, and no other preprocessor line.
for header in ("kernels/kernels.h", "executor/executor.h", "executor/mapping.h"):
    ffibuilder.cdef((HERE / header).read_text(encoding="utf-8"))
ffibuilder.set_source(
    "p2pdpt._native",
    '#include "kernels/kernels.h"\n#include <stdint.h>\n#include "executor/executor.h"\n'
    '#include "executor/mapping.h"',
    sources=SOURCES,
    depends=HEADERS,
    include_dirs=["cffi_build"],
    # Fused multiply-add, or a user's -ffast-math, would change the bits.
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-fast-math"],
    py_limited_api=True,
)
