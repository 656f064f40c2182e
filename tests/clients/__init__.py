"""Clients of other projects, unmodified, against live servers; ``make clients`` runs them.

The two folders are two environments, because some clients need openai 2 and others openai 3. Neither has optkit: the
servers run with the interpreter of the usual one.
"""
