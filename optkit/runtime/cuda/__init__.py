"""The runtime's GPU side: static inputs, CUDA graphs per bucket, sampling on the device.

``runner.GraphRunner`` is what the engine sees. What only a GPU can do (capture, replay, pinned memory, events, free
memory) is behind ``device.Device``; ``device.HostDevice`` does the same on a CPU, without the speed.
"""
