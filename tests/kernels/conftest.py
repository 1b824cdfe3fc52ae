"""Without a GPU the kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, its own library included, so it has
to be set before the first import of triton.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
