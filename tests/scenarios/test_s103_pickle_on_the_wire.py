"""S103: pickles that are sent to a node do not run."""

from __future__ import annotations

import pickle
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from p2pdpt.protocol.handshake import Handshake, Identity
from p2pdpt.protocol.messages import Farewell, Gather, encode

SCRIPT = """
from p2pdpt import ADD

found = []
sys.addaudithook(lambda event, values: event == "pickle.find_class" and found.append(values))

async def body(node, group):
    while not Path(os.environ["STOP"]).exists():
        await group.all_gather(b"x", name="alive")
        await asyncio.sleep(0.02)
    # All see the end in the same round.
    memory = fill(group, 1000)
    await group.all_reduce(memory, ADD, name="sum")
    assert (memory.result == pattern_sum(3, 1000)).all()
    say(unpickled=len(found))
    await group.leave()

main(body)
"""


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def shake(address: str, run: str, kind: str) -> socket.socket:
    """Return a connection whose handshake is done, as a node without a secret may do it."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    identity = Identity(cluster="default", node_id=secrets.token_hex(8), run=run, kind=kind)
    handshake = Handshake("dialer", identity, None, secrets.token_bytes(32), where=address)
    while True:
        sock.sendall(handshake.data_to_send())
        if handshake.done:
            break
        if data := sock.recv(handshake.wanted):
            handshake.receive(data)
        else:
            handshake.end()
    assert handshake.error is None, handshake.error
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side closes a connection, whatever it says before."""
    sock.settimeout(10)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        sock.close()
    return True


def test_s103_nothing_runs_and_the_node_goes_on(peers: Any, tmp_path: Path, run_name: str) -> None:
    pwned, stop = tmp_path / "pwned", tmp_path / "stop"
    evil = pickle.dumps(Evil(pwned))
    three = peers(SCRIPT, 3, transport="tcp", variables={"STOP": str(stop)})
    address, *_ = [peer.read()["address"] for peer in three]
    host, _, port = address.rpartition(":")

    # As the first bytes.
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(evil)
    assert is_closed(sock)
    # In place of each message of the handshake.
    identity = Identity(cluster="default", node_id=secrets.token_hex(8), run=run_name, kind="x")
    handshake = Handshake("dialer", identity, None, secrets.token_bytes(32), where="there")
    hello = handshake.data_to_send()
    for kind in range(5):
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.sendall(hello + struct.pack("!BH", kind, len(evil)) + evil)
        assert is_closed(sock)
    # In place of each control message, and within those that carry bytes or text.
    gather = encode(Gather("alive", 0, evil))
    farewell = encode(Farewell(1, {}, evil.decode("latin-1")))
    frames = [struct.pack("!BI", kind, len(evil)) + evil for kind in range(16)]
    for frame in [*frames, gather, farewell, msgspec.msgpack.encode(msgspec.msgpack.Ext(1, evil))]:
        sock = shake(address, run_name, "control")
        sock.sendall(frame)
        assert is_closed(sock)
    # And among the bulk.
    for head in (b"\x2b\x9d\x01\x00", b"\x2b\x9d\x02\x00", b""):
        sock = shake(address, run_name, "tcp")
        sock.sendall(head + evil + bytes(200) + evil * 10)
        assert is_closed(sock)

    stop.touch()
    for peer in three:
        assert peer.end() == 0, peer.wrote()
        assert peer.said()[-1]["unpickled"] == 0
        assert "Traceback" not in peer.wrote()
    assert not pwned.exists()
    # A stranger does not fill the log.
    assert len(three[0].wrote().splitlines()) <= 5
