"""The benchmark: evoattn's backends and their peers on the named workloads, checked against float64 before they get a time."""
