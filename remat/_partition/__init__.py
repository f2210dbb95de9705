"""A joint graph and a policy -> what is saved, and two graphs.

In come a joint graph and a policy, a plan or a budget; out come the `analysis` of the graph, what
`decide` or `budgets` let be saved of its classes, the `cut`, and the `halves`, forward and backward,
with what they cost. Reads `_graph`, `policies`, `planners` and `storage`, and never traces.
"""
