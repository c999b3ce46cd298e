"""Text in, text out: the engine with a tokenizer around it."""

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from compspec.config import EngineConfig, ModelSection, load_config, make_config
from compspec.detokenizer import Detokenizer, OutputText
from compspec.engine import Engine
from compspec.errors import ConfigError, RequestError, UnsupportedError, one_line
from compspec.request import FinishReason, Request, RequestStats, TokenDelta, TokenLogprobs
from compspec.runner.model_runner import Progress
from compspec.sampling.noise import sample_seed
from compspec.sampling.params import SamplingParams
from compspec.stats import SpecStats

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a finished request.

    Attributes:
        index: 0 .. n - 1.
        token_ids: the output, what ended it included.
        text: the output's text without what ended it, stop token or stop text; None without a tokenizer.
        finish_reason: stop, length, abort or error.
        stop_reason: the stop token id or stop text that ended it; None for the model's EOS.
        error: why it failed, with finish_reason error; what was generated before is kept.
        logprobs: one dict per output token, token id -> Logprob: the token itself, then the most likely ones.
        stats: what it cost.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None
    logprobs: list[TokenLogprobs] | None
    stats: RequestStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    What a sample has (`text`, `token_ids`, `finish_reason`, ...) can be asked of the request itself: it is that
    of the first one.

    Attributes:
        request_id: as given, or a number.
        prompt: the text, or None where token ids were given.
        prompt_token_ids: the prompt.
        prompt_logprobs: one entry per prompt token, None for the first, if asked for.
        outputs: the samples, `SamplingParams.n` of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample, as are the others below."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str | None:
        """See `CompletionOutput`."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """See `CompletionOutput`."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """See `CompletionOutput`."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        """See `CompletionOutput`."""
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """See `CompletionOutput`."""
        return self.outputs[0].logprobs

    @property
    def stats(self) -> RequestStats:
        """See `CompletionOutput`."""
        return self.outputs[0].stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a streamed output: deltas, and in the last one of a sample how it ended.

    Attributes:
        index: which sample it belongs to.
        text, token_ids, logprobs: what is new.
        finish_reason, stop_reason, error: as in `CompletionOutput`, with a sample's last piece.
        prompt_logprobs: with the first piece of the first sample, if asked for.
        stats: of the sample; they go on changing until it is finished.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
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
        self._num_finished = 0
        self._num_aborts_seen = 0

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
            One output per prompt, in their order. A request that fails while it runs has finish_reason `error`
            and says why in `error`; the others are not affected.

        Raises:
            RequestError, CapacityError, UnsupportedError: a prompt or parameter is wrong; then none of them runs.
        """
        listed = self._prompts(prompts)
        jobs = self._submit(listed, self._params(params, len(listed)), keep_chunks=False)
        outputs: dict[int, RequestOutput] = {}
        num_seen = -1
        try:
            while len(outputs) < len(jobs):
                self._step()
                if num_seen == self._num_finished:
                    continue  # nothing to look for among what may be thousands
                num_seen = self._num_finished
                for index, job in enumerate(jobs):
                    if index not in outputs and job.is_finished:
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
        (job,) = self._submit(self._prompts([prompt]), self._params(params, 1), keep_chunks=True)
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
        return self._tokenize(text, "messages", add_special_tokens=False)

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Refuses a request that could not run; `generate` does the same.

        Returns:
            The prompt's token ids.

        Raises:
            RequestError, UnsupportedError: as `generate`.
        """
        token_ids = prompt if not isinstance(prompt, str) else self.encode(prompt)
        return self.engine.check_request(token_ids, self.engine_params(params))

    def engine_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters in token ids, as `engine.add_request` takes them: bad words tokenised.

        Raises:
            UnsupportedError: stop texts without a tokenizer.
            RequestError: a bad word that has no tokens.
        """
        if self.tokenizer is None:
            if params.stop:
                raise UnsupportedError("this model has no tokenizer; use stop_token_ids instead of stop")
            return params
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            words.update(dict.fromkeys([word] if isinstance(word, tuple) else self._spellings(word)))
        return params.model_copy(update={"bad_words": tuple(words)})

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens at the beginning of a text, and after a space."""
        after_space = f" {word.lstrip(' ')}"
        texts = [word, after_space] if after_space.strip(" ") else [word]
        found = [tuple(self._tokenize(text, f"bad word {word!r}", add_special_tokens=False)) for text in texts]
        if not all(found):
            raise RequestError(f"bad word {word!r} has no tokens")
        return found

    def _tokenize(self, text: str, what: str, **options: Any) -> list[int]:
        try:
            ids: list[int] = self.tokenizer(text, **options)["input_ids"]
        except (TypeError, ValueError, UnicodeError) as error:  # a lone surrogate, for one
            raise RequestError(f"the tokenizer refused the {what}: {one_line(error)}") from None
        return ids

    def _step(self) -> None:
        """Runs one step and hands every delta to its job, whoever waits for it."""
        for delta in self.engine.step():
            self._hand_over(delta)
        if self._num_aborts_seen != self.engine.num_aborts:  # perhaps through the engine, behind our back
            self._num_aborts_seen = self.engine.num_aborts
            aborted = [request for job in list(self._jobs.values()) for request in job.aborted()]
            for request in dict.fromkeys(aborted):
                self._hand_over(TokenDelta(request=request, token_ids=(), finish_reason=FinishReason.ABORT))
        if self._jobs and not self.engine.has_work:
            lost, self._jobs = len(self._jobs), {}
            raise RuntimeError(f"the engine has ended, but {lost} requests have not: an earlier step was interrupted")

    def _hand_over(self, delta: TokenDelta) -> None:
        if delta.finish_reason is None:
            job = self._jobs.get(delta.request.request_id)
        else:
            job = self._jobs.pop(delta.request.request_id, None)
            self._num_finished += 1
        if job is not None:  # else it was submitted to the engine directly
            job.take(delta)

    def _abort(self, jobs: Sequence["_Job"]) -> None:
        for job in jobs:
            for sample in job.samples:
                delta = self.engine.abort(sample.request.request_id) if not sample.is_finished else None
                if delta is not None:
                    self._hand_over(delta)

    def _submit(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, keep_chunks: bool
    ) -> list["_Job"]:
        """Queues all, or none if one is refused."""
        jobs: list[_Job] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                job = _Job(text, self.tokenizer, keep_chunks)
                jobs.append(job)
                resolved = self.engine_params(each)
                token_ids = self.engine.check_request(
                    self.encode(prompt) if isinstance(prompt, str) else prompt, resolved
                )
                for one in _samples_of(resolved):
                    output_text = job.output_text(token_ids, one)
                    end_check = output_text.push if output_text is not None else None
                    request = self.engine.add_request(token_ids, one, end_check=end_check)
                    job.samples.append(_Sample(request, output_text))
                    self._jobs[request.request_id] = job
        except BaseException:
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
        return self._tokenize(prompt, "prompt")

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
    """The chunks of one request, those of several samples as they come.

    Closing it, leaving its `with` block or dropping it aborts the request.
    """

    def __init__(self, job: "_Job", step: Callable[[], None], abort: Callable[[], None]) -> None:
        self._job = job
        self._step = step
        self._abort = abort

    def __next__(self) -> Chunk:
        while not self._job.chunks:
            if self._job.is_finished:
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


class _Sample:
    """One request of the engine, and its text."""

    def __init__(self, request: Request, text: OutputText | None) -> None:
        self.request = request
        self.output_text = text
        self.text = ""
        self.is_finished = False
        self.has_chunks = False


class _Job:
    """A prompt and its samples so far."""

    def __init__(self, prompt: str | None, tokenizer: Any, keep_chunks: bool) -> None:
        self.samples: list[_Sample] = []
        self._keep_chunks = keep_chunks
        self.chunks: deque[Chunk] = deque()
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def is_finished(self) -> bool:
        """Whether every sample is, and its last delta was taken."""
        return all(sample.is_finished for sample in self.samples)

    def aborted(self) -> list[Request]:
        """Requests that were aborted without a delta for it."""
        ended = (sample.request for sample in self.samples if not sample.is_finished)
        return [request for request in ended if request.finish_reason == FinishReason.ABORT]

    def output_text(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> OutputText | None:
        """The text of a sample that is about to begin; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return OutputText(Detokenizer(self._tokenizer, prompt_token_ids), params.stop, params.min_tokens)

    def take(self, delta: TokenDelta) -> None:
        """Adds a delta. The engine has shown its tokens to the sample's text already."""
        index = next(at for at, sample in enumerate(self.samples) if sample.request is delta.request)
        sample, request = self.samples[index], delta.request
        text = ""
        if sample.output_text is not None:
            if delta.finish_reason is not None:
                sample.output_text.finish()
            text = sample.output_text.take()
        sample.text += text
        sample.is_finished = delta.finish_reason is not None
        if not self._keep_chunks:
            return
        self.chunks.append(
            Chunk(
                index=index,
                text=text,
                token_ids=list(delta.token_ids),
                logprobs=None if delta.logprobs is None else [self._with_text(one) for one in delta.logprobs],
                prompt_logprobs=self._prompt_logprobs() if index == 0 and not sample.has_chunks else None,
                finish_reason=delta.finish_reason,
                stop_reason=request.stop_reason,
                error=request.error,
                stats=request.stats,
            )
        )
        sample.has_chunks = True

    def output(self) -> RequestOutput:
        """The finished request."""
        first = self.samples[0].request
        return RequestOutput(
            request_id=first.request_id,
            prompt=self._prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens].tolist(),
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(index, sample) for index, sample in enumerate(self.samples)],
        )

    def _completion(self, index: int, sample: _Sample) -> CompletionOutput:
        request = sample.request
        assert request.finish_reason is not None
        return CompletionOutput(
            index=index,
            token_ids=request.output_token_ids,
            text=sample.text if sample.output_text is not None else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            logprobs=None if request.logprobs is None else [self._with_text(one) for one in request.logprobs],
            stats=request.stats,
        )

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        found = self.samples[0].request.prompt_logprobs
        return None if found is None else [None if one is None else self._with_text(one) for one in found]

    def _with_text(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        if self._tokenizer is None:
            return logprobs
        return {token: replace(one, token=self._tokenizer.decode([token])) for token, one in logprobs.items()}


def _samples_of(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the n samples: one each, with seeds that follow from the first."""
    if params.n == 1:
        return [params]
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    each = {"n": 1, "prompt_logprobs": None}
    first = params.model_copy(update={"n": 1, "seed": seed})
    return [first, *(params.model_copy(update={**each, "seed": sample_seed(seed, i)}) for i in range(1, params.n))]


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
