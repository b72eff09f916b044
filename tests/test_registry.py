from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdpt import registry
from p2pdpt.errors import ConfigError, PluginError
from p2pdpt.registry import create_topology, load_discovery, load_transport, plugins
from p2pdpt.runtime.discovery.local import LocalDiscovery

MODULE = """
from dataclasses import dataclass
from p2pdpt.topology import Topology

@dataclass(frozen=True)
class Tuned(Topology):
    fanout: int = 2
    rate: float = 0.5
    fast: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        if self.fanout < 1:
            raise ValueError("fanout must be positive")

    async def exchange(self, links, bucket): ...

class Plain(Topology):
    def __init__(self, width: int = 1):
        self.width = width

    async def exchange(self, links, bucket): ...

class Unfinished(Topology):
    pass

class Ring(Topology):
    async def exchange(self, links, bucket): ...
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a distribution that registers entry points, in a folder of its own on sys.path."""

    def make(name: str, points: dict[str, str], group: str = "p2pdpt.topologies") -> None:
        folder = tmp_path / name
        info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = "\n".join(f"{key} = {value}" for key, value in points.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
        module = f"plugin_{name.replace('-', '_')}"
        (folder / f"{module}.py").write_text(MODULE)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.setattr(registry, "_warned", set())
    return make


def test_built_ins() -> None:
    assert type(create_topology("ring")).__name__ == "Ring"
    assert create_topology("p2pdpt:ring") == create_topology("ring")
    assert create_topology("mapreduce:reducer=0").describe() == "mapreduce:reducer=0"
    assert load_transport("tcp").name == "tcp"
    assert load_discovery("local") is LocalDiscovery
    found = {(info.group, info.name): info for info in plugins()}
    for name in ("ring", "mapreduce"):
        info = found["p2pdpt.topologies", name]
        assert (info.distribution, info.status, info.reason) == ("p2pdpt", "ok", "")
    assert found["p2pdpt.transports", "tcp"].value == "p2pdpt_transports.tcp:TcpTransport"
    assert found["p2pdpt.discovery", "static"].status == "ok"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rng", "there is no topology called 'rng'; did you mean ring?; known: "),
        ("p2pdpt:tree", "there is no topology called 'tree' in distribution p2pdpt"),
        ("", "topology '' is not NAME"),
        (":ring", "is not NAME"),
        ("a:b:c", "is not NAME"),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        create_topology(name)
    assert said in str(caught.value)


def test_options_are_converted_by_the_plugins_types(install: Install) -> None:
    install("tuner", {"tuned": "plugin_tuner:Tuned", "plain": "plugin_tuner:Plain"})
    made = create_topology("tuned:fanout=3,rate=1e-3,fast=true,label=a:b=c")
    assert vars(made) == {"fanout": 3, "rate": 0.001, "fast": True, "label": "a:b=c"}
    assert vars(create_topology("tuner:tuned:fanout=3"))["fanout"] == 3
    assert vars(create_topology("tuned"))["label"] is None
    assert vars(create_topology("plain:width=4")) == {"width": 4}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("tuned:fanot=3", "topology tuned has no option 'fanot'; did you mean fanout?; it has: "),
        ("tuned:fanout=many", "topology tuned: option fanout=many: Expected `int`"),
        ("tuned:fanout=0", "topology 'tuned:fanout=0' cannot be made: fanout must be positive"),
        ("tuned:fanout=1,fanout=2", "option fanout is given twice"),
        ("tuned:fanout=1,rate", "'rate' is not key=value"),
    ],
)
def test_wrong_options(install: Install, spec: str, said: str) -> None:
    install("tuner", {"tuned": "plugin_tuner:Tuned"})
    with pytest.raises(ConfigError) as caught:
        create_topology(spec)
    assert said in str(caught.value)


def test_a_plugin_that_does_not_import_is_named_and_harms_nobody(install: Install) -> None:
    install("bad-one", {"broken": "no_such_module:Thing"})
    assert type(create_topology("ring")).__name__ == "Ring"
    with pytest.raises(PluginError) as caught:
        create_topology("broken")
    said = str(caught.value)
    assert said.startswith(
        "topology 'broken' of bad-one 1.2 (p2pdpt.topologies: no_such_module:Thing) does not "
        "import: ModuleNotFoundError: No module named 'no_such_module'"
    )
    (info,) = [info for info in plugins() if info.name == "broken"]
    assert (info.status, info.version, info.reason) == ("broken", "1.2", said)


def test_plugins_of_another_kind(install: Install) -> None:
    install("odd", {"text": "string:digits", "half": "plugin_odd:Unfinished"})
    with pytest.raises(PluginError, match=r"is not a subclass of p2pdpt\.topology\.Topology"):
        create_topology("text")
    with pytest.raises(PluginError, match="is not complete: it lacks exchange"):
        create_topology("half")


def test_a_name_of_two_distributions_must_be_qualified(install: Install) -> None:
    install("one", {"twin": "plugin_one:Tuned"})
    install("two", {"twin": "plugin_two:Tuned"})
    for _ in range(2):
        with pytest.raises(PluginError, match="choose one of: one:twin, two:twin"):
            create_topology("twin")
        sys.path.reverse()
    assert type(create_topology("one:twin")).__module__ == "plugin_one"
    assert type(create_topology("two:twin:fanout=3")).__module__ == "plugin_two"
    assert {info.status for info in plugins() if info.name == "twin"} == {"ambiguous"}


def test_a_built_in_is_never_replaced_silently(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("usurper", {"ring": "plugin_usurper:Ring"})
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert type(create_topology("ring")).__module__ == "p2pdpt_plugins.ring"
    assert len(caplog.records) == 1
    assert "p2pdpt:ring, usurper:ring" in caplog.text
    assert type(create_topology("usurper:ring")).__module__ == "plugin_usurper"


def test_other_groups(install: Install) -> None:
    install("carrier", {"pigeon": "no_such_module:Pigeon"}, "p2pdpt.transports")
    with pytest.raises(PluginError, match="transport 'pigeon' of carrier"):
        load_transport("pigeon")
    with pytest.raises(PluginError, match="no discovery called 'pigeon'"):
        load_discovery("pigeon")
