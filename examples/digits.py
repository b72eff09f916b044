"""Train a small convolutional network on scikit-learn's handwritten digits.

Alone:                    python examples/digits.py
On four local nodes:      p2pdpt run --nodes 4 examples/digits.py

The data is 1797 real images of 8 x 8 pixels that come with scikit-learn, so nothing is downloaded.
A quarter of them, the same one for everybody, is held out and only measured.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import p2pdpt


class DigitNet(nn.Module):
    """Classify images of shape (batch, 1, 8, 8) into ten digits; returns logits (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        # GroupNorm and not BatchNorm: its result for an image does not depend on which other
        # images are beside it, so that any number of nodes computes the same gradient.
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.GroupNorm(8, 128),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out part, pixels scaled to 0..1, split alike everywhere."""
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images / 16.0,
        digits.target,
        test_size=0.25,
        stratify=digits.target,
        random_state=seed,
    )

    def dataset(images: object, labels: object) -> TensorDataset:
        pixels = torch.as_tensor(images, dtype=torch.float32)
        return TensorDataset(pixels.unsqueeze(1), torch.as_tensor(labels, dtype=torch.int64))

    return dataset(train_x, train_y), dataset(test_x, test_y)


def main() -> None:
    """Train for some epochs and report the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training part")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images a step, all nodes together"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the test split")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test = load(args.seed)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=256)

    model = DigitNet()
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


if __name__ == "__main__":
    main()
