"""Plans: a budget solved over a whole function before it runs, as a value that prints.

In come a decorated function, example arguments and a size; out comes a `Plan`, which is a policy, a
table, and JSON. Reads `_calls` for the trace and `_partition` for the decisions. `plan`: plans,
their rows, differences and JSON; `shares`: budgets of several calls, within bytes or a peak;
`recording`: a training step on tensors without data, whose bytes it counts; `timeline`: its peak,
part by part; `tiles`: more of them where they help; `fit`: policies for its regions.
"""
