"""The one runtime: how calls run on placements, whoever asks for them.

This package says what a placed call does. The integrations decide when it runs.
"""
