"""What a node and a run are told, and the environment variables that tell it.

Every value is checked when it is made; an error names the key and the fix. Precedence is the
caller's: flag, environment, file, argument, default. Secrets are read from files, and never
appear in a ``repr``.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from p2pdpt.address import parse_address
from p2pdpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ENVIRONMENT",
    "SHARED",
    "Environ",
    "NodeConfig",
    "RunConfig",
    "read_environ",
    "read_secret",
]

_N = TypeVar("_N", int, float)
SHARED: Final = "shm"
"""What memory shared on one host is called among the transports."""
NAME_LENGTH: Final = 64
"""The longest name of a node, a run or a cluster, in characters."""
SECRET_BYTES: Final = 16
"""The shortest secret, in bytes."""


def _name(key: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be text, not {value!r}")
    if not value and not empty:
        raise ConfigError(f"{key} is empty; give it a name")
    if len(value) > NAME_LENGTH or not value.isprintable() or value != value.strip():
        raise ConfigError(
            f"{key} {value!r} is not 1 to {NAME_LENGTH} printable characters without blanks "
            "around them"
        )


def _number(key: str, value: object, low: float, high: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} must be a number of {unit}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{key} is {value:g}; it must lie between {low:g} and {high:g} {unit}")


def _whole(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} must be a whole number from {low} to {high}, not {value!r}")


def _listed(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list):
        raise ConfigError(f"{key} must be a list of texts, not {value!r}")
    for each in value:
        if not isinstance(each, str):
            raise ConfigError(f"{key} must be a list of texts; {each!r} is none")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """How a node is reached and whom it trusts.

    Attributes:
        name: what people call the node; empty: the machine's name.
        cluster: nodes of other clusters are refused.
        listen: ``host:port`` to accept connections at; port 0 is any free one.
        join: ``host:port`` of nodes to look for, one is enough.
        discovery: names of the ways to find peers; none: the node is alone and does not listen.
        transports: names of the transports to carry bulk, best first; ``shm`` shares memory if
            all members of the run can, and alone it must.
        secret: what all nodes of the cluster share, at least 16 bytes; None: loopback only.
        secret_file: a file of mode 0600 that holds it instead.
        patience: seconds of silence after which a peer counts as dead.
    """

    name: str = ""
    cluster: str = "default"
    listen: str = "127.0.0.1:0"
    join: tuple[str, ...] = ()
    discovery: tuple[str, ...] = ("static", "local")
    transports: tuple[str, ...] = ("shm", "tcp")
    secret: bytes | None = field(default=None, repr=False)
    secret_file: str | os.PathLike[str] | None = None
    patience: float = 10.0

    def __post_init__(self) -> None:
        _name("name", self.name, empty=True)
        _name("cluster", self.cluster)
        for key in ("join", "discovery", "transports"):
            object.__setattr__(self, key, _listed(key, getattr(self, key)))
        if not isinstance(self.listen, str):
            raise ConfigError(f"listen must be host:port, not {self.listen!r}")
        parse_address(self.listen, what="listen")
        for address in self.join:
            if parse_address(address, what="join").port == 0:
                raise ConfigError(f"join {address!r}: port 0 cannot be connected to")
        if self.join and "static" not in self.discovery:
            raise ConfigError("join is given, but discovery does not include 'static'")
        if not self.transports:
            raise ConfigError("transports is empty; name at least one, for instance tcp")
        _number("patience", self.patience, 0.1, 86400, "seconds")
        if self.secret is not None:
            if self.secret_file is not None:
                raise ConfigError("secret and secret_file are both given; give one")
            _check_secret(self.secret, "secret")

    def read_secret(self) -> bytes | None:
        """Return the cluster's secret, from the file if one is named; None if there is none.

        Raises:
            ConfigError: the file cannot be read, is open to others, or is too short.
        """
        return self.secret if self.secret_file is None else read_secret(self.secret_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Which run a node joins, and what the run begins with.

    Attributes:
        run: the run's name; nodes of other runs are never mixed in.
        min_nodes: how many nodes, this one included, the run waits for.
        topology: name and options, for instance ``mapreduce:reducer=0``; the first member's
            counts.
        wait: seconds to wait for them.
        seed: of the run, 0 to 2**63 - 1; None draws one. The first member's counts.
    """

    run: str = "default"
    min_nodes: int = 1
    topology: str = "ring"
    wait: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _name("run", self.run)
        _whole("min_nodes", self.min_nodes, 1, 4096)
        if not isinstance(self.topology, str) or not self.topology:
            raise ConfigError(f"topology must be a name such as ring, not {self.topology!r}")
        if len(self.topology) > 1024:
            raise ConfigError(f"topology is {len(self.topology)} characters long; at most 1024")
        _number("wait", self.wait, 0, 31536000, "seconds")
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)


