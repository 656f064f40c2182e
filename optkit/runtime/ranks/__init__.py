"""Ranks of a model as processes: the engine process is rank 0, and starts the other ranks.

Rank 0 has the scheduler and the sampler. For each step ``leader`` sends the inputs of the batch to the other ranks
(``messages``), with a graph and KV pools each (``follower``).
"""
