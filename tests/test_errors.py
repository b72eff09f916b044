"""The tree of errors."""

from __future__ import annotations

import copy
import inspect

import pytest

from p2pdpt import errors


def classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }


def test_every_error_is_public_and_below_the_root() -> None:
    assert sorted(classes()) == sorted(errors.__all__)
    assert all(issubclass(kind, errors.P2PError) for kind in classes().values())


def drawn_tree() -> list[tuple[str, str]]:
    """Return (class, its base) for each line of the module's drawing."""
    above: list[tuple[int, str]] = [(-1, "Exception")]
    found = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        name = line.split()[0] if line.startswith("    ") else ""
        if not name.endswith("Error"):
            continue
        depth = len(line) - len(line.lstrip())
        while above[-1][0] >= depth:
            above.pop()
        found.append((name, above[-1][1]))
        above.append((depth, name))
    return found


def test_the_drawing_in_the_docstring_is_true() -> None:
    drawn = dict(drawn_tree())
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in classes().items()}


def test_a_failed_peer_is_told_with_address_operation_and_step() -> None:
    error = errors.PeerFailedError("b (1234)", "10.0.0.2:70", "connection reset")
    assert str(error) == "peer b (1234) at 10.0.0.2:70 failed: connection reset"
    later = error.during("exchange of bucket 0 (ring)", 7)
    assert str(later) == (
        "peer b (1234) at 10.0.0.2:70 failed during exchange of bucket 0 (ring) at step 7: "
        "connection reset"
    )
    assert (later.peer, later.operation, later.step) == (
        "b (1234)",
        "exchange of bucket 0 (ring)",
        7,
    )


@pytest.mark.parametrize("kind", [errors.PeerFailedError, errors.PeerLeftError])
def test_a_failed_peer_survives_copying(kind: type[errors.PeerFailedError]) -> None:
    error = kind("b", "10.0.0.2:70", "left", operation="exchange", step=3)
    twin = copy.copy(error)
    assert type(twin) is kind
    assert (str(twin), twin.step, twin.address) == (str(error), 3, "10.0.0.2:70")
    assert type(error.during("x", 4)) is kind
