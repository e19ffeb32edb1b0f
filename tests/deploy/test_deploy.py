"""What `deploy/` has for Docker, Kubernetes, systemd and Prometheus: every file, flag, variable, route, port and name
that it mentions is there. Linters and validators of others are asked too, where they are installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.api.http import OPEN_ROUTES
from penstock.cli import serve
from penstock.cli.curve import SECRET
from penstock.cli.http import CLOSING_SECONDS
from penstock.cli.main import make_parser
from penstock.cli.options import read_options
from penstock.cli.up import read
from tests.helpers.servers import answering

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIABLES = {option.variable: option for option in serve.OPTIONS}
SPARE = 15  # seconds beyond the drain, for what ends then
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


def needs(tool: str) -> Any:
    return pytest.mark.skipif(shutil.which(tool, path=PATH) is None, reason=f"{tool} is not installed")


def run(tool: str, *more: str | Path, **options: Any) -> str:
    words = [str(shutil.which(tool, path=PATH)), *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def options_of(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What the server would make of this command line."""
    parser, _ = make_parser("serve")
    return read_options(serve.OPTIONS, parser.parse_args(arguments), environment)


class TestDocker:
    FILE = DEPLOY / "docker" / "Dockerfile"

    def instructions(self) -> list[tuple[str, str, str]]:
        """(stage, instruction, the rest) of each."""
        stage, found = "", []
        text = re.sub(r"^#.*\n", "", self.FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        for line in filter(str.strip, text.splitlines()):
            word, _, rest = line.strip().partition(" ")
            stage = rest.split()[-1] if word == "FROM" else stage
            found.append((stage, word, rest.strip()))
        return found

    def all_of(self, word: str) -> list[str]:
        return [rest for _, given, rest in self.instructions() if given == word]

    @needs("hadolint")
    def test_hadolint_has_nothing_to_say(self):
        assert run("hadolint", self.FILE) == ""

    def test_what_it_copies_is_in_the_repository_and_sent_to_the_builder(self):
        stages = {stage for stage, word, _ in self.instructions() if word == "FROM"}
        lines = self.FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        sent = {line[1:] for line in lines if line.startswith("!")}
        assert all((ROOT / path).exists() for path in sent)
        assert {"pyproject.toml", PROJECT["readme"], "penstock"} <= sent
        for rest in self.all_of("COPY"):
            origin = re.match(r"--from=(\S+) ", rest)
            if origin:
                assert origin[1] in stages
            else:
                (*sources, _) = rest.split()
                assert all(source == "." or source in sent for source in sources)

    def test_its_requirements_are_those_of_the_project(self, tmp_path):
        (program,) = [re.search(r'python -c "([^"]*)"', rest) for rest in self.all_of("RUN") if "tomllib" in rest]
        assert program is not None
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        found = run(sys.executable, "-c", program[1], cwd=tmp_path).splitlines()
        assert set(PROJECT["dependencies"]) < set(found)
        assert {"huggingface-hub", "aetcd>=1"} < set(found)

    def test_torch_is_the_one_that_is_tested(self):
        versions = {rest.removeprefix("TORCH=") for rest in self.all_of("ARG") if rest.startswith("TORCH")}
        assert versions == set(re.findall(r"^cpu_torch=(\S+)", (ROOT / "tools/setup.sh").read_text(), re.MULTILINE))

    def test_settings_and_commands_are_known_and_the_user_is_not_root(self):
        words = [word for rest in self.all_of("ENV") for word in shlex.split(rest)]
        variables = dict(word.split("=", 1) for word in words)
        given = {name: value for name, value in variables.items() if name.startswith("PENSTOCK")}
        assert set(given) <= set(VARIABLES)
        values = options_of(yaml.safe_load(self.all_of("CMD")[-1]), given)
        assert values["host"] == "0.0.0.0"
        assert self.all_of("EXPOSE") == [str(values["port"])]
        targets = set(re.findall(r"--target (\w+)", self.FILE.read_text()))
        assert targets == {"cpu", "cuda"} <= {stage for stage, _, _ in self.instructions()}
        for target in targets:
            *_, last = [(word, rest) for stage, word, rest in self.instructions() if stage == target]
            assert last == ("USER", "10001")

    def test_its_health_check_tells_health(self):
        assert "healthcheck.py" in self.all_of("HEALTHCHECK")[0]
        script = self.FILE.with_name("healthcheck.py")
        with answering({"/health": {}, "/llm/health": {}}) as (url, _):
            for root, code in (("", 0), ("/llm", 0), ("/elsewhere", 1)):
                environment = {**os.environ, "PENSTOCK_PORT": url.rpartition(":")[2], "PENSTOCK_ROOT_PATH": root}
                done = subprocess.run([sys.executable, script], env=environment, capture_output=True, check=False)
                assert done.returncode == code
        named = set(re.findall(r"PENSTOCK_\w+", script.read_text() + self.FILE.read_text()))
        assert named <= set(VARIABLES)


class TestKubernetes:
    FOLDER = DEPLOY / "kubernetes"
    FILES = ("serve.yaml", "cluster.yaml")

    def objects(self, file: str) -> list[dict[str, Any]]:
        return list(yaml.safe_load_all((self.FOLDER / file).read_text()))

    def workloads(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """(file, what it is, its pods' template)."""
        for file in self.FILES:
            for thing in self.objects(file):
                if thing["kind"] in ("Deployment", "StatefulSet"):
                    yield file, thing, thing["spec"]["template"]

    @pytest.mark.parametrize("file", FILES)
    def test_it_is_what_kubernetes_understands(self, file):
        validator = pytest.importorskip("kubernetes_validate")
        for thing in self.objects(file):
            validator.validate(thing, validator.latest_version(), strict=True)

    def test_pods_are_found_by_their_services_and_have_what_they_mention(self):
        for file, thing, template in self.workloads():
            labels, spec = template["metadata"]["labels"], template["spec"]
            assert thing["spec"]["selector"]["matchLabels"].items() <= labels.items()
            (container,) = spec["containers"]
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            services = [each for each in self.objects(file) if each["kind"] == "Service"]
            ours = [each for each in services if each["spec"]["selector"].items() <= labels.items()]
            assert ours
            for port in (port for each in ours for port in each["spec"].get("ports", ())):
                assert port.get("targetPort", port["name"]) in ports
            mounted = [mount["name"] for mount in container["volumeMounts"]]
            assert sorted(mounted) == sorted(volume["name"] for volume in spec["volumes"])
            if thing["kind"] == "StatefulSet":
                assert thing["spec"]["serviceName"] in {each["metadata"]["name"] for each in ours}
            scraped = template["metadata"].get("annotations", {}).get("prometheus.io/port")
            assert scraped is None or int(scraped) == ports["http"]

    def test_probes_ask_routes_that_need_no_key(self):
        for _, _, template in self.workloads():
            (container,) = template["spec"]["containers"]
            probes = [
                container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container
            ]
            assert len(probes) == (3 if "ports" in container else 0)
            for probe in probes:
                assert probe["httpGet"]["path"] in OPEN_ROUTES
                assert probe["httpGet"]["port"] == "http"

    def test_pods_are_given_the_time_that_a_drain_takes(self):
        for _, _, template in self.workloads():
            (container,) = template["spec"]["containers"]
            stopping = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            if container.get("command"):
                drain = self.deployment_of(container)[1].server["drain_timeout"]
            else:
                drain = options_of(container["args"], {})["drain_timeout"]
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert grace >= int(stopping[1]) + drain + CLOSING_SECONDS + SPARE

    def test_pods_run_as_the_images_user_on_a_file_system_that_they_cannot_write(self):
        for _, _, template in self.workloads():
            spec, (container,) = template["spec"], template["spec"]["containers"]
            assert spec["securityContext"]["runAsNonRoot"]
            assert f"--uid {spec['securityContext']['runAsUser']} " in TestDocker.FILE.read_text()
            assert f"-t {container['image']} " in TestDocker.FILE.read_text()
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {"/tmp", "/home/penstock/.cache"} < {mount["mountPath"] for mount in container["volumeMounts"]}
            assert not spec["enableServiceLinks"], "PENSTOCK_PORT would be the Service's"

    def test_settings_are_known_and_files_are_mounted(self):
        for file, _, template in self.workloads():
            (container,) = template["spec"]["containers"]
            environment = {each["name"]: each.get("value", "") for each in container["env"]}
            settings = {name for name in environment if name.startswith("PENSTOCK")}
            assert settings <= {*VARIABLES, SECRET}
            if container.get("command"):
                deployment = self.deployment_of(container)[1]
                assert deployment.cluster is not None
                keys = deployment.server["api_key_file"]
            else:
                values = options_of(container["args"], {name: environment[name] for name in settings})
                assert values["host"] == "0.0.0.0"
                keys = values["api_key_file"]
            if keys is not None:
                mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
                name = mounts[str(Path(keys).parent)]
                (volume,) = [volume for volume in template["spec"]["volumes"] if volume["name"] == name]
                made = re.findall(
                    rf"secret generic {volume['secret']['secretName']}((?:.|\n)*?)\n#\s+kubectl", self.text(file)
                )
                assert f"--from-literal={Path(keys).name}=" in made[0]

    def text(self, file: str) -> str:
        return (self.FOLDER / file).read_text()

    def deployment_of(self, container: dict[str, Any]) -> tuple[list[str], Any]:
        """The command that the shell runs in the end, and the deployment that its file describes."""
        (maps,) = [each for each in self.objects("cluster.yaml") if each["kind"] == "ConfigMap"]
        (script,) = container["args"]
        changes, source = re.match(r'sed "([^"]*)" \S*/(\S+) > (\S+);', script).groups()[:2]  # type: ignore[union-attr]
        text = maps["data"][source]
        values = {"POD_IP": "10.1.2.3", "POD_NAME": "penstock-engines-0"}
        for name, variable in re.findall(r"s/(\w+)/\$(\w+)/", changes):
            assert name == variable
            assert variable in {each["name"] for each in container["env"]}
            text = text.replace(name, values[name])
        assert not re.search("POD_", text)
        command = script.partition("exec ")[2].split()
        make_parser()[0].parse_args(command[1:])
        return command, read_with_secret(source, text)

    def test_head_and_engines_are_one_deployment(self):
        commands = {}
        for file, _, template in self.workloads():
            if file == "cluster.yaml":
                command, deployment = self.deployment_of(template["spec"]["containers"][0])
                commands[command[1]] = deployment
        head, engines = commands["up"], commands["join"]
        assert head.common == engines.common
        assert [group.instances for group in engines.groups] == [["penstock-engines-0-0"]]
        assert not head.groups
        (service,) = [
            each
            for each in self.objects("cluster.yaml")
            if each["kind"] == "Service" and engines.cluster.master.startswith(f"{each['metadata']['name']}.")
        ]
        assert service["spec"]["ports"][0]["port"] == head.cluster.port == int(engines.cluster.master.split(":")[1])

    def test_the_autoscaler_goes_by_metrics_that_the_adapter_has(self):
        (scaler,) = [each for each in self.objects("serve.yaml") if each["kind"] == "HorizontalPodAutoscaler"]
        wanted = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
        rules = yaml.safe_load(self.text("prometheus-adapter.yaml"))["rules"]["custom"]
        assert wanted == {rule["name"]["as"] for rule in rules}
        target = scaler["spec"]["scaleTargetRef"]
        assert [target["kind"], target["name"]] in [
            [each["kind"], each["metadata"]["name"]] for each in self.objects("serve.yaml")
        ]


def read_with_secret(file: str, text: str) -> Any:
    before = os.environ.get(SECRET)
    os.environ[SECRET] = "0" * 64
    try:
        return read(file, text)
    finally:
        os.environ.pop(SECRET) if before is None else os.environ.__setitem__(SECRET, before)


class TestSystemd:
    FILE = DEPLOY / "systemd" / "penstock.service"

    def lines(self, name: str) -> list[str]:
        return re.findall(rf"^{name}=(.*)$", self.FILE.read_text(), re.MULTILINE)

    @needs("systemd-analyze")
    def test_systemd_understands_it(self, tmp_path):
        here = shutil.which("true")
        unit = tmp_path / "penstock.service"
        unit.write_text(self.FILE.read_text().replace("/opt/penstock/bin/penstock", str(here)))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False, timeout=60
        )
        said = [line for line in done.stderr.splitlines() if "penstock.service" in line]
        assert not said, said

    def test_its_commands_are_ours_and_it_stops_them_as_they_are_to_be_stopped(self):
        parser, _ = make_parser()
        for command in (*self.lines("ExecStart"), *self.lines("ExecStartPre")):
            parser.parse_args(command.split()[1:])
        assert self.lines("KillMode") == ["mixed"]
        drain = next(option.default for option in serve.OPTIONS if option.name == "drain-timeout")
        assert int(self.lines("TimeoutStopSec")[0]) >= drain + CLOSING_SECONDS + SPARE
        named = re.findall(r"(?:recipes|deploy)/[\w./-]+\w", self.FILE.read_text())
        assert named
        assert all((ROOT / path).exists() for path in named)


@needs("promtool")
class TestPrometheus:
    def test_alerts_are_raised_when_they_should_be(self):
        folder = DEPLOY / "prometheus"
        assert "SUCCESS" in run("promtool", "check", "rules", "alerts.yaml", cwd=folder)
        assert "SUCCESS" in run("promtool", "test", "rules", "alerts_test.yaml", cwd=folder)
