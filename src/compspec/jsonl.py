"""Prompt files in, result files out, line by line; a result file survives a kill at any moment."""

import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compspec.config import EngineConfig
from compspec.errors import CompspecError, RequestError
from compspec.llm import CompletionOutput, RequestOutput
from compspec.request import TokenLogprobs
from compspec.sampling.params import SamplingParams

_KEYS = ("id", "prompt", "messages", "prompt_token_ids", "params")


class OutputError(CompspecError):
    """The output file cannot be written; what was finished before is kept in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of a prompt file: exactly one of the three kinds of prompt.

    Attributes:
        id: the line's `id`, or its number (from 0) as text.
        params: sampling parameters that differ from the configuration's.
    """

    id: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    prompt_token_ids: list[int] | None
    params: dict[str, Any]

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults with this line's own values.

        Raises:
            RequestError: an unknown name or a value out of range.
        """
        try:
            return SamplingParams(**{**defaults.model_dump(), **self.params})
        except RequestError as error:
            raise RequestError(f"prompt '{self.id}': {error}") from None


def read_prompts(path: Path) -> list[PromptLine]:
    """Reads a JSONL file of prompts; blank lines are skipped.

    Raises:
        RequestError: an unreadable file, a line that is not a prompt, or an id that occurs twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"cannot read prompt file '{path}': {reason}") from None
    lines = [_prompt_line(raw, number, path) for number, raw in enumerate(text.split("\n")) if raw.strip()]
    seen: set[str] = set()
    for line in lines:
        if line.id in seen:
            raise RequestError(f"'{path}' has two prompts with id '{line.id}'")
        seen.add(line.id)
    return lines


def _prompt_line(raw: str, number: int, path: Path) -> PromptLine:
    where = f"'{path}' line {number + 1}"
    try:
        data = json.loads(raw)
    except ValueError:
        raise RequestError(f"{where} is not valid JSON") from None
    except RecursionError:
        raise RequestError(f"{where} is nested too deep") from None
    if not isinstance(data, dict):
        raise RequestError(f"{where} must be a JSON object")
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise RequestError(f"{where}: unknown key '{unknown[0]}'; valid are: {', '.join(_KEYS)}")
    given = [key for key in ("prompt", "messages", "prompt_token_ids") if data.get(key) is not None]
    if len(given) != 1:
        raise RequestError(f"{where} must have exactly one of prompt, messages, prompt_token_ids")
    kinds: dict[str, tuple[type, str]] = {
        "prompt": (str, "text"),
        "messages": (list, "a list"),
        "prompt_token_ids": (list, "a list"),
        "params": (dict, "an object"),
    }
    for key, (kind, name) in kinds.items():
        if data.get(key) is not None and not isinstance(data[key], kind):
            raise RequestError(f"{where}: {key} must be {name}")
    token_ids = data.get("prompt_token_ids")
    if token_ids is not None and not all(type(token) is int for token in token_ids):
        raise RequestError(f"{where}: prompt_token_ids must be integers")
    identity = data.get("id", number)
    if not isinstance(identity, str) and type(identity) is not int:
        raise RequestError(f"{where}: id must be text or an integer")
    return PromptLine(
        id=str(identity),
        prompt=data.get("prompt"),
        messages=data.get("messages"),
        prompt_token_ids=token_ids,
        params=data.get("params") or {},
    )


