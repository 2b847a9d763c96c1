"""Patches of a toy client in all its states: replaced, entered again, reloaded, replaced by others, refused."""

import functools
import importlib
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import evoattn
import evoattn.nn
from evoattn.clients import patching
from evoattn.clients.registry import sources
from evoattn.clients.site import Client
from tests.clients.conftest import DEFAULT
from tests.clients.toy import SITES, Z, function_at


def x(length: int = 5) -> Tensor:
    return torch.randn(1, 2, length, 8, generator=torch.Generator().manual_seed(length))


def test_every_name_is_replaced_counted_and_put_back(toy: Any) -> None:
    before = {str(site): function_at(site) for site in SITES}
    expected = toy.layers._attention(x(), x(), x(), [])
    with evoattn.patch("toy", layers=False) as patched:
        assert patched.sites == tuple(str(site) for site in SITES[:3])
        assert toy.attend is toy.layers._attention is not before["toy_client.layers:_attention"], "imported by name"
        assert toy.layers.dispatch is before["toy_client.layers:dispatch"], "only checked"
        assert toy.layers.has_kernel
        torch.testing.assert_close(toy.layers.dispatch(x(), x(), x(), []), expected)
        torch.testing.assert_close(toy.layers.dispatch(x(), x(), x(), [], fast=True), expected)
        torch.testing.assert_close(toy.Block().forward(x()), expected)
        toy.Block().forward(x(9))
    assert patched.calls_by_site == {
        "toy_client.layers:_attention": 3,
        "toy_client.layers:kernel": 1,
        "toy_client.model:Block.forward": 1,
    }
    assert (patched.calls, patched.passed_on) == (5, {"more than 8 keys": 1})
    assert {str(site): function_at(site) for site in SITES} == before
    assert toy.attend is toy.layers._attention and not hasattr(toy.layers, "has_kernel")
    for text in ("toy 1.0: 5 attention calls", "1  by the original: more than 8 keys", "3  toy_client.layers:_attention"):
        assert text in str(patched)
    toy.layers._attention(x(), x(), x(), [])
    assert patched.calls == 5, "the original again"


def test_twice_is_once(toy: Any) -> None:
    original = toy.layers._attention
    with evoattn.patch("toy") as outer:
        with evoattn.patch("toy") as inner:
            assert inner is outer
        assert toy.layers._attention is not original, "the outer one holds on"
    assert toy.layers._attention is original
    patched = evoattn.patch("toy")
    with evoattn.patch("toy"):
        toy.layers._attention(x(), x(), x(), [])
    assert patched.calls == 1 and toy.layers._attention is not original
    patched.undo()
    assert toy.layers._attention is original
    with evoattn.patch("toy") as other:
        patched.undo()
        assert evoattn.patch("toy") is other, "one that is undone already takes no other with it"


def test_each_call_is_undone_for_itself(toy: Any) -> None:
    original = toy.layers._attention
    first, second = evoattn.patch("toy"), evoattn.patch("toy")
    second.undo()
    assert toy.layers._attention is not original and patching.active
    first.undo()
    assert toy.layers._attention is original and not patching.active
    first.undo()
    with evoattn.patch("toy"):
        evoattn.patch("toy").undo()
        assert toy.layers._attention is not original, "the block holds on"
        evoattn.patch("toy")
    assert toy.layers._attention is original, "a block ends the calls inside it"
    patched = evoattn.patch("toy")
    with evoattn.patch("toy"):
        patched.undo()
        assert toy.layers._attention is not original
    assert toy.layers._attention is original, "in either order"


