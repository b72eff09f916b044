from __future__ import annotations

import pytest

from p2pdpt.channel import Channel, Meta
from p2pdpt.errors import ChannelClosedError
from p2pdpt.testing.chaos_transport import ChaosTransport
from p2pdpt.testing.memory_mesh import memory_mesh
from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.transport_kit import RecordingLanding, tag


def between(rows: list[list[Channel | None]], here: int, there: int) -> Channel:
    channel = rows[here][there]
    assert channel is not None
    return channel


@pytest.mark.parametrize("transport", [MemoryTransport, ChaosTransport.around(MemoryTransport)])
async def test_everybody_reaches_everybody(transport: type[MemoryTransport]) -> None:
    async with memory_mesh(3, transport) as rows:
        for here in range(3):
            assert rows[here][here] is None
            for there in {0, 1, 2} - {here}:
                channel = between(rows, here, there)
                assert channel.peer.name == str(there)
                landing = RecordingLanding(4)
                between(rows, there, here).receive(tag(here), 4, landing).grant(4)
                sending = channel.send(tag(here), 4, lambda upto: None)
                sending.push(memoryview(bytes([here, there, 0, 1])), 4, Meta())
                await landing.done.wait()
                assert bytes(landing.memory[:4]) == bytes([here, there, 0, 1])
    with pytest.raises(ChannelClosedError):
        between(rows, 0, 1).send(tag(1), 4, lambda upto: None)


async def test_one_node_has_nobody_to_reach() -> None:
    async with memory_mesh(1) as rows:
        assert rows == [[None]]
