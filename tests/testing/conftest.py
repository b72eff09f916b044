"""A memory transport with one flaw, to see that the transport kit finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdpt.channel import (
    Availability,
    Channel,
    Incoming,
    Landing,
    Listener,
    Meta,
    Outgoing,
    PeerInfo,
    Tag,
)
from p2pdpt.testing.memory_transport import MemoryTransport


class _Landing(Landing):
    def __init__(self, inner: Landing, flaw: str) -> None:
        self.inner, self.flaw = inner, flaw

    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        return self.inner.buffer(start, count, width, meta)

    def arrived(self, start: int, count: int, meta: Meta) -> None:
        self.inner.arrived(start, count, Meta() if self.flaw == "loses metas" else meta)

    def failed(self, error: Exception) -> None:
        if self.flaw == "fails twice":
            self.inner.failed(error)
        if self.flaw != "swallows failures":
            self.inner.failed(error)


class _Incoming(Incoming):
    def __init__(self, inner: Incoming, flaw: str) -> None:
        self.inner, self.flaw = inner, flaw

    def grant(self, upto: int) -> None:
        self.inner.grant(upto)

    def cancel(self) -> None:
        if self.flaw != "places after cancel":
            self.inner.cancel()


class _Outgoing(Outgoing):
    def __init__(self, inner: Outgoing, flaw: str, on_drained: Callable[[int], None]) -> None:
        self.inner, self.flaw, self.on_drained = inner, flaw, on_drained
        self.pushed = 0

    def push(self, data: memoryview, count: int, meta: Meta) -> None:
        self.inner.push(data, count, meta)
        self.pushed += count
        if self.flaw == "drains at once" and count:
            self.on_drained(self.pushed)

    def cancel(self) -> None:
        if self.flaw != "sends after cancel":
            self.inner.cancel()


class _Channel(Channel):
    def __init__(self, inner: Channel, flaw: str) -> None:
        self.inner, self.flaw = inner, flaw
        self.peer, self.address = inner.peer, inner.address
        self.transport = "another" if flaw == "has another name" else inner.transport
        self.counters = inner.counters

    def send(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Outgoing:
        early = self.flaw == "drains at once" and length
        inner = self.inner.send(tag, length, (lambda upto: None) if early else on_drained)
        return _Outgoing(inner, self.flaw, on_drained)

    def receive(self, tag: Tag, length: int, landing: Landing) -> Incoming:
        if self.flaw == "mixes up tags":
            tag = tag._replace(ordinal=tag.ordinal ^ 1)
        incoming = self.inner.receive(tag, length, _Landing(landing, self.flaw))
        if self.flaw == "ignores grants":
            incoming.grant(length)
        return _Incoming(incoming, self.flaw)

    def on_closed(self, callback: Callable[[Exception | None], None]) -> None:
        if self.flaw != "tells nobody":
            self.inner.on_closed(callback)

    async def quiesce(self) -> None:
        if self.flaw != "does not quiesce":
            await self.inner.quiesce()

    def abort(self) -> None:
        self.inner.abort()

    async def close(self) -> None:
        if self.flaw == "closes at once":
            self.inner.abort()
        await self.inner.close()


class FlawedTransport(MemoryTransport):
    """A memory transport with the flaw that its class attribute names."""

    flaw = ""

    @classmethod
    def availability(cls) -> Availability:
        """Tell that it can be used."""
        return Availability(True, "" if cls.flaw == "gives no reason" else "for tests")

    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        """Accept channels with the flaw."""
        return await super().listen(lambda channel: accept(_Channel(channel, self.flaw)))

    async def connect(self, peer: PeerInfo) -> Channel:
        """Open a channel with the flaw."""
        return _Channel(await super().connect(peer), self.flaw)


def make_flawed(flaw: str) -> type[FlawedTransport]:
    return type("Flawed", (FlawedTransport,), {"flaw": flaw})


@pytest.fixture
def flawed() -> Callable[[str], type[FlawedTransport]]:
    """Make a memory transport with the flaw named."""
    return make_flawed
