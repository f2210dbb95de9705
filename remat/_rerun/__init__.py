"""`engine="rerun"`: a function that cannot be traced runs again in the backward.

In come the user's function and its arguments, of which `flat_call` makes a function of tensors; out
come its results. `region` runs it again in the backward, from the `state` of its first run;
`dependence` reads autograd's graph of a run. Reads `_regions`, under whose rules it stands.
"""
