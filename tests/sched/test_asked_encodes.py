"""An engine looks at images for others, beside what runs on it."""

from dataclasses import replace

from penstock.core.request import MediaSpan
from penstock.sched.local.encodes import Encodes
from tests.helpers.engines import make_request


def image(name, tokens=10):
    return MediaSpan(start=0, length=tokens, digest=name.encode())


def chosen(encodes, budget=100, before=None):
    return [each.span.digest.decode() for each in encodes.choose(budget, before, lambda s: True)]


def test_they_are_looked_at_in_order_as_far_as_a_step_goes():
    encodes = Encodes(1000)
    for name in "abc":
        assert encodes.ask("r", image(name, 60), b"pixels") == ""
    assert [chosen(encodes) for _ in range(4)] == [["a"], ["b"], ["c"], []]
    encodes.check()


def test_one_that_is_kept_on_the_device_is_only_given():
    encodes = Encodes(100)
    encodes.ask("r", image("a", 60), b"pixels")
    (first,) = encodes.choose(100, None, lambda s: True)
    assert first.wanted
    encodes.ask("r", image("a", 60), b"pixels")
    assert chosen(encodes, budget=0) == ["a"]
    assert encodes.looked == 1
    encodes.ask("r", image("b", 60), b"pixels")
    assert chosen(encodes) == ["b"]
    assert encodes.forgotten == [b"a"]


def test_what_does_not_fit_is_told():
    assert Encodes(5).ask("r", image("a"), b"") == "it has 10 tokens, and 5 fit media-cache-memory"


def test_prompts_and_images_of_others_take_turns():
    encodes = Encodes(1000)
    for name in "abc":
        encodes.ask("r", image(name), b"pixels")
    assert chosen(encodes, budget=0, before=(0.0,)) == ["a"]
    assert chosen(encodes, budget=0, before=(0.0,)) == [], "this step has prompts"
    assert chosen(encodes, budget=0, before=(0.0,)) == ["b"]
    assert chosen(encodes, budget=0) == ["c"]


def test_what_others_have_seen_needs_no_look():
    class Waiting:
        id, blocks, turn, settled, answered, images = "r", [], (0.0,), 0, None, None
        request = replace(
            make_request("r", [1] * 20),
            media=(replace(image("a"), embedded=True),),
            pixels=(b"what others have seen",),
        )
        tokens = request.prompt

    encodes = Encodes(1000)
    encodes.gives = True
    encodes.join(Waiting())
    (encode,) = encodes.choose(0, None, lambda s: True)
    assert (encode.made, encode.pixels, encode.wanted) == (b"what others have seen", b"", False)


def test_beside_steps_one_is_under_way_and_one_follows():
    encodes = Encodes(1000, beside=True)
    for name in "abc":
        encodes.ask("r", image(name, 60), b"pixels")

    def next_ones(budget):
        return [each.span.digest for each in encodes.choose(budget, None, lambda s: True, beside=True)]

    assert [next_ones(0) for _ in range(3)] == [[b"a"], [b"b"], []]
    assert not encodes.ready(b"a")
    encodes.ask("r", image("a", 60), b"pixels")
    encodes.made([b"a"])
    assert encodes.ready(b"a")
    assert next_ones(0) == [b"c"]
    assert next_ones(200) == [b"a"], "it is there, and only given"
    encodes.check()
    encodes.abandon()
    encodes.check()
    assert (encodes.under_way, encodes.used, encodes.forgotten) == (False, 60, [b"b", b"c"])
