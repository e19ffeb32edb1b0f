"""Ways to read a checkpoint: the same bits, however files and chunks are cut, alone and by several ranks; what cannot
be read is named."""

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.core.errors import ConfigError, RankFailed
from penstock.nn import native, reading
from penstock.nn.checkpoint import INDEX, Stored, stored
from penstock.nn.linear import Shard
from penstock.nn.loader import load_model
from penstock.nn.methods import METHODS
from penstock.nn.ranks import SharedMemoryRanks
from penstock.nn.reading import LOAD_FORMATS, PAGE, Plan, pieces, resident
from tests.helpers.checkpoints import write_checkpoint

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DIVISIBLE = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}  # by 2 and 3
needs_native = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")


@pytest.fixture(scope="module", params=["qwen3", "gemma"])
def checkpoint(request, tmp_path_factory):
    """Of several files."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), request.param, shard_size="100KB")


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def not_in_memory(monkeypatch):
    """Files are read past the page cache where that is possible."""
    monkeypatch.setattr(reading, "resident", lambda _: False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [600, 5000, 64 << 20])  # of which the first cuts every matrix
def test_every_format_loads_the_same_bits(checkpoint, monkeypatch, device, method, chunk):
    device = torch.device(device)
    if (reason := METHODS[method].missing(device, torch.float32)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr("penstock.nn.loader.method_for", lambda *_: METHODS[method])
    monkeypatch.setattr(reading, "CHUNK", chunk)
    expected = weights_of(load_model(checkpoint, device, load_format="mmap"))
    for load_format in LOAD_FORMATS:
        reports = []
        model = load_model(checkpoint, device, load_format=load_format, progress=lambda *r, to=reports: to.append(r))
        assert same(weights_of(model), expected), load_format
        assert reports == sorted(reports)
        assert reports[-1][0] == reports[-1][1] == sum(t.stop - t.start for t in stored(checkpoint))
    not_in_memory(monkeypatch)
    assert same(weights_of(load_model(checkpoint, device)), expected)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_experts_in_one_tensor_are_loaded_in_any_format(tmp_path, monkeypatch, name):
    """As transformers holds them: [experts, outs, ins]."""
    folder = write_checkpoint(tmp_path, name)
    file, expected = folder / "model.safetensors", weights_of(load_model(folder, CPU))
    apart = load_file(file)
    together = {key: value for key, value in apart.items() if ".experts." not in key}
    experts = apart.keys() - together.keys()
    for stem in {key.partition(".experts.")[0] + ".experts" for key in experts}:
        numbers = range(sum(key.startswith(f"{stem}.") for key in experts) // 3)
        for kind, of in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
            each = [torch.cat([apart[f"{stem}.{i}.{part}.weight"] for part in of]) for i in numbers]
            together[f"{stem}.{kind}"] = torch.stack(each)
    save_file(together, file)
    monkeypatch.setattr(reading, "CHUNK", 3000)
    for load_format in LOAD_FORMATS[1:]:
        assert same(weights_of(load_model(folder, CPU, load_format=load_format)), expected), load_format
    (stem,) = [key for key in together if key.endswith("1.mlp.experts.gate_up_proj")]
    save_file(together | {stem: together[stem][:-1]}, file)
    with pytest.raises(ConfigError, match=r"missing, the first is .*experts"):
        load_model(folder, CPU)


def test_a_head_beside_tied_embeddings_is_loaded_in_any_format(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    whole = load_file(file)
    head = torch.randn_like(whole["model.embed_tokens.weight"])
    save_file(whole | {"lm_head.weight": head}, file)
    monkeypatch.setattr(reading, "CHUNK", 3000)
    for load_format in LOAD_FORMATS[1:]:
        model = load_model(folder, CPU, load_format=load_format)
        assert torch.equal(model.lm_head.dense(), head)
        assert torch.equal(model.model.embed_tokens.dense(), whole["model.embed_tokens.weight"])


@needs_native
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_each_file_once_and_have_their_shards(tmp_path, monkeypatch, size):
    folder = write_checkpoint(tmp_path, "qwen3", shard_size="100KB", **DIVISIBLE)
    monkeypatch.setattr(reading, "CHUNK", 2000)
    expected = [weights_of(load_model(folder, CPU, shard=Shard(rank, size))) for rank in range(size)]
    opened = []

    class File(reading._File):
        def __init__(self, path: Path) -> None:
            opened.append(path)
            super().__init__(path)

    monkeypatch.setattr(reading, "_File", File)
    not_in_memory(monkeypatch)
    before = set(os.listdir("/proc/self/fd"))
    found = in_ranks(folder, size, "sequential")
    assert all(same(weights_of(model), other) for model, other in zip(found, expected, strict=True))
    assert sorted(opened) == sorted({tensor.path for tensor in stored(folder)})
    assert len(opened) > size
    assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests left to the collector may have gone


def in_ranks(folder, size, load_format):
    memory = mmap.mmap(-1, SharedMemoryRanks.bytes_for(size))

    def load(rank):
        ranks = SharedMemoryRanks(memory, rank, size)
        try:
            return load_model(folder, CPU, shard=Shard(rank, size, ranks), load_format=load_format)
        except ConfigError:
            ranks.fail(rank)  # as rank 0 does for one that has ended
            raise

    default = torch.get_default_dtype()
    with ThreadPoolExecutor(size) as pool:
        tasks = [pool.submit(load, rank) for rank in range(size)]
    torch.set_default_dtype(default)  # which threads set beside each other
    return [task.exception() or task.result() for task in tasks]


@needs_native
def test_a_file_that_one_rank_cannot_read_ends_the_others(checkpoint, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 2000)
    last = max(tensor.path for tensor in stored(checkpoint))
    truncated_while_it_is_read(monkeypatch, last, PAGE)
    found = in_ranks(checkpoint, 2, "sequential")
    assert {type(error) for error in found} == {ConfigError, RankFailed}
    (error,) = [error for error in found if isinstance(error, ConfigError)]
    assert f"{last}: was truncated to {PAGE} bytes while it was read" in str(error)


def truncated_while_it_is_read(monkeypatch, path, size):
    """As far as its reader can see."""
    preadv, fstat = os.preadv, os.fstat

    class Stat:
        st_size = size

    def cut(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}") != str(path):
            return preadv(fd, buffers, offset)
        return min(preadv(fd, buffers, offset), max(0, size - offset))

    monkeypatch.setattr(reading.os, "preadv", cut)
    monkeypatch.setattr(
        reading.os, "fstat", lambda fd: Stat if os.readlink(f"/proc/self/fd/{fd}") == str(path) else fstat(fd)
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_is_truncated_while_it_is_read(checkpoint, monkeypatch, direct):
    monkeypatch.setattr(reading, "resident", lambda _: not direct)
    tensor = list(stored(checkpoint))[3]
    truncated_while_it_is_read(monkeypatch, tensor.path, tensor.stop - 1)
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint, CPU, load_format="sequential")
    said = f"{tensor.name!r} is expected to end at byte {tensor.stop}"
    assert str(caught.value) == f"{tensor.path}: was truncated to {tensor.stop - 1} bytes while it was read; {said}"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5000)), max_size=6), min_size=1, max_size=4))
def test_chunks_hold_everything_once_and_two_have_room(files):
    tensors = []
    for number, shapes in enumerate(files):
        at = 8 + 77 * number
        for rows, width in shapes:
            tensors.append(Stored(Path(str(number)), f"{at}", "F16", (rows, width), at, at + rows * width * 2))
            at += rows * width * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK", 9000)
        plan = Plan.of(tensors)
    rows_of = [
        (tensor, row) for chunk in plan.chunks for tensor, first, n in chunk.parts for row in range(first, first + n)
    ]
    assert rows_of == [(tensor, row) for tensor in tensors for row in range(tensor.rows)]
    for i, (chunk, place) in enumerate(zip(plan.chunks, plan.places, strict=True)):
        assert chunk.stop - chunk.start <= max(9000, 2 * max(tensor.shape[1] for tensor, *_ in chunk.parts))
        assert 0 <= place <= place + len(chunk.aligned) <= plan.bytes
        if i:
            before, end = plan.places[i - 1], plan.places[i - 1] + len(plan.chunks[i - 1].aligned)
            assert place >= end or place + len(chunk.aligned) <= before


def test_auto_maps_what_is_in_memory(checkpoint, monkeypatch):
    tensors = list(stored(checkpoint))
    for there in (True, False):
        monkeypatch.setattr(reading, "resident", lambda path, there=there: there or path != tensors[-1].path)
        load_format, found = pieces(tensors, "auto", CPU)
        with closing(found):
            assert load_format == ("mmap" if there else "sequential")


def test_whether_a_file_is_in_memory(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 << 20))
    assert resident(file)
    device = file.stat().st_dev
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    place = f"{os.major(device)}:{os.minor(device)}"
    if not {after.split()[0] for before, after in mounts if before.split()[2] == place} & {"ext4", "xfs"}:
        pytest.skip("this file system may have its files in memory alone")
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not resident(file)


@pytest.mark.parametrize("load_format", LOAD_FORMATS[1:])
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, load_format):
    folder = write_checkpoint(tmp_path, "qwen3")
    file = folder / "model.safetensors"
    again = write_checkpoint(tmp_path / "other", "qwen3", seed=1) / "model.safetensors"

    def replace(done, total):
        if done == total:
            again.replace(file)

    with pytest.raises(ConfigError, match=f"{file}: was changed while it was read"):
        load_model(folder, CPU, load_format=load_format, progress=replace)


@pytest.mark.parametrize("load_format", LOAD_FORMATS)
def test_headers_that_do_not_fit_their_file_name_the_tensor(tmp_path, load_format):
    folder = write_checkpoint(tmp_path, "qwen3")
    file = folder / "model.safetensors"
    content, tensors = file.read_bytes(), list(stored(folder))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name, half = tensors[2].name, len(tensors) // 2

    def refused():
        with pytest.raises(ConfigError) as caught:
            load_model(folder, CPU, load_format=load_format)
        assert str(caught.value).startswith(f"{file}: ")
        return str(caught.value)

    file.write_bytes(content[: tensors[half].stop - 1])
    end = f"{tensors[half].name!r} is expected to end at byte {tensors[half].stop}"
    assert f"({end}, the file has {tensors[half].stop - 1} bytes)" in refused()
    file.write_bytes(content + b"12345")
    assert f"it has {len(content) + 5} bytes, its tensors are expected to end at byte {len(content)}" in refused()
    file.write_bytes(content[: length // 2])
    assert f"its header of {length} bytes is expected to end at byte {8 + length}" in refused()
    for change, says in (
        ({"dtype": "F64"}, f"{name!r} has {tensors[2].stop - tensors[2].start} bytes, expected are "),
        ({"dtype": "I32"}, f"{name!r} is of dtype I32, expected is BF16, F16, F32, F64"),
        ({"dtype": "Q7"}, f"{name!r} is of dtype 'Q7', expected is one of F64, F32"),
    ):
        text = json.dumps(header | {name: header[name] | change}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        assert says in refused()


def test_an_index_tells_where_what_is_missing_was_expected(checkpoint, tmp_path):
    index = json.loads((checkpoint / INDEX).read_text())
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    name, file = sorted(index["weight_map"].items())[-1]
    (tmp_path / file).unlink()
    whole = load_file(checkpoint / file)
    names = sorted(whole)
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path, CPU)
    assert str(caught.value) == (
        f"{tmp_path / file}: not found; {INDEX} has {len(names)} weights in it, the first is {names[0]!r}"
    )
    save_file({other: tensor for other, tensor in whole.items() if other != name}, tmp_path / file)
    with pytest.raises(ConfigError, match=f"1 weights are missing, the first is '{name}', which {INDEX} has in {file}"):
        load_model(tmp_path, CPU)
