"""Nothing that comes over a wire or out of a file is ever run: no pickle, no eval, no loader that makes objects."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "penstock"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "code"}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}  # as bare names
METHODS = {  # module -> what must not be called in it; `_unsafe` whatever the module
    "torch": {"load", "save"},
    "torch.serialization": {"load", "save"},
    "yaml": {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "Loader"},
    "numpy": {"load", "save"},
    "np": {"load", "save"},
    "importlib": {"import_module"},
    "multiprocessing": {"Pipe", "Queue", "Manager", "Pool", "Process"},  # these pickle what they carry
    "os": {"system", "popen"},
    "subprocess": {"getoutput", "getstatusoutput"},
}
SOCKETS = {"send_pyobj", "recv_pyobj"}  # pyzmq's pickles
WORDS = {"trust_remote_code", "allow_pickle"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found += [module] if module.split(".")[0] in MODULES else []
            found += [f"{module}.{a.name}" for a in node.names if a.name in METHODS.get(module, set())]
        elif isinstance(node, ast.Attribute):
            module = dotted(node.value)
            if node.attr in SOCKETS or node.attr in METHODS.get(module, set()):
                found.append(f"{module}.{node.attr}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
                found.append(node.func.id)
            found += [word.arg for word in node.keywords if word.arg in WORDS]
            found += ["shell=True" for word in node.keywords if word.arg == "shell"]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert not offences(path.read_text()), path


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import a, dill.x", "import torch\ntorch.load('x')"),
        *("eval('1')", "import yaml\nyaml.load(x)", "from yaml import unsafe_load", "s.recv_pyobj()"),
        *(
            "np.load(f, allow_pickle=True)",
            "AutoModel.from_pretrained(x, trust_remote_code=True)",
            "run(x, shell=True)",
        ),
        *("from torch import load", "from multiprocessing import Pipe"),
    ],
)
def test_the_test_sees_them(source: str) -> None:
    assert offences(source)


@pytest.mark.parametrize("source", ["model.eval()", "re.compile('a')", "yaml.safe_load(x)", "json.load(f)"])
def test_and_nothing_else(source: str) -> None:
    assert not offences(source)
