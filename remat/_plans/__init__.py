"""Plans: a budget solved over a whole function before it runs, as a value that prints.

In come a decorated function, example arguments and a size; out comes a `Plan`, which is a policy, a
table, and JSON (`json_parts`). Reads `_calls` for the trace and `_partition` for the decisions.
"""
