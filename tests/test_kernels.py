"""Folds and copies: exact values, and the same bits from every implementation."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt import kernels
from p2pdpt.dtypes import DTYPES, DType
from p2pdpt.errors import ConfigError, UnavailableError
from p2pdpt.kernels import Kernels
from p2pdpt.topology import ADD, COPY, MAX, MIN, PROD, Combine

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

NATIVE = kernels.load("auto").description.startswith("native")
needs_native = pytest.mark.skipif(not NATIVE, reason=kernels.load("auto").description)


@functools.cache
def implementations() -> dict[str, Kernels]:
    """Return every implementation that this machine can run, numpy's first."""
    found: dict[str, Kernels] = {"numpy": kernels.load("off")}
    if NATIVE:
        from p2pdpt._native import ffi, lib

        found["plain"] = kernels._Native(ffi, lib, lib.P2PDPT_PLAIN, "native (plain C)")
        found["native"] = kernels.load("require")
    return found


@pytest.fixture(params=sorted(implementations()))
def kernel(request: pytest.FixtureRequest) -> Kernels:
    return implementations()[request.param]


def floats(*values: float | np.floating[Any]) -> Array:
    return np.array(values, "float32")


def bits(name: str, *values: float) -> Array:
    """Return values in a half-precision type's storage, by the definition of the type."""
    if name == "float16":
        return np.array(values, "float16")
    return (np.array(values, "float32").view("uint32") >> 16).astype("uint16")


def test_adds_in_the_listed_order(kernel: Kernels) -> None:
    big, small, out = floats(1e8), floats(1.0), floats(0)
    kernel.fold(out, [big, floats(-1e8), small], DTYPES["float32"], ADD)
    assert out[0] == 1.0
    kernel.fold(out, [big, small, floats(-1e8)], DTYPES["float32"], ADD)
    assert out[0] == 0.0


def test_multiplies_and_adds_with_two_roundings(kernel: Kernels) -> None:
    x = np.float32(1 + 2**-12)
    out = floats(0)
    kernel.fold(out, [floats(-1), floats(x)], DTYPES["float32"], ADD, [1.0, float(x)])
    # x*x is 1 + 2**-11 + 2**-24, which a fused operation would not round before the sum.
    assert out[0] == np.float32(2**-11)


def test_rounds_half_precision_once(kernel: Kernels) -> None:
    dtype = DTYPES["bfloat16"]
    one, tiny = bits("bfloat16", 1.0), bits("bfloat16", 2**-9)
    out = bits("bfloat16", 0)
    kernel.fold(out, [one, tiny, tiny, tiny], dtype, ADD)
    # Each alone would round away; together they are 1.5 units of 2**-8, and go to the next one.
    assert out[0] == bits("bfloat16", 1 + 2**-7)[0]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, np.inf),
        ("float16", 2.0**-25, 0.0),
        ("float16", 2.0**-25 * 1.5, 2.0**-24),
        ("float16", -(2.0**-24) * 2.5, -(2.0**-24) * 2),
        ("float16", 1 + 2.0**-11, 1.0),
        ("float16", 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        ("bfloat16", 1 + 2.0**-8, 1.0),
        ("bfloat16", 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        ("bfloat16", 3.4e38, np.inf),
        ("bfloat16", -np.inf, -np.inf),
    ],
)
def test_rounds_to_nearest_even(kernel: Kernels, name: str, value: float, expected: float) -> None:
    out = bits(name, *[0] * 9)
    kernel.copy(out, floats(*[value] * 9), DTYPES[name])
    assert out.view("uint16").tolist() == bits(name, *[expected] * 9).view("uint16").tolist()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_survives_widening_and_rounding(kernel: Kernels, name: str) -> None:
    dtype = DTYPES[name]
    every = np.arange(1 << 16, dtype="uint16")
    wide, back = np.empty(1 << 16, "float32"), np.empty(1 << 16, dtype.storage)
    kernel.copy(wide, every.view(dtype.storage), dtype)
    kernel.copy(back, wide, dtype)
    nan = np.isnan(wide)
    assert nan.sum() == {"float16": 2046, "bfloat16": 254}[name]
    assert np.array_equal(back.view("uint16")[~nan], every[~nan])
    again = np.empty(1 << 16, "float32")
    kernel.copy(again, back, dtype)
    assert np.isnan(again[nan]).all()


