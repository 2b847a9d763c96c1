"""Draws the figures of the documentation: `python docs/figures/draw.py` writes the SVG files beside this script."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
INK, FAINT, LINE = "#1f2937", "#6b7280", "#94a3b8"
SCORE, MASK, PAIR, STATE = "#e2e8f0", "#fdba74", "#93c5fd", "#bbf7d0"
SANS = "Helvetica, Arial, sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def rect(x: float, y: float, w: float, h: float, fill: str, stroke: str = INK, extra: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{stroke}" {extra}/>'


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "middle", mono: bool = False, fill: str = INK) -> str:
    family = MONO if mono else SANS
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-family="{family}" text-anchor="{anchor}" fill="{fill}">{words}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, extra: str = "") -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" {extra}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return line(x1, y1, x2, y2, INK, 'stroke-width="1.5" marker-end="url(#head)"')


def grid(x: float, y: float, rows: int, columns: int, cell: float, fill: str) -> list[str]:
    parts = [rect(x, y, columns * cell, rows * cell, fill)]
    parts += [line(x + i * cell, y, x + i * cell, y + rows * cell) for i in range(1, columns)]
    parts += [line(x, y + i * cell, x + columns * cell, y + i * cell) for i in range(1, rows)]
    return [*parts, rect(x, y, columns * cell, rows * cell, "none")]


def stack(x: float, y: float, sheets: list[list[str]], step: float) -> list[str]:
    """Sheets behind each other, the first in front; each is drawn at 0, 0 and moved into place."""
    parts = []
    for i, sheet in reversed(list(enumerate(sheets))):
        parts += [f'<g transform="translate({x + i * step},{y - i * step})">', *sheet, "</g>"]
    return parts


def write(name: str, width: int, height: int, label: str, parts: list[str]) -> None:
    marker = (
        '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        f'<path d="M0,0 L9,4 L0,8 z" fill="{INK}"/></marker></defs>'
    )
    body = "\n".join([marker, rect(0, 0, width, height, "#ffffff", "none", 'rx="8"'), *parts])
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    (HERE / name).write_text(f"{opening}\n{body}\n</svg>\n")


def biases() -> None:
    """How the two biases reach the scores, and how their gradients come back."""
    rows, cell, step = 4, 24, 14
    side, top = rows * cell, 105
    parts = [
        text(112, 32, "scores of one head", 16),
        text(112, 52, "S[b,n,h,q,k]", 14, mono=True),
        text(405, 32, "mask_bias[b,n,k]", 14, mono=True),
        text(405, 52, "one strip for each row n,", 13, fill=FAINT),
        text(405, 68, "the same for every h and q", 13, fill=FAINT),
        text(680, 32, "pair_bias[b,h,q,k]", 14, mono=True),
        text(680, 52, "one sheet for each head h,", 13, fill=FAINT),
        text(680, 68, "the same for every n", 13, fill=FAINT),
    ]
    parts += stack(50, top + 40, [grid(0, 0, rows, rows, cell, SCORE) for _ in range(3)], step)
    parts += [text(40, top + 94, "q", 15, mono=True), text(98, top + 156, "k", 15, mono=True)]
    parts += [arrow(154, top + 138, 184, top + 108), text(180, top + 134, "n", 15, mono=True)]
    parts += [
        text(232, top + 84, "= scale QK", 15, mono=True),
        text(284, top + 77, "T", 11, mono=True),
        text(312, top + 84, "+", 18),
    ]

    strip = [[*grid(0, 0, 1, rows, cell, MASK)] for _ in range(3)]
    parts += stack(345, top + 78, strip, step)
    parts += [
        rect(345, top + 102, side, side - cell, "none", MASK, 'stroke-dasharray="4 3"'),
        text(393, top + 142, "read again", 12, fill=FAINT),
        text(393, top + 157, "for each q", 12, fill=FAINT),
        text(520, top + 84, "+", 18),
    ]
    parts += grid(616, top + 40, rows, rows, cell, PAIR)
    for i in (1, 2):
        x, y = 616 + i * step, top + 40 - i * step
        outline = f"M{x},{y + step - 2} V{y} H{x + side} V{y + side} H{x + side - step + 2}"
        parts.append(f'<path d="{outline}" fill="none" stroke="{PAIR}" stroke-dasharray="4 3"/>')
    parts += [text(664, top + 152, "read again for each n", 12, fill=FAINT)]

    parts += [
        line(30, 290, 770, 290),
        text(30, 320, "forward", 15, "start"),
        text(130, 320, "no bias is ever expanded to [b,n,h,q,k] in memory", 14, "start", fill=FAINT),
        text(30, 348, "backward", 15, "start"),
        text(130, 348, "dmask_bias[b,n,k] = sum over h and q of dS", 14, "start", mono=True),
        text(130, 372, "dpair_bias[b,h,q,k] = sum over n of dS", 14, "start", mono=True),
    ]
    write("biases.svg", 800, 395, "The mask bias is one strip for each row, the pair bias one sheet for each head", parts)


def online_softmax() -> None:
    """One block of queries walks over the blocks of keys."""
    parts = [
        text(
            30, 34, "one block of queries walks over the blocks of keys; only one block of scores exists at a time", 15, "start"
        )
    ]
    left, width, gap, top, height = 112, 200, 26, 92, 80
    steps = (
        ("first", ["m = max S", "l = sum exp(S - m)", "o = exp(S - m) V"]),
        (
            "middle",
            ["m' = max(m, max S)", "a = exp(m - m')", "l = a l + sum exp(S - m')", "o = a o + exp(S - m') V"],
        ),
        ("last", ["O = o / l", "LSE = m + log l"]),
    )
    parts += [
        text(98, top + 42, "queries q", 14, "end"),
        text(98, top + 152, "state", 14, "end"),
        text(98, top + 171, "m, l, o", 13, "end", mono=True),
    ]
    for i, (name, formulas) in enumerate(steps):
        x = left + i * (width + gap)
        if i < 2:
            parts += grid(x, top, 4, 10, 20, SCORE)
            parts += [
                text(
                    x + width / 2,
                    top - 12,
                    "keys k of the first block" if i == 0 else "keys k of each further block",
                    13,
                    fill=FAINT,
                )
            ]
            parts += [arrow(x + width / 2, top + height + 4, x + width / 2, top + height + 34)]
        else:
            parts += [text(x + width / 2, top + 44, "no keys left", 13, fill=FAINT)]
        y = top + height + 38
        parts += [rect(x, y, width, 120, STATE, INK, 'rx="6"'), text(x + 12, y + 22, name, 14, "start")]
        parts += [text(x + 12, y + 46 + 20 * j, formula, 12, "start", mono=True) for j, formula in enumerate(formulas)]
        if i:
            parts.append(arrow(x - gap + 2, y + 60, x - 2, y + 60))
    parts.append(
        text(
            30,
            362,
            "m, l, o of each query: the maximum so far, the sum of exponentials, and the output before it is divided by l.",
            13,
            "start",
            fill=FAINT,
        )
    )
    write("online_softmax.svg", 800, 382, "Online softmax: the first, the middle and the last step", parts)


if __name__ == "__main__":
    biases()
    online_softmax()
