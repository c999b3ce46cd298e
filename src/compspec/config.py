"""The configuration: one frozen pydantic model per YAML section, overrides, JSON schema."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from compspec.errors import ConfigError
from compspec.sampling.params import SamplingParams, describe_validation_error


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused, NaN refused, `true` and "8" are no numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model, and how it is loaded."""

    source: str = Field(description="hub id, folder, .gguf file, or package:<import_name>/<file>")
    tokenizer: str | None = Field(None, description="hub id or folder of the tokenizer; default: the model's")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = Field("auto", description="auto, cpu, cuda, or cuda:<index>", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    max_model_len: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens of prompt and output together; default: what the model was made for"
    )
    trust_remote_code: bool = False
    attention: Literal["auto", "flashinfer", "varlen", "sdpa", "cpu"] = Field(
        "auto",
        description="auto: the C++ kernel on CPU; FlashInfer on CUDA, else torch's variable-length attention (torch "
        "2.12, cache.block_size a multiple of 256), else sdpa, a slow reference",
    )
    cpu_linear: Literal["auto", "native", "kernel"] = Field(
        "auto",
        description="bf16 matrix products on CPU: torch's own, or compspec's C++ kernels, which auto takes on x86",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="weights of linear layers in 8 or 4 bits; the output embedding has 8. On CPU in groups of 32 with "
        "a scale of their own, multiplied by activations in 8 bits; a GGUF file's Q8_0, Q4_0 and Q4_1 blocks are "
        "taken over as they are. On CUDA by torchao (pip install 'compspec[quant]'), rounded anew. The model is "
        "another one then; speculation still never changes what it says",
    )


class SpeculativeSection(BaseModel):
    """Who drafts, and how much. Options of the method stand beside these; the method validates them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    method: str = Field("none", description="a file name in compspec/proposers: none, ngram, ...")
    num_draft_tokens: Annotated[int, Field(ge=1)] = 5
    adaptive: bool | None = Field(
        None,
        description="choose the number of drafts per request and step, up to num_draft_tokens, by what drafts win and "
        "cost as measured; none where they do not pay. Default: with verifier: equality, whose outputs do not depend "
        "on it (with numerics: fast, but for near-ties)",
    )
    scorer: Literal["multi_query", "batch_expansion"] = Field(
        "multi_query",
        description="how drafts are scored: as rows of one sequence, or each as a sequence of its own (a baseline; "
        "its shapes are others, and so may be its bits, with drafts and without)",
    )
    verifier: Literal["equality", "rejection"] = Field(
        "equality",
        description="equality: a draft is kept iff the target chooses it, and the output is the same as without "
        "speculation, sampled or not; rejection: the ratio test, which keeps the distribution of sampled outputs but "
        "not their tokens (greedy outputs stay the same); those hang on what is drafted, and a seed does not bring "
        "them back with a method that learns from other requests (suffix), nor where KV blocks run short",
    )
    block_verification: bool = Field(
        False, description="rejection: test the drafts of a window together instead of one by one; keeps more of them"
    )

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options."""
        return dict(self.model_extra or {})

    @property
    def is_adaptive(self) -> bool:
        """Whether the number of drafts follows what is measured."""
        return self.verifier == "equality" if self.adaptive is None else self.adaptive

    @property
    def max_draft_tokens(self) -> int:
        """K, or 0 where nothing drafts."""
        return 0 if self.method == "none" else self.num_draft_tokens


class CacheSection(Section):
    """The paged KV cache."""

    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    num_blocks: Annotated[int, Field(ge=2)] | None = Field(None, description="overrides memory")
    memory: Literal["auto"] | Annotated[float, Field(gt=0)] = Field("auto", description="GiB for the KV cache")
    prefix_caching: bool = Field(
        True,
        description="requests that begin with the same tokens share their blocks: full blocks of verified tokens; in "
        "exact numerics those of full prompt chunks, so numerics.prefill_chunk should be a multiple of block_size",
    )

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


class SchedulerSection(Section):
    """How many requests and tokens one step may hold."""

    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    max_batched_tokens: Annotated[int, Field(ge=1)] = 2048


