import math

import pytest

from penstock.bench.dataset import Dataset
from penstock.core.errors import ConfigError
from penstock.workload.requests import offered_rate

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02d}.0000000,{100 + second},{second + 1}\n" for second in range(0, 40, 2)
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    return str(path)


def test_random_lengths():
    requests = Dataset(count=200, input_len=100, output_len=10, range_ratio=0.5).build()
    assert len(requests) == 200
    assert {50 <= r.prompt_tokens <= 150 and 5 <= r.output_tokens <= 15 for r in requests} == {True}
    assert all(r.at == 0 and not r.prefix for r in requests)


def test_prefix():
    requests = Dataset(name="prefix", count=100, input_len=20, prefix_len=64, num_prefixes=3).build()
    assert {r.prefix for r in requests} == {(0,), (1,), (2,)}
    assert {(r.prompt_tokens, r.prefix_tokens) for r in requests} == {(84, 64)}


def test_a_rate():
    dataset = Dataset(count=2000, request_rate=5.0)
    assert dataset.has_schedule
    assert offered_rate(dataset.build()) == pytest.approx(5.0, rel=0.1)
    assert not Dataset(request_rate=math.inf).has_schedule
    constant = Dataset(count=3, request_rate=5.0, burstiness=math.inf).build()
    assert [r.at for r in constant] == pytest.approx([0.0, 0.2, 0.4])


def test_trace(trace):
    whole = Dataset(name="trace", path=trace)
    assert whole.has_schedule
    assert [(r.at, r.prompt_tokens) for r in whole.build()[:2]] == [(0.0, 100), (2.0, 102)]
    part = Dataset(name="trace", path=trace, trace_start=10, trace_duration=10, trace_scale=2.0, count=3).build()
    assert [(r.at, r.prompt_tokens) for r in part] == [(0.0, 110), (1.0, 112), (2.0, 114)]
    spread = Dataset(name="trace", path=trace, trace_spread=2.0).build()
    assert all(0 < new.at - old.at < 2 for old, new in zip(whole.build(), spread, strict=True))


def test_a_rate_replaces_a_traces_arrivals(trace):
    requests = Dataset(name="trace", path=trace, request_rate=100.0, burstiness=math.inf).build()
    assert [r.at for r in requests[:3]] == pytest.approx([0.0, 0.01, 0.02])
    at_once = Dataset(name="trace", path=trace, request_rate=math.inf)
    assert not at_once.has_schedule
    assert {r.at for r in at_once.build()} == {0.0}


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,completion_tokens\n5,50\n6,60\n")
    requests = Dataset(name="lengths", path=str(path), count=50).build()
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(5, 50), (6, 60)}


def test_images_of_which_some_came_before():
    requests = Dataset(count=100, input_len=30, images=2, image_repeats=0.5, request_rate=1.0).build()
    assert {(r.prompt_tokens, len(r.images)) for r in requests} == {(30, 2)}
    assert len({image.number for r in requests for image in r.images}) == pytest.approx(100, abs=25)
    text = Dataset(count=100, input_len=30, request_rate=1.0).build()
    assert [r.at for r in requests] == [r.at for r in text]


def test_the_seed_decides():
    one, again, other = (Dataset(count=50, range_ratio=0.9, request_rate=1.0, seed=seed).build() for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sharegpt"}, "--dataset-name: sharegpt, allowed is random, prefix, trace, lengths"),
        ({"name": "trace"}, "--dataset-path: not given, a file is needed with --dataset-name trace"),
        ({"name": "random", "path": "x"}, "--dataset-path: x, which is not used with --dataset-name random"),
        (
            {"name": "trace", "path": "x", "request_rate": 2.0, "trace_scale": 3.0},
            "--trace-scale: 3 with --request-rate 2",
        ),
        ({"image_repeats": 0.5}, "--image-repeats: 0.5, allowed with --images alone"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Dataset(**settings)


def test_an_empty_part_of_a_trace_is_named(trace):
    with pytest.raises(ConfigError, match=r"--trace-start: no request of .* lies in \[100, inf\)"):
        Dataset(name="trace", path=trace, trace_start=100).build()
