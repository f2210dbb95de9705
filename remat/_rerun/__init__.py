"""`engine="rerun"`: a function that cannot be traced runs again in the backward.

In come the user's function and its arguments; out come its results. Reads `_regions`, under whose
rules it stands. `flat_call`: the call as a function of all tensors that it reaches; `constants`:
those that it only reads; `region`: runs it again in the backward; `state`: generators and more, as
a first run found them; `dependence`: which leaves outputs depend on, by autograd's nodes, and which
only its graph holds; `fully_shard`: its modules.
"""
