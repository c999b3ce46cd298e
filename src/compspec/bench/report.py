"""A report as one HTML page that needs nothing but itself: tables, charts, and the texts with each token's origin."""

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from compspec.bench.charts import make_charts, svg
from compspec.bench.records import Origin
from compspec.bench.summary import ALL
from compspec.bench.table import extent, identical, notes, number, title

Report = Mapping[str, Any]

MAX_PROMPTS = 24
"""Texts of so many prompts are shown; the JSON has all."""

_ORIGINS = {
    Origin.ACCEPTED: "accepted draft",
    Origin.CORRECTION: "correction: the model's own token in place of a rejected draft",
    Origin.BONUS: "bonus: the model's own token after drafts that were all kept",
    Origin.PLAIN: "plain: a step without drafts",
    Origin.PREFILL: "first token, from the prompt",
}

_CAPTIONS = {
    "speed": "Decode speed: median of the rounds; the thin lines reach from the slowest round to the fastest.",
    "acceptance": "Drafts kept, of those that were verified at each position of the window.",
    "steps": "Where a decode step's time goes: propose is scheduling and drafting, sample is sampling, verification "
    "and bookkeeping, rest is what passes between steps.",
}

_MEANINGS = {
    "tokens/s": "Output tokens after each output's first step, by the time after it, both summed over the requests.",
    "speed-up": "Decode tokens/s by those of the side without drafts of the same round; the median of the rounds.",
    "tok/step": "Acceptance length: tokens per decode step and request, the model's own one included.",
    "TTFT": "Time from submission to the first token, the median of the requests.",
    "gap": "Time between two steps that gave a request tokens; tokens that come together count as one arrival.",
    "prefill": "Prompt tokens that were computed, by the time of the prompts' steps alone.",
    "throughput": "All output tokens by the whole time, prompts included.",
    "identical": "Outputs that were, token for token and in every round, those of the side without drafts.",
    "memory": "What the process held more after the engine had started.",
}


def html_report(report: Report) -> str:
    """Makes the page.

    Args:
        report: as `bench.run_bench` returns it, or as its JSON was read.
    """
    sections = [
        _head(report),
        _section("Overall", _overall(report)),
        _section("By category", _by_category(report)) if len(report["categories"]) > 2 else "",
        _section("Charts", _charts(report)),
        _section("Texts", _texts(report)),
        _section("How it was measured", _measured(report)),
    ]
    style = files("compspec.bench").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>compspec bench</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, sections))
        + "\n</body>\n</html>\n"
    )


def token_spans(output: Mapping[str, Any], marked: int | None = None) -> str:
    """The tokens of an output, each with the class of its origin, those of a step together.

    Args:
        marked: the place of a token to point out.
    """
    parts, start = [], 0
    for index, (at_s, count, drafts, kept) in enumerate(output["steps"]):
        what = f"{kept} of {drafts} drafts kept" if drafts else "no drafts"
        about = "first token" if index == 0 else f"step {index}: {what}"
        places = range(start, start + count)
        tokens = "".join(_token(output["origins"][at], output["pieces"][at], at == marked) for at in places)
        parts.append(f'<span title="{about}, at {at_s:.2f} s">{tokens}</span>')
        start += count
    return "".join(parts)


def _token(origin: str, text: str, is_marked: bool) -> str:
    return f'<i class="{origin}{" x" if is_marked else ""}">{_piece(text)}</i>'


def _piece(text: str) -> str:
    """The text of a token; a mark where it has none, or where one could not see it."""
    if not text:
        return "<s>◌</s>"
    pictures = {ord(char): chr(0x2400 + ord(char)) for char in map(chr, range(32)) if char not in "\n\t"}
    return escape(text.translate(pictures)).replace("\n", "<s>↵</s>\n")


def _section(name: str, content: str) -> str:
    return f"<section>\n<h2>{name}</h2>\n{content}\n</section>"


def _head(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f'<header>\n<h1>compspec bench</h1>\n<p>{escape(title(report))}</p>\n<p class="faint">'
        f"{escape(report['date'])} · {escape(versions)}</p>\n</header>"
    )


def _overall(report: Report) -> str:
    engines = {engine["label"]: engine for engine in report["engines"]}
    heads = ["", "decode<br>tokens/s", "speed-up", "tok/step", "TTFT<br>ms", "gap ms<br>p50", "gap ms<br>p99"]
    heads += ["prefill<br>tok/s", "throughput<br>tok/s", "identical", "start-up<br>s", "memory<br>GiB"]
    rows = []
    for side in report["sides"]:
        all_, engine = side["metrics"][ALL], engines[side["engine"]]
        cells = [
            _with_extent(all_["decode_tokens_per_s"]),
            number(all_["speed_up"], 2),
            number(all_["acceptance_length"], 2),
            number(all_["time_to_first_token_s"], 0, 1e3),
            number(all_["inter_token_p50_s"], 1, 1e3),
            number(all_["inter_token_p99_s"], 1, 1e3),
            number(all_["prefill_tokens_per_s"], 0),
            number(all_["throughput_tokens_per_s"]),
            identical(side),
            f"{engine['start_up_s']:.1f}",
            f"{engine['memory_bytes'] / 2**30:.2f}",
        ]
        rows.append([escape(side["label"]), *cells])
    best = _best([side["metrics"][ALL]["decode_tokens_per_s"] for side in report["sides"]])
    said = "".join(f"<p>{escape(note)}</p>\n" for note in notes(report))
    return _table(heads, rows, {(best, 1)}) + "\n" + said


