"""What a trace is: the data that every later stage reads.

In come operators and metadata; out go graphs, which are checked, numbered, merged and printed
here, and know nothing of policies, programs or transforms. Reads `_torch`. `values`: steps, refs,
check, labels, last uses, a program from others; `meta`: metadata and layouts of tensors;
`operators`: whether one views, draws, writes, and its name; `statistics`: operators that write
without telling, and what returns what they write; `joint`: forward and backward in one
graph, and views of outputs; `merging`: two lined up, matched, made one; `numbering`: which are
equal to the last bit; `zeros`: of forward mode; `flops`: torch's formulas.
"""
