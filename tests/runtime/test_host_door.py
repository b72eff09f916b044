"""Descriptors between members, with doors on one loop and real sockets."""

from __future__ import annotations

import array
import asyncio
import errno
import functools
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from p2pdpt.errors import ChannelClosedError, P2PError, PeerFailedError, UnavailableError
from p2pdpt.memory import Area
from p2pdpt.protocol.sharing import (
    MESSAGE_BYTES,
    Announce,
    Hand,
    Hello,
    HostMessage,
    Refusal,
    Standing,
    Welcome,
    decode,
    encode,
    prove,
)
from p2pdpt.runtime import host_door
from p2pdpt.runtime.host_door import HostDoor
from p2pdpt.runtime.sockets import _open

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


class Doors:
    """The doors of all members of a view.

    Attributes:
        lost: rank, lost rank and reason, of every loss that was told.
    """

    def __init__(self, size: int) -> None:
        self.ids = [f"{rank:016x}" for rank in range(size)]
        self.lost: list[tuple[int, int, str]] = []
        self.doors = [
            HostDoor(rank, self.ids, 1, functools.partial(self._lost, rank)) for rank in range(size)
        ]
        self.standings = [
            Standing("", False, 1, os.geteuid(), *door.listen()) for door in self.doors
        ]
        self.files = [self.file(f"member {rank}") for rank in range(size)]

    def _lost(self, rank: int, other: int, error: P2PError) -> None:
        self.lost.append((rank, other, str(error)))

    def file(self, text: str) -> int:
        descriptor = os.memfd_create("p2pdpt-test", os.MFD_CLOEXEC)
        os.write(descriptor, text.encode())
        return descriptor

    async def connect(self) -> list[dict[int, str]]:
        return await asyncio.gather(*(door.connect(self.standings) for door in self.doors))

    async def begin(self) -> Doors:
        assert await self.connect() == [{}] * len(self.doors)
        for door in self.doors:
            door.begin()
        return self

    async def share(self, rank: int, name: str, count: int = 1) -> list[tuple[bytes, str] | None]:
        """Share under a name, and return payloads and what the descriptors led to."""
        found = await self.doors[rank].share(name, b"from %d" % rank, [self.files[rank]] * count)
        shown: list[tuple[bytes, str] | None] = []
        for each in found:
            if each is None:
                shown.append(None)
                continue
            payload, descriptors = each
            assert len(descriptors) == count
            assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
            shown.append((payload, os.pread(descriptors[0], 99, 0).decode() if count else ""))
            for descriptor in descriptors:
                os.close(descriptor)
        return shown

    def close(self) -> None:
        for door in self.doors:
            door.close()
            door.close()
        for file in self.files:
            os.close(file)


Make = Callable[[int], Doors]


@pytest.fixture
async def doors() -> AsyncIterator[Make]:
    made: list[Doors] = []

    def start(size: int) -> Doors:
        made.append(Doors(size))
        return made[-1]

    yield start
    for each in made:
        each.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happens")


async def test_all_give_to_all(doors: Make) -> None:
    group = await doors(3).begin()
    found = await asyncio.gather(*(group.share(rank, "x") for rank in range(3)))
    for rank, each in enumerate(found):
        assert each == [
            None if other == rank else (b"from %d" % other, f"member {other}") for other in range(3)
        ]


async def test_many_names_at_once_in_any_order(doors: Make) -> None:
    group = await doors(3).begin()
    names = [f"bucket {number}" for number in range(60)]
    orders = [names, names[::-1], names[30:] + names[:30]]
    tasks = [
        asyncio.create_task(group.share(rank, name, count=3))
        for rank, order in enumerate(orders)
        for name in order
    ]
    for each in await asyncio.gather(*tasks):
        assert sum(one is None for one in each) == 1
    assert not any(door._calls for door in group.doors)


async def test_descriptors_are_handed_to_who_expects_them_only(doors: Make) -> None:
    group = await doors(2).begin()
    heard: list[str] = []
    group.doors[1].on_announced = heard.append
    before = len(os.listdir("/proc/self/fd"))
    first = asyncio.create_task(group.share(0, "x"))
    await wait_for(lambda: heard == ["x"])
    await asyncio.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not first.done()
    await group.share(1, "x")
    await first
    # Whoever shares itself is told nothing new.
    await asyncio.gather(group.share(1, "y"), group.share(0, "y"))
    assert heard in (["x"], ["x", "y"])


async def test_no_descriptors_are_fine(doors: Make) -> None:
    group = await doors(2).begin()
    found = await asyncio.gather(group.share(0, "x", 0), group.share(1, "x", 0))
    assert list(found) == [[None, (b"from 1", "")], [(b"from 0", ""), None]]


