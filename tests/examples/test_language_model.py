"""``examples/language_model.py``: a few steps of a tiny model, and its parts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Train = Callable[..., tuple[dict[str, Any], str]]
PATH = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("language_model", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_nodes_learn_for_a_few_steps(train: Train) -> None:
    summary, printed = train("language_model.py", "--size", "tiny", "--steps", "3")
    assert 4.0 < summary["metrics"]["bits_per_byte"] < 8.5
    assert [node["steps"] for node in summary["nodes"]] == [3, 3]
    assert len({node["digest"] for node in summary["nodes"]}) == 1
    _, _, sample = printed.partition("A sample of what it writes:\n")
    assert sample.startswith("def ")


def test_the_usual_model_has_about_three_million_parameters(example: ModuleType) -> None:
    model = example.ByteGPT(*example.SIZES["small"], context=128)
    assert 3_000_000 < sum(p.numel() for p in model.parameters()) < 3_500_000


def test_a_prediction_depends_on_the_past_only(example: ModuleType) -> None:
    model = example.ByteGPT(*example.SIZES["tiny"], context=16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] += 1 if changed[0, 9] < 255 else -1
    one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[0, :9], other[0, :9])
    assert not torch.allclose(one[0, 9:], other[0, 9:])


def test_windows_are_the_text_and_the_text_moved_by_one(example: ModuleType) -> None:
    windows = example.Windows(bytes(range(10)), context=4)
    assert len(windows) == 2
    x, y = windows[1]
    assert x.tolist() == [4, 5, 6, 7]
    assert y.tolist() == [5, 6, 7, 8]


def test_the_library_is_divided_by_file(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("skipped")
    (tmp_path / "skipped.txt").write_text("skipped")
    for number in range(100):
        (tmp_path / f"module{number:02}.py").write_text(f"text{number:02}")
    monkeypatch.setattr(example.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    train, test = (text.split(b"\n") for text in example.read_library())
    assert sorted(train + test) == [b"text%02d" % number for number in range(100)]
    assert len(test) == 16
    monkeypatch.setattr(example, "MOST_BYTES", 60)
    assert sum(map(len, b"\n".join(example.read_library()).split(b"\n"))) == 60


def test_without_the_library_it_says_so(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    monkeypatch.setattr(sys, "argv", ["language_model.py"])
    assert example.main() == 2
    assert "standard library" in capsys.readouterr().err


def test_the_schedule_warms_up_and_falls(example: ModuleType) -> None:
    shares = [example.schedule(step, 100) for step in range(101)]
    assert shares[0] == 0.1
    assert shares[9] == shares[10] == 1.0
    assert shares[100] == pytest.approx(0.02)
    assert example.schedule(0, 0) == 1.0


def test_what_it_writes_depends_on_the_seed_only(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.ByteGPT(*example.SIZES["tiny"], context=8)
    written = model.write(b"def ", length=20, seed=3)
    assert len(written) == 24
    assert written.startswith(b"def ")
    assert model.write(b"def ", length=20, seed=3) == written
    assert model.write(b"def ", length=20, seed=4) != written
