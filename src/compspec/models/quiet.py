"""Keeps transformers' progress bars and warnings off the terminal while a model loads."""

import contextlib
import warnings
from collections.abc import Iterator

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers and huggingface_hub, and restores what was set before."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        # transformers switches the hub's bars together with its own.
        (enable_progress_bars if hub_bars else disable_progress_bars)()


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first sentence-like line of an error message, for messages that quote another library."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= limit else text[: limit - 3] + "..."
