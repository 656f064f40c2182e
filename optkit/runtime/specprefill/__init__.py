"""SpecPrefill: the first layers score the tokens of a prompt, and the whole model computes a part of them.

``graph`` cuts the first layers out of a model, ``scorer`` runs the layers on whole prompts, ``selection`` picks tokens.
Picked tokens keep the positions of the prompt (``positions``), and the KV is never shared with other requests.
"""
