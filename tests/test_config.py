from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pdpt.config import ENVIRONMENT, Environ, NodeConfig, RunConfig, read_environ, read_secret
from p2pdpt.errors import ConfigError


def test_the_defaults_are_safe() -> None:
    node = NodeConfig()
    assert node.listen == "127.0.0.1:0"
    assert node.read_secret() is None
    assert node.patience == 10.0
    assert (RunConfig().min_nodes, RunConfig().topology, RunConfig().seed) == (1, "ring", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "a\nb"}, "name 'a\\nb' is not 1 to 64 printable characters"),
        ({"name": 3}, "name must be text, not 3"),
        ({"cluster": ""}, "cluster is empty"),
        ({"listen": "127.0.0.1"}, "listen '127.0.0.1' has no port"),
        ({"listen": 7777}, "listen must be host:port, not 7777"),
        ({"join": ("fd00::1:7",)}, "join 'fd00::1:7': write an IPv6 address in brackets"),
        ({"join": "host:1"}, "join must be a list of texts, not 'host:1'"),
        ({"join": (1,)}, "join must be a list of texts; 1 is none"),
        ({"join": ("host:0",)}, "port 0 cannot be connected to"),
        ({"join": ("host:1",), "discovery": ("local",)}, "discovery does not include 'static'"),
        ({"transports": ()}, "transports is empty"),
        ({"patience": 0}, "patience is 0; it must lie between 0.1 and 86400 seconds"),
        ({"patience": "10"}, "patience must be a number of seconds, not '10'"),
        ({"patience": float("nan")}, "patience must be a number of seconds"),
        ({"secret": b"short"}, "secret has 5 bytes; at least 16 are needed"),
        ({"secret": "0123456789abcdef"}, "secret must be bytes, not str"),
        ({"secret": b"x" * 16, "secret_file": "f"}, "secret and secret_file are both given"),
    ],
)
def test_a_wrong_node_value_names_its_key_and_the_fix(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NodeConfig(**change)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": ""}, "run is empty"),
        ({"run": " x"}, "without blanks around them"),
        ({"min_nodes": 0}, "min_nodes must be a whole number from 1 to 4096, not 0"),
        ({"min_nodes": True}, "min_nodes must be a whole number"),
        ({"topology": ""}, "topology must be a name such as ring"),
        ({"topology": "x" * 2000}, "topology is 2000 characters long"),
        ({"wait": -1}, "wait is -1; it must lie between 0 and"),
        ({"seed": -1}, "seed must be a whole number from 0 to 9223372036854775807, not -1"),
        ({"seed": 2**63}, "seed must be a whole number"),
    ],
)
def test_a_wrong_run_value_names_its_key_and_the_fix(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**change)
    assert said in str(caught.value)


def test_secrets_come_from_files_that_are_private(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef0123\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"mode 0644.*chmod 600 {path}"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"0123456789abcdef0123"
    assert NodeConfig(secret_file=path).read_secret() == b"0123456789abcdef0123"
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="5 bytes; at least 16"):
        read_secret(path)
    path.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="longer than 4096 bytes"):
        read_secret(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(tmp_path / "none")


def test_a_secret_is_never_shown() -> None:
    config = NodeConfig(secret=b"0123456789abcdef")
    assert "0123456789" not in repr(config) and "0123456789" not in str(config)


def test_environment() -> None:
    environ = {
        "P2PDPT_RUN": "r",
        "P2PDPT_NAME": "n",
        "P2PDPT_MIN_NODES": "3",
        "P2PDPT_TOPOLOGY": "mapreduce:reducer=0",
        "P2PDPT_JOIN": "a:1, [::1]:2,",
        "P2PDPT_LISTEN": "127.0.0.1:7",
        "P2PDPT_SECRET_FILE": "/secret",
        "P2PDPT_TRANSPORT": "shm, tcp",
        "P2PDPT_CLUSTER": "c",
        "P2PDPT_PATIENCE": "2.5",
        "P2PDPT_WAIT": "30",
        "P2PDPT_SEED": "7",
        "P2PDPT_REPORT_FD": "5",
        "HOME": "/",
    }
    found = read_environ(environ)
    assert found == Environ(
        {
            "name": "n",
            "cluster": "c",
            "listen": "127.0.0.1:7",
            "join": ("a:1", "[::1]:2"),
            "transports": ("shm", "tcp"),
            "secret_file": "/secret",
            "patience": 2.5,
        },
        {
            "run": "r",
            "min_nodes": 3,
            "topology": "mapreduce:reducer=0",
            "wait": 30.0,
            "seed": 7,
        },
        5,
    )
    assert found.given
    NodeConfig(**found.node), RunConfig(**found.run)
    assert set(ENVIRONMENT) == set(environ) - {"P2PDPT_REPORT_FD", "HOME"}


def test_nothing_given() -> None:
    assert read_environ({"P2PDPT_RUN": "", "P2PDPT_NATIVE": "off"}) == Environ()
    assert not read_environ({"P2PDPT_REPORT_FD": "3"}).given


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("P2PDPT_MIN_NODES", "three", "P2PDPT_MIN_NODES: 'three' is not a whole number"),
        ("P2PDPT_MIN_NODES", "0", "P2PDPT_MIN_NODES: min_nodes must be a whole number from 1"),
        ("P2PDPT_PATIENCE", "long", "P2PDPT_PATIENCE: 'long' is not a number"),
        ("P2PDPT_JOIN", "host", "P2PDPT_JOIN: join 'host' has no port"),
        ("P2PDPT_SEED", "-1", "P2PDPT_SEED: seed must be"),
        ("P2PDPT_REPORT_FD", "x", "P2PDPT_REPORT_FD: 'x' is not a whole number"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environ({variable: value})
    assert said in str(caught.value)
