"""The runtime's GPU side: static inputs, CUDA graphs per bucket, sampling on the device.

The engine uses ``runner.GraphRunner``. Operations of a GPU (capture, replay, pinned memory, events, free memory) are
behind ``device.Device``; ``device.HostDevice`` does the same on a CPU, without the speed.
"""
