"""Finds operands of Hopper's wgmma whose machine code reads other shared memory than its PTX says, without a GPU.

    wrong_descriptors(kernel)  # [] for a kernel without faults

A 64-bit descriptor names an operand of wgmma in shared memory. The whole numbers that lead to it are computed twice, for the
first thread of each warpgroup: from PTX, and from the machine code that ptxas made of it. Where PTX leads to a number, the
machine code must lead to the same. A register that nothing has written is unknown. ptxas 12.8 makes code that reads such
registers; see `tiles.limits`.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from typing import Any

import triton

__all__ = ["wrong_descriptors"]

RESERVED = 1024
"""Bytes at the start of shared memory that the driver keeps; PTX counts from behind them."""

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
Value = int | None


def wrong_descriptors(kernel: Any) -> list[str]:
    """One line for each product of a compiled kernel whose descriptor is not what PTX says."""
    if "wgmma" not in kernel.asm["ptx"]:
        return []
    code = _along_products(_disassembled(kernel.asm["cubin"]))
    faults: dict[str, None] = {}
    for warp in range(0, kernel.metadata.num_warps, 4):
        from_ptx, from_sass = _of_ptx(kernel.asm["ptx"], 32 * warp), _Sass(32 * warp).run(code)
        if len(from_ptx) != len(from_sass):
            return [f"{len(from_ptx)} products in PTX, {len(from_sass)} in machine code"]
        for (place, expected), (text, value) in zip(from_ptx, from_sass, strict=True):
            if expected is not None and value != expected + (RESERVED >> 4):
                faults[f"{place}: {text}: {'unknown' if value is None else hex(value)}, PTX says {hex(expected)}"] = None
    return list(faults)


def _disassembled(cubin: bytes) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        sass = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    return [
        (int(address, 16), text)
        for address, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, flags=re.MULTILINE)
    ]


def _along_products(code: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The instructions of a way through the kernel that meets each product once; no loop is gone round again."""
    place = {address: index for index, (address, _) in enumerate(code)}
    taken, index = [], 0
    while index < len(code):
        text = code[index][1]
        taken.append(code[index])
        jump = re.match(r"(@\S+\s+)?BRA\S*\s+(?:!?U?P\w+,\s*)?0x([0-9a-f]+)", text)
        target = place.get(int(jump[2], 16), 0) if jump else 0
        if target > index:
            passed = [each for _, each in code[index + 1 : target]]
            leaves = any(re.match(r"BRA ", each) for each in passed[-6:])
            if not (jump and jump[1]) or (leaves and not any("MMA" in each for each in passed)):
                index = target
                continue
        if re.match(r"EXIT\b", text):
            break
        index += 1
    return taken


def _of_ptx(ptx: str, thread: int) -> list[tuple[str, Value]]:
    """For each product its line in Python and the descriptor that ends its operands in shared memory."""
    known: dict[str, Value] = {"%tid.x": thread, "global_smem": 0}
    place, products = "", []

    def value(name: str) -> Value:
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", name):
            return int(name, 0) & M64
        return known.get(name)

    for line in ptx[ptx.index(".entry") :].splitlines():
        if located := re.match(r"\s*\.loc\s.*//\s*(\S+)", line):
            place = located[1]
        statement = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+([^;]*);", line)
        if not statement:
            continue
        op, operands = statement[1], re.sub(r"\{[^}]*\}", "{}", statement[2])
        if op.startswith("wgmma.mma_async"):
            products.append((place, value(re.findall(r"%rd\d+", operands)[-1])))
            continue
        target, *names = (name.strip() for name in operands.split(","))
        if target.startswith("%"):
            known[target] = _ptx_result(op, [value(name) for name in names])
    return products


