"""A trial of this machine: a tiny random model through every static shape, with and without speculation."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from compspec.config import make_config
from compspec.engine import Engine
from compspec.models.loader import random_model
from compspec.request import Request
from compspec.sampling.params import SamplingParams

_MODEL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)
_SETTINGS = {
    "speculative.method": "ngram",
    "speculative.adaptive": False,  # every width runs
    "scheduler.max_num_seqs": 4,
    "numerics.prefill_chunk": 64,
    "cache.num_blocks": 200,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was seen.

    Attributes:
        attention: the backend that ran.
        num_buckets, num_cuda_graphs: static shapes, and how many of them are one CUDA graph.
        num_skips, num_rerecordings, num_recompilations: graphs left out; captured, and compiled, after start-up.
        num_requests, num_equal: requests, and those whose output is the same with and without speculation.
        num_accepted: drafts that were kept.
    """

    attention: str
    num_buckets: int
    num_cuda_graphs: int
    num_skips: int
    num_rerecordings: int
    num_recompilations: int
    num_requests: int
    num_equal: int
    num_accepted: int

    @property
    def is_captured(self) -> bool:
        """Every shape is one CUDA graph, and none was left out or captured again."""
        return self.num_cuda_graphs == self.num_buckets and not (self.num_skips or self.num_rerecordings)

    @property
    def is_lossless(self) -> bool:
        """Drafts were kept, and changed nothing."""
        return self.num_accepted > 0 and self.num_equal == self.num_requests


def run_trial(device: torch.device, settings: dict[str, object] | None = None) -> Trial:
    """Runs requests of every kind in batches that shrink and grow.

    Args:
        device: where; its compiler and kernels are the ones that an engine would use.
        settings: dotted configuration keys that replace those of the trial.

    Raises:
        CompspecError: as `Engine`.
    """
    dtype = torch.bfloat16
    config = make_config(
        {"model": {"source": "random"}}, {**_SETTINGS, "model.device": str(device), **(settings or {})}
    )
    engine = Engine(config, loaded=random_model(_MODEL, dtype, device))
    prompts = [[3 + index, 7, 11] * (1 + 9 * index) for index in range(6)]
    wanted = [
        SamplingParams(
            max_tokens=8 + 4 * index,
            ignore_eos=True,
            seed=index,
            temperature=0.7 * (index % 2),
            repetition_penalty=1.0 + 0.1 * (index % 3),
        )
        for index in range(len(prompts))
    ]
    plain = [each.model_copy(update={"speculative": False}) for each in wanted]
    alone = [_run(engine, [prompt], [params])[0] for prompt, params in zip(prompts, plain, strict=True)]
    together = _run(engine, prompts, wanted)
    stats = engine.stats
    return Trial(
        attention=engine.runner.attention.implementation,
        num_buckets=len(engine.runner.buckets.all),
        num_cuda_graphs=stats.num_cuda_graphs,
        num_skips=stats.num_cuda_graph_skips,
        num_rerecordings=stats.num_cuda_graph_rerecordings,
        num_recompilations=stats.num_recompilations,
        num_requests=len(prompts),
        num_equal=sum(a.output_token_ids == b.output_token_ids for a, b in zip(alone, together, strict=True)),
        num_accepted=stats.num_accepted_tokens,
    )


def _run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    return requests
