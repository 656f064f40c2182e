"""Imports of every trial, made once in the server of ``children``."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch._dynamo
import torch.export  # noqa: F401
import transformers  # noqa: F401

import bench.coverage.trial  # noqa: F401
