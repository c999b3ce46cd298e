"""Layer skip: the target's first layers draft from what the target has computed, and have no state of their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import compspec.proposers.proposer as proposer_module
from compspec.batch import Batch
from compspec.config import EngineConfig, ModelSection, make_config
from compspec.errors import ConfigError
from compspec.models.first_layers import first_layers
from compspec.models.loader import LoadedModel, load_model
from compspec.proposers import layer_skip
from compspec.proposers.layer_skip import LayerSkipProposer, Options
from compspec.proposers.proposer import Target, check_drafts
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import TARGET_STREAM, GumbelNoise
from compspec.sampling.sampler import Sampler
from tests.tiny_models import tiny_model_folder
from tests.unit.fakes import entry, make_request, step_output
from tests.unit.models.paged import PagedRun
from tests.unit.runner.fake_model import FakeModelRunner

VOCAB = 128
K = 3
CPU = torch.device("cpu")


def config_of(**settings: object) -> EngineConfig:
    return make_config(
        {}, {"model.source": "x", **{name.replace("__", "."): value for name, value in settings.items()}}
    )


def loaded_llama(tmp: Path, num_layers: int) -> LoadedModel:
    folder = tiny_model_folder("llama", tmp, num_hidden_layers=num_layers)
    return load_model(ModelSection(source=str(folder), device="cpu"), tmp / "cache")


def loaded_proposer(tmp: Path, num_all: int, **options: Any) -> LayerSkipProposer:
    proposer = layer_skip.make(Options(**options), K)
    assert proposer.load(loaded_llama(tmp, num_all), config_of()) == ()
    return proposer


@pytest.mark.parametrize(("num_all", "num_layers"), [(2, 1), (3, 1), (6, 2), (7, 2)])
def test_a_third_of_the_layers_draft_by_default(num_all: int, num_layers: int, tmp_path: Path) -> None:
    proposer = started(loaded_proposer(tmp_path, num_all))
    assert len(proposer.runners[0].adapter.layers) == num_layers


@pytest.mark.parametrize("num_layers", [3, 4])
def test_as_many_layers_as_the_model_has_are_refused(num_layers: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"num_layers is {num_layers}, it must be less than the model's 3"):
        loaded_proposer(tmp_path, 3, num_layers=num_layers)


def test_a_model_of_one_layer_has_nothing_to_skip(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than the model's 1"):
        loaded_proposer(tmp_path, 1)


def started(proposer: LayerSkipProposer, progress: Any = None) -> LayerSkipProposer:
    """Started on a runner that needs no model; a target with caches that can be told apart."""
    config = config_of(scheduler__max_num_seqs=4, cache__block_size=4)
    caches = SimpleNamespace(k_caches=tuple("KLMNOPQRS"), v_caches=tuple("klmnopqrs"))
    adapter = SimpleNamespace(vocab_size=VOCAB, max_model_len=64)
    metadata = MetadataState(4, VOCAB, CPU, max_model_len=64)
    target = Target(
        config=config,
        runner=SimpleNamespace(num_blocks=17, adapter=adapter, **vars(caches)),
        metadata=metadata,
        sampler=Sampler(GumbelNoise(VOCAB, CPU)),
        stream=TARGET_STREAM,
        progress=progress,
    )
    with patch.object(proposer_module, "ModelRunner", FakeModelRunner):
        proposer.start(target)
    return proposer


def test_the_first_layers_use_the_targets_caches_of_these_layers(tmp_path: Path) -> None:
    said: list[str] = []
    proposer = started(loaded_proposer(tmp_path, 3, num_layers=2), lambda what, seconds: said.append(what))
    (runner,) = proposer.runners
    assert isinstance(runner, FakeModelRunner)
    assert runner.made_with["caches"] == (("K", "L"), ("k", "l"))
    assert runner.made_with["num_blocks"] == 17
    assert runner.made_with["config"].numerics.mode == "fast"
    assert runner.buckets.prefill == [], "it has no prompts to run"
    assert said == ["first 2 layers: shape"]


def test_drafts_start_at_the_newest_token_of_those_that_may_have_some(tmp_path: Path) -> None:
    proposer = started(loaded_proposer(tmp_path, 3))
    (runner,) = proposer.runners
    assert isinstance(runner, FakeModelRunner)
    requests = [make_request([3 + number] * 5, output=[7, 8]) for number in range(3)]
    most = [2, 0, 3]
    parts = []
    for slot, request in enumerate(requests):
        request.block_ids = [1 + slot * 4 + place for place in range(4)]
        runner.store(request, request.num_computed_tokens)
        parts.append(entry(request, slot, max_drafts=most[slot]))
    batch = Batch(scheduled=tuple(parts), is_prefill=False)
    drafts = proposer.propose(batch)
    check_drafts(batch, drafts, VOCAB)
    assert drafts.num_draft_tokens.tolist() == most
    assert drafts.token_ids.shape == (3, K)
    rows = [[(query.start, query.token_ids) for query in queries] for _, queries in runner.calls]
    assert rows[0] == [(6, [8]), (6, [8])]
    assert len(rows) == 3


def test_it_keeps_nothing_of_a_request(tmp_path: Path) -> None:
    """All that the target has computed is complete for it, and nobody has to be forgotten."""
    proposer = started(loaded_proposer(tmp_path, 3))
    (runner,) = proposer.runners
    assert isinstance(runner, FakeModelRunner)
    request = make_request([3] * 5, output=[7])
    request.block_ids = [1, 2, 3]
    runner.store(request, 5)
    batch = Batch(scheduled=(entry(request, 0, max_drafts=K),), is_prefill=False)
    first = proposer.propose(batch).token_ids.tolist()
    proposer.observe(batch, step_output([1]))
    proposer.forget(request)
    assert proposer.propose(batch).token_ids.tolist() == first
    assert proposer.num_computed_tokens(request) == request.num_computed_tokens == 5


def test_drafts_are_the_greedy_tokens_of_the_first_layers(tmp_path: Path) -> None:
    """With a real model, from a cache that the whole model has filled."""
    loaded = loaded_llama(tmp_path, 3)
    config = config_of(
        scheduler__max_num_seqs=1,
        cache__num_blocks=9,
        cache__block_size=8,
        compile__mode="none",
        numerics__prefill_chunk=32,
        model__device="cpu",
    )
    proposer = layer_skip.make(Options(num_layers=2), K)
    proposer.load(loaded, config)
    runner = ModelRunner(loaded.adapter, config, 64)
    metadata = MetadataState(1, VOCAB, CPU, max_model_len=64)
    sampler = Sampler(GumbelNoise(VOCAB, CPU))
    proposer.start(Target(config=config, runner=runner, metadata=metadata, sampler=sampler, stream=TARGET_STREAM))
    request = make_request(list(range(20, 41)), output=[50])
    request.block_ids = [3, 1, 7, 5]
    prompt = request.token_ids[:21].tolist()
    runner.run(runner.buckets.select(1, 21, is_prefill=True), [Query(token_ids=prompt, start=0, block_ids=[3, 1, 7])])
    drafts = proposer.propose(Batch(scheduled=(entry(request, 0, max_drafts=K),), is_prefill=False))
    # The same in one go, of keys and values of its own.
    tokens = request.token_ids.tolist()
    for place in range(K):
        run = PagedRun(first_layers(loaded.adapter, 2), [torch.tensor(tokens)])
        run.step(len(tokens))
        tokens.append(int(run.logits[0][-1][-1].argmax()))
        assert drafts.token_ids[0, place] == tokens[-1]
