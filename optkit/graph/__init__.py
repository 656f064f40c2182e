"""The graph: a torch.fx.Graph over a small dialect of ops, and a weight store."""
