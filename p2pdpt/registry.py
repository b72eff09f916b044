"""Plugins by name: entry points, loaded only when they are used.

A name is ``ring`` or, where two distributions use one name, ``distribution:ring``. Topologies
take options: ``mapreduce:reducer=0``. What p2pdpt brings itself is never replaced by another
distribution of the same name; that one stays available under its qualified name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import re
import sys
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from p2pdpt.errors import ConfigError, P2PError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from p2pdpt.channel import Transport
    from p2pdpt.runtime.discovery import Discovery
    from p2pdpt.topology import Topology

__all__ = [
    "GROUPS",
    "PluginInfo",
    "create_topology",
    "load_discovery",
    "load_transport",
    "plugins",
]

OWN: Final = "p2pdpt"
GROUPS: Final[dict[str, str]] = {
    "p2pdpt.topologies": "topology",
    "p2pdpt.transports": "transport",
    "p2pdpt.discovery": "discovery",
}
"""The entry-point groups, and what one plugin of each is called."""

logger = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One registered plugin.

    Attributes:
        group: entry-point group, for instance ``p2pdpt.topologies``.
        name: what people choose it by.
        distribution: name of the distribution that registered it.
        version: of the distribution.
        value: where its code is, ``module:object``.
        status: ``ok``, ``unavailable`` on this machine, ``ambiguous`` or ``broken``.
        reason: why, in words.
    """

    group: str
    name: str
    distribution: str
    version: str
    value: str
    status: str
    reason: str


def create_topology(spec: str) -> Topology:
    """Return the topology that `spec` names, with its options.

    Args:
        spec: ``name``, ``name:key=value,key=value`` or ``distribution:name:key=value``.

    Raises:
        PluginError: no such plugin, several of that name, or it does not import.
        ConfigError: an option is unknown or has a wrong value.
    """
    from p2pdpt.topology import Topology

    name, options = _split(spec)
    kind = _load("p2pdpt.topologies", name, Topology)
    types = _options(kind, name)
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in types:
            known = ", ".join(types) or "none"
            raise ConfigError(
                f"topology {name} has no option {key!r}{_nearest(key, types)}; it has: {known}"
            )
        try:
            values[key] = msgspec.convert(text, types[key], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"topology {name}: option {key}={text}: {error}") from None
    try:
        return typing.cast("Topology", kind(**values))
    except (TypeError, ValueError, P2PError) as error:
        raise ConfigError(f"topology {spec!r} cannot be made: {error}") from error


def load_transport(name: str) -> type[Transport]:
    """Return the transport class called `name`.

    Raises:
        PluginError: no such plugin, several of that name, or it does not import.
    """
    from p2pdpt.channel import Transport

    return typing.cast("type[Transport]", _load("p2pdpt.transports", name, Transport))


def load_discovery(name: str) -> type[Discovery]:
    """Return the discovery class called `name`.

    Raises:
        PluginError: no such plugin, several of that name, or it does not import.
    """
    from p2pdpt.runtime.discovery import Discovery

    return typing.cast("type[Discovery]", _load("p2pdpt.discovery", name, Discovery))


def plugins() -> list[PluginInfo]:
    """Return all registered plugins, sorted; imports each to tell whether it works."""
    found = []
    for group in GROUPS:
        entries = _entries(group)
        for entry in entries:
            status, reason = _status(group, entry, entries)
            distribution, version = _origin(entry)
            found.append(
                PluginInfo(group, entry.name, distribution, version, entry.value, status, reason)
            )
    return found


