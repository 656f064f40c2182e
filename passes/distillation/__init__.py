"""Distillation: a graph as a differentiable function, a teacher's logits on disk, and training within a budget of time."""
