"""compspec itself: one engine of a configuration; without drafts it runs the same requests with speculation off."""

from collections import deque

from compspec import LLM, SamplingParams
from compspec.version import __version__
from peers.protocol import Clock, Output, Setup, Task, serve


class Compspec:
    """Keeps as many requests in flight as it is asked to."""

    can_batch = True

    def __init__(self, setup: Setup) -> None:
        assert setup["config"] is not None
        self._llm = LLM.from_yaml(setup["config"], cache={"prefix_caching": False})
        config = self._llm.config
        self.version = f"compspec {__version__}"
        self.settings = f"{config.model.dtype}, numerics {config.numerics.mode}"

    def run(self, task: Task) -> list[Output]:
        """See `protocol.Engine`."""
        engine = self._llm.engine
        engine.reset()  # of what the last run left, this one would profit
        speculative = None if task["num_drafts"] else False
        params = SamplingParams(max_tokens=task["max_tokens"], temperature=0.0, speculative=speculative)
        waiting = deque(enumerate(task["prompts"]))
        clocks: dict[str, Clock] = {}
        outputs: dict[int, Output] = {}
        while waiting or clocks:
            while waiting and len(clocks) < task["concurrency"]:
                index, prompt = waiting.popleft()
                clocks[str(index)] = Clock()
                engine.add_request(prompt, params, request_id=str(index))
            for delta in engine.step():
                name = delta.request.request_id
                clocks[name].tick(delta.request.num_output_tokens)
                if delta.finish_reason is not None:
                    if delta.request.error is not None:
                        raise RuntimeError(delta.request.error)
                    outputs[int(name)] = clocks.pop(name).stop(delta.request.output_token_ids)
        return [outputs[index] for index in range(len(outputs))]


if __name__ == "__main__":
    serve(Compspec)