def test_min_and_max_yield_nan_and_the_first_of_two_zeros(kernel: Kernels) -> None:
    dtype = DTYPES["float32"]
    nan = float("nan")
    left, right = floats(nan, 1, 0.0, -0.0, 2), floats(1, nan, -0.0, 0.0, 3)
    for combine, last in ((MIN, 2.0), (MAX, 3.0)):
        out = np.empty(5, "float32")
        kernel.fold(out, [left, right], dtype, combine)
        assert np.isnan(out[:2]).all()
        assert np.signbit(out[2:4]).tolist() == [False, True]
        assert out[4] == last


def test_integers_wrap(kernel: Kernels) -> None:
    for name, value, expected in (
        ("int8", 100, -56),
        ("uint8", 200, 144),
        ("int16", 2**15 - 1, -2),
    ):
        x = np.full(3, value, name)
        out = np.empty(3, name)
        kernel.fold(out, [x, x], DTYPES[name], ADD)
        assert out.tolist() == [expected] * 3
    x = np.full(3, 2**40 + 1, "int64")
    kernel.fold(x, [x, x], DTYPES["int64"], PROD)
    assert x.tolist() == [(2**40 + 1) ** 2 % 2**64] * 3
    small = np.full(3, 2, "int8")
    kernel.fold(small, [small, small], DTYPES["int8"], ADD, [300, -1])
    assert small.tolist() == [(600 - 2 + 128) % 256 - 128] * 3


def test_a_source_of_scale_zero_is_not_read(kernel: Kernels) -> None:
    for name in ("float32", "bfloat16", "float16"):
        dtype = DTYPES[name]
        poison = np.full(5, np.nan, "float32")
        good = np.full(5, 3.0, "float32")
        out = np.empty(5, "float32")
        # 1e-60 is zero in the wide type.
        kernel.fold(out, [poison, good, poison], dtype, ADD, [0.0, 2.0, 1e-60], 4.0)
        assert out.tolist() == [1.5] * 5
        kernel.fold(out, [poison, poison], dtype, ADD, [0.0, -0.0], 0.0)
        assert out.tolist() == [0.0] * 5


def test_divides_once_at_the_end(kernel: Kernels) -> None:
    out = np.empty(3, "float64")
    kernel.fold(out, [np.ones(3), np.ones(3)], DTYPES["float64"], ADD, [1.0, 6.0], 3.0)
    assert out.tolist() == [7 / 3] * 3


def test_folds_nothing_at_all(kernel: Kernels) -> None:
    for dtype in DTYPES.values():
        empty = np.empty(0, dtype.storage)
        kernel.fold(empty, [empty, empty], dtype, ADD)
        kernel.copy(empty, empty.copy(), dtype)


def test_refuses_what_breaks_its_rules(kernel: Kernels) -> None:
    dtype, x = DTYPES["float32"], np.ones(4, "float32")
    with pytest.raises(ValueError, match="COPY cannot have 2 sources"):
        kernel.fold(x, [x, x], dtype, COPY)
    with pytest.raises(ValueError, match="ADD cannot have 0 sources"):
        kernel.fold(x, [], dtype, ADD)
    with pytest.raises(ValueError, match="one length"):
        kernel.fold(x, [x, x[:3]], dtype, ADD)
    with pytest.raises(ValueError, match="one length"):
        kernel.fold(x, [x, np.ones(4)], dtype, ADD)
    with pytest.raises(ValueError, match="one length"):
        kernel.copy(x, x[:3], dtype)
    with pytest.raises(ValueError, match="3 scales were given for 2"):
        kernel.fold(x, [x, x], dtype, ADD, [1, 2, 3])
    with pytest.raises(ValueError, match=r"contiguous|one length"):
        kernel.fold(x, [x, np.ones(8, "float32")[::2]], dtype, ADD)
    half = np.ones(4, "float16")
    with pytest.raises(ValueError, match="float16 or float32"):
        kernel.fold(half, [half, x[:2]], DTYPES["float16"], ADD)
    frozen = np.ones(4, "float32")
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        kernel.fold(frozen, [x, x], dtype, ADD)
    assert x.tolist() == [1.0] * 4


