"""`boltz` with a clock: python directory_clock.py RECORD predict DIR ...

A line of the record is a stage with its begin and end, in seconds of `time.time()`, as a JSON list. Stages of the main thread
lie beside one another; "confidence" alone lies inside a prediction.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

_BEGUN = time.time()


def main() -> None:
    record = open(sys.argv.pop(1), "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - a line at a time, until the end

    def note(stage: str, begin: float, **more: Any) -> None:
        record.write(json.dumps([stage, begin, time.time(), more]) + "\n")

    import boltz.main
    import torch
    from boltz.data.module import inferencev2
    from boltz.data.write import writer
    from boltz.model.models.boltz2 import Boltz2
    from boltz.model.modules.confidencev2 import ConfidenceModule
    from torch.utils.data import dataloader

    note("imports", _BEGUN)

    def clock(owner: Any, name: str, stage: str, waits: bool = False, make: Any = lambda timed: timed) -> None:
        """Time each call of a function. waits: until the GPU has computed what was launched."""
        function = getattr(owner, name)

        def wait() -> None:
            if waits and torch.cuda.is_initialized():
                torch.cuda.synchronize()

        @functools.wraps(function)
        def timed(*args: Any, **named: Any) -> Any:
            wait()
            begin, more = time.time(), {}
            try:
                result = function(*args, **named)
                wait()
                return result
            finally:
                if stage == "prediction":
                    more["tokens"] = int(args[1]["token_pad_mask"].shape[1])
                note(stage, begin, **more)

        setattr(owner, name, make(timed))

    clock(boltz.main, "process_inputs", "inputs")
    clock(Boltz2, "load_from_checkpoint", "checkpoint", make=staticmethod)
    clock(dataloader._BaseDataLoaderIter, "__next__", "loader")
    clock(inferencev2.Boltz2InferenceDataModule, "transfer_batch_to_device", "transfer", waits=True)
    clock(Boltz2, "predict_step", "prediction", waits=True)
    clock(ConfidenceModule, "forward", "confidence", waits=True)
    clock(writer.BoltzWriter, "write_on_batch_end", "writing")
    boltz.main.cli()


if __name__ == "__main__":
    main()
