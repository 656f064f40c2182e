"""The kernels and shapes that are measured on a GPU, a module for each family."""
