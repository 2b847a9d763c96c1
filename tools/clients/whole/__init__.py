"""Whole programs with random weights, from an input file to the structures that they write, without and with `evoattn run`.

    python3 dev.py clients --whole [NAME ...]

One module a program has:

- `prepare(folder, sequence, alignment)`, which writes the checkpoint, the chemical components and the input into a folder;
- `COMMANDS`, the command line of each model, run in that folder, with `{out}` for the folder of its results;
- `ENVIRONMENT`, variables that the program needs.

`compare` reads the structures and `__main__` runs the programs and prints the table.
"""
