"""What `vllm_tests.py` has pytest load: our server in the place of vLLM's, and stand-ins for the modules that the tests
import from vLLM. A test that needs more of vLLM than a server is deselected."""

from __future__ import annotations

import base64
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

SERVED = {"server", "client", "async_client", "remote_server"}  # a test that asks for one of these speaks HTTP
# what says how a GPU is used, or what our server has anyway; flags with a value are followed by it
DROPPED = {"--enforce-eager": 0, "--dtype": 1, "--enable-lora": 0, "--lora-modules": 1, "--max-lora-rank": 1}
DROPPED |= {"--max-cpu-loras": 1, "--gpu-memory-utilization": 1, "--seed": 1, "--runner": 1, "--load-format": 1}
DROPPED |= {"--enable-chunked-prefill": 0, "--enable-prompt-tokens-details": 0, "--trust-remote-code": 0}
DROPPED |= {"--enable-prefix-caching": 0, "--attention-backend": 1, "--tensor-parallel-size": 1, "--revision": 1}
DROPPED |= {"--enable-server-load-tracking": 0, "--limit-mm-per-prompt": 1, "--logits-processors": 1}
DROPPED |= {"--max-num-batched-tokens": 1, "--chat-template": 1, "--pooler-config": 1, "--structured-outputs-config": 1}
DROPPED |= {"--chat-template-content-format": 1, "--reasoning-config": 1, "--max-logprobs": 1, "--port": 1}
DROPPED |= {"--skip-tokenizer-init": 0, "--enable-prompt-embeds": 0, "--trust-request-chat-template": 0}
DROPPED |= {"--tool-server": 1, "--trust-request-mm-kwargs": 0, "--no-async-scheduling": 0}
KEPT = {"--no-enable-prefix-caching"}
RENAMED = {"--structured-outputs-config.backend": None}
LENGTH = 20480  # of sequences; the demo's could be twice as long, which takes too long where it does not end
LONGER = 2  # times as many tokens as theirs, and more, has a text by the demo's small vocabulary
VOCABULARY = 4096
MODEL = os.environ.get("VLLM_TESTS_MODEL", "demo")
DEMO = Path(__file__).parents[1] / "penstock" / MODEL.replace("-", "_")
SIZES = {"2560px": (2560, 1707), "1280px": (1280, 1280), "stop_sign": (1300, 876)}  # of images, by how names begin
LONGEST = json.loads((DEMO / "config.json").read_text()).get("max_position_embeddings", 4096)
READY = 90.0  # seconds


class RemoteOpenAIServer:
    """`penstock serve MODEL` under the name of the model that a test wants."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.host, self.port = "127.0.0.1", probe.getsockname()[1]
        self.uds = None
        arguments, names = _translated(list(vllm_serve_args))
        given = {key: str(value) for key, value in (options.get("env_dict") or {}).items()}
        if "VLLM_API_KEY" in given:
            arguments += ["--api-key", given["VLLM_API_KEY"]]
        command = [sys.executable, "-m", "penstock.cli.main", "serve", MODEL, "--port", str(self.port)]
        command += ["--served-model-name", *(names or [model]), "--log-level", "warning", *arguments]
        command += ["--speculative-config", "off"]  # as vLLM, which counts steps in its tests
        command += ["--override-generation-config", '{"temperature": 0}']  # so, its answers come to an end
        self.show_hidden_metrics = False
        self._process = subprocess.Popen([*command, "--metrics-compat", "vllm"], env=os.environ | given)
        ends = time.monotonic() + READY
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > ends:
                self._process.kill()
                raise RuntimeError(f"did not start: {command}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url_for("ready"), timeout=1):
                return True
        except OSError:
            return False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.lstrip("/") for part in parts)])

    def get_client(self, **options: Any) -> Any:
        import openai

        options.setdefault("timeout", 600)
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        options.setdefault("timeout", 600)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


def _translated(given: list[str]) -> tuple[list[str], list[str]]:
    """Our flags, and the names of the model."""
    kept: list[str] = []
    names: list[str] = []
    while given:
        flag, _, value = given.pop(0).partition("=")
        flag = flag.replace("_", "-")
        if flag == "--served-model-name":
            while given and not given[0].startswith("-"):
                names.append(given.pop(0))
        elif flag == "--max-model-len":
            kept += [flag, str(min(int(value or given.pop(0)) * LONGER, LENGTH, LONGEST))]
        elif flag == "--limit-mm-per-prompt" and MODEL == "demo-vl":
            kept += ["--max-media-count", str(json.loads(value or given.pop(0))["image"])]
        elif flag in KEPT:
            kept.append(flag)
        elif flag in DROPPED:
            if DROPPED[flag] and not value:
                given.pop(0)
        elif re.match(r"--(no-|show-hidden|structured-outputs|hf-|compilation|speculative|kv-|mm-|override)", flag):
            if not value and given and not given[0].startswith("-"):
                given.pop(0)
        else:
            kept.append(f"{flag}={value}" if value else flag)
    return kept, names


# --- what the tests import


def _tokenizer(*_: object, **__: object) -> Any:
    """The demo's, whatever hub name it is asked for by."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(DEMO)


