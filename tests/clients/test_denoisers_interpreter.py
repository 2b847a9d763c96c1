"""Diffusion transformers of clients by the fused kernels in Triton's interpreter, beside the client's own."""

from typing import Any

import pytest
import torch
from torch import Tensor

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

    from evoattn.clients.swap import Swap
    from evoattn.core import keeping
    from evoattn.nn import diffusion_steps
    from tests.clients import test_denoisers_rf3 as rf3
    from tests.clients.test_denoisers import CLIENTS, atoms, exact, inputs, known, rows_of, transformer
    from tests.clients.test_diffusion import prepared
    from tests.pair.products import error

    pytestmark = pytest.mark.usefixtures("poisoned")

    @pytest.mark.parametrize("windows", [False, True])
    @pytest.mark.parametrize("client", CLIENTS)
    @torch.no_grad()
    def test_no_further_from_float64_than_the_client(client: str, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # Protenix compiles an extension otherwise
        monkeypatch.setattr(diffusion_steps, "prepared", lambda blocks, *_: diffusion_steps.Prepared(blocks))
        original = transformer(client, windows)
        call: dict[str, Any] = atoms(client, 2, True, 29)
        if not windows:
            call = dict(zip(("a", "s", "z"), inputs(client, 2, True), strict=True)) | rows_of(client)
        true = exact(original, **call)
        original.float()
        single = {name: x.float() if isinstance(x, Tensor) else x for name, x in call.items()}
        plain, layer = original(**single), Swap(original, is_called=True).layer
        assert diffusion_steps.Prepared(layer.blocks).is_plain
        with keeping.sampling():
            fused = known(client).call(layer, **single)
        there = call.get("mask", torch.ones(1, true.shape[-2])).expand(true.shape[:-1]) > 0
        assert error(fused[there], true[there]) <= max(1.5 * error(plain[there], true[there]), 2e-6)

    @pytest.mark.parametrize("client", [*CLIENTS, "rf3"])
    @torch.no_grad()
    def test_steps_share_all_that_the_condition_of_atoms_gives(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bit for bit. It is made anew for another condition, one that was written to, and another weight."""
        monkeypatch.setenv("LAYERNORM_TYPE", "torch")
        monkeypatch.setattr(diffusion_steps, "prepared", prepared)
        original = (rf3.transformer() if client == "rf3" else transformer(client, True)).float()
        layer = Swap(original, is_called=True).layer
        if client == "rf3":
            single = [x.float() for x in rf3.inputs(2, 40, True)]
            call = dict(zip(("A_I", "S_I", "Z_II", "Beta_II"), rf3.call_of(*single, True), strict=True))
            name, compute = "S_I", rf3.rf3_denoiser.TRANSFORMER.call
        else:
            call = {key: x.float() if isinstance(x, Tensor) else x for key, x in atoms(client, 2, True, 29).items()}
            name, compute = "s", known(client).call
        made: list[Any] = []
        own, kept = diffusion_steps._each_condition, diffusion_steps.kept_condition
        monkeypatch.setattr(diffusion_steps, "_each_condition", lambda *x: made.append(1) or own(*x))
        last = layer.blocks[1].conditioned_transition.linear_g
        changes = [
            lambda: None,
            lambda: call[name].mul_(2),
            lambda: call.update({name: 3 * call[name]}),
            lambda: last.bias.add_(1),
        ]
        with keeping.sampling():
            for change in changes:
                change()
                made.clear()
                results = []
                for _ in range(2):
                    given = call | {name: call[name][None][0]}  # other views of one tensor
                    results.append(compute(layer, **given))
                assert len(made) == 1
                monkeypatch.setattr(diffusion_steps, "kept_condition", lambda *_: None)
                with keeping.nothing_kept(), keeping.sampling():
                    assert all(torch.equal(x, compute(layer, **call)) for x in results)
                monkeypatch.setattr(diffusion_steps, "kept_condition", kept)

    @pytest.mark.parametrize("precision", ["exact", "bf16"])
    @pytest.mark.parametrize("windows", [False, True])
    @torch.no_grad()
    def test_rosettafold_3_no_further_from_float64(windows: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Than its own in float32, or under autocast to bfloat16, in which it samples."""
        monkeypatch.setattr(diffusion_steps, "prepared", lambda blocks, *_: diffusion_steps.Prepared(blocks))
        original, (a, s, z) = rf3.transformer(), rf3.inputs(2, 40 if windows else 10, True)
        true = original(a, s, z, windows or None)
        original.float()
        single = [x.float() for x in (a, s, z)]
        layer = Swap(original, is_called=True).layer
        assert diffusion_steps.Prepared(layer.blocks).is_plain
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            plain = original(*single, windows or None)
            with keeping.sampling(precision):
                fused = rf3.rf3_denoiser.TRANSFORMER.call(layer, *rf3.call_of(*single, windows))
        assert fused.dtype == plain.dtype
        assert error(fused, true) <= max(1.5 * error(plain, true), 2e-6)
