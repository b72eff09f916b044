"""Every error that p2pdpt raises, as one tree.

The text of each names the cause, the peer, the operation and the step where they are known, and
what to do. Nothing else reaches a user: no bare ``CancelledError``, ``KeyError`` or struct error.

    P2PError
      UsageError                what was asked cannot be done: exit code 2
        ConfigError             a key, a value, a flag or an address
        PluginError             a plugin that is unknown, ambiguous or does not import
        UnavailableError        a transport or a compiled part that this machine cannot use
        AddressInUseError       the port asked for is taken
      TopologyError             a plugin broke the rules of topology.py
        HazardError             two writes to one element, or a write to a region in flight
        MismatchError           a send and its receive differ, or one of them is missing
        DeadlockError           nothing can move any more (simulator)
        IncompleteError         an exchange ended without the whole result
      TransportError            bytes
        FrameError              bytes that are not our protocol, or beyond its bounds
        ChannelClosedError      the connection ended
      HandshakeError            a peer that may not come in
        VersionError            it speaks another protocol version
        AuthenticationError     it does not hold the cluster's secret
        WrongRunError           it belongs to another cluster or run
      GroupError                the run
        NotEnoughNodesError     the nodes never came: exit code 3
        RunStartedError         the run began without this node
        PeerFailedError         a member died, closed or fell silent
          PeerLeftError         a member ended its script while others go on
        SchemaError             the members' models differ
        ViewChangedError        the view ended while something waited
      SessionError              the session was used in a way that cannot work
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
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
]


class P2PError(Exception):
    """The root of every error that p2pdpt raises.

    Attributes:
        agreed: whether every member comes to this error by itself, from what all were told, so
            that nobody needs to hear of it from a member that leaves because of it.
    """

    agreed: bool = False


class UsageError(P2PError):
    """What was asked cannot be done as asked; the command line exits with 2."""


class ConfigError(UsageError):
    """A configuration key, value, flag or address is wrong; the text names it and the fix."""


class PluginError(UsageError):
    """A plugin name is unknown or ambiguous, or its module does not import."""


class UnavailableError(UsageError):
    """Something this machine lacks was required by name; the text has the reason."""


class AddressInUseError(UsageError):
    """The address asked for by the user is taken by another process."""


class TopologyError(P2PError):
    """A topology plugin broke the rules of :mod:`p2pdpt.topology`."""


class HazardError(TopologyError):
    """Two writes to one element in one move, or a write to a region in flight."""


class MismatchError(TopologyError):
    """A send and the receive it meets differ in length, or one side has none."""


class DeadlockError(TopologyError):
    """Nothing can move any more; the text lists what each node waits for."""


class IncompleteError(TopologyError):
    """An exchange returned before every element of the result held every contribution."""


class TransportError(P2PError):
    """A connection or its bytes failed."""


class FrameError(TransportError):
    """Bytes arrived that are not this protocol, or that exceed one of its bounds."""


class ChannelClosedError(TransportError):
    """The connection to a peer ended, by either side."""


class HandshakeError(P2PError):
    """A connection was refused before it carried anything."""


class VersionError(HandshakeError):
    """The peer speaks another version of the protocol."""


class AuthenticationError(HandshakeError):
    """The peer does not hold this cluster's secret, or only one side has one."""


class WrongRunError(HandshakeError):
    """The peer belongs to another cluster or another run."""


class GroupError(P2PError):
    """The run as a whole cannot go on, or could not begin."""


class NotEnoughNodesError(GroupError):
    """Fewer nodes than ``min_nodes`` came in time; the command line exits with 3."""


class RunStartedError(GroupError):
    """The run formed its view without this node."""


class PeerFailedError(GroupError):
    """A member died, closed its connections, reported an error of its own or fell silent.

    Args:
        peer: name and id of the member.
        address: where it was reached.
        reason: the evidence, for instance ``connection reset`` or its own error text.
        operation: what this node was doing, for instance ``exchange of bucket 0 (ring)``.
        step: the step that was open, if any.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        reason: str,
        *,
        operation: str = "",
        step: int | None = None,
    ) -> None:
        self.peer, self.address, self.reason = peer, address, reason
        self.operation, self.step = operation, step
        during = f" during {operation}" if operation else ""
        at = f" at step {step}" if step is not None else ""
        super().__init__(f"peer {peer} at {address} failed{during}{at}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))

    def during(self, operation: str, step: int | None) -> PeerFailedError:
        """Return the same failure as seen by `operation` at `step`."""
        return type(self)(self.peer, self.address, self.reason, operation=operation, step=step)


def _rebuild(
    kind: type[PeerFailedError], state: dict[str, object], args: Sequence[object]
) -> PeerFailedError:
    error = kind.__new__(kind, *args)
    error.args = tuple(args)
    error.__dict__.update(state)
    return error


class PeerLeftError(PeerFailedError):
    """A member ended its part of the run while this one still needed it."""


class SchemaError(GroupError):
    """The members' models differ; the text lists the first differences."""

    agreed = True


class ViewChangedError(GroupError):
    """The view ended while this operation waited in it."""


class SessionError(P2PError):
    """The session was used in a way that cannot work; the text says what to do instead."""

    @classmethod
    def of_all(cls, text: str) -> SessionError:
        """Return an error that every member comes to by itself."""
        error = cls(text)
        error.agreed = True
        return error
