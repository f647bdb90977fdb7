"""Where kernels are tested: on the GPU, or without one on the CPU through Triton's interpreter."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
