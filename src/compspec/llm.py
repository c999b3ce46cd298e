"""Text in, text out: the engine with a tokenizer around it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from compspec.config import EngineConfig, ModelSection, load_config, make_config
from compspec.detokenizer import Detokenizer
from compspec.engine import Engine
from compspec.errors import ConfigError, RequestError, UnsupportedError
from compspec.request import FinishReason, Request, RequestStats, TokenDelta
from compspec.runner.model_runner import Progress
from compspec.sampling.params import SamplingParams
from compspec.stats import SpecStats

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: as given, or a number.
        prompt: the text, or None where token ids were given.
        prompt_token_ids, token_ids: prompt and output.
        text: the output's text; None without a tokenizer.
        finish_reason: stop, length or abort.
        stats: what it cost.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a streamed output: deltas, and in the last one how it ended."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: RequestStats


class LLM:
    """A model ready to generate.

    `LLM(config)`, `LLM("path-or-hub-id", dtype="bfloat16", speculative={"method": "ngram"})` and
    `LLM.from_yaml(path, **overrides)` are the same thing. Keyword arguments are sections of the
    configuration, or fields of its `model` section.

    Args:
        config: an `EngineConfig`, or the model's source.
        progress: told of each step of the start-up.

    Raises:
        CompspecError: one of its kinds; see `compspec.errors`.
    """

    def __init__(
        self, config: EngineConfig | str | None = None, *, progress: Progress | None = None, **overrides: Any
    ) -> None:
        if isinstance(config, EngineConfig):
            resolved = make_config(config.model_dump(), _by_section(overrides)) if overrides else config
        elif config is None:
            resolved = make_config({}, _by_section(overrides))
        else:
            resolved = make_config({"model": {"source": config}}, _by_section(overrides))
        self.config = resolved
        self.engine = Engine(resolved, progress=progress)
        self.tokenizer: Any = self.engine.loaded.tokenizer
        self._jobs: dict[str, _Job] = {}

    @classmethod
    def from_yaml(cls, path: str | Path, *, progress: Progress | None = None, **overrides: Any) -> "LLM":
        """Makes an LLM from a configuration file; see `load_config`."""
        return cls(load_config(path, _by_section(overrides)), progress=progress)

    @property
    def stats(self) -> SpecStats:
        """Sums over everything that this LLM generated."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts, batched.

        Args:
            prompts: a prompt or several; each a string or a list of token ids.
            params: for all, or one per prompt; default: the configuration's `sampling`.
            on_finish: called with the prompt's index as each output is complete.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError, CapacityError: a prompt or parameter is wrong; then none of them runs.
        """
        listed = self._prompts(prompts)
        jobs = self._submit(listed, self._params(params, len(listed)))
        outputs: dict[int, RequestOutput] = {}
        try:
            while len(outputs) < len(jobs):
                self._step()
                for index, job in enumerate(jobs):
                    if index not in outputs and job.request.finish_reason is not None:
                        outputs[index] = job.output()
                        if on_finish is not None:
                            on_finish(index, outputs[index])
        finally:
            self._abort(jobs)
        return [outputs[index] for index in range(len(jobs))]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next turn of conversations, through the tokenizer's chat template.

        Args:
            conversations: a list of messages ({"role": ..., "content": ...}), or a list of such lists.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if single else conversations
        return self.generate([self.chat_token_ids(messages) for messages in listed], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "Stream":
        """Generates for one prompt and yields each step's part; closing the stream aborts the request.

        The request is submitted when this is called, so a wrong one raises here. Several streams, and calls of
        `generate` beside them, run in the same batch.
        """
        (job,) = self._submit(self._prompts([prompt]), self._params(params, 1))
        return Stream(job, self._step, lambda: self._abort([job]))

    def chat_token_ids(self, messages: Conversation) -> list[int]:
        """The token ids of a conversation, ready for the assistant's turn.

        Raises:
            UnsupportedError: the tokenizer has no chat template.
            RequestError: the template refuses the messages.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UnsupportedError("this model's tokenizer has no chat template; use generate with a plain prompt")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise whatever their authors chose
            raise RequestError(f"the chat template refused the messages: {error}") from None
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _step(self) -> None:
        """Runs one step and hands every delta to its job, whoever waits for it."""
        for delta in self.engine.step():
            job = self._jobs.get(delta.request.request_id)
            if job is None:
                continue  # submitted to the engine directly
            job.take(delta)
            if delta.finish_reason is not None:
                del self._jobs[delta.request.request_id]

    def _abort(self, jobs: Sequence["_Job"]) -> None:
        for job in jobs:
            if job.request.finish_reason is None:
                self.engine.abort(job.request.request_id)
                self._jobs.pop(job.request.request_id, None)

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list["_Job"]:
        """Queues all, or none if one is refused."""
        jobs: list[_Job] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                token_ids = prompt if not isinstance(prompt, str) else self.encode(prompt)
                job = _Job(self.engine.add_request(token_ids, each), text, self.tokenizer)
                jobs.append(job)
                self._jobs[job.request.request_id] = job
        except Exception:
            self._abort(jobs)
            raise
        return jobs

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a plain prompt, special tokens as the tokenizer adds them.

        Raises:
            UnsupportedError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise UnsupportedError("this model has no tokenizer; give prompts as lists of token ids")
        try:
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
        except (TypeError, ValueError, UnicodeError) as error:  # a lone surrogate, for one
            raise RequestError(f"the tokenizer refused the prompt: {error}") from None
        return ids

    def _prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        listed: list[Any] = list(prompts)
        one_prompt_of_ids = bool(listed) and all(isinstance(item, Integral) for item in listed)
        return [listed] if one_prompt_of_ids else listed

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.config.sampling] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling parameters were given for {count} prompts")
        return list(params)