def _by_category(report: Report) -> str:
    categories, sides = report["categories"], report["sides"]
    rows = []
    for side in sides:
        found = [side["metrics"][category] for category in categories]
        cells = [
            f"{number(each['decode_tokens_per_s'])}<small>{number(each['speed_up'], 2)}&times; · "
            f"{number(each['acceptance_length'], 2)}</small>"
            for each in found
        ]
        rows.append([escape(side["label"]), *cells])
    bold = {
        (_best([side["metrics"][category]["decode_tokens_per_s"] for side in sides]), column)
        for column, category in enumerate(categories, 1)
    }
    heads = ["", *(escape(category) for category in categories)]
    caption = '<p class="faint">decode tokens/s; below, the speed-up and the tokens per step</p>'
    return caption + "\n" + _table(heads, rows, bold)


def _charts(report: Report) -> str:
    figures = [
        f"<figure>\n{svg(figure, name)}\n<figcaption>{_CAPTIONS[name]}</figcaption>\n</figure>"
        for name, figure in make_charts(report).items()
    ]
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def _texts(report: Report) -> str:
    """Every prompt's output of each side that drafts, and the one without drafts where they differ."""
    legend = "".join(f'<span><i class="{origin}">token</i> {words}</span>' for origin, words in _ORIGINS.items())
    sides = report["sides"]
    different = {(side["label"], each["prompt_id"]): each["position"] for side in sides for each in side["differences"]}
    drafting = [side for side in sides if side["speculative"]] or sides
    count = len(sides[0]["outputs"])
    blocks = []
    for index, first in enumerate(sides[0]["outputs"][:MAX_PROMPTS]):
        name = first["prompt_id"]
        references = {side["reference"] for side in drafting if (side["label"], name) in different}
        shown = [side for side in sides if side in drafting or side["label"] in references]
        texts = "\n".join(_text(side, index, different.get((side["label"], name))) for side in shown)
        about = " · ".join(filter(None, (f"prompt {name}", first["category"], "differs" if references else "")))
        is_open = " open" if index == 0 else ""
        blocks.append(f"<details{is_open}>\n<summary>{escape(about)}</summary>\n{texts}\n</details>")
    left_out = f"<p>The first {MAX_PROMPTS} of {count} prompts; the JSON has all.</p>" if count > MAX_PROMPTS else ""
    explained = '<p class="faint">Of the first round. A token without text, or a part of a character, is ◌.</p>'
    return f'<div class="legend">{legend}</div>\n{explained}\n{left_out}\n' + "\n".join(blocks)


def _text(side: Mapping[str, Any], index: int, position: int | None) -> str:
    output = side["outputs"][index]
    tokens, steps = len(output["token_ids"]), len(output["steps"])
    kept = output["origins"].count(Origin.ACCEPTED)
    differs = "" if position is None else f", differs from {side['reference']} at token {position}"
    about = f"{tokens} tokens in {steps} steps, {kept} of them drafts{differs}"
    return (
        f"<h3>{escape(side['label'])} <small>{escape(about)}</small></h3>\n"
        f'<div class="text">{token_spans(output, position)}</div>'
    )


def _measured(report: Report) -> str:
    settings, machine = report["settings"], report["machine"]
    together = settings["concurrent"]
    facts = {
        "command": shlex.join(report["command"]),
        "requests": "all at once" if together is None else f"{together} at a time",
        "rounds": f"{settings['rounds']}, all sides in turns, every other round in the opposite order"
        + ("; one more before them that does not count" if settings["warm_up"] else "; no warm-up"),
        "sampling": json.dumps(settings["params"]) + " over the configurations'",
        "machine": ", ".join(f"{name}: {value}" for name, value in machine.items()),
    }
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in {**facts, **_MEANINGS}.items()
    )
    configs = "\n".join(
        f"<details>\n<summary>configuration of {escape(engine['label'])}</summary>\n"
        f"<pre>{escape(json.dumps(engine['config'], indent=1))}</pre>\n</details>"
        for engine in report["engines"]
    )
    return f"<dl>\n{rows}</dl>\n{configs}"


def _with_extent(spread: Mapping[str, float] | None) -> str:
    return number(spread) if spread is None else f"{number(spread)}<small>{extent(spread)}</small>"


def _best(spreads: Sequence[Mapping[str, float] | None]) -> int:
    """The index of the largest median."""
    medians = [spread["median"] if spread is not None else 0.0 for spread in spreads]
    return medians.index(max(medians))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], bold: set[tuple[int, int]]) -> str:
    """Cells are HTML."""
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for index, row in enumerate(rows):
        cells = (
            f"<td{' class=best' if (index, column) in bold else ''}>{cell}</td>" for column, cell in enumerate(row)
        )
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"
