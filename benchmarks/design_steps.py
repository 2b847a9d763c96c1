#!/usr/bin/env python3
"""Milliseconds of a step of design by gradient: the weights of a whole model are frozen, the input has the gradient.

    PYTHONPATH=src python benchmarks/design_steps.py --tokens 384 --json design.json

Forward, loss and backward are those of `training_steps.py`, without an optimizer. The gradient is that of the sequence, as
numbers for each letter and position. `loss` and `sequence`, this gradient, are compared with those of the model as installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from prediction_ways import Case, Way
from torch import Tensor
from training_steps import Step, Training, main


def measure(training: Training, way: Way, features: Mapping[str, Any]) -> tuple[Case, dict[str, Tensor]]:
    """Measure one way. Its program is called so that its steps stand apart from those of training."""
    name = training.trained.sequence
    training.model.requires_grad_(False)

    def step() -> Step:
        sequence = features[name].float().clone().requires_grad_()
        loss, times = training.passes({**features, name: sequence})
        assert sequence.grad is not None
        return {"loss": loss, "sequence": sequence.grad.cpu()}, times

    numbers, outputs = training.timed(way, step)
    return numbers | {"program": f"{training.trained.program.title}, gradient of the sequence"}, outputs


if __name__ == "__main__":
    sys.exit(main(__doc__, measure))
