"""The driver's end of the protocol: a worker process that computes only while it is asked something."""

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compspec.errors import CompspecError
from peers.protocol import Output, Setup, Task

TOOLS = Path(__file__).parents[1]
_END_TIMEOUT_S = 30


class PeerError(CompspecError):
    """A peer could not be started, crashed, or does not speak the protocol; the others go on."""


class WorkerProcess:
    """A worker and all that it starts, one process group.

    Between two questions the group is stopped (SIGSTOP): some engines wait for work in a loop, and would take a core
    from whoever is measured. If the driver dies, the kernel continues and hangs up the stopped group, which ends it.

    Args:
        command: runs the worker.
        log: where its standard error goes.
        timeout_s: the longest it may take to answer.

    Raises:
        PeerError: the command cannot be run.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with log.open("wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    process_group=0,
                )
            except OSError as error:
                raise PeerError(f"cannot run '{command[0]}': {error.strerror}") from None
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, setup: Setup) -> dict[str, Any]:
        """Lets it load; returns what it says of itself: `version`, `settings`, `can_batch`.

        Raises:
            PeerError: it failed.
        """
        ready = self._ask(setup).get("ready")
        if not isinstance(ready, dict) or not ready.keys() >= {"version", "settings", "can_batch"}:
            raise PeerError("its first answer is not that it is ready")
        return ready

    def run(self, task: Task) -> tuple[list[Output], float]:
        """Lets it run prompts; returns the outputs in their order, and the seconds that all took together.

        Raises:
            PeerError: it failed.
        """
        answer = self._ask(task)
        outputs = answer.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != len(task["prompts"]) or "wall_s" not in answer:
            raise PeerError(f"its answer does not hold {len(task['prompts'])} outputs")
        return outputs, answer["wall_s"]

    def close(self) -> None:
        """Ends it and all that it started."""
        with suppress(OSError):
            self._pipe.close()
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    @property
    def _pipe(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    def _ask(self, message: Setup | Task) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            with suppress(BrokenPipeError):  # it has died: reading says how
                self._pipe.write(json.dumps(message).encode() + b"\n")
                self._pipe.flush()
            try:
                line = self._lines.get(timeout=self._timeout_s)
            except queue.Empty:
                raise PeerError(f"no answer within {self._timeout_s:g} s") from None
            if not line:
                raise PeerError(self._end())
        finally:
            self._signal(signal.SIGSTOP)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"answered {line[:60]!r}, which is no JSON object")
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def _end(self) -> str:
        """How the process ended."""
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")


def worker_environment(num_threads: int) -> dict[str, str]:
    """What every worker runs under."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(TOOLS),
        "PYTHONSAFEPATH": "1",  # else modules of the current folder come first
    }
