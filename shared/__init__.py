"""The spec of the skinny-activation MoE GEMM: what every backend computes, and how it is judged.

Nothing in this package imports torch, jax or a GPU library. Read it in this order:

- `problem`    what is multiplied, how many bytes and operations that needs, the floor time
- `models`     real layers by name, `routing` which experts their tokens go to
- `planning`   slots sorted by expert, padded, cut into tile rows
- `orders`     in which order thread blocks walk the output tiles
- `fp8`        quantisation, `reference` the float64 result
- `config`     tile shape and launch parameters, `checks` what input is refused
- `gpus`       numbers of known GPUs
"""
