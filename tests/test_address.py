from __future__ import annotations

import pytest

from p2pdpt.address import Address, is_loopback, is_wildcard, parse_address
from p2pdpt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7:7777", "10.0.0.7", 7777),
        ("node-1.example:0", "node-1.example", 0),
        ("[::1]:65535", "::1", 65535),
        (" [fd00::1]:7777 ", "fd00::1", 7777),
    ],
)
def test_there_and_back(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text.strip()
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "fd00::1:7777",
            "--join 'fd00::1:7777': write an IPv6 address in brackets: [fd00::1]:7777",
        ),
        ("::1", "in brackets: [::1]:PORT"),
        ("host", "has no port; write host:PORT"),
        (":7777", "is not host:port, for instance 10.0.0.7:7777"),
        ("tcp://host:1", "is not host:port"),
        ("a b:1", "is not host:port"),
        ("host:70000", "'70000' is not a port from 0 to 65535"),
        ("host:http", "'http' is not a port"),
        ("host:", "'' is not a port"),
        ("[::1]", "is not [host]:port, for instance [::1]:7777"),
        ("[host]:1", "'host' in brackets is not an IPv6 address"),
    ],
)
def test_what_is_none_is_told_with_the_fix(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text, what="--join")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--join ")


def test_kinds_of_hosts() -> None:
    assert [is_loopback(host) for host in ("127.0.1.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("10.0.0.1", "::", "host")] == [False] * 3
    assert [is_wildcard(host) for host in ("0.0.0.0", "::")] == [True] * 2
    assert [is_wildcard(host) for host in ("127.0.0.1", "host")] == [False] * 2
