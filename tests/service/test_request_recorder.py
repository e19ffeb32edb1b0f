"""What is written of requests for a replay: all of what is needed, nothing half, no more than there is room for."""

import errno
import os
import stat
import threading

import msgspec
import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import ConfigError, EngineFailure
from penstock.core.request import FinishReason, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.service_level import ServiceLevel
from penstock.obs.metrics import Metrics
from penstock.service import request_recorder
from penstock.service.instances import ChannelLost
from penstock.service.request_record import (
    BEGINS,
    FIRST,
    VERSION,
    Interruption,
    RecordedMedia,
    RecordedOutput,
    RecordedRequest,
    RequestRecord,
    file_digest,
    recorded_params,
)
from penstock.service.request_recorder import LEAST, RequestRecorder
from tests.helpers.frontends import collect, run, submit
from tests.helpers.scripted import ready
from tests.helpers.waiting import eventually, until


def recorder(folder, size=LEAST, name="frontend-0", clock=None):
    clock = clock or ManualClock()
    return RequestRecorder(folder, name, size, Metrics("m", []), clock, lambda: 995.0 + clock.now())


def request(name="r", at=0.0, prompt=(1, 2, 3), tokens=(4, 5), **changes):
    values = {"params": recorded_params(SamplingParams(stop=["x"], logit_bias={3: 1.5})), "max_tokens": 9, "seed": -7}
    values |= {"outputs": [RecordedOutput(list(tokens), "stop", "x")], "model": "m", "fingerprints": ["f00d"]}
    return RecordedRequest(version=VERSION, id=name, at=at, seconds=0.5, prompt=list(prompt), **(values | changes))


def counted(recorder, outcome):
    labels = {"model_name": "m", "outcome": outcome}
    return recorder._metrics.registry.get_sample_value("penstock:recorded_requests_total", labels)


def read(path):
    with RequestRecord(path) as record:
        return [record.read(line) for line in record.lines]


# --- the file


def test_what_is_written_comes_back_and_is_nobody_elses(tmp_path):
    folder = tmp_path / "new" / "record"
    first, second = recorder(folder), recorder(folder, name="frontend-1")
    asked = [request("a", 3.0), request("b", 1.0, seed=None, pooling="mean", failure="it's gone")]
    for one in asked:
        first.add(one)
    second.add(request("c", 2.0))
    for each in (first, second):
        each.close()
        each.check()
    found = read(folder)
    assert [one.id for one in found] == ["b", "c", "a"]
    assert [one.id for one in read(folder / "frontend-1.jsonl")] == ["c"]
    written = msgspec.json.decode(msgspec.json.encode(asked[0]), type=RecordedRequest)
    assert found[2] == written
    assert written.penstock
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert (counted(first, "written"), counted(first, "dropped")) == (2, 0)
    assert (folder / "frontend-0.jsonl").read_bytes().startswith(BEGINS)


def test_half_a_line_is_not_read_and_what_follows_is_whole(tmp_path):
    first = recorder(tmp_path)
    first.add(request("a"))
    first.close()
    file = tmp_path / "frontend-0.jsonl"
    whole = file.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):  # as a kill leaves it
        file.write_bytes(whole + whole[:cut])
        assert [one.id for one in read(file)] == ["a"]
    again = recorder(tmp_path)
    again.add(request("b", 1.0))
    again.close()
    assert [one.id for one in read(file)] == ["a", "b"]
    file.write_bytes(whole + b'{"version":1}\n' + whole)
    with pytest.raises(ConfigError, match=r"^RECORD: .*frontend-0\.jsonl:2: no recorded request \(.*`id`"):
        RequestRecord(tmp_path)
    file.write_bytes(whole.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ConfigError, match=r"frontend-0\.jsonl:1: version 2, allowed is 1"):
        RequestRecord(tmp_path)
    for nothing in (tmp_path / "absent", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="allowed is a folder of --record-requests"):
            RequestRecord(nothing)


def test_the_oldest_go_where_there_is_no_room(tmp_path):
    writer = recorder(tmp_path, LEAST)
    for number in range(80):
        writer.add(request(str(number), float(number), prompt=[100_000 + number] * 3000))  # 21 kB
        if number % 8 == 0:
            eventually(lambda: not writer._waiting)
    with RequestRecord(tmp_path) as record:  # which is open while it goes on
        before = [line.id for line in record.lines]
        for number in range(80, 110):
            writer.add(request(str(number), float(number), prompt=[100_000] * 3000))
        writer.close()
        assert [record.read(line).id for line in record.lines] == before
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert LEAST // 2 < sum(sizes) <= LEAST
    kept = [int(one.id) for one in read(tmp_path)]
    assert kept == list(range(110 - len(kept), 110))
    assert counted(writer, "written") == 110


