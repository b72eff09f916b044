from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from p2pdpt.address import Address
from p2pdpt.errors import AddressInUseError, ConfigError
from p2pdpt.runtime import sockets
from p2pdpt.runtime.sockets import bind, connect, outward_hosts, port_owner, resolve, track


async def test_numbers_are_resolved_at_once() -> None:
    assert await resolve(Address("127.0.0.1", 7)) == [(socket.AF_INET, ("127.0.0.1", 7))]
    assert await resolve(Address("::1", 7)) == [(socket.AF_INET6, ("::1", 7, 0, 0))]


async def test_names_are_resolved_without_the_default_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await resolve(Address("localhost", 7))
    assert {place[0] for _, place in found} <= {"127.0.0.1", "::1"}
    assert getattr(asyncio.get_running_loop(), "_default_executor", None) is None

    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="Name or service not known"):
        await resolve(Address("no.such.host", 7))


async def test_a_cancelled_resolution_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    lookup: Callable[..., Any] = socket.getaddrinfo

    def slow(*args: Any, **options: Any) -> Any:
        if not options["flags"]:
            go.wait(5)
        return lookup(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await resolve(Address("localhost", 7))
    go.set()


def test_a_taken_port_names_its_holder() -> None:
    first = bind(Address("127.0.0.1", 0), socket.AF_INET, ("127.0.0.1", 0))
    port = first.getsockname()[1]
    assert not first.get_inheritable()
    with first, pytest.raises(AddressInUseError) as caught:
        bind(Address("127.0.0.1", port), socket.AF_INET, ("127.0.0.1", port))
    text = str(caught.value)
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} (" in text
    assert "use port 0 for any free one, or another" in text


def test_an_address_of_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0"):
        bind(Address("192.0.2.1", 0), socket.AF_INET, ("192.0.2.1", 0))


def test_nobody_holds_a_free_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert port_owner(sock.getsockname()[1]) == ""


def test_outward_hosts_are_never_loopback() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        assert not [h for h in outward_hosts(family) if h.startswith("127.") or h == "::1"]


def test_a_forked_child_holds_no_tracked_socket() -> None:
    one, two = socket.socketpair()
    track(one)
    read, write = os.pipe()
    with one, two:
        child = os.fork()
        if child == 0:
            # The numbers stay taken, so that closing the objects closes nobody else's.
            os.write(write, os.readlink(f"/proc/self/fd/{one.fileno()}").encode())
            os.read(two.fileno(), 1)
            os._exit(0)
        assert os.read(read, 100) == b"/dev/null"
        one.close()
        two.close()
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


def test_closed_sockets_are_forgotten() -> None:
    sock = socket.socket()
    track(sock)
    sock.close()
    sockets._close_in_child()


async def test_a_socket_is_connected_without_the_loops_own_lookup() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sock:
        sock.setblocking(False)
        await connect(sock, listener.getsockname())
        assert sock.getpeername() == listener.getsockname()
        listener.accept()[0].close()


async def test_who_cannot_be_connected_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    with socket.socket() as sock:
        sock.setblocking(False)
        with pytest.raises(ConnectionRefusedError):
            await connect(sock, place)


async def test_a_cancelled_connection_leaves_nothing_with_the_loop() -> None:
    with socket.socket() as sock:
        sock.setblocking(False)
        # Nobody answers there: the address is kept for documentation.
        task = asyncio.create_task(connect(sock, ("192.0.2.1", 9)))
        await asyncio.sleep(0.01)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not asyncio.get_running_loop().remove_writer(sock.fileno())
        else:
            assert isinstance(task.exception(), OSError)


def test_closed_standard_descriptors_are_filled() -> None:
    # In a process of its own, which has nothing else open.
    code = (
        "import os\nfrom p2pdpt.runtime.sockets import fill_standard\n"
        "os.dup2(1, 9)\nfor number in (0, 2): os.close(number)\n"
        "fill_standard()\nlast = os.open('/dev/null', 0)\n"
        "os.write(9, f'{last} {os.readlink(\"/proc/self/fd/0\")}'.encode())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "3 /dev/null"
