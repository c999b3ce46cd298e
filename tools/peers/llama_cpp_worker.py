"""llama-cpp-python: one context without drafts, one with its prompt lookup."""

from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from peers.protocol import Clock, Output, Setup, Task, serve


class LlamaCpp:
    """One request at a time: the Python binding has no batches."""

    can_batch = False

    def __init__(self, setup: Setup) -> None:
        if setup["gguf"] is None:
            raise ValueError("llama.cpp needs a GGUF file")
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.settings = f"{Path(setup['gguf']).name}, max_ngram_size={setup['max_ngram']}, no prefix reuse"
        self._eos = frozenset(setup["eos_token_ids"])
        self._models = {num_drafts: self._load(setup, num_drafts) for num_drafts in setup["num_drafts"]}

    @staticmethod
    def _load(setup: Setup, num_drafts: int) -> llama_cpp.Llama:
        draft = LlamaPromptLookupDecoding(max_ngram_size=setup["max_ngram"], num_pred_tokens=num_drafts)
        return llama_cpp.Llama(
            model_path=setup["gguf"],
            n_ctx=setup["max_model_len"],
            n_threads=setup["num_threads"],
            n_threads_batch=setup["num_threads"],
            draft_model=draft if num_drafts else None,
            logits_all=num_drafts > 0,  # the binding verifies drafts on logits of every token
            verbose=False,
        )

    def run(self, task: Task) -> list[Output]:
        """See `protocol.Engine`."""
        return [
            self._generate(self._models[task["num_drafts"]], prompt, task["max_tokens"]) for prompt in task["prompts"]
        ]

    def _generate(self, model: llama_cpp.Llama, prompt: list[int], max_tokens: int) -> Output:
        model.reset()  # else a prefix of the last prompt is reused
        clock, tokens = Clock(), []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            clock.tick(len(tokens))
            if token in self._eos or len(tokens) == max_tokens:
                break
        return clock.stop(tokens)


if __name__ == "__main__":
    serve(LlamaCpp)
