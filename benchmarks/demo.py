"""Evoformer attention on a real alignment, by evoattn and by dense PyTorch: a table, a picture, a check against float64.

python3 dev.py demo                    75 domains of the ubiquitin family, in under a minute on two cores
python3 dev.py demo FILE.a3m           an alignment of yours: A3M, or aligned FASTA; lower case is an insertion and is dropped
python3 dev.py demo --quick            a few seconds: a look, and no measurement

The weights are random, with a fixed seed. Representations are made as in AlphaFold 2 (Jumper et al. 2021, supplementary
algorithms 3 to 5), and their projections go through the four attentions of an Evoformer block (7, 8, 13, 14).
Exit status: 0 evoattn's errors are within their budgets; 1 they are not; 2 the alignment cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import evoattn
from evoattn import testing
from evoattn.bench import machine
from evoattn.bench.memory import peak_bytes, too_much
from evoattn.testing import Case, CaseInputs

RESIDUES = "ACDEFGHIKLMNPQRSTVWYX-"
EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "ubiquitin.a3m"
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
LONGEST = {"cpu": 384, "cuda": 1024}
PATIENCE_S = {"evoattn": 20.0, "dense": 8.0}
"""Seconds of a forward and backward. A length that is expected to take longer is not measured."""

ORACLE_SCORES = 12 << 20
"""Scores that are compared with float64: half a gigabyte, and under a second on two CPU cores."""

NEXT = """\
What to do next
  in a model of yours    evoattn.evoformer_attention(q, k, v, mask=mask, pair_bias=pair_bias): docs/tutorial.md
  in an installed one    evoattn run boltz predict input.yaml: docs/clients/index.md
  with your sequences    python3 dev.py demo FILE.a3m
"""

Attend = Callable[..., Tensor]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair_bias: Tensor | None = None) -> Tensor:
    """The same as `evoformer_attention`, with all scores in memory."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [b,n,h,l,d]
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    scores = scores if pair_bias is None else scores + pair_bias
    o: Tensor = scores.masked_fill(~mask[..., None, None, :], -torch.inf).softmax(-1) @ v
    return o.transpose(-2, -3)


WAYS: dict[str, Attend] = {"evoattn": evoattn.evoformer_attention, "dense": dense_attention}


def read_alignment(path: pathlib.Path) -> list[str]:
    """The sequences of an A3M or aligned FASTA file, in letters of RESIDUES, in the columns where the first has a residue."""
    records: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith(">"):
            records.append("")
        elif records and not line.startswith("#"):
            records[-1] += line.strip()
    rows = ["".join(letter for letter in record if not letter.islower()).replace(".", "-") for record in records]
    if not rows or not rows[0].strip("-"):
        raise ValueError("expected an A3M or aligned FASTA file, whose first sequence has residues")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise ValueError(f"record {number} has {len(row)} aligned columns; expected {len(rows[0])}, as in the first one")
        if strange := {*row} - {*RESIDUES, *"BZJUO*"}:
            raise ValueError(f"record {number}: {min(strange)!r} is neither an amino acid nor a gap")
    kept = [column for column, letter in enumerate(rows[0]) if letter != "-"]
    rows = ["".join(row[column] if row[column] in RESIDUES else "X" for column in kept) for row in rows]
    if not rows[0].strip("X"):
        raise ValueError("the first sequence has no known residue")
    return rows


