"""Loads a Hugging Face causal LM so that its attention is ours: config, weights, tokenizer, self-check."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AttentionInterface

from compspec.attention import prebuilt
from compspec.attention.backend import ATTENTION_NAME, attention_forward
from compspec.config import ModelSection
from compspec.errors import CompspecError, ConfigError, ModelError, UnsupportedError
from compspec.kernels.build import choose_cache_dir
from compspec.models.adapter import ModelAdapter
from compspec.models.gguf import convert_gguf
from compspec.models.gguf_blocks import GgufBlocks
from compspec.models.linears import KnownWeights, use_kernels
from compspec.models.packed_store import PackedStore
from compspec.models.quiet import one_line, quiet_transformers
from compspec.models.rope import freeze_rope, rope_limit
from compspec.models.self_check import CheckResult, check_model
from compspec.models.source import resolve_source, weight_files
from compspec.models.support import architecture_name, check_config

AttentionInterface.register(ATTENTION_NAME, attention_forward)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_FINGERPRINT_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        adapter: token ids to logits.
        tokenizer: the transformers tokenizer, or None where the model has none.
        folder: where its config and safetensors lie; None where it was made in memory.
        fingerprint: identifies config, weights, dtype and library versions, for caches of what was
            measured with this model.
    """

    adapter: ModelAdapter
    tokenizer: Any
    folder: Path | None
    fingerprint: str


def load_model(section: ModelSection, cache_path: Path) -> LoadedModel:
    """Loads the model, and proves that compspec's attention is the one that it runs.

    Args:
        section: the `model` section of the configuration.
        cache_path: where converted GGUF weights live.

    Raises:
        ModelError: the model cannot be found, read or trusted.
        UnsupportedError: it needs something that compspec does not implement; the message names it.
        ConfigError: a value in the section does not fit the model or the machine.
    """
    device = _device(section.device)
    choose_cache_dir(cache_path / "kernels")
    prebuilt.choose_cache_path(cache_path)
    files = resolve_source(section.source, revision=section.revision, trust_remote_code=section.trust_remote_code)
    folder = files.folder
    if files.gguf is not None:
        folder = convert_gguf(files.gguf, DTYPES.get(section.dtype), cache_path)
    headers = _weight_headers(folder)
    config = read_config(folder, section)
    check_config(config)
    max_model_len = _max_model_len(config, section.max_model_len)
    dtype = choose_dtype(config, section.dtype)
    module = _weights(folder, config, dtype, device, section)
    freeze_rope(module)
    check = check_model(module, dtype, device)
    known = KnownWeights()
    if section.quantization != "none" and device.type == "cpu":
        source = str(files.gguf and files.gguf.resolve())
        known = KnownWeights(
            find_blocks=GgufBlocks(files.gguf).find if files.gguf is not None else None,
            store=PackedStore(
                cache_path / "packed",
                f"{Path(files.gguf or folder).stem}-{section.quantization}",
                [section.quantization, str(dtype), source, config.to_json_string(), transformers.__version__, *headers],
            ),
        )
    linear = use_kernels(module, check.same_inputs, section, dtype, device, known)
    return LoadedModel(
        adapter=_adapt(module, check, dtype, device, max_model_len),
        tokenizer=_tokenizer(folder, section),
        folder=folder,
        fingerprint=_fingerprint(config, dtype, [*headers, f"linear:{linear}"]),
    )


def random_model(config: Any, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> LoadedModel:
    """A model of random weights, made in memory, for trials of a machine.

    Args:
        config: a transformers config of a causal language model.

    Raises:
        UnsupportedError: as `load_model`.
    """
    check_config(config)
    with quiet_transformers(), torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    module = module.eval().requires_grad_(False)
    freeze_rope(module)
    check = check_model(module, dtype, device)
    return LoadedModel(
        adapter=_adapt(module, check, dtype, device, _max_model_len(config, None)),
        tokenizer=None,
        folder=None,
        fingerprint=_fingerprint(config, dtype, [f"random:{seed}"]),
    )


def _adapt(
    module: nn.Module, check: CheckResult, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> ModelAdapter:
    return ModelAdapter(
        module=module,
        layers=check.layers,
        dtype=dtype,
        device=device,
        vocab_size=check.vocab_size,
        max_model_len=max_model_len,
        no_region=check.no_region,
    )


def _device(name: str) -> torch.device:
    """Resolves `auto` and checks that the device is there."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"model.device is '{name}', but torch sees no CUDA device here; use 'cpu' or 'auto'")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"model.device is '{name}', but there are {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index or 0)
    return device


def read_config(folder: Path, section: ModelSection) -> Any:
    """Reads config.json; never runs code from the folder unless the configuration says so."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read '{folder / 'config.json'}': {one_line(error)}") from None
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    try:
        with quiet_transformers():
            return transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=section.trust_remote_code, local_files_only=True
            )
    except Exception as error:
        if not section.trust_remote_code and isinstance(raw, dict) and raw.get("auto_map"):
            raise UnsupportedError(
                f"model '{section.source}' needs Python code from its own repository; "
                "read that code, then set model.trust_remote_code: true"
            ) from None
        if kind is None or kind not in transformers.CONFIG_MAPPING:
            raise UnsupportedError(
                f"model '{section.source}' has model type '{kind}', "
                f"which transformers {transformers.__version__} does not know"
            ) from None
        raise ModelError(f"cannot read the config of model '{section.source}': {one_line(error)}") from error


