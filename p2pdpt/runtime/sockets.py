"""Sockets of a node: resolving without the default executor, listening, and forking.

A forked child (a DataLoader worker) inherits every descriptor, and would keep a dead parent's
connections open. So the sockets of this process's nodes are tracked, and a child replaces them
by ``/dev/null``: the numbers stay taken, as objects in the child will still close them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from p2pdpt.address import Address, is_loopback
from p2pdpt.errors import AddressInUseError, ConfigError

__all__ = ["bind", "connect", "fill_standard", "outward_hosts", "port_owner", "resolve", "track"]

_SIOCGIFADDR: Final = 0x8915

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked = False


def track(sock: socket.socket) -> None:
    """Close `sock` in children that this process forks from now on."""
    global _hooked
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        os.register_at_fork(after_in_child=_close_in_child)
    _open.add(sock)


def _close_in_child() -> None:
    descriptors = [sock.fileno() for sock in list(_open) if sock.fileno() >= 0]
    _open.clear()
    if not descriptors:
        return
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in descriptors:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


def fill_standard() -> None:
    """Let the descriptors 0 to 2 lead to ``/dev/null`` where they are closed, as under a daemon.

    Else the next sockets would get these numbers; libuv ends the process where it closes such a
    one, and whatever prints would write into a connection.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.open(os.devnull, os.O_RDWR)


async def resolve(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the families and socket addresses of a host, in the resolver's order.

    Names are looked up in a thread of their own, which the loop does not wait for at its end.

    Raises:
        OSError: the name is not known.
    """
    with contextlib.suppress(socket.gaierror):
        return _lookup(address, socket.AI_NUMERICHOST)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[tuple[socket.AddressFamily, Any]]] = loop.create_future()

    def settle(result: list[tuple[socket.AddressFamily, Any]] | OSError) -> None:
        if future.done():
            return
        if isinstance(result, OSError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def work() -> None:
        result: list[tuple[socket.AddressFamily, Any]] | OSError
        try:
            result = _lookup(address, 0)
        except OSError as error:
            result = error
        # The loop may have been closed meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=work, name="p2pdpt-resolve", daemon=True).start()
    return await future


async def connect(sock: socket.socket, place: Any) -> None:
    """Connect a socket that does not block.

    The loop's own way may look the address up once more, in threads of libuv's, which stay for
    ever and crash a forked child at its end.

    Raises:
        OSError: it cannot be connected.
    Cancellation leaves a socket that can only be closed.
    """
    code = sock.connect_ex(place)
    if code in (errno.EINPROGRESS, errno.EINTR):
        loop = asyncio.get_running_loop()
        writable = asyncio.Event()
        loop.add_writer(sock.fileno(), writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _lookup(address: Address, flags: int) -> list[tuple[socket.AddressFamily, Any]]:
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=flags
    )
    return [(family, place) for family, _, _, _, place in found]


def bind(address: Address, family: socket.AddressFamily, place: Any) -> socket.socket:
    """Return a socket that listens at `place`.

    Raises:
        AddressInUseError: the port is taken; the text names the holder where it can be read.
        ConfigError: this machine has no such address.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `[::]` means all addresses of both families.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(place)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            owner = port_owner(address.port)
            by = f" by {owner}" if owner else ""
            raise AddressInUseError(
                f"port {address.port} on {address.host} is in use{by}; use port 0 for any free "
                "one, or another"
            ) from None
        raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None
    track(sock)
    return sock


def port_owner(port: int) -> str:
    """Return ``pid N (name)`` of the process that listens at a TCP port, if it can be read."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        # Processes of others cannot be read, and processes end.
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def outward_hosts(family: socket.AddressFamily) -> list[str]:
    """Return this machine's own addresses that others might reach, best first.

    Nothing is sent: connecting a datagram socket only asks the kernel for a route.
    """
    probes: list[tuple[socket.AddressFamily, str]] = [(socket.AF_INET, "192.0.2.1")]
    if family == socket.AF_INET6:
        probes.insert(0, (socket.AF_INET6, "2001:db8::1"))
    hosts: list[str] = []
    for kind, target in probes:
        with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            hosts.append(sock.getsockname()[0])
    # Without a route to the world there may still be neighbours.
    if family == socket.AF_INET6:
        hosts += _ipv6_hosts()
    hosts += _ipv4_hosts()
    return [each for each in dict.fromkeys(hosts) if not is_loopback(each)]


def _ipv4_hosts() -> list[str]:
    """Return one address of each interface, where the system tells."""
    hosts: list[str] = []
    if sys.platform != "linux":
        return hosts
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            # Interfaces that are down or have no IPv4 address refuse.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
                hosts.append(socket.inet_ntoa(answer[20:24]))
    return hosts


def _ipv6_hosts() -> list[str]:
    """Return all addresses of global scope, where the system tells."""
    hosts = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, _, scope, *_ = line.split()
            if scope == "00":
                hosts.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    return hosts
