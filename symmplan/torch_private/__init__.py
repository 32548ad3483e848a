"""Torch's private names, and every patch of torch, in one place.

A feature is found by looking for it and never by version. Whoever needs another private name adds
it to the module of its part of torch: a function with a public-looking name, that says what it
returns where the feature is missing. Nothing here imports anything of symmplan's but its errors.
"""
