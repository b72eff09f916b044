"""The control connections of one node to all others of its run: exactly one for each pair.

Both nodes of a pair may dial, and neither knows what the other does. So the node with the
smaller id decides: it says ``Adopt`` on the first connection and closes any other; nothing else
is said on a connection before. Peers tell each other whom they are connected to, so that knowing
one address is enough.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

from p2pdpt.address import is_loopback, parse_address
from p2pdpt.errors import (
    AuthenticationError,
    FrameError,
    P2PError,
    VersionError,
    WrongRunError,
)
from p2pdpt.protocol.liveness import Liveness
from p2pdpt.protocol.messages import Adopt, Control, Heartbeat, Peers, Place
from p2pdpt.runtime.control import ControlLink
from p2pdpt.runtime.discovery import Sighting
from p2pdpt.runtime.door import NodeStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from p2pdpt.channel import Stream
    from p2pdpt.protocol.handshake import Identity
    from p2pdpt.runtime.background import Background
    from p2pdpt.runtime.door import NodeDoor

__all__ = ["Mesh"]

logger = logging.getLogger(__name__)

KIND: Final = "control"
_FIRST_S: Final = 0.05
_MOST_S: Final = 2.0
_TRIES: Final = 4
_YIELD_S: Final = 0.3
_WARNINGS: Final = 256


class _Target:
    """A node that is or was to be connected to."""

    def __init__(self, addresses: tuple[str, ...], node_id: str, lasting: bool) -> None:
        self.addresses, self.node_id, self.lasting = addresses, node_id, lasting
        self.tried = self.reached = False
        self.task: asyncio.Task[None] | None = None
        self.error = ""
        self.refusal: P2PError | None = None


class Mesh:
    """Finds, dials and keeps the other nodes of a run.

    Attributes:
        links: the connection to each node, by id.
    """

    def __init__(
        self,
        door: NodeDoor,
        identity: Identity,
        background: Background,
        patience: float,
        *,
        on_up: Callable[[str], None],
        on_down: Callable[[str, str], None],
        on_message: Callable[[str, Control], None],
        on_change: Callable[[], None],
    ) -> None:
        """Make a mesh of one node; ``open`` lets others in.

        Args:
            door: of this node, whose run is set.
            identity: of this node, for its versions.
            background: where dialing goes on.
            patience: seconds of silence after which a peer counts as dead.
            on_up: a connection to a node is ready for messages.
            on_down: it has ended, and why.
            on_message: a node said something.
            on_change: ``settled`` may have changed.
        """
        self.links: dict[str, ControlLink] = {}
        self._door, self._me, self._background = door, identity, background
        self._on_up, self._on_down = on_up, on_down
        self._on_message, self._on_change = on_message, on_change
        self._waiting: set[ControlLink] = set()
        self._ended: list[ControlLink] = []
        self._targets: dict[str, _Target] = {}
        self._unswept = 0
        self._members: frozenset[str] | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._liveness = Liveness(patience, self._loop.time())
        self._timer = self._loop.call_at(self._liveness.next_tick(), self._tick)
        self._warned: set[tuple[str, ...]] = set()
        # Not the module's generator: that one is the program's own.
        self._rng = random.Random()

    def open(self) -> None:
        """Accept control streams."""
        self._door.serve(KIND, self._accept)

    @property
    def settled(self) -> bool:
        """Whether every node that is known of has been tried.

        Of those that a person named one must have been reached: whoever was told to join others
        does not begin alone.
        """
        targets = self._targets.values()
        named = [target for target in targets if target.lasting]
        return (
            not self._unswept
            and all(target.tried or target.node_id in self.links for target in targets)
            and (not named or any(target.reached for target in named))
        )

    @property
    def stalled(self) -> float:
        """Seconds for which this node's loop has not run, in all."""
        return self._liveness.stalled

    def counters(self) -> tuple[int, int, int, int]:
        """Return bytes sent and received, and messages sent and received, of all links so far."""
        links = [*self.links.values(), *self._ended]
        return (
            sum(link.bytes_sent for link in links),
            sum(link.bytes_received for link in links),
            sum(link.messages_sent for link in links),
            sum(link.messages_received for link in links),
        )

    @property
    def refusal(self) -> P2PError | None:
        """Why none of the nodes that a person named can ever be joined, if so."""
        named = [target for target in self._targets.values() if target.lasting]
        if self.links or not all(target.refusal for target in named):
            return None
        return named[0].refusal if named else None

    def errors(self) -> list[str]:
        """Return what went wrong with the nodes that are not connected."""
        return [
            target.error
            for target in self._targets.values()
            if target.error and target.node_id not in self.links
        ]

    def expect_sweep(self) -> Callable[[], None]:
        """Wait for one more discovery source; call what is returned when it has looked once."""
        self._unswept += 1
        open_ = [True]

        def swept() -> None:
            if open_:
                open_.clear()
                self._unswept -= 1
                self._on_change()

        return swept

    def sight(self, sighting: Sighting, *, after: float = 0.0) -> None:
        """Try to connect to a node that was found, `after` some seconds."""
        if self._closed or self._members is not None:
            return
        if sighting.node_id == self._me.node_id or sighting.node_id in self.links:
            return
        if not sighting.addresses or set(sighting.addresses) <= set(self._door.me.addresses):
            return
        key = sighting.node_id or sighting.addresses[0]
        target = self._targets.get(key)
        if target is None:
            target = _Target(sighting.addresses, sighting.node_id, sighting.lasting)
            self._targets[key] = target
        if target.task is None or target.task.done():
            target.addresses = sighting.addresses
            work = self._pursue(target, after)
            target.task = self._background.start(work, f"dialing {sighting.addresses[0]}")
            self._on_change()

    def send(self, peer: str, message: Control) -> None:
        """Send to a node; nothing happens if it is not connected."""
        link = self.links.get(peer)
        if link is not None:
            link.send(message)

    def keep(self, members: Collection[str]) -> None:
        """Keep the connections to `members` only, and look for nobody else.

        Others may still connect, and are told what `on_up` sends them before they are let go.
        """
        self._members = frozenset(members)
        for target in self._targets.values():
            if target.task is not None:
                target.task.cancel()
        for peer in list(self.links):
            self._let_go(peer)

    def drop(self, peer: str, reason: str) -> None:
        """Close the connection to a node at once."""
        link = self.links.get(peer)
        if link is not None:
            link.abort(reason)

    async def close(self, grace: float = 0.0) -> None:
        """Send what is left, wait up to `grace` seconds for the peers to close, and close.

        May be called twice; a cancelled close still closes.
        """
        self._closed = True
        self._timer.cancel()
        self._door.close(KIND)
        for target in self._targets.values():
            if target.task is not None:
                target.task.cancel()
        for link in list(self._waiting):
            link.abort("this node closes")
        links = list(self.links.values())
        try:
            if links and grace > 0:
                for link in links:
                    link.finish()
                await asyncio.wait([link.closed for link in links], timeout=grace)
        finally:
            for link in links:
                link.abort("this node closes")
        if links:
            # An aborted connection ends in the loop's next turn.
            await asyncio.wait([link.closed for link in links])

    async def _accept(self, stream: Stream) -> None:
        await self._attach(stream, dialed=False)

    async def _attach(self, stream: Stream, *, dialed: bool) -> ControlLink | None:
        assert isinstance(stream, NodeStream)
        if stream.peer.node_id == self._me.node_id or self._closed:
            stream.abort()
            return None
        link = ControlLink(
            stream,
            dialed=dialed,
            on_message=self._receive,
            on_bytes=self._heard,
            on_closed=self._lost,
        )
        self._waiting.add(link)
        try:
            await stream.attach(link)
        except BaseException:
            self._waiting.discard(link)
            raise
        if self._me.node_id < link.peer.node_id:
            if link.peer.node_id in self.links:
                link.abort("there is a connection already")
            else:
                link.send(Adopt())
                self._adopt(link)
        return link

    def _adopt(self, link: ControlLink) -> None:
        peer = link.peer.node_id
        self._waiting.discard(link)
        old = self.links.get(peer)
        if old is not None:
            # The peer decides, and has found the old connection dead.
            old.abort("replaced by a new connection")
            self._end(old)
        self.links[peer] = link
        link.taken.set()
        self._liveness.add(peer, self._loop.time())
        self._compare(link)
        if self._members is None:
            others = [each for each in self.links.values() if each is not link]
            link.send(Peers(tuple(p for each in others if (p := self._place(each, link)))))
            for other in others:
                if place := self._place(link, other):
                    other.send(Peers((place,)))
        self._on_up(peer)
        self._on_change()
        if self._members is not None:
            self._let_go(peer)

    def _place(self, link: ControlLink, to: ControlLink) -> Place | None:
        """Return where the node of `link` is, as the node of `to` may use it."""
        addresses = tuple(
            each
            for each in link.peer.addresses
            if to.local or not is_loopback(parse_address(each).host)
        )
        return Place(link.peer.node_id, addresses) if addresses else None

    def _let_go(self, peer: str) -> None:
        if self._members is not None and peer not in self._members:
            self.links[peer].finish()
            self._loop.call_later(1.0, self.links[peer].abort, "it is no member")

    def _receive(self, link: ControlLink, message: Control) -> None:
        peer = link.peer.node_id
        if isinstance(message, Adopt):
            if link in self._waiting and peer < self._me.node_id:
                self._adopt(link)
            else:
                link.abort("bad message: Adopt is not this node's to say")
        elif self.links.get(peer) is not link:
            link.abort("bad message: the connection is not adopted")
        elif isinstance(message, Peers):
            for place in message.places:
                self._sight_place(place)
        elif not isinstance(message, Heartbeat):
            try:
                self._on_message(peer, message)
            except FrameError as error:
                link.abort(str(error))

    def _sight_place(self, place: Place) -> None:
        # Both nodes are told of each other; one dials at once, the other if that fails.
        after = 0.0 if self._me.node_id < place.node_id else _YIELD_S
        self.sight(Sighting(place.addresses, place.node_id), after=after)

    def _heard(self, link: ControlLink) -> None:
        self._liveness.heard(link.peer.node_id, self._loop.time())

    def _lost(self, link: ControlLink) -> None:
        self._waiting.discard(link)
        if self.links.get(link.peer.node_id) is link:
            del self.links[link.peer.node_id]
            self._end(link)
            self._on_change()

    def _end(self, link: ControlLink) -> None:
        peer = link.peer.node_id
        self._ended.append(link)
        self._liveness.remove(peer)
        self._on_down(peer, link.reason)
        if self._members is None and not self._closed and peer not in self.links:
            self.sight(Sighting(link.peer.addresses, peer), after=_FIRST_S)

    def _tick(self) -> None:
        for silence in self._liveness.tick(self._loop.time()):
            self.drop(silence.peer, silence.reason)
        for link in self.links.values():
            link.send(Heartbeat())
        self._timer = self._loop.call_at(self._liveness.next_tick(), self._tick)

    async def _pursue(self, target: _Target, after: float) -> None:
        """Dial until the node is connected, for ever if it is lasting."""
        pause, tries = _FIRST_S, 0
        if after:
            await asyncio.sleep(after)
        while target.node_id not in self.links:
            done = False
            for address in target.addresses:
                if done := await self._try(target, address):
                    break
            tries += 1
            target.tried = True
            self._on_change()
            if done or (tries >= _TRIES and not target.lasting):
                return
            await asyncio.sleep(pause * (0.75 + self._rng.random() / 2))
            pause = min(pause * 1.6, _MOST_S)

    async def _try(self, target: _Target, address: str) -> bool:
        """Return whether there is nothing more to do for this target."""
        try:
            stream = await self._door.dial(address, KIND, target.node_id)
        except P2PError as error:
            final = isinstance(error, VersionError | AuthenticationError | WrongRunError)
            target.refusal = error if final else None
            if str(error) != target.error:
                level = logging.WARNING if final else logging.INFO
                logger.log(level, "not joining the node at %s: %s", address, error)
            target.error = str(error)
            return False
        if stream.peer.node_id == self._me.node_id:
            stream.abort()
            target.error = f"{address} is this node itself"
            target.reached = True
            return True
        target.node_id = target.node_id or stream.peer.node_id
        target.error = f"{address} did not take the connection"
        link = await self._attach(stream, dialed=True)
        if link is None:
            return True
        # The peer may be the one that decides; it closes this connection if it chose another.
        await link.taken.wait()
        target.reached = target.reached or link.peer.node_id in self.links
        return link.peer.node_id in self.links

    def _compare(self, link: ControlLink) -> None:
        """Warn once of a peer with other versions of what matters."""
        theirs, mine = link.identity, self._me
        rows = [
            ("p2pdpt", theirs.package, mine.package),
            ("torch", theirs.torch, mine.torch),
            ("Python", _minor(theirs.python), _minor(mine.python)),
        ]
        different = [
            f"{name} {there or 'none'} there, {here or 'none'} here"
            for name, there, here in rows
            if there != here
        ]
        # By name: a node that is started again and again must not fill the log.
        warning = link.peer.name, *different
        if different and warning not in self._warned and len(self._warned) < _WARNINGS:
            self._warned.add(warning)
            logger.warning("node %s has other versions: %s", link.peer, "; ".join(different))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
