"""Embeddings that outlive who made them."""

import os

import pytest

from penstock.kv.embeddings import Embedding, EmbeddingCache
from penstock.transfer.embedding_files import EmbeddingFiles
from tests.helpers.waiting import eventually

ONE = Embedding.of(b"one" * 100)


@pytest.fixture
def files(tmp_path):
    made = []

    def make(most=1 << 20):
        made.append(EmbeddingFiles(tmp_path / "seen", most))
        return made[-1]

    yield make
    for each in made[:-1]:
        each.close()


def test_another_finds_what_one_has_written(files, tmp_path):
    one = files()
    one.write(b"d", ONE)
    one.close()
    assert files().read(b"d") == ONE
    assert files().read(b"e") is None
    assert (tmp_path / "seen").stat().st_mode & 0o777 == 0o700


def test_everybody_knows_what_others_have_written_and_deleted(files, tmp_path):
    one, other = files(), files()
    one.write(b"d", ONE)
    eventually(lambda: one.keys() == other.keys() == {b"d"})
    assert other.keys() is other.keys()
    for name in (".ab", "notes"):
        (tmp_path / "seen" / name).touch()
    assert files().keys() == {b"d"}, "from the first on"
    (tmp_path / "seen" / b"d".hex()).unlink()
    eventually(lambda: not one.keys() and not other.keys())


def test_what_was_changed_or_cut_is_not_believed(files, tmp_path):
    one = files()
    one.write(b"d", ONE)
    one.close()
    (path,) = (tmp_path / "seen").iterdir()
    whole = path.read_bytes()
    for spoiled in (whole[:-1] + b"x", whole[:-1], whole[:5], b""):
        path.write_bytes(spoiled)
        assert files().read(b"d") is None
        assert not path.exists()


def test_what_was_used_longest_ago_goes_first(files, tmp_path):
    one = files(most=3 * 312)
    for at, digest in enumerate((b"a", b"b", b"c")):
        one.write(digest, ONE)
        path = tmp_path / "seen" / digest.hex()
        eventually(path.exists)
        os.utime(path, (at, at))
    assert one.read(b"a") == ONE
    one.write(b"d", ONE)
    one.close()
    assert [files().read(digest) is not None for digest in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_a_cache_finds_again_what_is_below_it(files):
    below = files()
    cache = EmbeddingCache(350, below)
    cache.put(b"one", ONE)
    cache.put(b"two", Embedding.of(b"two" * 100))
    below.close()
    again = EmbeddingCache(350, files())
    assert sorted(again.take_changes()[0]) == sorted(again.keys()) == [b"one", b"two"], "before anybody asks"
    assert again.get(b"one") == ONE
    assert again.get(b"two").data == b"two" * 100
    assert len(again) == 1
    assert again.take_changes() == ([], []), "what is not in memory is below"
    again.check()
