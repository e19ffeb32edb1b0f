"""Where settings come from, and one line for each mistake. The command line is frozen here."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import serve
from penstock.cli.help import EXAMPLES, grouped
from penstock.cli.main import main, make_parser
from penstock.cli.options import Option, add_options, integer, number, one_of, read_options, size, switch, words
from penstock.core.errors import ConfigError

OPTIONS = (
    Option("port", integer(0, 65535), 8000, "a port"),
    Option("enable-it", switch, True, "a switch"),
    Option("memory", size, None, "a size"),
    Option("share", number(0, 1), 0.5, "a share"),
    Option("names", words, (), "names"),
    Option("kind", one_of("a", "b"), "a", "a kind"),
)


def read(*argv, environment=None, options=OPTIONS):
    parser = argparse.ArgumentParser()
    add_options(parser, {"all": options})
    return read_options(options, parser.parse_args(argv), environment or {})


def test_flag_environment_file_default(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nenable-it: false\nmemory: 1K\nnames: [x, y]\n")
    environment = {"PENSTOCK_PORT": "2", "PENSTOCK_MEMORY": "2K"}
    values = read("--config", str(file), "--port", "3", environment=environment)
    assert values == {"port": 3, "enable_it": False, "memory": 2048, "share": 0.5, "names": ("x", "y"), "kind": "a"}
    assert read("--enable-it", environment={"PENSTOCK_ENABLE_IT": "no"})["enable_it"] is True
    assert read("--no-enable-it")["enable_it"] is False
    file.write_text("port:\nnames:\n")
    assert read("--config", str(file)) == read()  # left blank is not given


@pytest.mark.parametrize(
    "content", ["draft: {a: 1, b: [x]}", "draft:\n  a: 1\n  b: [x]", """draft: '{"a": 1, "b": ["x"]}'"""]
)
def test_an_object_is_a_section_of_a_file_or_json(tmp_path, content):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    option = Option("draft", json.loads, None, "an object", takes_object=True)
    assert read("--config", str(file), options=(option,)) == {"draft": {"a": 1, "b": ["x"]}}
    file.write_text("draft: {? [1, 2] : 3}")
    with pytest.raises(ConfigError, match="1: draft: a section, allowed is what JSON can say"):
        read("--config", str(file), options=(option,))


def test_a_setting_under_its_old_name_is_refused_with_the_new_one(tmp_path, capsys):
    options = (Option("kv-pool", words, (), "was called keeper"),)
    with pytest.raises(SystemExit):
        read("--keeper", "x", options=options)
    assert "--keeper is called --kv-pool now" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^PENSTOCK_KEEPER is called PENSTOCK_KV_POOL now"):
        read(environment={"PENSTOCK_KEEPER": "x"}, options=options)
    file = tmp_path / "settings.yaml"
    file.write_text("keeper: [x]\n")
    with pytest.raises(ConfigError, match=r"settings\.yaml:1: keeper: it is called kv-pool now"):
        read("--config", str(file), options=options)
    assert read(environment={"PENSTOCK_KEEPER": "x"}) == read(), "that was no setting here"


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("4G", 4 << 30), ("512MiB", 512 << 20), ("1.5k", 1536), ("1000", 1000), ("4294967296", 4 << 30), ("2TB", 2 << 40)],
)
def test_sizes(text, bytes_):
    assert size(text) == bytes_


@pytest.mark.parametrize(
    ("argv", "environment", "says"),
    [
        (["--port", "x"], {}, "--port: 'x', allowed is a whole number from 0 to 65535"),
        (["--port", "70000"], {}, "--port: '70000'"),
        ([], {"PENSTOCK_PORT": "-1"}, "PENSTOCK_PORT: '-1'"),
        ([], {"PENSTOCK_PORT": "tcp://10.0.0.1:80"}, "PENSTOCK_PORT (set by Kubernetes for a Service?)"),
        (["--share", "0"], {}, "--share: '0', allowed is a number above 0 and at most 1"),
        (["--share", "nan"], {}, "--share: 'nan'"),
        (["--memory", "lots"], {}, "--memory: 'lots', allowed is a size such as 4G or 512M"),
        (["--kind", "c"], {}, "--kind: 'c', allowed is a, b"),
        ([], {"PENSTOCK_ENABLE_IT": "maybe"}, "PENSTOCK_ENABLE_IT: 'maybe', allowed is true or false"),
        (["--names", ","], {}, "--names: ','"),
    ],
)
def test_mistakes_name_source_value_and_what_is_allowed(argv, environment, says):
    with pytest.raises(ConfigError) as caught:
        read(*argv, environment=environment)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("port: 1\nnope: 1", "2: nope: no such setting"),
        ("- 1", "1: a list, allowed are settings"),
        (": :", "1: this is no YAML"),
        ("port: x\nport: 1", "2: port: given twice"),
        ("port: x", "1: port: 'x', allowed is a whole number"),
        ("kind: {a: b}", "1: kind: a section, allowed is one value"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, says):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"settings.yaml:{says}"):
        read("--config", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read("--config", str(tmp_path / "absent.yaml"))


def test_the_flags_of_serve():
    assert {option.name for option in serve.OPTIONS} == {
        *("api-key", "async-scheduling", "chat-template", "device", "drain-timeout", "dtype", "enable-prefix-caching"),
        *("isa", "disk-cache", "disk-cache-size", "enable-sleep-mode", "remote-cache", "tail-key-interval"),
        *("enable-auto-tool-choice", "reasoning-parser", "tool-call-parser", "override-generation-config"),
        *("batch-dir", "max-file-size"),
        *("return-tokens-as-token-ids", "enable-force-include-usage", "enable-per-request-metrics"),
        "enable-tokenizer-info-endpoint",
        *("max-media-count", "max-media-bytes", "max-media-pixels", "max-video-frames", "allowed-media-domains"),
        *("media-fetch-timeout", "media-decode-timeout", "media-cache-memory", "encode-beside"),
        *("flight-recorder", "gpu-memory-utilization", "graph-mode", "host", "host-cache-memory", "kv-address-mode"),
        *(
            "kv-cache-dtype",
            "kv-cache-memory",
            "kv-layout",
            "load-format",
            "log-format",
            "log-level",
            "max-body-size",
            "max-model-len",
        ),
        *("max-num-batched-tokens", "max-num-seqs", "max-queued-requests", "max-queued-tokens", "metrics-compat"),
        *(
            "otlp-traces-endpoint",
            "pooling",
            "port",
            "quantization",
            "record-requests",
            "record-requests-size",
            "scheduling-policy",
            "seed",
            "send-timeout",
            "served-model-name",
        ),
        *("api-key-file", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs", "root-path"),
        *("allowed-origins", "allowed-methods", "allowed-headers", "allow-credentials"),
        *("share-prefixes", "speculative-config", "step-time-limit-ms", "weight-cache"),
        *("tensor-parallel-size", "pipeline-parallel-size", "enable-expert-parallel", "enable-eplb", "eplb-config"),
        "data-parallel-size",
        "enable-dbo",
        "helper-kv-memory",
    }


def code_of(argv):
    """Exit code of the command line, run here."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def penstock(*argv):
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_folders_are_the_same_ones_for_processes_that_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    for option in (option for option in serve.OPTIONS if option.name in ("batch-dir", "disk-cache", "record-requests")):
        assert [option.read(name, "") for name in ("~/x", "x")] == ["/home/me/x", str(tmp_path / "x")]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "--port", "http"], "penstock: --port: 'http', allowed is"),
        (["serve", "--host", "[::1]"], "penstock: --host: '[::1]', allowed is a name or an address"),
        (["serve", "--no-such-flag"], "(see penstock serve --help)"),
        (["serve", "/no/such/folder"], "penstock: "),
        (["serve", "demo", "--disk-cache", "~nobody-here/x"], "penstock: --disk-cache: '~nobody-here/x', allowed is"),
        (["nonsense"], "nonsense"),
        ([], "penstock: "),
        (["bench", "serve", "--num-prompts", "-3"], "--num-prompts: '-3', allowed is"),
        (["chat", "--no-such-flag"], "(see penstock chat --help)"),
        (["serve", "demo", "--device", "modelled:h200"], "allowed is cpu, cuda or cuda:N; modelled"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, argv, says):
    assert code_of(argv) == 2
    shown = capsys.readouterr()
    complaints = [line for line in shown.err.splitlines() if line.startswith("penstock")]
    assert len(complaints) == 1
    assert says in complaints[0]
    assert "Traceback" not in shown.err + shown.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-model-len", "99999999"], "penstock: --max-model-len: 99999999, this checkpoint allows"),
        pytest.param(["--kv-cache-memory", "900T"], "penstock: --kv-cache-memory: ", marks=pytest.mark.slow),
        pytest.param(
            ["--device", "cpu", "--host-cache-memory", "1G"],
            "penstock: --host-cache-memory: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_only_the_engine_finds_out_is_one_line_too_spelled_as_the_flag_was(flags, says):
    done = penstock("serve", "demo", "--port", "0", *flags)
    assert done.returncode == 2, done.stderr
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("penstock")]
    assert says in complaint
    assert "Traceback" not in done.stderr + done.stdout


