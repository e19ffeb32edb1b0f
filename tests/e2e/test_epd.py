"""The EPD profiler in a real deployment: what comes changes, and with it who does what."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from tests.e2e.test_images import ask, drawn
from tests.helpers.deployments import deployed
from tests.helpers.waiting import eventually
from tools.make_checkpoint import write

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow
# a known machine, whose tower and steps take what the model of stages has them take
ENGINE = {"device": "modelled:h200", "geometry": "qwen2.5-vl-7b", "max-model-len": 4096, "max-num-seqs": 32}
ENGINE |= {"kv-blocks": 1024}
ROLES = "encode", "prefill", "decode"
FEWEST = 100  # requests that it looks at
SLO = {"ttft_ms": 3000, "tpot_ms": 200}


def send(up, number: int, images: int) -> None:
    """So many requests with images, of which some come again."""
    sides = count(number)

    def one(i: int) -> None:
        shown = [drawn("red", 280, 280 + (next(sides) % 500)) for _ in range(images)]
        answer = ask(up, *shown, max_tokens=8, ignore_eos=True, slo=SLO, cache_salt=f"{number}.{i}")
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(number)))


def test_images_begin_to_come_and_instances_change_what_they_do(tmp_path):
    write("qwen2.5-vl-tiny", tmp_path)
    content = {"model": str(tmp_path), "served-model-name": "tiny", "policy": "epd", "engine": ENGINE}
    with deployed(content | {"instances": [{"role": role} for role in ROLES]}) as up:
        send(up, FEWEST + 20, images=0)
        assert not any("changes to role" in line or " placed as " in line for line in up.lines), "text is no reason"

        send(up, FEWEST, images=2)  # nearly half of what it sees now
        changed = eventually(lambda: [line for line in up.lines if "changes to role" in line], 60, up.log)
        assert all(" epd: " in line and " of the latest traffic, E+P+D 1:1:1 " in line for line in changed), changed
        eventually(lambda: any("images are placed as EPD, " in line for line in up.lines), 20, up.log)
        send(up, 20, images=1)
        served = [line for line in up.lines if "200 length" in line]
        assert any("instance=encode-0 " in line for line in served), "who looked at images alone does all now"
        assert not any("Traceback" in line for line in up.lines)
