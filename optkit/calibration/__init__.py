"""Calibration: text samples and the layer-by-layer walk that passes calibrate on."""
