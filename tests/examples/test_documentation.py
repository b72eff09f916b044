"""The code shown in ``docs/topologies.md`` does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "topologies.md"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Run the page's blocks of Python, in order, and return what they define."""
    names: dict[str, Any] = {"__name__": "documentation"}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_first_topology_passes_the_kit(shown: dict[str, Any]) -> None:
    kit = shown["TestFlat"]()
    properties = [name for name in dir(kit) if name.startswith("test_")]
    assert len(properties) > 5
    for name in properties:
        getattr(kit, name)()


def test_the_simulation_ends_as_the_page_says(shown: dict[str, Any]) -> None:
    assert shown["outcome"].results[0].tolist() == [1.0, 1.0, 1.0, 1.0]
    contributions = [shown["np"].ones(1000)] * 3
    errors = shown["simulate"](shown["Flat"](), contributions, network=shown["slow"]).errors
    assert "rank 2" in str(errors[0]) and "rank 2" in str(errors[1])