def embed(rows: list[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The MSA representation `[n,l,256]`, the pair representation `[l,l,128]`, both normalised, and the residues' tokens."""
    tokens = torch.tensor([[RESIDUES.index(letter) for letter in row] for row in rows], device=device)  # [n,l]
    rng = torch.Generator().manual_seed(0)

    def table(entries: int, width: int) -> Tensor:
        return torch.randn(entries, width, generator=rng).to(device)

    query, place = tokens[0], torch.arange(tokens.shape[1], device=device)
    m = table(22, 256)[tokens] + table(22, 256)[query]
    apart = (place - place[:, None]).clamp(-32, 32) + 32
    z = table(22, 128)[query][:, None] + table(22, 128)[query] + table(65, 128)[apart]
    return F.layer_norm(m, (256,)), F.layer_norm(z, (128,)), tokens


def project(name: str, x: Tensor, z: Tensor | None, mask: Tensor, heads: int, dtype: torch.dtype) -> CaseInputs:
    """q, k, v `[1,n,l,h,32]` from x `[n,l,c]`, and a pair bias `[1,1,h,q,k]` from z."""
    rng = torch.Generator().manual_seed(1)
    n, length, _ = x.shape

    def linear(source: Tensor, outputs: int) -> Tensor:
        weight = torch.randn(outputs, source.shape[-1], generator=rng) * source.shape[-1] ** -0.5
        return F.linear(source, weight.to(source.device)).to(dtype)

    q, k, v, do = (linear(x, heads * 32).view(1, n, length, heads, 32) for _ in range(4))
    pair_bias = None if z is None else linear(z, heads).permute(2, 0, 1)[None, None]
    gradients = ("q", "k", "v", "pair_bias")
    case = Case(name, n=n, h=heads, lq=length, lk=length, d=32, dtype=dtype, gradients=gradients)
    return CaseInputs(case, q, k, v, mask[None], None, pair_bias, do, None)


def attentions(rows: list[str], device: torch.device, dtype: torch.dtype) -> list[CaseInputs]:
    """The four attentions of an Evoformer block. Gaps are masked keys of an MSA."""
    m, z, tokens = embed(rows, device)
    kept = tokens != RESIDUES.index("-")
    return [
        project("MSA row + pair bias", m, z, kept, 8, dtype),
        project("MSA column", m.transpose(0, 1), None, kept.T, 8, dtype),
        triangle("triangle, start node", z, tokens, dtype),
        triangle("triangle, end node", z.transpose(0, 1), tokens, dtype),
    ]


def triangle(name: str, z: Tensor, tokens: Tensor, dtype: torch.dtype) -> CaseInputs:
    """Triangle attention. Residues that are not known are masked keys."""
    return project(name, z, z, (tokens[0] != RESIDUES.index("X")).expand(z.shape[:2]), 4, dtype)


def values(attend: Attend, inputs: CaseInputs) -> dict[str, Tensor]:
    """The output and the gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    o = attend(mask=inputs.mask, **leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), inputs.do)
    return {"o": o.detach(), **{f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}}


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of a few runs, of one second in all at the most."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < 1000:
        machine.synchronize(device)
        begun = time.perf_counter()
        call()
        machine.synchronize(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


@dataclasses.dataclass
class Cost:
    """Milliseconds of forward and of both passes, and MiB held beyond the inputs."""

    forward: float
    both: float
    peak: float


def cost(attend: Attend, inputs: CaseInputs, repeats: int) -> Cost:
    device = inputs.q.device
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.differentiable.items()}
    peak = peak_bytes(lambda: values(attend, inputs), device) / 2**20  # this run also compiles
    forward = milliseconds(lambda: attend(mask=inputs.mask, **leaves), device, repeats)
    return Cost(forward, milliseconds(lambda: values(attend, inputs), device, repeats), peak)


def first_rows(inputs: CaseInputs) -> CaseInputs:
    """As many rows as float64 has room for."""
    rows = max(1, ORACLE_SCORES // (inputs.case.h * inputs.case.lq**2))
    part = {name: getattr(inputs, name)[:, :rows] for name in ("q", "k", "v", "mask", "do")}
    return dataclasses.replace(inputs, **part)


def show_attentions(block: list[CaseInputs], repeats: int) -> bool:
    """Print time, memory and error of each attention. Return whether evoattn's errors are within their budgets."""
    heads = f"{'forward ms':>11}{'backward ms':>12}{'peak MiB':>10}{'output error':>14}{'gradient error':>16}"
    print(f"\n{'attention':<22}{'by':<9}{heads}")
    held = True
    for inputs in block:
        if inputs.case.lk == 1:  # an alignment of one sequence: its column attention has gradients of 0, but for rounding
            continue
        part = first_rows(inputs)
        expected = testing.oracle(part)
        for name, attend in WAYS.items():
            spent, results = cost(attend, inputs, repeats), testing.Results(values(attend, part))
            errors = testing.errors(results, expected)
            worst = max(error for value, error in errors.items() if value != "o")
            times = f"{spent.forward:11.1f}{max(0.0, spent.both - spent.forward):12.1f}{spent.peak:10.1f}"
            print(f"{inputs.case.name:<22}{name:<9}{times}{errors['o']:14.1e}{worst:16.1e}")
            allowed = testing.budgets(part, results, expected)
            for value in (value for value in errors if name == "evoattn" and not errors[value] <= allowed[value]):
                held = False
                print(f"BEYOND ITS BUDGET  {value}: relative error {errors[value]:.1e}, allowed {allowed[value]:.1e}")
    print("\nErrors: |value - float64| / |float64|, of the output and of the worst gradient of q, k, v and pair bias.")
    return held


def show_growth(
    query: str, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, dict[int, Cost]]:
    """Print triangle attention against length: the query cut to each length, or repeated up to it."""
    print(f"\n{'length':>6}{'evoattn ms':>12}{'dense ms':>10}{'speed-up':>10}{'evoattn peak MiB':>18}{'dense peak MiB':>16}")
    found: dict[str, dict[int, Cost]] = {name: {} for name in WAYS}
    stopped: dict[str, str] = {}
    for length in lengths:
        row = (query * -(-length // len(query)))[:length]
        inputs = triangle("triangle", *embed([row], device)[1:], dtype)
        for name, attend in WAYS.items():
            if name in stopped:
                continue
            needed = (4 if name == "dense" else 0) * 4 * length**3 * inputs.q.element_size()
            last = max(found[name], default=0)
            seconds = found[name][last].both / 1e3 * (length / last) ** 3 if last else 0.0
            if seconds > PATIENCE_S[name]:
                stopped[name] = f"at L = {length}: it would take about {seconds:.0f} s"
            elif reason := too_much(needed, device):
                stopped[name] = f"at L = {length}: it would take {reason}"
            else:
                found[name][length] = cost(attend, inputs, repeats)
        own, dense = found["evoattn"].get(length), found["dense"].get(length)
        cells = [f"{own.both:12.1f}" if own else f"{'-':>12}", f"{dense.both:10.1f}" if dense else f"{'-':>10}"]
        cells += [f"{dense.both / own.both:8.1f} x" if own and dense else " " * 10]
        cells += [f"{own.peak:18.1f}" if own else f"{'-':>18}", f"{dense.peak:16.1f}" if dense else f"{'-':>16}"]
        print(f"{length:6}{''.join(cells)}", flush=True)
    for name, why in stopped.items():
        print(f"{name} was not run {why}")
    return found


def draw(found: dict[str, dict[int, Cost]], title: str, path: pathlib.Path) -> None:
    """Draw time and memory against length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for panel, unit, of in zip(panels, ("ms", "MiB"), ("both", "peak"), strict=True):
        for name, costs in found.items():
            panel.loglog([*costs], [getattr(spent, of) for spent in costs.values()], marker="o", label=name)
        panel.set(xlabel="length", ylabel=f"{'time, forward + backward' if of == 'both' else 'peak memory'}, {unit}")
        panel.legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=160)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("dev.py demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("alignment", nargs="?", type=pathlib.Path, default=EXAMPLE, metavar="FILE.a3m")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("evoattn-demo.png"), metavar="PNG", help="%(default)s"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, on a GPU bfloat16")
    parser.add_argument("--max-length", type=int, metavar="L", help="default: 384, on a GPU 1024")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    given = parser.parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    try:
        rows = read_alignment(given.alignment)
    except (OSError, ValueError) as error:
        parser.error(f"{given.alignment}: {error}")
    longest = given.max_length or (96 if given.quick else LONGEST[device.type])
    shortest = 64 if given.quick or device.type == "cuda" else 128  # dense PyTorch is as fast below
    lengths = (*(length for length in LENGTHS if shortest <= length < longest), longest)
    used = [row[: min(longest, 128 if device.type == "cpu" else 384)] for row in rows[: 32 if given.quick else 512]]
    used = [row for row in used if row.strip("-")]
    print(f"{given.alignment.name}: {len(used)} sequences x {len(used[0])} columns, of {len(rows)} x {len(rows[0])}")
    about = f"{machine.name(device)}; evoattn {evoattn.__version__}, PyTorch {torch.__version__}"
    print(f"{about}; {dtype}")
    repeats = 3 if given.quick else 9
    held = show_attentions(attentions(used, device, dtype), repeats)
    found = show_growth(rows[0], lengths, device, dtype, repeats)
    try:
        draw(found, f"Triangle attention of L x L pairs, 4 heads x 32 channels, {dtype}\n{about}", given.output)
        print(f"\npicture: {given.output}")
    except ImportError:
        print("\nThe picture needs matplotlib: pip install '.[docs]'")
    print(f"\n{NEXT}", end="")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
