"""The start-up self-test finds rows that depend on their place, their neighbours or their window."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compspec.batch import Bucket
from compspec.config import make_config
from compspec.errors import NumericsError
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import Query
from compspec.runner.self_test import SelfTestResult, StoredSelfTest, run_self_test
from tests.law import make_engine
from tests.tiny_models import tiny_model_folder

VOCAB = 32
Fault = Callable[[Bucket, int, int, Sequence[Query]], float]


class FakeRunner:
    """Logits are a function of (token, position), plus what a planted fault adds."""

    def __init__(self, fault: Fault, max_num_seqs: int = 4, window: int = 0) -> None:
        config = make_config({"model": {"source": "x"}, "scheduler": {"max_num_seqs": max_num_seqs}})
        self.buckets = Buckets.of_target(config)
        self.num_blocks, self.block_size, self.max_blocks = 129, 16, 64
        self.adapter = SimpleNamespace(
            vocab_size=VOCAB,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=1024,
            module=torch.nn.Module(),
        )
        self.adapter.layers = [SimpleNamespace(spec=SimpleNamespace(window=each)) for each in (0, window)]
        self._fault = fault
        self.places_seen: set[int] = set()

    def run(self, bucket: Bucket, queries: Sequence[Query]) -> torch.Tensor:
        logits = torch.full((bucket.num_requests, bucket.num_logits, VOCAB), float("nan"))
        for place, query in enumerate(queries):
            self.places_seen.add(place)
            for row, token in enumerate(query.token_ids[: bucket.num_logits]):
                value = 1.0 + token / 7 + (query.start + row) / 13
                logits[place, row] = torch.arange(VOCAB) / 3 + value + self._fault(bucket, place, row, queries)
        return logits


def test_independent_rows_pass_in_every_bucket() -> None:
    runner = FakeRunner(lambda bucket, place, row, queries: 0.0)
    result = run_self_test(runner)
    assert set(result.equal) == set(runner.buckets.decode)
    assert not result.different
    assert not result.dependent
    assert max(runner.places_seen) == 3, "the last place of the largest bucket was tried"


@pytest.mark.parametrize(
    "fault",
    [
        lambda bucket, place, row, queries: 1e-3 * place,
        lambda bucket, place, row, queries: 1e-3 * (row == 7),
        lambda bucket, place, row, queries: 1e-3 * (len(queries) > 1),
        lambda bucket, place, row, queries: 1e-3 * (max(len(query.token_ids) for query in queries) > 2),
        lambda bucket, place, row, queries: 1e-3 * (max(query.start for query in queries) > 400),
    ],
    ids=["place", "row", "number of neighbours", "rows of a neighbour", "length of a neighbour"],
)
def test_a_row_that_depends_on_something_else_is_found(fault: Fault) -> None:
    def planted(bucket: Bucket, place: int, row: int, queries: Sequence[Query]) -> float:
        return fault(bucket, place, row, queries) if bucket.query_len == 8 and bucket.num_requests == 4 else 0.0

    result = run_self_test(FakeRunner(planted))
    assert [str(bucket) for bucket in result.dependent] == ["decode 4x8"]


def test_a_long_window_is_left_behind_too() -> None:
    """A kernel that cuts the keys of a window by where the step begins: seen only where the window has an end."""

    def cut_by_start(bucket: Bucket, place: int, row: int, queries: Sequence[Query]) -> float:
        return 1e-3 * ((queries[place].start - 700) % 3) if queries[place].start > 700 else 0.0

    short = run_self_test(FakeRunner(cut_by_start))
    assert set(short.equal) == set(FakeRunner(cut_by_start).buckets.decode), "no context is that long"
    assert not run_self_test(FakeRunner(cut_by_start, window=700)).equal


def test_a_bucket_with_other_bits_is_set_apart() -> None:
    result = run_self_test(FakeRunner(lambda bucket, *_: 1e-3 * (bucket.query_len == 2 and bucket.num_requests == 1)))
    assert [str(bucket) for bucket in result.different] == ["decode 1x2"]
    assert not result.dependent


@pytest.mark.parametrize("scorer", ["multi_query", "batch_expansion"])
@pytest.mark.parametrize("length", [32, 64, 256, 513])
def test_nothing_is_probed_beyond_the_length_of_the_model(models: Path, scorer: str, length: int) -> None:
    """A model with learned positions has none to look up there."""
    folder = tiny_model_folder("gpt2", models, n_positions=length, max_position_embeddings=length)
    engine = make_engine(folder, speculative__scorer=scorer, cache__num_blocks=200)
    assert engine.max_model_len == length


def test_results_are_kept_per_model_and_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(lambda *_: 0.0)
    buckets = runner.buckets.decode
    result = SelfTestResult(equal=tuple(buckets[1:]), different=(buckets[0],), dependent=())
    StoredSelfTest(runner, ["model a"], tmp_path).store(result)
    assert StoredSelfTest(runner, ["model a"], tmp_path).load() == result
    assert StoredSelfTest(runner, ["model b"], tmp_path).load() is None
    (path,) = tmp_path.iterdir()
    path.write_text('{"equal": ["decode 99x9"]}', encoding="utf-8")
    assert StoredSelfTest(runner, ["model a"], tmp_path).load() is None
    assert "unreadable" in caplog.text


def test_the_engine_uses_only_buckets_that_passed(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import compspec.engine

    folder = tiny_model_folder("llama", models)

    def found(kind: str, which: int) -> Callable[[FakeRunner], SelfTestResult]:
        def result(runner: FakeRunner) -> SelfTestResult:
            buckets = sorted(runner.buckets.decode)
            odd = buckets.pop(which)
            empty = {"equal": tuple(buckets), "different": (), "dependent": ()}
            return SelfTestResult(**{**empty, kind: (odd,)})

        return result

    def used(folder_name: str, kind: str, which: int, **settings: str) -> list[str]:
        monkeypatch.setattr(compspec.engine, "run_self_test", found(kind, which))
        engine = make_engine(folder, cache_dir=str(tmp_path / folder_name), **settings)
        return [str(bucket) for bucket in sorted(engine.runner.buckets.decode)]

    rest = ["decode 1x8", "decode 4x2", "decode 4x8"]
    assert used("a", "different", 0) == rest
    assert used("b", "dependent", 0) == rest
    assert used("b", "different", 1) == rest, "the stored result holds, nothing is tested again"
    with pytest.raises(NumericsError, match="decode 4x8"):
        used("c", "dependent", -1)
    assert used("c", "dependent", -1, numerics__self_test="warn") == ["decode 1x2", *rest]
    off = make_engine(folder, cache_dir=str(tmp_path / "d"), numerics__self_test="skip")
    assert [str(bucket) for bucket in off.runner.buckets.decode] == ["decode 4x8"]
