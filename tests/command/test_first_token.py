"""When the first token came: on the engine's clock, and in the summary since the process started."""

import os
import re
import subprocess
import sys
import time

from compspec import LLM


def test_the_time_of_the_first_token_is_kept(config) -> None:
    llm = LLM.from_yaml(config)
    assert llm.stats.first_token_at is None
    before = time.perf_counter()
    stream = llm.stream("to be or not to be")
    next(stream)
    first = llm.stats.first_token_at
    assert first is not None and before < first < time.perf_counter()
    list(stream)
    llm.generate("to be")
    assert llm.stats.first_token_at == first


def test_the_summary_counts_from_the_start_of_the_process(config) -> None:
    """Imports take longer than the start of a tiny engine; both, and the first prompt, lie before the first token."""
    command = [sys.executable, "-c", "from compspec.cli import main; main()", "generate", "-c", str(config)]
    command += ["--prompt", "to be or not to be"]
    started = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    elapsed = time.monotonic() - started
    (first,) = re.findall(r"first token\D+([\d.]+) s after", result.stderr)
    (start_up,) = re.findall(r"start-up\D+([\d.]+) s for", result.stderr)
    assert float(start_up) < float(first) <= elapsed + 0.1
