"""The element types."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.dtypes import DTYPES, dtype_named
from p2pdpt.errors import ConfigError


def test_sizes_are_those_of_numpy() -> None:
    for name, dtype in DTYPES.items():
        assert dtype.name == name
        assert np.dtype(dtype.storage).itemsize == dtype.itemsize
        assert np.dtype(dtype.wide).itemsize == dtype.wide_itemsize
        assert dtype.inexact == (np.dtype(dtype.wide).kind == "f")


def test_codes_are_distinct_and_fit_the_wire() -> None:
    assert sorted(dtype.code for dtype in DTYPES.values()) == list(range(9))


def test_half_precision_is_summed_in_float32() -> None:
    assert [name for name, dtype in DTYPES.items() if dtype.half] == ["bfloat16", "float16"]
    assert {dtype.wide for dtype in DTYPES.values() if dtype.half} == {"float32"}


def test_names_may_be_torchs() -> None:
    assert dtype_named("torch.bfloat16") is DTYPES["bfloat16"]
    assert dtype_named("int64") is DTYPES["int64"]


def test_an_unknown_type_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'complex64' cannot be exchanged; .*float32, float64"):
        dtype_named("complex64")
