"""Files and batches on disk: of several processes exactly one runs a batch, and each line has one answer."""

import json
import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, Conflict
from penstock.service.batch_lines import Line, LineError, not_run
from penstock.service.batch_store import LEASE, SCHEMA, STRAY, TOKENS, Answered, BatchStore

ENDPOINT = "/v1/completions"
LONGEST = 1000


class Wall:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def store(tmp_path, wall):
    store = BatchStore(tmp_path / "batches", wall)
    yield store
    store.check()
    store.close()


def uploaded(store, count=3, owner="", **options):
    upload = store.begin_upload()
    for i in range(count):
        line = {"custom_id": f"id-{i + 1}", "method": "POST", "url": ENDPOINT, "body": {}}
        upload.write(json.dumps(line).encode() + b"\n")
    keep = options.pop("keep_seconds", None)
    return store.keep_upload(upload, owner=owner, purpose="batch", filename="in.jsonl", keep_seconds=keep)


def created(store, count=3, owner="", seconds=86400, **options):
    return store.create(owner, ENDPOINT, uploaded(store, count, owner).id, window="24h", seconds=seconds, **options)


def answer(number, failed=False):
    return Answered(number, failed, not_run("batch_x", number, f"id-{number}", "code", "message"))


def lines_of(store, file_id):
    return [] if file_id is None else [json.loads(line) for line in store.path(file_id).read_text().splitlines()]


def begun(store, holder="a", count=3, **options):
    batch = created(store, count, **options)
    claimed = store.claim(holder, [])
    assert claimed.id == batch.id
    store.begin(batch.id, holder, count, None)
    return store.batch("", batch.id)


def test_a_batch_from_beginning_to_end(store, wall):
    batch = begun(store)
    assert (batch.status, batch.total, batch.in_progress_at) == ("in_progress", 3, int(wall.now))
    assert store.record(batch.id, "a", [answer(3), answer(1, failed=True)]) == "in_progress"
    store.check()
    assert store.answered(batch.id) == {1, 3}
    assert store.record(batch.id, "a", [answer(2), answer(3)]) == "in_progress"  # one of them is known
    store.finalize(batch.id, "a")
    store.finish(batch, "a", LONGEST)
    ended = store.batch("", batch.id)
    assert (ended.status, ended.completed, ended.failed, ended.holder) == ("completed", 2, 1, None)
    assert [line["custom_id"] for line in lines_of(store, ended.output_file_id)] == ["id-2", "id-3"]
    assert [line["custom_id"] for line in lines_of(store, ended.error_file_id)] == ["id-1"]
    assert store.file("", ended.output_file_id).purpose == "batch_output"
    assert store.claim("b", []) is None
    assert store.answered(batch.id) == set()


def test_tokens_of_answers_are_added_up_once(store, wall):
    batch = begun(store)
    told = [Answered(number, False, b"{}", (number, 0, 10 * number, 1)) for number in (1, 2)]
    store.record(batch.id, "a", told)
    store.record(batch.id, "a", told[1:])  # it is known
    found = store.batch("", batch.id)
    assert [getattr(found, name) for name in TOKENS] == [3, 0, 30, 2]


def test_a_folder_that_knew_no_tokens_counts_them_from_now_on(tmp_path):
    old = SCHEMA.replace(
        SCHEMA[SCHEMA.index(", input_tokens") : SCHEMA.index("\n);\nCREATE TABLE IF NOT EXISTS answers")], ""
    )
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        db.executescript(old)
    for _ in range(2):
        store = BatchStore(tmp_path)
        batch = begun(store)
        store.record(batch.id, "a", [Answered(1, False, b"{}", (1, 0, 2, 0))])
        assert store.batch("", batch.id).output_tokens == 2
        store.close()


