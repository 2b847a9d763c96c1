"""`boltz` with float32 where it would take bfloat16, as for Boltz-2, and has no option: rounding would hide what differs."""

from __future__ import annotations

from typing import Any

import boltz.main

_trainer = boltz.main.Trainer


def _in_float32(**options: Any) -> Any:
    return _trainer(**{**options, "precision": 32})


if __name__ == "__main__":
    boltz.main.Trainer = _in_float32
    boltz.main.cli()