def _entries(group: str) -> list[EntryPoint]:
    return _entries_on(group, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _entries_on(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of a group; reading them takes tens of milliseconds."""
    # Imported here: it costs more than all of `import p2pdpt`.
    from importlib.metadata import entry_points

    # Sorted, so that the order of sys.path changes nothing.
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, *_origin(entry)))


def _origin(entry: EntryPoint) -> tuple[str, str]:
    distribution = entry.dist
    if distribution is None:
        return "unknown", ""
    return _normal(distribution.name), distribution.version


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _split(spec: str) -> tuple[str, dict[str, str]]:
    parts = spec.strip().split(":")
    # The options begin at the first part with a "=": their values may hold colons themselves.
    first = next((i for i, part in enumerate(parts) if "=" in part), len(parts))
    name, written = ":".join(parts[:first]), ":".join(parts[first:])
    if not name or not all(parts[:first]) or first > 2:
        raise PluginError(
            f"topology {spec!r} is not NAME, NAME:key=value,key=value or DISTRIBUTION:NAME"
        )
    options: dict[str, str] = {}
    for pair in written.split(",") if written else ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"topology {spec!r}: {pair!r} is not key=value")
        if key.strip() in options:
            raise ConfigError(f"topology {spec!r}: option {key.strip()} is given twice")
        options[key.strip()] = value.strip()
    return name, options


def _find(group: str, name: str) -> EntryPoint:
    kind = GROUPS[group]
    entries = _entries(group)
    distribution, colon, bare = name.rpartition(":")
    named = [entry for entry in entries if entry.name == bare]
    if colon:
        named = [entry for entry in named if _origin(entry)[0] == _normal(distribution)]
    if not named:
        names = sorted({entry.name for entry in entries})
        hint = _nearest(bare, names)
        where = f" in distribution {distribution}" if colon else ""
        raise PluginError(
            f"there is no {kind} called {bare!r}{where}{hint}; known: {', '.join(names) or 'none'}"
        )
    if len(named) == 1:
        return named[0]
    qualified = ", ".join(sorted({f"{_origin(entry)[0]}:{bare}" for entry in named}))
    own = [entry for entry in named if _origin(entry)[0] == OWN]
    if len(own) != 1:
        raise PluginError(
            f"several distributions bring a {kind} called {bare!r}; choose one of: {qualified}"
        )
    if (group, bare) not in _warned:
        _warned.add((group, bare))
        logger.warning(
            "%s %r is p2pdpt's own; others of that name are used only by: %s",
            kind,
            bare,
            qualified,
        )
    return own[0]


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _load(group: str, name: str, base: type) -> type:
    return _import(group, _find(group, name), base)


def _import(group: str, entry: EntryPoint, base: type) -> type:
    distribution, version = _origin(entry)
    what = f"{GROUPS[group]} {entry.name!r} of {distribution} {version} ({group}: {entry.value})"
    try:
        loaded = entry.load()
    except Exception as error:
        raise PluginError(
            f"{what} does not import: {type(error).__name__}: {error}; repair or uninstall "
            f"{distribution}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise PluginError(f"{what} is not a subclass of {base.__module__}.{base.__qualname__}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise PluginError(f"{what} is not complete: it lacks {missing}")
    return loaded


def _options(kind: type, name: str) -> dict[str, Any]:
    try:
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
        parameters = inspect.signature(kind).parameters.values()
        hints = typing.get_type_hints(vars(kind).get("__init__", kind)) if parameters else {}
    except Exception as error:
        raise PluginError(
            f"the options of topology {name} cannot be told: {type(error).__name__}: {error}"
        ) from error
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: hints.get(p.name, str) for p in parameters if p.kind in named}


def _status(group: str, entry: EntryPoint, entries: list[EntryPoint]) -> tuple[str, str]:
    from p2pdpt.channel import Transport
    from p2pdpt.runtime.discovery import Discovery
    from p2pdpt.topology import Topology

    bases: dict[str, type] = {"topology": Topology, "transport": Transport, "discovery": Discovery}
    try:
        loaded: Any = _import(group, entry, bases[GROUPS[group]])
        availability = getattr(loaded, "availability", None)
        if availability is not None and not (answer := availability()).ok:
            return "unavailable", str(answer.reason)
    except PluginError as error:
        return "broken", str(error)
    except Exception as error:
        return "broken", f"availability() failed: {type(error).__name__}: {error}"
    twins = [other for other in entries if other.name == entry.name]
    if len(twins) > 1 and _origin(entry)[0] != OWN:
        return "ambiguous", f"use {_origin(entry)[0]}:{entry.name}"
    return "ok", ""
