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
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch.utils.data import DataLoader

from p2pdpt.config import NodeConfig, RunConfig, read_environ
from p2pdpt.errors import P2PError, SessionError
from p2pdpt.training.agreement import Agreement
from p2pdpt.training.backward import Backward
from p2pdpt.training.buffers import ModelBuffers
from p2pdpt.training.connection import Connection, NodeConnection
from p2pdpt.training.data import Local, Split, mix_seed
from p2pdpt.training.digest import module_digest
from p2pdpt.training.report import Reporter
from p2pdpt.training.schema import schema_of
from p2pdpt.training.start import agree_on_model, spread_tensors
from p2pdpt.training.waiting import Waiting
from p2pdpt.training.weights import SampleLedger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle

    from p2pdpt.group import Group

__all__ = ["Session", "session"]

MIB: Final = 1 << 20
LARGEST_SEED: Final = 2**63 - 1


class _Values(msgspec.Struct, array_like=True):
    """Numbers of one member, and its weight."""

    values: list[float]
    weight: float


class _Loader(msgspec.Struct, array_like=True):
    """What must agree about a loader that is divided: samples, batches, its own seed."""

    samples: int
    batches: int
    base: int | None


class _Farewell(msgspec.Struct, array_like=True):
    """How a member ends: finished steps and the digest of its model."""

    steps: int
    digest: str