def test_refuses_means_and_fractions_of_integers(kernel: Kernels) -> None:
    x = np.ones(2, "int32")
    with pytest.raises(ConfigError, match="int32 elements have no mean"):
        kernel.fold(x, [x, x], DTYPES["int32"], ADD, divisor=2.0)
    for scale in (0.5, float("inf"), float("nan"), 2.0**60):
        with pytest.raises(ConfigError, match="int32 elements cannot be scaled by"):
            kernel.fold(x, [x, x], DTYPES["int32"], ADD, [scale, 1.0])


@dataclass(frozen=True)
class Case:
    """One call of fold, made of numbers only, so that it can be repeated exactly."""

    dtype: DType
    length: int
    combine: Combine
    wide: tuple[bool, ...]
    offsets: tuple[int, ...]
    out_wide: bool
    alias: int | None
    scales: tuple[float, ...] | None
    divisor: float | None
    seed: int
    tame: bool

    def run(self, kernel: Kernels) -> Array:
        rng = np.random.default_rng(self.seed)
        sources = [
            self.array(rng, wide, offset)
            for wide, offset in zip(self.wide, self.offsets, strict=True)
        ]
        if self.alias is None:
            out = self.array(rng, self.out_wide, self.offsets[0] // 2)
        else:
            out = sources[self.alias]
        kept = [source.copy() for source in sources]
        kernel.fold(out, sources, self.dtype, self.combine, self.scales, self.divisor)
        for source, before in zip(sources, kept, strict=True):
            assert source is out or source.tobytes() == before.tobytes()
        return out

    def array(self, rng: np.random.Generator, wide: bool, offset: int) -> Array:
        kind = np.dtype(self.dtype.wide if wide else self.dtype.storage)
        room = np.empty(self.length + offset + 64, kind)
        # Start at a cache line plus `offset` elements.
        first = -room.ctypes.data % 64 // kind.itemsize + offset % 16
        array = room[first : first + self.length]
        if not self.tame:
            array[:] = rng.integers(0, 256, array.nbytes, "uint8").view(kind)
        elif self.dtype.name == "bfloat16" and not wide:
            array[:] = rng.normal(size=self.length).astype("float32").view("uint32") >> 16
        else:
            array[:] = (
                (rng.normal(size=self.length) * 8)
                .astype("int8" if kind.kind in "iu" else kind)
                .astype(kind)
            )
        return array


@st.composite
def cases(draw: st.DrawFn, *, lengths: st.SearchStrategy[int], most: int = 11) -> Case:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    combine = draw(st.sampled_from(list(Combine)))
    count = 1 if combine is COPY else draw(st.integers(1, most))
    wide = tuple(dtype.half and draw(st.booleans()) for _ in range(count))
    whole = st.sampled_from([0.0, 1.0, 2.0, -3.0, 257.0])
    scale = st.one_of(whole, st.sampled_from([0.3, -1e30, 1e-50])) if dtype.inexact else whole
    alias = draw(st.one_of(st.none(), st.integers(0, count - 1)))
    return Case(
        dtype=dtype,
        length=draw(lengths),
        combine=combine,
        wide=wide,
        offsets=tuple(draw(st.integers(0, 15)) for _ in range(count)),
        out_wide=(dtype.half and draw(st.booleans())) if alias is None else wide[alias],
        alias=alias,
        scales=draw(st.one_of(st.none(), st.tuples(*[scale] * count))),
        divisor=draw(st.sampled_from([None, 3.0, 7e-3])) if dtype.inexact else None,
        seed=draw(st.integers(0, 2**32 - 1)),
        tame=draw(st.booleans()),
    )


def assert_same_bits(case: Case, expected: Array, found: Array, name: str) -> None:
    assert expected.dtype == found.dtype
    nan = np.zeros(case.length, bool)
    if case.dtype.inexact:
        wide = [np.empty(case.length, case.dtype.wide) for _ in range(2)]
        for array, target in zip((expected, found), wide, strict=True):
            implementations()["numpy"].copy(target, array, case.dtype)
        nan = np.isnan(wide[0])
        assert np.array_equal(nan, np.isnan(wide[1])), name
    raw = f"uint{8 * expected.itemsize}"
    assert np.array_equal(expected.view(raw)[~nan], found.view(raw)[~nan]), name


@needs_native
@given(case=cases(lengths=st.one_of(st.integers(0, 70), st.sampled_from([1023, 1025, 3000]))))
@settings(max_examples=400, deadline=None)
def test_numpy_and_c_give_the_same_bits(case: Case) -> None:
    expected = case.run(implementations()["numpy"])
    for name in ("plain", "native"):
        assert_same_bits(case, expected, case.run(implementations()[name]), name)


@needs_native
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_long_arrays_give_the_same_bits(name: str) -> None:
    dtype = DTYPES[name]
    for seed, alias in enumerate((None, 0, 5)):
        case = Case(
            dtype=dtype,
            length=kernels.BLOCK * 2 + 17,
            combine=ADD,
            wide=(False,) * 18,
            offsets=(*range(15), 0, 0, 0),
            out_wide=False,
            alias=alias,
            scales=(1.0, 2.0) * 9,
            divisor=3.0 if dtype.inexact else None,
            seed=seed,
            tame=True,
        )
        expected = case.run(implementations()["numpy"])
        for other in ("plain", "native"):
            assert_same_bits(case, expected, case.run(implementations()[other]), other)


@needs_native
def test_results_beyond_the_caches_give_the_same_bits() -> None:
    # Long enough to be written past the caches.
    length = (9 << 20) // 4 + 3
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=length).astype("float32") for _ in range(2))
    room = np.zeros(length + 1, "float32")
    out = room[1:]
    native = implementations()["native"]
    native.fold(out, [x, y], DTYPES["float32"], ADD)
    assert np.array_equal(out, x + y)
    native.copy(out, x, DTYPES["float32"])
    assert np.array_equal(out, x)
    assert room[0] == 0


