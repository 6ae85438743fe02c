"""Benchmarks of the MoE GEMM backends: how long, against which floor, and with what error.

- `cases`, `rows`  what is measured, by name
- `data`           its inputs and float64 reference, made on the device
- `clock`, `cold`  the GPU's own clock; the cache flush and the measured ceilings
- `contenders`     backends and `peers` behind one interface
- `measure`        kernel time, GPU total and call time; `pairs` interleaved comparisons
- `results`        JSON lines while running, one compact file per GPU; `report` tables and pictures from them

`python -m bench --help` lists the commands; README.md beside this file defines every number.
"""
