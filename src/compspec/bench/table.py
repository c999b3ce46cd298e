"""A report as tables for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from compspec.bench.summary import ALL

Report = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Speed; speed by category, where there are several; what it costs."""
    found = [_speed(report), _cost(report)]
    if len(report["categories"]) > 2:
        found.insert(1, _by_category(report))
    return found


def notes(report: Report) -> list[str]:
    """One line for each thing that a reader of the tables has to know."""
    lines = [_difference(side, each) for side in report["sides"] for each in side["differences"]]
    lines += [
        f"{side['label']}: outputs differ from round to round"
        for side in report["sides"]
        if not side["same_in_every_round"]
    ]
    if report["recompilations"]:
        lines.append(f"{report['recompilations']} compilations after start-up; the times hold them")
    peak = report["peak_memory"]
    lines.append(f"peak: {peak['bytes'] / 2**30:.2f} GiB, {peak['of']} with its engines ({len(report['engines'])})")
    return lines


def _difference(side: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    where = f"{side['label']}: prompt {each['prompt_id']} differs from {side['reference']} at token {each['position']}"
    if each["margin"] is None:
        return where
    return f"{where}, where the log-probabilities of the two likeliest are {each['margin']:.2g} apart"


def number(spread: Mapping[str, float] | None, digits: int = 1, scale: float = 1.0) -> str:
    """The median, or a dash."""
    return "-" if spread is None else rounded(spread["median"] * scale, digits)


def extent(spread: Mapping[str, float] | None, digits: int = 1, scale: float = 1.0) -> str:
    """min..max, or a dash."""
    return "-" if spread is None else "..".join(rounded(spread[end] * scale, digits) for end in ("min", "max"))


def rounded(value: float, digits: int) -> str:
    """With so many decimals, none of them from a hundred on."""
    return f"{value:.{digits if value < 100 else 0}f}"


def identical(side: Mapping[str, Any]) -> str:
    """How many outputs are those of the reference."""
    if side["label"] == side["reference"]:
        return "-"
    if side["num_identical"] is None:
        return "not compared"
    return f"{side['num_identical']} of {len(side['outputs'])}"


def title(report: Report) -> str:
    """What was run where."""
    outputs = report["sides"][0]["outputs"]
    together = report["settings"]["concurrent"]
    how = "all at once" if together is None else f"{together} at a time"
    machine = report["machine"]
    return f"{len(outputs)} prompts, {how}, {machine['gpu'] or machine['cpu']}"


def _speed(report: Report) -> Table:
    table = _table(title(report))
    for column in (
        "decode\ntok/s",
        "\nmin..max",
        "speed-\nup",
        "tok/\nstep",
        "TTFT\nms",
        "gap ms\np50, p99",
        "iden-\ntical",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for side in report["sides"]:
        all_ = side["metrics"][ALL]
        table.add_row(
            escape(side["label"]),
            number(all_["decode_tokens_per_s"]),
            extent(all_["decode_tokens_per_s"]),
            number(all_["speed_up"], 2),
            number(all_["acceptance_length"], 2),
            number(all_["time_to_first_token_s"], 0, 1e3),
            f"{number(all_['inter_token_p50_s'], 1, 1e3)}, {number(all_['inter_token_p99_s'], 1, 1e3)}",
            identical(side),
        )
    return table


def _by_category(report: Report) -> Table:
    table = _table("decode tok/s (tokens per step) by category")
    for category in report["categories"]:
        table.add_column(escape(category), justify="right")
    for side in report["sides"]:
        cells = []
        for category in report["categories"]:
            metrics = side["metrics"][category]
            cells.append(f"{number(metrics['decode_tokens_per_s'])} ({number(metrics['acceptance_length'], 2)})")
        table.add_row(escape(side["label"]), *cells)
    return table


def _cost(report: Report) -> Table:
    table = _table("milliseconds of a decode step by part; tok/s with prompts; what an engine takes")
    for column in ("propose", "forward", "sample", "rest", "tok/s", "prefill", "start s", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    engines = {engine["label"]: engine for engine in report["engines"]}
    for side in report["sides"]:
        engine, all_, step = engines[side["engine"]], side["metrics"][ALL], side["step_ms"] or {}
        table.add_row(
            escape(side["label"]),
            *(f"{step[part]:.2f}" if part in step else "-" for part in ("propose", "forward", "sample", "rest")),
            number(all_["throughput_tokens_per_s"]),
            number(all_["prefill_tokens_per_s"], 0),
            f"{engine['start_up_s']:.1f}",
            f"{engine['memory_bytes'] / 2**30:.2f}",
        )
    return table


def _table(title: str) -> Table:
    table = Table(
        title=escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), collapse_padding=True
    )
    table.add_column("", overflow="fold", ratio=1)
    return table
