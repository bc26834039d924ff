"""Kernels for one NVIDIA GPU, in Triton; imported only where tensors are on one."""
