"""The configuration: every mistake is a ConfigError of one line, and overrides change what they name and no more."""

import math
from pathlib import Path
from typing import Any

import pytest

from compspec.config import EngineConfig, default_cache_path, load_config, make_config, parse_override, parse_overrides
from compspec.errors import ConfigError
from compspec.sampling.params import SamplingParams

MODEL = {"model": {"source": "x"}}
SECTIONS = [name for name in EngineConfig.model_fields if name != "cache_dir"]


def refused(data: dict[str, Any], overrides: dict[str, Any] | None = None) -> str:
    """The message, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        make_config(data, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_model_is_all_that_must_be_given() -> None:
    config = make_config(MODEL)
    assert config.numerics.mode == "exact"
    assert config.speculative.max_draft_tokens == 0
    assert config.sampling == SamplingParams()
    assert "'model'" in refused({})


def test_an_unknown_section_lists_the_sections() -> None:
    message = refused({**MODEL, "sampler": {}})
    assert "unknown configuration key 'sampler'" in message
    assert all(name in message for name in EngineConfig.model_fields)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in ("speculative", "sampling")])
def test_an_unknown_key_lists_the_keys_of_its_section(section: str) -> None:
    message = refused({**MODEL, section: {**MODEL.get(section, {}), "typo": 1}})
    assert f"unknown configuration key '{section}.typo'" in message
    keys = EngineConfig.model_fields[section].annotation.model_fields
    assert all(key in message for key in keys)


def test_an_unknown_sampling_parameter_lists_the_parameters() -> None:
    message = refused({**MODEL, "sampling": {"typo": 1}})
    assert "'typo'" in message
    assert all(key in message for key in SamplingParams.model_fields)


def test_an_unknown_key_is_told_before_a_wrong_value() -> None:
    assert "typo" in refused({"model": {"source": 3}, "cache": {"typo": 1}})


WRONG = [
    ("model", "x", "model"),
    ("model", None, "model"),
    ("model.source", 3, "model.source"),
    ("model.dtype", "int8", "model.dtype"),
    ("model.device", "tpu", "model.device"),
    ("model.device", "cuda:x", "model.device"),
    ("model.max_model_len", 0, "model.max_model_len"),
    ("model.max_model_len", "512", "model.max_model_len"),
    ("model.trust_remote_code", "yes", "model.trust_remote_code"),
    ("speculative", [], "speculative"),
    ("speculative.method", 3, "speculative.method"),
    ("speculative.num_draft_tokens", 0, "speculative.num_draft_tokens"),
    ("speculative.num_draft_tokens", True, "speculative.num_draft_tokens"),
    ("speculative.scorer", "single_query", "speculative.scorer"),
    ("speculative.scorer", None, "speculative.scorer"),
    ("speculative.verifier", "typical", "speculative.verifier"),
    ("speculative.verifier", True, "speculative.verifier"),
    ("speculative.block_verification", "yes", "speculative.block_verification"),
    ("speculative.block_verification", 1, "speculative.block_verification"),
    ("cache.block_size", 17, "power of two"),
    ("cache.block_size", 0, "cache.block_size"),
    ("cache.num_blocks", 1, "cache.num_blocks"),
    ("cache.memory", 0, "cache.memory"),
    ("cache.memory", "much", "cache.memory"),
    ("scheduler.max_num_seqs", 0, "scheduler.max_num_seqs"),
    ("scheduler.max_num_seqs", 2.5, "scheduler.max_num_seqs"),
    ("scheduler.max_num_seqs", True, "scheduler.max_num_seqs"),
    ("scheduler.max_num_seqs", "8", "scheduler.max_num_seqs"),
    ("compile.mode", "max-autotune", "compile.mode"),
    ("compile.decode_buckets", [0], "compile.decode_buckets"),
    ("compile.decode_buckets", 3, "compile.decode_buckets"),
    ("numerics", "exactly", "numerics.mode"),
    ("numerics", 3, "numerics"),
    ("numerics.decode_width", 1, "numerics.decode_width"),
    ("numerics.prefill_chunk", 15, "numerics.prefill_chunk"),
    ("sampling", [], "sampling"),
    ("sampling.temperature", -1, "temperature"),
    ("sampling.temperature", "hot", "temperature"),
    ("sampling.n", 0, "n"),
    ("sampling.n", 2, "temperature is 0"),
    ("sampling.min_tokens", 1000, "min_tokens 1000 is more than max_tokens 128"),
    ("sampling.stop", [""], "stop"),
    ("sampling.logprobs", -1, "logprobs"),
    ("sampling.bad_words", [[]], "bad_words"),
    ("sampling.logit_bias", {3: 1000}, "logit_bias"),
    ("sampling.logits_processors", ["os.system"], "logits_processors"),
    ("sampling.logits_processors", [print], "are code and no configuration"),
    ("cache_dir", 3, "cache_dir"),
    ("cache.memory", math.nan, "cache.memory"),
    ("cache.memory", math.inf, "cache.memory"),
    ("sampling.top_p", math.nan, "top_p"),
    ("scheduler.max_num_seqs", math.nan, "scheduler.max_num_seqs"),
]


@pytest.mark.parametrize(("name", "value", "told"), WRONG)
def test_a_wrong_value_is_refused_and_the_key_is_named(name: str, value: object, told: str) -> None:
    assert told in refused(MODEL, {name: value})


@pytest.mark.parametrize("key", [1, None, "a\nb"])
def test_a_key_that_is_no_name_is_refused_in_one_line(key: object) -> None:
    refused({**MODEL, key: 1})
    refused({**MODEL, "cache": {key: 1}})


@pytest.mark.parametrize("section", SECTIONS)
def test_an_empty_section_is_refused_not_ignored(section: str) -> None:
    assert section in refused({**MODEL, section: None})


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_numerics_may_be_given_as_one_word(mode: str) -> None:
    assert make_config({**MODEL, "numerics": mode}).numerics.mode == mode


def test_exact_verifies_fewer_drafts_than_its_width() -> None:
    def with_drafts(count: int, **more: Any) -> EngineConfig:
        return make_config(MODEL, {"speculative.method": "ngram", "speculative.num_draft_tokens": count, **more})

    assert with_drafts(7).query_len == 8
    with pytest.raises(
        ConfigError, match=r"num_draft_tokens is 8 .* decode_width - 1 = 7 .*raise numerics.decode_width"
    ):
        with_drafts(8)
    assert with_drafts(8, **{"numerics.decode_width": 9}).query_len == 9
    assert with_drafts(8, numerics="fast").query_len == 9
    # Without a proposer nothing is verified.
    assert make_config(MODEL, {"speculative.num_draft_tokens": 50}).query_len == 8


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"scheduler.max_num_seqs": 257}, "257 x 8 = 2056"),
        ({"numerics.prefill_chunk": 2049}, "prefill_chunk = 2049"),
        ({"scheduler.max_batched_tokens": 255}, "prefill_chunk = 256"),
    ],
)
def test_a_step_that_cannot_fit_is_refused_with_the_numbers(overrides: dict[str, int], told: str) -> None:
    message = refused(MODEL, overrides)
    assert told in message
    assert "max_batched_tokens" in message


def test_a_configuration_cannot_be_changed() -> None:
    config = make_config(MODEL)
    for section, name in ((config, "cache_dir"), (config.cache, "block_size"), (config.speculative, "method")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, name, "changed")
    config.speculative.options["new"] = 1
    assert config.speculative.options == {}


def test_options_of_a_method_stand_beside_it() -> None:
    speculative = make_config({**MODEL, "speculative": {"method": "ngram", "prompt_lookup_max": 4}}).speculative
    assert speculative.options == {"prompt_lookup_max": 4}


def test_a_dumped_configuration_makes_the_same_configuration() -> None:
    config = make_config(
        MODEL, {"compile.decode_buckets": [1, 2], "sampling.stop_token_ids": [3], "speculative.prompt_lookup_max": 2}
    )
    assert make_config(config.model_dump()) == config
    assert make_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    "overrides",
    [
        {"cache": {"block_size": 32}},
        {"cache.block_size": 32},
        {"cache": {"block_size": 4}, "cache.block_size": 32},
        {"cache.block_size": 4, "cache": {"block_size": 32}},
    ],
)
def test_nested_and_dotted_overrides_merge_in_their_order(overrides: dict[str, Any]) -> None:
    data = {**MODEL, "cache": {"block_size": 8, "num_blocks": 9}}
    config = make_config(data, overrides)
    assert (config.cache.block_size, config.cache.num_blocks) == (32, 9)
    assert data["cache"] == {"block_size": 8, "num_blocks": 9}, "the caller's data was changed"


def test_a_section_object_is_an_override_too() -> None:
    config = make_config(MODEL, {"sampling": SamplingParams(max_tokens=3)})
    assert config.sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("given", "override"),
    [
        ({"mode": "exact", "decode_width": 16}, {"numerics": "fast"}),
        ("fast", {"numerics.decode_width": 16}),
        ("exact", {"numerics": {"mode": "fast", "decode_width": 16}}),
    ],
)
def test_the_numerics_word_merges_with_the_other_keys_both_ways(given: Any, override: dict[str, Any]) -> None:
    numerics = make_config({**MODEL, "numerics": given}, override).numerics
    assert (numerics.mode, numerics.decode_width) == ("fast", 16)


@pytest.mark.parametrize(
    ("text", "nested"),
    [
        ("cache.block_size=32", {"cache": {"block_size": 32}}),
        (" cache.block_size =32", {"cache": {"block_size": 32}}),
        ("model.source=a=b", {"model": {"source": "a=b"}}),
        ("cache.num_blocks=", {"cache": {"num_blocks": None}}),
        ("numerics=fast", {"numerics": {"mode": "fast"}}),
        ("compile.decode_buckets=[1, 2]", {"compile": {"decode_buckets": [1, 2]}}),
        ("model.trust_remote_code=true", {"model": {"trust_remote_code": True}}),
        ("sampling={max_tokens: 3}", {"sampling": {"max_tokens": 3}}),
    ],
)
def test_set_reads_the_value_as_yaml(text: str, nested: dict[str, Any]) -> None:
    assert parse_override(text) == nested


@pytest.mark.parametrize(
    "text",
    ["cache.block_size", "=3", " =3", "", "a=[1", "a=2001-99-99", "a=!!python/name:os.system x", "a=" + "[" * 1000],
)
def test_set_refuses_what_is_no_assignment_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="--set") as caught:
        parse_override(text)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {source: x}\ncache: {block_size: 32}\nnumerics: fast\n")
    config = load_config(path, {"cache.num_blocks": 5})
    assert (config.cache.block_size, config.cache.num_blocks, config.numerics.mode) == (32, 5, "fast")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "must hold a mapping of sections, it holds NoneType"),
        ("- a\n- b\n", "it holds list"),
        ("just text", "it holds str"),
        ("model: [", "is not valid YAML (line 1)"),
        ("model:\n\t- x", "is not valid YAML (line 2)"),
        ("---\na: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: \x00", "is not valid YAML"),
        ("a: 2001-99-99", "is not valid YAML"),
        ("a: " + "[" * 1000, "is not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not valid YAML"),
        (b"a: \xff", "not UTF-8"),
        ("model: &m {source: *m}", "model.source"),
        ("model: {source: x, extra: 1}", "'model.extra'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    tmp_path: Path, content: str | bytes, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, content))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)


def test_the_cache_folder_is_the_configured_one_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPSPEC_CACHE", "/some/where")
    assert default_cache_path() == Path("/some/where")
    assert make_config(MODEL).cache_path == Path("/some/where")
    assert make_config(MODEL, {"cache_dir": "~/else"}).cache_path == Path("~/else").expanduser()
    monkeypatch.delenv("COMPSPEC_CACHE")
    assert default_cache_path() == Path("~/.cache/compspec").expanduser()


def test_another_method_leaves_the_old_ones_options_behind() -> None:
    data = {"model": {"source": "m"}, "speculative": {"method": "ngram", "num_draft_tokens": 3, "prompt_lookup_max": 4}}
    other = make_config(data, {"speculative.method": "none"}).speculative
    assert (other.method, other.num_draft_tokens, other.options) == ("none", 3, {})
    same = make_config(data, {"speculative.method": "ngram"}).speculative
    assert same.options == {"prompt_lookup_max": 4}
    changed = make_config(data, {"speculative": {"method": "none", "wrong": 1}}).speculative
    assert changed.options == {"wrong": 1}, "an option given together with the method is never dropped"


def test_several_overrides_merge_and_the_last_of_two_holds() -> None:
    merged = parse_overrides(["sampling.top_k=3", "sampling={top_p: 0.5}", "sampling.top_k=4", "numerics=fast"])
    assert merged == {"sampling": {"top_k": 4, "top_p": 0.5}, "numerics": {"mode": "fast"}}


def test_keys_that_are_no_names_are_refused() -> None:
    for data in ({**MODEL, 1: {}}, {**MODEL, "sampling": {1: 2}}):
        assert "are names, given: 1" in refused(data)
    assert "are names" in refused(MODEL, {"model": {1: 2}})


def test_adaptive_goes_with_equality_and_is_refused_with_rejection() -> None:
    """Under the ratio test what is drafted changes sampled outputs, and times must not."""
    assert make_config(MODEL).speculative.is_adaptive
    assert not make_config(MODEL, {"speculative.adaptive": False}).speculative.is_adaptive
    assert not make_config(MODEL, {"speculative.verifier": "rejection"}).speculative.is_adaptive
    message = refused(MODEL, {"speculative.adaptive": True, "speculative.verifier": "rejection"})
    assert "speculative.adaptive" in message and "reproduced" in message


def test_block_verification_is_refused_without_the_verifier_it_belongs_to() -> None:
    message = refused(MODEL, {"speculative.block_verification": True})
    assert "speculative.block_verification" in message
    assert "speculative.verifier: rejection" in message
    assert "equality" in message
    both = {"speculative.block_verification": True, "speculative.verifier": "rejection"}
    assert make_config(MODEL, both).speculative.block_verification is True


def test_scorer_and_verifier_are_not_options_of_a_method() -> None:
    """They stay where another method is chosen."""
    chosen = {"method": "ngram", "scorer": "batch_expansion", "verifier": "rejection", "block_verification": True}
    data = {**MODEL, "speculative": {**chosen, "prompt_lookup_max": 4}}
    speculative = make_config(data).speculative
    assert speculative.options == {"prompt_lookup_max": 4}
    other = make_config(data, {"speculative.method": "none"}).speculative
    assert (other.scorer, other.verifier, other.block_verification) == ("batch_expansion", "rejection", True)
    assert other.options == {}


def test_drafts_are_compared_and_scored_together_unless_told_otherwise() -> None:
    speculative = make_config(MODEL).speculative
    assert (speculative.scorer, speculative.verifier, speculative.block_verification) == (
        "multi_query",
        "equality",
        False,
    )


def test_sampling_defaults_of_every_kind_are_read_from_a_file(tmp_path: Path) -> None:
    content = """
model: {source: x}
sampling:
  temperature: 0.5
  n: 2
  min_tokens: 3
  stop: ["\\n\\n", "User:"]
  bad_words: [ugly, [3, 4]]
  logit_bias: {5: 1.5, "6": -2}
  allowed_token_ids: [3, 4]
  logprobs: 2
  prompt_logprobs: 0
"""
    sampling = load_config(write(tmp_path, content)).sampling
    assert sampling == SamplingParams(
        temperature=0.5,
        n=2,
        min_tokens=3,
        stop=("\n\n", "User:"),
        bad_words=("ugly", (3, 4)),
        logit_bias={5: 1.5, 6: -2.0},
        allowed_token_ids=(3, 4),
        logprobs=2,
        prompt_logprobs=0,
    )
    config = load_config(tmp_path / "config.yaml")
    assert make_config(config.model_dump()) == config
    assert make_config(config.model_dump(mode="json")) == config


def test_the_schema_describes_sampling_without_code() -> None:
    properties = EngineConfig.model_json_schema()["$defs"]["SamplingParams"]["properties"]
    assert set(properties) == set(SamplingParams.model_fields) - {"logits_processors"}
