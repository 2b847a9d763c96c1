"""Triangle multiplication, outgoing and incoming."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evoattn.dispatch.distributed import Split
from evoattn.nn.attention import check_settings
from evoattn.nn.initial import start
from evoattn.nn.pair_layer import Epilogue, PairLayer
from evoattn.nn.project import compute_dtype_of, concatenate, layer_norm, linear
from evoattn.nn.submodules import is_linear, is_norm
from evoattn.pair import product, triangle_multiplication


class TriangleMultiplication(PairLayer):
    """Update each edge (i, j) from the edges (i, k) and (j, k), or from (k, i) and (k, j), over all residues k.

    Parameters have OpenFold's names: `layer_norm_in`, `linear_a_p`, `linear_a_g`, `linear_b_p`, `linear_b_g`, `layer_norm_out`,
    `linear_z` (the output product) and `linear_g` (its gate). The layer also loads the projections `linear_ab_p` and
    `linear_ab_g` of OpenFold's multimer models of version 3, and splits them.

    Args:
        c_z: channels of the pair representation.
        c_hidden: channels of the halves that are multiplied.
        outgoing: True: outgoing edges, (i, k) and (j, k). False: incoming edges.
        dropout: probability in training. All rows i drop the same entries.
        residual: whether the layer returns z + update. Else it returns the update alone.
        bias: whether the projections have biases: yes in OpenFold, no in OpenFold-3, Boltz and Protenix.

    Raises:
        ValueError: `dropout` is not in [0, 1).

    Example:
        >>> import torch
        >>> from evoattn.nn import TriangleMultiplication
        >>> layer = TriangleMultiplication(c_z=16, c_hidden=32, outgoing=False)
        >>> layer(torch.randn(1, 12, 12, 16), torch.ones(1, 12, 12)).shape
        torch.Size([1, 12, 12, 16])

    Source: Jumper et al. 2021, supplementary algorithms 11 and 12; Abramson et al. 2024, algorithms 12 and 13.
    """

    def __init__(
        self, c_z: int, c_hidden: int, outgoing: bool = True, *, dropout: float = 0.0, residual: bool = False, bias: bool = True
    ) -> None:
        super().__init__(dropout, residual)
        check_settings(dropout, "native")
        self.c_z, self.outgoing = c_z, outgoing
        self._make_projections(c_z, c_hidden, bias)
        self.linear_g, self.linear_z = nn.Linear(c_z, c_z, bias=bias), nn.Linear(c_hidden, c_z, bias=bias)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(c_z), nn.LayerNorm(c_hidden)
        for gate in (*self._projections[1], self.linear_g):  # at first they do not depend on their input
            start(gate, "zeros", bias=1.0)
        start(self.linear_z, "zeros")

    def _make_projections(self, c_z: int, c_hidden: int, bias: bool) -> None:
        self.linear_a_p, self.linear_a_g = nn.Linear(c_z, c_hidden, bias=bias), nn.Linear(c_z, c_hidden, bias=bias)
        self.linear_b_p, self.linear_b_g = nn.Linear(c_z, c_hidden, bias=bias), nn.Linear(c_z, c_hidden, bias=bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if "linear_ab_p" not in self._modules:
            for name in [name for name in state_dict if name.startswith(prefix)]:
                state_dict.update(split_joined(name, state_dict.pop(name)))  # for the modules inside, which load afterwards
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _projections(self) -> tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
        """The modules that make the halves a and b, and those of their gates: one module for each half, or one for both."""
        return (self.linear_a_p, self.linear_b_p), (self.linear_a_g, self.linear_b_g)

    def forward(self, z: Tensor, mask: Tensor | None = None, *, in_place: bool = False) -> Tensor:
        """Compute the update of z, or z + update with `residual=True`.

        Args:
            z: the pair representation, `[*, L, L, c_z]`. A DTensor may be split by rows or by columns.
            mask: `[*, L, L]`, 1 or True for an edge that counts. None: all do. A float mask is a factor. A DTensor if z is one.
            in_place: whether z + update is written into z, in inference. Not for DTensors.

        Returns:
            `[*, L, L, c_z]` in the compute dtype, or with the residual in the dtype to which torch promotes z and the update.

        Raises:
            TypeError, ValueError: z or mask has a wrong type or shape, or z cannot be overwritten.
        """
        self._check(z, mask, self.c_z, in_place)
        return self._compute(z, mask, Epilogue(None, self.residual, in_place))

    @property
    def _inputs(self) -> tuple[nn.Linear, ...]:
        return self._projections[0]

    def _run(self, z: Tensor, mask: Tensor | None, split: Split | None, epilogue: Epilogue) -> Tensor:
        if not self._is_plain():
            update = self._by_calls(z, mask, split)
        elif epilogue.residual and epilogue.dropout_mask is None and not (self.dropout > 0 and self.training):
            return self._by_operator(z, mask, residual=True, out=z if epilogue.in_place else None, split=split)
        else:
            update = self._by_operator(z, mask, residual=False, split=split)
        return self._add(z, update, split, epilogue)

    def _is_plain(self) -> bool:
        """Return whether the operator computes what the sub-modules define, and nobody has to see that one is called."""
        ps, gs = self._projections
        linears = (*ps, *gs, self.linear_g, self.linear_z)
        plain = [is_linear(module) for module in linears]  # not a generator: Dynamo cannot leave one half-way
        if not (all(plain) and is_norm(self.layer_norm_in) and is_norm(self.layer_norm_out)):
            return False
        joins = [(modules[0].bias is None) == (modules[-1].bias is None) for modules in (ps, gs)]
        return all(joins) and self.layer_norm_in.eps == self.layer_norm_out.eps

    def _by_operator(
        self, z: Tensor, mask: Tensor | None, *, residual: bool, out: Tensor | None = None, split: Split | None = None
    ) -> Tensor:
        ps, gs = self._projections
        dtype = compute_dtype_of(z, *ps)
        p_weight, p_bias = _joined(ps, dtype)
        g_weight, g_bias = _joined(gs, dtype)
        return triangle_multiplication(
            z,
            mask,
            direction="outgoing" if self.outgoing else "incoming",
            norm_in_weight=self.layer_norm_in.weight,
            norm_in_bias=self.layer_norm_in.bias,
            p_in_weight=p_weight,
            p_in_bias=p_bias,
            g_in_weight=g_weight,
            g_in_bias=g_bias,
            norm_out_weight=self.layer_norm_out.weight,
            norm_out_bias=self.layer_norm_out.bias,
            p_out_weight=self.linear_z.weight,
            p_out_bias=self.linear_z.bias,
            g_out_weight=self.linear_g.weight,
            g_out_bias=self.linear_g.bias,
            eps=self.layer_norm_in.eps,
            residual=residual,
            out=out,
            split=split,
        )

    def _by_calls(self, z: Tensor, mask: Tensor | None, split: Split | None = None) -> Tensor:
        """The update, with each sub-module called."""
        ps, gs = self._projections
        dtype = compute_dtype_of(z, *ps)
        y = layer_norm(z, self.layer_norm_in, dtype)
        halves = [linear(y, p) * linear(y, g).sigmoid() for p, g in zip(ps, gs, strict=True)]
        if mask is not None:
            halves = [x * mask.unsqueeze(-1).to(dtype) for x in halves]
        a, b = halves if len(halves) == 2 else halves[0].chunk(2, -1)
        t = product(a, b, split, outgoing=self.outgoing)
        n = layer_norm(t, self.layer_norm_out, dtype)
        return linear(n, self.linear_z) * linear(y, self.linear_g).sigmoid()


class JoinedTriangleMultiplication(TriangleMultiplication):
    """The same with one projection `linear_ab_p` for both halves, the rows of a first, and one projection `linear_ab_g` for
    their gates. Clients have such layers.
    """

    def _make_projections(self, c_z: int, c_hidden: int, bias: bool) -> None:
        self.linear_ab_p, self.linear_ab_g = (nn.Linear(c_z, 2 * c_hidden, bias=bias) for _ in range(2))

    @property
    def _projections(self) -> tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
        return (self.linear_ab_p,), (self.linear_ab_g,)


def _joined(linears: tuple[nn.Linear, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weights of projections, one below the other, and their biases."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    biases = [module.bias for module in linears if module.bias is not None]
    return concatenate([module.weight for module in linears], dtype), concatenate(biases, dtype) if biases else None


def split_joined(name: str, x: Tensor) -> dict[str, Tensor]:
    """Return the parameters of `evoattn.nn` that one of OpenFold becomes, by name.

    The triangle multiplications of its multimer models of version 3 have one projection for both halves, `linear_ab_p`, and one
    for their gates, `linear_ab_g`. So does OpenFold-3 with `fuse_projection_weights`. The first rows are those of the half a.
    """
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias") or not f".{module}".endswith((".linear_ab_p", ".linear_ab_g")):
        return {name: x}
    start, end = module[: -len("ab_p")], module[-len("_p") :]
    return {f"{start}{half}{end}.{kind}": part for half, part in zip("ab", x.chunk(2), strict=True)}
