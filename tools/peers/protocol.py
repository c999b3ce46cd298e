"""The worker's end of the protocol: JSON lines on standard input and output.

The first line is the `Setup`; the answer, once the model is loaded, is `{"ready": {...}}`. Every further line is a
`Task`, and its answer `{"outputs": [...], "wall_s": ...}`. Whatever fails is answered with `{"error": "..."}`. A worker
ends with its standard input. What an engine prints goes to standard error.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypedDict


class Setup(TypedDict):
    """What a worker has to load.

    Attributes:
        model: folder with config.json, safetensors and tokenizer.
        gguf: the GGUF file of the same model, or None.
        config: compspec's configuration file, for its own worker.
        max_model_len: longest prompt and output together, in tokens.
        max_num_seqs: most requests at a time.
        eos_token_ids: tokens that end an output.
        num_threads: CPU threads to compute with.
        num_drafts: the values of `Task.num_drafts` that will come.
        max_ngram: longest n-gram that prompt lookup looks for.
    """

    model: str
    gguf: str | None
    config: str | None
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int]
    num_threads: int
    num_drafts: list[int]
    max_ngram: int


class Task(TypedDict):
    """Prompts to run, greedily, each until an end-of-text token or `max_tokens`.

    Attributes:
        prompts: token ids.
        num_drafts: tokens to draft by prompt lookup; 0: none, without speculation.
        concurrency: how many requests run at a time.
    """

    prompts: list[list[int]]
    max_tokens: int
    num_drafts: int
    concurrency: int


class Output(TypedDict):
    """What came of one prompt.

    Attributes:
        token_ids: the output, with the end-of-text token where the engine gives it.
        num_first: tokens that came at once with the first.
        first_s, total_s: seconds from submission to the first token, and to the last.
    """

    token_ids: list[int]
    num_first: int
    first_s: float
    total_s: float


class Engine(Protocol):
    """A loaded engine.

    Attributes:
        version: of the engine, with its name.
        settings: in a few words, what it was loaded with.
        can_batch: whether it takes tasks with a concurrency above 1.
    """

    version: str
    settings: str
    can_batch: bool

    def run(self, task: Task) -> list[Output]:
        """Runs all prompts; nothing of earlier runs may be reused."""
        ...


def serve(load: Callable[[Setup], Engine]) -> None:
    """Loads the engine that the first line asks for, and runs tasks until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        engine = load(json.loads(sys.stdin.readline()))
        answer({"ready": {"version": engine.version, "settings": engine.settings, "can_batch": engine.can_batch}})
        for line in sys.stdin:
            task: Task = json.loads(line)
            started = time.perf_counter()
            outputs = engine.run(task)
            answer({"outputs": outputs, "wall_s": time.perf_counter() - started})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


class Clock:
    """Times one output while its tokens come."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first_s = 0.0
        self._num_first = 0

    def tick(self, num_tokens: int) -> None:
        """Says how many tokens the output has now; to be called as soon as they are there."""
        if self._num_first == 0 and num_tokens > 0:
            self._first_s = time.perf_counter() - self._started
            self._num_first = num_tokens

    def stop(self, token_ids: list[int]) -> Output:
        """The finished output."""
        total_s = time.perf_counter() - self._started
        return {"token_ids": token_ids, "num_first": self._num_first, "first_s": self._first_s, "total_s": total_s}