def test_who_has_lost_a_batch_can_say_nothing_of_it(store, wall):
    batch = begun(store)
    store.record(batch.id, "a", [answer(1)])
    assert store.claim("b", []) is None
    wall.now += LEASE + 1
    assert store.claim("b", []).id == batch.id
    assert store.record(batch.id, "a", [answer(2)]) is None
    store.finalize(batch.id, "a")
    store.finish(batch, "a", LONGEST)
    store.refuse(batch.id, "a", [LineError("x", "y")])
    store.release(batch.id, "a")
    found = store.batch("", batch.id)
    assert (found.status, found.holder, found.completed) == ("in_progress", "b", 1)
    assert store.record(batch.id, "b", [answer(2), answer(3)]) == "in_progress"
    store.finish(batch, "b", LONGEST)
    assert store.batch("", batch.id).status == "completed"


def test_a_lease_that_is_renewed_lasts(store, wall):
    batch = begun(store)
    for _ in range(5):
        wall.now += LEASE - 1
        assert store.record(batch.id, "a") == "in_progress"
        assert store.claim("b", []) is None
    store.release(batch.id, "a")
    assert store.claim("b", []).id == batch.id
    wall.now += LEASE + 1
    assert store.claim("b", [batch.id]) is None  # who runs it renews it


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_what_has_not_run_is_in_the_error_file(store, wall, end):
    batch = begun(store, count=4)
    store.record(batch.id, "a", [answer(2), answer(4, failed=True)])
    if end == "cancelled":
        assert store.cancel("", batch.id).status == "cancelling"
        assert store.record(batch.id, "a", []) == "cancelling"
    store.finalize(batch.id, "a")
    store.finish(batch, "a", LONGEST)
    ended = store.batch("", batch.id)
    assert (ended.status, ended.completed, ended.failed) == (end, 1, 3)
    assert getattr(ended, f"{end}_at") == int(wall.now)
    assert [line["custom_id"] for line in lines_of(store, ended.output_file_id)] == ["id-2"]
    errors = lines_of(store, ended.error_file_id)
    assert [line["custom_id"] for line in errors] == ["id-1", "id-3", "id-4"]
    assert [line["error"]["code"] for line in errors] == [f"batch_{end}", f"batch_{end}", "code"]


def test_a_batch_can_be_cancelled_once_and_before_its_end(store):
    batch = created(store)
    assert store.cancel("", "batch_no") is None
    assert store.cancel("other", batch.id) is None
    assert store.cancel("", batch.id).status == "cancelling"
    assert store.cancel("", batch.id).status == "cancelling"
    store.claim("a", [])
    store.begin(batch.id, "a", 3, None)
    store.finish(batch, "a", LONGEST)
    assert store.cancel("", batch.id).status == "cancelled"
    other = begun(store, count=1)
    store.record(other.id, "a", [answer(1)])
    store.finish(other, "a", LONGEST)
    with pytest.raises(Conflict, match="is completed, and cannot be cancelled"):
        store.cancel("", other.id)


def test_an_input_that_is_none(store):
    batch = created(store)
    store.claim("a", [])
    store.refuse(batch.id, "a", [LineError("invalid_json_line", "line 2: no", None, 2)])
    failed = store.batch("", batch.id)
    assert (failed.status, failed.holder) == ("failed", None)
    assert json.loads(failed.errors) == [
        {"code": "invalid_json_line", "message": "line 2: no", "param": None, "line": 2}
    ]
    assert store.claim("a", []) is None


def test_files_of_others_are_not_there(store):
    mine, other = uploaded(store, owner="me"), uploaded(store, owner="other")
    assert store.file("me", mine.id) == mine
    assert store.file("me", other.id) is None
    assert [file.id for file in store.files("me", None, None, 10, newest_first=True)[0]] == [mine.id]
    assert not store.delete_file("me", other.id)
    assert store.path(other.id).exists()
    assert store.delete_file("other", other.id)
    assert not store.path(other.id).exists()


def test_an_input_stays_until_its_batch_is_over(store):
    batch = begun(store, count=1)
    with pytest.raises(Conflict, match="which is not over"):
        store.delete_file("", batch.input_file_id)
    store.record(batch.id, "a", [answer(1)])
    store.finish(batch, "a", LONGEST)
    assert store.delete_file("", batch.input_file_id)


