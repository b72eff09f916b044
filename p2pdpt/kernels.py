"""Arithmetic on flat arrays: folds and copies, in C where it is compiled, else in numpy.

Both give the same bits (of a NaN, only that it is one). ``P2PDPT_NATIVE`` chooses: ``auto`` (C if
it imports, the default), ``require`` (an error without it), ``off`` (numpy). Every function here
may be called from any thread; the C ones release the global interpreter lock.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from p2pdpt.errors import ConfigError, UnavailableError
from p2pdpt.topology import Combine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from p2pdpt._native import _FFI, _Library
    from p2pdpt.dtypes import DType

    Array = npt.NDArray[Any]

__all__ = ["Kernels", "default", "load"]

logger = logging.getLogger(__name__)

Mode = Literal["auto", "require", "off"]
MODES: Final[tuple[Mode, ...]] = ("auto", "require", "off")
ABI: Final = 1
"""The declarations this module calls; see ``P2PDPT_KERNELS_ABI`` in ``kernels.h``."""
BLOCK: Final = 1 << 14
"""Elements that numpy works on at once, so that partial sums stay in the cache."""


class Kernels(Protocol):
    """Fold and copy flat arrays of one element type.

    Arrays are one-dimensional and contiguous, of equal length (0 allowed), in the type's storage;
    for half precision each may be in float32 instead (*wide*), and is told apart by its item size.

    Attributes:
        description: which implementation this is, for people.
    """

    description: str

    def fold(
        self,
        out: Array,
        sources: Sequence[Array],
        dtype: DType,
        combine: Combine,
        scales: Sequence[float] | None = None,
        divisor: float | None = None,
    ) -> None:
        """Join `sources` in their order into `out`, shape ``(length,)``.

        Each step is rounded on its own in the type's wide type: scale times source, then the sum
        (``ADD``), minimum, maximum or product so far with it, at last the division. The result is
        rounded to nearest even, once, if `out` is half precision. Integers wrap. ``MIN`` and
        ``MAX`` yield NaN if any source has one, and of two zeros the first listed.

        Args:
            out: where the result goes; may be one of `sources`, but not overlap one in part.
            sources: at least one; exactly one for ``COPY``.
            dtype: the element type.
            combine: how to join.
            scales: a factor for each source; a source with factor 0 is not read, and if all are
                0, so is the result. None multiplies nothing. Whole numbers for integers.
            divisor: divides the result; None divides nothing.

        Raises:
            ConfigError: integers with a divisor, or with a scale that is not a whole number.
            ValueError: the arrays, or their number, break the rules above; nothing was written.
        """

    def copy(self, out: Array, source: Array, dtype: DType) -> None:
        """Copy `source` to `out`, shape ``(length,)``, converting between half and wide.

        Raises:
            ValueError: the arrays differ in length, or are not contiguous.
        """


def _check(
    count: int,
    dtype: DType,
    combine: Combine,
    scales: Sequence[float] | None,
    divisor: float | None,
) -> None:
    if count != 1 and (count == 0 or combine == Combine.COPY):
        raise ValueError(f"a fold by {combine.name} cannot have {count} sources")
    if scales is not None:
        if len(scales) != count:
            raise ValueError(f"{len(scales)} scales were given for {count} sources")
        if not dtype.inexact:
            for scale in scales:
                # Beyond 2**53 neighbouring whole numbers are the same float.
                if not float(scale).is_integer() or abs(scale) > 2**53:
                    raise ConfigError(
                        f"{dtype.name} elements cannot be scaled by {scale}: weights of integer "
                        "elements must be whole numbers up to 2**53"
                    )
    if divisor is not None and not dtype.inexact:
        raise ConfigError(
            f"{dtype.name} elements have no mean: ask for their sum, or convert them to float32"
        )


def _unequal(out: Array, sources: Sequence[Array], dtype: DType) -> ValueError:
    listed = ", ".join(f"{source.shape} {source.dtype}" for source in sources)
    return ValueError(
        f"a fold of {dtype.name} needs flat arrays of one length in {dtype.storage}"
        f"{' or float32' if dtype.half else ''}, not {out.shape} {out.dtype} from {listed}"
    )


class _Native:
    """The compiled loops; `path` says which version of them."""

    def __init__(self, ffi: _FFI, lib: _Library, path: int, description: str) -> None:
        self._from_buffer, self._null = ffi.from_buffer, ffi.NULL
        self._fold, self._copy = lib.p2pdpt_fold, lib.p2pdpt_copy
        self._path = path
        self.description = description

    def fold(
        self,
        out: Array,
        sources: Sequence[Array],
        dtype: DType,
        combine: Combine,
        scales: Sequence[float] | None = None,
        divisor: float | None = None,
    ) -> None:
        count = len(sources)
        if count < 2 or scales is not None or divisor is not None or combine == Combine.COPY:
            _check(count, dtype, combine, scales, divisor)
        length = len(out)
        from_buffer = self._from_buffer
        # The addresses stay valid: the lists hold the buffers until the call has returned.
        target = from_buffer(out, require_writable=True)
        origins = [from_buffer(source) for source in sources]
        wide: bytes | Any = self._null
        out_wide = False
        nbytes = length * dtype.itemsize
        if dtype.half:
            out_wide = out.itemsize == 4
            wide = bytes([source.itemsize == 4 for source in sources])
            half, whole = nbytes, 2 * nbytes
            if len(target) != (whole if out_wide else half) or any(
                len(origin) != (whole if is_wide else half)
                for origin, is_wide in zip(origins, wide, strict=True)
            ):
                raise _unequal(out, sources, dtype)
        else:
            for buffer in (target, *origins):
                if len(buffer) != nbytes:
                    raise _unequal(out, sources, dtype)
        self._fold(
            self._path,
            dtype.code,
            combine,
            target,
            out_wide,
            origins,
            wide,
            self._null if scales is None else scales,
            count,
            length,
            divisor is not None,
            0.0 if divisor is None else divisor,
        )

    def copy(self, out: Array, source: Array, dtype: DType) -> None:
        if dtype.half and out.itemsize != source.itemsize:
            self.fold(out, (source,), dtype, Combine.COPY)
            return
        target, origin = self._from_buffer(out, require_writable=True), self._from_buffer(source)
        nbytes = len(target)
        if len(origin) != nbytes:
            raise _unequal(out, (source,), dtype)
        self._copy(self._path, target, origin, nbytes)


class _Numpy:
    """The same in numpy, by blocks."""

    def __init__(self, description: str) -> None:
        self.description = description

    def fold(
        self,
        out: Array,
        sources: Sequence[Array],
        dtype: DType,
        combine: Combine,
        scales: Sequence[float] | None = None,
        divisor: float | None = None,
    ) -> None:
        _check(len(sources), dtype, combine, scales, divisor)
        _check_arrays(out, sources, dtype)
        # C raises no warnings either: overflow is infinity, 0 / 0 is NaN.
        with np.errstate(all="ignore"):
            factors = [None] * len(sources) if scales is None else _factors(scales, dtype)
            terms = [
                _Term(source, factor, dtype)
                for source, factor in zip(sources, factors, strict=True)
                if factor is None or factor != 0
            ]
            if not terms:
                out.fill(0)
            elif len(terms) == 1 and terms[0].factor is None and divisor is None:
                _convert(out, terms[0].source, dtype)
            else:
                _fold_blocks(out, terms, dtype, combine, divisor)

    def copy(self, out: Array, source: Array, dtype: DType) -> None:
        _check_arrays(out, (source,), dtype)
        with np.errstate(all="ignore"):
            _convert(out, source, dtype)


class _Term:
    """One source of a fold, and what has to be done to its elements before they are joined."""

    __slots__ = ("address", "dtype", "factor", "prepared", "source")

    def __init__(self, source: Array, factor: Any, dtype: DType) -> None:
        self.source, self.dtype = source, dtype
        self.factor = None if factor == 1 else factor
        self.prepared = self.factor is not None or source.itemsize != dtype.wide_itemsize
        self.address = source.__array_interface__["data"][0]

    def values(self, part: slice, room: Array | None) -> Array:
        """Return a part in the wide type, scaled; in `room` if that takes memory."""
        values = self.source[part]
        if room is None or not self.prepared:
            return values
        if values.itemsize != room.itemsize:
            _widen(room, values, self.dtype)
            values = room
        if self.factor is not None:
            np.multiply(values, self.factor, out=room)
        return room


def _check_arrays(out: Array, sources: Sequence[Array], dtype: DType) -> None:
    shape, sizes = (len(out),), (dtype.itemsize, dtype.wide_itemsize)
    for array in (out, *sources):
        if array.shape != shape or not array.flags.c_contiguous or array.itemsize not in sizes:
            raise _unequal(out, sources, dtype)
    if not out.flags.writeable:
        raise ValueError("the result of a fold needs memory that may be written")


def _factors(scales: Sequence[float], dtype: DType) -> list[Any]:
    # By way of 64 bits, so that a factor wraps as the elements do.
    exact = "float64" if dtype.inexact else "int64"
    return [np.asarray(scale).astype(exact).astype(dtype.wide) for scale in scales]


def _fold_blocks(
    out: Array, terms: list[_Term], dtype: DType, combine: Combine, divisor: float | None
) -> None:
    first, rest = terms[0], terms[1:]
    block = min(len(out), BLOCK)
    narrow = out.itemsize != dtype.wide_itemsize
    # The sum is formed in `out` unless that would overwrite a source before it is read.
    later = rest if first.prepared else rest[1:]
    start = out.__array_interface__["data"][0]
    apart = narrow or any(term.address == start for term in later)
    sums = np.empty(block, dtype.wide) if apart else None
    room = np.empty(block, dtype.wide) if any(term.prepared for term in rest) else None
    by = None if divisor is None else np.asarray(divisor, "float64").astype(dtype.wide)
    for begin in range(0, len(out), BLOCK):
        part = slice(begin, begin + BLOCK)
        target = out[part]
        total = target if sums is None else sums[: len(target)]
        values = first.values(part, total)
        for term in rest:
            _join(
                combine,
                values,
                term.values(part, None if room is None else room[: len(target)]),
                total,
            )
            values = total
        if by is not None:
            np.divide(values, by, out=total)
        if narrow:
            _narrow(target, total, dtype)
        elif sums is not None:
            np.copyto(target, total)


def _join(combine: Combine, left: Array, right: Array, out: Array) -> None:
    if combine is Combine.ADD:
        np.add(left, right, out=out)
    elif combine is Combine.PROD:
        np.multiply(left, right, out=out)
    else:
        # Not numpy's minimum, which leaves the sign of a zero to the processor.
        take = np.less(right, left) if combine is Combine.MIN else np.greater(right, left)
        take |= np.not_equal(right, right)
        np.copyto(out, np.where(take, right, left))


def _convert(out: Array, source: Array, dtype: DType) -> None:
    if out.itemsize == source.itemsize:
        np.copyto(out, source)
    elif out.itemsize == dtype.wide_itemsize:
        _widen(out, source, dtype)
    else:
        for begin in range(0, len(out), BLOCK):
            part = slice(begin, begin + BLOCK)
            _narrow(out[part], source[part], dtype)


def _widen(out: Array, source: Array, dtype: DType) -> None:
    if dtype.name == "bfloat16":
        np.left_shift(source, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, source)


def _narrow(out: Array, source: Array, dtype: DType) -> None:
    """Round float32 to half precision, to nearest even."""
    if dtype.name != "bfloat16":
        np.copyto(out, source, casting="same_kind")
        return
    bits = source.view(np.uint32)
    rounded = bits >> np.uint32(16)
    # A NaN becomes quiet, lest it round to infinity.
    quiet = rounded | np.uint32(0x40)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    np.copyto(rounded, quiet, where=np.isnan(source))
    np.copyto(out, rounded, casting="same_kind")


def load(mode: Mode) -> Kernels:
    """Return the kernels for `mode`; see the module.

    Raises:
        UnavailableError: `mode` is ``require`` and the compiled module is missing or stale.
        ConfigError: no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"kernels cannot be {mode!r}: choose {', '.join(MODES)}")
    if mode == "off":
        return _Numpy("numpy (the compiled module is switched off)")
    try:
        # The module exists only where it was compiled.
        from p2pdpt._native import ffi, lib
    except ImportError as error:
        reason = (
            "the compiled module is not built"
            if isinstance(error, ModuleNotFoundError)
            else f"the compiled module does not load: {error}"
        )
    else:
        built = getattr(lib, "P2PDPT_KERNELS_ABI", 0)
        if built == ABI:
            fast = lib.p2pdpt_best_path() == lib.P2PDPT_AVX2
            path = lib.P2PDPT_AVX2 if fast else lib.P2PDPT_PLAIN
            return _Native(ffi, lib, path, "native (avx2, f16c)" if fast else "native (plain C)")
        reason = f"the compiled module is of another version ({built}, not {ABI})"
    if mode == "require":
        raise UnavailableError(
            f"P2PDPT_NATIVE=require, but {reason}. With a C compiler and Python's headers at "
            "hand, build it from the source folder: "
            "P2PDPT_NATIVE=require pip install --force-reinstall --no-deps ."
        )
    return _Numpy(f"numpy ({reason})")


@functools.cache
def default() -> Kernels:
    """Return the kernels that ``P2PDPT_NATIVE`` asks for (default ``auto``), loaded once.

    Raises:
        ConfigError: the variable is neither ``auto``, ``require`` nor ``off``.
        UnavailableError: as `load`.
    """
    asked = os.environ.get("P2PDPT_NATIVE") or "auto"
    for mode in MODES:
        if asked == mode:
            kernels = load(mode)
            logger.debug("kernels.loaded: %s", kernels.description)
            return kernels
    raise ConfigError(f"P2PDPT_NATIVE={asked!r}: choose {', '.join(MODES)}")
