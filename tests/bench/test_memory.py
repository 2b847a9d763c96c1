"""Peak memory on a CPU: all that a call held at once."""

import torch

from evoattn.bench.contender import Runner
from evoattn.bench.memory import peak_bytes
from evoattn.bench.peers import PEERS
from evoattn.testing import Case


def test_peak_memory_is_what_was_held() -> None:
    """On the CPU: two tensors live at a time out of three, 3 MiB at the most; what lived before does not count."""
    before = torch.empty(10 << 20, dtype=torch.uint8)

    def call() -> None:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(2 << 20, dtype=torch.uint8)
        del a
        c = torch.empty(512 << 10, dtype=torch.uint8)
        del b, c

    assert peak_bytes(call, torch.device("cpu")) == 3 << 20
    assert peak_bytes(lambda: before.zero_(), torch.device("cpu")) == 0


def test_peak_memory_of_dense_is_its_scores() -> None:
    inputs = Case("triangle", n=60, h=4, lq=60, lk=60, d=32, mask="random", pair_bias="b1hqk").make()
    peak = peak_bytes(Runner(PEERS["dense"], inputs).both, torch.device("cpu"))
    scores = 4 * 60 * 4 * 60 * 60
    assert 2 * scores < peak < PEERS["dense"].score_copies * scores + 8 * inputs.q.nbytes