class CompileSection(Section):
    """How the model is compiled."""

    mode: Literal["reduce-overhead", "default", "none"] = Field(
        "reduce-overhead", description="reduce-overhead: on CUDA every shape is one CUDA graph"
    )
    strict: bool = Field(
        True, description="reduce-overhead on CUDA: a shape that cannot be captured is an error, else a warning"
    )
    decode_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="batch sizes (requests) that get a graph; max_num_seqs is always one; default: 1, 4, 16, ...",
    )

    @field_validator("decode_buckets", mode="before")
    @classmethod
    def _list_as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class NumericsSection(Section):
    """What the outputs may depend on."""

    mode: Literal["exact", "fast"] = "exact"
    decode_width: Annotated[int, Field(ge=2, le=256)] = Field(
        8, description="exact: query rows per request in every decode step"
    )
    plain_width: Annotated[int, Field(ge=2, le=256)] | None = Field(
        2,
        description="exact: query rows per request of a step that needs no more of them, where the self-test finds "
        "them bit-equal to those of decode_width; null: always decode_width",
    )
    prefill_chunk: Annotated[int, Field(ge=16)] = Field(256, description="tokens per prefill step")
    self_test: Literal["error", "warn", "skip"] = Field(
        "error",
        description="exact: what happens when the start-up self-test finds a row that depends on its neighbours",
    )


class GenerateSection(Section):
    """What `compspec generate` does when the command line does not say."""

    prompt: str | None = Field(None, description="the prompt where neither --prompt nor --prompts is given")
    chat: bool = Field(False, description="wrap text prompts in the tokenizer's chat template, as a user's message")


class EngineConfig(Section):
    """Everything an engine is made from. See `configs/` for files and `load_config` to read one."""

    model: ModelSection
    speculative: SpeculativeSection = SpeculativeSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    compile: CompileSection = CompileSection()
    numerics: NumericsSection = NumericsSection()
    sampling: SamplingParams = Field(default_factory=SamplingParams, description="defaults for requests")
    generate: GenerateSection = GenerateSection()
    cache_dir: str | None = Field(
        None,
        description="where converted weights and compiled code live; default: $COMPSPEC_CACHE or ~/.cache/compspec",
    )

    @field_validator("numerics", mode="before")
    @classmethod
    def _numerics_shorthand(cls, value: Any) -> Any:
        return _full_numerics(value)

    @model_validator(mode="after")
    def _options_fit(self) -> "EngineConfig":
        if self.speculative.block_verification and self.speculative.verifier != "rejection":
            raise ValueError(
                "speculative.block_verification is an option of speculative.verifier: rejection, which is "
                f"{self.speculative.verifier}"
            )
        if self.speculative.adaptive and self.speculative.verifier == "rejection":
            raise ValueError(
                "speculative.adaptive follows measured times, and with speculative.verifier: rejection sampled outputs "
                "depend on how much is drafted, so they could not be reproduced; leave one of the two out"
            )
        if self.sampling.logits_processors:
            raise ValueError("sampling.logits_processors are code and no configuration; give them with each request")
        return self

    @model_validator(mode="after")
    def _widths_fit(self) -> "EngineConfig":
        drafts, numerics, scheduler = self.speculative.max_draft_tokens, self.numerics, self.scheduler
        if numerics.mode == "exact" and drafts >= numerics.decode_width:
            raise ValueError(
                f"speculative.num_draft_tokens is {drafts} but numerics: exact verifies at most decode_width - 1 = "
                f"{numerics.decode_width - 1} drafts; lower it, or raise numerics.decode_width"
            )
        if numerics.plain_width is not None and numerics.plain_width > numerics.decode_width:
            raise ValueError(
                f"numerics.plain_width = {numerics.plain_width} is more than numerics.decode_width = "
                f"{numerics.decode_width}; steps without drafts are never wider"
            )
        widest = scheduler.max_num_seqs * self.query_len
        if widest > scheduler.max_batched_tokens:
            raise ValueError(
                f"a full decode step has scheduler.max_num_seqs x query rows = {scheduler.max_num_seqs} x "
                f"{self.query_len} = {widest} tokens, more than scheduler.max_batched_tokens = "
                f"{scheduler.max_batched_tokens}"
            )
        if numerics.prefill_chunk > scheduler.max_batched_tokens:
            raise ValueError(
                f"numerics.prefill_chunk = {numerics.prefill_chunk} is more than scheduler.max_batched_tokens = "
                f"{scheduler.max_batched_tokens}"
            )
        return self

    @property
    def query_len(self) -> int:
        """Query rows per request of the widest decode step."""
        if self.numerics.mode == "exact":
            return self.numerics.decode_width
        return self.speculative.max_draft_tokens + 1

    @property
    def cache_path(self) -> Path:
        """The folder for converted weights, compiled code and self-test results."""
        return Path(self.cache_dir).expanduser() if self.cache_dir is not None else default_cache_path()