class ResultFile:
    """Appends one JSON line per finished prompt. Lines of an earlier, killed run are kept and not done again.

    A last line that the kill left incomplete is cut off when the file is opened. While it is open, no other
    process can open it.

    Args:
        path: the file; made if it is not there.
        keys: what each prompt id stands for (see `request_key`); a stored result of another prompt, model or
            parameters under the same id is refused.

    Raises:
        OutputError: it cannot be opened, or holds something else than results.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        self.path = path
        self._keys = keys
        self.finished: set[str] = set()
        try:
            # Unbuffered: a failed write leaves nothing behind that a later one could bring into the file.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
            # A pipe or a device holds no earlier results, and reading one may never end.
            self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if self._is_regular:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._recover()
        except BlockingIOError:
            raise OutputError(f"output file '{path}' is being written by another process") from None
        except OSError as error:
            raise OutputError(f"cannot write output file '{path}': {error.strerror}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line; it is in the file when this returns.

        Raises:
            OutputError: the disk is full or failed. The line is not there, all earlier ones are.
        """
        line = memoryview(json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            if self._is_regular:
                with suppress(OSError):  # then the next start cuts the line off
                    os.ftruncate(self._file.fileno(), end)
            raise OutputError(
                f"cannot write to output file '{self.path}': {error.strerror}; the {len(self.finished)} results "
                "finished so far are kept, run the same command again to go on"
            ) from None
        self.finished.add(str(record["id"]))

    def close(self) -> None:
        """Closes the file."""
        try:
            self._file.close()
        except OSError as error:
            raise OutputError(f"cannot write to output file '{self.path}': {error.strerror}") from None

    def _recover(self) -> None:
        """Reads what is finished, and cuts off a last line that a kill left incomplete."""
        good = 0
        with open(self.path, "rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    if not _may_be_cut_result(raw):
                        raise self._foreign()
                    break
                record = _parse(raw)
                if not _is_result(record):
                    raise self._foreign()
                name = str(record["id"])
                if record["key"] != self._keys.get(name, record["key"]):
                    raise OutputError(
                        f"'{self.path}' holds a result for prompt '{name}' that was made from another prompt, model or "
                        "parameters; choose another output file"
                    )
                self.finished.add(name)
                good += len(raw)
        os.truncate(self.path, good)

    def _foreign(self) -> OutputError:
        return OutputError(f"'{self.path}' holds a line that is no result of compspec; choose another output file")


def _parse(raw: bytes) -> Any:
    """The JSON value of a line; None where it is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _is_result(record: Any) -> bool:
    return isinstance(record, dict) and {"id", "key", "token_ids", "finish_reason"} <= record.keys()


def _may_be_cut_result(raw: bytes) -> bool:
    """Whether a line without an end is the beginning of a result, and not something of the user's."""
    start = b'{"id": '
    record = _parse(raw)
    return raw[: len(start)] == start[: len(raw)] and (record is None or _is_result(record))


def request_key(line: PromptLine, params: SamplingParams, config: EngineConfig, chat: bool) -> str:
    """Identifies all that the output of a prompt depends on: not who drafts, unless drafts are sampled from."""
    sampling = params.model_dump(exclude={"speculative", "priority", "cache_salt"})
    parts: list[Any] = [line.prompt, line.messages, line.prompt_token_ids, chat, sampling]
    parts += [config.model.model_dump(), config.numerics.model_dump(), config.speculative.scorer]
    if config.speculative.verifier == "rejection" and not params.is_greedy:
        parts += [config.speculative.model_dump(), params.speculative]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def result_record(line: PromptLine, key: str, output: RequestOutput) -> dict[str, Any]:
    """The JSON line of a finished prompt: the first sample's fields, and all samples where there are several."""
    samples = [_sample_record(sample) for sample in output.outputs]
    record = {"id": line.id, "key": key, **samples[0]}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [one and _logprobs_record(one) for one in output.prompt_logprobs]
    if len(samples) > 1:
        record["samples"] = samples
    return record


def _sample_record(sample: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": str(sample.finish_reason),
        "stop_reason": sample.stop_reason,
    }
    if sample.error is not None:
        record["error"] = sample.error
    if sample.logprobs is not None:
        record["logprobs"] = [_logprobs_record(one) for one in sample.logprobs]
    record["stats"] = {**asdict(sample.stats), "acceptance_length": sample.stats.acceptance_length}
    return record


def _logprobs_record(logprobs: TokenLogprobs) -> dict[str, Any]:
    """JSON has neither integer keys nor -Infinity."""
    return {
        str(token): {**asdict(one), "logprob": one.logprob if math.isfinite(one.logprob) else None}
        for token, one in logprobs.items()
    }
