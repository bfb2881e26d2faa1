"""Examines the machine, the settings, a running Triton and its default model, and says what to do about what it finds.

Never knows how a request is handled: it calls what requests call.
"""
