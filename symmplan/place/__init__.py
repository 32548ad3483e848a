"""Capture + plan -> the instructions of each call: where ranks meet, what is copied and launched.

How a collective runs on a memory backend is one row of one table (`algorithms.py`). The
integrations decide when instructions run.
"""
