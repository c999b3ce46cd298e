"""The doctor: what it looks at, and the trial on a device. Without a GPU the CPU stands in."""

from dataclasses import replace

import pytest
import torch

from compspec import doctor
from compspec.attention import flashinfer, varlen
from compspec.errors import UnsupportedError
from compspec.trial import Trial, run_trial

CPU = torch.device("cpu")
EAGER: dict[str, object] = {"compile.mode": "none"}
GOOD = Trial(
    attention="any",
    num_buckets=6,
    num_cuda_graphs=6,
    num_skips=0,
    num_rerecordings=0,
    num_recompilations=0,
    num_requests=4,
    num_equal=4,
    num_accepted=9,
)


def test_it_looks_at_everything_that_decides_what_runs() -> None:
    names = [finding.name for finding in doctor.examine()]
    assert names[:3] == ["versions", "cpu", "gpu"]
    assert {"flashinfer", "varlen", "attention", "compiler", "cache"} <= set(names)


def test_what_keeps_a_backend_from_serving_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "unavailable", lambda: "no flashinfer here")
    monkeypatch.setattr(varlen, "unavailable", lambda: "torch is too old")
    found = {finding.name: finding for finding in doctor.examine()}
    assert (found["flashinfer"].value, found["flashinfer"].good) == ("no flashinfer here", False)
    assert (found["varlen"].value, found["varlen"].good) == ("torch is too old", False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_trial_without_a_gpu_says_so() -> None:
    (finding,) = doctor.examine_gpu()
    assert (finding.good, finding.value) == (False, "there is no GPU that torch can use")


def test_the_trial_runs_where_it_is_told_to() -> None:
    attention, captured, outputs = doctor.examine_gpu(CPU, EAGER)
    assert "attention" in attention.value
    # On a CPU there is nothing to capture, and no proof is no success.
    assert captured.good is False and captured.value.startswith("0 of 6 shapes captured")
    assert outputs.good and outputs.value.startswith("6 of 6 outputs")


def test_an_engine_that_cannot_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Trial:
        raise UnsupportedError("bucket decode 1x8 was not captured")

    monkeypatch.setattr("compspec.trial.run_trial", refuse)
    (finding,) = doctor.examine_gpu(CPU)
    assert (finding.good, finding.value) == (False, "bucket decode 1x8 was not captured")


@pytest.mark.parametrize(
    ("changes", "captured", "lossless"),
    [
        ({}, True, True),
        ({"num_cuda_graphs": 5}, False, True),
        ({"num_skips": 1}, False, True),
        ({"num_rerecordings": 1}, False, True),
        ({"num_equal": 3}, True, False),
        ({"num_accepted": 0}, True, False),
    ],
)
def test_what_a_trial_proves(changes: dict[str, int], captured: bool, lossless: bool) -> None:
    trial = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert (trial.is_captured, trial.is_lossless) == (captured, lossless)


def test_the_trial_sees_outputs_that_speculation_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that keeps every draft, right or wrong."""
    from compspec.sampling import verifier

    original = verifier.step_output

    def keep_all(windows, sampled, metadata, drafts):  # type: ignore[no-untyped-def]
        counts = drafts.num_draft_tokens
        kept = [
            [*drafts.token_ids[row, : counts[row]].tolist(), window[-1]] if window else []
            for row, window in enumerate(windows)
        ]
        return original(kept, sampled, metadata, drafts)

    monkeypatch.setattr(verifier, "step_output", keep_all)
    assert not run_trial(CPU, EAGER).is_lossless
