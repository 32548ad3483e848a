"""Torch's private names, and every patch of torch, in one place.

Features are detected, never versions. A new private name goes to the module of its part of torch:
as a function with a public-looking name, which says what it returns if the feature is missing. Of
symmplan, these modules import only the errors.
"""
