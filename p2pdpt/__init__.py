"""Train a PyTorch model on many machines with no master.

Everything below is imported when it is first used, so that ``import p2pdpt`` is quick and needs
no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdpt.address import Address, parse_address
    from p2pdpt.config import NodeConfig, RunConfig, read_environ
    from p2pdpt.errors import (
        AddressInUseError,
        AuthenticationError,
        ChannelClosedError,
        ConfigError,
        DeadlockError,
        FrameError,
        GroupError,
        HandshakeError,
        HazardError,
        IncompleteError,
        MismatchError,
        NotEnoughNodesError,
        P2PError,
        PeerFailedError,
        PeerLeftError,
        PluginError,
        RunStartedError,
        SchemaError,
        SessionError,
        TopologyError,
        TransportError,
        UnavailableError,
        UsageError,
        VersionError,
        ViewChangedError,
        WrongRunError,
    )
    from p2pdpt.group import Group
    from p2pdpt.protocol.view import Member, View
    from p2pdpt.runtime.node import Node
    from p2pdpt.topology import (
        ADD,
        ANY,
        COPY,
        MAX,
        MIN,
        PROD,
        Bucket,
        Combine,
        Facts,
        Links,
        Message,
        Recv,
        Region,
        Send,
        Topology,
    )
    from p2pdpt.training import session

    __version__: str

_HOMES = {
    "p2pdpt.address": ("Address", "parse_address"),
    "p2pdpt.config": ("NodeConfig", "RunConfig", "read_environ"),
    "p2pdpt.errors": (
        "AddressInUseError",
        "AuthenticationError",
        "ChannelClosedError",
        "ConfigError",
        "DeadlockError",
        "FrameError",
        "GroupError",
        "HandshakeError",
        "HazardError",
        "IncompleteError",
        "MismatchError",
        "NotEnoughNodesError",
        "P2PError",
        "PeerFailedError",
        "PeerLeftError",
        "PluginError",
        "RunStartedError",
        "SchemaError",
        "SessionError",
        "TopologyError",
        "TransportError",
        "UnavailableError",
        "UsageError",
        "VersionError",
        "ViewChangedError",
        "WrongRunError",
    ),
    "p2pdpt.group": ("Group",),
    "p2pdpt.protocol.view": ("Member", "View"),
    "p2pdpt.runtime.node": ("Node",),
    "p2pdpt.topology": (
        "ADD",
        "ANY",
        "COPY",
        "MAX",
        "MIN",
        "PROD",
        "Bucket",
        "Combine",
        "Facts",
        "Links",
        "Message",
        "Recv",
        "Region",
        "Send",
        "Topology",
    ),
    "p2pdpt.training": ("session",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ADD",
    "ANY",
    "COPY",
    "MAX",
    "MIN",
    "PROD",
    "Address",
    "AddressInUseError",
    "AuthenticationError",
    "Bucket",
    "ChannelClosedError",
    "Combine",
    "ConfigError",
    "DeadlockError",
    "Facts",
    "FrameError",
    "Group",
    "GroupError",
    "HandshakeError",
    "HazardError",
    "IncompleteError",
    "Links",
    "Member",
    "Message",
    "MismatchError",
    "Node",
    "NodeConfig",
    "NotEnoughNodesError",
    "P2PError",
    "PeerFailedError",
    "PeerLeftError",
    "PluginError",
    "Recv",
    "Region",
    "RunConfig",
    "RunStartedError",
    "SchemaError",
    "Send",
    "SessionError",
    "Topology",
    "TopologyError",
    "TransportError",
    "UnavailableError",
    "UsageError",
    "VersionError",
    "View",
    "ViewChangedError",
    "WrongRunError",
    "__version__",
    "parse_address",
    "read_environ",
    "session",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value: Any = version("p2pdpt")
        except PackageNotFoundError:
            # Run from a source tree that was never installed.
            value = "unknown"
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'p2pdpt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
