"""``examples/fashion_mnist.py``: reads idx files within bounds, and says how to get them."""

from __future__ import annotations

import gzip
import importlib.util
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "fashion_mnist.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fashion_mnist", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def idx(array: Any, *, kind: int = 8) -> bytes:
    head = bytes([0, 0, kind, array.ndim])
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return head + shape + bytes(array.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small data set of the right form; one file is not packed."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 96), ("t10k", 30)):
        labels = np.arange(count) % 10
        images = rng.integers(0, 20, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[label : label + 9, 2 * label : 2 * label + 9] = 220
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def test_two_nodes_train_on_a_folder(
    folder: Path, train: Callable[..., tuple[dict[str, Any], str]]
) -> None:
    arguments = ("--data", str(folder), "--epochs", "3", "--batch-size", "16")
    summary, _ = train("fashion_mnist.py", *arguments)
    assert 0.0 <= summary["metrics"]["test_accuracy"] <= 1.0
    assert [node["steps"] for node in summary["nodes"]] == [18, 18]
    assert len({node["digest"] for node in summary["nodes"]}) == 1


def test_without_the_data_it_says_how_to_get_it(
    tmp_path: Path, alone: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = alone("fashion_mnist.py", "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    first, *_ = done.stderr.splitlines()
    assert first == (
        "fashion_mnist: there is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz "
        f"in {tmp_path}"
    )
    assert "apt-get install dataset-fashion-mnist" in done.stderr
    assert "--data FOLDER" in done.stderr


def test_images_and_labels_come_as_tensors(example: ModuleType, folder: Path) -> None:
    images, labels = example.load(folder, "train").tensors
    assert images.shape == (96, 1, 28, 28)
    assert images.max().item() == pytest.approx(220 / 255)
    assert labels.tolist() == [number % 10 for number in range(96)]


def test_an_idx_file_is_read_packed_or_not(example: ModuleType, tmp_path: Path) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "plain").write_bytes(idx(array))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx(array)))
    assert example.read_idx(tmp_path / "plain", 3).tolist() == array.tolist()
    assert example.read_idx(tmp_path / "packed.gz", 3).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no idx file"),
        (b"\0\0\x08\x01\0\0", "is no idx file"),
        (idx(np.zeros((2, 2))), "is no idx file of bytes in 1 dimensions"),
        (idx(np.zeros(2), kind=13), "is no idx file of bytes"),
        (idx(np.zeros(0)), "says it holds 0 bytes"),
        (b"\0\0\x08\x01" + struct.pack(">I", 2**32 - 1), "says it holds 4294967295 bytes"),
        (idx(np.zeros(9))[:-1], "holds another number"),
        (idx(np.zeros(9)) + b"\0", "holds another number"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(
    example: ModuleType, tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(example.DataError, match=complaint):
        example.read_idx(tmp_path / "file", 1)


def test_a_damaged_archive_is_refused(example: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    packed = gzip.compress(idx(rng.integers(0, 256, 2000)))
    for name, content in (("cut.gz", packed[:500]), ("other.gz", b"no gzip at all")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(example.DataError, match="cannot be read"):
            example.read_idx(tmp_path / name, 1)
    (tmp_path / "changed.gz").write_bytes(packed[:300] + b"????" + packed[304:])
    with pytest.raises(example.DataError):
        example.read_idx(tmp_path / "changed.gz", 1)


@pytest.mark.parametrize("labels", [np.zeros(95), np.full(96, 10)])
def test_labels_of_other_images_are_refused(example: ModuleType, folder: Path, labels: Any) -> None:
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(example.DataError, match="do not belong together"):
        example.load(folder, "train")
