"""vLLM on CPUs: one engine, with its n-gram drafts or without; each number of drafts needs a worker of its own."""

import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

from peers.protocol import Clock, Output, Setup, Task, serve


class Vllm:
    """Keeps as many requests in flight as it is asked to."""

    can_batch = True

    def __init__(self, setup: Setup) -> None:
        import vllm

        (num_drafts,) = setup["num_drafts"]
        options: dict[str, Any] = {}
        if num_drafts:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": num_drafts,
                "prompt_lookup_max": setup["max_ngram"],
                "prompt_lookup_min": 1,
            }
        llm = vllm.LLM(
            model=setup["model"],
            dtype="bfloat16",
            max_model_len=setup["max_model_len"],
            max_num_seqs=setup["max_num_seqs"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
            **options,
        )
        self.version = f"vLLM {vllm.__version__}"
        self.settings = f"bf16, prompt_lookup_max={setup['max_ngram']}, prompt_lookup_min=1, no prefix caching"
        self._engine = llm.llm_engine
        self._eos = setup["eos_token_ids"]

    def run(self, task: Task) -> list[Output]:
        """See `protocol.Engine`."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=task["max_tokens"], temperature=0.0, stop_token_ids=self._eos, detokenize=False
        )
        waiting = deque(enumerate(task["prompts"]))
        clocks: dict[str, Clock] = {}
        outputs: dict[int, Output] = {}
        while waiting or clocks:
            while waiting and len(clocks) < task["concurrency"]:
                index, prompt = waiting.popleft()
                clocks[str(index)] = Clock()
                self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
                clocks[output.request_id].tick(len(tokens))
                if output.finished:
                    outputs[int(output.request_id)] = clocks.pop(output.request_id).stop(tokens)
        return [outputs[index] for index in range(len(outputs))]


def _start_again_with_openmp() -> None:
    """Runs this program anew under what vLLM asks for on x86: Intel's OpenMP and tcmalloc, preloaded.

    Unless it is told which CPUs to use, vLLM leaves one to its scheduler, of two every second one. And where
    OMP_NUM_THREADS is set, its engine's own process gets as many threads as its worker, and they wait in loops.
    """
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    libraries = [
        *Path(sys.prefix, "lib").glob("libiomp5.so"),
        *Path(sys.prefix, "lib").glob("python*/site-packages/vllm/libs/libtcmalloc_minimal*.so*"),
    ]
    environment = dict(os.environ)
    num_threads = int(environment.pop("OMP_NUM_THREADS"))
    environment["LD_PRELOAD"] = ":".join(map(str, libraries))
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:num_threads]))
    environment["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
    os.execve(sys.executable, [sys.executable, "-m", "peers.vllm_worker"], environment)


if __name__ == "__main__":
    _start_again_with_openmp()
    serve(Vllm)
