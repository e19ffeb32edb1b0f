"""What `penstock up` gives its processes beside their command lines."""

import pytest

from penstock.cli.deployment import TABLES
from penstock.cli.main import main
from penstock.cli.up import _show, environments, warnings_about
from penstock.core.errors import ConfigError
from penstock.service.deployment_file import parse


def deployment(top=""):
    return parse("up.yaml", f"model: demo\n{top}\ninstances: [{{count: 2}}]\n", TABLES)


@pytest.mark.parametrize(
    ("top", "ours", "keys"),
    [
        ("", {}, ""),
        ("", {"PENSTOCK_API_KEY": ""}, ""),
        ("", {"PENSTOCK_API_KEY": "a, b"}, "a,b"),
        ("api-key: [c, d]", {}, "c,d"),
        ("api-key: [c, d]", {"PENSTOCK_API_KEY": "a"}, "c,d"),
    ],
)
def test_api_keys_are_the_files_or_else_the_environments(top, ours, keys):
    assert environments([deployment(top)], ours)["frontend"]["PENSTOCK_API_KEY"] == keys


def test_an_environment_without_a_key_in_it_is_a_mistake():
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY: ' , ', allowed is one or more names"):
        environments([deployment()], {"PENSTOCK_API_KEY": " , "})


def test_engines_know_a_secret_that_nobody_else_does():
    ours = {"PATH": "/bin"}
    first, second = environments([deployment()], ours), environments([deployment()], ours)
    assert len(first["engine"]["PENSTOCK_CLUSTER_SECRET"]) == 64
    assert first["engine"]["PENSTOCK_CLUSTER_SECRET"] != second["engine"]["PENSTOCK_CLUSTER_SECRET"]
    assert "PENSTOCK_CLUSTER_SECRET" not in first["frontend"]
    assert first["frontend"]["PATH"] == first["engine"]["PATH"] == "/bin"


def test_engines_share_the_cores_unless_somebody_said_otherwise():
    assert int(environments([deployment()], {})["engine"]["OMP_NUM_THREADS"]) >= 1
    assert environments([deployment()], {"OMP_NUM_THREADS": "7"})["engine"]["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("top", "ours", "open_to_all"),
    [
        ("", {}, False),
        ("host: localhost", {}, False),
        ("host: '::1'", {}, False),
        ("host: 127.0.0.2", {}, False),
        ("host: 0.0.0.0", {}, True),
        ("host: gpu7.example.com", {}, True),
        ("host: 0.0.0.0", {"PENSTOCK_API_KEY": "a"}, False),
        ("host: 0.0.0.0\napi-key: [a]", {}, False),
    ],
)
def test_whoever_serves_everybody_is_told(top, ours, open_to_all):
    said = [w for w in warnings_about([deployment(top)], ours) if "no api-key" in w]
    assert bool(said) == open_to_all


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("remote-cache: 'redis://host:6379'", "--remote-cache: 'redis://host:6379', allowed: file://"),
        ("remote-cache: 'file:///mnt?sise=1G'", "--remote-cache: file has no option 'sise', allowed: size, timeout"),
        (
            "device: cuda, remote-cache: 'file:///mnt', tensor-parallel-size: 2",
            "--remote-cache: 'file:///mnt', not supported yet",
        ),
        ("remote-cache: 'file:///mnt', enable-prefix-caching: false", "--remote-cache: 'file:///mnt' without prefix"),
        ("disk-cache: /tmp, enable-prefix-caching: false", "--disk-cache-size: 16.0 GiB without prefix caching"),
        ("host-cache-memory: 1G", "--host-cache-memory: 1.0 GiB below a CPU"),
        ("kv-cache-dtype: fp8", "--kv-cache-dtype: 'fp8', there are no kernels for it on a CPU"),
        ("device: cuda, kv-address-mode: contiguous", "--kv-address-mode: 'contiguous', on a CUDA device"),
    ],
)
def test_what_an_engine_would_refuse_fails_the_check(tmp_path, capsys, settings, said):
    file = tmp_path / "up.yaml"
    file.write_text(f"model: demo\ninstances: [{{{settings}}}]\n")
    assert main(["up", str(file), "--check"]) == 2
    assert capsys.readouterr().err.startswith(f"penstock: {said}")


@pytest.mark.parametrize(
    ("top", "joins", "shown", "hidden"),
    [
        ("", False, ["penstock up", "frontend", "master"], []),
        ("host: 'fd00::7'\nserved-model-name: ['[/a]']", False, ["penstock up: [/a]", "[fd00::7]:8000"], []),
        ("cluster: {registry: 'etcd://127.0.0.1:2379/x', masters: 2}", False, ["frontend", "master 2"], []),
        ("cluster: {}", True, ["penstock join"], ["frontend", "master"]),
        ("cluster: {registry: 'etcd://127.0.0.1:2379/x', masters: 1}", True, ["master"], ["frontend"]),
    ],
)
def test_what_runs_here_is_shown(capsys, top, joins, shown, hidden):
    _show([deployment(top)], joins=joins)
    table = " ".join(capsys.readouterr().out.split())
    assert all(word in table for word in shown)
    assert not any(word in table for word in hidden)
