"""Images of requests: read, drawn, repeated, and left out where they do not fit."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.workload.lengths import Fixed, Independent, LogNormal
from penstock.workload.requests import WorkImage, WorkRequest, limit_context, repeat_images
from penstock.workload.synthetic import synthesise
from penstock.workload.traces import read_trace

HEADER = "arrival_s,client,text_tokens,image_count,image_tokens,output_tokens\n"


def seen(count: int = 400, mean: float = 1.5) -> list[WorkRequest]:
    lengths = Independent(Fixed(50), Fixed(20))
    rng = np.random.default_rng(3)
    return synthesise(count, lengths, rng, rate=5.0, images=mean, image_tokens=LogNormal(600, 0.5))


def test_a_traces_images_share_its_tokens_and_are_all_different(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(HEADER + "0,1,40,3,1000,9\n1,1,40,0,0,9\n2,1,0,2,7,9\n")
    first, text, last = read_trace(file)
    assert [image.tokens for image in first.images] == [334, 333, 333]
    assert (first.prompt_tokens, text.images, text.prompt_tokens) == (1040, (), 40)
    assert ([image.tokens for image in last.images], last.prompt_tokens) == ([4, 3], 8), "no text before them"
    assert len({image.number for request in (first, last) for image in request.images}) == 5


@pytest.mark.parametrize("row", ["0,1,40,3,2,9", "0,1,40,0,10,9"])
def test_a_count_that_cannot_be_is_named(tmp_path, row):
    file = tmp_path / "t.csv"
    file.write_text(HEADER + row + "\n")
    with pytest.raises(ConfigError, match="line 2, column image_count"):
        read_trace(file)


def test_as_many_are_drawn_as_asked_for_and_text_does_not_change_by_it():
    requests = seen()
    count = sum(len(request.images) for request in requests)
    assert count == pytest.approx(1.5 * 400, rel=0.15)
    assert sum(request.image_tokens for request in requests) / count == pytest.approx(600, rel=0.1)
    assert all(request.prompt_tokens - request.image_tokens == 50 for request in requests)
    assert [r.at for r in requests] == [r.at for r in seen(mean=4.0)]


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_repeated_images_are_earlier_ones_with_their_tokens(share):
    requests = seen()
    known: dict[int, int] = {}
    again = total = 0
    for old, new in zip(requests, repeat_images(requests, share, np.random.default_rng(1)), strict=True):
        assert len(new.images) == len(old.images)
        assert new.prompt_tokens - new.image_tokens == 50
        for image in new.images:
            assert known.setdefault(image.number, image.tokens) == image.tokens
            total += 1
    again = total - len(known)
    assert again / total == pytest.approx(share, abs=0.05)


def test_what_fits_no_context_is_left_out_whole():
    images = (WorkImage(0, 400), WorkImage(1, 400), WorkImage(2, 150))
    request = WorkRequest(number=0, at=0.0, prompt_tokens=1000, output_tokens=50, images=images)
    (fitting,), cut = limit_context([request], 860)
    assert (cut, fitting.images) == (1, images[:2])
    assert fitting.prompt_tokens + fitting.output_tokens == 860
    (text,), _ = limit_context([request], 300)
    assert text.images == ()
