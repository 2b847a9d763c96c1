"""The sizes of tiles."""

from evoattn.core.sizes import MIN_TILE, power_of_two


def test_a_tile_is_the_smallest_power_of_two_that_holds_a_length() -> None:
    for length in range(600):
        tile = power_of_two(length, 1)
        assert tile >= length
        assert tile & (tile - 1) == 0
        assert tile == 1 or tile < 2 * length
        assert power_of_two(length) == max(tile, MIN_TILE)
