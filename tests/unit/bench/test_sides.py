"""Configurations, sweeps, and the sides that they make."""

from pathlib import Path

import pytest
import yaml

from compspec.bench.sides import make_setups, make_sides, parse_sweep
from compspec.errors import ConfigError


def write(folder: Path, name: str, **sections: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    base = {"model": {"source": "m"}, "speculative": {"method": "ngram", "num_draft_tokens": 3}}
    path.write_text(yaml.safe_dump({**base, **sections}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("speculative.num_draft_tokens=1,3", "speculative.num_draft_tokens", [1, 3]),
        ("model.dtype=bfloat16, float32", "model.dtype", ["bfloat16", "float32"]),
        ("compile.decode_buckets=[1,4],null", "compile.decode_buckets", [[1, 4], None]),
        ("numerics=exact,fast", "numerics", ["exact", "fast"]),
    ],
)
def test_a_sweep_has_yaml_values(text: str, key: str, values: list) -> None:
    assert parse_sweep(text) == (key, values)


@pytest.mark.parametrize("text", ["a.b", "=1", "a.b=", "a.b=1,", "a.b=1,,2", "a.b=[1", "a.b=1],[2"])
def test_a_wrong_sweep_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        parse_sweep(text)


def test_files_and_sweeps_multiply_and_overrides_reach_all(tmp_path: Path) -> None:
    paths = [write(tmp_path, "one.yaml"), write(tmp_path, "two.yaml", scheduler={"max_num_seqs": 2})]
    sweeps = ["speculative.num_draft_tokens=1,5", "speculative.adaptive=true,false"]
    setups = make_setups(paths, ["sampling.max_tokens=9"], sweeps)
    assert [setup.label for setup in setups][:4] == [
        "one num_draft_tokens=1 adaptive=true",
        "one num_draft_tokens=1 adaptive=false",
        "one num_draft_tokens=5 adaptive=true",
        "one num_draft_tokens=5 adaptive=false",
    ]
    assert len({setup.label for setup in setups}) == 8
    assert [setup.config.speculative.num_draft_tokens for setup in setups] == [1, 1, 5, 5] * 2
    assert {setup.config.sampling.max_tokens for setup in setups} == {9}
    assert [setup.config.scheduler.max_num_seqs for setup in setups] == [8] * 4 + [2] * 4


def test_a_sweep_of_methods_leaves_the_options_of_the_file_s_method_behind(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", speculative={"method": "ngram", "prompt_lookup_max": 4})
    setups = make_setups([path], [], ["speculative.method=ngram,suffix"])
    assert [setup.config.speculative.options for setup in setups] == [{"prompt_lookup_max": 4}, {}]


def test_one_file_alone_is_named_by_its_method_and_files_of_one_name_by_their_paths(tmp_path: Path) -> None:
    first, second = write(tmp_path, "x/a.yaml"), write(tmp_path, "y/a.yaml", numerics="fast")
    assert [setup.label for setup in make_setups([first], [], [])] == ["ngram"]
    assert [setup.label for setup in make_setups([first, second], [], [])] == [str(first), str(second)]


@pytest.mark.parametrize(
    ("sweeps", "words"),
    [
        (["speculative.num_draft_tokns=1"], "num_draft_tokns"),
        (["model.dtpe=1"], "model.dtpe"),
        (["speculative.num_draft_tokens=1,1"], "the same configuration"),
        (["speculative.num_draft_tokens=1", "speculative.num_draft_tokens=2"], "twice"),
    ],
)
def test_wrong_sweeps_are_named_before_an_engine_starts(tmp_path: Path, sweeps: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_setups([write(tmp_path, "a.yaml")], [], sweeps)


def test_two_files_that_say_the_same_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a' and 'b' are the same configuration"):
        make_setups([write(tmp_path, "a.yaml"), write(tmp_path, "b.yaml")], [], [])


def test_setups_that_differ_in_speculation_alone_share_a_plain_side(tmp_path: Path) -> None:
    setups = make_setups(
        [write(tmp_path, "a.yaml")], [], ["model.dtype=float32,bfloat16", "speculative.num_draft_tokens=1,3"]
    )
    sides = make_sides(setups)
    assert [side.label for side in sides if not side.speculative] == [
        "plain: dtype=float32 num_draft_tokens=1",
        "plain: dtype=bfloat16 num_draft_tokens=1",
    ]
    assert [side.setup for side in sides] == [0, 0, 1, 2, 2, 3]
    for side in sides:
        (reference,) = [other for other in sides if other.label == side.reference]
        assert setups[reference.setup].config.model == setups[side.setup].config.model
        assert not reference.speculative


def test_another_scorer_has_a_plain_side_of_its_own(tmp_path: Path) -> None:
    setups = make_setups([write(tmp_path, "a.yaml")], [], ["speculative.scorer=multi_query,batch_expansion"])
    assert sum(not side.speculative for side in make_sides(setups)) == 2


def test_the_setup_without_drafts_is_the_plain_side(tmp_path: Path) -> None:
    sides = make_sides(make_setups([write(tmp_path, "a.yaml")], [], ["speculative.method=ngram,none"]))
    assert [(side.label, side.setup, side.speculative) for side in sides] == [
        ("plain", 1, False),
        ("method=ngram", 0, True),
    ]


def test_a_file_named_plain_is_not_taken_for_the_plain_side(tmp_path: Path) -> None:
    paths = [write(tmp_path, "plain.yaml"), write(tmp_path, "b.yaml", speculative={"method": "suffix"})]
    labels = [side.label for side in make_sides(make_setups(paths, [], []))]
    assert len(set(labels)) == len(labels) == 3
