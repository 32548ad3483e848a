"""The one runtime: how calls run on placements, whoever asks for them.

The integrations decide when something of this runs; what it does is written here.
"""
