"""Who may import whom, and other rules of the house that a syntax tree can show.

Every import counts, wherever it stands; those for type checkers only (under ``TYPE_CHECKING``)
count where the rule is about knowing, and not where it is about loading.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "p2pdpt": ROOT,
    "p2pdpt_plugins": ROOT / "plugins",
    "p2pdpt_transports": ROOT / "transports",
}

CONTRACTS = {"channel", "codec", "dtypes", "errors", "group", "memory", "topology"}
"""Modules of ``p2pdpt`` that everything may know."""
SHARED = CONTRACTS | {"address", "config", "kernels", "registry"}
"""Modules of ``p2pdpt`` that the halves which act may know as well."""

# Who may know whom, by the first two names of a module; a package always knows itself. What a
# package needs of another kind comes to it by argument, or through an entry point.
MAY_KNOW: dict[str, set[str]] = {
    **{f"p2pdpt.{name}": CONTRACTS for name in CONTRACTS},
    "p2pdpt.address": {"errors"},
    "p2pdpt.config": CONTRACTS | {"address"},
    # Its handle shows the view, which is a protocol's.
    "p2pdpt.group": CONTRACTS | {"protocol"},
    "p2pdpt.kernels": CONTRACTS | {"_native"},
    # The contract of a discovery source lies beside the sources.
    "p2pdpt.registry": CONTRACTS | {"runtime"},
    "p2pdpt.protocol": CONTRACTS,
    # Its native driver hands plans to the compiled module.
    "p2pdpt.runtime": SHARED | {"protocol", "_native"},
    "p2pdpt.testing": SHARED | {"protocol", "runtime"},
    "p2pdpt.training": SHARED | {"protocol", "runtime"},
    "p2pdpt.cli": SHARED | {"protocol", "runtime"},
    "p2pdpt_plugins": {"topology", "errors"},
    "p2pdpt_transports": CONTRACTS | {"protocol"},
}

# What sans-io code may load: it is given sockets' bytes, the time and random numbers.
PURE = {
    "__future__", "abc", "array", "base64", "bisect", "collections", "contextlib", "copy",
    "dataclasses", "enum", "functools", "hashlib", "heapq", "hmac", "inspect", "ipaddress",
    "itertools", "json", "logging", "math", "operator", "random", "re", "string", "struct",
    "textwrap", "types", "typing", "unicodedata", "zlib",
}  # fmt: skip
TORCH_HOMES = ("p2pdpt.training", "p2pdpt.cli.bench", "examples", "tests")
LOOP_STARTERS = ("p2pdpt.cli", "p2pdpt.training.loop_thread", "examples", "tests")
STARTS_A_LOOP = {"run", "new_event_loop", "Runner", "run_until_complete", "run_forever"}
UNSAFE_MODULES = {
    "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "yaml", "xmlrpc",
}  # fmt: skip
"""Modules that make objects, or run code, from bytes."""


@dataclass(frozen=True)
class Import:
    """One imported module; `names` are those taken from it."""

    module: str
    names: tuple[str, ...]
    line: int
    typing_only: bool


@dataclass(frozen=True)
class Source:
    """One Python file."""

    name: str
    path: Path
    tree: ast.Module
    text: str

    @property
    def package(self) -> str:
        """The key of MAY_KNOW that it falls under."""
        parts = self.name.split(".")
        return parts[0] if parts[0] != "p2pdpt" else ".".join(parts[:2])

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"

    def imports(self) -> Iterator[Import]:
        typing_only: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                typing_only |= {id(inner) for part in node.body for inner in ast.walk(part)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, (), node.lineno, id(node) in typing_only)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.at(node.lineno)}: imports are absolute"
                names = tuple(alias.name for alias in node.names)
                yield Import(node.module or "", names, node.lineno, id(node) in typing_only)

    def known(self) -> Iterator[tuple[str, int]]:
        """Yield the modules of ours that it names, as ``(top.second, line)``."""
        for entry in self.imports():
            top, _, rest = entry.module.partition(".")
            if top not in SOURCES:
                continue
            if top != "p2pdpt":
                yield top, entry.line
            elif rest:
                yield f"p2pdpt.{rest.split('.')[0]}", entry.line
            else:
                yield from ((f"p2pdpt.{name}", entry.line) for name in entry.names)


@functools.cache
def sources() -> tuple[Source, ...]:
    """Return every Python file of the product, its examples and its tests."""
    folders = [(home, home / package) for package, home in SOURCES.items()]
    folders += [(ROOT, ROOT / name) for name in ("examples", "tests")]
    found = []
    for home, folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "build" in path.relative_to(home).parts:
                continue
            text = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")
            found.append(Source(name, path, ast.parse(text), text))
    return tuple(found)


def product() -> list[Source]:
    """Return what is installed."""
    return [source for source in sources() if source.name.split(".")[0] in SOURCES]


def shown() -> list[Source]:
    """Return what others use or copy: all but the tests."""
    return [source for source in sources() if source.name.split(".")[0] != "tests"]


def test_packages_know_only_whom_they_may() -> None:
    wrong = []
    for source in product():
        # The package itself is the door to all of it, opened on demand.
        if source.name == "p2pdpt":
            continue
        assert source.package in MAY_KNOW, f"{source.name}: say in MAY_KNOW whom it may know"
        allowed = {f"p2pdpt.{name}" for name in MAY_KNOW[source.package]} | {source.package}
        wrong += [
            f"{source.at(line)} knows {known}"
            for known, line in source.known()
            if known not in allowed and known != "p2pdpt.__version__"
        ]
    assert wrong == []


def test_the_core_never_names_a_plugin_or_a_transport() -> None:
    name = re.compile(r"p2pdpt_(plugins|transports)([.:].*)?")
    wrong = [
        source.at(node.lineno)
        for source in product()
        if source.name.split(".")[0] == "p2pdpt"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and name.fullmatch(node.value)
    ]
    assert wrong == []


def test_protocols_are_pure() -> None:
    wrong = []
    for source in product():
        if source.package != "p2pdpt.protocol":
            continue
        for entry in source.imports():
            top = entry.module.split(".")[0]
            if not entry.typing_only and top not in PURE | {"msgspec", "p2pdpt"}:
                wrong.append(f"{source.at(entry.line)} loads {entry.module}")
        for node in ast.walk(source.tree):
            # A generator that was seeded is an argument like any other; the global one is not.
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
                if node.attr != "Random":
                    wrong.append(f"{source.at(node.lineno)} uses random.{node.attr}")
    assert wrong == []


def test_contracts_and_plugins_load_neither_torch_nor_asyncio() -> None:
    bound = {f"p2pdpt.{name}" for name in CONTRACTS} | {"p2pdpt_plugins", "p2pdpt.protocol"}
    wrong = [
        f"{source.at(entry.line)} loads {entry.module}"
        for source in product()
        if source.package in bound
        for entry in source.imports()
        if not entry.typing_only and entry.module.split(".")[0] in {"torch", "asyncio", "uvloop"}
    ]
    assert wrong == []


def test_torch_stays_where_tensors_are() -> None:
    wrong = [
        f"{source.at(entry.line)} loads {entry.module}"
        for source in sources()
        if not source.name.startswith(TORCH_HOMES)
        for entry in source.imports()
        if entry.module.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_only_the_command_line_and_the_loop_thread_start_a_loop() -> None:
    wrong = []
    for source in sources():
        if source.name.startswith(LOOP_STARTERS):
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Attribute) or node.attr not in STARTS_A_LOOP:
                continue
            owner = ast.unparse(node.value)
            if owner in {"asyncio", "uvloop"} or node.attr in {"run_until_complete", "run_forever"}:
                wrong.append(f"{source.at(node.lineno)} starts a loop with {owner}.{node.attr}")
        wrong += [
            f"{source.at(entry.line)} takes {name} from {entry.module}"
            for entry in source.imports()
            if entry.module in {"asyncio", "uvloop"}
            for name in STARTS_A_LOOP & set(entry.names)
        ]
    assert wrong == []


def test_nothing_makes_objects_or_runs_code_from_bytes() -> None:
    wrong = []
    for source in shown():
        for entry in source.imports():
            if entry.module.split(".")[0] in UNSAFE_MODULES:
                wrong.append(f"{source.at(entry.line)} loads {entry.module}")
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if called in {"eval", "exec", "__import__"}:
                wrong.append(f"{source.at(node.lineno)} calls {called}")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                wrong.append(f"{source.at(node.lineno)}: torch.load without weights_only=True")
            if keywords.get("allow_pickle", "False") != "False":
                wrong.append(f"{source.at(node.lineno)}: allow_pickle")
    assert wrong == []


def test_files_are_short_and_named_for_one_thing() -> None:
    wrong = []
    for source in sources():
        lines = source.text.count("\n")
        if lines > 600:
            wrong.append(f"{source.path.relative_to(ROOT)} has {lines} lines")
        if source.package == "p2pdpt_plugins" and lines > 60:
            wrong.append(f"{source.path.relative_to(ROOT)} has {lines} lines; a plugin has 60")
        if re.search(r"util|helper|manager|misc|common", source.path.stem):
            wrong.append(f"{source.path.relative_to(ROOT)} is named for anything")
        wrong += [
            f"{source.at(node.lineno)}: class {node.name} is named for anything"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ClassDef) and re.search(r"Util|Helper|Manager", node.name)
        ]
    for path in sorted((ROOT / "cffi_build").rglob("*.[ch]")):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > 600 and "generated" not in path.parts:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
    assert wrong == []


def test_every_module_says_what_it_is_for() -> None:
    wrong = [str(s.path.relative_to(ROOT)) for s in shown() if not ast.get_docstring(s.tree)]
    assert wrong == []


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not installed")
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import p2pdpt",
        "from p2pdpt.cli.main import main; sys.argv = ['p2pdpt', '--help']; main()",
        "from p2pdpt.cli.main import main; sys.argv = ['p2pdpt', 'plugins', 'list']; main()",
        "import p2pdpt.testing",
    ],
    ids=["import", "help", "plugins", "testing"],
)
def test_all_but_training_works_without_torch(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("module", ["p2pdpt", "p2pdpt.cli.main"])
def test_start_up_loads_nothing_heavy(module: str) -> None:
    shown = f"import sys, {module}; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(result.stdout.split())
    assert loaded & {"torch", "numpy", "p2pdpt_plugins", "p2pdpt_transports"} == set()