def _ptx_result(op: str, x: list[Value]) -> Value:
    """What an instruction of PTX makes of known values; None for one that leads to no descriptor."""
    name, *kinds = op.split(".")
    if op.startswith("shfl.sync.idx"):
        return x[0] if x[1] == 0 else None
    a, b, c = (*x, 0, 0, 0)[:3]
    if name == "and" and 0 in (a, b):
        return 0
    if name == "selp":
        return None if c is None else a if c else b
    if a is None or b is None or c is None:
        return None
    if name == "setp" and kinds[-1] in ("s32", "u32"):
        return _compared(kinds[0], a & M32, b & M32, signed=kinds[-1] == "s32")
    bits = re.search(r"\d+$", kinds[0] if name == "cvt" else kinds[-1] if kinds else "")
    results = {
        "mov": a, "cvt": a, "and": a & b, "or": a | b, "xor": a ^ b, "add": a + b, "sub": a - b, "mul": a * b,
        "mad": a * b + c, "shl": a << min(b, 64), "shr": a >> min(b, 64), "bfe": (a >> min(b, 64)) & ((1 << min(c, 64)) - 1),
    }  # fmt: skip
    return results[name] & ((1 << int(bits[0])) - 1) if name in results and bits and "hi" not in kinds else None


class _Sass:
    """The first thread of a warp, going through machine code. Registers, uniform registers and predicates are in one table."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.known: dict[str, Value] = {}
        self.stack: dict[int, Value] = {}

    def run(self, code: list[tuple[int, str]]) -> list[tuple[str, Value]]:
        """For each product its text and its descriptor."""
        products = []
        for _, text in code:
            guarded = re.match(r"@(!?U?P\w+)\s+(.*)", text)
            condition = self.predicate(guarded[1]) if guarded else 1
            op, _, arguments = (guarded[2] if guarded else text).partition(" ")
            operands = [operand.strip().replace(".reuse", "") for operand in arguments.split(",")]
            if op.startswith("HGMMA"):
                first = int(re.findall(r"gdesc\[UR(\d+)\]", arguments)[-1])
                products.append((text, self.pair(f"UR{first + 2}")))
            if condition == 0:
                continue
            for register, value in self.results(op, operands).items():
                self.known[register] = value if condition else None
        return products

    def results(self, op: str, x: list[str]) -> dict[str, Value]:
        """What an instruction writes: None for what is not followed."""
        name = op.split(".")[0]
        if name in ("STL", "LDL"):
            return self.spill(op, x)
        if name == "HGMMA":
            return dict.fromkeys(_following(x[0], int(op.split("x")[1]) // 2))
        if name == "CS2R":
            return dict.fromkeys(_following(x[0], 2), 0)
        if name in ("S2R", "S2UR"):
            return {x[0]: {"SR_TID.X": self.thread, "SR_CgaCtaId": 0}.get(x[1])}
        if name in ("ISETP", "UISETP") and ".EX" not in op:
            a, b, third = self.number(x[2]), self.number(x[3]), self.predicate(x[4])
            decided = (
                None if a is None or b is None or third is None else _compared(op.split(".")[1].lower(), a, b, ".U32" not in op)
            )
            joined = None if decided is None else decided & third if ".AND" in op else decided | third  # type: ignore[operator]
            return {x[0]: joined, x[1]: None}
        predicates = [operand for operand in x[:2] if re.fullmatch(r"U?P\d", operand)]
        targets = [operand for operand in x[:2] if re.fullmatch(r"U?R\d+", operand)][:1]
        written: dict[str, Value] = dict.fromkeys((*predicates, *targets))
        if not targets or name in ("STG", "STS", "RED", "REDG", "STSM", "ATOMS"):
            return written
        size = {"64": 2, "128": 4, "4": 4}.get(op.split(".")[-1], 1) if name in ("LDG", "LDS", "LDSM", "LDC", "ULDC") else 1
        written |= dict.fromkeys(_following(targets[0], 2 if ".WIDE" in op or op.endswith(".64") else size))
        value = self.whole(op, [operand for operand in x if operand not in ("PT", "UPT")], targets[0])
        if value is None:
            return written
        if op.endswith(".64") or ".WIDE" in op:
            low, high = _following(targets[0], 2)
            return written | {low: value & M32, high: value >> 32 & M32}
        carries = dict.fromkeys(predicates[:1], value >> 32) if name in ("IADD3", "UIADD3", "LEA") else {}
        return written | {targets[0]: value & M32} | carries

    def whole(self, op: str, x: list[str], target: str) -> Value:
        """The result of an instruction on whole numbers, with what it carries above 32 bits."""
        name = op.split(".")[0].removeprefix("U")
        behind = x[x.index(target) + 1 :]
        numbers = [operand for operand in behind if not re.fullmatch(r"!?U?P\w+", operand)]
        taken = [operand for operand in behind if re.fullmatch(r"!?U?P\w+", operand)]
        a, b, c = ([self.pair(n) if op.endswith(".64") else self.number(n) for n in numbers] + [0, 0, 0])[:3]
        if name in ("MOV", "R2UR"):
            return a
        if name == "SHFL":
            return a if ".IDX" in op and b == 0 else None
        if name == "IMAD" and 0 in (a, b):
            a = b = 0
        if name == "SEL":
            chosen = self.predicate(taken[0])
            return None if chosen is None else a if chosen else b
        if a is None or b is None or c is None:
            return None
        if name == "IMAD" and ".HI" not in op and ".WIDE" not in op:
            return a * b + c + (self.carried(taken) or 0)
        if name in ("IADD3", "VIADD"):
            carry = self.carried(taken) if ".X" in op else 0
            return None if carry is None else a + b + c + carry
        if name == "LOP3":
            return _lop3(a, b, c, int(numbers[3], 16))
        if name == "LEA" and ".X" not in op and "SX32" not in op:
            return ((a | c << 32) >> (32 - int(numbers[3], 16))) + b if ".HI" in op else (a << int(numbers[2], 16)) + b
        if name == "SHF" and ".HI" in op and ".R" in op:
            return (c - (1 << 32) if ".S32" in op and c >> 31 else c) >> b
        if name == "SHF" and ".L.U32" in op:
            return a << b
        return a & ((1 << b) - 1) if name == "SGXT" and ".U32" in op else None

    def number(self, text: str) -> Value:
        """A register or a literal of 32 bits."""
        sign, text = (text[0], text[1:]) if text[0] in "-~" and not text.startswith("-0x") else ("", text)
        text = re.sub(r"\.(U32|64)$", "", text)
        if re.fullmatch(r"-?0x[0-9a-f]+", text):
            value: Value = int(text, 16) & M32
        else:
            value = 0 if text in ("RZ", "URZ", "SRZ") else self.known.get(text)
        if value is None or not sign:
            return value
        return (-value if sign == "-" else ~value) & M32

    def pair(self, text: str) -> Value:
        """A register and the one behind it, or a literal."""
        sign, text = (-1, text[1:]) if text.startswith(("-U", "-R")) else (1, text)
        if not re.fullmatch(r"U?R\d+", text):
            return self.number(text)
        low, high = (self.known.get(register) for register in _following(text, 2))
        return None if low is None or high is None else sign * (low | high << 32) & M64

    def predicate(self, text: str) -> Value:
        """A predicate, or its opposite."""
        value = 1 if text.lstrip("!") in ("PT", "UPT") else self.known.get(text.lstrip("!"))
        return value if value is None or text[0] != "!" else 1 - value

    def carried(self, taken: list[str]) -> Value:
        """What an addition takes over from the one before."""
        carries = [self.predicate(text) for text in taken if not text.startswith("!")]
        return sum(carry for carry in carries if carry) if None not in carries else None

    def spill(self, op: str, x: list[str]) -> dict[str, Value]:
        """Registers on their way to the stack and back."""
        memory, register = (x[0], x[1]) if op.startswith("STL") else (x[1], x[0])
        registers = _following(register, {"64": 2, "128": 4}.get(op.split(".")[-1], 1)) if register != "RZ" else []
        address = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", memory)
        if address is None:
            return {} if op.startswith("STL") else dict.fromkeys(registers)
        first = int(address[1] or "0", 16)
        if op.startswith("LDL"):
            return {each: self.stack.get(first + 4 * i) for i, each in enumerate(registers)}
        for i, each in enumerate(registers or ["RZ"]):
            self.stack[first + 4 * i] = self.number(each)
        return {}


def _compared(kind: str, a: int, b: int, signed: bool) -> int:
    """1 or 0, of two numbers of 32 bits."""
    if signed:
        a, b = (x - (1 << 32) if x >> 31 else x for x in (a, b))
    return int({"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}.get(kind, False))


def _following(register: str, count: int) -> list[str]:
    """A register and those behind it."""
    kind, number = re.fullmatch(r"(U?R)(\d+)", register).groups()  # type: ignore[union-attr]
    return [f"{kind}{int(number) + i}" for i in range(count)]


def _lop3(a: int, b: int, c: int, table: int) -> int:
    """Any function of three bits, for 32 of them."""
    bits = 0
    for row in range(8):
        if table >> row & 1:
            bits |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return bits & M32
