"""`penstock top` and `penstock explain --url`: what they make of a server's answers."""

import json
import os
import re
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.cli.top import SHOWN, Look, screen, watch
from penstock.core.clock import ManualClock
from penstock.core.errors import Unavailable
from penstock.core.wire.master import FleetTotals, InstanceOverview, Overview, PrefixTotals, StageOverview, StartTotals
from penstock.sched.cluster import Start
from penstock.service.overview import history_of, with_decisions
from penstock.service.recorder import FlightRecorder
from tests.helpers.recordings import an_afternoon
from tests.helpers.servers import answering


def recorder():
    made = FlightRecorder()
    an_afternoon(made)
    made.moved(12.0, Start(name="new", role="decode", reason="the queue is long"))
    return made


def wall(moment):
    return 1_790_000_000.0 + moment


def content(generated=1000, instances=None, stages=(), **frontend):
    rows = instances or [
        InstanceOverview(name="a[b]", role="any", state="ready", running=3, num_blocks=8, used_blocks=2, ttft_ms=12.34),
        InstanceOverview(name="p-0", role="prefill", state="ready", waiting=2, migrating=1, pending_tokens=5000),
        InstanceOverview(name="p-1", role="prefill", state="absent"),
    ]
    counts = {"frontends": 2, "waiting": 4, "offline_waiting": 5, "unplaceable": 1, "placed": 1234}
    rates = {"window": 10.0, "arrivals": 50, "completions": 40, "attained": 39}
    fleet = FleetTotals(1234.5, 3, [StartTotals("map", 2, 3.0), StartTotals("checkpoint", 1, 9.0)])
    seen = {"instances": rows, "fleet": fleet, "stages": list(stages), "prefixes": PrefixTotals(9000, 4500)}
    master = Overview(**counts, **rates, prompt_tokens=812.5, output_tokens=203.0, **seen)
    mine = {"sequences": 17, "queued_tokens": 0, "generated_tokens": generated, "troubles": {}}
    mine["attainment"] = {"online": {"requests": 1000, "kept": 982}, "offline": {"requests": 0, "kept": 0}}
    mine["prefixes"] = {"prompt_tokens": 8000, "found_tokens": {"device": 3200, "disk": 400, "peer": 0}}
    shown = msgspec.to_builtins(with_decisions(master, recorder(), wall))
    return {"at": "2026-11-25T03:31:12.000Z", "model": "m[1]", "frontend": mine | frontend, "master": shown}


def text(look, before=None):
    console = Console(file=StringIO(), width=140)
    console.print(screen(look, before))
    return console.file.getvalue()


def test_a_look():
    shown = text(Look("http://h", content(), 7.0))
    for words in (
        "m[1] at http://h, 2026-11-25T03:31:12.000Z",
        "4 online and 5 offline in its queue, 1 that no instance can take; 1,234 placed; 2 frontends",
        "5.0 requests/s of 812 tokens came, 4.0 of 203 ended, 97.5% within targets",
        "17 sequences; within targets: online 98% of the last 1,000\n",
        "prompts: 45% of 8,000 tokens were cached (device 40%, disk 5%); a cache without end would have had 50%\n",
        "any: 1 ready; 3 running, 0 waiting, KV 25% of 8 blocks",
        "prefill: 1 ready, 1 absent; 0 running, 2 waiting, KV - of 0 blocks",
        "free > busy",
        "start new to decode",
        "the queue is long",
        "busy > free",
        "slow: it [is]",
    ):
        assert words in shown
    assert "stays" not in shown, "of sequences only those that go on elsewhere"
    bounded = content()
    bounded["master"]["prefixes"]["complete"] = False
    assert "would have had at least 50%\n" in text(Look("http://h", bounded, 7.0))
    unknown = content(prefixes={"prompt_tokens": 0, "found_tokens": {}})
    unknown["master"]["prefixes"] = None  # the policy does not look at prefixes
    assert "prompts: - of 0 tokens were cached\n" in text(Look("http://h", unknown, 7.0))
    assert re.search(r"a\[b] +ready +3 +0 +0 +0 +25% +12.3 +- +-", shown)
    assert re.search(r"p-0 +ready +0 +2 +5,000 +0 +- +- +- +- +1 +0", shown), "what leaves and comes, where any does"
    assert shown.index("three-aaaaaaaa") < shown.index("one-0badc0de"), "the newest first"


