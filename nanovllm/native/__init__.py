"""The C library for CPUs."""

GROUP = 32  # columns that share a scale of the activations: src/products.h
