from __future__ import annotations

from pathlib import Path

import pytest

from p2pdpt.cli.options import as_environment, configs
from p2pdpt.config import NodeConfig, RunConfig
from p2pdpt.errors import ConfigError, PluginError


def test_what_is_not_given_sets_nothing() -> None:
    assert as_environment({"run": None, "join": (), "port": None, "seed": None}, {}) == {}


def test_flags_become_variables() -> None:
    flags = {"run": "r", "join": ("a:1", "b:2"), "seed": 0, "patience": 2.5, "secret_file": "s"}
    flags["transports"] = ("shm", "tcp")
    assert as_environment(flags, {}) == {
        "P2PDPT_RUN": "r",
        "P2PDPT_TRANSPORT": "shm,tcp",
        "P2PDPT_JOIN": "a:1,b:2",
        "P2PDPT_SEED": "0",
        "P2PDPT_PATIENCE": "2.5",
        "P2PDPT_SECRET_FILE": str(Path("s").absolute()),
    }


@pytest.mark.parametrize(
    ("variable", "listen"),
    [(None, "127.0.0.1:7"), ("10.0.0.1:9", "10.0.0.1:7"), ("[::1]:9", "[::1]:7")],
)
def test_a_port_keeps_the_host(variable: str | None, listen: str) -> None:
    environ = {"P2PDPT_LISTEN": variable} if variable else {}
    assert as_environment({"port": 7}, environ) == {"P2PDPT_LISTEN": listen}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"listen": "127.0.0.1:7", "port": 7}, "--listen and --port are both given"),
        ({"join": ("a",)}, "join 'a' has no port; write a:PORT"),
        ({"min_nodes": -1}, "--min-nodes is -1"),
        ({"patience": 0.0}, "patience is 0; it must lie between"),
    ],
)
def test_wrong_flags(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        as_environment(flags, {})


def test_a_node_gets_what_its_environment_says() -> None:
    node, run, environ = configs({"P2PDPT_NAME": "n", "P2PDPT_TOPOLOGY": "mapreduce"})
    assert (node, run) == (NodeConfig(name="n"), RunConfig(topology="mapreduce"))
    assert environ.report_fd is None


def test_what_would_fail_later_fails_now(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        configs({"P2PDPT_SECRET_FILE": str(secret)})
    with pytest.raises(PluginError, match="there is no topology called 'torus'"):
        configs({"P2PDPT_TOPOLOGY": "torus"})
    with pytest.raises(PluginError, match="there is no transport called 'pigeon'"):
        configs({"P2PDPT_TRANSPORT": "shm,pigeon"})
