"""Imports of every trial, made once in the server of ``children``."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch._dynamo  # noqa: E402, F401
import torch.export  # noqa: E402, F401
import transformers  # noqa: E402, F401

import bench.coverage.trial  # noqa: E402, F401