def test_a_refused_second_call_is_none(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy.layers._attention
    with evoattn.patch("toy", layers=False):
        monkeypatch.setattr(patching.Patch, "_apply", lambda *_: (_ for _ in ()).throw(ImportError("gone")))
        with pytest.raises(ImportError, match="gone"):
            evoattn.patch("toy")
        assert toy.layers._attention is not original
    assert toy.layers._attention is original


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_the_report_tells_of_forked_processes(toy: Any) -> None:
    with evoattn.patch("toy") as patched:
        assert "forked" not in str(patched)
        for count in ("1 process that was forked", "2 processes that were forked"):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            assert f"calls in {count} since are not counted here" in str(patched)
    with evoattn.patch("toy") as patched:
        assert "forked" not in str(patched)


def test_a_patch_may_be_entered_again(triangle: Any) -> None:
    """It replaces the same functions, layers too, and its counts go on."""
    layers: Any = sys.modules["toy_client.layers"]
    original, patched = layers._attention, evoattn.patch("toy")
    for calls in (2, 4):
        with patched:
            layers._attention(x(), x(), x(), [])
            assert triangle(Z).any()
            assert layers.has_kernel and evoattn.patch("toy") is patched
            with patched:
                assert layers._attention is not original
            assert layers._attention is not original
        patched.undo()
        assert patched.calls == calls and len(set(patched.sites)) == len(patched.sites) == 4
        assert layers._attention is original and not triangle(Z).any()
    with evoattn.patch("toy"), pytest.raises(RuntimeError, match="another patch of toy is active"):
        patched.__enter__()


def test_a_module_that_is_reloaded(triangle: Any) -> None:
    """The report says that its functions are the client's own again, and another call of `patch` replaces them."""
    layers: Any
    triangles: Any
    layers, triangles = sys.modules["toy_client.layers"], sys.modules["toy_client.triangle"]
    with evoattn.patch("toy") as patched:
        importlib.reload(layers)
        importlib.reload(triangles)
        again = triangles.Triangle()
        assert triangle(Z).any() and not again(Z).any()
        for site in ("toy_client.layers:_attention", "toy_client.triangle:Triangle.forward"):
            assert f"not by evoattn any more: {site} was reloaded" in str(patched)
        assert evoattn.patch("toy") is patched
        assert again(Z).any() and "any more" not in str(patched)
        before = patched.calls
        layers._attention(x(), x(), x(), [])
        assert patched.calls == before + 1 and layers.has_kernel
    assert not again(Z).any() and not triangle(Z).any() and not hasattr(layers, "has_kernel")
    assert "any more" not in str(patched)


@pytest.mark.parametrize(("wait", "waits"), [(None, False), (False, False), (True, True)])
def test_a_patch_waits_if_it_is_asked_to(toy: Any, wait: bool | None, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else not, as `evoattn run`. A second patch that asks for the other is refused."""
    monkeypatch.setattr(patching, "WAITS", DEFAULT)
    with evoattn.patch("toy", wait=wait, graphs=False) as patched:
        assert patched.waits is waits
        with evoattn.patch("toy", graphs=False) as again:
            assert again is patched
        with pytest.raises(ValueError, match=f"wait must be {waits} for 'toy', which is patched with it, got {not waits}"):
            evoattn.patch("toy", wait=not waits, graphs=False)


def test_what_others_put_over_ours_stays_when_patched_again(toy: Any) -> None:
    patched = evoattn.patch("toy")
    fused = toy.layers._attention
    toy.layers._attention = over = functools.wraps(fused)(lambda *args: fused(*args))
    toy.layers.kernel = replacement = lambda *_: None
    assert evoattn.patch("toy") is patched
    assert toy.layers._attention is over and toy.layers.kernel is replacement
    assert str(patched).count("any more") == 1 and "any more: toy_client.layers:kernel" in str(patched)
    patched.undo()
    with pytest.warns(UserWarning, match="not put back"):
        patched.undo()


@pytest.mark.parametrize("change", ["text", "gone", "no source", "wrapped"])
def test_code_that_has_moved_is_refused_and_nothing_is_replaced(toy: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = toy.layers._attention
    if change == "text":
        monkeypatch.setitem(sources()["toy"]["1.0"], "toy_client.layers:dispatch", "another")
    elif change == "gone":
        monkeypatch.delattr(toy.layers, "dispatch")
    elif change == "wrapped":
        monkeypatch.setattr(toy.layers, "dispatch", functools.wraps(toy.layers.dispatch)(lambda *args: None))
    else:
        monkeypatch.setattr(toy.layers, "dispatch", len)
    with pytest.raises(evoattn.clients.UnknownRelease, match=r"toy 1\.0 .* toy_client\.layers:dispatch; known are 0\.9, 1\.0"):
        evoattn.patch("toy")
    assert toy.layers._attention is original and not patching.active
    assert evoattn.patch().sites == ()


def test_all_that_are_installed(toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with evoattn.patch() as patched:
        assert patched.versions == {"toy": "1.0"}
        assert evoattn.patch("toy") is patched
    assert capsys.readouterr().err == "evoattn computes the attention of toy 1.0\n"


def test_what_others_replaced_since_stays(toy: Any) -> None:
    patched = evoattn.patch("toy")
    toy.layers._attention = replacement = lambda *_: None
    with pytest.warns(UserWarning, match="not put back, because others have replaced them since: _attention"):
        patched.undo()
    assert toy.layers._attention is replacement


def test_names_and_clients_that_are_not_there(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="name must be one of 'toy', or None for all that are installed; got 'bolz'"):
        evoattn.patch("bolz")
    missing = Client("toy", "toy-that-is-not-there", SITES)
    monkeypatch.setattr(patching, "client", {"toy": missing}.__getitem__)
    with pytest.raises(ImportError, match="toy is not installed: no distribution toy-that-is-not-there"):
        evoattn.patch("toy")


def test_a_compiled_call_is_ours_too(toy: Any) -> None:
    expected = toy.layers.dispatch(x(), x(), x(), [])
    torch.compiler.reset()
    with evoattn.patch("toy"):
        compiled = torch.compile(toy.layers.dispatch, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x(), x(), x(), [], fast=True), expected)
