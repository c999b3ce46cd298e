"""The tables and the page: what they say, that they are well-formed, and that they need no network."""

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from compspec.bench.charts import make_charts, side_colours, svg
from compspec.bench.records import origins
from compspec.bench.report import MAX_PROMPTS, html_report, token_spans
from compspec.bench.summary import metrics
from compspec.bench.table import notes, tables
from tests.unit.bench.records import request, run, step

# Pieces that would break out of a page, be lost in it, or be no text at all.
PIECES = ["<script>alert(1)</script>", "", "é", "a\n", '&"', "\x00\x1b"]
STEPS = [step(0.5), step(1.0, 3, 2, 2), step(1.5, 2, 3, 1)]
CATEGORIES = ["<b>qa</b> & a very long name of a category that has to be wrapped", "math $x_1$ reasoning", "all"]


def output(prompt_id: str, category: str) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "category": category,
        "num_prompt_tokens": 10,
        "finish_reason": "length",
        "token_ids": list(range(6)),
        "pieces": PIECES,
        "origins": "".join(origins(STEPS)),
        "steps": [[each.at_s, each.num_tokens, each.num_draft_tokens, each.num_accepted_tokens] for each in STEPS],
    }


def side(label: str, *, speculative: bool, categories: list[str], num_prompts: int) -> dict[str, Any]:
    requests = [request(str(index), STEPS, category=categories[0]) for index in range(num_prompts)]
    runs = [run(*requests), run(*requests)]
    return {
        "label": label,
        "engine": label if speculative else "e",
        "method": "ngram" if speculative else "none",
        "speculative": speculative,
        "reference": "plain",
        "metrics": {name: dataclasses.asdict(metrics(runs, runs, name)) for name in categories},
        "step_ms": {"propose": 0.5, "forward": 30.0, "sample": 2.0, "rest": 0.25} if speculative else None,
        "drafted_per_position": [8, 4, 0] if speculative else [],
        "accepted_per_position": [6, 1, 0] if speculative else [],
        "num_eager_steps": 0,
        "same_in_every_round": True,
        "num_identical": num_prompts,
        "differences": [],
        "outputs": [output(str(index), categories[0]) for index in range(num_prompts)],
    }


def report(
    labels: tuple[str, ...] = ("x", "y"), *, num_prompts: int = 2, categories: Any = CATEGORIES
) -> dict[str, Any]:
    names = list(categories)
    drafting = [side(label, speculative=True, categories=names, num_prompts=num_prompts) for label in labels]
    return {
        "schema_version": 1,
        "command": ["compspec", "bench", "-c", "a b.yaml"],
        "date": "2030-01-01T00:00:00+00:00",
        "machine": {"cpu": "a <fast> CPU", "gpu": None},
        "versions": {"compspec": "0"},
        "settings": {"rounds": 2, "warm_up": True, "concurrent": 1, "params": {}},
        "recompilations": 0,
        "peak_memory": {"bytes": 2**30, "of": "resident memory of the whole process"},
        "categories": names,
        "engines": [
            {"label": label, "config": {"model": {"source": "<m>"}}, "start_up_s": 1.0, "memory_bytes": 2**29}
            for label in ("e", *labels)
        ],
        "sides": [side("plain", speculative=False, categories=names, num_prompts=num_prompts), *drafting],
    }


def with_difference() -> dict[str, Any]:
    found = report()
    found["sides"][1]["differences"] = [
        {"prompt_id": "1", "round": 0, "position": 2, "token_id": 5, "reference_token_id": 6, "margin": 0.0125}
    ]
    found["sides"][1]["num_identical"] = 1
    return found


