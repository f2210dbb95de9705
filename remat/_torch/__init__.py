"""The one door to what torch does not promise: a file for each subject.

In come torch's private names, each with what will make it obsolete; out go functions that
say what they mean. Everything here was checked on torch 2.13 and 2.15: what fails to import
names the version, so that an upgrade fails at import and not in the middle of a training
run. Reads torch, and nothing of this package but its own subjects.
"""
