from __future__ import annotations

from p2pdpt.testing.transport_kit import TransportKit
from p2pdpt_transports.tcp import TcpTransport


class TestTcp(TransportKit):
    transport = TcpTransport
