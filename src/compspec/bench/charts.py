"""The charts of a report, as SVG that takes its ink from the page around it, and so suits light and dark pages."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compspec.bench.summary import ALL

Report = Mapping[str, Any]

# Told apart with every kind of colour vision; beyond them hatches help. The first is for sides without drafts.
COLOURS = ("#8a8f98", "#2a7ab9", "#e08a1e", "#2e9e6b", "#c2528b", "#7a5cc0", "#b5a11c", "#3fa7c9", "#c4473a")
HATCHES = ("", "///", "\\\\\\", "xxx")
_MARKERS = "osD^vPX*<>"
_PARTS = {"propose": "#e08a1e", "forward": "#2a7ab9", "sample": "#2e9e6b", "rest": "#8a8f98"}
_PART_HATCHES = {"propose": "\\\\\\", "sample": "///"}

# Stand-ins that are replaced in the SVG by what the page says.
_INK, _LINE = "#0f0e0d", "#d0cfce"
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor"), _INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _LINE),
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}
_WIDTH = 7.6  # inches


def make_charts(report: Report) -> dict[str, Figure]:
    """Every chart that there is something for, by name: speed, acceptance, steps."""
    with matplotlib.rc_context(_STYLE):
        charts = {"speed": _speed(report), "acceptance": _acceptance(report), "steps": _steps(report)}
    return {name: figure for name, figure in charts.items() if figure is not None}


def svg(figure: Figure, name: str) -> str:
    """A chart as an element to stand within a page.

    Args:
        name: begins the ids within, which must differ from those of other charts of the page.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)  # it would style the whole page
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    return text.replace(_INK, "currentColor").replace(_LINE, "var(--line)").strip()


def side_colours(report: Report) -> dict[str, tuple[str, str]]:
    """The colour and the hatch of each side: grey for those without drafts."""
    looks, num_plain, num_drafted = {}, 0, 0
    for side in report["sides"]:
        if side["speculative"]:
            turn, index = divmod(num_drafted, len(COLOURS) - 1)
            looks[side["label"]] = (COLOURS[1 + index], HATCHES[turn % len(HATCHES)])
            num_drafted += 1
        else:
            looks[side["label"]] = (COLOURS[0], HATCHES[num_plain % len(HATCHES)])
            num_plain += 1
    return looks


def _speed(report: Report) -> Figure | None:
    """A bar for each side in each category, with the extent over the rounds."""
    sides, categories, looks = report["sides"], report["categories"], side_colours(report)
    if len(categories) == 2:  # a single one and all are the same
        categories = [ALL]
    thickness = min(0.26, 0.8 / len(sides))
    rows = len(categories) * max(0.36, 0.14 * len(sides) + 0.14)
    figure, axes = _figure(rows + 0.5 + _legend_height(sides))
    highest = 0.0
    for place, side in enumerate(sides):
        spreads = [side["metrics"][category]["decode_tokens_per_s"] for category in categories]
        found = [(index, spread) for index, spread in enumerate(spreads) if spread is not None]
        if not found:
            continue
        offset = (place - (len(sides) - 1) / 2) * thickness
        medians = [spread["median"] for _, spread in found]
        extents = [
            [spread["median"] - spread["min"] for _, spread in found],
            [spread["max"] - spread["median"] for _, spread in found],
        ]
        colour, hatch = looks[side["label"]]
        axes.barh(
            [index + offset for index, _ in found],
            medians,
            thickness * 0.92,
            xerr=extents,
            error_kw={"ecolor": _INK, "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8},
            color=colour,
            hatch=hatch,
            edgecolor="white" if hatch else colour,
            linewidth=0,
            label=_wrapped(side["label"], 48),
        )
        for index, spread in found:
            axes.annotate(
                f"{spread['median']:.3g}",
                (spread["max"], index + offset),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
            highest = max(highest, spread["max"])
    if not highest:
        return None
    axes.set_yticks(range(len(categories)), [_wrapped(category, 18) for category in categories])
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlim(0, highest * 1.08)
    axes.set_xlabel("decode tokens/s")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.spines["left"].set_visible(False)
    _legend(figure, axes)
    return figure


def _acceptance(report: Report) -> Figure | None:
    """A line for each side that drafted: of the drafts verified at a position, the share that was kept."""
    looks = side_colours(report)
    drafting = [side for side in report["sides"] if any(side["drafted_per_position"])]
    if not drafting:
        return None
    figure, axes = _figure(2.4 + _legend_height(drafting))
    longest = 0
    for place, side in enumerate(drafting):
        pairs = zip(side["accepted_per_position"], side["drafted_per_position"], strict=True)
        shares = [accepted / drafted for accepted, drafted in pairs if drafted]
        longest = max(longest, len(shares))
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            linewidth=1.5,
            color=looks[side["label"]][0],
            label=_wrapped(side["label"], 48),
        )
    axes.set_xticks(_ticks(longest))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("position of the draft in the window")
    axes.set_ylabel("kept, of those verified")
    axes.grid(linewidth=0.6)
    _legend(figure, axes)
    return figure


def _steps(report: Report) -> Figure | None:
    """Where the milliseconds of a decode step go, one bar for each side."""
    sides = [side for side in report["sides"] if side["step_ms"] is not None]
    if not sides:
        return None
    names = [_wrapped(side["label"], 30) for side in sides]
    lines = max(name.count("\n") + 1 for name in names)
    figure, axes = _figure((0.16 * lines + 0.12) * len(sides) + 0.9)
    starts = [0.0] * len(sides)
    for part, colour in _PARTS.items():
        widths = [side["step_ms"][part] for side in sides]
        look: dict[str, Any] = {
            "color": colour,
            "hatch": _PART_HATCHES.get(part, ""),
            "edgecolor": "white",
            "linewidth": 0,
        }
        axes.barh(range(len(sides)), widths, 0.62, left=starts, label=part, **look)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for index, total in enumerate(starts):
        axes.annotate(
            f"{total:.3g}", (total, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7
        )
    axes.set_yticks(range(len(sides)), names)
    axes.set_ylim(len(sides) - 0.5, -0.5)
    axes.set_xlim(0, max(starts) * 1.08)
    axes.set_xlabel("milliseconds of a decode step")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.6)
    axes.spines["left"].set_visible(False)
    _legend(figure, axes, columns=len(_PARTS))
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: Figure, axes: Axes, columns: int | None = None) -> None:
    """Above the chart, so that it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = columns or _legend_columns(labels)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(len(line) for label in labels for line in label.split("\n"))
    return max(1, min(4, len(labels), 96 // (longest + 6)))


def _legend_height(sides: Sequence[Mapping[str, Any]]) -> float:
    labels = [_wrapped(side["label"], 48) for side in sides]
    rows = -(-len(labels) // _legend_columns(labels))
    return 0.18 * rows * max(label.count("\n") + 1 for label in labels)


def _ticks(longest: int) -> list[int]:
    step = max(1, -(-longest // 16))
    return list(range(1, longest + 1, step))


def _wrapped(text: str, width: int) -> str:
    """At most four lines; what is longer is cut with an ellipsis, the page's tables have the whole."""
    return "\n".join(textwrap.wrap(text, width, max_lines=4, placeholder=" …")) or text
