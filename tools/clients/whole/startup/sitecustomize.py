"""Python runs this file in each process of a comparison. Under `evoattn run` no call is left to the client for its size.

The comparison is of small calls on a CPU, which clients compute as fast by themselves.
"""

import os

if "EVOATTN_RUN" in os.environ:
    from evoattn.clients import calls

    calls.few_on_cpu = lambda x: 0
