"""The explorer: runs tiny programs in every order that their calls allow.

`machine` takes small steps in every order that matters, `behaviours` says what calls do as such
steps, `program` turns tiny programs into threads and says what was found. None of them knows how
plans are made or checked.
"""
