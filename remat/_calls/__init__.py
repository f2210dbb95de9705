"""A decorated function and its cache: from a user's call to the region that serves it.

In come a function, its options and the arguments of a call; out comes the result of the
region whose guards hold, compiled at a miss from the stages below. Reads every stage; what
a call may not do is said here, before anything runs.
"""
