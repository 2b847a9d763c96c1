"""`run_openfold` with a seed for its input: it draws the reference coordinates of residues before it takes its own seed."""

from __future__ import annotations

from openfold3.run_openfold import cli
from pytorch_lightning import seed_everything

if __name__ == "__main__":
    seed_everything(1)
    cli()
