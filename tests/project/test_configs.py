"""Every configuration file loads, and names a proposer and options that exist."""

from pathlib import Path

import pytest

from compspec.config import EngineConfig, load_config
from compspec.proposers.proposer import make_proposer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_its_proposer_takes_its_options(path: Path) -> None:
    speculative = load_config(path).speculative
    make_proposer(speculative.method, speculative.options, speculative.num_draft_tokens)


def test_full_config_names_every_key() -> None:
    import yaml

    path = next(path for path in CONFIGS if path.name == "full.yaml")
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(written) == set(EngineConfig.model_fields)
    for name, field in EngineConfig.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        if keys is not None:
            assert set(keys) <= set(written[name]), name
