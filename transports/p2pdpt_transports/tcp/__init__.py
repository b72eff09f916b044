"""Bulk over TCP, on whatever authenticated stream the node's door makes."""

from __future__ import annotations

from p2pdpt_transports.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