class Session:
    """One node's training in a group; a context manager, used from one thread.

    Attributes:
        seed: the same on all nodes, for what must be drawn alike.
        epoch: the pass over the data that ``epochs`` is in.
    """

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
        exact: bool = True,
        reporter: Reporter | None = None,
    ) -> None:
        """Prepare a session over `connection`; ``p2pdpt.session`` says what the rest means.

        Args:
            exact: whether all nodes must end with the same bits.
            reporter: where events go.
        """
        self._connection = connection
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model)
        if optimizer is None:
            self._optimizers: list[torch.optim.Optimizer] = []
        elif isinstance(optimizer, torch.optim.Optimizer):
            self._optimizers = [optimizer]
        else:
            self._optimizers = list(optimizer)
        self._state = dict(state or {})
        self._bucket_bytes = int(bucket_mb * MIB)
        self._strict, self._overlap, self._exact = strict_unused, overlap, exact
        self._average_buffers = average_buffers
        self._reporter = reporter or Reporter(None, time.monotonic)
        self.seed = torch.initial_seed() % (LARGEST_SEED + 1) if seed is None else seed
        self.epoch = 0
        self._ledger = SampleLedger()
        # Kept so that a rebuilt loader keeps its workers from epoch to epoch.
        self._splits: WeakKeyDictionary[Any, dict[tuple[bool, bool], Split]] = WeakKeyDictionary()
        # How many iterations began in an epoch, for training and for evaluation: an order of its
        # own for each, the same on all nodes as their calls are.
        self._uses: dict[tuple[int, bool], int] = {}
        self._metrics: dict[str, float] = {}
        self._loss: float | None = None
        self._handles: list[RemovableHandle] = []
        self._group: Group | None = None
        self._waiting: Waiting | None = None
        self._agreement: Agreement | None = None
        self._backward: Backward | None = None
        self._began = 0.0
        self._used = False
        self._marks: tuple[float, int, float] = (0.0, 0, 0.0)
        self._check_arguments()

    def _check_arguments(self) -> None:
        if not self._models or not all(isinstance(m, torch.nn.Module) for m in self._models):
            raise SessionError("p2pdpt.session(model) takes a torch.nn.Module, or a list of them")
        if self._bucket_bytes < 1:
            raise SessionError("bucket_mb must be more than 0; 25 is usual")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SessionError(f"seed must be from 0 to {LARGEST_SEED}, not {self.seed}")
        for name, parameter in self._parameters():
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise SessionError(
                    f"parameter {name} has no shape yet; run one batch through the model before "
                    "p2pdpt.session(...)"
                )
            if parameter.device.type != "cpu":
                raise SessionError(
                    f"parameter {name} is on {parameter.device}; only models in main memory can "
                    "be trained so far: use model.to('cpu')"
                )
        known = {id(parameter) for _, parameter in self._parameters()}
        for optimizer in self._optimizers:
            kind = type(optimizer).__name__
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise SessionError(f"{kind} is no torch.optim.Optimizer")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise SessionError(_closure_text(kind))
            strange = sum(
                id(parameter) not in known
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
            if strange:
                raise SessionError(
                    f"{kind} has {strange} parameters of no model of this session, which would "
                    "stay different on each node; give all models: session([model, head], ...)"
                )

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    def _buffers(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for model in self._models:
            for buffer in model.buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield buffer

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
            self._open()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _open(self) -> None:
        group = self._group = self._connection.open()
        waiting = self._waiting = Waiting(self._connection.loop, group)
        agreement = self._agreement = Agreement(waiting)
        waiting.start()
        me = group.me
        self._reporter.event(
            "joined",
            id=me.node_id,
            name=me.name,
            rank=group.rank,
            members=agreement.names,
            topology=group.topology,
            transport=group.transport,
            address=me.address,
        )
        schema = schema_of(self._models, self._settings())
        state: dict[str, Any] = {
            f"optimizer {index} ({type(each).__name__})": each
            for index, each in enumerate(self._optimizers)
        }
        state.update((f"state[{name!r}]", each) for name, each in self._state.items())
        self.seed = agree_on_model(agreement, schema, self.seed, state)
        parameters = list(self._parameters())
        spread_tensors(waiting, [*(p for _, p in parameters), *self._buffers()])
        self._backward = Backward(
            waiting,
            agreement,
            self._models,
            parameters,
            ModelBuffers(self._models) if self._average_buffers else None,
            self._ledger,
            limit_bytes=self._bucket_bytes,
            strict_unused=self._strict,
            overlap=self._overlap,
            counts_steps=not self._optimizers,
        )
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self._began = time.monotonic()
        self._marks = (self._began, 0, 0.0)

    def _settings(self) -> dict[str, str]:
        settings = {
            "bucket_mb": f"{self._bucket_bytes / MIB:g}",
            "average_buffers": str(self._average_buffers),
            "models": str(len(self._models)),
            "optimizers": str(len(self._optimizers)),
        }
        names = {id(parameter): name for name, parameter in self._parameters()}
        for index, optimizer in enumerate(self._optimizers):
            groups = [
                mix_seed(*(names[id(each)] for each in group["params"]))
                for group in optimizer.param_groups
            ]
            sizes = "+".join(str(len(group["params"])) for group in optimizer.param_groups)
            settings[f"optimizer {index}"] = (
                f"{type(optimizer).__name__} of {sizes} parameters "
                f"({mix_seed(*groups) % 2**24:06x})"
            )
        return settings

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
        group, backward = self._live, self._steps
        seconds = time.monotonic() - self._began
        backward.close()
        digest = self.digest()
        agreement = cast("Agreement", self._agreement)
        ends = agreement.gather("the end of the session", _Farewell(self.step, digest), _Farewell)
        if self._exact:
            _compare_ends(agreement.names, ends)
        # Whoever hears all of this second call knows that all have finished the first, so that
        # nobody's leaving can disturb it; whoever leaves during this one has.
        with contextlib.suppress(P2PError):
            agreement.gather("the end of the session, all heard", "", str)
        per_second = 1 / seconds if seconds > 0 else 0.0
        self._reporter.event(
            "finished",
            id=group.me.node_id,
            name=group.me.name,
            digest=digest,
            steps=self.step,
            samples_per_s=self._ledger.samples * per_second,
            steps_per_s=self.step * per_second,
            bytes_sent=group.counters.bytes_sent,
            exposed_s=backward.exposed_s,
            seconds=seconds,
            metrics=self._metrics,
        )

    def _fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._reporter.event(
            "failed",
            error=text,
            kind=type(error).__name__,
            step=self._backward.step if self._backward is not None else 0,
        )
        try:
            self._release()
        finally:
            self._connection.close(text)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._backward is not None:
            self._backward.close()
        if self._waiting is not None:
            self._waiting.stop()
        self._group = None

    @property
    def _live(self) -> Group:
        if self._group is None:
            raise SessionError(
                "the session is not open; use it inside `with p2pdpt.session(...) as s:`"
            )
        return self._group

    @property
    def _steps(self) -> Backward:
        if self._backward is None:
            raise SessionError(
                "the session is not open; use it inside `with p2pdpt.session(...) as s:`"
            )
        return self._backward

    # What a script asks.

    @property
    def rank(self) -> int:
        """This node's place among the members, from 0."""
        return self._live.rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._live.size

    @property
    def is_first(self) -> bool:
        """Whether this node is the one to do what should be done once."""
        return self._live.rank == 0

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        for _, parameter in self._parameters():
            return parameter.device
        return torch.device("cpu")

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self._steps.step

    @property
    def exposed_s(self) -> float:
        """Seconds that backward has waited for the network."""
        return self._steps.exposed_s

    @property
    def rounds(self) -> int:
        """Backwards exchanged."""
        return self._steps.rounds

    def digest(self) -> str:
        """Return the SHA-256 over all parameters and buffers, as hex; local."""
        return module_digest(self._models)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of `count` passes over the data, from 0."""
        for epoch in range(count):
            self.epoch = epoch
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
        group = self._live
        kept: dict[tuple[bool, bool], Split] = {}
        if isinstance(loader, DataLoader):
            kept = self._splits.setdefault(loader, {})
        if (per_node, train) not in kept:
            length = _length(getattr(loader, "dataset", None)), _length(loader)
            kept[per_node, train] = Split(
                loader,
                group.rank,
                group.size,
                seed=lambda base: self._split_seed(length, base, train),
                hand=self._ledger.hand if train else _ignore,
                per_node=per_node,
                train=train,
            )
        return kept[per_node, train]

    def _split_seed(self, length: tuple[int, int], base: int | None, train: bool) -> int:
        use = self._uses.get((self.epoch, train), 0)
        self._uses[self.epoch, train] = use + 1
        if train and self.size > 1:
            mine = _Loader(*length, base)
            agreement = cast("Agreement", self._agreement)
            heard = agreement.gather("s.split(loader)", mine, _Loader)
            for what, numbers in (
                ("samples", [each.samples for each in heard]),
                ("batches", [each.batches for each in heard]),
            ):
                if len(set(numbers)) > 1:
                    listed = ", ".join(
                        f"{number} on {name}"
                        for name, number in zip(agreement.names, numbers, strict=True)
                    )
                    raise SessionError(
                        f"s.split(loader): the loaders have different numbers of {what}: "
                        f"{listed}. Use the same data set and batch size on every node, or "
                        "s.local(loader) for data of each node's own"
                    )
            base = heard[0].base
        return mix_seed(self.seed if base is None else base, self.epoch, use)

    def local(self, loader: Iterable[Any]) -> Local:
        """Return an iterable over a loader of this node's own data, until all nodes are done.

        Nodes may have different numbers and sizes of batches; one that is done repeats its last
        with weight 0. The nodes agree before each batch.

        Raises:
            SessionError: some node has no batch at all (when the iteration begins).
        """
        agreement = cast("Agreement", self._agreement)
        return Local(
            loader,
            self._live.rank,
            agree=lambda has: agreement.gather("s.local(loader)", has, bool),
            names=agreement.names,
            hand=self._ledger.hand,
        )

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
        backward = self._steps
        before, backward.local = backward.local, True
        try:
            yield
        finally:
            backward.local = before

    def sum(self, **values: float) -> dict[str, float]:
        """Return the sums over all nodes, in float64; all nodes call it with the same names.

        Raises:
            SessionError: the nodes called different things.
        """
        heard = self._gather_values("s.sum", values, 1.0)
        return {
            name: float(sum(each.values[place] for each in heard))
            for place, name in enumerate(values)
        }

    def mean(self, *, weight: float | None = None, **values: float) -> dict[str, float]:
        """Return the means over all nodes, in float64; all nodes call it with the same names.

        Args:
            weight: of this node's values, for instance its number of samples; default equal.
            values: numbers or tensors of one element.
        A total weight of 0 gives NaN.

        Raises:
            SessionError: the nodes called different things, or a weight is negative.
        """
        own = 1.0 if weight is None else float(weight)
        if not own >= 0:
            raise SessionError(f"s.mean: a weight must be 0 or more, not {own}")
        heard = self._gather_values("s.mean", values, own)
        total = float(sum(each.weight for each in heard))
        means = {}
        for place, name in enumerate(values):
            # What counts nothing must not spoil the rest, be it NaN.
            added = sum(each.weight * each.values[place] for each in heard if each.weight)
            means[name] = added / total if total else float("nan")
        if "loss" in means:
            self._loss = means["loss"]
        return means

    def _gather_values(
        self, call: str, values: Mapping[str, float], weight: float
    ) -> list[_Values]:
        mine = _Values([_number(value) for value in values.values()], weight)
        self._live  # noqa: B018  # raises where there is no group
        agreement = cast("Agreement", self._agreement)
        return agreement.gather(f"{call}({', '.join(values)})", mine, _Values)

    def report(self, **metrics: float) -> None:
        """Show numbers, and keep them for the summary; local, nobody waits."""
        plain = {
            name: _number(value) if isinstance(value, torch.Tensor) else value
            for name, value in metrics.items()
        }
        self._metrics.update(plain)
        if "loss" in plain:
            self._loss = plain["loss"]
        self._reporter.report(self.step, self.epoch, plain, self.is_first)

    # What optimizers do.

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # The hook's arguments begin with the optimizer itself in some versions of torch.
        given = [each for each in args if each is not optimizer]
        if any(each is not None for each in given) or kwargs.get("closure") is not None:
            raise SessionError(_closure_text(type(optimizer).__name__))

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._steps.stepped()
        self._reporter.progress(self._progress)

    def _progress(self) -> dict[str, Any]:
        then, steps, samples = self._marks
        now = time.monotonic()
        self._marks = (now, self.step, self._ledger.samples)
        seconds = max(now - then, 1e-9)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "samples_per_s": (self._ledger.samples - samples) / seconds,
            "steps_per_s": (self.step - steps) / seconds,
            "bytes_sent": self._live.counters.bytes_sent,
            "exposed_s": self.exposed_s,
            "loss": self._loss,
        }


def _number(value: float | torch.Tensor) -> float:
    """Return a number, also of a tensor of one element that has a graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _ignore(samples: float) -> None:
    """Take no notice: evaluation does not weigh gradients."""


def _length(thing: object) -> int:
    try:
        return len(thing)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _closure_text(kind: str) -> str:
    return (
        f"{kind}.step(closure) runs backward an unknown number of times and cannot be trained in "
        "a group; call backward() yourself and then step() without a closure"
    )


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _compare_ends(names: Sequence[str], ends: Sequence[_Farewell]) -> None:
    """Check that all members trained the same.

    Raises:
        SessionError: digests differ; says whose.
    """
    groups: dict[str, list[str]] = {}
    for name, end in zip(names, ends, strict=True):
        groups.setdefault(f"{end.digest[:12]} after {end.steps} steps", []).append(name)
    if len(groups) > 1:
        listed = ", ".join(f"{text} on {', '.join(who)}" for text, who in groups.items())
        raise SessionError(
            f"the nodes' parameters and buffers are not equal at the end: {listed}. Something "
            "changed them on one node only: a step taken or skipped there, a different learning "
            "rate, or a write to a parameter outside the optimizer"
        )


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
    from p2pdpt.registry import create_topology

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
        exact=create_topology(run_config.topology).agreement == "exact",
        reporter=Reporter(environ.report_fd, time.monotonic),
    )