def test_what_scaling_costs_and_says_of_each_stage():
    stages = [
        StageOverview("prefill", 2, 1, 1, "rho 1.30", "ceiling: 3 of 3 instances are there"),
        StageOverview("decode", 1, 0, 0, "u [low]", "steady"),
    ]
    shown = text(Look("u", content(stages=stages), 5.0))
    for words in (
        "scaling: 3 instances hold devices, 1,234 instance-seconds so far; started: 2 by map in 1.5 s, 1 by",
        "prefill: 2 serve, 1 start, +1 wished (rho 1.30); ceiling: 3 of 3 instances are there",
        "decode: 1 serve, as many as are wished (u [low]); steady",
    ):
        assert words in shown
    assert "scaling" not in text(Look("u", content(), 5.0)), "without a policy that scales"


def test_rates_are_between_two_looks_and_troubles_are_told():
    first = Look("u", content(1000), 5.0)
    assert "2,500 tokens/s" in text(Look("u", content(6000), 7.0), first)
    assert "tokens/s" not in text(Look("u", content(10), 7.0), first), "it has been restarted"
    assert "e: it hangs" in text(Look("u", content(troubles={"e": "it hangs"}), 7.0))


def test_of_many_instances_the_busiest_are_shown():
    many = [InstanceOverview(name=f"i-{i}", role="any", state="ready", running=i) for i in range(SHOWN + 5)]
    shown = text(Look("u", content(instances=many), 7.0))
    assert f"{SHOWN + 5} ready" in shown
    assert "5 more" in shown
    assert f"i-{SHOWN + 4} " in shown
    assert "i-4 " not in shown


def test_a_server_that_goes_away_is_waited_for():
    console = Console(file=StringIO(), force_terminal=True, width=140, height=60, highlight=False)
    answers = iter([content(1000), Unavailable("no server there"), content(3000)])
    clock, waits = ManualClock(), iter([1.0, 1.0, 1.0])

    def look():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return Look("u", answer, clock.now())

    with pytest.raises(StopIteration):
        watch(console, look, lambda: clock.advance(next(waits)))
    shown = console.file.getvalue()
    assert "no server there" in shown
    assert shown.index("no server there") < shown.index("1,000 tokens/s"), "2,000 in the two seconds between"


def test_once_json_and_mistakes(capsys, monkeypatch):
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    with answering({"/overview": content()}) as (url, _):
        assert main(["top", "--url", url, "--once"]) == 0
        assert "1,234 placed" in capsys.readouterr().out
        assert main(["top", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == content()
    with answering({"/overview": []}) as (url, _):
        assert main(["top", "--url", url, "--once"]) == 2
        assert "is no penstock server" in capsys.readouterr().err
    assert main(["top", "--url", url, "--once"]) == 1
    assert "no server at" in capsys.readouterr().err
    assert main(["top", "--url", "ftp://h"]) == 2
    assert "--url: ftp://h, allowed is" in capsys.readouterr().err


def test_a_running_server_explains(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PENSTOCK_API_KEY", "mine,other")
    monkeypatch.delenv("PENSTOCK_FLIGHT_RECORDER", raising=False)
    found = history_of(recorder(), 0, "chatcmpl-two", wall)
    assert found.decisions == 4
    told = {"request": "two", "policy": None, "sequences": json.loads(found.sequences)}
    with answering({"/explain/a%2Fb": told}) as (url, seen):
        assert main(["explain", "a/b", "--url", url]) == 0
        out = capsys.readouterr().out
        assert seen[0]["authorization"] == "Bearer mine"
        for words in ("two-0-12345678-1", "no targets", "100.0 ms of it in the master's queue", "+109.3"):
            assert words in out
        assert main(["explain", "a/b", "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sequences"][0]["demand"]["ttft_ms"] is None
        assert main(["explain", "other", "--url", url]) == 1
        assert "the server answered 404" in capsys.readouterr().err
    for words, says in (
        (["--url", url], "REQUEST: missing, allowed only with a recording"),
        (["r", "--url", url, "--policy", "x"], "--policy: x, allowed only with a recording"),
        (["r", "--url", url, "--file", os.devnull], "--file: given, allowed only without --url"),
    ):
        assert main(["explain", *words]) == 2
        assert says in capsys.readouterr().err


def test_what_instances_do_with_images():
    rows = [
        InstanceOverview(name="e-0", role="encode", state="ready", encodes=1234, encode_ms=0.0625, image_tokens=5678),
        InstanceOverview(name="p-0", role="prefill", state="ready"),
    ]
    shown = text(Look("http://h", content(instances=rows), 7.0))
    line = next(line for line in shown.splitlines() if "e-0" in line)
    assert line.split()[-3:] == ["1,234", "5,678", "0.062"]
    assert shown.count("to look at") == 1, "where there are images alone"
