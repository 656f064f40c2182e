"""SpecPrefill: the first layers score the tokens of a prompt, and the whole model computes a part of them.

``graph`` cuts the first layers out of a model, ``scorer`` runs them on whole prompts, ``selection`` picks the tokens.
The picked tokens keep their positions (``positions``), and their KV is never shared with other requests.
"""