async def test_failing_ends_what_waits_and_what_comes(doors: Make) -> None:
    group = await doors(3).begin()
    waiting = [asyncio.create_task(group.share(rank, "x")) for rank in range(2)]
    await asyncio.sleep(0.02)
    failure = PeerFailedError("n2", "127.0.0.1:1", "it was killed")
    for door in group.doors[:2]:
        door.fail(failure)
        door.fail(ChannelClosedError("later"))
    for task in waiting:
        with pytest.raises(PeerFailedError, match="it was killed") as caught:
            await task
        assert caught.value is not failure
    with pytest.raises(PeerFailedError):
        await group.share(0, "y")


async def test_a_cancelled_share_closes_what_it_got(doors: Make) -> None:
    group = await doors(3).begin()
    before = len(os.listdir("/proc/self/fd"))
    one = asyncio.create_task(group.share(0, "x"))
    two = asyncio.create_task(group.share(1, "x"))
    calls = group.doors[0]._calls
    await wait_for(lambda: "x" in calls and len(calls["x"].handed) == 1)
    assert len(os.listdir("/proc/self/fd")) > before
    for task in (one, two):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(os.listdir("/proc/self/fd")) == before
    # What is handed to who has given up is closed; the connections live on.
    late = asyncio.create_task(group.share(2, "x"))
    await asyncio.sleep(0.02)
    assert [door._calls for door in group.doors[:2]] == [{}, {}]
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    await asyncio.gather(*(group.share(rank, "y") for rank in range(3)))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_name_is_shared_once_at_a_time(doors: Make) -> None:
    group = await doors(2).begin()
    first = asyncio.create_task(group.share(0, "x"))
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosedError, match="x is being shared already"):
        await group.share(0, "x")
    await asyncio.gather(first, group.share(1, "x"))


async def test_a_lost_member_is_told_once_begun(doors: Make) -> None:
    group = doors(3)
    await group.connect()
    group.doors[2].close()
    await asyncio.sleep(0.02)
    assert group.lost == []
    for door in group.doors[:2]:
        door.begin()
    said = "the connection was closed"
    assert sorted(group.lost) == [(0, 2, said), (1, 2, said)]
    group.doors[1].close()
    await wait_for(lambda: len(group.lost) == 3)
    assert group.lost[2] == (0, 1, said)


async def test_closing_ends_what_waits(doors: Make) -> None:
    group = await doors(2).begin()
    waiting = asyncio.create_task(group.share(0, "x"))
    await asyncio.sleep(0.02)
    group.doors[0].close()
    with pytest.raises(ChannelClosedError, match="the group has left"):
        await waiting


# Who may come in.


