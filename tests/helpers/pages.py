"""The pages of the checkout, and the blocks of Python in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<printed>.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A block of code and, where a text block follows it directly, what it must print."""
