"""transformers' own generate: eager, bf16, plain and with prompt lookup."""

from typing import Any

import torch
import transformers

from peers.protocol import Clock, Output, Setup, Task, serve


class Transformers:
    """One request at a time: a padded batch would be another computation."""

    can_batch = False

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup["num_threads"])
        self.version = f"transformers {transformers.__version__}"
        self.settings = f"eager, bf16, max_matching_ngram_size={setup['max_ngram']}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.bfloat16).eval()
        self._eos = setup["eos_token_ids"]
        self._max_ngram = setup["max_ngram"]

    def run(self, task: Task) -> list[Output]:
        """See `protocol.Engine`."""
        lookup = {"prompt_lookup_num_tokens": task["num_drafts"], "max_matching_ngram_size": self._max_ngram}
        options = lookup if task["num_drafts"] else {}
        return [self._generate(prompt, task["max_tokens"], options) for prompt in task["prompts"]]

    @torch.inference_mode()
    def _generate(self, prompt: list[int], max_tokens: int, options: dict[str, Any]) -> Output:
        clock = Clock()
        input_ids = torch.tensor([prompt])
        tokens = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0] if self._eos else 0,
            stopping_criteria=[_Listener(clock, len(prompt))],
            **options,
        )
        return clock.stop(tokens[0, len(prompt) :].tolist())


class _Listener:
    """A stopping criterion that never stops: generate shows it the tokens after every step."""

    def __init__(self, clock: Clock, prompt_len: int) -> None:
        self._clock = clock
        self._prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._clock.tick(input_ids.shape[1] - self._prompt_len)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


if __name__ == "__main__":
    serve(Transformers)
