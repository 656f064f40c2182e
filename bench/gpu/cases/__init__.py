"""The kernels and shapes measured on a GPU, a module for each family."""
