"""Packed weights on disk are the same bits as those that were packed, or they are not used."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.core.clock import SystemClock
from penstock.core.errors import ConfigError
from penstock.engine import build, worker
from penstock.nn import native, weight_cache
from penstock.nn.identity import cache_key
from penstock.nn.linear import WHOLE
from penstock.nn.loader import held, load_model
from penstock.nn.methods import PACKED
from penstock.nn.models.decoder import Decoder
from penstock.nn.weight_cache import WeightCache
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(checkpoint: Path, folder: Path, draft_head: bool = False, **limits: float) -> tuple[Decoder, bool]:
    """(model, whether it was mapped); afterwards it is kept."""
    cache = WeightCache(folder, least=0, **limits)  # type: ignore[arg-type]
    model = load_model(checkpoint, CPU, None, cache, draft_head=draft_head)
    mapped = cache._unsaved is None
    cache.save()
    return model, mapped


def same(model: Decoder, other: Decoder) -> bool:
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    assert file.suffix == ".weights"
    return file


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("llama", torch.float32),
        ("qwen3-moe", torch.float32),
        ("deepseek-v3", torch.bfloat16),
    ],
)
def test_a_second_load_gives_the_same_bits(tmp_path: Path, folder: Path, name: str, dtype: torch.dtype) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", name, dtype=dtype)
    first, mapped = load(checkpoint, folder)
    assert not mapped
    written = only(folder).stat().st_ino
    second, mapped = load(checkpoint, folder)
    assert mapped
    assert same(first, second)
    assert only(folder).stat().st_ino == written
    run = [Collector(make_engine(model)).run(make_request("a", [1, 2, 3])) for model in (first, second)]
    assert run[0] == run[1]


def test_a_model_with_a_draft_head_is_another(tmp_path: Path, folder: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "deepseek-v3", dtype=torch.bfloat16, further=True)
    first, _ = load(checkpoint, folder)
    for mapped_now in (False, True):
        headed, mapped = load(checkpoint, folder, draft_head=True)
        assert headed.draft_head is not None
        assert mapped == mapped_now
        assert len([*headed.parameters()]) > len([*first.parameters()])
    again, mapped = load(checkpoint, folder)
    assert mapped
    assert same(first, again)
    assert len([*folder.iterdir()]) == 2


def test_a_head_that_config_json_does_not_know_of(tmp_path: Path, folder: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, file)
    first, _ = load(checkpoint, folder)
    second, mapped = load(checkpoint, folder)
    assert mapped
    assert second.lm_head is not None
    assert same(first, second)


def flip(at: int):
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    return change


def other_shapes(file: Path) -> None:
    """All is in order, but it is another model's."""
    content = file.read_bytes()
    length = int.from_bytes(content[16:24], "little")
    header = json.loads(content[40 : 40 + length])
    header["weights"]["model.norm.weight"][1] = [1]
    text = json.dumps(header).encode().ljust(length)
    file.write_bytes(content[:24] + weight_cache._digest(text) + text + content[40 + length :])


def far_offset(file: Path) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[16:24], "little")
    header = json.loads(content[40 : 40 + length])
    header["weights"]["model.norm.weight"][2] += 1 << 12
    header["weights"]["model.norm.weight"][2] += header["bytes"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(content[:24] + weight_cache._digest(text) + text + content[40 + length :])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip(3), "something else"),
        (flip(30), "damaged"),
        (flip(200), "damaged"),
        (flip(23), "damaged"),  # the length of what follows
        (other_shapes, "model.norm.weight is"),
        (far_offset, "model.norm.weight cannot be"),
        (lambda file: os.truncate(file, 0), "something else"),
        (lambda file: os.truncate(file, 100), "damaged"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes instead of"),
        (lambda file: os.truncate(file, file.stat().st_size + 1), "bytes instead of"),
        (lambda file: file.write_bytes(b"x" * 100_000), "something else"),
    ],
)
def test_a_damaged_file_is_not_believed_and_written_again(checkpoint, folder, caplog, damage, says) -> None:
    first, _ = load(checkpoint, folder)
    content = only(folder).read_bytes()
    damage(only(folder))
    assert only(folder).read_bytes() != content
    with caplog.at_level(logging.INFO):
        second, mapped = load(checkpoint, folder)
    assert not mapped
    assert f"{only(folder)} is not used: " in caplog.text
    assert says in caplog.text
    assert same(first, second)
    assert only(folder).read_bytes() == content
    assert load(checkpoint, folder)[1]


