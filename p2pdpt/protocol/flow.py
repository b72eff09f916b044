"""One bulk connection without its socket: what every byte-stream transport is driven by.

A :class:`Flow` joins the outgoing half (:mod:`p2pdpt.protocol.sending`) and the incoming half
(:mod:`p2pdpt.protocol.receiving`) of a connection with its end. A shell reads into
:meth:`get_buffer` and reports :meth:`received`; it writes :meth:`next_output` and reports
:meth:`output_drained`; it says :meth:`close` when the connection has gone. Posts, pushes,
grants and cancellations may come at any time, also from inside the callbacks that those make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdpt.channel import ChannelCounters
from p2pdpt.errors import ChannelClosedError
from p2pdpt.protocol.receiving import Receive, Receiving
from p2pdpt.protocol.sending import Send, Sending

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Landing, Tag

__all__ = ["Flow"]


class Flow:
    """The messages of one connection.

    Attributes:
        counters: bytes and frames so far.
        get_buffer: ``Receiving.get_buffer``.
        received: ``Receiving.received``.
        next_output: ``Sending.next_output``.
        output_drained: ``Sending.output_drained``.
    """

    __slots__ = (
        "_receiving",
        "_refusal",
        "_sending",
        "counters",
        "get_buffer",
        "next_output",
        "output_drained",
        "received",
    )

    def __init__(self, wake: Callable[[], None]) -> None:
        """Begin a connection.

        Args:
            wake: called whenever ``next_output`` may have something; it must only make a note
                of that, for it is called from the middle of other calls.
        """
        self.counters = ChannelCounters()
        self._sending = Sending(wake, self.counters)
        self._receiving = Receiving(self._sending, self.counters)
        self._refusal: Exception | None = None
        self.get_buffer = self._receiving.get_buffer
        self.received = self._receiving.received
        self.next_output = self._sending.next_output
        self.output_drained = self._sending.output_drained

    def send(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Send:
        """Open an outgoing message; see ``Channel.send``.

        Raises:
            ChannelClosedError: the connection has ended, or is about to.
            MismatchError: the tag is in use, or the tag or length is out of bounds.
        """
        if self._refusal is not None:
            raise ChannelClosedError(str(self._refusal)) from self._refusal
        return self._sending.open(tag, length, on_drained)

    def receive(self, tag: Tag, length: int, landing: Landing) -> Receive:
        """Post a receive; see ``Channel.receive``.

        Raises:
            ChannelClosedError: the connection has ended, or is about to.
            MismatchError: the tag is in use, or the tag or length is out of bounds.
        """
        if self._refusal is not None:
            raise ChannelClosedError(str(self._refusal)) from self._refusal
        return self._receiving.open(tag, length, landing)

    @property
    def quiet(self) -> bool:
        """Whether no memory of a cancelled message is referenced any more."""
        return self._sending.quiet

    @property
    def between_frames(self) -> bool:
        """Whether the peer has ended every frame that it began."""
        return self._receiving.between_frames

    def refuse(self, error: Exception) -> None:
        """Let ``send`` and ``receive`` raise from now on; what is open goes on."""
        if self._refusal is None:
            self._refusal = error

    def halt(self, error: Exception) -> None:
        """Place nothing and refuse everything from now on; ``close`` is to follow soon."""
        self.refuse(error)
        self._receiving.halt()

    def close(self, error: Exception) -> None:
        """End everything: incomplete receives fail with `error`, sends fall silent."""
        self.refuse(error)
        self._sending.close()
        self._receiving.close(error)
