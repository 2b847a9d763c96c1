"""Config: how a backend cuts one problem into tiles. Plain data that knows no tensors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and launch options; a field left at None is chosen by the backend.

    Args:
        block_q: query rows of a tile, a power of two from 16 to 1024 on the GPU, any positive number in plain torch.
        block_k: key columns of a tile, likewise.
        num_warps: warps of a program (GPU backends only): 1, 2, 4, 8 or 16.
        num_stages: depth of the software pipeline over keys (GPU backends only): 1 to 8.
        score_bytes: the most bytes of scores that the tiled backend holds at a time.

    Raises:
        TypeError: a field is not a whole number.
        ValueError: a field is out of its range.

    Example:
        >>> Config(block_q=64, block_k=32).to_text()
        '{"block_k": 32, "block_q": 64}'
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    score_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Config.{field.name} must be a whole number or None, got {value!r}")
            if value <= 0:
                raise ValueError(f"Config.{field.name} must be positive, got {value}")
        if self.num_warps is not None and self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"Config.num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        if self.num_stages is not None and self.num_stages > 8:
            raise ValueError(f"Config.num_stages must be at most 8, got {self.num_stages}")
        if self.score_bytes is not None and self.score_bytes < 1024:
            raise ValueError(f"Config.score_bytes must be at least 1024, got {self.score_bytes}")

    def given(self) -> dict[str, int]:
        """The fields that were set, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def tiles(self) -> dict[str, int]:
        """Return the fields that were set and that are tile sizes of a GPU kernel."""
        return {name: value for name, value in self.given().items() if name != "score_bytes"}

    def to_text(self) -> str:
        """One line of JSON that `from_text` reads; the form in which a config passes through an operator."""
        return json.dumps(self.given(), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Config:
        """Read what `to_text` wrote; an empty text is a config with nothing set."""
        data: dict[str, Any] = json.loads(text) if text else {}
        return cls(**data)
