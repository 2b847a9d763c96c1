"""The benchmark of attention: contenders, a clock, a record, a table. `benchmarks/` of the checkout measures the rest."""
