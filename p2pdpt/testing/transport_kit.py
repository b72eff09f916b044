"""Prove a transport: subclass :class:`TransportKit`, name the transport, run the tests.

With pytest and pytest-asyncio::

    class TestMyTransport(TransportKit):
        transport = MyTransport

Every ``test_`` method is a coroutine that takes nothing, raises ``AssertionError`` if the
contract of :mod:`p2pdpt.channel` is broken, and needs no pytest; another runner may call them.
"""

from __future__ import annotations

import asyncio
import dataclasses

from p2pdpt.channel import Availability, Channel, Meta
from p2pdpt.errors import ChannelClosedError, HandshakeError
from p2pdpt.testing.callback_tests import CallbackTests
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt.testing.message_tests import MessageTests
from p2pdpt.testing.transport_bench import Ends, RecordingLanding, Sending, pattern, tag

__all__ = ["RecordingLanding", "TransportKit", "tag"]


class TransportKit(MessageTests, CallbackTests):
    """Conformance tests of a transport.

    Attributes:
        transport: the class under test; override ``make_transport`` where it needs more than
            a door.
        patience: seconds after which a test fails instead of waiting on.
    """

    # Who it is.

    async def test_name_and_availability(self) -> None:
        """It has a name and says whether it works here, and why (not)."""
        assert self.transport.name
        availability = self.transport.availability()
        assert isinstance(availability, Availability)
        assert availability.ok, availability.reason
        assert availability.reason

    async def test_ends_know_each_other(self) -> None:
        """Both ends know the peer, the address and the transport."""
        async with self.pair() as (here, there):
            assert here.peer.name == "bob"
            assert there.peer.name == "alice"
            assert here.peer.node_id != there.peer.node_id
            assert here.address
            assert there.address
            assert here.transport == there.transport == self.transport.name

    # The end.

    async def test_close_sends_what_was_granted(self) -> None:
        """``close`` returns when what was pushed and granted has gone; both ends are told."""
        size = 8 << 20
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            landing, _ = self.expect(there, tag(1), RecordingLanding(size // 4))
            await self.settle(here, there)
            data = pattern(size)
            self.send(here, tag(1), data)
            await here.close()
            await landing.done.wait()
            assert landing.error is None
            assert landing.memory == data
            await ends.wait()
            assert ends.reasons[0] is None
            assert isinstance(ends.reasons[1], ChannelClosedError)

    async def test_peer_closes_amid_a_message(self) -> None:
        """Receives that can never complete fail, and say who and why."""
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            landing, _ = self.expect(there, tag(1), RecordingLanding(1000))
            empty, _ = self.expect(there, tag(2), RecordingLanding(0))
            half = Sending(here, tag(1), 1000)
            half.outgoing.push(memoryview(pattern(2000)), 500, Meta())
            await here.close()
            await ends.wait()
            assert isinstance(landing.error, ChannelClosedError)
            assert "alice" in str(landing.error)
            assert landing.got in (0, 500)
            assert empty.error is None, "an empty message had completed"
            assert ends.reasons[0] is None

    async def test_abort_amid_a_message(self) -> None:
        """``abort`` ends both sides at once, whoever calls it, sender or receiver."""
        for receiver_aborts in (False, True):
            async with self.pair() as (here, there):
                ends = Ends(here, there)
                landing, incoming = self.expect(there, tag(1), RecordingLanding(4_000_000))
                sending = Sending(here, tag(1), 4_000_000)
                # Not all of it, or it might be complete before the end.
                sending.outgoing.push(memoryview(pattern(12_000_000)), 3_000_000, Meta())
                await landing.reach(1)
                (there if receiver_aborts else here).abort()
                (there if receiver_aborts else here).abort()
                got = landing.got
                await ends.wait()
                await landing.done.wait()
                assert isinstance(landing.error, ChannelClosedError)
                if receiver_aborts:
                    assert landing.got == got, "nothing is placed after abort returns"
                assert all(isinstance(why, ChannelClosedError) for why in ends.reasons)
                calls = len(sending.drained)
                sending.outgoing.push(memoryview(b""), 0, Meta())
                sending.outgoing.cancel()
                incoming.grant(4_000_000)
                incoming.cancel()
                await asyncio.gather(here.quiesce(), there.quiesce())
                await asyncio.sleep(0.01)
                assert len(sending.drained) == calls

    async def test_closed_channel_refuses(self) -> None:
        """After the end ``send`` and ``receive`` raise ``ChannelClosedError``."""
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            there.abort()
            await ends.wait()
            for channel in (here, there):
                for post in (
                    lambda channel=channel: channel.send(tag(1), 1, lambda upto: None),
                    lambda channel=channel: channel.receive(tag(1), 1, RecordingLanding(1)),
                ):
                    try:
                        post()  # type: ignore[no-untyped-call]
                    except ChannelClosedError:
                        pass
                    else:
                        raise AssertionError("a closed channel must refuse")

    async def test_close_and_abort_again(self) -> None:
        """Closing may be done twice, at once, by both ends, and after an abort."""
        async with self.pair() as (here, there):
            await asyncio.gather(here.close(), here.close(), there.close())
            await here.close()
            here.abort()
            await there.close()
        async with self.pair() as (here, there):
            here.abort()
            await here.close()
            await there.close()

    async def test_cancelled_close_still_closes(self) -> None:
        """Cancelling ``close`` aborts."""
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            self.expect(there, tag(1), RecordingLanding(8 << 20, 1))
            self.send(here, tag(1), bytes(8 << 20), 1)
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(here.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await ends.wait()

    async def test_receives_that_were_cancelled_hear_nothing_of_the_end(self) -> None:
        """``failed`` is not called for a cancelled receive."""
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            landing, incoming = self.expect(there, tag(1), RecordingLanding(10))
            incoming.cancel()
            here.abort()
            await ends.wait()
            assert landing.error is None

    async def test_on_closed_after_the_end(self) -> None:
        """A callback registered too late is called all the same, once."""
        async with self.pair() as (here, there):
            await here.close()
            ends = Ends(here, there)
            await ends.wait()
            assert ends.reasons[0] is None
            assert isinstance(ends.reasons[1], ChannelClosedError)
            await asyncio.sleep(0.01)
            assert ends.calls == 2

    # Coming together.

    async def test_closed_listener_accepts_no_more(self) -> None:
        """A closed listener refuses; channels that it accepted stay open."""
        async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
            accepted: asyncio.Queue[Channel] = asyncio.Queue()
            transport = self.make_transport(door)
            listener = await self.make_transport(other).listen(accepted.put_nowait)
            peer = dataclasses.replace(
                other.me, transports={self.transport.name: listener.endpoint}
            )
            async with asyncio.timeout(self.patience):
                here = await transport.connect(peer)
                there = await accepted.get()
                await listener.close()
                await listener.close()
                try:
                    await transport.connect(peer)
                except (ChannelClosedError, HandshakeError):
                    pass
                else:
                    raise AssertionError("a closed listener must refuse")
                await self.carry(here, there, tag(1))
                await asyncio.gather(here.close(), there.close())

    async def test_nobody_listens(self) -> None:
        """``connect`` to a peer that is gone raises, with the peer's name."""
        async with LoopbackDoor("alice") as door:
            async with LoopbackDoor("bob") as other:
                listener = await self.make_transport(other).listen(lambda channel: None)
                peer = dataclasses.replace(
                    other.me, transports={self.transport.name: listener.endpoint}
                )
                await listener.close()
            async with asyncio.timeout(self.patience):
                (error,) = await asyncio.gather(
                    self.make_transport(door).connect(peer), return_exceptions=True
                )
            assert isinstance(error, (ChannelClosedError, HandshakeError))
            assert "bob" in str(error)

    async def test_cancelled_connect(self) -> None:
        """Cancelling ``connect`` at any turn leaves nothing behind and breaks nothing."""
        async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
            accepted: asyncio.Queue[Channel] = asyncio.Queue()
            transport = self.make_transport(door)
            listener = await self.make_transport(other).listen(accepted.put_nowait)
            peer = dataclasses.replace(
                other.me, transports={self.transport.name: listener.endpoint}
            )
            async with asyncio.timeout(self.patience):
                for turns in range(8):
                    connecting = asyncio.ensure_future(transport.connect(peer))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    connecting.cancel()
                    (channel,) = await asyncio.gather(connecting, return_exceptions=True)
                    if not isinstance(channel, BaseException):
                        channel.abort()
                here = await transport.connect(peer)
                while True:
                    there = await accepted.get()
                    try:
                        await self.carry(here, there, tag(1))
                    except (ChannelClosedError, AssertionError):
                        continue
                    break
                await asyncio.gather(here.close(), there.close())
                await listener.close()