class Page(HTMLParser):
    """The elements of a page: every one is closed, none is a script, and nothing is fetched."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#")
        for value in attributes.values():
            assert "url(" not in (value or "").replace("url(#", "")
        if "id" in attributes:
            self.ids.append(attributes["id"] or "")
        if tag not in self.VOID:
            self.open.append((tag, attributes))
        if tag == "i":
            self.tokens.append((attributes["class"] or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "style":
            assert "@import" not in data
            assert "url(" not in data
            return
        self.text += data
        inside = [tag for tag, _ in self.open]
        if "i" in inside and "s" not in inside:
            name, text = self.tokens[-1]
            self.tokens[-1] = (name, text + data)


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere() -> None:
    page = Page(html_report(report()))
    assert not page.tags & {"script", "link", "img", "iframe", "object", "b"}
    assert len(page.ids) == len(set(page.ids)), "two charts share an id"
    for words in ("plain", "compspec bench -c 'a b.yaml'", "a <fast> CPU", CATEGORIES[0], "2 of 2", '"source": "<m>"'):
        assert words in page.text


def test_every_token_has_its_text_and_the_class_of_its_origin() -> None:
    page = Page(token_spans(output("a", "")))
    assert [name for name, _ in page.tokens] == list("faabac")
    # A null and an escape are shown as their pictures, a line break stays one, a token without text has a mark.
    assert [text for _, text in page.tokens] == [PIECES[0], "", "é", "a\n", '&"', "\u2400\u241b"]
    assert "◌" in page.text


def test_each_step_says_how_many_drafts_were_kept() -> None:
    titles = re.findall(r'title="([^"]*)"', token_spans(output("a", "")))
    assert titles == [
        "first token, at 0.50 s",
        "step 1: 2 of 2 drafts kept, at 1.00 s",
        "step 2: 1 of 3 drafts kept, at 1.50 s",
    ]


def test_origins_can_be_told_without_colour() -> None:
    page = html_report(report())
    lines = {letter: re.search(rf"^i\.{letter} {{.*underline (\w+)", page, re.M) for letter in "acbf"}
    assert len({found and found[1] for found in lines.values()}) == 4


def test_a_different_output_stands_beside_the_plain_one_with_its_place_marked() -> None:
    page = Page(html_report(with_difference()))
    assert [name for name, _ in page.tokens if name.endswith(" x")] == ["a x"]
    assert "differs from plain at token 2" in page.text
    same = Page(html_report(report()))
    assert len(page.tokens) == len(same.tokens) + len(PIECES), "the plain text is shown where outputs differ"
    assert "1 of 2" in page.text


def test_where_texts_are_left_out_the_page_says_so() -> None:
    assert "The first" not in Page(html_report(report(num_prompts=MAX_PROMPTS))).text
    page = Page(html_report(report(num_prompts=MAX_PROMPTS + 1)))
    assert f"The first {MAX_PROMPTS} of {MAX_PROMPTS + 1} prompts" in page.text


def test_a_report_read_back_from_its_json_gives_the_same_page() -> None:
    assert html_report(json.loads(json.dumps(report()))) == html_report(report())


def test_charts_take_their_ink_from_the_page_and_have_their_text_as_text() -> None:
    drawn = {name: svg(figure, name) for name, figure in make_charts(report()).items()}
    assert set(drawn) == {"speed", "acceptance", "steps"}
    for text in drawn.values():
        assert "currentColor" in text
        assert "<style" not in text
        assert len(text) < 60_000
    assert ">math $x_1$" in drawn["speed"], "not taken for a formula"
    assert "&lt;b&gt;qa&lt;/b&gt;" in drawn["speed"]
    assert "forward" in drawn["steps"]


def test_a_chart_without_anything_to_show_is_left_out() -> None:
    plain = report(())
    assert set(make_charts(plain)) == {"speed"}
    Page(html_report(plain))


@pytest.mark.parametrize("count", [1, 8, 20])
def test_sides_look_different_however_many_there_are(count: int) -> None:
    labels = tuple(f"side {index}" for index in range(count))
    looks = side_colours(report(labels))
    assert len(set(looks.values())) == count + 1
    assert make_charts(report(labels))["speed"].get_figheight() < 30


def printed(found: dict[str, Any], width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables(found):
        console.print(table)
    return console.export_text()


def test_the_tables_have_a_line_for_each_side_and_the_numbers_of_all() -> None:
    text = printed(report())
    speed = next(line for line in text.splitlines() if line.strip().startswith("x "))
    # 5 tokens in a second, two steps for them, half a second to the first token
    assert speed.split()[1:] == ["5.0", "5.0..5.0", "1.00", "2.50", "500", "500,", "500", "2", "of", "2"]
    assert "30.00" in text
    assert "by category" in text
    assert "by category" not in printed(report(categories=["all"]))


def test_labels_are_no_markup() -> None:
    assert "source=[bold]x" in printed(report(("source=[bold]x",)))


def test_notes_tell_of_differences_and_of_what_spoils_the_times() -> None:
    (peak,) = notes(report())
    assert "1.00 GiB" in peak
    found = with_difference()
    found["recompilations"] = 3
    found["sides"][2]["same_in_every_round"] = False
    text = "\n".join(notes(found))
    for words in ("prompt 1 differs from plain at token 2", "0.013 apart", "y: outputs differ from round", "3 compil"):
        assert words in text
