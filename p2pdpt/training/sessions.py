"""Training in a group: what a script says to train its model on all nodes.

::

    with p2pdpt.session(model, optimizer) as s:
        for epoch in s.epochs(10):
            for x, y in s.split(loader):
                loss = criterion(model(x), y)
                loss.backward()                  # returns with the mean gradient of all nodes
                optimizer.step()
                optimizer.zero_grad()
            s.report(**s.mean(loss=loss))

The same script alone, with nobody around, is the same training on one node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from p2pdpt.config import NodeConfig, RunConfig, read_environ
from p2pdpt.errors import P2PError, SessionError
from p2pdpt.registry import create_topology
from p2pdpt.training.agreement import Agreement
from p2pdpt.training.backward import Backward
from p2pdpt.training.buffers import ModelBuffers
from p2pdpt.training.connection import Connection, NodeConnection
from p2pdpt.training.farewell import Ending, end_together
from p2pdpt.training.figures import common_mean, common_sum, plain_number
from p2pdpt.training.loaders import Loaders
from p2pdpt.training.pace import Pace
from p2pdpt.training.report import Reporter
from p2pdpt.training.schema import schema_of
from p2pdpt.training.start import agree_on_model, spread_tensors
from p2pdpt.training.subject import Subject
from p2pdpt.training.waiting import Waiting
from p2pdpt.training.weights import SampleLedger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from p2pdpt.group import Group
    from p2pdpt.training.data import Local, Split

__all__ = ["Session", "session"]

MIB: Final = 1 << 20
LARGEST_SEED: Final = 2**63 - 1
NOT_OPEN: Final = "the session is not open; use it inside `with p2pdpt.session(...) as s:`"


class _Open:
    """The parts of a session that exist while it is open."""

    def __init__(self, group: Group, waiting: Waiting) -> None:
        self.group, self.waiting = group, waiting
        self.agreement = Agreement(waiting)
        self.pace = Pace(time.monotonic)
        self.backward: Backward | None = None
        self.loaders: Loaders | None = None


class Session:
    """One node's training in a group; a context manager, used from one thread."""

    def __init__(
        self,
        connection: Connection,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        seed: int | None = None,
        state: Mapping[str, Any] | None = None,
        bucket_mb: float = 25,
        strict_unused: bool = False,
        average_buffers: bool = True,
        overlap: bool = True,
        exact: bool | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        """Prepare a session over `connection`; ``p2pdpt.session`` says what the rest means.

        Args:
            exact: whether all nodes must end with the same bits; None asks the topology.
            reporter: where events go.
        """
        self._subject = Subject(model, optimizer, state)
        self._connection = connection
        self._bucket_bytes = int(bucket_mb * MIB)
        self._strict, self._overlap, self._exact = strict_unused, overlap, exact
        self._average_buffers = average_buffers
        self._reporter = reporter or Reporter(None, time.monotonic)
        self._seed = torch.initial_seed() % (LARGEST_SEED + 1) if seed is None else seed
        self._ledger = SampleLedger()
        self._metrics: dict[str, float] = {}
        self._loss: float | None = None
        self._hooks = contextlib.ExitStack()
        self._open: _Open | None = None
        self._used = self._ended = False
        self._pid = os.getpid()
        if self._bucket_bytes < 1:
            raise SessionError("bucket_mb must be more than 0; 25 is usual")
        if not 0 <= self._seed <= LARGEST_SEED:
            raise SessionError(f"seed must be from 0 to {LARGEST_SEED}, not {self._seed}")

    # Beginning and end.

    def __enter__(self) -> Session:
        """Join the run, compare models and take the first node's parameters and buffers.

        Raises:
            NotEnoughNodesError: the nodes never came.
            SchemaError: the nodes' models differ; lists the differences.
            SessionError: optimizer or other state differs, or the session was used before.
            PeerFailedError: a member failed meanwhile.
        """
        if self._used:
            raise SessionError("a session can be entered once; make another p2pdpt.session(...)")
        self._used = True
        try:
            self._begin()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _begin(self) -> None:
        group = self._connection.open()
        open_ = self._open = _Open(group, Waiting(self._connection.loop, group))
        open_.waiting.start()
        subject, agreement = self._subject, open_.agreement
        self._reporter.event(
            "joined",
            id=group.me.node_id,
            name=group.me.name,
            rank=group.rank,
            members=agreement.names,
            topology=group.topology,
            transport=group.transport,
            address=group.me.address,
        )
        settings = subject.settings()
        settings["bucket_mb"] = f"{self._bucket_bytes / MIB:g}"
        settings["average_buffers"] = str(self._average_buffers)
        schema = schema_of(subject.models, settings)
        self._seed = agree_on_model(agreement, schema, self._seed, subject.state())
        spread_tensors(open_.waiting, subject.tensors())
        open_.loaders = Loaders(agreement, group.rank, group.size, self._ledger, self._seed)
        open_.backward = Backward(
            open_.waiting,
            agreement,
            subject.models,
            list(subject.parameters()),
            ModelBuffers(subject.models) if self._average_buffers else None,
            self._ledger,
            limit_bytes=self._bucket_bytes,
            strict_unused=self._strict,
            overlap=self._overlap,
            counts_steps=not subject.optimizers,
        )
        self._hooks.enter_context(subject.hooked(self._stepped))
        open_.pace = Pace(time.monotonic)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the run: together if this node is done, at once with the error otherwise.

        Raises:
            SessionError: the nodes' parameters are not equal, or they ended in different places.
            PeerFailedError: a member failed before all were done.
        """
        if self._pid != os.getpid():
            # A forked child on its way out; the session is its parent's.
            return
        if error is not None and not _is_success(error):
            self._fail(error)
            return
        try:
            self._finish()
        except BaseException as failure:
            self._fail(failure)
            raise
        self._release()
        self._connection.close()

    def _finish(self) -> None:
        group, backward = self._live.group, self._backward
        rates = self._live.pace.overall(self.step, self._ledger.samples)
        backward.close()
        exact = self._exact
        if exact is None:
            exact = create_topology(group.topology).agreement == "exact"
        ending = Ending(self.step, self.digest())
        details = self._subject.digests
        end_together(self._live.agreement, ending, exact=exact, details=details)
        self._reporter.event(
            "finished",
            id=group.me.node_id,
            name=group.me.name,
            digest=ending.digest,
            steps=ending.steps,
            bytes_sent=group.counters.bytes_sent,
            exposed_s=backward.exposed_s,
            metrics=self._metrics,
            **rates,
        )

    def _fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        backward = self._open.backward if self._open is not None else None
        step = backward.step if backward is not None else 0
        self._reporter.event("failed", error=text, kind=type(error).__name__, step=step)
        try:
            self._release()
        finally:
            agreed = isinstance(error, P2PError) and error.agreed
            self._connection.close(None if agreed else text)

    def _release(self) -> None:
        self._ended = True
        self._hooks.close()
        if self._open is not None:
            if self._open.backward is not None:
                self._open.backward.close()
            self._open.waiting.stop()

    @property
    def _live(self) -> _Open:
        if self._open is None or self._ended:
            raise SessionError(NOT_OPEN)
        return self._open

    # What these count can be asked for when the session has ended, too.

    @property
    def _backward(self) -> Backward:
        if self._open is None or self._open.backward is None:
            raise SessionError(NOT_OPEN)
        return self._open.backward

    @property
    def _loaders(self) -> Loaders:
        if self._open is None or self._open.loaders is None:
            raise SessionError(NOT_OPEN)
        return self._open.loaders

    # What a script asks.

    @property
    def seed(self) -> int:
        """The same on all nodes once the session is open, for what must be drawn alike."""
        return self._seed

    @property
    def rank(self) -> int:
        """This node's place among the members, from 0."""
        return self._live.group.rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._live.group.size

    @property
    def is_first(self) -> bool:
        """Whether this node is the one to do what should be done once."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        for _, parameter in self._subject.parameters():
            return parameter.device
        return torch.device("cpu")

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self._backward.step

    @property
    def epoch(self) -> int:
        """The pass over the data that ``epochs`` is in."""
        return self._loaders.epoch

    @property
    def rounds(self) -> int:
        """Backwards exchanged."""
        return self._backward.rounds

    @property
    def exposed_s(self) -> float:
        """Seconds that backward has waited for the network."""
        return self._backward.exposed_s

    def digest(self) -> str:
        """Return the SHA-256 over all parameters and buffers, as hex; local."""
        return self._subject.digest()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of `count` passes over the data, from 0."""
        for epoch in range(count):
            self._loaders.epoch = epoch
            yield epoch

    def split(self, loader: Iterable[Any], *, per_node: bool = False, train: bool = True) -> Split:
        """Return an iterable over this node's part of each batch of `loader`.

        The loader's batch is the batch of all nodes together, in an order that depends on the
        seed and the epoch only. All nodes get the same number of batches; one whose part of a
        batch is empty repeats an earlier batch, which counts nothing.

        Args:
            loader: a DataLoader, which is rebuilt, or any iterable over batches that is the same
                on all nodes, whose tensors are cut along their first dimension.
            per_node: give each node whole batches in turn: the common batch grows with the nodes.
            train: False for evaluation: every sample exactly once, on one node.

        Raises:
            SessionError: the loader divides the data itself, or is not the same on all nodes
                (when the iteration begins).
        """
        return self._loaders.split(loader, per_node=per_node, train=train)

    def local(self, loader: Iterable[Any]) -> Local:
        """Return an iterable over a loader of this node's own data, until all nodes are done.

        Nodes may have different numbers and sizes of batches; one that is done repeats its last
        with weight 0. The nodes agree before each batch.

        Raises:
            SessionError: some node has no batch at all (when the iteration begins).
        """
        return self._loaders.local(loader)

    def weight(self, weight: float) -> None:
        """Let the current batch count as `weight` instead of its number of samples.

        For losses that are means over something else, for instance tokens. Call it before
        ``backward``. A repeated batch keeps weight 0.

        Raises:
            SessionError: the weight is negative or not finite.
        """
        self._ledger.override(weight)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep backwards inside the block local; the next one outside exchanges the sum."""
        backward = self._backward
        before, backward.local = backward.local, True
        try:
            yield
        finally:
            backward.local = before

    def sum(self, **values: float | torch.Tensor) -> dict[str, float]:
        """Return the sums over all nodes, in float64; all nodes call it with the same names.

        Args:
            values: numbers or tensors of one element.

        Raises:
            SessionError: the nodes called different things.
        """
        return common_sum(self._live.agreement, values)

    def mean(
        self, *, weight: float | None = None, **values: float | torch.Tensor
    ) -> dict[str, float]:
        """Return the means over all nodes, in float64; all nodes call it with the same names.

        Args:
            weight: of this node's values, for instance its number of samples; default equal.
            values: numbers or tensors of one element.
        A total weight of 0 gives NaN.

        Raises:
            SessionError: the nodes called different things, or a weight is negative.
        """
        means = common_mean(self._live.agreement, values, weight)
        self._loss = means.get("loss", self._loss)
        return means

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Show numbers, and keep them for the summary; local, nobody waits."""
        plain = {
            name: plain_number(value) if isinstance(value, torch.Tensor) else value
            for name, value in metrics.items()
        }
        self._metrics.update(plain)
        self._loss = plain.get("loss", self._loss)
        self._reporter.report(self.step, self.epoch, plain, self.is_first)

    def _stepped(self) -> None:
        self._backward.stepped()
        self._reporter.progress(self._progress)

    def _progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "bytes_sent": self._live.group.counters.bytes_sent,
            "exposed_s": self.exposed_s,
            "loss": self._loss,
            **self._live.pace.recent(self.step, self._ledger.samples),
        }


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def session(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    topology: str | None = None,
    run: str | None = None,
    min_nodes: int | None = None,
    seed: int | None = None,
    state: Mapping[str, Any] | None = None,
    patience: float | None = None,
    bucket_mb: float = 25,
    strict_unused: bool = False,
    average_buffers: bool = True,
    overlap: bool = True,
) -> Session:
    """Return a session in which `model` is trained together with the other nodes of the run.

    Where the environment (``P2PDPT_*``, as ``p2pdpt run`` sets it) says something, it wins over
    the arguments. Where neither names a run or peers, this node trains alone, by the same code.

    Args:
        model: a module, or several; all nodes start from the first node's values.
        optimizer: one, several or none; hooked, never replaced.
        topology: how gradients are exchanged, for instance ``ring`` or ``mapreduce``.
        run: name of the run to join.
        min_nodes: how many nodes to wait for.
        seed: what the order of the data is drawn from; default torch's initial seed. The first
            node's counts.
        state: objects with ``state_dict()``, such as a scheduler, that must be equal at the start.
        patience: seconds of silence after which a peer counts as dead.
        bucket_mb: size of a bucket in MiB.
        strict_unused: make it an error if a trainable parameter gets no gradient.
        average_buffers: keep floating-point buffers that training changes equal on all nodes, as
            their weighted mean after each step.
        overlap: send gradients while backward still computes others.

    Raises:
        ConfigError: an argument or an environment variable is wrong.
        SessionError: the model or an optimizer cannot be trained this way.
    """
    environ = read_environ(os.environ)
    node_values: dict[str, Any] = {} if patience is None else {"patience": patience}
    run_values: dict[str, Any] = {
        key: value
        for key, value in (
            ("topology", topology),
            ("run", run),
            ("min_nodes", min_nodes),
            ("seed", seed),
        )
        if value is not None
    }
    node_values.update(environ.node)
    run_values.update(environ.run)
    alone = not (
        {"run"} & run_values.keys()
        or {"join", "listen"} & node_values.keys()
        or run_values.get("min_nodes", 1) > 1
    )
    if alone:
        node_values["discovery"] = ()
        run_values["run"] = f"alone-{secrets.token_hex(4)}"
    run_config = RunConfig(**run_values)
    return Session(
        NodeConnection(NodeConfig(**node_values), run_config),
        model,
        optimizer,
        seed=run_config.seed,
        state=state,
        bucket_mb=bucket_mb,
        strict_unused=strict_unused,
        average_buffers=average_buffers,
        overlap=overlap,
        reporter=Reporter(environ.report_fd, time.monotonic),
    )
