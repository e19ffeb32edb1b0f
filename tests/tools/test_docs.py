"""What the documentation names exists: pages, figures, files, policies and commands."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from penstock.cli.main import make_parser
from penstock.sim.baselines import POLICIES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
NAMED = re.compile(r"(?<![\w./-])((?:penstock|tools|scenarios|recipes|tests|examples)/[\w./-]*\w)")


def anchor(heading):
    """As GitHub makes it."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page, name):
    """Indented or fenced lines that begin with a command, as words; continued lines are one."""
    text = page.read_text().replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines() if line.startswith("    ") or not line.startswith("|"))
    return [shlex.split(line, comments=True) for line in lines if re.match(rf"{name} [\w$]", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, fragment in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if fragment and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{path}{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    if page.name == "CHANGELOG.md":
        return  # it also names what is gone
    named = set(NAMED.findall(page.read_text()))
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_every_figure_is_shown():
    shown = {(page.parent / path).resolve() for page in PAGES for path, _ in LINK.findall(page.read_text())}
    assert set(ROOT.glob("docs/**/*.svg")) <= shown


def test_every_policy_is_explained():
    assert set(re.findall(r"`(\w+)`", (ROOT / "docs" / "scheduling.md").read_text())) >= set(POLICIES)


def test_comparisons_can_be_made_again():
    """Their scenario, policies and layouts exist."""
    compared = commands(ROOT / "docs" / "scheduling.md", "penstock sim compare")
    assert len(compared) > 10
    for words in compared:
        scenario = words[3]
        if scenario == "SCENARIO":
            continue
        layouts = yaml.safe_load((ROOT / scenario).read_text()).get("layouts") or {}
        for variant in words[words.index("--policies") + 1].split(","):
            policy, _, layout = variant.partition("@")
            assert policy in POLICIES, variant
            assert not layout or layout in layouts, variant


def test_the_flags_of_benchmarks_exist():
    parser, _ = make_parser()
    found = [words for page in PAGES for words in commands(page, "penstock bench")]
    assert len(found) > 5
    for words in found:
        parser.parse_args([word for word in words[1:] if word != "&"])
