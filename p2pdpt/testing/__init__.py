"""Simulator and conformance kits, for our own tests and for those of plugins.

Everything is loaded when it is first asked for, so that a test of a topology pays for no
transport, and a test of a transport for no simulator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdpt.testing.chaos_transport import ChaosTransport
    from p2pdpt.testing.clocks import ManualClock
    from p2pdpt.testing.loopback_door import LoopbackDoor
    from p2pdpt.testing.memory_transport import MemoryTransport
    from p2pdpt.testing.programs import AllReduce, Program, Scripted
    from p2pdpt.testing.random_programs import random_all_reduce, random_program
    from p2pdpt.testing.reference import run_reference
    from p2pdpt.testing.simulator import Network, Outcome, Simulation, simulate
    from p2pdpt.testing.topology_kit import TopologyKit, pattern
    from p2pdpt.testing.transport_kit import TransportKit

__all__ = [
    "AllReduce",
    "ChaosTransport",
    "LoopbackDoor",
    "ManualClock",
    "MemoryTransport",
    "Network",
    "Outcome",
    "Program",
    "Scripted",
    "Simulation",
    "TopologyKit",
    "TransportKit",
    "pattern",
    "random_all_reduce",
    "random_program",
    "run_reference",
    "simulate",
]

_MODULES = {
    "AllReduce": "programs",
    "ChaosTransport": "chaos_transport",
    "LoopbackDoor": "loopback_door",
    "ManualClock": "clocks",
    "MemoryTransport": "memory_transport",
    "Network": "simulator",
    "Outcome": "simulator",
    "Program": "programs",
    "Scripted": "programs",
    "Simulation": "simulator",
    "TopologyKit": "topology_kit",
    "TransportKit": "transport_kit",
    "pattern": "topology_kit",
    "random_all_reduce": "random_programs",
    "random_program": "random_programs",
    "run_reference": "reference",
    "simulate": "simulator",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
