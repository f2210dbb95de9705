"""What a trace is: the data that every later stage reads.

In come operators and metadata; out go graphs, which are checked, numbered, merged and
printed here, and know nothing of policies, programs or transforms. Reads `_torch`.
"""