class Stream(Iterator[Chunk]):
    """The chunks of one request. Closing it, leaving its `with` block or dropping it aborts the request."""

    def __init__(self, job: "_Job", step: Callable[[], None], abort: Callable[[], None]) -> None:
        self._job = job
        self._step = step
        self._abort = abort

    def __next__(self) -> Chunk:
        while not self._job.chunks:
            if self._job.request.finish_reason is not None:
                raise StopIteration
            self._step()
        return self._job.chunks.popleft()

    def close(self) -> None:
        """Aborts the request if it is not finished; no chunk follows."""
        self._abort()
        self._job.chunks.clear()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Job:
    """A request and its text so far."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Any) -> None:
        self.request = request
        self._prompt = prompt
        token_ids = request.token_ids.tolist()
        self._detokenizer = Detokenizer(tokenizer, token_ids) if tokenizer is not None else None
        self._text = ""
        self.chunks: deque[Chunk] = deque()

    def take(self, delta: TokenDelta) -> None:
        """Adds a delta."""
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.push(delta.token_ids)
            if delta.finish_reason is not None:
                text += self._detokenizer.finish()
        self._text += text
        self.chunks.append(
            Chunk(
                text=text,
                token_ids=list(delta.token_ids),
                finish_reason=delta.finish_reason,
                stats=delta.request.stats,
            )
        )

    def output(self) -> RequestOutput:
        """The finished request."""
        request = self.request
        assert request.finish_reason is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens].tolist(),
            token_ids=request.output_token_ids,
            text=self._text if self._detokenizer is not None else None,
            finish_reason=request.finish_reason,
            stats=request.stats,
        )


def _by_section(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM` as nested configuration: section names as they are, the rest into `model`.

    Raises:
        ConfigError: a name that is neither a section nor a field of the model section.
    """
    nested: dict[str, Any] = {}
    model_fields = list(ModelSection.model_fields)
    for name, value in overrides.items():
        head = name.partition(".")[0]
        if head in EngineConfig.model_fields:
            nested[name] = value
        elif name in model_fields:
            nested[f"model.{name}"] = value
        else:
            valid = [*EngineConfig.model_fields, *model_fields]
            raise ConfigError(f"unknown argument '{name}'; valid are: {', '.join(valid)}")
    return nested
