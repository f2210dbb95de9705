"""A joint graph and a policy -> what is saved, and two graphs.

In come a joint graph and a policy, a plan or a budget; out come the analysis of the graph,
a decision for each class of values, the cut, and the graphs of forward and backward, with
what they cost. Reads `_graph`, `policies`, `planners` and `storage`, and never traces.
"""