def test_another_checkpoints_file_is_not_believed(checkpoint, tmp_path, folder, caplog) -> None:
    load(checkpoint, folder)
    other = write_checkpoint(tmp_path / "other", "qwen3", seed=1)
    expected = load_model(other, CPU)
    shutil.copy(only(folder), folder / f"{key_of(other, torch.float32)}.weights")
    with caplog.at_level(logging.INFO):
        found, mapped = load(other, folder)
    assert "it belongs to another checkpoint" in caplog.text
    assert not mapped
    assert same(found, expected)
    assert load(other, folder)[1]


def test_a_checkpoint_that_was_changed_in_its_middle_is_another(checkpoint, tmp_path) -> None:
    """Also where everything that can be set says that it is the same."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    file, before = copy / "model.safetensors", key_of(copy, torch.float32)
    stat = file.stat()
    flip(-1)(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert key_of(copy, torch.float32) != before
    assert key_of(checkpoint, torch.float32) != key_of(checkpoint, torch.bfloat16)


def test_a_checkpoint_that_changes_while_it_is_read_is_refused_and_not_kept(
    checkpoint, tmp_path, folder, monkeypatch
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    file = copy / "model.safetensors"

    def change(*_) -> None:
        """With the former mtime."""
        stat = file.stat()
        flip(-1)(file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    monkeypatch.setattr(WeightCache, "read", change)
    load(copy, folder)
    assert not folder.exists()
    monkeypatch.setattr(WeightCache, "read", lambda *_: flip(-1)(file))
    with pytest.raises(ConfigError, match=f"{file}: was changed while it was read"):
        load(copy, folder)
    assert not folder.exists()


@pytest.mark.parametrize("helps", [True, False])
def test_a_file_that_is_in_small_pages_is_read_again_where_that_helps(checkpoint, folder, monkeypatch, helps) -> None:
    model, _ = load(checkpoint, folder)
    size = next(folder.glob("*.weights")).stat().st_size
    dropped: list[int] = []
    drop = os.posix_fadvise

    def noted(fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append(length)
        drop(fd, start, length, advice)

    monkeypatch.setattr(weight_cache, "TRIED", 8192)
    monkeypatch.setattr(weight_cache, "is_large", lambda address, length: bool(dropped) and helps)
    monkeypatch.setattr(os, "posix_fadvise", noted)
    again, mapped = load(checkpoint, folder)
    assert mapped
    assert dropped[0] == 8192
    assert [size - 8192 < length < size for length in dropped[1:]] == [True] * helps
    for name, value in model.named_parameters():
        assert torch.equal(value, again.get_parameter(name))


def test_who_stands_still_with_a_file_is_not_waited_for_long(checkpoint, folder, monkeypatch) -> None:
    load(checkpoint, folder)
    monkeypatch.setattr(weight_cache, "PATIENCE", 0.05)
    with next(folder.glob("*.weights")).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert load(checkpoint, folder)[1]
    assert load(checkpoint, folder)[1]


def test_of_two_engines_at_once_one_writes(checkpoint, folder) -> None:
    caches = [WeightCache(folder, least=0) for _ in range(4)]
    models = [load_model(checkpoint, CPU, None, cache) for cache in caches]
    threads = [cache.save_later() for cache in caches]
    for thread in threads:
        assert thread is not None
        thread.join()
    only(folder)
    again, mapped = load(checkpoint, folder)
    assert mapped
    assert same(again, models[0])


def test_what_somebody_else_is_writing_is_left_to_them(checkpoint, folder) -> None:
    folder.mkdir()
    part = folder / f"{key_of(checkpoint, torch.float32)}.part"
    with part.open("ab") as writer:
        assert weight_cache._owns(writer, part)
        writer.write(b"half of it")
        writer.flush()
        load(checkpoint, folder)
        assert [path.name for path in folder.iterdir()] == [part.name]
        assert part.read_bytes() == b"half of it"
    # and they died
    (folder / "other.part").write_bytes(b"and so did these")
    load(checkpoint, folder)
    only(folder)
    assert load(checkpoint, folder)[1]


def test_a_file_that_was_just_put_in_place_is_not_written_again(folder) -> None:
    folder.mkdir()
    part = folder / "a.part"
    with part.open("ab") as file:
        part.rename(folder / "a.weights")
        assert not weight_cache._owns(file, part)
        part.touch()
        assert not weight_cache._owns(file, part)


def test_a_folder_that_cannot_be_written(checkpoint, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        model, mapped = load(checkpoint, tmp_path / "file" / "cache")
    assert not mapped
    assert same(model, load_model(checkpoint, CPU))
    (line,) = [record.message for record in caplog.records if record.name == "penstock.weights"]
    assert line.startswith("weights are not kept for the next start: ")


def test_a_disk_without_room(checkpoint, folder, tmp_path, monkeypatch, caplog) -> None:
    load(write_checkpoint(tmp_path / "other", "qwen3", seed=1), folder)
    other, usage = only(folder), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 29))
    with caplog.at_level(logging.INFO):
        load(checkpoint, folder, files=1)
    assert [record.message for record in caplog.records if "512 MiB are free" in record.message]
    assert only(folder) == other


def test_a_disk_that_is_full_all_of_a_sudden(checkpoint, folder, monkeypatch, caplog) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with caplog.at_level(logging.INFO):
        load(checkpoint, folder)
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []


def test_writing_in_pieces(checkpoint, folder, monkeypatch) -> None:
    """The system takes as much at once as it likes."""
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:1000]]))
    first, _ = load(checkpoint, folder)
    second, mapped = load(checkpoint, folder)
    assert mapped
    assert same(first, second)


def test_the_least_recently_used_go(tmp_path: Path, folder: Path) -> None:
    checkpoints = [write_checkpoint(tmp_path / str(seed), "qwen3", seed=seed) for seed in range(3)]
    for checkpoint in checkpoints[:2]:
        load(checkpoint, folder, files=2)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    assert load(checkpoints[0], folder, files=2)[1]  # and is used now
    load(checkpoints[2], folder, files=2)
    assert [bool(WeightCache(folder).read(key_of(c, torch.float32), on_meta(c))) for c in checkpoints] == [1, 0, 1]
    size = 1.5 * next(folder.iterdir()).stat().st_size
    load(checkpoints[1], folder, share=size / shutil.disk_usage(folder).total)  # as many bytes as one
    assert load(checkpoints[1], folder)[1]
    only(folder)


def key_of(checkpoint: Path, dtype: torch.dtype) -> str:
    return cache_key(checkpoint, dtype, WHOLE, held(load_model(checkpoint, CPU, dtype)))


def on_meta(checkpoint: Path) -> Decoder:
    with torch.device("meta"):
        model = type(load_model(checkpoint, CPU))(load_model(checkpoint, CPU).config)
        model.hold(PACKED)
    return model


def test_a_small_model_is_packed_each_time(checkpoint, folder) -> None:
    cache = WeightCache(folder)
    load_model(checkpoint, CPU, None, cache)
    assert cache.save_later() is None
    assert not folder.exists()


def test_an_engine_keeps_its_weights_and_finds_them_again(checkpoint, folder, monkeypatch) -> None:
    monkeypatch.setattr(worker, "WeightCache", lambda files: WeightCache(folder, least=0, files=files))
    monkeypatch.setattr(
        WeightCache, "save_later", lambda self, later=WeightCache.save_later: (t := later(self)) and t.join()
    )
    options = build.EngineOptions(model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4)
    tokens = []
    for _ in range(2):
        built = build.build_engine(options, SystemClock())
        tokens.append(Collector(built.engine).run(make_request("a", [1, 2, 3])))
        only(folder)
        built.close()
    assert tokens[0] == tokens[1]
    shutil.rmtree(folder)
    build.build_engine(dataclasses.replace(options, weight_cache=False), SystemClock()).close()
    assert not folder.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-cache"]
