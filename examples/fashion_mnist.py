"""Train a convolutional network on Fashion-MNIST, 70 000 pictures of clothes.

Alone:                    python examples/fashion_mnist.py
On four local nodes:      p2pdpt run --nodes 4 examples/fashion_mnist.py

The four files are read where Debian's package dataset-fashion-mnist puts them, or from the folder
given with --data. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gzip
import math
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import p2pdpt

if TYPE_CHECKING:
    from typing import BinaryIO

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
HOW_TO_GET_IT = """\
fashion_mnist: {problem}

On Debian and Ubuntu:   apt-get install dataset-fashion-mnist
Elsewhere: put these four files of https://github.com/zalandoresearch/fashion-mnist, as .gz or
unpacked, in a folder, and say --data FOLDER:
    train-images-idx3-ubyte.gz   train-labels-idx1-ubyte.gz
    t10k-images-idx3-ubyte.gz    t10k-labels-idx1-ubyte.gz
"""
# Bounds for what is read from a file: more would be another data set, or a damaged one.
MOST_BYTES = 256 * 2**20
CLASSES = 10


class DataError(Exception):
    """The data set is missing or not what it should be; the text says which and why."""


class ClothesNet(nn.Module):
    """Classify images of shape (batch, 1, height, width) into ten kinds; logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(64 * 9, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Return the bytes of an idx file, plain or gzipped, as a uint8 tensor of its shape.

    Raises:
        DataError: it is no idx file of bytes with so many dimensions, it says to hold more than
            MOST_BYTES, or it holds less or more than it says.
    """
    file: BinaryIO
    try:
        # GzipFile reads like a binary file, which its annotation does not say.
        file = cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
        with file:
            head = file.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
                raise DataError(f"{path} is no idx file of bytes in {dimensions} dimensions")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            count = math.prod(shape)
            if not 0 < count <= MOST_BYTES:
                raise DataError(f"{path} says it holds {count} bytes; 1 to {MOST_BYTES} are read")
            content = file.read(count + 1)
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(content) != count:
        raise DataError(f"{path} says it holds {count} bytes, and holds another number")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def load(folder: Path, part: str) -> TensorDataset:
    """Return ``train`` or ``t10k``: images (n, 1, height, width) scaled to 0..1, and labels (n,).

    Raises:
        DataError: a file is missing or damaged, or the two do not belong together.
    """
    found = []
    for name, dimensions in ((f"{part}-images-idx3-ubyte", 3), (f"{part}-labels-idx1-ubyte", 1)):
        candidates = [folder / name, folder / f"{name}.gz"]
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            raise DataError(f"there is no {name} or {name}.gz in {folder}")
        found.append(read_idx(path, dimensions))
    images, labels = found
    if len(images) != len(labels) or int(labels.max()) >= CLASSES:
        raise DataError(f"the images and labels of {part} in {folder} do not belong together")
    return TensorDataset(images.unsqueeze(1).float() / 255.0, labels.long())


def main() -> int:
    """Train for some epochs and report the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DEBIAN, help="folder with the four files")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step, over all nodes")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args()

    try:
        train, test = load(args.data, "train"), load(args.data, "t10k")
    except DataError as problem:
        print(HOW_TO_GET_IT.format(problem=problem), end="", file=sys.stderr)
        return 2

    torch.manual_seed(args.seed)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=512)

    model = ClothesNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=max(1, args.epochs * len(train_loader))
    )

    with p2pdpt.session(model, optimizer) as s:
        for _epoch in s.epochs(args.epochs):
            model.train()
            losses = []
            for x, y in s.split(train_loader):
                loss = criterion(model(x.to(s.device)), y.to(s.device))
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            s.report(**s.mean(loss=sum(losses) / len(losses)))

        model.eval()
        correct, images = 0, 0
        with torch.no_grad():
            for x, y in s.split(test_loader, train=False):
                guesses = model(x.to(s.device)).argmax(dim=1)
                correct += int((guesses == y.to(s.device)).sum())
                images += len(x)
        total = s.sum(correct=correct, images=images)
        s.report(test_accuracy=total["correct"] / total["images"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
