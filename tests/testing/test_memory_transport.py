from __future__ import annotations

from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.transport_kit import TransportKit


class TestMemory(TransportKit):
    transport = MemoryTransport
