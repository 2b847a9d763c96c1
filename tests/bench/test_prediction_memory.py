"""The search of the longest input, which needs no GPU."""

import pytest
from prediction_memory import longest, show


@pytest.mark.parametrize("fitting", range(8))
def test_the_longest_that_fits_is_found(fitting: int) -> None:
    lengths, asked = [400, 500, 600, 700, 800, 900, 1000], list[int]()

    def fits(tokens: int) -> bool:
        asked.append(tokens)
        return lengths.index(tokens) < fitting

    assert longest(lengths, fits) == (lengths[fitting - 1] if fitting else 0)
    assert len(asked) <= 3 and len(set(asked)) == len(asked)


def test_lines() -> None:
    case = {"program": "Boltz-2", "gib": 80, "way": "evoattn run", "longest": 2500, "or_more": True, "peak_gib": 42.5}
    assert show(case) == "Boltz-2     80 GB, evoattn run      2500 tokens or more;  42.5 GiB"
    assert show(case | {"longest": 700, "or_more": False, "peak_gib": 9.0}).endswith("700 tokens;   9.0 GiB")
