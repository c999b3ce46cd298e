"""From what the workers measured to the numbers and rows of the table. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compspec.bench.summary import Spread
from peers.protocol import Output

COLUMNS = (
    "engine",
    "speculation",
    "decode tok/s",
    "min..max",
    "speed-up",
    "prefill tok/s",
    "at once, tok/s",
    "same output",
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of all prompts.

    Attributes:
        outputs: in the order of the prompts.
        wall_s: seconds for all of them.
    """

    outputs: list[Output]
    wall_s: float

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens that came after the first step of their output, by the time after it."""
        tokens = sum(len(one["token_ids"]) - one["num_first"] for one in self.outputs)
        seconds = sum(one["total_s"] - one["first_s"] for one in self.outputs)
        return tokens / seconds if tokens else None

    def prefill_tokens_per_s(self, num_prompt_tokens: int) -> float | None:
        """Prompt tokens by the time to the first token."""
        seconds = sum(one["first_s"] for one in self.outputs)
        return num_prompt_tokens / seconds if seconds else None

    @property
    def throughput_tokens_per_s(self) -> float:
        """Output tokens by the whole time, prompts included."""
        return sum(len(one["token_ids"]) for one in self.outputs) / self.wall_s


@dataclass(kw_only=True)
class Side:
    """An engine with one setting: a row of the table.

    Attributes:
        engine: its name; the sides of one engine share it.
        num_drafts: 0 is the plain side, which the others are compared with.
        speculation: who drafts and how much, in words.
        rounds, concurrent: runs one at a time, and several at once.
        failure: why it has no numbers.
    """

    engine: str
    num_drafts: int
    speculation: str
    rounds: list[Round] = field(default_factory=list)
    concurrent: list[Round] = field(default_factory=list)
    failure: str | None = None


def count_identical(side: Side, plain: Side) -> int | None:
    """How many outputs are those of the plain side, token for token, in the worst round; None without rounds."""
    counts = [
        sum(a["token_ids"] == b["token_ids"] for a, b in zip(one.outputs, other.outputs, strict=True))
        for one, other in zip(side.rounds, plain.rounds, strict=True)
    ]
    return min(counts, default=None)


def summarise(sides: Sequence[Side], num_prompt_tokens: int) -> list[dict[str, Any]]:
    """The numbers of every side, in a form that JSON takes.

    Args:
        num_prompt_tokens: of all prompts together.
    """
    plain = {side.engine: side for side in sides if side.num_drafts == 0}
    return [_summarise(side, plain.get(side.engine), num_prompt_tokens) for side in sides]


def _summarise(side: Side, plain: Side | None, num_prompt_tokens: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "engine": side.engine,
        "num_drafts": side.num_drafts,
        "speculation": side.speculation,
        "failure": side.failure,
    }
    if side.failure is not None:
        return numbers
    compared = side.num_drafts > 0 and plain is not None and plain.failure is None
    speed = Spread.of(one.decode_tokens_per_s for one in side.rounds)
    speed_up = identical = None
    if compared:
        assert plain is not None
        identical = count_identical(side, plain)
        pairs = zip(side.rounds, plain.rounds, strict=True)
        speed_up = Spread.of(_ratio(a.decode_tokens_per_s, b.decode_tokens_per_s) for a, b in pairs)
    return {
        **numbers,
        "decode_tokens_per_s": _plain(speed),
        "speed_up": _plain(speed_up),
        "prefill_tokens_per_s": _plain(Spread.of(one.prefill_tokens_per_s(num_prompt_tokens) for one in side.rounds)),
        "throughput_tokens_per_s": _plain(Spread.of(one.throughput_tokens_per_s for one in side.concurrent)),
        "num_identical": identical,
        "num_outputs": len(side.rounds[0].outputs),
        "num_output_tokens": sum(len(one["token_ids"]) for one in side.rounds[0].outputs),
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


def _plain(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"median": spread.median, "min": spread.min, "max": spread.max}


def cells(numbers: Mapping[str, Any]) -> list[str]:
    """A side's row, one text for each of `COLUMNS`; why it failed is not said here."""
    row = [numbers["engine"], numbers["speculation"]]
    if numbers["failure"] is not None:
        return [*row, "failed", *["-"] * (len(COLUMNS) - 3)]
    speed, speed_up = numbers["decode_tokens_per_s"], numbers["speed_up"]
    prefill, throughput = numbers["prefill_tokens_per_s"], numbers["throughput_tokens_per_s"]
    identical = numbers["num_identical"]
    return [
        *row,
        f"{speed['median']:.1f}" if speed else "-",
        f"{speed['min']:.1f}..{speed['max']:.1f}" if speed else "-",
        f"{speed_up['median']:.2f}" if speed_up else "-",
        f"{prefill['median']:.0f}" if prefill else "-",
        f"{throughput['median']:.0f}" if throughput else "-",
        f"{identical} of {numbers['num_outputs']}" if identical is not None else "-",
    ]


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The table and what is to be said below it."""
    lines = [_line(COLUMNS), _line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])]
    lines += [_line(row) for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