def test_pages(store):
    files = [uploaded(store, 1).id for _ in range(5)]
    batches = [created(store).id for _ in range(3)]
    first, more = store.files("", "batch", None, 2, newest_first=False)
    assert ([file.id for file in first], more) == (files[:2], True)
    rest, more = store.files("", "batch", files[1], 3, newest_first=False)
    assert ([file.id for file in rest], more) == (files[2:], True)
    assert store.files("", "batch_output", None, 9, newest_first=True) == ([], False)
    newest, more = store.batches("", None, 2)
    assert ([batch.id for batch in newest], more) == ([batches[2], batches[1]], True)
    last, more = store.batches("", batches[1], 2)
    assert ([batch.id for batch in last], more) == ([batches[0]], False)
    assert store.batches("", "batch_no", 2) == ([], False)


def test_what_has_expired_goes(store, wall):
    file, kept = uploaded(store, keep_seconds=10), uploaded(store)
    used = uploaded(store, keep_seconds=10)
    store.create("", ENDPOINT, used.id, window="24h", seconds=86400)
    wall.now += 11
    assert store.file("", file.id) is None
    assert [one.id for one in store.files("", None, None, 9, newest_first=True)[0]] == [kept.id]
    store.sweep()
    assert not store.path(file.id).exists()
    assert store.path(used.id).exists()


def test_what_died_in_an_upload_goes(store, wall):
    upload = store.begin_upload()
    upload.write(b"x")
    wall.now = upload.path.stat().st_mtime
    store.sweep()
    assert upload.path.exists()
    wall.now += STRAY + 1
    store.sweep()
    assert not upload.path.exists()
    upload.discard()


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"batch-dir: .* cannot be used"):
        BatchStore(tmp_path / "file")


COUNT = 4
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.sampled_from("ab"), st.just(0)),
        st.tuples(st.just("answer"), st.sampled_from("ab"), st.integers(1, COUNT)),
        st.tuples(st.just("wait"), st.just(""), st.sampled_from([1, LEASE + 1])),
        st.tuples(st.just("finish"), st.sampled_from("ab"), st.just(0)),
        st.tuples(st.just("cancel"), st.just(""), st.just(0)),
    ),
    max_size=25,
)


@given(steps=STEPS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_stands_still_whenever_each_line_has_one_result(tmp_path_factory, steps):
    """Two processes claim, answer and end a batch in any order, without regard to whether they hold it."""
    wall = Wall()
    folder = tmp_path_factory.mktemp("batches")
    stores = {name: BatchStore(folder, wall) for name in "ab"}
    try:
        batch = begun(stores["a"], count=COUNT)
        for what, who, number in steps:
            if what == "claim":
                stores[who].claim(who, [])
            elif what == "answer":
                line = Line(number, f"id-{number}", None, {})
                record = not_run(batch.id, number, line.custom_id, who, "")
                stores[who].record(batch.id, who, [Answered(number, number % 2 == 0, record)])
            elif what == "wait":
                wall.now += number
            elif what == "finish":
                stores[who].finish(batch, who, LONGEST)
            elif stores["a"].batch("", batch.id).status in ("in_progress", "cancelling"):
                stores["a"].cancel("", batch.id)
            stores["a"].check()
        wall.now += LEASE + 1
        if stores["b"].claim("b", []) is not None:
            stores["b"].finish(batch, "b", LONGEST)
        ended = stores["a"].batch("", batch.id)
        results = [*lines_of(stores["a"], ended.output_file_id), *lines_of(stores["a"], ended.error_file_id)]
        assert Counter(line["custom_id"] for line in results) == {f"id-{i + 1}": 1 for i in range(COUNT)}
        assert ended.completed + ended.failed == COUNT
        stores["a"].check()
    finally:
        for store in stores.values():
            store.close()
