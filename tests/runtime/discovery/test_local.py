from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from p2pdpt.channel import PeerInfo
from p2pdpt.config import NodeConfig
from p2pdpt.errors import UnavailableError
from p2pdpt.runtime.discovery import Sighting, local
from p2pdpt.runtime.discovery.local import LocalDiscovery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
Make = Callable[..., Awaitable[LocalDiscovery]]


def info(number: int) -> PeerInfo:
    return PeerInfo(f"{number:016x}", f"n{number}", (f"127.0.0.1:{number}",))


@pytest.fixture
async def make(run_name: str) -> AsyncIterator[Make]:
    sources: list[LocalDiscovery] = []

    async def build(number: int, *, cluster: str = "c", run: str = "") -> LocalDiscovery:
        source = LocalDiscovery(NodeConfig(cluster=cluster), info(number), run or run_name)
        sources.append(source)
        await source.start()
        return source

    yield build
    for source in sources:
        await source.close()
        await source.close()


async def look(source: LocalDiscovery) -> list[Sighting]:
    found: list[Sighting] = []
    swept = asyncio.Event()
    search = asyncio.create_task(source.search(found.append, swept.set))
    await asyncio.wait_for(swept.wait(), 5)
    search.cancel()
    await asyncio.wait([search])
    return found


async def test_nodes_of_one_run_find_each_other(make: Make) -> None:
    one, two, three = await make(1), await make(2), await make(3)
    assert await look(one) == [
        Sighting(("127.0.0.1:2",), info(2).node_id),
        Sighting(("127.0.0.1:3",), info(3).node_id),
    ]
    assert len(await look(three)) == 2
    assert one.describe() == "local: found 2 other nodes of this user and run on this machine"
    assert two.describe() == "local: found no other node of this user and run on this machine"
    await two.close()
    assert len(await look(one)) == 1


async def test_other_runs_and_clusters_are_not_seen(make: Make) -> None:
    one = await make(1)
    await make(2, cluster="other")
    await make(3, run="other")
    assert await look(one) == []


async def test_the_names_give_nothing_away(make: Make, run_name: str) -> None:
    await make(1)
    table = local._TABLE.read_text()
    assert f"-{info(1).node_id}" in table
    assert run_name not in table


async def test_nodes_of_other_users_are_ignored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = await make(1), await make(2)
    monkeypatch.setattr(local, "_same_user", lambda sock: False)
    assert await look(one) == []


async def test_liars_and_the_silent_are_ignored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_ANSWER_S", 0.1)
    one = await make(1)
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as liar:
        silent.bind(f"\0{one._prefix}{9:016x}".encode())
        silent.listen()
        liar.bind(f"\0{one._prefix}{8:016x}".encode())
        liar.listen()
        liar.setblocking(False)

        def lie() -> None:
            sock, _ = liar.accept()
            with sock:
                sock.send(b"\xc1 no msgpack")

        asyncio.get_running_loop().add_reader(liar, lie)
        assert await look(one) == []
        asyncio.get_running_loop().remove_reader(liar)


async def test_where_it_cannot_be_used_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LocalDiscovery.availability().ok
    monkeypatch.setattr(local, "_TABLE", Path("/no/such/table"))
    assert LocalDiscovery.availability().reason == "/no/such/table cannot be read"
    source = LocalDiscovery(NodeConfig(), info(1), "r")
    with pytest.raises(UnavailableError, match="'local' cannot be used: /no/such/table"):
        await source.start()
    assert await look(source) == []
    assert source.describe() == "local: /no/such/table: No such file or directory"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert LocalDiscovery.availability().reason == "darwin has no abstract sockets"
