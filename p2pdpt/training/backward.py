"""What ``loss.backward()`` does in a session: it returns when the step is sealed.

Gradients gather in buckets; a bucket leaves as soon as its parameters have all fired, the rest
at the end of the outermost backward, which then waits for all results and the seal. A second
backward before ``optimizer.step()`` is another attempt of the same step: it adds to what the
gradients show, and the sum is exchanged again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import SchemaError, SessionError
from p2pdpt.training.buckets import GradientBucket, carrier, plan_buckets
from p2pdpt.training.exchange import StepExchange
from p2pdpt.training.hooks import BackwardHooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from p2pdpt.training.agreement import Agreement
    from p2pdpt.training.buckets import Slot
    from p2pdpt.training.buffers import ModelBuffers
    from p2pdpt.training.waiting import Waiting
    from p2pdpt.training.weights import SampleLedger

__all__ = ["Backward"]

logger = logging.getLogger(__name__)
SHOWN: Final = 10


class _Grown(msgspec.Struct, array_like=True):
    """What a member found to take part from now on.

    Attributes:
        trainable: parameters that want gradients and are in no bucket.
        buffers: buffers that changed and are not averaged.
    """

    trainable: list[str]
    buffers: list[str]


class Backward:
    """Listen to backward and exchange what it computes.

    Attributes:
        step: finished optimizer steps.
        attempt: exchanges since the last of them.
        rounds: exchanged backwards in total.
        exposed_s: seconds that backward spent waiting for the network.
        local: whether backward only accumulates.
    """

    def __init__(
        self,
        waiting: Waiting,
        agreement: Agreement,
        modules: Sequence[torch.nn.Module],
        parameters: Sequence[tuple[str, torch.Tensor]],
        buffers: ModelBuffers | None,
        ledger: SampleLedger,
        *,
        limit_bytes: int,
        strict_unused: bool = False,
        overlap: bool = True,
        counts_steps: bool = False,
    ) -> None:
        """Allocate buckets for the trainable parameters and begin to watch.

        Args:
            parameters: of all modules, each once, in an order equal on all members.
            buffers: to average, or None.
            limit_bytes: size of a bucket.
            strict_unused: make it an error if a trainable parameter gets no gradient.
            overlap: let buckets leave while backward still runs.
            counts_steps: every exchange is a step, for there is no optimizer to count them.
        """
        self.step = self.attempt = self.rounds = 0
        self.exposed_s = 0.0
        self.local = False
        self._waiting, self._agreement, self._ledger = waiting, agreement, ledger
        self._parameters = [item for item in parameters if _differentiable(item[1])]
        self._buffers = buffers
        self._limit = limit_bytes
        self._strict, self._counts_steps = strict_unused, counts_steps
        self._early = overlap
        self._learned = False
        self._noted = False
        self._torn = False
        self._number = 0
        self._exchange: StepExchange | None = None
        self._fired: list[int] = []
        self._late = False
        self._slots: list[Slot | None] = [None] * len(self._parameters)
        self._homes: list[GradientBucket | None] = [None] * len(self._parameters)
        self._buckets: list[GradientBucket] = []
        self._control: GradientBucket | None = None
        self._add([i for i, (_, p) in enumerate(self._parameters) if p.requires_grad], control=1)
        if buffers is not None:
            known = buffers.known
            self._number += len(
                buffers.grow(known, self._number, limit_bytes, waiting.group.allocate)
            )
            buffers.remember()
        self._hooks = BackwardHooks([p for _, p in self._parameters], modules, self)

    def close(self) -> None:
        """Stop watching; gradients move out of the buckets, which can be given back."""
        self._hooks.remove()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and self._waiting.loop.running:
            exchange.abandon()
        for slot in self._slots:
            if slot is not None:
                slot.release()
        self._slots.clear()
        self._homes.clear()
        self._buckets.clear()
        self._buffers = self._control = None

    def stepped(self) -> None:
        """Note that an optimizer has stepped: what was exchanged has been used."""
        if self.attempt:
            self.step += 1
            self.attempt = 0

    def _add(self, indices: Sequence[int], control: int = 0) -> list[GradientBucket]:
        """Put parameters into new buckets, the last with `control` elements of its own."""
        chosen = [self._parameters[index] for index in indices]
        sizes = [
            (carrier(name, p.dtype), p.numel() * (2 if p.is_complex() else 1)) for name, p in chosen
        ]
        plans = plan_buckets(sizes, self._limit)
        if control and not plans:
            plans = [(DTYPES["float32"], [])]
        added = []
        for place, (dtype, planned) in enumerate(plans):
            bucket = GradientBucket.build(
                self._number,
                dtype,
                planned,
                chosen,
                self._waiting.group.allocate,
                control if place == len(plans) - 1 else 0,
            )
            self._number += 1
            added.append(bucket)
            for item, slot in zip(planned, bucket.slots, strict=True):
                self._slots[indices[item.index]] = slot
                self._homes[indices[item.index]] = bucket
        if control:
            # The last to be filled, so that it is no loss that it must wait for the end.
            self._control = added[-1]
        self._buckets.extend(added)
        return added

    # What the hooks tell.

    def begin(self) -> bool:
        """Open a step, unless this backward only accumulates."""
        # A forked child's gradients would go into its parent's buckets.
        self._waiting.loop.check()
        if self.local:
            self._ledger.touch()
            return False
        failure = self._waiting.group.failure
        if failure is not None:
            raise failure
        if self._torn:
            raise SessionError(
                f"an earlier backward of step {self.step} failed after some of its gradients had "
                "left, so this step cannot be completed; end the session, or use "
                "session(..., overlap=False) where backward may fail and be tried again"
            )
        weight = self._ledger.take()
        self._exchange = StepExchange(self._waiting, self.step, self.attempt, weight)
        self._fired = [0] * len(self._parameters)
        self._late = False
        for bucket in self._buckets:
            bucket.open()
        return True

    def before(self, index: int) -> None:
        """Make a parameter ready for accumulation.

        Raises:
            SessionError: its bucket has left already.
        """
        slot, home = self._slots[index], self._homes[index]
        if slot is None or home is None:
            return
        if self._exchange is not None and home.launched:
            self._torn = True
            raise SessionError(
                f"parameter {slot.name} got a second gradient in one backward, after its first "
                "had been sent: it is used inside and outside of a checkpoint with "
                "use_reentrant=True. Use use_reentrant=False, or session(..., overlap=False)"
            )
        slot.before()

    def after(self, index: int) -> None:
        """Take a parameter's gradient; let its bucket leave if it was the last one missing."""
        slot, home = self._slots[index], self._homes[index]
        if self._exchange is None:
            grad = self._parameters[index][1].grad
            # A gradient with a graph of its own is somebody's for a second derivative.
            if slot is not None and grad is not None and not grad.requires_grad:
                slot.absorb()
            return
        self._fired[index] += 1
        if slot is None or home is None:
            self._late = True
            return
        slot.absorb()
        if self._fired[index] > 1:
            # From the first such step on, nothing leaves early any more.
            self._early = False
            return
        home.waiting -= 1
        if home.waiting == 0 and self._early and self._learned and home is not self._control:
            self._leave(home)

    def drop(self) -> None:
        """Forget a backward that failed."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.launched:
            self._torn = True
            exchange.abandon()

    def end(self) -> None:
        """Exchange the rest, wait for the seal and show the result.

        Raises:
            PeerFailedError: a member failed; the gradients are this node's own.
            SchemaError: a parameter is trainable on some members only.
            SessionError: a parameter got no gradient, with ``strict_unused``.
        """
        exchange = self._exchange
        if exchange is None:
            return
        if self._strict:
            self._refuse_unused()
        try:
            self._complete(exchange)
        finally:
            self._exchange = None
        self._learned = True
        self.rounds += 1
        self.attempt += 1
        if self._counts_steps:
            self.stepped()
        self._note_unused()

    def _complete(self, exchange: StepExchange) -> None:
        groups = self._buffers.buckets if self._buffers is not None else []
        for group in groups:
            group.settle(counts=exchange.weight > 0)
            exchange.launch(group.number, group.memory)
        for bucket in self._buckets:
            if not bucket.launched:
                self._leave(bucket)
        sealed, seconds = exchange.finish(self._grows)
        self.exposed_s += seconds
        if not sealed:
            self._grow(exchange)
        for bucket in self._buckets:
            bucket.publish()
        for group in self._buffers.buckets if self._buffers is not None else []:
            group.publish()

    def _grows(self) -> bool:
        """Return whether any member, as the result says, found something new."""
        return self._control is not None and self._control.read_extra()[0] > 0

    def _leave(self, bucket: GradientBucket) -> None:
        assert self._exchange is not None
        news: list[float] = []
        if bucket is self._control:
            changed = self._buffers is not None and bool(self._buffers.changed())
            news = [float(self._late or changed)]
        bucket.settle(news, counts=self._exchange.weight > 0)
        bucket.launched = True
        self._exchange.launch(bucket.number, bucket.memory)

    def _grow(self, exchange: StepExchange) -> None:
        """Take parameters that were unfrozen and buffers that began to change into the step."""
        loose = [
            (index, name)
            for index, (name, parameter) in enumerate(self._parameters)
            if parameter.requires_grad and self._slots[index] is None
        ]
        changed = self._buffers.changed() if self._buffers is not None else []
        found = _Grown([name for _, name in loose], changed)
        heard = self._agreement.gather(f"backward() in step {self.step}", found, _Grown)
        self._refuse_one_sided(heard)
        added = self._add([index for index, _ in loose])
        for bucket in added:
            bucket.open()
            self._leave(bucket)
        if self._buffers is not None:
            names = {name for item in heard for name in item.buffers}
            grown = self._buffers.grow(
                names, self._number, self._limit, self._waiting.group.allocate
            )
            self._number += len(grown)
            for group in grown:
                group.settle(counts=exchange.weight > 0)
                exchange.launch(group.number, group.memory)
        _, seconds = exchange.finish(lambda: False)
        self.exposed_s += seconds

    def _refuse_one_sided(self, heard: Sequence[_Grown]) -> None:
        trainable = [set(item.trainable) for item in heard]
        for name in sorted(set().union(*trainable)):
            sides: tuple[list[str], list[str]] = ([], [])
            for node, names in zip(self._agreement.names, trainable, strict=True):
                sides[name in names].append(node)
            if sides[0]:
                raise SchemaError(
                    f"parameter {name} is trainable on {', '.join(sides[1])} and frozen on "
                    f"{', '.join(sides[0])} at step {self.step}; change requires_grad on all "
                    "nodes in the same step"
                )

    def _missed(self) -> list[str]:
        return [
            name
            for index, (name, parameter) in enumerate(self._parameters)
            if parameter.requires_grad and parameter.grad is None
        ]

    def _refuse_unused(self) -> None:
        missed = [
            name
            for index, (name, parameter) in enumerate(self._parameters)
            if parameter.requires_grad and not self._fired[index]
        ]
        if missed:
            raise SessionError(
                f"no gradient in step {self.step} for {_listed(missed)}, which strict_unused "
                "forbids; use these parameters in the loss, freeze them, or leave strict_unused"
            )

    def _note_unused(self) -> None:
        if self._noted or self._waiting.group.rank:
            return
        missed = self._missed()
        if missed:
            self._noted = True
            logger.warning(
                "no gradient on any node in step %d for %s: they keep their values; "
                "said once, session(..., strict_unused=True) makes it an error",
                self.step,
                _listed(missed),
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
