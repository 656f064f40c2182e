"""Distillation: a graph as a differentiable function, a teacher's logits on disk, training within a budget."""
