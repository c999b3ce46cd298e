"""Tiny random models of every family that compspec runs, and a small real tokenizer for tests of text."""

import functools
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compspec.models.quiet import quiet_transformers

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_HEAD_DIM = {"head_dim": 16}
_MOE = {"num_experts": 4, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": _HEAD_DIM,
    "gemma": _HEAD_DIM,
    "gemma2": {**_HEAD_DIM, "sliding_window": 16},
    "gemma3_text": {**_HEAD_DIM, "sliding_window": 16},
    "phi": {},
    "phi3": {"sliding_window": 16},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "starcoder2": {"sliding_window": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "glm4": _HEAD_DIM,
    "exaone4": {"sliding_window": 16},
    "ministral": {**_HEAD_DIM, "sliding_window": 16},
    "seed_oss": _HEAD_DIM,
    "ernie4_5": {},
    "helium": _HEAD_DIM,
    "persimmon": {},
    "hunyuan_v1_dense": _HEAD_DIM,
}

# Families that must be refused at load, and the options that make them tiny.
REFUSED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "stablelm": {},
    "nemotron": {},
    "falcon": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, **_HEAD_DIM},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "mamba": {"state_size": 4},
    "bert": {},
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of a tiny model of `family`."""
    options = FAMILIES[family] if family in FAMILIES else REFUSED[family]
    return AutoConfig.for_model(family, **{**COMMON, **options, **overrides})


def tiny_model_folder(
    family: str,
    tmp: Path,
    *,
    dtype: str = "float32",
    vocab_size: int = 128,
    seed: int = 0,
    gain: float = 0.9,
    **config_overrides: Any,
) -> Path:
    """Saves a random model as safetensors below `tmp`; the same arguments give the same weights.

    Weights are larger than a training run would start with, so that greedy output varies and, after a
    while, repeats: there is something to accept and something to reject.

    Args:
        gain: 0.8 makes the greedy output of llama repeat itself mostly, 0.9 about a third of the time, 1.5 never.

    Returns:
        The model's folder, `tmp / <family>-<key>`; it has no tokenizer (see `tiny_tokenizer`).
    """
    arguments = json.dumps([family, dtype, vocab_size, seed, gain, config_overrides], sort_keys=True)
    name = f"{family}-{hashlib.sha256(arguments.encode()).hexdigest()[:8]}"
    folder = Path(tmp) / name
    if not folder.exists():
        shutil.copytree(_made(arguments), folder)
    return folder


@functools.cache
def _made(arguments: str) -> Path:
    family, dtype, vocab_size, seed, gain, overrides = json.loads(arguments)
    config = tiny_config(family, **{"vocab_size": vocab_size, **overrides})
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        _enlarge(model, gain)
        model = model.to(getattr(torch, dtype))
        folder = Path(_session_folder().name, hashlib.sha256(arguments.encode()).hexdigest())
        model.save_pretrained(folder)
    return folder


@functools.cache
def _session_folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="compspec-tiny-")


def _enlarge(model: torch.nn.Module, gain: float) -> None:
    """Draws matrices so that layers outweigh the embedding; else tied weights would repeat the last token."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    for parameter in model.parameters():
        if parameter.dim() > 1:
            std = 0.01 if id(parameter) in embeddings else gain * parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=std)
        elif bool((parameter == 0).all()):
            torch.nn.init.normal_(parameter, std=0.1)


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder: Path, vocab_size: int = 512) -> Any:
    """Adds a byte-level BPE tokenizer with a chat template to a model folder, and returns it.

    Ids 0, 1 and 2 are `<pad>`, `<bos>` and `<eos>`, as in `COMMON`. Any text survives encode and decode.

    Args:
        vocab_size: at least 263; give the model at least as many rows.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog", "to be or not to be"] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    return fast
