"""Makes a small draft model for a target: a few of its layers, trained on what the target itself says.

    compspec generate -c configs/bench.yaml --prompts prompts.jsonl --output outputs.jsonl
    python tools/distill_draft.py -c configs/bench.yaml --prompts prompts.jsonl --outputs outputs.jsonl --save draft/

The result is a model folder with the target's tokenizer, for `speculative: {method: draft_model, model: draft/}`.
Embedding, last norm and head are copied from the target, and only the norm is trained with the layers, which start as
copies of target layers spread over its depth. The prompts should be like those that will be served, and not those of a
benchmark. On a CPU this takes minutes for a model of 100 million parameters and some hundred prompts.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from compspec import LLM, CompspecError
from compspec.jsonl import read_prompts

IGNORED = -100

_NORM_RATE = 20.0


def main() -> None:
    """Reads, trains, saves."""
    args = _arguments()
    try:
        # The model and its tokenizer are wanted, not its speed.
        llm = LLM.from_yaml(args.config, speculative={"method": "none"}, compile={"mode": "none"}, numerics="fast")
        texts = _texts(llm, args)
    except CompspecError as error:
        sys.exit(f"error: {error}")
    target: Any = llm.engine.loaded.adapter.module
    draft = shorter_model(target, args.num_layers)
    train(draft, texts, args.epochs, args.learning_rate, args.batch_size, args.seed)
    draft.to(llm.engine.loaded.adapter.dtype).save_pretrained(args.save)
    llm.tokenizer.save_pretrained(args.save)
    print(f"saved {args.save}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, required=True, help="of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL as for compspec generate")
    parser.add_argument("--outputs", type=Path, required=True, help="what compspec generate made of them")
    parser.add_argument("--save", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args: argparse.Namespace = parser.parse_args()
    return args


def _texts(llm: LLM, args: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of every line, token ids."""
    lines = map(json.loads, args.outputs.read_text(encoding="utf-8").splitlines())
    said = {str(line["id"]): line["token_ids"] for line in lines}
    texts = []
    for line in read_prompts(args.prompts):
        if line.prompt_token_ids is not None:
            prompt = line.prompt_token_ids
        elif line.messages is not None:
            prompt = llm.chat_token_ids(line.messages)
        else:
            prompt = llm.encode(line.prompt or "")
        texts.append((prompt, said[str(line.id)]))
    print(f"{len(texts)} prompts, {sum(len(output) for _, output in texts)} output tokens", flush=True)
    return texts


def shorter_model(target: Any, num_layers: int) -> Any:
    """A model of the target's class with copies of `num_layers` of its layers, float32, on the CPU."""
    config = copy.deepcopy(target.config)
    num_all = config.num_hidden_layers
    config.num_hidden_layers = num_layers
    chosen = [round(index * (num_all - 1) / max(1, num_layers - 1)) for index in range(num_layers)]
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in chosen]
    draft = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    state = {name: value.float().cpu() for name, value in target.state_dict().items() if "compspec" not in name}
    kept = {}
    for name, value in state.items():
        head, separator, tail = name.partition("layers.")
        if not separator:
            kept[name] = value
            continue
        number, _, rest = tail.partition(".")
        kept |= {f"{head}layers.{place}.{rest}": value for place, index in enumerate(chosen) if index == int(number)}
    draft.load_state_dict(kept, strict=False)
    return draft


def train(
    model: Any, texts: list[tuple[list[int], list[int]]], epochs: int, rate: float, batch_size: int, seed: int
) -> None:
    """Trains everything but embedding and head to say what the target said."""
    frozen = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Norms set the scale of the logits, which is far off at first.
    groups = [{"params": [one for one in trained if one.dim() > 1], "lr": rate}]
    groups.append({"params": [one for one in trained if one.dim() <= 1], "lr": _NORM_RATE * rate})
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    batches = _batches(texts, batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [rate, _NORM_RATE * rate], total_steps=epochs * len(batches), pct_start=0.1
    )
    shuffle = random.Random(seed)
    model.train()
    for epoch in range(epochs):
        shuffle.shuffle(batches)
        started, loss_sum, num_right, num_tokens = time.perf_counter(), 0.0, 0, 0
        for ids, labels in batches:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = _base(model)(input_ids=ids, use_cache=False).last_hidden_state
                at = labels != IGNORED
                logits = model.get_output_embeddings()(hidden[at])
            wanted = labels[at]
            loss = F.cross_entropy(logits.float(), wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            loss_sum += float(loss.detach()) * len(wanted)
            num_right += int((logits.argmax(-1) == wanted).sum())
            num_tokens += len(wanted)
        print(
            f"epoch {epoch + 1}: loss {loss_sum / num_tokens:.3f}, {num_right / num_tokens:.1%} of tokens right, "
            f"{time.perf_counter() - started:.0f} s",
            flush=True,
        )
    model.eval()


def _base(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


def _batches(texts: list[tuple[list[int], list[int]]], batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Token ids, padded on the right, and per position the token that follows, where it is the target's."""
    ordered = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    batches = []
    for first in range(0, len(ordered), batch_size):
        part = ordered[first : first + batch_size]
        longest = max(len(prompt) + len(output) for prompt, output in part) - 1
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        labels = torch.full((len(part), longest), IGNORED)
        for row, (prompt, output) in enumerate(part):
            whole = torch.tensor(prompt + output)
            ids[row, : len(whole) - 1] = whole[:-1]
            labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        batches.append((ids, labels))
    return batches


if __name__ == "__main__":
    main()
