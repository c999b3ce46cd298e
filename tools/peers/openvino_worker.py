"""OpenVINO GenAI on the GGUF file: one pipeline without drafts, one with its prompt lookup."""

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from peers.protocol import Clock, Output, Setup, Task, serve


class OpenVino:
    """One request at a time."""

    can_batch = False

    def __init__(self, setup: Setup) -> None:
        if setup["gguf"] is None:
            raise ValueError("OpenVINO's worker needs a GGUF file")
        self.version = f"OpenVINO GenAI {genai.__version__}"
        self.settings = f"{Path(setup['gguf']).name}, max_ngram_size={setup['max_ngram']}, no prefix caching"
        self._eos = set(setup["eos_token_ids"])
        self._max_ngram = setup["max_ngram"]
        kinds = {num_drafts > 0 for num_drafts in setup["num_drafts"]}
        self._pipelines = {is_speculative: self._load(setup, is_speculative) for is_speculative in kinds}

    @staticmethod
    def _load(setup: Setup, is_speculative: bool) -> genai.LLMPipeline:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = setup["max_model_len"]
        options = {"prompt_lookup": True} if is_speculative else {}
        return genai.LLMPipeline(
            setup["gguf"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=setup["num_threads"], **options
        )

    def run(self, task: Task) -> list[Output]:
        """See `protocol.Engine`."""
        config = genai.GenerationConfig()
        config.max_new_tokens = task["max_tokens"]
        config.do_sample = False
        config.stop_token_ids = self._eos
        config.apply_chat_template = False
        if task["num_drafts"]:
            config.num_assistant_tokens = task["num_drafts"]
            config.max_ngram_size = self._max_ngram
        pipeline = self._pipelines[task["num_drafts"] > 0]
        return [self._generate(pipeline, prompt, config) for prompt in task["prompts"]]

    @staticmethod
    def _generate(pipeline: genai.LLMPipeline, prompt: list[int], config: genai.GenerationConfig) -> Output:
        clock = Clock()
        listener = _Listener(clock)
        result = pipeline.generate(ov.Tensor(np.array([prompt], dtype=np.int64)), config, listener)
        return clock.stop(list(result.tokens[0]))


class _Listener(genai.StreamerBase):  # type: ignore[misc]
    """Hears of tokens as they come."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._num_tokens = 0

    def write(self, token: int | list[int]) -> genai.StreamingStatus:
        """Takes a token, or those of a step."""
        self._num_tokens += len(token) if isinstance(token, list) else 1
        self._clock.tick(self._num_tokens)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is left to flush."""


if __name__ == "__main__":
    serve(OpenVino)
