"""Fuzzing over the whole spec: random problems, configs and values for every backend, judged against float64.

- `example`   what one example is, as plain data that JSON holds
- `programs`  Hypothesis strategies that draw them
- `values`    the arrays of an example: edge values, odd routings, NaN and infinities
- `judge`     how far a result may be from the reference, element by element
- `execute`   one example on one backend
- `campaign`  many examples in worker processes: journal, crashes, shrinking, saved regressions

A *program* is what gets compiled (backend, problem, order, config); a *draw* is the data it is given. Compiling takes
far longer than running, so a program is given several draws; each counts as an example.
"""
