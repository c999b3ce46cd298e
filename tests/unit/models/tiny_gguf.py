"""Writes a small GGUF file: a random llama with a byte-level BPE tokenizer."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import CHAT_TEMPLATE, tiny_config, tiny_tokenizer

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.{layer}.{theirs}.weight": f"blk.{layer}.{ours}.weight"
        for layer in range(2)
        for theirs, ours in _LAYER_NAMES.items()
    },
}


def write_tiny_gguf(path: Path, tmp: Path, kind: str = "Q8_0", skip: str | None = None) -> dict[str, torch.Tensor]:
    """Writes the file and returns the weights by their transformers names, as they were before quantisation.

    Args:
        kind: type of the matrices: Q8_0, F16 or F32.
        skip: a tensor to leave out.
    """
    tokenizer = tiny_tokenizer(tmp / "tokenizer")
    config = tiny_config("llama", vocab_size=len(tokenizer), num_key_value_heads=4)
    torch.manual_seed(3)
    weights = AutoModelForCausalLM.from_config(config).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokenizer))
    writer.add_tokenizer_model("gpt2")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in weights.items():
        if name == skip:
            continue
        data = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp keeps the two halves of each head's rotary pairs interleaved.
            heads = config.num_attention_heads
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        dtype = getattr(gguf.GGMLQuantizationType, kind if data.ndim > 1 else "F32")
        writer.add_tensor(_NAMES[name], np.ascontiguousarray(gguf.quants.quantize(data, dtype)), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