def _hub_names() -> None:
    with contextlib.suppress(ImportError):
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained = _tokenizer  # type: ignore[method-assign]


class _Answer(SimpleNamespace):
    @classmethod
    def model_validate(cls, answer: dict[str, Any]) -> Any:
        return _namespace(answer)

    def model_dump(self, exclude: Sequence[str] = ()) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in exclude}


def _namespace(value: Any) -> Any:
    if isinstance(value, list):
        return [_namespace(each) for each in value]
    return _Answer(**{name: _namespace(each) for name, each in value.items()}) if isinstance(value, dict) else value


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda each: _absent(name, each)  # type: ignore[method-assign]
    if name == "tests.utils":
        module.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
        module.ROCM_EXTRA_ARGS, module.ROCM_ENV_OVERRIDES = [], {}  # type: ignore[attr-defined]
    elif name == "vllm.platforms":
        never = SimpleNamespace(**{f"is_{kind}": lambda: False for kind in ("rocm", "cuda", "cpu", "xpu", "tpu")})
        module.current_platform = never  # type: ignore[attr-defined]
    elif name == "vllm.tokenizers":
        module.get_tokenizer = _tokenizer  # type: ignore[attr-defined]
    elif name == "vllm.version":
        from penstock.api.app import _version

        module.__version__ = _version()  # type: ignore[attr-defined]
        module._prev_minor_version = lambda: "0"  # type: ignore[attr-defined]
    elif name == "vllm.config":
        module.ModelConfig = lambda **_: SimpleNamespace(get_vocab_size=lambda: VOCABULARY)  # type: ignore[attr-defined]
    elif name == "vllm.model_executor.model_loader.weight_utils":
        module.download_weights_from_hf = lambda *_, **__: str(DEMO)  # type: ignore[attr-defined]
    elif name == "vllm.entrypoints.pooling.embed.protocol":
        module.EmbeddingResponse = _Answer  # type: ignore[attr-defined]
    elif name == "vllm.multimodal.utils":
        module.encode_image_url = _data_url  # type: ignore[attr-defined]
    elif name == "pybase64":
        return base64
    return module


def _absent(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if module == "vllm" and name in ("version", "envs"):
        return importlib.import_module(f"vllm.{name}")
    if module == "vllm.envs":
        return False
    return MagicMock(name=f"{module}.{name}")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    NAMES = re.compile(r"vllm(\..+)?|tests\.(utils|conftest|models(\..+)?)|tests\..+\.test_serving_chat")
    MISSING = re.compile(r"(fastapi|pybase64)(\..+)?")  # which nobody needs to speak HTTP

    def __init__(self, *, last: bool) -> None:
        self.last = last

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        known = self.MISSING if self.last else self.NAMES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known.fullmatch(fullname) else None

    def create_module(self, spec: Any) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _StandIns(last=False))
sys.meta_path.append(_StandIns(last=True))  # for what is not installed
_hub_names()


class Assets:
    """Of images: what is at their URLs is not in the archive, so others of their size and kind are drawn. They are sent
    as data: URLs, since nothing is fetched from loopback."""

    def get_image_asset(self, name: str) -> Any:
        from PIL import Image

        size = next((size for begins, size in SIZES.items() if name.startswith(begins)), (800, 600))
        mode = {"Gray": "L", "RGBA": "RGBA"}.get(name[:4], "RGB")
        image = Image.new("RGB", size, "white")
        image.paste((220, 20, 30), (size[0] // 3, size[1] // 3, 2 * size[0] // 3, 2 * size[1] // 3))
        return image.convert(mode)

    def url_for(self, name: str) -> str:
        return _data_url(self.get_image_asset(name), "JPEG" if name.endswith(".jpg") else "PNG")


def _data_url(image: Any, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="session")
def local_asset_server() -> Assets:
    return Assets()


@pytest.fixture
def image_url(request: pytest.FixtureRequest) -> str:
    return Assets().url_for(request.param)


@pytest.fixture
def image_urls(request: pytest.FixtureRequest) -> list[str]:
    return [Assets().url_for(name) for name in request.param]


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return "none"


# --- which tests count


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    speak = [item for item in items if SERVED & set(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=[item for item in items if item not in speak])
    items[:] = speak


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, None]:
    report = (yield).get_result()
    told = report.when == "call" or report.outcome != "passed"
    if told and report.when != "teardown":
        why = str(call.excinfo.value).strip().partition("\n")[0][:300] if report.failed else ""
        said = {"id": item.nodeid.partition("entrypoints/")[2], "outcome": report.outcome, "why": why}
        with open(os.environ["VLLM_TESTS_OUTCOMES"], "ab") as file:
            file.write(msgspec.json.encode(said) + b"\n")
