"""The loaders of a session: divided in an order that all members share, or each one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from torch.utils.data import DataLoader

from p2pdpt.errors import SessionError
from p2pdpt.training.data import Local, Split, mix_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from p2pdpt.training.agreement import Agreement
    from p2pdpt.training.weights import SampleLedger

__all__ = ["Loaders"]


class _Loader(msgspec.Struct, array_like=True):
    """What must agree about a loader that is divided: samples, batches, its own seed."""

    samples: int
    batches: int
    base: int | None


class Loaders:
    """Divide loaders for one member.

    Attributes:
        seed: the same on all members.
        epoch: the pass over the data that training is in.
    """

    def __init__(
        self, agreement: Agreement, rank: int, size: int, ledger: SampleLedger, seed: int
    ) -> None:
        self.seed, self.epoch = seed, 0
        self._agreement, self._rank, self._size, self._ledger = agreement, rank, size, ledger
        # Kept so that a rebuilt loader keeps its workers from epoch to epoch.
        self._splits: WeakKeyDictionary[Any, dict[tuple[bool, bool], Split]] = WeakKeyDictionary()
        # How many iterations began in an epoch, for training and for evaluation: an order of its
        # own for each, the same on all members as their calls are.
        self._uses: dict[tuple[int, bool], int] = {}

    def split(self, loader: Iterable[Any], *, per_node: bool, train: bool) -> Split:
        """Return this member's part of `loader`; see ``Session.split``.

        Raises:
            SessionError: the loader divides the data itself.
        """
        kept: dict[tuple[bool, bool], Split] = {}
        if isinstance(loader, DataLoader):
            kept = self._splits.setdefault(loader, {})
        if (per_node, train) not in kept:
            length = _length(getattr(loader, "dataset", None)), _length(loader)
            kept[per_node, train] = Split(
                loader,
                self._rank,
                self._size,
                seed=lambda base: self._order(length, base, train),
                hand=self._ledger.hand if train else _ignore,
                per_node=per_node,
                train=train,
            )
        return kept[per_node, train]

    def _order(self, length: tuple[int, int], base: int | None, train: bool) -> int:
        """Return the seed of an iteration that begins; training compares loaders first."""
        use = self._uses.get((self.epoch, train), 0)
        self._uses[self.epoch, train] = use + 1
        if train and self._size > 1:
            heard = self._agreement.gather("s.split(loader)", _Loader(*length, base), _Loader)
            self._compare("samples", [each.samples for each in heard])
            self._compare("batches", [each.batches for each in heard])
            base = heard[0].base
        return mix_seed(self.seed if base is None else base, self.epoch, use)

    def _compare(self, what: str, numbers: list[int]) -> None:
        if len(set(numbers)) > 1:
            listed = ", ".join(
                f"{number} on {name}"
                for name, number in zip(self._agreement.names, numbers, strict=True)
            )
            raise SessionError(
                f"s.split(loader): the loaders have different numbers of {what}: {listed}. Use "
                "the same data set and batch size on every node, or s.local(loader) for data of "
                "each node's own"
            )

    def local(self, loader: Iterable[Any]) -> Local:
        """Return an iterable over this member's own data, until all are done."""
        return Local(
            loader,
            self._rank,
            agree=lambda has: self._agreement.gather("s.local(loader)", has, bool),
            names=self._agreement.names,
            hand=self._ledger.hand,
        )


def _ignore(samples: float) -> None:
    """Take no notice: evaluation does not weigh gradients."""


def _length(thing: object) -> int:
    try:
        return len(thing)  # type: ignore[arg-type]
    except TypeError:
        return -1
