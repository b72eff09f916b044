"""What the compiled module offers; declared in the headers of ``cffi_build/``."""

from collections.abc import Sequence
from typing import Any

class _Buffer:
    def __len__(self) -> int: ...

class _FFI:
    NULL: _Buffer
    def from_buffer(self, buffer: object, require_writable: bool = False) -> _Buffer: ...
    def new(self, cdecl: str, init: object = None) -> Any: ...
    def cast(self, cdecl: str, value: object) -> Any: ...

class _Library:
    P2PDPT_KERNELS_ABI: int
    P2PDPT_PLAIN: int
    P2PDPT_AVX2: int
    def p2pdpt_best_path(self) -> int: ...
    def p2pdpt_fold(
        self,
        path: int,
        dtype: int,
        combine: int,
        out: _Buffer,
        out_wide: bool,
        sources: Sequence[_Buffer],
        wide: bytes | _Buffer,
        scales: Sequence[float] | _Buffer,
        count: int,
        length: int,
        divide: bool,
        divisor: float,
        /,
    ) -> None: ...
    def p2pdpt_copy(self, path: int, out: _Buffer, source: _Buffer, nbytes: int, /) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

ffi: _FFI
lib: _Library
