from __future__ import annotations

import subprocess
import sys

import pytest

import p2pdpt
from p2pdpt import errors


def test_all_names_are_there_and_lazy() -> None:
    assert len(set(p2pdpt.__all__)) == len(p2pdpt.__all__)
    assert set(p2pdpt.__all__) <= set(dir(p2pdpt))
    for name in p2pdpt.__all__:
        if name != "session":
            assert getattr(p2pdpt, name) is not None
    assert set(errors.__all__) <= set(p2pdpt.__all__)
    assert p2pdpt.ConfigError is errors.ConfigError


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'p2pdpt' has no attribute 'nothing'"):
        _ = p2pdpt.nothing


def test_import_loads_neither_torch_nor_asyncio() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import p2pdpt\n"
        "heavy = {'torch', 'numpy', 'asyncio', 'msgspec', 'importlib.metadata', 'click', 'rich'}\n"
        "print(*sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_everything_but_training_works_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import p2pdpt\n"
        "for name in p2pdpt.__all__:\n"
        "    name == 'session' or getattr(p2pdpt, name)\n"
        "assert 'p2pdpt.training' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0