def test_an_image_is_written_once_in_each_file(tmp_path):
    """So that whatever is left after a rotation has all that it needs."""
    images = {file_digest(data): data for data in (b"\0" + bytes(100_000), b"\1\xff", b"")}
    first, second, empty = images
    writer = recorder(tmp_path, LEAST)

    def add(number, *digests):
        media = [RecordedMedia("image", 1, 1, digest) for digest in digests]
        writer.add(request(str(number), number, media=media), {digest: images[digest] for digest in digests})
        eventually(lambda: counted(writer, "written") == number + 1)

    add(0, first, second, first)
    add(1, second, empty)
    lines = (tmp_path / "frontend-0.jsonl").read_bytes().splitlines()
    assert [b'"file"' in line[:FIRST] for line in lines] == [True, True, False, True, False]
    for number in range(2, 6):
        writer.add(request("filler", 0.5, prompt=[100_000] * 20_000))
        eventually(lambda: counted(writer, "written") == number + 1)  # noqa: B023
    assert (tmp_path / "frontend-0.jsonl.1").exists()
    (tmp_path / "frontend-0.jsonl.1").unlink()
    add(6, second)
    with RequestRecord(tmp_path) as record:
        assert "6" in [line.id for line in record.lines]
        assert (record.has(second), record.image(second), record.image(first)) == (True, b"\1\xff", None)
    large = file_digest(b"large")
    writer.add(request("large", 9.0), {large: bytes(400_000)})
    writer.close()
    writer.check()
    assert counted(writer, "dropped") == 1