class Stranger:
    """A bare socket that speaks to a door."""

    def __init__(self, address: bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(address)
        self.sock.settimeout(5)

    def send(self, message: HostMessage | bytes, descriptors: Sequence[int] = ()) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.sock.sendmsg([data], rights if descriptors else [])

    async def hear(self) -> HostMessage | None:
        """Return the next message, or None at the end."""
        self.sock.setblocking(False)
        for _ in range(500):
            try:
                data = self.sock.recv(MESSAGE_BYTES)
                return decode(data) if data else None
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except ConnectionResetError:
                return None
        raise AssertionError("no answer")


@pytest.fixture
async def stranger(doors: Make) -> AsyncIterator[tuple[Doors, Stranger, Area]]:
    """Yield the doors of three members, a socket to the last, and the memory of a probe."""
    group = doors(3)
    other = Stranger(group.standings[2].address)
    group.doors[2]._tokens = [each.token for each in group.standings]
    # As if the members 0 and 1 did not connect by themselves.
    await group.doors[2].connect(group.standings)
    probe = Area(64)
    probe.buffer[:] = bytes(range(64))
    yield group, other, probe
    other.sock.close()
    probe.close()


def hello(group: Doors, rank: int = 0, token: bytes | None = None, view: int = 1) -> Hello:
    me, door = group.ids[rank], group.ids[2]
    return Hello(me, prove(token or group.standings[2].token, view, me, door))


async def test_a_member_is_welcome(stranger: tuple[Doors, Stranger, Area]) -> None:
    group, other, probe = stranger
    other.send(hello(group), [probe.fd])
    proof = prove(group.standings[0].token, 1, group.ids[2], group.ids[0], bytes(range(64)))
    assert await other.hear() == Welcome(proof)
    again = Stranger(group.standings[2].address)
    again.send(hello(group), [probe.fd])
    assert await again.hear() == Refusal("it is connected already")
    assert await again.hear() is None
    again.sock.close()


@pytest.mark.parametrize("wrong", ["token", "view", "rank", "self"])
async def test_who_cannot_prove_it_is_refused(
    stranger: tuple[Doors, Stranger, Area], wrong: str
) -> None:
    group, other, probe = stranger
    said = {
        "token": hello(group, token=bytes(32)),
        "view": hello(group, view=2),
        "rank": Hello("f" * 16, prove(group.standings[2].token, 1, "f" * 16, group.ids[2])),
        "self": hello(group, rank=2),
    }[wrong]
    other.send(said, [probe.fd])
    assert await other.hear() == Refusal("it is not the member that it says it is")
    assert await other.hear() is None


async def test_other_users_are_refused(
    stranger: tuple[Doors, Stranger, Area], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other, probe = stranger
    monkeypatch.setattr(host_door._Link, "user", lambda self: 4711)
    other.send(hello(group), [probe.fd])
    assert await other.hear() == Refusal(f"it belongs to user 4711, not to {os.geteuid()}")


async def test_memory_that_could_change_is_refused(
    stranger: tuple[Doors, Stranger, Area],
) -> None:
    group, other, _ = stranger
    descriptor = os.memfd_create("p2pdpt-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 64)
    other.send(hello(group), [descriptor])
    os.close(descriptor)
    assert await other.hear() == Refusal("its memory cannot be read: a shared area is not sealed")


@pytest.mark.parametrize(
    "first", [Announce("x", b""), Hand("x"), b"garbage", bytes(MESSAGE_BYTES + 1)]
)
async def test_whoever_says_anything_else_first_is_cut_off(
    stranger: tuple[Doors, Stranger, Area], first: HostMessage | bytes
) -> None:
    group, other, probe = stranger
    before = len(os.listdir("/proc/self/fd"))
    other.send(first, [probe.fd] * 3)
    assert await other.hear() is None
    assert len(os.listdir("/proc/self/fd")) == before - 1 and not group.doors[2]._unproven


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([Announce("x", b"")] * 2, "x is announced twice"),
        ([Hello("0" * 16, bytes(32))], "Hello between proven members"),
        ([b"garbage"], "bad message between members"),
        ([bytes(MESSAGE_BYTES + 1)], f"more than {MESSAGE_BYTES} bytes"),
        ([Announce(str(number), b"") for number in range(5)], "more than 4 names ahead"),
    ],
)
async def test_members_that_break_the_rules_are_cut_off(
    stranger: tuple[Doors, Stranger, Area],
    messages: list[HostMessage | bytes],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_door, "AHEAD", 4)
    group, other, probe = stranger
    other.send(hello(group), [probe.fd])
    await other.hear()
    group.doors[2].begin()
    for message in messages:
        other.send(message)
    assert await other.hear() is None
    ((rank, lost, reason),) = group.lost
    assert (rank, lost) == (2, 0) and said in reason


async def test_descriptors_nobody_asked_for_are_closed(
    stranger: tuple[Doors, Stranger, Area],
) -> None:
    group, other, probe = stranger
    other.send(hello(group), [probe.fd])
    await other.hear()
    before = len(os.listdir("/proc/self/fd"))
    other.send(Hand("never"), [probe.fd] * 8)
    other.send(Announce("x", b""), [probe.fd] * 2)
    await wait_for(lambda: "x" in group.doors[2]._calls)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_too_many_descriptors_are_an_error(stranger: tuple[Doors, Stranger, Area]) -> None:
    group, other, probe = stranger
    other.send(hello(group), [probe.fd])
    await other.hear()
    group.doors[2].begin()
    before = len(os.listdir("/proc/self/fd"))
    other.send(Hand("x"), [probe.fd] * 40)
    assert await other.hear() is None
    assert "raise the limit (ulimit -n)" in group.lost[0][2]
    assert len(os.listdir("/proc/self/fd")) == before - 1


# Why a pair cannot.


async def one_fails(group: Doors) -> str:
    """Connect member 0 to all as it sees them, and return why member 1 was not reached."""
    return (await group.doors[0].connect(group.standings))[1]


async def test_nobody_listens(doors: Make) -> None:
    group = doors(2)
    group.doors[1].close()
    assert "containers that are to share memory need one network namespace" in await one_fails(
        group
    )


async def test_nobody_answers(doors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_door, "PAIR_S", 0.05)
    group = doors(2)
    assert await one_fails(group) == "no answer within 0.05 s"
    assert group.doors[0]._links == {}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Refusal("not you"), "not you"),
        (Welcome(bytes(32)), "somebody else answers there"),
        (Hand("x"), "somebody else answers there"),
        (b"garbage", "bad message between members of one host"),
        (b"", "connection lost: Connection reset by peer"),
    ],
)
async def test_somebody_else_answers(doors: Make, answer: HostMessage | bytes, said: str) -> None:
    group = doors(2)
    listener = group.doors[1]._listener
    assert listener is not None
    asking = asyncio.create_task(one_fails(group))
    while True:
        try:
            sock, _ = listener.accept()
            break
        except BlockingIOError:
            await asyncio.sleep(0.01)
    if answer:
        sock.send(answer if isinstance(answer, bytes) else encode(answer))
    else:
        sock.close()
    assert said in await asking
    sock.close()


