from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pdpt.protocol.handshake import Identity
from p2pdpt.protocol.messages import Adopt, Control, Heartbeat, Vote, encode
from p2pdpt.runtime.control import ControlLink
from p2pdpt.runtime.door import NodeStream


class Ends:
    """Two links on a pair of sockets, and what they were told."""

    def __init__(self) -> None:
        self.links: list[ControlLink] = []
        self.heard: list[tuple[int, Control]] = []
        self.closed: list[int] = []

    async def open(self) -> Ends:
        for number, sock in enumerate(socket.socketpair()):
            sock.setblocking(False)
            identity = Identity(cluster="c", node_id=f"{1 - number:016x}", name=f"n{1 - number}")
            stream = NodeStream(sock, identity, "127.0.0.1:1")
            link = ControlLink(
                stream,
                dialed=number == 0,
                on_message=lambda link, message: self.heard.append(
                    (self.links.index(link), message)
                ),
                on_bytes=lambda link: None,
                on_closed=lambda link: self.closed.append(self.links.index(link)),
            )
            self.links.append(link)
            await stream.attach(link)
        return self

    async def end(self) -> None:
        for link in self.links:
            link.abort("the test ends")
        await asyncio.wait([link.closed for link in self.links])


async def wait_for(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happens")


async def test_messages_arrive_in_order_and_are_counted() -> None:
    ends = await Ends().open()
    one, two = ends.links
    assert (one.peer.name, one.dialed, two.dialed) == ("n1", True, False)
    said = [Adopt(), Vote(1), Heartbeat()]
    for message in said:
        one.send(message)
    await wait_for(lambda: len(ends.heard) == 3)
    assert ends.heard == [(1, message) for message in said]
    total = sum(len(encode(message)) for message in said)
    assert (one.bytes_sent, one.messages_sent) == (total, 3) == (two.bytes_received, 3)
    assert two.messages_received == 3
    await ends.end()


async def test_a_closed_peer_is_told_once_with_the_reason() -> None:
    ends = await Ends().open()
    one, two = ends.links
    one.abort("enough")
    await wait_for(lambda: len(ends.closed) == 2)
    assert one.reason == "enough" and two.reason == "the connection was closed"
    assert one.taken.is_set() and two.taken.is_set()
    one.send(Heartbeat())
    two.send(Heartbeat())
    await ends.end()
    assert sorted(ends.closed) == [0, 1]


async def test_what_was_sent_before_finishing_is_read() -> None:
    ends = await Ends().open()
    one, two = ends.links
    one.send(Vote(7))
    one.finish()
    one.finish()
    one.send(Vote(8))
    await asyncio.wait([one.closed, two.closed])
    assert ends.heard == [(1, Vote(7))]
    assert one.reason == "closed by this node"


async def test_bad_messages_end_the_connection() -> None:
    ends = await Ends().open()
    one, two = ends.links
    assert one._transport is not None
    one._transport.write(b"\x63\0\0\0\0")
    await wait_for(lambda: len(ends.closed) == 2)
    assert two.reason == "bad message: there is no kind 99"
    await ends.end()


async def test_nothing_is_passed_on_after_an_abort() -> None:
    ends = await Ends().open()
    one, two = ends.links
    assert one._transport is not None
    one._transport.write(encode(Vote(1)) + encode(Vote(2)))

    def hear_one(link: ControlLink, message: Control) -> None:
        ends.heard.append((1, message))
        link.abort("enough")

    two._on_message = hear_one
    await wait_for(lambda: len(ends.closed) == 2)
    assert ends.heard == [(1, Vote(1))]
    await ends.end()


@pytest.mark.parametrize("times", [1, 2])
async def test_aborting_is_harmless(times: int) -> None:
    ends = await Ends().open()
    for _ in range(times):
        await ends.end()