def test_images_that_wait_have_weight(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setattr(request_recorder, "_write_all", lambda file, content: gate.wait(20))
    monkeypatch.setattr(request_recorder, "MOST_WAITING", 20_000)
    writer = recorder(tmp_path)
    writer.add(request("a"))
    eventually(lambda: not writer._waiting)  # the thread has it
    for name in ("b", "c"):
        writer.add(request(name), {name: bytes(100_000)})
        writer.check()
    assert counted(writer, "dropped") == 1
    gate.set()
    writer.close()


def test_what_cannot_be_a_record_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=f"^record-requests-size: 5, allowed is at least {LEAST} bytes"):
        recorder(tmp_path, 5)
    (tmp_path / "frontend-1.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="is no record of requests"):
        recorder(tmp_path, name="frontend-1")
    assert (tmp_path / "frontend-1.jsonl").read_text() == "mine\n"
    with pytest.raises(ConfigError, match="cannot be written"):
        recorder(tmp_path / "frontend-1.jsonl")
    first = recorder(tmp_path)
    with pytest.raises(ConfigError, match="is written by another process"):
        recorder(tmp_path)
    first.close()


def test_what_cannot_be_written_is_dropped_and_counted_and_nobody_waits(tmp_path, monkeypatch, caplog):
    gate, full = threading.Event(), threading.Event()

    def slowly(file, content):
        assert gate.wait(20)
        if full.is_set():
            os.write(file, content[: len(content) // 2])
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        os.write(file, content)

    monkeypatch.setattr(request_recorder, "_write_all", slowly)
    monkeypatch.setattr(request_recorder, "MOST_WAITING", 3000)
    writer = recorder(tmp_path)
    writer.add(request("a"))
    eventually(lambda: not writer._waiting)  # the thread has it
    for number in range(4):
        writer.add(request(str(number), float(number + 1), prompt=[1] * 300))
        writer.check()
    assert counted(writer, "dropped") == 2
    gate.set()
    eventually(lambda: counted(writer, "written") == 3)
    full.set()
    writer.add(request("lost", 8.0))
    eventually(lambda: counted(writer, "dropped") == 3)
    writer.add(request("too long", 8.0, prompt=[123_456] * 100_000))
    eventually(lambda: counted(writer, "dropped") == 4)
    writer.add(request("\ud800", 8.0))
    writer.add(request("b", 9.0))
    writer.close()
    assert counted(writer, "dropped") == 5
    assert [one.id for one in read(tmp_path)] == ["a", "0", "1", "b"]
    for why in ("faster than they can be written", "No space left", "at most 524288", "UnicodeEncodeError"):
        assert sum(why in line for line in caplog.messages) == 1, why


def test_a_disk_without_room_keeps_no_server_from_starting(tmp_path, monkeypatch, caplog):
    real, full = os.open, [True]

    def open_(path, *more):
        if full[0] and str(path).endswith(".jsonl"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *more)

    monkeypatch.setattr(os, "open", open_)
    writer = recorder(tmp_path / "folder")
    assert "are not recorded" in caplog.text
    writer.add(request("early"))
    eventually(lambda: counted(writer, "dropped") == 1)
    full[0] = False
    writer.add(request("late"))
    writer.close()
    assert counted(writer, "written") == 1
    assert [one.id for one in read(tmp_path / "folder")] == ["late"]


def test_a_record_that_somebody_removes_begins_anew(tmp_path):
    writer = recorder(tmp_path)
    for number in range(2):
        writer.add(request(str(number)))
        eventually(lambda: counted(writer, "written") == number + 1)  # noqa: B023
        assert [one.id for one in read(tmp_path)] == [str(number)]
        (tmp_path / "frontend-0.jsonl").unlink()
    tmp_path.rmdir()
    writer.add(request("lost"))
    writer.close()
    assert (counted(writer, "written"), counted(writer, "dropped")) == (2, 1)


# --- what a frontend has written


def test_a_record_has_what_is_needed_to_run_a_request_again(tokenizer, tmp_path):
    words = tokenizer.encode("one two three")
    stopped = next(i for i in range(1, len(words)) if "two" in tokenizer.decode(words[:i]))
    some = words[: stopped - 1]
    level = ServiceLevel(ttft_ms=50.0, tpot_ms=None, priority=2, offline=False, chat="c")
    seeds = []

    async def scenario(frontend, channel, clock):
        frontend.recorder = recorder(tmp_path, clock=clock)
        clock.advance(5.0)
        params = SamplingParams(n=2, max_tokens=None, stop=["two"], truncate_prompt_tokens=2, min_p=0.25)
        arguments = {"request_id": "r", "level": level, "model": "other", "arrival": 3.0}
        generation = frontend.submit([[1, 2], [3]], params, **arguments)
        await until(lambda: len(channel.enqueued()) == 4)
        seeds.extend(sent.seed for sent in channel.enqueued())
        for sent in channel.enqueued():
            channel.report(TokenOutput(sent.id, some))
            if sent.id.startswith("r-0"):
                rest = words[len(some) :]
                channel.report(TokenOutput(sent.id, rest, start=len(some), finish=FinishReason.LENGTH))
        await until(lambda: len(generation._deltas) == 6)
        clock.advance(1.0)
        generation.cancel()

    run(tokenizer, scenario)
    whole, left = read(tmp_path)
    assert (whole.id, whole.prompt, whole.model, whole.failure) == ("r-0", [1, 2], "other", "")
    assert whole.outputs == [RecordedOutput(words[:stopped], "stop", "two")] * 2
    assert [one.seed for one in (whole, left)] == [seeds[0], seeds[2]]
    assert seeds[1] == seeds[0] + 1
    assert (whole.max_tokens, left.max_tokens) == (98, 99)  # what the model's length leaves
    assert (whole.ttft_ms, whole.tpot_ms, whole.priority, whole.offline) == (50.0, None, 2, False)
    assert (whole.at, left.at, left.seconds) == pytest.approx((998.0, 998.0, 3.0))
    assert whole.fingerprints == [ready().root_key.hex()]
    assert (whole.params["n"], whole.params["min_p"], whole.params["stop"]) == (2, 0.25, ["two"])
    assert not whole.params.keys() & {"seed", "max_tokens", "truncate_prompt_tokens"}
    assert (left.id, left.failure) == ("r-1", "the client left")
    assert left.outputs == [RecordedOutput(some)] * 2
    assert left.instance == "engine-0"


def test_a_record_says_what_interrupted_a_request_and_what_ended_it(tokenizer, tmp_path):
    async def scenario(frontend, channels, clock):
        frontend.recorder = recorder(tmp_path)
        generation, (name,) = await submit(frontend, [1, 2])
        channels["a"].report(TokenOutput(name, [5, 6]))
        await generation.next()
        channels["a"].say(ChannelLost("killed"))
        await until(channels["b"].enqueued)
        channels["b"].report(TokenOutput(name, [7], start=2, generation=1))
        await generation.next()
        generation.routed(0, "b", "cafe")  # as when b has another checkpoint
        generation.fail(EngineFailure("and this is the end"))
        with pytest.raises(EngineFailure):
            await collect(generation)

    run(tokenizer, scenario, "a", "b")
    (found,) = read(tmp_path)
    assert found.outputs == [RecordedOutput([5, 6, 7])]
    assert found.failure == "and this is the end"
    assert found.interruptions == [Interruption(0, 2, found.interruptions[0].why)]
    assert found.interruptions[0].why.startswith("a failed during this request")
    assert found.instance == "a,b"
    assert found.fingerprints == [ready().root_key.hex(), "cafe"]
