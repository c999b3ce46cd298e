"""The errors a caller can meet. Everything raised for a caller's mistake is one of these."""


def one_line(error: BaseException) -> str:
    """The text of an error that other code raised, in one line; it may have none, or fail to make it."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "(no text)"


class CompspecError(Exception):
    """Base of every error that compspec raises on purpose."""


class ConfigError(CompspecError, ValueError):
    """A configuration value, file or `--set` override is wrong."""


class RequestError(CompspecError, ValueError):
    """A prompt or a sampling parameter of one request is wrong; other requests are not affected."""


class UnsupportedError(CompspecError):
    """A model or a combination of options that compspec does not support; the message names it."""


class CapacityError(CompspecError):
    """Something does not fit into memory or into the KV cache; the message names the knob to turn."""


class ModelError(CompspecError):
    """A model cannot be found, read or trusted (missing, corrupt, pickled, failed self-check)."""


class NumericsError(CompspecError):
    """The start-up self-test found that results depend on the batch, so `numerics: exact` cannot hold."""