def test_version_and_help(capsys):
    assert code_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")
    assert code_of(["--help"]) == 0
    shown = capsys.readouterr().out
    commands = make_parser()[1]
    assert set(EXAMPLES) == set(commands)
    described = {line.split()[0] for line in shown.splitlines() if line.startswith("  ") and line.strip()}
    assert set(commands) <= described


@pytest.mark.parametrize("command", EXAMPLES)
def test_each_command_has_examples_that_are_right(command, capsys):
    assert code_of([command, "--help"]) == 0
    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert [line.strip() for line in shown if line.strip()] == list(EXAMPLES[command])
    for example in EXAMPLES[command]:
        line = re.sub(r'^eval "\$\((.*)\)"$', r"\1", example).partition(" > ")[0]
        program, *arguments = shlex.split(line)
        assert (program, arguments[0]) == ("penstock", command)
        make_parser()[0].parse_args(arguments)
        assert all(Path(word).exists() for word in arguments if re.match("(recipes|scenarios)/", word))


def test_flags_are_in_groups_each_in_one(capsys):
    groups = grouped(serve.OPTIONS)
    assert "more" not in groups
    names = [option.name for options in groups.values() for option in options]
    assert sorted(names) == sorted(option.name for option in serve.OPTIONS)
    assert code_of(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{title}:\n" in shown for title in groups)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("allowed-origins", "https://a.example, https://b.example", ("https://a.example", "https://b.example")),
        ("allowed-origins", '["*"]', ("*",)),
        ("ssl-cert-reqs", "2", "required"),
        ("ssl-cert-reqs", "optional", "optional"),
        ("root-path", "/llm/", "/llm"),
        ("root-path", "/", ""),
    ],
)
def test_settings_are_understood_as_vllm_has_them_too(name, given, value):
    (option,) = (option for option in serve.OPTIONS if option.name == name)
    assert option.read(given, "") == value


@pytest.mark.parametrize(
    ("name", "given"),
    [("allowed-origins", "[1]"), ("allowed-origins", '["a'), ("ssl-cert-reqs", "3"), ("root-path", "llm")],
)
def test_settings_that_cannot_be_one_are_refused(name, given):
    (option,) = (option for option in serve.OPTIONS if option.name == name)
    with pytest.raises(ConfigError, match="allowed is"):
        option.read(given, f"--{name}")