def _check_secret(secret: object, what: str) -> bytes:
    if not isinstance(secret, bytes):
        raise ConfigError(f"{what} must be bytes, not {type(secret).__name__}")
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            f"{what} has {len(secret)} bytes; at least {SECRET_BYTES} are needed, for instance "
            "from: openssl rand -hex 32"
        )
    return secret


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in a file, without the blanks and line ends around it.

    Raises:
        ConfigError: it cannot be read, others may read or write it, or it is too short.
    """
    shown = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(4097).strip()
    except OSError as error:
        raise ConfigError(f"secret_file {shown!r} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"secret_file {shown!r} has mode {mode:04o}, so that others can use it; "
            f"type: chmod 600 {shown}"
        )
    if len(secret) > 4096:
        raise ConfigError(f"secret_file {shown!r} is longer than 4096 bytes")
    return _check_secret(secret, f"the secret in {shown!r}")


ENVIRONMENT: Final[Mapping[str, tuple[str, str]]] = {
    "P2PDPT_NAME": ("node", "name"),
    "P2PDPT_CLUSTER": ("node", "cluster"),
    "P2PDPT_LISTEN": ("node", "listen"),
    "P2PDPT_JOIN": ("node", "join"),
    "P2PDPT_TRANSPORT": ("node", "transports"),
    "P2PDPT_SECRET_FILE": ("node", "secret_file"),
    "P2PDPT_PATIENCE": ("node", "patience"),
    "P2PDPT_RUN": ("run", "run"),
    "P2PDPT_MIN_NODES": ("run", "min_nodes"),
    "P2PDPT_TOPOLOGY": ("run", "topology"),
    "P2PDPT_WAIT": ("run", "wait"),
    "P2PDPT_SEED": ("run", "seed"),
}
"""For each variable, whether it is about the node or the run, and the field it sets."""


@dataclass(frozen=True, slots=True)
class Environ:
    """What the environment says; laid over other values, for instance ``NodeConfig(**e.node)``.

    Attributes:
        node: fields of :class:`NodeConfig` that are given.
        run: fields of :class:`RunConfig` that are given.
        report_fd: the file descriptor for a launcher's reports (``P2PDPT_REPORT_FD``), if any.
    """

    node: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    report_fd: int | None = None

    @property
    def given(self) -> bool:
        """Whether the environment says anything about a node or a run."""
        return bool(self.node or self.run)


def read_environ(environ: Mapping[str, str]) -> Environ:
    """Return what the ``P2PDPT_*`` variables say; empty ones count as not given.

    Raises:
        ConfigError: a value is wrong; the text names the variable.
    """
    parts: dict[str, dict[str, Any]] = {"node": {}, "run": {}}
    kinds = {f.name: f.type for f in (*fields(NodeConfig), *fields(RunConfig))}
    for variable, (part, key) in ENVIRONMENT.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        value: Any = text
        if key in ("join", "transports"):
            value = tuple(each.strip() for each in text.split(",") if each.strip())
        elif kinds[key] in ("int", "int | None"):
            value = _convert(variable, text, int)
        elif kinds[key] == "float":
            value = _convert(variable, text, float)
        parts[part][key] = value
        try:
            # Each value alone, so that the error can name its variable.
            (NodeConfig if part == "node" else RunConfig)(**{key: value})
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
    report = environ.get("P2PDPT_REPORT_FD", "").strip()
    descriptor = _convert("P2PDPT_REPORT_FD", report, int) if report else None
    return Environ(parts["node"], parts["run"], descriptor)


def _convert(variable: str, text: str, kind: type[_N]) -> _N:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{variable}: {text!r} is not {wanted}") from None