def default_cache_path() -> Path:
    """$COMPSPEC_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("COMPSPEC_CACHE", "~/.cache/compspec")).expanduser()


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> EngineConfig:
    """Reads a YAML file.

    Args:
        path: the file.
        overrides: nested ({"speculative": {"method": "none"}}) or dotted ({"speculative.method": "none"}).

    Raises:
        ConfigError: the file is missing, is not YAML, or holds an unknown key or a wrong value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read configuration file '{path}': {reason}") from None
    data = _parse_yaml(text, f"'{path}' is not valid YAML")
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' must hold a mapping of sections, it holds {type(data).__name__}")
    return make_config(data, overrides)


def make_config(data: dict[str, Any], overrides: dict[str, Any] | None = None) -> EngineConfig:
    """Validates a nested mapping, after merging `overrides` into it.

    An override that chooses another `speculative.method` leaves the options of the old method behind.

    Raises:
        ConfigError: an unknown key (the message lists the valid ones) or a wrong value.
    """
    _check_keys(data)
    nested = _nest(overrides or {})
    _check_keys(nested)
    merged = _merge(_without_other_methods_options(data, nested), nested)
    try:
        return EngineConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Turns several `section.key=value` into one nested mapping; of two for the same key the last one holds.

    Raises:
        ConfigError: as `parse_override`.
    """
    merged: dict[str, Any] = {}
    for text in texts:
        merged = _merge(merged, parse_override(text))
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """Turns `section.key=value` into a nested mapping; the value is read as YAML.

    Raises:
        ConfigError: no `=`, or a value that is not YAML.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--set takes section.key=value, given: '{text}'")
    return _nest({name.strip(): _parse_yaml(value, f"--set {name}: the value is not valid YAML")})


def _parse_yaml(text: str, complaint: str) -> Any:
    """Reads YAML; whatever is wrong with it becomes a ConfigError of one line."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{complaint}{line}: {problem}") from None
    except (ValueError, RecursionError) as error:  # a date that is none, nesting without end
        raise ConfigError(f"{complaint}: {error}") from None


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}; nested mappings pass through."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        head, _, rest = str(name).partition(".")
        if rest:
            value = _nest({rest: value})
        elif isinstance(value, BaseModel):
            value = value.model_dump()
        nested = _merge(nested, {head: value})
    return nested


def _check_keys(data: dict[Any, Any]) -> None:
    """Sections and their keys are names; deeper there are only values, and YAML lets those contain themselves."""
    for keys in (data, *(section for section in data.values() if isinstance(section, dict))):
        bad = next((key for key in keys if not isinstance(key, str)), None)
        if bad is not None:
            raise ConfigError(f"configuration keys are names, given: {bad!r}")


def _without_other_methods_options(data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    base, extra = data.get("speculative"), overrides.get("speculative")
    if (
        not isinstance(base, dict)
        or not isinstance(extra, dict)
        or extra.get("method", base.get("method")) == base.get("method")
    ):
        return data
    shared = {key: value for key, value in base.items() if key in SpeculativeSection.model_fields}
    return {**data, "speculative": shared}


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in extra.items():
        old = merged.get(name)
        if name == "numerics":
            old, value = _full_numerics(old), _full_numerics(value)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _full_numerics(value: Any) -> Any:
    """The shorthand `numerics: fast` as a mapping, so that it merges with the section's other keys."""
    return {"mode": value} if isinstance(value, str) else value


def _describe(error: ValidationError) -> str:
    """One line that names the key, the rule, and for an unknown key the valid ones."""
    errors = error.errors()
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "value_error" and not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    section: Any = EngineConfig
    for part in first["loc"][:-1]:
        fields: dict[str, Any] = getattr(section, "model_fields", {})
        section = fields[str(part)].annotation if part in fields else None
    valid = list(getattr(section, "model_fields", {}))
    return describe_validation_error(error, valid, "configuration key")
