"""Config: what its fields may be, and its text."""

from typing import Any

import pytest

from evoattn.core.config import Config


@pytest.mark.parametrize("config", [Config(), Config(block_q=64, num_stages=8), Config(1, 2, 4, 1, 1024)])
def test_the_text_of_a_config_says_all_of_it(config: Config) -> None:
    assert Config.from_text(config.to_text()) == config


def test_no_text_is_a_config_with_nothing_set() -> None:
    assert Config.from_text("") == Config()


def test_the_budget_of_scores_is_no_tile() -> None:
    config = Config(block_q=64, score_bytes=2048)
    assert config.given() == {"block_q": 64, "score_bytes": 2048}
    assert config.tiles() == {"block_q": 64}


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("block_q", 16.0, TypeError, r"Config.block_q must be a whole number or None, got 16.0"),
        ("block_k", True, TypeError, r"Config.block_k must be a whole number or None, got True"),
        ("block_q", 0, ValueError, r"Config.block_q must be positive, got 0"),
        ("num_warps", 3, ValueError, r"Config.num_warps must be 1, 2, 4, 8 or 16, got 3"),
        ("num_stages", 9, ValueError, r"Config.num_stages must be at most 8, got 9"),
        ("score_bytes", 1023, ValueError, r"Config.score_bytes must be at least 1024, got 1023"),
    ],
)
def test_a_field_out_of_range_is_named(field: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Config(**{field: value})
