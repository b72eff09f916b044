"""What the sdist and the wheels contain, with and without a compiler.

A build that quietly lost its compiled part, or its sources, still exits with 0: so look inside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("build", reason="builds need the distribution 'build'")
pytest.importorskip("setuptools", reason="builds need setuptools")

ROOT = Path(__file__).resolve().parents[2]
NATIVE = "p2pdpt/_native.abi3.so"
# Neither is a part of the sources.
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "*.egg-info", "*.so", "generated", "__pycache__"
)

needs_compiler = pytest.mark.skipif(
    os.environ.get("P2PDPT_NATIVE") != "require" and shutil.which("cc") is None,
    reason="there is no C compiler (cc)",
)


@dataclass(frozen=True)
class Build:
    """The outcome of one build."""

    code: int
    output: str
    made: list[Path]

    @property
    def wheel(self) -> zipfile.ZipFile:
        (path,) = (path for path in self.made if path.suffix == ".whl")
        return zipfile.ZipFile(path)

    def metadata(self, name: str) -> dict[str, list[str]]:
        """Return a file of the wheel's metadata, each key with all its values."""
        with self.wheel as wheel:
            (member,) = (m for m in wheel.namelist() if m.endswith(f".dist-info/{name}"))
            message = Parser().parsestr(wheel.read(member).decode())
        return {key: message.get_all(key, []) for key in message}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources, so that builds leave the checkout as it is."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "p2pdpt", ignore=LEFT_OUT)


def build(source: Path, out: Path, *options: str, native: str, compiler: str = "") -> Build:
    environment = {**os.environ, "P2PDPT_NATIVE": native}
    if compiler:
        environment["CC"] = compiler
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "-o", str(out), str(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return Build(result.returncode, result.stdout + result.stderr, sorted(out.glob("p2pdpt-*")))


@pytest.fixture(scope="module")
def complete(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build the sdist, and from it the wheel."""
    return build(checkout, tmp_path_factory.mktemp("complete"), native="require")


@pytest.fixture(scope="module")
def without_compiler(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build the wheel where the compiler fails."""
    out = tmp_path_factory.mktemp("auto")
    return build(checkout, out, "--wheel", native="auto", compiler="/bin/false")


@needs_compiler
def test_the_sdist_has_what_a_build_needs(complete: Build, checkout: Path) -> None:
    assert complete.code == 0, complete.output
    (path,) = (path for path in complete.made if path.name.endswith(".tar.gz"))
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    kept = {
        str(path.relative_to(checkout))
        for folder in ("cffi_build", "p2pdpt", "plugins", "transports", "tests", "examples", "docs")
        for path in (checkout / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".c", ".h", ".typed", ".md"}
        and "generated" not in path.parts
    }
    assert kept - names == set()
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "constraints.txt"} <= names
    assert not [name for name in names if "generated" in name or name.endswith(".so")]


@needs_compiler
def test_the_wheel_has_the_compiled_module_and_says_so(complete: Build) -> None:
    assert complete.code == 0, complete.output
    with complete.wheel as wheel:
        names = wheel.namelist()
    assert NATIVE in names
    about = complete.metadata("WHEEL")
    assert about["Root-Is-Purelib"] == ["false"]
    assert len(about["Tag"]) == 1 and about["Tag"][0].startswith("cp311-abi3-")


@needs_compiler
def test_the_wheel_has_the_packages_and_nothing_else(complete: Build) -> None:
    with complete.wheel as wheel:
        names = wheel.namelist()
        points = next(name for name in names if name.endswith("entry_points.txt"))
        declared = wheel.read(points).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "p2pdpt",
        "p2pdpt_plugins",
        "p2pdpt_transports",
    }
    for package in ("p2pdpt", "p2pdpt_plugins", "p2pdpt_transports"):
        assert f"{package}/py.typed" in names
    for line in ("p2pdpt = p2pdpt.cli.main:main", "ring = p2pdpt_plugins.ring:Ring"):
        assert line in declared
    requires = complete.metadata("METADATA")["Requires-Dist"]
    assert "torch>=2.4" in requires


def test_without_a_compiler_the_wheel_is_pure(without_compiler: Build) -> None:
    assert without_compiler.code == 0, without_compiler.output
    assert "p2pdpt is built without its compiled kernels" in without_compiler.output
    about = without_compiler.metadata("WHEEL")
    assert about["Root-Is-Purelib"] == ["true"]
    assert about["Tag"] == ["py3-none-any"]
    with without_compiler.wheel as wheel:
        assert not [name for name in wheel.namelist() if name.endswith((".so", ".c", ".o"))]


def test_the_pure_wheel_works(without_compiler: Build, tmp_path: Path) -> None:
    with without_compiler.wheel as wheel:
        wheel.extractall(tmp_path)
    show = (
        # Else the finder of an editable install lends the pure package its compiled module.
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '_editable_' not in repr(f)];"
        "import p2pdpt.kernels as k, p2pdpt_plugins.ring, p2pdpt_transports.tcp;"
        "print(k.__file__); print(k.default().description)"
    )
    result = subprocess.run(
        [sys.executable, "-c", show],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "P2PDPT_NATIVE": "auto"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    place, description = result.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert description == "numpy (the compiled module is not built)"


def test_required_and_without_a_compiler_the_build_fails(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout, tmp_path, "--wheel", native="require", compiler="/bin/false")
    assert result.code != 0
    assert "P2PDPT_NATIVE=require, but nothing compiles" in result.output
    assert "Install a C compiler" in result.output
    assert result.made == []


def test_a_missing_compiler_is_a_failing_one(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout, tmp_path, "--wheel", native="auto", compiler="/nowhere/cc")
    assert result.code == 0, result.output
    assert result.metadata("WHEEL")["Tag"] == ["py3-none-any"]


def test_switched_off_nothing_is_compiled(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout, tmp_path, "--wheel", native="off", compiler="/bin/false")
    assert result.code == 0, result.output
    assert "built without" not in result.output
    assert result.metadata("WHEEL")["Tag"] == ["py3-none-any"]


def test_an_unknown_choice_is_refused(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout, tmp_path, "--wheel", native="maybe")
    assert result.code != 0
    assert "P2PDPT_NATIVE='maybe': choose auto, require or off" in result.output