async def test_another_user_listens(doors: Make) -> None:
    group = doors(2)
    there = group.standings[1]
    group.standings[1] = Standing("", False, 1, 4711, there.address, there.token)
    assert await one_fails(group) == f"somebody else answers there, user {os.geteuid()}"


async def test_no_memory_comes_with_the_answer(doors: Make) -> None:
    group = doors(2)
    listener = group.doors[1]._listener
    assert listener is not None
    asking = asyncio.create_task(one_fails(group))
    while True:
        try:
            sock, _ = listener.accept()
            break
        except BlockingIOError:
            await asyncio.sleep(0.01)
    probe = bytes(group.doors[0]._probe.buffer)
    proof = prove(group.standings[0].token, 1, group.ids[1], group.ids[0], probe)
    sock.send(encode(Welcome(proof)))
    assert await asking == "no memory came with the answer"
    sock.close()


async def test_a_full_backlog_is_waited_for(doors: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    group = doors(2)
    codes = [errno.EAGAIN, errno.EAGAIN]
    connect_ex = socket.socket.connect_ex

    def busy(self: socket.socket, address: Any) -> int:
        return codes.pop() if codes else connect_ex(self, address)

    monkeypatch.setattr(socket.socket, "connect_ex", busy)
    assert await group.connect() == [{}, {}]
    assert codes == []


async def test_a_platform_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match="shared memory needs Linux, not darwin"):
        HostDoor(0, ["0" * 16], 1, lambda rank, error: None)


async def test_a_kernel_without_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdpt.memory._seal", lambda fd: False)
    with pytest.raises(UnavailableError, match="this kernel cannot share memory read-only"):
        HostDoor(0, ["0" * 16], 1, lambda rank, error: None)


async def test_a_kernel_that_refuses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    door = HostDoor(0, ["0" * 16], 1, lambda rank, error: None)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UnavailableError, match="no abstract socket: Operation not permitted"):
        door.listen()
    door.close()


# What the kernel may do.


async def test_sending_waits_for_room(doors: Make) -> None:
    """More is announced than the socket takes while the other does not read."""
    group = await doors(2).begin()
    link = group.doors[0]._links[1]
    count = 2000
    for number in range(count):
        link.send(Announce(f"{number:0100d}", bytes(1000)))
    assert link._writing
    await wait_for(lambda: len(group.doors[1]._calls) == count)
    await wait_for(lambda: not link._writing)
    assert not link._queue


async def test_descriptors_under_way_are_waited_for(
    doors: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await doors(2).begin()
    sendmsg = socket.socket.sendmsg
    refused: list[int] = []

    class Crowded(socket.socket):
        def sendmsg(self, *arguments: Any) -> int:
            if len(arguments) > 1 and arguments[1] and len(refused) < 3:
                refused.append(1)
                raise OSError(errno.ETOOMANYREFS, "Too many references")
            return sendmsg(self, *arguments)

    link = group.doors[0]._links[1]
    old = link._sock
    assert old is not None
    link._sock = Crowded(fileno=old.detach())
    await asyncio.gather(group.share(0, "x"), group.share(1, "x"))
    assert len(refused) == 3


async def test_a_broken_pipe_is_a_loss(doors: Make) -> None:
    group = await doors(2).begin()
    link = group.doors[0]._links[1]
    assert link._sock is not None
    link._sock.shutdown(socket.SHUT_WR)
    link.send(Announce("x", b""))
    await wait_for(lambda: len(group.lost) == 2)
    assert (0, 1, "connection lost: Broken pipe") in group.lost


async def test_children_do_not_keep_it_open(doors: Make) -> None:
    group = doors(2)
    assert all(door._listener in _open for door in group.doors)
    await group.begin()
    socks = [link._sock for door in group.doors for link in door._links.values()]
    assert len(socks) == 2 and all(sock in _open for sock in socks)


async def test_nothing_is_in_the_file_system(doors: Make) -> None:
    group = await doors(2).begin()
    await asyncio.gather(group.share(0, "x"), group.share(1, "x"))
    assert all(each.address.startswith(b"\0p2pdpt-") for each in group.standings)
    files = [os.readlink(f"/proc/self/fd/{file}") for file in group.files]
    assert all(file.startswith("/memfd:") for file in files)
