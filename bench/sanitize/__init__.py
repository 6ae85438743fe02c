"""NVIDIA's compute-sanitizer over the backends: out-of-bounds accesses, races, unwritten memory, misused barriers.

matrix.py: what is run; run.py: in batches, a child process each (child.py), under compute-sanitizer (sanitizer.py),
whose output output.py reads; report.py: the verdict. The result of every launch is checked too: one that is wrong is
not clean. Before anything is believed, each tool has to find the faults of planted.py.

Allocators hide overruns, as what lies past the end belongs to the same pool: PyTorch's is switched off and JAX's
exchanged for plain cudaMalloc, with padding between allocations. What XLA places in one allocation of a jitted
function (its temporaries) is still one block to memcheck.
"""
