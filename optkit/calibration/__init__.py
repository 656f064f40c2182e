"""Calibration: text samples, and the walk through a graph, layer by layer, with the activations of the samples."""
