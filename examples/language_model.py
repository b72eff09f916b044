"""Train a small GPT on the source code of Python's standard library, byte by byte.

Alone:                    python examples/language_model.py
On four local nodes:      p2pdpt run --nodes 4 examples/language_model.py

The text is what every machine with Python has. One file in ten, chosen by a hash of its name, is
held out; the model's bits per byte on those files fall from 8, which is knowing nothing, to about
3 in a few minutes on two cores. At the end it writes some Python of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

import p2pdpt

SIZES = {  # width, layers, heads; parameters
    "tiny": (32, 1, 2),  # 25 thousand
    "small": (256, 4, 4),  # 3.3 million
}
SKIPPED = {"__pycache__", "idle_test", "lib2to3", "site-packages", "dist-packages", "test", "tests"}
MOST_BYTES = 16 * 2**20
MOST_BYTES_OF_A_FILE = 2**20
REPORT_EVERY = 50  # steps


class Block(nn.Module):
    """One transformer layer on (batch, length, width): causal attention, then a small network."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for linear in (self.query_key_value, self.mix, self.up, self.down):
            # What adds to the residual stream starts smaller, so that depth does not matter.
            adds = linear is self.mix or linear is self.down
            nn.init.normal_(linear.weight, std=0.02 / (math.sqrt(2 * layers) if adds else 1.0))
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.query_key_value(self.norm_1(x))
        query, key, value = projected.view(
            batch, length, 3, self.heads, width // self.heads
        ).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + fed


class ByteGPT(nn.Module):
    """Predict the next byte: tokens (batch, length) of int64 to logits (batch, length, 256)."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, layers, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        # Weight tying, as in Press and Wolf (2017): reading and writing a byte are one matrix.
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, seed: int, temperature: float = 0.7) -> bytes:
        """Return `prompt` continued by `length` sampled bytes."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long()[None]
        device = self.position.device
        for _ in range(length):
            logits = self(tokens[:, -self.context :].to(device))[:, -1].cpu()
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows: `context` bytes, and the same ones moved by one as the answer."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def read_library() -> tuple[bytes, bytes]:
    """Return the text to train on and the held-out text, alike on machines with one Python."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.intersection(name.parts) or not path.is_file():
            continue
        with path.open("rb") as file:
            source = file.read(MOST_BYTES_OF_A_FILE)
        total += len(source)
        if total > MOST_BYTES:
            break
        held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 26
        parts[held_out].append(source)
    return b"\n".join(parts[0]), b"\n".join(parts[1])


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate at a step: linear warm-up, then a half cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def main() -> int:
    """Train, report bits per byte on the held-out files, and print a sample."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--batch-size", type=int, default=16, help="windows a step, over all nodes")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="of the model")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the sample")
    args = parser.parse_args()

    train_text, test_text = read_library()
    if len(train_text) <= args.batch_size * args.context or len(test_text) <= args.context:
        print(
            f"language_model: too little Python source below {sysconfig.get_path('stdlib')}; "
            "install your Python's standard library as .py files",
            file=sys.stderr,
        )
        return 2
    train, test = Windows(train_text, args.context), Windows(test_text, args.context)

    torch.manual_seed(args.seed)
    model = ByteGPT(*SIZES[args.size], context=args.context)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, args.steps)
    )

    criterion = nn.CrossEntropyLoss()

    # An "epoch" here is REPORT_EVERY steps on windows drawn anew: the text is longer than that.
    epochs, last = divmod(args.steps, REPORT_EVERY)
    lengths = [REPORT_EVERY] * epochs + [last] * (last > 0)
    # Windows spread evenly over the held-out files, the same ones each time.
    few = range(0, len(test), max(1, len(test) // 128))
    test_loader = DataLoader(Subset(test, few), batch_size=32)

    with p2pdpt.session(model, optimizer) as s:

        def bits_per_byte() -> float:
            model.eval()
            bits, count = 0.0, 0
            with torch.no_grad():
                for x, y in s.split(test_loader, train=False):
                    logits = model(x.to(s.device))
                    loss = criterion(logits.flatten(0, 1), y.to(s.device).flatten())
                    bits += loss.item() / math.log(2) * y.numel()
                    count += y.numel()
            model.train()
            total = s.sum(bits=bits, count=count)
            return float(total["bits"] / total["count"])

        s.report(bits_per_byte=bits_per_byte())
        for epoch in s.epochs(len(lengths)):
            sampler = RandomSampler(train, num_samples=lengths[epoch] * args.batch_size)
            loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
            for x, y in s.split(loader):
                logits = model(x.to(s.device))
                loss = criterion(logits.flatten(0, 1), y.to(s.device).flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            s.report(bits_per_byte=bits_per_byte())

    # All nodes have the same model and write the same; `p2pdpt run` shows the first one's.
    model.eval()
    written = model.write(b"def ", length=200, seed=args.seed)
    print("A sample of what it writes:\n" + written.decode("utf-8", errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
