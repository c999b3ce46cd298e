"""Where an output ends does not depend on how its tokens were grouped into steps."""

from pathlib import Path

import pytest

from compspec.errors import CapacityError, RequestError
from compspec.request import FinishReason
from compspec.sampling.params import SamplingParams
from tests.law import Scripted, make_engine, make_prompts, oracle, outputs, run
from tests.tiny_models import tiny_model_folder

K = 5
FREE = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(4, seed=3)


@pytest.fixture(scope="module")
def truth(folder: Path, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    engine = make_engine(folder)
    return {tuple(prompt): run(engine, [prompt], FREE)[0].output_token_ids for prompt in prompts}


def test_a_stop_token_ends_the_output_at_every_place_of_the_window(folder, prompts, truth) -> None:
    """As accepted draft at each position, as bonus token, and as the first token of all."""
    engine = make_engine(folder, Scripted(oracle(truth), K), speculative__num_draft_tokens=K)
    places = set()
    for prompt in prompts:
        whole = truth[tuple(prompt)]
        for token in dict.fromkeys(whole):
            params = FREE.model_copy(update={"stop_token_ids": (token,)})
            (request,) = run(engine, [prompt], params)
            end = whole.index(token) + 1
            assert request.output_token_ids == whole[:end]
            assert request.finish_reason == FinishReason.STOP
            stats = request.stats
            assert stats.num_decode_tokens == end - 1
            assert stats.num_accepted_tokens <= end - 1
            assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
            places.add((end - 2) % (K + 1) if end > 1 else -1)
    assert places == {-1, 0, 1, 2, 3, 4, 5}, "some place of the window was never tried"


def test_eos_ends_the_output_unless_it_is_ignored(models, prompts, truth) -> None:
    whole = truth[tuple(prompts[0])]
    eos = whole[7]
    end = whole.index(eos) + 1
    folder = tiny_model_folder("llama", models, eos_token_id=eos)
    engine = make_engine(folder, Scripted(oracle(truth), K), speculative__num_draft_tokens=K)
    stopped, ignored = (
        run(engine, [prompts[0]], SamplingParams(max_tokens=24, ignore_eos=ignore))[0] for ignore in (False, True)
    )
    assert outputs([stopped]) == [(whole[:end], "stop")]
    assert outputs([ignored]) == [(whole, "length")]


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 13])
def test_max_tokens_is_exact_for_any_drafts(folder, prompts, truth, max_tokens) -> None:
    for k in (1, 3, 7):
        engine = make_engine(folder, Scripted(oracle(truth), k), speculative__num_draft_tokens=k)
        params = FREE.model_copy(update={"max_tokens": max_tokens})
        for request in run(engine, prompts, params):
            assert request.output_token_ids == truth[tuple(request.token_ids[: request.num_prompt_tokens])][:max_tokens]
            assert request.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("missing", range(1, 9))
def test_prompt_and_output_may_fill_the_model_to_the_last_token(folder, missing) -> None:
    """The output ends where the model's length ends, whatever is drafted there."""
    limit = 64
    prompt = make_prompts(9, seed=5, longest=70)[8]
    prompt = (prompt * 10)[: limit - missing]
    found = []
    for method in ("none", "ngram"):
        engine = make_engine(folder, model__max_model_len=limit, speculative__method=method, cache__block_size=4)
        found.append(outputs(run(engine, [prompt], SamplingParams(max_tokens=50, ignore_eos=True))))
    assert found[0] == found[1]
    ((tokens, reason),) = found[0]
    assert (len(tokens), reason) == (missing, "length")


def test_prompts_that_do_not_fit_are_refused_and_others_go_on(folder) -> None:
    engine = make_engine(folder, model__max_model_len=64, cache__num_blocks=4)
    with pytest.raises(RequestError, match="empty"):
        engine.add_request([])
    with pytest.raises(RequestError, match=r"64 tokens.*takes 64"):
        engine.add_request([5] * 64)
    with pytest.raises(RequestError, match="token id 128 is outside"):
        engine.add_request([5, 128])
    with pytest.raises(RequestError, match="outside"):
        engine.add_request([-1])
    with pytest.raises(CapacityError, match=r"needs 4 KV blocks.*has 3"):
        engine.add_request([5] * 40, SamplingParams(max_tokens=20))
    with pytest.raises(RequestError, match="stop token id 500"):
        engine.add_request([5], SamplingParams(stop_token_ids=(500,)))
    request = engine.add_request([5], FREE, request_id="mine")
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add_request([5], FREE, request_id="mine")
    while engine.has_work:
        engine.step()
    assert request.num_output_tokens == 24
    assert engine.add_request([5], FREE, request_id="mine"), "an id is free again when its request has ended"


def test_an_aborted_request_frees_its_blocks_at_once_and_changes_no_other(folder, prompts) -> None:
    alone = outputs(run(make_engine(folder, speculative__method="ngram"), prompts[:1], FREE))
    for steps in range(8):
        engine = make_engine(folder, speculative__method="ngram", scheduler__max_num_seqs=2)
        kept, *doomed = [engine.add_request(prompt, FREE) for prompt in prompts]
        for _ in range(steps):
            engine.step()
        for request in doomed:
            if request.finish_reason is None:
                delta = engine.abort(request.request_id)
                assert delta is not None
                assert delta.finish_reason == FinishReason.ABORT
        held = len(kept.block_ids)
        assert engine.pool.num_free == engine.pool.num_usable - held
        assert engine.abort("unknown") is None
        while engine.has_work:
            engine.step()
        assert outputs([kept]) == alone
        assert engine.pool.num_free == engine.pool.num_usable


def test_a_smaller_number_of_drafts_per_request_is_kept_to(folder, prompts, truth) -> None:
    engine = make_engine(folder, Scripted(oracle(truth), K), speculative__num_draft_tokens=K)
    asked = [99, 2, 1, False]
    each = [FREE.model_copy(update={"speculative": value}) for value in asked]
    requests = run(engine, prompts, each)
    assert outputs(requests) == [(truth[tuple(prompt)], "length") for prompt in prompts]
    assert [len(request.stats.drafted_per_position) for request in requests] == [5, 2, 1, 0]
    assert [request.stats.speculation_off_because is None for request in requests] == [True, True, True, False]


def test_sampled_output_does_not_depend_on_uptime_place_or_neighbours(folder, prompts) -> None:
    """Seeded and unseeded requests mixed; a seeded one is the same in a fresh engine and in one long in use."""
    seeded = SamplingParams(max_tokens=16, temperature=2.0, seed=9)
    unseeded = SamplingParams(max_tokens=16, temperature=2.0)
    alone = outputs(run(make_engine(folder), prompts[:1], seeded))
    engine = make_engine(folder, speculative__method="ngram")
    seen = set()
    for place in range(4):
        mixed = [prompts[1], prompts[2], prompts[3]]
        mixed.insert(place, prompts[0])
        each = [seeded if prompt is prompts[0] else unseeded for prompt in mixed]
        requests = run(engine, mixed, each)
        assert outputs(requests)[place] == alone[0]
        seen.add(tuple(requests[3 if place < 3 else 2].output_token_ids))
    assert len(seen) > 1, "unseeded requests draw seeds of their own"