@needs_native
def test_c_and_python_number_types_and_combines_alike() -> None:
    from p2pdpt._native import lib

    for name, dtype in DTYPES.items():
        assert getattr(lib, f"P2PDPT_{name.upper()}") == dtype.code
    for combine in Combine:
        assert getattr(lib, f"P2PDPT_{combine.name}") == combine
    assert lib.P2PDPT_KERNELS_ABI == kernels.ABI


def without_native(code: str, mode: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where the compiled module cannot be imported."""
    block = "import sys; sys.modules['p2pdpt._native'] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code],
        env={**os.environ, "P2PDPT_NATIVE": mode},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_says_which_path_it_uses() -> None:
    assert kernels.load("off").description == "numpy (the compiled module is switched off)"
    show = "from p2pdpt import kernels; print(kernels.default().description)"
    assert without_native(show, "auto").stdout == "numpy (the compiled module is not built)\n"
    assert without_native(show, "").stdout == "numpy (the compiled module is not built)\n"


def test_requires_the_compiled_module_by_name() -> None:
    result = without_native("from p2pdpt import kernels; kernels.default()", "require")
    assert result.returncode == 1
    assert "UnavailableError: P2PDPT_NATIVE=require, but the compiled module is not built" in (
        result.stderr
    )
    assert "pip install" in result.stderr


def test_reads_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.default.cache_clear()
    try:
        monkeypatch.setenv("P2PDPT_NATIVE", "sometimes")
        with pytest.raises(ConfigError, match="P2PDPT_NATIVE='sometimes': choose auto, require"):
            kernels.default()
        monkeypatch.setenv("P2PDPT_NATIVE", "off")
        chosen = kernels.default()
        assert chosen.description.startswith("numpy")
        monkeypatch.setenv("P2PDPT_NATIVE", "auto")
        assert kernels.default() is chosen
    finally:
        kernels.default.cache_clear()


@needs_native
def test_recognises_a_stale_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ABI", kernels.ABI + 1)
    assert "of another version" in kernels.load("auto").description
    with pytest.raises(UnavailableError, match="of another version"):
        kernels.load("require")


def test_refuses_unknown_modes() -> None:
    with pytest.raises(ConfigError, match="choose auto, require, off"):
        kernels.load("fast")  # type: ignore[arg-type]
