"""The one door to what torch does not promise: a file for each subject.

In come torch's private names, each with what will make it obsolete; out go functions that say what
they mean. All was checked on torch 2.13 and 2.15: what fails to import names the version, so that
an upgrade fails at import, not in the middle of training. Reads torch and itself alone.
`allocator`: what a run takes from it; `attributes`: set for the length of a block; `autocast`: its
cache of casts; `autograd`: its nodes, what they saved, `Function`s, the backward under way,
detached tensors, `is_grads_batched`; `distributed`: process groups, collectives, `fully_shard`,
FSDP; `dropout`: masks that are the same under transforms; `dtensor`: DTensors, results under way;
`dynamo`: what torch.compile sees as it traces; `fakes`: tensors without data or a number to read, their mode, what an error says they lack;
`guards`: cheap checks of tensors and of a thread's state, its float32 precision; `isolation`:
outside every transform, mode and hook; `levels`: active transforms, their wrappers, versions and
writes below, graphs at the current level, the dual level; `loops`: `torch.while_loop` and its
derivative; `modes`: of dispatch and torch functions; `modules`: hooks and second places of
parameters; `runners`: Inductor, torch's interpreter; `schemas`: what is known of operators, and how
ours are defined; `sizes`: symbols of a trace; `taking_functions`: `torch.cond` and its like;
`tensors`: views, shared memory, bits; `tracer`: `make_fx` and its graph, in-place operators
replaced; `trees`: pytrees.
"""
