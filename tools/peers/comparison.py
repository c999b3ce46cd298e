"""Several workers measured in turns: who is started, who runs when, and what becomes of those that fail."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from peers.process import PeerError, WorkerProcess, worker_environment
from peers.protocol import Setup, Task
from peers.summary import Round, Side


@dataclass(kw_only=True)
class Worker:
    """An engine in a process, and the sides that it runs.

    Attributes:
        name: of its log file.
        command: runs it.
        config: compspec's configuration file, for compspec's own.
        process: once it is started.
        ready: what it said of itself.
    """

    name: str
    command: list[str]
    sides: list[Side]
    config: Path | None = None
    process: WorkerProcess | None = None
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Whether it can still run something."""
        return self.sides[0].failure is None

    def fail(self, error: PeerError, log: Path) -> None:
        """Writes a failure down, for all of its sides."""
        for side in self.sides:
            side.failure = f"{error}; its log: {log}"
        if self.process is not None:
            self.process.close()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What all workers are asked.

    Attributes:
        prompts: token ids.
        concurrency: so many requests at a time in further runs of those that can; None: no such runs.
        rounds: after one that warms up.
        log_folder: where the workers' standard error goes.
        timeout_s: the longest that a worker may take to load, or to run all prompts once.
    """

    prompts: list[list[int]]
    max_tokens: int
    concurrency: int | None
    rounds: int
    num_threads: int
    log_folder: Path
    timeout_s: float

    def run(self, workers: Sequence[Worker], setup: Setup, console: Console) -> None:
        """Starts all workers and fills their sides with rounds, or with why there are none."""
        with ExitStack() as stack:
            for worker in workers:
                console.print(f"starting {worker.name}", highlight=False)
                self._start(worker, setup, stack)
            turns = self._turns(workers)
            for number in range(1 + self.rounds):  # the first warms up
                console.print(f"round {number} of {self.rounds}" if number else "warm-up", highlight=False)
                for worker, side, concurrency in turns[:: 1 if number % 2 else -1]:
                    self._turn(worker, side, concurrency, keep=number > 0)

    def log(self, worker: Worker) -> Path:
        """A worker's log file."""
        return self.log_folder / f"{worker.name.replace(' ', '-')}.log"

    def _start(self, worker: Worker, setup: Setup, stack: ExitStack) -> None:
        own: Setup = {
            **setup,
            "config": None if worker.config is None else str(worker.config),
            "num_drafts": [side.num_drafts for side in worker.sides],
        }
        environment = worker_environment(self.num_threads)
        try:
            worker.process = WorkerProcess(worker.command, environment, self.log(worker), self.timeout_s)
            stack.callback(worker.process.close)
            worker.ready = worker.process.start(own)
        except PeerError as error:
            worker.fail(error, self.log(worker))

    def _turns(self, workers: Sequence[Worker]) -> list[tuple[Worker, Side, int | None]]:
        """One round: every side one request at a time, and where wanted and possible several at once."""
        pairs = [(worker, side) for worker in workers for side in worker.sides]
        turns: list[tuple[Worker, Side, int | None]] = [(worker, side, None) for worker, side in pairs]
        if self.concurrency is not None:
            turns += [(worker, side, self.concurrency) for worker, side in pairs if worker.ready.get("can_batch")]
        return turns

    def _turn(self, worker: Worker, side: Side, concurrency: int | None, *, keep: bool) -> None:
        if not worker.is_alive:
            return
        assert worker.process is not None
        task: Task = {
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "num_drafts": side.num_drafts,
            "concurrency": concurrency or 1,
        }
        try:
            outputs, wall_s = worker.process.run(task)
        except PeerError as error:
            worker.fail(error, self.log(worker))
            return
        if keep:
            rounds = side.rounds if concurrency is None else side.concurrent
            rounds.append(Round(outputs=outputs, wall_s=wall_s))
