"""Addresses as people write them: ``host:port`` and ``[v6]:port``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from p2pdpt.errors import ConfigError

__all__ = ["Address", "is_loopback", "is_wildcard", "parse_address"]


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name or number, without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, what: str = "address") -> Address:
    """Return the address that `text` writes.

    Args:
        text: ``host:port`` or ``[v6]:port``.
        what: the flag or key it came from, for the error.

    Raises:
        ConfigError: it is no address; the text shows the form that was meant.
    """
    stripped = text.strip()
    if stripped.startswith("["):
        host, bracket, rest = stripped[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise ConfigError(f"{what} {text!r} is not [host]:port, for instance [::1]:7777")
        number = rest[1:]
        if not _is_ipv6(host):
            raise ConfigError(f"{what} {text!r}: {host!r} in brackets is not an IPv6 address")
    else:
        host, colon, number = stripped.rpartition(":")
        if _is_ipv6(host) or (host.count(":") and _is_ipv6(stripped)):
            shown = f"[{host}]:{number}" if _is_ipv6(host) else f"[{stripped}]:PORT"
            raise ConfigError(
                f"{what} {text!r}: write an IPv6 address in brackets: {shown}"
                + (f" (or [{stripped}]:PORT)" if _is_ipv6(stripped) and _is_ipv6(host) else "")
            )
        if not colon:
            raise ConfigError(f"{what} {text!r} has no port; write {text.strip() or 'host'}:PORT")
        if not host or ":" in host or any(c.isspace() or c == "/" for c in host):
            raise ConfigError(f"{what} {text!r} is not host:port, for instance 10.0.0.7:7777")
    if not (number.isascii() and number.isdigit() and int(number) <= 65535):
        raise ConfigError(f"{what} {text!r}: {number!r} is not a port from 0 to 65535")
    return Address(host, int(number))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Tell whether `host`, a number or ``localhost``, can only be reached on its own machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Tell whether `host` stands for all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