def choose_dtype(config: Any, name: str) -> torch.dtype:
    """The dtype asked for, or the checkpoint's own; float32 where it names none."""
    if name != "auto":
        return DTYPES[name]
    dtype = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype or torch.float32
    if dtype not in DTYPES.values():
        raise ConfigError(f"the checkpoint's dtype is {dtype}; set model.dtype to one of {', '.join(DTYPES)}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(config: Any, asked: int | None) -> int:
    """The length asked for, checked against what the model was made for."""
    text = config.get_text_config(decoder=True)
    made_for: int | None = getattr(text, "max_position_embeddings", None)
    length = asked or made_for
    if length is None:
        raise ConfigError(f"{architecture_name(config)} states no maximal length; set model.max_model_len")
    if made_for is not None and length > made_for:
        raise ConfigError(
            f"model.max_model_len is {asked}, but {architecture_name(config)} was made for {made_for} tokens"
        )
    limit, kind = rope_limit(text)
    if limit is not None and length > limit:
        raise UnsupportedError(
            f"{architecture_name(config)} has {kind} RoPE, which turns earlier tokens anew once a text is longer than "
            f"{limit} tokens, so cached keys would be wrong; set model.max_model_len to at most {limit}"
        )
    return length


def _weight_headers(folder: Path) -> list[str]:
    """Checks that every weight file is there and complete; describes each for the fingerprint."""
    index = folder / "model.safetensors.index.json"
    files = weight_files(folder)
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"cannot read '{index}': {one_line(error)}") from None
        missing = sorted(shards - {path.name for path in files})
        if missing:
            raise ModelError(f"model folder '{folder}' lacks weight file {missing[0]} ({len(missing)} missing)")
    headers = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                num_tensors = len(file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"weight file '{path}' is corrupt or incomplete: {one_line(error)}") from None
        headers.append(f"{path.name}:{num_tensors}:{_sampled_hash(path)}")
    return headers


def _sampled_hash(path: Path) -> str:
    """Identifies a large file by size, time and samples spread over it."""
    stat = path.stat()
    digest = hashlib.sha256(f"{stat.st_size}:{stat.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        for index in range(_FINGERPRINT_SAMPLES):
            file.seek(stat.st_size * index // _FINGERPRINT_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _weights(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, section: ModelSection) -> nn.Module:
    """Builds the module on the meta device and loads its weights straight to where they belong."""
    try:
        with quiet_transformers():
            module, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map={"": device},
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=section.trust_remote_code,
                output_loading_info=True,
                # Mismatches are reported below by name; transformers would print a table and raise.
                ignore_mismatched_sizes=True,
            )
    except (MemoryError, torch.OutOfMemoryError, CompspecError):
        raise
    except SafetensorError as error:
        raise ModelError(f"the weights of model '{section.source}' are corrupt: {one_line(error)}") from None
    except Exception as error:
        if f"'{ATTENTION_NAME}'" == str(error) or f'attn_implementation="{ATTENTION_NAME}"' in str(error):
            raise UnsupportedError(
                f"{architecture_name(config)} is not supported: it takes no attention function but its own"
            ) from None
        raise ModelError(f"cannot load model '{section.source}': {type(error).__name__}: {one_line(error)}") from error
    for problem, names in (
        ("lacks", info["missing_keys"]),
        ("has other shapes for", info["mismatched_keys"]),
    ):
        if names:
            shown = sorted(name if isinstance(name, str) else name[0] for name in names)
            raise ModelError(
                f"the checkpoint of model '{section.source}' {problem} {len(shown)} of its weights: "
                + ", ".join(shown[:3])
            )
    assert isinstance(module, nn.Module)
    return module.eval().requires_grad_(False)


def _tokenizer(folder: Path, section: ModelSection) -> Any:
    """The tokenizer named in the section, else the model's own, else None."""
    if section.tokenizer is None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    named = Path(section.tokenizer or folder).expanduser()
    where = named if named.exists() else section.tokenizer
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=section.trust_remote_code)
    except Exception as error:
        raise ModelError(f"cannot load the tokenizer '{where}': {one_line(error)}") from None


def _fingerprint(config: Any, dtype: torch.dtype, headers: list[str]) -> str:
    description = [config.to_json_string(), str(dtype), torch.__version__, transformers.__version__, *headers]
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:32]
