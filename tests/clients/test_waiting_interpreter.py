"""A call that does not wait, with the launches of real kernels, in Triton's interpreter."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.helpers.interpreted import INTERPRETED, run

pytest.importorskip("triton")
if not INTERPRETED:

    @pytest.mark.slow
    def test_in_the_interpreter() -> None:
        """All tests below, in a process where Triton interprets."""
        run(__file__, "not gpu")

else:
    from tests.helpers import interpreter

    interpreter.patch()

    from evoattn import evoformer_attention
    from evoattn.clients.graphs.trees import same_bits
    from evoattn.clients.site import COMPILING, Count, replacement
    from evoattn.kit.launch import Launch

    pytestmark = pytest.mark.usefixtures("poisoned")

    @torch.no_grad()
    def test_the_answer_is_that_of_a_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is launched before all kernels are there, and then the bits are the same."""
        compiling: dict[str, Future[None]] = {}
        started: list[str] = []
        first = Launch._first

        def compilation(self: Any, *_: Any) -> Future[None] | None:
            future = compiling.setdefault(self.kernel.jitted.__name__, Future())
            return None if future.done() else future

        def noted(self: Any, tensors: Any) -> None:
            before = [x.clone() for x in tensors]
            first(self, tensors)
            if not all(map(same_bits, before, tensors)):
                started.append(self.kernel.jitted.__name__)

        monkeypatch.setattr(Launch, "_compilation", compilation)
        monkeypatch.setattr(Launch, "_first", noted)
        q, k, v = torch.randn(3, 1, 4, 20, 2, 16)
        mask, pair = torch.rand(1, 4, 20) < 0.7, torch.randn(1, 2, 20, 20)

        def attend(x: Any) -> Any:
            return evoformer_attention(x, k, v, mask=mask, pair_bias=pair, backend="triton")

        waited, count = attend(q), Count(waits=False)
        assert started
        started.clear()
        call = replacement(attend)(lambda x: -x, count)
        assert torch.equal(call(q), -q) and not started
        assert len(compiling) >= 2, "the mask's kernel, and the attention"
        for future in compiling.values():
            future.set_result(None)
        assert torch.equal(call(q), waited) and started
        assert count.passed_on == {COMPILING: 1} and count.replaced == 1
