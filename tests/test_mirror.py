"""Every module has its test module, at the same place, and every test module its module."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# Where the tests of a package lie.
MIRRORS = {
    ROOT / "p2pdpt": TESTS,
    ROOT / "plugins" / "p2pdpt_plugins": TESTS / "plugins",
    ROOT / "transports" / "p2pdpt_transports": TESTS / "transports",
}
# What is tested across modules: whole runs, the promises, the build, the examples.
ACROSS = {"scenarios", "proof", "packaging", "examples", "typing"}
# The rules of the house themselves.
HOUSE = {TESTS / "test_architecture.py", TESTS / "test_mirror.py"}


def expected() -> dict[Path, Path]:
    """Return for each module the path of its test module."""
    return {
        mirror / path.parent.relative_to(package) / f"test_{path.name}": path
        for package, mirror in MIRRORS.items()
        for path in package.rglob("*.py")
        # A package's own file gathers names, and what it decides is tested where it is used.
        if path.name != "__init__.py"
    }


def present() -> set[Path]:
    """Return the test modules that mirror something."""
    return {
        path
        for path in TESTS.rglob("test_*.py")
        if path.relative_to(TESTS).parts[0] not in ACROSS and path not in HOUSE
    }


def relative(paths: set[Path]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_every_module_has_its_test_module() -> None:
    assert relative(set(expected()) - present()) == []


def test_every_test_module_has_its_module() -> None:
    packages = {
        mirror / path.parent.relative_to(package) / f"test_{path.parent.name}.py"
        for package, mirror in MIRRORS.items()
        for path in package.rglob("__init__.py")
    }
    assert relative(present() - set(expected()) - packages) == []


def test_test_modules_have_distinct_import_names() -> None:
    """Folders of tests are no packages, or all are; a mixture imports one module as another."""
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    packages = {folder for folder in folders if (folder / "__init__.py").exists()}
    assert packages in (set(), folders)
