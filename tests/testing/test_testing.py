"""The package's own names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import p2pdpt.testing


def test_every_name_is_found() -> None:
    for name in p2pdpt.testing.__all__:
        assert getattr(p2pdpt.testing, name).__name__ == name
    assert dir(p2pdpt.testing) == sorted(p2pdpt.testing.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'p2pdpt[.]testing' has no attribute 'Simulator'"):
        _ = p2pdpt.testing.Simulator


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import sys, p2pdpt.testing\n"
        "print(sorted({'numpy', 'torch', 'asyncio', 'pytest'} & set(sys.modules)))\n"
        "p2pdpt.testing.ManualClock\n"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
