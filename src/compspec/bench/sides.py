"""What is compared: every configuration at every point of the sweeps, and what each of them does without drafts."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compspec.config import EngineConfig, load_config, parse_overrides
from compspec.errors import ConfigError
from compspec.proposers.proposer import make_proposer

_PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A configuration that gets an engine of its own.

    Attributes:
        label: short, different for each.
    """

    label: str
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One line of the comparison.

    Attributes:
        label: different for each.
        setup: whose engine it runs on, an index.
        speculative: whether drafts are made; without them it is a reference.
        reference: the label of the side without drafts that it is compared with; its own, if it is one.
    """

    label: str
    setup: int
    speculative: bool
    reference: str


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Turns `section.key=1,3,5` into the key and its values, each read as YAML.

    Raises:
        ConfigError: no `=`, no values, or values that are not YAML.
    """
    key, separator, values = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--sweep takes section.key=value,value,..., given: '{text}'")
    try:
        parsed = yaml.safe_load(f"[{values}]")
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--sweep {key}: '{values}' are not values with commas between them") from None
    if not parsed or values.rstrip().endswith(","):
        raise ConfigError(f"--sweep {key}: a value is missing in '{values}'")
    return key, parsed


def make_setups(paths: Sequence[Path], overrides: Sequence[str], sweeps: Sequence[str]) -> list[Setup]:
    """Every configuration file at every point of the sweeps.

    Args:
        paths: YAML files.
        overrides: `section.key=value`, for all of them.
        sweeps: `section.key=value,value,...`; several multiply.

    Raises:
        ConfigError: a wrong file, key or value; a key that is swept twice; two setups that are the same.
    """
    common = parse_overrides(overrides)
    points = _points([parse_sweep(text) for text in sweeps])
    names = [path.stem for path in paths]
    if len(set(names)) < len(names) or _PLAIN in names:
        names = [str(path) for path in paths]
    setups: list[Setup] = []
    for path, name in zip(paths, names, strict=True):
        for point in points:
            config = load_config(path, {**common, **point})
            make_proposer(config.speculative.method, config.speculative.options, config.speculative.num_draft_tokens)
            words = [*([name] if len(paths) > 1 else []), *itertools.starmap(_word, point.items())]
            setup = Setup(label=" ".join(words) or config.speculative.method, config=config)
            same = next((each for each in setups if each.config == config), None)
            if same is not None:
                raise ConfigError(f"'{same.label}' and '{setup.label}' are the same configuration; leave one out")
            setups.append(setup)
    return setups


def make_sides(setups: Sequence[Setup]) -> list[Side]:
    """The sides to run: each setup, after the plain side that it is compared with.

    Setups that differ in speculation alone share one plain side. It is the one that has no drafts at all, or else it
    runs on the engine of the first.
    """
    groups: dict[str, list[int]] = {}
    for index, setup in enumerate(setups):
        groups.setdefault(_without_speculation(setup.config), []).append(index)
    sides = []
    for members in groups.values():
        drafts = {index: setups[index].config.speculative.method != "none" for index in members}
        host = next((index for index in members if not drafts[index]), members[0])
        label = _PLAIN if len(groups) == 1 else f"{_PLAIN}: {setups[host].label}"
        sides.append(Side(label=label, setup=host, speculative=False, reference=label))
        sides += [
            Side(label=setups[index].label, setup=index, speculative=drafts[index], reference=label)
            for index in members
            if drafts[index] or index != host
        ]
    return sides


def _points(sweeps: Sequence[tuple[str, list[Any]]]) -> list[dict[str, Any]]:
    """Overrides by dotted key, one for each combination of values; an empty one where nothing is swept."""
    keys = [key for key, _ in sweeps]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"--sweep names {twice} twice; give all of its values at once")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(values for _, values in sweeps))]


def _word(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key.rpartition('.')[2]}={text}"


def _without_speculation(config: EngineConfig) -> str:
    """What plain outputs and their speed depend on; the scorer decides the shapes of plain steps too."""
    return config.model_dump_json(exclude={"speculative"}) + config.speculative.scorer
