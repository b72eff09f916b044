"""The element types that a bucket can have, and how each is added up.

Half-precision types accumulate in float32 and round once; numpy has no bfloat16, so its
elements are stored as ``uint16`` bit patterns. Names are those of torch without the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from p2pdpt.errors import ConfigError

__all__ = ["DTYPES", "DType", "dtype_named"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name without the prefix, for instance ``bfloat16``.
        code: the number that stands for it on the wire and in the C kernels.
        itemsize: bytes of one element.
        storage: the numpy dtype name of the stored elements (``uint16`` for bfloat16).
        wide: the numpy dtype name in which sums are formed (``float32`` for half precision).
        inexact: whether it is a floating type, so that a mean of it exists.
    """

    name: str
    code: int
    itemsize: int
    storage: str
    wide: str
    inexact: bool

    @property
    def half(self) -> bool:
        """Whether sums are formed in a wider type and rounded once."""
        return self.storage != self.wide

    @property
    def wide_itemsize(self) -> int:
        """Bytes of one element of a partial sum."""
        return 4 if self.half else self.itemsize


_TABLE: Final = (
    DType("float32", 0, 4, "float32", "float32", True),
    DType("float64", 1, 8, "float64", "float64", True),
    DType("bfloat16", 2, 2, "uint16", "float32", True),
    DType("float16", 3, 2, "float16", "float32", True),
    DType("int8", 4, 1, "int8", "int8", False),
    DType("uint8", 5, 1, "uint8", "uint8", False),
    DType("int16", 6, 2, "int16", "int16", False),
    DType("int32", 7, 4, "int32", "int32", False),
    DType("int64", 8, 8, "int64", "int64", False),
)
DTYPES: Final[dict[str, DType]] = {dtype.name: dtype for dtype in _TABLE}


def dtype_named(name: str) -> DType:
    """Return the element type called `name` (a ``torch.`` prefix is ignored).

    Raises:
        ConfigError: no such type; the text lists those that exist.
    """
    try:
        return DTYPES[name.removeprefix("torch.")]
    except KeyError:
        raise ConfigError(
            f"elements of type {name!r} cannot be exchanged; supported: {', '.join(DTYPES)}"
        ) from None
