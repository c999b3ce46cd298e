"""Proposers are found by name; what they return is checked before a model sees it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compspec.batch import Batch, DraftTokens
from compspec.errors import ConfigError
from compspec.proposers.ngram import NgramProposer
from compspec.proposers.none import NoProposer
from compspec.proposers.proposer import check_drafts, make_proposer, names
from tests.unit.fakes import decode, draft, entry, make_request

VOCAB = 100


def test_names_are_the_files_of_the_folder() -> None:
    assert {"none", "ngram"} <= set(names())
    assert "proposer" not in names()
    assert names() == sorted(names())


def test_every_proposer_that_is_named_can_be_loaded() -> None:
    for name in names():
        with pytest.raises(ConfigError, match=rf"unknown key for method {name} .*'not_an_option'.*method"):
            make_proposer(name, {"not_an_option": 1}, 3)


def test_a_proposer_is_made_with_its_options() -> None:
    assert isinstance(make_proposer("ngram", {"prompt_lookup_max": 4}, 3), NgramProposer)
    assert isinstance(make_proposer("none", {}, 3), NoProposer)


@pytest.mark.parametrize("method", ["ngrams", "", "proposer", "../ngram", "ngram.lookup"])
def test_an_unknown_method_lists_what_there_is(method: str) -> None:
    with pytest.raises(ConfigError, match=r"there are: .*ngram.*none"):
        make_proposer(method, {}, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_lookup": 3},
            "unknown key .*valid are: method, num_draft_tokens, .*, prompt_lookup_max, prompt_lookup_min",
        ),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max"),
        ({"prompt_lookup_max": float("nan")}, "prompt_lookup_max"),
        ({"prompt_lookup_max": "three"}, "prompt_lookup_max"),
        ({"prompt_lookup_max": True}, "prompt_lookup_max"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min 5 is more than prompt_lookup_max 3"),
    ],
)
def test_a_wrong_option_is_a_config_error_of_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_proposer("ngram", options, 3)
    assert "\n" not in str(caught.value)


def test_no_proposer_proposes_nothing_for_every_request() -> None:
    drafts = make_proposer("none", {}, 3).propose(decode(make_request(), make_request()))
    assert drafts.token_ids.shape == (2, 0)
    assert drafts.num_draft_tokens.tolist() == [0, 0]


def batch_of(*allowed: int) -> Batch:
    return Batch(
        scheduled=tuple(entry(make_request(), slot, max_drafts=most) for slot, most in enumerate(allowed)),
        is_prefill=False,
    )


def raw(token_ids: list[list[int]], counts: list[int]) -> DraftTokens:
    return DraftTokens(token_ids=np.array(token_ids), num_draft_tokens=np.array(counts))


def test_drafts_that_keep_the_protocol_pass() -> None:
    check_drafts(batch_of(3, 0, 1), draft([0, VOCAB - 1, 5], [], [7]), VOCAB)
    check_drafts(batch_of(3, 0), draft([], [], k=0), VOCAB)


@pytest.mark.parametrize(
    ("allowed", "drafts", "message"),
    [
        ((3, 3), draft([1]), "drafts for 1 requests, the batch has 2"),
        ((3,), raw([[1, 2]], [2, 2]), "drafts for 2 requests, the batch has 1"),
        ((1,), draft([1, 2]), "2 drafts where at most 1 are allowed"),
        ((3,), raw([[1, 2]], [-1]), "-1 drafts"),
        ((3,), raw([[1, 2]], [3]), "counted 3 drafts in 2 columns"),
        ((3,), draft([VOCAB]), "outside the vocabulary of 100"),
        ((3,), raw([[-1, 2]], [2]), "outside the vocabulary of 100"),
        ((3,), raw([[1, 2]], [1]), "must pad drafts with -1"),
        ((3,), raw([[1, -2]], [1]), "must pad drafts with -1"),
    ],
)
def test_drafts_that_break_the_protocol_are_refused(allowed: tuple, drafts: DraftTokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_drafts(batch_of(*allowed), drafts, VOCAB)


@pytest.mark.parametrize("shape", [(1, 3, VOCAB), (3, 3, VOCAB), (2, 2, VOCAB), (2, 3, VOCAB + 1), (2, 3), (6, VOCAB)])
def test_probabilities_must_be_there_for_every_draft_and_token(shape: tuple[int, ...]) -> None:
    drafts = draft([1, 2, 3], [4])
    batch = batch_of(3, 3)
    check_drafts(batch, replace(drafts, probs=torch.zeros(2, 3, VOCAB)), VOCAB)
    with pytest.raises(ValueError, match=r"probabilities .* for drafts \[2, 3\]"):
        check_drafts(batch, replace(drafts, probs=torch.zeros(shape)), VOCAB)
