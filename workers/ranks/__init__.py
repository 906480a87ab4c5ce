"""Rank processes of one host or of several: started, joined, driven and ended. Never what they compute."""
