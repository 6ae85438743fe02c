"""Where the tests run, decided once: compiled on a GPU if there is one, else in the interpreters on small shapes."""

from __future__ import annotations

import os

import pytest
import torch

from backends import mosaic_interpreter

HAS_GPU = torch.cuda.is_available()
INTERPRET = not HAS_GPU
NUMERICS = pytest.mark.gpu if HAS_GPU else pytest.mark.interpret
"""Mark of tests that run a backend's kernels on whatever there is."""
NEEDS_GPU = "needs an NVIDIA GPU; PyTorch sees none here"

# Read when JAX first looks for devices. It would take three quarters of the GPU's memory, which torch shares; and where
# there is no GPU, its CUDA plugin prints a traceback.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
mosaic_interpreter.prepare()
if not HAS_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
