"""What a trace is: the data that every later stage reads.

In come operators and metadata; out go graphs, which are checked, numbered, merged and
printed here, and know nothing of policies, programs or transforms. Reads `_torch`.

- `values`: a graph, its steps and references: checked, labelled, pruned, written from
  others.
- `meta`: the metadata of a tensor (shape, strides, dtype, whether it is differentiated),
  and layouts that compare.
- `operators`: what an operator does (views, draws, writes, is keyed), and what it is
  called.
- `statistics`: operators that write running statistics without telling, as batch norm does.
- `joint`: a forward and its backward in one graph, and how what is returned is made of it.
- `merging`: two graphs over the same inputs, made one that computes what both do once.
- `numbering`: which values are equal to the last bit.
- `zeros`: a pass that takes out the zeros of forward mode.
- `flops`: FLOPs of operators by torch's formulas.
"""
